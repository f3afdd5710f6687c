"""What is sent, by a recording of it, by processes as by simulated ranks, and as counted by hand; how it is printed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import ltx
from ltx import hooks, optim
from ltx.errors import InputError
from ltx.extend import exchange, inner, outer
from ltx.hooks import BucketInput, CollectiveRequest, CommHook, Reduction
from ltx.strategies import StateLayout, StepInfo
from tests import inside
from tests.contract.hooks import table
from tests.contract.strategies.test_protocol import STRATEGIES, problem, trainer
from tests.contract.strategies.test_protocol import loss as two_leaves
from tests.covering import some
from tests.inside import stateful
from tests.kinds import Params, Ranks
from tests.sent import ring, sent
from tests.train_on import refuses
from tests.twins.feedback import ErrorFeedback
from tests.twins.phases import InTwoPhases, OftenInTwoPhases

SGD = optim.from_torch(torch.optim.SGD, lr=0.01)
#: What a bucket or an exchange issues: its label, its collectives, their bytes.
Issues = list[tuple[str, str, int]]


def issues(trace: ltx.profile.Trace, *kinds: str) -> Issues:
    return [(e.label, e.operation, e.nbytes) for e in trace.events if e.kind in kinds]


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


HOOKS: tuple[CommHook, ...] = (
    hooks.AllReduce(),
    hooks.FP16(),
    hooks.BF16(),
    InTwoPhases(),
    OftenInTwoPhases(),
    InThreePhases(),
    ErrorFeedback(),
    *table.HOOKS.values(),
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


def _step(hook: CommHook) -> ltx.DataParallel:
    return ltx.data_parallel(_loss, ltx.DDPStrategy(comm_hook=hook, first_bucket_bytes=60, bucket_bytes=150))


def _backward(step: ltx.DataParallel, params: Params, x: Tensor) -> None:
    given = ltx.Synced(params, step.init(params)) if stateful(step.strategy) else params
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
def test_processes_send_what_simulated_ranks_do(ranks: Ranks, hook: CommHook, n: int, seed: int) -> None:
    params, step = _params(), _step(hook)
    with ltx.profile.record() as simulated:
        ltx.vmap(lambda x: WAYS["ltx.grad"](step, params, x)[0]["e"])(torch.arange(float(n)))
    expected = sorted(issues(simulated, "bucket"))

    def run() -> None:
        x = torch.tensor(float(ltx.axis_index()))
        for name, way in WAYS.items():
            with ltx.profile.record() as trace:
                way(step, params, x)
                ltx.psum(x)
            assert sorted(issues(trace, "bucket")) == expected, name
            assert issues(trace, "summary") == [("summary", "psum", ring(inside.SUMMARY_BYTES, n))]

    assert expected
    ranks(n).run(run)


#: hook -> what each of three buckets issues: of 16 numbers in double precision, and of 20 and 10. Four ranks send
#: 2 * 3/4 of a buffer to sum it, 3/4 to scatter or exchange it, 3 times it to gather it.
BY_HAND: dict[str, tuple[CommHook, list[list[tuple[str, int]]]]] = {
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


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name: str) -> None:
    hook, issued = BY_HAND[name]
    params = {"first": torch.ones(10), "w": torch.ones(5, 4), "tail": torch.ones(16, dtype=torch.float64)}
    trace = sent(ltx.DDPStrategy(comm_hook=hook, first_bucket_bytes=1, bucket_bytes=1), params, 4)
    assert issues(trace, "bucket") == [(f"bucket {i}", *issue) for i, bucket in enumerate(issued) for issue in bucket]
    assert [(packed.label, packed.nbytes) for packed in trace.packed] == [
        ("bucket 0", 128),
        ("bucket 1", 80),
        ("bucket 2", 40),
    ]
    assert trace.bytes == sum(nbytes for bucket in issued for _, nbytes in bucket)


def of_steps(train: Any, params: Params, inputs: Tensor) -> list[ltx.profile.Trace]:
    """A recording of each step of this process, or, outside of a world, of simulated ranks."""
    state, traces = train.init(params), list[ltx.profile.Trace]()
    for x in inputs:
        with ltx.profile.record() as trace:
            if ltx.axis_size() > 1:
                state, _ = train(state, x[int(ltx.axis_index())])
            else:
                state, _ = ltx.vmap(train, in_dims=(0 if traces else None, 0))(state, x)
        traces.append(trace)
    return traces


def sent_in_training(trace: ltx.profile.Trace) -> Issues:
    return issues(trace, "bucket", "exchange", "background")


@dataclass(frozen=True, kw_only=True)
class InNodes(ltx.Strategy):
    """Local gradients; parameters are averaged in nodes of two in two phases, then across nodes in half precision."""

    layout: ClassVar[StateLayout] = StateLayout(params="per_rank", opt_state="per_rank")

    def hook(self, step: int) -> None:
        return None

    def after_update(self, params: Params, states: Any, info: StepInfo) -> Any:
        for hook, part in ((InTwoPhases(), inner(info.axis, 2)), (hooks.FP16(), outer(info.axis, 2))):
            mean, _ = exchange(self, hook, list(params.values()), list(params), replace(info, axis=part)).wait()
            params = dict(zip(params, mean, strict=True))
        return params, states


@pytest.mark.full(but=1)
@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies_of_a_few_lines(ranks: Ranks, name: str, n: int) -> None:
    params, inputs = problem(n)
    share, header = ring(16, n), ring(inside.SUMMARY_BYTES, n)  # of four numbers
    quiet: tuple[Issues, list[int]] = [], []
    mean: tuple[Issues, list[int]] = [("exchange 0", "psum", share)], [header]
    steps = {
        "post-local SGD": [([("bucket 0", "psum", share)], [header])] * 2 + [mean, quiet, quiet, mean, quiet],
        "gossip": [([("background 0", "psum", share)], [])] * 7,
    }.get(name, [quiet, quiet, mean] * 2 + [quiet])

    for traces in ranks(n).run(of_steps, trainer(STRATEGIES[name]), params, inputs):
        headers = [[event.nbytes for event in trace.events if event.label == "summary"] for trace in traces]
        assert [*zip(map(sent_in_training, traces), headers, strict=True)] == steps
    simulated = of_steps(trainer(STRATEGIES[name]), params, inputs)
    assert [*map(sent_in_training, simulated)] == [issued for issued, _ in steps]


GUARD = ("exchange 0", "psum", 4)
WHOLE = ("bucket 0", "psum", 16)
#: ZeRO's parts of three numbers and of one have two numbers and one.
PART, PARTS = ("bucket 0", "psum_scatter", 12), ("exchange 0", "all_gather", 12)
#: Strategy, optimizer and options -> what each of two ranks sends of four numbers in float32, in each of three steps.
BESIDE: dict[str, tuple[ltx.Strategy, optim.Optimizer, dict[str, Any], list[Issues]]] = {
    "parts": (ltx.ZeroStrategy(), SGD, {}, [[PART, PARTS]] * 3),
    "parts of a bucket": (ltx.ZeroStrategy(), SGD, {"overlap": "update"}, [[PART, ("bucket 0", *PARTS[1:])]] * 3),
    "the guard on parts": (ltx.ZeroStrategy(), SGD, {"guard": "skip"}, [[PART, GUARD, PARTS]] * 3),
    "the guard of local steps": (
        ltx.LocalSGDStrategy(2),
        SGD,
        {"guard": "raise"},
        [[GUARD, ("exchange 0", "psum", 16)], [GUARD], [GUARD, ("exchange 0", "psum", 16)]],
    ),
    "the guard ahead of a ring": (
        ltx.BaguaStrategy("low_precision_decentralized"),
        SGD,
        {"guard": "skip"},
        [[GUARD, ("exchange 0", "ppermute", 12)]] * 3,  # a byte a number, and a grid of two numbers
    ),
    "a ring in buckets": (
        ltx.BaguaStrategy("low_precision_decentralized"),
        SGD,
        {"overlap": "update"},
        [[("bucket 0", "ppermute", 12)]] * 3,
    ),
    "the guard during an exchange": (
        ltx.BaguaStrategy("async", schedule=(3, 2)),
        SGD,
        {"guard": "skip"},
        [[GUARD, ("background 0", "psum", 16)], [GUARD], [GUARD]],
    ),
    "the guard of what all share": (ltx.DDPStrategy(), SGD, {"guard": "skip"}, [[WHOLE]] * 3),
    "clipping parts": (
        ltx.ZeroStrategy(),
        optim.chain(optim.clip_by_global_norm(1.0), SGD),
        {},
        [[PART, ("exchange 0", "psum", 8), PARTS]] * 3,  # the sum of squares is in double precision
    ),
    "frozen parameters": (ltx.DDPStrategy(), SGD, {"trainable": "w"}, [[("bucket 0", "psum", 12)]] * 3),
    "clipping what all share": (ltx.DDPStrategy(), optim.chain(optim.clip_by_global_norm(1.0), SGD), {}, [[WHOLE]] * 3),
}


@pytest.mark.parametrize("name", some(BESIDE, "the guard on parts", "clipping parts", "frozen parameters"))
def test_what_is_sent_beside_gradients(ranks: Ranks, name: str) -> None:
    strategy, optimizer, options, steps = BESIDE[name]
    params, inputs = problem(2)
    train = ltx.train_step(ltx.data_parallel(two_leaves, strategy), optimizer, **options)
    for traces in ranks(2).run(of_steps, train, params, inputs[:3]):
        assert [*map(sent_in_training, traces)] == steps
    if "overlap" not in options:  # simulated ranks have no backward pass that goes on meanwhile
        assert [*map(sent_in_training, of_steps(train, params, inputs[:3]))] == steps


def test_parts_of_the_axis(ranks: Ranks) -> None:
    """Of four numbers, half of two parts of two each way; and of four halves, all."""
    params, inputs = problem(4)
    expected = [[("exchange 0", "psum_scatter", 8), ("exchange 0", "all_gather", 8), ("exchange 0", "psum", 8)]]
    for traces in ranks(4).run(of_steps, trainer(InNodes()), params, inputs[:1]):
        assert [*map(sent_in_training, traces)] == expected
    assert [*map(sent_in_training, of_steps(trainer(InNodes()), params, inputs[:1]))] == expected


PARAMS = {name: torch.ones(60) for name in "abcd"}
#: Each parameter has a bucket of its own.
ALONE = {"bucket_bytes": 240, "first_bucket_bytes": 240}


def summing(strategy: ltx.Strategy) -> Any:
    return ltx.train_step(
        ltx.data_parallel(lambda params, x: sum((p * x).sum() for p in params.values()), strategy), SGD
    )


def recorded(strategy: ltx.Strategy, x: Tensor) -> ltx.profile.Trace:
    """One step, after one that ranks compare."""
    train = summing(strategy)
    state, _ = train(train.init(PARAMS), x)
    with ltx.profile.record() as trace:
        train(state, x)
    return trace


def rows(trace: ltx.profile.Trace) -> dict[str, list[str]]:
    """The cells of the table by kind; columns are two spaces apart or more."""
    table = str(trace).split("\n\n")[1].splitlines()[2:]
    return {cells[0]: cells[1:] for cells in (re.split(r" {2,}", line.strip()) for line in table)}


#: hook -> (collectives of a bucket, messages, bytes a rank sends of a buffer of 60 numbers), between n ranks.
PRINTED: dict[str, Any] = {
    "AllReduce()": (hooks.AllReduce(), "psum", lambda n: 2 * (n - 1), lambda n: 2 * 240 * (n - 1) // n),
    "BF16()": (hooks.BF16(), "psum", lambda n: 2 * (n - 1), lambda n: 2 * 120 * (n - 1) // n),
    "Noop()": (hooks.Noop(), "", lambda n: 0, lambda n: 0),
}


@pytest.mark.parametrize("name", PRINTED)
@pytest.mark.parametrize("simulated", [False, True])
def test_buckets(ranks: Ranks, name: str, simulated: bool) -> None:
    hook, operation, messages, nbytes = PRINTED[name]
    strategy = ltx.DDPStrategy(comm_hook=hook, **ALONE)
    if simulated:
        n, train = 4, summing(strategy)
        with ltx.profile.record() as trace:
            ltx.vmap(train, in_dims=(None, 0))(train.init(PARAMS), torch.ones(n))
    else:
        n = 2
        trace = ranks(n).run(recorded, strategy, torch.ones(())).rank(0)
    assert sum(event.nbytes for event in trace.buckets) == 4 * nbytes(n)
    assert [packed.hook for packed in trace.packed] == [name] * 4
    assert [packed.nbytes for packed in trace.packed] == [240] * 4
    if operation:
        sent = f"{4 * nbytes(n):,} B"
        assert rows(trace)["bucket"] == ["4", "240 B", name, f"4 {operation}", f"{4 * messages(n)}", sent]
    else:
        assert "bucket" not in str(trace)
    times = r"under way for .*s, .*s of it during the backward pass; waited for .*s"
    assert re.fullmatch("without times" if simulated else times, str(trace).splitlines()[-1]) or not trace.events


def test_exchanges_and_collectives_of_ones_own(ranks: Ranks) -> None:
    def run() -> ltx.profile.Trace:
        train = summing(ltx.LocalSGDStrategy(1))
        with ltx.profile.record() as trace:
            train(train.init(PARAMS), torch.ones(()))
            ltx.psum(torch.ones(3))
        return trace

    found = rows(ranks(2).run(run).rank(0))
    assert found["exchange"] == ["1", "960 B", "AllReduce()", "1 psum", "2", "960 B"]
    assert found["psum"] == ["1", "1 psum", "2", "12 B"]
    assert "bucket" not in found


def test_nothing() -> None:
    train = summing(ltx.DDPStrategy())
    with ltx.profile.record() as trace:
        train(train.init(PARAMS), torch.ones(()))
    assert str(trace) == "rank 0 sent nothing"


NET = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 3))


def loss_of(params: Any, buffers: Any, x: torch.Tensor) -> Any:
    y, buffers = ltx.functional_call(NET, (params, buffers), x, return_buffers=True)
    return y.square().mean(), buffers


def steps() -> dict[str, Any]:
    adam, compressed = ltx.optim.from_torch(torch.optim.Adam), ltx.DDPStrategy(comm_hook=hooks.PowerSGD(rank=1))
    strategies = {"ddp": None, "local": ltx.LocalSGDStrategy(4), "powersgd": compressed, "zero": ltx.ZeroStrategy()}
    return {name: ltx.train_step(ltx.data_parallel(loss_of, s), adam) for name, s in strategies.items()}


def compared() -> Any:
    candidates = steps()
    params = dict(NET.named_parameters())
    params["0.bias"].requires_grad_(False)
    state = candidates["zero"].init(params, dict(NET.named_buffers()))
    before = ltx.tree.map(torch.clone, (state.params, state.buffers))
    found = ltx.profile.compare(candidates, state, torch.randn(8, 40), steps=3)
    ltx.tree.map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), (state.params, state.buffers), before)
    return [(row.name, row.step_s) for row in found], {row.name: row.sent for row in found}, str(found)


def test_steps_in_turns(ranks: Ranks) -> None:
    (rows, sent, text), (others, *_) = ranks(2).run(compared)
    assert rows == others
    assert [step_s for _, step_s in rows] == sorted(step_s for _, step_s in rows)
    assert rows[0][1] > 0
    nbytes = sum(p.nbytes for name, p in NET.named_parameters() if name != "0.bias")  # of two ranks, each sends all
    assert sent["ddp"] == nbytes
    assert sent["powersgd"] < nbytes / 2, "steps begin behind the exact ones"
    assert sent["local"] == pytest.approx(nbytes / 4)
    assert text.splitlines()[0].split() == ["candidate", "a", "step", "to", "the", "first", "sent"]
    assert text.splitlines()[2].split()[0] == rows[0][0]


def test_alone_and_what_cannot_be() -> None:
    _, sent, _ = compared()
    assert set(sent.values()) == {0.0}
    candidates = steps()
    for wrong in (({}, None), (candidates, NET)):
        refuses(InputError, "compare takes train steps by name and a state, got", ltx.profile.compare, *wrong)
    with pytest.raises(InputError, match="compare: steps must be a whole number of at least 1, got 0"):
        ltx.profile.compare(candidates, candidates["ddp"].init(dict(NET.named_parameters())), steps=0)
