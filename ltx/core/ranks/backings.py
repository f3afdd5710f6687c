"""The ranks of an axis: one interface, :class:`Ranks`, and the :class:`Rule` of a collective.

Ranks are processes (:class:`ltx.core.comm.processes.ProcessRanks`), entries of a vmap level, or one rank alone. Code
that uses an axis calls its ranks' methods, and never asks which kind they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

#: Static arguments of a rule: ints only, so that they can be constants of a compiled graph.
Static = tuple[int, ...]
Tensors = Sequence[torch.Tensor]
#: (a stack of all ranks' values, True), or (the one value that all ranks have, False).
Stacked = tuple[torch.Tensor, bool]
#: Functions that make a call's key, and, only for a new call, its :class:`ltx.core.comm.Signature`.
Key = Callable[[], Hashable]
Describe = Callable[[], Any]
#: A function of one rank's tensors and, for each, whether ranks may have different ones; or of one of its tensors.
OfTensors = Callable[[Tensors, Sequence[bool]], Any]
OfTensor = Callable[[torch.Tensor], torch.Tensor]
#: (an object's bytes, False), or (the text of an error, True).
Dumped = tuple[bytes, bool]


@dataclass(frozen=True)
class Rule:
    """One collective. `x` is one rank's tensor, `n` the axis' size."""

    name: str  # the collective's name, which errors show
    operation: str | None  # the operation that a channel issues (ltx.core.comm.operations); None if nothing moves
    #: ``(xs, n, static) -> (ys, per_rank)`` on the stack of all ranks' values, shape ``(n, *x.shape)``. With `per_rank`
    #: the result is a stack again, else it is the one value that all ranks get.
    stacked: Callable[[torch.Tensor, int, Static], tuple[torch.Tensor, bool]]
    #: ``(shape of x, static)`` -> the transpose of a linear collective, a rule or its name, and its static arguments.
    transpose: Callable[[torch.Size, Static], tuple[Rule | str, Static]] = lambda shape, static: ("psum", ())
    #: ``(x, y)`` -> w, for a collective that isn't linear: its derivative at x is psum(w · ẋ) / psum(w).
    weights: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    #: ``(x, n, static)`` -> the contiguous buffer that the operation gets. Nothing writes into x.
    before: Callable[[torch.Tensor, int, Static], torch.Tensor] = lambda x, n, static: x.contiguous()
    #: The buffer that is sent instead where the backend, not ltx, computes with it; None: the same buffer.
    coded: OfTensor | None = None
    #: ``(result, x, rank, n, static)`` -> the value; `result` belongs to the caller, and only the dtype of `x` is used.
    after: Callable[[torch.Tensor, torch.Tensor, int, int, Static], torch.Tensor] = lambda result, x, rank, n, _: result
    alone: Callable[[torch.Tensor, Static], torch.Tensor] = lambda x, static: x  # the value on an axis of size 1
    batched: Callable[[Static], Static] = lambda static: static  # `static` for an x with one more dimension in front
    arguments: Callable[[Static], Static] = lambda static: ()  # the operation's
    moves: bool = False  # the collective computes nothing, so tensors of every dtype may travel, as bytes
    #: The value has x's shape, and x's memory layout on that rank (channels last, for example).
    keeps_strides: bool = False


def nothing() -> None:
    pass


@dataclass(frozen=True)
class Levels:
    """Vmap levels whose entries ranks are."""

    numbers: tuple[int, ...] = ()  # outermost first
    taken: int = 0  # so many of the innermost are taken off: tensors have a dimension in front for each

    def __bool__(self) -> bool:
        return bool(self.numbers)

    @property
    def left(self) -> tuple[int, ...]:
        """The levels that aren't taken off."""
        return self.numbers[: len(self.numbers) - self.taken]

    @property
    def below(self) -> Levels | None:
        """The levels once one more is taken off; None if that is the last one."""
        return Levels(self.numbers, self.taken + 1) if len(self.left) > 1 else None


class Ranks:
    """The ranks of an axis. The defaults are right for a rank that is alone: its values are all ranks' values."""

    rank: int = 0  # this rank's index on the axis, where the process knows it
    overlaps: bool = False  # collectives go on while this rank computes, from one step into another
    compared: Any = None  # notes on what ranks have compared (ltx.core.comm.signature.Seen), if they are kept
    levels: Levels = Levels()  # the vmap levels whose entries the ranks are; none for other ranks

    @property
    def device(self) -> torch.device | None:
        """The device of this rank's tensors; None if it isn't known."""
        return None

    @property
    def ended(self) -> str:
        """The reason why the ranks can't communicate any more; "" while they can."""
        return ""

    def index(self, size: int) -> torch.Tensor:
        """This rank's position among `size`, a 0-dim int64 tensor."""
        return torch.full((), self.rank, device=self.device)  # torch.full needs no copy from the host

    def least(self, size: int) -> int:
        """The size of the smallest group, if this axis of `size` is one of several groups."""
        return size

    def part(self, name: str, part: Part) -> tuple[int, Ranks]:
        """(size, ranks) of this rank's group in `part`, which all call this; the largest size if groups are unequal."""
        return len(part.members(self.rank)), self

    def need(self, what: str, said: str) -> None:
        """Raise an error with the text `said` if the ranks lack `what`.

        "objects": each rank may have objects, and take branches, of its own. "clock": each has its own time. "whole":
        no other axis is in the same batch.
        """

    def collective(self, rule: Rule, static: Static, xs: Tensors, compiled: bool) -> tuple[torch.Tensor, ...]:
        """This rank's result of the collective for each of `xs`, in new memory. `compiled`: in a graph."""
        return tuple(fresh(y, x) if rule.operation is None else y.clone() for x in xs for y in [rule.alone(x, static)])

    def confirm(self, key: Key, describe: Describe, offer: Callable[[], Any] = nothing, channel: str = "user") -> Any:
        """Compare the next call before data moves, once for each key, and return the agreement, if there is one.

        `describe` makes the call's :class:`ltx.core.comm.Signature`. All take rank 0's `offer`, a JSON value.
        `channel`: the one that data will move on, "user", "buckets" or "background".
        """
        return None

    def agree(self, keys: Iterable[Hashable], agreement: Any) -> None:
        """Note that the collectives under `keys` follow from an agreement, and needn't be compared."""

    def announce(self, agreement: Any) -> None:
        """Count a call that sends nothing, so that the next comparison includes it."""

    def open_phases(self, count: int) -> None:
        """Open channels for so many collectives of each bucket: all ranks call this together."""

    def stream_of(self, device: torch.device) -> Any:
        """The :class:`ltx.core.comm.backends.CommStream` on which buckets on `device` are reduced; None: no stream."""
        return None

    def in_step(self, number: int) -> AbstractContextManager[Callable[[], None]]:
        """Surrounds training step `number`. It yields a function that commits the step; an exception before the commit
        makes all ranks leave the step.
        """
        return nullcontext(nothing)

    def goes_on(self) -> bool:
        """Whether a call that the ranks have compared may go out again as it is. Raises if none may."""
        return True

    def start_anew(self) -> None:
        """All ranks begin a training: nothing that was begun for an earlier one may reach it."""

    def by_rank(self, signature: Any, f: OfTensors = lambda xs, apart: None, tensors: Tensors = ()) -> list[Any]:
        """A list by rank of what `f` gives, a JSON value, for its tensors. Ranks compare `signature` each time."""
        return [f(tensors, [False] * len(tensors))]

    def tell(self, label: str, numbers: list[int], describe: Describe, key: Key) -> list[list[int]]:
        """Every rank's integers (equally many), sent in order with the collectives. Compared as by `confirm`."""
        return [numbers]

    def objects(self, what: str, dump: Callable[[], Dumped], src: int | None = None) -> list[Dumped]:
        """A list by rank of what `dump` returns; of rank `src` alone, if given. A rank alone needn't call `dump`."""
        return [(b"", False)] * (1 if src is None else src + 1)

    def read(self, x: torch.Tensor, label: str) -> torch.Tensor:
        """A copy of `x` on the host. Peers may have to take part."""
        return x


@dataclass(frozen=True)
class Alone(Ranks):
    """A rank that is alone: all methods are those of :class:`Ranks`."""


ALONE = Alone()


@dataclass(frozen=True)
class Part:
    """A partition of an axis' ranks into groups: each group is an axis of its own."""

    groups: tuple[tuple[int, ...], ...]  # the ranks of each group, in the order of its axis; every rank is in one group

    @property
    def sizes(self) -> list[int]:
        """The number of ranks of each group."""
        return [len(group) for group in self.groups]

    def members(self, rank: int) -> tuple[int, ...]:
        """The ranks of the group of `rank`, in order."""
        return next(group for group in self.groups if rank in group)

    @property
    def places(self) -> torch.Tensor:
        """Each rank's place in its group."""
        found = sorted((rank, place) for group in self.groups for place, rank in enumerate(group))
        return torch.tensor([place for _, place in found], device="cpu")

    @property
    def order(self) -> torch.Tensor:
        """Each rank's position in a list of all groups, one group after the other."""
        listed = [rank for group in self.groups for rank in group]
        return torch.tensor(sorted(range(len(listed)), key=listed.__getitem__), device="cpu")

    def within(self, outer: Part) -> Part:
        """The partition of the whole axis that divides each group of `outer` by this partition."""
        return Part(tuple(tuple(group[i] for i in mine) for group in outer.groups for mine in self.groups))


@lru_cache(maxsize=64)
def mesh_part(sizes: tuple[int, ...], dims: tuple[int, ...]) -> Part:
    """The ranks of a mesh (its axes' `sizes`, outermost first) whose places differ only along `dims`, in that order."""
    groups: dict[tuple[int, ...], list[tuple[int, ...]]] = {}  # by their places along the other dims
    for rank, place in enumerate(itertools.product(*map(range, sizes))):
        others = tuple(at for dim, at in enumerate(place) if dim not in dims)
        groups.setdefault(others, []).append((*(place[dim] for dim in dims), rank))
    return Part(tuple(tuple(rank for *_, rank in sorted(group)) for group in groups.values()))


def fresh(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`y`, copied if it is `x` itself."""
    return y.view_as(y) if y is x else y
