"""gather, scatter, broadcast, psum_to, all_gather and psum_scatter: what the conformance table leaves out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ltx
from ltx.errors import AxisError, RankMismatchError
from tests import inside
from tests.kinds import Ranks
from tests.train_on import on_ranks, refuses, said


def test_only_src_s_values_matter(ranks: Ranks) -> None:
    """NaN on the others doesn't leak, forward or backward."""

    def run(x: Tensor) -> tuple[Tensor, ...]:
        mine = torch.where(ltx.axis_index() == 1, x, torch.nan)
        grad, value = torch.func.grad_and_value(lambda x: (ltx.scatter(x, src=1) * (1 + ltx.axis_index())).sum())(mine)
        of_broadcast, total = torch.func.grad_and_value(lambda x: ltx.broadcast(x, src=1).sum())(mine)
        return grad, value, torch.func.grad(lambda x: ltx.gather(x, dst=1).sum())(x), of_broadcast, total

    x = torch.tensor([3.0, 5.0])
    for found in (ltx.vmap(run)(x.expand(2, 2)), ranks(2).run(run, x).stack()):
        grad, value, of_gather, of_broadcast, total = (y.tolist() for y in found)
        assert (value, total) == ([3.0, 10.0], [8.0, 8.0])
        assert grad == [[0.0, 0.0], [1.0, 2.0]]
        assert of_gather == [[1.0, 1.0], [1.0, 1.0]]
        assert of_broadcast == [[0.0, 0.0], [2.0, 2.0]]


@on_ranks(2)
def test_what_is_sent() -> None:
    """One message each; gather sends what a rank has, not what all have."""
    x = torch.ones(2, 4)
    with ltx.profile.record() as trace:
        ltx.gather({"a": x}, dst=1)
        ltx.scatter(x)
        ltx.psum_to(x)
    sent = [(event.operation, event.nbytes) for event in trace.events]
    assert sent == [("gather", 32), ("scatter", 16), ("psum", 32)]


CALLS: dict[str, Callable[[Tensor, int], Any]] = {
    "gather: dst": lambda x, rank: ltx.gather(x, dst=rank),
    "scatter: src": lambda x, rank: ltx.scatter(x, src=rank),
    "psum_to: dst": lambda x, rank: ltx.psum_to(x, dst=rank),
    "broadcast: src": lambda x, rank: ltx.broadcast(x, src=rank),
    "broadcast_object: src": lambda x, rank: ltx.broadcast_object(1, src=rank),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("rank", [-1, 2])
def test_ranks_that_are_not_on_the_axis(ranks: Ranks, call: str, rank: int) -> None:
    text = rf"{call}={rank} isn't an index on an axis of 2 ranks, 0 to 1\. It counts on the axis, not in the world\."
    ranks(2).run(lambda: refuses(AxisError, text, CALLS[call], torch.ones(2), rank))
    refuses(AxisError, text, ltx.vmap(lambda x: CALLS[call](x, rank)), torch.ones(2, 2))


@on_ranks(2)
def test_ranks_that_disagree() -> None:
    rank, x = int(ltx.axis_index()), torch.ones(2, 11)  # which is new to both
    for call in (*list(CALLS.values())[:4], lambda x, rank: ltx.ppermute(x, [(rank, 1 - rank)])):
        text = said(RankMismatchError, call, x, rank)
        assert "its arguments: rank 0: arguments [(0" in text
        assert "rank 1: arguments [(1" in text
    refuses(RankMismatchError, r"rank 0: float32\[12\]; rank 1: float32\[13\]", ltx.gather, torch.ones(12 + rank))


@pytest.mark.parametrize(
    ("shape", "call", "message"),
    [
        ([3], ltx.scatter, "scatter over 2 ranks: dimension 0 of a tensor of shape [3] must be 2, got 3"),
        ([3], lambda x: ltx.scatter(x, tiled=True), "must be a multiple of 2, got 3"),
        ([3], lambda x: ltx.scatter(x, dim=1), "scatter: dim=1 is out of range for a tensor of shape [3]"),
        ([3], lambda x: ltx.gather(x, dim=2), "gather: dim=2 is out of range for a tensor of shape [3]"),
        ([], lambda x: ltx.gather(x, tiled=True), "Stack 0-dim tensors with tiled=False."),
        ([3], lambda x: ltx.all_gather(x, dim=2), "all_gather: dim=2 is out of range for a tensor of shape [3]."),
        ([], lambda x: ltx.all_gather(x, tiled=True), "shape []. Stack 0-dim tensors with tiled=False."),
        ([3, 2], ltx.psum_scatter, "over 2 ranks: dimension 0 of a tensor of shape [3, 2] must be 2, got 3"),
        ([3, 2], lambda x: ltx.psum_scatter(x, tiled=True), "of shape [3, 2] must be a multiple of 2, got 3"),
        ([2, 3], lambda x: ltx.psum_scatter(x, dim=-1), "dimension -1 of a tensor of shape [2, 3] must be 2, got 3"),
        ([2], lambda x: ltx.psum_scatter(x, dim=1), "dim=1 is out of range for a tensor of shape [2]"),
        ([], ltx.psum_scatter, "dim=0 is out of range for a tensor of shape []"),
        ([3, 4], lambda x: ltx.all_to_all(x, 0, 0), "of shape [3, 4] must be a multiple of 2, got 3"),
        ([3, 4], lambda x: ltx.all_to_all(x, 1, 2), "concat_dim=2 is out of range for a tensor of shape [3, 4]"),
        ([3, 4], lambda x: ltx.all_to_all(x, -3, 0), "split_dim=-3 is out of range"),
        ([4], lambda x: ltx.all_to_all(x, 0, 0, tiled=False), "dimension 0 of a tensor of shape [4] must be 2, got 4"),
        ([1], lambda x: ltx.all_to_all(x, 2, 0, tiled=False), "split_dim=2 is out of range"),
    ],
)
def test_shapes_that_do_not_fit(ranks: Ranks, shape: list[int], call: Callable[[Tensor], Any], message: str) -> None:
    assert message in ranks(2).run(lambda: said(AxisError, call, torch.ones(shape))).replicated()
    assert message in said(AxisError, lambda: ltx.vmap(call)(torch.ones(2, *shape)))


# All_gather, psum_scatter and AllGatherGrad: what the conformance table can't say.
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


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(("split", "concat"), [(0, 0), (1, 0), (0, -1), (-1, 1)])
def test_untiled(ranks: Ranks, n: int, split: int, concat: int, seed: int) -> None:
    """As in JAX by default: the dimension of the parts goes away, one of the sources comes in."""
    xs = torch.randn(n, *(n if dim == split % 3 else 3 + dim for dim in range(3)))
    want = [torch.stack([x.select(split, rank) for x in xs], concat) for rank in range(n)]

    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        y, pull = torch.func.vjp(lambda x: ltx.all_to_all(x, split, concat, tiled=False), x)
        return y, pull(y)[0]  # the transpose brings every part back to where it came from

    real = ranks(n).run(lambda xs: call(xs[ltx.axis_index()]), xs)
    simulated = ltx.vmap(call)(xs)
    for rank in range(n):
        for y, back in (real.rank(rank), [part[rank] for part in simulated]):
            assert torch.equal(y, want[rank])
            assert torch.equal(back, xs[rank])


def test_pairs_of_any_kind(ranks: Ranks) -> None:
    pairs = [(0, 1), (1, 0)]
    kinds: dict[str, Callable[[], Any]] = {
        "zip": lambda: zip([0, 1], [1, 0], strict=True),
        "generator": lambda: (pair for pair in pairs),
        "set": lambda: set(pairs),
        "items": lambda: {0: 1, 1: 0}.items(),
        "lists": lambda: [[0, 1], [1, 0]],
        "array": lambda: numpy.array(pairs),
        "numbers of NumPy": lambda: [(numpy.int64(a), numpy.int32(b)) for a, b in pairs],
        "rows of an array": lambda: list(numpy.array(pairs)),
    }

    def run(x: Tensor) -> Any:
        return [ltx.ppermute(x, make()) for make in kinds.values()]

    xs = torch.tensor([3.0, 4.0])
    real = ranks(2).run(lambda: run(xs[ltx.axis_index()]))
    for kind, simulated, *both in zip(kinds, ltx.vmap(run)(xs), *real, strict=True):
        assert torch.equal(simulated, xs.flip(0)), kind
        assert torch.equal(torch.stack(both), xs.flip(0)), kind
    assert ltx.ppermute(xs, numpy.zeros((1, 2), int)).tolist() == xs.tolist()  # alone


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ltx.ppermute(x, [(0, 2)]), "perm holds (0, 2), not a (source, destination) of ranks 0 to 1"),
        (lambda x: ltx.ppermute(x, [(0, 1), (0, 0)]), "rank 0 is the source of more than one pair"),
        (lambda x: ltx.ppermute(x, [(0, 1), (1, 1)]), "rank 1 is the destination of more than one pair"),
        (lambda x: ltx.ppermute(x, [(0, 1, 1)]), "perm holds (0, 1, 1)"),
        (lambda x: ltx.ppermute(x, [(0, 1.0)]), "perm holds (0, 1.0)"),
        (lambda x: ltx.ppermute(x, {0: 1, 1: 0}), "got {0: 1, 1: 0} of type dict. Give perm.items()."),
        (lambda x: ltx.ppermute(x, torch.tensor(1)), "got tensor(1) of type Tensor. Give perm.tolist()."),
    ],
)
def test_permutations_that_are_none(call: Callable[[Tensor], Tensor], message: str) -> None:
    assert message in said(AxisError, lambda: ltx.vmap(call)(torch.ones(2, 3, 4)))
