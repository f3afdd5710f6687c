"""debug_checks: ranks compare the k-th call of one, on any channel, with the k-th calls of the others, known or not."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from ltx.core.base.arguments import brief, checked
from ltx.core.base.callers import caller
from ltx.core.base.errors import CollectiveTimeoutError, LtxError, RankMismatchError, UnsupportedError
from ltx.core.base.handed_in import HandedIn
from ltx.core.comm.axis_comm import AxisComm
from ltx.core.comm.peers import under_way
from ltx.core.comm.signature import Agreement, Signature, mismatch
from ltx.core.ranks.axis import axes_in_scope
from ltx.core.ranks.backings import Describe
from ltx.peers.negotiation import Negotiation
from ltx.peers.posts import Post, list_calls

_SAID = "{0.__class__.__name__}: {0}".format

# Ranks may call these from different branches: a source and its receivers, or work that one rank does first.
_FROM_ANY_LINE = ("broadcast", "broadcast_object", "barrier", "data_parallel", "sync_gradients")


class Checks:
    """One ``with ltx.debug_checks()``, nested in the blocks `around` it."""

    def __init__(self, same_lines: bool, around: Checks | None):
        self.same_lines = same_lines
        self._axes: dict[AxisComm, None] = {} if around is None else around._axes
        self._covered: deque[tuple[AxisComm, Any]] = deque()
        self._told: BaseException | None = None

    def negotiate(
        self, axis_comm: AxisComm, key: Any, describe: Describe, offer: Callable[[], Any], known: Agreement | None
    ) -> Agreement:
        """:meth:`ltx.core.comm.axis_comm.AxisComm.negotiate` that compares a call even if it is `known`."""
        if known is not None and self._covered and self._covered[0] == (axis_comm, key):
            self._covered.popleft()
            return known
        self._covered.clear()
        signature = describe()
        posts = self.exchange(axis_comm, signature, offer() if known is None else known.offer)
        lines = {rank: os.path.basename(post.caller) for rank, post in enumerate(posts)}
        operation = posts[0].signature.operation
        if self.same_lines and len(set(lines.values())) > 1 and operation.split()[0] not in _FROM_ANY_LINE:
            fix = (
                "call the same collectives in the same order; if these calls belong together, "
                "ltx.debug_checks(same_lines=False)"
            )
            differ = mismatch(axis_comm.name, f"the line that calls {operation}", lines, fix)
            raise RankMismatchError(f"{differ} The calls: {list_calls(dict(enumerate(posts)))}.")
        agreed = posts[0].value
        if known is not None and known.offer == agreed:
            return known
        return Agreement(signature, signature.fingerprint, agreed)

    def cover(self, axis_comm: AxisComm, keys: Iterable[Any]) -> None:
        """Note that the next issues, under `keys`, are part of the call that was just compared."""
        self._covered = deque((axis_comm, key) for key in keys)

    def exchange(self, axis_comm: AxisComm, signature: Signature, value: Any = None) -> list[Post]:
        """Every rank's post for this call, with equal signatures and each rank's `value`."""
        if axis_comm not in self._axes:
            self._axes[axis_comm] = None
            _peers_of(axis_comm).begin_session()
        place, before = _peers_of(axis_comm).take_check()
        issued = {channel.name: channel.issued for channel in axis_comm.channels}
        post = Post(signature, value, caller(), issued, _peers_of(axis_comm).next_check)
        try:
            posts: list[Post] = _peers_of(axis_comm).compare_at(place, post)
        except BaseException as error:
            if isinstance(error, CollectiveTimeoutError):
                text = f"{error} This is {post.call}."
                for rank in _peers_of(axis_comm).store_exchange.absent(place):
                    last = _peers_of(axis_comm).peek(before, rank)
                    text += f" Rank {rank} was last at {last.call}." if last else f" Rank {rank} hasn't entered."
                error.args = (text,)
            self._told = error
            if not isinstance(error, RankMismatchError):
                with suppress(LtxError, dist.DistError):
                    _peers_of(axis_comm).withdraw(place, post, f"nothing: {brief(error, _SAID)}")
            raise
        _peers_of(axis_comm).store_exchange.forget(before, [axis_comm.rank])
        return posts

    def abort(self, error: BaseException) -> None:
        """Let the peers know that this rank won't come to their next call, without waiting for them."""
        if error is self._told or isinstance(error, RankMismatchError):
            return  # the peers know it already: all ranks have raised it
        signature = Signature(f"nothing: it has left debug_checks() by {brief(error, _SAID)}", ())
        for axis_comm in self.open():
            place, _ = _peers_of(axis_comm).take_check()
            with suppress(LtxError, dist.DistError):  # the first error is the one to show
                _peers_of(axis_comm).announce(place, Post(signature, None, caller()))

    def open(self) -> list[AxisComm]:
        """The axes on which calls were compared and that are still open."""
        return [axis_comm for axis_comm in self._axes if not axis_comm.closed]


def _peers_of(axis_comm: AxisComm) -> Negotiation:
    if not isinstance(axis_comm.peers, Negotiation):
        replayed = " In ltx.replay each call is compared with the record anyway." * (HandedIn.messages is not None)
        raise UnsupportedError(f"debug_checks: axis {axis_comm.name!r} knows nothing of its ranks.{replayed}")
    return axis_comm.peers


@checked("same_lines")
@contextmanager
def debug_checks(*, same_lines: bool = True) -> Iterator[None]:
    """Compare every call with all ranks before it is issued, and replicas at every step. For finding faults: slow.

    All ranks enter it together, as ``with ltx.debug_checks():`` or as a decorator ``@ltx.debug_checks()``; it may be
    nested. Inside, the ranks of an axis compare each collective and each call of a data-parallel step through the store
    (about a millisecond), known signatures too. It finds these mistakes, which are otherwise found late or never:

    * known collectives in another order on some ranks, also where the backend would abort or hang; other arguments
      (`src`, `dim`, reductions), barriers of other names;
    * the same operation on the same shapes from different lines: sums of different tensors of equal path and shape;
    * a rank that calls more collectives than the others, or runs a backward pass that the others don't run: an error
      comes as soon as the others call something else or leave; if they never do, a timeout that names the last calls;
    * a rank that leaves by an exception while its peers go on;
    * parameters that aren't the same bits on every rank when a data-parallel step or a train step is called and
      gradients are wanted: the error names the leaf, the ranks, and the difference.

    It doesn't see: calls inside compiled graphs, where no Python runs (they are compared as the graph is traced, if at
    all); different tensors summed by the same line, under the same path and shape; the issues of a hook; buffers of a
    train step; parameters of a step called without differentiating it, of blocked steps, and of steps whose strategy
    leaves the gradients local. Under transforms of torch.func, the values of parameters are compared and tangents
    aren't; parameters of simulated ranks (:func:`ltx.vmap`) are compared between the entries of the axis.

    Args:
        same_lines: equal calls must also come from the same line of the program (barriers, broadcasts and steps may
            come from any). False allows ranks to make equal calls from different branches of the program.

    Raises:
        RankMismatchError: on every rank, at the first call that differs, naming the calls, their leaves and lines; also
            if only some ranks enter or leave. This is before the call sends anything.
        ReplicaDivergedError: on every rank; parameters differ.
        CollectiveTimeoutError: a peer has made no call within the axis' timeout.

    Example:
        >>> import torch, ltx
        >>> with ltx.debug_checks():
        ...     total = ltx.psum(torch.ones(2))
        >>> @ltx.debug_checks()
        ... def train():
        ...     return ltx.psum(torch.ones(2))
    """
    checks = Checks(same_lines, under_way[-1] if under_way else None)
    for axis in axes_in_scope():  # raises unless the peers enter too
        if axis.comm is not None:
            checks.exchange(axis.comm, Signature("debug_checks", (), f"same_lines={same_lines}"))
    under_way.append(checks)
    try:
        yield
    except BaseException as error:
        checks.abort(error)
        raise
    else:
        for axis_comm in checks.open():
            checks.exchange(axis_comm, Signature("the end of debug_checks()", ()))
    finally:
        under_way.remove(checks)
