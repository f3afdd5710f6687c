"""Collectives on process groups.

Only this file calls a collective of torch.distributed. Every call is asynchronous and works on contiguous buffers that
the caller has made for it. :mod:`ltx.core.comm.operations` lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ltx.core.base import private
from ltx.core.comm.backends import is_gloo

_VMAP_KNOWS_VIEW = torch._C._dispatch_has_kernel_for_dispatch_key("aten::view.dtype", "FuncTorchBatched")


class _View(torch.autograd.Function):
    """``x.view(dtype)`` under vmap, which has no rule for it in torch 2.11."""

    @staticmethod
    def forward(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return x.view(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
        return view_as(x.movedim(in_dims[0], 0).contiguous(), dtype), 0


def view_as(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bits of `x` as numbers of `dtype`, as ``x.view(dtype)`` has them; without a gradient."""
    if _VMAP_KNOWS_VIEW or not private.is_wrapped(x):
        return x.view(dtype)
    viewed: torch.Tensor = _View.apply(x, dtype)  # type: ignore[no-untyped-call]
    return viewed


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The bytes of each element, in one more dimension at the end; a view."""
    return view_as(x.resolve_conj().resolve_neg().unsqueeze(-1), torch.uint8)


def from_bytes(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Inverse of :func:`as_bytes`."""
    return view_as(x, dtype).squeeze(-1)


# torch 2.13 has the pair *_single and warns about *_tensor; 2.11 has only *_tensor.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


#: Static arguments of an operation.
Arguments = tuple[int, ...]
#: The work that was started, the buffer that it completes, and how that becomes the value.
Started = tuple[Any, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]


def as_it_is(completed: torch.Tensor) -> torch.Tensor:
    """The completed buffer is the result."""
    return completed


def summable(buffer: torch.Tensor) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """`buffer` in a dtype that every backend can sum, and what makes a sum of it one of `buffer`'s dtype."""
    if buffer.dtype is torch.int16:  # which neither gloo nor NCCL knows
        return buffer.int(), torch.Tensor.short
    if buffer.is_complex():  # which NCCL doesn't know; a sum of complex numbers is one of their parts
        return torch.view_as_real(buffer.resolve_conj()), torch.view_as_complex
    return buffer, as_it_is


def all_reduce(op: Any) -> Callable[[dist.ProcessGroup, torch.Tensor, Arguments], Started]:
    def start(group: dist.ProcessGroup, buffer: torch.Tensor, _: Arguments) -> Started:
        given, restored = summable(buffer)
        return dist.all_reduce(given, op, group=group, async_op=True), given, restored

    return start


# gloo sends a message whole, and may receive one meanwhile or not: on a link of 100 Mbit/s an exchange of 20 MB each
# way took 1.8 times as long as an all-reduce that sends as much, 1.1 times in pieces of 4 MB, 0.98 in ones of 512 kB.
_MESSAGE_BYTES = 1 << 19


class Works:
    """Several works of torch, waited for as one."""

    def __init__(self, works: list[Any]):
        self._works = works

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self, *timeout: timedelta) -> None:
        for work in self._works:
            work.wait(*timeout)

    def get_future(self) -> Any:
        """The last one's: they complete in order."""
        return self._works[-1].get_future()


def _messages(group: dist.ProcessGroup, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`x` in parts of nearly equal length along its last dimension, each of which goes to a peer in one message."""
    length = x.shape[-1]
    count = -(-length * x.itemsize // _MESSAGE_BYTES) if is_gloo(group) else 1
    parts: tuple[torch.Tensor, ...] = x.split(-(-length // max(1, count)), -1)
    return parts


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Inverse of :func:`_messages`, without a copy of a single part."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def all_gather(group: dist.ProcessGroup, buffer: torch.Tensor, _: Arguments) -> Started:
    size, given = group.size(), _messages(group, buffer.flatten())
    taken = [part.new_empty((size, part.numel())) for part in given]
    both = zip(taken, given, strict=True)
    works = [_all_gather(out.flatten(), part, group=group, async_op=True) for out, part in both]
    return Works(works), buffer, lambda buffer: _joined(taken).view(size, *buffer.shape)


def psum_scatter(group: dist.ProcessGroup, buffer: torch.Tensor, arguments: Arguments) -> Started:
    if is_gloo(group):  # whose own is an all-reduce of everything, of which it keeps a part
        work, rows, finish = all_to_all(group, as_bytes(buffer), arguments)
        return work, rows, lambda rows: from_bytes(finish(rows), buffer.dtype).sum(0, dtype=buffer.dtype)
    given, restored = summable(buffer)
    out = given.new_empty(given.shape[1:])
    return _reduce_scatter(out.view(-1), given.view(-1), group=group, async_op=True), out, restored


def broadcast(group: dist.ProcessGroup, buffer: torch.Tensor, arguments: Arguments) -> Started:
    return dist.broadcast(buffer, group_src=arguments[0], group=group, async_op=True), buffer, as_it_is


def all_to_all(group: dist.ProcessGroup, buffer: torch.Tensor, _: Arguments) -> Started:
    given = [part.contiguous() for part in _messages(group, buffer.reshape(group.size(), -1))]
    taken = [torch.empty_like(part) for part in given]
    both = zip(taken, given, strict=True)
    works = [dist.all_to_all_single(out, part, group=group, async_op=True) for out, part in both]
    return Works(works), buffer, lambda buffer: _joined(taken).view(buffer.shape)


def ppermute(group: dist.ProcessGroup, buffer: torch.Tensor, arguments: Arguments) -> Started:
    out = torch.empty_like(buffer) if group.rank() in arguments[1::2] else torch.zeros_like(buffer)
    works = []
    for taken, given in zip(_messages(group, out.flatten()), _messages(group, buffer.flatten()), strict=True):
        sent, received = permuted_splits(arguments, group.rank(), group.size(), given.numel())
        flat = (taken[: sum(received)], given[: sum(sent)])
        works.append(dist.all_to_all_single(*flat, received, sent, group=group, async_op=True))
    return Works(works), out, as_it_is


def gather(group: dist.ProcessGroup, buffer: torch.Tensor, arguments: Arguments) -> Started:
    size, taken, works = group.size(), [], []
    for given in _messages(group, buffer.flatten()):
        sent, received = gathered_splits(arguments[0], group.rank(), size, given.numel())
        taken.append(given.new_empty(sum(received)))
        works.append(dist.all_to_all_single(taken[-1], given, received, sent, group=group, async_op=True))

    def finish(buffer: torch.Tensor) -> torch.Tensor:
        if group.rank() != arguments[0]:
            return buffer.new_zeros((size, *buffer.shape))
        return _joined([rows.view(size, -1) for rows in taken]).view(size, *buffer.shape)

    return Works(works), buffer, finish


def scatter(group: dist.ProcessGroup, buffer: torch.Tensor, arguments: Arguments) -> Started:
    rows = _messages(group, buffer.reshape(group.size(), -1))
    out, works = buffer.new_empty(buffer.shape[1:]), []
    for given, taken in zip(rows, _messages(group, out.flatten()), strict=True):
        received, sent = gathered_splits(arguments[0], group.rank(), group.size(), taken.numel())
        flat = given.reshape(-1)[: sum(sent)]
        works.append(dist.all_to_all_single(taken, flat, received, sent, group=group, async_op=True))
    return Works(works), out, as_it_is


def gathered_splits(to: int, rank: int, size: int, numel: int) -> tuple[list[int], list[int]]:
    """How many elements `rank` sends to and gets from each rank, where all go to one; a scatter turns it round."""
    sent = [numel if other == to else 0 for other in range(size)]
    return sent, [numel if rank == to else 0] * size


def permuted_splits(permutation: Arguments, rank: int, size: int, numel: int) -> tuple[list[int], list[int]]:
    """How many elements `rank` sends to and gets from each rank. `permutation`: source, destination, .."""
    pairs = list(zip(permutation[::2], permutation[1::2], strict=True))
    sent = [numel if (rank, other) in pairs else 0 for other in range(size)]
    return sent, [numel if (other, rank) in pairs else 0 for other in range(size)]


def is_of_network(error: RuntimeError) -> bool:
    """Whether a backend raised `error` because of its peers, and not for want of memory, of a dtype or of a device."""
    return isinstance(error, dist.DistError) or any(word in str(error) for word in ("gloo/", "Gloo", "Timed out"))


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether this process had no memory for what it was to do."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
