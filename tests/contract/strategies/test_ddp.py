"""DDPStrategy as a value, and its bad fields."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch

import ltx
from ltx import hooks
from ltx.errors import StrategyError
from tests.inside import stateful
from tests.train_on import refuses


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
    assert stateful(fed)
    # The hook and what goes around it stay apart.
    assert fed.comm_hook == hooks.ByteGrad()
    assert dataclasses.replace(fed, comm_hook=hooks.OneBit()).hook(0) == hooks.OneBit(error_feedback=True)
    assert pickle.loads(pickle.dumps(fed)).hook(0) == fed.hook(0)
    refuses(StrategyError, "needs a request for sums", ltx.DDPStrategy, comm_wrapper="fp16", comm_hook=hooks.ByteGrad())


def test_models_are_averaged_only_where_asked_for() -> None:
    plain, averaging = ltx.DDPStrategy(), ltx.DDPStrategy(model_averaging_period=4, start_local_sgd_step=100)
    assert not stateful(plain)
    assert not plain.communicates_besides
    assert not any(map(plain.communicates_after_update, range(200)))
    assert plain.layout.params == plain.layout.opt_state == "replicated"
    assert stateful(averaging)
    assert averaging.communicates_besides
    assert averaging.layout.params == averaging.layout.opt_state == "per_rank"
