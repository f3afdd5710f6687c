"""`axis_index_groups`: each group is an axis of its own, on processes, simulated ranks, and axes of several names.

What is expected is the collective of a flat axis of simulated ranks, for each group by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx.errors import AxisError, RankMismatchError
from ltx.extend import inner
from tests import inside
from tests.kinds import OnNewAxis, Ranks
from tests.train_on import on_ranks, refuses, said

Groups = list[list[int]]

SUMS: dict[str, Callable[..., Tensor]] = {"psum": ltx.psum, "pmean": ltx.pmean, "pmax": ltx.pmax, "pmin": ltx.pmin}
OPS: dict[str, Callable[..., Tensor]] = {
    **SUMS,
    "all_gather": lambda x, *args, **named: ltx.all_gather(x, *args, dim=1, **named),
    "all_gather tiled": lambda x, *args, **named: ltx.all_gather(x, *args, tiled=True, **named),
    "psum_scatter": lambda x, *args, **named: ltx.psum_scatter(x, *args, dim=1, tiled=True, **named),
    "all_to_all": lambda x, *args, **named: ltx.all_to_all(x, 0, 1, *args, **named),
    "all_to_all untiled": lambda x, *args, **named: ltx.all_to_all(
        x.unflatten(0, (2, -1)), 0, 2, *args, tiled=False, **named
    ),
}
TILED = {name: op for name, op in OPS.items() if name != "all_to_all untiled"}  # which is cut for two ranks
EQUAL: Groups = [[2, 0], [1, 3]]
UNEQUAL: Groups = [[0, 3, 1], [2]]


def of_each(x: Tensor, ops: dict[str, Callable[..., Tensor]], *args: Any, **named: Any) -> dict[str, Any]:
    """Each collective's value, and the gradient of a loss that weighs the ranks by what they have."""

    def loss(x: Tensor, name: str) -> Tensor:
        return (ops[name](x, *args, **named).sin() * x[0, 0].detach()).sum()

    return {name: (op(x, *args, **named), torch.func.grad(loss)(x, name)) for name, op in ops.items()}


def expected(xs: Tensor, ops: dict[str, Callable[..., Tensor]], groups: Groups) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for group in groups:
        stacked = ltx.vmap(lambda x: of_each(x, ops))(xs[group])
        for place, rank in enumerate(group):
            found[rank] = ltx.tree.map(lambda y, place=place: y[place], stacked)
    return [found[rank] for rank in range(len(xs))]


def check(got: Any, want: list[Any]) -> None:
    for rank, entry in enumerate(want):
        torch.testing.assert_close(got(rank), entry, rtol=1e-12, atol=1e-12)


CASES = [(OPS, EQUAL), (SUMS, UNEQUAL), (TILED, [[3, 0, 2, 1]]), (SUMS, [[0], [1], [2], [3]])]


@pytest.mark.parametrize(("ops", "groups"), CASES, ids=["equal", "unequal", "one, in another order", "each alone"])
def test_simulated_ranks(ops: dict[str, Any], groups: Groups, seed: int) -> None:
    xs = torch.randn(4, 4, 4, dtype=torch.float64)
    found = ltx.vmap(lambda x: of_each(x, ops, axis_index_groups=groups))(xs)
    check(lambda rank: ltx.tree.map(lambda y: y[rank], found), expected(xs, ops, groups))


def test_processes(ranks: Ranks, seed: int) -> None:
    xs = torch.randn(4, 4, 4, dtype=torch.float64)

    def run(xs: Tensor) -> tuple[list[Any], list[float], int]:
        rank = int(ltx.axis_index())
        found = [of_each(xs[rank], ops, axis_index_groups=groups) for ops, groups in CASES]
        count = len(inside.resolve("data").comm.parts)
        with ltx.profile.record() as trace:
            ltx.pmean(xs[rank], axis_index_groups=UNEQUAL)
        assert [event.operation for event in trace.events] == (["psum"] if rank != 2 else [])
        number = ltx.psum(1, axis_index_groups=UNEQUAL).item()
        # Other groups of which one is known: its communicator is used again.
        total = ltx.psum(xs[rank, 0, 0], axis_index_groups=[[2, 0], [3, 1]]).item()
        return found, [number, total], len(inside.resolve("data").comm.parts) - count

    by_rank = ranks(4).run(run, xs)
    for i, (ops, groups) in enumerate(CASES):
        check(lambda rank, i=i: by_rank.rank(rank)[0][i], expected(xs, ops, groups))
    totals = xs[:, 0, 0].unflatten(0, (2, 2)).sum(0)
    assert [numbers[0] for _, numbers, _ in by_rank] == [3, 3, 1, 3]
    torch.testing.assert_close([numbers[1] for _, numbers, _ in by_rank], totals.repeat(2).tolist())
    assert [opened for *_, opened in by_rank] == [0, 1, 0, 1]


def test_groups_of_axes_of_several_names(seed: int) -> None:
    """And groups within the parts of an axis."""
    xs = torch.randn(2, 2, 4, 4, dtype=torch.float64)

    def call(x: Tensor) -> Any:
        return of_each(x, OPS, ("node", "data"), axis_index_groups=EQUAL)

    found = ltx.vmap(ltx.vmap(call, axis_name="data"), axis_name="node")(xs)
    check(lambda rank: ltx.tree.map(lambda y: y.flatten(0, 1)[rank], found), expected(xs.flatten(0, 1), OPS, EQUAL))

    ys = torch.randn(8, 4, 4, dtype=torch.float64)
    found = ltx.vmap(lambda x: of_each(x, OPS, inner(inside.resolve(None), 4), axis_index_groups=EQUAL))(ys)
    for node in range(2):
        mine = slice(4 * node, 4 * node + 4)
        check(lambda rank, mine=mine: ltx.tree.map(lambda y: y[mine][rank], found), expected(ys[mine], OPS, EQUAL))


def test_whole_numbers_and_trees(seed: int) -> None:
    xs = torch.randint(-9, 9, (4, 2))
    found = ltx.vmap(lambda x: ltx.pmean({"a": x, "b": x > 0}, axis_index_groups=UNEQUAL))(xs)
    for group in UNEQUAL:
        for name, whole in (("a", xs), ("b", xs > 0)):
            torch.testing.assert_close(found[name][group], whole[group].float().mean(0).expand(len(group), 2))
    assert ltx.vmap(lambda x: ltx.psum(1, axis_index_groups=UNEQUAL))(xs).tolist() == [3, 3, 1, 3]


def test_alone() -> None:
    x = torch.randn(1, 3)
    named: Any = {"axis_index_groups": [[0]]}
    assert torch.equal(ltx.psum(x, **named), x)
    assert torch.equal(ltx.all_gather(x, **named), x[None])
    refuses(AxisError, r"axis_index_groups=\[\[0, 1\]\].*It has no rank 1\.", ltx.psum, x, axis_index_groups=[[0, 1]])


@pytest.mark.parametrize(
    ("groups", "fault"),
    [
        ([[0, 1], [2]], "Rank 3 is in none."),
        ([[0, 1], [1, 2, 3]], "Rank 1 is in more than one place."),
        ([[0, 2], [1, 4]], "It has no rank 4."),
        ([[0, 2], [1, -1]], "It has no rank -1."),
        ([], "Rank 0 is in none."),
        ([[0, 1, 2, 3], []], "Leave the empty ones out."),
    ],
)
def test_what_is_no_partition(groups: Groups, fault: str) -> None:
    text = said(AxisError, lambda: ltx.vmap(lambda x: ltx.psum(x, axis_index_groups=groups))(torch.ones(4)))
    assert f"axis_index_groups={groups}: on axis 'data' of 4 ranks, every index from 0 to 3" in text
    assert text.endswith(fault)


@pytest.mark.parametrize("name", ["all_gather", "psum_scatter", "all_to_all", "all_to_all untiled"])
def test_unequal_groups_where_shapes_would_differ(name: str) -> None:
    text = rf"{name.split()[0]}: axis_index_groups=\[\[0, 3, 1\], \[2\]\] are of unequal sizes.*psum, pmean, pmax"
    refuses(AxisError, text, ltx.vmap(lambda x: OPS[name](x, axis_index_groups=UNEQUAL)), torch.ones(4, 4, 4))


@on_ranks(4)
def test_groups_that_differ_between_ranks() -> None:
    """Compared before a communicator is opened: to open different ones would take until the timeout."""
    groups = [[0, 1, 2], [3]] if ltx.axis_index() else [[0], [1, 2, 3]]
    text = said(RankMismatchError, ltx.psum, torch.ones(1), axis_index_groups=groups)
    assert "rank 0: axis_index_groups=[[0], [1, 2, 3]]; ranks 1, 2, 3: axis_index_groups=[[0, 1, 2], [3]]" in text
    ltx.psum(torch.ones(1))


def test_one_rank_calls_something_else(on_new_axis: OnNewAxis) -> None:
    """Also where the groups are known already."""

    def run() -> list[str]:
        named: Any = {} if ltx.axis_index() else {"axis_index_groups": [[1, 0]]}
        found = []
        for known in (False, True):
            found.append(said(RankMismatchError, ltx.psum, torch.ones(3), **named))
            if not known:
                ltx.psum(torch.ones(2), axis_index_groups=[[1, 0]])
        return found

    (first, _), second = on_new_axis(run)
    assert first == second[0]
    assert "ranks disagree on the operation: rank 0: axis_index_groups; rank 1: psum" in first


@pytest.mark.full
def test_in_compiled_graphs(ranks: Ranks, seed: int) -> None:
    def f(x: Tensor) -> Tensor:
        y = ltx.all_gather(x.sin(), axis_index_groups=EQUAL).sum(0)
        return ltx.pmean(y, axis_index_groups=UNEQUAL) * ltx.pmax(x, axis_index_groups=UNEQUAL)

    xs = torch.randn(4, 3, dtype=torch.float64)
    want = ltx.vmap(f)(xs)
    torch.testing.assert_close(torch.compile(lambda xs: ltx.vmap(f)(xs), fullgraph=True, backend="aot_eager")(xs), want)

    def run(xs: Tensor) -> Tensor:
        return torch.compile(f, fullgraph=True, backend="aot_eager")(xs[int(ltx.axis_index())])

    for rank, found in enumerate(ranks(4).run(run, xs)):
        torch.testing.assert_close(found, want[rank])
