"""block_backward_sync: the same step with local gradients."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ltx.errors import StepError
from ltx.transforms.data_parallel import DataParallel


@dataclass(frozen=True)
class Blocked(DataParallel):
    """A data-parallel step whose gradients stay local; as a context manager it yields itself and changes nothing."""

    blocked: bool = True

    def __enter__(self) -> Blocked:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


def block_backward_sync(step: DataParallel) -> Blocked:
    """The same step with this rank's own gradients: nothing is reduced, nothing is sent.

    Args:
        step: what :func:`ltx.data_parallel` returned.

    Returns:
        A new step; `step` itself is as before. It is also a context manager that yields itself, for people used to
        Lightning's ``block_backward_sync`` and DDP's ``no_sync``; other than there, only what is called through it is
        affected, whether or not its forward pass lies inside the ``with``. A communication state passes through it
        unchanged. A :class:`ltx.Weighted` step gives its local mean.

    Example:
        >>> import torch, ltx
        >>> step = ltx.data_parallel(lambda w, x: (w * x).sum())
        >>> w, x = torch.tensor(1.0), torch.tensor([2.0, 4.0])
        >>> with ltx.block_backward_sync(step) as local:
        ...     ltx.vmap(torch.func.grad(local), in_dims=(None, 0))(w, x)
        tensor([2., 4.])

    Raises:
        StepError: `step` isn't data parallel.
    """
    if not isinstance(step, DataParallel):
        raise StepError(
            f"block_backward_sync takes a step made by ltx.data_parallel, got {type(step).__name__}. A step that isn't "
            "data parallel has local gradients already."
        )
    return Blocked(**{f.name: getattr(step, f.name) for f in fields(DataParallel)} | {"blocked": True})
