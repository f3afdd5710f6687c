"""explain: what a data-parallel step will put on the wire, before anything runs.

The step's own plan is made, and each bucket's reduction is driven on the meta device, where tensors have shapes and no
values. So what is counted is what the hook will ask for, and not a formula beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from ltx import hooks, tree, wire
from ltx.axis import DEFAULT_NAME, Axis
from ltx.errors import InputError, LtxError, StepError, StrategyError, UnsupportedError
from ltx.strategies import Strategy
from ltx.sync.buckets import Bucket
from ltx.sync.planning import make_plan
from ltx.sync.reduction import Ask, LeafState, collective_alone, reduce_at_once
from ltx.sync.schedule import Plan
from ltx.transforms import synchronise
from ltx.transforms.data_parallel import DataParallel
from ltx.transforms.train_state import TrainState
from ltx.transforms.train_step import TrainStep
from ltx.typing import Tree


@dataclass(frozen=True)
class Collective:
    """One collective that a bucket will issue.

    Attributes:
        operation: as in :class:`ltx.hooks.Ask`.
        buffer: dtype and shape of what goes in, as "float16[99]".
        nbytes: bytes that this rank sends for it, as :func:`ltx.record` will count them.
    """

    operation: str
    buffer: str
    nbytes: int


@dataclass(frozen=True)
class BucketExplanation:
    """What one bucket of gradients will put on the wire.

    Attributes:
        index: its place in the order of launches.
        paths: of its parameters, in the order in which they lie in it.
        elements, dtype, nbytes: of its gradients.
        hook: the hook in force.
        collectives: in the order in which they are issued.
    """

    index: int
    paths: tuple[str, ...]
    elements: int
    dtype: torch.dtype
    nbytes: int
    hook: hooks.CommHook
    collectives: tuple[Collective, ...]


@dataclass(frozen=True)
class Explanation:
    """What each synchronised step will put on the wire; ``print`` shows it as a table.

    Attributes:
        strategy: the step's.
        hook: the hook in force; None where gradients stay local.
        world, rank: the number of ranks, and the one that is explained.
        sync_step: the number of synchronised steps before this one.
        buckets: in the order of launches; none where nothing is sent.
        plain_bytes: what this rank would send to all-reduce the same gradients as they are, in the same buckets.
        notes: what a reader should know besides.
    """

    strategy: Strategy
    hook: hooks.CommHook | None
    world: int
    rank: int
    sync_step: int
    buckets: tuple[BucketExplanation, ...]
    plain_bytes: int
    notes: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """Bytes that this rank sends for the gradients of a step, without the header's."""
        return sum(collective.nbytes for bucket in self.buckets for collective in bucket.collectives)

    @property
    def collectives(self) -> int:
        """The number of collectives a step, without the header."""
        return sum(len(bucket.collectives) for bucket in self.buckets)

    @property
    def header_bytes(self) -> int:
        """Bytes that this rank sends for the header, the small sum ahead of the buckets: loss, weights and digest."""
        return wire.bytes_sent("sum", _meta((wire.HEADER_BYTES,), torch.uint8), self.world) if self.buckets else 0

    @property
    def compression(self) -> float:
        """`plain_bytes` by `bytes`: how many times less is sent. 1 where there is nothing to send."""
        if self.bytes == 0:
            return 1.0 if self.plain_bytes == 0 else math.inf
        return self.plain_bytes / self.bytes

    def matches(self, trace: wire.Trace, steps: int = 1) -> bool:
        """Whether `steps` recorded steps issued exactly this for their gradients: operations, bytes and order.

        `trace` is what :func:`ltx.record` saw of whole steps on this rank, of no other step, and not of a compiled
        one, which records nothing. Whatever else it saw doesn't count.
        """
        recorded: dict[int | None, list[tuple[str, int]]] = {}
        for event in trace.buckets:
            recorded.setdefault(event.bucket, []).append((event.operation, event.nbytes))
        explained = {b.index: [(c.operation, c.nbytes) for c in b.collectives] * steps for b in self.buckets}
        return recorded == {index: issues for index, issues in explained.items() if issues}

    def __str__(self) -> str:
        return "\n".join([self._title(), *self._table(), *self._totals(), *(f"note: {text}" for text in self.notes)])

    def _repr_html_(self) -> str:
        import html  # a dictionary of two thousand names, for notebooks alone

        return f"<pre>{html.escape(str(self))}</pre>"

    def _title(self) -> str:
        where = f"on {_many(self.world, 'rank')}, synchronised step {self.sync_step}"
        if self.buckets:
            return f"{self.hook!r} {where}: what rank {self.rank} sends"
        return f"{type(self.strategy).__name__} {where}: no gradients on the wire"

    def _table(self) -> list[str]:
        if not self.buckets:
            return []
        header = ("bucket", "parameters", "elements", "gradients", "collective", "of", "sent")
        rows: list[tuple[str, ...]] = []
        for bucket in self.buckets:
            gradients = f"{format_bytes(bucket.nbytes)} {str(bucket.dtype).removeprefix('torch.')}"
            first = (str(bucket.index), _short(bucket.paths), f"{bucket.elements:,}", gradients)
            issued = [(c.operation, c.buffer, format_bytes(c.nbytes)) for c in bucket.collectives]
            for place, cells in enumerate(issued or [("nothing", "", format_bytes(0))]):
                rows.append((*(first if place == 0 else ("",) * len(first)), *cells))
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        to_the_right = (True, False, True, True, False, False, True)
        lines = [header, tuple("-" * width for width in widths), *rows]
        return ["", *(_line(cells, widths, to_the_right) for cells in lines), ""]

    def _totals(self) -> list[str]:
        plain = f"plain all-reduce  {format_bytes(self.plain_bytes)}"
        if not self.buckets:
            return [plain] if self.plain_bytes else []
        if math.isfinite(self.compression) and self.bytes != self.plain_bytes:
            plain += f", {self.compression:.2f} times as much"
        return [
            f"sent a step       {format_bytes(self.bytes)} in {_many(self.collectives, 'collective')}",
            plain,
            f"header            {format_bytes(self.header_bytes)} besides, for loss, weights and digest",
        ]


def format_bytes(nbytes: int) -> str:
    """Bytes in decimal units, as links are sold; small numbers exactly.

    >>> format_bytes(1200), format_bytes(48_640), format_bytes(3_303_424)
    ('1,200 B', '48.6 kB', '3.30 MB')
    """
    if nbytes < 10_000:
        return f"{nbytes:,} B"
    for unit, size in (("kB", 1e3), ("MB", 1e6), ("GB", 1e9)):
        if nbytes < 999.5 * size or unit == "GB":
            break
    value = nbytes / size
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"


def _many(count: int, name: str) -> str:
    return f"{count} {name}" if count == 1 else f"{count} {name}s"


def _short(paths: Sequence[str], limit: int = 40) -> str:
    """The paths of a bucket in a cell: all of them if they fit, else the first and the last."""
    whole = ", ".join(paths)
    if len(whole) <= limit or len(paths) == 1:
        return whole
    return f"{paths[0]} .. {paths[-1]} ({len(paths)})"


def _line(cells: Sequence[str], widths: Sequence[int], to_the_right: Sequence[bool]) -> str:
    columns = zip(cells, widths, to_the_right, strict=True)
    return "  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in columns).rstrip()


def explain(
    step: DataParallel | TrainStep, params: Tree, *batch: Any, world: int | None = None, sync_step: int | None = None
) -> Explanation:
    """What a data-parallel step will put on the wire at each synchronised step, before anything runs.

    Nothing is computed and nothing is sent: the step isn't called, and only shapes and dtypes are read. So it works in
    a world of one, for any number of ranks, and for parameters on the meta device that no memory would hold.

    Args:
        step: what :func:`ltx.data_parallel` or :func:`ltx.train_step` returned, accumulated or not.
        params, batch: the arguments that the step will be called with, of which only the parameters (the step's
            `argnums`) are looked at; so the batch may be left out behind them. Parameters may come as
            :class:`ltx.Synced`, and for a train step as its :class:`ltx.TrainState`.
        world: the number of ranks; that of the step's axis if None. Given, it is rank 0 that is explained, else this
            rank.
        sync_step: the number of synchronised steps before the one in question, which decides for hooks and strategies
            that change with the step. If None, what the state that came with the parameters has counted; else 0.

    Returns:
        An :class:`Explanation`: a row a bucket and totals, to read (``print``), to compute with, and to compare with
        what :func:`ltx.record` saw (:meth:`Explanation.matches`). Bytes are those of the ring, as in the ledger.

        Every floating or complex leaf of the parameters is counted, as if all were differentiated. Frozen ones aren't
        sent: leave them out. What isn't counted: collectives of the step itself, a strategy's work on parameters, the
        mean of the loss at steps that send no gradients, and the comparisons between ranks when they meet a step for
        the first time. Ranks whose dicts list parameters in different orders take rank 0's for their buckets.

    Raises:
        StepError: `step` isn't data parallel.
        InputError: `world` or `sync_step` isn't a number that can be.
        TreeError: the parameters aren't a tree of tensors.
        StrategyError: the hook asks for what no schedule would issue.
        UnsupportedError: the hook reads values, so that it can't be run on shapes alone; or it isn't pure, and refuses
            tensors on the meta device itself.

    Example:
        >>> import torch, ltx
        >>> params = {"w": torch.zeros(1000, 30), "b": torch.zeros(30)}
        >>> step = ltx.data_parallel(lambda p, x: (x @ p["w"] + p["b"]).sum(), ltx.DDPStrategy(comm_hook="bf16"))
        >>> print(ltx.explain(step, params, world=4))
        BF16() on 4 ranks, synchronised step 0: what rank 0 sends
        <BLANKLINE>
        bucket  parameters  elements       gradients  collective  of                  sent
        ------  ----------  --------  --------------  ----------  ---------------  -------
             0  b, w          30,030  120 kB float32  sum         bfloat16[30030]  90.1 kB
        <BLANKLINE>
        sent a step       90.1 kB in 1 collective
        plain all-reduce  180 kB, 2.00 times as much
        header            96 B besides, for loss, weights and digest
        note: under second derivatives BF16() counts as the exact mean, and sends that
    """
    inner = step.step if isinstance(step, TrainStep) else step
    if not isinstance(inner, DataParallel):
        raise StepError(
            f"explain takes a step made by ltx.data_parallel or ltx.train_step, got {type(step).__name__}. Wrap it: "
            "ltx.explain(ltx.data_parallel(step, strategy), params)."
        )
    if isinstance(step, TrainStep) and isinstance(params, TrainState):
        state: Any = params.sync_state
        params = params.params
    else:
        params, state = inner.params_of((params, *batch))
    tree.check_tensors(params, "the parameters")
    size, rank = wire.size_and_rank(inner.axis) if world is None else (_number("world", world, 1), 0)
    counted = 0 if state is None else state.checked_step()
    number = counted if sync_step is None else _number("sync_step", sync_step, 0)
    hook = inner.hook(number, training=isinstance(step, TrainStep))
    leaves = [_meta(leaf.shape, leaf.dtype) for leaf in tree.flatten(params)[0]]
    wanted = [i for i, leaf in enumerate(leaves) if leaf.is_floating_point() or leaf.is_complex()]
    paths = tree.leaf_paths(params)
    given = [tree.flatten(params)[0][i] for i in wanted]
    order = synchronise.arrival_order(params, wanted)

    def planned(hook: hooks.CommHook, states: Sequence[LeafState]) -> Plan:
        names = tuple(tuple(state) for state in states)
        axis = Axis(DEFAULT_NAME, size)
        mine = [paths[i] for i in wanted]
        return make_plan(inner.strategy, hook, axis, given, order, names, number, lambda: mine, "", None)

    plain = planned(hooks.AllReduce(), [{} for _ in wanted])
    plain_bytes = sum(wire.bytes_sent("sum", _meta((b.numel,), b.dtype), size) for b in plain.buckets)
    notes = _notes(inner, hook, size, isinstance(step, TrainStep))
    if hook is None or size == 1:
        return Explanation(inner.strategy, hook, size, rank, number, (), plain_bytes, notes)
    with _on_shapes_alone(hook, "the first state"):
        entries = inner.init(tree.unflatten(tree.flatten(params)[1], leaves)).leaves
    states = [hook.states_of(entries.get(paths[i], {})) for i in wanted]
    plan = planned(hook, states)
    buckets = tuple(
        BucketExplanation(
            bucket.index,
            tuple(paths[wanted[member]] for member in bucket.members),
            bucket.numel,
            bucket.dtype,
            bucket.numel * bucket.dtype.itemsize,
            hook,
            tuple(_collectives(plan, hook, bucket, rank, [states[member] for member in bucket.members])),
        )
        for bucket in plan.buckets
    )
    return Explanation(inner.strategy, hook, size, rank, number, buckets, plain_bytes, notes)


def _collectives(
    plan: Plan, hook: hooks.CommHook, bucket: Bucket, rank: int, states: Sequence[LeafState]
) -> list[Collective]:
    """Drive the reduction of one bucket on shapes, and write down what it asks for."""
    there = replace(bucket, leaves=tuple(replace(leaf, device=torch.device("meta")) for leaf in bucket.leaves))
    flat = _meta((bucket.numel,), hook.wire_dtype(bucket.dtype))
    tensors = [_meta(x.shape, x.dtype) for state in states for x in state.values()]
    found: list[Collective] = []

    def answer(ask: Ask) -> torch.Tensor:
        buffer, size = ask.buffer, (ask.axis or plan.axis).size
        if not buffer.numel():  # the schedules send nothing then
            return buffer
        if size == 1:
            return collective_alone(ask)
        if len(found) == hook.phases_on(plan.axis.size):
            raise StrategyError(
                f"{hook!r} asks for more than {len(found)} collectives in bucket {bucket.index}. Say how many it may "
                "ask for: phases: ClassVar[int] = ..."
            )
        match ask.operation:
            case "sum" | "exchange" | "permute":
                answered = buffer
            case "all_gather":
                answered = buffer.new_empty((size, *buffer.shape))
            case "reduce_scatter":
                answered = buffer.new_empty(buffer.shape[1:])
            case other:
                raise StrategyError(
                    f"{hook!r} asks for {other!r} in bucket {bucket.index}. A reduction may ask for sum, all_gather, "
                    "reduce_scatter, exchange and permute."
                )
        sent = wire.bytes_sent(ask.operation, buffer, size)
        found.append(Collective(ask.operation, tree.describe(buffer), sent))
        return answered

    share = replace(plan.share(there, flat, plan.states_of(there, tensors)), rank=rank)
    with _on_shapes_alone(hook, f"bucket {bucket.index}"):
        reduce_at_once(hook, plan.axis, share, answer)
    return found


@contextmanager
def _on_shapes_alone(hook: hooks.CommHook, what: str) -> Iterator[None]:
    """Say what is wrong with a hook that can't do without values."""
    try:
        yield
    except LtxError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"explain: {hook!r} can't be run on shapes alone: {what} took {type(error).__name__}: {error}. It may not "
            "read values, and the tensors that it makes belong on the device of those that it is given. What a step "
            "sends can still be counted while it runs: with ltx.record() as trace."
        ) from error


def _notes(step: DataParallel, hook: hooks.CommHook | None, size: int, trains: bool) -> tuple[str, ...]:
    strategy, notes = step.strategy, []
    if step.blocked:
        notes.append("the step's gradients are blocked (block_backward_sync)")
    elif hook is None:
        notes.append(f"{strategy!r} leaves the gradients of this step local")
    elif size == 1:
        notes.append("a world of one talks to nobody; see what others would send with world=...")
    elif not hook.averages:
        notes.append(f"{hook!r} isn't a mean, and has no derivative: second derivatives raise")
    elif not hook.exact:
        notes.append(f"under second derivatives {hook!r} counts as the exact mean, and sends that")
    if trains and strategy.talks_besides:
        notes.append(f"{type(strategy).__name__} also works on parameters, which isn't counted")
    return tuple(notes)


def _meta(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def _number(name: str, value: Any, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"explain: {name} must be an int of at least {least}, got {value!r}.")
    return value
