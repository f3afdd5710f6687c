"""DDPStrategy: synchronous data parallelism, every gradient averaged at every step.

    w_{t+1} = update(w_t, mean_r grad f_r(w_t))

Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020: gradients travel in
buckets while the backward pass goes on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ltx import hooks
from ltx.errors import StrategyError
from ltx.strategies.base import Strategy, unchanging
from ltx.sync.reduction import LeafState


@dataclass(frozen=True, kw_only=True)
class DDPStrategy(Strategy):
    """Synchronous data parallelism in the manner of torch's DistributedDataParallel.

    Args:
        comm_hook: "allreduce", "fp16", "bf16", or a hook from :mod:`ltx.hooks`.
        bucket_bytes, first_bucket_bytes, process_group_backend, timeout: as in :class:`Strategy`.

    Raises:
        StrategyError: (a ValueError) a field's value isn't allowed.

    Example:
        >>> import dataclasses, ltx
        >>> strategy = ltx.DDPStrategy(comm_hook="bf16")
        >>> dataclasses.replace(strategy, comm_hook="fp16").comm_hook
        FP16()
    """

    comm_hook: str | hooks.CommHook = "allreduce"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.comm_hook, str) and self.comm_hook in hooks.NAMED:
            # The name is short for the hook, and equal to it.
            object.__setattr__(self, "comm_hook", getattr(hooks, hooks.NAMED[self.comm_hook])())
        if not isinstance(self.comm_hook, hooks.CommHook):
            raise StrategyError(
                f"DDPStrategy.comm_hook must be one of {sorted(hooks.NAMED)} or an ltx.hooks.CommHook, "
                f"got {self.comm_hook!r}."
            )

    def hook(self, step: int) -> hooks.CommHook:
        return self._comm_hook.at(step)

    def hook_in_graph(self, step: int) -> hooks.CommHook:
        return unchanging(self._comm_hook, step)

    def init(self, param: torch.Tensor, path: str = "") -> LeafState:
        return self._comm_hook.init(param, path)

    @property
    def stateful(self) -> bool:
        return self._comm_hook.stateful

    @property
    def cycle(self) -> tuple[int, int]:
        return self._comm_hook.settled_from, 1

    @property
    def _comm_hook(self) -> hooks.CommHook:
        assert isinstance(self.comm_hook, hooks.CommHook)
        return self.comm_hook
