"""Hooks that send far less than the gradients get larger buckets of them."""

from __future__ import annotations

import pytest
import torch

import ltx
from ltx import hooks
from tests.sent import sent

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
