"""What a worker process runs: :func:`serve`, given its end of a connection that the driver opened before it started.

The end of that connection means that the driver is gone, and ends the worker at once, whatever it is doing.
"""

from __future__ import annotations

import gc
import linecache
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from ltx.runtime import init, packing, show
from ltx.runtime.environments import LOOPBACK, loopback_listener
from ltx.runtime.failures import failure_of, places_of
from ltx.runtime.messages import At, Call, Cancel, Failure, Ready, Rendezvous, Renew, Result, Setup, Stop
from ltx.runtime.output import Writer
from ltx.runtime.refresh import Modules
from ltx.runtime.world import abandon


def main(fd: int) -> None:
    """What a fresh interpreter runs: :func:`serve` the connection `fd`.

    The driver has the garbage collector disabled before ltx is imported, which takes a fifth less time so.
    """
    serve(Connection(fd))


def serve(connection: Connection, inherited: tuple[Any, tuple[Any, ...]] | None = None) -> None:
    """Do what the driver asks for until it says stop.

    Args:
        connection: this process' end.
        inherited: (function, arguments) of the call that a fork does.
    """
    setup: Setup = packing.receive(connection)()
    sys.path[:] = setup.sys_path
    loop = _WorkerLoop(connection, inherited)
    signal.signal(signal.SIGINT, loop.interrupt)
    try:
        _start_world(connection, setup.threads)
    except Exception as error:
        loop.send(failure_of(error))
        os._exit(1)
    # Modules live as long as the process: the collector needn't go through them, now and at the end of the process.
    gc.freeze()
    gc.enable()
    show.outbox = loop.send
    if setup.shows_output:
        sys.stdout, sys.stderr = Writer("stdout", 1, loop.send), Writer("stderr", 2, loop.send)
    loop.send(Ready())
    # A thread of its own reads, so that the end of the driver is seen while a call runs or hangs in a collective.
    threading.Thread(target=loop.read, name="ltx-worker-reader", daemon=True).start()
    while True:
        message, load = loop.inbox.get()
        if isinstance(message, Stop):
            return
        if isinstance(message, Renew):
            loop.send(_renewed(message))
        elif isinstance(message, Call):
            loop.answer(message, load)


# A call in which KeyboardInterrupt was raised so long ago, and which goes on, has caught it.
_CAUGHT_S = 1.0


class _WorkerLoop:
    """Where a worker's messages come in and go out.

    Attributes:
        running: the number of the call that is being done.
        cancelled: the number of the last call that the driver asked to give up.
    """

    def __init__(self, connection: Connection, inherited: tuple[Any, tuple[Any, ...]] | None):
        self._inherited = inherited
        self.inbox: SimpleQueue[tuple[Any, Callable[[], Any]]] = SimpleQueue()
        self.running: int | None = None
        self.cancelled: int | None = None
        self._connection = connection
        self._delivering = False
        self._interrupted = False
        self._raised: int | None = None  # the number of the last call in which KeyboardInterrupt was raised
        self._sending = threading.Lock()  # threads of the user's may show things too
        self._modules = Modules()

    def read(self) -> None:
        while True:
            try:
                load = packing.receive(self._connection)
            except (EOFError, OSError):
                os._exit(1)
            message = load()
            if not isinstance(message, Cancel):
                self.inbox.put((message, load))
                continue
            self.cancelled = message.number
            if self.running == message.number:
                try:
                    self._tell_place(message.number)
                finally:
                    # A signal, since nothing else wakes a thread that sleeps in a system call.
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                    later = threading.Timer(_CAUGHT_S, self._tell_caught, (message.number,))
                    later.daemon = True
                    later.start()

    def _tell_caught(self, number: int) -> None:
        if self._raised == number:
            self._tell_place(number, caught=True)

    def _tell_place(self, number: int, caught: bool = False) -> None:
        """Say where call `number` is, unless its answer is on its way: that comes last."""
        place = packing.pack(At(places_of(sys._current_frames()[threading.main_thread().ident or 0]), caught))
        with self._sending, suppress(OSError):  # the driver is gone
            if self.running == number:
                place.send(self._connection)
        place.close()

    def interrupt(self, _signal: int, _frame: object) -> None:
        """The handler of SIGINT: outside of calls there is nothing to interrupt, and half a message says nothing."""
        self._interrupted = self.running is not None and self._delivering
        if self.running is not None and not self._delivering:
            self._raised = self.running
            raise KeyboardInterrupt

    def send(self, message: Any) -> None:
        self._deliver(packing.pack(message))

    def answer(self, call: Call, load: Callable[[], Any]) -> None:
        """Do a call, and send what came of it."""
        try:
            reply = self._reply(call, load)
        except KeyboardInterrupt as error:  # it came just when the call had ended
            self.running = None
            reply = packing.pack(failure_of(error, cancelled=True))
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # broken or closed: no reason to lose the answer
                stream.finish() if isinstance(stream, Writer) else stream.flush()
        self._deliver(reply)

    def _reply(self, call: Call, load: Callable[[], Any]) -> packing.Message:
        """The message with a call's result. BaseException: a worker outlives ``sys.exit`` in a call."""
        doing = "unpickling the function and its arguments: "
        self.running = call.number
        try:
            if self.cancelled == call.number:
                raise KeyboardInterrupt
            fn, args, kwargs = self._asked(call, load)
            doing = ""
            value = fn(*args, **kwargs)
            self._modules.note()
            doing = f"pickling the result, which is of type {type(value).__name__}: "
            reply = packing.pack(Result(value))
            self.running = None
            return reply
        except BaseException as error:
            self.running = None
            abandon(error)
            return packing.pack(failure_of(error, doing, cancelled=self.cancelled == call.number))

    def _asked(self, call: Call, load: Callable[[], Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """The function and its arguments."""
        if call.inherited:
            assert self._inherited is not None
            return *self._inherited, {}
        self._modules.refresh()
        fn, (args, kwargs), sources = load(), load(), load()
        for name, (label, lines) in sources.items():
            linecache.cache[name] = (sum(map(len, lines)), None, lines, label)
        return fn, args, kwargs

    def _deliver(self, message: packing.Message) -> None:
        shields = threading.current_thread() is threading.main_thread()
        with self._sending:
            self._delivering = shields
            try:
                message.send(self._connection)
            except OSError:  # the driver is gone
                os._exit(1)
            finally:
                message.close()
                self._delivering = False
        if shields and self._interrupted:
            self._interrupted = False
            raise KeyboardInterrupt


def _renewed(asked: Renew) -> Ready | Failure:
    try:
        init.renew(asked.count)
    except Exception as error:
        return failure_of(error)
    return Ready()


def _start_world(connection: Connection, threads: int) -> None:
    """Make a world with the other workers."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    if os.environ["RANK"] == "0":
        # Port 0: the system picks a free one and binds it at once, so no other process can take it in between.
        # The store that ltx.init, or the user, opens at this address finds this server (multi_tenant).
        # It listens for this machine alone.
        listener = loopback_listener(LOOPBACK, 0)
        store = dist.TCPStore(  # type: ignore[attr-defined]
            LOOPBACK,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )
        _hosted.append(store)
        port = store.port
        packing.pack(Rendezvous(port)).send(connection)
    else:
        port = packing.receive(connection)().port
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = LOOPBACK, str(port)
    init.init()


_hosted: list[Any] = []  # the store's server lives as long as this process
