"""DDPStrategy as a value, and its bad fields."""

from __future__ import annotations

import dataclasses
import datetime
import pickle
from datetime import timedelta
from typing import Any

import pytest

import ltx
from ltx import hooks
from ltx.errors import LtxError, StrategyError

VALUES = [
    ltx.DDPStrategy(),
    ltx.DDPStrategy(comm_hook="bf16", bucket_bytes=1 << 20),
    ltx.DDPStrategy(process_group_backend="gloo", timeout=timedelta(minutes=5), first_bucket_bytes=7),
]


@pytest.mark.parametrize("strategy", VALUES, ids=repr)
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


def test_repr() -> None:
    strategy = ltx.DDPStrategy(comm_hook="bf16")
    assert eval(repr(strategy), {"BF16": hooks.BF16, "datetime": datetime, **vars(ltx)}) == strategy


HOOKS = "DDPStrategy.comm_hook must be one of ['allreduce', 'bf16', 'fp16'] or an ltx.hooks.CommHook, got "
BYTES = "must be a positive number of bytes, got"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"comm_hook": "bf17"}, HOOKS + "'bf17'."),
        ({"comm_hook": None}, HOOKS + "None."),
        ({"comm_hook": hooks.BF16}, HOOKS + "<class 'ltx.hooks.half.BF16'>."),
        ({"bucket_bytes": 0}, f"DDPStrategy.bucket_bytes {BYTES} 0."),
        ({"bucket_bytes": -1}, f"DDPStrategy.bucket_bytes {BYTES} -1."),
        ({"bucket_bytes": 2.0}, f"DDPStrategy.bucket_bytes {BYTES} 2.0."),
        ({"bucket_bytes": True}, f"DDPStrategy.bucket_bytes {BYTES} True."),
        ({"first_bucket_bytes": "1 MiB"}, f"DDPStrategy.first_bucket_bytes {BYTES} '1 MiB'."),
        ({"timeout": 60}, "DDPStrategy.timeout must be a positive datetime.timedelta, got 60."),
        (
            {"timeout": timedelta(0)},
            "DDPStrategy.timeout must be a positive datetime.timedelta, got datetime.timedelta(0).",
        ),
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
