"""rank_seed and shard."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ltx
from ltx.errors import AxisError
from tests.kinds import Ranks
from tests.train_on import refuses, said


def test_seeds_differ_between_ranks_and_repeat(ranks: Ranks) -> None:
    def seeds() -> list[int]:
        return [ltx.rank_seed(s) for s in (0, 1, -5, 2**63 + 1, 0)]

    by_rank = ranks(3).run(seeds)
    assert all(mine[0] == mine[-1] for mine in by_rank)
    assert len({s for mine in by_rank for s in mine}) == 12
    assert all(0 <= s < 2**63 for mine in by_rank for s in mine)
    assert seeds() == by_rank.rank(0), "alone, one is rank 0"


def test_seeds_of_neighbours_are_unrelated() -> None:
    """About half of the bits differ between one seed and the next."""
    flips = [(ltx.rank_seed(s) ^ ltx.rank_seed(s + 1)).bit_count() for s in range(200)]
    assert 28 < sum(flips) / len(flips) < 35


def test_seeds_have_no_simulated_form() -> None:
    with pytest.raises(AxisError, match=r'share one generator.*ltx.vmap\(f, randomness="different"\)'):
        ltx.vmap(lambda x: x + ltx.rank_seed(0))(torch.ones(2))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_shard_takes_a_batch_apart(ranks: Ranks, dim: int, seed: int) -> None:
    batch = {"x": torch.randn(4, 6, 2), "name": "kept", "scale": torch.tensor(2.0)}

    def run() -> tuple[Tensor, str, Tensor]:
        mine = ltx.shard(batch, dim=dim)
        return mine["x"], mine["name"], mine["scale"]

    simulated = ltx.vmap(lambda: ltx.shard({"x": batch["x"]}, dim=dim)["x"], axis_size=2)()
    for rank, (x, name, scale) in enumerate(ranks(2).run(run)):
        assert torch.equal(x, batch["x"].chunk(2, dim)[rank])
        assert torch.equal(simulated[rank], x)
        assert (name, scale.item()) == ("kept", 2.0)
    assert torch.equal(run()[0], batch["x"]), "alone"


def test_shard_of_what_does_not_divide() -> None:
    assert said(AxisError, lambda: ltx.vmap(lambda: ltx.shard({"batch": {"x": torch.zeros(5, 2)}}), axis_size=2)()) == (
        "shard: leaf 'batch.x' of shape [5, 2] can't be split along dim 0 into 2 equal parts, one for each rank of "
        "axis 'data'. Drop or pad the remainder. Processes can take unequal parts in place of this, "
        "ltx.share_out(batch); an ltx.Weighted step then counts each sample alike."
    )
    refuses(AxisError, "can't be split along dim 2", ltx.shard, torch.zeros(4, 2), dim=2)
