"""What each parameter costs besides its bytes: steps of a model of many tiny parameters, in microseconds a parameter.

    python -m benchmarks.overhead [--parameters 1000] [--iterations 200]

The loss is one operation on all parameters, so nearly all of a step is what is done for each of them: by autograd and
the fused optimizer, which every variant pays, and by DDP's reducer or by ltx. A figure is the median over iterations of
the difference of two variants' times in the same iteration, the slowest rank's each, by the number of parameters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys

import torch
from torch import nn

import ltx
from benchmarks.ranks import Variant, found_by_ranks, interleaved

SIZE = 16
GOAL_US = 1.0
#: (variant, what does the same with torch alone, DDP's, what that is beyond)
ROWS = [
    ("ltx", "loop", "ddp", "loop"),
    ("ltx update", "loop", "ddp", "loop"),
    ("ltx.grad", "func gradients", "ddp gradients", "loop gradients"),
    ("torch.func.grad of ltx", "func gradients", "ddp gradients", "loop gradients"),
]


def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """One operation on all parameters, and a sum."""
    return (torch.cat(tuple(params.values())) * x).sum()


class Model(nn.Module):
    """The same as a module."""

    def __init__(self, params: dict[str, torch.Tensor]):
        super().__init__()
        self.all = nn.ParameterList(p.clone() for p in params.values())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        return (torch.cat(tuple(self.all)) * x).sum()


def variants(count: int) -> dict[str, Variant]:
    """All of them, made in the same order on every rank."""
    params = {f"p{i}": torch.randn(SIZE) for i in range(count)}
    x = torch.randn(count * SIZE)
    optimizer = ltx.optim.from_torch(torch.optim.AdamW, lr=1e-4, fused=True)

    def loop(model: nn.Module) -> Variant:
        fused = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def step() -> None:
            fused.zero_grad()
            model(x).backward()
            fused.step()

        return step

    def gradients(model: nn.Module) -> Variant:
        def step() -> None:
            model.zero_grad()
            model(x).backward()

        return step

    def train(**options: object) -> Variant:
        wrapped = ltx.train_step(ltx.data_parallel(loss), optimizer, **options)
        state = [wrapped.init(params)]

        def step() -> None:
            state[0], _ = wrapped(state[0], x)

        return step

    def ddp() -> nn.Module:
        return nn.parallel.DistributedDataParallel(Model(params), gradient_as_bucket_view=True)

    step, alone = ltx.data_parallel(loss), torch.func.grad(loss)
    mine, functional = ltx.grad(step), torch.func.grad(step)
    return {
        "loop": loop(Model(params)),
        "ddp": loop(ddp()),
        "ltx": train(),
        "ltx update": train(overlap="update"),
        "loop gradients": gradients(Model(params)),
        "ddp gradients": gradients(ddp()),
        "func gradients": lambda: alone(params, x),
        "ltx.grad": lambda: mine(params, x),
        "torch.func.grad of ltx": lambda: functional(params, x),
    }


def worker(arguments: argparse.Namespace) -> None:
    """One rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with ltx.init() as world:
        times = interleaved(variants(arguments.parameters), arguments.iterations)
        if world.is_global_zero:
            print(json.dumps(times))


def main() -> None:
    """Parse, run, print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=1000)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    times: dict[str, list[float]] = found_by_ranks(["-m", "benchmarks.overhead", *sys.argv[1:]], "loopback", 2)

    def beyond(name: str, base: str) -> float:
        pairs = zip(times[name], times[base], strict=True)
        return 1e6 * statistics.median(a - b for a, b in pairs) / arguments.parameters

    print(f"| us a parameter | step | DDP beyond torch | ltx beyond torch | more than DDP, at most {GOAL_US:g} |")
    print("|---|---|---|---|---|")
    for name, base, ddp, ddp_base in ROWS:
        whole = 1e6 * statistics.median(times[name]) / arguments.parameters
        theirs, ours = beyond(ddp, ddp_base), beyond(name, base)
        figures = (whole, theirs, ours, ours - theirs)
        print(f"| {name} | {' | '.join(f'{x:.2f}' for x in figures)} |")


if __name__ == "__main__":
    sys.exit(main())
