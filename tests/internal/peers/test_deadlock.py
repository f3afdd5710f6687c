"""Ranks that wait for each other, or open an axis alone: all are told within seconds. Slow ones aren't such."""

from __future__ import annotations

import _thread
import linecache
import os
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

import ltx
from ltx.core.comm.channel import Channel
from ltx.errors import AxisError, CollectiveTimeoutError, DeadlockDetectedError, PeerLostError, RankMismatchError
from ltx.peers.diagnosis import ThreadWait, Told, stuck
from ltx.peers.watcher import hold_watcher
from tests.forks import SILENT_S
from tests.kinds import Started, Tell
from tests.train_on import on_ranks, raised_by, refuses, said

ONES = torch.ones(2)
CALLS: dict[str, Callable[[], object]] = {
    "pmean": lambda: ltx.pmean(ONES),
    "psum": lambda: ltx.psum(ONES),
    "all_gather": lambda: ltx.all_gather(ONES),
    "all_gather_object": lambda: ltx.all_gather_object("x"),
    "barrier": lambda: ltx.barrier(),
}
TENSORS = [("pmean", 2, False), ("psum", 3, True), ("all_gather", 2, True)]
SGD = ltx.optim.from_torch(torch.optim.SGD, lr=0.1)


def stepper() -> Callable[[], int]:
    """A training step, to be called again and again; it gives the number of steps done."""
    train = ltx.train_step(ltx.data_parallel(lambda w: w.square().sum()), SGD)
    state = train.init(torch.ones(3))

    def step() -> int:
        nonlocal state
        state, _ = train(state)
        return int(state.step)

    return step


def assert_names(text: str, ranks: str, call: str, source: str) -> None:
    found = re.search(rf"{ranks}: {call} on axis '\w+' \((\w+[ \d]*, )?test_deadlock.py:(\d+)\)", text)
    assert found, text
    assert source in linecache.getline(__file__, int(found[2])), text


@pytest.mark.full(but=1)
@pytest.mark.parametrize(("name", "size", "sockets"), [*TENSORS, ("all_gather_object", 3, False), ("barrier", 2, True)])
def test_a_collective_that_one_rank_alone_calls(name: str, size: int, sockets: bool, started: Started) -> None:
    def body(tell: Tell) -> str:
        step, call = stepper(), CALLS[name]
        for i in range(9):
            try:
                step()
                if i < 4 or ltx.world().is_global_zero:
                    call()
            except RankMismatchError as error:
                tell((i, str(error)))
                break
        # Else a rank that failed in its step would wait for the ranks that failed in the call.
        refuses(RankMismatchError, "has been out of step since an earlier failure", call)
        return "over"

    world = started(size, body, sockets=sockets)
    for rank in range(size):
        step, text = world.told(rank)
        assert step == (4 if rank == 0 else 5)
        assert text.startswith(f"rank {rank}: ranks disagree on what they call, and wait for each other: ")
        assert_names(text, "rank 0", name, f"ltx.{name}(")
        assert_names(text, "rank 1" if size == 2 else "ranks 1, 2", "step 5", "train(state)")
    assert [world.told(rank) for rank in range(size)] == ["over"] * size


@pytest.mark.full
def test_collectives_of_two_axes_in_opposite_orders(started: Started) -> None:
    def body(tell: Tell) -> None:
        axes = [ltx.axis_from_group(dist.new_group([0, 1]), name) for name in ("one", "two")]
        for axis in axes:
            ltx.psum(ONES, axis)
        for axis in axes if ltx.world().is_global_zero else reversed(axes):
            ltx.psum(ONES, axis)

    world = started(2, body)
    for rank in range(2):
        text = world.told(rank)
        assert "rank 0: psum on axis 'one' (test_deadlock.py:" in text
        assert "rank 1: psum on axis 'two' (test_deadlock.py:" in text


@pytest.mark.full
@pytest.mark.covering(1, of=lambda **_: ())
@pytest.mark.parametrize("sockets", [False, True])
def test_ranks_that_are_slow(sockets: bool, started: Started) -> None:
    """Two threads on each: one of rank 0 waits for one of rank 1 that sleeps, and another of rank 1 the other way."""

    def body(tell: Tell) -> str:
        mine = ltx.axis_from_group(dist.new_group([0, 1]), "of threads")
        rank, step = ltx.world().rank, stepper()
        step()
        began = threading.Event()

        def beside() -> None:
            ltx.psum(ONES, mine)
            began.set()
            if rank == 1:
                time.sleep(4.0)
            ltx.psum(ONES, mine)

        thread = threading.Thread(target=beside)
        thread.start()
        assert began.wait(60.0)
        if rank == 0:
            time.sleep(4.0)
        step()
        thread.join()
        return "over"

    world = started(2, body, sockets=sockets)
    assert [world.told(rank) for rank in range(2)] == ["over"] * 2


@pytest.mark.full
def test_a_peer_that_has_no_time_to_hear_that_a_step_was_left(started: Started) -> None:
    """Its process says that it waits, again and again; the thread that will hear of it comes to nothing meanwhile."""
    says_so, may_look = (get_context("fork").Event() for _ in range(2))

    def body(tell: Tell) -> int:
        fails = False

        def loss(w: torch.Tensor) -> torch.Tensor:
            if fails:
                raise ValueError("of its own")
            return w.square().sum()

        train = ltx.train_step(ltx.data_parallel(loss), SGD)
        state, _ = train(train.init(torch.ones(3)))
        look = Channel.look_around

        def late(channel: Channel, *args: Any, **kwargs: Any) -> None:
            look(channel, *args, **kwargs)
            if channel.peers.deadlocks.waits:
                says_so.set()
                may_look.wait(60.0)

        if ltx.world().is_global_zero:
            assert says_so.wait(60.0)
            threading.Timer(4.0, may_look.set).start()
            fails = True
        else:
            Channel.look_around = late  # type: ignore[method-assign]
        refuses((ValueError, DeadlockDetectedError), "of its own", train, state)
        fails = False
        ltx.init()
        return int(train(state)[0].step)

    world = started(2, body)
    assert [world.told(rank) for rank in range(2)] == [2, 2]


def waiting(thread: int, key: str, number: int, ranks: int = 2) -> ThreadWait:
    return ThreadWait(thread, 0, key, number, list(range(ranks)), f"{key} {number}")


def told(*waits: ThreadWait, **counts: tuple[int, list[int]]) -> Told:
    return Told(list(waits), counts)


def in_b(**counts: tuple[int, list[int]]) -> Told:
    return told(waiting(1, "b", 4), **counts)


IN_A = told(waiting(1, "a", 5), a=(5, [1]), b=(3, [1]))
IN_B = in_b(a=(4, [1]), b=(4, [1]))
IN_C = ThreadWait(1, 0, "c", 1, [0, 2], "c")
BOTH = {(0, 1), (1, 1)}


def in_a_ring(i: int) -> Told:
    mine, next_one = f"axis{i}", (i + 1) % 3
    wait = ThreadWait(1, 0, mine, 1, sorted([i, next_one]), mine)
    return told(wait, **{mine: (1, [1]), f"axis{(i - 1) % 3}": (0, [1])})


RING = {i: in_a_ring(i) for i in range(3)}
#: What ranks say, and which of their threads, by rank and thread, wait for each other.
STUCK: dict[str, tuple[dict[int, Told], set[tuple[int, int]]]] = {
    "each waits for what the other has not issued": ({0: IN_A, 1: IN_B}, BOTH),
    "one has issued it": ({0: IN_A, 1: in_b(a=(5, [1]), b=(4, [1]))}, set()),
    "a peer that doesn't wait may still come": ({0: IN_A, 1: Told()}, set()),
    "a thread that doesn't wait may still issue it": ({0: IN_A, 1: in_b(a=(4, [1, 2]), b=(4, [1]))}, set()),
    "nobody has issued there yet: whoever is known will": ({0: IN_A, 1: in_b(a=(0, []), b=(4, [1]))}, BOTH),
    "nobody has, and another thread is known": ({0: IN_A, 1: in_b(a=(0, []), b=(4, [1]), c=(1, [2]))}, set()),
    "ranks wait for each other, but no thread for one that waits": (
        {0: told(waiting(1, "a", 5), a=(5, [1]), b=(3, [2])), 1: told(waiting(2, "b", 4), a=(4, [1]), b=(4, [2]))},
        set(),
    ),
    "a ring of three": (RING, BOTH | {(2, 1)}),
    "of a ring the third computes, and then comes": ({**RING, 2: Told()}, set()),
    "a third that computes does not help the other two": (
        {0: told(waiting(1, "a", 5, 3), **IN_A.counts), 1: told(waiting(1, "b", 4, 3), **IN_B.counts), 2: Told()},
        BOTH,
    ),
    "who waits for those in a deadlock is in it": (
        {0: told(*IN_A.waits, **IN_A.counts, c=(0, [1])), 1: IN_B, 2: told(IN_C, c=(1, [1]))},
        BOTH | {(2, 1)},
    ),
    "an axis that a peer has closed, or not opened yet": ({0: IN_A, 1: in_b(b=(4, [1]))}, set()),
}


@pytest.mark.parametrize("row", STUCK)
def test_who_is_stuck(row: str) -> None:
    said, expected = STUCK[row]
    assert set(stuck(said)) == expected


OPENINGS: dict[str, Callable[[], Callable[[], Any]]] = {
    "ranks": lambda: lambda: ltx.axis_from_group([1, 0], "both"),
    "group": lambda: (lambda group: lambda: ltx.psum(torch.ones(1), group))(dist.new_group([0, 1])),
}


@pytest.mark.full(but=1)
@pytest.mark.parametrize("known", [True, False], ids=["a known call", "a new call"])
@pytest.mark.parametrize("opening", OPENINGS)
def test_one_rank_opens_what_its_peer_does_not(opening: str, known: bool, started: Started) -> None:
    def body(tell: Tell) -> str:
        open_it, first = OPENINGS[opening](), ltx.world().is_global_zero
        if known:
            ltx.psum(torch.ones(2))
        tell("goes on")
        tell(said(RankMismatchError, open_it if first else lambda: ltx.psum(torch.ones(2))))
        open_it()
        return "opened"

    world = started(2, body)
    assert [world.told(rank) for rank in range(2)] == ["goes on"] * 2
    for rank in range(2):
        text = world.told(rank)
        assert text.startswith(f"rank {rank}: ranks disagree on what they call, and wait for each other: rank 0: ")
        assert "opening axis " in text
        assert "(test_deadlock.py:" in text
        assert "rank 1: psum on axis 'data'" in text
    assert [world.told(rank) for rank in range(2)] == ["opened"] * 2


def test_a_peer_that_dies(started: Started) -> None:
    def body(tell: Tell) -> str:
        if not ltx.world().is_global_zero:
            tell("ends")
            time.sleep(60)
        text = r"on axis 'both', the process of rank 1 is gone.*waited for opening axis 'both'\."
        refuses(PeerLostError, text, ltx.axis_from_group, [0, 1], "both")
        tell("found")
        os._exit(0)  # to end in order would be to wait for the peer

    world = started(2, body, heartbeat_s=SILENT_S)
    assert world.told(1) == "ends"
    world.processes[1].kill()
    assert world.told(0) == "found"


@pytest.mark.full(but=2)
@pytest.mark.parametrize(
    ("raises", "text"),
    [
        (False, "PeerLostError: rank 0: opening axis 'both' failed: rank 1 has ended its part of the world in good"),
        (True, "DeadlockDetectedError: rank 0: rank 1 has left axis 'both' because of an exception (ValueError: x)"),
    ],
    ids=["returns", "raises"],
)
def test_a_peer_whose_world_has_ended(raises: bool, text: str, started: Started) -> None:
    """Though its process may live on."""

    def body(tell: Tell) -> None:
        if ltx.world().is_global_zero:
            return tell(raised_by(ltx.axis_from_group, [0, 1], "both"))
        for _ in range(20):  # of which its record doesn't tell any more
            ltx.axis_from_group([1]).comm.close()
        if raises:
            raise ValueError("x")

    assert started(2, body).told(0).startswith(text)


@on_ranks(2)
def test_torch_knows_the_backend_of_a_group_that_some_ranks_make() -> None:
    """It asks for that when the group ends, and else warns on every rank that there is no backend of type 0."""
    with ltx.axis_from_group([0, 1]) as axis:
        assert axis.comm.group.name() == "gloo"


def heartbeat_users() -> int:
    heartbeat = hold_watcher(c10d._get_default_store(), dist.get_rank(), 1000.0)
    heartbeat.release()
    return heartbeat.users


def interrupted() -> None:
    timer = threading.Timer(0.5, _thread.interrupt_main)
    timer.start()
    said(KeyboardInterrupt, ltx.axis_from_group, [0, 1])
    timer.join()


def timed_out() -> None:
    text = r"rank 0: opening axis 'ranks \[0, 1\], 1': ranks \[1\] didn't come to open it too within 3 s\. All of its "
    refuses(CollectiveTimeoutError, text, ltx.axis_from_group, [0, 1])


@pytest.mark.parametrize("give_up", [interrupted, timed_out])
def test_a_rank_that_has_given_up_leaves_nothing_and_tries_again(give_up: Callable[[], None], started: Started) -> None:
    def body(tell: Tell) -> float:
        first = ltx.world().is_global_zero
        store, users = c10d._get_default_store(), heartbeat_users()
        if first:
            give_up()
            assert heartbeat_users() == users
            refuses(AxisError, "no axis called", ltx.psum, torch.ones(1), "ranks [0, 1], 1")
            store.set("has given up", "")
        store.wait(["has given up"], timedelta(seconds=60))
        with ltx.axis_from_group([0, 1]) as both:
            assert both.name == "ranks [0, 1], 1"
            return float(ltx.psum(torch.ones(()), both))

    world = started(2, body, timeout_s=3.0 if give_up is timed_out else 60.0)
    assert [world.told(rank) for rank in range(2)] == [2.0, 2.0]
