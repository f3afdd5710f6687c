"""The processes of a pool: n fresh interpreters, each on one end of a connection.

The connection is a pair of anonymous Unix sockets whose one end the worker inherits: there is no address that another
process could connect to, and no file to clean up. When the driver ends, in whatever way, the system closes its end, the
worker sees that and ends too. Only processes that this process started are ever signalled, by their handle.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import sysconfig
import time
import weakref
from collections.abc import Collection
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from ltx.errors import WorkerError
from ltx.runtime.messages import STOP, Failure, Meeting, Ready, Setup
from ltx.runtime.world import POOL_VARIABLE

# The folder that ltx is imported from.
_IMPORT_HOME = str(Path(__file__).resolve().parents[2])
_STOP_GRACE_S = 3.0
# Collecting garbage while torch is imported takes a fifth of the time; the worker enables it when it is up.
_WORKER = "import gc, sys; gc.disable(); from ltx.runtime.worker import main; main(int(sys.argv[1]))"


class Crew:
    """`size` workers whose world is up. They end with :meth:`stop`, with this object, or with this process.

    Raises:
        WorkerError: a worker failed to start, or they weren't all up after `start_timeout_s`.
    """

    def __init__(self, size: int, threads: int, start_timeout_s: float):
        self.size = size
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._end = weakref.finalize(self, _end, os.getpid(), self._processes, self._connections, _STOP_GRACE_S)
        try:
            for rank in range(size):
                self._spawn(rank, threads)
            self._await_start(time.monotonic() + start_timeout_s, start_timeout_s)
        except BaseException:
            self.kill()
            raise

    @property
    def pids(self) -> list[int]:
        """The workers' process ids, by rank."""
        return [process.pid for process in self._processes]

    @property
    def is_ours(self) -> bool:
        """Whether the process that asks is the one that started the workers, rather than a fork of it."""
        details = self._end.peek()
        return details is not None and details[2][0] == os.getpid()

    def send(self, rank: int, frame: bytes) -> bool:
        """Send `frame` to a worker; False if it is gone."""
        try:
            self._connections[rank].send_bytes(frame)
        except OSError:
            return False
        return True

    def receive(self, ranks: Collection[int], timeout_s: float | None) -> dict[int, bytes | None]:
        """The frames that have arrived from `ranks`, None from one that is gone; empty once `timeout_s` is over."""
        by_connection: dict[Any, int] = {self._connections[rank]: rank for rank in ranks}
        frames: dict[int, bytes | None] = {}
        for connection in wait(list(by_connection), timeout_s):
            try:
                frames[by_connection[connection]] = self._connections[by_connection[connection]].recv_bytes()
            except (EOFError, OSError):
                frames[by_connection[connection]] = None
        return frames

    def exit_text(self, rank: int) -> str:
        """How the process of a rank that is gone ended, in words."""
        try:
            code = self._processes[rank].wait(timeout=_STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            return "closed its connection to the driver"
        if code >= 0:
            return f"exited with status {code}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
        hint = {
            "SIGKILL": " (the system does that when memory runs out)",
            "SIGABRT": " (gloo does that when ranks issue different shapes or dtypes)",
        }
        return f"was killed by {name}{hint.get(name, '')}"

    def stop(self) -> None:
        """Let the workers end by themselves, and kill those that haven't after a few seconds."""
        self._end()

    def kill(self) -> None:
        """End the workers at once, whatever they are doing."""
        if self.is_ours:
            self._end.detach()
            _end(os.getpid(), self._processes, self._connections, 0.0)

    def _spawn(self, rank: int, threads: int) -> None:
        ours, theirs = Pipe()
        with theirs:
            self._connections.append(ours)
            self._processes.append(
                subprocess.Popen(
                    # -P: modules in the working directory shadow nothing while the worker starts.
                    [sys.executable, "-P", "-c", _WORKER, str(theirs.fileno())],
                    env=_worker_environment(rank, self.size, threads),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C in the terminal is the driver's to handle
                )
            )
        self.send(rank, pickle.dumps(Setup([path or os.getcwd() for path in sys.path], threads)))

    def _await_start(self, deadline: float, start_timeout_s: float) -> None:
        waiting = set(range(self.size))
        while waiting:
            frames = self.receive(waiting, max(0.0, deadline - time.monotonic()))
            if not frames:
                raise WorkerError(
                    f"the workers of ranks {sorted(waiting)} of {self.size} weren't up after {start_timeout_s:g} s. "
                    "Starting takes a few seconds on an idle machine: give a larger start_timeout_s, or look for what "
                    "loads this one."
                )
            for rank, frame in frames.items():
                message = pickle.loads(frame) if frame is not None else None
                if isinstance(message, Meeting):
                    for other in range(1, self.size):
                        self.send(other, pickle.dumps(message))
                elif isinstance(message, Ready):
                    waiting.discard(rank)
                elif isinstance(message, Failure):
                    raise WorkerError(
                        f"the worker of rank {rank} of {self.size} failed to start: {message.type_name}: "
                        f"{message.message}\n\n{message.traceback_text}"
                    )
                else:
                    raise WorkerError(
                        f"the worker of rank {rank} of {self.size} {self.exit_text(rank)} while it started. What it "
                        f"wrote to stderr says more; `{sys.executable} -c 'import ltx'` should work."
                    )


def _end(owner: int, processes: list[subprocess.Popen[bytes]], connections: list[Connection], grace_s: float) -> None:
    """Stop the workers, kill those that are left after `grace_s`, and wait for all of them to be gone."""
    if os.getpid() != owner:  # a fork of the driver: the workers aren't its children
        return
    deadline = time.monotonic() + grace_s
    try:
        for connection in connections if grace_s else ():
            with suppress(OSError):
                connection.send_bytes(STOP)
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            process.kill()  # does nothing to one that has ended
        for process in processes:
            process.wait()
        for connection in connections:
            connection.close()


def _worker_environment(rank: int, size: int, threads: int) -> dict[str, str]:
    """The driver's environment, with what torchrun would say to rank `rank` of `size` on one node."""
    import torch

    # What torchrun said to the driver about its own store isn't about the workers'.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC_")}
    environment |= {
        POOL_VARIABLE: str(size),
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "OMP_NUM_THREADS": str(threads),
    }
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all on this machine, whatever its name resolves to
    if torch.cuda.is_available() and torch.cuda.device_count() < size:
        environment["CUDA_VISIBLE_DEVICES"] = ""  # NCCL takes one device for each rank: all on the CPU then
    if _IMPORT_HOME not in sysconfig.get_paths().values():  # a checkout, not an installed package
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [_IMPORT_HOME, os.environ.get("PYTHONPATH")]))
    return environment
