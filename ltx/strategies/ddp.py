"""DDPStrategy: synchronous data parallelism, which averages gradients at every step.

    w_{t+1} = update(w_t, mean_r grad f_r(w_t))

Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020: gradients are sent in
buckets during the backward pass.

``comm_hook="auto"`` chooses a hook by the bandwidth between ranks and by the bytes that each hook would send;
:mod:`ltx.estimate` counts these.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import ClassVar, Literal, NamedTuple

import torch

from ltx import hooks
from ltx.errors import LtxError, StrategyError, SyncStateError
from ltx.estimate import Steps, format_bytes
from ltx.extend import LeafState, StateLayout, States, StepInfo, Strategy, arguments, brief, comm
from ltx.hooks.plain import EXACT, resolve_hook
from ltx.typing import Tree

_HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}

#: The layouts for equal and for differing replicas. They are made once, since every step asks for them.
_ALIKE, _APART = StateLayout(), StateLayout(params="per_rank", opt_state="per_rank")


@dataclass(frozen=True, kw_only=True)
class DDPStrategy(Strategy):
    """Synchronous data parallelism in the manner of torch's DistributedDataParallel.

    A strategy says how ranks (processes) that train one model together combine their gradients. This one is the
    default: at each step every rank gets the mean of all ranks' gradients, so the parameters stay equal on all ranks.

    With `model_averaging_period` and `start_local_sgd_step` it does so before that step, and post-local SGD follows:
    gradients stay local, and parameters are averaged periodically. :class:`ltx.LocalSGDStrategy` says more.

    Args:
        comm_hook: "allreduce", "fp16", "bf16", or a hook from :mod:`ltx.hooks`. "auto": ``step.init(params)`` and
            ``train.init(params)`` choose one by its cost and its gain, see below.
        comm_wrapper: a wrapper around `comm_hook`: "fp16" and "bf16" for :func:`ltx.hooks.cast` (torch's
            ``fp16_compress_wrapper``, ``bf16_compress_wrapper``), or a function from hook to hook. A strategy compares
            and pickles as its function does, so use a function that is defined in a module.
        model_averaging_period: parameters are averaged after every so many steps once local SGD has started.
        start_local_sgd_step: the first step, counted from 0, with local gradients; give it with the period. Lightning
            takes it from a ``PostLocalSGDState``, which all-reduces gradients within each node, as
            ``ltx.LocalSGDStrategy(period, start, subgroup=...)`` does.
        start_method: how ``ltx.launch(..., strategy=strategy)`` starts processes: "popen", "spawn", "fork" or
            "forkserver".
        bucket_bytes, first_bucket_bytes, network, process_group_backend, timeout: as in :class:`Strategy`.

    A hook pays if it takes a rank less time to encode and decode than it saves on the network. ``comm_hook="auto"``
    measures the axis' network (or uses `network`). Above 15 Gbit/s gradients are sent unchanged, between 1.5 and 15 in
    bfloat16, between 0.5 and 1.5 in eight bits (ByteGrad), and below 500 Mbit/s by PowerSGD of rank 2, exact for the
    first 1,000 steps. A hook that doesn't send less than the ones before it isn't chosen, and if latency matters more
    than bytes, gradients are sent unchanged. If computing takes most of a step, name a hook instead;
    ``ltx.profile.compare`` times several.

    The choice is part of the communication state, ``step.init(params).choice``, which every step then needs; so the
    choice stays for the whole training. ``ltx.profile.explain(step, state)`` gives its reason. In a world of one, and
    on simulated ranks without a `network`, the choice is "none". A checkpoint fits a state with the same choice, or
    with a hook that keeps the same state. To change the choice, load the checkpoint into a state with the old choice,
    which the error of a load names, and then replace its communication state:
    ``replace(state, sync_state=replace(train.step.init(state.params), step=state.step))``.

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
        # "auto" is the exact mean until a hook is chosen.
        hook = hooks.AllReduce() if self.auto_hook else resolve_hook(self, "comm_hook", "auto")
        object.__setattr__(self, "_hook", self._wrapped(hook))
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

    @property
    def auto_hook(self) -> bool:
        return isinstance(self.comm_hook, str) and self.comm_hook == "auto"

    def choose(self, params: Tree, ranks: int, network: comm.Network | None, dtype: torch.dtype | None) -> str:
        return choice_for(self, params, ranks, network, dtype).name

    def with_choice(self, choice: str) -> DDPStrategy:
        return _chosen(self, choice)

    def hook(self, step: int) -> hooks.CommHook | None:
        if self.start_local_sgd_step is not None and step >= self.start_local_sgd_step:
            return None
        return self._hook.at(step)

    @property
    def constant_after(self) -> int | None:
        start = self.start_local_sgd_step
        return self._hook.constant_after if start is None else start

    def init(self, param: torch.Tensor, path: str = "") -> LeafState:
        return self._hook.init(param, path)

    @property
    def stateful(self) -> bool:
        # Local SGD needs the count of steps, and "auto" needs the chosen hook.
        return self._hook.stateful or self.start_local_sgd_step is not None or self.auto_hook

    @property
    def cycle(self) -> tuple[int, int]:
        return self.constant_after or 0, self.model_averaging_period or 1

    @property
    def layout(self) -> StateLayout:
        return _ALIKE if self.start_local_sgd_step is None and self._hook.alike else _APART

    @property
    def communicates_besides(self) -> bool:
        return self.start_local_sgd_step is not None

    def communicates_after_update(self, step: int) -> bool:
        start, period = self.start_local_sgd_step, self.model_averaging_period
        return start is not None and period is not None and step >= start and (step - start) % period == 0

    def after_update(self, params: Tree, states: States, info: StepInfo) -> tuple[Tree, States]:
        if not self.communicates_after_update(info.step):
            return params, states
        from ltx.strategies.local_sgd import mean_over  # imported here, since few programs use it

        return mean_over(self, params, info), states


@lru_cache(maxsize=64)
def _chosen(strategy: DDPStrategy, choice: str) -> DDPStrategy:
    """`strategy` with the hook of the name `choice`, as a state has it. Cached, since every step asks for it."""
    return replace(strategy, comm_hook=hook_of(choice))


# --- comm_hook="auto" ------------------------------------------------------------------------------------------------


# The hooks that change gradients least come first. The time of a step relative to DDP's, with which it took turns, with
# 5 M parameters on two cores:
#
#               shared memory  1 Gbit/s  100 Mbit/s
#     none          0.96         0.86       1.02
#     half          0.94         0.61       0.51
#     bytegrad      1.06         0.55       0.28
#     powersgd      1.02         0.57       0.10
#
# Encoding and decoding a float32 number on one core took: none 0.4, half 0.7, bytegrad 2.7, powersgd 3.0 ns. A hook is
# chosen below the bandwidth at which its time for codec and bytes is 0.7 of the previous hook's, between two ranks: 15
# and 1.5 Gbit/s. Losses with half and eight bits were those of the exact mean; PowerSGD's, of rank 4, were half a
# percent higher on one of two tasks, so PowerSGD has to save more. On an accelerator, which encodes faster, the limits
# would be higher.
@cache
def candidates() -> dict[str, tuple[hooks.CommHook, float]]:
    """The hooks that "auto" may choose, by the name in a state, each with the highest bandwidth at which it may.

    A function, since most programs don't need these hooks.
    """
    return {
        "none": (hooks.AllReduce(), math.inf),
        "bf16": (hooks.BF16(), 15e9),
        "bytegrad": (hooks.ByteGrad(), 1.5e9),
        "powersgd": (hooks.PowerSGD(rank=2), 0.5e9),
    }


def hook_of(choice: str) -> hooks.CommHook:
    """The hook that a communication state says was chosen. Raises SyncStateError if no hook has that name."""
    if choice not in candidates():
        raise SyncStateError(
            f'comm_hook="auto": this communication state says that {choice!r} was chosen, and there are '
            f"{', '.join(map(repr, candidates()))}. A state that another strategy has made says nothing of it: take "
            "that of step.init(params), on every rank."
        )
    return candidates()[choice][0]


class Choice(NamedTuple):
    """The choice of "auto", and the candidates that it was chosen from."""

    name: str
    sent: dict[str, int]  # the bytes a step that each candidate for this bandwidth sends; empty without a network

    @property
    def reason(self) -> str:
        """Why the hook was chosen, in a line."""
        if not self.sent:
            return "there is nothing to choose by"
        sizes = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in self.sent.items())
        return f"of those for such a bandwidth the one that sends least, unless latency counts for more: {sizes}"


def choice_for(
    strategy: Strategy, params: Tree, ranks: int, network: comm.Network | None, dtype: torch.dtype | None = None
) -> Choice:
    """The choice of ``comm_hook="auto"`` for `network`. `dtype`: in which mixed precision reduces gradients."""
    if network is None or ranks == 1:
        return Choice("none", {})
    strategy = replace(strategy, network=network)
    sent: dict[str, int] = {}
    for name, (candidate, up_to) in candidates().items():
        if network.bandwidth > up_to:
            break
        try:
            made = strategy.with_choice(name)
            step = candidate.constant_after or 0
            hook = made.hook(step)
            if hook is None:
                continue  # local SGD begins before this hook would
            hook = hook if dtype is None else hooks.cast(hook, dtype)
            buckets = Steps(made, params, ranks).gradients(hook, step).rows
        except LtxError:
            if not sent:  # even the exact mean fails
                raise
            continue  # the hook can't be cast or wrapped
        sent[name] = sum(collective.nbytes for bucket in buckets for collective in bucket.collectives)
    late = bool(sent) and 8 * sent["none"] <= network.bandwidth * network.start_s(ranks)
    return Choice("none" if late or not sent else min(sent, key=sent.__getitem__), sent)
