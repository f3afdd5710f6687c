"""Ranks that are threads of this process (:func:`ltx.simulate`). One runs at a time, until it has to wait for others.

A thread that comes to a common call waits there until all members of the call have come. The last one computes each
member's result. Between such calls threads run in the order of their numbers, so runs are deterministic.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any

import torch

from ltx.core.base import private
from ltx.core.base.errors import DeadlockDetectedError, LtxError, PeerLostError, ReplicaDivergedError, UnsupportedError
from ltx.core.comm.diagnosis import left_halfway, parted
from ltx.core.comm.recovery import ALIKE, OF_PEERS, Forward
from ltx.core.comm.signature import Agreement, Seen, Signature, explain_mismatch, mismatch
from ltx.core.comm.step_summary import UNREDUCED
from ltx.core.ranks.backings import Describe, Dumped, Key, OfTensor, Part, Ranks, Rule, Static, Tensors, fresh

#: A function from the members' values, in order, to the members' results.
Combine = Callable[[list[Any]], Sequence[Any]]


@dataclass(eq=False)
class Call:
    """A common call, in which a rank waits for others."""

    axis_name: str
    members: tuple[int, ...]  # the ranks that make the call, in the order of the axis
    signatures: tuple[Signature, ...]  # of the outer calls, then of this call; members must agree on them
    value: Any  # this rank's value
    combine: Combine | None  # if None, each rank gets all values
    leavable: bool = False  # the call belongs to a step or pass, which a peer may leave
    complete: bool = field(default=False, init=False)  # `result` or `error` is set
    result: Any = field(default=None, init=False)
    error: BaseException | None = field(default=None, init=False)

    @property
    def what(self) -> str:
        """The rank's call, on one line: the outer call, if there is one."""
        return self.signatures[-2 if len(self.signatures) > 1 else -1].brief

    def fail(self, error: BaseException) -> None:
        """End the call with `error`; each rank raises a copy, since a traceback belongs to one thread."""
        self.complete, self.error = True, copy.copy(error)


@dataclass(eq=False)
class Left:
    """A training step or backward pass that rank `rank` has left, and why."""

    rank: int
    what: str
    why: str
    completed: int  # how many steps or passes the rank had completed before
    told: bool = False  # set if others have completed this step or pass


@dataclass(frozen=True)
class Failure:
    """The first error of a run, and the rank that raised it; None if the caller raised it, such as an interrupt."""

    error: BaseException
    rank: int | None

    def __str__(self) -> str:
        who = "the caller was interrupted by" if self.rank is None else f"rank {self.rank} raised"
        text = f": {self.error}" if str(self.error) else ""
        return f"{who} {type(self.error).__name__}{text}"


class Turns:
    """`size` threads that take turns, here called ranks.

    `set_aside`: called in a rank's thread at the end of its turn. It puts aside the rank's changes to this process, and
    returns a function that brings them back at the rank's next turn.
    """

    def __init__(self, size: int, set_aside: Callable[[], Callable[[], None]]):
        self.size = size
        self.closed = False
        self._set_aside = set_aside
        self._turns = [_held_lock() for _ in range(size)]  # a rank acquires its own lock to run
        self._all_ended = _held_lock()
        self._threads: dict[int, int] = {}
        self._calls: dict[int, Call] = {}
        self._ended: dict[int, str] = {}
        self._failure: Failure | None = None
        #: What a rank must be told when it next comes to a step or pass with others.
        self._told: dict[tuple[int, tuple[int, ...]], Left] = {}
        #: How many steps and passes a rank has completed with others.
        self.completed = Counter[tuple[int, tuple[int, ...]]]()

    def leave(self, left: Left, members: tuple[int, ...]) -> None:
        """A rank has left a step or pass: tell its peers, which wait in it, or else at their next one."""
        told = self._told.pop((left.rank, members), left)
        # else a peer has left it too
        if told.rank == left.rank or told.completed != left.completed:
            for peer in members:
                if peer != left.rank:
                    self._tell_later(peer, members, left)

    def _tell_later(self, rank: int, members: tuple[int, ...], left: Left) -> None:
        self._told[rank, members] = left
        if (call := self._calls.get(rank)) is not None and not call.complete and call.members == members:
            self._tell(rank, call)

    def _tell(self, rank: int, call: Call) -> None:
        """Make `call` of `rank` fail if it belongs to a step or pass that a peer has left."""
        if not call.leavable or (left := self._told.pop((rank, call.members), None)) is None:
            return
        who, done = call.members.index(left.rank), self.completed[rank, call.members] > left.completed
        if left.rank == rank:
            call.fail(ReplicaDivergedError(parted(call.axis_name, who, left.what, left.why)))
            return
        place = call.members.index(rank)
        kind = ReplicaDivergedError if done else DeadlockDetectedError
        call.fail(kind(left_halfway(place, who, left.what, call.axis_name, left.why, done)))
        if done and not left.told:
            left.told = True
            self.completed[left.rank, call.members] = self.completed[rank, call.members]
            self._tell_later(left.rank, call.members, left)

    def run(self, f: Callable[[int], Any]) -> list[Any]:
        """``f(rank)`` of every rank. The first error of a rank ends all of them, and is raised here.

        An interrupt is raised as soon as the rank that runs comes to its next call; a second one is raised at once, and
        leaves the threads behind.
        """
        results: list[Any] = [None] * self.size
        threads = [
            threading.Thread(
                target=copy_context().run, args=(self._run_rank, rank, f, results), name=f"ltx rank {rank}", daemon=True
            )
            for rank in range(self.size)
        ]
        started, begun = 0, False
        try:
            for thread in threads:
                thread.start()
                started += 1
            begun = True
            self._turns[0].release()
            self._wait()
        except BaseException as error:
            self._failure = self._failure or Failure(error, None)
            if not begun:  # the system has no more threads: end those made so far, which haven't run
                self._ended.update(dict.fromkeys(range(started, self.size), "has no thread"))
                self._turns[0].release()
            if started:
                self._wait()
            raise
        finally:
            self.closed = True
        for thread in threads:
            thread.join()
        failure, self._failure = self._failure, None  # the failure's traceback refers to this object
        if failure is not None:
            raise failure.error
        return results

    def _wait(self) -> None:
        """Wait until all ranks have ended. A signal just before a lock's wait is seen only after the wait."""
        while not self._all_ended.acquire(timeout=0.1):
            pass

    def _run_rank(self, rank: int, f: Callable[[int], Any], results: list[Any]) -> None:
        self._turns[rank].acquire()
        self._threads[rank] = threading.get_ident()
        how = "has returned"
        try:
            if self._failure is None:
                results[rank] = f(rank)
        except BaseException as error:  # also SystemExit, which the caller gets
            how = f"has raised {type(error).__name__}"
            if self._failure is None:
                self._failure = Failure(error, rank)
        self._ended[rank] = how
        if len(self._ended) == self.size:
            self._all_ended.release()
        else:
            self._turns[self._next_after(rank)].release()

    def wait_in(self, rank: int, call: Call) -> Any:
        """Come to `call` as `rank`, and return the call's result once all its members have come to it.

        Raises:
            RankMismatchError: members call something else, or return; on all ranks that wait.
            PeerLostError: another rank has raised something.
        """
        if private.has_tangents():
            raise UnsupportedError(
                f"rank {rank}: {call.what} on axis {call.axis_name!r} was called under forward mode (jvp, jacfwd, "
                "hessian), whose state torch has once for all threads, so ltx.simulate can't run another rank "
                "meanwhile. Use reverse mode (grad, vjp, jacrev), or ltx.vmap."
            )
        if self._failure is not None:
            raise self._lost(call)
        self._tell(rank, call)
        if call.error is not None:
            raise call.error
        come_back = self._set_aside()
        self._calls[rank] = call
        theirs = [self._calls.get(member) for member in call.members]
        together = [x for x in theirs if x is not None and x.members == call.members and not x.complete]
        if len(together) == len(call.members):
            _complete(together)
        following = self._next_after(rank)
        if following != rank:
            self._turns[following].release()
            self._turns[rank].acquire()
        if not self.closed:  # if the caller has left, the process' state is the caller's again
            come_back()
        del self._calls[rank]
        if call.error is not None:
            raise call.error
        return call.result

    def check_thread(self, rank: int, signature: Signature, axis_name: str) -> None:
        """Raise unless this is the thread of `rank`; `signature` names the call, for the error."""
        if threading.get_ident() != self._threads.get(rank):
            raise UnsupportedError(
                f"{signature.brief} on axis {axis_name!r} was called in a thread that is no rank's. ltx.simulate gives "
                "each rank one thread: call collectives in it, or use processes, as with ltx.Pool."
            )

    def _next_after(self, rank: int) -> int:
        """The rank whose turn comes after that of `rank`: the next one that can run."""
        if self._failure is not None:
            for call in self._calls.values():
                if not call.complete:
                    call.fail(self._lost(call))
        order = [other % self.size for other in range(rank + 1, rank + 1 + self.size)]
        waiting = {other for other, call in self._calls.items() if not call.complete}
        able = [other for other in order if other not in self._ended and other not in waiting]
        if not able:
            self._give_up()
            able = [min(self._calls)]
        return able[0]

    def _give_up(self) -> None:
        """The error when no rank can run: each waits for a rank that waits elsewhere or has ended."""
        names = {call.axis_name for call in self._calls.values()}
        place = dict(self._ended)
        for rank, call in self._calls.items():
            place[rank] = call.what + (f" on axis {call.axis_name!r}" if len(names) > 1 else "")
        fix = "call the same collectives in the same order on every rank"
        error = mismatch(min(names, key=len), "what they call next", dict(sorted(place.items())), fix)
        for call in self._calls.values():
            call.fail(error)

    def _lost(self, call: Call) -> LtxError:
        return PeerLostError(f"{self._failure}. This rank had called {call.what}, and ends too.")


def _held_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


def _complete(calls: list[Call]) -> None:
    """All members have come: give each member its result, or all of them the same error."""
    first = calls[0]
    values = [call.value for call in calls]
    try:
        if any(call.signatures != first.signatures for call in calls):
            for step in zip(*(call.signatures for call in calls), strict=False):
                if len(set(step)) > 1:
                    raise explain_mismatch(first.axis_name, dict(enumerate(step)))
            # One rank has made fewer calls than another before.
            texts = {i: "; ".join(s.brief for s in call.signatures) for i, call in enumerate(calls)}
            raise mismatch(first.axis_name, "the calls", texts, "call the same collectives in the same order")
        # The last rank computes all results, so its own modes mustn't count.
        with torch.no_grad(), private.below_transforms(), private.without_autocast():
            results = [values] * len(calls) if first.combine is None else first.combine(values)
    except Exception as error:
        for call in calls:
            call.fail(error)
        return
    for call, result in zip(calls, results, strict=True):
        call.complete, call.result = True, result


class ThreadRanks(Ranks):
    """The ranks of an axis that are threads of this process, as one of them sees them.

    Nothing is sent: each rank brings a value, and one of them computes all results. `members`: the numbers of the axis'
    threads; `rank`: this rank's place; `device`: the device of its arguments.
    """

    in_turn = True
    device: torch.device | None = None

    def __init__(
        self, turns: Turns, name: str, members: tuple[int, ...], rank: int, device: torch.device | None = None
    ):
        self.device = device
        self.name = name
        self.rank = rank
        self.size = len(members)
        self._turns = turns
        self._members = members
        self._announced: list[Signature] = []
        self._forward, self._issued = Forward(), 0
        self._step = self._pass = ""  # as far as this rank is in the call or comes to it
        self._known: dict[Any, Agreement] = {}
        self.compared = Seen()
        self._parts: dict[Part, ThreadRanks] = {}

    @property
    def lacks(self) -> dict[str, type[LtxError]]:
        return {"clock": UnsupportedError, "graphs": UnsupportedError}

    @property
    def ended(self) -> str:
        return "the ltx.simulate that opened it has ended" if self._turns.closed else ""

    def announce(self, agreement: Agreement) -> None:
        self._say(agreement.signature)

    def confirm(self, key: Key, describe: Describe) -> None:
        self._say(describe())

    def meet(self, key: Hashable, describe: Describe, each_time: bool) -> None:
        self.exchange(describe(), None)

    def barrier(self, label: str) -> None:
        self.exchange(Signature(label, ()), None)

    def _say(self, signature: Signature) -> None:
        """Have the ranks compare `signature`, an outer call, at the next exchange, which belongs to it."""
        self._turns.check_thread(self._members[self.rank], signature, self.name)
        self._announced.append(signature)

    @contextmanager
    def in_step(self, number: int) -> Iterator[Callable[[], None]]:
        self._step, self._forward.failed = f"step {number} of the training", ""
        committed = list[bool]()
        self._announced.append(Signature(self._step, ()))
        try:
            yield lambda: committed.append(True)
        except BaseException as error:
            if not committed:
                self._abort(self._step, error)
            raise
        finally:
            self._completed(bool(committed))

    def _abort(self, what: str, error: BaseException) -> None:
        self._announced.clear()
        if not isinstance(error, (*ALIKE, *OF_PEERS, PeerLostError)):
            self._leave(what, f"{type(error).__name__}: {error}")

    def _leave(self, what: str, why: str) -> None:
        me = self._members[self.rank]
        self._turns.leave(Left(me, what, why, self._turns.completed[me, self._members]), self._members)

    def in_forward(self) -> AbstractContextManager[None]:
        return self._forward.entered(lambda: self._issued)

    def begin_pass(self, agreement: Agreement | None, unreduced: str) -> None:
        why, self._forward.failed, self._pass = self._forward.failed, "", "a backward pass"
        if why:
            self._leave(self._pass, why)
        if agreement is not None:
            self.announce(agreement)
        if unreduced:
            self._say(Signature(f"a backward pass that adds to {unreduced}: {UNREDUCED}", ()))

    @contextmanager
    def in_pass(self, ends: bool) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if not self._step:
                self._abort(self._pass, error)
            raise
        if ends and not self._step:
            self._completed(True)

    def _completed(self, whole: bool) -> None:
        self._step = self._pass = ""
        self._turns.completed[self._members[self.rank], self._members] += whole

    def exchange(self, signature: Signature, value: Any = None) -> list[Any]:
        """Wait for all ranks, and return their values. Ranks share these objects, so they mustn't write to them.

        Raises:
            RankMismatchError: ranks disagree in their signatures, or some never come; on all ranks that wait.
            PeerLostError: another rank has raised something.
            UnsupportedError: under forward mode, or in a thread that isn't the rank's.
        """
        values: list[Any] = self.combined(signature, value)
        return values

    def combined(self, signature: Signature, value: Any, combine: Combine | None = None) -> Any:
        """:meth:`exchange`; with `combine`, return this rank's result of it for all values."""
        self._turns.check_thread(self._members[self.rank], signature, self.name)
        signatures = (*self._announced, signature)
        self._announced.clear()
        call = Call(self.name, self._members, signatures, value, combine, bool(self._step or self._pass))
        self._issued += 1
        return self._turns.wait_in(self._members[self.rank], call)

    def of_first(self, signature: Signature, f: OfTensor, x: torch.Tensor) -> torch.Tensor:
        first: torch.Tensor = self.exchange(signature, f(x))[0]
        return first

    def tell(self, label: str, numbers: list[int], describe: Describe, key: Key) -> list[list[int]]:
        return self.exchange(describe(), numbers)

    def objects(self, what: str, dump: Callable[[], Dumped], src: int | None = None) -> list[Dumped]:
        mine = dump() if src in (None, self.rank) else None
        return self.exchange(Signature(what, (), "" if src is None else f"src={src}"), mine)

    def collective(self, rule: Rule, static: Static, xs: Tensors) -> tuple[torch.Tensor, ...]:
        if rule.operation is None:
            n = self.size
            return tuple(fresh(rule.after(rule.before(x, n, static), x, self.rank, n, static), x) for x in xs)

        def each_rank(values: list[Tensors]) -> list[list[torch.Tensor]]:
            results = [rule.stacked(torch.stack(column), len(values), static) for column in zip(*values, strict=True)]
            # In new memory.
            return [[(y[rank] if per_rank else y).clone() for y, per_rank in results] for rank in range(len(values))]

        found = self.combined(Signature.of_tensors(rule.name, xs, static), xs, each_rank)
        if rule.keeps_strides:
            pairs = zip(found, xs, strict=True)
            return tuple(y if x.is_contiguous() else torch.empty_like(x).copy_(y) for y, x in pairs)
        return tuple(found)

    def agree_on_plan(self, key: Hashable, describe: Describe, offer: Callable[[], Any], background: bool) -> Agreement:
        if key not in self._known:
            signature = describe()
            self._known[key] = Agreement(signature, signature.fingerprint, self.exchange(signature, offer())[0])
        return self._known[key]

    def part(self, name: str, part: Part) -> ThreadRanks:
        if part not in self._parts:
            places = part.members(self.rank)
            members = tuple(self._members[place] for place in places)
            self._parts[part] = ThreadRanks(self._turns, name, members, places.index(self.rank), self.device)
        return self._parts[part]
