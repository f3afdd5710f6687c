"""The contract of a communication hook: what is done to a bucket of gradients on its way over the network.

:mod:`ltx.hooks` has one compressor a file. The contract is here, below them, because plans and schedules use it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import chain
from typing import Any, ClassVar, TypeVar

import torch

from ltx.core.base.arguments import Offering, check_fields, follows
from ltx.core.base.errors import StrategyError
from ltx.core.base.needs import require
from ltx.core.base.readable import Readable
from ltx.core.gradients.reduction import (
    BucketInput,
    CollectiveRequest,
    LeafState,
    Program,
    Reduced,
    Reduction,
    Terms,
    answer_at_once,
    drive,
)
from ltx.core.ranks.axis import Axis


@dataclass(frozen=True)
class HookOffers:
    """The properties of a communication hook that plans, steps and checks read.

    Attributes:
        exact: the result is the mean up to rounding in the gradients' dtype. If it isn't, second derivatives use the
            exact mean.
        averages: the result approximates the sum of the ranks' shares. If it doesn't, the hook has no derivative, and
            can't compute another hook's sums.
        alike: all ranks get the same result, so that parameters stay the same on all ranks.
        elementwise: each element's result depends on that element alone, so that gradients of several samples can be
            reduced side by side (``vmap`` of ``grad`` between processes).
        needs_whole: the result for a parameter depends on the whole parameter (its rows and columns, its norm), or
            isn't known not to. Such a hook can't reduce DTensors, of which ranks hold parts.
        sums: it requests sums of floating numbers, which another hook may provide (:func:`ltx.hooks.chain`).
        gives_gradients: its result scales with the gradients, as a mean of them does. A step whose loss is a
            :class:`ltx.Weighted` divides the result by the sum of the weights, which comes later; a loss scale divides
            it too.
        state_names: the tensors of one parameter's state; empty for a hook without state.
        reads_step: ``reduce`` reads the number of steps so far, for randomness too. In a hook without state
            ``inputs.step`` raises unless this is True.
        constant_after: the number of steps after which ``at`` always returns the same hook; None if it keeps changing.
            A hook that defines ``at`` has to set it. Compiled graphs can hold the hook from that step on; in them
            ``reduce`` gets the step as a tensor, which is enough to draw random numbers.
        stateful: a step needs communication state: the hook's tensors, or the count of steps.
        bucket_factor: a bucket, the first excepted, holds this many times the bytes that the strategy says. It is more
            than 1 for hooks that send far less than the gradients: fewer and longer buffers cost them less.
        phases: the largest number of requests that ``reduce`` yields for a bucket. Each phase has a channel of its own,
            which ranks open together when a plan is new, since gradients come in different orders in the backward pass.
        phases_on: ``phases_on(axis_size)``, the number of phases on so many ranks.
        by_path: parameters have different hooks, which `each` returns. All parameters of a bucket have the same hook.
        within: ``within(axis)``, the part of `axis`, one of ``axes(axis)``, whose ranks reduce among themselves; None
            if all ranks reduce together. The step summary, with losses and weights, is reduced among the same ranks.
    """

    exact: bool = True
    averages: bool = True
    alike: bool = True
    elementwise: bool = False
    needs_whole: bool = False
    sums: bool = True
    gives_gradients: bool = True
    state_names: tuple[str, ...] = ()
    reads_step: bool = False
    constant_after: int | None = follows(lambda hook: 0 if type(hook).at is CommHook.at else None)
    stateful: bool = follows(lambda hook: bool(hook.state_names) or hook.reads_step or hook.constant_after != 0)
    bucket_factor: int = 1
    phases: int = 1
    phases_on: Callable[[int], int] = follows(lambda hook: lambda axis_size: hook.phases)
    by_path: bool = False
    within: Callable[[Axis], Axis | None] = follows(lambda hook: lambda axis: None)


@dataclass(frozen=True)
class CommHook(Offering[HookOffers], Readable, kind=HookOffers):
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

    def each(self, paths: Sequence[str], *, part: bool = False) -> Sequence[CommHook]:
        """The hook of each parameter at `paths`, if they differ; `part`: the model has other parameters too."""
        return [self] * len(paths)

    def with_error_feedback(self) -> CommHook | None:
        """The hook with error feedback (:func:`ltx.hooks.error_feedback`); None if the hook makes no error."""
        return None

    def axes(self, axis: Axis) -> tuple[Axis, ...]:
        """The parts of `axis` (:func:`ltx.core.ranks.axis.inner`, :func:`ltx.core.ranks.axis.outer`) on which
        :meth:`reduce` requests collectives.

        Ranks open them together when a plan is new.
        """
        return ()

    def cast(self, dtype: torch.dtype) -> CommHook | None:
        """The same hook with sums that are sent in `dtype` (:func:`ltx.hooks.cast`); None if a chain has to cast."""
        return None

    def scale(self, axis_size: int) -> float:
        """Gradients are multiplied by this number when they are packed; the step gets their sum over ranks."""
        return 1.0 / axis_size

    def derivative_scale(self, axis_size: int) -> float:
        """Derivatives take the result for the sum over ranks times this factor."""
        require("derivative, hook", self)
        return 1.0 / axis_size

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of `dtype` are packed and given to :meth:`reduce`."""
        return dtype

    def extra_terms(self, state: LeafState, axis_size: int) -> Terms:
        """Tensors of a parameter's state that are added to its gradient as it is packed, with their factors."""
        return ()

    def reduce(self, inputs: BucketInput) -> Reduction:
        """Yield collective requests; return (the sum of all ranks' inputs, the next states)."""
        raise NotImplementedError(f"{type(self).__name__} must define reduce(inputs)")


C = TypeVar("C")

#: Members that an outer hook doesn't copy from the hook inside: they are about the outer hook, or follow from its other
#: members.
_ITS_OWN = ("at", "cast", "with_error_feedback", "reduce", "stateful", "offers")


def around(field: str, base: type = CommHook, but: Collection[str] = _ITS_OWN) -> Callable[[type[C]], type[C]]:
    """Decorate a class whose field `field` holds another value of the same `base`, which it wraps.

    Public members of `base` that the class (or a class between the two) doesn't define come from the wrapped value,
    except those in `but`; so do the fields of `offers`. So no member that is added to `base` later is forgotten.
    """
    own_fields = {f.name for f in fields(base)} if is_dataclass(base) else set[str]()

    def mark(cls: type[C]) -> type[C]:
        defined = {name for c in cls.__mro__[: cls.__mro__.index(base)] for name in vars(c)}.union(but, own_fields)
        if "phases" in defined:
            defined.add("phases_on")  # which gives them
        for name, inherited in vars(base).items():
            if not name.startswith("_") and name not in defined:
                setattr(cls, name, _of_field(field, name, inherited))
        kind: Any = base._kind  # type: ignore[attr-defined]
        cls.offers = property(lambda self: kind(**{f.name: getattr(self, f.name) for f in fields(kind)}))  # type: ignore[attr-defined]
        return cls

    return mark


def _of_field(field: str, name: str, inherited: Any) -> Any:
    if inherited is CommHook.each:
        return lambda self, *args, **kwargs: [
            replace(self, **{field: hook}) for hook in getattr(self, field).each(*args, **kwargs)
        ]
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

    elementwise: ClassVar[bool] = True

    def reduce(self, inputs: BucketInput) -> Reduction:
        total = yield CollectiveRequest("psum", inputs.flat)
        return total, inputs.states


EXACT = AllReduce()


@dataclass(frozen=True)
class ExactSum(AllReduce):
    """The sum over ranks times `factor`. Second derivatives use it in a hook's place; for most hooks it is the mean."""

    factor: float

    def scale(self, axis_size: int) -> float:
        return self.factor

    def derivative_scale(self, axis_size: int) -> float:
        return self.factor


def states_of(hook: CommHook, entries: LeafState) -> LeafState:
    """The part of a leaf's state that `hook` reads."""
    return {name: entries[name] for name in hook.state_names if name in entries}


def program_of(hook: CommHook, inputs: BucketInput) -> Program:
    return Program(hook.reduce(inputs), [inputs.flat, *chain.from_iterable(map(dict.values, inputs.states))])


def reduce_at_once(hook: CommHook, axis: Axis, inputs: BucketInput) -> Reduced:
    """Run one reduction to its end with differentiable collectives: a readable reference for the schedules."""
    return drive(hook.reduce(inputs), lambda request: answer_at_once(request, axis))


def unchanging(hook: CommHook, step: int) -> CommHook:
    """The hook that a graph compiled at `step` can hold in place of `hook`."""
    require("graph, hook or strategy", hook, f"a graph that is compiled at step {step}", step)
    return hook.at(step)
