"""What a step costs: plan computes it for a network that is only described, compare measures it on these ranks.

For a plan, :mod:`ltx.estimate` gives the messages that the strategy asks for on shapes, and a simulation of a step
finds their times. Of the processors only the caller's measured `compute_s` is known. A collective takes the latency of
each message in its longest chain, plus its bytes at the link's bandwidth (Thakur, Rabenseifner and Gropp, "Optimization
of collective communication operations in MPICH", 2005, section 4).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from ltx.core import collectives
from ltx.core.base import tree
from ltx.core.base.arguments import brief, checked, number, whole
from ltx.core.base.readable import Shown, Table, format_bytes, format_seconds, many
from ltx.core.comm.operations import OPERATIONS
from ltx.core.gradients.exchange import Exchange
from ltx.core.training import TrainState
from ltx.core.training.train_state import counted
from ltx.core.training.train_step import TrainStep
from ltx.errors import InputError, StrategyError
from ltx.estimate import Collective, Issues, Started, Steps, Waited
from ltx.optim import Optimizer
from ltx.profile.traces import record
from ltx.strategies import Strategy
from ltx.typing import Tree

FORWARD, BACKWARD, OPTIMIZER = 0.3, 0.6, 0.1  #: the parts of `compute_s`


@dataclass(frozen=True)
class Network:
    """What connects the ranks of an axis.

    Args:
        bandwidth: of each rank's link in each direction, in bits per second: 1e9 for 1 Gbit/s.
        latency: of a message, in seconds.

    Raises:
        InputError: (a ValueError) a number is out of range.
    """

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "bandwidth", number("Network.bandwidth", self.bandwidth, 0, more=True))
        object.__setattr__(self, "latency", number("Network.latency", self.latency, 0))


@dataclass(frozen=True)
class Traffic:
    """What an average step sends of one `kind`: "gradients", "exchanges", "in the background" or "summaries"."""

    kind: str
    nbytes: float
    collectives: float
    link_s: float


@dataclass(frozen=True)
class Cost(Shown):
    """What an average training step costs; ``print`` shows it as a table.

    Attributes:
        strategy, world, steps: what was planned: the strategy, the number of ranks, the steps of the average.
        time_s, compute_s: the seconds of a step, and the seconds of computing that were given.
        traffic: what is sent, one entry for each kind.
    """

    strategy: Strategy
    world: int
    steps: range
    time_s: float
    compute_s: float
    traffic: tuple[Traffic, ...]

    @property
    def bytes_per_rank(self) -> float:
        """Bytes that a rank sends per step, without step summaries: the mean of :attr:`Explanation.bytes`."""
        return sum(t.nbytes for t in self.traffic if t.kind != "summaries")

    @property
    def collectives(self) -> float:
        """The number of collectives per step, without step summaries."""
        return sum(t.collectives for t in self.traffic if t.kind != "summaries")

    @property
    def link_s(self) -> float:
        """Seconds per step during which a rank's link is busy."""
        return sum(t.link_s for t in self.traffic)

    @property
    def waiting_s(self) -> float:
        """Seconds per step that a rank waits."""
        return max(0.0, self.time_s - self.compute_s)

    def _parts(self) -> list[str | Table]:
        length = f"mean of {len(self.steps):,} steps" if len(self.steps) > 1 else "a step"
        head = f"{self.strategy!r} on {many(self.world, 'rank')}, {length}: {format_seconds(self.time_s)}"
        header, rows = ("traffic", "sent", "collectives", "on the link"), list[tuple[str, ...]]()
        for t in self.traffic:
            rows.append((t.kind, format_bytes(round(t.nbytes)), f"{t.collectives:,.4g}", format_seconds(t.link_s)))
        table: list[str | Table] = ["", Table(header, rows, (False, True, True, True)), ""] if rows else []
        parts = f"computing {format_seconds(self.compute_s)}, waiting {format_seconds(self.waiting_s)}"
        return [head, *table, parts]


@dataclass
class _Transfer:
    """A bucket that is being sent."""

    kind: str
    left: list[Collective]
    issued: int = 0
    done: float = 0.0  # when the collective that was issued last completes


@dataclass
class _Clock:
    """The clock of one rank and of its link. The rank computes, and the link sends, one thing after the other."""

    networks: list[tuple[int, Network]]  # (number of neighbours that it connects, network), the smallest first
    compute_s: float
    now: float = 0.0
    link_free: float = 0.0
    pending: dict[Exchange, list[_Transfer]] = field(default_factory=dict)
    traffic: dict[str, list[float]] = field(default_factory=dict)  # kind: [bytes, collectives, seconds on the link]

    def step(self, issues: Issues) -> None:
        """Simulate one step, which waits for all gradients before the optimizer."""
        for event in issues.begun:
            self._event(event)
        self.now += FORWARD * self.compute_s
        self._wait(self._start(issues.gradients, "gradients", BACKWARD * self.compute_s))
        updated = list(issues.updated)
        while updated and isinstance(updated[0], Waited):
            self._event(updated.pop(0))
        self.now += OPTIMIZER * self.compute_s
        for event in updated:
            self._event(event)

    def _event(self, event: Started | Waited) -> None:
        assert event.exchange is not None
        if isinstance(event, Waited):
            self._wait(self.pending.pop(event.exchange, []))
        else:
            kind = "exchanges" if event.summary is not None else "in the background"
            self.pending[event.exchange] = self._start(event, kind)

    # The order of events is that of ltx.core.gradients.pending.

    def _start(self, started: Started, kind: str, making_s: float = 0.0) -> list[_Transfer]:
        """Launch the buckets. `making_s`: the time in which the rank computes them, in proportion to their bytes."""
        if started.summary is not None:
            self._carry(started.summary, "summaries")
        whole, under_way = sum(row.nbytes for row in started.rows), list[_Transfer]()
        for row in started.rows:
            self.now += making_s * row.nbytes / whole if whole else 0.0
            under_way.append(_Transfer(kind, list(row.collectives)))
            self._issue(under_way[-1])
            for place, each in enumerate(under_way):
                ahead = under_way[:place]
                while each.left and each.done <= self.now and all(x.issued > each.issued or not x.left for x in ahead):
                    self._issue(each)
        self.now += 0.0 if whole else making_s
        return under_way

    def _issue(self, each: _Transfer) -> None:
        self.now = max(self.now, each.done)
        if each.left:
            each.done = self._carry(each.left.pop(0), each.kind)
            each.issued += 1

    def _wait(self, under_way: list[_Transfer]) -> None:
        while any(each.left for each in under_way):
            for each in under_way:
                self._issue(each)
        self.now = max([self.now, *(each.done for each in under_way)])

    def _carry(self, collective: Collective, kind: str) -> float:
        """Send a collective that is issued now. Returns the time at which it is done."""
        first, last = collective.between
        network = next(net for size, net in self.networks if first // size == last // size)
        messages = OPERATIONS[collective.operation].messages(collective.ranks)
        taken = messages * network.latency + collective.nbytes * 8 / network.bandwidth
        self.link_free = max(self.link_free, self.now) + taken
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
    inside: Mapping[int, Network] | None = None,
    optimizer: Optimizer | None = None,
    steps: range | None = None,
) -> Cost:
    """What an average training step with `strategy` costs on a network, for any number of ranks, before anything runs.

    The messages are those that :func:`ltx.profile.explain` counts, over one period of the strategy's schedule.
    Collectives cost what they cost as rings. During the backward pass, 0.6 of `compute_s`, gradients get ready in
    proportion to their bytes; the forward pass before it takes 0.3, and the optimizer after it 0.1. The link sends one
    collective after the other, also those in the background. The plan doesn't know of the work of processors for a
    message, of ranks that are slower than others, nor of messages that share links. :func:`ltx.profile.compare`
    measures instead.

    Args:
        strategy: how ranks communicate.
        params: the parameters, whose shapes and dtypes are read; they may be on the meta device.
        world: the number of ranks.
        bandwidth: the bandwidth of each rank's link in each direction, in bits per second: 1e9 for 1 Gbit/s.
        latency: the latency of a message, in seconds.
        compute_s: seconds that one rank alone takes to compute a step, with its hook; measure them.
        inside: faster networks between neighbouring ranks, by the number of ranks that they connect, such as the eight
            of each node: ``{8: ltx.profile.Network(bandwidth=2e12, latency=5e-6)}``. Messages within such a group use
            its network; a sum over all ranks is as slow as its slowest link.
        optimizer: for strategies that need a certain optimizer; else a stand-in that does nothing is used.
        steps: the steps to average over; if None, one period of the strategy's schedule after its warm-up.

    Returns:
        A :class:`Cost`: `time_s`, `bytes_per_rank`, `collectives`; ``print`` shows it as a table.

    Raises:
        InputError: a number is out of its range.
        StrategyError: the strategy doesn't work on so many ranks, or needs an `optimizer`, which the error names.
        UnsupportedError: the strategy or its hook can't be run on shapes alone.

    Example:
        >>> import torch, ltx
        >>> params = {"w": torch.empty(25_000_000, device="meta")}
        >>> network = dict(bandwidth=10e9, latency=50e-6, compute_s=0.1)
        >>> print(ltx.profile.plan(ltx.DDPStrategy(), params, world=1000, **network))
        DDPStrategy() on 1,000 ranks, a step: 400 ms
        <BLANKLINE>
        traffic      sent  collectives  on the link
        ---------  ------  -----------  -----------
        summaries   127 B            1      99.9 ms
        gradients  200 MB            1       260 ms
        <BLANKLINE>
        computing 100 ms, waiting 300 ms
    """
    network = Network(number("plan: bandwidth", bandwidth, 0, more=True), number("plan: latency", latency, 0))
    compute_s, world = number("plan: compute_s", compute_s, 0), whole("plan: world", world, 1)
    inside = {} if inside is None else inside
    if not isinstance(inside, Mapping) or not all(isinstance(net, Network) for net in inside.values()):
        raise InputError(f"plan: inside maps numbers of ranks to ltx.profile.Network, got {brief(inside)}.")
    networks = sorted((whole("plan: a group of inside", size, 1), net) for size, net in inside.items())
    if steps is not None and not (isinstance(steps, range) and len(steps) and steps.start >= 0 and steps.step == 1):
        raise InputError(f"plan: steps must be a range of steps that follow one another, got {brief(steps)}.")
    tree.check_dense(tree.flatten(params)[0], params, "the parameters")
    window = _cycle_of(strategy) if steps is None else steps
    start = max(0, window.start - strategy.cycle[1])
    driven = Steps(strategy, params, world, 0, start, optimizer)
    clock = _Clock([*networks, (world, network)], compute_s)
    for step in range(start, window.stop):
        if step == window.start:
            began, clock.traffic = clock.now, {}
        clock.step(driven.next() if world > 1 else Issues())  # a world of one sends nothing
    traffic = tuple(Traffic(kind, *(amount / len(window) for amount in sums)) for kind, sums in clock.traffic.items())
    return Cost(strategy, world, window, (clock.now - began) / len(window), compute_s, traffic)


def _cycle_of(strategy: Strategy) -> range:
    """The steps of one cycle of the strategy; raises if steps after it communicate at other times."""
    first, length = strategy.cycle
    late = strategy.communicates_after_update
    differs = next((step for step in range(first, first + 1000) if late(step) != late(step + length)), None)
    if differs is not None:
        raise StrategyError(
            f"plan: {type(strategy).__name__}.cycle says that from step {first} on steps repeat every {length}, and "
            f"communicates_after_update({differs}) isn't communicates_after_update({differs + length}). Define cycle: "
            "(the first step of the first cycle, how many steps a cycle has); or say which steps to take the mean of: "
            f"plan(..., steps=range({first}, {first + 1000}))."
        )
    return range(first + length, first + 2 * length)


class Compared(NamedTuple):
    """A candidate: the slowest rank's seconds per step, and the bytes that this rank sends per step."""

    name: str
    step_s: float
    sent: float


class Comparison(Shown, tuple[Compared, ...]):
    """The candidates, fastest first; ``print`` shows them as a table."""

    def _parts(self) -> list[str | Table]:
        rows = [(x, format_seconds(s), f"{s / self[0].step_s:.2f}", format_bytes(round(sent))) for x, s, sent in self]
        return [Table(("candidate", "a step", "to the first", "sent"), rows, (False, True, True, True))]


def compare(candidates: dict[str, TrainStep], state: TrainState, *batch: Any, steps: int = 20) -> Comparison:
    """Time train steps in turns, on all ranks, as Horovod's autotuner does with settings.

    A turn is as long as the longest period of a schedule; the first turn isn't counted. Steps begin after a strategy's
    warm-up, so that a hook that is exact at first does compress. So few steps don't show the effect on the loss.

    Args:
        candidates: train steps by name.
        state: the state of one candidate, which doesn't change. The others begin with its parameters and buffers.
        batch: this rank's batch, for all steps.
        steps: the least number of steps that each candidate is timed for.

    Returns:
        The candidates, fastest first, the same on every rank; ``print`` shows them as a table.

    Example:
        >>> import torch, ltx
        >>> step = ltx.data_parallel(lambda p, x: (p["w"] * x).square().mean())
        >>> sgd = ltx.optim.from_torch(torch.optim.SGD, lr=0.1)
        >>> candidates = {way: ltx.train_step(step, sgd, overlap=way) for way in ("backward", "update")}
        >>> state = candidates["backward"].init({"w": torch.ones(3)})
        >>> sorted(row.name for row in ltx.profile.compare(candidates, state, torch.ones(3), steps=2))
        ['backward', 'update']
    """
    whole("compare: steps", steps, 1)
    if not candidates or not isinstance(state, TrainState):
        raise InputError(f"compare takes train steps by name and a state, got {brief(candidates)} and {brief(state)}.")
    trained, length = set(tree.leaf_paths(state.trained)), max(t.step.strategy.cycle[1] for t in candidates.values())
    states, sent, times = dict[str, TrainState](), dict[str, float](), {name: list[float]() for name in candidates}
    candidates = {name: replace(train, trainable=trained.__contains__) for name, train in candidates.items()}
    for name, train in candidates.items():
        at = max(state.step, train.step.strategy.cycle[0])
        states[name] = counted(train.init(state.params, state.buffers), at, at)
        with record() as trace:
            states[name], _ = _turn(train, states[name], batch, length)
        sent[name] = sum(x.nbytes for x in trace.events if x.kind in ("bucket", "exchange", "background")) / length
    for _ in range(-(-steps // length)):
        for name, train in candidates.items():
            states[name], taken = _turn(train, states[name], batch, length)
            times[name].append(taken / length)
    rows = (Compared(name, statistics.median(taken), sent[name]) for name, taken in times.items())
    return Comparison(sorted(rows, key=lambda row: row.step_s))


def _turn(train: TrainStep, state: TrainState, batch: tuple[Any, ...], length: int) -> tuple[TrainState, float]:
    """Run `length` steps. Returns the state after them, and the slowest rank's seconds."""
    collectives.barrier(axis=train.step.axis)
    began = time.perf_counter()
    for _ in range(length):
        state, metrics = train(state, *batch)
    state = train.finish(state)
    metrics.loss.item()  # waits until an accelerator has done all of it
    taken = torch.tensor(time.perf_counter() - began, dtype=torch.float64, device=metrics.loss.device)
    return state, float(collectives.pmax(taken, train.step.axis))
