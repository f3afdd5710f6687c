"""recommend: the strategies that a network and a model call for, best first.

A new strategy is a row of :data:`CANDIDATES`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from ltx import hooks, tree
from ltx.axis import DEFAULT_NAME, Axis
from ltx.errors import AxisError, OptimError, StrategyError
from ltx.estimate.formats import Shown, aligned, format_bytes, format_seconds, short
from ltx.estimate.requests import meta
from ltx.optim import Optimizer, qadam
from ltx.profile.step_plan import Cost, plan
from ltx.strategies import DDPStrategy, Strategy
from ltx.strategies.bagua import BaguaStrategy
from ltx.strategies.diloco import DiLoCoStrategy
from ltx.strategies.horovod import HorovodStrategy
from ltx.strategies.local_sgd import LocalSGDStrategy
from ltx.strategies.zero import ZeroStrategy
from ltx.typing import Tree

#: What a strategy does to the training, from nothing to most: the mean gradient itself; the same rounded; with a part
#: held back for later steps; something else than the mean; parameters of others that are some steps old; parameters
#: that differ between ranks.
Effect = Literal["exact", "rounded", "compressed", "combined", "stale", "local"]

#: Times that differ by less count as equal.
TIE = 0.02


@dataclass(frozen=True)
class Candidate:
    """A strategy that may be recommended.

    Attributes:
        strategy: as it would be used.
        effect: what it does to the training.
        reason: the same in a sentence.
        optimizer: for strategies that insist on one.
    """

    strategy: Strategy
    effect: Effect
    reason: str
    optimizer: Optimizer | None = None


def _hook(hook: hooks.CommHook, effect: Effect, reason: str) -> Candidate:
    return Candidate(DDPStrategy(comm_hook=hook), effect, reason)


CANDIDATES: tuple[Candidate, ...] = (
    _hook(hooks.AllReduce(), "exact", "the mean gradient at every step, as one large batch"),
    Candidate(ZeroStrategy(), "exact", "the mean gradient; each rank keeps its part of the optimizer's state"),
    _hook(hooks.BF16(), "rounded", "gradients in bfloat16: 8 bits of precision, float32's range"),
    _hook(hooks.FP16(), "rounded", "gradients in float16: 11 bits of precision, overflows beyond 65504"),
    _hook(hooks.error_feedback(hooks.ByteGrad()), "compressed", "8 bits a gradient, and what is lost is sent later"),
    _hook(hooks.PowerSGD(rank=4), "compressed", "gradients of rank 4, the rest later; exact for the first 1,000 steps"),
    _hook(hooks.after(1000, hooks.OneBit()), "compressed", "signs, the rest later; exact for the first 1,000 steps"),
    _hook(
        hooks.after(1000, hooks.TopK(0.01)), "compressed", "1% of the numbers, the rest later; 1,000 exact steps first"
    ),
    Candidate(
        BaguaStrategy("qadam", warmup_steps=1000),
        "compressed",
        "momenta in 8 bits; exact for the first 1,000 steps",
        qadam(warmup_steps=1000),
    ),
    Candidate(HorovodStrategy(op="adasum"), "combined", "sums of updates that differ, means of those that agree"),
    Candidate(BaguaStrategy("async", schedule=(8, 4)), "stale", "means of parameters every 8 steps, added 4 later"),
    Candidate(BaguaStrategy("decentralized"), "local", "the ranks' mean parameters, and each its own step from there"),
    Candidate(BaguaStrategy("decentralized", peer_selection_mode="shift_one"), "local", "means of pairs that change"),
    Candidate(LocalSGDStrategy(period=8), "local", "alone for 8 steps, then the mean of parameters"),
    Candidate(DiLoCoStrategy(period=30), "local", "alone for 30 steps, then a step of an outer optimizer for all"),
    Candidate(BaguaStrategy("low_precision_decentralized"), "local", "8 bits of each step to two neighbours"),
)


@dataclass(frozen=True)
class Recommendation:
    """A strategy that works on so many ranks.

    Attributes:
        strategy: as it would be used.
        cost: what :func:`ltx.profile.plan` says of it.
        effect, reason: what it does to the training, in a word and in a sentence.
    """

    strategy: Strategy
    cost: Cost
    effect: Effect
    reason: str


class Recommendations(Shown, tuple[Recommendation, ...]):
    """Recommendations, best first; ``print`` shows them as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        rows = [
            (
                short(r.strategy),
                format_seconds(r.cost.time_s),
                format_bytes(round(r.cost.bytes_per_rank)),
                r.effect,
                r.reason,
            )
            for r in self
        ]
        header = ("strategy", "a step", "sent", "effect", "what it does")
        return "\n".join(aligned(header, rows, (False, True, True, False, False)))


def recommend(
    params: Tree,
    *,
    world: int,
    bandwidth: float,
    latency: float,
    compute_s: float,
    send_s: float | None = None,
    device: torch.device | str | None = None,
    candidates: Sequence[Candidate] = CANDIDATES,
) -> Recommendations:
    """Strategies for a model on a network, the fastest first; of equally fast ones the more exact.

    Args:
        params, world, bandwidth, latency, compute_s, send_s, device: as in :func:`ltx.profile.plan`.
        candidates: what there is to choose from.

    Returns:
        A tuple of :class:`Recommendation`: `strategy`, `cost`, `effect`, `reason`. Those whose steps take within 2% of
        the fastest count as equally fast, then those within 2% of the fastest of the rest, and so on. What doesn't work
        on so many ranks, or with complex parameters where there are some, is left out.

    Raises:
        InputError: a number that can't be; a `device` that this machine lacks.

    Example:
        >>> import torch, ltx
        >>> params = {"w": torch.empty(5000, 5000, device="meta")}
        >>> best, *others = ltx.profile.recommend(params, world=8, bandwidth=400e9, latency=1e-5, compute_s=2.0)
        >>> best.strategy == ltx.DDPStrategy(), best.effect
        (True, 'exact')
    """

    network: dict[str, Any] = {"world": world, "bandwidth": bandwidth, "latency": latency, "compute_s": compute_s}
    network |= {"send_s": send_s, "device": device}
    return Recommendations(
        _ranked(
            Recommendation(c.strategy, cost, c.effect, c.reason)
            for c in candidates
            if _works(c.strategy, world) and (cost := _cost(c, params, network)) is not None
        )
    )


def _cost(candidate: Candidate, params: Tree, network: dict[str, Any]) -> Cost | None:
    """What :func:`plan` says; None where it works but for complex parameters."""
    try:
        return plan(candidate.strategy, params, optimizer=candidate.optimizer, **network)
    except (StrategyError, OptimError):
        if not any(x.is_complex() for x in tree.flatten(params)[0]):
            raise
        real = tree.map(lambda x: meta(x.shape, x.real.dtype if x.is_complex() else x.dtype), params)
        plan(candidate.strategy, real, optimizer=candidate.optimizer, **network)  # raises what isn't about them
        return None


def _works(strategy: Strategy, world: int) -> bool:
    axis = Axis(DEFAULT_NAME, world)
    try:
        strategy.check_axis(axis)
        hook = strategy.hook(strategy.cycle[0])
        if hook is not None:
            hook.axes(axis)
    except (StrategyError, AxisError):
        return False
    return True


def _ranked(found: Iterable[Recommendation]) -> list[Recommendation]:
    rest = sorted(found, key=lambda r: r.cost.time_s)
    ranked: list[Recommendation] = []
    while rest:
        equal = [r for r in rest if r.cost.time_s <= (1 + TIE) * rest[0].cost.time_s]
        rest = rest[len(equal) :]
        ranked += sorted(equal, key=lambda r: get_args(Effect).index(r.effect))
    return ranked
