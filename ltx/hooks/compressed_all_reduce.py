"""Compressed all-reduce: a reduce-scatter and an all-gather of messages, for any codec.

    1. A share is cut into n rows. Row r is encoded and goes to rank r.                        (exchange)
    2. Rank r decodes what it gets and adds it up: row r of the sum. It encodes that.
    3. Every rank gets all rows of the sum and decodes them, its own included.                 (all-gather)

Each rank sends 2(n-1)/n of a message, as the ring does, whatever n is; gathering everyone's message would send (n-1).
All ranks decode the same bytes, so they are equal to the last bit. What the second encoding loses is its row's owner's
to feed back, so that what the ranks sent adds up to the result.

Bagua's bytegrad has these steps; Tang et al., "1-bit Adam", 2021, section 4.2, calls them compressed_allreduce.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ltx.comm.process_groups import view_as
from ltx.gradients.packing import is_plain
from ltx.gradients.reduction import BucketInput, CollectiveRequest
from ltx.hooks.lossy import Compression, CompressionResult, CompressionWithRemainder, LossyHook


@dataclass(frozen=True)
class CompressedAllReduce(LossyHook):
    """A hook that sends messages of bytes: its codec, :meth:`encode` and :meth:`decode`, is all that it defines."""

    phases: ClassVar[int] = 2
    sums: ClassVar[bool] = False

    def multiple(self) -> int:
        """Rows are padded with zeros to a multiple of this many elements."""
        return 1

    def encode(self, rows: torch.Tensor, key: torch.Tensor | None) -> torch.Tensor:
        """Messages, uint8 of shape ``(k, length)``, of `rows`, floating of shape ``(k, m)``.

        The length is a function of m and the dtype. `key` is for randomness, where the hook has any.
        """
        raise NotImplementedError(f"{type(self).__name__} must define encode(rows, key)")

    def decode(self, messages: torch.Tensor, m: int, dtype: torch.dtype) -> torch.Tensor:
        """Rows of shape ``(k, m)`` in new memory."""
        raise NotImplementedError(f"{type(self).__name__} must define decode(messages, m, dtype)")

    def add_decoded(self, message: torch.Tensor, to: torch.Tensor) -> None:
        """Add what :meth:`decode` makes of one message to the row `to`, in place."""
        to.add_(self.decode(message[None], to.numel(), to.dtype)[0])

    def encode_and_keep(self, rows: torch.Tensor, key: torch.Tensor | None) -> torch.Tensor:
        """:meth:`encode`, and make `rows`, in place, what is left of them: less what :meth:`decode` will make of it.

        Of eager tensors on the CPU alone. A codec that can do both at once in less time overrides it.
        """
        messages = self.encode(rows, key)
        rows.sub_(self.decode(messages, rows.shape[1], rows.dtype))
        return messages

    def keys(self, inputs: BucketInput) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What :meth:`encode` draws its random numbers from, the first and the second time."""
        return None, None

    def send(self, inputs: BucketInput, *, feedback: bool) -> Compression:
        return self._sending(inputs, feedback, in_place=False)

    def send_and_keep(self, inputs: BucketInput) -> CompressionWithRemainder:
        if not is_plain(inputs.flat) or not inputs.flat.numel():
            return (yield from super().send_and_keep(inputs))
        sent = yield from self._sending(inputs, feedback=True, in_place=True)
        assert sent.remainder is not None
        return sent, sent.remainder(inputs.flat)

    def _sending(self, inputs: BucketInput, feedback: bool, in_place: bool) -> Compression:
        """:meth:`send`. `in_place`: the codec leaves what it doesn't send in the input; `own` must not be called."""
        n, numel, dtype, rank = inputs.axis_size, inputs.flat.numel(), inputs.flat.dtype, inputs.rank
        if not numel:
            return CompressionResult(inputs.flat, inputs.flat.clone, inputs.states)
        lot = n * self.multiple()
        flat = inputs.flat if numel % lot == 0 else torch.nn.functional.pad(inputs.flat, (0, -numel % lot))
        rows = flat.view(n, -1)
        m = rows.shape[1]
        first, second = self.keys(inputs)
        encode = self.encode_and_keep if in_place else self.encode
        outgoing = encode(rows, first)
        # Decoded before it is sent: the channel may overwrite the buffer.
        mine = self.decode(outgoing, m, dtype) if feedback and not in_place else None
        incoming = yield CollectiveRequest("all_to_all", outgoing)
        # One message after the other, each while it is in the cache.
        part = self.decode(incoming[:1], m, dtype)[0]
        for place in range(1, 1 if incoming.is_meta else n):  # shapes alone have nothing to add
            self.add_decoded(incoming[place], part)
        message = encode(part[None], second)
        rest = part - self.decode(message, m, dtype)[0] if mine is not None else part
        messages = yield CollectiveRequest("all_gather", message[0])
        total = self.decode(messages, m, dtype).view(-1)

        def with_rest(rows: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
            if isinstance(rank, int):
                rows[rank] += rest
            else:
                rows = rows + (torch.arange(n, device=rest.device) == rank)[:, None] * rest
            return rows.view(-1)[:numel]

        def own() -> torch.Tensor:
            assert mine is not None
            return with_rest(mine, -rest)

        def remainder(corrected: torch.Tensor) -> torch.Tensor:
            return with_rest(rows if mine is None else rows - mine, rest)

        return CompressionResult(total[:numel], own, inputs.states, remainder)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the last dimension."""
    return view_as(tensor.contiguous(), torch.uint8)


def from_bytes(messages: torch.Tensor, start: int, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """`count` numbers of `dtype` from byte `start` of each message, and where they end."""
    end = start + count * dtype.itemsize
    part = messages[:, start:end]
    return (part if dtype is torch.uint8 else view_as(part.clone(memory_format=torch.contiguous_format), dtype)), end
