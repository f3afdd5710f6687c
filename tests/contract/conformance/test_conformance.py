"""Each operation under each transform, on each backing, eagerly and compiled, against plain torch; and as in JAX."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vjp

import ltx
from tests.contract.conformance.table import (
    OPS,
    ROUNDING,
    TRANSFORMS,
    Fn,
    Op,
    Outcome,
    Transform,
    attempt,
    draw,
    on_one_rank,
)
from tests.covering import covering
from tests.kinds import Ranks

Apply = Callable[[Fn, Transform, Tensor, Tensor, str | None], Outcome]


@dataclass(frozen=True)
class Backing:
    """What an axis' ranks are. `apply` is None for processes: they do many rows in one run."""

    name: str
    size: int
    apply: Apply | None = None
    plain: bool = True  # autograd without torch.func works around it


def _simulated(output: Fn, transform: Transform, xs: Tensor, ts: Tensor, backend: str | None) -> Outcome:
    return attempt(ltx.vmap(lambda x, t: transform.per_rank(output, x, t)), xs, ts, backend)


def _from_outside(output: Fn, transform: Transform, xs: Tensor, ts: Tensor, backend: str | None) -> Outcome:
    """The transform of all simulated ranks together."""
    return attempt(lambda xs, ts: transform.reference(ltx.vmap(output), xs, ts), xs, ts, backend)


def _alone(output: Fn, transform: Transform, xs: Tensor, ts: Tensor, backend: str | None) -> Outcome:
    return attempt(lambda xs, ts: transform.per_rank(output, xs[0], ts[0]).unsqueeze(0), xs, ts, backend)


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
WITH_INDUCTOR = (("psum", "grad"), ("data_parallel", "hvp"), ("accumulate", "grad"))


@dataclass(frozen=True)
class Row:
    """One test: a cell of op x transform x backing x eager or compiled x dtype x whether ranks' losses are equal."""

    backing: Backing
    mode: str | None
    op: Op
    transform: Transform
    dtype: torch.dtype = torch.float64
    equal: bool = False

    def __str__(self) -> str:
        names = [self.backing.name, self.mode or "eager", self.op.name, self.transform.name]
        names += [str(self.dtype).removeprefix("torch.")] * (self.dtype != torch.float64)
        names += ["equal losses"] * self.equal
        return "-".join(names).replace(" ", "_")

    @property
    def run(self) -> tuple[str, str | None, str, torch.dtype, bool]:
        """What processes do in one run: all transforms of an operation; of the few in other dtypes, all operations."""
        few = self.equal or self.dtype != torch.float64
        return self.backing.name, self.mode, "" if few else self.op.name, self.dtype, self.equal

    @property
    def cell(self) -> tuple[str, str]:
        """Where in a run."""
        return self.op.name, self.transform.name


MET = [(op.name, transform.name) for op in OPS for transform in TRANSFORMS if not transform.plain]
MET = [MET[i] for i in covering(MET, 1)]


def _is_in_table(backing: Backing, mode: str | None, op: Op, transform: Transform) -> bool:
    if op.paired and backing.size == 3:
        return False
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
    """Compiled, every operation, and under some operation every transform: a graph breaks at either of them."""
    return mode == AOT and backing is PROCESSES and (op.name, transform.name) in MET


def _rows(within: Callable[[Backing, str | None, Op, Transform], bool]) -> list[Row]:
    return [
        Row(backing, mode, op, transform)
        for mode in (EAGER, AOT, INDUCTOR)
        for backing in BACKINGS
        for op in OPS
        for transform in TRANSFORMS
        if within(backing, mode, op, transform)
    ]


def _variants() -> list[Row]:
    """Eagerly: ranks' losses equal, as they are in data parallelism, and the other dtypes.

    Of these, processes, which take ten times as long as simulated ranks, do those in which every operation, transform
    and dtype meets every other.
    """
    found, narrow = [], list[Row]()
    for row in _rows(lambda backing, mode, op, transform: mode is EAGER and _is_in_table(backing, mode, op, transform)):
        value = row.transform.name == "value"
        if row.backing.size > 1 and not value:
            found.append(replace(row, equal=True))
        if row.backing in (PROCESSES, SIMULATED, ALONE):
            dtypes = [*row.op.dtypes, *(row.op.whole if value else ())]
            narrow += [replace(row, dtype=dtype) for dtype in dtypes if not (dtype.is_complex and row.transform.real)]
    between = [i for i, row in enumerate(narrow) if row.backing is PROCESSES and not _is_representative(row)]
    met = covering([(narrow[i].op.name, narrow[i].transform.name, narrow[i].dtype) for i in between])
    left = set(between) - {between[k] for k in met}
    return [*found, *(row for i, row in enumerate(narrow) if i not in left)]


def _is_representative(row: Row) -> bool:
    """The variants that are always run: reverse mode if losses are equal, forward over reverse mode in each dtype."""
    if row.equal:
        return row.op.name == "psum" or (row.transform.name == "grad" and row.backing in (PROCESSES, SIMULATED))
    return row.transform.name == ("value" if row.dtype in row.op.whole else "hvp")


VARIANTS = _variants()
ROWS = [*_rows(_is_in_table), *filter(_is_representative, VARIANTS)]
FULL_ROWS = [
    *(row for row in _rows(_is_in_full_table) if row not in ROWS),
    *(row for row in VARIANTS if not _is_representative(row)),
]
MARKS = {
    EAGER: (),
    AOT: (pytest.mark.slow_compile,),
    INDUCTOR: (pytest.mark.slow_compile, pytest.mark.inductor, pytest.mark.timeout(260)),
}
#: The compiled rows of the fast suite: a collective, and a second derivative of a step. Inductor's compiler is slow.
COMPILED = {("psum", "grad", AOT), ("data_parallel", "hvp", AOT)}
# A second derivative takes Inductor a minute where nothing is in its cache.
LIMITS_S = {INDUCTOR: 250.0}
FAST = {row for row in ROWS if row.mode is EAGER or (*row.cell, row.mode) in COMPILED}


@pytest.fixture(scope="module")
def outcome(ranks: Ranks, drawn: int, request: pytest.FixtureRequest) -> Callable[[Row], Outcome]:
    """What a row gives, on all ranks. Processes do all of a run's rows that this session tests at the first's turn."""
    done: dict[Any, dict[tuple[str, str], Outcome]] = {}
    tested = [
        item.callspec.params["row"]
        for item in request.session.items
        if getattr(item, "function", None) is test_conformance and not item.get_closest_marker("full")
    ]

    def on_processes(row: Row) -> dict[tuple[str, str], Outcome]:
        run = [r for r in tested if r.run == row.run]
        # Where only some of the table are tested, such as a shard, an operation's rows are done together.
        wanted = (
            run if row in run else [replace(row, transform=each) for each in TRANSFORMS if row.mode is EAGER] or [row]
        )
        cells = [(*r.cell, *draw(r.op, r.backing.size, drawn, r.dtype)) for r in wanted]
        by_rank = ranks(row.backing.size).run(on_one_rank, cells, row.mode, row.equal, timeout_s=LIMITS_S.get(row.mode))
        return {r.cell: _stacked(list(each)) for r, *each in zip(wanted, *by_rank, strict=True)}

    def get(row: Row) -> Outcome:
        if row.backing.apply is not None:
            xs, ts = draw(row.op, row.backing.size, drawn, row.dtype)
            return row.backing.apply(partial(row.op.output, equal=row.equal), row.transform, xs, ts, row.mode)
        found = done.setdefault(row.run, {})
        if row.cell not in found:
            found.update(on_processes(row))
        return found[row.cell]

    return get


def _stacked(by_rank: list[Outcome]) -> Outcome:
    return next((o for o in by_rank if isinstance(o, Exception)), None) or torch.stack(by_rank)


def _check(got: Outcome, want: Tensor, tolerance: float) -> None:
    if isinstance(got, Exception):
        raise got
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance * max(1.0, float(want.abs().max())))


@pytest.mark.covering(
    of=lambda row: (row.backing.name, row.mode, row.op.name, row.transform.name, row.dtype, row.equal)
)
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=str(row), marks=MARKS[row.mode] if row in FAST else (*MARKS[row.mode], pytest.mark.full))
        for row in [*ROWS, *FULL_ROWS]
    ],
)
def test_conformance(row: Row, outcome: Callable[[Row], Outcome], drawn: int) -> None:
    print(f"LTX_SEED={drawn} repeats this test's random numbers")
    # What is expected is computed in float64, of the numbers that the row's dtype has.
    exact = torch.complex128 if row.dtype.is_complex else torch.float64
    xs, ts = (z.to(exact) for z in draw(row.op, row.backing.size, drawn, row.dtype))
    want = row.transform.reference(partial(row.op.outputs, equal=row.equal), xs, ts)
    got = outcome(row)
    rounding = max(ROUNDING[row.dtype], row.op.rounding if row.transform.gradient else 0.0)
    _check(got.to(want.dtype) if isinstance(got, Tensor) else got, want, rounding)


@pytest.mark.full
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name.replace(" ", "_"))
def test_simulated_ranks_give_what_processes_give(op: Op, outcome: Callable[[Row], Outcome]) -> None:
    """Also where the reference leaves room: hooks that round give the same bits."""
    for transform in TRANSFORMS:
        if not transform.plain:
            _check(outcome(Row(SIMULATED, EAGER, op, transform)), outcome(Row(PROCESSES, EAGER, op, transform)), 1e-9)


def test_names_are_unique() -> None:
    assert len({str(row) for row in [*ROWS, *FULL_ROWS]}) == len(ROWS) + len(FULL_ROWS)


JaxCall = Callable[[Tensor], Tensor]
JaxRow = dict[str, Any]
Values = dict[str, Tensor]

COLLECTIVES = (ltx.psum, ltx.pmean, ltx.pmax, ltx.pmin, ltx.all_gather, ltx.psum_scatter, ltx.ppermute, ltx.all_to_all)
#: op -> ltx's call on one rank
CALLS: dict[str, Callable[..., Tensor]] = {
    **{collective.__name__: collective for collective in COLLECTIVES},
    "axis_index": lambda x: x * ltx.axis_index(),
}
JAX_OPS = list(CALLS)

GIVEN = ("input", "cotangent", "tangent")
WANTED = ("output", "gradient", "jvp", "curved", "hvp")


@cache
def table() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("jax_table.json").read_text(encoding="utf-8"))


def rows(op: str, n: int) -> list[JaxRow]:
    found = [row for row in table()["rows"] if (row["op"], row["n"]) == (op, n)]
    assert found, f"jax_table.json has no row of {op} on {n} ranks"
    return found


def tensors(row: JaxRow, names: tuple[str, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.tensor(row[name], dtype=torch.float64) for name in names)


def call(row: JaxRow) -> JaxCall:
    arguments = {"axis_index_groups" if name == "groups" else name: value for name, value in row["args"].items()}
    return lambda x: CALLS[row["op"]](x, **arguments)


def derivatives(f: JaxCall, x: Tensor, bar: Tensor, dot: Tensor) -> Values:
    """All that a row has, of one rank's `f` or of an `f` of all ranks' stacks: the convention makes them one."""

    def curved(x: Tensor) -> Tensor:
        return (bar * torch.sin(f(x**2))).sum()

    output, transpose = vjp(f, x)
    return {
        "output": output,
        "gradient": transpose(bar)[0],
        "jvp": jvp(f, (x,), (dot,))[1],
        "curved": grad(curved)(x),
        "hvp": grad(lambda x: (dot * grad(curved)(x)).sum())(x),
        "hvp, forward over reverse": jvp(grad(curved), (x,), (dot,))[1],
    }


def check(row: JaxRow, got: Values) -> None:
    want = dict(zip(WANTED, tensors(row, WANTED), strict=True))
    want["hvp, forward over reverse"] = want["hvp"]
    assert got.keys() == want.keys()
    for name in want:
        where = f"{row['op']} {row['args']} on {row['n']} ranks: {name}"
        torch.testing.assert_close(
            # atol for what cancels: the table's numbers are of the order of 1 to 100.
            got[name],
            want[name],
            rtol=1e-12,
            atol=1e-13,
            msg=lambda text, where=where: f"{where}: {text}",
        )


@pytest.mark.full(but=4)
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("op", JAX_OPS)
def test_jax_on_simulated_ranks(op: str, n: int) -> None:
    for row in rows(op, n):
        check(row, ltx.vmap(partial(derivatives, call(row)))(*tensors(row, GIVEN)))


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("op", JAX_OPS)
def test_jax_on_simulated_ranks_from_outside(op: str, n: int) -> None:
    """As JAX was asked: derivatives around the mapped function."""
    for row in rows(op, n):
        check(row, derivatives(ltx.vmap(call(row)), *tensors(row, GIVEN)))


@pytest.mark.full(but=3)
@pytest.mark.covering(1)
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("op", JAX_OPS)
def test_jax_on_processes(op: str, n: int, ranks: Ranks) -> None:
    def on_one_rank(table_rows: list[JaxRow]) -> list[Values]:
        rank = int(ltx.axis_index())
        return [derivatives(call(row), *(stack[rank] for stack in tensors(row, GIVEN))) for row in table_rows]

    by_rank = ranks(n).run(on_one_rank, rows(op, n))
    for i, row in enumerate(rows(op, n)):
        check(row, {name: torch.stack([values[i][name] for values in by_rank]) for name in by_rank[0][i]})


def test_every_op_of_the_table_is_called() -> None:
    assert {row["op"] for row in table()["rows"]} == set(CALLS)
