"""Recordings of what a rank received, from which that rank runs alone: in a notebook, under a debugger.

What peers sent came through an axis' channels and its exchange in the store: these are recorded, beside the state, the
batches and random states, and a replay answers in their place. A record is a checkpoint's directory for each rank, with
one structure in it. For a script that knows nothing of it: ``ltx run -n 4 -m ltx.record DIRECTORY 3:8 script.py ...``.
"""

from __future__ import annotations

import os
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from ltx.checkpoint import directory, storage
from ltx.checkpoint.loading import open_checkpoint
from ltx.core.base import private, tree
from ltx.core.base.arguments import brief, checked
from ltx.core.base.handed_in import HandedIn
from ltx.core.comm import HOST_BLOCKING, AxisComm, Channel, Signature, Work, communicators
from ltx.core.comm.operations import OPERATIONS
from ltx.core.comm.peers import Peers
from ltx.core.comm.signature import Seen
from ltx.core.training.train_state import TrainState, random_states, set_random_states
from ltx.core.transforms.compare import digest, values
from ltx.core.world.init import init
from ltx.core.world.world import settings_of_world, world
from ltx.errors import CheckpointError, InputError, RankMismatchError, ReplicaDivergedError, WorldError


@contextmanager
@checked("path", "batches", "max_bytes")
def record_messages(
    path: str | os.PathLike[str], *, steps: range, batches: bool = True, max_bytes: int = 4 << 30
) -> Iterator[None]:
    """Record what this rank receives in some training steps, so that :func:`replay` can run it alone.

    Put it around the training loop, on all ranks or some. A record has the state before its first step, each step's
    batch and random states, all results of collectives, and digests of what this rank sent. It is in memory until a
    step that isn't one of `steps`, or until the block ends, also by an exception; then it is written to
    ``path/rank_5/step_00000003``, whole or not at all, as a checkpoint is: reading it runs no code.

    Args:
        path: the directory of the records; ranks may share it.
        steps: the numbers of the steps, ``range(3, 8)``, as ``state.step`` is before them. No record begins while the
            strategy has an exchange under way between steps.
        batches: record batches, which are tensors, numbers and strings in lists, tuples and dicts, given by position.
        max_bytes: of messages and batches; the record ends with the step in which there are more, and with a warning.

    Raises:
        InputError: a batch holds something else; before the step. CheckpointError: it can't be written.

    A block that records nothing warns, and writes nothing. Compiled graphs of whole steps aren't seen.

    Example:
        >>> import os, tempfile, torch, ltx
        >>> sgd = ltx.optim.from_torch(torch.optim.SGD, lr=0.5)
        >>> train = ltx.train_step(ltx.data_parallel(lambda w, x: (w * x).sum()), sgd)
        >>> state, run = train.init(torch.ones(2)), tempfile.mkdtemp()
        >>> with ltx.record_messages(run, steps=range(1, 3)):
        ...     for i in range(4):
        ...         state, metrics = train(state, torch.tensor([1.0, i]))
        >>> sorted(os.listdir(run)), os.listdir(f"{run}/rank_0")
        (['rank_0'], ['step_00000001'])
    """
    if HandedIn.messages is not None:
        raise WorldError("record_messages: this process records or replays messages already. End that block first.")
    if not isinstance(steps, range):
        raise InputError(f"record_messages: steps are a range of steps' numbers, as range(3, 8), got {brief(steps)}.")
    HandedIn.messages = recorder = _Recorder(Path(os.path.abspath(path)), steps, batches, max_bytes)
    try:
        yield
    finally:
        HandedIn.messages = None
        recorder.end()


class _Recorder:
    """Hears of channels and steps while messages are recorded."""

    def __init__(self, path: Path, steps: range, batches: bool, max_bytes: int):
        self._path, self._wanted, self._batches, self._max_bytes = path, steps, batches, max_bytes
        self._record: dict[str, Any] = {}
        self._nbytes, self._ended = 0, False
        self._axes: list[tuple[AxisComm, dict[str, Any]]] = []  # with what is recorded of each
        self._tapped: list[tuple[Any, str]] = []  # objects, and the names of their methods that are replaced

    def step_begins(self, state: TrainState, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        wanted = state.step in self._wanted
        if self._ended or (not self._record and (not wanted or state.under_way)):
            return
        if not wanted or self._nbytes > self._max_bytes:
            if wanted:
                _warn(f"more than max_bytes={self._max_bytes} came before step {state.step}, where the record ends")
            return self.end()
        if self._batches:
            if named:
                raise InputError(f"record_messages: give batches by position, got {sorted(named)}; or batches=False.")
            try:
                storage.encode(args, "batch")
            except InputError as error:
                hint = "Or record_messages(..., batches=False), and give the replayed steps their batches again"
                raise InputError(f"record_messages: the batch of step {state.step}: {error} {hint}.") from None
            args = tree.map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, args)
            self._nbytes += sum(getattr(x, "nbytes", 0) for x in tree.flatten(args)[0])
        if not self._record:
            self._begin(state)
        batch = args if self._batches else None
        self._record["steps"].append({"step": state.step, "batch": batch, "random": random_states()})

    def _begin(self, state: TrainState) -> None:
        here, mesh = world(), settings_of_world().get("mesh")
        self._record = {
            "world": {name: getattr(here, name) for name in ("rank", "size", "local_rank", "local_size")},
            "mesh": mesh and dict(mesh),
            "threads": torch.get_num_threads(),
            "state": {path: x.clone() for path, x in state.state_dict().items()},
            "of_step": state.of_step,
            "axes": {},
            "steps": [],
        }
        for axis in communicators():
            for channel in axis.channels:
                self.opened(axis, channel)

    def opened(self, axis: AxisComm, channel: Channel) -> None:
        if not self._record or self._ended:
            return
        if channel.name == "user" and _key(axis) in self._record["axes"]:
            _warn(f"another axis {axis.name!r} is opened, as in a new world. The record ends here")
            return self.end()
        if channel.name == "user":
            of_axis = _new_axis(axis.compared.has_any, axis.peers.store_exchange.begun, axis.peers.world)
            self._record["axes"][_key(axis)] = of_axis
            self._axes.append((axis, of_axis))
            self._tap(axis.peers, "exchange", partial(self._exchange, of_axis["values"]))
            self._tap(axis.peers.store_exchange, "exchange", partial(self._exchange, of_axis["values"]))
        start = channel.issued, channel.begun, channel.compared, channel.digest
        kept = _new_channel(start, channel.transport is not None)
        self._record["axes"][_key(axis)]["channels"][channel.name] = kept
        self._tap(channel, "issue", partial(self._issue, kept["messages"]))

    def _tap(self, of: Any, name: str, instead: Callable[..., Any]) -> None:
        setattr(of, name, partial(instead, getattr(of, name)))
        self._tapped.append((of, name))

    def _exchange(self, kept: dict[str, Any], exchange: Any, at: Any, *call: Any, **named: Any) -> list[Any]:
        got: list[Any] = exchange(at, *call, **named)
        if named.get("wait", True):  # else nobody's values are there
            kept.setdefault(str(getattr(at, "fingerprint", at)), []).append(got)  # or its place in the store
        return got

    def _issue(self, messages: list[Any], issue: Callable[..., Work], *call: Any, **named: Any) -> Work:
        message: list[Any] = [*_sent(*call, **named), None]
        work = issue(*call, **named)
        messages.append(message)
        finish = work._finish

        def arrived(completed: torch.Tensor) -> torch.Tensor:
            result = finish(completed)
            with private.below_modes(), torch.no_grad():
                message[-1] = [result.detach().clone(), work.total, [float(x) for x in work.note]]
            self._nbytes += result.nbytes
            return result

        work._finish = arrived
        return work

    def end(self) -> None:
        for of, name in self._tapped:
            del vars(of)[name]
        for axis, of_axis in self._axes:
            of_axis["agreed"] = {str(each.fingerprint): each.offer for each in axis.known.values()}
        self._tapped, self._axes = [], []
        record, ended, self._record, self._ended = self._record, self._ended, {}, True
        if not record and not ended:
            unseen = "Compiled graphs' steps aren't seen, and no record begins while a strategy's exchange is under way"
            _warn(f"no step of {self._wanted} was seen, so nothing is recorded. {unseen}")
        if not record:
            return
        rank = record["world"]["rank"]
        final = directory.step_path(self._path / f"rank_{rank}", record["steps"][0]["step"])
        temporary = directory.hidden(final.parent, final.name)
        try:
            temporary.mkdir(parents=True)
            storage.write_metadata(temporary, [storage.write(temporary, rank, storage.encode(record, "record"))])
            files = directory.describe(temporary, os.listdir(temporary))
            directory.commit(temporary, final, {"format": directory.FORMAT, "files": files, "ranks": 1})
        except (OSError, ValueError) as error:  # a full disk; not a name
            if temporary.exists():
                directory.remove(temporary)
            raise CheckpointError(f"record_messages: rank {rank}: {final} can't be written: {error}") from error


def _warn(text: str) -> None:
    warnings.warn(f"record_messages: rank {world().rank}: {text}.", RuntimeWarning, stacklevel=4)


def _new_axis(compared: bool = False, begun: int = 0, world: str = "") -> dict[str, Any]:
    return {"channels": {}, "values": {}, "agreed": {}, "compared": compared, "begun": begun, "world": world}


def _new_channel(start: tuple[int, ...] = (0, 0, 0, 0), carried: bool = False) -> dict[str, Any]:
    return {"start": start, "carried": carried, "messages": []}


def _key(axis: AxisComm) -> str:
    return f"{axis.name} of ranks {axis.global_ranks}"


def _sent(
    operation: str, buffer: torch.Tensor, label: str, arguments: Any = (), *_: Any, note: Any = (), **__: Any
) -> list[str]:
    """Of a call of :meth:`Channel.issue`: what is compared of it, its label, and a digest of the values."""
    with private.below_modes(), torch.no_grad():
        sent = " ".join([digest(values(buffer.detach())) or "empty", *map(repr, note)])
    return [f"{operation}{list(arguments) or ''} of {tree.describe(buffer)}", label, sent]


# --- replay ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Replayed:
    """One rank of a recorded training, alone in this process: `rank`, and the numbers of its `steps`."""

    rank: int
    steps: list[int]
    _record: dict[str, Any]
    _check_sent: bool
    _loaded: bool = False
    _step: int | None = None

    def load(self, state: TrainState) -> TrainState:
        """`state` with the values before the first step. From now on the program receives what the rank received then.

        Until now collectives give what they do where all ranks have the same values, as ``train.init`` needs them.
        `state`: one of the same structure (``train.init(params)``), which is written to. InputError if leaves differ.
        """
        state.load_state_dict(self._record["state"])
        state.__dict__["of_step"] = self._record["of_step"]  # it is part of what the rank sends
        self._loaded = True
        for axis in communicators():
            axis.known.clear()
            for channel in axis.channels:
                self.opened(axis, channel)
        return state

    @property
    def batches(self) -> Iterator[tuple[Any, ...]]:
        """Each step's batch, as the tuple of the arguments after the state: ``train(state, *batch)``."""
        for step in self._record["steps"]:
            if step["batch"] is None:
                raise InputError("replay: the record was made with batches=False. Make them as the training did.")
            yield step["batch"]

    def step_begins(self, state: TrainState, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not self._loaded or state.step not in self.steps:
            raise InputError(
                f"replay: step {state.step} isn't in the record of rank {self.rank}, which has steps {self.steps}. "
                "Begin with state = replayed.load(train.init(params)), and do as many steps."
            )
        self._step = state.step
        set_random_states(next(step["random"] for step in self._record["steps"] if step["step"] == state.step))

    def opened(self, axis: AxisComm, channel: Channel) -> None:
        of_axis, of_channel = self._of(axis, channel)
        vars(channel)["issue"] = partial(self._issue, axis, channel)
        channel.transport = _CARRIED if of_channel["carried"] else None
        if not self._loaded:
            return
        channel.issued, channel.begun, channel.compared, channel.digest = of_channel["start"]
        if channel.name == "user":
            axis.peers.store_exchange.begun, axis.compared = of_axis["begun"], Seen()
            axis.peers.world = of_axis["world"] or axis.peers.world  # with which peers have sealed objects
            if of_axis["compared"]:  # what is compared once was, before the record
                vars(axis.compared)["has"] = lambda fn, key=None: True

    def _of(self, axis: AxisComm, channel: Channel) -> tuple[dict[str, Any], dict[str, Any]]:
        of_axis = self._record["axes"].get(_key(axis), _new_axis())
        return of_axis, of_axis["channels"].get(channel.name, _new_channel())

    def _issue(
        self, axis: AxisComm, channel: Channel, operation: str, buffer: torch.Tensor, *call: Any, **named: Any
    ) -> Work:
        """In place of :meth:`Channel.issue`."""
        axis.peers.own.sent += 1
        if not self._loaded:
            work = Work.arrived(channel, _alike(operation, buffer, channel.rank, channel.size))
            work.note = [channel.size * x for x in named.get("note", ())]
            return work
        what, label, digest = _sent(operation, buffer, *call, **named)
        expected, _, sent, got = self._next(axis, channel)
        if expected != what or got is None:
            then = expected if expected != what else f"{what}, whose result wasn't waited for"
            raise self._left(axis, channel, then, f"{what} ({label})")
        if self._check_sent and sent != digest:
            if sent.split()[:3] == digest.split()[:3]:  # values, loss and weight
                raise self._left(axis, channel, f"the recorded calls before {label}", "others, or in another order")
            raise ReplicaDivergedError(
                f"{self._where(axis, channel)} sends other values than then in {what} ({label}): digest {digest}, "
                f"recorded {sent}. What it sent before was the same bit for bit, so what it computed since differs. "
                "Run the recorded program, with the same torch, kind of machine and LTX_KEY. "
                "replay(..., check_sent=False) goes on with what the peers sent then."
            )
        kept, total, note = got
        with private.below_modes(), torch.no_grad():
            in_place = OPERATIONS[operation].in_place and (kept.shape, kept.dtype) == (buffer.shape, buffer.dtype)
            work = Work.arrived(channel, buffer.copy_(kept) if in_place else kept.to(buffer.device, copy=True))
        work.total, work.note = total, note
        return work

    def _next(self, axis: AxisComm, channel: Channel) -> Any:
        """The message that comes next in the record of a channel."""
        _, of_channel = self._of(axis, channel)
        channel.begun += 1
        place = channel.begun - of_channel["start"][1] - 1
        return [*of_channel["messages"][place : place + 1], ("nothing more", "", "", None)][0]

    def _where(self, axis: AxisComm, channel: Channel) -> str:
        at = "before its first step" if self._step is None else f"at step {self._step}"
        return f"rank {self.rank}, {at}, in call {channel.begun} on channel {channel.name!r} of axis {axis.name!r}"

    def _left(self, axis: AxisComm, channel: Channel, expected: str, got: str) -> RankMismatchError:
        return RankMismatchError(
            f"{self._where(axis, channel)}, has left the record: expected {expected}, got {got}. Run the recorded "
            "program: with the same model, strategy and batches, and the same collectives in the same order."
        )

    def agreed(self, axis: AxisComm, channel: Channel, signature: Signature, offer: Any) -> Any:
        """In place of :meth:`Peers.compare`."""
        agreed, known = self._of(axis, channel)[0]["agreed"], str(signature.fingerprint)
        if self._loaded and known not in agreed:
            raise self._left(axis, channel, self._next(axis, channel)[0], signature.brief)
        return agreed[known] if self._loaded else offer

    def exchanged(self, axis: AxisComm, at: Signature | str, value: Any) -> list[Any]:
        """In place of an exchange through the store."""
        if not self._loaded:
            return [value] * axis.size
        if not (kept := self._of(axis, axis.user)[0]["values"].get(str(getattr(at, "fingerprint", at)))):
            raise self._left(axis, axis.user, "no such exchange of values", at if isinstance(at, str) else at.brief)
        return list(kept.pop(0))


class _Alone(Peers):
    replayed = True

    def __init__(self, axis: Any, *how: Any):
        super().__init__(axis, *how)
        self._replayed: Replayed = HandedIn.messages
        vars(self.store_exchange)["exchange"] = lambda place, value, *_: self._replayed.exchanged(axis, place, value)

    def compare(self, channel: Any, signature: Signature, offer: Any) -> Any:
        channel.compared += 1
        return self._replayed.agreed(self.axis, channel, signature, offer)  # type: ignore[arg-type]

    def exchange(self, signature: Signature, value: Any, place: Any = None, wait: bool = True) -> list[Any]:
        return self._replayed.exchanged(self.axis, signature, value) if wait else []  # type: ignore[arg-type]


#: In place of the shared memory of channels that had it.
_CARRIED: Any = SimpleNamespace(
    error=None, busy=False, failures=dict, lost_peers=list, room=lambda nbytes: None, close=lambda: None
)


def _alike(operation: str, x: torch.Tensor, rank: int, n: int) -> torch.Tensor:
    """The result of a collective where all ranks send `x`."""
    if operation in ("all_gather", "gather"):
        return x.expand(n, *x.shape).clone()
    if operation in ("psum_scatter", "scatter", "all_to_all"):
        row = x[rank] * n if operation == "psum_scatter" else x[rank]
        return row.expand_as(x).clone() if operation == "all_to_all" else row.clone()
    return x.mul_(n) if operation == "psum" and x.dtype is not torch.bool else x


@contextmanager
@checked("path", "rank", "step", "check_sent")
def replay(
    path: str | os.PathLike[str], rank: int, *, step: int | None = None, check_sent: bool = True
) -> Iterator[Replayed]:
    """Run one rank of a training that :func:`record_messages` has recorded, alone in this process.

    In the block :func:`ltx.world` is that rank's. Run the same program there: ``train.init``, ``replayed.load``, the
    steps. States, losses, results of collectives and errors are what they were, bit for bit, with the same torch and
    kind of machine. Nobody waits for it: it may stand in a debugger. Objects that ranks exchange are sealed with the
    training's ``LTX_KEY``, which the replay needs then.

    Args:
        path: as for :func:`record_messages`. rank: the rank to run. step: the record's first step; None: the latest.
        check_sent: raise where the program sends other values than then. False: after a change of the program that
            leaves its calls alike, go on with what peers sent then.

    Raises:
        CheckpointError: there is no record, or it isn't whole. WorldError: this process has a world already.
        RankMismatchError: in the block: the program calls something else than then.
        ReplicaDivergedError: in the block: it sends other values. InputError: in the block: a step isn't recorded.

    Example:
        >>> import tempfile, torch, ltx
        >>> sgd = ltx.optim.from_torch(torch.optim.SGD, lr=0.5)
        >>> train = ltx.train_step(ltx.data_parallel(lambda w, x: (w * x).sum()), sgd)
        >>> run = tempfile.mkdtemp()
        >>> with ltx.record_messages(run, steps=range(1)):
        ...     state, _ = train(train.init(torch.ones(2)), torch.ones(2))
        >>> with ltx.replay(run, rank=0) as replayed:
        ...     again = replayed.load(train.init(torch.zeros(2)))
        ...     for batch in replayed.batches:
        ...         again, _ = train(again, *batch)
        >>> torch.equal(state.params, again.params)
        True
    """
    base = Path(os.path.abspath(path)) / f"rank_{rank}"
    found = [at for at in directory.steps(base) if step in (None, at)]
    if not found:
        raise CheckpointError(f"replay: there is no record{'' if step is None else f' of step {step}'} under {base}.")
    record = open_checkpoint(directory.step_path(base, found[0]), 0, 1).structure("record")
    if dist.is_initialized() or HandedIn.messages is not None or settings_of_world():
        raise WorldError("replay: this process has a world, or records messages. Replay in a process of its own.")
    place = dict(record["world"])
    replayed = Replayed(rank, [each["step"] for each in record["steps"]], record, check_sent)
    peers, HandedIn.peers, HandedIn.messages = HandedIn.peers, _Alone, replayed
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(record.get("threads", threads))  # sums of several threads are rounded otherwise
        if place["size"] > 1:
            _open_group(place["rank"], place["size"])
            place["master"] = "localhost:1"  # where nobody listens, nor needs to
        with init(mesh=record["mesh"], **place):
            yield replayed
    finally:
        HandedIn.peers, HandedIn.messages = peers, None
        torch.set_num_threads(threads)
        if dist.is_initialized():
            dist.destroy_process_group()


def _open_group(rank: int, size: int) -> None:
    """Initialise torch.distributed with groups on which every collective raises."""

    def make(store: Any, rank: int, size: int, timeout: Any) -> Any:
        options = private.FakeProcessGroup.Options()
        options.error_on_collective = True
        return private.FakeProcessGroup._create_internal(rank, size, options)

    if (backend := "ltx_replay") not in HOST_BLOCKING:
        HOST_BLOCKING.add(backend)
        dist.Backend.register_backend(backend, make, devices=["cpu", "cuda"])
    dist.init_process_group(backend, store=dist.HashStore(), rank=rank, world_size=size)  # type: ignore[attr-defined]


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit("usage: ltx run -n 4 -m ltx.record DIRECTORY 3:8 script.py ...")
    _, folder, numbers, *sys.argv = sys.argv
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    with record_messages(folder, steps=range(*map(int, numbers.split(":")))):
        runpy.run_path(sys.argv[0], run_name="__main__")
