"""Gradients of steps by plain autograd: ltx.grad and grad_and_value, and those of torch.func below its level.

functorch records the backward pass too, which takes time and memory. So if no transform is around ``ltx.grad`` and only
the parameters are differentiated, plain autograd takes the gradients. If a single level of ``grad`` (or ``vjp``,
``jacrev``) is active, a data-parallel step runs *below* it, as one autograd Function of its parameters; gradient,
overlap and bits are those of ``loss.backward()``. All other cases use torch.func itself: several levels, tangents,
other arguments that are differentiated, or a step that closes over a differentiated value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from operator import attrgetter
from typing import Any, TypeGuard, cast

import torch

from ltx.core import comm
from ltx.core.base import private, traced, tree
from ltx.core.base.arguments import checked, outcome
from ltx.core.base.errors import StepError, UnsupportedError
from ltx.core.base.private import Tensors
from ltx.core.collectives.linear import Function
from ltx.core.gradients import one_sum
from ltx.core.gradients.marker import can_raise_priority
from ltx.core.gradients.pending import ProcessSchedule
from ltx.core.gradients.planning import in_step, requires_grad, tracked
from ltx.core.gradients.reduction import LeafState
from ltx.core.ranks.batched import in_front
from ltx.core.transforms.calls_again import Calls, checkpoints_allowed, own_grad_and_value
from ltx.core.transforms.closure_check import first_hooked, hooked_text, refuse_captured, watch_for_traced_values
from ltx.core.transforms.run import PLAIN_CALL, CallOptions, Run, StepSettings, refuse_backward
from ltx.core.transforms.sync_state import Synced, SyncState, check_state, states_after
from ltx.typing import Step, Tree

Flat = tuple[list[torch.Tensor], Any]  # leaves and their structure


@checked("step", "argnums", "has_aux")
def grad_and_value(step: Step, argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> Callable[..., Any]:
    """``torch.func.grad_and_value`` with a keyword argument for the communication state.

    Args:
        step: a step, data parallel or not, that returns a 0-dim floating tensor (or ``(0-dim tensor, aux)``).
        argnums: the arguments to differentiate with respect to.
        has_aux: the step returns ``(loss, aux)``.

    Returns:
        A function with the step's arguments and ``sync_state=None``. Without a state it returns ``(grads, value)``,
        with one ``((grads, next state), value)``; `value` is ``(value, aux)`` with `has_aux`.

    Raises:
        StepError: the step didn't return a 0-dim floating tensor.
        SyncStateError: the strategy has state, but no state was given, or one that was used before.

    Example:
        >>> import torch, ltx
        >>> step = ltx.data_parallel(lambda w, x: (w * x).sum())
        >>> ltx.grad_and_value(step)(torch.tensor(2.0), torch.tensor([1.0, 3.0]))
        (tensor(4.), tensor(8.))
    """

    def checked_output(output: Any) -> Any:
        value = output[0] if has_aux and isinstance(output, tuple) and len(output) == 2 else output
        if has_aux and value is output:
            raise StepError(f"has_aux=True needs a step that returns (loss, aux), got {outcome(output)}.")
        if isinstance(step, StepSettings) and step.returns == "grads":
            raise StepError('this step returns gradients (returns="grads"): call it as it is.')
        if not isinstance(value, torch.Tensor) or value.ndim != 0 or not value.is_floating_point():
            raise StepError(
                f"a gradient needs a step that returns a 0-dim floating tensor, got {outcome(value)}. Take its mean or "
                "sum; a step that returns (loss, aux) wants has_aux=True."
            )
        return output

    def transformed(*args: Any, sync_state: SyncState | None = None, **kwargs: Any) -> Any:
        numbers = (argnums,) if isinstance(argnums, int) else argnums
        if any(not -len(args) <= n < len(args) for n in numbers):
            raise StepError(f"argnums={argnums}: the step was called with {len(args)} positional arguments.")
        recording = traced.recording()
        for n in () if recording else numbers:
            params = args[n].params if isinstance(args[n], Synced) else args[n]
            flat = tree.flatten(params)
            _check_differentiable(flat[0], params, n)
        if sync_state is not None:
            check_state(sync_state)
        if isinstance(argnums, int) and not recording and flat[0] and _is_plain(step, argnums, args):
            others = tree.flatten((tree.at_places(args, [argnums], [None]), kwargs))[0]
            if not requires_grad([*flat[0], *others]):
                options = step.deferred(flat, 0 if sync_state is None else sync_state.checked_step())
                axis = None if options else comm.resolve(step.axis)
                if axis is None or (axis.size == 1 and not axis.ranks.levels and sync_state is None):
                    # Who differentiates such a value may do so with the gradients.
                    with suppress(traced.TracedValueError):
                        of = flat, options, args, kwargs, sync_state
                        return _by_plain_autograd(step, argnums, checked_output, *of)
        given: Sequence[Any] = args
        if sync_state is not None:
            if not isinstance(argnums, int):
                raise StepError(f"a communication state goes with one argument of parameters, got argnums={argnums}.")
            sync_state.checked_step()  # raises for a state that was used before
            given = tree.at_places(args, [argnums], [Synced(args[argnums], sync_state)])
        flats = [tree.flatten(given[n]) for n in numbers]  # torch.func takes None for a leaf, and not for an empty node

        def of_leaves(lists: list[list[torch.Tensor]]) -> Any:
            trees = [tree.unflatten(spec, leaves) for leaves, (_, spec) in zip(lists, flats, strict=True)]
            return checked_output(step(*tree.at_places(given, numbers, trees), **kwargs))

        lists, value = own_grad_and_value(of_leaves, has_aux=has_aux)([leaves for leaves, _ in flats])
        grads = tuple(tree.unflatten(spec, leaves) for leaves, (_, spec) in zip(lists, flats, strict=True))
        if not isinstance(argnums, int):
            return grads, value
        if sync_state is None:
            return grads[0], value
        # the clock has counted the step; a count in the structure would make the next step compile anew
        state = grads[0].sync_state if traced.recording() else grads[0].sync_state.clock_read()
        return (grads[0].params, state), value

    return transformed


@checked("step", "argnums", "has_aux")
def grad(step: Step, argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> Callable[..., Any]:
    """``torch.func.grad`` with a keyword argument for the communication state.

    As :func:`grad_and_value`, without the value: it returns ``grads``, or ``(grads, next state)`` if it gets a
    `sync_state`; with `has_aux` it returns the pair of that and aux.

    Example:
        >>> import torch, ltx
        >>> ltx.grad(ltx.data_parallel(lambda w, x: (w * x).sum()))(torch.tensor(2.0), torch.tensor([1.0, 3.0]))
        tensor(4.)
    """
    both = grad_and_value(step, argnums, has_aux)

    def transformed(*args: Any, **kwargs: Any) -> Any:
        grads, value = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return transformed


def _is_plain(step: Step, argnum: int, args: tuple[Any, ...]) -> TypeGuard[Any]:
    """Whether plain autograd gives torch.func's result for parameters alone: no transform is active."""
    if not isinstance(step, StepSettings) or not isinstance(step.argnums, int) or step.returns != "value":
        return False
    if argnum % len(args) != step.argnums % len(args) or isinstance(args[argnum], Synced):
        return False
    return not (private.in_transform() or private.has_tangents() or torch.is_inference_mode_enabled())


def _by_plain_autograd(
    step: Any, at: int, check: Any, flat: Flat, options: Any, args: tuple[Any, ...], named: Any, state: Any
) -> Any:
    """The result of :func:`grad_and_value`'s function, if :func:`_is_plain`. `options`: those of a call that waits for
    its buckets here; None for a step of one rank, which too may use what torch.func has no rules for. `named`: kwargs.
    """
    leaves, spec = flat
    inputs = [] if options else [x.detach().requires_grad_() for x in leaves]
    params = args[at] if options else tree.unflatten(spec, inputs)
    given = params if state is None else Synced(params, state)
    filled = args if given is args[at] else tree.at_places(args, [at], [given])
    calls, closes = Calls(), False
    with comm.span("forward"), torch.enable_grad(), watch_for_traced_values(step.fn), calls.recorded():
        before = private.nodes_made()
        run = step.run(tuple(filled), named, options or PLAIN_CALL)
        output = check(run.value())
        if not options:
            refuse_backward(inputs)
            try:
                refuse_captured(step.fn, output, filled, private.nodes_made() - before)
            except StepError:
                closes = True  # over variables, whose gradients nobody refuses here
    loss = output[0] if isinstance(output, tuple) else output
    with calls.in_pass():
        if run.inputs is not None:
            objective = [loss] if loss.requires_grad else []  # else no operation connects it to the markers
            grads, states = by_buckets(run, objective, None, False)
        else:
            grads, states = gradients(loss, inputs, closes, run.own), {}
    found, value = tree.unflatten(spec, grads), output if closes and torch.is_grad_enabled() else tree.detached(output)
    # Copies of scalars: a loss that is a parameter itself may be changed in place (loss /= steps).
    value = tree.map(lambda x: x.clone() if isinstance(x, torch.Tensor) and x.ndim == 0 else x, value)
    if state is None:
        return found, value
    assert run.known.plan is not None
    return (found, state.advanced(states_after(run.known.plan, states, state.leaves, params))), value


def _check_differentiable(leaves: list[Any], params: Tree, number: int) -> None:
    """Raise unless argument `number`, `params` with these `leaves`, is a tree of tensors that have gradients."""
    tree.check_leaves(leaves, params, f"argument {number} of the step")
    if (place := first_hooked(leaves)) is not None:
        raise StepError(hooked_text(f"argument {number} of the step: leaf {tree.leaf_paths(params)[place]!r}"))
    dense = all(map(torch.Tensor.is_floating_point, leaves)) and {*map(attrgetter("layout"), leaves)} == {torch.strided}
    for place, x in () if dense else enumerate(leaves):
        if not (x.is_floating_point() or x.is_complex()) or x.layout not in _LAYOUTS:
            raise StepError(
                f"argument {number} of the step: leaf {tree.leaf_paths(params)[place]!r} is {tree.describe(x)} "
                f"({x.layout}), which has no gradient. Pass it as an argument of its own."
            )


_LAYOUTS = (torch.strided, torch.sparse_coo, torch.jagged)


def gradients(total: torch.Tensor, leaves: Tensors, again: bool = False, own: Tensors = ()) -> list[torch.Tensor]:
    """The gradients of `total` with respect to new `leaves`, or zeros. `again`: they may be differentiated."""
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
    run: Run, outputs: Tensors, cotangents: Tensors | None, again: bool
) -> tuple[list[torch.Tensor], dict[int, LeafState]]:
    """Run a deferred pass (:meth:`ProcessSchedule.backward`): (the gradients, next states by parameters' places)."""
    plan, inputs, schedule = run.known.plan, run.inputs or (), cast(ProcessSchedule, run.schedule)
    assert plan is not None
    if plan.one_sum and len(inputs) == len(plan.buckets[0].members) and not run.own:
        return one_sum.reduced(plan, inputs, outputs, cotangents, again)[0], {}
    grads, states = dict[int, torch.Tensor](), dict[int, LeafState]()
    try:
        schedule.send_summary()
        schedule.backward(outputs, inputs, cotangents, again, run.own)
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
        self.calls = Calls()
        self._params: list[torch.Tensor] = []  # the leaves of the step's parameters

    def forward(self, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        """Run the step on plain leaves; return the outputs that have a gradient."""
        wanted = (self.leaves[i].requires_grad for i in self.wrapped)
        self.inputs = [t.detach().requires_grad_(w) for t, w in zip(tensors, wanted, strict=True)]
        args, kwargs = tree.unflatten(self.spec, tree.at_places(self.leaves, self.wrapped, self.inputs))
        # Below a transform inference mode is still on, though torch says that it isn't: autograd would record nothing.
        plain, step = torch.inference_mode(False), self.step
        allowed, watched = checkpoints_allowed(), watch_for_traced_values(step.fn)
        with comm.span("forward"), plain, torch.enable_grad(), allowed, watched, self.calls.recorded():
            run = step.run(args, kwargs, self._options(args))
            outputs, self.result_spec = tree.flatten(run.value())
        self._run = run
        found = [(i, x) for i, x in enumerate(outputs) if isinstance(x, torch.Tensor)]
        self.differentiable = [i for i, x in found if x.requires_grad]
        if run.inputs is not None and not self.differentiable:  # the rank takes part, as its peers wait for it
            self.differentiable = [i for i, x in found if x.is_floating_point() or x.is_complex()]
        self.outputs = [outputs[i] for i in self.differentiable]
        self.constants = [None if i in self.differentiable else x for i, x in enumerate(outputs)]
        return tuple(x.detach() for x in self.outputs)

    def _options(self, args: tuple[Any, ...]) -> CallOptions:
        """Deferred, if the pass can wait for its buckets itself: it is one of all parameters, which bring no state."""
        number = self.step.argnums
        whole = isinstance(number, int) and not isinstance(args[number], Synced) and not traced.recording()
        if not (whole and can_raise_priority()) or in_step.get():  # hooks of leaves serve one pass
            return PLAIN_CALL
        self._params, spec = tree.flatten(args[number])
        mine, wanted = {*map(id, self._params)}, {id(x) for x in self.inputs if x.requires_grad}
        if len(mine) != len(self._params) or not mine <= wanted:
            return PLAIN_CALL
        flat = self._params, spec
        return self.step.deferred(flat) or CallOptions(deferred=True, flat=flat)

    def pull(self, cotangents: Tensors, batched: bool) -> tuple[torch.Tensor | None, ...]:
        """Run the backward pass, on plain autograd. It may run several times (jacrev in chunks)."""
        if self._run.inputs is not None and batched:  # one pass after the other: each is a pass of all ranks
            rows = [self.pull(one, False) for one in zip(*cotangents, strict=True)]
            return tuple(None if column[0] is None else torch.stack(column) for column in zip(*rows, strict=True))

        def pull(*one: torch.Tensor) -> tuple[torch.Tensor, ...]:
            wanted = [x for x in self.inputs if x.requires_grad]
            asked = [*wanted, *self._run.own]
            found = torch.autograd.grad(self.outputs, asked, one, retain_graph=True, allow_unused=True)
            return tuple(map(_with_own, wanted, found))

        with torch.inference_mode(False), checkpoints_allowed(), self.calls.in_pass():
            if self._run.inputs is not None:  # as :func:`ltx.grad` does it: the pass has no fence
                objectives = [x for x in self.outputs if x.requires_grad]
                given = [c for x, c in zip(self.outputs, cotangents, strict=True) if x.requires_grad]
                with torch.no_grad():
                    found, _ = by_buckets(self._run, objectives, given, True)
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
    return tree.unflatten(call.result_spec, tree.at_places(call.constants, call.differentiable, outputs))
