"""Each operation under each transform, on each backing, eagerly and compiled, against plain torch in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import ltx
from ltx.runtime.pool import Pool

from .table import OPS, TRANSFORMS, Op, Outcome, Transform, attempt, draw, on_one_rank

Ranks = Callable[[int], Pool]
Apply = Callable[[Op, Transform, Tensor, Tensor, str | None], Outcome]


@dataclass(frozen=True)
class Backing:
    """What an axis' ranks are. `apply` is None for processes: they do all transforms of an operation in one run."""

    name: str
    size: int
    apply: Apply | None = None
    plain: bool = True  # autograd without torch.func works around it


def _simulated(op: Op, transform: Transform, xs: Tensor, ts: Tensor, backend: str | None) -> Outcome:
    return attempt(ltx.vmap(lambda x, t: transform.per_rank(op.output, x, t)), xs, ts, backend)


def _from_outside(op: Op, transform: Transform, xs: Tensor, ts: Tensor, backend: str | None) -> Outcome:
    """The transform of all simulated ranks together."""
    return attempt(lambda xs, ts: transform.reference(ltx.vmap(op.output), xs, ts), xs, ts, backend)


def _alone(op: Op, transform: Transform, xs: Tensor, ts: Tensor, backend: str | None) -> Outcome:
    return attempt(lambda xs, ts: transform.per_rank(op.output, xs[0], ts[0]).unsqueeze(0), xs, ts, backend)


PROCESSES = Backing("2 processes", 2)
SIMULATED = Backing("2 simulated", 2, _simulated, plain=False)
ALONE = Backing("alone", 1, _alone)
BACKINGS = (
    PROCESSES,
    SIMULATED,
    Backing("3 simulated", 3, _simulated, plain=False),
    Backing("2 from outside", 2, _from_outside),
    ALONE,
)

EAGER, AOT, INDUCTOR = None, "aot_eager", "inductor"
EVERY_TRANSFORM = "data_parallel"  # also when compiled, on processes
WITH_INDUCTOR = (
    ("psum", "grad"),
    ("data_parallel", "hvp"),
    ("accumulate", "grad"),
)


@dataclass(frozen=True)
class Row:
    """One test: a cell of op x transform x backing x eager or compiled."""

    backing: Backing
    mode: str | None
    op: Op
    transform: Transform

    def __str__(self) -> str:
        names = (self.backing.name, self.mode or "eager", self.op.name, self.transform.name)
        return "-".join(names).replace(" ", "_")


def _is_in_table(backing: Backing, mode: str | None, op: Op, transform: Transform) -> bool:
    if mode is EAGER:
        return (backing.plain or not transform.plain) and (op.from_outside or backing.apply is not _from_outside)
    if mode == INDUCTOR:
        return backing is PROCESSES and (op.name, transform.name) in WITH_INDUCTOR
    if op.name == EVERY_TRANSFORM:
        return (
            transform.name == "hvp" if backing in (SIMULATED, ALONE) else backing is PROCESSES and not transform.plain
        )
    return backing is PROCESSES and transform.name in op.compiled


def _is_in_full_table(backing: Backing, mode: str | None, op: Op, transform: Transform) -> bool:
    """Compiled, every operation under every transform; takes most of an hour, so only with --full."""
    return mode is not EAGER and backing is PROCESSES and not transform.plain


def _rows(within: Callable[[Backing, str | None, Op, Transform], bool]) -> list[Row]:
    return [
        Row(backing, mode, op, transform)
        for mode in (EAGER, AOT, INDUCTOR)
        for backing in BACKINGS
        for op in OPS
        for transform in TRANSFORMS
        if within(backing, mode, op, transform)
    ]


ROWS = _rows(_is_in_table)
FULL_ROWS = [row for row in _rows(_is_in_full_table) if row not in ROWS]
MARKS = {EAGER: (), AOT: (pytest.mark.slow_compile,), INDUCTOR: (pytest.mark.slow_compile, pytest.mark.inductor)}


@pytest.fixture(scope="module")
def outcome(ranks: Ranks, drawn: int) -> Callable[[Row], Outcome]:
    """What a row gives, on all ranks. Processes do all transforms of an operation at the first one's turn."""
    done: dict[tuple[str, str | None, str], dict[str, Outcome]] = {}

    def on_processes(row: Row, xs: Tensor, ts: Tensor) -> dict[str, Outcome]:
        group = [r for r in ROWS if (r.backing, r.mode, r.op) == (row.backing, row.mode, row.op)]
        wanted = tuple(r.transform.name for r in (group if row in group else [row]))
        by_rank = ranks(row.backing.size).run(on_one_rank, row.op.name, wanted, xs, ts, row.mode)
        return {name: _stacked([by_name[name] for by_name in by_rank]) for name in wanted}

    def get(row: Row) -> Outcome:
        xs, ts = draw(row.op, row.backing.size, drawn)
        if row.backing.apply is not None:
            return row.backing.apply(row.op, row.transform, xs, ts, row.mode)
        found = done.setdefault((row.backing.name, row.mode, row.op.name), {})
        if row.transform.name not in found:
            found.update(on_processes(row, xs, ts))
        return found[row.transform.name]

    return get


def _stacked(by_rank: list[Outcome]) -> Outcome:
    return next((o for o in by_rank if isinstance(o, Exception)), None) or torch.stack(by_rank)


def _check(got: Outcome, want: Tensor, tolerance: float) -> None:
    if isinstance(got, Exception):
        raise got
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance * max(1.0, float(want.abs().max())))


@pytest.mark.parametrize(
    "row",
    [
        *(pytest.param(row, id=str(row), marks=MARKS[row.mode]) for row in ROWS),
        *(pytest.param(row, id=str(row), marks=(*MARKS[row.mode], pytest.mark.full)) for row in FULL_ROWS),
    ],
)
def test_conformance(row: Row, outcome: Callable[[Row], Outcome], drawn: int) -> None:
    print(f"LTX_SEED={drawn} repeats this test's random numbers")
    xs, ts = draw(row.op, row.backing.size, drawn)
    rounding = row.op.rounding if row.transform.gradient else 0.0
    _check(outcome(row), row.transform.reference(row.op.outputs, xs, ts), max(rounding, 1e-9))


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name.replace(" ", "_"))
def test_simulated_ranks_give_what_processes_give(op: Op, outcome: Callable[[Row], Outcome]) -> None:
    """Also where the reference leaves room: hooks that round give the same bits."""
    for transform in TRANSFORMS:
        if not transform.plain:
            simulated = outcome(Row(SIMULATED, EAGER, op, transform))
            _check(simulated, outcome(Row(PROCESSES, EAGER, op, transform)), 1e-9)


def test_names_are_unique() -> None:
    assert len({str(row) for row in ROWS}) == len(ROWS)
