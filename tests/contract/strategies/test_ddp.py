"""DDPStrategy as a value, and its bad fields."""

from __future__ import annotations

import dataclasses
import datetime
import pickle
from datetime import timedelta
from typing import Any

import pytest
import torch

import ltx
from ltx import hooks
from ltx.errors import LtxError, StrategyError

VALUES = [
    ltx.DDPStrategy(),
    ltx.DDPStrategy(comm_hook="bf16", bucket_bytes=1 << 20),
    ltx.DDPStrategy(process_group_backend="gloo", timeout=timedelta(minutes=5), first_bucket_bytes=7),
    ltx.DDPStrategy(model_averaging_period=4, start_local_sgd_step=100),
    ltx.DDPStrategy(comm_wrapper="bf16", comm_hook=hooks.PowerSGD(rank=2), start_method="spawn"),
    ltx.DDPStrategy(comm_wrapper=hooks.error_feedback, comm_hook=hooks.ByteGrad()),
    ltx.DDPStrategy(comm_hook="auto", bucket_bytes="auto"),
    ltx.DDPStrategy(comm_hook="auto", network=ltx.profile.Network(bandwidth=1e9, latency=1e-4)),
]


@pytest.mark.parametrize("strategy", VALUES)
def test_is_a_value(strategy: ltx.DDPStrategy) -> None:
    copy = dataclasses.replace(strategy)
    assert copy == strategy
    assert hash(copy) == hash(strategy)
    assert pickle.loads(pickle.dumps(strategy)) == strategy
    assert "\n" not in repr(strategy)
    assert sum(strategy == other for other in VALUES) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        strategy.bucket_bytes = 3
    with pytest.raises(TypeError):
        ltx.DDPStrategy("bf16")  # by keyword alone


@pytest.mark.parametrize(
    ("name", "hook"), [("allreduce", hooks.AllReduce()), ("fp16", hooks.FP16()), ("bf16", hooks.BF16())]
)
def test_a_hooks_name_is_short_for_the_hook(name: str, hook: hooks.CommHook) -> None:
    assert ltx.DDPStrategy(comm_hook=name) == ltx.DDPStrategy(comm_hook=hook)
    assert hash(ltx.DDPStrategy(comm_hook=name)) == hash(ltx.DDPStrategy(comm_hook=hook))
    assert dataclasses.replace(ltx.DDPStrategy(), comm_hook=name).hook(0) == hook


def test_wrappers() -> None:
    assert ltx.DDPStrategy(comm_wrapper="fp16").hook(0) == hooks.FP16()
    assert ltx.DDPStrategy(comm_wrapper="bf16", comm_hook=hooks.RandomK(0.1)).hook(0) == hooks.cast(
        hooks.RandomK(0.1), torch.bfloat16
    )
    fed = ltx.DDPStrategy(comm_wrapper=hooks.error_feedback, comm_hook=hooks.ByteGrad())
    assert fed.hook(0) == hooks.ByteGrad(error_feedback=True)
    assert list(fed.init(torch.ones(2))) == ["residual"]
    assert fed.stateful
    # The hook and what goes around it stay apart.
    assert fed.comm_hook == hooks.ByteGrad()
    assert dataclasses.replace(fed, comm_hook=hooks.OneBit()).hook(0) == hooks.OneBit(error_feedback=True)
    assert pickle.loads(pickle.dumps(fed)).hook(0) == fed.hook(0)
    with pytest.raises(StrategyError, match="asks for no sum that"):
        ltx.DDPStrategy(comm_wrapper="fp16", comm_hook=hooks.ByteGrad())


def test_models_are_averaged_only_where_asked_for() -> None:
    plain, averaging = VALUES[0], ltx.DDPStrategy(model_averaging_period=4, start_local_sgd_step=100)
    assert not plain.stateful
    assert not plain.communicates_besides
    assert not any(map(plain.communicates_after_update, range(200)))
    assert plain.layout.params == plain.layout.opt_state == "replicated"
    assert averaging.stateful
    assert averaging.communicates_besides
    assert averaging.layout.params == averaging.layout.opt_state == "per_rank"


def test_repr() -> None:
    strategy = ltx.DDPStrategy(comm_hook="bf16")
    assert eval(repr(strategy), {"BF16": hooks.BF16, "datetime": datetime, **vars(ltx)}) == strategy


HOOKS = "DDPStrategy.comm_hook must be one of ['allreduce', 'auto', 'bf16', 'fp16'] or an ltx.hooks.CommHook, got "
WRAPPER = (
    "DDPStrategy.comm_wrapper must be one of ['bf16', 'fp16'] or a function from an ltx.hooks.CommHook to another, got "
)
TOGETHER = (
    "DDPStrategy.model_averaging_period and start_local_sgd_step go together, got {} and {}: parameters are averaged "
    "every so many steps from the step on whose gradients stay local."
)
BYTES = "must be a whole number of at least 1, got"
DURATION = "must be a number of seconds or a datetime.timedelta, more than 0, got"
OR_AUTO = BYTES.replace("must be", 'must be "auto" or')


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"comm_hook": "bf17"}, HOOKS + "'bf17'."),
        ({"comm_hook": None}, HOOKS + "None."),
        ({"comm_hook": hooks.BF16}, HOOKS + "<class 'ltx.hooks.half.BF16'>."),
        ({"comm_wrapper": "fp8"}, WRAPPER + "'fp8'."),
        ({"comm_wrapper": torch.float16}, WRAPPER + "torch.float16."),
        ({"comm_wrapper": repr}, WRAPPER + "<built-in function repr>, which gave 'AllReduce()'."),
        ({"model_averaging_period": 3}, TOGETHER.format(3, None)),
        ({"start_local_sgd_step": 3}, TOGETHER.format(None, 3)),
        (
            {"model_averaging_period": 0, "start_local_sgd_step": 0},
            "DDPStrategy.model_averaging_period must be a whole number of at least 1, got 0.",
        ),
        (
            {"model_averaging_period": 1, "start_local_sgd_step": -1},
            "DDPStrategy.start_local_sgd_step must be a whole number of at least 0, got -1.",
        ),
        (
            {"start_method": "thread"},
            "DDPStrategy.start_method must be one of ['fork', 'forkserver', 'popen', 'spawn'], got 'thread'.",
        ),
        ({"bucket_bytes": 0}, f"DDPStrategy.bucket_bytes {OR_AUTO} 0."),
        ({"bucket_bytes": -1}, f"DDPStrategy.bucket_bytes {OR_AUTO} -1."),
        ({"bucket_bytes": 2.0}, f"DDPStrategy.bucket_bytes {OR_AUTO} 2.0."),
        ({"bucket_bytes": True}, f"DDPStrategy.bucket_bytes {OR_AUTO} True."),
        ({"bucket_bytes": "large"}, f"DDPStrategy.bucket_bytes {OR_AUTO} 'large'."),
        ({"first_bucket_bytes": "auto"}, f"DDPStrategy.first_bucket_bytes {BYTES} 'auto'."),
        ({"network": 1e9}, "DDPStrategy.network must be an ltx.profile.Network or None, got 1000000000.0."),
        ({"first_bucket_bytes": "1 MiB"}, f"DDPStrategy.first_bucket_bytes {BYTES} '1 MiB'."),
        ({"timeout": "60"}, f"DDPStrategy.timeout {DURATION} '60'."),
        (
            {"timeout": float("inf")},
            f"DDPStrategy.timeout {DURATION.replace('more than 0', 'more than 0 and less than 1,000 years')} inf.",
        ),
        ({"timeout": timedelta(0)}, f"DDPStrategy.timeout {DURATION} datetime.timedelta(0)."),
    ],
)
def test_bad_fields(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(StrategyError) as raised:
        ltx.DDPStrategy(**fields)
    assert str(raised.value) == text
    with pytest.raises(StrategyError) as raised:
        dataclasses.replace(ltx.DDPStrategy(), **fields)
    assert str(raised.value) == text
    assert isinstance(raised.value, LtxError)
    assert isinstance(raised.value, ValueError)
