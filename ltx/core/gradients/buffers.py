"""A bucket's flat buffer: packing gradients into it, unpacking, and chunks of it.

On eager tensors of the CPU hooks work in :func:`chunks`, which stay in the cache. On other devices, under transforms
and in compiled graphs they work on a whole buffer at once, and read no values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from operator import methodcaller, not_

import torch

from ltx.core.base import private, traced
from ltx.core.base.errors import StrategyError
from ltx.core.gradients.comm_hook import CommHook
from ltx.core.gradients.reduction import Bucket, LeafState, Terms

#: Types of devices on which eager tensors are processed by pieces. Tests empty it: the CPU takes accelerators' path.
IN_PIECES = frozenset({"cpu"})
_FLAT = methodcaller("reshape", -1)


def pack(
    grads: Sequence[torch.Tensor],
    bucket: Bucket,
    hook: CommHook,
    axis_size: int,
    states: Sequence[LeafState],
    batch: Sequence[int] = (),
    empty: Callable[[tuple[int, ...], torch.dtype, torch.device], torch.Tensor] | None = None,
) -> torch.Tensor:
    """A flat buffer, ``(*batch, numel)``, new or `empty`'s: gradients times the hook's scale, plus its extra terms."""
    wire_dtype, scale, _, terms, *_ = hook.packing(bucket.dtype, axis_size)
    shape = (*batch, bucket.numel)
    if empty is None:
        flat = torch.empty(shape, dtype=wire_dtype, device=bucket.device)
    else:
        flat = empty(shape, wire_dtype, bucket.device)
    if bucket.device.type not in IN_PIECES:
        _pack_by_foreach(grads, flat, bucket, scale, [*map(terms, states)] if any(states) else ())
        return flat
    start = 0
    for first, end in bucket.runs:
        stop = start + sum(bucket.sizes[first:end])
        part = flat[..., start:stop]
        start = stop
        if end - first > 1 and not batch and wire_dtype == bucket.dtype and not any(states[first:end]):
            alike = map(_FLAT, grads[first:end]) if bucket.folded else grads[first:end]
            torch.cat([*alike], out=part).mul_(scale)
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
    alike = [*map(torch.Tensor.is_contiguous, grads)]
    if any(alike):
        to, given = [*compress(views, alike)], [*compress(grads, alike)]
        # If the dtype becomes narrower, scale before rounding, or numbers might overflow.
        torch._foreach_copy_(to, given if wider >= 0 or scale == 1 else torch._foreach_mul(given, scale))
        if wider >= 0 and scale != 1:
            torch._foreach_mul_([flat] if all(alike) else to, scale)
    for view, grad in compress(zip(views, grads, strict=True), map(not_, alike)):
        if wider > 0:
            view.copy_(grad).mul_(scale)
        else:
            torch.mul(grad, scale, out=view)
    added: dict[tuple[int, float], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for view, terms in zip(views, extra_terms, strict=bool(extra_terms)):
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
    wire_dtype, scale, _, terms, *_ = hook.packing(bucket.dtype, axis_size)
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
    """``torch.add(x, y, alpha=times)``, of which Inductor (torch 2.13) drops `times` if y is a matrix product."""
    return torch.sub(x, y, alpha=-times)


def unpack(flat: torch.Tensor, bucket: Bucket, cast: bool = True) -> list[torch.Tensor]:
    """The parts of ``(*batch, numel)`` in their parameters' shapes (`cast`: and dtypes); views without a batch."""
    if flat.ndim == 0 or flat.shape[-1] != bucket.numel:
        raise StrategyError(
            f"a hook's reduce returned a buffer of shape {list(flat.shape)} for bucket {bucket.index}: expected "
            f"{bucket.numel} elements, as inputs.flat has. Cut off what was padded."
        )
    batch, parts = flat.shape[:-1], list((flat.to(bucket.dtype) if cast else flat).split_with_sizes(bucket.sizes, -1))
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
