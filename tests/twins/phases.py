"""Hooks whose buckets take several collectives, one after the other."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ltx.hooks import BucketInput, CollectiveRequest, CommHook, Reduction


@dataclass(frozen=True)
class InTwoPhases(CommHook):
    """The mean as a reduce-scatter and an all-gather: two collectives that wait for each other."""

    def phases(self, axis_size: int) -> int:
        return 2

    def reduce(self, inputs: BucketInput) -> Reduction:
        n, numel = inputs.axis_size, inputs.flat.numel()
        padded = torch.nn.functional.pad(inputs.flat, (0, -numel % n))
        part = yield CollectiveRequest("psum_scatter", padded.reshape(n, -1))
        whole = yield CollectiveRequest("all_gather", part.contiguous())
        return whole.reshape(-1)[:numel], inputs.states


@dataclass(frozen=True)
class OftenInTwoPhases(InTwoPhases):
    """As above for the buckets with even indices, one sum for the others: phases of unequal lengths."""

    def reduce(self, inputs: BucketInput) -> Reduction:
        if inputs.bucket.index % 2 == 0:
            return (yield from super().reduce(inputs))
        return (yield CollectiveRequest("psum", inputs.flat)), inputs.states
