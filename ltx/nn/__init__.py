"""Layers whose forward pass communicates."""

from ltx.nn.sync_batch_norm import SyncBatchNorm, convert_sync_batch_norm, sync_batch_norm

__all__ = [
    "SyncBatchNorm",
    "convert_sync_batch_norm",
    "sync_batch_norm",
]


def __dir__() -> list[str]:
    return sorted(__all__)
