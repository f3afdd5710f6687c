"""Every collective on axes that aren't the whole world: subgroups, nested axes, mesh dimensions, simulated ranks.

Axes of subgroups have two ranks. The world is a table of 2 x 2, rank r at ``divmod(r, 2)``: an axis "data" goes along
a row of it, "node" along a column. Each is compared with plain torch on the stack of its ranks' tensors.
"""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ltx
from ltx.errors import AxisError
from tests import inside, train_on
from tests.contract.conformance.test_properties import each_fixed
from tests.forks import open_now, settles
from tests.kinds import Ranks
from tests.train_on import on_ranks, refuses, said

Found = dict[str, tuple[Tensor, Tensor]]


#: `src`, `dst` and `perm` count on the axis.
OPS = each_fixed(2, dim=1) | {
    "AllGatherGrad": (lambda x, axis: ltx.AllGatherGrad.apply(x, axis), lambda xs: xs.expand(2, *xs.shape))
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
    for rank, (found, index, size, of_rows, uneven) in enumerate(ranks(4).run(run, xs)):
        row, place = divmod(rank, 2)
        assert (index, size, of_rows) == (row, 2, [place, place + 2])
        _check(found, _expected(xs[:, place]), row)
        assert all(torch.equal(part, xs[r, place][: 1 + r]) for r, part in enumerate(uneven))
    assert ranks(4).run(lambda: ltx.psum(torch.ones(()))).replicated().item() == 4.0, "the world is as it was"


def test_a_rank_outside_says_so(ranks: Ranks) -> None:
    """Horovod's process set is an axis over some of the ranks."""

    def run() -> tuple[list[str], float]:
        with _subgroups([1, 3]) as (group,):
            if dist.get_rank() % 2:
                return [], float(ltx.psum(torch.tensor(float(dist.get_rank())), ltx.axis_from_group(group, "set")))
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
    found = ltx.vmap(ltx.vmap(run, axis_name="data"), axis_name="node")(xs)
    for row, column in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        on_node, on_data = ltx.tree.map(lambda y, at=(row, column): y[at], found)
        _check(on_node, _expected(xs[:, column]), row)
        _check(on_data, _expected(xs[row]), column)


def test_simulated_ranks_on_each_process(ranks: Ranks, seed: int) -> None:
    """Between processes every simulated rank does its own; and on the simulated axis every process."""

    def run(xs: Tensor) -> tuple[Found, Found]:
        mine = xs[ltx.axis_index("data")]
        return ltx.vmap(lambda x: (_on_rank(x, "data"), _on_rank(x, "simulated")), axis_name="simulated")(mine)

    xs = _draw()
    for rank, found in enumerate(ranks(2).run(run, xs)):
        for entry in range(2):
            on_processes, on_simulated = ltx.tree.map(lambda y, entry=entry: y[entry], found)
            _check(on_processes, _expected(xs[:, entry]), rank)
            _check(on_simulated, _expected(xs[rank]), entry)


@on_ranks(2)
def test_an_axis_is_found_by_its_name() -> None:
    """Axes in scope come first; a name that two groups have names neither."""
    opened = [ltx.axis_from_group(dist.new_group([0, 1]), name) for name in ("mine", "data", "twice", "twice")]
    try:
        refuses(AxisError, "axis='twice': 2 axes are called so", ltx.psum, torch.ones(()), "twice")
        assert inside.resolve("data") is not opened[1]
        assert ltx.psum(torch.ones(()), "mine") == 2.0
    finally:
        for axis in opened:
            inside.close_axis(axis)


@on_ranks(3)
def test_a_set_of_ranks() -> None:
    rank = ltx.world().rank
    members, total, mean = ([1], 1, 2.0) if rank == 1 else ([0, 2], 2, 2.0)
    with ltx.axis_from_group(members) as axis:
        sums = [ltx.psum(torch.tensor(rank), of).item() for of in (axis, axis.name)]
        grad = ltx.grad(ltx.data_parallel(lambda w: w * (rank + 1.0), axis=axis))(torch.tensor(1.0))
    assert (sums, axis.size, grad.item(), ltx.psum(torch.tensor(rank)).item()) == ([total] * 2, len(members), mean, 3)


@on_ranks(2)
def test_ranks_in_another_order() -> None:
    rank = ltx.world().rank
    with ltx.axis_from_group([1, 0]) as axis:
        assert (ltx.axis_index(axis), ltx.all_gather(torch.tensor(rank), axis).tolist()) == (1 - rank, [1, 0])


@on_ranks(2)
def test_what_is_closed_leaves_no_threads_and_files() -> None:
    """Though what was planned and differentiated on it may still refer to it."""
    mine, seen = dist.new_group([0, 1]), []
    for _ in range(3):
        for group in ([0, 1], mine):
            with ltx.axis_from_group(group, "closed") as axis:
                ltx.grad(ltx.data_parallel(lambda w: (w**2).sum(), axis=axis))(torch.ones(3))
                ltx.psum(torch.ones(4), axis, axis_index_groups=[[0], [1]])
        seen.append(axis)
        if len(seen) == 1:
            first = settles(open_now, lambda now: False, 1.0)
    last = settles(open_now, lambda now: sum(now.values()) <= sum(first.values()))
    again = float(ltx.psum(torch.ones(()), mine))
    dist.destroy_process_group(mine)

    more = sum(last.values()) - sum(first.values())
    assert more <= 0
    assert again == 2.0


@on_ranks(2)
def test_what_is_closed_says_so() -> None:
    group = dist.new_group([0, 1])
    for axis, name in ((ltx.axis_from_group([0, 1], "closed"), "closed"), (ltx.axis_from_group(group), r"\w+")):
        ltx.psum(torch.ones(1), axis)
        axis.close()
        axis.close()
        text = rf"^axis '{name}' is closed: by its close\(\), the end of its `with`, or of its world\.$"
        refuses(AxisError, text, ltx.psum, torch.ones(1), axis)
    with ltx.axis_from_group(group) as again:  # the group is its user's
        assert ltx.psum(torch.ones(1), again) == 2.0
    dist.destroy_process_group(group)


@pytest.mark.parametrize(
    ("group", "text"),
    [
        ([0, 0], "expected different ranks from 0 to 1, got [0, 0]"),
        ([0, 2], "expected different ranks from 0 to 1, got [0, 2]"),
        ([], "expected different ranks from 0 to 1, got []"),
        (["0"], "expected different ranks from 0 to 1, got ['0']"),
        ("01", "takes a torch.distributed process group or ranks, and a name, got '01' and None"),
    ],
)
def test_what_is_no_set(ranks: Ranks, group: Any, text: str) -> None:
    assert text in ranks(2).run(said, AxisError, ltx.axis_from_group, group).replicated()


def test_only_members_may_call(ranks: Ranks) -> None:
    def run() -> str:
        try:
            with ltx.axis_from_group([0], "mine") as axis:
                return str(axis.size)
        except AxisError as error:
            return str(error)

    assert list(ranks(2).run(run)) == ["1", "axis_from_group: rank 1 isn't among ranks [0]. Only these may call it."]


def test_a_world_of_one() -> None:
    with ltx.axis_from_group([0]) as axis:
        assert ltx.psum(torch.tensor(3.0), axis) == 3.0
    with pytest.raises(AxisError, match=re.escape("ranks are those of a world that is up. Call ltx.init() first")):
        ltx.axis_from_group([0, 1])


@on_ranks(2)
def test_a_group_by_two_names() -> None:
    """Each has its own channels; both are found, and to close one leaves the other and no thread behind."""
    threads = threading.active_count()
    group = dist.new_group([0, 1])
    one, two = (ltx.axis_from_group(group, name) for name in ("one", "two"))
    sums = [float(ltx.psum(torch.tensor(k), axis)) for k, axis in enumerate(("one", "two", group, one, two))]
    one.close()
    refuses(AxisError, "'one' is closed", ltx.psum, torch.ones(1), one)
    sums.append(float(ltx.psum(torch.tensor(5), "two")))
    two.close()
    left = [axis.name for axis in inside.open_axes() if axis.name in ("one", "two")]
    dist.destroy_process_group(group)
    del group, one, two
    gc.collect()

    assert (sums, left, threading.active_count() <= threads) == ([0.0, 2.0, 4.0, 6.0, 8.0, 10.0], [], True)


@on_ranks(2)
def test_the_worlds_axis_by_its_name_stays_open() -> None:
    (world,) = inside.axes_in_scope()
    with ltx.axis_from_group(dist.group.WORLD, world.name) as axis:
        assert axis.comm is world.comm
    assert ltx.psum(torch.tensor(1.0)) == 2.0


@pytest.mark.full
def test_groups_and_meshes_wait_as_long_as_the_world() -> None:
    """Its timeout and heartbeat, not the defaults, which would lower the process' own."""

    def run() -> Any:
        world = ltx.world()
        ltx.shutdown()
        limits = []
        with ltx.init(timeout=77, heartbeat_timeout=33):
            mesh = dist.device_mesh.init_device_mesh("cpu", (world.size,), mesh_dim_names=("rows",))
            group = dist.new_group([0, 1])
            with ltx.axis_from_group([1, 0]) as ranked, ltx.axis_from_group(group) as grouped:
                for axis in (None, ranked, grouped, mesh):
                    comm = inside.resolve(axis).comm
                    limits.append((comm.user.timeout_s, comm.peers.heartbeat_s))
        return limits

    assert ltx.launch(run, 2, start_method="fork", timeout=60.0) == [[(77.0, 33.0)] * 4] * 2
