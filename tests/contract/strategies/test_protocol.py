"""The protocol of strategies: local SGD and its kin, written in a few lines, train as their slow twins say."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import ltx
from ltx import hooks
from ltx.errors import InvalidStateError, StrategyError
from ltx.extend import Exchange, Update, exchange
from ltx.strategies import StateLayout, StepInfo, Updated
from tests.kinds import Params
from tests.train_on import refuses

STEPS, LR = 7, 0.1


def mean_over(strategy: ltx.Strategy, params: Params, info: StepInfo) -> Params:
    mean, _ = exchange(strategy, hooks.AllReduce(), list(params.values()), list(params), info).wait()
    return dict(zip(params, mean, strict=True))


@dataclass(frozen=True, kw_only=True)
class LocalSGD(ltx.Strategy):
    """Local gradients; parameters are averaged after every `period` steps."""

    layout: ClassVar[StateLayout] = StateLayout(params="per_rank", opt_state="per_rank")

    period: int = 3

    def hook(self, step: int) -> None:
        return None

    def communicates_after_update(self, step: int) -> bool:
        return (step + 1) % self.period == 0

    def after_update(self, params: Any, states: Any, info: StepInfo) -> Any:
        return (mean_over(self, params, info) if (info.step + 1) % self.period == 0 else params), states


@dataclass(frozen=True, kw_only=True)
class PostLocalSGD(LocalSGD):
    """Mean gradients for two steps, then local SGD."""

    def hook(self, step: int) -> hooks.CommHook | None:
        return hooks.AllReduce() if step < 2 else None


@dataclass(frozen=True, kw_only=True)
class Gossip(ltx.Strategy):
    """Local gradients; the parameters' mean is made during the step, which is added to that mean instead."""

    layout: ClassVar[StateLayout] = StateLayout(params="per_rank", opt_state="per_rank")

    def hook(self, step: int) -> None:
        return None

    def begin(self, params: Params, states: Any, info: StepInfo, pending: Any) -> Exchange:
        return exchange(self, hooks.AllReduce(), list(params.values()), list(params), info, background=True)

    def update(self, update: Update, states: Any, info: StepInfo, pending: Exchange) -> Updated:
        mean, _ = pending.wait()
        params, opt_state = replace(update, params=dict(zip(update.params, mean, strict=True))).apply()
        return Updated(params, opt_state, states)


@dataclass(frozen=True, kw_only=True)
class Anchored(LocalSGD):
    """Local SGD towards an anchor, part of the state: w <- (anchor + mean w) / 2, which is the next anchor too."""

    def init(self, param: Tensor, path: str = "") -> dict[str, Tensor]:
        return {"anchor": param.clone()}

    def after_update(self, params: Params, states: Any, info: StepInfo) -> Any:
        if (info.step + 1) % self.period:
            return params, states
        mean = mean_over(self, params, info)
        anchors = {path: {"anchor": (state["anchor"] + mean[path]) / 2} for path, state in states.items()}
        return {path: state["anchor"] for path, state in anchors.items()}, anchors


STRATEGIES = {"local SGD": LocalSGD(), "post-local SGD": PostLocalSGD(), "gossip": Gossip(), "anchored": Anchored()}


def loss(params: Params, x: Tensor) -> Tensor:
    return ((params["w"] * x).sum() + params["b"] - 1).square() + params["w"].square().sum()


def problem(ranks: int) -> tuple[Params, Tensor]:
    """(parameters, inputs by step and rank)"""
    generator = torch.Generator().manual_seed(0)
    return {"w": torch.ones(3), "b": torch.zeros(())}, 0.5 * torch.randn(STEPS, ranks, 3, generator=generator)


def trainer(strategy: ltx.Strategy, **kwargs: Any) -> Any:
    return ltx.train_step(ltx.data_parallel(loss, strategy), ltx.optim.from_torch(torch.optim.SGD, lr=LR), **kwargs)


def test_work_on_all_parameters_together_cant_be_done_by_bucket() -> None:
    with pytest.raises(StrategyError, match=r"each bucket by itself, which Gossip\(\) doesn't offer"):
        trainer(Gossip(), overlap="update")


def test_without_a_hook_gradients_are_local() -> None:
    grads = ltx.vmap(torch.func.grad(ltx.data_parallel(lambda w, x: w * x, LocalSGD())), in_dims=(None, 0))
    assert grads(torch.tensor(1.0), torch.tensor([1.0, 3.0])).tolist() == [1.0, 3.0]
    assert ltx.vmap(lambda g: ltx.sync_gradients(g, LocalSGD())[0])(torch.tensor([1.0, 3.0])).tolist() == [1.0, 3.0]


def test_what_a_strategy_must_define() -> None:
    with pytest.raises(NotImplementedError, match=re.escape("Strategy must define hook(step)")):
        ltx.data_parallel(lambda w: w.sum(), ltx.Strategy())(torch.ones(2, requires_grad=True))
    refuses(NotImplementedError, re.escape("CommHook must define reduce(inputs)"), hooks.CommHook().reduce, None)


@dataclass(frozen=True, kw_only=True)
class Undeclared(ltx.Strategy):
    """Synchronous in the first step, local from then on, and no word about what ranks differ in."""

    def hook(self, step: int) -> hooks.CommHook | None:
        return hooks.AllReduce() if step == 0 else None

    cycle = (1, 1)


@pytest.mark.parametrize("way", ["one rank", "simulated", "compiled"])
def test_ranks_that_differ_have_a_layout(way: str) -> None:
    train = trainer(Undeclared())
    params, inputs = problem(2)
    text = "Undeclared: hook(1) leaves gradients local, so that ranks may differ, and Undeclared.layout doesn't say in"
    if way == "simulated":
        state, _ = ltx.vmap(train, in_dims=(None, 0))(train.init(params), inputs[0])
        refuses(StrategyError, re.escape(text), ltx.vmap(train), state, inputs[1])
        return
    state, _ = train(train.init(params), inputs[0, 0])
    with pytest.raises(Exception, match=re.escape(text)):  # Dynamo's in a graph, with the text
        (torch.compile(train, backend="eager") if way == "compiled" else train)(state, inputs[1, 0])


PAIR = "Returns.after_update must return (params, states), states a dict by path, got "
ANSWERS: dict[str, tuple[Callable[[Params, Any], Any], str]] = {
    "parameters alone": (lambda p, s: p, PAIR + "dict."),
    "three": (lambda p, s: (p, s, None), PAIR + "a tuple of 3."),
    "no dict": (lambda p, s: (p, None), PAIR + "(dict, NoneType)."),
    "no states": (
        lambda p, s: (p, {}),
        "Returns.after_update returned no 'anchor' and no 'extra' in the states of parameter 'b', which init made.",
    ),
    "a state less": (
        lambda p, s: (p, {**s, "w": {"anchor": s["w"]["anchor"]}}),
        "Returns.after_update returned no 'extra' in the states of parameter 'w', which init made. Return all states",
    ),
    "a leaf less": (
        lambda p, s: ({"w": p["w"]}, s),
        "Returns.after_update returned parameters with the leaves ['w'], and was given ['b', 'w'].",
    ),
    "another shape": (
        lambda p, s: ({**p, "w": p["w"][:1]}, s),
        "Returns.after_update returned float32[1] for parameter 'w', which is float32[3]. Return its shape and dtype.",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Returns(LocalSGD):
    answer: str

    def init(self, param: Tensor, path: str = "") -> dict[str, Tensor]:
        return {"anchor": param.clone(), "extra": torch.zeros_like(param)}

    def after_update(self, params: Params, states: Any, info: StepInfo) -> Any:
        return ANSWERS[self.answer][0](params, states)


@dataclass(frozen=True, kw_only=True)
class UpdatesTo(Returns):
    """The same as the result of `update`."""

    def update(self, update: Update, states: Any, info: StepInfo, pending: Any) -> Any:
        params, opt_state = update.apply()
        given = ANSWERS[self.answer][0](params, states)
        return Updated(given[0], opt_state, given[1]) if self.answer != "parameters alone" else given


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("way", ["backward", "update", "simulated"])
def test_what_after_update_returns_is_looked_at(answer: str, way: str) -> None:
    train = trainer(Returns(answer=answer), overlap="update" if way == "update" else "backward")
    params, inputs = problem(2)
    state = train.init(params)
    step, x = (ltx.vmap(train, in_dims=(None, 0)), inputs[0]) if way == "simulated" else (train, inputs[0, 0])
    refuses(StrategyError, re.escape(ANSWERS[answer][1]), step, state, x)


@pytest.mark.parametrize("answer", ["parameters alone", "no states", "another shape"])
def test_what_update_returns_is_looked_at(answer: str) -> None:
    train = trainer(UpdatesTo(answer=answer))
    params, inputs = problem(1)
    text = (
        ANSWERS[answer][1]
        .replace("Returns.after_update", "UpdatesTo.update")
        .replace("(params, states), states a dict by path", "an ltx.strategies.Updated(params, opt_state, states)")
    )
    state = train.init(params)
    refuses(StrategyError, re.escape(text), train, state, inputs[0, 0])
    refuses(InvalidStateError, "the optimizer had begun to update its tensors in place", train, state, inputs[0, 0])
    kept = trainer(UpdatesTo(answer=answer), donate=False)
    with pytest.raises(StrategyError, match=re.escape(text)):
        kept(state := kept.init(params), inputs[0, 0])
    assert all(torch.equal(x, y) for x, y in zip(state.params.values(), params.values(), strict=True))


def test_states_may_come_and_go_beside_those_of_init() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Transient(LocalSGD):
        def after_update(self, params: Params, states: Any, info: StepInfo) -> Any:
            return params, {} if states else {path: {"own": x.clone()} for path, x in params.items()}

    train = trainer(Transient())
    params, inputs = problem(1)
    state = train.init(params)
    for count in (2, 0):
        state, _ = train(state, inputs[0, 0])
        assert len(state.sync_state.leaves) == count
