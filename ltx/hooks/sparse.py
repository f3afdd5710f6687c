"""TopK and RandomK: send some numbers of each bucket; error feedback sends the others later.

TopK:     C(x) = x where |x| is among the k greatest of a row, else 0         |C(x) - x|^2 <= (1 - k/d) |x|^2
RandomK:  C(x) = x at one random place of each of k strata, else 0          E|C(x) - x|^2 =  (1 - k/d) |x|^2
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from ltx.errors import StrategyError
from ltx.extend import BucketInput, CollectiveRequest, brief, buffers
from ltx.hooks import noise
from ltx.hooks.lossy import CompressedAllReduce, Compression, CompressionResult, LossyHook, from_message, to_message

#: In rows of at least _LONG numbers, every _EVERY-th is sampled. A prime, so that all columns of a matrix are sampled.
_LONG, _EVERY = 1 << 16, 101


@dataclass(frozen=True)
class SparseHook(LossyHook):
    """The base of TopK and RandomK, which send the fraction `ratio` of the numbers."""

    ratio: float = 0.01
    error_feedback: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.ratio <= 1:
            what = f"{type(self).__name__}.ratio"
            raise StrategyError(f"{what} must be more than 0 and at most 1, got {brief(self.ratio)}.")

    def _count(self, m: int) -> int:
        return max(1, round(self.ratio * m))


@dataclass(frozen=True)
class TopK(SparseHook, CompressedAllReduce):
    """Sends the greatest numbers of each rank's part of a bucket, with their places.

    Args:
        ratio: the fraction of the numbers that is sent; at least one of each row.
        error_feedback: keep the other numbers for the next step. Without it they are lost.

    Source: Aji and Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017.

    Example:
        >>> import torch, ltx
        >>> strategy = ltx.DDPStrategy(comm_hook=ltx.hooks.TopK(ratio=0.5, error_feedback=False))
        >>> grads = torch.tensor([[1.0, 8.0, 4.0, 2.0], [1.0, 8.0, 4.0, 2.0]])
        >>> ltx.vmap(lambda g: ltx.sync_gradients(g, strategy)[0])(grads)[0]
        tensor([0., 8., 4., 0.])
    """

    def encode(self, rows: torch.Tensor, key: torch.Tensor | None) -> torch.Tensor:
        return self._message(rows, self._places(rows))

    def encode_and_keep(self, rows: torch.Tensor, key: torch.Tensor | None) -> torch.Tensor:
        places = self._places(rows)
        message = self._message(rows, places)
        rows.scatter_(1, places, 0)
        return message

    def _places(self, rows: torch.Tensor) -> torch.Tensor:
        count = self._count(rows.shape[1])
        if buffers.is_plain(rows) and rows.shape[1] >= _LONG:
            return torch.stack([greatest(row, count) for row in rows])
        return torch.topk(rows.abs(), count, dim=1, sorted=False).indices

    def _message(self, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return torch.cat([to_message(rows.gather(1, places)), to_message(places.int())], 1)

    def decode(self, messages: torch.Tensor, m: int, dtype: torch.dtype) -> torch.Tensor:
        count = self._count(m)
        values, start = from_message(messages, 0, count, dtype)
        places, _ = from_message(messages, start, count, torch.int32)
        return values.new_zeros((messages.shape[0], m)).scatter(1, places.long(), values)


def greatest(row: torch.Tensor, count: int) -> torch.Tensor:
    """The places of the `count` greatest absolute values of a long row, as topk finds them, in a sixth of its time:
    only what is above a threshold, which a sample gives, is sorted; if these are fewer than `count`, all are.
    """
    sample = row[::_EVERY].abs()
    expected = count * len(sample) / len(row)
    least = torch.topk(sample, min(len(sample), int(expected + 3 * expected**0.5) + 2), sorted=False).values.amin()
    if least > 0:  # false for NaN too
        most = min(buffers.CHUNK, len(row))
        memory, below = row.new_empty(most), torch.empty(most, dtype=torch.bool, device="cpu")
        found = []
        for some in buffers.chunks(len(row)):
            size = torch.abs(row[some], out=memory[: some.stop - some.start])
            candidates = torch.lt(size, least, out=below[: len(size)]).logical_not_()  # "not less" includes NaN
            found.append(candidates.nonzero().view(-1).add_(some.start))
        places = torch.cat(found)
        if len(places) >= count:
            return places[torch.topk(row[places].abs(), count, sorted=False).indices]
    return torch.topk(row.abs(), count, sorted=False).indices


@dataclass(frozen=True)
class RandomK(SparseHook):
    """Sends a sum of numbers at random places, the same on all ranks: one in each stretch of 1/ratio numbers.

    Args:
        ratio: the fraction of the numbers that is sent.
        seed: the places are a function of this seed, the step and the bucket.
        error_feedback: keep the other numbers for the next step. Without it a number that is sent is multiplied by the
            length of its stretch, so that the expectation is the mean.

    Source: Stich, Cordonnier and Jaggi, "Sparsified SGD with memory", NeurIPS 2018, definition 2.1, TopK's too.

    Example:
        >>> import ltx
        >>> ltx.hooks.RandomK(ratio=0.1)
        RandomK(ratio=0.1)
    """

    reads_step: ClassVar[bool] = True

    seed: int = 0

    def send(self, inputs: BucketInput) -> Compression:
        flat, numel = inputs.flat, inputs.flat.numel()
        count = self._count(numel)
        edges = torch.arange(count + 1, device=flat.device) * numel // count
        lengths = edges.diff()
        key = noise.key_of(self.seed, inputs.step, inputs.bucket.index, device=flat.device)
        # In float64, a length times a number below 1 stays below the length.
        places = edges[:-1] + (noise.uniform(key, count, torch.float64) * lengths).long()
        # NaN and inf have to arrive from any place. Written without 0 * low, which Inductor folds to 0.
        low, high = flat.aminmax()
        values = flat[places] + (low - low) + (high - high)
        if not self.error_feedback:
            values = values * lengths
        request = CollectiveRequest("psum", values)
        given = values.clone() if self.error_feedback else values
        total = yield request

        def spread(values: torch.Tensor) -> torch.Tensor:
            return values.new_zeros(numel).scatter(0, places, values)

        def left() -> torch.Tensor:
            return flat.sub_(spread(given if request.sent is None else request.sent()))

        return CompressionResult(spread(total), left, inputs.states)
