"""What each parameter costs besides its bytes: steps of a model of many tiny parameters, in microseconds a parameter.

    python -m benchmarks.overhead [--parameters 1000] [--iterations 200] [--block 10]
    python -m benchmarks.overhead --device cuda [--parameters 100 1000 2000]

The loss is one operation on all parameters, so nearly all of a step is what is done for each of them: by autograd and
the fused optimizer, which every variant pays, and by DDP's reducer or by ltx. A figure is the median over iterations of
the difference of two variants' times in the same iteration, the slowest rank's each, by the number of parameters.

With ``--device cuda`` one rank has the GPU over NCCL, and what counts is how long the host is busy with a step: until
then it can't begin the next one. ltx leaves out the exact sum of one rank, which DDP does; so both are compared with
their FP16 hooks as well, which neither leaves out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

import ltx
from benchmarks.ranks import Variant, backend_on, found_by_ranks, interleaved, ratio

SIZE = 16
GOAL_US = 1.0
#: (variant, what does the same with torch alone, DDP's, what that is beyond)
ROWS = [
    ("ltx", "loop", "ddp", "loop"),
    ("ltx update", "loop", "ddp", "loop"),
    ("ltx.grad", "func gradients", "ddp gradients", "loop gradients"),
    ("torch.func.grad of ltx", "func gradients", "ddp gradients", "loop gradients"),
]
HALVES = ltx.DDPStrategy(comm_hook="fp16")
#: Buckets of 16 parameters, for what a bucket takes besides.
NBYTES = 16 * 4 * SIZE
BUCKETS = ltx.DDPStrategy(comm_hook="fp16", bucket_bytes=NBYTES, first_bucket_bytes=NBYTES)
#: Of which the host's time counts on a GPU, and what each is compared with.
ON_GPU = {
    "loop": "ddp",
    "ddp": "ddp",
    "ltx": "ddp",
    "ltx update": "ddp",
    "ddp, fp16": "ddp, fp16",
    "ltx, fp16": "ddp, fp16",
    "ltx update, fp16": "ddp, fp16",
    "ddp, fp16, buckets of 16": "ddp, fp16, buckets of 16",
    "ltx, fp16, buckets of 16": "ddp, fp16, buckets of 16",
}


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


def variants(count: int, device: str) -> dict[str, Variant]:
    """All of them, made in the same order on every rank."""
    params = {f"p{i}": torch.randn(SIZE, device=device) for i in range(count)}
    x = torch.randn(count * SIZE, device=device)
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

    def train(strategy: ltx.Strategy | None = None, **options: object) -> Variant:
        wrapped = ltx.train_step(ltx.data_parallel(loss, strategy), optimizer, **options)
        state = [wrapped.init(params)]

        def step() -> None:
            state[0], _ = wrapped(state[0], x)

        return step

    def ddp(fp16: bool = False, mib: float = 25) -> nn.Module:
        made = nn.parallel.DistributedDataParallel(Model(params), gradient_as_bucket_view=True, bucket_cap_mb=mib)
        if fp16:
            made.register_comm_hook(None, fp16_compress_hook)
        return made

    if device == "cuda":
        return {
            "loop": loop(Model(params)),
            "ddp": loop(ddp()),
            "ltx": train(),
            "ltx update": train(overlap="update"),
            "ddp, fp16": loop(ddp(fp16=True)),
            "ltx, fp16": train(HALVES),
            "ltx update, fp16": train(HALVES, overlap="update"),
            "ddp, fp16, buckets of 16": loop(ddp(fp16=True, mib=NBYTES / 2**20)),
            "ltx, fp16, buckets of 16": train(BUCKETS),
        }

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
    with ltx.init(backend=backend_on(arguments.device)) as world:
        host: dict[str, list[float]] = {}
        made = variants(arguments.parameters[0], arguments.device)
        times = interleaved(made, arguments.iterations // arguments.block, block=arguments.block, host=host)
        if world.is_global_zero:
            print(json.dumps(times if arguments.device == "cpu" else host))


def rows_of(times: dict[str, list[float]], count: int) -> list[str]:
    """Microseconds a parameter beyond torch, and the ratio of times to DDP's."""

    def beyond(name: str, base: str) -> float:
        pairs = zip(times[name], times[base], strict=True)
        return 1e6 * statistics.median(a - b for a, b in pairs) / count

    lines = []
    for name, base, ddp, ddp_base in ROWS:
        whole = 1e6 * statistics.median(times[name]) / count
        theirs, ours = beyond(ddp, ddp_base), beyond(name, base)
        figures = (whole, theirs, ours, ours - theirs)
        lines.append(f"| {count:,} | {name} | {' | '.join(f'{x:.2f}' for x in (*figures, ratio(times, name, ddp)))} |")
    return lines


def host_rows_of(times: dict[str, list[float]], count: int) -> list[str]:
    """Milliseconds of the host's a step, and their ratio to DDP's."""
    return [
        f"| {count:,} | {name} | {1e3 * statistics.median(times[name]):.2f} | {ratio(times, name, base):.2f} |"
        for name, base in ON_GPU.items()
    ]


def main() -> None:
    """Parse, run, print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, nargs="+", default=[1000])
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--block", type=int, default=1, help="so many in a row, as in a loop, between two barriers")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    if arguments.device == "cpu":
        print("| parameters | us a parameter | step | DDP beyond torch | ltx beyond torch ", end="")
        print(f"| more than DDP, at most {GOAL_US:g} | to DDP's |\n|---|---|---|---|---|---|---|", flush=True)
    else:
        print("| parameters | | host, ms a step | to DDP's |\n|---|---|---:|---:|", flush=True)
    for count in arguments.parameters:
        options = {"parameters": count} | {name: getattr(arguments, name) for name in ("iterations", "block", "device")}
        given = [f"--{name}={value}" for name, value in options.items()]
        ranks = 2 if arguments.device == "cpu" else 1
        times: dict[str, list[float]] = found_by_ranks(["-m", "benchmarks.overhead", *given], "loopback", ranks)
        lines = rows_of(times, count) if arguments.device == "cpu" else host_rows_of(times, count)
        print("\n".join(lines), flush=True)


if __name__ == "__main__":
    sys.exit(main())
