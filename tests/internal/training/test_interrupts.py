"""Ctrl-C in the middle of a step: the state that the caller holds is that of a whole step."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import pytest
import torch

import ltx
from ltx.errors import InvalidStateError, ReplicaDivergedError
from tests.kinds import Ranks


def _loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return ((params["w"] * x).sum() - 1.0) ** 2


@pytest.mark.parametrize("donate", [True, False])
def test_an_interrupt_while_tensors_are_updated_in_place(donate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    train = ltx.train_step(ltx.data_parallel(_loss), ltx.optim.from_torch(torch.optim.AdamW, lr=0.1), donate=donate)
    start = {"w": torch.tensor([1.0, 2.0])}
    batches = torch.randn(4, 2)
    expected = train.init(start)
    for x in batches:
        expected, _ = train(expected, x)

    state = train.init(start)
    state, _ = train(state, batches[0])
    apply, seen = ltx.DDPStrategy.update, []

    def interrupted(self: Any, update: Any, *rest: Any) -> Any:
        updated = apply(self, update, *rest)
        os.kill(os.getpid(), signal.SIGINT)
        seen.append(True)
        return updated

    with monkeypatch.context() as patch:
        patch.setattr(ltx.DDPStrategy, "update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            state, _ = train(state, batches[1])
    if donate:
        assert seen == [True], "the update goes on to its end"
        assert state.step == 2, "and the caller's state is the one that came of it"
    else:
        assert state.step == 1
    for x in batches[state.step :]:
        state, _ = train(state, x)
    assert torch.equal(state.params["w"], expected.params["w"])
    assert state.step == 4


def test_an_interrupt_before_the_update_leaves_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        if armed:
            os.kill(os.getpid(), signal.SIGINT)
        return _loss(params, x)

    armed: list[bool] = []
    train = ltx.train_step(ltx.data_parallel(loss), ltx.optim.from_torch(torch.optim.SGD, lr=0.1))
    state = train.init({"w": torch.tensor([1.0, 2.0])})
    before = state.params["w"].clone()
    armed.append(True)
    with pytest.raises(KeyboardInterrupt):
        train(state, torch.ones(2))
    armed.clear()
    assert torch.equal(state.params["w"], before)
    state, _ = train(state, torch.ones(2))
    assert state.step == 1


def test_steps_outside_of_the_main_thread() -> None:
    train = ltx.train_step(ltx.data_parallel(_loss), ltx.optim.from_torch(torch.optim.SGD, lr=0.1))
    steps: list[int] = []
    thread = threading.Thread(
        target=lambda: steps.append(train(train.init({"w": torch.ones(2)}), torch.ones(2))[0].step)
    )
    thread.start()
    thread.join()
    assert steps == [1]


def test_ranks_that_were_interrupted_in_different_steps_are_told(ranks: Ranks) -> None:
    """Each rank's state is whole, but they aren't of the same step: the first step in the new world says so."""

    def train_step() -> Any:
        return ltx.train_step(ltx.data_parallel(_loss), ltx.optim.from_torch(torch.optim.SGD, lr=0.1))

    def begin() -> None:
        train = train_step()
        state = train.init({"w": torch.tensor([1.0, 2.0])})
        torch.ltx_test_state = train(state, torch.ones(2))[0]  # type: ignore[attr-defined]

    def differ() -> None:
        if ltx.world().rank == 1:
            torch.ltx_test_state.params["w"].add_(1.0)  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    def go_on() -> str:
        train, state = train_step(), torch.__dict__["ltx_test_state"]
        try:
            train(state, torch.ones(2))
        except ReplicaDivergedError as error:
            text = str(error)
        state = train.broadcast(state, src=1)
        state, _ = train(state, torch.ones(2))
        del torch.ltx_test_state  # type: ignore[attr-defined]
        return f"{state.step} {text}"

    pool = ranks(2)
    pool.run(begin)
    with pytest.raises(ltx.errors.WorkerError):
        pool.run(differ)
    text = pool.run(go_on).replicated()
    assert text.startswith("2 axis 'data': leaf 'params.w' (float32[2]) should be the same on every rank")


@pytest.mark.full(but=1)
@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("strategy", [ltx.DDPStrategy(), ltx.ZeroStrategy()])
def test_between_the_last_bucket_and_the_next_state(strategy: ltx.Strategy, donate: bool, ranks: Ranks) -> None:
    """With overlap="update" all parameters have their new values there, and nothing else has: the state is invalid."""

    def run() -> str:
        step = ltx.data_parallel(_loss, strategy)
        sgd = ltx.optim.from_torch(torch.optim.SGD, lr=0.1)
        train = ltx.train_step(step, sgd, overlap="update", donate=donate)
        state = train.init({"w": torch.tensor([1.0, 2.0])})
        with pytest.MonkeyPatch.context() as patch:

            def interrupted(*_: Any) -> Any:
                raise KeyboardInterrupt

            patch.setattr(sys.modules["ltx.core.training.step"], "next_state", interrupted)
            with pytest.raises(KeyboardInterrupt):
                train(state, torch.ones(2))
        try:
            told = str(state.params["w"].tolist())
        except InvalidStateError as error:
            told = str(error)
        train(train.init({"w": torch.zeros(2)}), torch.ones(2))
        return told

    expected = "all buckets had been updated in place" if donate else "[1.0, 2.0]"
    assert all(expected in told for told in ranks(2).run(run))
