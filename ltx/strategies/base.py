"""The contract of a strategy: when and how ranks talk, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch

from ltx.axis import Axis
from ltx.errors import StrategyError, UnsupportedError
from ltx.hooks import CommHook
from ltx.sync.reduction import LeafState
from ltx.typing import Tree

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """What a training step does besides the user's own work, at three places.

    A strategy is immutable: it compares, hashes, pickles, prints, and is changed with ``dataclasses.replace``. Its
    schedules read the static number of steps so far; its state is explicit, in the communication state that the step
    is given and gives back.

    * :meth:`before_forward`: the parameters that the step computes with.
    * :meth:`hook`: what is done to the gradients, bucket by bucket, during the backward pass.
    * :meth:`after_update`: what becomes of the parameters that the optimizer gives.

    Attributes:
        bucket_bytes: gradients travel in buckets of at most this many bytes.
        first_bucket_bytes: size of the first bucket; small, so that the link starts early.
        process_group_backend: backend for ``ltx.init``; None chooses NCCL on CUDA and gloo on CPU.
        timeout: how long ``ltx.init``'s collectives wait for a peer.
    """

    bucket_bytes: int = 4 * MIB
    first_bucket_bytes: int = MIB
    process_group_backend: str | None = None
    timeout: timedelta = timedelta(seconds=1800)

    def __post_init__(self) -> None:
        for name in ("bucket_bytes", "first_bucket_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                raise StrategyError(f"{type(self).__name__}.{name} must be a positive number of bytes, got {value!r}.")
        if not isinstance(self.timeout, timedelta) or self.timeout <= timedelta(0):
            raise StrategyError(
                f"{type(self).__name__}.timeout must be a positive datetime.timedelta, got {self.timeout!r}."
            )

    def hook(self, step: int) -> CommHook | None:
        """The reduction of the gradients of synchronised step `step`; None leaves them local."""
        raise NotImplementedError(f"{type(self).__name__} must define hook(step)")

    def hook_in_graph(self, step: int) -> CommHook | None:
        """:meth:`hook` for a compiled graph that is traced at step `step` and runs at later ones too.

        Raises:
            UnsupportedError: the hook changes with the step.
        """
        hook = self.hook(step)
        return None if hook is None else unchanging(hook, step)

    def init(self, param: Any, path: str = "") -> LeafState:
        """The state of the parameter at `path`: the hook's, and the strategy's own under other names."""
        hook = self.hook(0)
        return hook.init(param, path) if hook is not None else {}

    @property
    def stateful(self) -> bool:
        """Whether a step needs communication state, be it only for the count of steps."""
        return _has_state(self)

    def before_forward(self, params: Tree, states: dict[str, LeafState], step: int, axis: Axis) -> Tree:
        """The parameters that the step sees."""
        return params

    def after_update(
        self, params: Tree, states: dict[str, LeafState], step: int, axis: Axis
    ) -> tuple[Tree, dict[str, LeafState]]:
        """What becomes of the updated parameters, and the next state."""
        return params, states


def unchanging(hook: CommHook, step: int) -> CommHook:
    """What of `hook` a graph that is compiled at `step` can hold."""
    held = hook.in_graph(step)
    if held is None:
        raise UnsupportedError(
            f"{hook!r} changes with the number of steps, which is {step} for good in a graph that is compiled now. "
            "Take the first steps eagerly until the hook no longer changes, or compile the step inside: "
            "ltx.data_parallel(torch.compile(f), strategy)."
        )
    return held


@lru_cache(maxsize=64)
def _has_state(strategy: Strategy) -> bool:
    hook = strategy.hook(0)
    return bool(strategy.init(torch.zeros(1))) or (hook is not None and hook.stateful)
