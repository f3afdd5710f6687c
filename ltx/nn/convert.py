"""Replacing a module's batch norms by synchronised ones."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from ltx.errors import TreeError, UnsupportedError
from ltx.nn.modules import SyncBatchNorm, SyncBatchNormAct

_CONVERTED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, SyncBatchNorm)


def convert_sync_batch_norm(module: nn.Module, axis: Any = None) -> nn.Module:
    """A copy of a module in which every batch norm takes its statistics from all ranks.

    Args:
        module: any module; it stays as it is. ``nn.BatchNorm1d``, ``2d``, ``3d`` and ``nn.SyncBatchNorm`` in it become
            :class:`SyncBatchNorm`, with their parameters, buffers, names, hooks and state dict, and timm's
            ``BatchNormAct2d`` becomes :class:`SyncBatchNormAct`.
        axis: as in :func:`ltx.psum`; best a name or None, which can be pickled with the module.

    Returns:
        The copy, with parameters and buffers of its own.

    Raises:
        UnsupportedError: a batch norm of another class (lazy, or with a forward of its own), with its path.
        TreeError: `module` isn't a module.

    Example:
        >>> import torch, ltx
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        >>> ltx.nn.convert_sync_batch_norm(net)[1]
        SyncBatchNorm(3, eps=1e-05, ...)

    Source: ``torch.nn.SyncBatchNorm.convert_sync_batchnorm``, which changes its argument.
    """
    if not isinstance(module, nn.Module):
        raise TreeError(f"convert_sync_batch_norm takes a torch.nn.Module, got {type(module).__name__}.")
    for path, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and _made_into(part) is None:
            raise UnsupportedError(
                f"convert_sync_batch_norm: {path or 'the module'!r} is a {type(part).__name__}, which isn't one of "
                "torch's BatchNorm1d, 2d and 3d or timm's BatchNormAct2d: its forward may do something else. Replace "
                "it by one of these (a lazy one becomes one when it is first called), or call ltx.nn.sync_batch_norm "
                "in it."
            )
    copied = copy.deepcopy(module)
    done: dict[nn.Module, SyncBatchNorm] = {}
    for part in list(copied.modules()):
        for name, child in part._modules.items():
            if _made_into(child) is not None:
                part._modules[name] = _converted(child, axis, done)
    return copied if _made_into(copied) is None else _converted(copied, axis, done)


def _made_into(part: nn.Module | None) -> type[SyncBatchNorm] | None:
    """The class that a batch norm is converted to; None for what isn't one, or isn't known."""
    if type(part) in _CONVERTED:
        return SyncBatchNorm
    if isinstance(part, SyncBatchNormAct):
        return type(part)
    # By its name, as timm isn't needed here; a subclass with a forward of its own may do something else.
    owner = next((cls for cls in type(part).__mro__ if "forward" in vars(cls)), None)
    if not isinstance(part, nn.BatchNorm2d) or owner is None or owner.__name__ != "BatchNormAct2d":
        return None
    return SyncBatchNormAct if {"drop", "act"} <= part._modules.keys() else None


def _converted(part: Any, axis: Any, done: dict[nn.Module, SyncBatchNorm]) -> SyncBatchNorm:
    if part not in done:  # a module that is in two places stays one
        into = _made_into(part) or SyncBatchNorm
        made = done[part] = into.__new__(into)
        made.__dict__.update(part.__dict__)  # parameters, buffers, hooks, the mode: all there is
        made.axis = axis
    return done[part]
