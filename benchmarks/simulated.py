"""Cost of simulated ranks at 16, 64 and 256 of them: a data-parallel gradient of a small MLP, and each collective.

    python -m benchmarks.simulated [--iterations 20] [--sizes 16 64 256]

One process, one thread. Times are medians over iterations that take all sizes in turns; each rank's work stays the same
(64 samples, or a tensor of 64 KiB), so that the cost should grow with the number of ranks at most. The last column is
the median ratio of the largest size's time to the smallest's, beside the ratio of the sizes.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable

import torch

import ltx
from benchmarks.ranks import Variant, interleaved, ratio

SIZES = (16, 64, 256)
# Of one rank's tensor; a multiple of every size. All ranks' together stay below the size from which glibc maps fresh
# memory for every tensor, whose page faults would be measured instead.
ELEMENTS = 16_384

Call = Callable[[torch.Tensor], torch.Tensor]


def _ring(x: torch.Tensor) -> torch.Tensor:
    n = ltx.axis_size()
    return ltx.ppermute(x, [(rank, (rank + 1) % n) for rank in range(n)])


OPS: dict[str, Call] = {
    "psum": ltx.psum,
    "pmean": ltx.pmean,
    "pmax": ltx.pmax,
    "pmin": ltx.pmin,
    "pvary": ltx.pvary,
    "all_gather": ltx.all_gather,
    "psum_scatter": lambda x: ltx.psum_scatter(x, tiled=True),
    "broadcast": ltx.broadcast,
    "all_to_all": lambda x: ltx.all_to_all(x, 0, 0),
    "ppermute": _ring,
    "reduce product": lambda x: ltx.reduce(x, "product"),
}


def _loss(params: list[torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    w, v = params
    return (torch.tanh(x @ w) @ v - y).square().mean()


def _gradient(n: int) -> Variant:
    params = [torch.randn(16, 64), torch.randn(64, 8)]
    x, y = torch.randn(n, 64, 16), torch.randn(n, 64, 8)
    step = ltx.vmap(torch.func.grad(ltx.data_parallel(_loss)), in_dims=(None, 0, 0))
    return lambda: step(params, x, y)


def _time(name: str, sizes: list[int], iterations: int) -> dict[str, list[float]]:
    """Seconds by size. One row at a time, so that only its tensors are held."""
    if name == "vmap(grad(step))":
        made = {str(n): _gradient(n) for n in sizes}
    else:
        call = ltx.vmap(OPS[name])
        made = {str(n): functools.partial(call, torch.randn(n, ELEMENTS)) for n in sizes}
    return interleaved(made, iterations, warmup=3)


def main() -> None:
    """Parse, run, print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), help="numbers of ranks, powers of two")
    arguments = parser.parse_args()
    if len(arguments.sizes) < 2 or any(n < 1 or ELEMENTS % n for n in arguments.sizes):
        parser.error(f"--sizes: at least two numbers that divide {ELEMENTS:,}, got {arguments.sizes}")
    torch.set_num_threads(1)
    sizes = sorted(arguments.sizes)
    least, most = str(sizes[0]), str(sizes[-1])
    columns = " | ".join(f"{n} ranks, ms" for n in sizes)
    print(f"| simulated | {columns} | cost({most}) / cost({least}), at most {sizes[-1] / sizes[0]:g} |")
    print("|---" * (len(sizes) + 2) + "|")
    for name in ("vmap(grad(step))", *OPS):
        times = _time(name, sizes, arguments.iterations)
        each = " | ".join(f"{1e3 * statistics.median(times[str(n)]):.2f}" for n in sizes)
        print(f"| {name} | {each} | {ratio(times, most, least):.1f} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
