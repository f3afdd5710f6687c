"""LocalSGDStrategy: each rank trains alone, and parameters are averaged now and then (local SGD); before that, all may
train together for a while (post-local SGD).

    t <  T:   w_r <- update(w_r, mean_s grad f_s(w_s))          over all ranks s
    t >= T:   w_r <- update(w_r, grad f_r(w_r))                 or the mean over the ranks of r's node
              w_r <- mean_s w_s                                 where (t - T) mod H = 0

Stich, "Local SGD converges fast and communicates little", ICLR 2019; Lin, Stich, Patel and Jaggi, "Don't use large
mini-batches, use local SGD", ICLR 2020, sections 3 and 5 (post-local) and appendix D (hierarchical). T is
`warmup_steps`, H is `period`; the schedules are those of torch.distributed's PeriodicModelAverager and
HierarchicalModelAverager, which count the steps as here: from 0, after the update.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ltx import hooks, tree
from ltx.errors import UnsupportedError
from ltx.hooks.base import check_whole
from ltx.strategies.base import Kinds, Moment, States, Strategy
from ltx.strategies.fields import resolve_hook
from ltx.sync.reduction import LeafState
from ltx.typing import Tree


@dataclass(frozen=True)
class LocalSGDStrategy(Strategy):
    """Post-local SGD: mean gradients for `warmup_steps`, then each rank its own, and parameters averaged periodically.

    What each rank sees: from step `warmup_steps` on (steps are counted from 0) its own parameters, equal to the
    others' after the updates of steps `warmup_steps`, `warmup_steps + period` and so on. In between nothing is sent,
    and nobody waits: ``metrics.loss`` is then the rank's own. The optimizer's state isn't averaged.

    Averaging is a training step's (:func:`ltx.train_step`). :func:`ltx.grad_and_value` and the like give the gradients
    of a step, local ones after the warm-up, and leave parameters alone.

    Args:
        period: parameters are averaged after every so many steps.
        warmup_steps: as long, the mean gradients of all ranks are used.
        comm_hook: how gradients travel until then: "allreduce", "fp16", "bf16", or a hook from :mod:`ltx.hooks`.
            Parameters are averaged exactly, in their own dtype.
        bucket_bytes, first_bucket_bytes, process_group_backend, timeout: as in :class:`Strategy`.

    Raises:
        StrategyError: (a ValueError) a field's value isn't allowed.

    Source: see the head of this file; torch's ``PostLocalSGDOptimizer`` with ``post_localSGD_hook``.

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

    period: int
    warmup_steps: int = 0
    comm_hook: str | hooks.CommHook = "allreduce"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(self, 1, "period")
        check_whole(self, 0, "warmup_steps")
        resolve_hook(self, "comm_hook")

    def hook(self, step: int) -> hooks.CommHook | None:
        return self._comm_hook.at(step) if step < self.warmup_steps else None

    def hook_in_graph(self, step: int) -> hooks.CommHook | None:
        refuse_in_warm_up(self, step, self.warmup_steps)
        return self.hook(step)

    def init(self, param: torch.Tensor, path: str = "") -> LeafState:
        return self._comm_hook.init(param, path) if self.warmup_steps else {}

    @property
    def stateful(self) -> bool:
        return self.warmup_steps > 0  # the count of steps

    @property
    def kinds(self) -> Kinds:
        return Kinds(params="per_rank", opt_state="per_rank")

    def talks_late(self, step: int) -> bool:
        return averages_at(step, self.warmup_steps, self.period)

    def after_update(self, params: Tree, states: States, at: Moment) -> tuple[Tree, States]:
        if averages_at(at.step, self.warmup_steps, self.period):
            params = mean_over(self, params, at)
        return params, states

    @property
    def _comm_hook(self) -> hooks.CommHook:
        assert isinstance(self.comm_hook, hooks.CommHook)
        return self.comm_hook


def averages_at(step: int, start: int, period: int) -> bool:
    """Whether parameters are averaged after the update of `step`: at `start`, and every `period` after."""
    return step >= start and (step - start) % period == 0


def mean_over(strategy: Strategy, params: Tree, at: Moment) -> Tree:
    """The mean of the parameters over the ranks of ``at.axis``."""
    if at.axis.size == 1:
        return params
    leaves, spec = tree.flatten(params)
    means, _ = strategy.exchange(hooks.AllReduce(), leaves, tree.leaf_paths(params), at).land()
    # Models in channels_last stay so.
    laid_out = [
        mean if mean.stride() == leaf.stride() else torch.empty_like(leaf).copy_(mean)
        for mean, leaf in zip(means, leaves, strict=True)
    ]
    return tree.unflatten(spec, laid_out)


def refuse_in_warm_up(strategy: Strategy, step: int, start: int) -> None:
    """Raise where a graph that is compiled now would go on with mean gradients for good."""
    if step < start:
        raise UnsupportedError(
            f"{strategy!r} leaves gradients local from step {start} on, and a graph that is compiled now, at step "
            f"{step}, would reduce them for good. Compile the step inside: ltx.data_parallel(torch.compile(f), "
            "strategy)."
        )
