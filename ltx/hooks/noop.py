"""Noop: nothing is sent. Each rank continues with its own gradients, so ranks drift apart.

It measures what a step would take if communication cost nothing (``noop_hook`` of torch.distributed).

    g^_r = g_r
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ltx.gradients.comm_hook import CommHook
from ltx.gradients.reduction import BucketInput, Reduction


@dataclass(frozen=True)
class Noop(CommHook):
    """No communication, for measurements. For training with local gradients use ``ltx.block_backward_sync``.

    Example:
        >>> import torch, ltx
        >>> strategy = ltx.DDPStrategy(comm_hook=ltx.hooks.Noop())
        >>> ltx.vmap(lambda g: ltx.sync_gradients(g, strategy)[0])(torch.tensor([1.0, 3.0]))
        tensor([1., 3.])
    """

    exact: ClassVar[bool] = False

    def scale(self, axis_size: int) -> float:
        return 1.0

    def reduce(self, inputs: BucketInput) -> Reduction:
        return inputs.flat, inputs.states
        yield  # a generator that asks for nothing
