"""What a worker process of a pool runs: :func:`main`, given a file descriptor.

That is the worker's end of a connection that the driver opened before it started the process (see
:mod:`ltx.runtime.messages`). The end of that connection means that the driver is gone, and ends the worker at once,
whatever it is doing.
"""

from __future__ import annotations

import gc
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from ltx.runtime.messages import STOP, Failure, Meeting, Ready, Result, Setup


def main(fd: int) -> None:
    """Serve calls from the connection `fd` until the driver ends it.

    The driver has the garbage collector disabled before ltx is imported, which takes a fifth less time so.
    """
    connection = Connection(fd)
    setup: Setup = pickle.loads(connection.recv_bytes())
    sys.path[:] = setup.sys_path
    try:
        _start_world(connection, setup.threads)
    except Exception as error:
        connection.send_bytes(pickle.dumps(_failure(error)))
        os._exit(1)
    # Modules live as long as the process: the collector needn't go through them, now and at the end of the process.
    gc.freeze()
    gc.enable()
    connection.send_bytes(pickle.dumps(Ready()))

    # A thread of its own reads, so that the end of the driver is seen while a call runs or hangs in a collective.
    frames: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_read, args=(connection, frames), name="ltx-worker-reader", daemon=True).start()
    while (frame := frames.get()) != STOP:
        reply = _answer(frame)
        with suppress(OSError, ValueError):  # broken or closed: no reason to lose the answer
            sys.stdout.flush()
            sys.stderr.flush()
        try:
            connection.send_bytes(reply)
        except OSError:  # the driver is gone
            os._exit(1)


def _start_world(connection: Connection, threads: int) -> None:
    """Meet the other workers and initialise ltx."""
    import torch
    import torch.distributed as dist

    from ltx.runtime.init import init

    torch.set_num_threads(threads)
    if os.environ["RANK"] == "0":
        # Port 0: the system picks a free one and it is bound in the same moment, so nobody can take it in between.
        # The store that ltx.init, or the user, opens at this address finds this server (multi_tenant).
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True
        )
        _hosted.append(store)
        port = store.port
        connection.send_bytes(pickle.dumps(Meeting(port)))
    else:
        port = pickle.loads(connection.recv_bytes()).port
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    init()


_hosted: list[Any] = []  # the store's server lives as long as this process


def _read(connection: Connection, frames: SimpleQueue[bytes]) -> None:
    while True:
        try:
            frames.put(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(1)


def _answer(frame: bytes) -> bytes:
    """Run one call, and pickle what came of it. BaseException: a worker outlives ``sys.exit`` in a call."""
    import cloudpickle

    doing = "unpickling the function and its arguments: "
    try:
        fn: Callable[..., Any]
        fn, args, kwargs = pickle.loads(frame)
        doing = ""
        value = fn(*args, **kwargs)
        doing = f"pickling the result, which is of type {type(value).__name__}: "
        reply: bytes = cloudpickle.dumps(Result(value))
        return reply
    except BaseException as error:
        return pickle.dumps(_failure(error, doing))


def _failure(error: BaseException, doing: str = "") -> Failure:
    """`error` as it is sent. The outermost frame of the traceback, which is this file's, is left out."""
    import cloudpickle

    at_s = time.monotonic()
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    try:
        message, text = str(error), "".join(traceback.format_exception(type(error), error, frames))
    except Exception as broken:  # an exception whose own __str__ raises
        message = text = f"<no text: its __str__ raised {type(broken).__name__}>"
    try:
        pickled = cloudpickle.dumps(error)
    except Exception:
        pickled = None
    return Failure(type(error).__qualname__, doing + message, text, at_s, pickled)
