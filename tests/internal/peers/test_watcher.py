"""Peers that fall silent: stopped processes are told from slow ones, and a rank that never comes is named."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

import ltx
from ltx.checkpoint.together import Together
from ltx.core.base import kernel
from ltx.core.comm.channel import Work
from ltx.core.comm.registry import resolve
from ltx.peers import watcher as module
from ltx.peers.diagnosis import Record, Status, silent_of
from ltx.peers.watcher import Watcher, hold_watcher
from tests.forks import SILENT_S, Ranks, hold_store, settles
from tests.kinds import Started, Tell
from tests.programs import begun, end, of_torchrun
from tests.train_on import raised_by

SIZE = 3
Body = Callable[[int, Tell], None]


def _sum(n: int = 3) -> float:
    return float(ltx.psum(torch.ones(n))[0])


def _state() -> Any:
    train = ltx.train_step(ltx.data_parallel(torch.sum), ltx.optim.from_torch(torch.optim.SGD, lr=0.1))
    return train.init(torch.ones(3))


def up(started: Started, body: Body, size: int = SIZE, stays: bool = False, **kwargs: Any) -> Ranks:
    def goes_on(tell: Tell) -> None:
        _sum()
        tell("up")
        body(ltx.world().rank, tell)
        if stays:
            time.sleep(60)  # the others are to find their errors by themselves, not by this one's end

    world: Ranks = started(size, goes_on, **{"heartbeat_s": SILENT_S, **kwargs})
    assert [world.told(rank) for rank in range(size)] == ["up"] * size
    return world


def without_store(world: Ranks) -> None:
    world.holder.kill()
    world.holder.join()


def test_who_is_only_late_is_not_taken_for_gone() -> None:
    """Of two ranks that show no beat for longer than an interval, after a connection has broken."""
    began = time.monotonic()

    class Seen(Watcher):
        without_store = False  # type: ignore[assignment]
        records: ClassVar[dict[int, Record]] = {}  # of processes on other machines

        def __init__(self) -> None:
            self.heartbeat_s = 10.0

        def look_now(self) -> dict[int, Record]:
            return {1: Record(1.0 + (time.monotonic() - began > 1.0)), 2: Record(1.0)}

    assert Seen().without_beat([1, 2]) == {2}


@pytest.mark.full(but=2)
@pytest.mark.covering(1)
@pytest.mark.parametrize("sockets", [False, True])
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_process_that_is_stopped(stopped: int, sockets: bool, started: Started) -> None:
    def body(rank: int, tell: Tell) -> None:
        if rank == stopped:
            os.kill(os.getpid(), signal.SIGSTOP)
        tell(raised_by(_sum))

    world = up(started, body, stays=True, held_by="rank 0", sockets=sockets)
    others = [rank for rank in range(SIZE) if rank != stopped]
    for rank, text in [(rank, world.told(rank)) for rank in others]:
        assert text.startswith(f"PeerLostError: rank {rank}: "), text
        if stopped == 0:  # it holds the store
            assert f"the store through which the ranks meet hasn't answered for {SILENT_S:g} s" in text
            assert "rank 0's" in text
        else:
            assert f"rank {stopped} on axis 'data' has shown no sign of life for {SILENT_S:g} s" in text
        assert "It waited for psum (issue 2)." in text


class Both:
    """An axis of two ranks, as far as a watcher looks after it."""

    label, global_ranks, look_after_device = "both", [0, 1], staticmethod(lambda: None)
    status = staticmethod(Status)


def test_a_shorter_heartbeat_than_before_has_shorter_pauses() -> None:
    """As where a process group was an axis before ``ltx.init(heartbeat_timeout=)``."""
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    stores = [store, dist.TCPStore("127.0.0.1", store.port)]  # type: ignore[attr-defined]
    beats = [hold_watcher(each, rank, heartbeat_s) for heartbeat_s in (60.0, 3.0) for rank, each in enumerate(stores)]
    for watcher in beats[:2]:
        watcher.axes["both"] = Both()
    try:
        end = time.monotonic() + 3.5
        while time.monotonic() < end:
            records = beats[0].look()
            assert not silent_of(records)
            assert all(record.beat for record in records.values())
            time.sleep(0.05)
        for _ in range(2):
            beats[1].release()
        assert settles(lambda: beats[0].look()[1].beat, (0.0).__eq__) == 0.0
    finally:
        for _ in range(2):
            beats[0].release()


@pytest.mark.full
def test_who_waited_for_a_stopped_peer_can_end() -> None:
    """Though that still holds its end of every connection, and gloo waits for it."""
    script = (
        "import os, signal, torch, ltx\nfrom datetime import timedelta\n"
        "with ltx.init(heartbeat_timeout=timedelta(seconds=5)) as world:\n"
        "    ltx.psum(torch.ones(3))\n"
        "    if world.rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    ltx.psum(torch.ones(3))\n"
    )
    processes = begun(["-c", script], [environ | {"LTX_SHARED_MEMORY": "0"} for environ in of_torchrun(SIZE)])
    try:
        for rank in (0, 2):
            _, err = processes[rank].communicate(timeout=100)
            assert processes[rank].returncode == 1, err
            # Seen by itself, or heard from the other that left because of it.
            assert f"PeerLostError: rank {rank}: " in err
            assert "rank 1 on axis 'data' has shown no sign of life" in err
    finally:
        end(processes)


def test_a_rank_that_came_is_not_named_though_it_is_behind(started: Started) -> None:
    """What counts is the collective that is waited for, not the last one that this rank has issued."""

    def body(rank: int, tell: Tell) -> None:
        user: Any = resolve(None).comm.user  # type: ignore[union-attr]
        issued = [user.issue("psum", torch.ones(3), "psum") for _ in range((6, 4, 1)[rank])]
        if rank == 0:
            tell(raised_by(issued[2].wait))

    text = up(started, body, stays=True, held_by="rank 0", timeout_s=4).told(0)
    assert text.startswith("CollectiveTimeoutError: rank 0: psum (issue 4) on axis 'data'"), text
    assert "within 4 s: rank 2 is at issue 2 and never came to it. Every rank must call" in text


@pytest.mark.full
def test_steps_go_on_without_the_store(started: Started, tmp_path: Path) -> None:
    """It was another process', such as a launcher's. Only what is new can't be compared any more."""
    dead = get_context("fork").Event()

    def body(rank: int, tell: Tell) -> None:
        state = _state()
        tell("ready")
        assert dead.wait(60)
        if rank == 1:
            time.sleep(1.5)  # the others wait, and look around meanwhile
        tell(_sum())
        for new in (lambda: _sum(4), lambda: ltx.checkpoint.save(tmp_path, state)):
            tell(raised_by(new))

    world = up(started, body, stays=True, sockets=True)
    assert [world.told(rank) for rank in range(SIZE)] == ["ready"] * SIZE
    without_store(world)
    dead.set()
    assert [world.told(rank) for rank in range(SIZE)] == [SIZE] * SIZE
    for rank in [*range(SIZE)] * 2:
        text = world.told(rank)
        assert text.startswith(f"StoreGoneError: rank {rank}: the store through which the ranks meet is gone"), text
        assert "torch.save(state.state_dict(), path) keeps what this rank has" in text


@pytest.mark.full
def test_waiting_costs_the_store_as_much_however_many_ranks_there_are(started: Started) -> None:
    def body(tell: Tell) -> None:
        asked: list[str] = []

        def counted(method: Any) -> Any:
            return lambda *args: (asked.append(method.__name__), method(*args))[1]

        for name in ("set", "get", "multi_get", "check", "add", "append", "compare_set", "delete_key"):
            setattr(PrefixStore, name, counted(getattr(PrefixStore, name)))
        _sum()
        ltx.barrier()
        asked.clear()
        if ltx.world().is_global_zero:
            time.sleep(3.0)
        began = time.monotonic()
        _sum()
        tell((len(asked), time.monotonic() - began))
        time.sleep(1.0)  # so that nobody's end is part of what another one sees

    for size in (2, 4, 6):
        world = started(size, body)
        requests, waited_s = [world.told(rank) for rank in range(size)][1]
        assert waited_s > 1.0
        assert requests < 20 * waited_s + 12, size  # 3 N + 1 each tenth of a second would be 70, 130 and 190 a second


class Door:
    """Before the store at `port`: it counts connections, and serves nobody else for `slow_s` while it lets one in."""

    def __init__(self, port: int, slow_s: float):
        self.port, self.count, self._behind, self._slow_s = 0, 0, port, slow_s
        opened = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._open(opened)), daemon=True).start()
        opened.wait()

    async def _open(self, opened: threading.Event) -> None:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        opened.set()
        await server.serve_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.count += 1
        time.sleep(self._slow_s)
        behind = await asyncio.open_connection("127.0.0.1", self._behind)
        await asyncio.gather(self._relay(reader, behind[1]), self._relay(behind[0], writer))

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.close()


@pytest.mark.full(but=1)
@pytest.mark.parametrize("slow_s", [0.0, 1.2])
def test_a_world_opens_three_connections_a_rank_before_it_expects_answers(slow_s: float) -> None:
    """torch's store looks for the name of each one's other end in its only thread, which may take a second."""
    late, clone, heartbeat_s = random.Random(3), PrefixStore.clone, 0.5 if slow_s else 5.0

    def clones(store: Any) -> Any:
        time.sleep(slow_s * late.random() * (1 + os.getpid() % 3))
        return clone(store)

    holder, port = hold_store()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrefixStore, "clone", clones)
        door = Door(port, slow_s)
        world = Ranks(SIZE, lambda tell: _sum(), heartbeat_s=heartbeat_s, environment={"MASTER_PORT": str(door.port)})
    try:
        assert ([world.told(rank) for rank in range(SIZE)], door.count) == ([SIZE] * SIZE, 3 * SIZE)
    finally:
        world.close()
        holder.kill()
        holder.join()


@pytest.mark.full
@pytest.mark.parametrize("at", ["before", "exchange"])
def test_rank_0_dies_with_the_store_while_ranks_save(at: str, tmp_path: Path, started: Started) -> None:
    def body(rank: int, tell: Tell) -> None:
        state = _state()
        ltx.checkpoint.save(tmp_path, state)
        tell("saved")
        if rank == 0 and at == "exchange":
            Together.exchange = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        elif rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        ltx.checkpoint.save(tmp_path, state)

    world = up(started, body, held_by="rank 0", sockets=True)
    assert [world.told(rank) for rank in range(SIZE)] == ["saved"] * SIZE
    for rank in (1, 2):
        said = world.told(rank)
        assert said.startswith(f"StoreGoneError: rank {rank}: the store"), said
        assert "is gone, and with it rank 0's process, which held it." in said


@pytest.mark.full
@pytest.mark.parametrize(("by", "end"), [(signal.SIGKILL, "PeerLostError"), (signal.SIGSTOP, "CollectiveTimeoutError")])
def test_a_peer_that_goes_after_the_store(by: signal.Signals, end: str, started: Started) -> None:
    """A broken connection shows that it is gone; silence doesn't, so the wait ends by its timeout."""
    over = get_context("fork").Event()

    def body(rank: int, tell: Tell) -> None:
        assert over.wait(60)
        if rank == 1:
            os.kill(os.getpid(), by)
        _sum()

    world = up(started, body, sockets=True, timeout_s=10.0)
    without_store(world)
    over.set()
    for rank in (0, 2):
        said = world.told(rank)
        assert said.startswith(f"{end}: rank {rank}: "), said


def test_a_rank_that_waits_on_without_rank_0_and_its_store(started: Started) -> None:
    """gloo may not tell it of a connection that has ended while the process was stopped; nor the other's kernel."""

    def body(rank: int, tell: Tell) -> None:
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        Work._block = lambda work, _, began: waits(work, began)  # type: ignore[method-assign]
        kernel.machine = lambda: None
        _sum()

    def waits(work: Any, began: float) -> None:
        while True:
            time.sleep(0.05)
            work._channel.look_around(began, work.number, work._label)

    said = up(started, body, 2, held_by="rank 0", sockets=True).told(1)
    assert said.startswith("PeerLostError: rank 1: rank 0 on axis 'data' is gone, and with it the store"), said


def test_rank_0_does_not_wait_for_the_dead_to_hear_why_it_leaves(started: Started) -> None:
    def body(rank: int, tell: Tell) -> None:
        module._HEARD_S = 60.0
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        _sum()

    # It is told once its world has ended.
    assert up(started, body, heartbeat_s=60.0).told(0).startswith("PeerLostError: rank 0: ")
