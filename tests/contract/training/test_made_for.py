"""A state goes to the train step that it was made for; another one refuses it, or adopts it."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx.errors import StepError
from ltx.optim import adjustable, chain, clip_by_global_norm, from_torch
from tests.contract.bad_input.public import loss
from tests.kinds import Params, Ranks
from tests.train_on import go_on, on_ranks, raised_by, refuses, said
from tests.twins.cases import assert_same_bits

SGD = from_torch(torch.optim.SGD, lr=0.1)
ADAM = from_torch(torch.optim.Adam, lr=0.1)

STRATEGIES: dict[str, Callable[[], ltx.Strategy]] = {
    "ddp": ltx.DDPStrategy,
    "fp16": lambda: ltx.DDPStrategy(comm_hook=ltx.hooks.FP16()),
    "onebit": lambda: ltx.DDPStrategy(comm_hook=ltx.hooks.OneBit()),
    "powersgd": lambda: ltx.DDPStrategy(comm_hook=ltx.hooks.PowerSGD(rank=1)),
    "noop": lambda: ltx.DDPStrategy(comm_hook=ltx.hooks.Noop()),
    "local": lambda: ltx.LocalSGDStrategy(period=4),
    "diloco": lambda: ltx.DiLoCoStrategy(period=4),
    "gossip": lambda: ltx.BaguaStrategy("decentralized"),
    "low precision": lambda: ltx.BaguaStrategy("low_precision_decentralized"),
    "async": lambda: ltx.BaguaStrategy("async", sync_interval_ms=1, warmup_steps=0),
    "qadam": lambda: ltx.BaguaStrategy("qadam", warmup_steps=2),
    "adasum": lambda: ltx.HorovodStrategy(op="adasum"),
    "zero": ltx.ZeroStrategy,
}


def train_of(name: str) -> Any:
    optimizer = ltx.optim.qadam(lr=0.1, warmup_steps=2) if name == "qadam" else SGD
    return ltx.train_step(ltx.data_parallel(loss, STRATEGIES[name]()), optimizer)


def begun(train: Any, params: Params, x: Tensor, steps: int = 2) -> Any:
    return train.gather(train.finish(go_on(train, train.init(params), [x] * steps).state))


#: Of these the state has equal parameters, and nothing of its own; of those each rank has parameters of its own.
PLAIN, OWN = ("ddp", "fp16"), ("noop", "local", "gossip", "async")


@pytest.mark.full(but=3)
@pytest.mark.parametrize("first", STRATEGIES)
@on_ranks(2)
def test_strategies(first: str, seed: int) -> None:
    """For each other one: what its step says of a state of `first`, and that it goes on from what it adopts."""
    warnings.simplefilter("ignore")
    torch.manual_seed(seed)
    params, x = {"w": torch.randn(16, 16), "b": torch.randn(16)}, torch.randn(4, 16) + ltx.world().rank
    for name in STRATEGIES:
        train, fits = train_of(name), name == first or any(first in kind and name in kind for kind in (PLAIN, OWN))
        text = raised_by(train, begun(train_of(first), params, x), x)
        told = re.match(r"StepError: .*was made for another train step.*train\.adopt\(state\)", text, re.DOTALL)
        assert text == "" if fits else told, (name, text)
        state = begun(train_of(first), params, x)
        mean = ltx.pmean(state.params)
        state = train.adopt(state)
        assert_same_bits(dict(state.params), mean)
        state, _ = go_on(train, state, [x] * 2)
        if train.step.strategy.layout.params == "replicated":
            ltx.check_replicas(state)
        assert state.step == 4


def squares(params: Params, x: Tensor) -> Tensor:
    return (params["w"] * x) ** 2


#: A step multiplies w by 0.8 on rank 0 and by 0.2 on rank 1, by 0.5 where they share their gradients.
LOCAL = ltx.train_step(ltx.data_parallel(squares, ltx.LocalSGDStrategy(period=4)), SGD)
DDP = ltx.train_step(ltx.data_parallel(squares), SGD)


def test_replicas_that_have_parted(ranks: Ranks) -> None:
    """w = 1, loss (w x)², x = 1 + rank, SGD 0.1: two local steps, then five of DDP."""

    def run(params: Any) -> tuple[str, float]:
        x = torch.tensor(1.0 + ltx.world().rank)
        state = LOCAL.finish(go_on(LOCAL, LOCAL.init({"w": torch.tensor(1.0)}), [x] * 2).state)
        return said(StepError, DDP, state, x), go_on(DDP, DDP.adopt(state, params), [x] * 5).params["w"].item()

    # Local SGD takes the mean after its first step; the next leaves 0.4 and 0.1.
    for params, w in (("mean", (0.4 + 0.1) / 2 / 32), ("rank0", 0.4 / 32)):
        for text, got in ranks(2).run(run, params):
            assert "strategy: made for LocalSGDStrategy(period=4), this one has DDPStrategy()" in text
            assert got == pytest.approx(w, rel=1e-5)


@pytest.mark.parametrize("thaws", [True, False])
def test_trainable(thaws: bool) -> None:
    def plain(params: Params, x: Tensor) -> Tensor:
        return ((params["body"] * x + params["head"]) ** 2).sum()

    step, x = ltx.data_parallel(plain), torch.tensor(0.5)
    head, everything = ltx.train_step(step, SGD, trainable="head"), ltx.train_step(step, SGD)
    first, then = (head, everything) if thaws else (everything, head)
    state, _ = first(first.init({"body": torch.tensor(0.5), "head": torch.tensor(0.3)}), x)
    refuses(StepError, rf"trainable=: .*\['body'\] {'trained' if thaws else 'frozen'}", then, state, x)
    expected = {
        name: value.clone().requires_grad_(name in ("head", "body"[: 4 * thaws]))
        for name, value in state.params.items()
    }
    plain(expected, x).backward()
    state, _ = then(then.adopt(state), x)
    for name, value in expected.items():
        after = value.detach() if value.grad is None else value.detach() - 0.1 * value.grad
        torch.testing.assert_close(state.params[name], after)


PAIRS = {
    "sgd, adam": (SGD, ADAM),
    "adam, sgd": (ADAM, SGD),
    "adam, nadam": (ADAM, from_torch(torch.optim.NAdam, lr=0.1)),
    "adam, adadelta": (ADAM, from_torch(torch.optim.Adadelta, lr=0.1)),
    "sgd, with momentum": (SGD, from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)),
    "adjustable, a number": (from_torch(torch.optim.SGD, lr=adjustable(0.1)), SGD),
    "adam, amsgrad": (ADAM, from_torch(torch.optim.Adam, lr=0.1, amsgrad=True)),
    "clipped, plain": (chain(clip_by_global_norm(1.0), ADAM), ADAM),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_optimizers(pair: str) -> None:
    before, after = (ltx.train_step(ltx.data_parallel(squares), optimizer) for optimizer in PAIRS[pair])
    x = torch.tensor(2.0)
    state, _ = before(before.init({"w": torch.tensor(1.0)}), x)
    refuses(StepError, r"optimizer: made for .* train\.adopt\(state\)", after, state, x)
    fresh = replace(after.init(state.params), step=1)
    adopted, _ = after(after.adopt(state), x)
    fresh, _ = after(fresh, x)
    if pair != "adam, amsgrad":  # whose moments are Adam's
        torch.testing.assert_close(adopted.params, fresh.params)


SAME: dict[str, tuple[Any, Any]] = {
    "another rate": (SGD, from_torch(torch.optim.SGD, lr=0.2)),
    "a schedule": (SGD, from_torch(torch.optim.SGD, lr=lambda step: 0.1)),
    "the schedule made again": tuple(from_torch(torch.optim.SGD, lr=lambda step: 0.1) for _ in range(2)),  # type: ignore[dict-item]
    "weight decay": (ADAM, from_torch(torch.optim.Adam, lr=0.1, weight_decay=0.1)),
}


@pytest.mark.parametrize("pair", SAME)
def test_what_is_no_difference(pair: str) -> None:
    before, after = (ltx.train_step(ltx.data_parallel(squares), optimizer) for optimizer in SAME[pair])
    state, _ = before(before.init({"w": torch.tensor(1.0)}), torch.tensor(2.0))
    state, _ = after(state, torch.tensor(2.0))
    assert state.step == 2


CHANGES: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda state: state,
    "copied": copy.deepcopy,
    "pickled": lambda state: pickle.loads(pickle.dumps(state)),
    "replaced": lambda state: replace(state, params={"w": torch.tensor(3.0)}),
    "mapped": lambda state: ltx.tree.map(torch.clone, state),
}


@pytest.mark.parametrize("how", CHANGES)
def test_from_elsewhere(how: str) -> None:
    """A state that was changed outside of steps fits its own train step, and still no other one."""
    own, other = (ltx.train_step(ltx.data_parallel(squares), optimizer) for optimizer in (ADAM, SGD))
    state, _ = own(own.init({"w": torch.tensor(1.0)}), torch.tensor(2.0))
    refuses(StepError, "made for another train step", other, CHANGES[how](state), torch.tensor(2.0))
    after, _ = own(CHANGES[how](state), torch.tensor(2.0))
    assert after.step == 2


def test_simulated_ranks_and_graphs() -> None:
    def on_a_rank(x: Tensor) -> Tensor:
        state, _ = LOCAL(LOCAL.init({"w": torch.tensor(1.0)}), x)
        refuses(StepError, "made for another train step", DDP, state, x)
        return DDP(DDP.adopt(state), x)[0].params["w"]

    # 0.8 and 0.2, then half of their mean
    torch.testing.assert_close(ltx.vmap(on_a_rank)(torch.tensor([1.0, 2.0])), torch.full((2,), 0.25))


@pytest.mark.full
def test_a_compiled_step() -> None:
    warnings.simplefilter("ignore")  # of torch's own
    with pytest.raises(Exception, match="made for another train step"):
        torch.compile(DDP)(LOCAL.init({"w": torch.tensor(1.0)}), torch.tensor(1.0))


def test_moments_of_those_that_stay(seed: int) -> None:
    """Unfreezing keeps the moments of what was trained; zeros for others, as a new optimizer has."""
    params = {"w": torch.randn(3, 2), "b": torch.randn(2)}
    x = torch.randn(4, 3)
    bias, both = (
        ltx.train_step(ltx.data_parallel(loss), ADAM, trainable="b"),
        ltx.train_step(ltx.data_parallel(loss), ADAM),
    )
    state, _ = bias(bias.init(params), x)
    moment = state.opt_state.per_param["b"]["exp_avg"].clone()
    state = both.adopt(state)
    assert torch.equal(state.opt_state.per_param["b"]["exp_avg"], moment)
    assert state.layout.adopted == "parameters unchanged, optimizer state kept, communication state kept"
    assert not state.opt_state.per_param["w"]["exp_avg"].any()
    assert state.frozen is None


def test_parts_in_turns_have_nothing_of_each_other() -> None:
    parts = {name: ltx.train_step(ltx.data_parallel(loss), ADAM, trainable=name) for name in ("w", "b")}
    state = parts["w"].init({"w": torch.randn(3, 2), "b": torch.randn(2)})
    state, _ = parts["w"](state, torch.randn(4, 3))
    assert "optimizer state new" in parts["b"].adopt(state).layout.adopted


def test_errors() -> None:
    state = DDP.init({"w": torch.tensor(1.0)})
    assert 'adopt: params must be "mean" or "rank0", got \'median\'' in said(StepError, DDP.adopt, state, "median")
    zero = ltx.train_step(ltx.data_parallel(squares, ltx.ZeroStrategy()), SGD)
    assert "old_train.gather" in said(StepError, DDP.adopt, zero.init({"w": torch.tensor(1.0)}))
