"""Lossy hooks: what is sent isn't all that was given. What was left out may be kept for the next step.

    sent_t = C(g_t / n + e_t),   e_{t+1} = g_t / n + e_t - sent_t

Error feedback: Seide et al., "1-bit stochastic gradient descent and its application to data-parallel distributed
training of speech DNNs", 2014; Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression
schemes", 2019, algorithm 2. The residual e is in the units of a share: the cotangent divided by the number of ranks.
What a rank sends adds up over ranks to what the step gets, so nothing is lost: over any number of steps,
sum of the steps' gradients = sum of what was sent + the residuals of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

import torch

from ltx.arguments import checked
from ltx.errors import StrategyError
from ltx.gradients.comm_hook import CommHook
from ltx.gradients.packing import is_plain, unpack
from ltx.gradients.reduction import BucketInput, CollectiveRequest, LeafState, Reduction, Terms

RESIDUAL = "residual"


class CompressionResult(NamedTuple):
    """What a lossy hook has done with a share.

    Attributes:
        total: the sum over ranks of what they sent.
        own: gives this rank's part of it in new memory; over all ranks they add up to `total`.
        states: the next states.
        remainder: gives what is left of the share, whose memory it may use; where None, the share less `own`.
        finite: what is left is known to be finite.
    """

    total: torch.Tensor
    own: Callable[[], torch.Tensor]
    states: Sequence[LeafState]
    remainder: Callable[[torch.Tensor], torch.Tensor] | None = None
    finite: bool = False


#: Yields asks as a Reduction does, returns what was sent.
Compression = Generator[CollectiveRequest, torch.Tensor, CompressionResult]
#: The same with what is left of the share.
CompressionWithRemainder = Generator[CollectiveRequest, torch.Tensor, tuple[CompressionResult, torch.Tensor]]


@dataclass(frozen=True)
class LossyHook(CommHook):
    """A hook that sends less than its share. Half-precision gradients are compressed in float32.

    Args:
        error_feedback: keep what wasn't sent, and add it to the next share.
    """

    exact: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False

    error_feedback: bool = field(default=False, kw_only=True)

    @property
    def state_names(self) -> tuple[str, ...]:
        return (RESIDUAL,) if self.error_feedback else ()

    def init(self, param: torch.Tensor, path: str = "") -> LeafState:
        if not self.error_feedback:
            return {}
        return {RESIDUAL: torch.zeros_like(param, dtype=self.wire_dtype(param.dtype)).contiguous()}

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if dtype.is_complex:
            raise StrategyError(
                f"{self!r} compresses real gradients, and a parameter is {dtype}. Use hooks.AllReduce() for a model "
                "with complex parameters, or keep their real and imaginary parts apart (torch.view_as_real)."
            )
        return torch.float32 if dtype.itemsize < 4 else dtype

    def with_error_feedback(self) -> LossyHook:
        return replace(self, error_feedback=True)

    def extra_terms(self, state: LeafState, axis_size: int) -> Terms:
        return [(state[RESIDUAL], 1.0)] if self.error_feedback and RESIDUAL in state else ()

    def send(self, inputs: BucketInput, *, feedback: bool) -> Compression:
        """Send what this hook sends of its input. `feedback`: the caller will call `own`."""
        raise NotImplementedError(f"{type(self).__name__} must define send(share)")

    def send_and_keep(self, inputs: BucketInput) -> CompressionWithRemainder:
        """:meth:`send`, and what is left of the share, for which its memory may be used."""
        corrected = inputs.flat
        sent = yield from self.send(inputs, feedback=True)
        return sent, corrected.sub_(sent.own()) if sent.remainder is None else sent.remainder(corrected)

    def reduce(self, inputs: BucketInput) -> Reduction:
        if not self.error_feedback:
            sent = yield from self.send(inputs, feedback=False)
            return sent.total, sent.states
        sent, left = yield from self.send_and_keep(inputs)
        # What isn't finite has reached every rank as such, so nothing of it is left to send. A sum will find it.
        if not sent.finite and not (is_plain(left) and left.sum().isfinite()):
            left.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        residuals = zip(sent.states, unpack(left, inputs.bucket, cast=False), strict=True)
        return sent.total, [{**s, RESIDUAL: p} if RESIDUAL in s else s for s, p in residuals]


@checked("hook")
def error_feedback(hook: CommHook) -> CommHook:
    """`hook` with error feedback: what it doesn't send at one step is added to the share of the next.

    Args:
        hook: a lossy hook, or a combination of some.

    Returns:
        The same hook with communication state ("residual", one tensor of each parameter's shape).

    Raises:
        StrategyError: the hook is exact, so there is nothing to feed back, or has no error of its own.

    Source: Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes", 2019.

    Example:
        >>> import ltx
        >>> ltx.hooks.error_feedback(ltx.hooks.ByteGrad())
        ByteGrad(error_feedback=True)
    """
    fed = hook.with_error_feedback() if isinstance(hook, CommHook) else None
    if fed is None:
        raise StrategyError(
            f"error_feedback: {hook!r} leaves no error to feed back. It is for lossy hooks such as hooks.ByteGrad() "
            "or hooks.OneBit()."
        )
    return fed
