"""QAdam: Adam whose ranks, once its second moment has settled, average momenta in 8 bits instead of gradients.

    steps s <= w:   g = mean_r g_r;     Adam's m, v and step
    steps s > w:    m_r = b1 m + (1 - b1) g_r;     m = 8-bit mean_r m_r;     v frozen;     Adam's step along m

Tang et al., "1-bit Adam: communication efficient large-scale training with Adam's convergence speed", ICML 2021,
algorithm 1, with the 8-bit messages of Bagua's qadam (Gan et al., "BAGUA: scaling up distributed learning with system
relaxations", VLDB 2022) in place of one bit with error feedback. Adam's step is linear in m, not in g: so m may be
compressed as gradients may in SGD. The optimizer's part is :func:`ltx.optim.qadam`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ltx import hooks
from ltx.errors import StrategyError
from ltx.extend import (
    BucketInput,
    LeafState,
    QAdamOptimizer,
    Reduction,
    StateLayout,
    States,
    StepInfo,
    Terms,
    Update,
    Updated,
    arguments,
    around,
    brief,
    needs,
    tree,
    unpack,
)
from ltx.optim import Optimizer
from ltx.strategies.nodes import ByNode, NodeStrategy

MOMENTUM = "momentum"
_EIGHT_BITS = hooks.ByteGrad()


@around("among")
@dataclass(frozen=True)
class MeanMomentum(hooks.CommHook):
    """The mean over ranks of b1 m + (1 - b1) g_r in eight bits, which is the next m too: state of each parameter."""

    state_names: ClassVar[tuple[str, ...]] = (MOMENTUM,)

    exact: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False
    sums: ClassVar[bool] = False
    gives_gradients: ClassVar[bool] = False

    beta1: float
    among: hooks.CommHook = _EIGHT_BITS  # what takes the mean: among all ranks, or among nodes

    def init(self, param: torch.Tensor, path: str = "") -> LeafState:
        return {MOMENTUM: torch.zeros_like(param, dtype=self.wire_dtype(param.dtype)).contiguous()}

    def scale(self, axis_size: int) -> float:
        return (1 - self.beta1) / axis_size

    def extra_terms(self, state: LeafState, axis_size: int) -> Terms:
        return [(state[MOMENTUM], self.beta1 / axis_size)]

    def reduce(self, inputs: BucketInput) -> Reduction:
        mean, _ = yield from self.among.reduce(replace(inputs, states=[{} for _ in inputs.states]))
        return mean, [{MOMENTUM: part} for part in unpack(mean, inputs.bucket, cast=False)]


@dataclass(frozen=True, kw_only=True)
class QAdam(NodeStrategy):
    """Adam with mean gradients for `warmup_steps` steps, and 8-bit mean momenta from then on.

    It trains with :func:`ltx.optim.qadam` alone, of the same `warmup_steps` and `betas`, and by
    :func:`ltx.train_step`: what a data-parallel step of it gives for gradients after the warm-up is the next momentum.
    Parameters and states are the same on every rank. The loss mustn't be an :class:`ltx.Weighted`.

    The phases don't overlap: the last step of the warm-up is all Adam's, the next one averages momenta. Bagua's loses
    the gradients of a step in between; ``ltx.optim.qadam(bagua_exact=True)`` does too.

    Args:
        warmup_steps, betas: the optimizer's.
        hierarchical, node_size: exact sums within nodes of that many ranks, each of which exchanges a part with other
            nodes: in eight bits after the warm-up, with a grid for each part.
        bucket_bytes, first_bucket_bytes, process_group_backend, timeout: as in :class:`Strategy`.

    Raises:
        StrategyError: (a ValueError) a field's value isn't allowed, or the optimizer is another, or its state has
            counted other steps.

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

    layout: ClassVar[StateLayout] = StateLayout(sync_state="replicated")

    warmup_steps: int
    betas: tuple[float, float] = (0.9, 0.999)

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.check_whole(self, 1, "warmup_steps")
        pair = self.betas if isinstance(self.betas, tuple) else ()
        if len(pair) != 2 or not all(arguments.is_number(beta) and 0 <= beta < 1 for beta in pair):
            raise StrategyError(f"QAdam.betas must be a pair of numbers in [0, 1), got {brief(self.betas)}.")

    def hook(self, step: int) -> hooks.CommHook:
        return self._hooks.at(step)

    def init(self, param: torch.Tensor, path: str = "") -> LeafState:
        return self._hooks.init(param, path)

    @property
    def _hooks(self) -> hooks.CommHook:
        if self.node_size is None:
            return hooks.after(self.warmup_steps, MeanMomentum(self.betas[0]))
        momenta = MeanMomentum(self.betas[0], ByNode(self.node_size, _EIGHT_BITS))
        return hooks.after(self.warmup_steps, momenta, ByNode(self.node_size, hooks.AllReduce()))

    @property
    def constant_after(self) -> int:
        return self.warmup_steps

    def check_optimizer(self, optimizer: Optimizer) -> None:
        wanted = QAdamOptimizer, self.warmup_steps, self.betas
        needs.require("QAdam, optimizer", optimizer, repr(self), *wanted)

    def update(self, update: Update, states: States, info: StepInfo, pending: None) -> Updated:
        count = update.opt_state.count
        if count != info.step:
            raise StrategyError(
                f"QAdam: the optimizer's state has counted {count} steps and the communication state {info.step}, so "
                "they may be in different phases. Use the two that one step returned."
            )
        if info.step >= self.warmup_steps and update.finite is None:
            # The next momentum itself, of which the optimizer needn't take a copy.
            moments = update.optimizer.leaf_states(update.opt_state, update.params)
            grads, spec = tree.flatten(update.grads)
            held = [{**own, "exp_avg": mean} for own, mean in zip(moments, grads, strict=True)]
            update = replace(update, opt_state=replace(update.opt_state, per_param=tree.unflatten(spec, held)))
        params, opt_state = update.apply()
        if info.step + 1 == self.warmup_steps:
            moments = update.optimizer.leaf_states(opt_state, params)
            states = _with_momenta(states, dict(zip(tree.leaf_paths(params), moments, strict=True)))
        return Updated(params, opt_state, states)


def _with_momenta(states: States, moments: Mapping[str, LeafState]) -> States:
    """The states that the second phase begins with: copies of Adam's momenta."""
    return {
        path: {**state, MOMENTUM: moments[path]["exp_avg"].to(state[MOMENTUM].dtype, copy=True)}
        for path, state in states.items()
    }
