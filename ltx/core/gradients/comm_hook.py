"""The contract of a communication hook: what is done to a bucket of gradients on its way over the network.

:mod:`ltx.hooks` has one compressor a file. The contract is here, below them, because plans and schedules use it. So is
what its members say about a bucket's flat buffer: packing gradients into it, unpacking, and chunks of it.

On the CPU several passes over a chunk that stays in the cache cost little more than one pass over memory, so hooks work
on eager tensors there in :func:`chunks`. On other devices, where a call costs more than a small tensor, under
transforms and in compiled graphs hooks work on a whole buffer at once, and read no values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, ClassVar, TypeVar, cast

import torch

from ltx.core import comm
from ltx.core.base import private, traced
from ltx.core.base.arguments import Offering, check_fields, follows
from ltx.core.base.errors import StrategyError
from ltx.core.base.needs import require
from ltx.core.base.readable import Readable
from ltx.core.gradients.reduction import (
    Bucket,
    BucketInput,
    CollectiveRequest,
    LeafState,
    Packing,
    Program,
    Reduced,
    Reduction,
    Terms,
    answer_at_once,
    drive,
)
from ltx.core.ranks.axis import Axis

#: What hooks were asked before, and what says it now.
GONE = {
    **dict.fromkeys(("scale", "wire_dtype", "extra_terms"), "packing(dtype, axis_size)"),
    **dict.fromkeys(("averages", "derivative_scale"), "packing(dtype, axis_size), whose counts_as may be None"),
    "by_path": "each(paths), which returns None if all have the same hook",
    "cast": "a row of ltx.hooks.combined.in_half",
    "phases_on": "phases, which may be a method, phases(axis_size)",
    "stateful": "state_names, reads_step and constant_after",
    "with_error_feedback": "a row of ltx.hooks.lossy.with_error_feedback",
    "within": "axes(axis), of which there is one then",
}


@dataclass(frozen=True)
class HookOffers:
    """The properties of a communication hook that plans, steps and checks read.

    Attributes:
        exact: the result is the mean up to rounding in the gradients' dtype. If it isn't, second derivatives use the
            exact mean.
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
        bucket_factor: a bucket, the first excepted, holds this many times the bytes that the strategy says. It is more
            than 1 for hooks that send far less than the gradients: fewer and longer buffers cost them less.
        phases: the largest number of requests that ``reduce`` yields for a bucket, or a function of the number of ranks
            that gives it. Each phase has a channel of its own, which ranks open together when a plan is new, since
            gradients come in different orders in the backward pass.
    """

    exact: bool = True
    alike: bool = True
    elementwise: bool = False
    needs_whole: bool = False
    sums: bool = True
    gives_gradients: bool = True
    state_names: tuple[str, ...] = ()
    reads_step: bool = False
    constant_after: int | None = follows(lambda hook: 0 if type(hook).at is CommHook.at else None)
    bucket_factor: int = 1
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

#: Members that an outer hook doesn't copy from the hook inside: they are about the outer hook.
_ITS_OWN = ("at", "reduce", "offers")


def around(field: str, base: type = CommHook, but: Collection[str] = _ITS_OWN) -> Callable[[type[C]], type[C]]:
    """Decorate a class whose field `field` holds another value of the same `base`, which it wraps.

    Public members of `base` that the class (or a class between the two) doesn't define come from the wrapped value,
    except those in `but`; so do the fields of `offers`. So no member that is added to `base` later is forgotten.
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

    def packing(self, dtype: torch.dtype, axis_size: int) -> Packing:
        return Packing(dtype, self.factor, self.factor)


# --- what follows from a hook's members -------------------------------------------------------------------------------


def stateful_hook(hook: CommHook) -> bool:
    """Whether a step needs communication state: the hook's tensors, or the count of steps."""
    return bool(hook.state_names) or hook.reads_step or hook.constant_after != 0


def phases_on(hook: CommHook, axis_size: int) -> int:
    """The number of the hook's phases on so many ranks."""
    phases: int | Callable[[int], int] = hook.phases
    return phases(axis_size) if callable(phases) else phases


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


def program_of(hook: CommHook, inputs: BucketInput) -> Program:
    return Program(hook.reduce(inputs), [inputs.flat, *chain.from_iterable(map(dict.values, inputs.states))])


def reduce_at_once(hook: CommHook, axis: Axis, inputs: BucketInput, kind: str = "bucket") -> Reduced:
    """Run one reduction to its end with differentiable collectives: a readable reference for the schedules.

    A recording counts what the first simulated rank would send; processes' collectives count themselves. `kind`: the
    word for the bucket in it.
    """
    label = f"{kind} {inputs.bucket.index}"
    simulated = axis.comm is None and axis.size > 1

    def answer(request: CollectiveRequest) -> torch.Tensor:
        size = (request.axis or axis).size
        if simulated and size > 1 and request.buffer.numel():
            sent = partial(comm.bytes_sent, request.operation, request.buffer, size)
            comm.note("simulated", request.operation, label, sent, size)
        return answer_at_once(request, axis)

    if simulated:
        comm.note_packed(kind, hook, inputs.bucket)
    return drive(hook.reduce(inputs), answer)


def unchanging(hook: CommHook, step: int) -> CommHook:
    """The hook that a graph compiled at `step` can hold in place of `hook`."""
    who = f"a graph that is compiled at step {step}"
    require("graph, hook or strategy", hook, who, step, hook.constant_after)
    return hook.at(step)


# --- a bucket's flat buffer -------------------------------------------------------------------------------------------

#: The types of devices on which eager tensors are processed piece by piece. Tests empty it, so that the CPU takes the
#: accelerators' path.
IN_PIECES = frozenset({"cpu"})


def pack(
    grads: Sequence[torch.Tensor],
    bucket: Bucket,
    hook: CommHook,
    axis_size: int,
    states: Sequence[LeafState],
    batch: Sequence[int] = (),
    empty: Callable[[tuple[int, ...], torch.dtype, torch.device], torch.Tensor] | None = None,
) -> torch.Tensor:
    """A flat buffer of shape ``(*batch, numel)``: the gradients times the hook's scale, plus its extra terms.

    It reads large gradients only once. `empty` provides the buffer; without it the buffer is new.
    """
    wire_dtype, scale, _, terms = hook.packing(bucket.dtype, axis_size)
    shape = (*batch, bucket.numel)
    if empty is None:
        flat = torch.empty(shape, dtype=wire_dtype, device=bucket.device)
    else:
        flat = empty(shape, wire_dtype, bucket.device)
    if bucket.device.type not in IN_PIECES:
        _pack_by_foreach(grads, flat, bucket, scale, list(map(terms, states)))
        return flat
    start = 0
    for first, end in bucket.runs:
        stop = start + sum(bucket.sizes[first:end])
        part = flat[..., start:stop]
        start = stop
        if end - first > 1 and not batch and wire_dtype == bucket.dtype and not any(states[first:end]):
            alike = [g.reshape(-1) for g in grads[first:end]] if bucket.folded else list(grads[first:end])
            torch.cat(alike, out=part).mul_(scale)
        else:
            sizes = bucket.sizes[first:end]
            for grad, own, state in zip(grads[first:end], part.split(sizes, -1), states[first:end], strict=True):
                _pack_one(grad, own.view(grad.shape), scale, terms(state))
    return flat


def _pack_by_foreach(
    grads: Sequence[torch.Tensor], flat: torch.Tensor, bucket: Bucket, scale: float, extra_terms: Sequence[Terms]
) -> None:
    """:func:`pack` by few kernels, plus one for each gradient that isn't contiguous."""
    if flat.ndim == 1:
        views = list(private.parts_like(flat, grads))
    else:
        views = [part.view(grad.shape) for part, grad in zip(flat.split(bucket.sizes, -1), grads, strict=True)]
    wider = flat.dtype.itemsize - bucket.dtype.itemsize
    # A single gradient with other strides (channels last) would make torch copy all of them one by one.
    alike = [place for place, grad in enumerate(grads) if grad.is_contiguous()]
    if alike:
        to, given = [views[place] for place in alike], [grads[place] for place in alike]
        # If the dtype becomes narrower, scale before rounding, or numbers might overflow.
        torch._foreach_copy_(to, given if wider >= 0 or scale == 1 else torch._foreach_mul(given, scale))
        if wider >= 0 and scale != 1:
            torch._foreach_mul_(to if len(alike) < len(views) else [flat], scale)
    for place in set(range(len(views))).difference(alike):
        if wider > 0:
            views[place].copy_(grads[place]).mul_(scale)
        else:
            torch.mul(grads[place], scale, out=views[place])
    added: dict[tuple[int, float], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for view, terms in zip(views, extra_terms, strict=True):
        for place, (term, times) in enumerate(terms):  # all leaves' first terms, then all second terms, ...
            to, what = added.setdefault((place, times), ([], []))
            to.append(view)
            what.append(term)
    for (_, times), (to, what) in added.items():
        torch._foreach_add_(to, what, alpha=times)


def _pack_one(grad: torch.Tensor, view: torch.Tensor, scale: float, extra_terms: Terms) -> None:
    # A linear layer's weight gradient comes transposed: copy_ has a blocked kernel for that, torch.mul hasn't. If the
    # dtype becomes wider, scale in the wider one.
    copied = view.dtype.itemsize > grad.dtype.itemsize or (view.dtype == grad.dtype and not grad.is_contiguous())
    given = view.copy_(grad) if copied else grad
    if extra_terms:
        view.copy_(_packed(given, scale, extra_terms))
    else:
        torch.mul(given, scale, out=view)


def pack_pure(
    grads: Sequence[torch.Tensor], bucket: Bucket, hook: CommHook, axis_size: int, states: Sequence[LeafState]
) -> torch.Tensor:
    """:func:`pack` without in-place operations, for vmap and compiled graphs."""
    wire_dtype, scale, _, terms = hook.packing(bucket.dtype, axis_size)
    parts = []
    for grad, state in zip(grads, states, strict=True):
        wide = grad.to(wire_dtype) if wire_dtype.itemsize > grad.dtype.itemsize else grad
        parts.append(_packed(wide, scale, terms(state)).to(wire_dtype).reshape(-1))
    return torch.cat(parts)


def _packed(grad: torch.Tensor, scale: float, extra_terms: Terms) -> torch.Tensor:
    if not extra_terms:
        return grad * scale
    (first, times), *others = extra_terms
    if scale == 1 and times != 1:
        part = plus(grad, first, times)
    else:
        part = plus(first if times == 1 else first * times, grad, scale)
    for term, times in others:
        part = plus(part, term, times)
    return part


def plus(x: torch.Tensor, y: torch.Tensor, times: float) -> torch.Tensor:
    """x + times y, in one pass, by the same kernel as ``torch.add(x, y, alpha=times)``.

    Inductor (torch 2.13) makes an addmm of ``torch.add(x, a @ b, alpha=times)``, and drops `times`.
    """
    return torch.sub(x, y, alpha=-times)


def unpack(flat: torch.Tensor, bucket: Bucket, cast: bool = True) -> list[torch.Tensor]:
    """The parts of a flat buffer of shape ``(*batch, numel)`` in their parameters' shapes; views without a batch.

    `cast`: convert to the parameters' dtype; else keep the buffer's.
    """
    if flat.ndim == 0 or flat.shape[-1] != bucket.numel:
        raise StrategyError(
            f"a hook's reduce returned a buffer of shape {list(flat.shape)} for bucket {bucket.index}: expected "
            f"{bucket.numel} elements, as inputs.flat has. Cut off what was padded."
        )
    batch, parts = flat.shape[:-1], list((flat.to(bucket.dtype) if cast else flat).split(bucket.sizes, dim=-1))
    for place in range(len(parts)) if batch else bucket.folded:
        parts[place] = parts[place].reshape((*batch, *bucket.leaves[place].shape))
    return parts


def is_plain(x: torch.Tensor) -> bool:
    """Whether `x` is an eager CPU tensor under no transform, for which there is a faster path."""
    return x.device.type in IN_PIECES and _is_eager(x)


def prefers_few_calls(x: torch.Tensor) -> bool:
    """Whether `x` is an eager tensor on an accelerator, where one call for many tensors is faster."""
    return x.device.type not in IN_PIECES and x.device.type != "meta" and _is_eager(x)


def _is_eager(x: torch.Tensor) -> bool:
    return not (traced.recording() or private.in_transform() or type(x) is not torch.Tensor)


#: The length of a chunk. ``benchmarks.codecs`` tried 2^15 to 2^20: shorter chunks need too many calls, longer ones
#: and what is made of them don't fit into a cache of 2 MB.
CHUNK = 1 << 17


def chunks(length: int, width: int = 1) -> Iterator[slice]:
    """Slices of `length` rows of `width` numbers, each of at most a chunk and at least one row."""
    step = max(1, CHUNK // width)
    return (slice(start, min(start + step, length)) for start in range(0, length, step))
