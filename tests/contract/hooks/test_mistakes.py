"""Hooks of a user's own: what is wrong in them is said in the words of their contract; hooks made of functions."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx.errors import CallFailedError, LtxError, StrategyError
from ltx.hooks import BucketInput, CollectiveRequest, CommHook, error_feedback, from_functions
from tests.contract.hooks.table import quarter, spread
from tests.inside import stateful
from tests.kinds import Ranks
from tests.train_on import on_ranks, refuses, said, trained
from tests.twins.training import sgd


def summed(inputs: BucketInput) -> Any:
    return CollectiveRequest("psum", inputs.flat)


def returned(total: torch.Tensor, inputs: BucketInput) -> Any:
    return total, inputs.states


def four_rows(inputs: BucketInput) -> Any:
    """For two ranks: a message that could be cut in two all the same."""
    return CollectiveRequest("all_to_all", torch.nn.functional.pad(inputs.flat, (0, -len(inputs.flat) % 4)).view(4, -1))


@dataclass(frozen=True)
class Wrong(CommHook):
    """A sum over ranks, or what else it asks for and returns."""

    asks: Callable[[BucketInput], Any] = field(default=summed, repr=False)  # ranks compare what they print
    returns: Callable[[torch.Tensor, BucketInput], Any] = field(default=returned, repr=False)

    def reduce(self, inputs: BucketInput) -> Any:
        return self.returns((yield self.asks(inputs)), inputs)


@dataclass(frozen=True)
class WithState(Wrong):
    @property
    def state_names(self) -> tuple[str, ...]:
        return ("residual",)

    def init(self, param: torch.Tensor, path: str = "") -> dict[str, torch.Tensor]:
        return {"residual": torch.zeros_like(param)}


class DoesNotAsk(CommHook):
    def reduce(self, inputs: BucketInput) -> Any:
        return inputs.flat, inputs.states


#: Hooks, and what is said of them.
MISTAKES: dict[str, tuple[CommHook, str]] = {
    "too short": (
        Wrong(returns=lambda total, inputs: (total[:-1], inputs.states)),
        r"returned a buffer of shape \[7\] for bucket 0: expected 8 elements",
    ),
    "doubled": (
        Wrong(returns=lambda total, inputs: (torch.cat([total, total]), inputs.states)),
        r"returned a buffer of shape \[16\] for bucket 0: expected 8 elements",
    ),
    "without states": (
        Wrong(returns=lambda total, inputs: total),
        r"returned a (Batched)?Tensor: expected the reduced buffer and the next states",
    ),
    "returns nothing": (Wrong(returns=lambda total, inputs: None), r"returned a NoneType: expected the reduced buffer"),
    "doesn't ask": (DoesNotAsk(), r"returned a tuple and has no yield"),
    "asks without a request": (Wrong(lambda inputs: inputs.flat), r"yields a (Batched)?Tensor: expected a request"),
    "in other words": (
        Wrong(lambda inputs: CollectiveRequest("all_reduce", inputs.flat)),
        r"'all_reduce', \.\.\.\): expected one of 'psum', 'all_gather'",
    ),
    "sends no tensor": (
        Wrong(lambda inputs: CollectiveRequest("psum", list(inputs.bucket.members))),  # type: ignore[arg-type]
        r"'psum', a list\): expected a tensor",
    ),
    "without rows": (
        Wrong(lambda inputs: CollectiveRequest("psum_scatter", inputs.flat)),
        r"'psum_scatter', a buffer of shape \[8\]\): expected a first dimension of 2",
    ),
    "four rows": (
        Wrong(four_rows, lambda rows, inputs: (rows.reshape(-1)[: len(inputs.flat)], inputs.states)),
        r"'all_to_all', a buffer of shape \[4, 2\]\): expected a first dimension of 2",
    ),
    "without pairs": (
        Wrong(lambda inputs: CollectiveRequest("ppermute", inputs.flat)),
        r"'ppermute', \.\.\., \(\)\): expected arguments source, destination, source, \.\.\., of ranks 0 to 1",
    ),
    "two sources": (
        Wrong(lambda inputs: CollectiveRequest("ppermute", inputs.flat, (0, 1, 1, 1))),
        r"\(0, 1, 1, 1\)\): expected arguments .* each once as a source at most, and once as a destination",
    ),
    "to nobody": (
        Wrong(lambda inputs: CollectiveRequest("ppermute", inputs.flat, (0, 2))),
        r"\(0, 2\)\): expected arguments .* of ranks 0 to 1",
    ),
    "reads the step": (
        Wrong(lambda inputs: CollectiveRequest("psum", inputs.flat * (1 + inputs.step))),
        r"Set reads_step = True",
    ),
    "loses a state": (
        WithState(returns=lambda total, inputs: (total, [{} for _ in inputs.states])),
        r"WithState\(\) returned states \[\[\], \[\]\] for a bucket of 2 .*: expected \[\['residual'\]",
    ),
    "loses a parameter": (
        WithState(returns=lambda total, inputs: (total, inputs.states[1:])),
        r"returned states \[\['residual'\]\] for a bucket of 2 parameters",
    ),
}


def train(hook: CommHook, x: torch.Tensor) -> torch.Tensor:
    step = ltx.data_parallel(lambda p, x: (p["w"] * x).sum() + p["b"].sum(), ltx.DDPStrategy(comm_hook=hook))
    return trained(step, sgd(0.1), {"w": torch.ones(5), "b": torch.zeros(3)}, [x] * 3).params["w"]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake: str, ranks: Ranks, seed: int) -> None:
    (hook, text), x = MISTAKES[mistake], torch.randn(2, 5)
    refuses(StrategyError, text, ltx.vmap(lambda x: train(hook, x)), x)
    refuses(CallFailedError, text, ranks(2).run, lambda: train(hook, x[ltx.world().rank]))
    assert ranks(2).run(lambda: train(WithState(), x[0])).replicated().shape == (5,)  # the ranks live on


@pytest.mark.full(but=1)
@pytest.mark.parametrize("mistake", ["reads the step", "too short", "without rows"])
def test_a_mistake_is_named_in_a_graph(mistake: str, ranks: Ranks, seed: int) -> None:
    hook, text = MISTAKES[mistake]

    def run() -> torch.Tensor:
        step = ltx.data_parallel(lambda p, x: (p["w"] * x).sum() + p["b"].sum(), ltx.DDPStrategy(comm_hook=hook))
        params = {"w": torch.ones(5), "b": torch.zeros(3)}
        return torch.compile(lambda p, x: ltx.grad(step)(p, x)["w"], backend="aot_eager", fullgraph=True)(params, x)

    x = torch.randn(5)
    refuses(CallFailedError, text, ranks(2).run, run)


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


@on_ranks(3)
def test_the_mean_of_what_each_rank_sends(seed: int) -> None:
    x = torch.randn(64)
    got, _ = ltx.sync_gradients(x, ltx.DDPStrategy(comm_hook=from_functions(quarter, spread)))
    torch.testing.assert_close(got, ltx.psum(spread(quarter(x / ltx.world().size), 64)))


def test_messages_that_are_views_of_others_conjugated_or_negated(ranks: Ranks, seed: int) -> None:
    x = torch.randn(2, 7)
    for compress, decompress in (
        (lambda x: torch.complex(x, 2 * x).conj(), lambda message, numel: (message.real - message.imag) / 3),
        (lambda x: torch.complex(x, 2 * x).conj().imag, lambda message, numel: message / -2),
    ):
        strategy = ltx.DDPStrategy(comm_hook=from_functions(compress, decompress))
        found = ranks(2).run(lambda s=strategy: ltx.sync_gradients(x[ltx.world().rank], s)[0])
        torch.testing.assert_close(found.replicated(), x.mean(0))


@on_ranks(2)
def test_messages_whose_length_depends_on_the_values_are_refused(seed: int) -> None:
    hook = from_functions(lambda x: x[x > 0], lambda message, numel: message.new_zeros(numel))
    text = said(LtxError, lambda: ltx.sync_gradients(torch.randn(64), ltx.DDPStrategy(comm_hook=hook)))
    assert "must follow from the length and dtype of its argument" in text
    assert "and for as many zeros torch.float32 of shape [0]" in text


@pytest.mark.parametrize(
    ("compress", "decompress", "text"),
    [
        (lambda x: 3, spread, "compress must return a tensor or a tuple of tensors, got 3"),
        (lambda x: (), spread, "compress must return a tensor or a tuple of tensors, got ()"),
        (lambda x: x, lambda message, numel: 3, "decompress must return"),
        (lambda x: x, lambda message, numel: message[1:], "decompress must return"),
        (lambda x: x, lambda message, numel: message.int(), "decompress must return"),
        (None, spread, "takes two functions, got None and"),
        (lambda x: x, lambda message: message, "calls decompress(message, numel), and <lambda> takes (message)"),
        (lambda x, numel: x, spread, "calls compress(vector), and <lambda> takes (x, numel)"),
    ],
)
def test_refused(compress: Any, decompress: Any, text: str) -> None:
    def run() -> Tensor:
        strategy = ltx.DDPStrategy(comm_hook=from_functions(compress, decompress))
        return ltx.vmap(lambda x: ltx.sync_gradients(x, strategy)[0])(torch.randn(2, 8))

    refuses(StrategyError, re.escape(text), run)


def test_is_a_value() -> None:
    hook = from_functions(quarter, spread)
    assert hook == from_functions(quarter, spread) != from_functions(quarter, spread, error_feedback=True)
    assert repr(error_feedback(hook)) == "from_functions(quarter, spread, error_feedback=True)"
