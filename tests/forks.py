"""Ranks of a world that are forks of the test's process, for tests in which some are killed, stopped or cut off."""

from __future__ import annotations

import gc
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import ltx
from ltx.core.world.world import forget
from tests.streams import backend

T = TypeVar("T")

#: ``heartbeat_s`` where a rank falls silent, which tests wait for. A loaded machine can keep ranks from beating for 2.
SILENT_S = 5.0

#: What a rank does, given how it tells something on the way; what it returns, it tells at its end.
Body = Callable[[Callable[[Any], None]], object]


class Ranks:
    """Forks of this process, which are ranks of a world; what they tell comes piece by piece.

    Args:
        size: their number.
        body: what each of them does in the world.
        held_by: where they meet is held by a process of its own, as a launcher does, or with ``"rank 0"`` by rank 0.
        sockets: they do without shared memory.
        timeout_s, heartbeat_s: as in :func:`ltx.init`; `heartbeat_s` is :data:`SILENT_S` where a rank falls silent.
        environment: more variables of all of them.
        streams: they communicate by a backend that orders streams.
    """

    def __init__(
        self,
        size: int,
        body: Body,
        held_by: str = "launcher",
        sockets: bool = False,
        timeout_s: float = 60.0,
        heartbeat_s: float = 10.0,
        environment: dict[str, str] | None = None,
        streams: bool = False,
    ):
        self._limits = (timeout_s, heartbeat_s)
        self._common = {"MASTER_ADDR": "127.0.0.1", "LTX_SHARED_MEMORY": "0" if sockets else "1"}
        self.holder, self.lines, self.processes = None, list[Connection](), list[Any]()
        port = free_port()
        if held_by == "launcher":
            self.holder, port = hold_store()
            self._common["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        self._common["MASTER_PORT"] = str(port)
        self._common |= environment or {}
        if streams:
            self._common["LTX_TEST_STREAMS"] = "1"
        for rank in range(size):
            self._start(body, {"RANK": str(rank), "WORLD_SIZE": str(size)})

    def _start(self, body: Body, environment: dict[str, str]) -> None:
        context = get_context("fork")
        mine, its = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(body, its, self._common | environment, *self._limits))
        process.start()
        its.close()
        self.lines.append(mine)
        self.processes.append(process)

    def told(self, rank: int, timeout_s: float = 60.0) -> Any:
        assert self.lines[rank].poll(timeout_s), f"rank {rank} tells nothing"
        return self.lines[rank].recv()

    def close(self) -> None:
        for process in (*self.processes, *([self.holder] if self.holder else [])):
            process.kill()
            process.join()
            process.close()
        for line in self.lines:
            line.close()


def _rank(body: Body, line: Connection, environment: dict[str, str], timeout_s: float, heartbeat_s: float) -> None:
    gc.freeze()  # the parent's garbage isn't collected here: stores in it would wait for threads that a fork hasn't
    for name in [name for name in os.environ if name.startswith(("TORCHELASTIC_", "LTX_"))]:
        del os.environ[name]
    os.environ.update(environment)
    torch.set_num_threads(1)
    forget()
    told: dict[str, Any] = {}
    host: AbstractContextManager[Any] = nullcontext()
    if os.environ.pop("LTX_TEST_STREAMS", "0") == "1":
        backend.register()
        told["backend"], host = backend.NAME, backend.Host()
    limits = {"timeout": timedelta(seconds=timeout_s), "heartbeat_timeout": timedelta(seconds=heartbeat_s)}
    try:
        with ltx.init(**told, **limits), host:
            end = body(line.send)
        assert not dist.is_initialized(), "the with block has left a world behind"
        line.send(end)
    except Exception as error:
        line.send(f"{type(error).__name__}: {error}")


def hold_store() -> tuple[Any, int]:
    """A process that holds a store as a launcher does, until it is killed; and the store's port."""
    context = get_context("fork")
    mine, its = context.Pipe(duplex=False)
    process = context.Process(target=_hold, args=(its,))
    process.start()
    its.close()
    with mine:
        return process, mine.recv()


def _hold(end: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    end.send(store.port)
    signal.pause()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def open_now() -> dict[str, int]:
    """How many files, sockets, pieces of shared memory and threads this process has at the moment, by their kind."""
    found = Counter[str]()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one that listed them
            kind = os.readlink(f"/proc/self/fd/{name}")
            found[kind if kind.startswith("/memfd") else kind.partition(":")[0]] += 1
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has just ended
            found[f"thread {Path(f'/proc/self/task/{task}/comm').read_text().strip()}"] += 1
    return dict(found)


def settles(look: Callable[[], T], wanted: Callable[[T], bool], limit_s: float = 30.0) -> T:
    """What `look` gives once it is as `wanted`: threads take a moment to end. At the limit, what it gives then."""
    deadline = time.monotonic() + limit_s
    while not wanted(found := look()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found
