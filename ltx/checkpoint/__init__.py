"""Checkpoints: a training state on disk, whole or not at all, and training that goes on from it bit for bit."""

from ltx.checkpoint.loading import Restored as Restored
from ltx.checkpoint.loading import latest as latest
from ltx.checkpoint.loading import load as load
from ltx.checkpoint.preemption import RESUMABLE as RESUMABLE
from ltx.checkpoint.preemption import Preemption as Preemption
from ltx.checkpoint.preemption import preemption as preemption
from ltx.checkpoint.saving import Saving as Saving
from ltx.checkpoint.saving import save as save
from ltx.checkpoint.saving import save_async as save_async
