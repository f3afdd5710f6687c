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

import torch

from ltx.core.world.groups import loopback_store
from ltx.core.world.init import init, renew
from ltx.core.world.placement import LOOPBACK
from ltx.core.world.world import abandon
from ltx.runtime import show
from ltx.runtime.calls import Modules
from ltx.runtime.failures import failure_of, places_of
from ltx.runtime.messages import (
    At,
    Call,
    Cancel,
    Message,
    Ready,
    Rendezvous,
    Renew,
    Result,
    Setup,
    Stop,
    pack,
    receive,
)
from ltx.runtime.output import Writer


def main(fd: int) -> None:
    """What a fresh interpreter runs, with the garbage collector disabled: :func:`serve` the connection `fd`."""
    serve(Connection(fd))


def serve(connection: Connection, inherited: tuple[Any, tuple[Any, ...]] | None = None) -> None:
    """Do what the driver asks for until it says stop.

    Args:
        connection: this process' end.
        inherited: (function, arguments) of the call that a fork does.
    """
    os.set_inheritable(connection.fileno(), False)  # else the driver would see its end only with that of a command
    setup: Setup = receive(connection)()
    sys.path[:] = setup.search_path
    loop = _WorkerLoop(connection, inherited, setup.search_path)
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
    os.register_at_fork(after_in_child=loop.in_fork)
    if setup.shows_output:
        sys.stdout, sys.stderr = (Writer(name, fd, loop.send) for fd, name in ((1, "stdout"), (2, "stderr")))
        for writer in (sys.stdout, sys.stderr):
            os.register_at_fork(after_in_child=writer.in_fork)
    loop.send(Ready())
    # A thread of its own reads, so that the end of the driver is seen while a call runs or hangs in a collective.
    threading.Thread(target=loop.read, name="ltx-worker-reader", daemon=True).start()
    while True:
        message, load = loop.inbox.get()
        if isinstance(message, Stop):
            return
        if isinstance(message, Renew):
            try:
                renew(message.count)
                loop.send(Ready())
            except Exception as error:
                loop.send(failure_of(error))
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

    def __init__(self, connection: Connection, inherited: tuple[Any, tuple[Any, ...]] | None, search_path: list[str]):
        self._inherited, self._search_path = inherited, search_path
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
                load = receive(self._connection)
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
        place = pack(At(places_of(sys._current_frames()[threading.main_thread().ident or 0]), caught))
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

    def in_fork(self) -> None:
        """In a fork, such as a data loader's worker: the connection is the parent's, and ends with the parent."""
        show.outbox = None
        self._connection.close()

    def send(self, message: Any) -> None:
        self._deliver(pack(message))

    def answer(self, call: Call, load: Callable[[], Any]) -> None:
        """Do a call, and send what came of it."""
        try:
            reply = self._reply(call, load)
        except KeyboardInterrupt as error:  # it came just when the call had ended
            self.running = None
            reply = pack(failure_of(error, cancelled=True))
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # broken or closed: no reason to lose the answer
                if isinstance(stream, Writer):
                    stream.finish()
                elif stream is not None:
                    stream.flush()
        self._deliver(reply)

    def _reply(self, call: Call, load: Callable[[], Any]) -> Message:
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
            reply = pack(Result(value))
            self.running = None
            return reply
        except BaseException as error:
            self.running = None
            failure = failure_of(error, doing, cancelled=self.cancelled == call.number)  # peers fail after this one
            abandon(error)
            return pack(failure)

    def _asked(self, call: Call, load: Callable[[], Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """The function and its arguments."""
        if call.inherited:
            assert self._inherited is not None
            return *self._inherited, {}
        if call.search_path != self._search_path:
            added_here = [path for path in sys.path if path not in self._search_path]
            sys.path[:] = [*call.search_path, *added_here]
            self._search_path = call.search_path
        self._modules.refresh()
        fn, (args, kwargs), sources = load(), load(), load()
        for name, (label, lines) in sources.items():
            linecache.cache[name] = (sum(map(len, lines)), None, lines, label)
        return fn, args, kwargs

    def _deliver(self, message: Message) -> None:
        shields = threading.current_thread() is threading.main_thread()
        with self._sending:
            self._delivering = shields
            try:
                message.send(self._connection)
            except OSError:  # the driver is gone, or this is a fork that goes on in the worker's place
                os._exit(1)
            finally:
                message.close()
                self._delivering = False
        if shields and self._interrupted:
            self._interrupted = False
            raise KeyboardInterrupt


def _start_world(connection: Connection, threads: int) -> None:
    """Make a world with the other workers."""
    torch.set_num_threads(threads)
    if os.environ["RANK"] == "0":
        # The store that ltx.init, or the user, opens at this address finds this server (multi_tenant).
        store = loopback_store(0)
        _hosted.append(store)
        port = store.port
        pack(Rendezvous(port)).send(connection)
    else:
        port = receive(connection)().port
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = LOOPBACK, str(port)
    init()


_hosted: list[Any] = []  # the store's server lives as long as this process
