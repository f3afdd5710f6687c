"""The mechanism that every collective of tensors shares: a rule, and one autograd Function that follows rules.

A linear collective A is given by a :class:`Rule`: what it does on a process group, on the stacked values of ranks in
one process, on an axis of size 1, and which rule is its transpose. Everything else follows from linearity:

* forward mode: the tangent of A x is A applied to the tangent of x;
* reverse mode: the cotangent of x is the transpose of A applied to the cotangent of A x, where the loss is the sum over
  ranks of each rank's loss;
* vmap over any level that isn't the axis itself: one more dimension in front;
* any order of these, any number of times, since each recurses through the same Function.

A collective that isn't linear is a rule too: it says by which sum over ranks it is differentiated (`weights`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ParamSpec

import torch
from torch._C import _functorch
from torch.autograd import forward_ad

from ltx.core import comm
from ltx.core.base import traced
from ltx.core.base.errors import UnsupportedError
from ltx.core.collectives.futures import Arrived, Pending
from ltx.core.comm.operations import OPERATIONS
from ltx.core.ranks.axis import Axis
from ltx.core.ranks.backings import MetaBacking, VmapBacking

P = ParamSpec("P")

#: Static arguments of a rule: ints only, so that they can be constants of a compiled graph.
Static = tuple[int, ...]


@dataclass(frozen=True)
class Rule:
    """One collective. `x` is one rank's tensor, `n` the axis' size.

    Attributes:
        name: the collective's name; also its key in :data:`RULES`.
        operation: the operation that a channel issues (:mod:`ltx.core.comm.operations`); None if nothing moves.
        stacked: ``(xs, n, static) -> (ys, per_rank)`` on the stack of all ranks' values, shape ``(n, *x.shape)``. With
            `per_rank` the result is a stack again, else it is the one value that all ranks get.
        transpose: ``(shape of x, static)`` -> name and static arguments of the transpose, of a linear collective.
        weights: ``(x, y)`` -> w, of one that isn't linear: its derivative at x is psum(w · ẋ) / psum(w).
        before: ``(x, n, static)`` -> a contiguous buffer; the channel overwrites it where the operation does.
        coded: what is sent instead of that buffer where the backend, and not ltx, computes with it; None: the buffer.
        after: ``(result, x, rank, n, static)`` -> the value; `result` belongs to the caller, of `x` the dtype is asked.
        alone: ``(x, static)`` -> the value on an axis of size 1.
        batched: `static` for an x with one more dimension in front.
        arguments: the operation's arguments, from `static`.
        keeps_strides: the value, of x's shape, has x's memory layout on that rank (channels last, for example). What is
            sent is contiguous, because ranks' tensors may have different layouts.
    """

    name: str
    operation: str | None
    stacked: Callable[[torch.Tensor, int, Static], tuple[torch.Tensor, bool]]
    transpose: Callable[[torch.Size, Static], tuple[str, Static]] = lambda shape, static: ("psum", ())
    weights: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    before: Callable[[torch.Tensor, int, Static], torch.Tensor] = lambda x, n, static: x.contiguous()
    coded: Callable[[torch.Tensor], torch.Tensor] | None = None
    after: Callable[[torch.Tensor, torch.Tensor, int, int, Static], torch.Tensor] = lambda result, x, rank, n, static: (
        result
    )
    alone: Callable[[torch.Tensor, Static], torch.Tensor] = lambda x, static: x
    batched: Callable[[Static], Static] = lambda static: static
    arguments: Callable[[Static], Static] = lambda static: ()
    keeps_strides: bool = False

    @property
    def moves(self) -> bool:
        """Whether nothing is computed with the data, so that it may travel as bytes."""
        return self.operation is not None and OPERATIONS[self.operation].moves


RULES: dict[str, Rule] = {}


def at_places(values: Sequence[Any], places: Sequence[int], others: Iterable[Any]) -> list[Any]:
    """`values` with `others` at these places."""
    filled = list(values)
    for place, other in zip(places, others, strict=True):
        filled[place] = other
    return filled


def _entering(make: Callable[P, Rule]) -> Callable[P, None]:
    def add(*args: P.args, **kwargs: P.kwargs) -> None:
        rule = make(*args, **kwargs)
        RULES[rule.name] = rule

    return add


#: Enter a rule into the table: with the arguments of :class:`Rule`.
add_rule = _entering(Rule)


class Function(torch.autograd.Function):
    """A typed ``apply``, and one look at forward's signature, where torch 2.13 takes one at each call (50 µs).

    Forward mode is mended in two ways. torch turns it off while it runs a ``jvp``: the tangents' own tangents, of an
    outer level, would be lost without a word. And outside of torch.func it refuses a tangent that is no view where the
    output is one.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        run, push = cls.forward, cls.jvp

        def forward(*args: Any) -> Any:
            outputs = run(*args)
            if forward_ad._current_level < 0:
                return outputs
            return outputs.clone() if isinstance(outputs, torch.Tensor) else tuple([y.clone() for y in outputs])

        def jvp(ctx: Any, *tangents: Any) -> Any:
            with forward_ad._set_fwd_grad_enabled(True):
                return push(ctx, *tangents)

        forward.__signature__ = inspect.signature(run)  # type: ignore[attr-defined]
        cls.forward, cls.jvp = staticmethod(forward), staticmethod(jvp)  # type: ignore[method-assign]

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """torch's apply.

        Raises:
            UnsupportedError: a tracer records the call, and torch can't let it see autograd Functions.
        """
        if in_autograd_vmap() and any(map(_batched_by_autograd, args)):
            return _batched_anew(cls.apply, args)
        if torch._C._are_functorch_transforms_active():
            traced.refuse_blind()
        try:
            return super().apply(*args)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "NYI: Functionalize rule" in str(error):  # torch's, at whichever level it is
                raise UnsupportedError(
                    "torch.func.functionalize can't look into ltx's collectives and data-parallel steps. Leave it out: "
                    "what ltx gives to make_fx and torch.compile is functional already."
                ) from None
            raise


def in_autograd_vmap() -> bool:
    """Whether torch.autograd batches, by a vmap of its own: ``vectorize=True`` or ``is_grads_batched=True``."""
    return torch._C._dispatch_tls_is_dispatch_key_included("VmapMode")


def _batched_by_autograd(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and _functorch.is_legacy_batchedtensor(x)


def _batched_anew(fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    """``fn(*args)``, where torch.autograd has batched some of `args`, by ``torch.vmap``, for which there are rules."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    places = [i for i, x in enumerate(args) if _batched_by_autograd(x)]
    stacks = [torch._remove_batch_dim(args[i], level, 1, 0) for i in places]
    if any(map(_batched_by_autograd, stacks)):
        raise UnsupportedError(
            "a collective or data-parallel step inside several vectorised calls of torch.autograd, one in another. Use "
            "torch.func.jacrev and torch.func.jacfwd, which nest."
        )

    results = torch.vmap(lambda *xs: fn(*at_places(args, places, xs)), randomness="different")(*stacks)
    # Contiguous: torch asks for tangents whose batch dimension is the first in memory too.
    if isinstance(results, torch.Tensor):
        return torch._add_batch_dim(results.contiguous(), 0, level)
    return tuple([torch._add_batch_dim(y.contiguous(), 0, level) for y in results])


class Linear(Function):
    """``Linear.apply(rule name, static, axis, compiled, index, *tensors)``: the collective of each tensor.

    `index` is the rank's position on a simulated axis and None elsewhere. It is an input so that functorch calls the
    vmap rule at the axis' own level even for tensors that are the same on every rank.
    """

    @staticmethod
    def forward(
        name: str, static: Static, axis: Axis, compiled: bool, index: torch.Tensor | None, *xs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        rule = RULES[name]
        if axis.backing is None:
            # New memory, as on every other backing.
            return tuple(
                _fresh(y, x) if rule.operation is None else y.clone() for x in xs for y in [rule.alone(x, static)]
            )
        if axis.threads:
            return _among_threads(axis.threads, rule, static, xs)
        if axis.meta:
            return tuple(_on_shapes(rule, static, axis, axis.meta, x) for x in xs)
        assert axis.comm, "a simulated axis is peeled by the vmap rule"
        axis_comm: comm.AxisComm = axis.comm
        if compiled:
            waits = [_begin_compiled(axis_comm, rule, x, static) for x in xs]
            pairs = list(zip(waits, xs, strict=True))
            return tuple(_fresh(rule.after(wait(), x, axis_comm.rank, axis.size, static), x) for wait, x in pairs)
        works = [begin(axis_comm, rule, x, static) for x in xs]
        return tuple(finished(axis_comm, rule, x, static, work.wait()) for x, work in zip(xs, works, strict=True))

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
        # One call for each distinct transpose keeps the order of issues that of the tensors.
        front = ctx.axis.simulated.taken if ctx.axis.simulated else 0
        transposes = [RULES[ctx.name].transpose(shape[front:], ctx.static) for shape in ctx.shapes]
        grads: list[torch.Tensor] = []
        for (name, static), cotangent in zip(transposes, cotangents, strict=True):
            grads.extend(apply(name, static, ctx.axis, [cotangent], ctx.compiled))
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
        info: Any,
        in_dims: tuple[Any, ...],
        name: str,
        static: Static,
        axis: Axis,
        compiled: bool,
        index: torch.Tensor | None,
        *xs: torch.Tensor,
    ) -> tuple[tuple[torch.Tensor, ...], tuple[int | None, ...]]:
        rule, dims = RULES[name], in_dims[5:]
        simulated = axis.simulated
        # functorch has taken the level whose rule it runs off its stack.
        if simulated and (_functorch.maybe_current_level() or 0) + 1 == simulated.level:
            below = simulated.below
            if below is not None:  # a level of several: the outermost one's rule does it
                rest, stacks = replace(axis, backing=below), _in_front(info.batch_size, xs, dims)
                all_ranks = Linear.apply(name, static, rest, compiled, index_below(index, in_dims[4]), *stacks)
                return all_ranks, (0,) * len(xs)
            results = [_on_stack(simulated, rule, static, axis.size, x, dim) for x, dim in zip(xs, dims, strict=True)]
            return tuple(y for y, _ in results), tuple(0 if per_rank else None for _, per_rank in results)
        front = simulated.taken if simulated else 0
        outs: list[torch.Tensor] = []
        for x, dim in zip(xs, dims, strict=True):
            inner = static if dim is None else rule.batched(static)
            outs.extend(Linear.apply(name, inner, axis, compiled, index, x if dim is None else x.movedim(dim, front)))
        return tuple(outs), tuple(None if dim is None else front for dim in dims)


def index_below(index: torch.Tensor | None, dim: int | None) -> torch.Tensor | None:
    """The index of an axis of several levels once its innermost level is off: batched at the others, as before."""
    return index if index is None or dim is None else index.select(dim, 0)


def _by_weights(ctx: Any, given: Sequence[torch.Tensor | None], backward: bool) -> list[torch.Tensor | None]:
    """The derivative that a rule's weights say, of tangents; or, `backward`, its transpose, of cotangents."""
    found: list[torch.Tensor | None] = []
    saved, weights = ctx.saved_tensors, RULES[ctx.name].weights
    assert weights is not None
    for x, y, change in zip(saved[: len(given)], saved[len(given) :], given, strict=True):
        if change is None or not x.is_floating_point():
            found.append(None)
            continue
        w = weights(x, y)
        total, whole = apply("psum", (), ctx.axis, [change if backward else w * change, w], ctx.compiled)
        found.append(w * total / whole if backward else total / whole)
    return found


def _in_front(size: int, xs: Sequence[torch.Tensor], dims: Sequence[int | None]) -> list[torch.Tensor]:
    pairs = zip(xs, dims, strict=True)
    return [x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0) for x, dim in pairs]


def _on_stack(
    backing: VmapBacking, rule: Rule, static: Static, n: int, x: torch.Tensor, dim: int | None
) -> tuple[torch.Tensor, bool]:
    """The rule's `stacked` on the values of all `n` simulated ranks of an axis."""
    part = backing.part
    world = n if part is None else part.world
    if backing.dims:
        size = next(size for level, size in backing.dims if level == backing.level)
        flat = backing.stacked(_in_front(size, [x], [dim])[0])
        y, per_rank = _on_stack(replace(backing, dims=()), rule, static, n, flat, 0)
        # Every level has got its dimension, so every level gets one back.
        return backing.unstacked(y if per_rank else y.expand(world, *y.shape)), True
    (xs,) = _in_front(world, [x], [dim])
    if part is None:
        return rule.stacked(xs, n, static)
    by_group = torch.cat(
        [
            y if per_rank else y.expand(len(group), *y.shape)
            for group in part.groups
            for y, per_rank in [rule.stacked(xs[torch.tensor(group, device=xs.device)], len(group), static)]
        ]
    )
    return by_group[part.order.to(xs.device)], True


def only_at(value: torch.Tensor, n: int, rank: int) -> tuple[torch.Tensor, bool]:
    """What a Rule's `stacked` gives where `rank` alone gets `value`, and the others zeros."""
    stack = torch.zeros((), dtype=value.dtype, device=value.device).expand(n, *value.shape)
    return torch.cat([stack[:rank], value.unsqueeze(0), stack[rank + 1 :]]), True


def _among_threads(
    threads: comm.ThreadComm, rule: Rule, static: Static, xs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    if rule.operation is None:
        return tuple(
            _fresh(rule.after(rule.before(x, threads.size, static), x, threads.rank, threads.size, static), x)
            for x in xs
        )
    found = threads.exchange(
        _signature_of(rule.name, xs, static),
        xs,
        lambda values: _each_rank(rule, static, values),
    )
    if rule.keeps_strides:
        return tuple(y if x.is_contiguous() else torch.empty_like(x).copy_(y) for y, x in zip(found, xs, strict=True))
    return tuple(found)


def _each_rank(rule: Rule, static: Static, values: list[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """What each rank gets for its `values`, one or more tensors. In new memory."""
    n = len(values)
    results = [rule.stacked(torch.stack(column), n, static) for column in zip(*values, strict=True)]
    return [[(y[rank] if per_rank else y).clone() for y, per_rank in results] for rank in range(n)]


def _on_shapes(rule: Rule, static: Static, axis: Axis, backing: MetaBacking, x: torch.Tensor) -> torch.Tensor:
    if rule.operation is None:
        return rule.before(x, axis.size, static)
    answer = backing.answer(rule.operation, rule.before(x, axis.size, static), rule.arguments(static), axis)
    return rule.after(answer, x, backing.rank, axis.size, static)


def _fresh(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y.view_as(y) if y is x else y


def begin(axis_comm: comm.AxisComm, rule: Rule, x: torch.Tensor, static: Static, label: str = "") -> Pending:
    """Start a rule's operation. With a `label`, which the ledger and errors show, x may change meanwhile."""
    if rule.operation is None:
        return Arrived(rule.before(x, axis_comm.size, static))
    key = key_of(rule.name, x, static)
    axis_comm.negotiate_issue(axis_comm.user, key, lambda: _signature_of(rule.name, [x], static))
    buffer = rule.before(x, axis_comm.size, static)
    if rule.coded is not None and not axis_comm.user.uses_transport(buffer):
        buffer = rule.coded(buffer)
    if buffer.numel() == 0:  # backends refuse empty buffers; every rank has the same shape, so none waits
        return Arrived(OPERATIONS[rule.operation].new_result(buffer, axis_comm.size))
    if label and buffer.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
        buffer = buffer.clone()
    return axis_comm.user.issue(rule.operation, buffer, label or rule.name, rule.arguments(static))


def finished(
    axis_comm: comm.AxisComm, rule: Rule, x: torch.Tensor, static: Static, result: torch.Tensor
) -> torch.Tensor:
    """The value that the rule makes of the operation's result."""
    y = _fresh(rule.after(result, x, axis_comm.rank, axis_comm.size, static), x)
    return y if x.is_contiguous() or not rule.keeps_strides else torch.empty_like(x).copy_(y)


def key_of(name: str, x: torch.Tensor, static: Static = ()) -> tuple[Any, ...]:
    """What tells the signature of a single tensor's collective apart from others."""
    return (name, x.shape, x.dtype, static)


def _signature_of(name: str, xs: Sequence[torch.Tensor], static: Static) -> comm.Signature:
    """What ranks compare of a collective of tensors, which have no paths."""
    return comm.Signature.of(name, ["<tensor>"] * len(xs), list(xs), f"arguments {static}" if static else "")


def _begin_compiled(
    axis_comm: comm.AxisComm, rule: Rule, x: torch.Tensor, static: Static
) -> Callable[[], torch.Tensor]:
    n, name = axis_comm.size, axis_comm.user.group_for(x.device).group_name
    buffer = rule.before(x, n, static)
    if rule.operation is None:
        return lambda: buffer
    if rule.coded is not None:
        buffer = rule.coded(buffer)
    operation = OPERATIONS[rule.operation]
    if buffer.numel() == 0:  # see begin
        return lambda: operation.new_result(buffer, n)
    return operation.begin_in_graph(buffer, n, name, rule.arguments(static))


def apply(name: str, static: Static, axis: Axis, xs: list[torch.Tensor], compiled: bool = False) -> list[torch.Tensor]:
    """The collective `name` of each of `xs` on `axis`."""
    if not xs:
        return []
    if not compiled and not _differentiated(xs):
        return list(Linear.forward(name, static, axis, compiled, None, *xs))
    index = axis.index() if axis.simulated else None
    return list(Linear.apply(name, static, axis, compiled, index, *xs))


def _differentiated(xs: list[torch.Tensor]) -> bool:
    """Whether anything may differentiate or transform the call: entering a Function takes 40 µs."""
    return (
        torch._C._are_functorch_transforms_active()
        or in_autograd_vmap()
        or forward_ad._current_level >= 0
        or (torch.is_grad_enabled() and any(x.requires_grad for x in xs))
    )
