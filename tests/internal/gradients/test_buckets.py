"""Plans of buckets, and reductions that are under way."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from ltx.core import comm
from ltx.core.gradients.pending import Pending
from ltx.core.gradients.planning import plan_buckets
from ltx.core.gradients.reduction import Bucket, Leaf
from ltx.hooks import BucketInput, CollectiveRequest, CommHook, Reduction

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


# Pending reductions: on each phase's channel issues go out in bucket order, whatever order collectives complete in.
@dataclass(frozen=True)
class Twice(CommHook):
    """Two sums, one after the other."""

    phases: ClassVar[int] = 2

    def reduce(self, inputs: BucketInput) -> Reduction:
        first = yield CollectiveRequest("psum", inputs.flat)
        second = yield CollectiveRequest("psum", first)
        return second, inputs.states


@dataclass
class Work:
    """An issue that is complete when the test says so, or when it is waited for."""

    value: Tensor
    done: bool = False
    total: None = None

    def wait(self) -> Tensor:
        self.done = True
        return self.value


@dataclass
class Channel:
    """Takes down what is issued on it."""

    issued: list[str] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)

    def issue(self, operation: str, buffer: Tensor, label: str, *_: Any, note: Any, eager: bool) -> Work:
        self.issued.append(label)
        self.works.append(Work(buffer))
        return self.works[-1]


def test_what_completes_first_waits_for_the_buckets_before_it() -> None:
    first, second = channels = [Channel(), Channel()]
    pending = Pending(
        cast(comm.AxisComm, SimpleNamespace(size=2, rank=0, stream_of=lambda device: None)),
        channel_of=lambda axis_comm, phase: cast(comm.Channel, channels[phase]),
    )
    for _ in range(3):
        pending.reduce(Twice(), BucketInput(torch.ones(2), cast(Bucket, None), 2))
    assert first.issued == ["bucket 0", "bucket 1", "bucket 2"]
    first.works[2].done = first.works[1].done = True
    pending.poll()
    assert second.issued == []
    first.works[0].done = True
    pending.poll()
    assert second.issued == ["bucket 0", "bucket 1", "bucket 2"]
