"""A worker's process: how it starts, and what it does until its connection ends, as the driver is gone then."""

from __future__ import annotations

import builtins
import gc
import linecache
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from types import FunctionType
from typing import Any, Literal, get_args

import cloudpickle
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ltx.core import comm
from ltx.core.ranks.axis import set_world_axes
from ltx.core.world.init import again, init, start
from ltx.core.world.world import LOOPBACK, abandon, accelerators, forget, process, settings_of_world, shutdown
from ltx.errors import LtxError, UnsupportedError, WorkerError
from ltx.peers.addresses import loopback_store
from ltx.peers.meeting import next_is_begun
from ltx.peers.negotiation import Negotiation
from ltx.peers.pickling import KEY, named
from ltx.peers.watcher import Watcher
from ltx.runtime import messages, show
from ltx.runtime.failures import failure_of, places_of
from ltx.runtime.launchers import POOL_VARIABLE
from ltx.runtime.messages import Call, Message, Modules, pack, receive
from ltx.runtime.show import Writer
from ltx.runtime.tracebacks import LTX_HOME

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]

Inherited = tuple[Any, tuple[Any, ...]]  #: the function and arguments that a fork has without pickling


def serve(connection: Connection, inherited: Inherited | None = None) -> None:
    """Do what the driver asks for through `connection` until it says stop; a fork calls the `inherited` function."""
    os.set_inheritable(connection.fileno(), False)  # else commands would keep it open after the worker's end
    setup: messages.Setup = receive(connection)()
    sys.path[:] = setup.search_path
    loop = _WorkerLoop(connection, inherited, setup.search_path)
    signal.signal(signal.SIGINT, loop.interrupt)
    try:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        if os.environ["RANK"] == "0":
            # ltx.init, or the user, later opens a store at this address, which uses this server (multi_tenant).
            loop.hosted = loopback_store(0)
            met = messages.Rendezvous(loop.hosted.port)
            loop.send(met)
        else:
            met = receive(connection)()
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = LOOPBACK, str(met.port)
        init()
    except Exception as error:
        loop.send(failure_of(error))
        os._exit(1)
    gc.freeze()  # imported modules live as long as the process: the garbage collector needn't look at them
    gc.enable()
    show.outbox = loop.send
    process.when_made.append(loop.counted)
    os.register_at_fork(after_in_child=loop.in_fork)
    if setup.shows_output:
        sys.stdout, sys.stderr = (Writer(name, fd, loop.send) for fd, name in ((1, "stdout"), (2, "stderr")))
        for writer in (sys.stdout, sys.stderr):
            os.register_at_fork(after_in_child=writer.in_fork)
    builtins.input = _no_input
    _by_value()
    loop.send(messages.Ready())
    # A separate thread reads, so that the driver's end is noticed while a call runs or hangs in a collective.
    threading.Thread(target=loop.read, name="ltx-worker-reader", daemon=True).start()
    if setup.in_notebook:
        import_module("ltx.runtime.shell").started()
    while True:
        message, load = loop.inbox.get()
        if isinstance(message, messages.Stop):
            return
        if isinstance(message, messages.Renew):
            try:
                _renew(message.number)
                loop.send(messages.Ready())
            except Exception as error:
                loop.send(failure_of(error))
        elif isinstance(message, messages.Others):
            loop.wait_for_others(message.number)
        elif isinstance(message, Call):
            loop.answer(message, load)


def _by_value(pickled: bytes | None = None) -> Any:
    """From now on what came by value goes by value to data loaders, and back from them. Returns what is `pickled`."""

    def reducer_override(_: Any, obj: Any) -> Any:
        if isinstance(obj, type | FunctionType) and named(obj.__module__, obj.__qualname__) is not obj:
            return _by_value, (cloudpickle.dumps(obj),)
        return NotImplemented

    ForkingPickler.reducer_override = reducer_override  # type: ignore[method-assign]
    return None if pickled is None else pickle.loads(pickled)


def _no_input(prompt: object = "", /) -> str:
    raise UnsupportedError(
        f"input({str(prompt)!r}): a worker has no keyboard, nor has a debugger on it. Ask where the workers are driven "
        "from, and send the answer along as an argument, or with `%%ltx --in`."
    )


_RETURNED = "pool/returned"  #: the key under which workers count the calls that have returned

_DEAF_S = 1.0  # after it, a call has caught KeyboardInterrupt, or is in code that ignores it


class _WorkerLoop:
    def __init__(self, connection: Connection, inherited: Inherited | None, search_path: Sequence[str]):
        self._inherited, self._search_path = inherited, search_path
        self.inbox: SimpleQueue[tuple[Any, Callable[[], Any]]] = SimpleQueue()
        self.running: int | None = None  # the number of the call that runs
        self.cancelled: int | None = None  # the number of the last call that the driver asked to give up
        self._returned = 0  # the number of the last call that has returned
        self._connection = connection
        self._raised: int | None = None  # the number of the last call in which KeyboardInterrupt was raised
        self.hosted: Any = None  # the store whose server lives as long as this process
        self._sending = threading.Lock()  # the user's threads may show things at the same time
        self._modules = Modules()

    def read(self) -> None:
        while True:
            try:
                load = receive(self._connection)
            except (EOFError, OSError):
                os._exit(1)
            message = load()
            if not isinstance(message, messages.Cancel):
                self.inbox.put((message, load))
                continue
            self.cancelled = message.number
            if self.running == message.number:
                try:
                    self._tell_place(message.number)
                finally:
                    # A signal, since nothing else wakes a thread that sleeps in a system call.
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                    later = threading.Timer(_DEAF_S, self._tell_place, (message.number, True))
                    later.daemon = True
                    later.start()

    def _tell_place(self, number: int, later: bool = False) -> None:
        """Tell the driver where call `number` is, unless the call has ended: nothing may follow its answer."""
        raised = self._raised == number if later else None
        place = pack(messages.At(places_of(sys._current_frames()[threading.main_thread().ident or 0]), raised))
        with self._sending, suppress(OSError):  # the driver is gone
            if self.running == number:
                place.send(self._connection)
        place.close()

    def interrupt(self, _signal: int, _frame: object) -> None:
        """The handler of SIGINT, which is ignored outside of calls."""
        if self.running is not None:
            self._raised = self.running
            raise KeyboardInterrupt

    def in_fork(self) -> None:
        """In a fork, such as a data loader's worker: close its copy of the connection, which belongs to the parent."""
        show.outbox = None
        self._connection.close()

    def send(self, message: Any) -> None:
        self._deliver(pack(message))

    def wait_for_others(self, number: int) -> None:
        """Until the driver asks for more: wait for call `number` as in a collective, so that circles are seen."""
        watcher, ranks = self.counted(number), [*range(int(os.environ["WORLD_SIZE"]))]
        while number and watcher is not None and self.inbox.empty():
            # Busy workers may begin a new world in the call. If the call merely fails, the driver has one made.
            if process.session is not None and next_is_begun():
                try:
                    again(process.session)
                except LtxError:
                    return
                watcher = self.counted(number)
                continue
            with suppress(LtxError):  # the busy workers raise it
                watcher.deadlocks.check(_RETURNED, number, ranks, lambda: "the call's end, as it isn't in it any more")
            time.sleep(0.02)
        if watcher is not None:
            watcher.deadlocks.done()

    def counted(self, call: int = 0) -> Watcher | None:
        """The world's watcher, which is told of the `call` and of those returned; None without a world."""
        watcher = next((peers.watcher for peers in comm.all_peers() if isinstance(peers, Negotiation)), None)
        if watcher is not None:
            main = threading.main_thread().ident or 0
            watcher.call = call or watcher.call
            watcher.deadlocks.counts[_RETURNED] = lambda: {_RETURNED: (self._returned, (main,))}
        return watcher

    def answer(self, call: Call, load: Callable[[], Any]) -> None:
        try:
            reply = self._reply(call, load)
        except KeyboardInterrupt as error:  # the interrupt came right after the call had ended
            self.running = None
            reply = pack(failure_of(error, cancelled=True))
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # the stream is broken or closed, but the answer has to be sent
                if isinstance(stream, Writer):
                    stream.finish()
                elif stream is not None:
                    stream.flush()
        self._deliver(reply)

    def _reply(self, call: Call, load: Callable[[], Any]) -> Message:
        """Run the call. Returns the message with its result or failure. A ``sys.exit`` in a call is a failure too."""
        doing = "unpickling the function and its arguments: "
        self.running, self._returned = call.number, call.number - 1
        _go_on()
        session, before = process.session, _calls()
        try:
            self.counted(call.number)
            if self.cancelled == call.number:
                raise KeyboardInterrupt
            fn, args, kwargs = self._asked(call, load)
            doing = ""
            try:
                value = fn(*args, **kwargs)
            finally:
                if (shell := sys.modules.get("ltx.runtime.shell")) is not None:
                    shell.finish()
            self._modules.note()
            doing = f"pickling the result, which is of type {type(value).__name__}: "
            up = process.session is not None or dist.is_initialized()
            reply = pack(messages.Result(value, up and not comm.has_failed()))
            self.running, self._returned = None, call.number
            return reply
        except BaseException as error:
            self.running = None
            # made before abandon, so that its time is earlier than that of the peers' failures
            # An interrupt may come to ranks in different steps of the training.
            alike = isinstance(error, Exception) and process.session is session and _calls() == before
            as_it_was = alike and not comm.has_failed()
            failure = failure_of(error, doing, cancelled=self.cancelled == call.number, in_world=as_it_was)
            abandon(error, call.number)
            return pack(failure)

    def _asked(self, call: Call, load: Callable[[], Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        if self._inherited is not None:
            return *self._inherited, {}
        if call.search_path != self._search_path:
            sys.path[:] = [*call.search_path, *(path for path in sys.path if path not in self._search_path)]
            self._search_path = call.search_path
        self._modules.refresh()
        fn, (args, kwargs), sources = load(), load(), load()
        for name, (label, lines) in sources.items():
            linecache.cache[name] = (sum(map(len, lines)), None, lines, label)
        return fn, args, kwargs

    def _deliver(self, message: Message) -> None:
        with self._sending:
            try:
                signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # an interrupt waits until all is sent
                message.send(self._connection)
            except OSError:  # the driver is gone, or this process is a fork of the worker
                os._exit(1)
            finally:
                message.close()
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def _renew(count: int) -> None:
    """Make a new world with the same settings, in place of one that failed. `count`: its number, above all ranks'."""
    settings = settings_of_world()
    settings.pop("placement", None)  # as the environment says
    shutdown()
    if dist.is_initialized():  # the user's world, which failed too
        dist.destroy_process_group()
    process.worlds = count - 1
    process.session = start(settings)


def _go_on() -> None:
    """Take back what :func:`abandon` has said: all ranks have raised, and none had sent anything."""
    for axis_comm in comm.communicators():
        if axis_comm.passes.failed is not None:
            axis_comm.passes.failed, process.abandoned = None, False
            axis_comm.peers.tell()


def _calls() -> int:
    """The number of collectives of this process, ltx's or others; a new one each time where a backend can't count."""
    groups: list[Any] = list(c10d._world.pg_map) if dist.is_initialized() else []
    backends = [group._get_backend(device) for group in groups for device in group._device_types]
    try:
        counts = [backend._get_sequence_number_for_group() for backend in backends]
    except (AttributeError, RuntimeError):
        return time.monotonic_ns()
    for axis_comm in comm.communicators():
        counts += [n for channel in axis_comm.channels for n in (channel.begun, channel.issued, channel.compared)]
        counts += [axis_comm.peers.store_exchange.begun, axis_comm.peers.next_check]
    return sum(map(int, counts))


# Collecting garbage takes a fifth of the time of importing torch; the worker enables it when it is ready.
_WORKER = """import gc, sys; gc.disable()
from multiprocessing.connection import Connection; from ltx.runtime.worker import serve
serve(Connection(int(sys.argv[1])))"""


Process = subprocess.Popen[bytes] | BaseProcess


def ended(process: Process, timeout_s: float | None) -> int | None:
    """The exit status, negative for a signal; None if the process is still running after `timeout_s`."""
    if isinstance(process, BaseProcess):
        process.join(timeout_s)
        return process.exitcode
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout_s)
    return process.returncode


#: start(rank, the worker's end of its connection, the driver's ends so far, where its output goes) -> the process
Starter = Callable[[int, Connection, Sequence[Connection], Sequence[int]], Process]


_OWN_KEY = os.urandom(16).hex()  # the default key with which this process' workers authenticate pickles


def starter(method: str, size: int, threads: int, inherited: Inherited | None = None) -> Starter:
    """What starts a worker of a world of `size` by `method`; WorkerError if it can't now. Forks get `inherited`."""
    if method not in get_args(StartMethod):
        raise WorkerError(f"start_method must be one of {', '.join(map(repr, get_args(StartMethod)))}, got {method!r}.")
    if method == "fork" and torch.cuda.is_initialized():
        raise WorkerError(
            'start_method="fork": CUDA is initialised in this process, and a fork of it can\'t use CUDA. Use "popen", '
            "or start the ranks before anything touches the GPU."
        )
    if method == "fork" and dist.is_initialized():
        raise WorkerError(
            'start_method="fork": torch.distributed is initialised in this process, and forks of it would share its '
            'connections. Use "popen", or call ltx.shutdown() first.'
        )
    # In a script without `if __name__ == "__main__"`, each spawned process runs the script and comes here again.
    if method != "popen" and getattr(multiprocessing.current_process(), "_inheriting", False):
        raise WorkerError(
            f"start_method={method!r} runs this script again in every process, and it would start processes there "
            'again. Put what starts them under `if __name__ == "__main__":`, or use start_method="popen".'
        )

    def start(rank: int, end: Connection, others: Sequence[Connection], streams: Sequence[int]) -> Process:
        environment = worker_environment(rank, size, threads)
        if method == "popen":
            out, err = streams or (None, None)
            return subprocess.Popen(
                # -P: a module in the working directory can't shadow another while the worker starts.
                [sys.executable, "-P", "-c", _WORKER, str(end.fileno())],
                env=environment,
                pass_fds=[end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,  # the terminal's Ctrl-C goes to the driver only
            )
        # A fork has copies of the driver's connections; while these are open, no other worker sees the driver end.
        copies = [other.fileno() for other in others] if method == "fork" else []
        process: BaseProcess = multiprocessing.get_context(method).Process(  # type: ignore[attr-defined]
            target=_serve,
            args=(end, environment, copies, inherited),
            daemon=True,  # else Python would wait for the worker at this process' end
        )
        process.start()
        return process

    return start


def _serve(end: Connection, environment: dict[str, str], copies: Sequence[int], inherited: Inherited | None) -> None:
    """What a process of multiprocessing runs. It closes `copies`, its copies of the driver's connections."""
    # multiprocessing's daemons may not start processes, but data loaders do. The driver ends this process anyway.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignore it until serve() sets its handler
    with suppress(OSError):
        os.setsid()
    for fd in copies:
        os.close(fd)
    os.environ.clear()
    os.environ.update(environment)
    forget()
    set_world_axes(())
    serve(end, inherited)


def worker_environment(rank: int, size: int, threads: int) -> dict[str, str]:
    """The driver's environment, with the variables that torchrun sets for rank `rank` of `size` on one node."""
    # The driver's TORCHELASTIC_ variables are about the driver's own store.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC_")}
    environment.setdefault(KEY, _OWN_KEY)
    environment |= dict.fromkeys((POOL_VARIABLE, "WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(size))
    environment |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    environment |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "OMP_NUM_THREADS": str(threads)}
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    if 0 < accelerators()[1] < size:
        environment["CUDA_VISIBLE_DEVICES"] = ""  # NCCL needs a device for each rank: all use the CPU
    home = str(LTX_HOME.parent)
    if home not in sysconfig.get_paths().values():  # ltx is imported from a checkout that isn't installed
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
    return environment
