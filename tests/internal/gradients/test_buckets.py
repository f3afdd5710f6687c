"""Plans of buckets, and what goes in and out of their buffers."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

from ltx import hooks
from ltx.core.gradients.comm_hook import pack, pack_pure, unpack
from ltx.core.gradients.planning import plan_buckets
from ltx.core.gradients.reduction import Bucket, Leaf

CPU, META = torch.device("cpu"), torch.device("meta")


def _random_leaves(count: int, dtypes: list[torch.dtype], devices: list[torch.device]) -> tuple[Leaf, ...]:
    shapes = [torch.Size(random.choices([0, 1, 2, 3, 7, 20], k=random.randrange(3))) for _ in range(count)]
    return tuple(Leaf(shape, random.choice(dtypes), random.choice(devices)) for shape in shapes)


def _bytes(bucket: Bucket) -> int:
    return sum(leaf.nbytes for leaf in bucket.leaves)


DRAWS = range(200)


def test_every_plan(seed: int) -> None:
    for _ in DRAWS:
        leaves = _random_leaves(random.randrange(1, 30), [torch.float32, torch.float64, torch.bfloat16], [CPU, META])
        arrival = tuple(random.sample(range(len(leaves)), len(leaves)))
        sizes = random.choice([1, 64, 1000, 10**6]), random.choice([1, 64, 1000])
        buckets = plan_buckets(leaves, arrival, *sizes)
        assert sorted(m for bucket in buckets for m in bucket.members) == list(range(len(leaves))), "every leaf once"
        assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
        due = [[arrival.index(member) for member in bucket.members] for bucket in buckets]
        assert [max(places) for places in due] == sorted(max(places) for places in due), "by the last arrival"
        for bucket, places in zip(buckets, due, strict=True):
            assert bucket.leaves == tuple(leaves[member] for member in bucket.members)
            assert len({(leaf.dtype, leaf.device) for leaf in bucket.leaves}) == 1
            assert (bucket.dtype, bucket.device) == (bucket.leaves[0].dtype, bucket.leaves[0].device)
            assert places == sorted(places), "leaves lie in the order of their arrival"
            assert len(places) == 1 or _bytes(bucket) <= max(sizes)
            assert bucket.numel == sum(bucket.sizes)


def test_buckets_of_one_dtype_are_full(seed: int) -> None:
    """Each takes what fits: the next leaf, after tiny ones that go with it, would have been too much."""
    for _ in DRAWS:
        leaves = _random_leaves(random.randrange(1, 30), [torch.float32], [CPU])
        arrival = tuple(random.sample(range(len(leaves)), len(leaves)))
        size, first_size = random.choice([1, 64, 1000, 10**6]), random.choice([1, 64, 1000])
        buckets = plan_buckets(leaves, arrival, size, first_size)
        assert [member for bucket in buckets for member in bucket.members] == list(arrival)
        for bucket, following in itertools.pairwise(buckets):
            limit = size if bucket.index else first_size
            assert len(bucket.members) == 1 or _bytes(bucket) <= limit
            more = [leaf.nbytes for leaf in following.leaves]
            tiny = [i for i, nbytes in enumerate(more) if 64 * sum(more[:i]) <= nbytes]  # what comes before is tiny
            assert any(_bytes(bucket) + sum(more[: i + 1]) > limit for i in tiny)


def test_a_bias_travels_with_its_weights() -> None:
    head, bias, weights = (Bucket.of(0, [torch.zeros(n)]).leaves[0] for n in (300, 4, 400))
    together = plan_buckets((weights, bias, head), (2, 1, 0), bucket_bytes=2000, first_bucket_bytes=2000)
    assert [bucket.members for bucket in together] == [(2,), (1, 0)]
    full = plan_buckets((weights, bias, head), (2, 1, 0), bucket_bytes=1600, first_bucket_bytes=1600)
    assert [bucket.members for bucket in full] == [(2, 1), (0,)], "with the bias the weights wouldn't fit"


def test_an_example() -> None:
    leaves = Bucket.of(
        0, [torch.zeros(4), torch.zeros(2, dtype=torch.float64), torch.zeros(2), torch.zeros(100)]
    ).leaves
    buckets = plan_buckets(leaves, (3, 2, 1, 0), bucket_bytes=32, first_bucket_bytes=8)
    assert [bucket.members for bucket in buckets] == [(3,), (1,), (2, 0)]


def test_no_leaves() -> None:
    assert plan_buckets((), (), 10, 10) == ()


def _random_bucket(batch: tuple[int, ...]) -> tuple[Bucket, list[Tensor]]:
    """A bucket and gradients for it, some of which are transposed or expanded."""
    shapes = [(), (3,), (2, 5), (0, 4), (4, 1, 2)]
    grads = [torch.randn((*batch, *shape)) for shape in shapes]
    grads[2] = torch.randn(*batch, 5, 2).transpose(-1, -2)
    grads[1] = torch.randn(*batch, 1).expand(*batch, 3)
    leaves = tuple(Leaf(torch.Size(shape), torch.float32, CPU) for shape in shapes)
    return plan_buckets(leaves, (4, 3, 2, 1, 0), 10**6, 10**6)[0], grads[::-1]


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("wire_dtype", [torch.float32, torch.bfloat16])
def test_in_and_out(batch: tuple[int, ...], wire_dtype: torch.dtype, seed: int) -> None:
    bucket, grads = _random_bucket(batch)
    hook, states = hooks.BF16() if wire_dtype is torch.bfloat16 else hooks.AllReduce(), [{}] * len(grads)
    flat = pack(grads, bucket, hook, 2, states, batch)
    assert (flat.shape, flat.dtype) == (torch.Size([*batch, bucket.numel]), wire_dtype)
    for grad, back in zip(grads, unpack(flat, bucket), strict=True):
        assert (back.shape, back.dtype) == (grad.shape, torch.float32)
        assert torch.equal(back, (0.5 * grad).to(wire_dtype).float())
    if not batch:
        assert torch.equal(flat, pack_pure(grads, bucket, hook, 2, states)), "the readable form does the same"


def test_what_a_hook_carries_over_is_added(seed: int) -> None:
    bucket, grads = _random_bucket(())
    states = [{"residual": torch.randn(g.shape)} if g.ndim else {} for g in grads]
    hook = hooks.TopK(0.5)
    flat = pack(grads, bucket, hook, 2, states)
    for grad, state, part in zip(grads, states, unpack(flat, bucket), strict=True):
        torch.testing.assert_close(part, grad / 2 + state.get("residual", 0))
    assert torch.equal(flat, pack_pure(grads, bucket, hook, 2, states))
