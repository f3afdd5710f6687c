"""Layers whose forward pass communicates."""

from ltx.nn.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
from ltx.nn.sync_batch_norm import convert_sync_batch_norm as convert_sync_batch_norm
from ltx.nn.sync_batch_norm import sync_batch_norm as sync_batch_norm
