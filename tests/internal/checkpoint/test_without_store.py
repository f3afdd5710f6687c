"""The store's process ends: steps that are known go on, and what they have come to can be saved and gone on with."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

import ltx
from ltx.checkpoint import saving, storage
from ltx.errors import CheckpointError, RankMismatchError
from tests import train_on
from tests.forks import Ranks
from tests.small import make, values

SIZE = 3


def steps(train: Any, state: Any, count: int) -> Any:
    """Each rank's batch has a length of its own."""
    rank = ltx.world().rank
    for _ in range(count):
        x = torch.randn(4 + rank, 5, generator=torch.Generator().manual_seed(100 * state.step + rank))
        state, _ = train(state, x, x.sum(1))
    return state


def without_store(before: Callable[[], Any], after: Callable[[Any], Any]) -> list[Any]:
    """What `after` gives on each rank for what `before` gave; the process of their store ends in between."""
    gone = get_context("fork").Event()

    def body(tell: Callable[[Any], None]) -> Any:
        found = before()
        tell("ready")
        assert gone.wait(60)
        return after(found)

    world = Ranks(SIZE, body)
    try:
        assert [world.told(rank) for rank in range(SIZE)] == ["ready"] * SIZE
        world.holder.kill()
        world.holder.join()
        gone.set()
        told = [world.told(rank) for rank in range(SIZE)]
        for process in world.processes:  # they clean up behind what they have told
            process.join(60)
        return told
    finally:
        world.close()


@pytest.mark.full
@pytest.mark.parametrize("how", ["save", "save_async"])
def test_steps_go_on_and_are_saved(how: str, tmp_path: Path) -> None:
    def before() -> Any:
        train, state = make()
        state = steps(train, state, 2)
        ltx.psum(torch.ones(3))
        ltx.checkpoint.save(tmp_path, state)
        return train, state

    def after(found: Any) -> Any:
        train, state = found
        state, data = steps(train, state, 3), {"rank": ltx.world().rank}
        if how == "save":
            ltx.checkpoint.save(tmp_path, state, data=data)
        else:
            ltx.checkpoint.save_async(tmp_path, state, data=data).result()
        ltx.psum(torch.ones(3))
        return values(state)

    def undisturbed(tell: Callable[[Any], None]) -> Any:
        train, state = make()
        loaded = ltx.checkpoint.load(tmp_path, state)
        assert (loaded.data, loaded.step) == ({"rank": ltx.world().rank}, 5)
        return values(loaded.state), values(steps(train, state, 5))

    told = without_store(before, after)
    world = Ranks(SIZE, undisturbed)
    try:
        for rank in range(SIZE):
            assert world.told(rank) == (told[rank], told[rank])
    finally:
        world.close()
    assert sorted(os.listdir(tmp_path)) == ["step_00000002", "step_00000005"]


@pytest.mark.parametrize("place", [(saving, "_contents"), (storage, "write")], ids=["before they agree", "writing"])
def test_who_is_interrupted_tells_it(place: tuple[Any, str], tmp_path: Path) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    def before() -> Any:
        train, state = make(donate=False)
        return steps(train, state, 2)

    def after(state: Any) -> str:
        with pytest.MonkeyPatch.context() as patch:
            if ltx.world().rank == 1:
                patch.setattr(*place, interrupted)
            with pytest.raises((CheckpointError, KeyboardInterrupt)) as raised:
                ltx.checkpoint.save(tmp_path, state)
        return f"{raised.type.__name__}: {raised.value}"

    told = without_store(before, after)
    assert told.pop(1) == "KeyboardInterrupt: "
    for said in told:
        assert re.match(r"CheckpointError: the checkpoint .*wasn't saved.*: rank 1: KeyboardInterrupt", said)
    assert os.listdir(tmp_path) == []


def test_ranks_that_save_different_steps_are_told(tmp_path: Path) -> None:
    def after(found: Any) -> str:
        train, state = found
        following = steps(train, state, 1)
        return train_on.said(
            RankMismatchError, ltx.checkpoint.save, tmp_path, state if ltx.world().rank == 1 else following
        )

    def before() -> Any:
        train, state = make(donate=False)
        return train, steps(train, state, 2)

    for text in without_store(before, after):
        assert "save the same step to the same path on every rank" in text
    assert os.listdir(tmp_path) == []
