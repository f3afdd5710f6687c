"""TopK and RandomK: some numbers of each bucket, the others later.

    TopK:     C(x) = x where |x| is among the k greatest of a row, else 0         |C(x) - x|^2 <= (1 - k/d) |x|^2
    RandomK:  C(x) = x at one random place of each of k strata, else 0          E|C(x) - x|^2 =  (1 - k/d) |x|^2

Aji and Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017, and Stich, Cordonnier and Jaggi,
"Sparsified SGD with memory", NeurIPS 2018, where the bounds are (definition 2.1). RandomK's places are the same on all
ranks, so that a sum of k numbers is all that travels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from ltx.errors import StrategyError
from ltx.hooks.lossy import LossyHook, Sending, Sent
from ltx.hooks.noise import key_of, uniform
from ltx.hooks.scattered import ScatteredHook, as_bytes, from_bytes
from ltx.sync.reduction import Ask, Share


def _check_ratio(hook: TopK | RandomK) -> None:
    if not isinstance(hook.ratio, int | float) or not 0 < hook.ratio <= 1:
        raise StrategyError(f"{type(hook).__name__}.ratio must be greater than 0 and at most 1, got {hook.ratio!r}.")


@dataclass(frozen=True)
class TopK(ScatteredHook):
    """The greatest numbers of each rank's part of a bucket, as values and places.

    Args:
        ratio: the part of the numbers that is sent, at least one of each row.
        error_feedback: keep the others for the next step. Without it they are lost.

    Source: see the head of this file.

    Example:
        >>> import torch, ltx
        >>> strategy = ltx.DDPStrategy(comm_hook=ltx.hooks.TopK(ratio=0.5, error_feedback=False))
        >>> grads = torch.tensor([[1.0, 8.0, 4.0, 2.0], [1.0, 8.0, 4.0, 2.0]])
        >>> ltx.vmap(lambda g: ltx.sync_gradients(g, strategy)[0])(grads)[0]
        tensor([0., 8., 4., 0.])
    """

    ratio: float = 0.01
    error_feedback: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        _check_ratio(self)

    def encode(self, rows: torch.Tensor, key: torch.Tensor | None) -> torch.Tensor:
        places = torch.topk(rows.abs(), self._count(rows.shape[1]), dim=1, sorted=False).indices
        return torch.cat([as_bytes(rows.gather(1, places)), as_bytes(places.int())], 1)

    def decode(self, messages: torch.Tensor, m: int, dtype: torch.dtype) -> torch.Tensor:
        count = self._count(m)
        values, start = from_bytes(messages, 0, count, dtype)
        places, _ = from_bytes(messages, start, count, torch.int32)
        return values.new_zeros((messages.shape[0], m)).scatter(1, places.long(), values)

    def _count(self, m: int) -> int:
        return max(1, round(self.ratio * m))


@dataclass(frozen=True)
class RandomK(LossyHook):
    """Numbers at random places, the same on all ranks, one in each stretch of 1/ratio.

    Args:
        ratio: the part of the numbers that is sent.
        seed: of the places, which are a function of seed, step and bucket.
        error_feedback: keep the others for the next step. Without it what is sent is scaled up by the length of its
            stretch, so that the expectation is the mean.

    Source: see the head of this file.

    Example:
        >>> import ltx
        >>> ltx.hooks.RandomK(ratio=0.1)
        RandomK(ratio=0.1)
    """

    reads_step: ClassVar[bool] = True

    ratio: float = 0.01
    seed: int = 0
    error_feedback: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        _check_ratio(self)

    def send(self, share: Share, *, feedback: bool) -> Sending:
        flat, numel = share.flat, share.flat.numel()
        if not numel:
            return Sent(flat, flat.clone, share.states)
        count = max(1, round(self.ratio * numel))
        edges = torch.arange(count + 1, device=flat.device) * numel // count
        lengths = edges.diff()
        key = key_of(self.seed, share.step, share.bucket.index, device=flat.device)
        # In float64, in which a length times a number below 1 stays below the length.
        places = edges[:-1] + (uniform(key, count, torch.float64) * lengths).long()
        # What isn't finite has to arrive wherever it is.
        low, high = flat.aminmax()
        values = flat[places] + 0 * low + 0 * high
        if not self.error_feedback:
            values = values * lengths
        ask = Ask("sum", values)
        given = values.clone() if feedback else values
        total = yield ask

        def spread(values: torch.Tensor) -> torch.Tensor:
            return values.new_zeros(numel).scatter(0, places, values)

        return Sent(spread(total), lambda: spread(given if ask.sent is None else ask.sent()), share.states)
