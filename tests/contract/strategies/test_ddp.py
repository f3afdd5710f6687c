"""DDPStrategy as a value, its bad fields, and the buckets of hooks that send far less than the gradients."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch

import ltx
from ltx import hooks
from ltx.errors import StrategyError
from tests.inside import stateful
from tests.sent import sent
from tests.train_on import refuses


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
