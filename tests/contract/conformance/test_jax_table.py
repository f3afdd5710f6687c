"""Collectives against JAX: the values and derivatives that jax_table.py wrote to jax_table.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vjp

import ltx
from tests.kinds import Ranks

Fn = Callable[[Tensor], Tensor]
Row = dict[str, Any]
Values = dict[str, Tensor]

#: op -> ltx's call on one rank, by the argument names of the table.
CALLS: dict[str, Callable[..., Tensor]] = {
    "psum": lambda x, groups=None: ltx.psum(x, axis_index_groups=groups),
    "pmean": lambda x, groups=None: ltx.pmean(x, axis_index_groups=groups),
    "pmax": lambda x, groups=None: ltx.pmax(x, axis_index_groups=groups),
    "pmin": lambda x, groups=None: ltx.pmin(x, axis_index_groups=groups),
    "all_gather": lambda x, dim, tiled, groups=None: ltx.all_gather(x, dim=dim, tiled=tiled, axis_index_groups=groups),
    "psum_scatter": lambda x, dim, tiled, groups=None: ltx.psum_scatter(
        x, dim=dim, tiled=tiled, axis_index_groups=groups
    ),
    "ppermute": lambda x, perm: ltx.ppermute(x, [(source, destination) for source, destination in perm]),
    "all_to_all": lambda x, split_dim, concat_dim, groups=None: ltx.all_to_all(
        x, split_dim, concat_dim, axis_index_groups=groups
    ),
    "axis_index": lambda x: x * ltx.axis_index(),
}
OPS = list(CALLS)

GIVEN = ("input", "cotangent", "tangent")
WANTED = ("output", "gradient", "jvp", "curved", "hvp")


@cache
def table() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_name("jax_table.json").read_text(encoding="utf-8"))
    return found


def rows(op: str, n: int) -> list[Row]:
    found = [row for row in table()["rows"] if (row["op"], row["n"]) == (op, n)]
    assert found, f"jax_table.json has no row of {op} on {n} ranks"
    return found


def tensors(row: Row, names: tuple[str, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.tensor(row[name], dtype=torch.float64) for name in names)


def call(row: Row) -> Fn:
    return lambda x: CALLS[row["op"]](x, **row["args"])


def derivatives(f: Fn, x: Tensor, bar: Tensor, dot: Tensor) -> Values:
    """All that a row has, of one rank's `f` or of an `f` of all ranks' stacks: the convention makes them one."""

    def curved(x: Tensor) -> Tensor:
        return (bar * torch.sin(f(x**2))).sum()

    output, transpose = vjp(f, x)
    return {
        "output": output,
        "gradient": transpose(bar)[0],
        "jvp": jvp(f, (x,), (dot,))[1],
        "curved": grad(curved)(x),
        "hvp": grad(lambda x: (dot * grad(curved)(x)).sum())(x),
        "hvp, forward over reverse": jvp(grad(curved), (x,), (dot,))[1],
    }


def check(row: Row, got: Values) -> None:
    want = dict(zip(WANTED, tensors(row, WANTED), strict=True))
    want["hvp, forward over reverse"] = want["hvp"]
    assert got.keys() == want.keys()
    for name in want:
        where = f"{row['op']} {row['args']} on {row['n']} ranks: {name}"
        torch.testing.assert_close(
            # atol for what cancels: the table's numbers are of the order of 1 to 100.
            got[name],
            want[name],
            rtol=1e-12,
            atol=1e-13,
            msg=lambda text, where=where: f"{where}: {text}",
        )


@pytest.mark.full(but=4)
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("op", OPS)
def test_simulated_ranks(op: str, n: int) -> None:
    for row in rows(op, n):
        check(row, ltx.vmap(partial(derivatives, call(row)))(*tensors(row, GIVEN)))


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("op", OPS)
def test_simulated_ranks_from_outside(op: str, n: int) -> None:
    """As JAX was asked: derivatives around the mapped function."""
    for row in rows(op, n):
        check(row, derivatives(ltx.vmap(call(row)), *tensors(row, GIVEN)))


@pytest.mark.full(but=3)
@pytest.mark.covering(1)
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("op", OPS)
def test_processes(op: str, n: int, ranks: Ranks) -> None:
    def on_one_rank(table_rows: list[Row]) -> list[Values]:
        rank = int(ltx.axis_index())
        return [derivatives(call(row), *(stack[rank] for stack in tensors(row, GIVEN))) for row in table_rows]

    by_rank = ranks(n).run(on_one_rank, rows(op, n))
    for i, row in enumerate(rows(op, n)):
        check(row, {name: torch.stack([values[i][name] for values in by_rank]) for name in by_rank[0][i]})


def test_every_op_of_the_table_is_called() -> None:
    assert {row["op"] for row in table()["rows"]} == set(CALLS)
