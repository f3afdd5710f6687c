"""Futures: what a collective that was begun will give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ltx import comm
from ltx.errors import AxisError, LtxError
from ltx.typing import Tree


class Pending(Protocol):
    """One buffer on its way: :class:`ltx.comm.Work`, or what stands for it where nothing is sent."""

    @property
    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        ...

    def wait(self) -> torch.Tensor:
        """The result, once it is there."""
        ...


class Arrived:
    """A result that is there already."""

    done = True

    def __init__(self, value: torch.Tensor):
        self._value = value

    def wait(self) -> torch.Tensor:
        """The result."""
        return self._value


class Future:
    """What a collective that :func:`ltx.async_` has begun will give.

    Ranks may wait for their futures in any order, between other collectives or not. One that nobody waits for is
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
        works: Sequence[Pending] = (),
        finish: Callable[[list[torch.Tensor]], Tree] = lambda results: None,
        axis_comm: comm.AxisComm | None = None,
    ):
        self.name = name
        self._works, self._finish, self._axis_comm = works, finish, axis_comm
        self._value: Any = None
        self._error: LtxError | None = None
        if axis_comm is None:
            self._value = finish([])
        else:  # the axis completes what nobody waits for
            axis_comm.futures[:] = [*(other for other in axis_comm.futures if not other.done), self]

    @property
    def done(self) -> bool:
        """Whether :meth:`wait` would return at once, or raise."""
        return self._axis_comm is None or all(work.done for work in self._works)

    def wait(self) -> Tree:
        """Wait for the result and return it: what the collective itself would have. Again: the same, at once.

        Raises:
            LtxError: what the collective itself would have raised, which then names it as "async psum", say. Again: the
                same.
            AxisError: the axis was closed, and it couldn't be completed.
        """
        if self._error is not None:
            raise self._error
        if self._axis_comm is not None:
            try:
                self._value = self._finish([work.wait() for work in self._works])
            except LtxError as error:
                self._over(error)
                raise
            self._over(None)
        return self._value

    def wait_all(self) -> None:
        """Complete it, because its axis closes now."""
        try:
            self.wait()
        except LtxError as error:
            self._error = AxisError(
                f"async {self.name} was under way when its axis was closed, and couldn't be completed: {error} Call "
                "wait() before that."
            )

    def _over(self, error: LtxError | None) -> None:
        assert self._axis_comm is not None
        self._error = error
        self._axis_comm.futures[:] = [other for other in self._axis_comm.futures if other is not self]
        self._axis_comm, self._works, self._finish = None, (), lambda results: None

    def __repr__(self) -> str:
        return f"<ltx.Future of {self.name}, {'done' if self.done else 'under way'}>"
