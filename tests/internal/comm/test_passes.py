"""An exception in a step or pass: it ends the world for all ranks, unless all raise it before anything was sent."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import ltx
from ltx.core import comm
from ltx.core.comm.peers import BUCKETS
from ltx.errors import LtxError, StepLeftOutError
from ltx.hooks import from_functions
from ltx.peers.store_exchange import StoreExchange
from ltx.peers.watcher import Watcher
from tests.kinds import OnNewAxis, Started, Tell
from tests.train_on import raised_by

SGD = ltx.optim.from_torch(torch.optim.SGD, lr=0.01)


class BrokenError(Exception):
    """What a rank's own program raises."""


def _axis_comm() -> comm.AxisComm:
    return comm.resolve("data").comm


def _gradient() -> float:
    # Of one step: the first call of each compares parameters.
    return float(torch.func.grad(ltx.data_parallel(lambda w: w * (1.0 + ltx.axis_index())))(torch.tensor(1.0)))


def _of_two_buckets(fails: bool) -> float:
    """The gradient of a step of two buckets; if `fails`, the backward pass raises between them."""

    def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
        hidden = (1.0 + ltx.axis_index()) * params["first"]
        if fails:
            hidden.register_hook(lambda _: 1 // 0)
        return (hidden + params["last"]).sum()

    step = ltx.data_parallel(loss, ltx.DDPStrategy(bucket_bytes=8, first_bucket_bytes=8))
    params = {name: torch.ones(2, requires_grad=True) for name in ("first", "last")}
    step(params).backward()
    return float(params["first"].grad[0])  # type: ignore[index]


LEFT_BY_RANK_1 = "DeadlockDetectedError: rank 0: rank 1 has left a backward pass on axis 'data' halfway"
ON_BOTH = pytest.mark.parametrize("sockets", [False, True], ids=["shared memory", "sockets"])


@ON_BOTH
@pytest.mark.parametrize("who", ["one", "all"])
def test_a_pass_that_autograd_drops_after_a_bucket_ends_the_world(who: str, sockets: bool, on_new_axis: Any) -> None:
    """Also where all ranks raise: some may have sent more than others."""

    def run() -> tuple[str, list[str], float]:
        _of_two_buckets(fails=False)
        first = raised_by(_of_two_buckets, who == "all" or _axis_comm().rank == 1)
        later = [raised_by(_gradient), raised_by(ltx.psum, torch.ones(())), raised_by(ltx.all_gather_object, 1)]
        ltx.init()
        return first, later, _gradient()

    results = list(on_new_axis(run, sockets=sockets))
    (told, *_), (raised, *_) = results
    assert raised.startswith("ZeroDivisionError")
    assert told.startswith(LEFT_BY_RANK_1 if who == "one" else "ZeroDivisionError")
    for _, later, gradient in results:
        assert gradient == 1.5
        for text in later:
            assert "out of step since an earlier failure. ltx.init() on all ranks begins a new world" in text


@ON_BOTH
def test_a_rank_that_raises_in_a_pass_of_one_sum_tells(sockets: bool, on_new_axis: OnNewAxis) -> None:
    def loss(w: torch.Tensor, fails: bool) -> torch.Tensor:
        doubled = 2 * w
        if fails:
            doubled.register_hook(lambda _: 1 // 0)
        return doubled.sum()

    def run() -> str:
        grad = ltx.grad(ltx.data_parallel(loss))
        assert grad(torch.ones(2), False).tolist() == [2.0, 2.0]
        return raised_by(grad, torch.ones(2), _axis_comm().rank == 1)

    waited, raised = on_new_axis(run, sockets=sockets)
    assert raised.startswith("ZeroDivisionError")
    assert re.match("DeadlockDetectedError: rank 0: rank 1 has left a backward pass on axis 'data'", waited), waited
    assert "ZeroDivisionError" in waited


def test_who_begins_a_new_world_at_once_has_told_why_it_left_the_old_one(on_new_axis: OnNewAxis) -> None:
    """Its shared memory closes under peers that still wait; what they say then isn't that its process is gone."""

    def run() -> str:
        _of_two_buckets(fails=False)
        fails, write = _axis_comm().rank == 1, Watcher._write
        if fails:
            Watcher._write = lambda watcher: time.sleep(0.5) or write(watcher)  # type: ignore[method-assign]
        said = raised_by(_of_two_buckets, fails)
        ltx.init()
        Watcher._write = write  # type: ignore[method-assign]
        return said

    waited, raised = on_new_axis(run)
    assert raised.startswith("ZeroDivisionError")
    assert waited.startswith(LEFT_BY_RANK_1)


def _trains(fails: Callable[[int], bool], carry_on: Callable[[], object] = int) -> tuple[list[str], list[float]]:
    """Six steps; where `fails`, the loss raises before it sends anything. (what was raised, the parameters)"""
    broken = [False]

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if broken[0]:
            broken[0] = False
            raise BrokenError("bad batch")
        return (w * x).square().sum()

    train = ltx.train_step(ltx.data_parallel(loss), SGD)
    state, raised = train.init(torch.ones(3)), []
    for step in range(6):
        broken[0] = fails(step)
        while state.step == step:
            try:
                state, _ = train(state, torch.full((3,), 1.0 + ltx.axis_index() + step))
            except (BrokenError, LtxError) as error:
                raised.append(f"{type(error).__name__}: {error}")
                carry_on()
    return raised, state.params.tolist()


@ON_BOTH
def test_what_all_ranks_raise_before_anything_was_sent_changes_nothing(sockets: bool, on_new_axis: OnNewAxis) -> None:
    def run() -> tuple[bool, list[str], list[float], list[float]]:
        axis = comm.resolve("data")
        raised, params = _trains(lambda step: step in (0, 3))
        return comm.resolve("data") is axis, raised, params, _trains(lambda step: False)[1]

    for same, raised, params, undisturbed in on_new_axis(run, sockets=sockets):
        assert (same, raised, params) == (True, ["BrokenError: bad batch"] * 2, undisturbed)


def test_who_came_and_left_the_step_has_come(on_new_axis: OnNewAxis) -> None:
    """Both ranks compare a plan, and raise: the slower one hears that its peer has left before it reads the plan."""

    def run() -> list[str]:
        axis, heard = _axis_comm(), list[BaseException]()
        check, has = type(axis.peers).check_peers, StoreExchange.has

        def checked(*args: Any, **kwargs: Any) -> None:
            try:
                check(*args, **kwargs)
            except LtxError as error:
                heard.append(error)
                raise

        def late(self: Any, place: str, ranks: Any = None) -> bool:
            hidden = place.startswith(BUCKETS) and ranks is not None and not heard
            return not hidden and has(self, place, ranks)

        def broken(w: torch.Tensor) -> torch.Tensor:
            raise BrokenError("on every rank")

        train = ltx.train_step(ltx.data_parallel(broken), SGD)
        state = train.init(torch.ones(3))
        with pytest.MonkeyPatch.context() as patch:
            if axis.rank == 0:
                patch.setattr(type(axis.peers), "check_peers", checked)
                patch.setattr(StoreExchange, "has", late)
            return [raised_by(train, state), *map(str, heard)]

    (late, *heard), (first,) = on_new_axis(run)
    assert late == first == "BrokenError: on every rank"
    assert "rank 1 has left step 0 of the training" in heard[0]


def test_steps_of_two_threads_at_a_time_end_the_world(on_new_axis: OnNewAxis) -> None:
    """Each rank refuses the one that comes second, which needn't be the same one."""

    def run() -> list[str]:
        begun, may_end = threading.Event(), threading.Event()

        def waiting(params: torch.Tensor, other: bool) -> torch.Tensor:
            if other:
                begun.set()
                may_end.wait(60.0)
            return params.sum()

        def said(other: bool) -> str:
            return raised_by(lambda: train(states[other], other))

        train = ltx.train_step(ltx.data_parallel(waiting), SGD)
        states = [train(train.init(torch.ones(2)), False)[0] for _ in range(2)]
        with ThreadPoolExecutor() as pool:
            first = pool.submit(said, True)
            begun.wait(60.0)
            second = said(False)
            may_end.set()
            return [first.result(), second]

    for rank, (first, second) in enumerate(on_new_axis(run)):
        assert f"UnsupportedError: rank {rank}: two threads run training steps on axis 'data' at a time" in second
        assert "DeadlockDetectedError" in first


def test_collectives_of_two_threads_at_a_time_end_the_world(on_new_axis: OnNewAxis) -> None:
    """One's values came to the other: equal calls can't be told apart."""

    def run() -> list[str]:
        ltx.psum(torch.ones(()))  # which ranks needn't compare from now on
        if ltx.axis_index() == 1:
            return []
        entered, may_go, kind = threading.Event(), threading.Event(), type(_axis_comm())
        issue = kind._issue

        def issued(self: Any, *args: Any) -> Any:
            entered.set()
            may_go.wait(60.0)
            return issue(self, *args)

        with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor() as pool:
            patch.setattr(kind, "_issue", issued)
            first = pool.submit(raised_by, ltx.psum, torch.ones(()))
            entered.wait(60.0)
            second = raised_by(ltx.psum, torch.ones(()))
            may_go.set()
            return [first.result(), second]

    (first, second), _ = on_new_axis(run)
    assert "UnsupportedError: rank 0: psum was called while another thread of this rank is in a collective" in second
    assert "DeadlockDetectedError" in first


def test_who_has_left_a_step_with_all_others_waits_for_them(on_new_axis: OnNewAxis) -> None:
    """A rank that is ahead waits in its next call, and finds that the others have left the step, as it has."""

    def run() -> tuple[list[str], bool]:
        seen = []

        def carry_on() -> None:
            axis_comm = _axis_comm()
            axis_comm.peers.store_exchange.exchange("all have raised", None, "this test")
            axis_comm.peers.watcher.look_now()
            seen.append(axis_comm.peers.diagnosed(in_pass=True) is None)

        return _trains(lambda step: step == 3, carry_on)[0], seen == [True]

    for raised, waits in on_new_axis(run):
        assert (raised, waits) == (["BrokenError: bad batch"], True)


def test_what_all_ranks_left_together_explains_no_later_disagreement(on_new_axis: OnNewAxis) -> None:
    def run() -> tuple[str, str]:
        no_message = from_functions(lambda vector: 1 // 0, lambda message, numel: message)
        lost = raised_by(ltx.sync_gradients, torch.randn(8), ltx.DDPStrategy(comm_hook=no_message))
        _gradient()
        return lost, raised_by(ltx.all_gather, torch.ones(2 + int(ltx.axis_index())))

    for lost, told in on_new_axis(run):  # through shared memory: nothing was sent before the hook raised
        assert "division or modulo by zero" in lost
        assert "rank 1: float32[3]" in told
        assert "left" not in told


@ON_BOTH
def test_a_rank_that_raises_alone_and_goes_on_ends_the_world(sockets: bool, on_new_axis: OnNewAxis) -> None:
    """All ranks raise; a new world trains to the values of an undisturbed run."""

    def run() -> tuple[list[str], list[float], list[float]]:
        rank, undisturbed = int(ltx.axis_index()), _trains(lambda step: False)[1]
        again = [True]

        def carry_on() -> None:
            if rank == 1 and again.pop():  # goes on without a new world, once
                again.append(False)
            else:
                ltx.init()

        return *_trains(lambda step: rank == 1 and step == 3, carry_on), undisturbed

    (told, params, undisturbed), (raised, params_1, _) = on_new_axis(run, sockets=sockets)
    assert params == params_1 == undisturbed
    assert len(told) == 1
    assert "rank 1 has left step 3 of the training" in told[0]
    assert "BrokenError: bad batch" in told[0]
    assert raised[0] == "BrokenError: bad batch"
    assert raised[1].startswith(("DeadlockDetectedError", "RankMismatchError"))
    assert len(raised) == 2


@dataclass(frozen=True, kw_only=True)
class LeavesOut(ltx.Strategy):
    """DDP, which leaves the third step out on all ranks, once."""

    left: list[int] = field(compare=False)

    def hook(self, step: int) -> ltx.hooks.CommHook:
        return ltx.hooks.AllReduce()

    def update(self, update: Any, states: Any, info: Any, pending: Any) -> Any:
        if info.step == 2 and not self.left:
            self.left.append(2)
            raise StepLeftOutError("not this one")
        return super().update(update, states, info, pending)


@ON_BOTH
def test_a_step_that_all_ranks_leave_out_by_a_decision_changes_nothing(sockets: bool, on_new_axis: OnNewAxis) -> None:
    def run() -> tuple[bool, list[float], list[float]]:
        axis, found = comm.resolve("data"), []
        for strategy in (LeavesOut(left=[]), LeavesOut(left=[2])):
            train = ltx.train_step(ltx.data_parallel(lambda w, x: (w * x).square().sum(), strategy), SGD)
            state = train.init(torch.ones(3))
            while state.step < 4:
                with suppress(StepLeftOutError):
                    state, _ = train(state, torch.full((3,), 1.0 + ltx.axis_index() + state.step))
            found.append(state.params.tolist())
            assert strategy.left == [2]
        return comm.resolve("data") is axis, *found

    for same, left_out, undisturbed in on_new_axis(run, sockets=sockets):
        assert same
        assert left_out == undisturbed


@ON_BOTH
def test_no_new_world_begins_without_a_rank_that_is_gone(sockets: bool, started: Started) -> None:
    """It is said at once, not after the time that ranks have to meet."""

    def body(tell: Tell) -> str:
        _gradient()
        if ltx.world().rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        tell(raised_by(_gradient))
        return raised_by(ltx.init)

    world = started(2, body, sockets=sockets)
    assert world.told(0).startswith("PeerLostError")
    assert "no new world can begin, as the process of rank [1] is gone." in world.told(0)
