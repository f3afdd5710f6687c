"""QAdam: after a warm-up, the second moment stays fixed, and ranks average momenta in 8 bits instead of gradients.

    steps s <= w:   g = mean_r g_r;     Adam's m, v and step
    steps s > w:    m_r = b1 m + (1 - b1) g_r;     m = 8-bit mean_r m_r;     v frozen;     Adam's step along m

Tang et al., "1-bit Adam", ICML 2021, algorithm 1, with ``momentum_hook=hooks.OneBit()``; the default is Bagua's qadam
(Gan et al., "BAGUA", VLDB 2022). Adam's step is linear in m, not in g, so m may be compressed, as SGD's gradients may.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ltx import hooks
from ltx.errors import StrategyError
from ltx.extend import Axis, LeafState, Packing, Update, arguments, around, buffers, needs, states_of, tree
from ltx.hooks.plain import EXACT, resolve_hook, resolved
from ltx.optim import Optimizer
from ltx.optim.quantized_adam import QAdamOptimizer
from ltx.strategies import StateLayout, States, StepInfo, Updated
from ltx.strategies.nodes import ByNode, NodeStrategy

MOMENTUM = "momentum"
_EIGHT_BITS = hooks.ByteGrad()


@around("among")
@dataclass(frozen=True)
class MeanMomentum(hooks.CommHook):
    """The mean over ranks of b1 m + (1 - b1) g_r, taken by another hook. It is the next m, which the state keeps."""

    exact: ClassVar[bool] = False
    reach: ClassVar[str] = "bucket"
    sums: ClassVar[bool] = False

    beta1: float
    among: hooks.CommHook = _EIGHT_BITS  # the hook that takes the mean

    @property
    def state_names(self) -> tuple[str, ...]:
        return (MOMENTUM, *self.among.state_names)

    def init(self, param: torch.Tensor, path: str = "") -> LeafState:
        momentum = torch.zeros_like(param, dtype=self.packing(param.dtype, 1).dtype).contiguous()
        return {**self.among.init(param, path), MOMENTUM: momentum}

    def packing(self, dtype: torch.dtype, axis_size: int) -> Packing:
        among = self.among.packing(dtype, axis_size)

        def terms(state: LeafState) -> list[tuple[torch.Tensor, float]]:
            return [(state[MOMENTUM], self.beta1 / axis_size), *among.terms(state)]

        return among._replace(scale=(1 - self.beta1) / axis_size, terms=terms, proportional=False)

    def reduce(self, inputs: hooks.BucketInput) -> hooks.Reduction:
        own = [states_of(self.among, state) for state in inputs.states]
        mean, after = yield from self.among.reduce(replace(inputs, states=own))
        momenta = buffers.unpack(mean, inputs.bucket, cast=False)
        return mean, [{**state, MOMENTUM: m} for state, m in zip(after, momenta, strict=True)]


@dataclass(frozen=True, kw_only=True)
class QAdam(NodeStrategy):
    """Adam with mean gradients for `warmup_steps` steps, and compressed mean momenta after them.

    It works only with :func:`ltx.optim.qadam` of the same `warmup_steps` and `betas`, in :func:`ltx.train_step`: after
    the warm-up, the "gradients" that its data-parallel step returns are the next momentum. Parameters and momenta are
    the same on every rank. The loss mustn't be an :class:`ltx.Weighted`.

    The last step of the warm-up is wholly Adam's, and the next one averages momenta. Bagua's qadam loses the gradients
    of a step in between; ``ltx.optim.qadam(bagua_exact=True)`` loses them too.

    Args:
        warmup_steps, betas: those of the optimizer.
        momentum_hook: the hook that averages momenta: ByteGrad() for Bagua's qadam, OneBit() for 1-bit Adam, whose
            residuals differ between ranks, or another hook that computes a mean; also "allreduce", "fp16", "bf16".
        hierarchical, node_size: nodes of `node_size` ranks sum exactly; then each rank exchanges a part between nodes:
            in eight bits after the warm-up, with a grid for each part. The `momentum_hook` mustn't have state.

    Raises:
        StrategyError: (a ValueError) a field's value is wrong, or the optimizer isn't such a qadam or counts otherwise.

    Example:
        >>> import torch, ltx
        >>> from ltx.strategies.qadam import QAdam
        >>> step = ltx.data_parallel(lambda w, x: (w * x - 1).square().mean(), QAdam(warmup_steps=2))
        >>> train = ltx.train_step(step, ltx.optim.qadam(0.1, warmup_steps=2))
        >>> state = train.init(torch.tensor(0.0))
        >>> for x in torch.ones(4, 3):
        ...     state, _ = train(state, x)
        >>> state.params
        tensor(0.4383)
    """

    warmup_steps: int
    betas: tuple[float, float] = (0.9, 0.999)
    momentum_hook: str | hooks.CommHook = _EIGHT_BITS

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.check_whole(self, 1, "warmup_steps")
        pair = self.betas if isinstance(self.betas, tuple) else ()
        if len(pair) != 2 or not all(arguments.is_number(beta) and 0 <= beta < 1 for beta in pair):
            raise StrategyError(f"QAdam.betas must be a pair of numbers in [0, 1), got {arguments.brief(self.betas)}.")
        hook = resolve_hook(self, "momentum_hook")
        needs.require("momenta, hook", hook)
        if self.hierarchical:
            needs.require("state in nodes, hook", hook, repr(self))

    @property
    def layout(self) -> StateLayout:
        return StateLayout(sync_state="per_rank" if resolved(self.momentum_hook).state_names else "replicated")

    def hook(self, step: int) -> hooks.CommHook:
        return self._hooks.at(step)

    def init(self, param: torch.Tensor, path: str = "") -> LeafState:
        return self._hooks.init(param, path)

    @property
    def _hooks(self) -> hooks.CommHook:
        among: hooks.CommHook = resolved(self.momentum_hook)
        exact: hooks.CommHook = EXACT
        if self.node_size is not None:
            among, exact = ByNode(self.node_size, among), ByNode(self.node_size, exact)
        return hooks.after(self.warmup_steps, MeanMomentum(self.betas[0], among), exact)

    @property
    def cycle(self) -> tuple[int, int] | None:
        last_change = self._hooks.constant_after
        return None if last_change is None else (last_change, 1)

    def check(self, optimizer: Optimizer, axis: Axis | None = None) -> None:
        super().check(optimizer, axis)
        needs.require("QAdam, optimizer", optimizer, repr(self), QAdamOptimizer, self.warmup_steps, self.betas)

    def update(self, update: Update, states: States, info: StepInfo, pending: None) -> Updated:
        count = update.opt_state.count
        if count != info.step:
            raise StrategyError(
                f"QAdam: the optimizer's state has counted {count} steps and the communication state {info.step}, so "
                "they may be in different phases. Use the two that one step returned."
            )
        if info.step >= self.warmup_steps and update.finite is None:
            # The mean is the next momentum itself: the optimizer needn't compute it again.
            moments = update.optimizer.leaf_states(update.opt_state, update.params)
            grads, spec = tree.flatten(update.grads)
            held = [{**own, "exp_avg": mean} for own, mean in zip(moments, grads, strict=True)]
            update = replace(update, opt_state=replace(update.opt_state, per_param=tree.unflatten(spec, held)))
        params, opt_state = update.apply()
        if info.step + 1 == self.warmup_steps:
            moments = update.optimizer.leaf_states(opt_state, params)
            momenta = {path: own["exp_avg"] for path, own in zip(tree.leaf_paths(params), moments, strict=True)}
            states = {p: {**own, MOMENTUM: momenta[p].to(own[MOMENTUM].dtype, copy=True)} for p, own in states.items()}
        return Updated(params, opt_state, states)
