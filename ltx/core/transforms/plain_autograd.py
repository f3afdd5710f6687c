"""First derivatives by torch.func at the speed of plain autograd.

functorch records the backward pass too, which takes time and memory. So if a single level of ``grad`` (or ``vjp``,
``jacrev``) is active, a step runs *below* it, as one autograd Function of its parameters; gradient, overlap and bits
are those of ``loss.backward()``. All other cases use torch.func itself: several levels, tangents, other arguments that
are differentiated, or a step that closes over a differentiated value.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import Any

import torch

from ltx.core import comm
from ltx.core.base import private, traced, tree
from ltx.core.base.errors import StepError, UnsupportedError
from ltx.core.base.private import Tensors
from ltx.core.collectives.linear import Function, at_places
from ltx.core.gradients.marker import can_raise_priority
from ltx.core.gradients.pending import ProcessSchedule
from ltx.core.gradients.planning import in_step, tracked
from ltx.core.gradients.reduction import LeafState
from ltx.core.ranks.batched import in_front
from ltx.core.transforms.closure_check import watch_for_traced_values
from ltx.core.transforms.functional_call import Calls, checkpoints_allowed
from ltx.core.transforms.run import PLAIN_CALL, CallOptions
from ltx.core.transforms.sync_state import Synced


def gradients(total: torch.Tensor, leaves: Tensors, again: bool = False, own: Tensors = ()) -> list[torch.Tensor]:
    """The gradients of `total` with respect to new `leaves`, by plain autograd; zeros where `total` doesn't use one.
    `again`: they may be differentiated. `own`: as in :class:`ltx.core.transforms.run.Run`.
    """
    if not total.requires_grad:
        return [torch.zeros_like(x) for x in leaves]
    found = torch.autograd.grad(total, [*leaves, *own], create_graph=again, allow_unused=True)
    return [*map(_with_own, leaves, found)]


def _with_own(leaf: torch.Tensor, grad: torch.Tensor | None) -> torch.Tensor:
    """A leaf's gradient, with what a Function has brought that called backward() itself (reversible layers)."""
    brought, leaf.grad = leaf.grad, None
    if grad is None:
        return torch.zeros_like(leaf) if brought is None else brought
    return grad if brought is None else grad + brought


def by_buckets(
    schedule: ProcessSchedule, outputs: Tensors, cotangents: Tensors | None, inputs: Tensors, again: bool, own: Tensors
) -> tuple[list[torch.Tensor], dict[int, LeafState]]:
    """Run a deferred pass (:meth:`ProcessSchedule.backward`): (the gradients, next states by parameters' places)."""
    grads, states = dict[int, torch.Tensor](), dict[int, LeafState]()
    try:
        schedule.send_summary()
        schedule.backward(outputs, inputs, cotangents, again, own)
        with torch.no_grad():
            for bucket, reduced in schedule.wait_buckets():
                grads.update(zip(bucket.members, schedule.unpack(bucket, reduced), strict=True))
                states.update(schedule.plan.states_by_leaf(bucket, reduced[1]))
        schedule.finish()
    except BaseException as error:
        schedule.abandon(error)
        raise
    return [*map(grads.__getitem__, range(len(grads)))], states


class Call:
    """One call of a step below the transform. Keeps the plain graph for the backward pass."""

    def __init__(self, step: Any, leaves: list[Any], spec: Any):
        self.step, self.leaves, self.spec = step, leaves, spec
        self.wrapped = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and private.is_wrapped(x)]
        self._wanted = [leaves[i].requires_grad for i in self.wrapped]
        self.calls = Calls()
        self._params: list[torch.Tensor] = []  # the leaves of the step's parameters

    def forward(self, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        """Run the step on plain leaves; return the outputs that have a gradient."""
        self.inputs = [t.detach().requires_grad_(w) for t, w in zip(tensors, self._wanted, strict=True)]
        args, kwargs = tree.unflatten(self.spec, at_places(self.leaves, self.wrapped, self.inputs))
        # Below a transform inference mode is still on, though torch says that it isn't: autograd would record nothing.
        plain, step = torch.inference_mode(False), self.step
        allowed, watched = checkpoints_allowed(), watch_for_traced_values(step.fn)
        with comm.span("forward"), plain, torch.enable_grad(), allowed, watched, self.calls.recorded():
            run = step.run(args, kwargs, self._options(args))
            outputs, spec = tree.flatten(run.value())
        self._inputs, self._own, self._schedule = run.inputs, run.own, run.schedule
        found = [(i, x) for i, x in enumerate(outputs) if isinstance(x, torch.Tensor)]
        self._differentiable = [i for i, x in found if x.requires_grad]
        if self._inputs is not None and not self._differentiable:  # the rank takes part, as its peers wait for it
            self._differentiable = [i for i, x in found if x.is_floating_point() or x.is_complex()]
        self.outputs = [outputs[i] for i in self._differentiable]
        self._result = ([None if i in self._differentiable else x for i, x in enumerate(outputs)], spec)
        return tuple(x.detach() for x in self.outputs)

    def _options(self, args: tuple[Any, ...]) -> CallOptions:
        """Deferred, if the pass can wait for its buckets itself: it is one of all parameters, which bring no state."""
        number = self.step.argnums
        if not isinstance(number, int) or isinstance(args[number], Synced) or traced.recording():
            return PLAIN_CALL
        if not can_raise_priority() or in_step.get():  # hooks of leaves serve one pass
            return PLAIN_CALL
        self._params, spec = tree.flatten(args[number])
        mine, wanted = {*map(id, self._params)}, {id(x) for x in self.inputs if x.requires_grad}
        if len(mine) != len(self._params) or not mine <= wanted:
            return PLAIN_CALL
        flat = self._params, spec
        return self.step.deferred(flat) or CallOptions(deferred=True, flat=flat)

    def result(self, outputs: Tensors) -> Any:
        """The step's result, with `outputs` in the places of the tensors that have a gradient."""
        values, spec = self._result
        return tree.unflatten(spec, at_places(values, self._differentiable, outputs))

    def pull(self, cotangents: Tensors, batched: bool) -> tuple[torch.Tensor | None, ...]:
        """Run the backward pass, on plain autograd. It may run several times (jacrev in chunks)."""
        if self._inputs is not None and batched:  # one pass after the other: each is a pass of all ranks
            rows = [self.pull(one, False) for one in zip(*cotangents, strict=True)]
            return tuple(None if column[0] is None else torch.stack(column) for column in zip(*rows, strict=True))

        def pull(*one: torch.Tensor) -> tuple[torch.Tensor, ...]:
            wanted = [x for x in self.inputs if x.requires_grad]
            found = torch.autograd.grad(self.outputs, [*wanted, *self._own], one, retain_graph=True, allow_unused=True)
            return tuple(map(_with_own, wanted, found))

        with torch.inference_mode(False), checkpoints_allowed(), self.calls.in_pass():
            if self._inputs is not None:  # as :func:`ltx.grad` does it: the pass has no fence
                objectives = [x for x in self.outputs if x.requires_grad]
                given = [c for x, c in zip(self.outputs, cotangents, strict=True) if x.requires_grad]
                with torch.no_grad():
                    found, _ = by_buckets(self._schedule, objectives, given, self._inputs, True, self._own)
                of = dict(zip(map(id, self._params), found, strict=True))
                return tuple(map(of.get, map(id, self.inputs)))
            with comm.span("backward"):
                grads = iter((torch.vmap(pull) if batched else pull)(*cotangents))
        return tuple(next(grads) if x.requires_grad else None for x in self.inputs)


class Below(Function):
    """``Below.apply(call, *wrapped arguments)``: the step's differentiable outputs."""

    @staticmethod
    def forward(call: Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return call.forward(tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.call = inputs[0]

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[Any, ...]:
        kinds = _levels()
        if kinds not in ([], [private.TransformType.Grad]) or private.has_tangents() or any(map(tracked, cotangents)):
            return (None, *Pull.apply(ctx.call, False, *cotangents))
        # Nobody differentiates or maps these gradients: at the level they are constants.
        with torch.no_grad(), private.innermost().lower() if kinds else nullcontext():
            return (None, *ctx.call.pull([*map(private.unwrapped, cotangents)], False))


def _once_only(ctx: Any, *_: torch.Tensor | None) -> tuple[Any, ...]:
    raise UnsupportedError(
        "the function that torch.func.vjp returned for a data-parallel step was differentiated again. Take both "
        "derivatives in one go, such as torch.func.jvp(torch.func.grad(step), ...) or torch.func.hessian(step)."
    )


class Pull(Function):
    """``Pull.apply(call, batched, *cotangents)``: the backward pass of a :class:`Call`, below the transform."""

    @staticmethod
    def forward(call: Call, batched: bool, *cotangents: torch.Tensor) -> tuple[Any, ...]:
        return call.pull(cotangents, batched)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    backward = jvp = staticmethod(_once_only)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: Call, batched: bool, *cotangents: torch.Tensor) -> Any:
        stacked = in_front(info.batch_size, cotangents, in_dims[2:])
        if not batched:
            outs = Pull.apply(call, True, *stacked)
        else:  # autograd can batch over one level only
            rows = [Pull.apply(call, True, *(ct[i] for ct in stacked)) for i in range(info.batch_size)]
            outs = tuple(torch.stack(column) for column in zip(*rows, strict=True))
        return outs, (0,) * len(outs)


def _levels() -> list[Any]:
    """The kinds of the active transforms, outermost first."""
    return [level.key() for level in private.interpreter_stack() or ()]


def applies(params: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether a step of `params` and `others` can run below the transform around it."""
    if _levels() != [private.TransformType.Grad] or private.has_tangents():
        return False
    tensors = [x for x in (*params, *others) if isinstance(x, torch.Tensor)]
    inner = [private.unwrapped_once(x) if private.is_wrapped(x) else x for x in tensors]
    return (
        any(map(tracked, params))
        and not any(tracked(x) for x in others if isinstance(x, torch.Tensor))
        and not any(map(attrgetter("requires_grad"), inner))
    )


def call_below(step: Any, leaves: list[Any], spec: Any) -> Any:
    """The value of `step` at flattened arguments, by plain autograd. Raises TracedValueError if that isn't complete."""
    call = Call(step, leaves, spec)
    outputs = Below.apply(call, *map(leaves.__getitem__, call.wrapped))
    if not call.outputs:
        raise StepError("the step returned no floating or complex tensor that depends on its parameters.")
    return call.result(outputs)
