"""Collectives that others issue, on process groups of theirs: the wire only waits for them.

It can't renew such a group. So ranks that leave a backward pass halfway tell each other how far they had come with
these collectives (:class:`ltx.wire.passes.Passes`), and where that differs no more of them are run.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from ltx.errors import CollectiveTimeoutError, DeadlockDetectedError
from ltx.wire.deadlock import PATIENCE_S
from ltx.wire.line import Line
from ltx.wire.shared import any_busy, stride_everywhere

_TICK_S = 0.1
_SHORT_TICK_S = 0.001


def begin_foreign(line: Line, label: str) -> None:
    """Collectives of others are about to be issued, on every rank of `line`.

    Raises:
        DeadlockDetectedError: earlier ones are still waiting for a peer, and the next would pair with them.
    """
    if line.passes.foreign_error:
        raise DeadlockDetectedError(
            f"rank {line.rank}: {label} can't run on axis {line.name!r}: the collectives that such hooks issue have "
            f"been out of step since an earlier failure. Destroy their process group, ltx.shutdown(), and start again. "
            f"The failure was: {line.passes.foreign_error}"
        )
    line.passes.foreign_runs += 1


def wait_for_foreign(line: Line, future: torch.futures.Future[Any], label: str) -> Any:
    """The value of `future`, or what was raised in it. Peers of `line` that have given up are noticed meanwhile.

    Raises:
        CollectiveTimeoutError: it isn't there within the axis' timeout.
        DeadlockDetectedError: a peer has left this backward pass halfway.
    """
    landed = threading.Event()
    future.add_done_callback(lambda _: landed.set())
    channel, began = line.bucket_channel(0), time.perf_counter()
    looked = began
    try:
        while not landed.wait(_SHORT_TICK_S if any_busy() else _TICK_S):
            stride_everywhere()  # peers may wait for this rank's strides in a lane
            now = time.perf_counter()
            if now - looked < _TICK_S:
                continue
            looked = now
            channel.meetings.answer()
            if now - began > PATIENCE_S:  # peers that haven't even begun this step have issued nothing in it
                channel.meetings.look_for_deadlock(channel, channel.begun, label)
            if now - began > line.timeout_s:
                raise CollectiveTimeoutError(
                    f"rank {line.rank}: {label} on axis {line.name!r} didn't complete within {line.timeout_s:g} s."
                )
    except BaseException as error:
        line.passes.foreign_error = f"rank {line.rank} waited in {label}: {error}"
        raise
    finally:
        channel.meetings.deadlocks.done()
    return future.wait()
