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
from ltx.errors import AxisError, RankMismatchError
from ltx.extend import inner
from tests import inside
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
            texts = []
            for call in [
                lambda: ltx.axis_from_group(group, "set"),
                lambda: ltx.axis_index(group),
                *(lambda op=op: op(torch.ones(2, 4), axis=group) for op, _ in OPS.values()),
            ]:
                with pytest.raises(AxisError) as caught:
                    call()
                texts.append(str(caught.value))
            return texts, float(dist.get_rank())

    for rank, (texts, total) in enumerate(ranks(4).run(run)):
        assert total == (4.0 if rank % 2 else rank)
        assert len(texts) == (0 if rank % 2 else len(OPS) + 2)
        assert all(f"rank {rank} isn't a member of the process group" in text for text in texts)


@contextmanager
def _nested() -> Iterator[None]:
    """The worker's world, with two axes."""
    ltx.shutdown()
    try:
        with ltx.init(mesh={"node": 2, "data": 2}):
            yield
    finally:
        ltx.init()


@pytest.mark.full
def test_nested_axes(ranks: Ranks, seed: int) -> None:
    def run(xs: Tensor) -> tuple[Found, Found, int, int]:
        with _nested():
            node, data = int(ltx.axis_index("node")), int(ltx.axis_index("data"))
            return _on_rank(xs[node, data], "node"), _on_rank(xs[node, data], "data"), node, data

    xs = _draw()
    for rank, (on_node, on_data, node, data) in enumerate(ranks(4).run(run, xs)):
        assert (node, data) == divmod(rank, 2)
        _check(on_node, _expected(xs[:, data]), node)
        _check(on_data, _expected(xs[node]), data)


def _of_both(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Functions of the sum over two nested axes: gradients both ways round, and a Hessian's diagonal block."""

    def loss(x: Tensor, inner: str = "data", outer: str = "node") -> Tensor:
        weight = 1 + 2 * ltx.axis_index("node") + ltx.axis_index("data")
        return weight * ltx.psum(ltx.psum(x, inner), outer).sin().sum()

    grad = torch.func.grad(loss)
    return grad(x), grad(x, "node", "data"), torch.func.grad(lambda x: grad(x).sum())(x)


def _expected_of_both(xs: Tensor) -> list[Tensor]:
    total, weights = xs.sum((0, 1)), 10  # 1 + 2 + 3 + 4
    # The sum over ranks of the sum of each rank's gradient is 4 * weights * cos(total).
    each = [weights * total.cos(), weights * total.cos(), -4 * weights * total.sin()]
    return [y.expand_as(xs) for y in each]


@pytest.mark.full
def test_gradients_through_nested_axes(ranks: Ranks, seed: int) -> None:
    """The gradient of the sum over both is that of the global sum."""

    def run(xs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with _nested():
            return _of_both(xs[ltx.axis_index("node"), ltx.axis_index("data")])

    xs = _draw()
    for rank, found in enumerate(ranks(4).run(run, xs)):
        for a, b in zip(found, _expected_of_both(xs), strict=True):
            torch.testing.assert_close(a, b[divmod(rank, 2)])
    simulated = ltx.vmap(ltx.vmap(_of_both, axis_name="data"), axis_name="node")(xs)
    for a, b in zip(simulated, _expected_of_both(xs), strict=True):
        torch.testing.assert_close(a, b)


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
            with pytest.raises(AxisError) as caught:
                ltx.psum(torch.ones(()), "twice")
            in_scope = inside.resolve("data") is not opened[1]
            return float(ltx.psum(torch.ones(()), "mine")), float(in_scope), str(caught.value)
        finally:
            for axis in (*opened, *other):
                inside.close_axis(axis)

    total, in_scope, message = ranks(2).run(run).replicated()
    assert (total, in_scope) == (2.0, 1.0)
    assert "axis='twice': 2 axes are called so" in message


# --- `axis_index_groups`: each group is an axis of its own, on processes, simulated ranks, and axes of several names
# What is expected is the collective of a flat axis of simulated ranks, for each group by itself.


Groups = list[list[int]]

SUMS: dict[str, Callable[..., Tensor]] = {
    "psum": ltx.psum,
    "pmean": ltx.pmean,
    "pmax": ltx.pmax,
    "pmin": ltx.pmin,
}
GROUPED: dict[str, Callable[..., Tensor]] = {
    **SUMS,
    "all_gather": lambda x, *args, **named: ltx.all_gather(x, *args, dim=1, **named),
    "all_gather tiled": lambda x, *args, **named: ltx.all_gather(x, *args, tiled=True, **named),
    "psum_scatter": lambda x, *args, **named: ltx.psum_scatter(x, *args, dim=1, tiled=True, **named),
    "all_to_all": lambda x, *args, **named: ltx.all_to_all(x, 0, 1, *args, **named),
    "all_to_all untiled": lambda x, *args, **named: ltx.all_to_all(
        x.unflatten(0, (2, -1)), 0, 2, *args, tiled=False, **named
    ),
}
TILED = {name: op for name, op in GROUPED.items() if name != "all_to_all untiled"}  # which is cut for two ranks
EQUAL: Groups = [[2, 0], [1, 3]]
UNEQUAL: Groups = [[0, 3, 1], [2]]


def of_each(x: Tensor, ops: dict[str, Callable[..., Tensor]], *args: Any, **named: Any) -> dict[str, Any]:
    """Each collective's value, and the gradient of a loss that weighs the ranks by what they have."""

    def loss(x: Tensor, name: str) -> Tensor:
        return (ops[name](x, *args, **named).sin() * x[0, 0].detach()).sum()

    return {name: (op(x, *args, **named), torch.func.grad(loss)(x, name)) for name, op in ops.items()}


def expected(xs: Tensor, ops: dict[str, Callable[..., Tensor]], groups: Groups) -> list[dict[str, Any]]:
    """By rank."""
    found: dict[int, dict[str, Any]] = {}
    for group in groups:
        stacked = ltx.vmap(lambda x: of_each(x, ops))(xs[group])
        for place, rank in enumerate(group):
            found[rank] = ltx.tree.map(lambda y, place=place: y[place], stacked)
    return [found[rank] for rank in range(len(xs))]


def check(got: Any, want: list[Any]) -> None:
    for rank, entry in enumerate(want):
        torch.testing.assert_close(got(rank), entry, rtol=1e-12, atol=1e-12)


CASES = [(GROUPED, EQUAL), (SUMS, UNEQUAL), (TILED, [[3, 0, 2, 1]]), (SUMS, [[0], [1], [2], [3]])]


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
        return of_each(x, GROUPED, ("node", "data"), axis_index_groups=EQUAL)

    found = ltx.vmap(ltx.vmap(call, axis_name="data"), axis_name="node")(xs)
    check(lambda rank: ltx.tree.map(lambda y: y.flatten(0, 1)[rank], found), expected(xs.flatten(0, 1), GROUPED, EQUAL))

    ys = torch.randn(8, 4, 4, dtype=torch.float64)
    found = ltx.vmap(lambda x: of_each(x, GROUPED, inner(inside.resolve(None), 4), axis_index_groups=EQUAL))(ys)
    for node in range(2):
        mine = slice(4 * node, 4 * node + 4)
        check(lambda rank, mine=mine: ltx.tree.map(lambda y: y[mine][rank], found), expected(ys[mine], GROUPED, EQUAL))


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
    with pytest.raises(AxisError, match=r"axis_index_groups=\[\[0, 1\]\].*It has no rank 1\."):
        ltx.psum(x, axis_index_groups=[[0, 1]])


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
    with pytest.raises(AxisError) as caught:
        ltx.vmap(lambda x: ltx.psum(x, axis_index_groups=groups))(torch.ones(4))
    assert f"axis_index_groups={groups}: on axis 'data' of 4 ranks, every index from 0 to 3" in str(caught.value)
    assert str(caught.value).endswith(fault)


@pytest.mark.parametrize("name", ["all_gather", "psum_scatter", "all_to_all", "all_to_all untiled"])
def test_unequal_groups_where_shapes_would_differ(name: str) -> None:
    text = rf"{name.split()[0]}: axis_index_groups=\[\[0, 3, 1\], \[2\]\] are of unequal sizes.*psum, pmean, pmax"
    with pytest.raises(AxisError, match=text):
        ltx.vmap(lambda x: GROUPED[name](x, axis_index_groups=UNEQUAL))(torch.ones(4, 4, 4))


def test_groups_that_differ_between_ranks(ranks: Ranks) -> None:
    """Compared before a communicator is opened: to open different ones would take until the timeout."""

    def run() -> str:
        groups = [[0, 1, 2], [3]] if ltx.axis_index() else [[0], [1, 2, 3]]
        with pytest.raises(RankMismatchError) as caught:
            ltx.psum(torch.ones(1), axis_index_groups=groups)
        ltx.psum(torch.ones(1))
        return str(caught.value)

    text = ranks(4).run(run).replicated()
    assert "rank 0: axis_index_groups=[[0], [1, 2, 3]]; ranks 1, 2, 3: axis_index_groups=[[0, 1, 2], [3]]" in text


def test_one_rank_calls_something_else(on_new_axis: Callable[..., Any]) -> None:
    """Also where the groups are known already."""

    def run() -> list[str]:
        named: Any = {} if ltx.axis_index() else {"axis_index_groups": [[1, 0]]}
        found = []
        for known in (False, True):
            with pytest.raises(RankMismatchError) as caught:
                ltx.psum(torch.ones(3), **named)
            found.append(str(caught.value))
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
    compiled = torch.compile(lambda xs: ltx.vmap(f)(xs), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(xs), want)

    def run(xs: Tensor) -> Tensor:
        found: Tensor = torch.compile(f, fullgraph=True, backend="aot_eager")(xs[int(ltx.axis_index())])
        return found

    for rank, found in enumerate(ranks(4).run(run, xs)):
        torch.testing.assert_close(found, want[rank])
