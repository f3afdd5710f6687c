"""Saving while training goes on."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ltx.arguments import checked
from ltx.checkpoint.saving import Job, begin_saving
from ltx.comm import HostCopy
from ltx.training.train_state import TrainState


class Saving:
    """A checkpoint that is being saved in the background; see :func:`save_async`."""

    def __init__(self, job: Job, copies: Sequence[HostCopy] = ()):
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(job, copies), name="ltx-checkpoint")
        if job.together.comm is not None:
            job.together.comm.store_exchange.hold(self._thread)
        self._thread.start()

    def _run(self, job: Job, copies: Sequence[HostCopy]) -> None:
        try:
            pieces = zip(job.pieces, copies, strict=job.failure is None)
            job = replace(job, pieces=[replace(piece, tensor=copy.read()) for piece, copy in pieces])
            self._path = job.run()
        except BaseException as error:
            self._error = error
            warnings.warn(f"save_async: {error}", RuntimeWarning, stacklevel=1)

    @property
    def done(self) -> bool:
        """Whether :meth:`result` would return or raise at once."""
        return not self._thread.is_alive()

    def result(self, timeout_s: float | None = None) -> Path:
        """The directory of the checkpoint, once it is there on all ranks; what went wrong is raised, as by save.

        Raises:
            TimeoutError: it isn't there within `timeout_s`.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the checkpoint isn't saved within {timeout_s:g} s.")
        if self._error is not None:
            raise self._error
        assert self._path is not None
        return self._path


@checked("path", "rng")
def save_async(
    path: str | os.PathLike[str],
    state: TrainState,
    *,
    data: Any = None,
    rng: bool = True,
    keep: int | None = None,
    axis: Any = None,
) -> Saving:
    """:func:`save` in the background of the steps that follow. Every rank calls it.

    It copies what this rank writes, and returns: `state` may go into the next step and be donated to it, while a
    thread writes the copy. Ranks agree on it through the store alone, so nothing mixes with their collectives.

    Args:
        path, state, data, rng, keep, axis: as in :func:`save`.

    Each one under way holds its copy: wait for the last one before the next, should the disk be slower than that.

    Returns:
        A handle: ``.done``, and ``.result()``, which waits and raises what went wrong, on all ranks alike. A failure is
        a RuntimeWarning besides, lest nobody asks. ``ltx.shutdown()`` and the end of the process wait for it.
    """
    job = begin_saving("checkpoint.save_async", path, state, data, rng, keep, axis)
    try:
        copies = [_copied(piece.tensor) for piece in job.pieces]
    except Exception as error:  # which :meth:`Saving.result` raises, on all ranks alike
        return Saving(replace(job, failure=error))
    except BaseException as error:
        job.give_up(error)
        raise
    return Saving(job, copies)


def _copied(tensor: torch.Tensor) -> HostCopy:
    """A copy on the host. From an accelerator it is on its way, behind what computes the tensor."""
    tensor = tensor.detach()
    return HostCopy(tensor.clone() if tensor.device.type == "cpu" else tensor)
