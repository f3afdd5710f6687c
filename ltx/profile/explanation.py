"""explain: what a data-parallel step will send, before anything runs; :mod:`ltx.estimate` counts it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ltx import hooks
from ltx.core import comm
from ltx.core.base import tree
from ltx.core.base.arguments import whole
from ltx.core.base.readable import Shown, Table, format_bytes, many
from ltx.core.optim.combine import members_of
from ltx.core.optim.grad_transforms import ClipByGlobalNorm
from ltx.core.ranks.axis import axes_in_scope
from ltx.core.training.guard import must_sync_finite, on_any
from ltx.core.training.parameters import split
from ltx.core.training.train_state import TrainState
from ltx.core.training.train_step import TrainStep
from ltx.core.transforms.data_parallel import DataParallel
from ltx.errors import LtxError, StepError
from ltx.estimate import BucketExplanation, Collective, Issues, Steps, collective, meta
from ltx.optim import Optimizer, chain, identity
from ltx.profile.traces import Trace
from ltx.strategies import StepInfo, Strategy
from ltx.typing import Tree


@dataclass(frozen=True)
class Explanation(Shown):
    """What each synchronised step will send; ``print`` shows it as a table.

    Attributes:
        strategy: the step's strategy.
        hook: the hook at this step; None if gradients stay local.
        world, rank: the number of ranks, and the one that is explained.
        sync_step: the number of synchronised steps before this one.
        buckets: the buckets of gradients, in the order of launches; empty if no gradients are sent.
        exchanges: what is sent besides gradients, in the order in which it starts: by the strategy and, if ranks don't
            share gradients, by the guard and by clipping. None for a step that isn't a training step.
        summaries: the small sums that are sent before the gradients and before each exchange in the foreground.
        plain_bytes: the bytes with which this rank would all-reduce the same gradients uncompressed, in these buckets.
        notes: sentences on what the table doesn't show.
    """

    strategy: Strategy
    hook: hooks.CommHook | None
    world: int
    rank: int
    sync_step: int
    buckets: tuple[BucketExplanation, ...]
    exchanges: tuple[BucketExplanation, ...] | None
    summaries: tuple[Collective, ...]
    plain_bytes: int
    notes: tuple[str, ...]

    @property
    def rows(self) -> tuple[BucketExplanation, ...]:
        """All that is sent except step summaries: the buckets of gradients, then those of exchanges."""
        return (*self.buckets, *(self.exchanges or ()))

    @property
    def bytes(self) -> int:
        """Bytes that this rank sends in a step, without step summaries."""
        return sum(c.nbytes for row in self.rows for c in row.collectives)

    @property
    def collectives(self) -> int:
        """The number of collectives per step, without step summaries."""
        return sum(len(row.collectives) for row in self.rows)

    @property
    def summary_bytes(self) -> int:
        """Bytes that this rank sends for step summaries: loss, weights and digest of a step, digests of exchanges."""
        return sum(c.nbytes for c in self.summaries)

    @property
    def compression(self) -> float:
        """`plain_bytes` divided by `bytes`; 1 if there is nothing to send."""
        if self.bytes == 0:
            return 1.0 if self.plain_bytes == 0 else math.inf
        return self.plain_bytes / self.bytes

    def matches(self, trace: Trace, steps: int = 1) -> bool:
        """Whether `steps` recorded steps issued exactly this: operations, bytes and order.

        `trace` is what :func:`ltx.profile.record` recorded of whole steps on this rank, and of no other steps. A
        compiled step records nothing. Other collectives in the trace are ignored, and exchanges are compared only for
        training steps.
        """
        kinds = ("bucket",) if self.exchanges is None else ("bucket", "exchange", "background")
        recorded: dict[str, list[tuple[str, int]]] = {}
        for event in trace.events:
            if event.kind in kinds:
                recorded.setdefault(event.label, []).append((event.operation, event.nbytes))
        explained: dict[str, list[tuple[str, int]]] = {}
        for row in self.rows:
            explained.setdefault(row.label, []).extend((c.operation, c.nbytes) for c in row.collectives)
        return recorded == {label: issues * steps for label, issues in explained.items() if issues}

    def _parts(self) -> list[str | Table]:
        return [self._title(), *self._tables(), *self._totals(), *(f"note: {text}" for text in self.notes)]

    def _title(self) -> str:
        where = f"on {many(self.world, 'rank')}, synchronised step {self.sync_step}"
        if self.buckets:
            return f"{self.hook!r} {where}: what rank {self.rank} sends"
        title = f"{type(self.strategy).__name__} {where}: no gradients sent"
        return f"{title}; what rank {self.rank} sends besides" if self.exchanges else title

    def _tables(self) -> list[str | Table]:
        parts: list[str | Table] = []
        for rows, names in (
            ([(str(b.index), b) for b in self.buckets], ("bucket", "gradients")),
            ([(x.label, x) for x in self.exchanges or ()], ("besides", "tensors")),
        ):
            if rows:
                parts += ["", _table(rows, *names)]
        return [*parts, ""] if parts else []

    def _totals(self) -> list[str]:
        plain = f"plain all-reduce  {format_bytes(self.plain_bytes)}"
        if not self.rows:
            return [plain] if self.plain_bytes else []
        if math.isfinite(self.compression) and self.bytes != self.plain_bytes:
            plain += f", {self.compression:.2f} times as much"
        summaries = f"step summary      {format_bytes(self.summary_bytes)} besides, for loss, weights and digest"
        if not self.buckets or len(self.summaries) > 1:
            summaries = f"step summaries    {format_bytes(self.summary_bytes)} besides, {len(self.summaries)} in all"
        return [
            f"sent a step       {format_bytes(self.bytes)} in {many(self.collectives, 'collective')}",
            plain,
            *([summaries] if self.summaries else []),
        ]


def _table(buckets: Sequence[tuple[str, BucketExplanation]], kind: str, what: str) -> Table:
    """A table of buckets, each with its label."""
    header = (kind, "parameters", "elements", what, "collective", "of", "sent")
    rows: list[tuple[str, ...]] = []
    for label, bucket in buckets:
        tensors = f"{format_bytes(bucket.nbytes)} {str(bucket.dtype).removeprefix('torch.')}"
        paths = ", ".join(bucket.paths)
        if len(paths) > 40 and len(bucket.paths) > 1:
            paths = f"{bucket.paths[0]} .. {bucket.paths[-1]} ({len(bucket.paths)})"
        first = (label, paths, f"{bucket.elements:,}", tensors)
        issued = [(c.operation, c.buffer, format_bytes(c.nbytes)) for c in bucket.collectives]
        for place, cells in enumerate(issued or [("nothing", "", format_bytes(0))]):
            rows.append((*(first if place == 0 else ("",) * len(first)), *cells))
    return Table(header, rows, (kind == "bucket", False, True, True, False, False, True))


def explain(
    step: DataParallel | TrainStep, params: Tree, *batch: Any, world: int | None = None, sync_step: int | None = None
) -> Explanation:
    """What a data-parallel step will send at each synchronised step, before anything runs.

    Nothing is computed and nothing is sent: the step isn't called, and only shapes and dtypes are read. So it works in
    a world of one for any number of ranks, and for parameters on the meta device that are larger than the memory.

    Args:
        step: what :func:`ltx.data_parallel` or :func:`ltx.train_step` returned, accumulated or not. For a data-parallel
            step, what its gradients send outside of a train step is shown; if the strategy, such as ZeRO, sends
            something else in training, a note says so.
        params, batch: the arguments of the step. Only the parameters (the step's `argnums`) are read, so the batch may
            be left out if it comes after them. Parameters may be an :class:`ltx.Synced`, and for a train step its
            :class:`ltx.TrainState`.
        world: the number of ranks, of which rank 0 is explained; if None, this rank of the step's axis is.
        sync_step: the number of synchronised steps before this one, for hooks and strategies that change with the
            step. If None, the count of the state that came with the parameters; else 0.

    Returns:
        An :class:`Explanation`: a row per bucket and totals, to read (``print``), to compute with, and to compare with
        a recording of :func:`ltx.profile.record` (:meth:`Explanation.matches`). Bytes are those of the ring algorithm,
        as in recordings. Buckets of the default size are as large as the world's backend for the parameters'
        device has them.

        Every floating or complex leaf of the parameters is counted as if it were differentiated, except leaves that a
        train step freezes; for a data-parallel step, leave frozen leaves out. For a train step, exchanges besides
        gradients are counted too, with the state that the step before has left. Not counted are collectives of the
        step function itself, and comparisons between ranks when a step is new to them. If ranks' dicts list parameters
        in different orders, buckets have rank 0's order.

    Raises:
        StepError: `step` isn't data parallel.
        InputError: `world` or `sync_step` is out of its range.
        TreeError: the parameters aren't a tree of tensors.
        StrategyError: the hook asks for a collective that isn't allowed; or the strategy can't work on so many ranks.
        UnsupportedError: the hook or the strategy reads values or the clock, or isn't pure, so that it can't be run on
            shapes alone; or the strategy communicates other than by exchanges.

    Example:
        >>> import torch, ltx
        >>> params = {"w": torch.zeros(1000, 30), "b": torch.zeros(30)}
        >>> step = ltx.data_parallel(lambda p, x: (x @ p["w"] + p["b"]).sum(), ltx.DDPStrategy(comm_hook="bf16"))
        >>> print(ltx.profile.explain(step, params, world=4))
        BF16() on 4 ranks, synchronised step 0: what rank 0 sends
        <BLANKLINE>
        bucket  parameters  elements       gradients  collective  of                  sent
        ------  ----------  --------  --------------  ----------  ---------------  -------
             0  b, w          30,030  120 kB float32  psum        bfloat16[30030]  90.1 kB
        <BLANKLINE>
        sent a step       90.1 kB in 1 collective
        plain all-reduce  180 kB, 2.00 times as much
        step summary      96 B besides, for loss, weights and digest
        note: under second derivatives BF16() counts as the exact mean, and sends that
    """
    inner = step.step if isinstance(step, TrainStep) else step
    if not isinstance(inner, DataParallel):
        raise StepError(
            f"explain takes a step made by ltx.data_parallel or ltx.train_step, got {type(step).__name__}. Wrap it: "
            "ltx.profile.explain(ltx.data_parallel(step, strategy), params)."
        )
    if isinstance(step, TrainStep) and isinstance(params, TrainState):
        state: Any = params.sync_state
        params = params.trained
    else:
        params, state = inner.params_of((params, *batch))
        tree.check_dense(tree.flatten(params)[0], params, "the parameters")
        params = split(params, step.trainable)[0] if isinstance(step, TrainStep) else params
    world = world if world is None else whole("explain: world", world, 1)
    sync_step = sync_step if sync_step is None else whole("explain: sync_step", sync_step, 0)
    size, rank = comm.size_and_rank(inner.axis) if world is None else (world, 0)
    counted = 0 if state is None else state.checked_step()
    number = counted if sync_step is None else sync_step
    trains, strategy, post_update_hook = isinstance(step, TrainStep), inner.strategy, None
    hook = inner.hook(number, training=trains)
    steps = Steps(strategy, params, size, rank, scope=axes_in_scope())
    plain_bytes = sum(
        collective("psum", meta((b.numel,), b.dtype), steps.axis.ranks).nbytes
        for b in steps.plan(hooks.AllReduce()).buckets
    )
    issues = Issues()
    if size > 1 and isinstance(step, TrainStep):
        # The step before is driven too, for the exchanges that it leaves under way.
        first = max(0, number - 1)
        optimizer, post_update_hook = _stand_in(strategy, step.optimizer), step.post_update_hook(number)
        hooked = inner.reduce_dtype, step.post_update_hook, partial(_ask_if_finite, step)
        steps = Steps(strategy, params, size, rank, first, optimizer, *hooked, axes_in_scope())
        if number:
            steps.next()
        issues = steps.next()
    elif size > 1 and hook is not None:
        issues = Issues(gradients=steps.gradients(hook, number))
    exchanges = issues.exchanges if trains else None
    notes = _notes(inner, hook, size, number, trains)
    if post_update_hook is not None:
        notes.append('with overlap="update" a bucket is sent once the optimizer has run on it')
    rows = issues.gradients.rows, exchanges, issues.summaries
    return Explanation(strategy, post_update_hook or hook, size, rank, number, *rows, plain_bytes, tuple(notes))


def _stand_in(strategy: Strategy, optimizer: Optimizer) -> Optimizer:
    """An optimizer that reads no values, for shapes alone; `optimizer` itself if the strategy accepts no other.

    It is :func:`ltx.optim.identity`, chained to the clippings by norm of `optimizer`: where ranks have parts of the
    gradients, these communicate.
    """
    clips = [member for member in members_of(optimizer) if isinstance(member, ClipByGlobalNorm)]
    made = chain(*clips, identity())
    try:
        strategy.check_optimizer(made)
    except LtxError:
        return optimizer
    return made


def _ask_if_finite(train: TrainStep, info: StepInfo) -> None:
    """Send what the guard sends if ranks don't share gradients."""
    if must_sync_finite(train, info):
        on_any(train, meta((), torch.bool), info)


def _notes(step: DataParallel, hook: hooks.CommHook | None, size: int, number: int, trains: bool) -> list[str]:
    """Sentences on what a reader may not expect: of this step, and of later steps or training if they differ."""
    if step.blocked:
        return ["the step's gradients are blocked (block_backward_sync)"]
    strategy, notes = step.strategy, list[str]()
    if hook is None:
        notes.append(f"{strategy!r} leaves the gradients of this step local")
    elif size == 1:
        notes.append("a world of one sends nothing; see what others would send with world=...")
    elif not hook.averages:
        notes.append(f"{hook!r} isn't a mean, and has no derivative: second derivatives raise")
    elif not hook.exact:
        notes.append(f"under second derivatives {hook!r} counts as the exact mean, and sends that")
    first = strategy.cycle[0]
    later = step.hook(first, trains) if number < first else hook
    if hook is not None and later != hook:
        then = "local gradients" if later is None else repr(later)
        notes.append(
            f"{hook!r} is in force before synchronised step {first} alone, and {then} from then on: "
            f"ltx.profile.explain(..., sync_step={first}) shows that"
        )
    if not trains and (strategy.communicates_besides or step.hook(number, True) != hook):
        notes.append(
            "this is the step alone, differentiated outside of a train step. In training "
            f"{type(strategy).__name__} sends something else or more: "
            "ltx.profile.explain(ltx.train_step(step, optimizer), params) shows that"
        )
    return notes
