"""Calls that fail: what the driver is told, how soon, and that the pool works afterwards."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ltx
from ltx.errors import WorkerError
from ltx.runtime.failures import CallFailedError, CallTimeoutError
from ltx.runtime.init import world
from ltx.runtime.pool import Pool

Ranks = Callable[[int], Pool]


class TwoArgumentsError(Exception):
    """Pickles, but doesn't unpickle: pickle calls it with the one argument that it passed on."""

    def __init__(self, first: str, second: str):
        super().__init__(f"{first} and {second}")


def _works(pool: Pool) -> bool:
    return bool(pool.run(lambda: ltx.psum(torch.ones(1))).replicated().item() == len(pool))


def test_an_exception_arrives_with_rank_type_text_and_cause(ranks: Ranks) -> None:
    def fails_on_one() -> None:
        if world().rank == 1:
            raise ValueError("no such luck")

    with pytest.raises(CallFailedError, match=r"^rank 1 of 2 raised ValueError: no such luck\n") as caught:
        ranks(2).run(fails_on_one)
    error = caught.value
    assert (error.rank, error.type_name) == (1, "ValueError")
    assert isinstance(error, WorkerError)
    assert isinstance(error.__cause__, ValueError)
    assert error.__cause__.args == ("no such luck",)
    assert 'raise ValueError("no such luck")' in error.traceback_text
    assert "in fails_on_one" in str(error)
    assert "worker.py" not in str(error), "the worker's own frames are no news"
    assert "Other ranks" not in str(error)
    assert pickle.loads(pickle.dumps(error)).rank == 1
    assert repr(ranks(2)) == "<ltx.Pool of 2: starts new workers at the next run>"
    assert _works(ranks(2))


def test_the_first_to_fail_is_shown_and_the_others_listed(ranks: Ranks) -> None:
    def fails_in_turn() -> None:
        if world().rank == 0:
            time.sleep(0.5)
        raise KeyError(f"from {world().rank}")

    with pytest.raises(CallFailedError, match=r"rank 1 of 2 raised KeyError") as caught:
        ranks(2).run(fails_in_turn, keep_on_error=True)
    assert str(caught.value).endswith("Other ranks: rank 0 raised KeyError: 'from 0'.")


def test_workers_are_kept_when_asked_for(ranks: Ranks) -> None:
    def fails() -> None:
        raise RuntimeError("everywhere")

    before = list(ranks(2).run(os.getpid))
    with pytest.raises(CallFailedError):
        ranks(2).run(fails, keep_on_error=True)
    assert list(ranks(2).run(os.getpid)) == before
    with pytest.raises(CallFailedError):
        ranks(2).run(fails)
    assert set(ranks(2).run(os.getpid)).isdisjoint(before)


@pytest.mark.parametrize("keep_on_error", [False, True])
def test_a_peer_that_waits_in_a_collective(ranks: Ranks, keep_on_error: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("pool", "failures"):
        monkeypatch.setattr(f"ltx.runtime.{module}.GRACE_S", 0.5)

    def torn() -> None:
        if world().rank == 1:
            raise ValueError("before the collective")
        ltx.psum(torch.ones(3))

    ranks(2).run(os.getpid)
    began = time.monotonic()
    with pytest.raises(CallFailedError, match=r"rank 1 of 2 raised ValueError: before") as caught:
        ranks(2).run(torn, keep_on_error=keep_on_error)
    assert time.monotonic() - began < 10
    assert "Other ranks: no answer from 0 within 0.5 s after it (waiting in a collective?)." in str(caught.value)
    assert _works(ranks(2))


def test_exceptions_that_do_not_pickle(ranks: Ranks) -> None:
    def fails() -> None:
        error = ValueError("with a lock")
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        raise error

    with pytest.raises(CallFailedError, match=r"rank [01] of 2 raised ValueError: with a lock") as caught:
        ranks(2).run(fails, keep_on_error=True)
    assert caught.value.__cause__ is None
    assert "error.lock = threading.Lock()" not in caught.value.traceback_text
    assert "raise error" in caught.value.traceback_text


def test_exceptions_that_do_not_unpickle(ranks: Ranks) -> None:
    def fails() -> None:
        raise TwoArgumentsError("this", "that")

    with pytest.raises(CallFailedError, match="raised TwoArgumentsError: this and that") as caught:
        ranks(2).run(fails, keep_on_error=True)
    assert caught.value.__cause__ is None


def test_exceptions_whose_text_raises(ranks: Ranks) -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("mute")

    def fails() -> None:
        raise MuteError

    with pytest.raises(CallFailedError, match=r"raised .*MuteError: <no text: its __str__ raised RuntimeError>"):
        ranks(2).run(fails, keep_on_error=True)


def test_results_that_do_not_pickle(ranks: Ranks) -> None:
    with pytest.raises(
        CallFailedError, match=r"raised TypeError: pickling the result, which is of type lock: cannot pickle"
    ):
        ranks(2).run(threading.Lock, keep_on_error=True)


def test_wrong_arguments(ranks: Ranks) -> None:
    with pytest.raises(CallFailedError, match=r"raised TypeError: .*takes 0 positional arguments but 1 was given"):
        ranks(2).run(lambda: None, 1, keep_on_error=True)


def test_sys_exit_ends_the_call_and_not_the_worker(ranks: Ranks) -> None:
    before = list(ranks(2).run(os.getpid))
    with pytest.raises(CallFailedError, match="raised SystemExit: 3"):
        ranks(2).run(sys.exit, 3, keep_on_error=True)
    assert list(ranks(2).run(os.getpid)) == before


def test_a_rank_that_is_killed(ranks: Ranks) -> None:
    def killed() -> None:
        if world().rank == 1:
            os.kill(os.getpid(), 9)
        ltx.psum(torch.ones(3))

    began = time.monotonic()
    with pytest.raises(
        CallFailedError, match=r"rank 1 of 2 was killed by SIGKILL .*memory.* while it ran .*killed"
    ) as caught:
        ranks(2).run(killed, keep_on_error=True)
    assert time.monotonic() - began < 10
    assert (caught.value.rank, caught.value.type_name, caught.value.__cause__) == (1, "", None)
    assert "Other ranks: rank 0 raised PeerLostError: " in str(caught.value)
    assert _works(ranks(2))


def test_a_rank_that_exits(ranks: Ranks) -> None:
    with pytest.raises(CallFailedError, match="of 2 exited with status 7 while it ran _exit"):
        ranks(2).run(os._exit, 7)
    assert _works(ranks(2))


def test_a_rank_that_ends_between_calls(ranks: Ranks) -> None:
    def end_soon() -> None:
        if world().rank == 0:
            threading.Timer(0.2, os._exit, (5,)).start()

    pid = ranks(2).run(os.getpid).rank(0)
    ranks(2).run(end_soon)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z" and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(CallFailedError, match="rank 0 of 2 exited with status 5"):
        ranks(2).run(os.getpid)
    assert _works(ranks(2))


def test_a_run_that_takes_too_long(ranks: Ranks) -> None:
    def slow_on_one() -> None:
        if world().rank == 1:
            time.sleep(40)

    ranks(2).run(os.getpid)
    began = time.monotonic()
    with pytest.raises(
        CallTimeoutError, match=r"slow_on_one didn't return on rank 1 of 2 within 1 s, while it returned on 0\."
    ) as caught:
        ranks(2).run(slow_on_one, timeout_s=1.0)
    assert time.monotonic() - began < 10
    assert isinstance(caught.value, TimeoutError)
    assert isinstance(caught.value, WorkerError)
    assert _works(ranks(2))
