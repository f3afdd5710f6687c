"""The step summary: one small sum in each step, which carries loss, weights and the digest.

The sum is issued between the forward and the backward pass, in float64; through shared memory the first bucket carries
it, which saves a wait. The digest is the running fingerprint of all collectives that this rank has issued. All ranks
have the same digest iff its limbs have variance zero, which sums can tell: with limbs d below 2^20,
n * sum(d^2) == sum(d)^2 exactly if and only if all are equal.

The number of the training step is part of the digest. Where digests differ, ranks exchange reasons in the store. A
compiled step sends its number with its loss, and an operation of the graph looks at the sum (:func:`count_in_graph`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from operator import mul
from typing import Any, NamedTuple, cast

import torch

from ltx.core.base import private, traced
from ltx.core.base.errors import no_mean
from ltx.core.base.private import unwrapped
from ltx.core.comm import ledger
from ltx.core.comm.axis_comm import AxisComm, compare_unusual
from ltx.core.comm.backends import CommStream, HostCopy, to_device
from ltx.core.comm.channel import Channel, Work
from ltx.core.comm.operations import bytes_sent
from ltx.core.comm.signature import Agreement, Signature

_LIMB_BITS = 20
_MASK = (1 << _LIMB_BITS) - 1
_SPREAD = 0x9E3779B97F4A7C15  # an odd factor, so that different step numbers give different limbs
#: The advice in errors about gradients that weren't reduced.
UNREDUCED = (
    "gradients of a function that isn't data parallel, or of a step under ltx.block_backward_sync, are each rank's "
    "own: add nothing reduced to them. Take ltx.accumulate(step, n) for micro-batches; or reduce their sum by "
    "ltx.sync_gradients(grads); or set .grad to None"
)


class StepSummary(NamedTuple):
    """The sum of the ranks' summaries: numbers, or on a device, which may not have them yet, 0-dim float64."""

    total: Any  # the sum of the ranks' losses, or of their totals if they are weighted
    weight: Any  # the sum of the ranks' weights (the number of ranks if unweighted)

    def mean(self, dtype: torch.dtype) -> torch.Tensor:
        if isinstance(self.total, torch.Tensor):
            return cast(torch.Tensor, (self.total / self.weight).to(dtype))
        return torch.full((), self.total / self.weight if self.weight else math.nan, dtype=dtype, device="cpu")


class Said(NamedTuple):
    """The parts of a rank's digest, which ranks exchange where digests differ."""

    issued: int  # the fingerprint of all collectives that the rank has issued
    step: int | None = None  # the number of the training step; None in a pass of a plain step
    raised: str = ""  # see Passes.counted
    #: The unreduced gradients to which this pass adds, and their digest; or where a step's state comes from.
    unreduced: str = ""
    weighted: bool = False  # the step returned a weighted loss

    @property
    def digest(self) -> int:
        own = Signature(self.unreduced, ()).fingerprint if self.unreduced else 0
        step = 0 if self.step is None else self.step + 1
        return self.issued ^ own ^ (step + (self.weighted << _LIMB_BITS)) * _SPREAD


@dataclass(eq=False, repr=False)
class IssuedSummary:
    """A step summary that is pending; where digests differ, ranks tell each other at `place` the parts of them, `said`.
    Without `work` it hasn't gone out: a bucket may carry it (:meth:`carried_by`), else :meth:`wait` sends it; ranks
    launch the same buckets, so all do the one or the other. On a stream-ordered backend the host doesn't wait:
    :meth:`enqueued` gives sums that the device will compute; the host calls :meth:`wait` when it needs them, or in the
    next pass.
    """

    work: Work | None
    channel: Channel
    stream: CommStream | None = None
    weighted: bool = False
    place: str = ""
    said: Said | None = None
    numbers: Sequence[float] = ()  # of this rank, if they haven't gone out

    def __post_init__(self) -> None:
        self._summary: StepSummary | None = None
        self._event: ledger.Event | None = None  # the record of a summary that a bucket carries
        self._copy: HostCopy | None = None
        if self.stream is not None and self.work is not None:
            with self.stream.behind_current():
                self._copy = self.work.read()
                self._sums = self.work.wait()
            self._fence = self.stream.fence()

    @property
    def stays_on_device(self) -> bool:
        """Whether the host continues without the sums."""
        return self._copy is not None and self._summary is None

    def enqueued(self) -> StepSummary:
        """The sums on the device, which the host hasn't read; on host-blocking backends as :meth:`wait`. If ranks
        differ, which the host finds later, the loss is NaN, so that nobody sees a wrong one.
        """
        if not self.stays_on_device:
            return self.wait()
        self._fence([self._sums])
        first, second = self._sums[2::2], self._sums[3::2]
        apart = first.square().ne(second * self.channel.size).any()  # even if the wait raises
        return StepSummary(self._sums[0].masked_fill(apart, torch.nan), self._sums[1])

    def carried_by(self, channel: Channel) -> Sequence[float]:
        """The note for a bucket that is about to be issued on `channel`, whose work is then :attr:`work`."""
        if channel is not self.channel or not self.numbers:
            return ()
        note, self.numbers = self.numbers, ()
        if ledger.recordings:
            sent = partial(bytes_sent, "psum", torch.tensor(note, dtype=torch.float64, device="cpu"), channel.size)
            self._event = ledger.note(channel.name, "psum", "summary", sent, channel.size)
        return note

    def wait(self) -> StepSummary:
        """The summary. Raises if ranks have issued different collectives, or are at different steps."""
        if self._summary is None:
            if self.numbers:
                mine = torch.tensor(self.numbers, dtype=torch.float64, device="cpu")
                self.work, self.numbers = self.channel.issue("psum", mine, "summary"), ()
            assert self.work is not None
            late = self._copy is not None
            arrived = self.work.wait() if self._copy is None else self.channel.wait_for_host(self._copy, "summary")
            summed = self.work.note or arrived.tolist()
            if self._event is not None:
                self._event.completed_s = time.perf_counter()
            limbs = [*map(int, summed[2:])]
            if [*map(mul, limbs[::2], limbs[::2])] != [*map(mul, limbs[1::2], repeat(self.channel.size))]:
                raise self.channel.peers.explain_apart(self.place, self.said, late)
            if late and self.weighted and not 0 < summed[1] < math.inf:
                before = "Weighted: in the step before this one the weights of all ranks added up to 0"
                raise no_mean(before, "The step before this one has changed nothing. ", odd=summed[1] != 0)
            self._summary, self.work = StepSummary(*summed[:2]), None
        return self._summary


def end_pass(among: AxisComm, summary: IssuedSummary) -> StepSummary:
    """End a pass whose buckets are all complete or enqueued: check its step summary here or later."""
    if not summary.stays_on_device:
        arrived, among.passes.counted = summary.wait(), ""  # the ranks agree: they have left a pass together, if any
        return arrived
    among.unread = summary
    for group in [axis.user.stream_group for axis in among.peers.own.axes]:
        if group is not None:  # the host goes on from a pass whose collectives the device may not have completed
            group.of_last_pass = group.last
    return summary.enqueued()


def read_last_summary(among: AxisComm) -> None:
    """Read the step summary of the last pass, if the host is ahead of the device (it is ahead by one pass at most)."""
    if among.unread is None:
        return
    unread, among.unread = among.unread, None
    with among.passes.aborted_by(BaseException):
        unread.wait()
    among.passes.counted = ""


def begin_pass(
    axis_comm: AxisComm,
    among: AxisComm,
    name: str,
    agreement: Agreement | None,
    total: torch.Tensor | float = 0.0,
    weight: torch.Tensor | float = 0.0,
    unreduced: str = "",
) -> IssuedSummary:
    """Begin a pass over buckets: wait until the last one is complete, then issue this rank's step summary, on the
    bucket channels of `among`: `axis_comm` or a part of it. Errors call the pass `name`. `agreement`: the ranks' on the
    pass, if there is one. `total`, `weight`: this rank's loss and its weight, 0-dim tensors; 0 if nobody needs them.
    `unreduced`: as :attr:`Said.unreduced`.
    """
    if among.unread is not None:
        read_last_summary(among)
    if among.passes.raised is not None:
        among.passes.begin()
    channel = among.first_phase
    axis_comm.under_way = among.under_way = name
    if agreement is not None:
        compare_unusual(among, channel, agreement)
        channel.advance(agreement)
    issued = axis_comm.user.digest ^ (channel.digest << 1)
    said = Said(issued, among.passes.step, among.passes.counted, unreduced, isinstance(weight, torch.Tensor))
    weighted = said.weighted and among is axis_comm
    apart = f"apart/{channel.name}/{channel.begun}", said
    device = axis_comm.device
    # Reading an element is cheaper than writing one, but would block the host on stream-ordered backends.
    reads = not channel.orders_streams(device)
    mine = [total, weight] if reads else [0.0 if isinstance(x, torch.Tensor) else x for x in (total, weight)]
    numbers = numbers_of([*map(float, mine)], said.digest)
    if reads and channel.transport is not None:
        return IssuedSummary(None, channel, None, weighted, *apart, numbers)
    sent = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    sent = sent if reads else to_device(sent, device)
    for index, x in () if reads else enumerate((total, weight)):
        if isinstance(x, torch.Tensor):
            sent[index] = x.detach()
    work = channel.issue("psum", sent, "summary", eager=True)
    return IssuedSummary(work, channel, None if reads else axis_comm.stream_of(device), weighted, *apart)


def numbers_of(sums: list[float], digest: int) -> list[float]:
    a, b, c = float(digest & _MASK), float(digest >> _LIMB_BITS & _MASK), float(digest >> 2 * _LIMB_BITS & _MASK)
    return [*sums, a, a * a, b, b * b, c, c * c]


@traced.node
def count_in_graph(key: str, step: int, clock: torch.Tensor, total: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
    """In a graph: `clock` plus one step; raises, when the graph runs, if ranks are at different steps. `total`,
    `square`: the sums over ranks of :func:`number_in_graph` and of its square.
    """
    with private.below_transforms():
        sums = [unwrapped(x).detach() for x in (total, square)]
        one: torch.Tensor = torch.ops.ltx.count_step(*sums, unwrapped(clock).detach(), step, key)
    return clock + one


def number_in_graph(step: int, clock: torch.Tensor) -> torch.Tensor:
    """The number of a compiled step, as a tensor to send."""
    return (step + clock) % (1 << _LIMB_BITS)


def _count_step(total: torch.Tensor, squares: torch.Tensor, clock: torch.Tensor, step: int, key: str) -> torch.Tensor:
    axis_comm: AxisComm = traced.kept(key).comm
    number, stream = step + int(clock.max()), axis_comm.stream_of(total.device)
    one = torch.ones((), dtype=torch.float64, device="cpu")
    limbs = [x.flatten()[:1] for x in (total, squares)]  # samples share them
    if stream is None and axis_comm.size * int(limbs[1]) == int(limbs[0]) ** 2:
        return one
    channel = axis_comm.first_phase
    work = Work.arrived(channel, torch.cat([total.new_zeros(2), *limbs]))  # the graph has waited already
    read_last_summary(axis_comm)
    end_pass(axis_comm, IssuedSummary(work, channel, stream, said=Said(0, number)))
    return one


# The operation copies to the host, which can't be captured in a CUDA graph.
_lib = torch.library.Library("ltx", "DEF")
_schema = "count_step(Tensor total, Tensor squares, Tensor clock, int step, str key) -> Tensor"
_lib.define(_schema, tags=torch.Tag.cudagraph_unsafe)
_lib.impl("count_step", _count_step, "CompositeExplicitAutograd")
torch.library.register_fake("ltx::count_step", lambda *_: torch.ones((), dtype=torch.float64, device="cpu"), lib=_lib)
