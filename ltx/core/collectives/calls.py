"""Calls of collectives: checks of the arguments, trees, the rule of the collective, nodes of compiled graphs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

import torch

from ltx.core import comm
from ltx.core.base import errors, private, traced, tree
from ltx.core.base.arguments import checked
from ltx.core.base.containers import of_array
from ltx.core.base.errors import AxisError, Kind, LtxError, UnsupportedError
from ltx.core.collectives.linear import RULES, Rule, Static, apply, entered
from ltx.core.comm.operations import SUMMED, as_bytes, as_it_is, from_bytes
from ltx.core.ranks.axis import Axis
from ltx.core.ranks.backings import OfTensor, Tensors
from ltx.typing import Tree

P = ParamSpec("P")
R = TypeVar("R")
StaticOf = Callable[[torch.Tensor, int], Static]

# All ranks know of these errors without being told.
_OF_THE_NETWORK = (
    *(errors.CollectiveTimeoutError, errors.DeadlockDetectedError, errors.PeerLostError, errors.RankMismatchError),
    *(errors.ReplicaDivergedError, errors.TransportError, errors.WorldError),
)


def counted(collective: Callable[P, R]) -> Callable[P, R]:
    """Decorate a collective so that a call that raises counts as a call: other ranks find out at their next call. If
    all have raised, they can go on together, even if their errors differ.
    """

    @functools.wraps(collective)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return collective(*args, **kwargs)
        try:
            return collective(*args, **kwargs)
        except Exception as error:
            if not isinstance(error, _OF_THE_NETWORK) and not hasattr(error, "_ltx_counted"):
                error._ltx_counted = True  # type: ignore[attr-defined]  # once, if collectives call each other
                with suppress(TypeError, LtxError):  # the arguments don't fit the signature, or there is no such axis
                    axis = inspect.signature(collective).bind(*args, **kwargs).arguments.get("axis")
                    # to resolve another kind of axis may open it, which all ranks have to do together
                    if isinstance(axis, Axis | str | None):
                        comm.resolve(axis).ranks.announce(comm.RAISED)
            raise

    return wrapped


def public(*names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a collective that is :func:`counted`, and whose arguments `names` are checked."""
    return lambda collective: counted(checked(*names)(collective))


def _found(axis: Any) -> Axis:
    """The axis that a user means by `axis`, or that has this key in a graph."""
    known = traced.kept(axis)
    return known if isinstance(known, Axis) else comm.resolve(axis)


@traced.at_trace_time
def prepare_trace(axis: Any) -> str:
    """The key of an axis for the nodes of a graph."""
    found = _found(axis)
    return traced.keep(f"{found.name!r} of {found.size}, {found.ranks!r}", found)


@traced.at_trace_time
def _prepare_groups(axis: Any, groups: tuple[tuple[int, ...], ...]) -> str:
    return prepare_trace(comm.InGroups(axis, groups))  # Dynamo can't make one


@traced.node
def in_graph(name: str, static: Static, axis_key: str, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(apply(name, static, _found(axis_key), list(xs), compiled=True))


def grouped(axis: Any, groups: Sequence[Sequence[int]] | None, equal: str = "") -> Any:
    """The axis of this rank's group. `equal`: the name of a collective that needs groups of equal size."""
    if groups is None:
        return axis
    lists = [list(group) for group in groups]
    if equal and len({len(group) for group in lists}) > 1:
        raise AxisError(
            f"{equal}: axis_index_groups={lists} are of unequal sizes, and what ranks get would have unequal shapes. "
            "Make them equal; psum, pmean, pmax and pmin take unequal ones."
        )
    key = tuple([tuple(group) for group in lists])
    return _prepare_groups(axis, key) if traced.recording() else comm.InGroups(axis, key)


def tensors_of(value: Tree, axis: Any) -> Tree:
    """`value`, with numbers and NumPy arrays turned into tensors on the axis' device; other leaves don't change."""
    leaves, spec = tree.flatten(value)
    if all(isinstance(x, torch.Tensor) for x in leaves):
        return value
    device = None if traced.recording() else comm.resolve(axis).ranks.device
    return tree.unflatten(spec, [_as_tensor(x, device) for x in leaves])


def _as_tensor(x: Any, device: torch.device | None) -> Any:
    of_numpy = type(x).__module__ == "numpy" and getattr(getattr(x, "dtype", None), "kind", "O") in "biufc"
    if not (of_numpy or isinstance(x, bool | int | float | complex)):
        return x
    try:
        return comm.to_device(torch.as_tensor(of_array(x), device="cpu"), device)
    except (OverflowError, RuntimeError, TypeError, ValueError):  # the number has more than 64 bits
        return x


def collective(
    rule: Rule | str, value: Tree, axis: Any = None, static: StaticOf = lambda x, n: (), then: OfTensor = as_it_is
) -> Tree:
    """Apply the collective of `rule` to every leaf of `value`.

    `rule` is a rule, or the name of one of ltx's. `value` and `axis` are those of the caller, as in :func:`ltx.psum`.
    ``static(leaf, number of ranks)`` returns the rule's static arguments, ints; ``then`` is applied to each result.
    """
    name = entered(rule)
    value = tensors_of(value, axis)
    leaves, spec = tree.flatten(value)
    if not RULES[name].moves and RULES[name].operation is not None:
        check_sums(name, leaves, value, "sums" if RULES[name].coded is None else "extrema")
    if RULES[name].weights is not None:
        refuse_leaves(name, leaves, value, torch.is_complex, f"and {name} takes real numbers alone.")

    def restored(moved: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> Tree:
        all_three = zip(leaves, moved, results, strict=True)
        return tree.unflatten(spec, [then(y if m is x else from_bytes(y, x.dtype)) for x, m, y in all_three])

    if traced.recording():
        key = prepare_trace(axis)
        size = traced_size(key)
        sent = [movable(name, x) for x in leaves]
        return restored(sent, [in_graph(name, static(x, size), key, m)[0] for x, m in zip(leaves, sent, strict=True)])
    check_dense(name, leaves, value)
    found = comm.resolve(axis)
    if found.ranks.overlaps:
        tree.check_values(leaves, value, name)
    groups = [static(x, found.size) for x in leaves]
    moved = [movable(name, x) for x in leaves]
    negotiate_tree(name, value, leaves, spec, groups, found, moved)
    if len(set(groups)) == 1:
        results = apply(name, groups[0], found, moved)
    else:
        results = [y for x, group in zip(moved, groups, strict=True) for y in apply(name, group, found, [x])]
    return restored(moved, results)


def checked_index(what: str, name: str, index: int, size: int) -> int:
    """`index`, the argument `name` of the collective `what`. Raises unless it is a rank of an axis of `size` ranks."""
    if not 0 <= index < size:
        raise AxisError(
            f"{what}: {name}={index} isn't an index on an axis of {size} ranks, 0 to {size - 1}. It counts on the "
            "axis, not in the world."
        )
    return index


def movable(name: str, x: torch.Tensor) -> torch.Tensor:
    """`x` as it is sent: as bytes, if torch's kernels don't know its dtype and it needs no gradient."""
    return x if x.dtype in SUMMED or x.requires_grad or not RULES[name].moves else as_bytes(x)


def check_dense(name: str, leaves: list[Any], value: Tree) -> None:
    """Raise unless every leaf is a strided tensor, which holds its numbers itself."""
    tree.check_leaves(leaves, value, f"{name}: its argument")
    tree.check_dense(leaves, value, name, "Only ltx.psum and ltx.pmean take sparse tensors (COO): use x.to_dense().")
    for place, x in enumerate(leaves):
        if not (private.has_memory(x) or isinstance(x, private.FakeTensor) or private.has_memory(private.in_memory(x))):
            raise UnsupportedError(
                f"{name}: leaf {tree.leaf_paths(value)[place]!r} is a {type(x).__name__}, which holds its numbers in "
                "other tensors, and a plain tensor was expected. Pass those."
            )


def check_sums(name: str, leaves: list[Any], value: Tree, what: str = "sums") -> None:
    """Raise for dtypes that have no sums or extrema, before anything is sent."""
    refuse_leaves(name, leaves, value, lambda x: x.dtype not in SUMMED, f"which has no {what}. Cast it.")


def refuse_leaves(
    name: str, leaves: list[Any], value: Tree, is_bad: Callable[[Any], bool], why: str, error: Kind = UnsupportedError
) -> None:
    """Raise `error` for the first tensor that `is_bad`, with its path, shape and dtype."""
    for place, x in enumerate(leaves):
        if isinstance(x, torch.Tensor) and is_bad(x):
            traced.refuse(f"{name}: leaf {tree.leaf_paths(value)[place]!r} is {tree.describe(x)}, {why}", error)


def negotiate_tree(
    name: str, value: Tree, leaves: list[Any], spec: Any, groups: list[Static], axis: Axis, moved: Tensors = ()
) -> None:
    """Let ranks compare a collective of a tree, with its paths. `moved`: the tensors to be sent, if not the leaves."""
    arguments = f"arguments {sorted(set(groups))}" if any(groups) else ""
    agreed = axis.ranks.confirm(
        # Signatures have paths only, so a list on one rank and a tuple on another are the same call.
        lambda: (name, tree.spec_paths(spec), tuple([(x.shape, x.dtype) for x in leaves]), tuple(groups)),
        lambda: comm.Signature.of(name, tree.leaf_paths(value), leaves, arguments),
    )
    # Functions compare each tensor again, since collectives of derivatives have no tree.
    axis.ranks.agree((comm.key_of(name, x, group) for x, group in zip(moved or leaves, groups, strict=True)), agreed)


@traced.at_trace_time
def traced_size(key: str) -> int:
    return _found(key).size


@traced.at_trace_time
def known_rank(axis: Any) -> int | None:
    """This rank's index on an axis, or on the one with a key; None if it is simulated."""
    rank = _found(axis).rank
    return rank if isinstance(rank, int) else None


@traced.at_trace_time
def traced_processes(key: str) -> bool:
    return _found(key).ranks.overlaps and _found(key).size > 1


@traced.node
def in_graph_index(key: str) -> torch.Tensor:
    return _found(key).index()
