"""Every collective on axes that aren't the whole world: subgroups, nested axes, mesh dimensions, simulated ranks.

All axes here have two ranks. The world is a table of 2 x 2 ranks, rank r at ``divmod(r, 2)``: an axis "data" goes along
a row of it, "node" along a column. Each is compared with plain torch on the stack of its ranks' tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ltx
from ltx.errors import AxisError
from tests import inside, train_on
from tests.contract.conformance.test_properties import fixed
from tests.kinds import Ranks

Found = dict[str, tuple[Tensor, Tensor]]


#: `src`, `dst` and `perm` count on the axis.
OPS: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]] = {
    **{name: fixed(name) for name in ("psum", "pmean", "pmax", "pmin", "pvary", "weighted_mean")},
    "all_gather": fixed("all_gather", dim=1, tiled=False),
    "AllGatherGrad": (lambda x, axis: ltx.AllGatherGrad.apply(x, axis), lambda xs: xs.expand(2, *xs.shape)),
    "psum_scatter": fixed("psum_scatter", dim=1, tiled=True),
    "broadcast": fixed("broadcast", src=1),
    "psum_to": fixed("psum_to", dst=1),
    "gather": fixed("gather", dst=1, dim=1, tiled=False),
    "scatter": fixed("scatter", src=1, dim=1, tiled=True),
    "all_to_all": fixed("all_to_all", split_dim=0, concat_dim=1),
    "ppermute": fixed("ppermute", perm=[(1, 0)]),
    "reduce": fixed("reduce", op="product", keep_dtype=False),
}


def _draw() -> Tensor:
    """Each rank's tensor at its place in the table."""
    return torch.randn(2, 2, 2, 4, dtype=torch.float64)


def _on_rank(x: Tensor, axis: Any) -> Found:
    """Each collective's value, and the gradient of a loss that weighs rank r of the axis by r + 1."""

    def loss(x: Tensor, name: str) -> Tensor:
        return (1 + ltx.axis_index(axis)) * OPS[name][0](x, axis=axis).sin().sum()

    return {name: (op(x, axis=axis), torch.func.grad(loss)(x, name)) for name, (op, _) in OPS.items()}


def _expected(xs: Tensor) -> Found:
    """The same for both ranks of an axis, stacked."""
    found = {}
    for name, (_, reference) in OPS.items():
        grads = torch.func.grad(
            lambda xs, reference=reference: sum((1 + r) * y.sin().sum() for r, y in enumerate(reference(xs)))
        )(xs)
        # pvary's argument is one value that the ranks share; its gradient is the sum over their copies.
        found[name] = (reference(xs), grads.sum(0).expand_as(grads) if name == "pvary" else grads)
    return found


def _check(got: Found, want: Found, at: int) -> None:
    """`want` holds both ranks of the axis; `got` the one at `at`."""
    for name, expected in want.items():
        for a, b in zip(got[name], expected, strict=True):
            torch.testing.assert_close(a, b[at], msg=lambda text, name=name: f"{name}: {text}")


@contextmanager
def _subgroups(*members: list[int]) -> Iterator[list[Any]]:
    """Process groups, made by all ranks of the world; what torch gives to those outside is left as it is."""
    groups = [dist.new_group(ranks) for ranks in members]
    try:
        yield groups
    finally:
        for group in groups:
            if isinstance(group, dist.ProcessGroup):
                inside.close_axis(inside.resolve(group))


@pytest.mark.full
def test_two_subgroups_at_once(ranks: Ranks, seed: int) -> None:
    """Ranks 1 and 3, and ranks 0 and 2, which go on without each other."""

    def run(xs: Tensor) -> tuple[Found, int, int, list[Any], list[Tensor]]:
        with _subgroups([1, 3], [0, 2]) as groups:
            mine = groups[0] if dist.get_rank() % 2 else groups[1]
            x = xs.flatten(0, 1)[dist.get_rank()]
            index, size = int(ltx.axis_index(mine)), ltx.axis_size(mine)
            said = ltx.all_gather_object(dist.get_rank(), mine)
            # Unequal shapes, and once more on one of the groups alone.
            uneven = ltx.gather_all_tensors(x[: 1 + index], mine)
            if dist.get_rank() % 2:
                ltx.psum(x, mine)
            return _on_rank(x, mine), index, size, said, uneven

    xs = _draw()
    for rank, (found, index, size, said, uneven) in enumerate(ranks(4).run(run, xs)):
        row, place = divmod(rank, 2)
        assert (index, size, said) == (row, 2, [place, place + 2])
        _check(found, _expected(xs[:, place]), row)
        assert all(torch.equal(part, xs[r, place][: 1 + r]) for r, part in enumerate(uneven))
    assert ranks(4).run(lambda: ltx.psum(torch.ones(()))).replicated().item() == 4.0, "the world is as it was"


def test_a_rank_outside_says_so(ranks: Ranks) -> None:
    """Horovod's process set is an axis over some of the ranks."""

    def run() -> tuple[list[str], float]:
        with _subgroups([1, 3]) as (group,):
            if dist.get_rank() % 2:
                axis = ltx.axis_from_group(group, "set")
                return [], float(ltx.psum(torch.tensor(float(dist.get_rank())), axis))
            calls = [
                lambda: ltx.axis_from_group(group, "set"),
                lambda: ltx.axis_index(group),
                *(lambda op=op: op(torch.ones(2, 4), axis=group) for op, _ in OPS.values()),
            ]
            return [train_on.said(AxisError, call) for call in calls], float(dist.get_rank())

    for rank, (texts, total) in enumerate(ranks(4).run(run)):
        assert total == (4.0 if rank % 2 else rank)
        assert len(texts) == (0 if rank % 2 else len(OPS) + 2)
        assert all(f"rank {rank} isn't a member of the process group" in text for text in texts)


def test_nested_simulated_axes(seed: int) -> None:
    def run(x: Tensor) -> tuple[Found, Found]:
        return _on_rank(x, "node"), _on_rank(x, "data")

    xs = _draw()
    on_node, on_data = ltx.vmap(ltx.vmap(run, axis_name="data"), axis_name="node")(xs)
    for row, column in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        at = {name: (y[row, column], g[row, column]) for name, (y, g) in on_node.items()}
        _check(at, _expected(xs[:, column]), row)
        at = {name: (y[row, column], g[row, column]) for name, (y, g) in on_data.items()}
        _check(at, _expected(xs[row]), column)


def test_simulated_ranks_on_each_process(ranks: Ranks, seed: int) -> None:
    """Between processes every simulated rank does its own; and on the simulated axis every process."""

    def run(xs: Tensor) -> tuple[Found, Found]:
        mine = xs[ltx.axis_index("data")]
        each = ltx.vmap(lambda x: (_on_rank(x, "data"), _on_rank(x, "simulated")), axis_name="simulated")
        return each(mine)

    xs = _draw()
    for rank, (on_processes, on_simulated) in enumerate(ranks(2).run(run, xs)):
        for entry in range(2):
            _check({k: (y[entry], g[entry]) for k, (y, g) in on_processes.items()}, _expected(xs[:, entry]), rank)
            _check({k: (y[entry], g[entry]) for k, (y, g) in on_simulated.items()}, _expected(xs[rank]), entry)


def test_an_axis_is_found_by_its_name(ranks: Ranks) -> None:
    """Axes in scope come first; a name that two groups have names neither."""

    def run() -> tuple[float, float, str]:
        opened = [ltx.axis_from_group(dist.new_group([0, 1]), name) for name in ("mine", "data")]
        other = (
            ltx.axis_from_group(dist.new_group([0, 1]), "twice"),
            ltx.axis_from_group(dist.new_group([0, 1]), "twice"),
        )
        try:
            text = train_on.said(AxisError, ltx.psum, torch.ones(()), "twice")
            in_scope = inside.resolve("data") is not opened[1]
            return float(ltx.psum(torch.ones(()), "mine")), float(in_scope), text
        finally:
            for axis in (*opened, *other):
                inside.close_axis(axis)

    total, in_scope, message = ranks(2).run(run).replicated()
    assert (total, in_scope) == (2.0, 1.0)
    assert "axis='twice': 2 axes are called so" in message
