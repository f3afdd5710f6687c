"""Strategies that talk besides reducing gradients, on a backend that orders streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx.strategies.async_averaging import AsyncAveraging
from ltx.strategies.decentralized import Decentralized
from tests.kinds import Ranks
from tests.streams.pool import StreamedPool
from tests.streams.test_steps import SMALL, batch, copies, prepared, trained
from tests.train_on import go_on


def test_nobody_waits_for_a_round_in_the_background(ranks: Ranks) -> None:
    """Rank 1 stands still in its first step until rank 0 has done all of its own."""

    def run() -> tuple[int, Tensor]:
        rank = int(ltx.axis_index())
        blocked = [rank == 1]

        def loss(w: Tensor, x: Tensor) -> Tensor:
            if blocked.pop() if blocked else False:
                ltx.barrier()
            return (w * x).sum()

        step = ltx.data_parallel(loss, AsyncAveraging(sync_interval_ms=0))
        train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=0.1))
        state = train.init(torch.zeros(3))
        for number in range(4):
            state, _ = train(state, torch.ones(3) * (rank + 1))
            if rank == 0 and number == 3:
                ltx.barrier()
        return state.step, train.finish(state).params + 0

    (steps, params), (others_steps, others) = StreamedPool(ranks(2)).run(run)
    assert steps == others_steps == 4
    torch.testing.assert_close(params, others, rtol=0, atol=0)
    torch.testing.assert_close(params, torch.full((3,), -0.1 * 4 * 1.5))


@pytest.mark.parametrize("mode", ["all", "shift_one"])
def test_gossip_is_as_over_gloo(mode: Any, ranks: Ranks) -> None:
    """Each step reads once, whether the ranks were at the same step."""
    strategy = Decentralized(peer_selection_mode=mode)
    expected = [params for params, *_ in ranks(2).run(trained, strategy)]
    for (params, _, reads), wanted in zip(StreamedPool(ranks(2)).run(trained, strategy), expected, strict=True):
        torch.testing.assert_close(params, wanted)
        assert len([line for line in reads[-1] if "Decentralized._check" in line]) == 1


@pytest.mark.parametrize("overlap", ["backward", "update"])
@pytest.mark.parametrize("strategy", [ltx.ZeroStrategy(**SMALL), ltx.HorovodStrategy(op="adasum", **SMALL)])
def test_parameters_that_are_given_away_keep_their_memory(strategy: ltx.Strategy, overlap: Any, ranks: Ranks) -> None:
    """What ranks share after the optimizer is written where the old ones lie, and comes to the same."""

    def run(donate: bool) -> tuple[bool, dict[str, Tensor]]:
        train, state, rank = prepared(strategy, donate=donate, overlap=overlap)
        places = [x.data_ptr() for x in state.params.values()]
        state = go_on(train, state, [batch(rank, step) for step in range(3)]).state
        return [x.data_ptr() for x in state.params.values()] == places, copies(state.params)

    given, held = (StreamedPool(ranks(2)).run(run, donate) for donate in (True, False))
    for (kept, params), (moved, expected) in zip(given, held, strict=True):
        assert (kept, moved) == (True, False)
        torch.testing.assert_close(params, expected, rtol=0, atol=0)
