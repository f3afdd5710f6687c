"""mixed_precision: a step that computes in one dtype, with parameters, gradients and optimizer in another.

    f16(p, batch) = output(f(compute(p), compute(batch)))          parameters p, gradients and optimizer in p's dtype
    dynamic scaling:    g = grad(s f16) / s
                        all of g finite on all ranks:   update; s <- growth s after growth_interval such steps in a row
                        else:                           no update; s <- backoff s

Micikevicius et al., "Mixed precision training", ICLR 2018: sections 3.1 (master weights) and 3.2 (loss scaling). The
dynamic scale is that of torch.amp.GradScaler.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from ltx.core.base import traced, tree
from ltx.core.base.arguments import brief, check_number, check_whole, is_whole, number
from ltx.core.base.errors import StepError, StrategyError
from ltx.core.base.readable import Readable
from ltx.core.training.accumulate import Accumulated
from ltx.core.training.train_state import LossScale
from ltx.core.transforms.data_parallel import DataParallel
from ltx.core.transforms.strategy import steps_ahead
from ltx.typing import Step

_COMPUTE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_REDUCE = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class DynamicLossScale:
    """A loss scale that shrinks when gradients overflow, and grows while they don't, as in torch.amp.GradScaler.

    Args:
        init: the first scale.
        growth: the scale is multiplied by this after `growth_interval` steps in a row with finite gradients.
        backoff: the scale is multiplied by this after a step with infinite or NaN gradients.
        growth_interval: see `growth`.
        least: the scale doesn't shrink below this. ``train_step(guard="raise")`` raises when the scale is down to
            `least`, or to 1.

    Raises:
        StrategyError: (a ValueError) a field's value isn't allowed.
    """

    init: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    growth_interval: int = 2000
    least: float = 0.0

    def __post_init__(self) -> None:
        check_number(self, 0, "init", more=True)
        check_number(self, 1, "growth", more=True)
        check_number(self, 0, "backoff", more=True, below=1)
        check_whole(self, 1, "growth_interval")
        check_number(self, 0, "least", below=self.init)

    def start(self) -> LossScale:
        """The state before the first step."""
        return LossScale(torch.tensor(float(self.init), device="cpu"))

    def after(self, state: LossScale, finite: torch.Tensor | bool) -> LossScale:
        """The state after a step. `finite`: whether its gradients were finite on all ranks."""
        finite = torch.as_tensor(finite, device=state.scale.device)
        run, grown = state.run_after(finite, self.growth_interval), state.scale * self.growth
        after_good = torch.where((run == 0) & grown.isfinite(), grown, state.scale)
        scale = torch.where(finite, after_good, (state.scale * self.backoff).clamp(min=self.least))
        return LossScale(scale, run)


@dataclass(frozen=True, kw_only=True)
class Precision(Readable):
    """Dtypes of a step, for :func:`ltx.mixed_precision`.

    Args:
        compute: inside the step, floating parameters and floating tensors of the batch are cast to this dtype.
        reduce: the dtype in which ranks send gradients, torch.float16 or torch.bfloat16 (:func:`ltx.hooks.cast`). None:
            the parameters' own dtype, or as the strategy says.
        output: floating outputs whose dtype is `compute` are cast to this dtype; None casts no output.
        loss_scale: in :func:`ltx.train_step` the loss is multiplied by it before the backward pass, and gradients are
            divided by it before the optimizer. None is 1, and a number is a fixed scale. With a
            :class:`ltx.DynamicLossScale` all ranks skip the update if any gradient of any rank isn't finite. A fixed
            scale skips no update.
        keep_params: paths of parameters that aren't cast, as patterns of :mod:`fnmatch` (``("*norm*", "*.bn?.*")``) or
            a function from a path to a bool. If `compute` is a half precision, keep the weights and biases of norms in
            float32: torch's batch norm takes half-precision inputs with float32 parameters and statistics.
        keep: positions of arguments whose tensors aren't cast: ``keep=(1,)`` for the buffers of a train step, such as
            running means, which would lose precision.

    Raises:
        StrategyError: (a ValueError) a field's value isn't allowed; in a step, a pattern matches no parameter.

    Example:
        >>> import torch, ltx
        >>> ltx.Precision(compute=torch.float16, loss_scale=ltx.DynamicLossScale(init=1024.0))
        Precision(compute=torch.float16, loss_scale=DynamicLossScale(init=1024.0))
    """

    _one_line = True

    compute: torch.dtype = torch.bfloat16
    reduce: torch.dtype | None = None
    output: torch.dtype | None = torch.float32
    loss_scale: float | DynamicLossScale | None = None
    keep: tuple[int, ...] = ()
    keep_params: tuple[str, ...] | Callable[[str], bool] = ()

    def __post_init__(self) -> None:
        for name, none, allowed in (
            ("compute", "", _COMPUTE),
            ("reduce", "None (the parameters' own dtype, which gradients have) or ", _REDUCE),
            ("output", "None or ", _COMPUTE),
        ):
            if (value := getattr(self, name)) not in allowed and not (none and value is None):
                which = ", ".join(map(str, allowed))
                raise StrategyError(f"Precision.{name} must be {none}one of {which}, got {brief(value)}.")
        scale = self.loss_scale
        if not (scale is None or isinstance(scale, DynamicLossScale)):
            others = "None, an ltx.DynamicLossScale or "
            scale = number("Precision.loss_scale", scale, 0, StrategyError, more=True, besides=others)
            object.__setattr__(self, "loss_scale", float(scale))
        if not isinstance(self.keep, tuple) or any(not is_whole(n) or n < 0 for n in self.keep):
            raise StrategyError(
                f"Precision.keep must be a tuple of positions of arguments, such as (1,), got {brief(self.keep)}."
            )
        patterns = self.keep_params
        several = isinstance(patterns, tuple) and all(isinstance(pattern, str) for pattern in patterns)
        if not (callable(patterns) or several):
            raise StrategyError(
                "Precision.keep_params must be a tuple of patterns of parameters' paths, such as ('*norm*',), or a "
                f"function from a path to a bool, got {brief(patterns)}."
            )

    @property
    def dynamic(self) -> DynamicLossScale | None:
        """The dynamic loss scale; None for a fixed one."""
        return self.loss_scale if isinstance(self.loss_scale, DynamicLossScale) else None


@traced.at_trace_time
def _fitting(patterns: tuple[str, ...], paths: tuple[str, ...]) -> tuple[str, ...]:
    """The paths that match a pattern, and so aren't cast. Raises for a pattern that matches none."""
    return tuple(sorted(tree.wanted(patterns, paths, StrategyError, "Precision.keep_params: ")))


@dataclass(frozen=True)
class Casted:
    """A step between two casts, which :func:`mixed_precision` makes of a plain step."""

    fn: Step
    precision: Precision
    argnums: int | tuple[int, ...] = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        keep, compute, output = self.precision.keep, self.precision.compute, self.precision.output

        def given(x: Any) -> Any:
            return x.to(compute) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

        def answered(x: Any) -> Any:
            return x.to(output) if isinstance(x, torch.Tensor) and x.dtype == compute else x

        def inside(arg: Any, kept: Collection[str] = ()) -> Any:
            leaves, spec = tree.flatten(arg)
            tree.check_open(leaves, arg, "mixed_precision", "cast")
            pairs = zip(tree.leaf_paths(arg) if kept else [""] * len(leaves), leaves, strict=True)
            return tree.unflatten(spec, [leaf if path in kept else given(leaf) for path, leaf in pairs])

        patterns, at = self.precision.keep_params, self.argnums
        some = {n % len(args) for n in ((at,) if isinstance(at, int) else at)} if patterns and args else set()
        paths = [path for place in sorted(some) for path in tree.leaf_paths(args[place])]
        if callable(patterns):
            kept: Collection[str] = [path for path in paths if patterns(path)]
        else:
            kept = _fitting(patterns, tuple(paths)) if some else ()
        cast_args = [x if n in keep else inside(x, kept if n in some else ()) for n, x in enumerate(args)]
        names = _names(self.fn, keep) if kwargs and keep else ()
        value = self.fn(*cast_args, **{name: arg if name in names else inside(arg) for name, arg in kwargs.items()})
        return value if output is None else tree.map(answered, value)


@traced.at_trace_time
def _names(fn: Step, keep: tuple[int, ...]) -> tuple[str, ...]:
    """The names of the arguments at the positions `keep`."""
    names = [*inspect.signature(getattr(fn, "fn", fn)).parameters]
    return tuple([names[place] for place in keep if place < len(names)])


def mixed_precision(step: DataParallel, precision: Precision) -> DataParallel:
    """The same step, computed in ``precision.compute``; parameters and their gradients keep their own dtype.

    The optimizer updates the master weights, which are the parameters that were passed in, and gradients have their
    dtype: the gradient of each micro-batch is cast before it is added up, and ranks sum gradients in that dtype unless
    ``precision.reduce`` is set. Complex and integer tensors of parameters and batch aren't cast, nor parameters whose
    paths match ``precision.keep_params``. ``torch.autocast`` may be used inside the step.

    Args:
        step: a step from :func:`ltx.data_parallel`, with any strategy; accumulate it before or after this.
        precision: an :class:`ltx.Precision`.

    Returns:
        A step with the same arguments, which composes in the same way: with torch.func, torch.compile,
        :func:`ltx.accumulate` and :func:`ltx.train_step`. Only the train step applies the loss scale; a program that
        takes the step's gradients itself has to scale the loss itself.

    With a loss scale, hooks and strategies see gradients multiplied by it. Numbers that overflow in a reduction arrive
    as inf or NaN on every rank. A hook's residual (error feedback) is in units of the scaled gradient, even after the
    scale has changed. :func:`ltx.train_step` refuses a scale if the strategy adds gradients to tensors that aren't
    scaled: QAdam's momenta, Horovod's sums over several passes.

    Raises:
        StepError: `step` isn't data parallel, is of mixed precision already, or returns gradients.
        StrategyError: the strategy's hook has no sums that could be taken in ``precision.reduce``.

    Source: Micikevicius et al., "Mixed precision training", ICLR 2018.

    Example:
        >>> import torch, ltx
        >>> step = ltx.data_parallel(lambda w, x: (w * x).sum())
        >>> half = ltx.mixed_precision(step, ltx.Precision(compute=torch.bfloat16))
        >>> torch.func.grad_and_value(half)(torch.tensor(1.0), torch.tensor([1.0, 1.001]))
        (tensor(2.), tensor(2.))
    """
    if not isinstance(step, DataParallel):
        raise StepError(
            f"mixed_precision takes a step made by ltx.data_parallel, got {type(step).__name__}. Wrap it first: "
            "ltx.mixed_precision(ltx.data_parallel(step), ltx.Precision())."
        )
    if not isinstance(precision, Precision):
        raise StepError(f"mixed_precision: precision must be an ltx.Precision, got {brief(precision)}.")
    if step.precision is not None:
        raise StepError(f"mixed_precision: this step has {step.precision!r} already.")
    if step.returns != "value":
        raise StepError('mixed_precision: a step with returns="grads" takes gradients in the cast. Wrap its loss.')
    # The cast is inside an accumulation, so that gradients of micro-batches are summed in the parameters' dtype.
    if isinstance(step.fn, Accumulated):
        fn: Step = replace(step.fn, fn=Casted(step.fn.fn, precision, step.argnums))
    else:
        fn = Casted(step.fn, precision, step.argnums)
    casted = replace(step, fn=fn, precision=precision)
    for at in steps_ahead(step.strategy):
        for training in (False, True):
            casted.hook(at, training)  # raises for a hook that can't be cast
    return casted
