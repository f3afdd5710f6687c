"""broadcast: sources that aren't there, and what the conformance table leaves out."""

from __future__ import annotations

import pytest
import torch

import ltx
from ltx.errors import AxisError
from tests.kinds import Ranks


@pytest.mark.parametrize("src", [-1, 2])
def test_src_that_is_not_on_the_axis(ranks: Ranks, src: int) -> None:
    counts = r"isn't an index on an axis of 2 ranks, 0 to 1\. It counts on the axis, not in the world\."
    text = f"broadcast: src={src} {counts}"

    def both() -> None:
        with pytest.raises(AxisError, match=text):
            ltx.broadcast(torch.ones(1), src=src)
        with pytest.raises(AxisError, match=f"broadcast_object: src={src} {counts}"):
            ltx.broadcast_object(1, src=src)

    ranks(2).run(both)
    with pytest.raises(AxisError, match=text):
        ltx.vmap(lambda x: ltx.broadcast(x, src=src))(torch.ones(2))


def test_only_src_s_values_matter(ranks: Ranks) -> None:
    """0 * NaN doesn't leak, neither forward nor backward."""

    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mine = torch.where(ltx.axis_index() == 1, x, torch.nan)
        grad, value = torch.func.grad_and_value(lambda x: ltx.broadcast(x, src=1).sum())(mine)
        return grad, value

    x = torch.tensor([1.0, 2.0])
    simulated = ltx.vmap(run)(x.expand(2, 2))
    processes = ranks(2).run(run, x).stack()
    for grad, value in (simulated, processes):
        assert value.tolist() == [3.0, 3.0]
        assert grad.tolist() == [[0.0, 0.0], [2.0, 2.0]]
