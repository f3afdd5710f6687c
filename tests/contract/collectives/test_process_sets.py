"""Axes over some ranks of the world: opened by these alone, with or without a name, and closed again."""

from __future__ import annotations

import gc
import re
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ltx
from ltx.errors import AxisError
from tests import inside
from tests.forks import open_now, settles
from tests.kinds import Ranks
from tests.train_on import on_ranks, refuses, said


def test_a_set_of_ranks(ranks: Ranks, seed: int) -> None:
    def run() -> Any:
        rank = ltx.world().rank
        mine = [0, 2] if rank != 1 else [1]
        with ltx.axis_from_group(mine) as axis:
            inside = (ltx.psum(torch.tensor(rank), axis), ltx.psum(torch.tensor(rank), axis.name), axis.size)
            grad = ltx.grad(ltx.data_parallel(lambda w: w * (rank + 1.0), axis=axis))(torch.tensor(1.0))
        return *(x.item() for x in inside[:2]), inside[2], grad.item(), ltx.psum(torch.tensor(rank)).item()

    assert list(ranks(3).run(run)) == [(2, 2, 2, 2.0, 3), (1, 1, 1, 2.0, 3), (2, 2, 2, 2.0, 3)]


def test_ranks_in_another_order(ranks: Ranks) -> None:
    def run() -> Any:
        with ltx.axis_from_group([1, 0]) as axis:
            return ltx.axis_index(axis).item(), ltx.all_gather(torch.tensor(ltx.world().rank), axis).tolist()

    assert list(ranks(2).run(run)) == [(1, [1, 0]), (0, [1, 0])]


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


def test_what_is_closed_says_so(ranks: Ranks) -> None:
    def run() -> list[str]:
        group = dist.new_group([0, 1])
        texts = []
        for axis in (ltx.axis_from_group([0, 1], "closed"), ltx.axis_from_group(group)):
            ltx.psum(torch.ones(1), axis)
            axis.close()
            axis.close()
            texts.append(said(AxisError, ltx.psum, torch.ones(1), axis))
        with ltx.axis_from_group(group) as again:  # the group is its user's
            texts.append(str(float(ltx.psum(torch.ones(1), again))))
        dist.destroy_process_group(group)
        return texts

    one, two, again = ranks(2).run(run).replicated()
    assert one == "axis 'closed' is closed: by its close(), the end of its `with`, or of its world."
    assert re.fullmatch(r"axis '\w+' is closed: .*", two)
    assert again == "2.0"


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


def test_the_worlds_axis_by_its_name_stays_open(ranks: Ranks) -> None:
    def run() -> Any:
        (world,) = inside.axes_in_scope()
        with ltx.axis_from_group(dist.group.WORLD, world.name) as axis:
            same = axis.comm is world.comm
        return same, float(ltx.psum(torch.tensor(1.0)))

    assert ranks(2).run(run).replicated() == (True, 2.0)


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
