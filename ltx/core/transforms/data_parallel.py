"""data_parallel: tie ∘ f ∘ mark, as a transformation of steps. The rule is that of ``jax.shard_map``'s replicated
arguments: the gradient with respect to a replicated argument is reduced over the axis. An eager call gets a schedule; a
compiled graph nodes, which make one of functional collectives when they run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict, Unpack, overload

import torch

from ltx.core import comm
from ltx.core.base import private, traced, tree
from ltx.core.base.arguments import checked
from ltx.core.base.errors import StepError, SyncStateError
from ltx.core.base.private import Tensors
from ltx.core.gradients import marker
from ltx.core.gradients.comm_hook import shared_part
from ltx.core.gradients.pending import ProcessSchedule
from ltx.core.gradients.planning import Plan
from ltx.core.transforms import compare
from ltx.core.transforms import run as calls
from ltx.core.transforms.closure_check import look_at_modules, own_leaves, refuse_captured
from ltx.core.transforms.compare import check_in_debug, check_params_once
from ltx.core.transforms.grad import applies, call_below
from ltx.core.transforms.marking import mark, mark_in_graph, marks_on_wire, sync_gradients
from ltx.core.transforms.run import KIND, PLAIN_CALL, Called, CallOptions, Known, Marked, Run, StepSettings
from ltx.core.transforms.strategy import Strategy, default_strategy, hook_of_plain, stateful
from ltx.core.transforms.sync_state import Synced, SyncState, check_state
from ltx.typing import Step, Tree


@dataclass(frozen=True)
class DataParallel(StepSettings):
    """A step with synchronised gradients: what :func:`data_parallel` returns.

    An immutable value, called like the step.

    Attributes:
        fn: the user's step.
        strategy: how gradients are reduced.
        argnums, axis, outputs, returns: as in :func:`ltx.data_parallel`.
        blocked: gradients stay local (:func:`ltx.block_backward_sync`).
        precision: the :class:`ltx.Precision` of :func:`ltx.mixed_precision`, or None.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.returns == "grads":
            if traced.recording():
                return self._reduce_returned(self.fn(*args, **kwargs))
            self._check_given(args)
            with calls.differentiating_itself():
                output = self.fn(*args, **kwargs)
            return self._reduce_returned(output)
        if traced.recording():
            return self.run(args, kwargs).value()
        if private.in_transform() and (flat := self._flat_below(args, kwargs)) is not None:
            with suppress(traced.TracedValueError):
                return call_below(self, *flat)
        with comm.span("forward"):
            return self.run(args, kwargs).value()

    def _flat_below(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any] | None:
        """The arguments, flattened, if the step can run below the transform; else None."""
        axis = comm.resolve(self.axis)
        if not (axis.ranks.overlaps or (axis.size == 1 and not axis.ranks.levels)):
            return None
        leaves, spec = tree.flatten((args, kwargs))
        given = tree.flatten(self._params_of(args))[0]
        mine = {*map(id, given)}
        return (leaves, spec) if applies(given, [x for x in leaves if id(x) not in mine]) else None

    def init(self, params: Tree) -> SyncState:
        """The communication state before the first step; it has no leaves if the strategy keeps no state."""
        tree.check_tensors(params, "params")
        tree.check_paths(params, "params")
        floats = [(path, leaf) for path, leaf in compare.tensors_by_path(params) if leaf.is_floating_point()]
        return SyncState.new({path: state for path, leaf in floats if (state := self.strategy.init(leaf, path))})

    def deferred(self, flat: tuple[list[torch.Tensor], Any], step: int = 0) -> CallOptions | None:
        """For a call on the parameters `flat` whose caller waits for the buckets; None if no schedule sends any."""
        hook, axis = self.hook(step), comm.resolve(self.axis)
        # A step keeps what its last such call has found out, as a jitted function keeps its graphs.
        asked, known = self.__dict__.get("_answers", (None, None))
        if asked and asked == (hook, axis, [flat[1], *map(KIND, flat[0])]) and axis.ranks.goes_on():
            return CallOptions(True, flat=flat, known=known)
        return CallOptions(True, flat=flat) if marks_on_wire(self, hook, axis) else None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_answers"}

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions = PLAIN_CALL) -> Run:
        """Call the step on marked parameters and tie its output."""
        step, plan, called = options.step, options.known.plan, options.called
        recorded = not options.deferred and traced.recording()
        if plan is None:
            params, sync_state = self._params_of(args, training=step is not None)
        leaves, spec = options.flat or tree.flatten(params)
        if plan is not None:
            if plan.one_sum and step is None:
                called = self._called(plan, leaves, spec, args, kwargs)
                if called.is_loss(options.known.nodes):
                    mean = self.outputs == "mean"
                    return Run(called.output, self.axis, None, mean, False, called.leaves, (), options.known)
            schedule, local, within = ProcessSchedule(plan, deferred=True), False, options.known.within
            given, inputs = marker.defer(schedule, leaves, [()] * len(leaves), called and called.leaves)
            marked = Marked(given, None, schedule, inputs)
        elif recorded:
            tree.refuse_in_graph(leaves)
            counted = sync_state.step if sync_state is not None else 0
            marked = mark_in_graph(self, params, leaves, spec, sync_state, counted if step is None else step)
            local, within = self.blocked, None
        else:
            tree.check_leaves(leaves, params, f"argument {self.argnums} of the step")
            counted = sync_state.checked_step() if sync_state is not None else 0
            training, step = step is not None, counted if step is None else step
            hook, axis = self.hook(step, training), comm.resolve(self.axis)
            marked = mark(self, params, leaves, spec, sync_state, axis, hook, step, options)
            local, within = hook is None, None if hook is None else shared_part(hook, axis)
        wire = marked.schedule if isinstance(marked.schedule, ProcessSchedule) else None
        given = params if marked.as_given else tree.unflatten(spec, marked.leaves)
        if options.frozen is not None:
            given = tree.filled(given, options.frozen)
        args = self._filled(args, given)
        own: Sequence[torch.Tensor] = ()
        made: int | None = None
        if recorded:
            output = self.fn(*args, **kwargs)
        else:
            with wire.among.passes.in_forward() if wire and options.step is None else nullcontext():
                with look_at_modules(self.fn, leaves, given) if plan is None else comm.NOTHING as first:
                    called = called or Called.now(self.fn, given, marked.leaves, args, kwargs)
                output = called.output
                if not private.in_transform():  # side effects
                    held, made = (marked.leaves, args, kwargs), called.nodes
                    if made != options.known.nodes:
                        if marked.schedule or (first and options.deferred):  # a train step of one rank has no schedule
                            refuse_captured(self.fn, output, held, made, options.deferred)
                        own = own_leaves(self.fn, output, marked.leaves, held, made)
        if options.deferred and not options.step:
            calls.refuse_backward(marked.inputs or leaves, marked.inputs and marked.schedule)
        if not isinstance(output, torch.Tensor) or output.ndim:  # it isn't a loss
            calls.refuse_gradients(output, leaves, spec)
        mean = self.outputs == "mean" and not self.blocked
        if marked.inputs is not None and options.step is None:
            output = calls.reaching(output, marked.leaves, mean)
        output = output if marked.tie is None else marked.tied(output)
        known = Known(wire.plan if wire else None, within, None if own else made)
        if wire and plan is None and options.deferred and options.step is None and wire.plan.lasts(len(leaves)):
            self.__dict__["_answers"] = (wire.plan.hook, axis, [spec, *map(KIND, leaves)]), known
        return Run(output, self.axis, marked.schedule, mean, local, marked.inputs, own, known)

    def _called(self, plan: Plan, params: Tensors, spec: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Called:
        """A call on new leaves in place of `params`; the one sum of `plan` is to reduce their gradients."""
        assert plan.axis.comm
        leaves = [*map(torch.Tensor.requires_grad_, map(torch.Tensor.detach, params))]
        given = tree.unflatten(spec, leaves)
        with plan.axis.comm.passes.in_forward():
            called = Called.now(self.fn, given, leaves, self._filled(args, given), kwargs)
            calls.refuse_backward(leaves)
        return called

    def _filled(self, args: tuple[Any, ...], params: Any) -> tuple[Any, ...]:
        """The arguments of a call with `params` in the places of the parameters."""
        several = not isinstance(self.argnums, int)
        return tuple(tree.at_places(args, *((self.argnums, params) if several else ((self.argnums,), (params,)))))

    def _params_of(self, args: tuple[Any, ...], training: bool = False) -> tuple[Tree, SyncState | None]:
        """The parameters among the arguments of a call, and the communication state that came with them."""
        numbers = (self.argnums,) if isinstance(self.argnums, int) else self.argnums
        if any(not -len(args) <= n < len(args) for n in numbers):
            raise StepError(
                f"argnums={self.argnums}: the step was called with {len(args)} positional arguments. Parameters are "
                "passed by position."
            )
        params = args[self.argnums] if isinstance(self.argnums, int) else tuple(args[n] for n in self.argnums)
        if isinstance(params, Synced):
            check_state(params.sync_state)
            return params.params, params.sync_state
        alone = training or self.blocked or not isinstance(self.argnums, int) or traced.recording()
        if not alone and stateful(self.strategy, plain=True):
            raise SyncStateError(
                f"{self.strategy!r} has communication state, but the step was given bare parameters. Use "
                "ltx.grad_and_value(step)(params, batch, sync_state=step.init(params)), ltx.train_step, or "
                "ltx.Synced(params, state)."
            )
        return params, None

    def _check_given(self, args: tuple[Any, ...]) -> None:
        if self.blocked or (hook := hook_of_plain(self.strategy, 0)) is None:
            return
        axis, params = comm.resolve(self.axis), self._params_of(args)[0]
        check_in_debug(axis, params)
        leaves, structure = tree.flatten(params)
        key = structure, tuple((x.shape, x.dtype) for x in leaves if isinstance(x, torch.Tensor))
        check_params_once(shared_part(hook, axis) or axis, params, self.fn, key, None)

    def _reduce_returned(self, output: Any) -> Any:
        if self.blocked:
            return output
        if isinstance(output, tuple) and not hasattr(output, "_fields") and output:
            grads, _ = sync_gradients(output[0], self.strategy, axis=self.axis)
            rest = output[1:]
            return (grads, *(calls.averaged(rest, self.axis) if self.outputs == "mean" else rest))
        return sync_gradients(output, self.strategy, axis=self.axis)[0]


class _Options(TypedDict, total=False):
    argnums: int | tuple[int, ...]
    axis: Any
    outputs: Literal["local", "mean"]
    returns: Literal["value", "grads"]


@overload
def data_parallel(step_fn: Step, strategy: Strategy | None = None, **options: Unpack[_Options]) -> DataParallel: ...


@overload
def data_parallel(
    step_fn: None = None, strategy: Strategy | None = None, **options: Unpack[_Options]
) -> Callable[[Step], DataParallel]: ...


@checked()
def data_parallel(
    step_fn: Step | None = None,
    strategy: Strategy | None = None,
    *,
    argnums: int | tuple[int, ...] = 0,
    axis: Any = None,
    outputs: Literal["local", "mean"] = "local",
    returns: Literal["value", "grads"] = "value",
) -> DataParallel | Callable[[Step], DataParallel]:
    """A step whose gradients are reduced over the ranks of an axis, overlapping the backward pass.

    You write the step of one process. Every rank (process) runs it on its own batch, and gets the mean of all ranks'
    gradients: those of one process that had all batches.

    Args:
        step_fn: ``(params, *batch) -> output``, pure in its parameters: a tree of tensors in, a scalar loss (or a tree
            of tensors, or :class:`ltx.Weighted`) out. Each rank calls it on its own batch.
        strategy: how gradients are reduced; :class:`ltx.DDPStrategy` if None.
        argnums: the positional argument(s) that are the parameters, the same on every rank. Gradients of other
            arguments, such as a rank's own experts, are those of the sum of all ranks' outputs: n times the mean's.
        axis: as in :func:`ltx.psum`; the one in scope at the time of the call if None.
        outputs: "local": each rank gets its own outputs, also in a train step's ``metrics.aux``; call ``ltx.pmean(x)``
            in the step for means. "mean": floating and complex tensors that the step returns, also aux and buffers, are
            averaged over the ranks, and in forward mode so are their tangents.
        returns: "grads" for a step that itself returns gradients (as with JAX's ``pmap``): the returned tree, or the
            first element of a returned tuple, is reduced; the rest is returned unchanged, or averaged with
            ``outputs="mean"``.

    Returns:
        A :class:`DataParallel`: a function with `step_fn`'s signature and result. ``@ltx.data_parallel`` decorates.

    Gradient:
        With respect to `argnums`: the gradient of the mean over ranks of the output, as the strategy reduces it, with
        the same bits on every rank. If ranks don't share gradients, as in local SGD, it is this rank's own. It works
        through ``loss.backward()``, ``torch.autograd.grad``, torch.func, ``torch.compile`` and inside :func:`ltx.vmap`.
        Gradients with respect to other arguments are this rank's own. So is what other functions of the parameters add
        to a ``.grad``, such as another term of the loss, or a backward pass after the step's. Every rank must
        differentiate its output; parameters that the output doesn't use get zeros. ``vmap(grad(step))`` gives, for
        sample j, the mean over ranks of the gradients of each rank's sample j. Second derivatives are exact, even if
        the hook compresses first ones.

    Raises:
        StepError: the output has the structure and shapes of the parameters and `returns` isn't "grads"; or the step
            uses a parameter that isn't an argument, or lets a module write to its own buffers.
        TreeError: the parameters aren't a tree of tensors.
        RankMismatchError: ranks' parameters differ in structure, shapes or dtypes; on all ranks, at the first call.
        ReplicaDivergedError: ranks' parameters differ in their values; on all ranks, at the first differentiated call
            with parameters of this structure. Ranks compare digests through the store before anything is reduced.

    Example:
        >>> import torch, ltx
        >>> @ltx.data_parallel
        ... def step(w, x):
        ...     return (w * x).mean()
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])  # two ranks with two samples each
        >>> ltx.vmap(torch.func.grad(step), in_dims=(None, 0))(torch.tensor(1.0), x)
        tensor([2.5000, 2.5000])

    Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, section 3.
    """
    chosen = default_strategy() if strategy is None else strategy
    if step_fn is None:
        return lambda fn: DataParallel(fn, chosen, argnums, axis, outputs, returns)
    return DataParallel(step_fn, chosen, argnums, axis, outputs, returns)


@dataclass(frozen=True)
class Blocked(DataParallel):
    """A data-parallel step whose gradients stay local; as a context manager it yields itself and changes nothing."""

    blocked: bool = True

    def __enter__(self) -> Blocked:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


def block_backward_sync(step: DataParallel) -> Blocked:
    """The same step with this rank's own gradients: nothing is reduced or sent.

    Args:
        step: a step from :func:`ltx.data_parallel`.

    Returns:
        A new step; `step` itself doesn't change. The new step is also a context manager that yields itself, like
        Lightning's ``block_backward_sync`` and DDP's ``no_sync``. Unlike these, it only affects calls of the new step,
        inside or outside of the ``with``, and nothing reduces the gradients later: if a backward pass of `step` would
        add to a ``.grad`` that the new step wrote and that wasn't reduced since, it raises RankMismatchError. Use
        :func:`ltx.accumulate` instead, or :func:`ltx.sync_gradients` of the sum. The communication state doesn't
        change. A :class:`ltx.Weighted` step returns its local mean.

    Example:
        >>> import torch, ltx
        >>> step = ltx.data_parallel(lambda w, x: (w * x).sum())
        >>> w, x = torch.tensor(1.0), torch.tensor([2.0, 4.0])
        >>> with ltx.block_backward_sync(step) as local:
        ...     ltx.vmap(torch.func.grad(local), in_dims=(None, 0))(w, x)
        tensor([2., 4.])

    Raises:
        StepError: `step` isn't data parallel.
    """
    if not isinstance(step, DataParallel):
        raise StepError(
            f"block_backward_sync takes a step made by ltx.data_parallel, got {type(step).__name__}. A step that isn't "
            "data parallel has local gradients already."
        )
    return Blocked(**{f.name: getattr(step, f.name) for f in fields(DataParallel)} | {"blocked": True})
