"""Rules, which define the collectives of tensors, and the autograd Function that runs them.

A :class:`ltx.core.ranks.backings.Rule` says what a linear collective A does, and which rule is its transpose. The rest
follows: the tangent of A x is A applied to the tangent of x; the cotangent of x is the transpose of A applied to that
of A x, where the loss is the sum of all ranks' losses; and over any other level than the axis A has one more dimension
in front. A nonlinear collective is a rule too; its `weights` define the sum over ranks that is its derivative.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import compress, repeat
from typing import Any

import torch
from torch.autograd import forward_ad

from ltx.core.base import private, traced, tree
from ltx.core.base.errors import CollectiveError, UnsupportedError
from ltx.core.ranks.axis import Axis
from ltx.core.ranks.backings import Rule as Rule
from ltx.core.ranks.backings import Static as Static
from ltx.core.ranks.batched import in_front

RULES: dict[str, Rule] = {}


def add_rule(name: str, **fields: Any) -> None:
    """Add a rule to the table; the arguments are those of :class:`Rule`. The operation has its name by default."""
    RULES[name] = Rule(name, **{"operation": name, **fields})


@traced.at_trace_time
def entered(rule: Rule | str) -> str:
    """The name of a rule. A user's rule is added to the table."""
    if isinstance(rule, str):
        return rule
    if RULES.setdefault(rule.name, rule).stacked.__module__.startswith("ltx."):
        raise CollectiveError(f"ltx has a rule called {rule.name!r} already. Give yours another name.")
    RULES[rule.name] = rule
    return rule.name


class Function(torch.autograd.Function):
    """torch's Function with a faster ``apply``: torch's inspects forward's signature at each call (50 µs), from 2.14 on
    where ``setup_context`` is apart, so `_plain`, for calls outside of ``torch.func``, is both. Two faults of forward
    mode are mended: torch turns it off in a ``jvp``, where an outer level's tangents of tangents would be lost; and
    outside of torch.func it refuses a tangent that isn't a view where the output is one.
    """

    _recorded: _Recorded
    _plain: Any

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        run, push = cls.forward, cls.jvp

        def forward(*args: Any) -> Any:
            return _copies(run(*args)) if private.has_tangents() else run(*args)

        def _forward_and_context(ctx: Any, *args: Any) -> Any:
            outputs = _copies(run(*args)) if private.has_tangents() else run(*args)
            cls.setup_context(ctx, args, outputs)
            return outputs

        def jvp(ctx: Any, *tangents: Any) -> Any:
            with forward_ad._set_fwd_grad_enabled(True):
                return push(ctx, *tangents)

        forward.__signature__ = inspect.signature(run)  # type: ignore[attr-defined]
        cls.forward, cls.jvp = staticmethod(forward), staticmethod(jvp)  # type: ignore[method-assign]
        cls._plain = _in_one_level(cls.__name__, _forward_and_context, cls.backward, jvp)
        cls._recorded = _Recorded(cls)

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """torch's apply. Raises UnsupportedError if a tracer that can't see autograd Functions records the call."""
        if private.is_dispatched(private.AUTOGRAD_VMAP) and any(map(_batched_by_autograd, args)):
            return _batched_anew(cls.apply, args)
        if not private.in_transform():  # torch's own apply, without its work on each argument
            if any(map(private.is_wrapped, compress(args, map(isinstance, args, repeat(torch.Tensor))))):
                args = tuple([private.unwrapped_if_dead(x) if isinstance(x, torch.Tensor) else x for x in args])
            return cls._plain.apply(*args)
        traced.refuse_blind()
        level = private.innermost()
        if level.key() == private.TransformType.Grad and not torch.overrides.has_torch_function(args):
            return cls._recorded.apply(level, args)
        try:
            return super().apply(*args)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "NYI: Functionalize rule" in str(error):  # the error is torch's, at any level
                raise UnsupportedError(
                    "torch.func.functionalize can't look into ltx's collectives and data-parallel steps. Leave it out: "
                    "what ltx gives to make_fx and torch.compile is functional already."
                ) from None
            raise

    @classmethod
    def made(cls, node: Any) -> bool:
        """Whether a call outside of torch.func has made this `node` of a graph."""
        return isinstance(node, cls._plain._backward_cls)


def _copies(outputs: Any) -> Any:
    return outputs.clone() if isinstance(outputs, torch.Tensor) else tuple([y.clone() for y in outputs])


def _in_one_level(name: str, forward: Callable[..., Any], backward: Callable[..., Any], jvp: Callable[..., Any]) -> Any:
    """torch's Function of these rules, for calls that no transform looks at; `forward` takes the context too."""
    rules = {"forward": forward, "backward": backward, "jvp": jvp}
    return type(name, (private.SingleLevelFunction,), {key: staticmethod(rule) for key, rule in rules.items()})


class _Recorded:
    """The rule of a :class:`Function` at a level of ``torch.func.grad``, which records it; it runs below the level."""

    # torch's ``custom_function_call_grad`` does the same on trees, flattened eight times.

    def __init__(self, cls: type[Function]):
        self._cls = cls
        name, jvp = f"{cls.__name__}Generated", private.SingleLevelFunction.jvp
        self._recording = _in_one_level(name, self.forward, self.backward, jvp)

    def apply(self, level: Any, args: Sequence[Any]) -> Any:
        lift = level._cptr.lift
        given = [lift(private.unwrapped_if_dead(x)) if isinstance(x, torch.Tensor) else x for x in args]
        with private.in_single_level():
            return self._recording.apply(level, *given)

    def forward(self, ctx: Any, level: Any, *args: Any) -> Any:
        number = level.level()
        inner = [private.unwrap_for_grad(x, number) if isinstance(x, torch.Tensor) else x for x in args]
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), level.lower():
            outputs = self._cls.apply(*inner)
        same = dict(zip(map(id, inner), args, strict=True))  # autograd knows an input that is returned by its identity
        wrapped = [
            same[id(y)] if id(y) in same else private.wrap_for_grad(y, number) if isinstance(y, torch.Tensor) else y
            for y in (outputs if isinstance(outputs, tuple) else (outputs,))
        ]
        given = tuple(wrapped) if isinstance(outputs, tuple) else wrapped[0]
        self._cls.setup_context(ctx, args, given)
        return given

    def backward(self, ctx: Any, *cotangents: Any) -> Any:
        found = self._cls.backward(ctx, *cotangents)
        return (None, *(found if isinstance(found, tuple) else (found,)))


def _batched_by_autograd(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and private.is_batched_by_autograd(x)


def _batched_anew(fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    """``fn(*args)`` for arguments batched by torch.autograd's vmap, run under ``torch.vmap``, which supports rules."""
    level = private.enter_autograd_vmap() - 1
    private.leave_autograd_vmap()
    places = [i for i, x in enumerate(args) if _batched_by_autograd(x)]
    stacks = [private.out_of_autograd_vmap(args[i], level, 1, 0) for i in places]
    if any(map(_batched_by_autograd, stacks)):
        raise UnsupportedError(
            "a collective or data-parallel step inside several vectorised calls of torch.autograd, one in another. Use "
            "torch.func.jacrev and torch.func.jacfwd, which nest."
        )
    results = torch.vmap(lambda *xs: fn(*tree.at_places(args, places, xs)), randomness="different")(*stacks)
    # torch needs tangents whose batch dimension is the first in memory.
    if isinstance(results, torch.Tensor):
        return private.into_autograd_vmap(results.contiguous(), 0, level)
    return tuple([private.into_autograd_vmap(y.contiguous(), 0, level) for y in results])


class Linear(Function):
    """The collective of each tensor. `index`, the rank's on a simulated axis, else None, has functorch call the vmap
    rule at the axis' own level, even for tensors that are the same on every rank.
    """

    @staticmethod
    def forward(
        name: str, static: Static, axis: Axis, compiled: bool, index: torch.Tensor | None, *xs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return axis.ranks.collective(RULES[name], static, xs, compiled)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.name, ctx.static, ctx.axis, ctx.compiled, _, *xs = inputs
        ctx.shapes = [x.shape for x in xs]
        if RULES[ctx.name].weights is not None:
            ctx.save_for_backward(*xs, *output)
            ctx.save_for_forward(*xs, *output)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[Any, ...]:
        if RULES[ctx.name].weights is not None:
            return (None, None, None, None, None, *_by_weights(ctx, cotangents, backward=True))
        # Transposes may differ, so each tensor has its own call. The collectives are issued in the tensors' order.
        front = ctx.axis.ranks.levels.taken
        transposes = [RULES[ctx.name].transpose(shape[front:], ctx.static) for shape in ctx.shapes]
        grads: list[torch.Tensor] = []
        for (name, static), cotangent in zip(transposes, cotangents, strict=True):
            grads.extend(apply(entered(name), static, ctx.axis, [cotangent], ctx.compiled))
        return (None, None, None, None, None, *grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if RULES[ctx.name].weights is not None:
            return tuple(_by_weights(ctx, tangents[5:], backward=False))
        present = [t for t in tangents[5:] if t is not None]
        results = iter(apply(ctx.name, ctx.static, ctx.axis, present, ctx.compiled))
        return tuple(None if t is None else next(results) for t in tangents[5:])

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, name: str, static: Static, axis: Axis, compiled: bool, index: Any, *xs: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], tuple[int | None, ...]]:
        rule, dims = RULES[name], in_dims[5:]
        ranks: Any = axis.ranks
        # functorch has already removed the level whose rule it runs.
        if (private.maybe_current_level() or 0) + 1 in ranks.levels.numbers:
            stacks = in_front(info.batch_size, xs, dims)
            # the axis has several levels: the rule of the outermost one handles all
            if (below := ranks.levels.below) is not None:
                index, rest = index_below(index, in_dims[4]), axis.at(below)
                return Linear.apply(name, static, rest, compiled, index, *stacks), (0,) * len(xs)
            results = [ranks.on_stack(rule, static, axis.size, x) for x in stacks]
            return tuple(y for y, _ in results), tuple(0 if per_rank else None for _, per_rank in results)
        front = ranks.levels.taken
        outs: list[torch.Tensor] = []
        for x, dim in zip(xs, dims, strict=True):
            inner = static if dim is None else rule.batched(static)
            outs.extend(Linear.apply(name, inner, axis, compiled, index, x if dim is None else x.movedim(dim, front)))
        return tuple(outs), tuple(None if dim is None else front for dim in dims)


def index_below(index: torch.Tensor | None, dim: int | None) -> torch.Tensor | None:
    """`index` without the axis' innermost level, whose batch dimension is `dim`; it stays batched at the others."""
    return index if index is None or dim is None else index.select(dim, 0)


def _by_weights(ctx: Any, given: Sequence[torch.Tensor | None], backward: bool) -> list[torch.Tensor | None]:
    """Apply the derivative that a rule's weights define to tangents; with `backward`, its transpose to cotangents."""
    found: list[torch.Tensor | None] = []
    saved, weights = ctx.saved_tensors, RULES[ctx.name].weights
    assert weights is not None
    for x, y, change in zip(saved[: len(given)], saved[len(given) :], given, strict=True):
        if change is None or not x.is_floating_point():
            found.append(None)
            continue
        if not backward:  # torch has only level 0: tangents of x and y would count as tangents of the result's tangent
            x, y = (forward_ad.unpack_dual(value, level=0).primal for value in (x, y))
        w = weights(x, y)
        # One sum for both: a sum of `w` alone depends on no cotangent, so torch.compile would issue it in both graphs.
        both = torch.stack([change if backward else w * change, w], -1)
        total, whole = apply("psum", (), ctx.axis, [both], ctx.compiled)[0].unbind(-1)
        found.append(w * total / whole if backward else total / whole)
    return found


def only_at(value: torch.Tensor, n: int, rank: int) -> tuple[torch.Tensor, bool]:
    """A rule's stacked result in which `rank` gets `value`, and other ranks get zeros."""
    stack = torch.zeros((), dtype=value.dtype, device=value.device).expand(n, *value.shape)
    return torch.cat([stack[:rank], value.unsqueeze(0), stack[rank + 1 :]]), True


def apply(name: str, static: Static, axis: Axis, xs: list[torch.Tensor], compiled: bool = False) -> list[torch.Tensor]:
    if not xs:
        return []
    if not compiled and not _differentiated(xs):
        return list(Linear.forward(name, static, axis, compiled, None, *xs))
    return list(Linear.apply(name, static, axis, compiled, axis.batch_index, *xs))


def _differentiated(xs: list[torch.Tensor]) -> bool:
    """Whether the call may be differentiated or transformed. If not, 40 µs for a Function are saved."""
    if private.is_transforming() or private.is_dispatched(private.AUTOGRAD_VMAP):
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in xs)
