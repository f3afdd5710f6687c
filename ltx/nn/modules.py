"""Batch norm with the statistics of all ranks' batches as modules, which a module's own are converted to."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ltx.errors import InputError, TreeError, UnsupportedError
from ltx.extend import arguments, wide
from ltx.nn.sync_batch_norm import sync_batch_norm


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """``nn.BatchNorm1d``, ``2d`` or ``3d`` by :func:`sync_batch_norm`; made by :func:`convert_sync_batch_norm`.

    Parameters, buffers and what they do are those of torch's modules: in training the buffers are updated in place. So
    call it with ``ltx.functional_call(module, (params, buffers), x, return_buffers=True)``, which gives the next ones.

    Attributes:
        axis: as in :func:`ltx.psum`, looked up at each call.
    """

    axis: Any = None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
    ) -> None:
        if not arguments.is_whole(num_features) or not 0 < num_features < 2**48:
            raise InputError(
                f"SyncBatchNorm: num_features must be a number of channels, got {arguments.shown(num_features)}."
            )
        if not arguments.is_number(eps) or eps <= 0:
            raise InputError(f"SyncBatchNorm: eps must be a number above 0, got {arguments.shown(eps)}.")
        if momentum is not None and not arguments.is_number(momentum):
            raise InputError(f"SyncBatchNorm: momentum must be a number or None, got {arguments.shown(momentum)}.")
        for name, flag in (("affine", affine), ("track_running_stats", track_running_stats), ("bias", bias)):
            if not isinstance(flag, bool):
                raise InputError(f"SyncBatchNorm: {name} must be a bool, got {arguments.shown(flag)}.")
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        if not bias:  # torch's classes take this from 2.12 on
            self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` of shape ``(N, C, *)``, normalised."""
        if not self.training:
            by_batch = self.running_mean is None  # as torch's modules without track_running_stats do
            return nn.functional.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, by_batch, 0.0, self.eps
            )
        momentum: Any = self.momentum
        if self.running_mean is None:
            momentum = 0.0
        elif self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:
                # Of the statistics' precision: an integer tensor alone would give 1 / n in torch's default dtype.
                momentum = 1 / self.num_batches_tracked.to(wide(self.running_mean.dtype))
        y, mean, var = sync_batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            momentum=momentum,
            eps=self.eps,
            axis=self.axis,
        )
        for buffer, moved in ((self.running_mean, mean), (self.running_var, var)):
            if buffer is not None and moved is not None:
                buffer.copy_(moved)
        return y

    def extra_repr(self) -> str:
        """As torch's, and the axis."""
        what: str = super().extra_repr()  # type: ignore[no-untyped-call]
        return what if self.axis is None else f"{what}, axis={self.axis!r}"


class SyncBatchNormAct(SyncBatchNorm):
    """timm's ``BatchNormAct2d`` by :func:`sync_batch_norm`: the norm, then `drop`, then `act`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` of shape ``(N, C, H, W)``, normalised, dropped and activated."""
        drop, act = self.get_submodule("drop"), self.get_submodule("act")
        y: torch.Tensor = act(drop(super().forward(x)))
        return y


_CONVERTED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, SyncBatchNorm)


def convert_sync_batch_norm(module: nn.Module, axis: Any = None) -> nn.Module:
    """A copy of a module in which every batch norm takes its statistics from all ranks.

    Args:
        module: any module; it stays as it is. ``nn.BatchNorm1d``, ``2d``, ``3d`` and ``nn.SyncBatchNorm`` in it become
            :class:`SyncBatchNorm`, with their parameters, buffers, names, hooks and state dict, and timm's
            ``BatchNormAct2d`` becomes :class:`SyncBatchNormAct`.
        axis: as in :func:`ltx.psum`, for all norms in the module; best a name or None, which can be pickled with the
            module. With None a :class:`SyncBatchNorm` keeps its own, so parts can be converted first, with other axes.

    Returns:
        The copy, with parameters and buffers of its own.

    Raises:
        UnsupportedError: a batch norm of another class (lazy, or with a forward of its own, or parametrized), or whose
            ``forward`` attribute was set, or without `axis` one over a process group that isn't the world's, with its
            path.
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
        if _made_into(part) not in (None, type(part)) and "forward" in vars(part) and not _is_class_forward(part):
            raise UnsupportedError(
                f"convert_sync_batch_norm: {path or 'the module'!r} is a {type(part).__name__} whose forward attribute "
                "was set, as accelerate's hooks do: it may go on to call the old forward, whose statistics are local. "
                "Convert the module first, or take that forward away (accelerate.hooks.remove_hook_from_module)."
            )
        group = vars(part).get("process_group") if isinstance(part, nn.SyncBatchNorm) else None
        if axis is None and group is not None and group is not dist.group.WORLD:
            raise UnsupportedError(
                f"convert_sync_batch_norm: {path or 'the module'!r} is a SyncBatchNorm over a process group that isn't "
                "the world's, and axis=None would take its statistics from other ranks. Give axis= that group or the "
                "name of the axis of its ranks, or convert that part alone with it first."
            )
    norms = [vars(part) for part in module.modules() if _made_into(part) is not None]
    # Process groups, and axes over them, can't be copied: the copy has the same.
    same = [norm[name] for norm in norms for name in ("axis", "process_group") if norm.get(name) is not None]
    copied = copy.deepcopy(module, {id(value): value for value in same})
    for part in copied.modules():
        into = _made_into(part)
        if into is not None:
            kept = part.axis if isinstance(part, SyncBatchNorm) else None
            if _is_class_forward(part):
                del part.forward  # it is the old class'
            # In place: whatever else holds the norm, such as a list, a dict or a hook, has the converted one too.
            part.__class__ = into
            vars(part)["axis"] = kept if axis is None else axis
            vars(part).pop("process_group", None)  # it has no use here, and can't be pickled
    return copied


def _is_class_forward(part: nn.Module) -> bool:
    """Whether the attribute forward is set to what the class has, as accelerate's removal of a hook leaves it."""
    forward = vars(part).get("forward")
    return getattr(forward, "__self__", None) is part and getattr(forward, "__func__", None) is type(part).forward


def _made_into(part: nn.Module) -> type[SyncBatchNorm] | None:
    """The class that a batch norm is converted to; None for what isn't one, or isn't known."""
    if type(part) in _CONVERTED:
        return SyncBatchNorm
    if isinstance(part, SyncBatchNormAct):
        return type(part)
    if "parametrizations" in part._modules:  # its class has the properties that give its weights
        return None
    # By its name, as timm isn't needed here; a subclass with a forward of its own may do something else.
    owner = next((cls for cls in type(part).__mro__ if "forward" in vars(cls)), None)
    if not isinstance(part, nn.BatchNorm2d) or owner is None or owner.__name__ != "BatchNormAct2d":
        return None
    return SyncBatchNormAct if {"drop", "act"} <= part._modules.keys() else None
