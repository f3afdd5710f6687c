"""explain: what is explained before a step is what is recorded of it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ltx
from ltx import hooks
from ltx.errors import InputError, StepError, StrategyError, TreeError, UnsupportedError
from ltx.extend import inner, outer
from ltx.hooks import BucketInput, CollectiveRequest, CommHook, Reduction
from ltx.strategies import StateLayout, StepInfo
from tests import inside
from tests.contract.strategies.test_protocol import STRATEGIES, Gossip, LocalSGD, problem, trainer
from tests.covering import some
from tests.kinds import Params, Ranks
from tests.twins.feedback import ErrorFeedback
from tests.twins.phases import InTwoPhases, OftenInTwoPhases

SGD = ltx.optim.from_torch(torch.optim.SGD, lr=0.01)


@dataclass(frozen=True)
class InThreePhases(CommHook):
    """As compressors go: parts are exchanged in half precision, summed, gathered; then a sum that adds nothing."""

    exact: ClassVar[bool] = False
    phases: ClassVar[int] = 3

    def reduce(self, share: BucketInput) -> Reduction:
        n, numel = share.axis_size, share.flat.numel()
        rows = torch.nn.functional.pad(share.flat, (0, -numel % n)).reshape(n, -1).bfloat16()
        mine = yield CollectiveRequest("all_to_all", rows)
        whole = yield CollectiveRequest("all_gather", mine.sum(0))
        zero = yield CollectiveRequest("psum", torch.zeros(3, device=share.flat.device))
        return whole.reshape(-1)[:numel].to(share.flat.dtype) + zero.sum().to(share.flat.dtype), share.states


@dataclass(frozen=True)
class Warm(hooks.FP16):
    """The exact mean for two steps, then half precision."""

    reads_step: ClassVar[bool] = True

    def at(self, step: int) -> CommHook:
        return hooks.AllReduce() if step < 2 else hooks.FP16()


HOOKS: tuple[CommHook, ...] = (
    hooks.AllReduce(),
    hooks.FP16(),
    hooks.BF16(),
    InTwoPhases(),
    OftenInTwoPhases(),
    InThreePhases(),
    ErrorFeedback(),
    hooks.ByteGrad(),
    hooks.Quantize("channel", 16),
    hooks.QSGD(block=8),
    hooks.OneBit(block=8),
    hooks.TopK(0.3),
    hooks.RandomK(0.3),
    hooks.PowerSGD(1, start_step=0, min_compression_rate=0.5),
    hooks.BatchedPowerSGD(2, start_step=0),
    hooks.cast(hooks.PowerSGD(1, start_step=0, min_compression_rate=0.5), torch.bfloat16),
    hooks.chain(hooks.RandomK(0.5), hooks.ByteGrad()),
    hooks.error_feedback(hooks.FP16()),
)


def _params() -> Params:
    """Of several dtypes, some empty or 0-dim; the names aren't sorted."""
    return {
        "e": torch.randn(7, 5),
        "d": torch.randn(11, dtype=torch.float64),
        "c": torch.randn(()),
        "f": torch.randn(0, 3),
        "b": torch.randn(4, 9).T,
        "z": torch.randn(0, dtype=torch.float16),
        "a": torch.randn(13).bfloat16(),
    }


def _loss(params: Params, x: Tensor) -> Tensor:
    return sum(((p * x) ** 2).sum().double() for p in params.values()).float()


def _step(hook: CommHook, loss: Any = _loss, **kwargs: Any) -> ltx.DataParallel:
    strategy = ltx.DDPStrategy(comm_hook=hook, first_bucket_bytes=60, bucket_bytes=150)
    return ltx.data_parallel(loss, strategy, **kwargs)


def _train(hook: CommHook, **kwargs: Any) -> Any:
    return ltx.train_step(_step(hook), ltx.optim.from_torch(torch.optim.SGD, lr=0.1), **kwargs)


def _backward(step: ltx.DataParallel, params: Params, x: Tensor) -> None:
    given = ltx.Synced(params, step.init(params)) if step.strategy.stateful else params
    step(ltx.tree.map(lambda t: t.detach().clone().requires_grad_(), given), x).backward()


WAYS: dict[str, Callable[[ltx.DataParallel, Params, Tensor], Any]] = {
    "ltx.grad": lambda step, params, x: ltx.grad(step)(params, x, sync_state=step.init(params)),
    "backward": _backward,
    "sync_gradients": lambda step, params, x: ltx.sync_gradients(
        ltx.grad(ltx.block_backward_sync(step))(params, x), step.strategy, step.init(params)
    ),
    "accumulate": lambda step, params, x: ltx.grad(ltx.accumulate(step, 2))(params, x, sync_state=step.init(params)),
}


@pytest.mark.full(but=1)
@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: type(hook).__name__)
def test_is_what_is_recorded(ranks: Ranks, hook: CommHook, n: int, seed: int) -> None:
    params = _params()

    def run() -> list[ltx.profile.Explanation]:
        step, x = _step(hook), torch.tensor(float(ltx.axis_index()))
        found = []
        for name, way in WAYS.items():
            with ltx.profile.record() as nothing:
                found.append(ltx.profile.explain(step, params, x))
            assert nothing.events == []
            with ltx.profile.record() as trace:
                way(step, params, x)
                ltx.psum(x)
            assert found[-1].matches(trace), (name, str(found[-1]), trace)
            assert sum(event.nbytes for event in trace.buckets) == found[-1].bytes
            assert len(trace.buckets) == found[-1].collectives
            assert [event.nbytes for event in trace.events if event.label == "summary"] == [found[-1].summary_bytes]
            with ltx.profile.record() as trace:
                for _ in range(3):
                    way(step, params, x)
            assert found[-1].matches(trace, steps=3)
            assert not found[-1].matches(trace, steps=2)
        return found

    for rank, found in enumerate(ranks(n).run(run)):
        here = replace(ltx.profile.explain(_step(hook), params, world=n), rank=rank)
        assert found == [here] * len(WAYS)


@pytest.mark.full(but=1)
@pytest.mark.parametrize("overlap", ["backward", "update"])
@pytest.mark.parametrize("n", [2, 3])
def test_train_steps_whose_hook_changes(ranks: Ranks, n: int, overlap: Any, seed: int) -> None:
    params = {name: p for name, p in _params().items() if p.dtype == torch.float32}

    def run() -> list[str]:
        train, x = _train(Warm(), overlap=overlap), torch.tensor(float(ltx.axis_index()))
        state, seen = train.init(params), []
        for number in range(4):
            explained = ltx.profile.explain(train, state, x)
            assert explained == ltx.profile.explain(train, params, sync_step=number)
            with ltx.profile.record() as trace:
                state, _ = train(state, x)
            assert explained.matches(trace), (str(explained), trace)
            seen.append(repr(explained.hook))
        return seen

    assert ranks(n).run(run).replicated() == ["AllReduce()"] * 2 + ["FP16()"] * 2


def test_what_doesnt_match(ranks: Ranks) -> None:
    params = {"a": torch.ones(40), "b": torch.ones(40)}

    def run() -> list[bool]:
        step = _step(InTwoPhases())
        with ltx.profile.record() as trace:
            torch.func.grad(step)(params, torch.tensor(1.0))
        explained = ltx.profile.explain(step, params)
        lost = replace(trace, events=trace.events[:-1])
        turned = replace(trace, events=trace.events[::-1])
        other = replace(trace, events=[replace(event, nbytes=event.nbytes + 1) for event in trace.events])
        return [
            *(explained.matches(t) for t in (trace, lost, turned, other, ltx.profile.Trace())),
            *(ltx.profile.explain(_step(hook), params).matches(trace) for hook in (hooks.AllReduce(), hooks.FP16())),
        ]

    assert ranks(2).run(run).replicated() == [True] + [False] * 6


def test_by_hand() -> None:
    """Four ranks send 2 * 3/4 of a buffer to sum it, 3/4 to scatter or exchange it, 3 times it to gather it."""
    params = {"first": torch.ones(10), "w": torch.ones(5, 4), "tail": torch.ones(16, dtype=torch.float64)}
    rows = {
        "AllReduce": (hooks.AllReduce(), [[("psum", 192)], [("psum", 120)], [("psum", 60)]]),
        "FP16": (hooks.FP16(), [[("psum", 48)], [("psum", 60)], [("psum", 30)]]),
        "InTwoPhases": (
            InTwoPhases(),
            [
                [("psum_scatter", 96), ("all_gather", 96)],
                [("psum_scatter", 60), ("all_gather", 60)],
                [("psum_scatter", 36), ("all_gather", 36)],  # 10 elements padded to 12
            ],
        ),
        "InThreePhases": (
            InThreePhases(),
            [
                [("all_to_all", 24), ("all_gather", 24), ("psum", 18)],
                [("all_to_all", 30), ("all_gather", 30), ("psum", 18)],
                [("all_to_all", 18), ("all_gather", 18), ("psum", 18)],
            ],
        ),
    }
    for name, (hook, issued) in rows.items():
        strategy = ltx.DDPStrategy(comm_hook=hook, first_bucket_bytes=1, bucket_bytes=1)
        found = ltx.profile.explain(ltx.data_parallel(_loss, strategy), params, world=4)
        assert [[(c.operation, c.nbytes) for c in bucket.collectives] for bucket in found.buckets] == issued, name
        assert [bucket.paths for bucket in found.buckets] == [("tail",), ("w",), ("first",)]
        assert [(b.index, b.elements, b.nbytes) for b in found.buckets] == [(0, 16, 128), (1, 20, 80), (2, 10, 40)]
        assert [bucket.dtype for bucket in found.buckets] == [torch.float64, torch.float32, torch.float32]
        assert all(bucket.hook is hook for bucket in found.buckets)
        total = sum(nbytes for bucket in issued for _, nbytes in bucket)
        assert (found.bytes, found.plain_bytes, found.summary_bytes) == (total, 372, 96)
        assert found.compression == 372 / total
        assert found.collectives == sum(map(len, issued))


def test_nothing_runs_and_nothing_needs_memory() -> None:
    def never(params: Params, x: Tensor) -> Tensor:
        raise AssertionError("called")

    params = {"w": torch.empty(1 << 20, 1 << 20, device="meta"), "count": torch.empty(3, dtype=torch.int64)}
    with ltx.profile.record() as trace:
        found = ltx.profile.explain(_step(InThreePhases(), never), params, world=1000)
    assert trace.events == []
    assert [bucket.paths for bucket in found.buckets] == [("w",)]  # integers have no gradients
    assert found.plain_bytes == 2 * (1 << 42) * 999 // 1000


def test_one_rank_alone_may_ask_and_opens_no_axis(ranks: Ranks) -> None:
    def run() -> tuple[int, int] | None:
        group, found = dist.new_group(list(range(dist.get_world_size()))), None
        if dist.get_rank() == 1:
            before = inside.open_axes()
            explained = ltx.profile.explain(_step(hooks.AllReduce(), axis=group), _params())
            assert inside.open_axes() == before
            found = explained.world, explained.rank
        dist.destroy_process_group(group)
        return found

    assert list(ranks(2).run(run)) == [None, (2, 1)]


def test_simulated_ranks_are_explained_as_processes_are() -> None:
    found = []

    def one_rank(params: Params) -> Tensor:
        found.append(ltx.profile.explain(_step(ErrorFeedback()), params))
        return params["e"].sum()

    stacked = {name: p.expand(3, *p.shape) for name, p in _params().items()}
    ltx.vmap(one_rank)(stacked)
    assert found == [ltx.profile.explain(_step(ErrorFeedback()), _params(), world=3)]


def test_what_the_parameters_come_in() -> None:
    params = {"w": torch.ones(40)}
    step, warm = _step(ErrorFeedback()), _step(Warm())
    bare = ltx.profile.explain(step, params, world=2)
    assert ltx.profile.explain(step, ltx.Synced(params, step.init(params)), torch.ones(2), world=2) == bare
    state = replace(warm.init(params), step=5)
    assert ltx.profile.explain(warm, ltx.Synced(params, state), world=2).sync_step == 5
    assert ltx.profile.explain(warm, ltx.Synced(params, state), world=2, sync_step=1).hook == hooks.AllReduce()
    second = _step(hooks.AllReduce(), lambda x, p: (p["w"] * x).sum(), argnums=1)
    assert ltx.profile.explain(second, torch.ones(2), params, world=2).buckets[0].paths == ("w",)
    both = ltx.profile.explain(replace(second, argnums=(0, 1)), torch.ones(2), params, world=2)
    assert [bucket.paths for bucket in both.buckets] == [("1.w",), ("0",)]
    with pytest.raises(StepError, match=re.escape("argnums=1: the step was called with 1 positional arguments")):
        ltx.profile.explain(second, params)


# --- as text ---------------------------------------------------------------------------------------------------------


TABLE = """\
InThreePhases() on 2 ranks, synchronised step 0: what rank 0 sends

bucket  parameters                          elements       gradients  collective  of                     sent
------  ----------------------------------  --------  --------------  ----------  ------------------  -------
     0  blocks.1.b .. blocks.0.b (3)          31,000  124 kB float32  all_to_all  bfloat16[2, 15500]  31.0 kB
                                                                      all_gather  bfloat16[15500]     31.0 kB
                                                                      psum        float32[3]             12 B
     1  blocks.0.linear.weight, wte.weight    30,100  120 kB float32  all_to_all  bfloat16[2, 15050]  30.1 kB
                                                                      all_gather  bfloat16[15050]     30.1 kB
                                                                      psum        float32[3]             12 B
     2  empty                                      0    0 B bfloat16  psum        float32[3]             12 B

sent a step       122 kB in 7 collectives
plain all-reduce  244 kB, 2.00 times as much
step summary      64 B besides, for loss, weights and digest
note: under second derivatives InThreePhases() counts as the exact mean, and sends that"""


def test_table() -> None:
    """A bucket of two parameters whose names fit, one of three whose names don't, an empty one."""
    params = {
        f"blocks.{i}.{kind}": torch.ones(n) for i in range(2) for kind, n in (("linear.weight", 30_000), ("b", 500))
    }
    params = {"empty": torch.ones(0, dtype=torch.bfloat16), "wte.weight": torch.ones(100), **params}
    strategy = ltx.DDPStrategy(comm_hook=InThreePhases(), first_bucket_bytes=200_000)
    found = ltx.profile.explain(ltx.data_parallel(_loss, strategy), params, world=2)
    assert str(found) == TABLE
    assert found._repr_html_().startswith("<div><pre>InThreePhases() on 2 ranks")
    assert "<th style='text-align: left'>parameters</th>" in found._repr_html_()


def test_no_gradients_on_the_wire() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Local(ltx.Strategy):
        def hook(self, step: int) -> CommHook | None:
            return hooks.AllReduce() if step < 2 else None

        def after_update(self, params: Any, states: Any, info: StepInfo) -> Any:
            mean, _ = self.exchange(hooks.FP16(), list(params.values()), list(params), info).wait()
            return dict(zip(params, mean, strict=True)), states

    params = {"w": torch.ones(100)}
    step = ltx.data_parallel(_loss, Local())
    assert ltx.profile.explain(step, params, world=2).bytes == 400
    found = ltx.profile.explain(step, params, world=2, sync_step=2)
    assert (found.buckets, found.hook, found.bytes, found.collectives, found.summary_bytes) == ((), None, 0, 0, 0)
    assert (found.plain_bytes, found.compression) == (400, math.inf)
    assert found.matches(ltx.profile.Trace())
    assert "Local on 2 ranks, synchronised step 2: no gradients sent" in str(found)
    assert f"note: {Local()!r} leaves the gradients of this step local" in str(found)
    assert found.exchanges is None
    train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=0.1))
    trained = ltx.profile.explain(train, params, world=2, sync_step=2)
    assert (trained.bytes, trained.collectives, trained.summary_bytes) == (200, 1, 64)
    blocked = ltx.profile.explain(ltx.block_backward_sync(step), params, world=2)
    assert (blocked.bytes, blocked.notes) == (0, ("the step's gradients are blocked (block_backward_sync)",))
    alone = ltx.profile.explain(step, params)
    assert (alone.world, alone.bytes, alone.compression) == (1, 0, 1.0)
    assert str(alone).splitlines()[0] == "Local on 1 rank, synchronised step 0: no gradients sent"
    nobody = ltx.profile.explain(step, {"count": torch.ones(3, dtype=torch.int64)}, world=2)
    assert (nobody.buckets, nobody.plain_bytes) == ((), 0)


# --- what strategies send besides ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class InNodes(ltx.Strategy):
    """Local gradients; parameters are averaged in nodes of two in two phases, then across nodes in half precision."""

    layout: ClassVar[StateLayout] = StateLayout(params="per_rank", opt_state="per_rank")

    def hook(self, step: int) -> None:
        return None

    def check_axis(self, axis: ltx.Axis) -> None:
        if axis.size % 2:
            raise StrategyError(f"InNodes needs an even number of ranks, got {axis.size}.")

    def after_update(self, params: Params, states: Any, info: StepInfo) -> Any:
        for hook, part in ((InTwoPhases(), inner(info.axis, 2)), (hooks.FP16(), outer(info.axis, 2))):
            mean, _ = self.exchange(hook, list(params.values()), list(params), replace(info, axis=part)).wait()
            params = dict(zip(params, mean, strict=True))
        return params, states


@pytest.mark.full(but=1)
@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", STRATEGIES)
def test_training_steps_send_what_is_explained(ranks: Ranks, name: str, n: int) -> None:
    def run() -> list[tuple[int, int, int]]:
        params, inputs = problem(n)
        train = trainer(STRATEGIES[name])
        state, seen = train.init(params), []
        for x in inputs:
            explained = ltx.profile.explain(train, state)
            with ltx.profile.record() as trace:
                state, _ = train(state, x[ltx.world().rank])
                ltx.psum(x)
            assert explained.matches(trace), (str(explained), trace)
            headers = [event.nbytes for event in trace.events if event.label == "summary"]
            assert headers == [c.nbytes for c in explained.summaries]
            assert explained.matches(replace(trace, events=[])) == (explained.bytes == 0)
            seen.append((explained.bytes, explained.collectives, explained.summary_bytes))
        return seen

    share, header = 2 * (n - 1) * 16 // n, 128 * (n - 1) // n  # four numbers; eight in double precision
    sends, quiet = (share, 1, header), (0, 0, 0)
    local = [quiet, quiet, sends] * 2 + [quiet]
    expected = {"post-local SGD": [sends] * 3 + local[3:], "gossip": [(share, 1, 0)] * 7}
    for found in ranks(n).run(run):
        assert found == expected.get(name, local)


BESIDE: dict[str, tuple[ltx.Strategy, ltx.optim.Optimizer, dict[str, Any]]] = {
    "the guard on parts": (ltx.ZeroStrategy(), SGD, {"guard": "skip"}),
    "the guard of local steps": (ltx.LocalSGDStrategy(2), SGD, {"guard": "raise"}),
    "the guard ahead of a ring": (ltx.BaguaStrategy("low_precision_decentralized"), SGD, {"guard": "skip"}),
    "the guard during an exchange": (ltx.BaguaStrategy("async", schedule=(3, 2)), SGD, {"guard": "skip"}),
    "the guard of what all share": (ltx.DDPStrategy(), SGD, {"guard": "skip"}),
    "clipping parts": (ltx.ZeroStrategy(), ltx.optim.chain(ltx.optim.clip_by_global_norm(1.0), SGD), {}),
    "clipping what all share": (ltx.DDPStrategy(), ltx.optim.chain(ltx.optim.clip_by_global_norm(1.0), SGD), {}),
}


@pytest.mark.parametrize("name", some(BESIDE, "the guard on parts", "clipping parts"))
def test_what_the_guard_and_clipping_send(ranks: Ranks, name: str) -> None:
    strategy, optimizer, options = BESIDE[name]

    def run() -> None:
        params, inputs = problem(2)
        train = ltx.train_step(ltx.data_parallel(_loss, strategy), optimizer, **options)
        state = train.init(params)
        for x in inputs[:4]:
            explained = ltx.profile.explain(train, state)
            with ltx.profile.record() as trace:
                state, _ = train(state, x[ltx.world().rank].sum())
            assert explained.matches(trace), (str(explained), trace)
            sent = [event.nbytes for event in trace.events if event.label == "summary"]
            assert sum(sent) == explained.summary_bytes

    ranks(2).run(run)


def test_frozen_parameters_arent_sent(ranks: Ranks) -> None:
    params = {name: torch.ones(40) for name in "abc"}

    def run() -> None:
        train = _train(hooks.AllReduce(), trainable=["a", "c"])
        state = train.init(params)
        explained = ltx.profile.explain(train, state)
        assert explained == ltx.profile.explain(train, params)
        held = {name: torch.nn.Parameter(x, requires_grad=name != "b") for name, x in params.items()}
        assert explained == ltx.profile.explain(_train(hooks.AllReduce()), held)
        assert sorted(path for bucket in explained.buckets for path in bucket.paths) == ["a", "c"]
        with ltx.profile.record() as trace:
            train(state, torch.tensor(1.0))
        assert explained.matches(trace), (str(explained), trace)

    ranks(2).run(run)


def test_exchanges_in_rows() -> None:
    params, _ = problem(2)
    step = ltx.data_parallel(_loss, Gossip(bucket_bytes=4, first_bucket_bytes=4))
    found = ltx.profile.explain(ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=0.1)), params, world=4)
    assert found.exchanges is not None
    assert [(x.label, x.paths, x.elements, x.background, x.exchange) for x in found.exchanges] == [
        ("background 0", ("w",), 3, True, 0),
        ("background 1", ("b",), 1, True, 0),
    ]
    assert [(c.operation, c.buffer, c.nbytes, c.ranks) for x in found.exchanges for c in x.collectives] == [
        ("psum", "float32[3]", 18, 4),
        ("psum", "float32[1]", 6, 4),
    ]
    assert (found.buckets, found.bytes, found.summary_bytes, found.plain_bytes) == ((), 24, 0, 24)
    assert ltx.profile.explain(step, params, world=4).bytes == 0  # a strategy does nothing besides in a bare step
    assert found.matches(ltx.profile.Trace()) is False
    assert ltx.profile.explain(step, params, world=4).matches(ltx.profile.Trace())


def test_parts_of_the_axis(ranks: Ranks) -> None:
    def run() -> int:
        params, inputs = problem(4)
        train = trainer(InNodes())
        state, rank = train.init(params), ltx.world().rank
        explained = ltx.profile.explain(train, state)
        with ltx.profile.record() as trace:
            train(state, inputs[0][rank])
        assert explained.matches(trace), (str(explained), trace)
        assert replace(explained, rank=0) == ltx.profile.explain(train, params, world=4)
        return explained.bytes

    # Of four numbers, half of two parts of two each way; and of four halves, all.
    assert ranks(4).run(run).replicated() == 8 + 8 + 8
    with pytest.raises(StrategyError, match=re.escape("InNodes needs an even number of ranks, got 3.")):
        ltx.profile.explain(trainer(InNodes()), problem(2)[0], world=3)


BESIDES = """\
LocalSGD on 2 ranks, synchronised step 2: no gradients sent; what rank 0 sends besides

besides     parameters  elements       tensors  collective  of          sent
----------  ----------  --------  ------------  ----------  ----------  ----
exchange 0  w, b               4  16 B float32  psum        float32[4]  16 B

sent a step       16 B in 1 collective
plain all-reduce  16 B
step summaries    64 B besides, 1 in all
note: LocalSGD"""


def test_table_of_what_is_sent_besides() -> None:
    assert str(ltx.profile.explain(trainer(LocalSGD()), problem(2)[0], world=2, sync_step=2)).startswith(BESIDES)


@pytest.mark.full
def test_lossy_hooks_say_what_second_derivatives_do() -> None:
    for hook in HOOKS:
        text = str(ltx.profile.explain(_step(hook), _params(), world=2))
        assert (f"note: under second derivatives {hook!r} counts as the exact mean" in text) == (not hook.exact)


# --- what can't be explained -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReadsValues(CommHook):
    def reduce(self, share: BucketInput) -> Reduction:
        scale = share.flat.abs().max().item()
        return (yield CollectiveRequest("psum", share.flat / scale)), share.states


@dataclass(frozen=True)
class Foreign(CommHook):
    """One with a state of its own to guard."""

    def reduce(self, share: BucketInput) -> Reduction:
        if share.flat.is_meta:
            raise UnsupportedError("Foreign() can't be explained")
        yield CollectiveRequest("psum", share.flat)


@dataclass(frozen=True)
class ReadsParameters(CommHook):
    state_names: ClassVar[tuple[str, ...]] = ("norm",)

    def init(self, param: Tensor, path: str = "") -> dict[str, Tensor]:
        return {"norm": torch.tensor(float(param.norm()))}


@dataclass(frozen=True)
class AsksForMore(InTwoPhases):
    phases: ClassVar[int] = 1


@dataclass(frozen=True)
class AsksForTheLargest(CommHook):
    def reduce(self, share: BucketInput) -> Reduction:
        return (yield CollectiveRequest("pmax", share.flat)), share.states


@dataclass(frozen=True, kw_only=True)
class Besides(ltx.Strategy):
    """One whose work on parameters can't be done on shapes alone."""

    reads: bool = False
    named: bool = True

    def hook(self, step: int) -> None:
        return None

    def after_update(self, params: Params, states: Any, info: StepInfo) -> Any:
        if self.reads and params["w"].sum() < 0:
            return params, states
        return ltx.pmean(params, info.axis if self.named else None), states


def test_what_isnt_an_exchange_cant_be_explained() -> None:
    for strategy, text in (
        (Besides(), "communicates by a collective (psum of float32[3]) that belongs to no exchange"),
        (Besides(named=False), "communicates by a collective (psum of float32[3]) that belongs to no exchange"),
        (Besides(reads=True), "can't be run on shapes alone: step 0 took"),
    ):
        with pytest.raises(UnsupportedError, match=re.escape(text)):
            ltx.profile.explain(trainer(strategy), {"w": torch.ones(3)}, world=2)


def test_errors() -> None:
    params = {"w": torch.ones(4)}
    cases: list[tuple[type[Exception], str, Any]] = [
        (UnsupportedError, "ReadsValues() can't be run on shapes alone: bucket 0 took", _step(ReadsValues())),
        (UnsupportedError, "Foreign() can't be explained", _step(Foreign())),
        (
            UnsupportedError,
            ", NoneType) communicates over a process group of torch.distributed, so what it sends isn't known ahead",
            _step(hooks.from_torch(lambda state, bucket: None)),
        ),
        (UnsupportedError, "ReadsParameters() can't be run on shapes alone: the first", _step(ReadsParameters())),
        (StrategyError, "AsksForMore() asks for more than 1 collectives in bucket 0", _step(AsksForMore())),
        (StrategyError, "CollectiveRequest('pmax', ...): expected one of 'psum', ", _step(AsksForTheLargest())),
        (StepError, "explain takes a step made by ltx.data_parallel or ltx.train_step, got function", _loss),
    ]
    for error, text, step in cases:
        with pytest.raises(error, match=re.escape(text)):
            ltx.profile.explain(step, params, world=2)
    step = _step(hooks.AllReduce())
    for bad in (0, -1, 2.0, True, "2"):
        with pytest.raises(InputError, match=re.escape(f"world must be a whole number of at least 1, got {bad!r}")):
            ltx.profile.explain(step, params, world=bad)
    for bad in (-1, 2.0, False):
        with pytest.raises(InputError, match=re.escape(f"sync_step must be a whole number of at least 0, got {bad!r}")):
            ltx.profile.explain(step, params, world=2, sync_step=bad)
    for made in (step, _train(hooks.AllReduce())):
        with pytest.raises(TreeError, match=re.escape("the parameters must be a tree of tensors, but leaf 'w'")):
            ltx.profile.explain(made, {"w": 1.0}, world=2)


def test_steps_that_go_by_the_clock_arent_known_ahead() -> None:
    params = {"w": torch.ones(4)}
    train = ltx.train_step(ltx.data_parallel(_loss, ltx.BaguaStrategy("async", warmup_steps=2)), SGD)
    assert ltx.profile.explain(train, params, world=2, sync_step=1).collectives == 1
    with pytest.raises(UnsupportedError, match=re.escape("Give the rounds a schedule: schedule=(period, delay)")):
        ltx.profile.explain(train, params, world=2, sync_step=2)


def test_notes_on_what_other_steps_send() -> None:
    params = {"w": torch.zeros(30, 40)}
    step = ltx.data_parallel(lambda p, x: (p["w"] * x).sum(), ltx.DDPStrategy(comm_hook=hooks.PowerSGD()))
    text = str(ltx.profile.explain(step, params, world=2))
    assert "AllReduce() is in force before synchronised step 1000 alone, and PowerSGD() from then on" in text
    assert "sync_step=1000" in text
    assert "in force before" not in str(ltx.profile.explain(step, params, world=2, sync_step=1000))
    zero = ltx.data_parallel(lambda p, x: (p["w"] * x).sum(), ltx.ZeroStrategy())
    text = str(ltx.profile.explain(zero, params, world=2))
    assert "In training ZeroStrategy sends something else or more: ltx.profile.explain(ltx.train_step(" in text
    trains = ltx.train_step(zero, ltx.optim.from_torch(torch.optim.SGD, lr=1.0))
    assert "In training" not in str(ltx.profile.explain(trains, params, world=2))
    plain = ltx.data_parallel(lambda p, x: (p["w"] * x).sum())
    assert "note: " not in str(ltx.profile.explain(plain, params, world=2))
