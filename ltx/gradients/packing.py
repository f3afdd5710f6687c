"""Packing: from a bucket's gradients to one flat buffer, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ltx.errors import UnsupportedError
from ltx.gradients.buckets import Bucket
from ltx.gradients.reduction import LeafState, Reducer, Terms


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
    if bucket.device.type != "cpu":
        _pack_by_foreach(grads, flat, bucket, scale, [hook.extra_terms(state, axis_size) for state in states])
        return flat
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


def _pack_by_foreach(
    grads: Sequence[torch.Tensor], flat: torch.Tensor, bucket: Bucket, scale: float, extra_terms: Sequence[Terms]
) -> None:
    """:func:`pack` in few kernels: on an accelerator a call costs more than a small copy."""
    views = [part.view(grad.shape) for part, grad in zip(flat.split(bucket.sizes, -1), grads, strict=True)]
    if flat.dtype.itemsize >= bucket.dtype.itemsize:
        torch._foreach_copy_(views, list(grads))
        flat.mul_(scale)
    else:  # scaled before it is rounded, or it might overflow
        torch._foreach_copy_(views, torch._foreach_mul(list(grads), scale))
    for terms in zip(*extra_terms, strict=True):  # the first of every leaf, the second, ...
        torch._foreach_add_(views, [term for term, _ in terms], alpha=terms[0][1])


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
