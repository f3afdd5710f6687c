"""The base of lossy hooks: error feedback, and the compressed all-reduce for any codec.

A lossy hook C doesn't send all of a gradient. Error feedback keeps the rest e for the next step:

    sent_t = C(g_t / n + e_t),   e_{t+1} = g_t / n + e_t - sent_t

Seide et al., "1-bit stochastic gradient descent", 2014; Karimireddy et al., "Error feedback fixes SignSGD", 2019,
algorithm 2. A share is a gradient divided by the number of ranks n; the residual e is in the same units. The result of
a step is the sum of what ranks sent: over any steps, the sum of gradients is that of results plus all residuals.

A compressed all-reduce (Tang et al., "1-bit Adam", 2021, section 4.2) sends 2(n-1)/n of a message, as a ring does:

    1. A share is cut into n rows. Row r is encoded and sent to rank r.                        (exchange)
    2. Rank r decodes the messages it gets and adds them: row r of the sum, which it encodes.
    3. Every rank gets all rows of the sum and decodes them, its own included.                 (all-gather)

All ranks decode the same bytes, so their results are equal to the last bit. The error of the second encoding goes into
the residual of the rank that encoded the row, so that what the ranks sent adds up to the result.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ltx.errors import StrategyError
from ltx.extend import Bucket, BucketInput, CollectiveRequest, CommHook, LeafState, Packing, Reduction, buffers, comm

RESIDUAL = "residual"


class CompressionResult(NamedTuple):
    """What a lossy hook got, and what it hasn't sent of a share."""

    total: Tensor  # the sum over ranks of what they sent
    left: Callable[[], Tensor]  # the share less this rank's part of `total`, perhaps in the share's memory; called once
    states: Sequence[LeafState]  # the next states
    finite: bool = False  # whether what is left is known to be finite


#: Yields requests as a Reduction does, and returns a CompressionResult.
Compression = Generator[CollectiveRequest, Tensor, CompressionResult]


@dataclass(frozen=True)
class LossyHook(CommHook):
    """A hook that sends less than its share. Half-precision gradients are compressed in float32.

    Args:
        error_feedback: keep what wasn't sent, and add it to the next share.
    """

    exact: ClassVar[bool] = False

    error_feedback: bool = field(default=False, kw_only=True)

    @property
    def state_names(self) -> tuple[str, ...]:
        return (RESIDUAL,) if self.error_feedback else ()

    def init(self, param: Tensor, path: str = "") -> LeafState:
        if not self.error_feedback:
            return {}
        return {RESIDUAL: torch.zeros_like(param, dtype=self.packing(param.dtype, 1).dtype).contiguous()}

    def packing(self, dtype: torch.dtype, axis_size: int) -> Packing:
        if dtype.is_complex:
            raise StrategyError(
                f"{self!r} compresses real gradients, and a parameter is {dtype}. Use hooks.AllReduce() for a model "
                "with complex parameters, or keep their real and imaginary parts apart (torch.view_as_real)."
            )
        packing = Packing(torch.float32 if dtype.itemsize < 4 else dtype, 1.0 / axis_size, 1.0 / axis_size)
        return packing._replace(terms=_residual) if self.error_feedback else packing

    def send(self, inputs: BucketInput) -> Compression:
        """Send a part of the input, which isn't empty. With error feedback the caller will call ``left()``."""
        raise NotImplementedError(f"{type(self).__name__} must define send(inputs)")

    def reduce(self, inputs: BucketInput) -> Reduction:
        if not inputs.flat.numel():
            return inputs.flat, inputs.states
        sent = yield from self.send(inputs)
        if not self.error_feedback:
            return sent.total, sent.states
        left = sent.left()
        return sent.total, with_residuals(sent.states, left if sent.finite else finite(left), inputs.bucket)


def with_residuals(states: Sequence[LeafState], left: Tensor, bucket: Bucket) -> list[LeafState]:
    """The next states of a bucket's parameters, of which `left` wasn't sent."""
    residuals = zip(states, buffers.unpack(left, bucket, cast=False), strict=True)
    return [{**state, RESIDUAL: part} if RESIDUAL in state else state for state, part in residuals]


def finite(left: Tensor) -> Tensor:
    """`left`, in place, without values that aren't finite: they reach all ranks, so they mustn't be sent again."""
    if buffers.is_plain(left) and left.sum().isfinite():
        return left
    return left.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _residual(state: LeafState) -> Sequence[tuple[Tensor, float]]:
    return [(state[RESIDUAL], 1.0)] if RESIDUAL in state else ()


@dataclass(frozen=True)
class CompressedAllReduce(LossyHook):
    """A lossy hook that sends messages of bytes. Subclasses define the codec, :meth:`encode` and :meth:`decode`."""

    phases: ClassVar[int] = 2
    sums: ClassVar[bool] = False

    def multiple(self) -> int:
        """The size of a block: rows are padded to a multiple of it. If it is 1, a row is one block."""
        return 1

    def filling(self, last: Tensor) -> Tensor:
        """The number with which a block is padded after its own numbers, `last`. Decoding drops the padding.

        A codec overrides it if zeros would change what it computes over a block, such as a mean.
        """
        return last.new_zeros(())

    def encode(self, rows: Tensor, key: Tensor | None) -> Tensor:
        """Encode `rows`, floating of shape ``(k, m)``, to messages, uint8 of shape ``(k, length)``.

        The length must be a function of m and the dtype. `key` is for random numbers, if the codec draws any.
        """
        raise NotImplementedError(f"{type(self).__name__} must define encode(rows, key)")

    def decode(self, messages: Tensor, m: int, dtype: torch.dtype) -> Tensor:
        """Decode messages to rows of shape ``(k, m)``, in new memory."""
        raise NotImplementedError(f"{type(self).__name__} must define decode(messages, m, dtype)")

    def decoded_sum(self, messages: Tensor, m: int, dtype: torch.dtype) -> Tensor:
        """The sum of the decoded rows, of shape ``(m,)``, in new memory. Each is added while it is in the cache."""
        total = self.decode(messages[:1], m, dtype)[0]
        for place in range(1, len(messages)):
            total.add_(self.decode(messages[place : place + 1], m, dtype)[0])
        return total

    def encode_and_keep(self, rows: Tensor, key: Tensor | None) -> Tensor:
        """As :meth:`encode`. Also replaces `rows`, in place, by their encoding error.

        Only called for eager tensors on the CPU. A codec that can do both in one pass overrides it.
        """
        messages = self.encode(rows, key)
        rows.sub_(self.decode(messages, rows.shape[1], rows.dtype))
        return messages

    def keys(self, inputs: BucketInput) -> tuple[Tensor | None, Tensor | None]:
        """The keys for the random numbers of the first and the second :meth:`encode`."""
        return None, None

    def encoded(self, rows: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor]:
        """(messages, with error feedback what they leave out of `rows`, perhaps in the memory of `rows`)."""
        if self.error_feedback and buffers.is_plain(rows):
            return self.encode_and_keep(rows, key), rows
        messages = self.encode(rows, key)
        # Decode before sending: the channel may overwrite the buffer.
        return messages, rows - self.decode(messages, rows.shape[1], rows.dtype) if self.error_feedback else rows

    def send(self, inputs: BucketInput) -> Compression:
        n, numel, dtype, rank = inputs.axis_size, inputs.flat.numel(), inputs.flat.dtype, inputs.rank
        m = -(-numel // (n * self.multiple())) * self.multiple()
        # the last row that isn't all padding, and its count of numbers without padding
        last, own_of_last = (numel - 1) // m, (numel - 1) % m + 1
        rows = self.filled(inputs.flat, n * m, m).view(n, m)
        first, second = self.keys(inputs)
        messages, unsent = self.encoded(rows, first)
        part = self.decoded_sum((yield CollectiveRequest("all_to_all", messages)), m, dtype)
        if own_of_last < m and not self._fills_with_zeros:  # the sum of paddings isn't the padding of the sum
            if not isinstance(rank, int):
                part = torch.where(rank == last, self.filled(part[:own_of_last], m, m), part)
            elif rank == last:
                part = self.filled(part[:own_of_last], m, m)
        message, rest = self.encoded(part[None], second)
        total = self.decode((yield CollectiveRequest("all_gather", message[0])), m, dtype).view(-1)

        def left() -> Tensor:
            if not isinstance(rank, int):
                return (unsent + (torch.arange(n, device=rest.device) == rank)[:, None] * rest).view(-1)[:numel]
            unsent[rank] += rest[0]
            return unsent.view(-1)[:numel]

        return CompressionResult(total[:numel], left, inputs.states)

    @property
    def _fills_with_zeros(self) -> bool:
        return type(self).filling is CompressedAllReduce.filling

    def filled(self, own: Tensor, length: int, m: int) -> Tensor:
        """`own`, which begins at the start of a row of `m` numbers, padded to `length`."""
        if len(own) == length:
            return own
        if self._fills_with_zeros:  # after a cat, Inductor computes wrong numbers for QSGD
            return torch.nn.functional.pad(own, (0, length - len(own)))
        block = m if self.multiple() == 1 else self.multiple()
        filling = self.filling(own[(len(own) - 1) // block * block :])
        return torch.cat([own, filling.expand(length - len(own))])


def by_greatest(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(rows / greatest, greatest): each row's greatest absolute value, so that squares don't overflow or vanish."""
    greatest = rows.abs().amax(-1, keepdim=True)
    greatest = torch.where(greatest == 0, 1, greatest)
    return rows / greatest, greatest


def to_message(numbers: Tensor) -> Tensor:
    return comm.as_bytes(numbers).flatten(-2)


def from_message(messages: Tensor, start: int, count: int, dtype: torch.dtype) -> tuple[Tensor, int]:
    """`count` numbers of `dtype` from byte `start` of each message, and the byte at which they end."""
    end = start + count * dtype.itemsize
    part = messages[:, start:end]
    if dtype.itemsize > 1:  # view_as needs numbers that are aligned to their size
        part = part.clone(memory_format=torch.contiguous_format)
    return comm.view_as(part, dtype), end
