"""The arguments of a train step, and the checks that they fit together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ltx.core.base import traced, tree
from ltx.core.base.arguments import brief, check_fields, whole
from ltx.core.base.errors import OptimError, StepError, StrategyError
from ltx.core.base.needs import require
from ltx.core.base.readable import Readable
from ltx.core.optim import Optimizer
from ltx.core.ranks.axis import Axis
from ltx.core.training.accumulate import Accumulated
from ltx.core.training.parameters import Trainable
from ltx.core.transforms.compare import tensors_by_path
from ltx.core.transforms.data_parallel import DataParallel
from ltx.core.transforms.strategy import Strategy, StrategyOffers, shares_gradients, steps_ahead
from ltx.typing import Tree


def check_devices(axis: Axis, value: Tree, what: str) -> None:
    """Raise unless `value` is on this rank's accelerator, if it has one: other collectives go through the host."""
    here = axis.ranks.device if axis.ranks.overlaps else None
    if here is None or here.type == "cpu":
        return
    for path, leaf in tensors_by_path(value):
        if leaf.device != here:
            raise StepError(
                f"train.init: rank {axis.rank} computes on {here}, and {what} leaf {path!r} is on {leaf.device}. Move "
                f'it: ltx.to_device({what}), module.to(ltx.world().device). On the CPU: ltx.init(backend="gloo").'
            )


@traced.at_trace_time
def check_layout(strategy: Strategy, step: int) -> None:
    """Raise if ranks' parameters part at `step` and the layout doesn't say so, by which checkpoints load them."""
    if strategy.layout is StrategyOffers.layout and not shares_gradients(strategy, step):
        name = type(strategy).__name__
        raise StrategyError(
            f"{name}: hook({step}) leaves gradients local, so that ranks may differ, and {name}.layout doesn't say in "
            "what. Say which parts are each rank's own, so that checkpoints keep them: layout: ClassVar[StateLayout] = "
            'StateLayout(params="per_rank", opt_state="per_rank"), with StateLayout of ltx.strategies.'
        )


@traced.at_trace_time
def refuse_in_graph(strategy: Strategy, checks_finite: bool, may_raise: bool) -> None:
    """Refuse what a compiled step can't do. Dynamo runs this while it traces, before it knows the axis."""
    if may_raise:
        require("guard, graph", "a compiled graph")
    if checks_finite:
        require("guard in a graph, strategy", strategy, "", shares_gradients(strategy, 0))
    require("graph, strategy", strategy)


def check_kept(buffers: Tree, step: DataParallel) -> None:
    """Refuse buffers that steps would round, or would split as if they were part of the batch."""
    tree.check_tensors(buffers, "buffers")
    precision = step.precision
    if isinstance(step.fn, Accumulated) and step.fn.carry is None:
        raise StepError(
            "train_step: ltx.accumulate would cut the buffers into micro-batches, as it does with the batch. Take "
            f"ltx.accumulate(step, {step.fn.steps}, carry=1); each micro-batch begins with those of the one before."
        )
    if precision is None or 1 in precision.keep:
        return
    for path, leaf in tensors_by_path(buffers):
        if leaf.is_floating_point() and leaf.dtype != precision.compute:
            raise StepError(
                f"train_step: the buffer {path!r} is {tree.describe(leaf)}, and would be rounded to "
                f"{precision.compute} at every step. Keep the buffers as they are: ltx.Precision(..., keep=(1,)); with "
                'batch norm its parameters too, such as keep_params=("*norm*",).'
            )


@dataclass(frozen=True)
class TrainSettings(Readable):
    """The arguments of :func:`ltx.train_step`, checked one by one and together."""

    step: DataParallel
    optimizer: Optimizer
    donate: bool = True
    guard: Literal["off", "skip", "raise"] = "off"
    overlap: Literal["backward", "update"] = "backward"
    has_aux: bool = False
    check_every: int | None = None
    trainable: Trainable = None
    max_skipped: int | None = None
    #: Whether a 0-dim bool is true here or on a rank beside the axis that holds other parts of the parameters, as with
    #: tensor parallelism: these skip a step together. :func:`ltx.tensor_parallel.with_dtensors` sets it.
    bad_anywhere: Callable[[torch.Tensor], torch.Tensor] | None = field(default=None, repr=False)
    #: What follows: the loss scale that changes; whether gradients are checked; whether a step may raise for theirs.
    dynamic: Any = field(init=False, repr=False, compare=False)
    checks_finite: bool = field(init=False, repr=False, compare=False)
    may_raise: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(given := self.trainable, list | tuple) and all(isinstance(pattern, str) for pattern in given):
            object.__setattr__(self, "trainable", tuple(given))
        elif not (given is None or isinstance(given, str) or callable(given)):
            raise StepError(
                "train_step: trainable must be a pattern of paths, a list of patterns, a function of a path, or None, "
                f'got {brief(given)}. Such as trainable=["*.lora_*", "head.*"].'
            )
        check_fields(self, StrategyError, "guard", "overlap")
        step, optimizer = self.step, self.optimizer
        if not isinstance(step, DataParallel):
            raise StepError(
                f"train_step takes a step made by ltx.data_parallel, got {type(step).__name__}. Wrap it: "
                "ltx.train_step(ltx.data_parallel(loss_fn), optimizer)."
            )
        if step.blocked:
            raise StepError(
                "train_step: the step's gradients are blocked (block_backward_sync), so ranks would diverge."
            )
        if step.argnums != 0:
            raise StepError(
                f"train_step passes the parameters first: the step needs argnums=0, got {brief(step.argnums)}."
            )
        if not isinstance(optimizer, Optimizer):
            raise OptimError(
                f"optimizer must be an ltx.optim.Optimizer, got {brief(optimizer)}. Use "
                "ltx.optim.from_torch(torch.optim.AdamW, lr=...) or ltx.optim.from_functions(init, update)."
            )
        strategy, precision = step.strategy, step.precision
        strategy.check(optimizer)
        if self.check_every is not None:
            whole("train_step: check_every", self.check_every, 1, StrategyError, besides="None or ")
            require("check_every, strategy", strategy)
        scale, dynamic = (None, None) if precision is None else (precision.loss_scale, precision.dynamic)
        may_raise = self.guard == "raise" or self.max_skipped is not None
        vars(self).update(dynamic=dynamic, checks_finite=bool(dynamic) or self.guard != "off", may_raise=may_raise)
        # Such a hook adds gradients, which have the loss scale as a factor, to tensors that don't have it.
        for hook in () if scale is None or scale == 1 else map(strategy.hook, steps_ahead(strategy)):
            require("loss scale, hook", hook, f"train_step: loss_scale={scale!r}")
        if self.overlap == "update":
            require("overlap, strategy", strategy)
            require("overlap, optimizer", optimizer)
            if self.guard != "off" or dynamic is not None:
                asks = f'guard="{self.guard}"' if self.guard != "off" else repr(dynamic)
                require("guard, overlap", 'overlap="update"', asks)
        if self.max_skipped is not None:
            whole("train_step: max_skipped", self.max_skipped, 1, StrategyError, besides="None or ")
            if self.guard != "skip" and dynamic is None:
                raise StrategyError(
                    f"train_step: max_skipped={self.max_skipped} is a limit on skipped steps, and "
                    f'guard="{self.guard}" skips none. Use guard="skip", or an ltx.DynamicLossScale.'
                )
