"""DiLoCoStrategy: an inner optimizer on each rank, an outer one for all, which communicates once in H steps.

    w_r    <- update(w_r, grad f_r(w_r))                        H times, each rank for itself
    d      =  mean_r (a - w_r)                                  the outer gradient; a is where all ranks began
    v      <- mu v + d,    a <- a - lr (d + mu v)               Nesterov's momentum, as torch.optim.SGD has it
    w_r    <- a

Douillard et al., "DiLoCo: Distributed low-communication training of language models", 2023, algorithm 1. Fragments that
take turns: Douillard et al., "Streaming DiLoCo with overlapping communication", 2025. With lr = 1 and mu = 0 it is
local SGD.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ltx import hooks
from ltx.errors import StrategyError
from ltx.extend import Axis, LeafState, Optimizer, StateLayout, States, StepInfo, Strategy, arguments, states_of, tree
from ltx.hooks.plain import EXACT, resolve_hook, resolved
from ltx.typing import Tree

#: A parameter's communication state: where all ranks began, and the outer optimizer's velocity; the hook's is beside.
ANCHOR, VELOCITY = "anchor", "velocity"


@dataclass(frozen=True)
class DiLoCoStrategy(Strategy):
    """DiLoCo: `period` steps with local gradients, then one of an outer optimizer with what all ranks have moved.

    What each rank sees: its own parameters, equal to the others' after every `period` steps (those of a fragment, where
    there are several: never all at once). In between nothing is sent, and no rank waits. ``metrics.loss`` is always the
    rank's own; :func:`ltx.pmean` gives the mean. Optimizer states stay local.

    The communication state has two tensors a parameter, "anchor" and "velocity", the same on every rank, of the
    parameter's shape; they are float32 where the parameter is narrower.

    Args:
        period: inner steps between two outer ones; the papers use 30 to 500.
        outer_lr, outer_momentum: of the outer optimizer.
        outer_hook: how outer gradients are averaged: "allreduce", "fp16", "bf16", or a hook from :mod:`ltx.hooks`, as
            ``ByteGrad(error_feedback=True)``. What counts steps there counts outer ones.
        fragments: parameters are cut into so many groups, in the order of their paths and balanced by their bytes.
            Group j takes its outer step where ``(steps so far + j * period // fragments) % period == 0``, so that at
            any time only one is sent, of about 1/fragments of the bytes.
        bucket_bytes, first_bucket_bytes, process_group_backend, timeout: as in :class:`Strategy`.

    Raises:
        StrategyError: (a ValueError) a field's value isn't allowed; more fragments than parameters, complex parameters
            (when training is initialised).

    Source: "DiLoCo", 2023, algorithm 1; "Streaming DiLoCo", 2025, but for its overlap of an outer step with the inner
    ones after it.

    Example:
        >>> import torch, ltx
        >>> strategy = ltx.DiLoCoStrategy(period=1, outer_lr=1.0, outer_momentum=0.0)
        >>> step = ltx.data_parallel(lambda w, x: (w - x).square() / 2, strategy)
        >>> train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=0.5))
        >>> state, x = train.init(torch.tensor(0.0)), torch.tensor([0.0, 4.0])  # two ranks want 0 and 4
        >>> state, _ = ltx.vmap(train, in_dims=(None, 0))(state, x)
        >>> state.params
        tensor([1., 1.])
    """

    stateful: ClassVar[bool] = True
    takes_complex: ClassVar[bool] = False  # anchors are real

    period: int
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    outer_hook: str | hooks.CommHook = EXACT
    fragments: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.check_whole(self, 1, "period", "fragments")
        arguments.check_number(self, 0, "outer_lr")
        arguments.check_number(self, 0, "outer_momentum", below=1)
        resolve_hook(self, "outer_hook")
        if self.fragments > self.period:
            raise StrategyError(
                f"DiLoCoStrategy.fragments must be at most the period, {self.period}, as one is sent at a time, got "
                f"{self.fragments!r}."
            )

    def hook(self, step: int) -> None:
        return None

    def init(self, param: torch.Tensor, path: str = "") -> LeafState:
        wide = torch.float32 if param.dtype.itemsize < 4 else param.dtype
        anchor = param.detach().to(wide, copy=True)
        return {**resolved(self.outer_hook).init(anchor, path), ANCHOR: anchor, VELOCITY: torch.zeros_like(anchor)}

    @property
    def cycle(self) -> tuple[int, int]:
        return 0, self.period

    @property
    def layout(self) -> StateLayout:
        stateful = resolved(self.outer_hook).stateful
        return StateLayout("per_rank", "per_rank", "per_rank", "per_rank" if stateful else "replicated")

    def init_optimizer(self, optimizer: Optimizer, params: Tree, axis: Axis) -> Tree:
        leaves = tree.flatten(params)[0]
        if self.fragments > max(1, len(leaves)):
            raise StrategyError(
                f"DiLoCoStrategy.fragments must be at most the number of parameters, {len(leaves)}, got "
                f"{self.fragments!r}."
            )
        resolved(self.outer_hook).each(tree.leaf_paths(params))  # raises where paths don't fit
        return super().init_optimizer(optimizer, params, axis)

    def due(self, step: int) -> int | None:
        """The fragment that takes an outer step after the update of `step`; at most one does."""
        return next((j for j in range(self.fragments) if self._since(step, j) % self.period == 0), None)

    def _since(self, step: int, fragment: int) -> int:
        """`step + 1`, counted from where the first outer step of a fragment would have had a whole period before it."""
        return step + 1 + fragment * self.period // self.fragments

    def communicates_after_update(self, step: int) -> bool:
        return self.due(step) is not None

    def after_update(self, params: Tree, states: States, info: StepInfo) -> tuple[Tree, States]:
        fragment = self.due(info.step)
        if fragment is None:
            return params, states
        leaves, spec = tree.flatten(params)
        members = cut([x.numel() * x.dtype.itemsize for x in leaves], self.fragments)[fragment]
        every = tree.leaf_paths(params)
        paths = [every[i] for i in members]
        before = [states[path] for path in paths]
        # In the anchor's dtype, but without what a narrower parameter rounds off of it: no rank has moved by that.
        moved = [
            state[ANCHOR].to(leaves[i].dtype).to(state[ANCHOR].dtype) - leaves[i]
            for i, state in zip(members, before, strict=True)
        ]
        outer_step = self._since(info.step, fragment) // self.period - 1
        hook = resolved(self.outer_hook).at(outer_step)
        held = [states_of(hook, state) for state in before]
        grads, advanced = self.exchange(hook, moved, paths, StepInfo(outer_step, info.axis), held).wait()
        leaves, states = list(leaves), dict(states)
        for i, path, d, after in zip(members, paths, grads, advanced, strict=True):
            v = self.outer_momentum * states[path][VELOCITY] + d
            anchor = states[path][ANCHOR] - self.outer_lr * (d + self.outer_momentum * v)
            leaves[i] = anchor.to(leaves[i].dtype)
            states[path] = {**states[path], **after, ANCHOR: anchor, VELOCITY: v}
        return tree.unflatten(spec, leaves), states


def cut(sizes: Sequence[int], parts: int) -> list[range]:
    """`sizes` in so many runs of about the same sum, none of them empty while there are enough.

    >>> cut([1, 1, 1, 9, 2, 2], 3)
    [range(0, 3), range(3, 4), range(4, 6)]
    """
    runs, start = [], 0
    for left in range(parts, 0, -1):
        fair, end, held = sum(sizes[start:]) / left, start, 0
        while end < len(sizes) - left + 1 and (end == start or left == 1 or held + sizes[end] / 2 <= fair):
            held += sizes[end]
            end += 1
        runs.append(range(start, end))
        start = end
    return runs
