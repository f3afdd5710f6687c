"""Parameters that no rank uses: the first step names them, once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx.errors import StepError, UnusedParameterWarning
from tests.kinds import Params, Ranks
from tests.train_on import loop_of_torch, said, trained

X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
adamw = ltx.optim.from_torch(torch.optim.AdamW, lr=0.1, weight_decay=0.5)


def start() -> Params:
    return {"used": torch.ones(2), "pooler": torch.ones(2), "zero": torch.zeros(2), "low": torch.ones(2)}


def loss(params: Params, x: Tensor) -> Tensor:
    """The gradient of "low" is zero at first, as of LoRA's second matrix."""
    return (params["used"] * x + params["low"] * params["zero"] * x).square().mean()


def by_rank(params: Params, x: Tensor) -> Tensor:
    """Rank 0 alone uses "pooler", if there is another."""
    if ltx.axis_size() == 1 or int(ltx.axis_index()):
        return loss(params, x)
    return loss(params, x) + params["pooler"].sum()


def without_data(params: Params, x: Tensor) -> Tensor:
    """Rank 0 has no data, so its loss is a constant."""
    return loss(params, x) if int(ltx.axis_index()) or ltx.axis_size() == 1 else torch.zeros(())


def given(params: Params, x: Tensor) -> Any:
    return {**torch.func.grad(loss)(params, x), "pooler": None}, loss(params, x)


STEPS: dict[str, Callable[[], Any]] = {
    "plain": lambda: ltx.data_parallel(loss),
    "accumulated": lambda: ltx.accumulate(ltx.data_parallel(loss), 2),
    "weighted": lambda: ltx.data_parallel(lambda p, x: ltx.Weighted(loss(p, x), 1.0)),
    "given": lambda: ltx.data_parallel(given, returns="grads"),
    "mixed": lambda: ltx.mixed_precision(ltx.data_parallel(loss), ltx.Precision(compute=torch.bfloat16)),
    "without data": lambda: ltx.data_parallel(without_data),
    "zero": lambda: ltx.data_parallel(loss, ltx.ZeroStrategy()),
    "local": lambda: ltx.data_parallel(loss, ltx.LocalSGDStrategy(period=2)),
    "fp16": lambda: ltx.data_parallel(loss, ltx.DDPStrategy(comm_hook=ltx.hooks.FP16())),
}


def warned(step: Any, trainable: Any = None, **options: Any) -> tuple[list[str], Params]:
    """What the steps of a training have warned of, and what has become of the parameters."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        after = trained(step, adamw, start(), [X] * 3, trainable=trainable, **options)
    return [str(one.message) for one in caught if one.category is UnusedParameterWarning], after.params


def assert_said(found: list[str]) -> None:
    (text,) = found
    assert text.startswith("train_step: the loss of the first step doesn't depend on 'pooler'. ")
    assert "trainable=" in text
    assert "Keep those that other steps or ranks use, such as idle experts." in text


@pytest.mark.parametrize("name", STEPS)
def test_said_once(name: str, ranks: Ranks) -> None:
    step = STEPS[name]()
    for rank, (found, params) in enumerate((warned(step), *ranks(2).run(warned, step))):
        if name == "without data" and rank == 1:
            assert found == []
            continue
        assert_said(found)
        assert params["pooler"].eq(0.95**3).all() or name in ("mixed", "zero") or params["pooler"].lt(0.95).all()


@pytest.mark.parametrize("strategy", [ltx.DDPStrategy(), ltx.ZeroStrategy()])
def test_bucket_by_bucket(strategy: ltx.Strategy, ranks: Ranks) -> None:
    step = ltx.data_parallel(loss, strategy)
    for found, _ in (warned(step, overlap="update"), *ranks(2).run(warned, step, overlap="update")):
        assert_said(found)


def refused(step: Any, **options: Any) -> tuple[str, float]:
    train = ltx.train_step(step, adamw, donate=False, **options)
    state = train.init(start())
    return said(StepError, train, state, torch.ones(2, 2)), float(state.params["used"].sum())


@pytest.mark.parametrize("overlap", ["backward", "update"])
@pytest.mark.parametrize("strategy", [ltx.DDPStrategy(), ltx.BaguaStrategy("bytegrad")], ids=["ddp", "bytegrad"])
def test_a_loss_that_depends_on_nothing(strategy: Any, overlap: Any, ranks: Ranks) -> None:
    """On no rank: all raise, and the state is as before."""
    step = ltx.data_parallel(lambda params, x: loss(params, x).detach(), strategy)
    for text, kept in (refused(step, overlap=overlap), *ranks(2).run(refused, step, overlap=overlap)):
        assert "the loss of the first step doesn't depend on 'low', 'pooler', 'used', 'zero', on any rank. " in text
        assert "These are all: use the parameters that the step is given" in text
        assert kept == 2.0


def test_where_a_rank_does_not_see_the_gradients_of_others(ranks: Ranks) -> None:
    """It may be the only one that depends on nothing, so this is a warning."""
    step = ltx.data_parallel(without_data, ltx.LocalSGDStrategy(period=2))
    first, second = (found for found, _ in ranks(2).run(warned, step))
    assert "These are all: " in first[0]
    assert_said(second)
    of_none = ltx.data_parallel(lambda params, x: loss(params, x).detach(), ltx.ZeroStrategy())
    for found, _ in ranks(2).run(warned, of_none):
        assert "These are all: " in found[0]


def test_not_of_what_another_rank_uses(ranks: Ranks) -> None:
    step = ltx.data_parallel(by_rank)
    assert_said(warned(step)[0])
    for overlap in ("backward", "update"):
        for found, _ in ranks(2).run(warned, step, overlap=overlap):
            assert found == []


def test_trainable_leaves_them_alone(ranks: Ranks) -> None:
    """As torch does, whose .grad is None."""
    module = {name: torch.nn.Parameter(x) for name, x in start().items()}
    loop_of_torch(torch.optim.AdamW(module.values(), lr=0.1, weight_decay=0.5), loss, [(module, X)] * 3)
    step = ltx.data_parallel(loss)
    for found, params in (warned(step, ["used", "zero", "low"]), *ranks(2).run(warned, step, ["used", "zero", "low"])):
        assert found == []
        assert params["pooler"].tolist() == [1, 1]
        torch.testing.assert_close(dict(params), {name: x.detach() for name, x in module.items()})


def messages() -> list[str]:
    with ltx.profile.record() as trace:
        warned(ltx.data_parallel(loss))
    return [event.label for event in trace.events if event.label in ("summary", "bucket 0")]


def test_it_costs_no_message(ranks: Ranks) -> None:
    for found in ranks(2).run(messages):
        assert found == ["summary", "bucket 0"] * 3
