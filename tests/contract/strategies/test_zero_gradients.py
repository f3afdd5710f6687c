"""Parameters whose gradient is 0 on all ranks don't move, whatever the hook and strategy; where they do, how far."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ltx
from tests.contract.hooks.table import HOOKS
from tests.contract.strategies.table import ROWS
from tests.inside import QAdam

STEPS, LR = 12, 0.01
ADAM = ltx.optim.from_torch(torch.optim.Adam, lr=LR)
QADAM = ltx.optim.qadam(lr=LR, warmup_steps=4)

#: (strategy, optimizer) of each case: every hook under Adam, which makes a step of any gradient; every strategy.
CASES: dict[str, tuple[Any, Any]] = {
    **{f"hook {name}": (ltx.DDPStrategy(comm_hook=hook), ADAM) for name, hook in HOOKS.items()},
    **{
        f"strategy {name}": (row.strategy, ADAM)
        for name, row in ROWS.items()
        if 2 in row.ranks and not isinstance(row.optimizer, type(QADAM))
    },
    "qadam": (QAdam(warmup_steps=4), QADAM),
    "qadam in small buckets": (
        QAdam(warmup_steps=4, betas=(0.9, 0.999), bucket_bytes=64, first_bucket_bytes=64),
        QADAM,
    ),
}

#: How far parameters without gradient go in these steps at most, of the way that steps of lr make.
MOVES = {
    # A size for each block of signs, and 0 has a sign: what all ranks send for it goes one way, unless it is fed back.
    "hook onebit": 1.0,
    "hook onebit after 1": 1.0,
    # The bucket is one matrix, of which two directions are kept: they run through all of its parameters.
    "hook batched powersgd": 1.0,
}


def moved(cases: dict[str, tuple[Any, Any]], seed: int) -> dict[str, tuple[float, float]]:
    """How far the parameters without gradient have gone, and those with one; greatest distances."""
    rank, found = int(ltx.axis_index()), {}

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        seen = torch.nn.functional.embedding(rows, params["table"])
        return ((seen * params["w"]).sum(-1) - x).square().mean() + 0.0 * params["idle"].sum()

    for name, (strategy, optimizer) in cases.items():
        draw = torch.Generator().manual_seed(seed)
        # Rows of an embedding that nobody looks up lie between those that are; a whole parameter has no gradient.
        start = {
            "w": torch.randn(8, generator=draw),
            "table": torch.randn(20, 8, generator=draw),
            "idle": torch.randn(33, generator=draw),
        }
        begun = {key: x.clone() for key, x in start.items()}
        train = ltx.train_step(ltx.data_parallel(loss, strategy), optimizer)
        state = train.init(start)
        draw = torch.Generator().manual_seed(seed + 1 + rank)
        for _ in range(STEPS):
            x, rows = torch.randn(16, generator=draw), 2 * torch.randint(10, (16,), generator=draw)
            state = train(state, x, rows)[0]
        params = train.finish(state).params
        idle = max(
            float((params["table"] - begun["table"])[1::2].abs().max()),
            float((params["idle"] - begun["idle"]).abs().max()),
        )
        found[name] = idle, float((params["table"] - begun["table"])[::2].abs().max())
    return found


@pytest.fixture(scope="module")
def distances(request: pytest.FixtureRequest, ranks: Callable[[int], Any]) -> list[dict[str, tuple[float, float]]]:
    """Of the cases that are to be looked at."""
    wanted = [item for item in request.session.items if getattr(item, "originalname", "") == ROWS]
    names = [item.callspec.params["name"] for item in wanted]  # type: ignore[attr-defined]
    return list(ranks(2).run(moved, {name: CASES[name] for name in names}, 7))


@pytest.mark.full(but=5)
@pytest.mark.parametrize("name", CASES)
def test_what_has_no_gradient_stays(name: str, distances: list[dict[str, tuple[float, float]]]) -> None:
    print(name, [of_rank[name] for of_rank in distances])
    for idle, used in (of_rank[name] for of_rank in distances):
        assert used > LR
        assert idle <= MOVES.get(name, 0.0) * STEPS * LR, (idle, used)


ROWS = test_what_has_no_gradient_stays.__name__
