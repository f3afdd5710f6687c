"""HorovodStrategy: what Horovod's DistributedOptimizer does with gradients and updates.

    average:  w <- update(w, (f/n) sum_r g_r / f)       sum:  w <- update(w, sum_r g_r)
    adasum:   d_r = update_r(w, g_r) - w,  w <- w + adasum_r d_r       optimizer states differ between ranks

Sergeev and Del Balso, "Horovod", 2018; Maleki et al., "Scaling distributed training with adaptive summation", 2021.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal, TypeGuard

import torch

from ltx import extend, hooks
from ltx.errors import StrategyError, UnsupportedError
from ltx.extend import Axis, Bucket, LeafState, Packing, Update, arguments, buffers, collectives, optimizers, tree
from ltx.hooks.combined import in_half
from ltx.hooks.plain import EXACT, resolve_hook, resolved
from ltx.optim import Optimizer
from ltx.strategies import StateLayout, States, StepInfo, Strategy, Updated
from ltx.typing import Tree

#: The keys of a parameter's state: the sum of its gradients since the last update; its value before its move.
PASSES, START = "passes", "start"


@dataclass(frozen=True, kw_only=True)
class HorovodStrategy(Strategy):
    """Synchronous data parallelism in the manner of Horovod's ``DistributedOptimizer``.

    Horovod's process sets are axes here: ``ltx.data_parallel(step, strategy, axis=ltx.axis_from_group(group, "odd"))``.
    For sparse gradients use :func:`ltx.sync_gradients`, for ``join`` :func:`ltx.uneven` with ``divisor="all"``.

    Args:
        compression: "none", "fp16", "bf16", or a hook from :mod:`ltx.hooks`: how gradients are sent.
        op: "average"; "sum", which is n times the average, also for :class:`ltx.Weighted`; or "adasum": each rank takes
            its own optimizer step, and the parameters move by the adaptive sum (:func:`ltx.adasum`) of these steps.
            With "adasum" the optimizer's state and ``metrics.loss`` differ between ranks, a data-parallel step returns
            local gradients, `compression` is the dtype in which the steps are sent, and the number of ranks must be a
            power of two. With ``overlap="update"`` steps are taken and combined by bucket in the backward pass.
        backward_passes_per_step: k calls of a train step make one update, with the *sum* of their k gradients, as in
            Horovod for torch: divide the loss by k to get the mean. Calls in between send nothing and leave parameters
            and optimizer as they are (``metrics.loss`` is then the rank's own); their gradients' sum is part of the
            state. Outside of :func:`ltx.train_step`, gradients in between are local, and the caller has to sum them.
            :func:`ltx.accumulate` takes the mean over micro-batches within one call.
        gradient_predivide_factor: None: gradients are divided by n before they are rounded and summed, so that the sum
            doesn't overflow unless the mean does, in half precision too. A number f: they are divided by f before, and
            by n / f after the sum. Horovod's default is 1.0, with which the sum of n float16 numbers may overflow.
        groups: which gradients share a bucket, whatever its size (one bucket for each dtype and device): the number of
            equal groups of consecutive parameters, or a list of groups, each a list of paths or patterns of paths
            (``"layer1.*"``). Parameters in no group fill buckets as usual.
        scale_lr: multiply the learning rate by the number of ranks, for optimizers of :func:`ltx.optim.from_torch`.
            Lightning's HorovodStrategy does this, Horovod itself doesn't.
        bucket_bytes, first_bucket_bytes, process_group_backend, timeout: as in :class:`Strategy`.

    Raises:
        StrategyError: (a ValueError) a field's value isn't allowed, or doesn't fit another field's. In a train step,
            it can't work with the number of ranks, the optimizer, or (several passes) an :class:`ltx.Weighted` step.

    Example:
        >>> import torch, ltx
        >>> def reduced(gradient, **fields):
        ...     return ltx.sync_gradients(gradient, ltx.HorovodStrategy(**fields))[0]
        >>> ltx.vmap(lambda g: (reduced(g), reduced(g, op="sum")))(torch.tensor([1.0, 2.0]))
        (tensor([1.5000, 1.5000]), tensor([3., 3.]))
    """

    compression: str | hooks.CommHook = EXACT
    op: Literal["average", "sum", "adasum"] = "average"
    backward_passes_per_step: int = 1
    gradient_predivide_factor: float | None = None
    groups: int | Sequence[Sequence[str]] | None = None
    scale_lr: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.compression, str) and self.compression == "none":
            object.__setattr__(self, "compression", EXACT)
        resolve_hook(self, "compression", "none")
        arguments.check_fields(self, StrategyError, "op", "scale_lr")
        arguments.check_whole(self, 1, "backward_passes_per_step")
        if self.gradient_predivide_factor is not None:
            arguments.check_number(self, 0, "gradient_predivide_factor", more=True, besides="None or ")
            if self.op != "average":
                if self.gradient_predivide_factor != 1:
                    told = f'None with op="{self.op}", which has nothing to divide'
                    raise self._wrong("gradient_predivide_factor", told)
                object.__setattr__(self, "gradient_predivide_factor", None)
        if arguments.is_whole(groups := self.groups) and groups > 0:
            object.__setattr__(self, "groups", int(groups))
        elif _is_list(groups) and all(_is_list(group) and all(isinstance(p, str) for p in group) for group in groups):
            object.__setattr__(self, "groups", tuple(tuple(group) for group in groups))  # hashable
        elif groups is not None:
            raise self._wrong("groups", "a positive number of groups, or a list of lists of parameters' paths")
        if self.op == "adasum":
            hook = resolved(self.compression)
            if not isinstance(hook, (hooks.AllReduce, hooks.FP16, hooks.BF16)) or hook.state_names:
                raise self._wrong("compression", 'one of "none", "fp16", "bf16" with op="adasum"')
            if self.scale_lr:
                raise self._wrong("scale_lr", 'False with op="adasum", which keeps one rank\'s learning rate')

    def _wrong(self, field: str, allowed: str) -> StrategyError:
        return StrategyError(f"HorovodStrategy.{field} must be {allowed}, got {arguments.brief(getattr(self, field))}.")

    @property
    def _moves(self) -> AdasumOfMoves:
        """The hook with op="adasum", which sends in half precision if `compression` does."""
        return AdasumOfMoves(getattr(self.compression, "short", None))

    def _synchronises(self, step: int) -> bool:
        return (step + 1) % self.backward_passes_per_step == 0

    @property
    def _reduction(self) -> hooks.CommHook:
        """The hook for steps that synchronise. With "adasum" only its communication state is used."""
        hook, factor = resolved(self.compression), self.gradient_predivide_factor
        passes = self.backward_passes_per_step > 1
        if self.op == "average" and factor is None and not passes:
            return hook
        return Scaled(hook, "sum" if self.op == "sum" else "average", factor, passes)

    def hook(self, step: int) -> hooks.CommHook | None:
        if self.op == "adasum" or not self._synchronises(step):
            return None
        return self._reduction.at(step // self.backward_passes_per_step)

    def init(self, param: torch.Tensor, path: str = "") -> LeafState:
        return self._reduction.init(param, path) if self._reduction.state_names else {}

    @property
    def cycle(self) -> tuple[int, int] | None:
        passes, last_change = self.backward_passes_per_step, resolved(self.compression).constant_after
        return None if last_change is None else (passes * last_change, passes)

    def grouping(self, paths: Callable[[], list[str]], arrival: Sequence[int]) -> tuple[int, ...]:
        if self.groups is None:
            return ()
        if isinstance(self.groups, int):
            return _consecutive(self.groups, tuple(arrival))
        return _matching(tuple(tuple(group) for group in self.groups), tuple(paths()))

    @property
    def layout(self) -> StateLayout:
        if not resolved(self.compression).alike:
            return StateLayout(params="per_rank", opt_state="per_rank")
        return StateLayout(opt_state="per_rank" if self.op == "adasum" else "replicated")

    @property
    def updates_in_buckets(self) -> bool:
        return self.backward_passes_per_step == 1 and not self.scale_lr

    @property
    def communicates_besides(self) -> bool:
        return self.op == "adasum"

    def communicates_after_update(self, step: int) -> bool:
        return self.op == "adasum" and self._synchronises(step)

    def post_update_hook(self, step: int) -> AdasumOfMoves | None:
        return self._moves if self.op == "adasum" else None

    def check(self, optimizer: Optimizer, axis: Axis | None = None) -> None:
        super().check(optimizer, axis)
        if self.scale_lr:
            with_scaled_lr(optimizer, 1)
        if self.op == "adasum" and axis is not None and axis.size & (axis.size - 1):
            raise StrategyError(
                f'HorovodStrategy(op="adasum") pairs ranks with ranks, and works on 1, 2, 4, 8, ... of them; axis '
                f"{axis.name!r} has {axis.size}."
            )

    def init_optimizer(self, optimizer: Optimizer, params: Tree, axis: Axis) -> Tree:
        return self._on(optimizer, axis).init(params)

    def rates(self, optimizer: Optimizer, opt_state: Tree, axis: Axis) -> Any:
        return super().rates(self._on(optimizer, axis), opt_state, axis)

    def _on(self, optimizer: Optimizer, axis: Axis) -> Optimizer:
        return with_scaled_lr(optimizer, axis.size) if self.scale_lr else optimizer

    def update(self, update: Update, states: States, info: StepInfo, pending: Any) -> Updated:
        if not self._synchronises(info.step):
            added = update.if_finite(self._added(update, states)[0], states)
            return Updated(update.params, update.opt_state, added, pending)
        if self.op == "adasum":
            if self.backward_passes_per_step > 1:
                added, grads = self._added(update, states)
                none = {path: {**state, PASSES: torch.zeros_like(state[PASSES])} for path, state in added.items()}
                states = update.if_finite(none, states)
                update = replace(update, grads=grads)
            if info.axis.size == 1 or update.finite is False:
                return Updated(*update.apply(), states, pending)
            given, opt_state = update.optimizer.apply(update.grads, update.opt_state, update.params)
            moved = extend.communicate_after_update(self, self._moves, update, given, opt_state, states, info)
            params, opt_state = update.if_finite((moved.params, opt_state), (update.params, update.opt_state))
            return replace(moved, params=params, opt_state=opt_state, pending=pending)
        params, opt_state = replace(update, optimizer=self._on(update.optimizer, info.axis)).apply()
        return Updated(params, opt_state, states, pending)

    def _added(self, update: Update, states: States) -> tuple[States, Tree]:
        """The sum of these gradients and of earlier passes' gradients: as the next state, and as a tree."""
        grads, spec = tree.flatten(update.grads)
        paths = tree.leaf_paths(update.params)
        for path in paths:
            if PASSES not in states.get(path, {}):
                raise UnsupportedError(
                    f"HorovodStrategy.backward_passes_per_step: leaf {path!r} has no sum of gradients in the "
                    "communication state, which holds real floating parameters alone. Use ltx.accumulate(step, k)."
                )
        totals = [states[path][PASSES] + grad for path, grad in zip(paths, grads, strict=True)]
        added = {path: {**states[path], PASSES: total} for path, total in zip(paths, totals, strict=True)}
        return {**states, **added}, tree.unflatten(spec, [x.to(g.dtype) for x, g in zip(totals, grads, strict=True)])


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


@lru_cache(maxsize=64)
def _consecutive(count: int, arrival: tuple[int, ...]) -> tuple[int, ...]:
    """Horovod's split of the parameters into `count` groups: the first groups have one more if they aren't equal."""
    numbers = sorted(place % count for place in range(len(arrival)))
    groups = dict(zip(reversed(arrival), numbers, strict=True))
    return tuple(groups[place] for place in range(len(arrival)))


@lru_cache(maxsize=64)
def _matching(groups: tuple[tuple[str, ...], ...], paths: tuple[str, ...]) -> tuple[int, ...]:
    found: dict[str, int] = {}
    for place, patterns in enumerate(groups):
        for path in sorted(tree.wanted(patterns, paths, StrategyError, "HorovodStrategy.groups: ")):
            if found.setdefault(path, place) != place:
                raise StrategyError(
                    f"HorovodStrategy.groups: parameter {path!r} is in groups {found[path]} and {place}. Choose one."
                )
    return tuple(found.get(path, -1) for path in paths)


@extend.around("hook")
@dataclass(frozen=True)
class Scaled(hooks.CommHook):
    """`hook`, with Horovod's scaling of gradients, and for the gradients of several passes."""

    hook: hooks.CommHook
    op: Literal["average", "sum"] = "average"  # "sum" doesn't divide by n
    predivide: float | None = None  # f: divide by f before the sum, by n / f after it; None: by n before it
    passes: bool = False  # whether to add the gradients of earlier passes, which the communication state holds

    @property
    def state_names(self) -> tuple[str, ...]:
        return (*self.hook.state_names, PASSES) if self.passes else self.hook.state_names

    def init(self, param: torch.Tensor, path: str = "") -> LeafState:
        passes = {PASSES: torch.zeros_like(param, dtype=collectives.wide(param.dtype))} if self.passes else {}
        return {**self.hook.init(param, path), **passes}

    def packing(self, dtype: torch.dtype, axis_size: int) -> Packing:
        own = self.hook.packing(dtype, axis_size)
        scale = own.scale * axis_size
        if self.op == "sum":
            own = own._replace(scale=scale, counts_as=own.counts_as and own.counts_as * axis_size)
        elif self.predivide is not None:
            own = own._replace(scale=scale / self.predivide)
        # Passes are added before they are rounded; to the earlier ones no scale or weight has been applied.
        return own._replace(dtype=collectives.wide(dtype), proportional=False) if self.passes else own

    def reduce(self, inputs: hooks.BucketInput) -> hooks.Reduction:
        dtype, states, flat = inputs.bucket.dtype, inputs.states, inputs.flat
        if self.passes:
            earlier = torch.cat([state[PASSES].reshape(-1) for state in states])
            own, inner = (each.packing(dtype, inputs.axis_size) for each in (self, self.hook))
            flat = (flat + earlier * own.scale).to(inner.dtype)
            states = [{name: x for name, x in state.items() if name != PASSES} for state in states]
        total, after = yield from self.hook.reduce(replace(inputs, flat=flat, states=states))
        if self.passes:
            zeros = [torch.zeros_like(state[PASSES]) for state in inputs.states]
            after = [{**state, PASSES: zero} for state, zero in zip(after, zeros, strict=True)]
        if self.predivide is not None:
            total = total.to(dtype) * (self.predivide / inputs.axis_size)
        return total, after


in_half.register(Scaled, lambda hook, dtype: replace(hook, hook=hooks.cast(hook.hook, dtype)))


@lru_cache(maxsize=64)
def with_scaled_lr(optimizer: Optimizer, factor: int) -> Optimizer:
    """`optimizer` with `factor` times its learning rate. Raises StrategyError unless it is one of torch's."""
    scaled = optimizers.times_lr(optimizer, factor)
    if scaled is None:
        raise StrategyError(
            "HorovodStrategy.scale_lr multiplies the learning rate of ltx.optim.from_torch's optimizers, which "
            f"{optimizer!r} isn't one of. Scale its rate yourself."
        )
    return scaled


@dataclass(frozen=True)
class AdasumOfMoves(hooks.Adasum, extend.PostUpdateHook):
    """Moves the old parameters by the adaptive sum of the ranks' moves. Packing subtracts the new parameters from the
    old ones, in one pass; the adaptive sum of negated moves is the negated adaptive sum of moves, to the bit.
    """

    def begun(self, old: extend.Old) -> list[LeafState]:
        return [{START: start} for start in old.params]

    def packing(self, dtype: torch.dtype, axis_size: int) -> Packing:
        return Packing(super().packing(dtype, axis_size).dtype, -1.0, None, lambda state: [(state[START], 1.0)])

    def reduce(self, inputs: hooks.BucketInput) -> hooks.Reduction:
        total, _ = yield from super().reduce(inputs)
        return total, ()

    def finish_bucket(self, bucket: Bucket, reduced: extend.Reduced, old: extend.Old) -> extend.PostUpdateResult:
        back = buffers.unpack(reduced[0], bucket)
        if old.may_overwrite:
            return extend.PostUpdateResult(old.params, old.states, partial(torch._foreach_sub_, [*old.params], back))
        return extend.PostUpdateResult([torch.sub(p, b) for p, b in zip(old.params, back, strict=True)], old.states)
