"""Plans of buckets."""

from __future__ import annotations

import itertools
import random

import torch

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
