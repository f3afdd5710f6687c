"""Peers: one in a long call lives; one that is stopped or killed is told of soon and once, and leaves whole states."""

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
from torch import Tensor

import ltx
from ltx.errors import CallFailedError, CallInterruptedError, InvalidStateError, LtxError, PeerLostError
from tests.forks import SILENT_S
from tests.kinds import Ranks, Started
from tests.train_on import on_ranks, raised_by, refuses, said
from tests.twins.training import sgd

HEARTBEAT_S = 3.0


@pytest.mark.full(but=1)
@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("busy", [0, 1])
def test_a_rank_in_one_long_call_of_c_code_is_waited_for(busy: int, new: bool, started: Started) -> None:
    """It was taken for lost after the heartbeat timeout, and took the store for lost when it came back."""

    def body(tell: Callable[[Any], None]) -> str:
        ltx.psum(torch.ones(3))
        if ltx.world().rank == busy:
            ctypes.PyDLL(None).usleep(int(2e6 * HEARTBEAT_S))  # which doesn't release Python's lock
        return raised_by(ltx.psum, torch.ones(4 if new else 3))

    world = started(2, body, held_by="rank 0", heartbeat_s=HEARTBEAT_S)
    assert [world.told(rank) for rank in range(2)] == ["", ""]


@pytest.mark.full(but=1)
@pytest.mark.parametrize("held_by", ["rank 0", "launcher"])
@pytest.mark.parametrize("call", ["psum", "barrier", "save"])
def test_a_stopped_rank_0_is_told(call: str, held_by: str, tmp_path: Path, started: Started) -> None:
    """Also what the kernel says of it."""

    def body(tell: Callable[[Any], None]) -> None:
        state = ltx.train_step(ltx.data_parallel(lambda w: w.sum()), sgd(0.1)).init(torch.ones(3))
        if ltx.world().rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        calls = {"psum": lambda: ltx.psum(state), "barrier": ltx.barrier}
        calls.get(call, lambda: ltx.checkpoint.save(tmp_path, state))()

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
@on_ranks(3)
def test_what_one_rank_cannot_unpickle_is_an_error_of_all(gathered: bool) -> None:
    """One rank raised a bare KeyError, and the others went on."""
    call = ltx.all_gather_object if gathered else ltx.broadcast_object
    text = said(TypeError, call, OnOneRankAlone(1))
    assert text.startswith(f"{call.__name__}: rank 1 couldn't unpickle rank 0's: KeyError: 'not here'."), text
    assert ltx.psum(torch.ones(())) == 3


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
@pytest.mark.parametrize(("by", "interval_ms"), [(signal.SIGKILL, 600_000.0), (signal.SIGSTOP, 0.0)])
def test_asynchronous_averaging_tells_of_a_lost_peer(by: signal.Signals, interval_ms: float, started: Started) -> None:
    """No step waits for it, and between rounds nobody does: training ended as if nothing had happened."""

    def body(tell: Callable[[Any], None]) -> Any:
        strategy = ltx.BaguaStrategy("async", sync_interval_ms=interval_ms)
        train = ltx.train_step(ltx.data_parallel(lambda w: w.square().sum(), strategy), sgd(0.01))
        state = train.init(torch.ones(3))

        def steps() -> None:
            nonlocal state
            began = time.monotonic()
            while time.monotonic() - began < 40:
                if ltx.world().rank == 1 and state.step == 9:
                    os.kill(os.getpid(), by)
                state, _ = train(state)

        return raised_by(steps)

    said = started(2, body, heartbeat_s=HEARTBEAT_S).told(0)
    assert said.startswith("PeerLostError: rank 0: "), said
    if by == signal.SIGSTOP:
        assert f"rank 1 on axis 'data' has shown no sign of life for {HEARTBEAT_S:g} s" in said, said
    else:  # on a busy machine the first round may still be under way
        assert "the process of rank 1 is gone" in said or "background 0 on axis 'data'" in said, said


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


SIZE, LAST_WHOLE, SIDE = 3, 4, 40
STRATEGY = ltx.DDPStrategy(bucket_bytes=4 * SIDE * SIDE, first_bucket_bytes=4 * SIDE * SIDE)  # a bucket a matrix
#: Told within two seconds, of which the look for signs of life takes one; the rest is what a busy machine may add.
SOON_S = 10.0


def training(dies: str, overlap: str, by: signal.Signals = signal.SIGKILL) -> Callable[..., Any]:
    """Rank 1 dies after so many steps: "between" two, or in the "middle" of the next backward pass."""

    def body(tell: Callable[[Any], None]) -> Any:
        rank, steps = ltx.world().rank, 0

        def die(_: Tensor | None = None) -> None:
            if dies and rank == 1 and steps == LAST_WHOLE:
                tell(time.time())
                os.kill(os.getpid(), by)

        def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
            for place, weight in enumerate(params.values()):
                x = torch.tanh(x @ weight)
                if place == 2 and dies == "middle":
                    x.register_hook(die)
            return x.square().mean()

        draw = torch.Generator().manual_seed(0)
        params = {f"w{i}": torch.randn(SIDE, SIDE, generator=draw) / SIDE**0.5 for i in range(5)}
        adam = ltx.optim.from_torch(torch.optim.Adam, lr=0.01)
        train = ltx.train_step(ltx.data_parallel(loss, STRATEGY), adam, overlap=overlap)
        state, draw = train.init(params), torch.Generator().manual_seed(rank)
        try:
            while steps < LAST_WHOLE + (1 if dies else 0):
                if dies == "between":
                    die()
                state, _ = train(state, torch.randn(8, SIDE, generator=draw))
                steps += 1
        except PeerLostError as error:
            tell((time.time(), str(error)))
        try:
            return state.step, [x.tolist() for x in ltx.tree.flatten((state.params, state.opt_state))[0]]
        except InvalidStateError as error:
            return str(error)

    return body


@pytest.mark.full(but=1)
@pytest.mark.covering(1)
@pytest.mark.parametrize("sockets", [False, True])
@pytest.mark.parametrize("dies", ["between", "middle"])
@pytest.mark.parametrize("overlap", ["backward", "update"])
def test_peers_are_told_soon_and_hold_the_last_whole_step(
    dies: str, overlap: str, sockets: bool, started: Started
) -> None:
    whole = started(SIZE, training("", overlap), sockets=sockets)
    expected = [whole.told(rank) for rank in range(SIZE)]
    world = started(SIZE, training(dies, overlap), sockets=sockets)
    killed_s = world.told(1)
    for rank in (0, 2):
        told = world.told(rank)
        assert isinstance(told, tuple), told
        raised_s, said = told
        assert raised_s - killed_s < SOON_S
        assert said.startswith(f"rank {rank}: "), said
        assert re.search(r"rank 1 is gone", said), said  # by the kernel, by the connection, or by a peer that knew
        assert re.search(r"(bucket \d|summary) (on axis 'data' failed while waiting|\(issue \d+\))", said), said
        assert said.endswith(f"It was in step {LAST_WHOLE} of the training."), said
        held = world.told(rank)
        if overlap == "update" and isinstance(held, str):  # some buckets were complete before the rank died
            assert re.search(r"\(step 4\) is invalid: \d of 5 buckets had been updated in place .*PeerLostError", held)
        else:
            assert held == expected[rank]


@pytest.mark.full
@pytest.mark.parametrize("sockets", [False, True])
def test_peers_of_a_stopped_one_hold_the_last_whole_step(sockets: bool, started: Started) -> None:
    whole = started(SIZE, training("", "backward"), sockets=sockets)
    expected = [whole.told(rank) for rank in range(SIZE)]
    world = started(SIZE, training("middle", "backward", signal.SIGSTOP), sockets=sockets, heartbeat_s=SILENT_S)
    stopped_s = world.told(1)
    for rank in (0, 2):
        told = world.told(rank)
        assert isinstance(told, tuple), told
        raised_s, said = told
        assert raised_s - stopped_s < SILENT_S + SOON_S
        silent = f"rank 1 on axis 'data' has shown no sign of life for {SILENT_S:g} s: its process has been stopped. It"
        assert silent in said, said
        assert said.endswith(f"It was in step {LAST_WHOLE} of the training."), said
        assert world.told(rank) == expected[rank]


@pytest.mark.full(but=1)
@pytest.mark.parametrize("donate", [True, False])
@on_ranks(2)
def test_a_failure_between_two_buckets_leaves_no_state_that_is_neither(donate: bool) -> None:
    optimizer = sgd(0.1)
    step = ltx.data_parallel(lambda p: sum(w.sum() for w in p.values()), STRATEGY)
    train = ltx.train_step(step, optimizer, overlap="update", donate=donate)
    state = train.init({f"w{i}": torch.ones(SIDE, SIDE) for i in range(3)})
    applied, apply = [], type(optimizer).update_leaves

    def fails(*args: Any) -> None:
        applied.append(apply(*args))
        if len(applied) == 2:
            raise ValueError("not today")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(optimizer), "update_leaves", fails)
        refuses(ValueError, "not today", train, state)
    if donate:
        assert said(InvalidStateError, lambda: state.params).startswith(
            "this TrainState (step 0) is invalid: 2 of 3 buckets had been updated in place when something failed "
            "(ValueError: not today). Load a checkpoint."
        )
    else:
        assert all((w == 1).all() for w in state.params.values())
