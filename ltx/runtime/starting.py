"""How a worker's process is started: as a fresh interpreter, or by one of multiprocessing's methods."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from ltx.core.comm.pickling import KEY
from ltx.core.ranks.axis import set_world_axes
from ltx.core.world.failures import LTX_HOME
from ltx.core.world.launchers import POOL_VARIABLE
from ltx.core.world.world import accelerators, forget
from ltx.errors import WorkerError
from ltx.runtime import worker

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]

# Collecting garbage while torch is imported takes a fifth of the time; the worker enables it when it is up.
_WORKER = "import gc, sys; gc.disable(); from ltx.runtime.worker import main; main(int(sys.argv[1]))"


@dataclass(frozen=True)
class Process:
    """A process that this one has started.

    Attributes:
        pid: its id.
        ended: its exit status once it has ended, negative for a signal; None if it hasn't after so many seconds.
        kill: ends it at once; does nothing to one that has ended.
    """

    pid: int
    ended: Callable[[float | None], int | None]
    kill: Callable[[], None]


#: start(rank, the worker's end of its connection, the driver's ends so far, where its output goes) -> the process
Starter = Callable[[int, Connection, Sequence[Connection], Sequence[int]], Process]


#: What a fork inherits: a function and its arguments.
Inherited = tuple[Any, tuple[Any, ...]]


def starter(method: str, size: int, threads: int, inherited: Inherited | None = None) -> Starter:
    """Starts workers of a world of `size` on this machine by `method`; a fork gets `inherited` as it is.

    Raises:
        WorkerError: there is no such method, or it can't be right in the state that this process is in.
    """
    if method not in get_args(StartMethod):
        raise WorkerError(f"start_method must be one of {', '.join(map(repr, get_args(StartMethod)))}, got {method!r}.")
    if method == "fork":
        _check_fork()
    # A script without a guard comes here again in each process that spawn starts, which runs it from the top.
    if method != "popen" and getattr(multiprocessing.current_process(), "_inheriting", False):
        raise WorkerError(
            f"start_method={method!r} runs this script again in every process, and it would start processes there "
            'again. Put what starts them under `if __name__ == "__main__":`, or use start_method="popen".'
        )

    def start(rank: int, end: Connection, others: Sequence[Connection], streams: Sequence[int]) -> Process:
        environment = worker_environment(rank, size, threads)
        if method == "popen":
            return _fresh(end, environment, streams)
        # A fork has copies of the driver's ends, which would keep its peers from seeing the driver go.
        copies = [other.fileno() for other in others] if method == "fork" else []
        process: BaseProcess = multiprocessing.get_context(method).Process(  # type: ignore[attr-defined]
            target=_serve,
            args=(end, environment, copies, inherited),
            daemon=True,  # or the end of this process would wait for it
        )
        process.start()

        def ended(timeout_s: float | None) -> int | None:
            process.join(timeout_s)
            return process.exitcode

        return Process(process.pid or 0, ended, process.kill)

    return start


def _fresh(end: Connection, environment: dict[str, str], streams: Sequence[int]) -> Process:
    out, err = streams or (None, None)
    process = subprocess.Popen(
        # -P: modules in the working directory shadow nothing while the worker starts.
        [sys.executable, "-P", "-c", _WORKER, str(end.fileno())],
        env=environment,
        pass_fds=[end.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        start_new_session=True,  # Ctrl-C in the terminal is the driver's to handle
    )

    def ended(timeout_s: float | None) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(timeout_s)
        return None

    return Process(process.pid, ended, process.kill)


def _serve(end: Connection, environment: dict[str, str], copies: Sequence[int], inherited: Inherited | None) -> None:
    """What a process of multiprocessing's runs; it closes its `copies` of the driver's ends."""
    # A daemon may start no processes, and a data loader wants to. The driver ends this one anyway.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the worker takes it over
    with suppress(OSError):
        os.setsid()
    for fd in copies:
        os.close(fd)
    os.environ.clear()
    os.environ.update(environment)
    forget()
    set_world_axes(())
    worker.serve(end, inherited)


def _check_fork() -> None:
    if torch.cuda.is_initialized():
        raise WorkerError(
            'start_method="fork": CUDA is initialised in this process, and a fork of it can\'t use CUDA. Use "popen", '
            "or start the ranks before anything touches the GPU."
        )
    if dist.is_initialized():
        raise WorkerError(
            'start_method="fork": torch.distributed is initialised in this process, and forks of it would share its '
            'connections. Use "popen", or call ltx.shutdown() first.'
        )


@functools.cache
def _own_key() -> str:
    """That of all workers of this process."""
    return os.urandom(16).hex()


def worker_environment(rank: int, size: int, threads: int) -> dict[str, str]:
    """The driver's environment, with what torchrun would say to rank `rank` of `size` on one node."""
    # What torchrun said to the driver about its own store isn't about the workers'.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC_")}
    environment.setdefault(KEY, _own_key())
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
    if 0 < accelerators()[1] < size:
        environment["CUDA_VISIBLE_DEVICES"] = ""  # NCCL takes one device for each rank: all on the CPU then
    home = str(LTX_HOME.parent)
    if home not in sysconfig.get_paths().values():  # a checkout, not an installed package
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
    return environment
