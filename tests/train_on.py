"""How tests train: one loop over a rank's batches, on ranks of every kind; and what an error says that they meet."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import ltx
from tests.kinds import Ranks


def inner(w: Tensor, x: Tensor) -> Tensor:
    """A loss whose gradient is x."""
    return (w * x).sum()


class _InBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, call: Callable[[], object]) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.call = inputs[1]

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return cotangent, None


def in_backward(x: Tensor, call: Callable[[], object]) -> Tensor:
    """x, whose backward pass calls `call`."""
    found: Tensor = _InBackward.apply(x, call)
    return found


class Trained(NamedTuple):
    """The state after the last step, and each step's metrics."""

    state: Any
    metrics: list[Any]

    @property
    def params(self) -> Any:
        return self.state.params

    @property
    def losses(self) -> Tensor:
        return torch.stack([each.loss for each in self.metrics])

    @property
    def skipped(self) -> list[bool]:
        return [bool(each.skipped) for each in self.metrics]


def go_on(train: Any, state: Any, batches: Iterable[Any]) -> Trained:
    """One step on each batch: a tuple is a step's arguments, anything else its one argument."""
    metrics = []
    for batch in batches:
        state, found = train(state, *(batch if isinstance(batch, tuple) else (batch,)))
        metrics.append(found)
    return Trained(state, metrics)


def trained(
    step: Any,
    optimizer: Any,
    start: Any,
    batches: Iterable[Any],
    strategy: Any = None,
    buffers: Any = None,
    **made: Any,
) -> Trained:
    """:func:`go_on` from the parameters `start`, with ``train_step(step, optimizer, **made)``.

    `step` may be a plain function, which then communicates by `strategy`.
    """
    if inspect.isfunction(step):
        step = ltx.data_parallel(step, strategy)
    train = ltx.train_step(step, optimizer, **made)
    return go_on(train, train.init(start) if buffers is None else train.init(start, buffers), batches)


def loop_of_torch(optimizer: torch.optim.Optimizer, loss: Callable[..., Tensor], batches: Iterable[Any]) -> Tensor:
    """The bare torch loop, and the losses of its steps; batches as for :func:`go_on`."""
    losses = []
    for batch in batches:
        found = loss(*(batch if isinstance(batch, tuple) else (batch,)))
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
        losses.append(found.detach())
    return torch.stack(losses)


def reduced(strategy: ltx.Strategy, grads: Iterable[Any], state: Any = None) -> tuple[list[Any], Any]:
    """The results of gradients that are reduced one after another, and the last state."""
    results = []
    for given in grads:
        if state is None:
            state = ltx.data_parallel(lambda p: p, strategy).init(ltx.tree.map(torch.zeros_like, given))
        result, state = ltx.sync_gradients(given, strategy, state)
        results.append(result)
    return results, state


def mine(by_rank: Any) -> Any:
    """This rank's entry, of those of all ranks."""
    return by_rank[int(ltx.axis_index())]


def on_ranks(n: int, alone: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The test runs on each of `n` ranks of the session's pool, with its arguments; before that, `alone`, here."""

    def of(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(ranks: Ranks, **given: Any) -> None:
            if alone:
                test(**given)
            ranks(n).run(test, **given)

        own = inspect.signature(test)
        first = inspect.Parameter("ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        run.__signature__ = own.replace(parameters=[first, *own.parameters.values()])  # type: ignore[attr-defined]
        return run

    return of


def in_all_worlds(f: Callable[[Tensor], Any], ranks: Ranks, xs: Tensor) -> list[list[Any]]:
    """What `f` gives on ranks that have a row of `xs` each: on processes, and on simulated ranks."""
    simulated = ltx.vmap(f)(xs)
    real = ranks(len(xs)).run(lambda: f(mine(xs)))
    return [list(real), [torch.utils._pytree.tree_map(lambda x, r=r: x[r], simulated) for r in range(len(xs))]]


def said(error: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """What the `error` says that ``call(*args, **kwargs)`` raises."""
    with pytest.raises(error) as raised:
        call(*args, **kwargs)
    return str(raised.value)


def raised_by(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """What ``call(*args, **kwargs)`` raises, as "its type: its text"; "" if it returns."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refuses(error: Any, match: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """``call(*args, **kwargs)`` raises an `error` in whose text `match` is found."""
    with pytest.raises(error, match=match):
        call(*args, **kwargs)
