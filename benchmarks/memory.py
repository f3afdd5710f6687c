"""Peak memory of a training step with large parameters: ltx and torch DDP, each in processes of its own.

    python -m benchmarks.memory [--parameters 200] [--variants "ddp, views" "ltx, taken over"]

A figure is the largest resident memory of a rank above that of the imports, as a ratio to that of parameters, gradients
and Adam's two moments (four times the parameters). The model is a stack of square linear layers, whose activations are
small beside it; a rank does forward, backward and fused AdamW. "views" is DDP's ``gradient_as_bucket_view=True``,
"copied" is ``train.init(dict(model.named_parameters()))`` beside the model, "taken over" ``train.init(model)``.
"""

from __future__ import annotations

import argparse
import json
import resource
from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

import ltx
from benchmarks.ranks import found_by_ranks

WIDTH, STEPS = 2048, 4
Step = Callable[[torch.Tensor], object]


def made_by_ddp(model: nn.Module, views: bool) -> Step:
    """One step of DDP and torch's fused AdamW."""
    ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=views)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-4, fused=True)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=not views)
        ddp(x).square().mean().backward()
        optimizer.step()

    return step


def made_by_ltx(model: nn.Module, copied: bool, overlap: Literal["backward", "update", "step"]) -> Step:
    """One step of ltx."""

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = ltx.functional_call(model, params, (x,))
        return output.square().mean()

    optimizer = ltx.optim.from_torch(torch.optim.AdamW, lr=1e-4, fused=True)
    train = ltx.train_step(ltx.data_parallel(loss), optimizer, overlap=overlap)
    state = [train.init(dict(model.named_parameters()) if copied else model)]

    def step(x: torch.Tensor) -> None:
        state[0], _ = train(state[0], x)

    return step


VARIANTS: dict[str, Callable[[nn.Module], Step]] = {
    "ddp": lambda model: made_by_ddp(model, views=False),
    "ddp, views": lambda model: made_by_ddp(model, views=True),
    "ltx, copied": lambda model: made_by_ltx(model, True, "backward"),
    "ltx, taken over": lambda model: made_by_ltx(model, False, "backward"),
    'ltx, taken over, "update"': lambda model: made_by_ltx(model, False, "update"),
    'ltx, taken over, "step"': lambda model: made_by_ltx(model, False, "step"),
}


def worker(name: str, layers: int) -> None:
    """One rank."""
    torch.set_num_threads(1)
    with ltx.init() as world:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        step, x = VARIANTS[name](model), torch.randn(2, WIDTH)
        for _ in range(STEPS):
            step(x)
        peak = torch.tensor(float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
        if dist.is_initialized():
            dist.all_reduce(peak, dist.ReduceOp.MAX)
        if world.is_global_zero:
            print(json.dumps({"peak_mib": peak.item() / 1024}))


def main() -> None:
    """Parse, run, print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=200.0, help="millions")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    layers = max(1, round(arguments.parameters * 1e6 / WIDTH**2))
    if arguments.worker:
        worker(arguments.variants[0], layers)
        return
    print(f"| {layers * WIDTH**2 / 1e6:.0f} M parameters, 2 ranks | peak MiB | of parameters, gradients, moments |")
    print("|---|---|---|")
    for name in arguments.variants:
        given = ["-m", "benchmarks.memory", "--parameters", str(arguments.parameters), "--variants", name]
        peak = found_by_ranks(given, "loopback", 2, keep_memory=False)["peak_mib"]
        print(f"| {name} | {peak:.0f} | {peak * 2**20 / (16 * layers * WIDTH**2):.3f} |", flush=True)


if __name__ == "__main__":
    main()
