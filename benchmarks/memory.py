"""Peak memory of a training step with large parameters: ltx and torch DDP, each in processes of its own.

    python -m benchmarks.memory [--parameters 200] [--variants "ddp, views" "ltx, taken over"]
    python -m benchmarks.memory --device cuda

A figure is the largest resident memory of a rank above that of the imports, as a ratio to that of parameters, gradients
and Adam's two moments (four times the parameters). The model is a stack of square linear layers, whose activations are
small beside it; a rank does forward, backward and fused AdamW. "views" is DDP's ``gradient_as_bucket_view=True``,
"copied" is ``train.init(dict(model.named_parameters()))`` beside the model, "taken over" ``train.init(model)``.

With ``--device cuda`` one rank has the GPU over NCCL, and the peak is that of torch's allocator there. ltx leaves out
the exact sum of one rank, for which DDP has buckets; with FP16 hooks both have them.
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
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

import ltx
from benchmarks.ranks import backend_on, found_by_ranks

WIDTH, STEPS = 2048, 4
Step = Callable[[torch.Tensor], object]


def made_by_ddp(model: nn.Module, views: bool, fp16: bool = False) -> Step:
    """One step of DDP and torch's fused AdamW."""
    ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=views)
    if fp16:
        ddp.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-4, fused=True)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=not views)
        ddp(x).square().mean().backward()
        optimizer.step()

    return step


def made_by_ltx(model: nn.Module, copied: bool, overlap: Literal["backward", "update"], fp16: bool = False) -> Step:
    """One step of ltx."""

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = ltx.functional_call(model, params, (x,))
        return output.square().mean()

    optimizer = ltx.optim.from_torch(torch.optim.AdamW, lr=1e-4, fused=True)
    strategy = ltx.DDPStrategy(comm_hook="fp16" if fp16 else "allreduce")
    train = ltx.train_step(ltx.data_parallel(loss, strategy), optimizer, overlap=overlap)
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
}
ALONE: dict[str, Callable[[nn.Module], Step]] = {
    "ddp, views, fp16": lambda model: made_by_ddp(model, True, fp16=True),
    "ltx, taken over, fp16": lambda model: made_by_ltx(model, False, "backward", fp16=True),
    'ltx, taken over, "update", fp16': lambda model: made_by_ltx(model, False, "update", fp16=True),
    **{name: VARIANTS[name] for name in ("ddp, views", "ltx, taken over")},
}


def peak_bytes(device: str) -> int:
    """The most memory that this process had so far: resident, or of torch's allocator on the GPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def worker(name: str, layers: int, device: str) -> None:
    """One rank."""
    torch.set_num_threads(1)
    with ltx.init(backend=backend_on(device)) as world:
        before = peak_bytes(device)
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, device=device) for _ in range(layers)))
        step, x = (VARIANTS | ALONE)[name](model), torch.randn(2, WIDTH, device=device)
        for _ in range(STEPS):
            step(x)
        peak = torch.tensor(float(peak_bytes(device) - before))
        if dist.is_initialized():
            dist.all_reduce(peak, dist.ReduceOp.MAX)
        if world.is_global_zero:
            print(json.dumps({"peak_mib": peak.item() / 2**20}))


def main() -> None:
    """Parse, run, print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=200.0, help="millions")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS | ALONE))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    layers, device = max(1, round(arguments.parameters * 1e6 / WIDTH**2)), arguments.device
    if arguments.worker:
        worker(arguments.variants[0], layers, device)
        return
    ranks = "2 ranks" if device == "cpu" else "1 rank"
    print(f"| {layers * WIDTH**2 / 1e6:.0f} M parameters, {ranks} | peak MiB ", end="")
    print("| of parameters, gradients, moments | to DDP's with views |\n|---|---:|---:|---:|", flush=True)
    peaks: dict[str, float] = {}
    for name in arguments.variants or (VARIANTS if device == "cpu" else ALONE):
        given = ["--parameters", str(arguments.parameters), "--variants", name, "--device", device]
        found = found_by_ranks(["-m", "benchmarks.memory", *given], "loopback", int(ranks[0]), keep_memory=False)
        peaks[name] = found["peak_mib"]
        base = "ddp, views, fp16" if name.endswith("fp16") else "ddp, views"
        whole = peaks[name] * 2**20 / (16 * layers * WIDTH**2)
        to_ddp = f"{peaks[name] / peaks[base]:.3f}" if base in peaks else ""
        print(f"| {name} | {peaks[name]:.0f} | {whole:.3f} | {to_ddp} |", flush=True)


if __name__ == "__main__":
    main()
