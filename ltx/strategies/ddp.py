"""DDPStrategy: synchronous data parallelism, which averages gradients at every step.

    w_{t+1} = update(w_t, mean_r grad f_r(w_t))

Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020: gradients in buckets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from ltx import hooks
from ltx.errors import StrategyError
from ltx.extend import LeafState, StateLayout, States, StepInfo, Strategy, arguments, brief, exchange, tree
from ltx.hooks.plain import EXACT, resolve_hook
from ltx.typing import Tree

_HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}

#: The layouts for equal and for differing replicas. They are made once, since every step asks for them.
ALIKE, APART = StateLayout(), StateLayout(params="per_rank", opt_state="per_rank")


@dataclass(frozen=True, kw_only=True)
class DDPStrategy(Strategy):
    """Synchronous data parallelism in the manner of torch's DistributedDataParallel.

    A strategy says how ranks (processes) that train one model together combine their gradients. This one is the
    default: at each step every rank gets the mean of all ranks' gradients, so the parameters stay equal on all ranks.

    With `model_averaging_period` and `start_local_sgd_step` it does so before that step, and post-local SGD follows:
    gradients stay local, and parameters are averaged periodically. :class:`ltx.LocalSGDStrategy` says more.

    Args:
        comm_hook: "allreduce", "fp16", "bf16", or a hook from :mod:`ltx.hooks`.
            :func:`ltx.profile.compare` times several.
        comm_wrapper: a wrapper around `comm_hook`: "fp16" and "bf16" for :func:`ltx.hooks.cast` (torch's
            ``fp16_compress_wrapper``, ``bf16_compress_wrapper``), or a function from hook to hook. A strategy compares
            and pickles as its function does, so use a function that is defined in a module.
        model_averaging_period: parameters are averaged after every so many steps once local SGD has started.
        start_local_sgd_step: the first step, counted from 0, with local gradients; give it with the period. Lightning
            takes it from a ``PostLocalSGDState``, which all-reduces gradients within each node, as
            ``ltx.LocalSGDStrategy(period, start, subgroup=...)`` does.
        start_method: how ``ltx.launch(..., strategy=)`` starts processes: "popen", "spawn", "fork" or "forkserver".
        bucket_bytes, first_bucket_bytes, process_group_backend, timeout: as in :class:`Strategy`.

    A hook pays if it takes a rank less time to encode and decode than it saves on the network.

    Raises:
        StrategyError: (a ValueError) a field's value isn't allowed.

    Example:
        >>> import dataclasses, ltx
        >>> strategy = ltx.DDPStrategy(comm_hook="bf16")
        >>> dataclasses.replace(strategy, comm_hook="fp16").comm_hook
        FP16()
    """

    comm_hook: str | hooks.CommHook = EXACT
    comm_wrapper: Literal["fp16", "bf16"] | Callable[[hooks.CommHook], hooks.CommHook] | None = None
    model_averaging_period: int | None = None
    start_local_sgd_step: int | None = None
    start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen"

    _hook: ClassVar[hooks.CommHook]  # not a field: comm_hook with its comm_wrapper, which every step looks up

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.comm_hook == "auto":
            raise StrategyError(
                'DDPStrategy.comm_hook="auto" is gone. Time train steps with several hooks by ltx.profile.compare, and '
                "name the fastest one."
            )
        object.__setattr__(self, "_hook", self._wrapped(resolve_hook(self, "comm_hook")))
        if (self.model_averaging_period is None) != (self.start_local_sgd_step is None):
            raise StrategyError(
                "DDPStrategy.model_averaging_period and start_local_sgd_step go together, got "
                f"{brief(self.model_averaging_period)} and {brief(self.start_local_sgd_step)}: parameters are averaged "
                "every so many steps from the step on whose gradients stay local."
            )
        if self.model_averaging_period is not None:
            arguments.check_whole(self, 1, "model_averaging_period")
            arguments.check_whole(self, 0, "start_local_sgd_step")
        arguments.check_fields(self, StrategyError, "start_method")

    def _wrapped(self, hook: hooks.CommHook) -> hooks.CommHook:
        wrapper = self.comm_wrapper
        if wrapper is None:
            return hook
        if isinstance(wrapper, str) and wrapper in _HALVES:
            return hooks.cast(hook, _HALVES[wrapper])
        wrapped = wrapper(hook) if callable(wrapper) else None
        if not isinstance(wrapped, hooks.CommHook):
            gave = f", which gave {brief(wrapped)}" if callable(wrapper) else ""
            raise StrategyError(
                f"DDPStrategy.comm_wrapper must be one of {sorted(_HALVES)} or a function from an ltx.hooks.CommHook "
                f"to another, got {brief(wrapper)}{gave}."
            )
        return wrapped

    def hook(self, step: int) -> hooks.CommHook | None:
        if self.start_local_sgd_step is not None and step >= self.start_local_sgd_step:
            return None
        return self._hook.at(step)

    def init(self, param: torch.Tensor, path: str = "") -> LeafState:
        return self._hook.init(param, path) if self._hook.state_names else {}

    @property
    def cycle(self) -> tuple[int, int] | None:
        start = self._hook.constant_after if self.start_local_sgd_step is None else self.start_local_sgd_step
        return None if start is None else (start, self.model_averaging_period or 1)

    @property
    def layout(self) -> StateLayout:
        return ALIKE if self.start_local_sgd_step is None and self._hook.alike else APART

    @property
    def communicates_besides(self) -> bool:
        return self.start_local_sgd_step is not None

    def communicates_after_update(self, step: int) -> bool:
        start, period = self.start_local_sgd_step, self.model_averaging_period
        return start is not None and period is not None and step >= start and (step - start) % period == 0

    def after_update(self, params: Tree, states: States, info: StepInfo) -> tuple[Tree, States]:
        if self.model_averaging_period is None or not self.communicates_after_update(info.step):
            return params, states
        return mean_over(self, params, info), states


def mean_over(strategy: Strategy, params: Tree, info: StepInfo) -> Tree:
    if info.axis.size == 1:
        return params
    leaves, spec = tree.flatten(params)
    means, _ = exchange(strategy, hooks.AllReduce(), leaves, tree.leaf_paths(params), info).wait()
    return tree.unflatten(spec, means)
