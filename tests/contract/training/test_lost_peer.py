"""A rank that is killed or stopped in training: what its peers are told, how soon, and what they hold afterwards."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx.errors import InvalidStateError, PeerLostError
from tests.forks import SILENT_S
from tests.kinds import Ranks, Started
from tests.train_on import refuses

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
        assert f"rank 1 on axis 'data' has shown no sign of life for {SILENT_S:g} s" in said, said
        assert said.endswith(f"It was in step {LAST_WHOLE} of the training."), said
        assert world.told(rank) == expected[rank]


@pytest.mark.full(but=1)
@pytest.mark.parametrize("donate", [True, False])
def test_a_failure_between_two_buckets_leaves_no_state_that_is_neither(donate: bool, ranks: Ranks) -> None:
    def on_a_rank() -> tuple[bool, str]:
        sgd = ltx.optim.from_torch(torch.optim.SGD, lr=0.1)
        step = ltx.data_parallel(lambda p: sum(w.sum() for w in p.values()), STRATEGY)
        train = ltx.train_step(step, sgd, overlap="update", donate=donate)
        state = train.init({f"w{i}": torch.ones(SIDE, SIDE) for i in range(3)})
        applied, apply = [], type(sgd).update_leaves

        def fails(*args: Any) -> None:
            applied.append(apply(*args))
            if len(applied) == 2:
                raise ValueError("not today")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(sgd), "update_leaves", fails)
            refuses(ValueError, "not today", train, state)
        try:
            return all(bool((w == 1).all()) for w in state.params.values()), ""
        except InvalidStateError as error:
            return False, str(error)

    same, said = ranks(2).run(on_a_rank).replicated()
    if donate:
        assert said.startswith(
            "this TrainState (step 0) is invalid: 2 of 3 buckets had been updated in place when something failed "
            "(ValueError: not today). Load a checkpoint."
        )
    else:
        assert same
