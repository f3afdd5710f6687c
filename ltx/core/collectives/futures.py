"""Calls of collectives: one that raises counts as a call, and one by async_ begins now and is waited for later."""

from __future__ import annotations

import atexit
import functools
import inspect
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch

from ltx.core import comm
from ltx.core.base import traced
from ltx.core.base.arguments import brief, name_of
from ltx.core.base.errors import (
    AxisError,
    CollectiveTimeoutError,
    LtxError,
    PeerLostError,
    TransportError,
    UnsupportedError,
    WorldError,
)
from ltx.core.comm.recovery import OF_PEERS
from ltx.core.ranks.axis import Axis
from ltx.typing import Tree

P = ParamSpec("P")
R = TypeVar("R")

# Their ranks know it without being told.
_OF_THE_NETWORK = (*OF_PEERS, CollectiveTimeoutError, PeerLostError, TransportError, WorldError)


def in_step(collective: Callable[P, R]) -> Callable[P, R]:
    """Mark a collective: a call that raises counts too, so that other ranks find out at their next call.

    Where all ranks have raised, they go on together, even if their errors differ.
    """

    @functools.wraps(collective)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return collective(*args, **kwargs)
        try:
            return collective(*args, **kwargs)
        except Exception as error:
            if not isinstance(error, _OF_THE_NETWORK) and not hasattr(error, "_ltx_counted"):
                error._ltx_counted = True  # type: ignore[attr-defined]  # once, if collectives call each other
                with suppress(TypeError):  # arguments without an axis
                    _count(inspect.signature(collective).bind(*args, **kwargs).arguments.get("axis"))
            raise

    return wrapped


def _count(axis: Any) -> None:
    if isinstance(axis, comm.InBackground):
        axis = axis.axis
    if not isinstance(axis, Axis | str | None):  # other axes may have to be opened, by all ranks together
        return
    with suppress(LtxError):  # there is no such axis
        comm.resolve(axis).ranks.announce(comm.RAISED)


class Future:
    """The coming result of a collective that :func:`ltx.async_` has begun.

    Ranks may wait for their futures in any order, between other collectives or not. A future that nobody waits for is
    completed when its axis closes (``ltx.shutdown``).

    Attributes:
        name: the collective's.
        done: whether :meth:`wait` would return at once.

    Example:
        >>> import torch, ltx
        >>> future = ltx.async_(ltx.psum)(torch.tensor(3.0))
        >>> future.wait(), future.done
        (tensor(3.), True)
    """

    def __init__(
        self,
        name: str,
        works: Sequence[comm.Work] = (),
        finish: Callable[[list[torch.Tensor]], Tree] = lambda results: None,
        others: list[Any] | None = None,
    ):
        self.name = name
        self._works, self._finish, self._others = works, finish, others
        self._value: Any = None
        self._error: LtxError | None = None
        if others is None:
            self._value = finish([])
        else:  # the axis completes futures that nobody waits for
            others[:] = [*(other for other in others if not other.done), self]
            if not self.over:
                _mover.watch(self)

    @property
    def done(self) -> bool:
        """Whether :meth:`wait` would return at once, or raise."""
        return self._others is None or all(work.done for work in self._works)

    @property
    def over(self) -> bool:
        """Whether no part of it goes through shared memory, where peers may wait for this rank."""
        return self._others is None or not comm.any_transport_busy()

    def wait(self) -> Tree:
        """Wait for the collective's result and return it; a second call returns the same at once.

        Raises:
            LtxError: the error that the collective itself raises, which then names it as "async psum", say. Again: the
                same.
            AxisError: the axis was closed, and it couldn't be completed.
        """
        if self._error is not None:
            raise self._error
        if self._others is not None:
            try:
                self._value = self._finish([work.wait() for work in self._works])
            except LtxError as error:
                self._over(error)
                raise
            self._over(None)
        return self._value

    def wait_all(self) -> None:
        """Complete the collective, because its axis closes now."""
        try:
            self.wait()
        except LtxError as error:
            self._error = AxisError(
                f"async {self.name} was under way when its axis was closed, and couldn't be completed: {error} Call "
                "wait() before that."
            )

    def _over(self, error: LtxError | None) -> None:
        assert self._others is not None
        self._error = error
        self._others[:] = [other for other in self._others if other is not self]
        self._others, self._works, self._finish = None, (), lambda results: None

    def __repr__(self) -> str:
        return f"<ltx.Future of {self.name}, {'done' if self.done else 'under way'}>"


# The thread looks after futures that are older than this (in seconds), this often.
_PATIENCE_S, _PAUSE_S = 0.1, 0.01


class _Mover:
    """A thread that does this rank's part in shared memory while its process does something else.

    In shared memory a collective goes on only when its ranks do its phases, so a waiting peer depends on this rank. A
    running step checks for phases, and so does a wait; but a process may also be in another library's barrier, or at
    the prompt of a notebook. So once a future is older than a step should take, the thread checks.
    """

    def __init__(self) -> None:
        self._watched = WeakKeyDictionary[Future, float]()
        self._ends = False
        self._more = threading.Condition()
        self._thread: threading.Thread | None = None

    def watch(self, future: Future) -> None:
        """Do this rank's part now and then, once `future` has been pending for long, until it is over or deleted."""
        with self._more:
            self._watched[future] = time.monotonic()
            if self._thread is None or not self._thread.is_alive():  # a fork has none of the process' threads
                self._ends = False
                self._thread = threading.Thread(target=self._run, name="ltx: progress", daemon=True)
                self._thread.start()
                atexit.unregister(self._end)
                atexit.register(self._end)
            if len(self._watched) == 1:  # else the thread wakes in time for the oldest
                self._more.notify()

    def _forget(self) -> bool:
        """Forget futures that are over; return whether some aren't. It takes no time."""
        for future in list(self._watched):
            if future.over:
                del self._watched[future]
        return bool(self._watched)

    def _end(self) -> None:
        """Python must not exit while the thread frees tensors: torch releases the interpreter there, and aborts."""
        with self._more:
            self._ends = True
            self._more.notify()
        if self._thread is not None:
            self._thread.join(1.0)

    def _run(self) -> None:
        while True:
            with self._more:
                self._more.wait_for(lambda: self._ends or self._forget())
                due_s = min(self._watched.values(), default=0.0) + _PATIENCE_S
                if self._more.wait_for(lambda: self._ends, max(_PAUSE_S, due_s - time.monotonic())):
                    return
            if time.monotonic() >= due_s:
                with suppress(BaseException):  # a wait raises
                    comm.progress_everywhere()


_mover = _Mover()


def one_message(collective: Callable[P, Tree]) -> Callable[P, Tree]:
    """Mark a collective that sends one message for each tensor: :func:`ltx.async_` may begin it.

    A call that raises on some ranks counts as a call, so their peers find out instead of waiting.
    """
    counted: Any = in_step(collective)
    counted.sends_one = collective  # not True: functools.wraps would copy True to a wrapper that calls it twice
    return counted  # type: ignore[no-any-return]


def async_(collective: Callable[..., Tree]) -> Callable[..., Future]:
    """A collective that returns at once: it gives a :class:`ltx.Future` of the result.

    It is issued at the call, like the collective itself, so all ranks must make these calls and all others in the same
    order; a rank may call ``ltx.psum`` where another calls ``ltx.async_(ltx.psum)``. Each rank may wait where, and in
    which order, it likes. Tensors are read at the call, so they may change after it.

    Args:
        collective: psum, pmean, pmax, pmin, psum_to, all_gather, psum_scatter, all_to_all, ppermute, broadcast, gather,
            scatter, or one of your own that :func:`ltx.extend.one_message` decorates.

    Returns:
        A function with the same arguments. Its future has ``wait()`` and ``done``. On simulated ranks and in a world of
        one it is done at once.

    Gradient:
        There is none: a leaf that requires a gradient is refused, and so are calls under transforms of torch.func and
        forward mode. On simulated ranks ``ltx.vmap`` itself, and ``torch.vmap`` around it, are allowed.

    Raises:
        UnsupportedError: `collective` is none of these; a leaf requires a gradient; `splits` or sparse tensors are
            given, which take several messages; the call is in a compiled graph, which orders its collectives itself.
            The collective's own errors are raised too: at the call, or at ``wait()`` if they come later.

    Example:
        >>> import torch, ltx
        >>> future = ltx.async_(ltx.psum)({"hits": torch.tensor(3)}, axis="data")
        >>> y = torch.ones(2) * 2  # meanwhile
        >>> future.wait()
        {'hits': tensor(3)}

    Source: ``async_op=True`` in torch.distributed; Horovod's ``allreduce_async`` and ``synchronize``.
    """
    sent = getattr(collective, "sends_one", None)
    if sent is None or sent is not getattr(collective, "__wrapped__", None):
        name = name_of(collective) if callable(collective) else brief(collective)
        raise UnsupportedError(
            f"async_ takes a collective that is one message, got {name}. It must be ltx.psum, pmean, pmax, pmin, "
            "psum_to, all_gather, psum_scatter, all_to_all, ppermute, broadcast, gather or scatter, or one of your own "
            "that ltx.extend.one_message decorates."
        )
    signature = inspect.signature(collective)

    @functools.wraps(collective)
    def wrapped(*args: Any, **kwargs: Any) -> Future:
        if traced.recording():
            name = collective.__name__
            traced.refuse(
                f"async_: ltx.{name} can't be begun in a compiled graph, which orders its collectives itself. Call "
                f"ltx.{name} itself there."
            )
        bound = signature.bind(*args, **kwargs)
        bound.arguments["axis"] = comm.InBackground(bound.arguments.get("axis"), collective.__name__)
        future: Future = collective(*bound.args, **bound.kwargs)
        return future

    return wrapped
