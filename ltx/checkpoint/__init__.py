"""Checkpoints: a training state on disk, whole or not at all, from which training goes on bit for bit."""

from ltx.checkpoint.loading import Restored, latest, load
from ltx.checkpoint.preemption import RESUMABLE, Preemption, preemption
from ltx.checkpoint.saving import Saving, save, save_async

__all__ = ["RESUMABLE", "Preemption", "Restored", "Saving", "latest", "load", "preemption", "save", "save_async"]


def __dir__() -> list[str]:
    return sorted(__all__)
