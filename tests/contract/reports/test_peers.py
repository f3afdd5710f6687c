"""Peers: a rank that is in one long call lives, one that is stopped is told once, and what pools know is used."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ltx
from ltx.errors import CallFailedError, CallInterruptedError, LtxError
from tests.kinds import Ranks, Started
from tests.train_on import refuses, said
from tests.twins.training import sgd

HEARTBEAT_S = 3.0


def _hold_the_lock(for_s: float) -> None:
    """One call of C code that doesn't release Python's lock."""
    ctypes.PyDLL(None).usleep(int(for_s * 1e6))


def _told(call: Callable[[], object]) -> str:
    try:
        call()
        return "completed"
    except LtxError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.full(but=1)
@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("busy", [0, 1])
def test_a_rank_in_one_long_call_of_c_code_is_waited_for(busy: int, new: bool, started: Started) -> None:
    """It was taken for lost after the heartbeat timeout, and took the store for lost when it came back."""

    def body(tell: Callable[[Any], None]) -> str:
        ltx.psum(torch.ones(3))
        if ltx.world().rank == busy:
            _hold_the_lock(2 * HEARTBEAT_S)
        return _told(lambda: ltx.psum(torch.ones(4 if new else 3)))

    world = started(2, body, held_by="rank 0", heartbeat_s=HEARTBEAT_S)
    assert [world.told(rank) for rank in range(2)] == ["completed"] * 2


@pytest.mark.full(but=1)
@pytest.mark.parametrize("dies", [0, 1])
def test_what_the_kernel_says_of_a_stopped_process_is_told(dies: int, started: Started) -> None:
    def body(tell: Callable[[Any], None]) -> str:
        ltx.psum(torch.ones(3))
        if ltx.world().rank == dies:
            os.kill(os.getpid(), signal.SIGSTOP)
        return _told(lambda: ltx.psum(torch.ones(3)))

    said = started(2, body, held_by="launcher", heartbeat_s=HEARTBEAT_S).told(1 - dies)
    begins = (
        f"PeerLostError: rank {1 - dies}: rank {dies} on axis 'data' has shown no sign of life for 3 s: its process"
    )
    assert said.startswith(f"{begins} has been stopped. It waited for psum"), said


@pytest.mark.full(but=1)
@pytest.mark.parametrize("held_by", ["rank 0", "launcher"])
@pytest.mark.parametrize("call", ["barrier", "save"])
def test_a_stopped_rank_0_is_told(call: str, held_by: str, tmp_path: Path, started: Started) -> None:
    def body(tell: Callable[[Any], None]) -> None:
        state = ltx.train_step(ltx.data_parallel(lambda w: w.sum()), sgd(0.1)).init(torch.ones(3))
        if ltx.world().rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        ltx.barrier() if call == "barrier" else ltx.checkpoint.save(tmp_path, state)

    said = started(2, body, held_by=held_by, heartbeat_s=HEARTBEAT_S).told(1)
    assert said.startswith("PeerLostError: rank 1: "), said
    assert "process has been stopped" in said or "process, which holds it, has been stopped" in said, said


class OnOneRankAlone:
    """An object that rank `where` can't unpickle."""

    def __init__(self, where: int):
        self.where = where

    def __setstate__(self, state: dict[str, int]) -> None:
        if ltx.axis_index() == state["where"]:
            raise KeyError("not here")
        self.__dict__.update(state)


@pytest.mark.parametrize("gathered", [True, False])
def test_what_one_rank_cannot_unpickle_is_an_error_of_all(gathered: bool, ranks: Ranks) -> None:
    """One rank raised a bare KeyError, and the others went on."""

    def on_a_rank() -> tuple[str, float]:
        thing = OnOneRankAlone(1)
        text = said(TypeError, lambda: ltx.all_gather_object(thing) if gathered else ltx.broadcast_object(thing))
        return text, float(ltx.psum(torch.ones(())))

    what = "all_gather_object" if gathered else "broadcast_object"
    text, total = ranks(3).run(on_a_rank).replicated()
    assert text.startswith(f"{what}: rank 1 couldn't unpickle rank 0's: KeyError: 'not here'."), text
    assert total == 3


@pytest.mark.full(but=1)
@pytest.mark.parametrize("left_out", [False, True])
def test_a_worker_that_waits_for_one_that_is_not_in_the_call(left_out: bool, ranks: Ranks) -> None:
    """It waited until the timeout, though the pool knew."""

    def run() -> None:
        if int(ltx.axis_index()) > 0 or left_out:
            ltx.psum(torch.ones(3))

    pool = ranks(3)
    with pytest.raises(
        CallFailedError, match=r"wait for each other: ranks? 0.*: the call's end, as it isn't in it any"
    ):
        pool._call([1], run, (), {}, None) if left_out else pool.run(run)
    assert pool.run(lambda: float(ltx.psum(torch.ones(())))).replicated() == 3


def test_a_worker_that_hears_of_a_failure_before_the_call_has_failed(ranks: Ranks) -> None:
    """It began a new world, in which no other came to meet it."""

    def run() -> None:
        if int(ltx.axis_index()) > 0:
            try:
                ltx.psum(torch.ones(3))
            finally:
                if int(ltx.axis_index()) == 2:
                    time.sleep(1.5)  # longer than it takes to hear that rank 1 has failed

    pool = ranks(3)
    refuses(CallFailedError, "wait for each other", pool.run, run)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pool.run(lambda: float(ltx.psum(torch.ones(())))).replicated() == 3


def test_a_worker_that_is_not_in_the_call_joins_a_new_world(ranks: Ranks) -> None:
    def run() -> int:
        if int(ltx.axis_index()) > 0:
            refuses(LtxError, "wait for each other", ltx.psum, torch.ones(3))
            ltx.init()
        return ltx.world().size

    pool = ranks(3)
    assert pool.run(run).replicated() == 3
    assert pool.run(lambda: float(ltx.psum(torch.ones(())))).replicated() == 3


def test_a_worker_may_go_on_alone(ranks: Ranks) -> None:
    def run() -> float:
        if int(ltx.axis_index()) == 1:
            time.sleep(2.5)  # longer than it takes the pool to tell the other
        return float(ltx.psum(torch.ones(()))) if int(ltx.axis_index()) < 0 else 1.0

    assert ranks(2).run(run).replicated() == 1
    assert ranks(2).run(lambda: float(ltx.psum(torch.ones(())))).replicated() == 2


@pytest.mark.full
def test_asynchronous_averaging_tells_of_a_lost_peer_between_rounds(started: Started) -> None:
    """Between rounds nobody waits, and training ended as if nothing had happened."""

    def body(tell: Callable[[Any], None]) -> Any:
        strategy = ltx.BaguaStrategy("async", sync_interval_ms=600_000.0)
        train = ltx.train_step(ltx.data_parallel(lambda w: w.square().sum(), strategy), sgd(0.01))
        state = train.init(torch.ones(3))

        def steps() -> None:
            nonlocal state
            began = time.monotonic()
            while time.monotonic() - began < 40:
                if ltx.world().rank == 1 and state.step == 9:
                    os.kill(os.getpid(), signal.SIGKILL)
                state, _ = train(state)

        return _told(steps)

    said = started(2, body, heartbeat_s=HEARTBEAT_S).told(0)
    assert said.startswith("PeerLostError: rank 0: on axis 'data', the process of rank 1 is gone"), said


# Pools: an interrupt that each rank answers is over at once, and modules that can't be read again by their name.
def _sleep() -> None:
    time.sleep(60)


def _sums() -> None:
    while True:
        ltx.psum(torch.ones(4))


def _one_alone() -> None:
    if ltx.axis_index() == 0:
        ltx.psum(torch.ones(4))
    time.sleep(60)


@pytest.mark.parametrize(
    ("waits", "places"),
    [
        (_sleep, r"rank [01] was at test_peers\.py:\d+ in _sleep: time\.sleep\(60\)"),
        (_sums, r"rank [01] was at test_peers\.py:\d+ in _sums: (while True:|ltx\.psum\(torch\.ones\(4\)\))"),
        (_one_alone, r"rank [01] was at test_peers\.py:\d+ in _one_alone: (ltx\.psum|time\.sleep)\S*"),
    ],
)
def test_an_interrupt_that_all_ranks_answer_is_over_at_once(
    ranks: Ranks, waits: Callable[[], None], places: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It took as long as ranks in code that Python can't interrupt get, and said that they were in such code."""

    def run() -> None:
        (tmp_path / str(ltx.axis_index())).touch()
        waits()

    def interrupt() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        time.sleep(1.0)  # into what they wait in
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    pids = list(ranks(2).run(os.getpid))
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(CallInterruptedError) as caught:
        ranks(2).run(run)
    said = "The workers keep their state, and the next run begins with a new world."
    assert re.fullmatch(rf".*run was interrupted: {places}; {places}\. {re.escape(said)}", str(caught.value))
    assert caught.value.kept
    assert "can't interrupt" not in capfd.readouterr().err
    assert list(ranks(2).run(os.getpid)) == pids


NAME = "ltx_reloaded_by_its_user"


def _edit(file: Path, value: int) -> None:
    file.write_text(f"def f():\n    return {value}\n" + "#" * value)


def test_a_module_that_travels_by_value_is_edited_and_reloaded(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder that was put on ``sys.path`` later: every later call of the pool had failed."""
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / f"{NAME}.py"
    _edit(file, 1)
    module = importlib.import_module(NAME)
    try:
        for value in (1, 2, 3):
            _edit(file, value)
            importlib.invalidate_caches()
            assert importlib.reload(module).f() == value
            assert ranks(2).run(module.f).replicated() == value
        assert ranks(2).run(lambda x: x, 4).replicated() == 4
    finally:
        del sys.modules[NAME]


def test_a_module_that_workers_load_from_a_path_is_edited(ranks: Ranks, tmp_path: Path) -> None:
    """As programs load a configuration or a plugin: there is nothing to find by its name."""
    file = tmp_path / "config.py"

    def loads() -> Any:
        spec = importlib.util.spec_from_file_location(NAME, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[NAME] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.f()

    for value in (1, 2):
        _edit(file, value)
        assert ranks(2).run(loads).replicated() == value
    ranks(2).run(lambda: sys.modules.pop(NAME) and None)
