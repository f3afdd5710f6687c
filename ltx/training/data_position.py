"""DataPosition: how far a run is in its data, for any number of ranks.

A step takes the next ``batch_size`` samples of the epoch's order, and the ranks share these out. So what a step takes
doesn't depend on how many ranks there are, and their number may change between any two steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from ltx.arguments import check_fields
from ltx.errors import InputError

# What the seed of a torch.Generator may be, twice over: that of an epoch is the sum of two of these.
_LARGEST = (1 << 62) - 1


@dataclass(frozen=True)
class DataPosition:
    """Which samples come next: a value, that steps don't change but follow up.

    In an epoch every sample comes exactly once, whatever becomes of the number of ranks. The order of epoch ``e`` is
    ``torch.randperm`` with the seed ``seed + e``, as in torch's DistributedSampler; unlike that one, nothing is padded,
    so nothing comes twice. The last step of an epoch takes what is left.

    Attributes:
        length: the number of samples in the data.
        batch_size: how many of them a step takes, on all ranks together.
        seed: what the orders are drawn from; the same on every rank.
        epoch: the number of epochs done.
        done: the number of this epoch's samples that are done.
        shuffle: False: every epoch goes through the samples in their own order.
        weighted: whether ranks may get unequal numbers of samples, or none: then the step has to return an
            :class:`ltx.Weighted`, whose mean over samples is exact. Otherwise such a division is refused, for a mean of
            the ranks' means would be another one.

    Raises:
        InputError: (a ValueError) a field is out of its range.

    Source: Horovod's ``ElasticSampler``, which counts the samples done likewise, and pads.

    Example:
        >>> import ltx
        >>> position = ltx.DataPosition(length=6, batch_size=4, shuffle=False)
        >>> [position.indices(rank, 2).tolist() for rank in range(2)]
        [[0, 2], [1, 3]]
        >>> position = position.after_step()  # two samples are left
        >>> [position.indices(rank, 2).tolist() for rank in range(2)]
        [[4], [5]]
        >>> position.after_step()
        DataPosition(length=6, batch_size=4, seed=0, epoch=1, done=0, shuffle=False, weighted=False)
    """

    length: int
    batch_size: int
    seed: int = 0
    epoch: int = 0
    done: int = 0
    shuffle: bool = True
    weighted: bool = False

    def __post_init__(self) -> None:
        check_fields(self, InputError)
        limits = {name: (low, _LARGEST) for name, low in {"length": 1, "batch_size": 1, "seed": 0, "epoch": 0}.items()}
        for name, (low, high) in {**limits, "done": (0, self.length - 1)}.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                allowed = f"of at least {low}" if high == _LARGEST else f"from {low} to {high}"
                raise InputError(f"DataPosition({name}={value!r}): expected an integer {allowed}.")

    @property
    def step_size(self) -> int:
        """How many samples the next step takes, on all ranks together."""
        return min(self.batch_size, self.length - self.done)

    def indices(self, rank: int = 0, size: int = 1) -> torch.Tensor:
        """The samples that `rank` of `size` takes in the next step: int64, 1-dim; unequal numbers differ by one.

        Raises:
            InputError: (a ValueError) they can't be shared out equally, and the position isn't `weighted`.
        """
        if not 0 <= rank < size:
            raise InputError(f"DataPosition.indices: expected a rank from 0 to {size - 1}, got {rank}.")
        self._check_divides(self.step_size, size)
        together = _order(self.length, self.seed + self.epoch, self.shuffle)[self.done : self.done + self.step_size]
        return together[rank::size].clone()

    def after_step(self) -> DataPosition:
        """The position once a step has taken its samples; after the last of an epoch, at the start of the next."""
        done = self.done + self.step_size
        return replace(self, epoch=self.epoch + 1, done=0) if done == self.length else replace(self, done=done)

    def check_sizes(self, fewest: int, most: int) -> None:
        """Raise InputError unless all steps of an epoch can be shared out among each number of ranks in that range."""
        for size in range(fewest, most + 1):
            for taken in (min(self.batch_size, self.length), self.length % self.batch_size):
                self._check_divides(taken, size)

    def fits(self, size: int) -> bool:
        """Whether all steps of an epoch can be shared out among `size` ranks."""
        return self.weighted or all(
            taken % size == 0 for taken in (min(self.batch_size, self.length), self.length % self.batch_size)
        )

    def _check_divides(self, taken: int, size: int) -> None:
        if not self.weighted and taken % size:
            raise InputError(
                f"DataPosition: a step takes {taken} samples (batch_size={self.batch_size}, length={self.length}), "
                f"which {size} ranks can't share out equally, and the mean of their means isn't the mean over samples. "
                "Let the step return ltx.Weighted(total, count) and say so with weighted=True, or choose a batch_size "
                f"and a length (drop the last samples) that are multiples of {size}."
            )


@lru_cache(maxsize=2)
def _order(length: int, seed: int, shuffle: bool) -> torch.Tensor:
    """The order of an epoch. It is cached, so callers don't write to it."""
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed)) if shuffle else torch.arange(length)
