"""LocalSGDStrategy: each rank trains alone, and parameters are averaged periodically (local SGD). In post-local SGD,
all ranks first train together for some steps.

    t <  T:   w_r <- update(w_r, mean_s grad f_s(w_s))          over all ranks s
    t >= T:   w_r <- update(w_r, mean_s grad f_s(w_s))          over the ranks s of r's node, or r alone
              w_r <- mean_s w_s                                 where (t - T) mod H = 0

    with several periods H_1 < H_2 < ...:
              w_r <- mean_s w_s over r's group of n_i ranks     with the greatest H_i that divides t

T is `warmup_steps`, H is `period`. The schedules are those of torch's PeriodicModelAverager and
HierarchicalModelAverager. With `at_end`, t + 1 stands for t in the conditions of averages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, pairwise
from math import lcm
from typing import TypeGuard, cast

import torch

from ltx import hooks
from ltx.errors import StrategyError
from ltx.extend import Axis, LeafState, States, StepInfo, Strategy, arguments, brief, inner
from ltx.hooks.plain import EXACT, resolve_hook, resolved
from ltx.optim import Optimizer
from ltx.strategies.ddp import APART, mean_over
from ltx.strategies.nodes import WithinNode
from ltx.typing import Tree

Levels = tuple[tuple[int, int], ...]  #: (period, number of ranks), both ascending


@dataclass(frozen=True)
class LocalSGDStrategy(Strategy):
    """Post-local SGD: mean gradients for `warmup_steps`, then local gradients, and parameters averaged periodically.

    What each rank sees: until step `warmup_steps` (steps are counted from 0) the same parameters; then its own
    parameters, which are averaged after the updates of steps `warmup_steps`, `warmup_steps + period` and so on. In
    between nothing is sent, and no rank waits: ``metrics.loss`` is the rank's own. Optimizer states aren't averaged.

    With a `subgroup` the ranks of a node share their gradients at every step, and so have the same parameters. In
    between averages, nodes don't communicate: ``metrics.loss`` is the mean over the node. Averages weigh every rank
    equally, so a step that returns :class:`ltx.Weighted` is refused.

    Only :func:`ltx.train_step` averages: :func:`ltx.grad_and_value` gives gradients, local ones after the warm-up.

    Args:
        period: parameters are averaged after every `period` steps. Or several periods, ``{period: number of ranks}``,
            both ascending: the average is over groups of so many contiguous ranks; the last number must be all ranks.
            Steps are then counted from the very first, and a step that several periods divide uses the longest.
        warmup_steps: for so many steps, the mean gradients of all ranks are used.
        subgroup: the number of ranks of a node; these are contiguous on the axis.
        comm_hook: how gradients are sent during the warm-up: "allreduce", "fp16", "bf16", or a hook from
            :mod:`ltx.hooks`. Means within nodes and of parameters are exact, in the dtype of what is averaged.
        at_end: each period ends with its average, as a round of FedAvg does: with ``period=5``, after 5 steps, 10 and
            so on, so that training for 10 ends with equal parameters. By default, as in torch, after 1 step, 6 and 11.
        bucket_bytes, first_bucket_bytes, process_group_backend, timeout: as in :class:`Strategy`.

    Raises:
        StrategyError: (a ValueError) a field's value isn't allowed; in ``init``: several ranks that aren't such groups.

    Source: Stich, "Local SGD converges fast and communicates little", ICLR 2019; Lin et al., "Don't use large
    mini-batches, use local SGD", ICLR 2020; torch's ``PostLocalSGDOptimizer`` with ``post_localSGD_hook``.

    Example:
        >>> import torch, ltx
        >>> strategy = ltx.LocalSGDStrategy(period=2)
        >>> step = ltx.data_parallel(lambda w, x: (w - x).square() / 2, strategy)
        >>> train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=0.5))
        >>> state, x = train.init(torch.tensor(0.0)), torch.tensor([0.0, 4.0])  # two ranks want 0 and 4
        >>> state, _ = ltx.vmap(train, in_dims=(None, 0))(state, x)
        >>> state.params  # averaged
        tensor([1., 1.])
        >>> state, _ = ltx.vmap(train)(state, x)
        >>> state.params
        tensor([0.5000, 2.5000])
    """

    layout = APART

    period: int | Mapping[int, int] | Levels
    warmup_steps: int = 0
    subgroup: int | None = None
    comm_hook: str | hooks.CommHook = EXACT
    at_end: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        levels = tuple(self.period.items()) if isinstance(self.period, Mapping) else self.period
        if _are_levels(levels):
            object.__setattr__(self, "period", tuple((int(period), int(ranks)) for period, ranks in levels))
        elif arguments.is_whole(levels) and levels >= 1:
            arguments.check_whole(self, 1, "period")
        else:
            raise StrategyError(
                "LocalSGDStrategy.period must be a whole number of at least 1, or {period: number of ranks} with "
                f"periods ascending from 1 and numbers from 2, each of which divides the next one, got {brief(levels)}."
            )
        arguments.check_whole(self, 0, "warmup_steps")
        if self.subgroup is not None:
            arguments.check_whole(self, 2, "subgroup")
        resolve_hook(self, "comm_hook")
        arguments.check_fields(self, StrategyError, "at_end")

    def hook(self, step: int) -> hooks.CommHook | None:
        if step < self.warmup_steps:
            return resolved(self.comm_hook).at(step)
        return None if self.subgroup is None else WithinNode(self.subgroup)

    def init(self, param: torch.Tensor, path: str = "") -> LeafState:
        return resolved(self.comm_hook).init(param, path) if self.warmup_steps else {}

    @property
    def cycle(self) -> tuple[int, int]:
        periods = [self.period] if isinstance(self.period, int) else [period for period, _ in cast(Levels, self.period)]
        return self.warmup_steps, lcm(*periods)

    def check(self, optimizer: Optimizer, axis: Axis | None = None) -> None:
        super().check(optimizer, axis)
        if axis is None or axis.size == 1:
            return
        if self.subgroup is not None and axis.size % self.subgroup:
            raise StrategyError(
                f"LocalSGDStrategy.subgroup={self.subgroup}: axis {axis.name!r} has {axis.size} ranks, which don't "
                "divide into nodes of that size. Give a divisor."
            )
        if not isinstance(self.period, int) and cast(Levels, self.period)[-1][1] != axis.size:
            raise StrategyError(
                f"LocalSGDStrategy.period={self.period}: the last number of ranks must be all of axis {axis.name!r}, "
                f"{axis.size}."
            )

    def group(self, step: int, ranks: int) -> int:
        """The size of the groups of `ranks` that average parameters after the update of `step`; 1 for no average."""
        if step < self.warmup_steps or ranks == 1:
            return 1
        step += self.at_end
        if isinstance(self.period, int):
            return ranks if (step - self.warmup_steps) % self.period == 0 else 1
        return next((size for period, size in reversed(cast(Levels, self.period)) if step % period == 0), 1)

    def communicates_after_update(self, step: int) -> bool:
        return self.group(step, 2) > 1

    def after_update(self, params: Tree, states: States, info: StepInfo) -> tuple[Tree, States]:
        size = self.group(info.step, info.axis.size)
        return (params if size == 1 else mean_over(self, params, StepInfo(info.step, inner(info.axis, size)))), states


def _are_levels(value: object) -> TypeGuard[Levels]:
    """Whether `value` is pairs of ascending periods and ascending numbers of ranks, each dividing the next number."""
    if not (isinstance(value, tuple) and value and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value)):
        return False
    if not all(map(arguments.is_whole, chain(*value))):
        return False
    pairs = pairwise([(0, 1), *value])  # so the first period is at least 1, and its number at least 2
    return all(b < period and held < size and size % held == 0 for (b, held), (period, size) in pairs)
