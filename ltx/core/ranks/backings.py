"""What the ranks of an axis are: one interface, :class:`Ranks`, and the :class:`Rule` that they follow.

Ranks are processes (:class:`ltx.core.comm.processes.ProcessRanks`), threads that take turns
(:class:`ltx.core.comm.ThreadRanks`), entries of a vmap level, shapes alone, or one rank alone. What uses an axis asks
its ranks to do something, and never which of these they are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ltx.core.base.errors import LtxError

#: Static arguments of a rule: ints only, so that they can be constants of a compiled graph.
Static = tuple[int, ...]
Tensors = Sequence[torch.Tensor]
#: A stack of all ranks' values, and True; or the one value that all of them have, and False.
Stacked = tuple[torch.Tensor, bool]
#: Makes what is needed for a new call alone: its key; its :class:`ltx.core.comm.Signature`.
Key = Callable[[], Hashable]
Describe = Callable[[], Any]
#: A function of one rank's tensors, or of one tensor of its.
OfTensors = Callable[[Tensors], Any]
OfTensor = Callable[[torch.Tensor], torch.Tensor]
#: An object's bytes, or what went wrong, and True.
Dumped = tuple[bytes, bool]


@dataclass(frozen=True)
class Rule:
    """One collective. `x` is one rank's tensor, `n` the axis' size."""

    name: str  # the collective's, which errors show
    operation: str | None  # that a channel issues (ltx.core.comm.operations); None if nothing moves
    #: ``(xs, n, static) -> (ys, per_rank)`` on the stack of all ranks' values, shape ``(n, *x.shape)``. With `per_rank`
    #: the result is a stack again, else it is the one value that all ranks get.
    stacked: Callable[[torch.Tensor, int, Static], tuple[torch.Tensor, bool]]
    #: ``(shape of x, static)`` -> the transpose of a linear collective, a rule or its name, and its static arguments.
    transpose: Callable[[torch.Size, Static], tuple[Rule | str, Static]] = lambda shape, static: ("psum", ())
    #: ``(x, y)`` -> w, of a collective that isn't linear: its derivative at x is psum(w · ẋ) / psum(w).
    weights: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    #: ``(x, n, static)`` -> the contiguous buffer that the operation gets. Nothing writes into x.
    before: Callable[[torch.Tensor, int, Static], torch.Tensor] = lambda x, n, static: x.contiguous()
    #: What is sent instead of that buffer where the backend, and not ltx, computes with it; None: the buffer.
    coded: OfTensor | None = None
    #: ``(result, x, rank, n, static)`` -> the value; `result` belongs to the caller, of `x` the dtype is asked.
    after: Callable[[torch.Tensor, torch.Tensor, int, int, Static], torch.Tensor] = lambda result, x, rank, n, _: result
    alone: Callable[[torch.Tensor, Static], torch.Tensor] = lambda x, static: x  # the value on an axis of size 1
    batched: Callable[[Static], Static] = lambda static: static  # for an x with one more dimension in front
    arguments: Callable[[Static], Static] = lambda static: ()  # the operation's
    moves: bool = False  # nothing is computed with elements, so that tensors of every dtype may travel, as bytes
    #: The value has x's shape, and x's memory layout on that rank (channels last, for example).
    keeps_strides: bool = False


class Ranks:
    """The ranks of an axis. The defaults are those of a rank that is alone: what all have is what it has."""

    rank: int = 0  # this one's index on the axis, where the process knows it
    overlaps: bool = False  # what is begun on their channels goes on while this rank computes
    lags: bool = False  # what is begun in one step may be waited for in another
    in_turn: bool = False  # they are threads of this process, of which one runs at a time
    lasting: bool = True  # what is made for them once is worth keeping
    answer: Callable[..., Any] | None = None  # gives a collective's result: (operation, buffer, arguments, ranks)
    exchanges: Callable[..., Any] | None = None  # makes a strategy's exchanges, in place of gradients.pending.Exchange
    compared: Any = None  # what they have compared once (ltx.core.comm.signature.Seen), if that is kept
    futures: list[Any]  # where they overlap: what was begun and not waited for yet, oldest first
    level: int = 0  # the innermost vmap level whose entries they are that isn't off yet; 0 where there is none

    @property
    def device(self) -> torch.device | None:
        """Where this rank's tensors are; None where nothing says it."""
        return None

    @property
    def levels(self) -> Sequence[int]:
        """All vmap levels whose entries they are, the outermost first."""
        return ()

    @property
    def taken(self) -> int:
        """The number of dimensions in front of the tensors: those of levels that are off."""
        return sum(level > self.level for level in self.levels)

    @property
    def below(self) -> Ranks | None:
        """What is left once `level` is off; None if it was the last one."""
        return None

    def at(self, levels: Sequence[int]) -> Ranks:
        """The same with other `levels` for its own, the outermost first."""
        return self

    @property
    def ended(self) -> str:
        """Why they can't communicate any more; "" while they can."""
        return ""

    def index(self, size: int) -> torch.Tensor:
        """This rank's position among `size`, a 0-dim int64 tensor."""
        return torch.full((), self.rank, device=self.device)  # which copies nothing from the host

    def batch_index(self, size: int) -> torch.Tensor | None:
        """:meth:`index` where it is batched: a Function that takes it has its vmap rule called at each level."""
        return None

    def size_of(self, part: Part) -> int:
        """The number of ranks that `part` puts together with this one: of groups of unequal sizes, the most."""
        return len(part.members(self.rank))

    def least(self, size: int) -> int:
        """The number of ranks in the smallest of the groups of which this axis of `size` is one."""
        return size

    def part(self, name: str, part: Part) -> Ranks:
        """Those that `part` puts together with this one, as the axis called `name`. All of them call this together."""
        return self

    @property
    def lacks(self) -> Mapping[str, type[LtxError]]:
        """What :meth:`need` asks for, and they haven't: with the error that it raises."""
        return {}

    def need(self, what: str, said: str) -> None:
        """Raise `said` if they lack `what`.

        "objects": an object, and a branch that is taken, of each one's own. "clock": a time of each one's own. "whole":
        no other axis in the same batch. "values": of tensors, so that what is sent may depend on them. "graphs":
        communication that a graph can hold.
        """
        if what in self.lacks:
            raise self.lacks[what](said)

    # --- collectives -----------------------------------------------------------------------------------------------

    def collective(self, rule: Rule, static: Static, xs: Tensors) -> tuple[torch.Tensor, ...]:
        """What this rank gets for each of `xs`, in new memory."""
        return tuple(fresh(y, x) if rule.operation is None else y.clone() for x in xs for y in [rule.alone(x, static)])

    def recorded(self, rule: Rule, static: Static, xs: Tensors) -> tuple[torch.Tensor, ...]:
        """:meth:`collective` as part of a graph that runs later."""
        return self.collective(rule, static, xs)

    def begin(self, rule: Rule, static: Static, x: torch.Tensor, label: str) -> tuple[Any, OfTensor]:
        """Where they overlap: what is on its way, and what the rule makes of it. `x` may change meanwhile."""
        raise NotImplementedError

    def on_stack(self, rule: Rule, static: Static, n: int, x: torch.Tensor, dim: int | None) -> Stacked:
        """At the last of their vmap levels: the rule's `stacked` on all `n` ranks' values, which lie along `dim`."""
        raise NotImplementedError

    # --- what they agree on ----------------------------------------------------------------------------------------

    def confirm(self, key: Key, describe: Describe) -> Any:
        """Compare the call that is about to be made, before data moves, and give the agreement, if one is made.

        `key` gives what equal calls have in common: where ranks can know it, they compare a key once. `describe` gives
        the call's :class:`ltx.core.comm.Signature`.
        """
        return None

    def agree(self, keys: Iterable[Hashable], agreement: Any) -> None:
        """The single collectives under the `keys` follow from an agreement: they needn't be compared."""

    def meet(self, key: Hashable, describe: Describe, each_time: bool) -> None:
        """:meth:`confirm` a call that sends nothing, and count it as one; `each_time`: though it is known."""

    def announce(self, agreement: Any) -> None:
        """Count what this rank does by itself, and let the others compare that at their next call."""

    def agree_on_plan(self, key: Hashable, describe: Describe, offer: Callable[[], Any], background: bool) -> Any:
        """The agreement on a plan, and on rank 0's `offer`; None: no peers. `background`: for that channel."""
        return None

    # --- steps and passes -------------------------------------------------------------------------------------------

    def open_phases(self, count: int) -> None:
        """Open channels for so many collectives of each bucket: all ranks call this together."""

    def stream_of(self, device: torch.device) -> Any:
        """The :class:`ltx.core.comm.backends.CommStream` on which buckets on `device` are reduced; None: no stream."""
        return None

    def in_step(self, number: int) -> AbstractContextManager[Callable[[], None]]:
        """Surrounds training step `number`. What raises before the call of what it gives leaves the step on all."""
        return nullcontext(_nothing)

    def in_forward(self) -> AbstractContextManager[None]:
        """Surrounds the forward pass of a plain step."""
        return nullcontext()

    def begin_pass(self, agreement: Any, unreduced: str) -> None:
        """A backward pass begins, and peers are told if this rank has left one out.

        `agreement`: on its plan, if there is one. `unreduced`: what ``.grad`` holds of this rank alone.
        """

    def in_pass(self, ends: bool) -> AbstractContextManager[None]:
        """Surrounds the reduction of a bucket in a backward pass; `ends`: of the last one."""
        return nullcontext()

    # --- small values ----------------------------------------------------------------------------------------------

    def exchange(self, signature: Any, value: Any) -> list[Any]:
        """Every rank's value, by rank: JSON, of any size. `signature`: what ranks are compared to be at."""
        return [value]

    def may_differ(self, x: torch.Tensor) -> bool:
        """Whether each may have a value of its own in the place of `x`."""
        return self.compared is not None

    def by_rank(self, signature: Any, f: OfTensors, tensors: Tensors) -> list[Any]:
        """What `f` makes of each rank's `tensors`, by rank, which is JSON."""
        return self.exchange(signature, f(tensors))

    def of_first(self, signature: Any, f: OfTensor, x: torch.Tensor) -> torch.Tensor:
        """What `f` makes of rank 0's tensor in the place of `x`: contiguous, and of the same shape on all ranks."""
        return f(x)

    def tell(self, label: str, numbers: list[int], describe: Describe, key: Key) -> list[list[int]]:
        """Every rank's integers, of which all give as many, in order with its collectives. Compared as by `confirm`."""
        return [numbers]

    def objects(self, what: str, dump: Callable[[], Dumped], src: int | None = None) -> list[Dumped]:
        """By rank, what `dump` gives there: an object's bytes, or what went wrong, and True.

        `src`: the only one whose is wanted. A rank that is alone needn't dump what it has.
        """
        return [(b"", False)] * (1 if src is None else src + 1)

    def read(self, x: torch.Tensor, label: str) -> torch.Tensor:
        """`x` on the host, for which peers may have to do their part."""
        return x

    def barrier(self, label: str) -> None:
        """Return once all of them have come here, and the device has done what was enqueued before."""


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Alone(Ranks):
    """This rank alone: everything is as :class:`Ranks` has it."""


ALONE = Alone()


@dataclass(frozen=True)
class Part:
    """Which ranks of an axis belong together: each group of them is an axis of its own."""

    groups: tuple[tuple[int, ...], ...]  # the ranks of each, in the order of its axis; every rank is in one of them

    @property
    def world(self) -> int:
        """The number of ranks of all groups."""
        return sum(self.sizes)

    @property
    def sizes(self) -> list[int]:
        """The number of ranks of each group."""
        return [len(group) for group in self.groups]

    def members(self, rank: int) -> tuple[int, ...]:
        """The ranks that `rank` belongs to, in order."""
        return next(group for group in self.groups if rank in group)

    def place(self, rank: int) -> int:
        """Where among those that it belongs to a rank is."""
        return self.members(rank).index(rank)

    def by_rank(self, entries: Iterable[Iterable[int]]) -> torch.Tensor:
        """A vector with one entry for each rank, from `entries` by group and place."""
        rows = zip(self.groups, entries, strict=True)
        of = {rank: entry for group, row in rows for rank, entry in zip(group, row, strict=True)}
        return torch.tensor([of[rank] for rank in range(self.world)])

    @property
    def order(self) -> torch.Tensor:
        """The position of each rank in a list of all groups, one group after the other."""
        ends = itertools.accumulate(self.sizes)
        return self.by_rank(range(end - size, end) for size, end in zip(self.sizes, ends, strict=True))

    def within(self, outer: Part) -> Part:
        """This part of each group of `outer`, as a part of the axis that `outer` is one of."""
        return Part(tuple(tuple(group[i] for i in mine) for group in outer.groups for mine in self.groups))


@lru_cache(maxsize=64)
def mesh_part(sizes: tuple[int, ...], dims: tuple[int, ...]) -> Part:
    """The ranks of a mesh (its axes' `sizes`, outermost first) whose places differ only along `dims`, in that order."""
    strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]

    def ranks(along: Iterable[int]) -> list[int]:
        steps = [[i * strides[dim] for i in range(sizes[dim])] for dim in along]
        return [sum(step) for step in itertools.product(*steps)]

    others = [dim for dim in range(len(sizes)) if dim not in dims]
    return Part(tuple(tuple(first + step for step in ranks(dims)) for first in ranks(others)))


def fresh(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`y`, as a tensor of its own if it is `x`."""
    return y.view_as(y) if y is x else y
