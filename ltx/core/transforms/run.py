"""One call of a step: its settings, marked parameters, tied output, and the value that the caller gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch

from ltx.core import collectives, comm
from ltx.core.base import private, traced, tree
from ltx.core.base.arguments import brief, check_fields, is_number
from ltx.core.base.errors import StepError, StrategyError, no_mean
from ltx.core.base.readable import Readable
from ltx.core.collectives.reduce import unusable, wide
from ltx.core.gradients.comm_hook import CommHook
from ltx.core.gradients.planning import Plan, in_step
from ltx.core.gradients.schedule import Schedule
from ltx.core.ranks.axis import Axis
from ltx.core.transforms.calls_again import recording_calls
from ltx.core.transforms.strategy import Strategy, default_strategy, hook_of_plain, in_dtype
from ltx.core.transforms.sync_state import plain_values
from ltx.typing import Step, Tree


class Weighted(NamedTuple):
    """A step returns this instead of a mean: a sum over its samples or tokens, and their count.

    The value and gradient of the wrapped step are then the sum of the totals divided by the sum of the weights, over
    ranks and micro-batches, exactly; ranks may have unequal batches, and a rank without data contributes weight 0.
    Sums are taken in float32 at least, so the value is too.

    Attributes:
        total: 0-dim floating tensor: the sum of the losses.
        weight: 0-dim tensor or number: the count of samples. It is a constant: no gradient flows through it.

    Raises:
        StrategyError: (from a train step) the strategy averages the parameters or updates of ranks that take their own
            steps (local SGD, DiLoCo, gossip, asynchronous averaging, Adasum): there every rank has the same weight.
        WeightError: (from the step) the weights of all ranks add up to 0, or one is negative, infinite or NaN. In a
            compiled graph the result is NaN.

    Example:
        >>> import torch, ltx
        >>> @ltx.data_parallel
        ... def step(w, x, keep):
        ...     return ltx.Weighted(((w * x) * keep).sum(), keep.sum())
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> keep = torch.tensor([[1.0, 1.0], [1.0, 0.0]])  # the second rank has one sample
        >>> ltx.vmap(torch.func.grad(step), in_dims=(None, 0, 0))(torch.tensor(1.0), x, keep)
        tensor([2., 2.])
    """

    total: torch.Tensor
    weight: torch.Tensor | float

    def __add__(self, other: Any) -> Any:  # of tuples it would be one of four
        raise StepError(
            "a Weighted can't be added: a step has one weight. Divide each term by its own mean count over ranks, and "
            "return a plain loss: a / ltx.pmean(n) + b / ltx.pmean(m). With accumulate its n and m are the means over "
            "micro-batches too, given as arguments."
        )

    def checked(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Total and weight as 0-dim tensors of one dtype and device; the weight has no gradient.

        Their dtype is float32 at least: half precision can't represent most counts, and float16 none above 65504.
        """
        total = self.total
        if not isinstance(total, torch.Tensor) or total.ndim != 0 or not total.is_floating_point():
            got = f"shape {list(total.shape)}, {total.dtype}" if isinstance(total, torch.Tensor) else brief(total)
            raise StepError(f"Weighted.total must be a 0-dim floating tensor, got {got}. Sum it.")
        dtype = wide(total.dtype)
        if isinstance(self.weight, torch.Tensor):
            if self.weight.is_meta and not total.is_meta:
                raise StepError("Weighted.weight is a tensor on the meta device, which holds no value.")
            weight = comm.to_device(self.weight, total.device)
        elif is_number(self.weight):
            weight = torch.full((), float(self.weight), dtype=dtype, device=total.device)
        else:
            raise StepError(f"Weighted.weight must be a 0-dim tensor or a number, got {brief(self.weight)}.")
        if weight.ndim != 0:
            raise StepError(f"Weighted.weight must be 0-dim, got shape {list(weight.shape)}. Sum it.")
        weight = weight.to(dtype).detach()
        # The sum over ranks is then NaN on all of them, and all raise: see `unusable`.
        return total.to(dtype), torch.where(weight >= 0, weight, torch.nan)


@dataclass(frozen=True)
class StepSettings(Readable):
    """The fields of :class:`ltx.DataParallel`, each checked, and values that follow from them."""

    fn: Step
    strategy: Strategy = field(default_factory=default_strategy)
    argnums: int | tuple[int, ...] = 0
    axis: Any = None
    outputs: Literal["local", "mean"] = "local"
    returns: Literal["value", "grads"] = "value"
    blocked: bool = False
    precision: Any = None

    def __post_init__(self) -> None:
        check_fields(self, StepError, "argnums", "blocked")
        if not callable(self.fn):
            raise StepError(f"data_parallel wraps a function, got {type(self.fn).__name__}.")
        if isinstance(self.fn, torch.nn.Module) and next(self.fn.parameters(), None) is not None:
            raise StepError(
                f"data_parallel wraps a step, (params, *batch) -> loss, got the module {type(self.fn).__name__}. "
                "Call it in a step, ltx.functional_call(model, params, (x,)), with the params of train.init(model)."
            )
        if isinstance(self.fn, StepSettings):
            raise StepError(
                "this step is already data parallel, and would be averaged twice. Use dataclasses.replace(step, "
                "strategy=...) for another strategy, and data_parallel(fn, axis=('data', 'model')) for several axes."
            )
        if not isinstance(self.strategy, Strategy):
            raise StrategyError(
                f"strategy must be an ltx.Strategy such as ltx.DDPStrategy(), got {brief(self.strategy)}."
            )
        inside = getattr(self.fn, "argnums", self.argnums)  # the argnums of ltx.accumulate around a plain step
        if self.argnums not in (inside, (inside,)):
            raise StepError(
                f"data_parallel: the step takes argument {brief(inside)} for its parameters, and argnums="
                f"{brief(self.argnums)}, so it would split the parameters and leave the batch whole. Wrap the plain "
                f"step first: ltx.accumulate(ltx.data_parallel(step, argnums={brief(self.argnums)}), steps)."
            )
        check_fields(self, StrategyError, "outputs", "returns")
        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            if hasattr(self.fn, name):
                object.__setattr__(self, name, getattr(self.fn, name))
        object.__setattr__(self, "__wrapped__", self.fn)

    def hook(self, step: int, training: bool = False) -> CommHook | None:
        """The hook for the gradients of synchronised step `step`. `training`: whether it is in a train step."""
        if self.blocked:
            return None
        hook = self.strategy.hook(step) if training else hook_of_plain(self.strategy, step)
        return hook if self.precision is None else in_dtype(hook, self.precision.reduce)

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        reduce: torch.dtype | None = None if self.precision is None else self.precision.reduce
        return reduce


class Known(NamedTuple):
    """What a call has found out, for later ones from which nothing is different that it follows from."""

    plan: Plan | None = None  # its buckets, if they are sent; for later calls if its hook has no state
    within: Axis | None = None  # the part of the axis whose ranks share gradients, if not all ranks do
    nodes: int | None = None  # a graph of so many nodes was looked at, and leads to no leaves beside the parameters


class Called(NamedTuple):
    """A call of the user's function; a caller of a step may have made it itself."""

    leaves: list[Any]  # the parameters that it got
    output: Any
    nodes: int  # the number of autograd nodes that it has made

    @classmethod
    def now(cls, fn: Step, given: Tree, leaves: list[Any], args: Sequence[Any], named: dict[str, Any]) -> Called:
        """Call `fn` with `args`, among which are the parameters `given`, `leaves` as a tree."""
        if (record := recording_calls.get()) is not None:
            record.kept.append(given)  # they are there in the backward pass
        token, before = in_step.set(True), private.nodes_made()
        try:
            output = fn(*args, **named)
        finally:
            in_step.reset(token)
        return cls(leaves, output, private.nodes_made() - before)

    def is_loss(self, nodes: int | None) -> bool:
        """Whether the output is a loss at the end of a graph of so many `nodes`, of which all is known."""
        x = self.output
        plain = type(x) is torch.Tensor and x.ndim == 0 and x.requires_grad and x.is_floating_point()
        return plain and self.nodes == nodes


class CallOptions(NamedTuple):
    """Options of one call of a step. A plain call has the defaults."""

    #: The backward pass doesn't wait for its reductions; the caller waits instead. The caller then differentiates with
    #: respect to :attr:`Run.inputs`, and parameters needn't require gradients.
    deferred: bool = False
    # the number of steps so far, if the caller counts them; if None, the communication state does
    step: int | None = None
    hook: CommHook | None = None  # the hook for what ranks share instead of gradients; None for the strategy's hook
    frozen: Tree = None  # the frozen parameters, which fill the places of None among the step's parameters
    flat: tuple[list[torch.Tensor], Any] | None = None  # the step's parameters, flattened, if the caller has done that
    known: Known = Known()
    called: Called | None = None  # then the user's function isn't called again; `known` has a plan


PLAIN_CALL = CallOptions()
_GRAD = attrgetter("grad")
KIND = attrgetter("__class__", "shape", "dtype", "device", "layout")


class Marked(NamedTuple):
    """The parameters that a step gets, and the function that ties its output to their markers."""

    leaves: list[Any]  # the parameters: marked, or unchanged without communication
    #: Ties floating tensors to the markers; None if there are none, or if `inputs` are given.
    tie: Callable[[list[torch.Tensor]], list[torch.Tensor]] | None = None
    schedule: Schedule | None = None  # the schedule of the coming backward pass on an axis; None in a compiled graph
    #: If the schedule keeps the gradients itself, the tensors with respect to which to differentiate; else None.
    inputs: list[torch.Tensor] | None = None
    as_given: bool = False  # whether `leaves` are those of the call; a graph can't ask for a list's identity

    def tied(self, output: Any) -> Any:
        """`output` with its floating and complex tensors tied, if there is a :attr:`tie`."""
        assert self.tie is not None
        leaves, spec = tree.flatten(output)
        ties = _floating(leaves)
        if not (traced.recording() or private.in_transform()):
            # Detached tensors stay detached. If all are, the loss reaches no parameter, but the rank takes part.
            ties = [i for i in ties if leaves[i].requires_grad] or ties
        if ties:
            leaves = tree.at_places(leaves, ties, self.tie([leaves[i] for i in ties]))
        elif self.schedule is not None:
            raise StepError("the step returned no floating or complex tensor, so its parameters have no gradient.")
        return tree.unflatten(spec, leaves)


@contextmanager
def differentiating_itself() -> Iterator[None]:
    """While a step that returns gradients is called: its parameters require none, which torch's error doesn't say."""
    try:
        yield
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
        raise StepError(
            'the parameters that a step with returns="grads" gets require no gradient. Take torch.func.grad_and_value('
            "loss)(params, ...) in it; or, for loss.backward() and torch.autograd.grad, first params = {name: "
            "p.detach().requires_grad_() for name, p in params.items()}."
        ) from error


def reaching(output: Any, leaves: Sequence[torch.Tensor], mean: bool) -> Any:
    """`output`; a loss without data that ranks average gets a zero of parameters, as all ranks run psum's pass."""
    if type(output) is tuple and output:
        return (reaching(output[0], leaves, mean), *output[1:])
    weighted = isinstance(output, Weighted)
    total = output.total if weighted else output
    if not (weighted or mean) or getattr(total, "requires_grad", True):
        return output
    nothing = leaves[0].reshape(-1)[:0].sum()  # 0, even where the parameter isn't finite
    total = total + (nothing.real if nothing.is_complex() else nothing).to(total)
    return output._replace(total=total) if weighted else total


def _floating(leaves: list[Any]) -> list[int]:
    tensors = ((i, x) for i, x in enumerate(leaves) if isinstance(x, torch.Tensor))
    return [i for i, x in tensors if x.is_floating_point() or x.is_complex()]


def averaged(values: Tree, axis: Any) -> Tree:
    """`values`, with floating and complex tensors replaced by their means over ranks."""
    leaves, spec = tree.flatten(values)
    floating = _floating(leaves)
    means = collectives.pmean([leaves[i] for i in floating], axis) if floating else []
    return tree.unflatten(spec, tree.at_places(leaves, floating, means))


class Run(NamedTuple):
    """One call of a step, before its value is computed."""

    output: Any  # what the user's function returned, tied to the markers
    axis: Any  # the axis of the step
    schedule: Schedule | None  # as in :class:`Marked`
    mean: bool  # whether tensors of the value are averaged over ranks
    local: bool  # whether gradients stay local in this step, so that a Weighted's mean is this rank's too
    inputs: list[torch.Tensor] | None  # as in :class:`Marked`
    #: Leaves beside the parameters, for whose gradients a backward pass is asked too (closure_check.own_leaves).
    own: Sequence[torch.Tensor] = ()
    known: Known = Known()

    def value(self) -> Any:
        output = self.output
        if isinstance(output, Weighted):
            return self._weighted_mean(output)
        if isinstance(output, tuple) and output and isinstance(output[0], Weighted):
            return (self._weighted_mean(output[0]), *self.averaged(output[1:]))
        return self.averaged(output)

    def averaged(self, values: Tree) -> Tree:
        return averaged(values, self.axis) if self.mean else values

    def _weighted_mean(self, output: Weighted) -> torch.Tensor:
        total, weight = output.checked()
        if not self.local:
            total, weight = collectives.psum((total, weight), self.known.within or self.axis)
        if not traced.recording():
            with private.below_transforms():
                ranks = comm.resolve(self.axis).ranks
                fault = int(ranks.read(unusable(plain_values(weight)), "the sum of the weights"))
            if fault:
                of = "" if self.known.within is None else f" of {self.known.within.name!r}"
                whose = "this rank's weight is 0" if self.local else f"the weights of all ranks{of} add up to 0"
                raise no_mean(f"Weighted: {whose}", odd=fault == 2)
        return total / weight


def refuse_backward(inputs: Sequence[torch.Tensor], schedule: Any = None) -> None:
    """Raise if a step's own backward pass came to `inputs`, made for this call, or to the markers of `schedule`."""
    if (schedule and schedule.early) or {*map(type, map(_GRAD, inputs))} - {type(None)}:
        raise StepError(
            "the step has called .backward() itself, so its gradients would count twice. Return the loss: ltx.grad and "
            "ltx.train_step differentiate it. For a gradient inside of a step (penalties) use torch.autograd.grad."
        )


def refuse_gradients(output: Any, leaves: list[torch.Tensor], spec: Any) -> None:
    """Raise if `output` looks like the parameters: gradients taken inside would silently differ between ranks."""
    if len(leaves) == 1 and leaves[0].ndim == 0:
        return  # the parameters themselves look like a loss
    several = isinstance(output, tuple) and not hasattr(output, "_fields")
    for candidate in (output, *(output[:1] if several else ())):
        outs, out_spec = tree.flatten(candidate)
        if out_spec == spec and all(
            isinstance(out, torch.Tensor) and out.shape == leaf.shape for out, leaf in zip(outs, leaves, strict=True)
        ):
            params = tree.unflatten(spec, leaves)
            raise StepError(
                "the step returned a tree with the structure and shapes of its parameters "
                f"(first leaf {tree.leaf_paths(params)[0]!r}, shape {list(leaves[0].shape)}). Gradients taken inside a "
                "data-parallel step, and parameters updated with them, are local to the rank. Either return the loss "
                'and differentiate the wrapped step; or wrap with returns="grads", which reduces the returned '
                "gradients; or call ltx.sync_gradients inside; or, if this is no gradient, return it inside a dict or "
                "a one-element list."
            )
