"""Turns: one thread runs at a time, in order; nothing that goes wrong leaves one waiting."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ltx.core.comm import Signature, ThreadRanks, Turns
from ltx.errors import PeerLostError, RankMismatchError

MEET = Signature("meet", ())


def nothing_aside() -> Callable[[], None]:
    return lambda: None


def comm_of(turns: Turns, rank: int) -> ThreadRanks:
    return ThreadRanks(turns, "data", tuple(range(turns.size)), rank)


def test_what_a_rank_has_put_aside_comes_back() -> None:
    current = [-1]

    def set_aside() -> Callable[[], None]:
        mine = current[0]

        def come_back() -> None:
            current[0] = mine

        return come_back

    turns = Turns(4, set_aside)

    def f(rank: int) -> None:
        current[0] = rank
        for _ in range(3):
            comm_of(turns, rank).exchange(MEET)
            assert current == [rank]

    turns.run(f)


def test_results_are_computed_without_the_last_ranks_modes() -> None:
    turns = Turns(2, nothing_aside)
    w = torch.ones(2, requires_grad=True)

    def f(rank: int) -> Any:
        with torch.autocast("cpu", enabled=rank == 1):
            return comm_of(turns, rank).combined(MEET, w, lambda ws: [ws[0] @ ws[1].unsqueeze(1)] * 2)

    results = turns.run(f)
    assert all(x.dtype == torch.float32 and not x.requires_grad for x in results)


def test_an_error_of_what_is_computed_is_raised_on_every_rank() -> None:
    turns, caught = Turns(2, nothing_aside), list[str]()

    def f(rank: int) -> None:
        try:
            comm_of(turns, rank).combined(MEET, rank, lambda values: [1 / x for x in values])
        except ZeroDivisionError as error:
            caught.append(str(error))

    turns.run(f)
    assert caught == ["division by zero"] * 2


def test_announced_calls_are_compared() -> None:
    turns, caught = Turns(2, nothing_aside), list[str]()

    def f(rank: int) -> None:
        comm = comm_of(turns, rank)
        for _ in range(1 + rank):
            comm.confirm(lambda: "step", lambda: Signature("step", ()))
        try:
            comm.exchange(MEET)
        except RankMismatchError as error:
            caught.append(str(error))
        comm.exchange(MEET)  # what was announced is forgotten

    turns.run(f)
    assert caught == [caught[0]] * 2
    assert "ranks disagree on the operation: rank 0: meet; rank 1: step" in caught[0]


def test_ranks_that_swallow_errors_come_to_an_end() -> None:
    turns = Turns(3, nothing_aside)
    lost = list[int]()

    def f(rank: int) -> None:
        if rank == 1:
            raise KeyError
        for _ in range(5):
            try:
                comm_of(turns, rank).exchange(MEET)
            except PeerLostError:
                lost.append(rank)

    with pytest.raises(KeyError):
        turns.run(f)
    assert lost == [0] * 5  # rank 2 had not begun


def test_threads_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, list[str]()

    def at_most_two(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", at_most_two)
    turns, ran = Turns(4, nothing_aside), list[int]()
    with pytest.raises(RuntimeError, match="can't start new thread"):
        turns.run(ran.append)
    assert (started, ran) == (["ltx rank 0", "ltx rank 1"], [])
    started[:] = ["none", "at all"]
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Turns(2, nothing_aside).run(ran.append)


def test_a_second_interrupt_leaves_at_once() -> None:
    """Also where the rank that runs never comes to a call."""
    turns, go_on = Turns(2, nothing_aside), threading.Event()
    main = threading.main_thread().ident or 0

    def f(rank: int) -> None:
        for _ in range(2):
            signal.pthread_kill(main, signal.SIGINT)
            while turns._failure is None:  # the first one was seen
                go_on.wait(0.001)
        go_on.wait()

    with pytest.raises(KeyboardInterrupt):
        turns.run(f)
    assert turns.closed
    go_on.set()
    for thread in threading.enumerate():
        if thread.name.startswith("ltx rank"):
            thread.join(60)
            assert not thread.is_alive()
