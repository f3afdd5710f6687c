"""Cost of simulated ranks at 16, 64 and 256 of them: a data-parallel gradient of a small MLP, and each collective.

    python -m benchmarks.simulated [--iterations 20] [--sizes 16 64 256]
    python -m benchmarks.simulated --clients 64

One process, one thread. Times are medians over iterations that take all sizes in turns; each rank's work stays the same
(64 samples, or a tensor of 64 KiB), so that the cost should grow with the number of ranks at most. The last column is
the median ratio of the largest size's time to the smallest's, beside the ratio of the sizes. ``--clients`` compares one
round of that many, each with a batch of its own, with a Python loop over them, with torch's own vmap of the gradient,
and with JAX's vmap where JAX is installed, op by op and compiled.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
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


def clients(n: int, width: int = 64) -> dict[str, Variant]:
    """A round of n clients: each one's gradient on its own batch, and a step by their mean. All come to the same."""
    params = [torch.randn(16, width), torch.randn(width, 8)]
    x, y = torch.randn(n, 64, 16), torch.randn(n, 64, 8)

    def moved(grads: list[torch.Tensor]) -> list[torch.Tensor]:
        return [p - 0.1 * grad for p, grad in zip(params, grads, strict=True)]

    def loop() -> list[torch.Tensor]:
        held = [p.detach().requires_grad_() for p in params]
        each = [torch.autograd.grad(_loss(held, x[client], y[client]), held) for client in range(n)]
        return moved([torch.stack(grads).mean(0) for grads in zip(*each, strict=True)])

    step = ltx.vmap(torch.func.grad(ltx.data_parallel(_loss)), in_dims=(None, 0, 0), out_dims=None)
    bare = torch.func.vmap(torch.func.grad(_loss), in_dims=(None, 0, 0))
    made: dict[str, Callable[[], object]] = {
        "Python loop": loop,
        "ltx.vmap": lambda: moved(step(params, x, y)),
        "ltx.vmap, compiled": torch.compile(lambda: moved(step(params, x, y)), fullgraph=True),
        "torch.func.vmap": lambda: moved([grads.mean(0) for grads in bare(params, x, y)]),
    }
    if find_spec("jax"):
        made |= _jax_clients(params, x, y)
    for name, variant in made.items():
        for ours, expected in zip(variant(), loop(), strict=True):  # type: ignore[call-overload]
            torch.testing.assert_close(torch.tensor(np.asarray(ours)), expected, rtol=1e-4, atol=1e-5, msg=name)
    return made


def _jax_clients(params: list[torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> dict[str, Variant]:
    import jax
    import jax.numpy as jnp

    def loss(params: Any, x: Any, y: Any) -> Any:
        w, v = params
        return jnp.square(jnp.tanh(x @ w) @ v - y).mean()

    def grads(params: Any, x: Any, y: Any) -> Any:
        return jax.lax.pmean(jax.grad(loss)(params, x, y), "clients")

    def run(params: Any, x: Any, y: Any) -> Any:
        mean = jax.vmap(grads, in_axes=(None, 0, 0), out_axes=None, axis_name="clients")(params, x, y)
        return jax.tree.map(lambda p, grad: p - 0.1 * grad, params, mean)

    given = [jnp.asarray(p.numpy()) for p in params], jnp.asarray(x.numpy()), jnp.asarray(y.numpy())
    compiled = jax.jit(run)
    return {
        "JAX vmap, op by op": lambda: jax.block_until_ready(run(*given)),
        "JAX vmap, jit": lambda: jax.block_until_ready(compiled(*given)),
    }


def main() -> None:
    """Parse, run, print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), help="numbers of ranks, powers of two")
    parser.add_argument("--clients", type=int, help="a round of so many, by loops and other libraries")
    arguments = parser.parse_args()
    if arguments.clients:
        torch.set_num_threads(1)
        for width in (64, 1024):
            times = interleaved(clients(arguments.clients, width), arguments.iterations, warmup=3)
            print(f"| {arguments.clients} clients, {width} hidden | ms | to the Python loop |\n|---|---|---|")
            for name, taken in times.items():
                ms = 1e3 * statistics.median(taken)
                print(f"| {name} | {ms:.2f} | {ratio(times, name, 'Python loop'):.2f} |", flush=True)
        return
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
