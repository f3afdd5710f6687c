"""AsyncAveraging: local steps, while the mean of all ranks' parameters is computed in the background.

    every step:   x_r = update(x_r, grad f_r(x_r))
    a round:      s_r = x_r;     S = sum_r s_r while steps go on;     then x_r = x_r + S / n - s_r

Bagua's async (Gan et al., "BAGUA", VLDB 2022, section 3; Lian et al., "Asynchronous decentralized parallel stochastic
gradient descent", ICML 2018). A rank keeps its own steps of the meantime, and the sum over ranks doesn't change.

The process group's threads do a round's communication; steps begin and finish rounds at their end. From a GPU a round
goes through the host, and the step that begins it waits until parameters are copied: NCCL would wait for all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch

from ltx import hooks
from ltx.errors import StrategyError
from ltx.extend import Axis, Exchange, States, StepInfo, Update, Updated, arguments, brief, exchange, negotiate, tree
from ltx.optim import Optimizer
from ltx.strategies.ddp import APART
from ltx.strategies.nodes import ByNode, NodeStrategy, WithinNode, node
from ltx.typing import Tree

_MEAN = hooks.AllReduce()
_DELTA = "delta"
_FINISHING = "the number of ranks that finish"
_clocked = WeakKeyDictionary[Any, float | None]()  #: by axis of processes: the training whose rounds go by the clock


@dataclass(frozen=True, eq=False)
class Round:
    """The last round that this rank began."""

    began_s: float  # when the round began, by time.monotonic
    snapshot: Sequence[torch.Tensor] = ()  # the parameters that the round sent
    mean: Exchange | None = None  # the exchange of the parameters; None after it was waited for
    training: float | None = None  # when the first of the rounds began since init, finish, or another state


@dataclass(frozen=True, kw_only=True)
class AsyncAveraging(NodeStrategy):
    """Local steps, and rounds in the background that move every rank towards the mean of all ranks' parameters.

    It needs :func:`ltx.train_step`. After `warmup_steps` steps with mean gradients every rank trains at its own pace,
    and the loss in the metrics is its own. At the end of a step it adds the result of the last round, if that is
    complete, and begins the next one if `sync_interval_ms` have passed since the last one began. A round completes when
    every rank has begun it. Steps don't wait for other ranks (but at first for those of a state that ``train.init``
    hasn't made in this process), and ranks may do different numbers of steps.

    ``train.finish(state)``, called by every rank, ends a phase of training, as Bagua's ``abort``: all then hold the
    mean, and the next step continues. A rank that calls it early takes part in the others' rounds until all have called
    it. A round under way isn't part of a saved state: call finish before saving, and before ranks go on from another
    state that they have kept, as peers may still get what was sent of the old one. A new ``train.init`` drops a round,
    and so do ranks that shut down within seconds of each other. On an axis one training at a time has a clock.

    Staleness: a rank adds its peers' parameters as they were one round ago. A rank that doesn't reach the end of a step
    delays rounds but not steps: the others go on alone until the axis' timeout has passed, or its process has ended;
    then their next step raises.

    With a `schedule` rounds begin at certain steps, not by the clock; all ranks do equally many, and two runs give the
    same bits. Simulated ranks need it: their communication state ("delta") holds a round's result until it is added.

    Args:
        sync_interval_ms: the least time between the beginnings of two rounds, in milliseconds.
        schedule: ``(period, delay)`` in place of the clock: after every `period`-th local step, from the first on, a
            round begins, and `delay` steps later ranks wait for its result and add it. 1 <= delay <= period.
        hierarchical, node_size: nodes of `node_size` ranks act as one. The ranks of a node share their gradients at
            every step, ``metrics.loss`` is their mean, each sends a part of the parameters to other nodes, and they
            begin and add rounds at the same steps, when the round is due on all of them.

    Raises:
        StrategyError: (a ValueError) a field's value isn't allowed.
        UnsupportedError: without a schedule: on simulated ranks.
        StrategyError: from a step, without a schedule: another training by the clock has begun on the axis meanwhile.
        PeerLostError, CollectiveTimeoutError: from a step or :meth:`finish`: a rank is gone, or has begun no round for
            the axis' timeout. The state is as it was before the step.

    Example:
        >>> import torch, ltx
        >>> from ltx.strategies.async_averaging import AsyncAveraging
        >>> step = ltx.data_parallel(lambda w, x: w * x, AsyncAveraging(schedule=(2, 1)))
        >>> train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=1.0))
        >>> state, xs = train.init(torch.tensor(0.0)), torch.tensor([1.0, 3.0])
        >>> state, _ = ltx.vmap(train, in_dims=(None, 0))(state, xs)
        >>> state.params  # a round begins after this step
        tensor([-1., -3.])
        >>> state, _ = ltx.vmap(train)(state, xs)
        >>> state.params  # -2 and -6, plus the round's differences -1 and +1
        tensor([-3., -5.])
        >>> ltx.vmap(train.finish)(state).params
        tensor([-4., -4.])
    """

    layout = APART

    warmup_steps: int = 0
    sync_interval_ms: float = 500
    schedule: tuple[int, int] | None = None
    peer_selection_mode: Literal["all"] = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.check_whole(self, 0, "warmup_steps")
        arguments.check_number(self, 0, "sync_interval_ms")
        pair = self.schedule
        whole = isinstance(pair, tuple) and len(pair) == 2 and all(type(x) is int for x in pair)
        if pair is not None and not (whole and 1 <= pair[1] <= pair[0]):
            raise StrategyError(
                "AsyncAveraging.schedule must be None or a pair (period, delay) of whole numbers with 1 <= delay <= "
                f"period, got {brief(self.schedule)}."
            )
        if self.peer_selection_mode != "all":
            raise StrategyError(
                f'AsyncAveraging.peer_selection_mode must be "all", got {brief(self.peer_selection_mode)}: ranks of '
                "which nobody knows which round they are in can't be paired."
            )

    def hook(self, step: int) -> hooks.CommHook | None:
        if self.together == 1:
            return _MEAN if step < self.warmup_steps else None
        return ByNode(self.together, _MEAN) if step < self.warmup_steps else WithinNode(self.together)

    @property
    def cycle(self) -> tuple[int, int]:
        return self.warmup_steps, 1 if self.schedule is None else self.schedule[0]

    def check(self, optimizer: Optimizer, axis: Axis | None = None) -> None:
        super().check(optimizer, axis)
        if self.schedule is None and axis is not None and axis.size > 1:
            axis.ranks.need(
                "clock",
                "AsyncAveraging: simulated ranks have no clock, as all of them step together. Give the rounds a "
                "schedule: AsyncAveraging(schedule=(period, delay)).",
            )

    def init_optimizer(self, optimizer: Optimizer, params: Tree, axis: Axis) -> Tree:
        # All ranks are here now. At the first round, they would have to wait for each other to agree on it.
        negotiate(self, self._round, *self._message(params, 0), StepInfo(0, axis), background=True)
        return super().init_optimizer(optimizer, params, axis)

    def update(self, update: Update, states: States, info: StepInfo, pending: Round | None) -> Updated:
        if info.step < self.warmup_steps or info.axis.size == 1:
            return super().update(update, states, info, pending)
        # This comes before the optimizer's update: if a peer is lost, the state is unchanged.
        waits, begins = self._due(info, pending)
        deltas: Tree = None
        if waits:
            deltas, states, pending = self._take_round(update.params, states, info, pending)
        params, opt_state = update.apply()
        params = params if deltas is None else tree.map(torch.add, params, deltas)
        if begins:
            pending, states = self._begin(params, states, info, pending)
        return Updated(params, opt_state, states, pending)

    def finish(self, params: Tree, states: States, info: StepInfo, pending: Round | None) -> tuple[Tree, States]:
        if info.axis.size == 1:
            return params, states
        deltas, states, _ = self._take_round(params, states, info, pending)
        params = params if deltas is None else tree.map(torch.add, params, deltas)
        finished, count = False, info.axis.size // self.together
        while not finished:
            # This rank takes no steps meanwhile: x + S / n - s is the mean itself, with the same bits on all ranks.
            reduced = self._wait_round(self._exchange(params, info, None, finishing=1), params, info)
            leaves, spec = tree.flatten(params)
            finished = self.schedule is not None or round(count * reduced[-1].item()) == count
            params = tree.unflatten(spec, reduced[: len(leaves)])
        return params, states

    @property
    def _round(self) -> hooks.CommHook:
        return _MEAN if self.together == 1 else ByNode(self.together, _MEAN, (2,))

    def _due(self, info: StepInfo, pending: Round | None) -> tuple[bool, bool]:
        """Whether this step takes the result of a round, and whether the next round begins at its end."""
        if self.schedule is not None:
            period, delay = self.schedule
            since = info.step - self.warmup_steps
            return since >= delay and (since - delay) % period == 0, since % period == 0
        if info.axis.comm is not None and (error := info.axis.comm.peers.diagnosed(in_pass=False)) is not None:
            raise error  # steps between rounds wait for nobody, and would go on for ever
        mean = None if pending is None else pending.mean
        late = pending is None or time.monotonic() - pending.began_s >= self.sync_interval_ms / 1000
        flags = [mean is not None and mean.done, late]
        if self.together > 1:  # whether each is set on all ranks of the node
            there = StepInfo(info.step, node(info.axis, self.together))
            given = torch.tensor(flags, dtype=torch.float64, device="cpu")
            reduced, _ = exchange(self, _MEAN, [given], ["whether a round is due"], there).wait()
            flags = [round(self.together * inputs) == self.together for inputs in reduced[0].tolist()]
        is_there, late = flags
        return is_there, (late or pending is None) and (is_there or mean is None)

    def _begin(self, params: Tree, states: States, info: StepInfo, before: Round | None) -> tuple[Round | None, States]:
        """Begin a round; on ranks whose collectives complete at once, the states hold its result."""
        leaves, ranks = tree.flatten(params)[0], info.axis.ranks
        training = time.monotonic() if before is None else before.training
        if before and self.schedule is None and ranks.overlaps and _clocked.get(ranks) != training:
            raise StrategyError(
                f"rank {info.axis.rank}: AsyncAveraging: since this training's last round another training has begun "
                "rounds on the axis. Each rank begins rounds by its own clock, so rounds of two trainings would be "
                "mixed. Give both a schedule=(period, delay), give one an axis of its own (ltx.axis_from_group), or "
                "call train.finish(state) before another training begins."
            )
        mean = self._exchange(params, info, training, finishing=0)
        if ranks.overlaps:
            return Round(time.monotonic(), [x.clone() for x in leaves], mean, training), states
        reduced = self._wait_round(mean, params, info)
        paths = tree.leaf_paths(params)
        return None, {path: {_DELTA: y - x} for path, y, x in zip(paths, reduced, leaves, strict=False)}

    def _take_round(
        self, params: Tree, states: States, info: StepInfo, pending: Round | None
    ) -> tuple[Tree, States, Round | None]:
        """Wait for the round under way: (its S / n - s or None, the states without it, the round without exchange)."""
        spec = tree.flatten(params)[1]
        if pending is not None and pending.mean is not None:
            reduced = self._wait_round(pending.mean, params, info)
            deltas = [y - s for y, s in zip(reduced, pending.snapshot, strict=False)]
            return tree.unflatten(spec, deltas), states, replace(pending, snapshot=(), mean=None)
        if states:
            return tree.unflatten(spec, [states[path][_DELTA] for path in tree.leaf_paths(params)]), {}, pending
        return None, states, pending

    def _wait_round(self, mean: Exchange, params: Tree, info: StepInfo) -> list[torch.Tensor]:
        """Wait for the result of a round; in a node, each rank gathers the parts of the others."""
        reduced, _ = mean.wait()
        if self.together == 1:
            return reduced
        there = StepInfo(info.step, node(info.axis, self.together))
        return exchange(self, ByNode(self.together, steps=(3,)), reduced, self._message(params, 0)[1], there).wait()[0]

    def _exchange(self, params: Tree, info: StepInfo, training: float | None, finishing: int) -> Exchange:
        if self.schedule is None and info.axis.ranks.overlaps:
            _clocked[info.axis.ranks] = training
        return exchange(self, self._round, *self._message(params, finishing), info, background=True)

    def _message(self, params: Tree, finishing: int) -> tuple[list[torch.Tensor], list[str]]:
        """The tensors that a round sends, and their names: parameters and, with a clock, whether this rank finishes."""
        leaves, paths = tree.flatten(params)[0], tree.leaf_paths(params)
        if self.schedule is not None:
            return leaves, paths
        device = leaves[0].device if leaves else None
        return [*leaves, torch.full((), float(finishing), dtype=torch.float64, device=device)], [*paths, _FINISHING]
