"""Strategies are values: what they equal, how they print and travel, the fields they refuse; a hook's buckets."""

from __future__ import annotations

import dataclasses
import datetime
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import ltx
from ltx import hooks
from ltx.errors import LtxError, StrategyError
from tests import train_on
from tests.contract.strategies.table import ROWS
from tests.contract.strategies.test_protocol import Anchored, LocalSGD
from tests.inside import AsyncAveraging, QAdam, stateful
from tests.sent import sent
from tests.train_on import refuses

Bagua, DDP, DiLoCo, Horovod = ltx.BaguaStrategy, ltx.DDPStrategy, ltx.DiLoCoStrategy, ltx.HorovodStrategy

VALUES = [
    DDP(),
    DDP(comm_hook="bf16"),
    DDP(comm_hook="bf16", bucket_bytes=1 << 20),
    DDP(process_group_backend="gloo", timeout=datetime.timedelta(minutes=5), first_bucket_bytes=7),
    DDP(model_averaging_period=4, start_local_sgd_step=100),
    DDP(comm_wrapper="bf16", comm_hook=hooks.PowerSGD(rank=2), start_method="spawn"),
    DDP(comm_wrapper=hooks.error_feedback, comm_hook=hooks.ByteGrad()),
    Horovod(compression="fp16", op="sum"),
    Horovod(groups=[["w", "b"], ["x.*"]], backward_passes_per_step=3),
    Bagua("gradient_allreduce", average=False),
    Bagua("bytegrad", hierarchical=True, node_size=4),
    Bagua("decentralized", peer_selection_mode="shift_one"),
    Bagua("low_precision_decentralized", communication_interval=2, bucket_bytes=1 << 20),
    LocalSGD(period=2),
    Anchored(period=5),
]
ALL = [*VALUES, *(row.strategy for row in ROWS.values())]
NAMES = {"datetime": datetime, "AsyncAveraging": AsyncAveraging, "QAdam": QAdam}
NAMES |= {"LocalSGD": LocalSGD, "Anchored": Anchored}
NAMES |= {name: getattr(module, name) for module in (ltx, hooks) for name in module.__all__}
NAMES |= {"torch": torch, "After": type(hooks.after(1, hooks.Noop())), "from_torch": ltx.optim.from_torch}


@pytest.mark.parametrize("strategy", ALL, ids=repr)
def test_is_a_value(strategy: ltx.Strategy) -> None:
    for copy in (replace(strategy), pickle.loads(pickle.dumps(strategy))):
        assert copy == strategy
        assert hash(copy) == hash(strategy)
    assert replace(strategy, bucket_bytes=123) != strategy
    assert all((strategy == other) == (repr(strategy) == repr(other)) for other in ALL)
    assert "\n" not in repr(strategy)
    assert repr(strategy).startswith(type(strategy).__name__)
    if "<function" not in repr(strategy):
        assert eval(repr(strategy), dict(NAMES)) == strategy
    with pytest.raises(AttributeError):
        strategy.bucket_bytes = 3  # type: ignore[misc]


#: Without the fields that have their default values.
PRINTED: dict[str, Any] = {
    "DDPStrategy()": DDP(),
    "DDPStrategy(comm_hook=OneBit())": DDP(comm_hook=ltx.hooks.OneBit()),
    "DDPStrategy(bucket_bytes=9)": DDP(bucket_bytes=9, timeout=1800),
    "DDPStrategy(timeout=datetime.timedelta(seconds=9))": DDP(timeout=datetime.timedelta(seconds=9)),
    "LocalSGDStrategy(period=2)": ltx.LocalSGDStrategy(2),
    "ZeroStrategy()": ltx.ZeroStrategy(),
    "HorovodStrategy(op='adasum')": ltx.HorovodStrategy(compression="none", op="adasum"),
    "BaguaStrategy('bytegrad', bucket_bytes=9)": Bagua("bytegrad", bucket_bytes=9),
    "BaguaStrategy('decentralized', peer_selection_mode='shift_one')": Bagua(
        "decentralized", peer_selection_mode="shift_one"
    ),
    "OneBit(block=8)": ltx.hooks.OneBit(block=8),
    "After(step=2, hook=TopK())": ltx.hooks.after(2, ltx.hooks.TopK()),
}


@pytest.mark.parametrize("text", PRINTED)
def test_how_they_print(text: str) -> None:
    assert repr(PRINTED[text]) == text


EXACT, HALF = hooks.AllReduce(), hooks.FP16()
DILOCO = DiLoCo(period=50, outer_lr=0.7, outer_momentum=0.9, outer_hook=EXACT, fragments=1)
#: What is short for what.
SHORTER: list[tuple[Any, Any]] = [
    *((DDP(comm_hook=name), DDP(comm_hook=hook)) for name, hook in (("allreduce", EXACT), ("bf16", hooks.BF16()))),
    (replace(DDP(), comm_hook="fp16").hook(0), HALF),
    (Horovod(compression="none"), Horovod(compression=EXACT)),
    (Horovod(compression="fp16").hook(0), HALF),
    (Horovod().hook(7), EXACT),
    (ltx.LocalSGDStrategy(4, 2), ltx.LocalSGDStrategy(period=4, warmup_steps=2, comm_hook="allreduce")),
    (ltx.LocalSGDStrategy({2: 2, 4: 4}), ltx.LocalSGDStrategy(((2, 2), (4, 4)))),
    (ltx.LocalSGDStrategy(4, 2).hook(1), EXACT),
    (ltx.LocalSGDStrategy(4, 2, comm_hook=hooks.after(1, hooks.ByteGrad())).hook(1), hooks.ByteGrad()),
    (DiLoCo(50), DILOCO),
    (DiLoCo(50, outer_hook="bf16").outer_hook, hooks.BF16()),
    (LocalSGD(), LocalSGD(period=3)),
]
#: Numbers of NumPy are taken for Python's.
SHORTER += [
    (
        DDP(bucket_bytes=np.int64(9), comm_hook=hooks.PowerSGD(np.int32(2))),
        DDP(bucket_bytes=9, comm_hook=hooks.PowerSGD(2)),
    ),
    (DiLoCo(np.int64(3), np.float32(0.5), np.float64(0.25)), DiLoCo(3, 0.5, 0.25)),
    (ltx.LocalSGDStrategy(np.int64(4)), ltx.LocalSGDStrategy(4)),
    (ltx.LocalSGDStrategy({np.int64(2): np.int64(2), 4: 4}), ltx.LocalSGDStrategy({2: 2, 4: 4})),
    (
        Horovod(groups=np.int64(2), gradient_predivide_factor=np.float32(2)),
        Horovod(groups=2, gradient_predivide_factor=2.0),
    ),
]


@pytest.mark.parametrize(("short", "whole"), SHORTER, ids=repr)
def test_what_is_short_for_it(short: Any, whole: Any) -> None:
    assert short == whole
    assert hash(short) == hash(whole)
    assert repr(short) == repr(whole), "by which ranks compare what they have"


def test_fields_are_given_by_keyword_alone() -> None:
    with pytest.raises(TypeError):
        DDP("bf16")  # type: ignore[misc]


Local, Outer, Momenta = (
    partial(ltx.LocalSGDStrategy, period=2),
    partial(DiLoCo, period=4),
    partial(QAdam, warmup_steps=1),
)
Eight, Peers, EightBitPeers = map(partial(partial, Bagua), ("bytegrad", "decentralized", "low_precision_decentralized"))

WHOLE, NOT_NEGATIVE = "a whole number of at least {}", "a finite number of at least 0"
BYTES = WHOLE.format(1)
HOOK = "one of {} or an ltx.hooks.CommHook"
SHORT = HOOK.format(["allreduce", "bf16", "fp16"])
AHEAD, ALONE = "less than period // fragments, ", "as one fragment is under way at a time"
SECONDS = "a number of seconds or a datetime.timedelta, more than 0"
WRAPPER = "one of ['bf16', 'fp16'] or a function from an ltx.hooks.CommHook to another"
PERIODS = (
    f"{BYTES}, or {{period: number of ranks}} with periods ascending from 1 and numbers from 2, each of which divides "
    "the next one"
)
SCHEDULE = "None or a pair (period, delay) of whole numbers with 1 <= delay <= period"
GROUPS = "a positive number of groups, or a list of lists of parameters' paths"
ALGORITHM = (
    "one of ['gradient_allreduce', 'bytegrad', 'decentralized', 'low_precision_decentralized', 'qadam', 'async']"
)

#: What makes a strategy, whose error it is, a field, what it must be, and values that it may not have.
BAD: list[tuple[Callable[..., ltx.Strategy], str, str, str, list[Any]]] = [
    (DDP, "DDPStrategy", "comm_hook", SHORT, ["bf17", None, hooks.BF16]),
    (DDP, "DDPStrategy", "comm_wrapper", WRAPPER, ["fp8", torch.float16]),
    (DDP, "DDPStrategy", "start_method", "'popen' or 'spawn' or 'fork' or 'forkserver'", ["thread"]),
    (DDP, "DDPStrategy", "bucket_bytes", BYTES, [0, -1, 2.0, True, "auto"]),
    (DDP, "DDPStrategy", "first_bucket_bytes", BYTES, ["auto", "1 MiB"]),
    (DDP, "DDPStrategy", "timeout", SECONDS, ["60", datetime.timedelta(0)]),
    (DDP, "DDPStrategy", "timeout", f"{SECONDS} and less than 1,000 years", [float("inf")]),
    (LocalSGD, "LocalSGD", "bucket_bytes", BYTES, [0]),  # of a subclass
    (Horovod, "HorovodStrategy", "compression", HOOK.format(["allreduce", "bf16", "fp16", "none"]), ["int8"]),
    (Horovod, "HorovodStrategy", "op", "'average' or 'sum' or 'adasum'", ["max"]),
    (Horovod, "HorovodStrategy", "backward_passes_per_step", BYTES, [0, True]),
    (Horovod, "HorovodStrategy", "gradient_predivide_factor", "None or a finite number of more than 0", [0.0]),
    (Horovod, "HorovodStrategy", "groups", GROUPS, [0, ["w"]]),
    (Horovod, "HorovodStrategy", "scale_lr", "bool", [2]),
    (Local, "LocalSGDStrategy", "period", PERIODS, [0, True, 2.0, (), ((4, 2), (2, 4)), ((2, 2), (4, 3))]),
    (Local, "LocalSGDStrategy", "period", PERIODS, [((2, 4), (4, 4)), ((2, 1),), (2, 2)]),
    (Local, "LocalSGDStrategy", "warmup_steps", WHOLE.format(0), [-1]),
    (Local, "LocalSGDStrategy", "subgroup", WHOLE.format(2), [1]),
    (Local, "LocalSGDStrategy", "comm_hook", SHORT, ["fp17"]),
    (Local, "LocalSGDStrategy", "at_end", "bool", [1]),
    (Outer, "DiLoCoStrategy", "period", BYTES, [0]),
    (Outer, "DiLoCoStrategy", "fragments", BYTES, [0]),
    (Outer, "DiLoCoStrategy", "fragments", "at most the period, 4, as one is sent at a time", [5]),
    (Outer, "DiLoCoStrategy", "outer_lr", NOT_NEGATIVE, [-0.1, float("nan"), "0.7"]),
    (Outer, "DiLoCoStrategy", "outer_momentum", f"{NOT_NEGATIVE}, and less than 1", [1.0]),
    (Outer, "DiLoCoStrategy", "outer_hook", SHORT, [None]),
    (Outer, "DiLoCoStrategy", "outer", "Optimizer or None", ["adam"]),
    (Outer, "DiLoCoStrategy", "update_alpha", f"{NOT_NEGATIVE}, and less than 1", [1.0]),
    (Outer, "DiLoCoStrategy", "fragment_sync_delay", WHOLE.format(0), [-1]),
    (Outer, "DiLoCoStrategy", "fragment_sync_delay", f"{AHEAD}4, {ALONE}", [4]),
    (partial(Outer, fragments=2), "DiLoCoStrategy", "fragment_sync_delay", f"{AHEAD}2, {ALONE}", [2]),
    (Momenta, "QAdam", "warmup_steps", BYTES, [0, 2.0]),
    (Momenta, "QAdam", "momentum_hook", SHORT, [None, "onebit"]),
    (Momenta, "QAdam", "betas", "a pair of numbers in [0, 1)", [(0.9, 1.0), 0.9]),
    (AsyncAveraging, "AsyncAveraging", "warmup_steps", WHOLE.format(0), [-1]),
    (AsyncAveraging, "AsyncAveraging", "sync_interval_ms", NOT_NEGATIVE, [-1.0, float("nan"), True]),
    (AsyncAveraging, "AsyncAveraging", "schedule", SCHEDULE, [(2, 3), (2, 0)]),
    (Eight, "BaguaStrategy", "algorithm", ALGORITHM, ["byte_grad", None]),
    (Eight, "EightBitGradients", "average", "bool", [1]),
    (Eight, "BaguaStrategy", "flatten", "bool or None", [1]),
    (Eight, "BaguaStrategy", "bucket_bytes", BYTES, [0]),
    (partial(Eight, node_size=2), "EightBitGradients", "hierarchical", "bool", [1]),
    (partial(Eight, hierarchical=True), "EightBitGradients", "node_size", BYTES, [0]),
    (Peers, "Decentralized", "peer_selection_mode", "'all' or 'shift_one'", ["shift_two"]),
    (Peers, "Decentralized", "communication_interval", BYTES, [0]),
    (EightBitPeers, "LowPrecisionDecentralized", "communication_interval", BYTES, [1.5]),
]


def test_a_hook_is_not_chosen() -> None:
    refuses(StrategyError, r"Time train steps with several hooks by ltx\.profile\.compare", DDP, comm_hook="auto")


@pytest.mark.parametrize(
    ("make", "owner", "field", "must", "value"), [(*row[:-1], value) for row in BAD for value in row[-1]]
)
def test_bad_fields(make: Callable[..., ltx.Strategy], owner: str, field: str, must: str, value: Any) -> None:
    with pytest.raises(StrategyError) as raised:
        Bagua(value) if field == "algorithm" else make(**{field: value})
    said = str(raised.value)
    assert said.replace(f" of type {type(value).__name__}.", ".") == f"{owner}.{field} must be {must}, got {value!r}."
    assert isinstance(raised.value, LtxError)
    assert isinstance(raised.value, ValueError)
    if make is DDP:
        assert train_on.said(StrategyError, lambda: replace(DDP(), **{field: value})) == said


TOGETHER = (
    "DDPStrategy.model_averaging_period and start_local_sgd_step go together, got {} and {}: parameters are averaged "
    "every so many steps from the step on whose gradients stay local."
)
NODES = "hierarchical=True and node_size=(the number of ranks of a node) belong together, got hierarchical="
PEERS = (
    "peer_selection_mode must be \"all\", got 'shift_one': ranks of which nobody knows which round they are in can't be"
)


@pytest.mark.parametrize(
    ("make", "fields", "text"),
    [
        (
            DDP,
            {"comm_wrapper": repr},
            f"DDPStrategy.comm_wrapper must be {WRAPPER}, got <built-in function repr>, which",
        ),
        (DDP, {"model_averaging_period": 3}, TOGETHER.format(3, None)),
        (DDP, {"start_local_sgd_step": 3}, TOGETHER.format(None, 3)),
        (
            DDP,
            {"model_averaging_period": 0, "start_local_sgd_step": 0},
            f"DDPStrategy.model_averaging_period must be {BYTES}, got 0.",
        ),
        (
            DDP,
            {"model_averaging_period": 1, "start_local_sgd_step": -1},
            f"DDPStrategy.start_local_sgd_step must be {WHOLE.format(0)}, got -1.",
        ),
        (
            Horovod,
            {"gradient_predivide_factor": 2.0, "op": "sum"},
            'None with op="sum", which has nothing to divide, got',
        ),
        (Horovod, {"op": "adasum", "scale_lr": True}, 'HorovodStrategy.scale_lr must be False with op="adasum"'),
        (Horovod, {"op": "adasum", "compression": hooks.ByteGrad()}, "HorovodStrategy.compression must be one of"),
        (Local, {"period": {4: 2, 2: 4}}, f"LocalSGDStrategy.period must be {PERIODS}, got ((4, 2), (2, 4))."),
        (AsyncAveraging, {"peer_selection_mode": "shift_one"}, f"AsyncAveraging.{PEERS} paired."),
        (
            Eight,
            {"peer_selection_mode": "all"},
            "BaguaStrategy('bytegrad') has no field 'peer_selection_mode'. It has: hierarchical, node_size, average.",
        ),
        (
            Peers,
            {"average": True},
            "BaguaStrategy('decentralized') has no field 'average'. It has: hierarchical, node_size, "
            "communication_interval, peer_selection_mode.",
        ),
        (Eight, {"hierarchical": True}, f"EightBitGradients: {NODES}True, node_size=None."),
        (Eight, {"node_size": 2}, f"EightBitGradients: {NODES}False, node_size=2."),
    ],
)
def test_fields_that_dont_go_together(make: Callable[..., ltx.Strategy], fields: dict[str, Any], text: str) -> None:
    assert text in train_on.said(StrategyError, make, **fields)


def test_wrappers() -> None:
    assert ltx.DDPStrategy(comm_wrapper="fp16").hook(0) == hooks.FP16()
    assert ltx.DDPStrategy(comm_wrapper="bf16", comm_hook=hooks.RandomK(0.1)).hook(0) == hooks.cast(
        hooks.RandomK(0.1), torch.bfloat16
    )
    fed = ltx.DDPStrategy(comm_wrapper=hooks.error_feedback, comm_hook=hooks.ByteGrad())
    assert fed.hook(0) == hooks.ByteGrad(error_feedback=True)
    assert list(fed.init(torch.ones(2))) == ["residual"]
    assert stateful(fed)
    # The hook and what goes around it stay apart.
    assert fed.comm_hook == hooks.ByteGrad()
    assert dataclasses.replace(fed, comm_hook=hooks.OneBit()).hook(0) == hooks.OneBit(error_feedback=True)
    assert pickle.loads(pickle.dumps(fed)).hook(0) == fed.hook(0)
    refuses(StrategyError, "needs a request for sums", ltx.DDPStrategy, comm_wrapper="fp16", comm_hook=hooks.ByteGrad())


# Hooks that send far less than the gradients get larger buckets of them.
POWER = hooks.PowerSGD(1, start_step=0)


@pytest.mark.full(but=3)
@pytest.mark.parametrize(
    ("hook", "bytes_of"),
    [
        (hooks.AllReduce(), [400] * 9),
        (POWER, [400, 1600, 1600]),
        (hooks.cast(POWER, torch.bfloat16), [400, 1600, 1600]),
        (hooks.BatchedPowerSGD(1, start_step=0), [400] * 9),
        (hooks.PowerSGD(1, start_step=1), [400] * 9),  # exact means at this step
    ],
    ids=repr,
)
@pytest.mark.parametrize("horovod", [False, True])
def test_buckets_after_the_first_are_larger(hook: hooks.CommHook, bytes_of: list[int], horovod: bool) -> None:
    sizes = {"bucket_bytes": 400, "first_bucket_bytes": 400}
    strategy = ltx.HorovodStrategy(compression=hook, **sizes) if horovod else ltx.DDPStrategy(comm_hook=hook, **sizes)
    params = {f"w{i}": torch.zeros(10, 10) for i in range(9)}
    assert [bucket.nbytes for bucket in sent(strategy, params).packed] == bytes_of
