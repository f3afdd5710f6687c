"""grad and grad_and_value, as in torch.func, but with a communication state as argument and result. If no transform is
around the call and only the parameters are differentiated, plain autograd takes the gradients, which is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any, TypeGuard

import torch

from ltx.core import comm
from ltx.core.base import private, traced, tree
from ltx.core.base.arguments import checked, outcome
from ltx.core.base.errors import StepError
from ltx.core.collectives.linear import at_places
from ltx.core.gradients.pending import ProcessSchedule
from ltx.core.gradients.planning import requires_grad
from ltx.core.transforms.closure_check import first_hooked, hooked_text, refuse_captured, watch_for_traced_values
from ltx.core.transforms.data_parallel import DataParallel
from ltx.core.transforms.functional_call import Calls, own_grad_and_value
from ltx.core.transforms.plain_autograd import by_buckets, gradients
from ltx.core.transforms.run import PLAIN_CALL, refuse_backward
from ltx.core.transforms.sync_state import Synced, SyncState, check_state, states_after
from ltx.typing import Step, Tree

Check = Callable[[Any], Any]
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
        if isinstance(step, DataParallel) and step.returns == "grads":
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
            others = tree.flatten((at_places(args, [argnums], [None]), kwargs))[0]
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
            given = at_places(args, [argnums], [Synced(args[argnums], sync_state)])
        flats = [tree.flatten(given[n]) for n in numbers]  # torch.func takes None for a leaf, and not for an empty node

        def of_leaves(lists: list[list[torch.Tensor]]) -> Any:
            trees = [tree.unflatten(spec, leaves) for leaves, (_, spec) in zip(lists, flats, strict=True)]
            return checked_output(step(*at_places(given, numbers, trees), **kwargs))

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


def _is_plain(step: Step, argnum: int, args: tuple[Any, ...]) -> TypeGuard[DataParallel]:
    """Whether plain autograd gives torch.func's result for parameters alone: no transform is active."""
    if not isinstance(step, DataParallel) or not isinstance(step.argnums, int) or step.returns != "value":
        return False
    if argnum % len(args) != step.argnums % len(args) or isinstance(args[argnum], Synced):
        return False
    return not (private.in_transform() or private.has_tangents() or torch.is_inference_mode_enabled())


def _by_plain_autograd(
    step: DataParallel, at: int, check: Check, flat: Flat, options: Any, args: tuple[Any, ...], named: Any, state: Any
) -> Any:
    """The result of :func:`grad_and_value`'s function, if :func:`_is_plain`. `options`: those of a call that waits for
    its buckets here; None for a step of one rank, which too may use what torch.func has no rules for. `named`: kwargs.
    """
    leaves, spec = flat
    inputs = [] if options else [x.detach().requires_grad_() for x in leaves]
    params = args[at] if options else tree.unflatten(spec, inputs)
    given = params if state is None else Synced(params, state)
    filled = args if given is args[at] else at_places(args, [at], [given])
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
    loss, schedule = output[0] if isinstance(output, tuple) else output, run.schedule
    with calls.in_pass():
        if isinstance(schedule, ProcessSchedule):
            objective = [loss] if loss.requires_grad else []  # else no operation connects it to the markers
            grads, states = by_buckets(schedule, objective, None, run.inputs or (), False, run.own)
        else:
            grads, states = gradients(loss, inputs, closes, run.own), {}
    found, value = tree.unflatten(spec, grads), output if closes and torch.is_grad_enabled() else tree.detached(output)
    # Copies of scalars: a loss that is a parameter itself may be changed in place (loss /= steps).
    value = tree.map(lambda x: x.clone() if isinstance(x, torch.Tensor) and x.ndim == 0 else x, value)
    if state is None:
        return found, value
    assert schedule is not None
    return (found, state.advanced(states_after(schedule.plan, states, state.leaves, params))), value


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
