"""Hooks that give way to others: where a strategy leaves to them which is in force, in chains, with error feedback."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import ltx
from ltx import hooks
from ltx.errors import StrategyError
from ltx.extend import exchange
from ltx.hooks import CommHook
from ltx.strategies import States, StepInfo
from ltx.typing import Tree
from tests.kinds import Ranks
from tests.sent import sent
from tests.train_on import go_on, refuses
from tests.twins.training import sgd

FED = hooks.error_feedback
EXACT = hooks.AllReduce()


@dataclass(frozen=True)
class Plain(ltx.Strategy):
    """It gives the hook that it has, at every step."""

    comm_hook: CommHook = EXACT

    def hook(self, step: int) -> CommHook:
        return self.comm_hook


@dataclass(frozen=True)
class Sharing(ltx.Strategy):
    """Each rank trains alone; `comm_hook` makes one of the ranks' parameters."""

    layout = ltx.strategies.StateLayout(params="per_rank", opt_state="per_rank", sync_state="per_rank")

    comm_hook: CommHook = EXACT

    def hook(self, step: int) -> None:
        return None

    def communicates_after_update(self, step: int) -> bool:
        return True

    def after_update(self, params: Tree, states: States, info: StepInfo) -> tuple[Tree, States]:
        (mean,), _ = exchange(self, self.comm_hook, [params], [""], info).wait()
        return mean, states


SCHEDULES = {
    "after": hooks.after(2, hooks.RandomK(0.5)),
    "two phases": hooks.after(1, hooks.OneBit(block=8), first=FED(hooks.ByteGrad())),
    "not shares": hooks.after(1, hooks.Noop()),
    "powersgd": hooks.PowerSGD(1, start_step=2),
    "chained": hooks.chain(hooks.after(1, hooks.RandomK(0.5)), hooks.BF16()),
}


def steps_of(strategy: ltx.Strategy, x: Tensor) -> Tensor:
    state = ltx.data_parallel(lambda w: w.sum(), strategy).init(torch.empty_like(x[0]))
    found = []
    for grad in x:
        reduced, state = ltx.sync_gradients(grad, strategy, state)
        found.append(reduced)
    return torch.stack(found)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_strategy_may_leave_it_to_the_hook_which_is_in_force(name: str, ranks: Ranks, seed: int) -> None:
    hook = SCHEDULES[name]
    x = torch.randn(2, 4, 8, 8)
    given, looked_up = Plain(comm_hook=hook), ltx.DDPStrategy(comm_hook=hook)
    assert torch.equal(ltx.vmap(lambda x: steps_of(given, x))(x), ltx.vmap(lambda x: steps_of(looked_up, x))(x))

    def run() -> tuple[Tensor, Tensor]:
        mine = x[int(ltx.axis_index())]
        return steps_of(given, mine), steps_of(looked_up, mine)

    for got, want in ranks(2).run(run):
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_one_in_force_sends(name: str, seed: int) -> None:
    params = torch.randn(40, 30)
    for step in (0, 3):
        given, looked_up = (
            sent(strategy, params, 4, step)
            for strategy in (Plain(comm_hook=SCHEDULES[name]), ltx.DDPStrategy(comm_hook=SCHEDULES[name]))
        )
        assert given.packed == looked_up.packed
        assert [(e.operation, e.nbytes) for e in given.events] == [(e.operation, e.nbytes) for e in looked_up.events]


def test_an_exchange_takes_the_one_in_force(seed: int) -> None:
    hook = hooks.after(1, hooks.Noop())
    train = ltx.train_step(ltx.data_parallel(lambda w, x: (w * x).sum(), Sharing(comm_hook=hook)), sgd(0.1))
    x, start = torch.randn(2, 5), torch.randn(5)

    def two(x: Tensor) -> Tensor:
        state, _ = go_on(train, train.init(start), [x] * 2)
        whole: Tensor = state.params
        return whole

    torch.testing.assert_close(ltx.vmap(two)(x), start - 0.1 * x.mean(0) - 0.1 * x)


# What can't work is refused when it is made, not at the step from which on it would be in force.
WRONG = {
    "needs a request for sums, which ByteGrad": lambda: hooks.chain(hooks.after(10, hooks.ByteGrad()), hooks.BF16()),
    "needs sums of its results, which Adasum": lambda: hooks.chain(hooks.AllReduce(), hooks.after(10, hooks.Adasum())),
    "needs sums of its results, which Noop": lambda: hooks.chain(hooks.AllReduce(), hooks.Noop()),
    "needs sums of its results, which FromTorch": lambda: hooks.chain(
        hooks.AllReduce(), hooks.from_torch(lambda state, bucket: None)
    ),
    "needs an error to feed back": lambda: FED(hooks.after(10, hooks.AllReduce())),
}


@pytest.mark.parametrize("text", WRONG)
def test_combinations_that_cannot_work(text: str) -> None:
    refuses(StrategyError, text, WRONG[text])


def test_hooks_that_would_share_a_tensor_have_one_shape_of_it() -> None:
    hook = hooks.after(10, hooks.PowerSGD(4, start_step=0), first=hooks.PowerSGD(1, start_step=0))
    with pytest.raises(StrategyError, match=r"PowerSGD\(start_step=0\) keeps 'q' of parameter 'w' as float32\[1, 30\]"):
        hook.init(torch.empty(40, 30), "w")
    assert hook.init(torch.empty(40), "b") == {}
    alike = hooks.after(10, hooks.PowerSGD(4, start_step=0), first=hooks.PowerSGD(4, start_step=0, seed=1))
    assert alike.init(torch.empty(40, 30), "w")["q"].shape == (4, 30)


def test_both_are_cast_chained_and_fed_back() -> None:
    warmed = hooks.after(10, hooks.RandomK(0.5, error_feedback=False), first=hooks.AllReduce())
    bf16 = torch.bfloat16
    assert hooks.cast(warmed, bf16) == hooks.after(10, hooks.cast(warmed.hook, bf16), first=hooks.BF16())
    assert hooks.cast(hooks.after(10, hooks.Noop()), bf16).at(10) == hooks.Noop()
    chained = hooks.chain(warmed, hooks.after(20, hooks.ByteGrad()))
    assert chained.at(9) == hooks.chain(hooks.AllReduce(), hooks.AllReduce())
    assert chained.at(20) == hooks.chain(warmed.hook, hooks.ByteGrad())
    assert FED(hooks.after(10, hooks.AllReduce(), first=hooks.FP16())).at(0) == FED(hooks.FP16())
    assert FED(hooks.after(10, hooks.ByteGrad(), first=hooks.FP16())).at(0) == FED(hooks.FP16())
