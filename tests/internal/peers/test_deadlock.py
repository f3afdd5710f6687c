"""Ranks that wait for each other: found within seconds, on every rank. Ranks that are slow aren't taken for such."""

from __future__ import annotations

import linecache
import re
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ltx
from ltx.core.comm.channel import Channel
from ltx.errors import DeadlockDetectedError, RankMismatchError
from ltx.peers.diagnosis import ThreadWait, Told, stuck
from tests.kinds import Started, Tell
from tests.train_on import refuses

ONES = torch.ones(2)
CALLS: dict[str, Callable[[], object]] = {
    "pmean": lambda: ltx.pmean(ONES),
    "psum": lambda: ltx.psum(ONES),
    "all_gather": lambda: ltx.all_gather(ONES),
    "all_gather_object": lambda: ltx.all_gather_object("x"),
    "barrier": lambda: ltx.barrier(),
}


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
@pytest.mark.parametrize(
    ("name", "size", "sockets"),
    [
        ("pmean", 2, False),
        ("psum", 3, True),
        ("all_gather", 2, True),
        ("all_gather_object", 3, False),
        ("barrier", 2, True),
    ],
)
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
            if channel.peers.deadlocks._waits:
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
        {
            0: told(waiting(1, "a", 5, 3), a=(5, [1]), b=(3, [1])),
            1: told(waiting(1, "b", 4, 3), a=(4, [1]), b=(4, [1])),
            2: Told(),
        },
        BOTH,
    ),
    "who waits for those in a deadlock is in it": (
        {
            0: Told(IN_A.waits, {**IN_A.counts, "c": (0, [1])}),
            1: IN_B,
            2: Told([ThreadWait(1, 0, "c", 1, [0, 2], "c")], {"c": (1, [1])}),
        },
        BOTH | {(2, 1)},
    ),
    "an axis that a peer has closed, or not opened yet": ({0: IN_A, 1: in_b(b=(4, [1]))}, set()),
}


@pytest.mark.parametrize("row", STUCK)
def test_who_is_stuck(row: str) -> None:
    said, expected = STUCK[row]
    assert set(stuck(said)) == expected
