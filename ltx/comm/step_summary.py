"""The step summary: one small sum a step that carries loss, weights and the digest.

It is issued between the forward and the backward pass, in float64. The digest is the running fingerprint of all that
this rank has issued; all ranks have the same one iff its limbs have variance zero, which sums can tell: with limbs d
below 2^20, n * sum(d^2) == sum(d)^2 exactly if and only if all are equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ltx.comm.channel import Channel, Work
from ltx.errors import RankMismatchError

_LIMB_BITS = 20
_LIMBS = 3
_MASK = (1 << _LIMB_BITS) - 1

#: Bytes of the buffer that is summed.
SUMMARY_BYTES = (2 + 2 * _LIMBS) * torch.float64.itemsize


@dataclass(frozen=True)
class StepSummary:
    """The sum of the ranks' summaries.

    Attributes:
        total: sum of the ranks' losses, or of their totals if they are weighted; 0-dim float64.
        weight: sum of the ranks' weights (the number of ranks if unweighted); 0-dim float64.
    """

    total: torch.Tensor
    weight: torch.Tensor

    @property
    def mean(self) -> torch.Tensor:
        """The mean loss."""
        return self.total / self.weight


class PendingSummary:
    """A step summary that is pending."""

    def __init__(self, work: Work, size: int, axis_name: str):
        self._work: Work | None = work
        self._size = size
        self._axis_name = axis_name
        self._summary: StepSummary | None = None

    def wait(self) -> StepSummary:
        """The summary; raises :class:`ltx.errors.RankMismatchError` if ranks have issued different things."""
        if self._summary is None:
            assert self._work is not None
            summed = self._work.wait()
            limbs = [int(x) for x in summed[2:].tolist()]
            for first, second in zip(limbs[::2], limbs[1::2], strict=True):
                if self._size * second != first * first:
                    raise RankMismatchError(
                        f"axis {self._axis_name!r}: ranks have issued different collectives, or the same ones in "
                        "another order, since the last synchronised step; the results since then are not to be "
                        "trusted. Nothing of this step was applied. Wrap the program in ltx.debug_checks() to see "
                        "which call differs."
                    )
            self._summary, self._work = StepSummary(summed[0], summed[1]), None
        return self._summary


def send_summary(channel: Channel, total: torch.Tensor, weight: torch.Tensor, digest: int) -> PendingSummary:
    """Issue this rank's part: `total` and `weight` are 0-dim tensors on the communicator's device."""
    limbs = [(digest >> (_LIMB_BITS * i)) & _MASK for i in range(_LIMBS)]
    marks = torch.tensor([y for d in limbs for y in (d, d * d)], dtype=torch.float64, device=total.device)
    buffer = torch.cat([total.detach().double().reshape(1), weight.detach().double().reshape(1), marks])
    return PendingSummary(channel.issue("psum", buffer, "summary"), channel.size, channel.axis_name)
