"""The contract of a communication hook: what is done to a bucket of gradients on its way over the network."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeVar, cast

import torch

from ltx.core import comm
from ltx.core.base.arguments import Offering, brief, check_fields, follows
from ltx.core.base.errors import StrategyError
from ltx.core.base.needs import require
from ltx.core.base.readable import Readable
from ltx.core.gradients import reduction
from ltx.core.gradients.reduction import BucketInput, CollectiveRequest, LeafState, Packing, Reduced, Reduction
from ltx.core.ranks.axis import Axis

#: What hooks were asked before, and what says it now.
GONE = {
    **dict.fromkeys(("scale", "wire_dtype", "extra_terms"), "packing(dtype, axis_size)"),
    **dict.fromkeys(("averages", "derivative_scale"), "packing(dtype, axis_size), whose counts_as may be None"),
    "gives_gradients": "packing(dtype, axis_size), whose result may be proportional=False",
    "bucket_factor": "packing(dtype, axis_size), whose result has a bucket_factor",
    **dict.fromkeys(("elementwise", "needs_whole"), 'reach, which is "element", "bucket" or "parameter"'),
    "by_path": "each(paths), which returns None if all have the same hook",
    "cast": "a row of ltx.hooks.combined.in_half",
    "phases_on": "phases, which may be a method, phases(axis_size)",
    "stateful": "state_names, reads_step and constant_after",
    "with_error_feedback": "deriving from ltx.hooks.LossyHook",
    "within": "axes(axis), of which there is one then",
}


@dataclass(frozen=True)
class HookOffers:
    """The properties of a communication hook that plans, steps and checks read.

    Attributes:
        exact: the result is the mean up to rounding in the gradients' dtype. If it isn't, second derivatives use the
            exact mean.
        alike: all ranks get the same result, so that parameters stay the same on all ranks.
        reach: on what an element of the result depends. "element": on that element of the ranks' gradients alone, so
            that gradients of several samples can be reduced side by side (``vmap`` of ``grad`` between processes).
            "bucket": on others in its bucket too. "parameter": on its whole parameter (rows and columns, a norm), or it
            isn't known; such a hook can't reduce DTensors, of which ranks hold parts.
        sums: it requests sums of floating numbers, which another hook may provide (:func:`ltx.hooks.chain`).
        state_names: the tensors of one parameter's state; empty for a hook without state.
        reads_step: ``reduce`` reads the number of steps so far, for randomness too. In a hook without state
            ``inputs.step`` raises unless this is True.
        constant_after: the number of steps after which ``at`` always returns the same hook; None if it keeps changing.
            A hook that defines ``at`` has to set it. Compiled graphs can hold the hook from that step on; in them
            ``reduce`` gets the step as a tensor, which is enough to draw random numbers.
        phases: the largest number of requests that ``reduce`` yields for a bucket, or a function of the number of ranks
            that gives it. Each phase has a channel of its own, which ranks open together when a plan is new, since
            gradients come in different orders in the backward pass.
    """

    exact: bool = True
    alike: bool = True
    reach: str = "bucket"
    sums: bool = True
    state_names: tuple[str, ...] = ()
    reads_step: bool = False
    constant_after: int | None = follows(lambda hook: 0 if type(hook).at is CommHook.at else None)
    phases: int | Callable[[int], int] = 1


@dataclass(frozen=True)
class CommHook(Offering[HookOffers], Readable, kind=HookOffers, gone=GONE):
    """A pure reduction of buckets, with explicit state.

    A hook is a value: it compares, hashes, pickles and prints. :meth:`reduce` is a generator written with
    :class:`ltx.core.gradients.reduction.CollectiveRequest`, so that the same lines run asynchronously between
    processes, on simulated ranks and in compiled graphs.

    Attributes:
        offers: an :class:`ltx.extend.HookOffers`. A subclass overrides a field's default by a class attribute of the
            same name, such as ``exact = False``.
    """

    _one_line = True

    def __post_init__(self) -> None:
        check_fields(self, StrategyError)
        if self.reach not in (reaches := ("element", "bucket", "parameter")):
            raise StrategyError(f"{type(self).__name__}.reach is one of {reaches}, got {brief(self.reach)}.")

    def init(self, param: torch.Tensor, path: str = "") -> LeafState:
        """The state of the parameter at `path` before the first step: floating tensors named as in `state_names`.

        A parameter may have fewer than all of them.
        """
        return {}

    def at(self, step: int) -> CommHook:
        """The hook in force at synchronised step `step`; states that it doesn't name pass through unchanged.

        Its requests have the same shapes at every step.
        """
        return self

    def each(self, paths: Sequence[str], *, part: bool = False) -> Sequence[CommHook] | None:
        """The hook of each parameter at `paths`, if they differ; None if this one is for all.

        `part`: the model has other parameters too. All parameters of a bucket have the same hook.
        """
        return None

    def axes(self, axis: Axis) -> tuple[Axis, ...]:
        """The axes on which :meth:`reduce` requests collectives: `axis` itself, or parts of it
        (:func:`ltx.core.ranks.axis.inner`, :func:`ltx.core.ranks.axis.outer`).

        Ranks open them together when a plan is new. If there is one, a part, its ranks reduce among themselves: the
        step summary, with losses and weights, is reduced among them too.
        """
        return (axis,)

    def packing(self, dtype: torch.dtype, axis_size: int) -> Packing:
        """How gradients of `dtype` are packed and given to :meth:`reduce`, and what its result is of them."""
        return Packing(dtype, 1.0 / axis_size, 1.0 / axis_size)

    def reduce(self, inputs: BucketInput) -> Reduction:
        """Yield collective requests; return (the sum of all ranks' inputs, the next states)."""
        raise NotImplementedError(f"{type(self).__name__} must define reduce(inputs)")


C = TypeVar("C")


def around(
    field: str, base: type = CommHook, but: Collection[str] = ("reduce", "offers")
) -> Callable[[type[C]], type[C]]:
    """Decorate a class whose field `field` holds another value of the same `base`, which it wraps.

    Public members of `base` that the class (or a class between the two) doesn't define come from the wrapped value,
    except those in `but`; so do the fields of `offers`. So no member that is added to `base` later is forgotten. Hooks
    that the wrapped one's `at` and `each` give are wrapped, too.
    """
    own_fields = {f.name for f in fields(base)} if is_dataclass(base) else set[str]()

    def mark(cls: type[C]) -> type[C]:
        defined = {name for c in cls.__mro__[: cls.__mro__.index(base)] for name in vars(c)}.union(but, own_fields)
        for name, inherited in vars(base).items():
            if not name.startswith("_") and name not in defined:
                setattr(cls, name, _of_field(field, name, inherited))
        kind: Any = base._kind  # type: ignore[attr-defined]
        cls.offers = property(lambda self: kind(**{f.name: getattr(self, f.name) for f in fields(kind)}))  # type: ignore[attr-defined]
        return cls

    return mark


def _of_field(field: str, name: str, inherited: Any) -> Any:
    if inherited is CommHook.each:

        def each(self: Any, *args: Any, **kwargs: Any) -> list[Any] | None:
            found = getattr(self, field).each(*args, **kwargs)
            return None if found is None else [replace(self, **{field: hook}) for hook in found]

        return each
    if inherited is CommHook.at:
        return lambda self, step: replace(self, **{field: getattr(self, field).at(step)})
    if not callable(inherited):  # a property or a class variable
        return property(lambda self: getattr(getattr(self, field), name))

    @functools.wraps(inherited)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(getattr(self, field), name)(*args, **kwargs)

    return method


@dataclass(frozen=True)
class AllReduce(CommHook):
    """The exact mean over ranks, by a ring all-reduce: each rank sends 2(n-1)/n of the bucket.

    ḡ = sum_r g_r / n: each share is a gradient divided by n; the mean is their sum.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.

    Example:
        >>> import ltx
        >>> ltx.DDPStrategy(comm_hook=ltx.hooks.AllReduce()) == ltx.DDPStrategy(comm_hook="allreduce")
        True
    """

    reach: ClassVar[str] = "element"

    def reduce(self, inputs: BucketInput) -> Reduction:
        total = yield CollectiveRequest("psum", inputs.flat)
        return total, inputs.states


EXACT = AllReduce()


@dataclass(frozen=True)
class ExactSum(AllReduce):
    """The sum over ranks times `factor`. Second derivatives use it in a hook's place; for most hooks it is the mean."""

    factor: float

    def packing(self, dtype: torch.dtype, axis_size: int) -> Packing:
        return Packing(dtype, self.factor, self.factor)


# --- what follows from a hook's members -------------------------------------------------------------------------------


def stateful_hook(hook: CommHook) -> bool:
    """Whether a step needs communication state: the hook's tensors, or the count of steps."""
    return bool(hook.state_names) or hook.reads_step or hook.constant_after != 0


def shared_part(hook: CommHook, axis: Axis) -> Axis | None:
    """The part of `axis` whose ranks reduce among themselves; None if all ranks reduce together."""
    axes = hook.axes(axis)
    return axes[0] if len(axes) == 1 and axes[0] is not axis else None


def counts_as(hook: CommHook, axis_size: int) -> float:
    """Derivatives take the hook's result for the sum over ranks times this number. Raises if they can't."""
    require("derivative, hook", hook, "", axis_size)
    return cast(float, hook.packing(torch.float32, axis_size).counts_as)


def states_of(hook: CommHook, entries: LeafState) -> LeafState:
    """The part of a leaf's state that `hook` reads."""
    return {name: entries[name] for name in hook.state_names if name in entries}


def reduce_at_once(hook: CommHook, axis: Axis, inputs: BucketInput, kind: str = "bucket") -> Reduced:
    """Run one reduction to its end with differentiable collectives; recordings of simulated ranks call it a `kind`."""
    label = f"{kind} {inputs.bucket.index}"
    if simulated := axis.comm is None and axis.size > 1:
        comm.note_packed(kind, hook, inputs.bucket)
    request = reduction.advance(program := hook.reduce(inputs))
    while isinstance(request, reduction.Request):
        if isinstance(request, reduction.StartedWork):
            result = request.wait()
        else:
            size = (request.axis or axis).size
            if simulated and size > 1 and request.buffer.numel():
                sent = partial(comm.bytes_sent, request.operation, request.buffer, size)
                comm.note("simulated", request.operation, label, sent, size)
            result = reduction.answer_at_once(request, axis)
        request = reduction.advance(program, result)
    return cast(Reduced, request)
