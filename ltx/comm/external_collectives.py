"""Collectives that other libraries issue, on process groups of theirs: ltx only waits for them.

It can't renew such a group. So ranks that leave a backward pass halfway tell each other how far they had come with
these collectives (:class:`ltx.comm.recovery.Recovery`), and where that differs no more of them are run.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from ltx.comm.axis_comm import AxisComm
from ltx.comm.deadlock import PATIENCE_S
from ltx.comm.shared_memory import any_transport_busy, progress_everywhere
from ltx.errors import CollectiveTimeoutError, DeadlockDetectedError

_TICK_S = 0.1
_SHORT_TICK_S = 0.001


def begin_external(axis_comm: AxisComm, label: str) -> None:
    """Other libraries' collectives are about to be issued, on every rank of `axis_comm`.

    Raises:
        DeadlockDetectedError: earlier ones are still waiting for a peer, and the next would pair with them.
    """
    if axis_comm.recovery.external_error:
        raise DeadlockDetectedError(
            f"rank {axis_comm.rank}: {label} can't run on axis {axis_comm.name!r}: the collectives that such hooks "
            "issue have been out of step since an earlier failure. Destroy their process group, ltx.shutdown(), and "
            f"start again. The failure was: {axis_comm.recovery.external_error}"
        )
    axis_comm.recovery.external_runs += 1


def wait_for_external(axis_comm: AxisComm, future: torch.futures.Future[Any], label: str) -> Any:
    """The value of `future`, or what was raised in it. Raises if a peer of `axis_comm` has given up.

    Raises:
        CollectiveTimeoutError: it isn't there within the axis' timeout.
        DeadlockDetectedError: a peer has left this backward pass halfway.
    """
    completed = threading.Event()
    future.add_done_callback(lambda _: completed.set())
    channel, began = axis_comm.bucket_channel(0), time.perf_counter()
    looked = began
    try:
        # The future wakes this thread, which poll_until's pauses would delay.
        while not completed.wait(_SHORT_TICK_S if any_transport_busy() else _TICK_S):
            progress_everywhere()  # peers may wait for this rank's progress in shared memory
            now = time.perf_counter()
            if now - looked < _TICK_S:
                continue
            looked = now
            channel.negotiation.answer_peers()
            if now - began > PATIENCE_S:  # peers that haven't even begun this step have issued nothing in it
                channel.negotiation.check_deadlock(channel, channel.begun, label)
            if now - began > axis_comm.timeout_s:
                raise CollectiveTimeoutError(
                    f"rank {axis_comm.rank}: {label} on axis {axis_comm.name!r} didn't complete within "
                    f"{axis_comm.timeout_s:g} s."
                )
    except BaseException as error:
        axis_comm.recovery.external_error = f"rank {axis_comm.rank} waited in {label}: {error}"
        raise
    finally:
        channel.negotiation.deadlocks.done()
    return future.wait()
