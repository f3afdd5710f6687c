"""The table of combinations: which feature needs what from a strategy, hook or optimizer, and what to do instead.

Every error about an unsupported combination takes its text from a row; ``docs/reference/combinations.md`` lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from ltx.core.base.errors import Kind, StrategyError, UnsupportedError


class Need(NamedTuple):
    """What a feature needs from a strategy, hook or optimizer, and what to `do` if that part doesn't offer it."""

    what: str
    needs: str
    offered: Callable[..., bool]
    do: str
    error: Kind = StrategyError


def phases_on(hook: Any, axis_size: int) -> int:
    """The number of a communication hook's phases on so many ranks."""
    phases: int | Callable[[int], int] = hook.phases
    return phases(axis_size) if callable(phases) else phases


def _updates(optimizer: Any) -> bool:
    """Whether it updates parameters from gradients, with any strategy."""
    return optimizer.offers.moves_params is not False and optimizer.offers.strategy is None


def _found(part: Any, offers: Any = False) -> bool:
    """What the caller has found; without that, `part` can never offer what the row needs."""
    return bool(offers)


def _averages(hook: Any, axis_size: int = 2) -> bool:
    """Whether its result is the sum of gradients times a number, nearly."""
    return hook.packing(torch.float32, axis_size).counts_as is not None


def _proportional(hook: Any) -> bool:
    return bool(hook.packing(torch.float32, 2).proportional)


_unsupported = partial(Need, error=UnsupportedError)

_WAIT = 'use overlap="backward"'
_DDP = "use another strategy, such as ltx.DDPStrategy()"
_INSIDE = "compile the step inside: ltx.data_parallel(torch.compile(f), strategy)"
_ALIKE = f"return the mean of equally many samples on each rank, or {_DDP}; for micro-batches, ltx.accumulate(step, k)"
_UNSCALED = f"compute in bfloat16, which needs no loss scale, or {_DDP}; for micro-batches, ltx.accumulate(step, k)"
_ELEMENTWISE = (
    "use an elementwise optimizer (SGD, Adam, AdamW, ...; from_functions(..., elementwise=True)), alone or in a chain "
    "with clip_by_global_norm"
)
_ITS_OWN = "train with the optimizer's own strategy, or use another optimizer"
_REAL = "keep its real and imaginary parts apart (torch.view_as_real)"
_LOCAL = "take second derivatives of ltx.block_backward_sync(step), or of a step with another strategy"
_LOSSY = "use it for lossy hooks such as hooks.ByteGrad(); one of your own derives from ltx.hooks.LossyHook"
_SUMS = "put a hook that asks for sums (AllReduce, RandomK, PowerSGD, ...) first"
_MAKES_SUMS = "put a hook after it that makes sums (FP16, BF16, ByteGrad, ...)"
_AROUND = "put error feedback around the chain: hooks.error_feedback(hooks.chain(...))"
_OWN = "use a hook of ltx.hooks in its place"
_ONE = "train with ltx.train_step, or use one hook for all"

#: The keys name the feature and the part that it needs something of.
TABLE = {
    "own strategy, optimizer": Need(
        "any other strategy",
        "an optimizer for gradients at every step",
        lambda x, *own: x.offers.strategy in (None, *own),
        _ITS_OWN,
    ),
    "QAdam, optimizer": Need(
        "QAdam",
        "an ltx.optim.qadam with its warmup_steps and betas, not in a chain, as others take momenta for gradients",
        lambda x, kind, *same: isinstance(x, kind) and (x.warmup_steps, x.betas) == same,
        "use ltx.optim.qadam(lr, warmup_steps=, betas=)",
    ),
    "momenta, hook": Need("QAdam.momentum_hook", "a result that is a mean", _averages, "use ltx.hooks.OneBit()"),
    "state in nodes, hook": Need(
        "a strategy by node",
        "a hook without per-parameter state, as each rank of a node has only parts of parameters",
        lambda x: not x.state_names,
        "leave hierarchical and node_size out, or error feedback: ltx.hooks.OneBit(error_feedback=False)",
    ),
    "ZeRO, optimizer": Need(
        "ZeroStrategy",
        "an elementwise update, as a rank updates only some elements of a parameter",
        lambda x: x.offers.elementwise,
        f"{_ELEMENTWISE}, or {_DDP}",
    ),
    "ZeRO, hook": Need(
        "ZeroStrategy.comm_hook",
        "messages, each of which can be decoded by itself, as every rank gets its own part",
        lambda x, in_messages: in_messages,
        "use FP16, BF16, ByteGrad, Quantize, QSGD, OneBit or TopK, or hooks.after(steps, one of them)",
    ),
    "outer, optimizer": Need(
        "DiLoCoStrategy.outer",
        "an optimizer for gradients that updates each parameter by itself",
        lambda x: _updates(x) and (x.offers.leafwise or x.offers.elementwise),
        "use one of torch's: ltx.optim.from_torch(torch.optim.Adam, lr=0.1)",
    ),
    "overlap, strategy": Need(
        'overlap="update"', "an update of each bucket by itself", lambda x: x.updates_in_buckets, _WAIT
    ),
    "overlap, optimizer": Need(
        'overlap="update"', "an update of each parameter by itself", lambda x: x.offers.leafwise, _WAIT
    ),
    "guard, overlap": Need("a guard or dynamic loss scale", "all gradients before the optimizer runs", _found, _WAIT),
    "check_every, strategy": Need(
        "check_every", "parameters alike on all ranks", lambda x: x.layout.params == "replicated", "leave it out"
    ),
    "weighted, strategy": Need(
        "a loss that is an ltx.Weighted",
        "gradients that ranks average by weight at every step",
        lambda x, step=0: x.layout.params != "per_rank" and x.hook(step) is not None,
        _ALIKE,
    ),
    "weighted, hook": _unsupported(
        "a loss that is an ltx.Weighted", "gradients that it can divide by the weights", _proportional, _ALIKE
    ),
    "loss scale, hook": _unsupported(
        "a loss scale", "gradients that it can divide by the scale", _proportional, _UNSCALED
    ),
    "graph, hook or strategy": _unsupported(
        "a compiled graph",
        "one reduction at this step and all later ones",
        lambda x, step, last_change: last_change is not None and step >= last_change,
        f"run the first steps eagerly until the reduction no longer changes, or {_INSIDE}",
    ),
    "guard, graph": _unsupported(
        'guard="raise" or max_skipped', "the gradients' values", _found, f'use guard="skip" alone, or {_INSIDE}'
    ),
    "guard in a graph, strategy": _unsupported(
        "a check of gradients in a compiled graph", "equal gradients on all ranks", _found, _INSIDE
    ),
    "graph, strategy": _unsupported(
        "a compiled graph",
        "a training step that only reduces gradients",
        lambda x: x.updates_in_buckets and not x.communicates_besides,
        _INSIDE,
    ),
    "complex, strategy": Need("a complex parameter", "work on complex numbers", _found, _REAL),
    "derivative, hook": _unsupported("a derivative of what is reduced", "a mean of gradients", _averages, _LOCAL),
    "sparse, hook": _unsupported("a sparse gradient", "a mean of gradients", _averages, "use x.to_dense()"),
    "chain, outer hook": Need("chain: the inner hook", "a request for sums", lambda x: x.sums, _SUMS),
    "chain, inner hook": Need(  # it must sum values that are already divided by the number of ranks
        "chain: the outer hook",
        "sums of its results",
        lambda x: x.packing(torch.float32, 2)[1:3] == (0.5, 0.5),
        _MAKES_SUMS,
    ),
    "state in a chain, inner hook": Need(
        "chain: the outer hook", "a hook without per-parameter state", lambda x: not x.state_names, _AROUND
    ),
    "background, hook": Need(
        "an exchange in the background",
        "one collective for each bucket, as it has one channel",
        lambda x, ranks=2: phases_on(x, ranks) < 2,
        "use a hook of one phase, such as ltx.hooks.BF16(), or make the exchange within a step",
    ),
    "partition, hook": Need(
        "hooks.partition", "a hook that calls ltx's collectives in the order of buckets", lambda x: x.phases != 0, _OWN
    ),
    "bucket of DDP, hook": Need(
        "hooks.to_torch", "one hook for all parameters, as DDP fills the buckets", _found, _ONE
    ),
    "error feedback, hook": Need("error_feedback", "an error to feed back", _found, _LOSSY),
}


def require(row: str, part: Any, who: str | Callable[[], str] = "", *at: Any) -> None:
    """Raise unless `part` is None or offers what a row needs, `at` a step. `who` names the feature in the error."""
    what, needs, offered, do, error = TABLE[row]
    if part is not None and not offered(part, *at):
        said, who = part if isinstance(part, str) else repr(part), who() if callable(who) else who or what
        raise error(f"{who} needs {needs}, which {said} doesn't offer: {do}.")
