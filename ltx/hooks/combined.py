"""Combinators: after(step, hook), chain(hook, ...), cast(hook, dtype)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Any, ClassVar

import torch

from ltx import extend
from ltx.errors import StrategyError
from ltx.extend import Bucket, LeafState, Packing, arguments, around, brief, drive_within, needs, tree
from ltx.hooks import BucketInput, CollectiveRequest, CommHook
from ltx.hooks.half import BF16, FP16
from ltx.hooks.lossy import Compression, CompressionResult, LossyHook
from ltx.hooks.plain import EXACT, Noop

_HALVES: dict[torch.dtype, CommHook] = {torch.float16: FP16(), torch.bfloat16: BF16()}


def furthest(hooks: Sequence[CommHook]) -> str:
    """The `reach` of hooks together: an element depends on what any of them makes it depend on."""
    return str(max((hook.reach for hook in hooks), key=("element", "bucket", "parameter").index))


class Several(CommHook):
    """The base of hooks made of several hooks, `members`, one of which reduces a bucket."""

    members: Any  # a field or a property, tuple[CommHook, ...]

    def of(self, make: Callable[[CommHook], CommHook]) -> CommHook:
        """A copy of this hook in which each member is replaced by ``make(member)``."""
        raise NotImplementedError

    # These two stand apart, as steps ask for them.

    @property
    def state_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for hook in self.members for name in hook.state_names))

    @property
    def alike(self) -> bool:
        return all(hook.alike for hook in self.members)

    @property
    def offers(self) -> extend.HookOffers:
        each: list[extend.HookOffers] = [hook.offers for hook in self.members]
        ends = [one.constant_after for one in each if one.constant_after is not None]

        def phases(axis_size: int) -> int:
            return max(needs.phases_on(one, axis_size) for one in each)

        return extend.HookOffers(
            exact=all(one.exact for one in each),
            alike=self.alike,
            sums=all(one.sums for one in each),
            reach=furthest(self.members),
            state_names=self.state_names,
            reads_step=any(one.reads_step for one in each),
            constant_after=max(ends) if len(ends) == len(each) else None,
            phases=phases,
        )

    def each(self, paths: Sequence[str], *, part: bool = False) -> Sequence[CommHook] | None:
        return None if all(hook.each(paths, part=part) is None for hook in self.members) else [self] * len(paths)


def with_error_feedback(hook: CommHook) -> CommHook | None:
    """`hook` with error feedback; None if it makes no error."""
    if isinstance(hook, Several) and any(map(with_error_feedback, hook.members)):
        return hook.of(lambda member: with_error_feedback(member) or member)
    return replace(hook, error_feedback=True) if isinstance(hook, LossyHook) else None


@arguments.checked("hook")
def error_feedback(hook: CommHook) -> CommHook:
    """`hook` with error feedback: what it doesn't send at a step is added to the next step's gradients.

    Args:
        hook: a lossy hook, or a combination of lossy hooks.

    Returns:
        The same hook with communication state ("residual", one tensor of each parameter's shape).

    Raises:
        StrategyError: the hook is exact, or has no compression error to feed back.

    Source: Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes", 2019.

    Example:
        >>> import ltx
        >>> ltx.hooks.error_feedback(ltx.hooks.ByteGrad())
        ByteGrad(error_feedback=True)
    """
    fed = with_error_feedback(hook)
    needs.require("error feedback, hook", hook, "", fed)
    assert fed is not None
    return fed


@dataclass(frozen=True)
class After(Several):
    """`first` at the synchronised steps before `step`, `hook` from `step` on; made by :func:`after`."""

    reads_step: ClassVar[bool] = True

    step: int
    hook: CommHook
    first: CommHook = EXACT

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.check_whole(self, 0, "step")

    @property
    def members(self) -> tuple[CommHook, ...]:
        return self.first, self.hook

    def of(self, make: Callable[[CommHook], CommHook]) -> CommHook:
        return replace(self, hook=make(self.hook), first=make(self.first))

    def init(self, param: torch.Tensor, path: str = "") -> LeafState:
        first, later = self.first.init(param, path), self.hook.init(param, path)
        for name in first.keys() & later.keys():  # both hooks use the same tensor
            before, behind = tree.describe(first[name]), tree.describe(later[name])
            if before != behind:
                raise StrategyError(
                    f"after: {self.first!r} keeps {name!r} of parameter {path!r} as {before}, with which {self.hook!r} "
                    f"goes on from step {self.step} on, and has {behind}. Give both the fields that it follows from."
                )
        return {**first, **later}

    def at(self, step: int) -> CommHook:
        return self.first.at(step) if step < self.step else self.hook.at(step)

    @property
    def constant_after(self) -> int | None:
        last_change = self.hook.constant_after
        return None if last_change is None else max(self.step, last_change)


def after(step: int, hook: CommHook, first: CommHook | None = None) -> After:
    """Warm-up: `first` (the exact mean if None) at the synchronised steps before `step`, `hook` from `step` on.

    A step with such a hook needs communication state, at least for the count of steps. If both hooks keep a state of
    the same name, such as a residual, it is one tensor: `hook` goes on with what `first` has left.

    Example:
        >>> import ltx
        >>> hook = ltx.hooks.after(100, ltx.hooks.ByteGrad())
        >>> hook.at(99), hook.at(100)
        (AllReduce(), ByteGrad())
    """
    return After(step, hook, EXACT if first is None else first)


@around("hook")
@dataclass(frozen=True)
class Chain(LossyHook):
    """`hook`, whose sums over ranks are done by `inner`; made by :func:`chain` and :func:`cast`."""

    hook: CommHook
    inner: CommHook

    def __post_init__(self) -> None:
        super().__post_init__()
        needs.require("chain, outer hook", self.hook, f"chain: {self.inner!r}")
        needs.require("chain, inner hook", self.inner, f"chain: {self.hook!r}")
        needs.require("state in a chain, inner hook", self.inner, f"chain: {self.hook!r}")
        if self.error_feedback:
            object.__setattr__(self, "hook", with_error_feedback(self.hook) or self.hook)  # whose state the chain uses
        elif isinstance(self.hook, LossyHook) and self.hook.error_feedback:
            object.__setattr__(self, "error_feedback", True)
        if self.error_feedback:
            with_error_feedback(self.inner)  # raises if the inner hook's errors are too large to feed back

    @property
    def reads_step(self) -> bool:
        return bool(self.hook.reads_step or self.inner.reads_step)

    def phases(self, axis_size: int) -> int:
        return needs.phases_on(self.hook, axis_size) * needs.phases_on(self._inner, axis_size)

    @property
    def sums(self) -> bool:
        return bool(self.inner.sums)

    @property
    def _inner(self) -> CommHook:
        """The inner hook as it runs: with error feedback it has to tell what it sent."""
        return (with_error_feedback(self.inner) if self.error_feedback else None) or self.inner

    @property
    def reach(self) -> str:
        return furthest((self.hook, self.inner))

    @property
    def state_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*super().state_names, *self.hook.state_names)))

    def init(self, param: torch.Tensor, path: str = "") -> LeafState:
        return {**super().init(param, path), **self.hook.init(param, path)}

    def at(self, step: int) -> CommHook:
        hook, inner = self.hook.at(step), self.inner.at(step)
        return self if (hook, inner) == (self.hook, self.inner) else replace(self, hook=hook, inner=inner)

    @property
    def constant_after(self) -> int | None:
        hook, inner = self.hook.constant_after, self.inner.constant_after
        return None if hook is None or inner is None else max(hook, inner)

    def packing(self, dtype: torch.dtype, axis_size: int) -> Packing:
        packing = self.hook.packing(dtype, axis_size)
        if self.error_feedback:
            own = super().packing(dtype, axis_size)
            packing = packing._replace(dtype=own.dtype, terms=own.terms)
        self.inner.packing(packing.dtype, axis_size)  # raises for gradients that the inner hook doesn't take
        return packing

    def send(self, inputs: BucketInput) -> Compression:
        hook = self.hook
        sending = hook.send(inputs) if isinstance(hook, LossyHook) else _send_all(hook, inputs)

        def answer(request: CollectiveRequest) -> Any:
            if request.operation != "psum" or not request.buffer.is_floating_point():
                return (yield request)
            total, request.sent = yield from self._sum(request.buffer, inputs)
            return total

        sent: CompressionResult = yield from drive_within(sending, answer)
        return sent

    def _sum(self, buffer: torch.Tensor, inputs: BucketInput) -> Any:
        """(the sum of `buffer` by the inner hook, a function that returns this rank's part of the sum)."""
        shape, dtype = buffer.shape, buffer.dtype
        bucket = Bucket.of(inputs.bucket.index, [buffer])
        hook = self._inner
        flat = buffer.reshape(-1).to(hook.packing(dtype, inputs.axis_size).dtype)
        inner = replace(inputs, flat=flat, bucket=bucket, states=({},))
        if isinstance(hook, LossyHook):
            given = flat.clone() if self.error_feedback else flat
            sent = yield from hook.send(inner)
            return sent.total.to(dtype).view(shape), lambda: given.sub_(sent.left()).to(dtype).view(shape)
        total, _ = yield from hook.reduce(inner)
        return total.to(dtype).view(shape), None


def _send_all(hook: CommHook, inputs: BucketInput) -> Compression:
    """Run an exact hook's `reduce` as a `send`: it leaves what an inner hook leaves of the hook's only sum."""
    sums: list[tuple[CollectiveRequest, torch.Tensor]] = []

    def answer(request: CollectiveRequest) -> Any:
        if sums:
            raise StrategyError(f"chain: {hook!r} asks for several sums, so it must be a hooks.LossyHook.")
        sums.append((request, request.buffer.clone()))
        return (yield request)

    flat, states = yield from drive_within(hook.reduce(inputs), answer)
    request, given = sums[0]
    return CompressionResult(flat, lambda: given.sub_(given if request.sent is None else request.sent()), states)


@arguments.checked("hook")
def chain(hook: CommHook, *inner: CommHook) -> CommHook:
    """`hook`, whose sums over ranks are done by the next hook, whose sums are done by the next, and so on.

    So ``chain(RandomK(0.1), ByteGrad())`` sends a tenth of the numbers, in eight bits each.

    Args:
        hook: a hook that asks for sums: AllReduce, FP16, BF16, RandomK, PowerSGD, BatchedPowerSGD, or a chain of them.
        inner: hooks that keep no state. Error feedback, in `hook` or around the chain, feeds their losses back too.

    Raises:
        StrategyError: these hooks can't be combined in this way.

    Example:
        >>> import ltx
        >>> ltx.hooks.chain(ltx.hooks.RandomK(0.1, error_feedback=False), ltx.hooks.BF16())
        Chain(hook=RandomK(ratio=0.1, error_feedback=False), inner=BF16())
    """
    return _chained(hook, chain(*inner)) if inner else hook


def _chained(hook: CommHook, inner: CommHook) -> CommHook:
    # A schedule of chains is made now, so that an invalid chain is refused here and not at its first step.
    if isinstance(hook, Several):
        return hook.of(lambda member: _chained(member, inner))
    if isinstance(inner, Several):
        return inner.of(lambda member: _chained(hook, member))
    return Chain(hook, inner)


@arguments.checked("hook", "dtype")
def cast(hook: CommHook, dtype: torch.dtype) -> CommHook:
    """`hook` with sums in half precision, as torch's fp16_compress_wrapper and bf16_compress_wrapper do.

    torch's wrappers round the gradients before the hook sees them; `cast` rounds the buffers that the hook sends.

    Args:
        hook: a hook that asks for sums over ranks.
        dtype: torch.float16 or torch.bfloat16.

    Example:
        >>> import torch, ltx
        >>> ltx.hooks.cast(ltx.hooks.AllReduce(), torch.bfloat16)
        BF16()
    """
    half = _HALVES.get(dtype)
    if half is None:
        raise StrategyError(f"cast: dtype must be torch.float16 or torch.bfloat16, got {brief(dtype)}.")
    return half if hook == EXACT else in_half(hook, dtype)


@singledispatch
def in_half(hook: CommHook, dtype: torch.dtype) -> CommHook:
    """`hook`, which isn't AllReduce, with sums in `dtype`. Hooks that do it by themselves are registered."""
    return chain(hook, _HALVES[dtype])


in_half.register(Noop, lambda hook, dtype: hook)
in_half.register(extend.PostUpdateHook, lambda hook, dtype: hook)  # Precision.reduce is for gradients
in_half.register(Several, lambda hook, dtype: hook.of(lambda member: cast(member, dtype)))
