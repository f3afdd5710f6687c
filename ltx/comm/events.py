"""What a recording is made of: collectives, and stretches of computing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Event:
    """One collective.

    Attributes:
        channel: the channel's name: "user", "buckets" or "background".
        operation: the collective, as "psum" or "all_gather".
        label: its purpose, as "psum" or "bucket 3".
        nbytes: bytes that this rank sends for it, by the ring's count: 2(n-1)/n of the buffer for a sum.
        issued_s, completed_s: when it was issued and when it was complete (time.perf_counter; seconds).
        waited_s: for how long this rank was blocked in its wait.
        marks: on an accelerator, while it is recorded: where the device began and completed it.

    Times of collectives on an accelerator are those of the device, once the recording has ended.
    """

    channel: str
    operation: str
    label: str
    nbytes: int
    issued_s: float
    completed_s: float | None = None
    waited_s: float = 0.0
    marks: list[Any] = field(default_factory=list, repr=False, compare=False)

    @property
    def kind(self) -> str:
        """The label without its number: "bucket", "exchange" and "background" have one."""
        return self.label.rpartition(" ")[0] or self.label

    @property
    def bucket(self) -> int | None:
        """The bucket of gradients that this was issued for; None for anything else."""
        return int(self.label.rpartition(" ")[2]) if self.kind == "bucket" else None


@dataclass
class Span:
    """A stretch of computing. Spans nest: those of a :class:`ltx.train_step` are in its "step".

    Attributes:
        name: "step", "forward", "backward" or "update".
        began_s, ended_s: when (time.perf_counter; seconds). On a GPU, when this process queued the work.
    """

    name: str
    began_s: float
    ended_s: float | None = None


def mark(device: torch.device) -> Any:
    """An event with its time, which the current stream comes to once it has done all before; None on the CPU."""
    if device.type == "cpu":
        return None
    return torch.accelerator.current_stream(device).record_event(torch.Event(device, enable_timing=True))
