"""Every dtype of torch under every collective: one outcome on shared memory, sockets, simulated ranks and alone.

What only moves is of any dtype. Sums and extrema are those of the dtypes that torch adds up; of others they are refused
by name, before anything is sent, so that what follows is right.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from tests.contract.conformance.table import ring
from tests.kinds import OnNewAxis, Ranks
from tests.train_on import said

# Torch tells that it has few operators for complex32 and bcomplex32; ltx needs none.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:BComplex32")

DTYPES = sorted({x for x in vars(torch).values() if isinstance(x, torch.dtype)}, key=str)
QUANTIZED = (torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4)
PLAIN = [dtype for dtype in DTYPES if dtype not in QUANTIZED]
WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)

SUMS = (*WHOLE, *REAL, *COMPLEX)
EXTREMA = (*WHOLE, *REAL)
BITS = (*WHOLE, *UNSIGNED)


def total(xs: Tensor) -> Tensor:
    return xs.sum(0, dtype=torch.int64 if xs.dtype == torch.bool else xs.dtype)


def product(xs: Tensor) -> Tensor:
    return xs.prod(0, dtype=torch.int64 if xs.dtype == torch.bool else xs.dtype)


def only_at(y: Tensor, rank: int, at: int) -> Tensor:
    return y if rank == at else torch.zeros_like(y)


#: name: (what a rank calls on a tensor of shape (2, 2), the same of all ranks' stacked tensors on rank r, its dtypes)
OPS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor, int], Tensor], Any]] = {
    "psum": (ltx.psum, lambda xs, r: total(xs), SUMS),
    "pmean": (ltx.pmean, lambda xs, r: total(xs) / len(xs), SUMS),
    "psum_scatter": (lambda x: ltx.psum_scatter(x, tiled=True), lambda xs, r: total(xs).chunk(len(xs))[r], SUMS),
    "pmax": (ltx.pmax, lambda xs, r: xs.amax(0), EXTREMA),
    "pmin": (ltx.pmin, lambda xs, r: xs.amin(0), EXTREMA),
    "product": (lambda x: ltx.reduce(x, "product"), lambda xs, r: product(xs), SUMS),
    "bor": (lambda x: ltx.reduce(x, "bor"), lambda xs, r: xs[0] | xs[-1], BITS),
    "pvary": (ltx.pvary, lambda xs, r: xs[r], PLAIN),
    "all_gather": (ltx.all_gather, lambda xs, r: xs, PLAIN),
    "all_gather at the end": (lambda x: ltx.all_gather(x, dim=-1), lambda xs, r: xs.movedim(0, -1), PLAIN),
    "broadcast": (lambda x: ltx.broadcast(x, ltx.axis_size() - 1), lambda xs, r: xs[-1], PLAIN),
    "all_to_all": (
        lambda x: ltx.all_to_all(x, 0, 1),
        lambda xs, r: torch.cat([x.chunk(len(xs))[r] for x in xs], 1),
        PLAIN,
    ),
    "gather": (lambda x: ltx.gather(x, ltx.axis_size() - 1), lambda xs, r: only_at(xs, r, len(xs) - 1), PLAIN),
    "scatter": (lambda x: ltx.scatter(x, tiled=True), lambda xs, r: xs[0].chunk(len(xs))[r], PLAIN),
    "psum_to": (ltx.psum_to, lambda xs, r: only_at(total(xs), r, 0), SUMS),
    "ppermute": (lambda x: ltx.ppermute(x, ring(ltx.axis_size())), lambda xs, r: xs[r - 1], PLAIN),
    "gather_all_tensors": (lambda x: torch.stack(ltx.gather_all_tensors(x)), lambda xs, r: xs, PLAIN),
    "broadcast_object": (ltx.broadcast_object, lambda xs, r: xs[0], PLAIN),
}
REAL_RANKS = ("gather_all_tensors", "broadcast_object")
CASES = [(name, dtype) for name in OPS for dtype in PLAIN]


def given(dtype: torch.dtype) -> Tensor:
    """Each of two ranks' tensors, by their bytes: small numbers where there are any."""
    numbers = torch.tensor([[[0, 1], [2, 3]], [[1, 0], [1, 2]]])
    if dtype in (*SUMS, *UNSIGNED):
        return numbers.to(dtype)
    spread = torch.arange(8 * dtype.itemsize).reshape(2, 2, 2, dtype.itemsize) % 4 + numbers.unsqueeze(-1)
    return spread.to(torch.uint8).view(dtype).squeeze(-1)


def bytes_of(x: Tensor) -> Tensor:
    return x.unsqueeze(-1).view(torch.uint8)


def outcome(call: Callable[[Tensor], Any], x: Tensor) -> Any:
    """(dtype, bytes) of a result: torch can't compare or print all dtypes. Or the error's class and text."""
    try:
        y = call(x)
    except ltx.errors.LtxError as error:
        return type(error).__name__, str(error)
    return y.dtype, bytes_of(y)


def on_one_rank(tensors: dict[torch.dtype, Tensor]) -> dict[tuple[str, torch.dtype], Any]:
    rank, found = int(ltx.axis_index()), {}
    for name, dtype in CASES:
        found[name, dtype] = outcome(OPS[name][0], tensors[dtype].view(torch.uint8)[rank].view(dtype))
        assert ltx.psum(torch.tensor(float(rank))) == sum(range(ltx.axis_size())), (name, dtype)
    return found


@pytest.fixture(scope="module")
def by_backing(ranks: Ranks, on_new_axis: OnNewAxis) -> Callable[[str], list[dict[tuple[str, Any], Any]]]:
    tensors = {dtype: given(dtype) for dtype in PLAIN}
    ones = {dtype: x[:1] for dtype, x in tensors.items()}
    run: dict[str, Callable[[], Any]] = {
        "shared memory": lambda: ranks(2).run(on_one_rank, tensors),
        "sockets": lambda: on_new_axis(lambda: on_one_rank(tensors), timeout_s=30.0, sockets=True),
        "one process": lambda: ranks(1).run(on_one_rank, ones),
        "alone": lambda: [on_one_rank(ones)],
    }
    return cache(lambda backing: list(run[backing]()))


def check(name: str, dtype: torch.dtype, rank: int, n: int, got: Any) -> None:
    _, reference, dtypes = OPS[name]
    if dtype not in dtypes:
        assert got[0] in ("UnsupportedError", "TreeError"), got
        assert str(dtype).removeprefix("torch.").split("_")[0] in got[1], got
        assert name in got[1] or name in ("pmean", "product", "bor"), got
        return
    xs = given(dtype)[:n]
    if dtype in (*SUMS, *UNSIGNED):
        want = reference(xs, rank)
        assert got[0] == want.dtype, got
        assert torch.equal(got[1], bytes_of(want.contiguous())), got
    else:  # of bytes: what moves is the same
        moved = reference(xs.view(torch.uint8).reshape(n, 2, 2, -1).to(torch.int64), rank) if xs.itemsize == 1 else None
        assert got[0] == dtype
        assert moved is None or torch.equal(got[1].flatten().long(), moved.flatten())


@pytest.mark.parametrize(
    "backing", ["shared memory", "sockets", pytest.param("one process", marks=pytest.mark.full), "alone"]
)
@pytest.mark.parametrize("name", OPS)
def test_outcome(name: str, backing: str, by_backing: Callable[[str], list[Any]]) -> None:
    by_rank = by_backing(backing)
    for rank, found in enumerate(by_rank):
        for dtype in PLAIN:
            check(name, dtype, rank, len(by_rank), found[name, dtype])


@pytest.mark.parametrize("name", [name for name in OPS if name not in REAL_RANKS])
def test_simulated_ranks(name: str) -> None:
    for dtype in PLAIN:
        xs = given(dtype)
        try:
            ys = ltx.vmap(OPS[name][0])(xs)
            by_rank = [(ys.dtype, bytes_of(y)) for y in ys.unbind()]
        except ltx.errors.LtxError as error:
            by_rank = [(type(error).__name__, str(error))] * 2
        for rank, got in enumerate(by_rank):
            check(name, dtype, rank, 2, got)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("psum", torch.uint16),
        ("psum_scatter", torch.float8_e4m3fn),
        ("pmax", torch.complex64),
        ("pmin", torch.uint32),
        ("adasum", torch.int32),
    ],
)
def test_compiled_calls_are_refused_as_eager_ones_are(name: str, dtype: torch.dtype) -> None:
    collective, x = getattr(ltx, name), torch.ones(1, dtype=dtype)
    text = said(ltx.errors.LtxError, collective, x)
    assert text in said(
        torch._dynamo.exc.InternalTorchDynamoError,
        lambda: torch.compile(collective, backend="eager", fullgraph=True)(x),
    )


@pytest.mark.parametrize("dtype", [*UNSIGNED, torch.float8_e4m3fn, torch.float8_e5m2, torch.bits8, torch.uint4])
def test_pools_carry_every_dtype(dtype: torch.dtype, ranks: Ranks) -> None:
    x = given(dtype)[0].t()
    for y, moved in ranks(2).run(lambda x: (x, bytes_of(x)), x):
        assert y.dtype == dtype
        assert torch.equal(moved, bytes_of(x))
        assert torch.equal(bytes_of(y), bytes_of(x))


def test_int16_in_a_compiled_graph(ranks: Ranks) -> None:
    """Neither gloo nor NCCL knows it."""
    names, xs = ("psum", "all_gather"), given(torch.int16)

    def run(xs: Tensor) -> list[Tensor]:
        compiled = torch.compile(lambda x: [OPS[name][0](x) for name in names], fullgraph=True, backend="aot_eager")
        results: list[Tensor] = compiled(xs[int(ltx.axis_index())])
        assert all(type(y) is Tensor for y in results), "none is pending"
        return results

    for rank, found in enumerate(ranks(2).run(run, xs)):
        for name, got in zip(names, found, strict=True):
            torch.testing.assert_close(got, OPS[name][1](xs, rank), rtol=0, atol=0)
