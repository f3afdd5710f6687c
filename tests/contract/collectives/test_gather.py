"""all_gather, psum_scatter and AllGatherGrad: what the conformance table can't say."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ltx
from ltx.errors import AxisError
from tests import inside
from tests.kinds import Ranks
from tests.train_on import said


def test_all_gather_grad_on_a_subgroup(ranks: Ranks) -> None:
    """Three ranks, loss_r = (r + 1) * sum(gathered): each gradient is 1 + 2 + 3."""

    def gradient() -> tuple[Tensor, Tensor] | str:
        group = dist.new_group([1, 2, 3])
        try:
            x = torch.full((2, 2), float(ltx.axis_index()), requires_grad=True)
            gathered = ltx.AllGatherGrad.apply(x.T, group)
            (gathered.sum() * dist.get_rank(group) + gathered.sum()).backward()
            assert x.grad is not None
            return gathered.detach(), x.grad
        except AxisError as error:
            return str(error)
        finally:
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                inside.close_axis(inside.resolve(group))

    outside, *members = ranks(4).run(gradient)
    assert "isn't a member" in str(outside)
    for gathered, grad in members:
        assert torch.equal(gathered, torch.tensor([1.0, 2.0, 3.0]).reshape(3, 1, 1).expand(3, 2, 2))
        assert torch.equal(grad, torch.full((2, 2), 6.0))


def test_without_sync_grads_the_result_is_a_constant(ranks: Ranks) -> None:
    def gradient(x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: x.sum() + (ltx.all_gather(x, sync_grads=False) ** 2).sum())(x)

    x = torch.tensor([2.0, 3.0])
    assert torch.equal(gradient(x), torch.ones(2)), "alone"
    assert torch.equal(ltx.vmap(gradient)(torch.stack([x, x])), torch.ones(2, 2)), "simulated"
    assert torch.equal(ranks(2).run(gradient, x).replicated(), torch.ones(2)), "processes"

    leaf = x.clone().requires_grad_()
    assert ltx.all_gather(leaf).requires_grad
    assert not ltx.all_gather(leaf, sync_grads=False).requires_grad


@pytest.mark.parametrize(
    ("shape", "dim", "tiled", "message"),
    [
        ((3, 2), 0, False, "over 2 ranks: dimension 0 of a tensor of shape [3, 2] must be 2, got 3"),
        ((3, 2), 0, True, "over 2 ranks: dimension 0 of a tensor of shape [3, 2] must be a multiple of 2, got 3"),
        ((2, 3), -1, False, "dimension -1 of a tensor of shape [2, 3] must be 2, got 3"),
        ((2,), 1, False, "dim=1 is out of range for a tensor of shape [2]"),
        ((), 0, False, "dim=0 is out of range for a tensor of shape []"),
    ],
)
def test_psum_scatter_of_what_cannot_be_split(
    ranks: Ranks, shape: tuple[int, ...], dim: int, tiled: bool, message: str
) -> None:
    def text() -> str:
        return said(AxisError, ltx.psum_scatter, torch.zeros(shape), dim=dim, tiled=tiled)

    assert message in ranks(2).run(text).replicated()
    assert message in said(
        AxisError, lambda: ltx.vmap(lambda x: ltx.psum_scatter(x, dim=dim, tiled=tiled))(torch.zeros(2, *shape))
    )


def test_all_gather_of_what_has_no_such_dimension() -> None:
    with pytest.raises(AxisError, match=r"all_gather: dim=2 is out of range for a tensor of shape \[3\]\."):
        ltx.all_gather(torch.zeros(3), dim=2)
    with pytest.raises(AxisError, match=r"shape \[\]\. Stack 0-dim tensors with tiled=False\."):
        ltx.all_gather(torch.zeros(()), tiled=True)
