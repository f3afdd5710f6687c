"""accumulate: the mean over micro-batches, with one synchronisation and one micro-batch's graph in memory.

    f(p, [b_1 ... b_k]) = (f(p, b_1) + ... + f(p, b_k)) / k          grad f = (grad f_1 + ... + grad f_k) / k

Sums are taken in float32 at least: in bfloat16, adding up a thousand equal gradients gives 256 times one gradient. The
first k - 1 micro-batches are one autograd Function that computes its gradients G in its forward pass and keeps only
them; the last one is an ordinary graph, so that the reduction overlaps with its backward pass. G has its own derivative
(which recomputes the micro-batches), so second derivatives are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NamedTuple, overload

import torch

from ltx.core.base import private, traced, tree
from ltx.core.base.arguments import checked, whole
from ltx.core.base.errors import StepError, UnsupportedError
from ltx.core.collectives import ranks as batches
from ltx.core.collectives.linear import Function
from ltx.core.collectives.reduce import wide
from ltx.core.gradients.marker import ACCUMULATE_PRIORITY, raise_priority
from ltx.core.gradients.planning import tracked
from ltx.core.training.outputs import as_loss, loss_in
from ltx.core.training.train_state import drawn_again, torch_states
from ltx.core.transforms.calls_again import Calls, checkpoints_allowed, own_grad_and_value
from ltx.core.transforms.closure_check import own_leaves, refuse_captured, watch_for_traced_values
from ltx.core.transforms.data_parallel import DataParallel
from ltx.core.transforms.grad import gradients
from ltx.core.transforms.run import Weighted
from ltx.typing import Step


class _Part(NamedTuple):
    """The sum over some micro-batches. `rest` has the other outputs of each micro-batch."""

    total: torch.Tensor
    weight: torch.Tensor | None
    rest: list[Any]
    carry: Any


@dataclass(frozen=True, eq=False)  # torch 2.11 looks up objects that a compiled function makes before they have fields
class Accumulated:
    """A step over micro-batches, which :func:`accumulate` makes of a plain step."""

    fn: Step
    steps: int
    argnums: int | tuple[int, ...] = 0
    carry: int | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = _Call(self, args, kwargs)
        # If the step closes over tensors with tangents, a Function would lose these; the plain graph keeps them.
        leaves = () if traced.recording() or self.steps == 1 or private.has_tangents() else call.leaves
        inputs = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and tracked(leaf)]
        if not inputs:
            return call.finish(call.run(call.leaves, range(self.steps)))
        first = call.first_micro_batches(inputs)
        return call.finish(_add(first, call.run(call.leaves, range(self.steps - 1, self.steps), first.carry)))


class _Call:
    """One call of an accumulated step. Called with tensors for its leaves, it sums all micro-batches but the last."""

    def __init__(self, step: Accumulated, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.step, self.names = step, tuple(kwargs)
        whole = {n % len(args) for n in ((step.argnums,) if isinstance(step.argnums, int) else step.argnums)}
        if step.carry is not None:
            if not -len(args) <= step.carry < len(args):
                raise StepError(f"accumulate: carry={step.carry}, and the step was called with {len(args)} arguments.")
            whole.add(step.carry % len(args))
        batch = {f"argument {n}": arg for n, arg in enumerate(args) if n not in whole} | kwargs
        # Dynamo can't flatten an empty dict
        self.length: int | None
        parts, self.length = batches.opened(batch, "accumulate") if batch else (batch, None)
        self.has_records = parts is not batch
        given = tuple(arg if n in whole else parts[f"argument {n}"] for n, arg in enumerate(args))
        named = tuple(parts[name] for name in kwargs)
        self.leaves, self.spec = tree.flatten((given, named))
        self.cuts: list[bool] = []  # which leaves are split
        for n, arg in enumerate((*given, *named)):
            for cell in (batches.cells if self.has_records and n not in whole else tree.flatten)(arg)[0]:
                cuts = n not in whole and isinstance(cell, torch.Tensor) and cell.ndim > 0
                count = len(tree.flatten(cell)[0]) if batches.is_records(cell) else 1
                self.cuts += [cuts] * count

    def run(self, leaves: Sequence[Any], which: range, carry: Any = None) -> _Part:
        """The sum over the micro-batches `which`, as plain graph, of arguments with these `leaves`."""
        parts, several = [], len(which) > 1
        chunks = [x.tensor_split(self.step.steps) if cut else None for x, cut in zip(leaves, self.cuts, strict=True)]
        # Tensors that micro-batches share are widened to float32, so that their gradients are summed in float32.
        shared = [_widened(x) if chunk is None and several else x for x, chunk in zip(leaves, chunks, strict=True)]
        for k in which:
            filled = [
                chunk[k] if chunk is not None else x if x is leaf else x.to(leaf.dtype)
                for leaf, x, chunk in zip(leaves, shared, chunks, strict=True)
            ]
            arguments = tree.unflatten(self.spec, filled)
            given, named = batches.cut(arguments, self.step.steps, k) if self.has_records else arguments
            args, kwargs = list(given), dict(zip(self.names, named, strict=True))
            if self.step.carry is not None and carry is not None:
                args[self.step.carry] = tree.detached(carry)
            part = self._one(self.step.fn(*args, **kwargs))
            carry = part.carry
            parts.append(part)
        return reduce(_add, parts)

    def _one(self, output: Any) -> _Part:
        several = isinstance(output, tuple) and not isinstance(output, Weighted)
        first, rest, carry = (output[0], output[1:], None) if several else (output, (), None)
        if self.step.carry is not None:
            if not rest:
                raise StepError("accumulate(carry=...): the step must return (loss, next carry, ...).")
            carry, rest = rest[0], rest[1:]
        if isinstance(first, Weighted):
            total, weight = first.checked()
            return _Part(total, weight, [rest], carry)
        if not isinstance(first, torch.Tensor) or first.ndim != 0:
            got = f"a tensor of shape {list(first.shape)}" if isinstance(first, torch.Tensor) else type(first).__name__
            hint = "" if loss_in(first) is None else " It holds one as `loss`: return that."
            raise StepError(
                f"accumulate needs a step that returns a 0-dim loss (or ltx.Weighted), alone or first in a tuple; "
                f"got {got}.{hint}"
            )
        if self.length is not None and self.length % self.step.steps:
            raise StepError(
                f"accumulate: a batch of {self.length} samples can't be split into {self.step.steps} equal "
                "micro-batches, and a mean of unequal means isn't the mean. Return ltx.Weighted(total, weight) from "
                "the step, or choose a batch size that divides."
            )
        self._dtype = first.dtype if first.is_floating_point() else wide(first.dtype)
        return _Part(first.to(wide(first.dtype)), None, [rest], carry)

    def finish(self, part: _Part) -> Any:
        """The output of the whole call: the mean (or Weighted sums), then the step's other outputs, stacked."""
        if part.weight is None:
            first: Any = (part.total / self.step.steps).to(self._dtype)
        else:
            first = Weighted(part.total, part.weight)
        stack = lambda *xs: torch.stack(xs) if isinstance(xs[0], torch.Tensor) else list(xs)  # noqa: E731
        rest = tuple(tree.map(stack, *values) for values in zip(*part.rest, strict=True))
        carried = () if self.step.carry is None else (part.carry,)
        return (first, *carried, *rest) if carried or rest else first

    def first_micro_batches(self, inputs: list[int]) -> _Part:
        """The sums over all micro-batches except the last, with one graph in memory at a time."""
        # All tensors are arguments of the Function, since it unwraps only its arguments from torch.func's levels.
        self._positions = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]
        self.wanted = tuple(self._positions.index(i) for i in inputs)  # the places of `inputs` among the tensors
        self.drawn = torch_states()
        outs = MicroBatches.apply(self, *(self.leaves[i] for i in self._positions))
        raise_priority(outs[0], ACCUMULATE_PRIORITY)
        spec, others = self._structure
        extras = iter(outs[1 + len(inputs) :])
        filled = [next(extras) if isinstance(x, torch.Tensor) else x for x in others]
        return _Part(outs[0], *tree.unflatten(spec, filled))

    def __call__(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """(sum of losses, *sums of gradients with respect to the wanted tensors, *everything else)."""
        found, part = self._gradient(tensors, 0, None)
        grads = [g.to(wide(g.dtype)) for g in found]
        for k in range(1, self.step.steps - 1):
            found, one = self._gradient(tensors, k, part.carry)
            grads, part = [*map(torch.add, grads, found)], _add(part, one)
        extras, spec = tree.flatten((part.weight, part.rest, part.carry))
        self._structure = (spec, [torch.empty(0, device="cpu") if isinstance(x, torch.Tensor) else x for x in extras])
        return (part.total, *grads, *(x.detach() for x in extras if isinstance(x, torch.Tensor)))

    def _gradient(self, tensors: Sequence[torch.Tensor], k: int, carry: Any) -> tuple[list[torch.Tensor], _Part]:
        parts: list[_Part] = []

        def total(*wanted: torch.Tensor) -> torch.Tensor:
            leaves = tree.at_places(self.leaves, self._positions, tree.at_places(tensors, self.wanted, wanted))
            parts.append(self.run(leaves, range(k, k + 1), carry))
            return parts[-1].total

        # `tensors` may be widened to float32
        at = [tensors[i].to(self.leaves[self._positions[i]].dtype) for i in self.wanted]
        if private.in_transform():
            found, value = own_grad_and_value(total, argnums=tuple(range(len(at))))(*at)
            return list(found), parts[-1]._replace(total=value)
        leaves, calls = [x.detach().requires_grad_() for x in at], Calls()
        try:
            with torch.enable_grad(), checkpoints_allowed(), watch_for_traced_values(self.step.fn), calls.recorded():
                value = total(*leaves)
        except traced.TracedValueError:
            raise UnsupportedError(
                "accumulate: the step uses a value from a surrounding torch.func transform that isn't one of its "
                "arguments, which would have no derivative here. Pass it as an argument (a 0-dim tensor goes to every "
                "micro-batch)."
            ) from None
        refuse_captured(self.step.fn, value, [*leaves, *tensors])
        own = own_leaves(self.step.fn, value, leaves, self.leaves)
        with checkpoints_allowed(), calls.in_pass():
            grads = gradients(value, leaves, own=own)
        return grads, tree.detached(parts[-1])


class MicroBatches(Function):
    """``MicroBatches.apply(call, *tensors)``: ``call(tensors)``, with its derivatives. The cotangent of a wanted tensor
    is ct(total) * G, G its gradient of the forward pass. The derivative of G, the Hessian, runs the steps again.
    """

    @staticmethod
    def forward(call: _Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return call(tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.call, *tensors = inputs
        count = len(ctx.call.wanted)
        ctx.inputs = len(tensors)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1 + count :])
        ctx.save_for_backward(*tensors, *output[1 : 1 + count])

    @staticmethod
    def backward(ctx: Any, total: torch.Tensor | None, *others: torch.Tensor | None) -> tuple[Any, ...]:
        call: _Call = ctx.call
        tensors, grads = ctx.saved_tensors[: ctx.inputs], ctx.saved_tensors[ctx.inputs :]
        found: list[torch.Tensor | None] = [None if total is None else total * g for g in grads]
        if any(ct is not None for ct in others[: len(grads)]):
            cotangents = [torch.zeros_like(g) if ct is None else ct for ct, g in zip(others, grads, strict=False)]

            def gradient(*wanted: torch.Tensor) -> tuple[torch.Tensor, ...]:
                return call(tree.at_places(tensors, call.wanted, wanted))[1 : 1 + len(wanted)]

            with drawn_again(call.drawn):
                pull = torch.func.vjp(gradient, *(tensors[i].to(wide(tensors[i].dtype)) for i in call.wanted))[1]
            again = pull(tuple(cotangents))
            found = [h if g is None else g + h for g, h in zip(found, again, strict=True)]
        rounded = [None if g is None else g.to(tensors[i].dtype) for i, g in zip(call.wanted, found, strict=True)]
        return (None, *tree.at_places([None] * ctx.inputs, call.wanted, rounded))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: _Call, *tensors: torch.Tensor) -> tuple[Any, Any]:
        # Through `call` itself: the levels of torch.func below this one have to see its plain operations.
        outs = torch.vmap(lambda *mine: call(mine), in_dims=in_dims[1:], randomness=info.randomness)(*tensors)
        return outs, (0,) * len(outs)


def _widened(leaf: Any) -> Any:
    """`leaf`, widened to float32 if it is differentiated and narrower."""
    floats = isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())
    return leaf.to(wide(leaf.dtype)) if floats and (traced.recording() or tracked(leaf)) else leaf


def _add(a: _Part, b: _Part) -> _Part:
    if (a.weight is None) != (b.weight is None):
        raise StepError("accumulate: the step returned ltx.Weighted for one micro-batch and a plain loss for another.")
    weight = a.weight + b.weight if a.weight is not None and b.weight is not None else None
    return _Part(a.total + b.total, weight, a.rest + b.rest, b.carry)


@overload
def accumulate(  # type: ignore[overload-overlap]
    step: DataParallel, steps: int, *, carry: int | None = None
) -> DataParallel: ...


@overload
def accumulate(step: Step, steps: int, *, carry: int | None = None) -> Accumulated: ...


@checked("step", "carry")
def accumulate(step: Step, steps: int, *, carry: int | None = None) -> DataParallel | Accumulated:
    """The same step over a batch `steps` times as large, with the graph of one micro-batch in memory at a time.

    For batches that don't fit into memory: the batch is cut into micro-batches, which run one after the other. Their
    gradients are summed, and ranks communicate once.

    Args:
        step: a step from :func:`ltx.data_parallel` (all micro-batches then share one synchronisation), or a plain step
            that is wrapped later; the result is the same. It returns a 0-dim loss or :class:`ltx.Weighted`, alone or
            first in a tuple. A step of ``ltx.data_parallel(f, returns="grads")``, whose f returns ``(grads, loss)``,
            becomes a step that returns the loss, and has the mean of these gradients (DP-SGD in micro-batches).
        steps: the number of micro-batches, at least 1. All arguments after the parameters are the batch, given by
            position or by keyword. Its tensors must have one length, and are split along dim 0 into that many chunks,
            of equal size unless the step is Weighted. 0-dim tensors and other leaves go to every micro-batch unchanged.
            Lists of records are split as by :func:`ltx.shard`. :mod:`ltx.tree` lists known containers.
        carry: the position of an argument that micro-batches pass on, such as batch norm's buffers: the second output
            of each micro-batch becomes this argument of the next one, as a constant. The last one is returned.
    Returns:
        A step with the same arguments: the mean over the micro-batches (or the Weighted sums), then the other outputs,
        each stacked along a new dimension 0 of size `steps`.

    Gradient:
        That of the mean over micro-batches, to any order, with sums in float32 at least. The carried argument has no
        gradient. Second derivatives compute the micro-batches again. All graphs are in memory together in forward mode
        (jvp, hessian), inside a compiled graph, and under vmap within an outer grad.

    Raises:
        StepError: the batch can't be split evenly, or the step returns no loss.
        TreeError: as for :func:`ltx.shard`: lengths of tensors, records or fields differ, or something can't be split.
        UnsupportedError: the step closes over a value that a surrounding transform differentiates.

    Example:
        >>> import torch, ltx
        >>> step = ltx.accumulate(ltx.data_parallel(lambda w, x: (w * x).mean()), steps=2)
        >>> torch.func.grad(step)(torch.tensor(1.0), torch.tensor([1.0, 2.0, 3.0, 4.0]))
        tensor(2.5000)
    """
    steps = whole("accumulate: steps", steps, 1, StepError)
    if not isinstance(step, DataParallel):
        return Accumulated(step, steps, 0, carry)
    step = as_loss(step)
    return replace(step, fn=Accumulated(step.fn, steps, step.argnums, carry))
