"""The processes of a pool or of a launch, each on one end of a connection, and a call's answers from all of them.

The connection is a pair of anonymous Unix sockets, of which the worker inherits one: no other process can connect.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
import weakref
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import groupby
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from ltx.core.base import kernel
from ltx.errors import CallInterruptedError, WorkerError
from ltx.runtime import messages
from ltx.runtime.failures import exit_text, failure_of, told_where
from ltx.runtime.messages import Failure, Message, Result, pack, receive, search_path
from ltx.runtime.show import Area, Printed, in_notebook
from ltx.runtime.worker import Process, Starter, ended

PATIENCE_S = 0.5  #: how long others have to answer after a failure: most fail for the same reason, or because of it
GRACE_S = 3.0  #: how long a rank that was asked to give up has for it, unless the pool says otherwise
_BUSY_S = 1.0  # after ranks were busy with a call for so long, those that aren't in it are told
_TELL_S = 0.25  # how often the driver looks whether to warn that workers will be lost
_STOP_GRACE_S = 3.0
_ALIKE_S = 0.2  # how long a line waits for that of other ranks; a notebook takes a millisecond to show each alone
# How often the driver looks whether a worker has been stopped, and how long it must have been stopped to count.
_LOOK_S, _STOPPED_S = 0.5, 2.0
_PIPE_BYTES = 1 << 20  # the most that the system allows: nobody reads between calls, and writing mustn't block


class WorkerGroup:
    """`size` workers that form a world, until :meth:`stop`, or this object's or process' end."""

    def __init__(self, size: int, start: Starter, start_timeout_s: float, shows_output: bool = False):
        self.size = size
        self.failed = False  # whether the last call failed on a rank or ended its world, so that a new one is needed
        self._worlds = 1
        self._stopped_since: dict[int, float] = {}
        self._start_timeout_s = start_timeout_s
        self._processes: list[Process] = []
        self._connections: list[Connection] = []
        self._output = Output(size)
        self.owner = os.getpid()  # of which this process may be a fork by now
        theirs = (self.owner, self._processes, self._connections, self._output)
        self._end = weakref.finalize(self, _end, *theirs, grace_s=_STOP_GRACE_S)
        try:
            for rank in range(size):
                self._spawn(rank, start, shows_output)
            self._await_worlds("start")
        except BaseException as error:
            self.kill()
            if not isinstance(error, KeyboardInterrupt):
                raise
            raise CallInterruptedError(f"{size} workers were interrupted as they started, and ended.", False) from None

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    def send(self, rank: int, message: Message) -> bool:
        """Send `message` to a worker; False if it is gone."""
        with suppress(OSError):
            message.send(self._connections[rank])
            return True
        return False

    def receive(self, ranks: Collection[int], timeout_s: float) -> dict[int, Any]:
        """The first answers of `ranks`, or how their processes ended; {} after `timeout_s`. Shows prints meanwhile."""
        look_at = time.monotonic() + _LOOK_S
        end = time.monotonic() + timeout_s
        answers: dict[int, Any] = {}
        while not answers:
            left_s = end - time.monotonic()
            by_connection: dict[Any, int] = {self._connections[rank]: rank for rank in ranks}
            ready = wait([*by_connection, *self._output.sources], max(0.0, min(self._output.due_s(), left_s)))
            for connection in ready:
                if connection in by_connection:
                    self._take(by_connection[connection], answers)
            self._output.show()
            if not ready or time.monotonic() >= look_at:
                self._look_for_stopped(ranks, answers)
                look_at = time.monotonic() + _LOOK_S
            if left_s <= 0:  # checked here too, since a rank may print without end
                break
        return answers

    def renew(self) -> None:
        """Have all workers make a new world; they keep their state. Raises WorkerError if one fails to."""
        self._worlds += 1
        for rank in range(self.size):
            self.send(rank, pack(messages.Renew(self._worlds * 1_000_000)))  # far above what calls of ltx.init reach
        self._await_worlds("make a new world")
        self.failed = False

    def exit_text(self, rank: int) -> str:
        code = ended(self._processes[rank], _STOP_GRACE_S)
        if code is None:
            return "closed its connection to the driver"
        hint = {
            -signal.SIGKILL: " (the system does that when memory runs out)",
            -signal.SIGABRT: " (gloo does that when ranks issue different shapes or dtypes)",
        }
        return exit_text(code) + hint.get(code, "")

    def stop(self) -> None:
        """Let the workers end by themselves, and kill the ones that still run after a few seconds."""
        self._end()

    def kill(self) -> None:
        ending: Any = self._end.detach()
        if ending is not None:
            ending[1](*ending[2], grace_s=0.0)

    def _spawn(self, rank: int, start: Starter, shows_output: bool) -> None:
        ours, theirs = Pipe()
        self._connections.append(ours)
        streams = list[int]()
        with theirs, ExitStack() as opened:
            for name in ("stdout", "stderr") if shows_output else ():
                reading, writing = open_pipe()
                opened.callback(os.close, writing)
                streams.append(writing)
                self._output.sources[reading] = (rank, name)
            self._processes.append(start(rank, theirs, self._connections, streams))
        self.send(rank, pack(messages.Setup(search_path(), shows_output, in_notebook())))

    def _take(self, rank: int, answers: dict[int, Any]) -> None:
        """Read a message of `rank`: show it, or put an answer into `answers`; how its process ended, if it has."""
        try:
            load = receive(self._connections[rank])
        except (EOFError, OSError):
            answers[rank] = self.exit_text(rank)
            return
        try:
            message = load()
        except Exception as error:
            message = failure_of(error, "the driver couldn't unpickle the result: ")
        if isinstance(message, Printed):
            self._output.show()  # the pipe's text was printed before this message
            self._output.hold(rank, message.stream, message.text)
        elif hasattr(message, "shown"):
            self._output.show(wait=False)
            message.shown(rank, self.size, self._output.drawn)
        else:
            answers[rank] = message

    def _look_for_stopped(self, ranks: Collection[int], answers: dict[int, Any]) -> None:
        """Add an answer for each stopped process, which can't send one. Only Linux tells that, in /proc."""
        now = time.monotonic()
        for rank in ranks:
            if kernel.stat(self.pids[rank])[0] != "T":
                self._stopped_since.pop(rank, None)
            elif now - self._stopped_since.setdefault(rank, now) >= _STOPPED_S:
                answers[rank] = "has been stopped (SIGSTOP, or Ctrl-Z)"

    def _await_worlds(self, to: str) -> None:
        """Wait until the world of every worker is up. `to`: what the workers are told to do."""
        deadline, waiting = time.monotonic() + self._start_timeout_s, set(range(self.size))
        while waiting:
            answers = self.receive(waiting, max(0.0, deadline - time.monotonic()))
            if not answers:
                raise WorkerError(
                    f"the workers of ranks {sorted(waiting)} of {self.size} didn't {to} within "
                    f"{self._start_timeout_s:g} s. Starting takes a few seconds on an idle machine: give a larger "
                    "start_timeout_s, or look for what loads this one."
                )
            for rank, message in answers.items():
                who = f"the worker of rank {rank} of {self.size}"
                if isinstance(message, messages.Rendezvous):
                    for other in range(1, self.size):
                        self.send(other, pack(message))
                elif isinstance(message, messages.Ready):
                    waiting.discard(rank)
                elif isinstance(message, Failure):
                    told = f"{message.type_name}: {message.message}\n\n{message.traceback_text}"
                    raise WorkerError(f"{who} failed to {to}: {told}")
                else:
                    says_more = f"What it wrote to stderr says more; `{sys.executable} -c 'import ltx'` should work."
                    raise WorkerError(f"{who} {message} when it was to {to}. {says_more}")

    def collect(
        self, number: int, call: Message, ranks: Sequence[int], name: str, limit_s: float | None, grace_s: float
    ) -> dict[int, Any]:
        """Send call `number` to `ranks` and gather the answers: a Result, a Failure, or how a process ended, in words.

        After the first failure, `limit_s` or an interrupt, which becomes a CallInterruptedError, busy ranks are asked
        to give up. One that doesn't in `grace_s` has no answer, or an At, which says where it is.
        """
        answers, asked = dict[int, Any](), set[int]()
        try:
            for rank in ranks:  # an interrupt may come before all have got the call: `asked` has those that got it
                asked.add(rank)
                if not self.send(rank, call):  # a rank that ends later is noticed below
                    answers[rank] = messages.Idle(self.exit_text(rank))
            waiting = asked - answers.keys()
            end = float("inf") if limit_s is None else time.monotonic() + limit_s
            end = min(end, time.monotonic() + PATIENCE_S) if answers else end
            self._wait(number, waiting, answers, end, PATIENCE_S)
            self._give_up(number, waiting, answers, grace_s)
            return answers
        except KeyboardInterrupt:
            waiting = asked - answers.keys()
            with suppress(KeyboardInterrupt):  # a second interrupt ends the patience
                self._give_up(number, waiting, answers, grace_s)
            kept = all(isinstance(answers.get(rank), Result | Failure) for rank in asked)
            places = "; ".join(f"rank {rank} {told_where(answers.get(rank))}" for rank in sorted(asked))
            raise CallInterruptedError(f"{name} was interrupted: {places}.", kept) from None
        finally:
            self._output.show(finish=True)
            self._output.drawn = {key: drawn for key, drawn in self._output.drawn.items() if isinstance(drawn, Area)}
            for area in self._output.drawn.values():
                area.finish()

    def _give_up(self, number: int, waiting: set[int], answers: dict[int, Any], grace_s: float) -> None:
        """Ask the ranks in `waiting` to give call `number` up, and wait until they have, at most `grace_s`. Warn when
        one says that it can't, or has been silent for half of it: on a busy machine workers only need a while.
        """
        for rank in waiting:
            self.send(rank, pack(messages.Cancel(number)))
        now = time.monotonic()
        end, silent, told = now + grace_s, now + max(1.0, grace_s / 2), False
        while waiting and (now := time.monotonic()) < end:
            self._wait(number, waiting, answers, min(end, now + _TELL_S))
            said = {rank: answers.get(rank) for rank in sorted(waiting)}
            deaf = [r for r, at in said.items() if (now > silent if at is None else at.raised is not None)]
            if deaf and not told:
                told = True
                print(
                    f"ltx: {'; '.join(f'rank {rank} {told_where(said[rank])}' for rank in deaf)}. Unless they end "
                    f"within {end - time.monotonic():.0f} s, all workers end, and what they keep is lost: see "
                    "ltx.Pool(grace_s=).",
                    file=sys.stderr,
                    flush=True,
                )

    def _wait(
        self, number: int, waiting: set[int], answers: dict[int, Any], end: float, patience_s: float = float("inf")
    ) -> None:
        """Gather answers until none is `waiting`, `end`, or `patience_s` after a failure; tell the idle of it."""
        tell_at = time.monotonic() + _BUSY_S
        told: set[int] = set()
        try:
            while waiting and (now := time.monotonic()) < end:
                came = self.receive(waiting, max(0.0, min(end, tell_at) - now))
                answers.update(came)
                if came:
                    tell_at = time.monotonic() + _BUSY_S
                elif time.monotonic() >= tell_at:
                    tell_at = float("inf")
                    told = {*range(self.size)} - waiting
                    for rank in told:
                        self.send(rank, pack(messages.Others(number)))
                done = {rank: answer for rank, answer in came.items() if not isinstance(answer, messages.At)}
                waiting.difference_update(done)
                if not all(isinstance(answer, Result) for answer in done.values()):
                    end = min(end, time.monotonic() + patience_s)
        finally:  # an interrupt may end the wait
            for rank in told:
                self.send(rank, pack(messages.Others(0)))


def _end(owner: int, processes: list[Process], ends: list[Connection], output: Output, grace_s: float) -> None:
    """Stop the workers, kill those that are left after `grace_s`, and wait for all of them to be gone."""
    if os.getpid() != owner:  # a fork of the driver mustn't end the workers, which aren't its children
        return
    deadline = time.monotonic() + grace_s
    try:
        for end in ends if grace_s else ():
            with suppress(OSError):
                pack(messages.Stop()).send(end)
        for process in processes if grace_s else ():
            ended(process, max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            process.kill()  # does nothing if the process has ended
        for process in processes:
            ended(process, None)
        for end in ends:
            end.close()
        output.show(finish=True)
        output.close()


def open_pipe() -> tuple[int, int]:
    """(reading end, writing end) of a pipe whose reading end doesn't block."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    with suppress(OSError, AttributeError):
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return reading, writing


class Output:
    """What ranks print: the reading ends of their pipes, and lines that wait for the same line of the other ranks."""

    def __init__(self, size: int = 1) -> None:
        self.drawn: dict[Any, Any] = {}  # what is drawn on the screen and may change: lines, areas of ranks
        self.sources: dict[int, tuple[int, str]] = {}  # of each pipe, the rank, and "stdout" or "stderr"
        self._begun: dict[int, bytes] = {}  # the unfinished last line of each pipe
        self._held = [deque[tuple[float, tuple[str, str]]]() for _ in range(size)]
        self._counts = [Counter[tuple[str, str]]() for _ in range(size)]  # of what `_held` has

    def hold(self, rank: int, stream: str, text: str) -> None:
        """Print `text` of `rank` with a later :meth:`show`."""
        lines = [(stream, line) for line in text.removesuffix("\n").split("\n")]
        self._held[rank] += ((time.monotonic(), line) for line in lines)
        self._counts[rank].update(lines)

    def due_s(self) -> float:
        """In how many seconds something has to be printed, or looked at."""
        return max(0.01, min([_LOOK_S, *(held[0][0] + _ALIKE_S - time.monotonic() for held in self._held if held)]))

    def show(self, *, wait: bool = True, finish: bool = False) -> None:
        """Print whole lines, those of all ranks once; `wait`: others wait a moment; `finish`: unfinished lines too."""
        for fd, (rank, stream) in list(self.sources.items()):
            read, gone = b"", False
            with suppress(BlockingIOError):
                read = os.read(fd, _PIPE_BYTES)
                if gone := not read:  # the process has closed the pipe: no more output follows
                    self._close(fd)
            written = self._begun.pop(fd, b"") + read
            end = len(written) if finish or gone else written.rfind(b"\n") + 1
            self._begun[fd] = written[end:].rpartition(b"\r")[2]  # drop the text that a carriage return has overwritten
            if end:
                self.hold(rank, stream, written[:end].decode(errors="replace"))
        due = self._due(time.monotonic() - _ALIKE_S if wait and not finish else float("inf"))
        for (rank, stream), group in groupby(due, key=lambda each: (each[0], each[1][0])):
            Printed(stream, "".join(f"{line}\n" for _, (_, line) in group)).shown(rank, len(self._held), self.drawn)

    def _due(self, before_s: float) -> Iterator[tuple[int | None, tuple[str, str]]]:
        """Take what all ranks have printed, as (None, line), and what has waited since `before_s`, as (rank, line)."""
        while heads := {rank: held[0] for rank, held in enumerate(self._held) if held}:
            lines = {line for _, line in heads.values()}
            ranks = [*heads]
            if not len(heads) == len(self._held) > 1 == len(lines):
                everywhere = {line for line in lines if all(count[line] for count in self._counts)}
                # A line that all have waits until it is the next of all, unless that can't be.
                apart = [rank for rank in heads if heads[rank][1] not in everywhere] or ranks
                ranks = sorted((r for r in apart if heads[r][0] <= before_s), key=lambda rank: heads[rank][0])[:1]
                if not ranks:
                    return
            for rank in ranks:
                self._counts[rank].subtract([self._held[rank].popleft()[1]])
                if not self._held[rank]:  # forget which lines there were
                    self._counts[rank].clear()
            yield None if len(ranks) > 1 else ranks[0], heads[ranks[0]][1]

    def _close(self, fd: int) -> None:
        with suppress(OSError):
            os.close(fd)
        self.sources.pop(fd, None)

    def close(self) -> None:
        for fd in list(self.sources):
            self._close(fd)
