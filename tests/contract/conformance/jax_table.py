"""Writes jax_table.json: what JAX makes of the collectives, which test_conformance.py holds ltx to.

Run by hand, in a virtual environment of its own, when rows are added here or JAX moves on::

    python -m venv jaxenv
    jaxenv/bin/pip install "jax[cpu]==0.10.2"
    jaxenv/bin/python tests/contract/conformance/jax_table.py

Every row says, for the stacked values of n ranks, in float64:

    input       x
    output      y = op(x)
    cotangent   ȳ, another one on each rank
    gradient    the transpose's value at ȳ: the gradient with respect to x of L = sum over ranks of <ȳ_r, y_r>
    tangent     ẋ
    jvp         the derivative of y in direction ẋ
    curved      the gradient of M(x) = sum over ranks of <ȳ_r, sin(op(x²)_r)>
    hvp         the derivative of `curved` in direction ẋ, reverse mode over reverse mode

The rows are those of ``jax.vmap(op, axis_name="data")``, with ``jax.vjp`` and ``jax.jvp`` around the vmap. The same
under ``shard_map``, on n CPU devices, must agree, or the script stops; `under` says whose numbers a row has. Rows with
`groups` are those of ``shard_map(check_vma=False)``: vmap has no axis_index_groups. Inputs are multiples of 1/64 and
sums of them exact, so that they are short to write.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

JAX_VERSION = "0.10.2"
SEED = 20250
SIZES = (2, 3, 4)
TABLE = Path(__file__).with_suffix(".json")
AXIS = "data"
ARRAYS = ("input", "output", "cotangent", "gradient", "tangent", "jvp", "curved", "hvp")

Fn = Callable[[Array], Array]

#: op -> the call on one rank, by the argument names that rows have.
CALLS: dict[str, Callable[..., Array]] = {
    "psum": lambda x, groups=None: lax.psum(x, AXIS, axis_index_groups=groups),
    "pmean": lambda x, groups=None: lax.pmean(x, AXIS, axis_index_groups=groups),
    "pmax": lambda x, groups=None: lax.pmax(x, AXIS, axis_index_groups=groups),
    "pmin": lambda x, groups=None: lax.pmin(x, AXIS, axis_index_groups=groups),
    "all_gather": lambda x, dim, tiled, groups=None: lax.all_gather(
        x, AXIS, axis=dim, tiled=tiled, axis_index_groups=groups
    ),
    "psum_scatter": lambda x, dim, tiled, groups=None: lax.psum_scatter(
        x, AXIS, scatter_dimension=dim, tiled=tiled, axis_index_groups=groups
    ),
    "ppermute": lambda x, perm: lax.ppermute(x, AXIS, perm),
    "all_to_all": lambda x, split_dim, concat_dim, groups=None: lax.all_to_all(
        x, AXIS, split_dim, concat_dim, tiled=True, axis_index_groups=groups
    ),
    "axis_index": lambda x: x * lax.axis_index(AXIS),
}

#: JAX can't differentiate pmax and pmin. It can differentiate these, whose values are the same; among equal extrema its
#: rule is an equal share for each, which is ltx's.
DIFFERENTIABLE: dict[str, Callable[..., Array]] = {
    "pmax": lambda x, groups=None: lax.all_gather(x, AXIS, axis_index_groups=groups).max(0),
    "pmin": lambda x, groups=None: lax.all_gather(x, AXIS, axis_index_groups=groups).min(0),
}


def cases(n: int) -> Iterator[tuple[str, dict[str, Any], tuple[int, ...]]]:
    """Op, arguments and shape of one rank's input."""
    for op in ("psum", "pmean"):
        yield op, {}, (2, 3)
        yield op, {}, ()
    for op in ("pmax", "pmin"):
        yield op, {}, (2, 2)
        yield op, {}, ()
        yield f"{op} with ties", {}, (5,)
    yield "all_gather", {"dim": 0, "tiled": False}, ()
    yield "all_gather", {"dim": 0, "tiled": False}, (2,)
    yield "all_gather", {"dim": 1, "tiled": False}, (2, 2)
    yield "all_gather", {"dim": 0, "tiled": True}, (2, 1)
    yield "all_gather", {"dim": 1, "tiled": True}, (2, 2)
    yield "psum_scatter", {"dim": 0, "tiled": False}, (n,)
    yield "psum_scatter", {"dim": 1, "tiled": False}, (2, n)
    yield "psum_scatter", {"dim": 0, "tiled": True}, (2 * n,)
    yield "psum_scatter", {"dim": 1, "tiled": True}, (2, 2 * n)
    ring = [(rank, (rank + 1) % n) for rank in range(n)]
    yield "ppermute", {"perm": ring}, (2, 2)
    yield "ppermute", {"perm": [(dst, src) for src, dst in ring]}, (2,)
    yield "ppermute", {"perm": ring[:-1]}, (3,)  # a line: rank 0 has no source
    yield "ppermute", {"perm": [(n - 1, 0)]}, ()
    yield "ppermute", {"perm": [(0, 0), (1, n - 1)]}, (2,)
    yield "all_to_all", {"split_dim": 0, "concat_dim": 0}, (2 * n,)
    yield "all_to_all", {"split_dim": 0, "concat_dim": 1}, (2 * n, 2)
    yield "all_to_all", {"split_dim": 1, "concat_dim": 0}, (2, n)
    yield "all_to_all", {"split_dim": 2, "concat_dim": 1}, (1, 2, n)
    yield "axis_index", {}, (2,)


def cases_of_groups() -> Iterator[tuple[int, str, dict[str, Any], tuple[int, ...]]]:
    """The same with the number of ranks, in groups. JAX divides pmean of unequal ones by the size of the first."""
    yield 3, "psum", {"groups": [[0, 2], [1]]}, (2,)
    yield 4, "psum", {"groups": [[3], [2, 0, 1]]}, ()
    groups = {"groups": [[2, 0], [1, 3]]}
    for op in ("psum", "pmean", "pmax", "pmin"):
        yield 4, op, groups, (2, 2)
    yield 4, "all_gather", {"dim": 1, "tiled": False, **groups}, (2,)
    yield 4, "all_gather", {"dim": 0, "tiled": True, **groups}, (2, 1)
    yield 4, "psum_scatter", {"dim": 0, "tiled": False, **groups}, (2,)
    yield 4, "psum_scatter", {"dim": 1, "tiled": True, **groups}, (2, 4)
    yield 4, "all_to_all", {"split_dim": 1, "concat_dim": 0, **groups}, (1, 4)


def under_vmap(f: Fn, n: int) -> Fn:
    return jax.vmap(f, axis_name=AXIS, axis_size=n)


def under_shard_map(f: Fn, n: int) -> Fn:
    mesh, each = Mesh(np.array(jax.devices()[:n]), (AXIS,)), PartitionSpec(AXIS)
    return jax.shard_map(lambda x: f(x[0])[None], mesh=mesh, in_specs=each, out_specs=each)


def unchecked(f: Fn, n: int) -> Fn:
    mesh, each = Mesh(np.array(jax.devices()[:n]), (AXIS,)), PartitionSpec(AXIS)
    return jax.shard_map(lambda x: f(x[0])[None], mesh=mesh, in_specs=each, out_specs=each, check_vma=False)


def drawn(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Multiples of 1/64 between -2 and 2 of which no two have the same magnitude."""
    size = int(np.prod(shape))
    return (rng.permutation(np.arange(1, 129))[:size] / 64 * rng.choice([-1, 1], size)).reshape(shape)


def tied(rng: np.random.Generator, shape: tuple[int, ...], largest: bool) -> np.ndarray:
    """Five elements whose extremum, and that of whose squares, belongs to all ranks, to the first and the last, to all
    but the first, to the last, and to all with the value 0."""
    x = np.abs(drawn(rng, shape)) + 0.5
    extreme = 4.0 if largest else 0.25
    x[:, 0] = extreme
    x[0, 1] = x[-1, 1] = extreme
    x[1:, 2] = extreme
    x[-1, 3] = extreme
    x[:, 4] = 0.0
    return x


def derivatives(f: Fn, x: Array, bar: Array, dot: Array) -> dict[str, Array]:
    """All of a row that JAX computes; `f` maps stacks to stacks."""

    def curved(x: Array) -> Array:
        return jnp.sum(bar * jnp.sin(f(x**2)))

    output, transpose = jax.vjp(f, x)
    return {
        "output": output,
        "gradient": transpose(bar)[0],
        "jvp": jax.jvp(f, (x,), (dot,))[1],
        "curved": jax.grad(curved)(x),
        "hvp": jax.grad(lambda x: jnp.sum(dot * jax.grad(curved)(x)))(x),
    }


def row(rng: np.random.Generator, n: int, case: str, args: dict[str, Any], shape: tuple[int, ...]) -> dict[str, Any]:
    op = case.split()[0]
    x = drawn(rng, (n, *shape)) if op == case else tied(rng, (n, *shape), op == "pmax")

    def call(x: Array) -> Array:
        return CALLS[op](x, **args)

    # JAX's ppermute under vmap refuses permutations that leave a rank without a source.
    sourceless = op == "ppermute" and len(args["perm"]) < n
    places = {"shard_map": under_shard_map} if sourceless else {"vmap": under_vmap, "shard_map": under_shard_map}
    if "groups" in args:
        places = {"shard_map(check_vma=False)": unchecked}
    under = next(iter(places))
    output = np.asarray(places[under](call, n)(x))
    bar, dot = drawn(rng, output.shape), drawn(rng, x.shape)
    smooth = partial(DIFFERENTIABLE[op], **args) if op in DIFFERENTIABLE else call
    found = {name: jax.jit(partial(derivatives, place(smooth, n)))(x, bar, dot) for name, place in places.items()}
    np.testing.assert_allclose(found[under]["output"], output, rtol=1e-15)
    for name, values in found.items():
        for key, value in values.items():
            assert value.dtype == jnp.float64
            np.testing.assert_allclose(
                value, found[under][key], rtol=1e-13, atol=1e-13, err_msg=f"{case} {args}: {name}"
            )
    arrays = {"input": x, "cotangent": bar, "tangent": dot, **found[under]}
    return {"op": op, "n": n, "args": args, "under": under, **{key: np.asarray(arrays[key]).tolist() for key in ARRAYS}}


def main() -> None:
    if jax.__version__ != JAX_VERSION:
        raise SystemExit(f"The table is JAX {JAX_VERSION}'s, this is {jax.__version__}. See the docstring.")
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(SIZES))
    rng = np.random.default_rng(SEED)
    rows = [row(rng, n, *case) for n in SIZES for case in cases(n)]
    rows += [row(rng, *case) for case in cases_of_groups()]
    head = {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "numpy": np.__version__, "seed": SEED}
    # json writes floats by repr: every bit comes back.
    lines = ",\n".join(json.dumps(r, separators=(",", ":")) for r in rows)
    TABLE.write_text(f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")
    print(f"{len(rows)} rows, {TABLE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
