"""Futures of asynchronous collectives, and the counting of calls that raise."""

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
    DeadlockDetectedError,
    LtxError,
    PeerLostError,
    RankMismatchError,
    ReplicaDivergedError,
    TransportError,
    UnsupportedError,
    WorldError,
)
from ltx.core.ranks.axis import Axis
from ltx.typing import Tree

P = ParamSpec("P")
R = TypeVar("R")

# All ranks know of these errors without being told.
_OF_THE_NETWORK = (
    CollectiveTimeoutError,
    DeadlockDetectedError,
    PeerLostError,
    RankMismatchError,
    ReplicaDivergedError,
    TransportError,
    WorldError,
)


def in_step(collective: Callable[P, R]) -> Callable[P, R]:
    """Decorate a collective so that a call that raises counts as a call: other ranks find out at their next call.

    If all ranks have raised, they can go on together, even if their errors differ.
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
                with suppress(TypeError):  # the arguments don't fit the signature
                    _count(inspect.signature(collective).bind(*args, **kwargs).arguments.get("axis"))
            raise

    return wrapped


def _count(axis: Any) -> None:
    if isinstance(axis, comm.InBackground):
        axis = axis.axis
    # to resolve another kind of axis may open it, which all ranks have to do together
    if not isinstance(axis, Axis | str | None):
        return
    with suppress(LtxError):  # there is no such axis
        comm.resolve(axis).ranks.announce(comm.RAISED)


class Future:
    """The result, to be waited for, of a collective that :func:`ltx.async_` has begun.

    Ranks may wait for their futures in any order, also after other collectives. A future that nobody waits for is
    completed when its axis closes (``ltx.shutdown``).

    Attributes:
        name: the name of the collective.
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
        else:  # the axis has a list of futures, to complete those that nobody waits for
            others[:] = [*(other for other in others if not other.done), self]
            if not self.over:
                _mover.watch(self)

    @property
    def done(self) -> bool:
        """Whether :meth:`wait` would return at once, or raise."""
        return self._others is None or all(work.done for work in self._works)

    @property
    def over(self) -> bool:
        """Whether no transfer through shared memory is left, in which peers may wait for this rank."""
        return self._others is None or not comm.any_transport_busy()

    def wait(self) -> Tree:
        """Wait for the collective's result and return it; a second call returns the same at once.

        Raises:
            LtxError: the error of the collective, which is called "async psum", say, in it. A second call raises it
                again.
            AxisError: the axis was closed before the collective could be completed.
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
        """Complete the collective, since its axis is being closed."""
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


# The thread works for futures that are older than _PATIENCE_S, every _PAUSE_S.
_PATIENCE_S, _PAUSE_S = 0.1, 0.01


class _Mover:
    """A thread that does this rank's part of transfers in shared memory while its process does something else.

    In shared memory a collective only progresses when its ranks run its phases, so a waiting peer depends on this rank.
    A running step looks for phases to run, and so does a wait; but a process may also be in another library's barrier,
    or at the prompt of a notebook. So when a future is older than a step should take, this thread looks for them.
    """

    def __init__(self) -> None:
        self._watched = WeakKeyDictionary[Future, float]()
        self._ends = False
        self._more = threading.Condition()
        self._thread: threading.Thread | None = None

    def watch(self, future: Future) -> None:
        """If `future` stays pending for long, do this rank's part regularly, until it is over or deleted."""
        with self._more:
            self._watched[future] = time.monotonic()
            if self._thread is None or not self._thread.is_alive():  # after a fork, the thread is gone
                self._ends = False
                self._thread = threading.Thread(target=self._run, name="ltx: progress", daemon=True)
                self._thread.start()
                atexit.unregister(self._end)
                atexit.register(self._end)
            if len(self._watched) == 1:  # otherwise the thread wakes in time for the oldest future
                self._more.notify()

    def _forget(self) -> bool:
        """Forget futures that are over. Returns whether some are left."""
        for future in list(self._watched):
            if future.over:
                del self._watched[future]
        return bool(self._watched)

    def _end(self) -> None:
        """End the thread before Python exits: torch aborts if tensors are freed in a thread during the exit."""
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
                with suppress(BaseException):  # errors are raised by the waits
                    comm.progress_everywhere()


_mover = _Mover()


def one_message(collective: Callable[P, Tree]) -> Callable[P, Tree]:
    """Decorate a collective that sends one message for each tensor, so that :func:`ltx.async_` accepts it.

    A call that raises on some ranks counts as a call, so their peers find out instead of waiting.
    """
    counted: Any = in_step(collective)
    # not True, which functools.wraps would copy to a wrapper that calls the collective twice
    counted.sends_one = collective
    return counted  # type: ignore[no-any-return]


def async_(collective: Callable[..., Tree]) -> Callable[..., Future]:
    """The asynchronous form of a collective, which returns a :class:`ltx.Future` of the result at once.

    The collective is issued at the call, so all ranks must make these and all other calls in the same order; one rank
    may call ``ltx.psum`` where another calls ``ltx.async_(ltx.psum)``. Each rank may wait at any place and in any
    order. Tensors are read at the call, so they may change after it.

    Args:
        collective: psum, pmean, pmax, pmin, psum_to, all_gather, psum_scatter, all_to_all, ppermute, broadcast, gather,
            scatter, or your own one that is decorated by :func:`ltx.extend.collectives.one_message`.

    Returns:
        A function with the same arguments. Its future has ``wait()`` and ``done``. On simulated ranks and in a world of
        one it is done at once.

    Gradient:
        None: a leaf that requires a gradient is refused, and so are calls under transforms of torch.func and forward
        mode. On simulated ranks ``ltx.vmap`` itself, and ``torch.vmap`` around it, are allowed.

    Raises:
        UnsupportedError: `collective` is none of these; a leaf requires a gradient; `splits` or sparse tensors are
            given, which need several messages; the call is in a compiled graph, which orders its collectives itself.
            Errors of the collective itself are raised too: by the call, or later by ``wait()``.

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
            "that ltx.extend.collectives.one_message decorates."
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
