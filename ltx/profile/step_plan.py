"""plan: the time of a training step on a network, before there is one.

What is sent is what the strategy asks for when its own methods are driven on shapes (:mod:`ltx.estimate.dry_run`),
what that takes is :mod:`ltx.estimate.costs`'s. When it is sent is found by going through a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ltx import comm, hooks, tree
from ltx.arguments import brief, checked, number, whole
from ltx.errors import InputError
from ltx.estimate.autotune import device_of, on_network
from ltx.estimate.costs import BESIDE_S, Link, check_device, codec, copies, sending_s
from ltx.estimate.dry_run import Steps, cycle_of
from ltx.estimate.formats import Shown, aligned, format_bytes, format_seconds, short
from ltx.estimate.requests import BucketExplanation, Collective, ExchangeStarted, ExchangeWaited, Issues
from ltx.gradients.pending import Exchange
from ltx.optim import Optimizer
from ltx.strategies import Strategy
from ltx.typing import Tree

#: Parts of a step's own time: forward pass, backward pass, optimizer.
FORWARD, BACKWARD, OPTIMIZER = 0.3, 0.6, 0.1


@dataclass(frozen=True)
class Traffic:
    """What one kind of traffic is in a mean step.

    Attributes:
        kind: "gradients", "exchanges", "in the background", "summaries".
        nbytes, collectives: bytes that a rank sends, and in how many.
        link_s: seconds that they take on the link.
    """

    kind: str
    nbytes: float = 0.0
    collectives: float = 0.0
    link_s: float = 0.0


@dataclass(frozen=True)
class Cost(Shown):
    """What a mean training step costs; ``print`` shows it as a table.

    Attributes:
        strategy: what was planned.
        world, steps: the number of ranks, and the steps over which the mean was taken.
        time_s: seconds a step.
        compute_s: seconds of the step's own work, as they were given.
        codec_s: seconds that the rank spends besides on packing, encoding and decoding, and on copies of what a step
            begins with where it communicates after the optimizer.
        traffic: by kind.
        notes: what a reader should know besides.
    """

    strategy: Strategy
    world: int
    steps: range
    time_s: float
    compute_s: float
    codec_s: float
    traffic: tuple[Traffic, ...]
    notes: tuple[str, ...] = ()

    @property
    def bytes_per_rank(self) -> float:
        """Bytes that a rank sends a step, without step summaries: the mean of :attr:`Explanation.bytes`."""
        return sum(t.nbytes for t in self.traffic if t.kind != "summaries")

    @property
    def collectives(self) -> float:
        """Collectives a step, without step summaries."""
        return sum(t.collectives for t in self.traffic if t.kind != "summaries")

    @property
    def link_s(self) -> float:
        """Seconds a step during which a rank's link is busy."""
        return sum(t.link_s for t in self.traffic)

    @property
    def waiting_s(self) -> float:
        """Seconds a step that a rank waits."""
        return max(0.0, self.time_s - self.compute_s - self.codec_s)

    def __str__(self) -> str:
        many = f"{self.world:,} rank{'' if self.world == 1 else 's'}"
        length = f"mean of {len(self.steps):,} steps" if len(self.steps) > 1 else "a step"
        head = f"{short(self.strategy)} on {many}, {length}: {format_seconds(self.time_s)}"
        rows = [
            (t.kind, format_bytes(round(t.nbytes)), f"{t.collectives:,.4g}", format_seconds(t.link_s))
            for t in self.traffic
        ]
        header = ("traffic", "sent", "collectives", "on the link")
        table = ["", *aligned(header, rows, (False, True, True, True)), ""] if rows else []
        parts = (
            f"computing {format_seconds(self.compute_s)}, packing and encoding {format_seconds(self.codec_s)}, "
            f"waiting {format_seconds(self.waiting_s)}"
        )
        return "\n".join([head, *table, parts, *(f"note: {text}" for text in self.notes)])


@dataclass
class _PendingReduction:
    """A bucket under way: its collectives one after the other, with the rank's own work before, between and behind.

    Attributes:
        collectives: of which `issued` are on the link or complete.
        piece_s: the work ahead of each, and behind the last: equal parts of all.
        done: when the collective issued last is complete.
        completed: whether the rank has done its work behind all of them.
    """

    collectives: tuple[Collective, ...]
    piece_s: float
    issued: int = 0
    done: float = 0.0
    completed: bool = False


@dataclass
class _Clock:
    """The clock of one rank and its link: each does one thing after the other.

    Attributes:
        network, compute_s: as :func:`plan` is told of them.
        codec, beside_s: seconds of the rank for a number, by hook; and besides for a gradient's number.
        now, link_free: when the rank is done with what it does, and the link with what it was given.
        codec_s: what the rank has spent on packing, encoding, decoding.
        owed_s: seconds of sending that its core has still to do, while the rank waits or computes.
        pending: exchanges under way.
        traffic: by kind: bytes, collectives, seconds on the link.
    """

    network: Link
    compute_s: float
    codec: Callable[[hooks.CommHook], float]
    beside_s: float = 0.0
    now: float = 0.0
    link_free: float = 0.0
    codec_s: float = 0.0
    owed_s: float = 0.0
    pending: dict[Exchange, tuple[list[_PendingReduction], str]] = field(default_factory=dict)
    traffic: dict[str, list[float]] = field(default_factory=dict)

    def step(self, issues: Issues, copies_s: float = 0.0) -> None:
        """Go through one step, whose optimizer takes `copies_s` longer than in place."""
        for event in issues.begun:
            self._event(event)
        self.now += FORWARD * self.compute_s
        if issues.summary is not None:
            self._carry(issues.summary, "summaries", self.now)
        self._backward(issues.buckets)
        updated = list(issues.updated)
        while updated and isinstance(updated[0], ExchangeWaited):
            self._event(updated.pop(0))
        self.now += OPTIMIZER * self.compute_s + copies_s
        self.codec_s += copies_s
        for event in updated:
            self._event(event)
        # What the core couldn't send while the rank waited is added to the rank's own work.
        self.now, self.owed_s = self.now + self.owed_s, 0.0

    def _wait(self, until: float) -> None:
        """The rank waits, and its core sends meanwhile."""
        if until > self.now:
            self.owed_s = max(0.0, self.owed_s - (until - self.now))
            self.now = until

    def _backward(self, buckets: Sequence[BucketExplanation]) -> None:
        """Gradients get ready evenly by their bytes. All of them are waited for."""
        whole = sum(bucket.nbytes for bucket in buckets)
        pending: list[_PendingReduction] = []
        for bucket in buckets:
            self.now += BACKWARD * self.compute_s * (bucket.nbytes / whole if whole else 0.0)
            self._launch(pending, bucket, "gradients")
        self.now += 0.0 if whole else BACKWARD * self.compute_s
        self._wait_all(pending, "gradients")

    def _event(self, event: ExchangeStarted | ExchangeWaited) -> None:
        if isinstance(event, ExchangeWaited):
            self._wait_all(*self.pending.pop(event.exchange, ([], "")))
            return
        if event.summary is not None:
            self._carry(event.summary, "summaries", self.now)
        pending: list[_PendingReduction] = []
        kind = "exchanges" if event.summary is not None else "in the background"
        for row in event.rows:
            self._launch(pending, row, kind)
        self.pending[event.exchange] = pending, kind

    # The methods below do what ltx.gradients.pending does: where a rank launches a bucket it advances those whose
    # collectives are complete, and once all are launched, in rounds, one collective of each after the other.

    def _launch(self, pending: list[_PendingReduction], bucket: BucketExplanation, kind: str) -> None:
        work_s = (self.codec(bucket.hook) + (self.beside_s if kind == "gradients" else 0.0)) * bucket.elements
        self.codec_s += work_s
        pending.append(_PendingReduction(bucket.collectives, work_s / (len(bucket.collectives) + 1)))
        self._advance(pending[-1], kind)
        for place, transfer in enumerate(pending):
            while not transfer.completed and transfer.done <= self.now and self._may_issue(pending, place):
                self._advance(transfer, kind)

    def _may_issue(self, pending: list[_PendingReduction], place: int) -> bool:
        return all(earlier.completed or earlier.issued > pending[place].issued for earlier in pending[:place])

    def _advance(self, transfer: _PendingReduction, kind: str) -> None:
        """Wait for a bucket's collective, do the work behind it, issue the next one."""
        self._wait(transfer.done)
        self.now += transfer.piece_s
        if transfer.issued == len(transfer.collectives):
            transfer.completed = True
            return
        transfer.done = self._carry(transfer.collectives[transfer.issued], kind, self.now)
        transfer.issued += 1

    def _wait_all(self, pending: list[_PendingReduction], kind: str) -> None:
        while not all(transfer.completed for transfer in pending):
            for transfer in pending:
                if not transfer.completed:
                    self._advance(transfer, kind)

    def _carry(self, collective: Collective, kind: str, at: float) -> float:
        """When a collective that is there at `at` is done."""
        taken = self.network.seconds(collective)
        self.link_free = max(self.link_free, at) + taken
        self.owed_s += self.network.core_s(collective)
        sums = self.traffic.setdefault(kind, [0.0, 0.0, 0.0])
        sums[:] = [total + x for total, x in zip(sums, (collective.nbytes, 1, taken), strict=True)]
        return self.link_free


@checked("strategy", "optimizer")
def plan(
    strategy: Strategy,
    params: Tree,
    *,
    world: int,
    bandwidth: float,
    latency: float,
    compute_s: float,
    optimizer: Optimizer | None = None,
    steps: range | None = None,
    codec_s: float | None = None,
    send_s: float | None = None,
    device: torch.device | str | None = None,
) -> Cost:
    """What a mean training step with `strategy` costs on a network, for any number of ranks, before anything runs.

    The strategy's own methods are driven on shapes, as :func:`ltx.profile.explain` does, over as many steps as its
    schedule takes to repeat itself, and once before for what is then under way. Collectives cost what they do as rings.
    Gradients get ready evenly by their bytes during the backward pass, 0.6 of `compute_s`, behind a forward pass of 0.3
    and ahead of an optimizer's 0.1; the link takes them one after the other. So it does with what goes on in the
    background. Exchanges in the foreground are waited for where the strategy waits for them.

    A bucket of several collectives goes on where the rank launches another bucket, and once all are launched in rounds.

    Sending takes the rank's core `send_s` a byte: while it waits anyway, for nothing, else at the cost of its own work.
    Other operations than a sum of float32 numbers take more or less of it.

    Left out: that ranks aren't equally fast, and that messages share links or switches.

    Args:
        strategy: how ranks communicate.
        params: the parameters, of which shapes and dtypes are read; they may be on the meta device.
        world: the number of ranks.
        bandwidth: of each rank's link in each direction, in bits per second: 1e9 for 1 Gbit/s.
        latency: of a message, in seconds.
        compute_s: seconds that one rank alone takes for a step: forward pass, backward pass, optimizer.
        optimizer: for strategies that insist on one; else one that does nothing stands for any.
        steps: over which to take the mean; if None, one cycle of the strategy's schedule behind its warm-up.
        codec_s: seconds a number for packing, encoding and decoding, for all hooks; if None, what was measured of each
            hook on one core, and where cores do the sending too, of what that does to the caches of the rest of a step;
            hooks that ltx doesn't know count as AllReduce, with a note. On an accelerator it is measured by this call.
        send_s: seconds of a core for a byte sent, with what is received meanwhile; 0.0 where others do the sending
            (NCCL on GPUs). If None, what was measured of sockets, on links that a core can fill through them (5.7
            Gbit/s), and 0.0 on faster ones, which come with hardware for that, and on accelerators.
        device: where the ranks compute. If None, where the parameters are; for those on the meta device, the CPU.

    Returns:
        A :class:`Cost`: `time_s`, `bytes_per_rank`, `collectives`; ``print`` shows it as a table.

    Raises:
        InputError: a number that can't be; a `device` that this machine lacks, without `codec_s`.
        StrategyError: the strategy doesn't work on so many ranks, or not without the `optimizer` that it names.
        UnsupportedError: the strategy or its hook reads values or the clock, so that it can't be run on shapes alone.

    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005.

    Example:
        >>> import torch, ltx
        >>> params = {"w": torch.empty(25_000_000, device="meta")}
        >>> network = dict(bandwidth=10e9, latency=50e-6, compute_s=0.1)
        >>> print(ltx.profile.plan(ltx.DDPStrategy(), params, world=1000, **network))
        DDPStrategy() on 1,000 ranks, a step: 405 ms
        <BLANKLINE>
        traffic      sent  collectives  on the link
        ---------  ------  -----------  -----------
        summaries   127 B            1      99.9 ms
        gradients  200 MB            1       260 ms
        <BLANKLINE>
        computing 100 ms, packing and encoding 10 ms, waiting 295 ms
    """
    bandwidth = number("plan: bandwidth", bandwidth, 0, more=True)
    latency, compute_s = number("plan: latency", latency, 0), number("plan: compute_s", compute_s, 0)
    send_s = send_s if send_s is None else number("plan: send_s", send_s, 0)
    codec_s = codec_s if codec_s is None else number("plan: codec_s", codec_s, 0)
    world = whole("plan: world", world, 1)
    if steps is not None and (not isinstance(steps, range) or not len(steps) or steps.start < 0 or steps.step != 1):
        raise InputError(f"plan: steps must be a range of steps that follow one another, got {brief(steps)}.")
    tree.check_dense(tree.flatten(params)[0], params, "the parameters")
    on = device_of(params) if device is None else torch.device(device)
    if codec_s is None or strategy.auto_hook:
        check_device(on, "plan")
    if strategy.auto_sizes or strategy.auto_hook:
        strategy = on_network(strategy, params, world, comm.Network(bandwidth, latency), on)
    window = cycle_of(strategy) if steps is None else steps
    length = strategy.cycle[1]
    # A world of one sends nothing.
    start = max(0, window.start - length)
    driven = Steps(strategy, params, world, 0, start, optimizer)
    unknown: dict[str, None] = {}
    sending = sending_s(bandwidth, on.type == "cpu") if send_s is None else send_s
    clock = _Clock(
        Link(bandwidth, latency, sending),
        compute_s,
        lambda hook: codec(hook, unknown, on) if codec_s is None else codec_s,
        BESIDE_S if codec_s is None and sending and on.type == "cpu" else 0.0,
    )
    numel = sum(x.numel() for x in tree.flatten(params)[0]) / (world if strategy.layout.opt_state == "sharded" else 1)

    def go(step: int) -> None:
        late = world > 1 and codec_s is None and strategy.communicates_after_update(step)
        clock.step(driven.next() if world > 1 else Issues(), copies(on) * numel if late else 0.0)

    for step in range(start, window.start):
        go(step)
    began, clock.codec_s, clock.traffic = clock.now, 0.0, {}
    for step in window:
        go(step)
    count = len(window)
    traffic = tuple(Traffic(kind, *(amount / count for amount in sums)) for kind, sums in clock.traffic.items())
    notes = tuple(f"what {name} computes isn't known; it counts as AllReduce(); see codec_s" for name in unknown)
    taken = (clock.now - began) / count
    return Cost(strategy, world, window, taken, compute_s, clock.codec_s / count, traffic, notes)
