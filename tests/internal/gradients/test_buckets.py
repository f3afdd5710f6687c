"""Plans of buckets, and what goes in and out of their buffers."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor

from ltx import hooks
from ltx.core import comm
from ltx.core.gradients import comm_hook
from ltx.core.gradients.comm_hook import pack, pack_pure, program_of, unpack
from ltx.core.gradients.pending import Pending
from ltx.core.gradients.planning import DEFAULT_BYTES, MIB, bucket_sizes, chosen_sizes, plan_buckets
from ltx.core.gradients.reduction import Bucket, Leaf, LeafState
from ltx.hooks import BucketInput, CollectiveRequest, CommHook, Reduction
from ltx.profile import Network

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


# --- Packing by foreach kernels, which accelerators use, is packing leaf by leaf -------------------------------------


HOOKS = [hooks.AllReduce(), hooks.FP16(), hooks.error_feedback(hooks.ByteGrad()), hooks.PowerSGD()]
SHAPES = [(), (3,), (4, 5), (0,), (2, 1, 3), (100, 100)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("hook", HOOKS, ids=repr)
def test_it_comes_to_the_same(hook: hooks.CommHook, dtype: torch.dtype, seed: int) -> None:
    grads = [torch.randn(shape).to(dtype) for shape in SHAPES]
    grads[2] = grads[2].T.contiguous().T  # as of a linear layer
    bucket = Bucket.of(0, grads)
    states: list[LeafState] = [{k: torch.randn_like(x) for k, x in hook.init(g).items()} for g in grads]
    expected = comm_hook.pack(grads, bucket, hook, 3, states)
    flat = torch.empty_like(expected)
    terms = [hook.extra_terms(state, 3) for state in states]
    comm_hook._pack_by_foreach(grads, flat, bucket, hook.scale(3), terms)
    torch.testing.assert_close(flat, expected)


def test_accelerators_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Any] = []
    monkeypatch.setattr(comm_hook, "_pack_by_foreach", lambda *arguments: used.append(arguments))
    leaf: Tensor = torch.ones(2, device="meta")
    bucket = Bucket.of(0, [leaf])
    comm_hook.pack([leaf], bucket, hooks.AllReduce(), 2, [{}])
    assert len(used) == 1


# --- Sizes of buckets from the cost model, against the model itself --------------------------------------------------


START = 0.02


def _drawn() -> tuple[Network, int, int]:
    bandwidth, latency = (10 ** (a + b * torch.rand(()).item()) for a, b in ((6.0, 5.5), (-6.0, 4.0)))
    return Network(bandwidth, latency), int(torch.randint(2, 65, ())), int(10 ** (4 + 6 * torch.rand(()).item()))


def _starts_s(network: Network, ranks: int, nbytes: int, size: int) -> float:
    """What is lost where the link is what a step waits for."""
    return network.start_s(ranks) * nbytes / size


def _tail_s(network: Network, ranks: int, nbytes: int, size: int) -> float:
    """What is lost where it isn't: the last bucket."""
    return network.sum_s(size, ranks) - network.start_s(ranks)


def test_every_size(seed: int) -> None:
    for _ in range(300):
        network, ranks, nbytes = _drawn()
        size, first = bucket_sizes(network, ranks, nbytes, MIB)
        assert size & (size - 1) == 0, "a power of two"
        assert 256 << 10 <= size <= 256 << 20
        assert 0 < first <= min(size // 4, MIB)
        assert bucket_sizes(network, ranks, nbytes, 1000)[1] == 1000


def test_starts_take_little_of_the_links_time(seed: int) -> None:
    """Where the link is the bottleneck: at most what the default's starts take, or a fiftieth of the whole, rounded."""
    for _ in range(300):
        network, ranks, nbytes = _drawn()
        size, _ = bucket_sizes(network, ranks, nbytes, MIB)
        lost = _starts_s(network, ranks, nbytes, size)
        default = _starts_s(network, ranks, nbytes, DEFAULT_BYTES)
        assert lost <= max(1.5 * default, 1.45 * START * network.sum_s(nbytes, ranks))


def test_it_is_near_the_best_of_the_sum(seed: int) -> None:
    """Where neither the bounds nor the default hold it, no other power of two loses a tenth less."""
    for _ in range(300):
        network, ranks, nbytes = _drawn()
        size, _ = bucket_sizes(network, ranks, nbytes, MIB)
        if size <= DEFAULT_BYTES or size == 256 * MIB:
            continue
        lost = {
            other: _starts_s(network, ranks, nbytes, other) + _tail_s(network, ranks, nbytes, other)
            for other in (1 << k for k in range(18, 29))
        }
        assert lost[size] <= 1.1 * min(lost.values())


def test_latency_makes_buckets_larger(seed: int) -> None:
    for _ in range(50):
        network, ranks, nbytes = _drawn()
        sizes = [bucket_sizes(Network(network.bandwidth, k * network.latency), ranks, nbytes, MIB)[0] for k in (1, 10)]
        assert sizes == sorted(sizes)


@pytest.mark.parametrize(
    ("network", "size"),
    [
        (Network(25e9, 50e-6), 4 * MIB),  # shared memory
        (Network(1e9, 125e-6), 2 * MIB),
        (Network(1e8, 300e-6), 512 << 10),
        (Network(1e9, 20e-3), 8 * MIB),  # far apart
    ],
)
def test_known_links(network: Network, size: int) -> None:
    assert bucket_sizes(network, 2, 21_000_000, MIB) == (size, min(size // 4, MIB))


@pytest.mark.full(but=1)
@pytest.mark.parametrize(
    ("hook", "sizes"),
    [
        (hooks.AllReduce(), (2 * MIB, MIB // 2)),
        (hooks.FP16(), (2 * MIB, MIB // 2)),
        (hooks.ByteGrad(), (4 * MIB, MIB)),
        (hooks.PowerSGD(rank=2), (4 * MIB, MIB)),
    ],
    ids=repr,
)
def test_hooks_of_several_phases_keep_the_default_at_least(hook: hooks.CommHook, sizes: tuple[int, int]) -> None:
    network = Network(1e9, 125e-6)
    assert chosen_sizes((4 * MIB, MIB), network, hook, 2, 21_000_000) == sizes
    assert chosen_sizes((4 * MIB, MIB), Network(1e9, 20e-3), hook, 2, 21_000_000)[0] == 8 * MIB
    assert chosen_sizes((4 * MIB, MIB), None, hook, 2, 21_000_000) == (4 * MIB, MIB)


@pytest.mark.full
def test_nothing_to_send() -> None:
    assert bucket_sizes(Network(1e9, 1e-4), 2, 0, MIB)[0] >= 1
    assert math.log2(bucket_sizes(Network(1e9, 0.0), 2, 10, MIB)[0]).is_integer()


# --- Pending reductions: on each phase's channel issues go out in bucket order, whatever order collectives complete in


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

    def issue(self, operation: str, buffer: Tensor, label: str, *_: Any) -> Work:
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
        pending.launch([program_of(Twice(), BucketInput(torch.ones(2), cast(Bucket, None), 2))], Twice())
    assert first.issued == ["bucket 0", "bucket 1", "bucket 2"]
    first.works[2].done = first.works[1].done = True
    pending.poll()
    assert second.issued == []
    first.works[0].done = True
    pending.poll()
    assert second.issued == ["bucket 0", "bucket 1", "bucket 2"]
