"""Streams: how the host runs ahead of an accelerator, and how it reads values without standing still.

On the CPU there are no streams. A backend for CPU tensors may order them all the same, as those of tests do; then all
of this does nothing but hand values on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from ltx.comm import ledger


class CommStream:
    """The stream of one device on which an axis communicates, beside the one that computes."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device, priority=-1)

    @contextmanager
    def behind_current(self) -> Iterator[None]:
        """Enqueue on this stream, behind what the current stream has so far.

        Tensors that were made there and are used here must be kept until the current stream is behind this one again.
        """
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            yield

    def fence(self) -> Callable[[Iterable[torch.Tensor]], None]:
        """A function that puts the stream on which it is called behind what is enqueued here now.

        It is given the tensors that were made here and are used there.
        """
        if self._stream is None:
            return lambda made: None
        done = self._stream.record_event()

        def wait(made: Iterable[torch.Tensor]) -> None:
            current = torch.accelerator.current_stream(self._device)
            with ledger.device_wait(self._device):
                current.wait_event(done)
            for tensor in made:
                tensor.record_stream(current)

        return wait


class HostCopy:
    """A small tensor on its way to the host, which continues meanwhile."""

    def __init__(self, tensor: torch.Tensor):
        self._done: torch.Event | None = None
        self._before: Callable[[], bool] | None = None
        if tensor.device.type == "cpu":
            self._value = tensor
        else:
            self._value = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
                tensor, non_blocking=True
            )
            self._done = torch.accelerator.current_stream(tensor.device).record_event()

    def after(self, completed: Callable[[], bool]) -> None:
        """It isn't there before what `completed` tells of."""
        self._before = completed

    def ready(self) -> bool:
        """Whether the value is there, so that :meth:`read` doesn't wait."""
        return (self._before is None or self._before()) and (self._done is None or self._done.query())

    def read(self) -> torch.Tensor:
        """The value, on the host."""
        if self._done is not None:
            self._done.synchronize()
        return self._value


def to_device(numbers: list[float], device: torch.device) -> torch.Tensor:
    """Numbers as float64 on `device`, without the host waiting for the device."""
    made = torch.tensor(numbers, dtype=torch.float64)
    return made if device.type == "cpu" else made.pin_memory().to(device, non_blocking=True)
