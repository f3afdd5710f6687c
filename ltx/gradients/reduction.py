"""Reductions: what a communication hook does with a bucket, written once for every kind of axis.

A reduction is a generator. It yields a :class:`CollectiveRequest` wherever it needs the network and is sent the result;
it returns the reduced buffer and the next state. Its driver decides how: asynchronously between processes with other
buckets in between, at once on simulated ranks, or as nodes of a compiled graph.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from ltx.axis import Axis
from ltx.collectives.linear import Static, apply
from ltx.errors import UnsupportedError
from ltx.gradients.buckets import Bucket

#: One parameter's communication state: tensors by name.
LeafState = dict[str, torch.Tensor]

#: Tensors, and what each is multiplied by in a sum.
Terms = Sequence[tuple[torch.Tensor, float]]


@dataclass(eq=False)
class CollectiveRequest:
    """A collective that a reduction waits for.

    Attributes:
        operation: "psum", "all_gather" (gives a new first dimension), "psum_scatter" (takes the first dimension),
            "all_to_all" (row i of the first dimension goes to rank i, and row i comes from rank i), "ppermute" (as
            `arguments` say; zeros come where no rank sends).
        buffer: contiguous; the driver may overwrite it.
        arguments: of a permutation: source, destination, source, ...
        axis: the ranks of the collective, if not all: a part of the input's axis, which the hook names in its `axes`.
        sent: set by a hook that answers a sum with less than the sum: returns what it took of `buffer`.
    """

    operation: str
    buffer: torch.Tensor
    sent: Callable[[], torch.Tensor] | None = None
    arguments: Static = ()
    axis: Axis | None = None


@dataclass(frozen=True)
class BucketInput:
    """A bucket's gradients on this rank, divided by the number of ranks: the sum over ranks is the mean gradient.

    Attributes:
        flat: all of them, in the hook's wire dtype, with the hook's extra terms added; the hook may overwrite it.
        bucket: shapes and sizes of the parameters in it.
        axis_size: the number of ranks.
        rank: this rank's place among them; on simulated ranks a 0-dim tensor.
        states: the state of each parameter of the bucket, in the bucket's order.
        step: the number of synchronised steps before this one; in compiled graphs a 0-dim tensor.
        last: whether no bucket comes after this one.
        axis: the ranks; None in a reduction on its own.
        update: for a hook that updates parameters in its reduction
            (:class:`ltx.strategies.post_update.PostUpdateHook`): from reduced gradients to what this rank's optimizer
            makes of the parameters.
    """

    flat: torch.Tensor
    bucket: Bucket
    axis_size: int
    rank: int | torch.Tensor = 0
    states: Sequence[LeafState] = ()
    step: int | torch.Tensor = 0
    last: bool = True
    axis: Axis | None = None
    update: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] | None = None


#: Yields asks, is sent their results, returns (sum of the shares, next states).
Reduction = Generator[CollectiveRequest, torch.Tensor, tuple[torch.Tensor, Sequence[LeafState]]]


def sum_of_shares(inputs: BucketInput) -> Reduction:
    """The exact mean: the sum of all ranks' inputs."""
    total = yield CollectiveRequest("psum", inputs.flat)
    return total, inputs.states


class Reducer(Protocol):
    """What a schedule needs of a communication hook; :class:`ltx.hooks.CommHook` is the full contract."""

    def __hash__(self) -> int: ...

    @property
    def exact(self) -> bool:
        """Whether the result is the sum of the inputs up to rounding in their own dtype."""
        ...

    @property
    def elementwise(self) -> bool:
        """Whether each element's result depends on that element alone, so that samples may share a buffer."""
        ...

    @property
    def stateful(self) -> bool:
        """Whether a reduction reads states or the step."""
        ...

    @property
    def bucket_factor(self) -> int:
        """What a strategy's bytes of a bucket, the first excepted, are multiplied by."""
        ...

    def axes(self, axis: Axis) -> tuple[Axis, ...]:
        """The parts of `axis` on which a reduction requests collectives."""
        ...

    def within(self, axis: Axis) -> Axis | None:
        """The part of `axis` that a reduction stays in; None for all ranks."""
        ...

    def phases_on(self, axis_size: int) -> int:
        """The largest number of requests that a reduction yields."""
        ...

    def scale(self, axis_size: int) -> float:
        """The factor of gradients when they are packed: 1 / axis_size for a mean."""
        ...

    def derivative_scale(self, axis_size: int) -> float:
        """The factor of the sum over ranks in derivatives of the result: 1 / axis_size for a mean."""
        ...

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of `dtype` are packed."""
        ...

    def extra_terms(self, state: LeafState, axis_size: int) -> Terms:
        """Tensors of a parameter's state that are added to its gradient as it is packed, with their factors."""
        ...

    def output_bucket(self, bucket: Bucket, axis_size: int) -> Bucket:
        """The shapes that come out of an exchange of `bucket`."""
        ...

    def reduce(self, inputs: BucketInput) -> Reduction:
        """The reduction of one bucket."""
        ...


@dataclass(frozen=True)
class ExactSum:
    """The sum over ranks times `factor`: what a hook counts as in second derivatives, for most hooks the mean."""

    factor: float

    exact = True
    elementwise = True
    stateful = False
    bucket_factor = 1

    def axes(self, axis: Axis) -> tuple[Axis, ...]:
        """All ranks at once."""
        return ()

    def within(self, axis: Axis) -> None:
        """All ranks."""

    def scale(self, axis_size: int) -> float:
        """Shares of the sum."""
        return self.factor

    def phases_on(self, axis_size: int) -> int:
        """One sum."""
        return 1

    def derivative_scale(self, axis_size: int) -> float:
        """Itself."""
        return self.factor

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Gradients travel as they are."""
        return dtype

    def extra_terms(self, state: LeafState, axis_size: int) -> Terms:
        """Nothing."""
        return ()

    def output_bucket(self, bucket: Bucket, axis_size: int) -> Bucket:
        """The shapes that came in."""
        return bucket

    def reduce(self, inputs: BucketInput) -> Reduction:
        """Sum the shares."""
        return sum_of_shares(inputs)


def _collective(request: CollectiveRequest, axis: Axis) -> torch.Tensor:
    axis = request.axis or axis
    if axis.meta:
        return axis.meta.answer(request.operation, request.buffer, request.arguments, axis.size)
    static = request.arguments if request.operation == "ppermute" else _STATIC[request.operation]
    return apply(request.operation, static, axis, [request.buffer])[0]


def collective_alone(request: CollectiveRequest) -> torch.Tensor:
    """What a collective among one rank gives."""
    return _collective(replace(request, axis=Axis("alone", 1)), Axis("alone", 1))


_STATIC: dict[str, Static] = {"psum": (), "all_gather": (0, 0), "psum_scatter": (0, 0), "all_to_all": (0, 0)}


def pack(
    grads: Sequence[torch.Tensor],
    bucket: Bucket,
    hook: Reducer,
    axis_size: int,
    states: Sequence[LeafState],
    batch: Sequence[int] = (),
    empty: Callable[[tuple[int, ...], torch.dtype, torch.device], torch.Tensor] | None = None,
) -> torch.Tensor:
    """A flat buffer of shape ``(*batch, numel)``: the gradients times the hook's scale, plus its extra terms.

    It makes one pass over large gradients. `empty` provides the buffer, if it isn't to be a new one.
    """
    wire_dtype, scale = hook.wire_dtype(bucket.dtype), hook.scale(axis_size)
    shape = (*batch, bucket.numel)
    if empty is None:
        flat = torch.empty(shape, dtype=wire_dtype, device=bucket.device)
    else:
        flat = empty(shape, wire_dtype, bucket.device)
    refuse_sparse(grads)
    start = 0
    for first, end in bucket.runs:
        stop = start + sum(bucket.sizes[first:end])
        part = flat[..., start:stop]
        start = stop
        if end - first > 1 and not batch and wire_dtype == bucket.dtype and not any(states[first:end]):
            torch.cat([g if g.ndim == 1 else g.reshape(-1) for g in grads[first:end]], out=part).mul_(scale)
        else:
            sizes = bucket.sizes[first:end]
            for grad, own, state in zip(grads[first:end], part.split(sizes, -1), states[first:end], strict=True):
                _pack_one(grad, own.view(grad.shape), scale, hook.extra_terms(state, axis_size))
    return flat


def refuse_sparse(grads: Sequence[torch.Tensor]) -> None:
    """Raise unless all gradients are dense."""
    for grad in grads:
        if grad.layout is not torch.strided:
            raise UnsupportedError(
                f"a gradient of shape {list(grad.shape)} has layout {grad.layout}, and buckets hold dense ones. Use "
                "nn.Embedding(sparse=False), or ltx.sync_gradients on the local gradients."
            )


def _pack_one(grad: torch.Tensor, view: torch.Tensor, scale: float, extra_terms: Terms) -> None:
    # A linear layer's weight gradient comes transposed, for which copy_ has a blocked kernel and others haven't.
    transposed = view.dtype == grad.dtype and not grad.is_contiguous()
    given = view.copy_(grad) if transposed else grad
    if not extra_terms:
        torch.mul(given, scale, out=view)
        return
    (first, times), *others = extra_terms
    if times == 1:
        torch.add(first, given, alpha=scale, out=view)
    elif scale == 1:
        torch.add(given, first, alpha=times, out=view)
    elif transposed:
        torch.add(first * times, given, alpha=scale, out=view)
    else:
        torch.mul(first, times, out=view).add_(given, alpha=scale)
    for term, times in others:
        view.add_(term, alpha=times)


def pack_pure(
    grads: Sequence[torch.Tensor], bucket: Bucket, hook: Reducer, axis_size: int, states: Sequence[LeafState]
) -> torch.Tensor:
    """:func:`pack` without writing into anything, for vmap and for compiled graphs."""
    wire_dtype, scale = hook.wire_dtype(bucket.dtype), hook.scale(axis_size)
    parts = []
    for grad, state in zip(grads, states, strict=True):
        parts.append(_packed(grad, scale, hook.extra_terms(state, axis_size)).to(wire_dtype).reshape(-1))
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


def unpack(flat: torch.Tensor, bucket: Bucket) -> list[torch.Tensor]:
    """The parts of a flat buffer as views in their parameters' shapes and dtype."""
    return parts_of(flat.to(bucket.dtype), bucket)


def parts_of(flat: torch.Tensor, bucket: Bucket) -> list[torch.Tensor]:
    """The parts of a flat buffer of shape ``(*batch, numel)`` in their parameters' shapes; views without a batch."""
    batch, parts = flat.shape[:-1], flat.split(bucket.sizes, dim=-1)
    return [
        part if len(leaf.shape) == 1 and not batch else part.reshape((*batch, *leaf.shape))
        for part, leaf in zip(parts, bucket.leaves, strict=True)
    ]


def is_plain(x: torch.Tensor) -> bool:
    """Whether `x` is an eager tensor on the CPU that no transform looks at: those are worth a path of their own."""
    return x.device.type == "cpu" and not (
        torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or type(x) is not torch.Tensor
    )


def reduce_at_once(
    hook: Reducer,
    axis: Axis,
    inputs: BucketInput,
    collective: Callable[[CollectiveRequest], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, Sequence[LeafState]]:
    """Drive one reduction to its end with differentiable collectives: the readable reference for the scheduler."""
    answer = collective or (lambda request: _collective(request, axis))
    reduction = hook.reduce(inputs)
    try:
        request = next(reduction)
        while True:
            request = reduction.send(answer(request))
    except StopIteration as end:
        flat, states = end.value
        return flat, states
