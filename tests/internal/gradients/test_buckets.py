"""Plans of buckets, reductions that are under way, and the kernels that packing takes."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ltx
from ltx.core import comm
from ltx.core.gradients import buffers, marker
from ltx.core.gradients.pending import Pending
from ltx.core.gradients.planning import plan_buckets
from ltx.core.gradients.reduction import Bucket, Leaf, LeafState
from ltx.core.optim.kernel import run_aligned
from ltx.errors import UnsupportedError
from ltx.hooks import BucketInput, CollectiveRequest, CommHook, Reduction, noise
from ltx.nn import _Normalised, _normalised_by_formula
from tests.train_on import on_ranks, refuses, said

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
        buckets = plan_buckets(leaves, arrival, sizes)
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
        buckets = plan_buckets(leaves, arrival, (size, first_size))
        assert [member for bucket in buckets for member in bucket.members] == list(arrival)
        for bucket, following in itertools.pairwise(buckets):
            limit = size if bucket.index else first_size
            assert len(bucket.members) == 1 or _bytes(bucket) <= limit
            more = [leaf.nbytes for leaf in following.leaves]
            tiny = [i for i, nbytes in enumerate(more) if 64 * sum(more[:i]) <= nbytes]  # what comes before is tiny
            assert any(_bytes(bucket) + sum(more[: i + 1]) > limit for i in tiny)


def test_a_bias_travels_with_its_weights() -> None:
    head, bias, weights = (Bucket.of(0, [torch.zeros(n)]).leaves[0] for n in (300, 4, 400))
    together = plan_buckets((weights, bias, head), (2, 1, 0), sizes=(2000, 2000))
    assert [bucket.members for bucket in together] == [(2,), (1, 0)]
    full = plan_buckets((weights, bias, head), (2, 1, 0), sizes=(1600, 1600))
    assert [bucket.members for bucket in full] == [(2, 1), (0,)], "with the bias the weights wouldn't fit"


# Pending reductions: on each phase's channel issues go out in bucket order, whatever order collectives complete in.
@dataclass(frozen=True)
class Twice(CommHook):
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


READS = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")


class Kernels(TorchDispatchMode):
    """Counts operations that aren't views, and don't only take memory; a list of tensors that lie unlike is so many."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not views and "empty" not in func.name():
            lists = [x for x in args if isinstance(x, list)]
            steps = [[[s for n, s in zip(x.shape, x.stride(), strict=True) if n > 1] for x in given] for given in lists]
            self.seen[func._schema.name] += 1 if all(given == steps[0] for given in steps) else len(lists[0])
        return func(*args, **(kwargs or {}))


def counted(run: Callable[[], Any]) -> Counter[str]:
    with Kernels() as kernels:
        run()
    return kernels.seen


def convolutions() -> list[Tensor]:
    """Gradients of a residual network in channels_last: of ten convolutions two are 3 x 3."""
    shapes = [(4, 6, side, side) for side in (1, 1, 3, 1, 1, 1, 3, 1, 1, 1)]
    return [x for s in shapes for x in (torch.randn(s).to(memory_format=torch.channels_last), torch.randn(4))]


@pytest.mark.parametrize("hook", [ltx.hooks.AllReduce(), ltx.hooks.BF16()], ids=repr)
def test_packing_copies_together_what_lies_alike(hook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "IN_PIECES", frozenset())
    grads = convolutions()
    bucket, states = Bucket.of(0, grads), [{} for _ in grads]
    seen = counted(lambda: buffers.pack(grads, bucket, hook, 4, states))
    several = next(k for k in seen if "foreach_mul" in k)
    assert seen == {"aten::_foreach_copy_": 1, several: 1, "aten::mul": 2}, "what lies otherwise is scaled on its way"
    alone = counted(lambda: buffers.pack(grads, bucket, hook, 1, states))
    assert alone == {"aten::_foreach_copy_": 1, "aten::mul": 2}, "no list is multiplied by 1"
    expected = torch.cat([(g / 4).to(hook.packing(g.dtype, 4).dtype).reshape(-1) for g in grads])
    assert torch.equal(buffers.pack(grads, bucket, hook, 4, states), expected)


HOOKS = [ltx.hooks.AllReduce(), ltx.hooks.FP16(), ltx.hooks.error_feedback(ltx.hooks.ByteGrad()), ltx.hooks.PowerSGD()]
SHAPES = [(), (3,), (4, 5), (0,), (2, 1, 3), (100, 100)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("hook", HOOKS, ids=repr)
def test_packing_by_few_kernels(hook: ltx.hooks.CommHook, dtype: torch.dtype, seed: int) -> None:
    grads = [torch.randn(shape).to(dtype) for shape in SHAPES]
    grads[2] = grads[2].T.contiguous().T  # as of a linear layer
    bucket = Bucket.of(0, grads)
    states: list[LeafState] = [{k: torch.randn_like(x) for k, x in hook.init(g).items()} for g in grads]
    expected = buffers.pack(grads, bucket, hook, 3, states)
    flat = torch.empty_like(expected)
    packing = hook.packing(dtype, 3)
    buffers._pack_by_foreach(grads, flat, bucket, packing.scale, [packing.terms(state) for state in states])
    torch.testing.assert_close(flat, expected)


def test_accelerators_pack_so(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Any] = []
    monkeypatch.setattr(buffers, "_pack_by_foreach", lambda *arguments: used.append(arguments))
    leaf: Tensor = torch.ones(2, device="meta")
    buffers.pack([leaf], Bucket.of(0, [leaf]), ltx.hooks.AllReduce(), 2, [{}])
    assert len(used) == 1


def test_optimizers_copy_gradients_that_lie_otherwise_alone() -> None:
    params, ran = convolutions(), []
    grads = buffers.unpack(torch.randn(sum(p.numel() for p in params)), Bucket.of(0, params))
    states = [{"exp_avg": torch.zeros_like(p)} for p in params]
    seen = counted(lambda: run_aligned(lambda *given: ran.append(given), grads, states, params))
    assert (seen, len(ran)) == ({"aten::copy_": 2}, 1)


@pytest.mark.parametrize("parts", [(0,), (7, 1 << 40, 3, -1)], ids=str)
def test_a_key_of_numbers_is_one_kernel(parts: tuple[int, ...]) -> None:
    cpu, key = torch.device("cpu"), noise.key_of(*parts, device=torch.device("cpu"))
    assert sum(counted(lambda: noise.key_of(*parts, device=cpu)).values()) == 1
    for tensors in range(1, len(parts) + 1):  # simulated ranks and counts of steps are tensors
        mixed = [*parts[:-tensors], *(torch.tensor(p & 0xFFFFFFFF) for p in parts[-tensors:])]
        assert torch.equal(noise.key_of(*mixed, device=cpu), key)


def test_buffers_that_nobody_takes_are_compared_in_one_read() -> None:
    net = nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(5)), nn.Dropout())
    for norm in net[:5]:
        norm.eval()  # as when only the rest is trained
    given, x = (dict(net.named_parameters()), dict(net.named_buffers())), torch.randn(4, 3)
    seen = counted(lambda: ltx.functional_call(net, given, (x,)))
    assert sum(seen[name] for name in READS) == 1
    net[3].num_batches_tracked = None  # nothing counts now that this one writes
    net[3].train()
    given = (dict(net.named_parameters()), dict(net.named_buffers()))
    refuses(ltx.errors.StepError, r"wrote to '3\.running_mean'", ltx.functional_call, net, given, (x,))


@pytest.mark.parametrize("affine", [True, False])
def test_second_derivatives_by_kernels_of_statistics_that_depend_on_x(affine: bool, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    x, dy, tangent = (torch.randn(5, 3, 2, generator=draw, dtype=torch.float64) for _ in range(3))
    weight, bias = (torch.randn(3, generator=draw, dtype=torch.float64) if affine else None for _ in range(2))

    def second(normalised: Any) -> list[torch.Tensor]:
        given = [t.clone().requires_grad_() for t in (x, weight, bias) if t is not None]
        var, mean = torch.var_mean(given[0], [0, 2], correction=0)
        y = normalised(1e-5, given[0], mean, var, *(given[1:] if affine else (None, None)))
        first = torch.autograd.grad(y, given, dy, create_graph=True)
        return list(torch.autograd.grad((first[0] * tangent).sum(), given[: 1 + affine]))

    torch.testing.assert_close(second(_Normalised.apply), second(_normalised_by_formula))


@on_ranks(2)
def test_a_gradient_that_comes_twice_before_torch_2_13() -> None:
    """Where torch can't raise a node's priority; all else there, tests/contract holds on such a torch."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            x, w = ctx.saved_tensors
            with torch.enable_grad():
                (x.detach() @ w).backward(grad)
            return grad @ w.T, x.T @ grad

    strategy = ltx.DDPStrategy(bucket_bytes=256, first_bucket_bytes=256)  # a bucket a matrix
    step = ltx.data_parallel(lambda p, x: Twice.apply(x, p["a"]).square().mean(), strategy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(marker, "can_raise_priority", lambda: False)
        told = said(UnsupportedError, ltx.grad(step), {name: torch.ones(8, 8) for name in "ab"}, torch.ones(4, 8))
    assert "a gradient came twice in one backward pass" in told
