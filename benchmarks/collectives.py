"""Time of each collective beside the raw call of torch.distributed, iteration by iteration in one run; and bytes.

    python -m benchmarks.collectives [--ranks 2] [--iterations 40] [--ops psum all_gather ...] [--sizes 4000 ...]

Both sides make a new tensor for the result, as ltx never writes into its input: the raw side clones first where the
call works in place. A figure is the median over iterations of the ratio of the two times, the slowest rank's each.
Small messages are sent many times an iteration.

The second table counts bytes: what the backward pass of ``all_gather`` sends from one rank, beside an all-reduce of the
whole cotangent, which is what the reference systems do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

import ltx
from benchmarks import links
from benchmarks.ranks import Variant, backend_on, found_by_ranks, interleaved, ratio

Call = Callable[[torch.Tensor], torch.Tensor]

GOAL = 1.05
SIZES = (4_000, 1_000_000, 100_000_000)


def _all_reduce(op: dist.ReduceOp.RedOpType) -> Call:
    def call(x: torch.Tensor) -> torch.Tensor:
        out = x.clone()
        dist.all_reduce(out, op)
        return out

    return call


def _broadcast(x: torch.Tensor) -> torch.Tensor:
    out = x.clone()
    dist.broadcast(out, 0)
    return out


def _all_gather(x: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(dist.get_world_size() * x.numel())
    dist.all_gather_single(out, x)
    return out


def _reduce_scatter(x: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(x.numel() // dist.get_world_size())
    dist.reduce_scatter_single(out, x)
    return out


def _all_to_all(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x)
    return out


def _ring(x: torch.Tensor) -> torch.Tensor:
    rank, n = dist.get_rank(), dist.get_world_size()
    out = torch.empty_like(x)
    sends = [dist.P2POp(dist.isend, x, (rank + 1) % n), dist.P2POp(dist.irecv, out, (rank - 1) % n)]
    for work in dist.batch_isend_irecv(sends):
        work.wait()
    return out


def _ring_of_axis() -> list[tuple[int, int]]:
    n = ltx.axis_size()
    return [(rank, (rank + 1) % n) for rank in range(n)]


#: op -> (raw, ltx)
OPS: dict[str, tuple[Call, Call]] = {
    "psum": (_all_reduce(dist.ReduceOp.SUM), ltx.psum),
    "pmax": (_all_reduce(dist.ReduceOp.MAX), ltx.pmax),
    "all_gather": (_all_gather, lambda x: ltx.all_gather(x, tiled=True)),
    "psum_scatter": (_reduce_scatter, lambda x: ltx.psum_scatter(x, tiled=True)),
    "broadcast": (_broadcast, ltx.broadcast),
    "all_to_all": (_all_to_all, lambda x: ltx.all_to_all(x, 0, 0)),
    "ppermute": (_ring, lambda x: ltx.ppermute(x, _ring_of_axis())),
}


def repeats(nbytes: int) -> int:
    """How often a message of this size is sent in one iteration."""
    return max(1, min(50, 5_000_000 // nbytes))


def variants(ops: list[str], sizes: list[int]) -> dict[str, Variant]:
    """Raw and ltx of each op at each size."""
    made: dict[str, Variant] = {}
    for nbytes in sizes:
        x = torch.randn(nbytes // 4)
        for op in ops:
            for name, call in zip(("raw", "ltx"), OPS[op], strict=True):

                def many(call: Call = call, x: torch.Tensor = x, times: int = repeats(nbytes)) -> None:
                    for _ in range(times):
                        call(x)

                made[f"{op} {nbytes} {name}"] = many
    return made


def bytes_of_backward() -> dict[str, int]:
    """What one rank sends in the backward pass of an all_gather of 1 MB, and in an all-reduce of its cotangent."""
    x = torch.randn(250_000, requires_grad=True)
    gathered = ltx.all_gather(x)
    with ltx.profile.record() as trace:
        gathered.sum().backward()
    with ltx.profile.record() as reference:
        ltx.psum(torch.ones_like(gathered))
    return {"psum_scatter": trace.bytes, "all-reduce": reference.bytes}


def worker(arguments: argparse.Namespace) -> None:
    """One rank."""
    torch.set_num_threads(1)
    with ltx.init(backend=backend_on("cpu")) as world:
        times = interleaved(variants(arguments.ops, arguments.sizes), arguments.iterations, warmup=3)
        sent = bytes_of_backward()
        if world.is_global_zero:
            print(json.dumps({"times": times, "bytes": sent}))


def main() -> None:
    """Parse, run, print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--ops", nargs="+", choices=list(OPS), default=list(OPS))
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), help="bytes of one rank's tensor")
    parser.add_argument("--link", choices=["loopback", *links.RATES], default="loopback")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    found = found_by_ranks(["-m", "benchmarks.collectives", *sys.argv[1:]], arguments.link, arguments.ranks)
    times = found["times"]
    print(
        f"| {arguments.link}, {arguments.ranks} ranks | raw, µs | ltx, µs | ratio, at most {GOAL} |\n|---|---|---|---|"
    )
    for nbytes in arguments.sizes:
        for op in arguments.ops:
            raw, ours = f"{op} {nbytes} raw", f"{op} {nbytes} ltx"
            each = [1e6 * statistics.median(times[name]) / repeats(nbytes) for name in (raw, ours)]
            print(f"| {op} {nbytes:,} B | {each[0]:.0f} | {each[1]:.0f} | {ratio(times, ours, raw):.3f} |")
    sent = found["bytes"]
    print("\n| backward of all_gather, 1 MB a rank | bytes sent by a rank |\n|---|---|")
    for name, count in sent.items():
        print(f"| {name} | {count:,} |")


if __name__ == "__main__":
    sys.exit(main())
