"""What is wrong in a user's hook is said in the words of its contract, on real and on simulated ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ltx
from ltx.errors import CallFailedError, StrategyError
from ltx.hooks import BucketInput, CollectiveRequest, CommHook
from tests.inside import stateful
from tests.kinds import Ranks
from tests.train_on import refuses, trained
from tests.twins.training import sgd


class Wrong(CommHook):
    def reduce(self, inputs: BucketInput) -> Any:
        return (yield from self.asks(inputs))

    def asks(self, inputs: BucketInput) -> Any:
        total = yield CollectiveRequest("psum", inputs.flat)
        return self.returns(total, inputs)

    def returns(self, total: torch.Tensor, inputs: BucketInput) -> Any:
        return total, inputs.states


class TooShort(Wrong):
    def returns(self, total: torch.Tensor, inputs: BucketInput) -> Any:
        return total[:-1], inputs.states


class Doubled(Wrong):
    def returns(self, total: torch.Tensor, inputs: BucketInput) -> Any:
        return torch.cat([total, total]), inputs.states


class WithoutStates(Wrong):
    def returns(self, total: torch.Tensor, inputs: BucketInput) -> Any:
        return total


class ReturnsNothing(Wrong):
    def returns(self, total: torch.Tensor, inputs: BucketInput) -> Any:
        return None


class DoesNotAsk(Wrong):
    def reduce(self, inputs: BucketInput) -> Any:
        return inputs.flat, inputs.states


class AsksWithoutRequest(Wrong):
    def asks(self, inputs: BucketInput) -> Any:
        total = yield inputs.flat
        return total, inputs.states


class InOtherWords(Wrong):
    def asks(self, inputs: BucketInput) -> Any:
        total = yield CollectiveRequest("all_reduce", inputs.flat)
        return total, inputs.states


class SendsNoTensor(Wrong):
    def asks(self, inputs: BucketInput) -> Any:
        total = yield CollectiveRequest("psum", list(inputs.bucket.members))  # type: ignore[arg-type]
        return total, inputs.states


class WithoutRows(Wrong):
    def asks(self, inputs: BucketInput) -> Any:
        part = yield CollectiveRequest("psum_scatter", inputs.flat)
        return part, inputs.states


class RowsOfTwo(Wrong):
    """Four rows for two ranks: a message that could be cut in two all the same."""

    def asks(self, inputs: BucketInput) -> Any:
        rows = torch.nn.functional.pad(inputs.flat, (0, -len(inputs.flat) % 4)).view(4, -1)
        exchanged = yield CollectiveRequest("all_to_all", rows)
        return exchanged.reshape(-1)[: len(inputs.flat)], inputs.states


class ReadsStep(Wrong):
    def asks(self, inputs: BucketInput) -> Any:
        total = yield CollectiveRequest("psum", inputs.flat * (1 + inputs.step))
        return total, inputs.states


class WithState(Wrong):
    @property
    def state_names(self) -> tuple[str, ...]:
        return ("residual",)

    def init(self, param: torch.Tensor, path: str = "") -> dict[str, torch.Tensor]:
        return {"residual": torch.zeros_like(param)}


class LosesState(WithState):
    def returns(self, total: torch.Tensor, inputs: BucketInput) -> Any:
        return total, [{} for _ in inputs.states]


class LosesAParameter(WithState):
    def returns(self, total: torch.Tensor, inputs: BucketInput) -> Any:
        return total, inputs.states[1:]


MISTAKES = {
    TooShort: r"returned a buffer of shape \[7\] for bucket 0: expected 8 elements",
    Doubled: r"returned a buffer of shape \[16\] for bucket 0: expected 8 elements",
    WithoutStates: r"returned a (Batched)?Tensor: expected the reduced buffer and the next states",
    ReturnsNothing: r"returned a NoneType: expected the reduced buffer",
    DoesNotAsk: r"returned a tuple and has no yield",
    AsksWithoutRequest: r"yields a (Batched)?Tensor: expected a request",
    InOtherWords: r"'all_reduce', \.\.\.\): expected one of 'psum', 'all_gather'",
    SendsNoTensor: r"'psum', a list\): expected a tensor",
    WithoutRows: r"'psum_scatter', a buffer of shape \[8\]\): expected a first dimension of 2",
    RowsOfTwo: r"'all_to_all', a buffer of shape \[4, 2\]\): expected a first dimension of 2",
    ReadsStep: r"Set reads_step = True",
    LosesState: r"LosesState\(\) returned states \[\[\], \[\]\] for a bucket of 2 .*: expected \[\['residual'\]",
    LosesAParameter: r"returned states \[\['residual'\]\] for a bucket of 2 parameters",
}


def train(hook: CommHook, x: torch.Tensor) -> torch.Tensor:
    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return (params["w"] * x).sum() + params["b"].sum()

    step = ltx.data_parallel(loss, ltx.DDPStrategy(comm_hook=hook))
    return trained(step, sgd(0.1), {"w": torch.ones(5), "b": torch.zeros(3)}, [x] * 3).params["w"]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda cls: cls.__name__)
def test_a_mistake_is_named(mistake: type[CommHook], ranks: Ranks, seed: int) -> None:
    hook, x = mistake(), torch.randn(2, 5)
    refuses(StrategyError, MISTAKES[mistake], ltx.vmap(lambda x: train(hook, x)), x)
    refuses(CallFailedError, MISTAKES[mistake], ranks(2).run, lambda: train(hook, x[ltx.world().rank]))
    assert ranks(2).run(lambda: train(WithState(), x[0])).replicated().shape == (5,)  # the ranks live on


@pytest.mark.full(but=1)
@pytest.mark.parametrize("mistake", [ReadsStep, TooShort, WithoutRows], ids=lambda cls: cls.__name__)
def test_a_mistake_is_named_in_a_graph(mistake: type[CommHook], ranks: Ranks, seed: int) -> None:
    def run() -> torch.Tensor:
        step = ltx.data_parallel(lambda p, x: (p["w"] * x).sum() + p["b"].sum(), ltx.DDPStrategy(comm_hook=mistake()))
        params = {"w": torch.ones(5), "b": torch.zeros(3)}
        return torch.compile(lambda p, x: ltx.grad(step)(p, x)["w"], backend="aot_eager", fullgraph=True)(params, x)

    x = torch.randn(5)
    refuses(CallFailedError, MISTAKES[mistake], ranks(2).run, run)


class Alternating(CommHook):
    """It needs no reads_step: that it gives another hook at each step says that steps are counted."""

    def at(self, step: int) -> CommHook:
        return ltx.hooks.FP16() if step % 2 else ltx.hooks.AllReduce()


def test_steps_are_counted_for_a_hook_that_changes(ranks: Ranks, seed: int) -> None:
    x = torch.randn(2, 5)
    assert stateful(ltx.DDPStrategy(comm_hook=Alternating()))
    got = ranks(2).run(lambda: train(Alternating(), x[ltx.world().rank])).replicated()
    exact, half = (x / 2).sum(0), (x / 2).half().sum(0).float()
    torch.testing.assert_close(got, 1 - 0.1 * (2 * exact + half), rtol=0, atol=1e-6)
    assert not torch.equal(exact, half)
