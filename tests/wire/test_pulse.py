"""Peers that fall silent: stopped processes are told from slow ones, and a rank that never comes is named."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ltx
from ltx.errors import LtxError
from ltx.runtime.init import forget, init

ROOT = Path(__file__).parents[2]
SIZE = 3
Body = Callable[[int, Callable[[str], None]], None]


def _environment(rank: int, port: int, sockets: bool) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("TORCHELASTIC_", "LTX_"))}
    meeting = {"RANK": str(rank), "WORLD_SIZE": str(SIZE), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return clean | meeting | {"PYTHONPATH": str(ROOT), "LTX_SHARED_MEMORY": "0" if sockets else "1"}


class Ranks:
    """Three forks of this process, which are ranks of a world; what they tell comes line by line."""

    def __init__(self, body: Body, sockets: bool, timeout_s: float, port: int):
        context = get_context("fork")
        given, port = bool(port), port or _free_port()
        self.lines: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(SIZE):
            ours, theirs = context.Pipe(duplex=False)
            self.lines.append(ours)
            environment = _environment(rank, port, sockets)
            if given:
                environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # nobody of them holds it
            process = context.Process(target=_rank, args=(rank, body, theirs.send, environment, timeout_s))
            process.start()
            theirs.close()
            self.processes.append(process)

    def line(self, rank: int) -> str:
        """What `rank` tells next."""
        assert self.lines[rank].poll(30), f"rank {rank} tells nothing"
        return str(self.lines[rank].recv())

    def close(self) -> None:
        """End them."""
        for process in self.processes:
            process.kill()
            process.join()


def _rank(
    rank: int,
    body: Body,
    tell: Callable[[str], None],
    environment: dict[str, str],
    timeout_s: float,
) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    forget()
    init(timeout=timedelta(seconds=timeout_s), heartbeat_timeout=timedelta(seconds=2))
    ltx.psum(torch.ones(3))
    tell("up")
    body(rank, tell)
    time.sleep(60)  # the others are to find their errors by themselves, not by this one's end


def _sum(tell: Callable[[str], None]) -> None:
    began = time.monotonic()
    try:
        ltx.psum(torch.ones(3))
        tell("landed")
    except LtxError as error:
        tell(f"{type(error).__name__} after {time.monotonic() - began:.1f} s: {error}")


def _hold_store(end: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    end.send(store.port)
    time.sleep(100)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def ranks() -> Iterator[Callable[..., Ranks]]:
    started: list[Ranks] = []

    def start(body: Body, sockets: bool = False, timeout_s: float = 30, port: int = 0) -> Ranks:
        started.append(Ranks(body, sockets, timeout_s, port))
        assert [started[-1].line(rank) for rank in range(SIZE)] == ["up"] * SIZE
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.mark.parametrize("sockets", [False, True])
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_process_that_is_stopped(stopped: int, sockets: bool, ranks: Callable[..., Ranks]) -> None:
    def body(rank: int, tell: Callable[[str], None]) -> None:
        if rank == stopped:
            os.kill(os.getpid(), signal.SIGSTOP)
        _sum(tell)

    world = ranks(body, sockets)
    others = [rank for rank in range(SIZE) if rank != stopped]
    began = time.monotonic()
    told = {rank: world.line(rank) for rank in others}
    assert time.monotonic() - began < 15
    for rank, text in told.items():
        assert text.startswith("PeerLostError after "), text
        assert f"rank {rank}: " in text
        if stopped == 0:  # it holds the store
            assert "the store through which the ranks meet hasn't answered for 2 s" in text
            assert "rank 0's" in text
        else:
            assert f"rank {stopped} on axis 'data' has shown no sign of life for 2 s" in text
        assert "It waited for psum (issue 2)." in text


def test_who_waited_for_a_stopped_peer_can_end() -> None:
    """Though that still holds its end of every connection, and gloo waits for it."""
    script = (
        "import os, signal, torch, ltx\nfrom datetime import timedelta\n"
        "with ltx.init(heartbeat_timeout=timedelta(seconds=2)) as world:\n"
        "    ltx.psum(torch.ones(3))\n"
        "    if world.rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    ltx.psum(torch.ones(3))\n"
    )
    port = _free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script], env=_environment(rank, port, True), stderr=subprocess.PIPE, text=True
        )
        for rank in range(SIZE)
    ]
    try:
        for rank in (0, 2):
            _, err = processes[rank].communicate(timeout=50)
            assert processes[rank].returncode == 1, err
            # Seen by itself, or heard from the other that left because of it.
            assert f"PeerLostError: rank {rank}: " in err
            assert "rank 1 on axis 'data' has shown no sign of life" in err
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_a_slow_peer_is_no_lost_one(ranks: Callable[..., Ranks]) -> None:
    """One that computes in Python, one that sleeps: both for longer than the heartbeat timeout."""

    def body(rank: int, tell: Callable[[str], None]) -> None:
        end = time.monotonic() + 4
        while rank == 0 and time.monotonic() < end:
            pass
        if rank == 1:
            time.sleep(4)
        _sum(tell)

    world = ranks(body)
    assert [world.line(rank) for rank in range(SIZE)] == ["landed"] * SIZE


def test_a_rank_that_never_comes_is_named_with_what_it_never_issued(ranks: Callable[..., Ranks]) -> None:
    def body(rank: int, tell: Callable[[str], None]) -> None:
        while rank == 1:
            pass
        _sum(tell)

    world = ranks(body, timeout_s=3)
    for rank in (0, 2):
        text = world.line(rank)
        assert text.startswith("CollectiveTimeoutError after 3."), text
        assert f"rank {rank}: psum (issue 2) on axis 'data', channel 'user', didn't complete within 3 s" in text
        assert "rank 1 is at issue 1 and never came to it" in text


def test_steps_go_on_without_the_store(ranks: Callable[..., Ranks]) -> None:
    """It was another process', such as a launcher's. Only what is new can't be compared any more."""
    context = get_context("fork")
    ours, theirs = context.Pipe()
    launcher = context.Process(target=_hold_store, args=(theirs,))
    launcher.start()

    def body(rank: int, tell: Callable[[str], None]) -> None:
        tell("ready")
        while not dead.is_set():
            time.sleep(0.01)
        if rank == 1:
            time.sleep(1.5)  # the others wait, and look around meanwhile
        _sum(tell)
        try:
            ltx.psum(torch.ones(4))
            tell("compared")
        except LtxError as error:
            tell(f"{type(error).__name__}: {error}")

    dead = context.Event()
    world = ranks(body, sockets=True, port=ours.recv())
    assert [world.line(rank) for rank in range(SIZE)] == ["ready"] * SIZE
    launcher.kill()
    launcher.join()
    dead.set()
    assert [world.line(rank) for rank in range(SIZE)] == ["landed"] * SIZE
    for rank in range(SIZE):
        text = world.line(rank)
        assert text.startswith(f"StoreGoneError: rank {rank}: the store through which the ranks meet is gone"), text
        assert "Save a checkpoint" in text
