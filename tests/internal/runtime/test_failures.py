"""Calls that fail: what the driver is told, how soon, and that the pool works afterwards."""

from __future__ import annotations

import io
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

import ltx
from ltx import Pool, init, shutdown, world
from ltx.core import comm
from ltx.errors import CallFailedError, CallInterruptedError, CallTimeoutError, InputError, WorkerError
from ltx.runtime import worker_group
from ltx.runtime.failures import failure_error, failure_of, text_of
from ltx.runtime.messages import Failure, Result, pack
from ltx.runtime.tracebacks import place_of
from tests.forks import settles
from tests.kinds import Ranks
from tests.train_on import refuses, said


def _works(pool: Pool) -> bool:
    return bool(pool.run(lambda: ltx.psum(torch.ones(1))).replicated().item() == len(pool))


def test_an_exception_arrives_with_rank_type_text_and_cause(ranks: Ranks) -> None:
    def fails_on_one() -> None:
        torch.ltx_test_note = os.getpid()  # type: ignore[attr-defined]
        if world().rank == 1:
            raise ValueError("no such luck")

    before = list(ranks(2).run(os.getpid))
    with pytest.raises(CallFailedError, match=r"^rank 1 of 2 raised ValueError: no such luck\n") as caught:
        ranks(2).run(fails_on_one)
    error = caught.value
    assert (error.rank, error.type_name) == (1, "ValueError")
    assert isinstance(error, WorkerError)
    assert isinstance(error.__cause__, ValueError)
    assert error.__cause__.args == ("no such luck",)
    assert 'raise ValueError("no such luck")' in error.traceback_text
    assert "in fails_on_one" in str(error)
    assert "worker.py" not in str(error), "ltx's own frames are no news"
    assert "Other ranks" not in str(error)
    assert pickle.loads(pickle.dumps(error)).rank == 1
    assert list(ranks(2).run(lambda: torch.__dict__.pop("ltx_test_note"))) == before, "workers keep their state"
    assert _works(ranks(2))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers of a rank that has failed get to say what came of it, however slow the machine is."""
    monkeypatch.setattr(worker_group, "PATIENCE_S", 30.0)


@pytest.mark.usefixtures("patient")
def test_the_first_to_fail_is_shown_and_the_others_listed(ranks: Ranks, tmp_path: Path) -> None:
    def fails_in_turn() -> None:
        if world().rank == 1:
            (tmp_path / "first").touch()
        else:
            assert settles((tmp_path / "first").exists, bool)
            time.sleep(0.1)
        raise KeyError(f"from {world().rank}")

    with pytest.raises(CallFailedError, match=r"rank 1 of 2 raised KeyError") as caught:
        ranks(2).run(fails_in_turn)
    assert str(caught.value).endswith("Other ranks: rank 0 raised KeyError: 'from 0'.")


def test_what_comes_of_a_peers_failure_is_not_the_first_even_if_it_came_first() -> None:
    def failed(kind: str, at_s: float) -> Failure:
        return Failure(kind, f"of {kind}", "", at_s)

    def first(*answers: Any) -> int:
        error = failure_error("f", dict(enumerate(answers)), range(3), 3, None, kept=None)
        assert isinstance(error, CallFailedError)
        return error.rank

    assert first(failed("DeadlockDetectedError", 1.0), failed("KeyError", 3.0), failed("OSError", 2.0)) == 2
    assert first(failed("PeerLostError", 2.0), failed("PeerLostError", 1.0), Result(None)) == 1
    # torch's words for a peer that is gone are those of any RuntimeError
    assert first(failed("RuntimeError", 1.0), "was killed by SIGKILL", failed("PeerLostError", 0.5)) == 1


def test_an_interrupt_while_others_give_up_interrupts_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group(worker_group.WorkerGroup):
        """Two workers: one fails, and the user interrupts the wait for the other, twice."""

        answers: ClassVar[list[dict[int, Any]]] = [{0: Failure("ValueError", "", "", 0.0)}]

        def __init__(self) -> None:
            self.size, self._output = 2, worker_group.Output(2)

        def send(self, *_: Any) -> bool:
            return True

        def receive(self, *_: Any) -> dict[int, Any]:
            if not self.answers:
                raise KeyboardInterrupt
            return self.answers.pop()

    monkeypatch.setattr(worker_group, "PATIENCE_S", 0.0)
    with pytest.raises(CallInterruptedError, match=r"f was interrupted: .*in code that Python") as caught:
        Group().collect(1, pack(None), [0, 1], "f", None, 3.0)
    assert not caught.value.kept


def test_a_workers_traceback_points_at_what_pythons_own_does() -> None:
    def fails(values: dict[str, int]) -> int:
        return values["there"] + values["missing"] + values["there"]

    with pytest.raises(KeyError) as caught:
        fails({"there": 1})
    assert text_of(caught.value) == "".join(traceback.format_exception(caught.value))


@pytest.mark.full
def test_a_rank_that_prints_without_end_is_not_waited_for_without_end() -> None:
    def flood() -> None:
        while True:
            os.write(1, b"y" * 1000 + b"\n")

    with Pool(1, show_output=True) as pool, redirect_stdout(io.StringIO()):
        refuses(CallTimeoutError, r"within 3 s: rank 0 was .* in flood", pool.run, flood, timeout_s=3.0)
        assert _works(pool)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("sockets", [False, True])
def test_a_peer_that_waits_in_a_collective_is_told_at_once(ranks: Ranks, sockets: bool) -> None:
    def one_fails() -> None:
        if sockets:
            os.environ["LTX_SHARED_MEMORY"] = "0"
            shutdown()
            init()
            ltx.psum(torch.ones(3))
        if world().rank == 1:
            raise ValueError("before the collective")
        ltx.psum(torch.ones(3))

    before = list(ranks(2).run(os.getpid))
    try:
        with pytest.raises(CallFailedError, match=r"rank 1 of 2 raised ValueError: before") as caught:
            ranks(2).run(one_fails)
        assert _works(ranks(2))
    finally:
        ranks(2).run(lambda: os.environ.pop("LTX_SHARED_MEMORY", None))
    assert "Other ranks: rank 0 raised DeadlockDetectedError: rank 0: rank 1 has left axis 'data'" in str(caught.value)
    assert "(ValueError: before the collective)" in str(caught.value)
    assert list(ranks(2).run(os.getpid)) == before


STAYS = r"rank 0 didn't give up \(it "


@pytest.mark.full
@pytest.mark.parametrize("stubborn", [False, True])
def test_a_peer_that_computes_is_asked_to_give_up(stubborn: bool, ranks: Ranks) -> None:
    def endless() -> None:
        if world().rank == 1:
            raise ValueError("on one")
        while True:
            with suppress(BaseException) if stubborn else nullcontext():
                time.sleep(0.01)

    before = list(ranks(2).run(os.getpid))
    with pytest.raises(CallFailedError, match=r"rank 1 of 2 raised ValueError: on one") as caught:
        ranks(2).run(endless)
    at, said = r"at test_failures\.py:\d+ in endless: ", str(caught.value)
    if stubborn:
        assert re.search(rf"{STAYS}catches KeyboardInterrupt, as BaseException, and goes on, {at}", said)
        assert "can't interrupt" not in said
        assert _works(ranks(2))
    else:
        assert re.search(rf"Other ranks: rank 0 was given up {at}time\.sleep\(0\.01\)", said)
        assert list(ranks(2).run(os.getpid)) == before


@pytest.mark.full
@pytest.mark.parametrize(("grace_s", "kept"), [(0.5, False), (3.0, False), (40.0, True)])
def test_patience_is_the_pools(grace_s: float, kept: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """With code that Python can't interrupt; where it is more than a second, it is told first what will be lost."""

    def stuck() -> None:
        if world().rank == 1:
            raise ValueError("on one")
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        time.sleep(4 if kept else 60)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])

    with Pool(2, grace_s=grace_s) as pool:
        before = list(pool.run(os.getpid))
        with pytest.raises(CallFailedError, match=r"rank 1 of 2 raised ValueError: on one") as caught:
            pool.run(stuck)
        assert (repr(pool) == "<ltx.Pool of 2: starts new workers at the next run>") != kept
        after = list(pool.run(os.getpid))
        assert after == before if kept else set(after).isdisjoint(before)
    stays = STAYS + r"is in code that Python can't interrupt, at test_failures\.py:\d+ in stuck: time\.sleep\("
    if not kept:
        assert re.search(stays + r"4 if kept else 60\)\)", str(caught.value))
        assert "The workers were ended, with what they had kept" in str(caught.value)
    said = capfd.readouterr().err
    assert ("Unless they end within" in said) == bool(re.search(stays, said)) == (grace_s > 1)


@pytest.mark.full
def test_a_rank_that_only_takes_a_while_is_no_reason_to_warn(capfd: pytest.CaptureFixture[str]) -> None:
    """As on a busy machine: it is kept from running when it is asked to give up."""

    def slow(peer: int) -> None:
        if world().rank == 1:
            os.kill(peer, signal.SIGSTOP)
            raise ValueError("on one")
        while True:
            time.sleep(0.01)

    with Pool(2, grace_s=40.0) as pool:
        before = list(pool.run(os.getpid))
        again = threading.Timer(1.8, os.kill, (before[0], signal.SIGCONT))
        again.start()
        refuses(CallFailedError, r"rank 1 of 2 raised ValueError: on one", pool.run, slow, before[0])
        again.join()
    assert "interrupt" not in capfd.readouterr().err


def test_what_is_no_function(ranks: Ranks) -> None:
    with pytest.raises(ltx.errors.ArgumentError, match=r"ltx\.Pool: what workers run must be a function, got 'print'"):
        ranks(2).run("print")  # type: ignore[arg-type]


class TwoArgumentsError(Exception):
    """Pickles, but doesn't unpickle: pickle calls it with the one argument that it passed on."""

    def __init__(self, first: str, second: str):
        super().__init__(f"{first} and {second}")


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("mute")


def _with_a_lock() -> None:
    error = ValueError("with a lock")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    raise error


def _of_two_arguments() -> None:
    raise TwoArgumentsError("this", "that")


def _mute() -> None:
    raise MuteError


#: What is called, with which arguments; what is said.
RAISED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "input": (input, (), r"UnsupportedError: input\('.*'\): a worker has no keyboard"),
    "breakpoint": (breakpoint, (), r"UnsupportedError: input\('.*'\): a worker has no keyboard"),
    "an exception that doesn't pickle": (_with_a_lock, (), "ValueError: with a lock\n"),
    "one that doesn't unpickle": (_of_two_arguments, (), "TwoArgumentsError: this and that"),
    "one whose text raises": (_mute, (), ".*MuteError: <no text: its __str__ raised RuntimeError>"),
    "a result": (threading.Lock, (), "TypeError: pickling the result, which is of type lock: cannot pickle"),
    "wrong arguments": (lambda: None, (1,), "TypeError: .*takes 0 positional arguments but 1 was given"),
    "sys.exit": (sys.exit, (3,), "SystemExit: 3"),
}


@pytest.mark.parametrize("name", RAISED)
def test_what_is_said_of_an_exception(name: str, ranks: Ranks) -> None:
    """It ends the call, and not the worker."""
    call, arguments, said = RAISED[name]
    before = list(ranks(2).run(os.getpid))
    with pytest.raises(CallFailedError, match=f"rank [01] of 2 raised {said}") as caught:
        ranks(2).run(call, *arguments)
    if name in ("an exception that doesn't pickle", "one that doesn't unpickle"):
        assert caught.value.__cause__ is None
        assert "    raise " in caught.value.traceback_text
        assert "error.lock = threading.Lock()" not in caught.value.traceback_text
    assert list(ranks(2).run(os.getpid)) == before


@pytest.mark.usefixtures("patient")
def test_a_rank_that_is_killed(ranks: Ranks) -> None:
    def killed() -> None:
        if world().rank == 1:
            os.kill(os.getpid(), 9)
        ltx.psum(torch.ones(3))

    text = r"rank 1 of 2 was killed by SIGKILL .*memory.* while it ran .*killed"
    with pytest.raises(CallFailedError, match=text) as caught:
        ranks(2).run(killed)
    assert (caught.value.rank, caught.value.type_name, caught.value.__cause__) == (1, "", None)
    assert "Other ranks: rank 0 raised PeerLostError: " in str(caught.value)
    assert _works(ranks(2))


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux tells that a process is stopped")
def test_a_rank_that_is_stopped(ranks: Ranks) -> None:
    def stopped() -> None:
        if world().rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        ltx.psum(torch.ones(3))

    before = list(ranks(2).run(os.getpid))
    with pytest.raises(CallFailedError, match=r"rank 1 of 2 has been stopped \(SIGSTOP, or Ctrl-Z\)") as caught:
        ranks(2).run(stopped)
    assert "rank 0 was given up at test_failures.py" in str(caught.value)
    assert _works(ranks(2))
    assert set(ranks(2).run(os.getpid)).isdisjoint(before)
    assert not any(Path(f"/proc/{pid}").exists() for pid in before), "ended, and reaped"


@pytest.mark.full
def test_a_rank_that_ends_between_calls(ranks: Ranks) -> None:
    def end_soon() -> None:
        if world().rank == 0:
            threading.Timer(0.2, os._exit, (5,)).start()

    pid = ranks(2).run(os.getpid).rank(0)
    ranks(2).run(end_soon)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # all of its threads: until then its pipe is open
    refuses(CallFailedError, "rank 0 of 2 exited with status 5 before it could run getpid", ranks(2).run, os.getpid)
    assert _works(ranks(2))


@pytest.mark.full
def test_a_run_that_takes_too_long(ranks: Ranks) -> None:
    def slow_on_one() -> None:
        if world().rank == 1:
            time.sleep(40)

    ranks(2).run(os.getpid)
    text = r"slow_on_one didn't return on rank 1 of 2 within 5 s, while it returned on 0: rank 1 was at test_failures"
    with pytest.raises(CallTimeoutError, match=text + r"\.py:\d+ in slow_on_one: time\.sleep\(40\)") as caught:
        ranks(2).run(slow_on_one, timeout_s=5.0)
    assert isinstance(caught.value, TimeoutError)
    assert isinstance(caught.value, WorkerError)
    assert _works(ranks(2))


@pytest.mark.parametrize("limit", ["1", 0, -1.0, float("nan"), timedelta(0)])
def test_a_limit_that_is_none_leaves_the_pool_as_it_is(limit: Any, ranks: Ranks) -> None:
    pool, pids = ranks(2), ranks(2).pids
    for _ in range(2):
        with pytest.raises(InputError, match=r"timeout_s must be a number of seconds or a datetime\.timedelta"):
            pool.run(world, timeout_s=limit)
    assert (list(pool.run(lambda: world().rank, timeout_s=timedelta(minutes=1))), pool.pids) == ([0, 1], pids)


def test_a_pool_of_wrong_arguments_starts_nothing() -> None:
    for name, value in {"threads": 0, "start_timeout_s": 0, "timeout_s": "5", "grace_s": -1}.items():
        refuses(InputError, f"ltx.Pool: {name} must be", Pool, 1, **{name: value})


def test_the_place_of_a_failure_is_no_method_of_a_dataclass() -> None:
    """Python has generated it; without a file it would count as the user's."""
    of_ltx = str(Path(ltx.__file__).parent / "core" / "comm" / "channel.py")
    frames = [("/mine/program.py", 3, "main", "f()"), (of_ltx, 5, "issue", "Work()"), ("<string>", 2, "__init__", "")]
    assert place_of(traceback.StackSummary.from_list(frames)) == "program.py:3 in main: f()"


def test_the_place_of_a_failure_is_the_users_line_not_pythons_library() -> None:
    def waits() -> None:
        threading.Event().wait(timeout="not a number")  # type: ignore[arg-type]

    with pytest.raises(TypeError) as caught:
        waits()
    assert "test_failures.py" in failure_of(caught.value).where
    assert "in waits" in failure_of(caught.value).where


def worlds() -> int:
    return int(sys.modules["ltx.core.world.world"].process.worlds)  # a pickled one would be a copy


def test_a_call_that_all_ranks_fail_alike_changes_nothing(ranks: Ranks) -> None:
    """Where nothing was sent; else, or where one rank alone fails, the next call begins with a new world."""
    pool, rank = ranks(2), lambda: ltx.world().rank
    calls: list[tuple[Callable[[], object], bool]] = [
        (lambda: 1 // 0, True),
        (lambda: 1 // rank(), False),
        (lambda: ltx.psum(torch.ones(())) and 1 // 0, False),
        (lambda: dist.all_reduce(torch.ones(())) or 1 // 0, False),
    ]
    for call, same in calls:
        before = pool.run(worlds).replicated()
        refuses(CallFailedError, "ZeroDivisionError", pool.run, call)
        assert (pool.run(worlds).replicated() == before) is same
        assert pool.run(lambda: float(ltx.psum(torch.ones(())))).replicated() == 2.0


def on_somebody_elses_group() -> str:
    ltx.shutdown()
    store = dist.FileStore(os.environ["LTX_TEST_FILE"], 2)
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)
    with ltx.init():
        comm.resolve("data").comm.passes.end_world(ValueError("as in a step"))
        return said(ltx.errors.WorldError, ltx.init)


def test_a_world_over_somebody_elses_group_isnt_begun_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LTX_TEST_FILE", str(tmp_path / "store"))
    for text in ltx.launch(on_somebody_elses_group, 2, start_method="fork", timeout=60):
        assert "whose process group was initialised before ltx.init" in text
        assert "torch.distributed.destroy_process_group()" in text
