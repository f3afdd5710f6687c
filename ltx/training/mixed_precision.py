"""mixed_precision: a step that computes in one dtype, with parameters, gradients and optimizer in another."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ltx import tree
from ltx.arguments import brief
from ltx.errors import StepError
from ltx.training.accumulate import Accumulated
from ltx.transforms.data_parallel import DataParallel
from ltx.transforms.precision import Precision
from ltx.typing import Step


@dataclass(frozen=True)
class Casted:
    """A step between two casts: what :func:`mixed_precision` makes of a plain one."""

    fn: Step
    precision: Precision
    argnums: int | tuple[int, ...] = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        keep, compute, output = self.precision.keep, self.precision.compute, self.precision.output

        def given(x: Any) -> Any:
            return x.to(compute) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

        def answered(x: Any) -> Any:
            return x.to(output) if isinstance(x, torch.Tensor) and x.dtype == compute else x

        def inside(arg: Any) -> Any:
            leaves, spec = tree.flatten(arg)
            tree.check_open(leaves, arg, "mixed_precision", "cast")
            return tree.unflatten(spec, [given(leaf) for leaf in leaves])

        def params(arg: Any) -> Any:
            leaves, spec = tree.flatten(arg)
            paths = tree.plain_paths(arg) if torch.compiler.is_compiling() else tree.leaf_paths(arg)
            pairs = zip(paths, leaves, strict=True)
            return tree.unflatten(spec, [leaf if self.precision.keeps(path) else given(leaf) for path, leaf in pairs])

        numbers = (self.argnums,) if isinstance(self.argnums, int) else self.argnums
        some = {n % len(args) for n in numbers} if self.precision.keep_params and args else set()
        cast_args = [
            arg if place in keep else params(arg) if place in some else inside(arg) for place, arg in enumerate(args)
        ]
        value = self.fn(*cast_args, **{name: inside(arg) for name, arg in kwargs.items()})
        return value if output is None else tree.map(answered, value)


def mixed_precision(step: DataParallel, precision: Precision) -> DataParallel:
    """The same step, computed in ``precision.compute``; parameters and their gradients keep their own dtype.

    Inside the step floating parameters and floating tensors of the batch are in ``precision.compute``; what the
    optimizer updates are the master weights that came in, and gradients have their dtype too: each micro-batch's is
    cast before it is added up, and ranks sum them in that dtype unless ``precision.reduce`` says otherwise. Complex
    and integer tensors pass as they are, and so do parameters whose paths ``precision.keep_params`` names.
    ``torch.autocast`` inside the step works as anywhere.

    Args:
        step: what :func:`ltx.data_parallel` returned, of any strategy; accumulated before or afterwards, which is the
            same.
        precision: an :class:`ltx.Precision`.

    Returns:
        A step with the same arguments, which composes as the one given does: with torch.func, torch.compile,
        :func:`ltx.accumulate` and :func:`ltx.train_step`. Loss scaling is the train step's; a program that
        takes gradients of the step itself scales them itself.

    With a loss scale, hooks and strategies see gradients multiplied by it. What overflows in a reduction arrives as
    inf or NaN on every rank. A hook's residual (error feedback) is in units of the scaled gradient, also after the
    scale has changed.

    Raises:
        StepError: `step` isn't data parallel, is of mixed precision already, or returns gradients.
        StrategyError: the strategy's hook has no sums that could travel in ``precision.reduce``.

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
        raise StepError(
            'mixed_precision: a step with returns="grads" takes its gradients inside the cast, where they have the '
            "dtype of the computation. Wrap the loss instead."
        )
    # Inside an accumulation, so that gradients of micro-batches add up in the parameters' dtype.
    if isinstance(step.fn, Accumulated):
        fn: Step = replace(step.fn, fn=Casted(step.fn.fn, precision, step.argnums))
    else:
        fn = Casted(step.fn, precision, step.argnums)
    casted = replace(step, fn=fn, precision=precision)
    for training in (False, True):
        casted.hook(0, training)  # raises for one that can't be cast
    return casted
