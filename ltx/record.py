"""Recordings of what a rank received, from which that rank runs alone: in a notebook, under a debugger.

What a rank computes follows from its state, its batches, its random numbers, and what its peers sent. All of the last
comes through an axis' channels and its exchange in the store. So these are recorded where channels give results, and a
replay answers from the record in their place.

A record is a checkpoint's directory for each rank, ``rank_5/step_00000003``, with one structure in it.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from ltx.checkpoint import directory, storage
from ltx.checkpoint.loading import open_checkpoint
from ltx.core import comm
from ltx.core.base import private, tree
from ltx.core.base.arguments import checked
from ltx.core.base.handed_in import HandedIn
from ltx.core.comm.axis_comm import AxisComm
from ltx.core.comm.backends import HOST_BLOCKING
from ltx.core.comm.channel import Channel, Work
from ltx.core.comm.operations import OPERATIONS
from ltx.core.comm.peers import Peers
from ltx.core.comm.signature import Seen, Signature
from ltx.core.training.train_state import TrainState, counted, random_states, set_random_states, updates_of
from ltx.core.transforms.compare import bytes_of, values
from ltx.core.world.init import init
from ltx.core.world.world import settings_of_world, world
from ltx.errors import CheckpointError, InputError, RankMismatchError, ReplicaDivergedError, WorldError

_WORDS = 1024  # the columns of :func:`_digest`
_BACKEND = "ltx_replay"  # the process groups of a replay, on which every collective raises


@contextmanager
@checked("path", "batches", "max_bytes")
def record_messages(
    path: str | os.PathLike[str], *, steps: Container[int], batches: bool = True, max_bytes: int = 4 << 30
) -> Iterator[None]:
    """Record what this rank receives in some training steps, so that :func:`replay` can run it alone.

    Put it around the training loop, on the ranks to be recorded: all, or those that go wrong. The record begins before
    the first step of `steps` and ends before the first one after it that isn't in `steps`, or with the block, also by
    an exception. It holds the state before the first step, and of each step the batch and the states of the random
    number generators; all results of collectives, and digests of what this rank sent. Until it ends it is in memory;
    then it is written to ``path/rank_5/step_00000003``, whole or not at all. Nothing in it is a pickle of a program's
    objects, and reading runs no code.

    Args:
        path: the directory of the records of all ranks; each writes a directory of its own there.
        steps: the numbers of the steps, such as ``range(3, 8)``, by ``state.step`` before the step. A record begins
            later if the strategy has an exchange under way.
        batches: record the batches: dicts with string keys, lists, tuples, tensors, numbers and strings, given by
            position. False: the replay makes them again.
        max_bytes: the memory for messages and batches. The record ends after the step that exceeds it, with a warning.

    Raises:
        InputError: a batch holds something else; before the step. CheckpointError, OSError: it can't be written.

    A block without a step in `steps` writes nothing and warns. Steps that torch.compile has made one graph of aren't
    seen.

    Example:
        >>> import tempfile, torch, ltx
        >>> train = ltx.train_step(ltx.data_parallel(lambda w, x: (w * x).sum()), ltx.optim.from_torch(torch.optim.SGD, lr=0.5))
        >>> state, run = train.init(torch.ones(2)), tempfile.mkdtemp()
        >>> with ltx.record_messages(run, steps=range(1, 3)):
        ...     for i in range(4):
        ...         state, metrics = train(state, torch.tensor([1.0, i]))
        >>> with ltx.replay(run, rank=0) as replayed:
        ...     state = replayed.load(train.init(torch.ones(2)))
        ...     print(state.step, [train(state, *batch)[1].loss for batch in replayed.batches][:1])
        1 [tensor(1.5000)]
    """
    if HandedIn.messages is not None:
        raise WorldError("record_messages: this process records or replays messages already. End that block first.")
    HandedIn.messages = recorder = _Recorder(Path(os.path.abspath(path)), steps, batches, max_bytes)
    try:
        yield
    finally:
        HandedIn.messages = None
        recorder.finish()


class _Recorder:
    """What hears of channels and steps while messages are recorded."""

    def __init__(self, path: Path, steps: Container[int], batches: bool, max_bytes: int):
        self._path, self._wanted, self._batches, self._max_bytes = path, steps, batches, max_bytes
        self._record: dict[str, Any] = {}
        self._nbytes, self._ended = 0, False
        self._axes: dict[str, AxisComm] = {}
        self._tapped: list[tuple[Any, str]] = []  # (object, name) of the methods that are replaced

    def step_begins(self, train: Any, state: TrainState, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self._ended or (not self._record and (state.step not in self._wanted or state.under_way)):
            return
        if state.step not in self._wanted or self._nbytes > self._max_bytes:
            if state.step in self._wanted:
                said = f"rank {world().rank}: more than max_bytes={self._max_bytes} came before step {state.step}"
                warnings.warn(f"record_messages: {said}, where the record ends.", RuntimeWarning, stacklevel=4)
            self.finish()
            return
        batch: Any = None
        if self._batches:
            if named:
                raise InputError(f"record_messages: give batches by position, got {sorted(named)}; or batches=False.")
            storage.encode(args, "batch")  # raises what can't be recorded
            batch = tree.map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, args)
            self._nbytes += sum(x.nbytes for x in tree.flatten(batch)[0] if isinstance(x, torch.Tensor))
        if not self._record:
            self._begin(state)
        self._record["steps"].append({"step": state.step, "batch": batch, "random": random_states()})

    def _begin(self, state: TrainState) -> None:
        here, mesh = world(), settings_of_world().get("mesh")
        self._record = {
            "world": [here.rank, here.size, here.local_rank, here.local_size, here.node_rank],
            "mesh": mesh and dict(mesh),
            "step": state.step,
            "updates": updates_of(state),
            "of_step": state.of_step,
            "strategy": state.layout.strategy,
            "state": [[piece.name, piece.tensor.detach().clone()] for piece in storage.leaves_of(state)],
            "axes": {},
            "steps": [],
        }
        for axis in comm.communicators():
            for channel in axis.channels:
                self.opened(axis, channel)

    def opened(self, axis: AxisComm, channel: Channel) -> None:
        if not self._record or self._ended:
            return
        exchange = axis.peers.store_exchange
        if (key := _key(axis)) not in self._record["axes"]:
            found = {"channels": {}, "values": {}, "places": {}, "agreed": {}, "begun": exchange.begun}
            self._record["axes"][key], self._axes[key] = found | {"compared": axis.compared.has_any}, axis
            self._tap(axis.peers, "exchange_values", partial(self._values, found["values"]))
            self._tap(exchange, "exchange", partial(self._places, found["places"]))
        of_channel = {"start": _counters(channel), "carried": channel.transport is not None, "messages": []}
        self._record["axes"][key]["channels"][channel.name] = of_channel
        self._tap(channel, "issue", partial(self._issue, of_channel["messages"]))

    def _tap(self, of: Any, name: str, instead: Callable[..., Any]) -> None:
        setattr(of, name, partial(instead, getattr(of, name)))
        self._tapped.append((of, name))

    def _issue(self, messages: list[Any], issue: Callable[..., Work], *call: Any, **named: Any) -> Work:
        operation, buffer, label, arguments = (*call, ())[:4]
        message = [operation, label, *_sent(buffer, named.get("arguments", arguments), named.get("note", ())), None]
        work = issue(*call, **named)
        messages.append(message)
        finish = work._finish

        def arrived(completed: torch.Tensor) -> torch.Tensor:
            result = finish(completed)
            with private.below_modes(), torch.no_grad():
                kept = result.detach().clone()
            message[-1] = [kept, work.total, [float(x) for x in work.note]]
            self._nbytes += kept.nbytes
            return result

        work._finish = arrived
        return work

    def _values(
        self, kept: dict[str, Any], exchange: Callable[..., list[Any]], signature: Signature, *call: Any, **named: Any
    ) -> list[Any]:
        got = exchange(signature, *call, **named)
        kept.setdefault(str(signature.fingerprint), []).append(got)
        return got

    def _places(
        self, kept: dict[str, Any], exchange: Callable[..., list[Any]], place: str, *call: Any, **named: Any
    ) -> list[Any]:
        kept[place] = exchange(place, *call, **named)
        return list(kept[place])

    def finish(self) -> None:
        """End the record, and write it, if it has begun."""
        for of, name in self._tapped:
            vars(of).pop(name, None)
        self._tapped.clear()
        if self._ended:
            return
        self._ended = True
        if not self._record:
            said = f"rank {world().rank}: no step of {self._wanted} was seen, so nothing is recorded"
            why = "Steps of compiled graphs aren't seen, and none begins with an exchange under way"
            warnings.warn(f"record_messages: {said}. {why}.", RuntimeWarning, stacklevel=4)
            return
        for key, axis in self._axes.items():
            known = axis.agreements()
            self._record["axes"][key]["agreed"] = {str(each.fingerprint): each.offer for each in known}
        self._write()
        self._record, self._axes = {"written": True}, {}

    def _write(self) -> None:
        rank = self._record["world"][0]
        base = self._path / f"rank_{rank}"
        base.mkdir(parents=True, exist_ok=True)
        final = directory.step_path(base, self._record["step"])
        temporary = directory.hidden(base, final.name)
        temporary.mkdir()
        try:
            written = storage.write(temporary, rank, storage.encode(self._record, "record"))
            storage.write_metadata(temporary, [written])
            files = directory.describe(temporary, [f"__{rank}_0.distcp", storage.METADATA])
            directory.commit(temporary, final, {"format": directory.FORMAT, "files": files, "ranks": 1, "record": True})
        except BaseException:
            directory.remove(temporary)
            raise


def _key(axis: AxisComm) -> str:
    return f"{axis.name} of ranks {axis.global_ranks}"


def _counters(channel: Channel) -> list[int]:
    return [channel.issued, channel.begun, channel.compared, channel.digest]


def _sent(buffer: torch.Tensor, arguments: tuple[int, ...], note: Any) -> list[Any]:
    """What is compared of a message that this rank sends: a text of its kind, and a digest of its values."""
    return [f"{tree.describe(buffer)}{list(arguments) or ''}", _digest(buffer) + "".join(f" {x!r}" for x in note)]


def _digest(x: torch.Tensor) -> str:
    """64 bits of `x`, at the speed of a sum; 64-bit words that are 1024 places apart may change places unnoticed."""
    with private.below_modes(), torch.no_grad():
        data = values(x.detach()).view(-1).view(torch.uint8)
        whole = data.numel() // (8 * _WORDS) * (8 * _WORDS)
        found = hashlib.blake2b(bytes_of(data[whole:]), digest_size=8)
        if whole:
            words = data[:whole] if data.storage_offset() % 8 == 0 else data[:whole].clone()
            found.update(bytes_of(words.view(torch.int64).view(-1, _WORDS).sum(0)))
    return found.hexdigest()


# --- replay ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Replayed:
    """One rank of a recorded training, alone in this process; what :func:`replay` gives.

    Attributes:
        rank: the rank that was recorded.
        steps: the numbers of its steps.
    """

    rank: int
    steps: tuple[int, ...]
    _record: dict[str, Any]
    _check_sent: bool
    _loaded: bool = False
    _at: int | None = None  # the number of the present step

    def load(self, state: TrainState) -> TrainState:
        """The state before the first step, and the begin of the record: collectives now give what they gave then.

        Before this, they give what they would if all ranks had this one's values, so that ``train.init`` can run.

        Args:
            state: a state of the same structure, such as ``train.init(params)``. It isn't changed.

        Raises:
            InputError: the record's state has other leaves.
        """
        storage.check_state("Replayed.load", state)
        pieces, kept = storage.leaves_of(state), dict(self._record["state"])
        mine = {piece.name: tree.describe(piece.tensor) for piece in pieces}
        theirs = {name: tree.describe(x) for name, x in kept.items()}
        if apart := sorted(name for name in {*mine, *theirs} if mine.get(name) != theirs.get(name)):
            name, fix = apart[0], f"Build the state as it was recorded (with {self._record['strategy']})"
            raise InputError(f"replay: leaf {name!r} is {theirs.get(name)} in the record, {mine.get(name)} here. {fix}.")
        read: TrainState = tree.unflatten(
            tree.flatten(state)[1], [kept[piece.name].to(piece.tensor.device, copy=True) for piece in pieces]
        )
        sync = replace(read.held("sync_state"), clock=state.held("sync_state").clock)
        read = counted(
            replace(read, module=state.module, sync_state=sync), self._record["step"], self._record["updates"]
        )
        read.__dict__["of_step"] = self._record["of_step"]  # else the step's summary says that the program made it
        self._loaded = True
        for axis in comm.communicators():
            axis.forget_agreements()
            for channel in axis.channels:
                self.opened(axis, channel)
        return read

    @property
    def batches(self) -> Iterator[tuple[Any, ...]]:
        """The batches of the recorded steps, each as the tuple of the arguments that followed the state."""
        for step in self._record["steps"]:
            if step["batch"] is None:
                raise InputError("replay: recorded with batches=False. Make the batches as the training did.")
            yield step["batch"]

    def step_begins(self, train: Any, state: TrainState, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not self._loaded or state.step not in self.steps:
            what = f"has steps {self.steps[0]} to {self.steps[-1]}, and step {state.step} was called"
            fix = "Begin with state = replayed.load(train.init(params)), and run so many steps as were recorded"
            raise InputError(f"replay: the record of rank {self.rank} {what}. {fix}.")
        self._at = state.step
        set_random_states(next(step["random"] for step in self._record["steps"] if step["step"] == state.step))

    def opened(self, axis: AxisComm, channel: Channel) -> None:
        known = self._of(axis)["channels"].get(channel.name, {"start": [0] * 4, "carried": False, "messages": []})
        vars(channel)["issue"] = partial(self._issue, axis, channel, known["messages"], known["start"][1])
        channel.transport = _CARRIED if known["carried"] else None
        if self._loaded:
            channel.issued, channel.begun, channel.compared, channel.digest = known["start"]
            axis.peers.store_exchange.begun = self._of(axis)["begun"]
            axis.compared = _AllSeen() if self._of(axis)["compared"] else Seen()

    def _of(self, axis: AxisComm) -> dict[str, Any]:
        """What is recorded of an axis."""
        nothing = {"channels": {}, "values": {}, "places": {}, "agreed": {}, "begun": 0, "compared": False}
        return dict(self._record["axes"].get(_key(axis), nothing))

    def _issue(
        self,
        axis: AxisComm,
        channel: Channel,
        messages: list[Any],
        start: int,
        operation: str,
        buffer: torch.Tensor,
        label: str,
        arguments: tuple[int, ...] = (),
        summed: bool = False,
        on_host: bool = False,
        note: Any = (),
        eager: bool = False,
    ) -> Work:
        """Takes the place of :meth:`Channel.issue`."""
        channel.begun += 1
        axis.peers.own.sent += 1
        if not self._loaded:
            work = Work.arrived(channel, _alike(operation, buffer, channel.rank, channel.size))
            work.note = [channel.size * x for x in note]
            return work
        what, digest = _sent(buffer, arguments, note)
        place = channel.begun - start - 1
        expected = messages[place] if place < len(messages) else None
        if expected is None or expected[0] != operation or expected[2] != what:
            self._refuse(axis, channel, expected, f"{operation} of {what} ({label})")
        if self._check_sent and expected[3] != digest:
            raise ReplicaDivergedError(
                f"{self._where(axis, channel)} this rank now sends other values than it sent in {operation} of {what} "
                f"({label}): digest {expected[3]}, now {digest}. All that it sent before was the same bit for bit, so "
                "what was computed since then differs. Run the recorded program, on the same kind of machine, with as "
                "many threads and the same torch; to go on with what peers sent then, replay(..., check_sent=False)."
            )
        if expected[4] is None:
            self._refuse(axis, channel, None, f"the result of {operation} ({label}), for which it hadn't waited")
        kept, total, sums = expected[4]
        in_place = OPERATIONS[operation].in_place and kept.shape == buffer.shape and kept.dtype == buffer.dtype
        with private.below_modes(), torch.no_grad():
            value = buffer.copy_(kept) if in_place else kept.to(buffer.device, copy=True)
        work = Work.arrived(channel, value)
        work.total, work.note = total, sums
        return work

    def _where(self, axis: AxisComm, channel: Channel) -> str:
        at = "before the first step" if self._at is None else f"in or after step {self._at}"
        return f"rank {self.rank}: at call {channel.begun} of channel {channel.name!r} of axis {axis.name!r}, {at},"

    def _refuse(self, axis: AxisComm, channel: Channel, expected: Any, got: str) -> None:
        """Raise: the program has left the record."""
        what = "the record has nothing more" if expected is None else f"{expected[0]} of {expected[2]} ({expected[1]})"
        raise RankMismatchError(
            f"{self._where(axis, channel)} the replay left the record: expected {what}, got {got}. Run the program "
            "that was recorded: the same model, strategy and batches, and the same collectives in the same order."
        )

    def agreed(self, axis: AxisComm, channel: Channel, signature: Signature, offer: Any) -> Any:
        """Takes the place of :meth:`Peers.compare`."""
        if not self._loaded:
            return offer
        known, of_axis = str(signature.fingerprint), self._of(axis)
        if known not in of_axis["agreed"]:
            messages = of_axis["channels"].get(channel.name, {"messages": (), "start": [0] * 4})
            place = channel.begun - messages["start"][1]
            channel.begun += 1
            self._refuse(axis, channel, [*messages["messages"][place:], None][0], signature.brief)
        return of_axis["agreed"][known]

    def exchanged(self, axis: AxisComm, kind: str, at: str, value: Any, what: str) -> list[Any]:
        """Takes the place of an exchange through the store."""
        if not self._loaded:
            return [value] * axis.size
        kept = self._of(axis)[kind].get(at)
        if not kept:
            self._refuse(axis, axis.user, None, f"an exchange of values, {what}")
        return list(kept.pop(0) if kind == "values" else kept)


class _AllSeen(Seen):
    """Nothing is compared for the first time: that was before the record."""

    def has(self, fn: Any, key: Any = None) -> bool:
        return True


class _Alone(Peers):
    """The peers of a replay."""

    def __init__(self, axis: Any, *how: Any):
        super().__init__(axis, *how)
        self._replayed: Any = HandedIn.messages
        exchanged: Callable[..., Any] = lambda place, value, what, *_: self._replayed.exchanged(
            axis, "places", place, value, what
        )
        vars(self.store_exchange)["exchange"] = exchanged

    def compare(self, channel: Any, signature: Signature, offer: Any) -> Any:
        channel.compared += 1
        return self._replayed.agreed(self.axis, channel, signature, offer)

    def exchange_values(
        self, signature: Signature, value: Any, place: str | None = None, wait: bool = True
    ) -> list[Any]:
        at = str(signature.fingerprint)
        return list(self._replayed.exchanged(self.axis, "values", at, value, signature.brief)) if wait else []


#: In place of shared memory, on channels that had it: they carry notes.
_CARRIED: Any = SimpleNamespace(
    error=None, busy=False, failures=dict, lost_peers=list, room=lambda nbytes: None, close=lambda: None
)


def _alike(operation: str, x: torch.Tensor, rank: int, n: int) -> torch.Tensor:
    """The result of a collective if all ranks send `x`."""
    if operation == "psum":
        return x if x.dtype is torch.bool else x.mul_(n)
    if operation in ("all_gather", "gather"):
        return x.expand(n, *x.shape).clone()
    if operation in ("psum_scatter", "scatter"):
        return x[rank] * n if operation == "psum_scatter" else x[rank].clone()
    return x[rank].expand_as(x).clone() if operation == "all_to_all" else x


@contextmanager
@checked("path", "rank", "step", "check_sent")
def replay(
    path: str | os.PathLike[str], rank: int, *, step: int | None = None, check_sent: bool = True
) -> Iterator[Replayed]:
    """Run one rank of a training that :func:`record_messages` has recorded, alone in this process.

    In the block :func:`ltx.world` has that rank, and the size of the training. Run the same program: ``train.init``,
    ``replayed.load``, then the steps. Collectives, losses, states and errors are what they were, bit for bit, on the
    same kind of machine with as many threads and the same torch. No peer is needed, so the program may stand still in a
    debugger or print what it likes.

    Args:
        path: as in :func:`record_messages`. rank: the rank to run.
        step: the first step of the record; None: the latest of this rank.
        check_sent: compare what this rank sends with what it sent. False: go on with what peers sent then, after a
            change of the program that doesn't change what it calls.

    Raises:
        CheckpointError: there is no record, or it isn't whole.
        WorldError: this process has a world already.
        RankMismatchError: in the block: the program calls something else than it did.
        ReplicaDivergedError: in the block: it sends other values.
        InputError: in the block: a step that wasn't recorded.

    Example:
        >>> import tempfile, torch, ltx
        >>> train = ltx.train_step(ltx.data_parallel(lambda w, x: (w * x).sum()), ltx.optim.from_torch(torch.optim.SGD, lr=0.5))
        >>> run, x = tempfile.mkdtemp(), torch.ones(2)
        >>> with ltx.record_messages(run, steps=range(0, 1)):
        ...     state, _ = train(train.init(torch.ones(2)), x)
        >>> with ltx.replay(run, rank=0) as replayed:
        ...     again = replayed.load(train.init(torch.zeros(2)))
        ...     for batch in replayed.batches:
        ...         again, _ = train(again, *batch)
        >>> torch.equal(state.params, again.params)
        True
    """
    record = _read(Path(os.path.abspath(path)) / f"rank_{rank}", step)
    if dist.is_initialized() or HandedIn.messages is not None or settings_of_world():
        raise WorldError("replay: this process has a world, or records messages. Replay in a process of its own.")
    own, size, local_rank, local_size, _ = record["world"]
    replayed = Replayed(own, tuple(each["step"] for each in record["steps"]), record, check_sent)
    peers, HandedIn.peers, HandedIn.messages = HandedIn.peers, _Alone, replayed
    try:
        where: dict[str, Any] = {}
        if size > 1:
            where = {"master": "localhost:1", "local_rank": local_rank, "local_size": local_size}
            _register()
            dist.init_process_group(_BACKEND, store=dist.HashStore(), rank=own, world_size=size)
        with init(rank=own, size=size, mesh=record["mesh"], **where):
            yield replayed
    finally:
        HandedIn.peers, HandedIn.messages = peers, None
        if dist.is_initialized():
            dist.destroy_process_group()


def _read(base: Path, step: int | None) -> dict[str, Any]:
    found = [at for at in directory.steps(base) if step in (None, at)]
    if not found:
        others = sorted(each.name for each in base.parent.glob("rank_*")) if base.parent.is_dir() else []
        raise CheckpointError(
            f"replay: there is no record{'' if step is None else f' of step {step}'} under {base}; found: {others}."
        )
    record: dict[str, Any] = open_checkpoint(directory.step_path(base, found[0]), 0, 1).structure("record")
    if not isinstance(record, dict) or "axes" not in record:
        raise CheckpointError(f"replay: {base} holds a checkpoint, not a record of messages.")
    return record


def _register() -> None:
    """Let torch know the backend of replays."""
    if _BACKEND in HOST_BLOCKING:
        return
    from torch._C._distributed_c10d import FakeProcessGroup  # ty: ignore

    kind: Any = FakeProcessGroup

    def make(store: Any, rank: int, size: int, timeout: Any) -> Any:
        options = kind.Options()
        options.error_on_collective = True
        return kind._create_internal(rank, size, options)

    HOST_BLOCKING.add(_BACKEND)
    dist.Backend.register_backend(_BACKEND, make, devices=["cpu", "cuda"])
