"""The cases of Horovod's tests for torch: collectives, their gradients, what they refuse, the optimizer, Adasum.

After test/parallel/test_torch.py and test_adasum_pytorch.py. Horovod's gradient of allgather and broadcast is the mean
over ranks, that of a summing reducescatter n times ltx's: ``grad_scale="mean"``. Sums, extrema and moves of every
dtype, scaled ones, and gradients of sums are rows of tests/contract/conformance; what the optimizer does without
clipping of strategies/table.py; synchronised batch norm is in tests/contract/nn.

Left out, as ltx has no way to say it:

* duplicate names, ``poll`` and ``synchronize``, ``skip_synchronize``, the warning of two synchronisations: calls have
  no names or handles, and a step is one function.
* in-place forms: collectives are pure (each case asserts that inputs stay as they are).
* one rank with a CPU tensor and one with a GPU's: needs two kinds of device.
* ``join`` under allgather and broadcast: ranks that are done go on calling the step, so there is nothing to refuse.
* named_parameters that are missing, duplicate or no pairs: parameters are a tree.
* gradients of min, max and product by the same operation: wrong in Horovod; ltx has the true ones.
* averages of integers in a sum's own division are ``ltx.reduce(keep_dtype=True)``; ``pmean`` gives floats.
* reinitialisation, the timeline's API, process sets that are added while ranks run: tests/internal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ltx
from ltx.errors import AxisError, CollectiveError, RankMismatchError, TreeError
from tests import inside
from tests.contract.peers.cases import (
    Case,
    Cases,
    Ranks,
    Refusal,
    check,
    failures,
    failures_simulated,
    on_all,
    on_rank,
    randn,
    the_sum,
    whole,
    worlds_of,
)

DTYPES = (torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64)
REAL = (torch.float32, torch.float64)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def total(xs: list[Tensor]) -> Tensor:
    return torch.stack(xs).sum(0, dtype=xs[0].dtype)


def truncated_mean(xs: list[Tensor]) -> Tensor:
    """Horovod's scaling: in float64, back to the dtype towards zero."""
    if xs[0].is_floating_point():
        return total(xs) / len(xs)
    return (total(xs).double() / len(xs)).trunc().to(xs[0].dtype)


# --- allreduce --------------------------------------------------------------------------------------------------------

ALLREDUCE: dict[str, Case | Refusal] = {}
for dtype in DTYPES:
    ALLREDUCE[f"allreduce, average, {name_of(dtype)}"] = Case(
        lambda x: ltx.reduce(x, "avg", keep_dtype=True),
        lambda xs: on_all(truncated_mean(xs), len(xs)),
        whole(17, dtype=dtype),
        worlds=(2, 3),
        tolerance=None if dtype.is_floating_point else 0,
    )


def group_of(n: int) -> list[dict[str, Tensor]]:
    """A group of tensors of several shapes and dtypes for each rank."""
    return [
        {
            "a": torch.randn(17, dtype=torch.float64),
            "b": torch.randint(-9, 9, (3, 4)),
            "c": torch.randn(2, 3, 4),
            "d": torch.randn((), dtype=torch.float64),
            "e": torch.randn(0, 4),
        }
        for _ in range(n)
    ]


def each(f: Callable[[list[Tensor]], Tensor], groups: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    return on_all({key: f([group[key] for group in groups]) for key in groups[0]}, len(groups))


ALLREDUCE |= {
    "grouped allreduce, sum": Case(ltx.psum, lambda gs: each(total, gs), group_of, gradient=the_sum, worlds=(2, 3)),
    "grouped allreduce, average": Case(
        lambda g: ltx.reduce(g, "mean", keep_dtype=True), lambda gs: each(truncated_mean, gs), group_of, worlds=(2, 3)
    ),
    "grouped allreduce, min": Case(ltx.pmin, lambda gs: each(lambda xs: torch.stack(xs).amin(0), gs), group_of),
    "many tensors at once": Case(
        ltx.psum,
        lambda gs: on_all([total(list(xs)) for xs in zip(*gs, strict=True)], len(gs)),
        lambda n: [[torch.randn(k % 17 + 1) for k in range(100)] for _ in range(n)],
    ),
}

# --- allgather, broadcast ---------------------------------------------------------------------------------------------

#: Rows of each rank's part, as many as three ranks have; Horovod's own are [17, 32, 81, ...].
ROWS = (17, 32, 5)


def parts(*rest: int, dtype: torch.dtype = torch.float64) -> Callable[[int], list[Tensor]]:
    return lambda n: [(torch.randn(ROWS[r], *rest, dtype=torch.float64) * 9).to(dtype) for r in range(n)]


def a_mean(n: int) -> float:
    return 1 / n


MOVES: dict[str, Case | Refusal] = {}
for dtype in (*DTYPES, torch.bool, torch.bfloat16):
    MOVES |= {
        f"allgather of rows that differ in number, {name_of(dtype)}": Case(
            lambda x: torch.cat(ltx.gather_all_tensors(x)),
            lambda xs: on_all(torch.cat(xs), len(xs)),
            parts(3, dtype=dtype),
            simulated=(),
        ),
        f"allgather of announced rows, {name_of(dtype)}": Case(
            lambda x: ltx.all_gather(x, tiled=True, splits=ROWS),
            lambda xs: on_all(torch.cat(xs), len(xs)),
            parts(2, 2, dtype=dtype),
            simulated=(),
        ),
    }
MOVES |= {
    "allgather, gradient": Case(
        lambda x: ltx.all_gather(x, tiled=True, grad_scale="mean"),
        lambda xs: on_all(torch.cat(xs), len(xs)),
        randn(17, 3),
        gradient=a_mean,
        worlds=(2, 3),
    ),
    "allgather of announced rows, gradient": Case(
        lambda x: ltx.all_gather(x, tiled=True, splits=ROWS, grad_scale="mean"),
        lambda xs: on_all(torch.cat(xs), len(xs)),
        parts(3),
        gradient=a_mean,
        simulated=(),
    ),
    "allgather of rows that differ in number, gradient": Case(
        lambda x: torch.cat(ltx.gather_all_tensors(x)),
        lambda xs: on_all(torch.cat(xs), len(xs)),
        parts(3),
        gradient=the_sum,
        simulated=(),
    ),
    "grouped allgather": Case(
        lambda g: ltx.all_gather({"a": g["a"], "b": g["b"]}, tiled=True),
        lambda gs: on_all({key: torch.cat([g[key] for g in gs]) for key in ("a", "b")}, len(gs)),
        lambda n: [{key: g[key] for key in ("a", "b")} for g in group_of(n)],
        gradient=the_sum,
    ),
    "broadcast, gradient": Case(
        lambda x: ltx.broadcast(x, 1, grad_scale="mean"),
        lambda xs: on_all(xs[1], len(xs)),
        randn(17, 2),
        gradient=a_mean,
        worlds=(2, 3),
    ),
}

# --- alltoall ---------------------------------------------------------------------------------------------------------


def sends(n: int) -> list[Tensor]:
    """Rank r sends i + 1 rows of the number r to rank i."""
    return [torch.full((n * (n + 1) // 2, 4), float(rank), dtype=torch.float64) for rank in range(n)]


def by_splits(xs: list[Tensor], splits: list[list[int]]) -> list[Any]:
    """What each rank receives, and how many rows from whom."""
    n = len(xs)
    chunks = [x.split(of_rank) for x, of_rank in zip(xs, splits, strict=True)]
    return [
        (torch.cat([chunks[s][r] for s in range(n)]), tuple(torch.tensor(splits[s][r]) for s in range(n)))
        for r in range(n)
    ]


def alltoallv(x: Tensor, splits: list[int]) -> Any:
    received, lengths = ltx.all_to_all(x, 0, 0, splits=splits)
    return received, tuple(torch.tensor(length) for length in lengths)


#: Row r of the table is how rank r splits; zeros, and a rank that sends all to one.
TABLE = [[2, 0, 3], [0, 0, 4], [1, 1, 0]]

for dtype in (*DTYPES, torch.bool):
    MOVES[f"alltoall with splits, {name_of(dtype)}"] = Case(
        lambda x: alltoallv(x, TABLE[ltx.axis_index()]),
        lambda xs: by_splits(xs, TABLE),
        lambda n, dtype=dtype: [torch.randint(0, 9, (sum(row), 2)).to(dtype) for row in TABLE],
        simulated=(),
    )
MOVES |= {
    "alltoall, i + 1 rows to rank i": Case(
        lambda x: alltoallv(x, list(range(1, ltx.axis_size() + 1))),
        lambda xs: by_splits(xs, [list(range(1, len(xs) + 1))] * len(xs)),
        sends,
        worlds=(2, 3),
        simulated=(),
        gradient=the_sum,
    ),
    "alltoall with splits, gradient": Case(
        lambda x: alltoallv(x, TABLE[ltx.axis_index()]),
        lambda xs: by_splits(xs, TABLE),
        lambda n: [torch.randn(sum(row), 2, dtype=torch.float64) for row in TABLE],
        simulated=(),
        gradient=the_sum,
    ),
}

# --- reducescatter ----------------------------------------------------------------------------------------------------


def uneven_parts(length: int, n: int) -> list[int]:
    """Horovod's: the first ranks have a row more."""
    return [length // n + (r < length % n) for r in range(n)]


SCATTERS: dict[str, Case | Refusal] = {}
for dtype in DTYPES:
    SCATTERS[f"reducescatter of 11 rows, {name_of(dtype)}"] = Case(
        lambda x: ltx.psum_scatter(x, tiled=True, splits=uneven_parts(11, ltx.axis_size())),
        lambda xs: list(total(xs).split(uneven_parts(11, len(xs)))),
        whole(11, 2, dtype=dtype),
        worlds=(2, 3),
        simulated=(),
    )
SCATTERS |= {
    "reducescatter, gradient": Case(
        lambda x: ltx.psum_scatter(x, tiled=True, grad_scale="mean"),
        lambda xs: list(sum(xs).chunk(len(xs))),
        randn(12, 3),
        gradient=lambda n: n,
    ),
    "reducescatter of 11 rows, gradient": Case(
        lambda x: ltx.psum_scatter(x, tiled=True, splits=uneven_parts(11, ltx.axis_size())),
        lambda xs: list(sum(xs).split(uneven_parts(11, len(xs)))),
        randn(11, 3),
        worlds=(2, 3),
        simulated=(),
        gradient=the_sum,
    ),
    "grouped reducescatter": Case(
        lambda g: ltx.psum_scatter(g, tiled=True),
        lambda gs: [{key: total([g[key] for g in gs]).chunk(len(gs))[r] for key in gs[0]} for r in range(len(gs))],
        lambda n: [{"a": torch.randn(12, dtype=torch.float64), "b": torch.randint(-9, 9, (12, 2))} for _ in range(n)],
        gradient=the_sum,
    ),
}

# Shapes that no other test has: a signature that one rank knows and another doesn't is told too late to go on.
# --- what is refused --------------------------------------------------------------------------------------------------

CALLS: dict[str, Callable[[Tensor], Any]] = {
    "allreduce": ltx.psum,
    "allreduce, max": ltx.pmax,
    "broadcast": ltx.broadcast,
    "reducescatter": lambda x: ltx.psum_scatter(x, tiled=True),
    "alltoall": lambda x: ltx.all_to_all(x, 0, 0),
    "allgather": lambda x: ltx.all_gather(x, tiled=True),
    "grouped allreduce": lambda x: ltx.psum({"a": torch.ones(3), "b": x}),
}

REFUSALS: dict[str, Case | Refusal] = {}
for name, call in CALLS.items():
    REFUSALS |= {
        f"{name}: shapes differ": Refusal(
            lambda r, call=call: call(torch.ones(6, 4 + r, 1, 1)),
            RankMismatchError,
            ("rank 0", "float32[6, 4, 1, 1]", "rank 1", "float32[6, 5, 1, 1]"),
            worlds=(2, 3),
        ),
        f"{name}: numbers of dimensions differ": Refusal(
            lambda r, call=call: call(torch.ones(6, 1, 1, *[4] * r)),
            RankMismatchError,
            ("rank 0", "float32[6, 1, 1]", "rank 1", "float32[6, 1, 1, 4]"),
        ),
        f"{name}: dtypes differ": Refusal(
            lambda r, call=call: call(torch.ones(6, 1, 1, 5, dtype=DTYPES[2 + 3 * (r % 2)])),
            RankMismatchError,
            ("int32[6, 1, 1, 5]", "rank 1", "float32[6, 1, 1, 5]"),
            worlds=(2, 3),
        ),
    }
REFUSALS |= {
    "broadcast: roots differ": Refusal(
        lambda r: ltx.broadcast(torch.ones(1, 1, 1, 17), r), RankMismatchError, ("rank 1",)
    ),
    "broadcast: no such root": Refusal(lambda r: ltx.broadcast(torch.ones(17), 2), AxisError, ("src=2",)),
    "operations differ": Refusal(
        lambda r: (ltx.psum, ltx.pmax)[r](torch.ones(1, 1, 1, 19)), RankMismatchError, ("psum", "pmax")
    ),
    "kinds of collective differ": Refusal(
        lambda r: (ltx.psum, ltx.all_gather)[r](torch.ones(1, 1, 1, 23)), RankMismatchError, ("psum", "all_gather")
    ),
    "allgather of scalars": Refusal(lambda r: ltx.all_gather(torch.ones(()), tiled=True), AxisError, ("tiled=False",)),
    "alltoall of scalars": Refusal(lambda r: ltx.all_to_all(torch.ones(()), 0, 0), AxisError, ("out of range",)),
    "reducescatter of scalars": Refusal(
        lambda r: ltx.psum_scatter(torch.ones(()), tiled=True), AxisError, ("out of range",)
    ),
    "alltoall: length isn't a multiple": Refusal(
        lambda r: ltx.all_to_all(torch.ones(2 * ltx.axis_size() + 1, 3), 0, 0),
        AxisError,
        ("multiple of",),
        worlds=(2, 3),
    ),
    "reducescatter: length isn't a multiple": Refusal(
        lambda r: ltx.psum_scatter(torch.ones(7), tiled=True), AxisError, ("multiple of 2",)
    ),
    "alltoall: splits don't add up": Refusal(
        lambda r: ltx.all_to_all(torch.ones(8), 0, 0, splits=[2, 2]), AxisError, ("splits",)
    ),
    "alltoall: splits of one rank don't add up": Refusal(
        lambda r: ltx.all_to_all(torch.ones(8), 0, 0, splits=[4, 4 + r]), RankMismatchError, ("splits",)
    ),
    "alltoall: as many splits as ranks": Refusal(
        lambda r: ltx.all_to_all(torch.ones(8), 0, 0, splits=[4, 2, 2]), AxisError, ("splits",)
    ),
    "alltoall: splits are integers": Refusal(
        lambda r: ltx.all_to_all(torch.ones(8), 0, 0, splits=[4.5, 3.5]),
        TypeError,
        ("splits",),
    ),
    "no such operation": Refusal(lambda r: ltx.reduce(torch.ones(3), "median"), CollectiveError, ("median",)),
    "what isn't a tensor": Refusal(lambda r: ltx.psum(["1.0", "2.0"]), TreeError, ("tensor",)),
    "not a power of two": Refusal(lambda r: ltx.adasum(torch.ones(3)), AxisError, ("got 3",), worlds=(3,)),
}

# --- Adasum -----------------------------------------------------------------------------------------------------------


def adasum(xs: list[Tensor]) -> Tensor:
    """Maleki et al.: pairs of neighbours, then pairs of pairs; sums in float64."""
    if len(xs) == 1:
        return xs[0].double()
    a, b = adasum(xs[: len(xs) // 2]), adasum(xs[len(xs) // 2 :])
    dot, aa, bb = float(a @ b), float(a @ a), float(b @ b)
    least = math.sqrt(np.finfo(np.float64).tiny)
    return (1 - dot / (2 * aa) if aa >= least else 1) * a + (1 - dot / (2 * bb) if bb >= least else 1) * b


def orthogonal(n: int, length: int, dtype: torch.dtype) -> list[Tensor]:
    q = torch.linalg.qr(torch.randn(length, n, dtype=torch.float64))[0]
    return [column.to(dtype).clone() for column in q.T]


def along_one(n: int, length: int, dtype: torch.dtype, scales: Tensor) -> list[Tensor]:
    axis_comm = torch.randn(length, dtype=torch.float64)
    return [(scale * axis_comm).to(dtype) for scale in scales[:n]]


def tiny(n: int, dtype: torch.dtype) -> list[Tensor]:
    """Around the least normal number of the dtype."""
    return along_one(n, 1024, dtype, torch.finfo(dtype).tiny * torch.randn(n, dtype=torch.float64))


def from_tiny_to_huge(n: int, dtype: torch.dtype) -> list[Tensor]:
    least, most = torch.finfo(dtype).tiny, math.sqrt(torch.finfo(dtype).max)
    scales = [most ** ((i + 1) / n) * least ** ((n - i - 1) / n) for i in range(n)]
    return along_one(n, 1024, dtype, torch.tensor(scales, dtype=torch.float64)[torch.randperm(n)])


ADASUM: dict[str, Case | Refusal] = {}
for dtype in (torch.float16, *REAL):
    loose = {torch.float16: 5e-3, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    for length in (63, 6):
        ADASUM |= {
            f"adasum of {length} orthogonal, {name_of(dtype)}": Case(
                ltx.adasum,
                lambda xs, dtype=dtype: on_all(sum(x.double() for x in xs).to(dtype), len(xs)),
                lambda n, length=length, dtype=dtype: orthogonal(n, length, dtype),
                worlds=(2, 4),
                tolerance=loose,
            ),
            f"adasum of {length} parallel, {name_of(dtype)}": Case(
                ltx.adasum,
                lambda xs, dtype=dtype: on_all((sum(x.double() for x in xs) / len(xs)).to(dtype), len(xs)),
                lambda n, length=length, dtype=dtype: along_one(
                    n, length, dtype, 0.5 + torch.rand(n, dtype=torch.float64)
                ),
                worlds=(2, 4),
                tolerance=loose,
            ),
            f"adasum of {length} numbers, {name_of(dtype)}": Case(
                ltx.adasum,
                lambda xs, dtype=dtype: on_all(adasum(xs).to(dtype), len(xs)),
                randn(length, dtype=dtype),
                worlds=(2, 4),
                tolerance=10 * loose,
            ),
        }
for dtype in REAL:
    ADASUM |= {
        # Their squares underflow: vectors without length are added as they are. Compared at their own size.
        f"adasum of tiny numbers, {name_of(dtype)}": Case(
            lambda x: ltx.adasum(x).double() / torch.finfo(x.dtype).tiny,
            lambda xs: on_all(adasum(xs) / torch.finfo(xs[0].dtype).tiny, len(xs)),
            lambda n, dtype=dtype: tiny(n, dtype),
            worlds=(2, 4),
            tolerance=1e-2,
        ),
        f"adasum from tiny to huge, {name_of(dtype)}": Case(
            lambda x: ltx.adasum(x).double() / ltx.pmax(x.abs().max()).double(),
            lambda xs: on_all(adasum(xs) / max(x.abs().max().double() for x in xs), len(xs)),
            lambda n, dtype=dtype: from_tiny_to_huge(n, dtype),
            worlds=(2, 4),
            tolerance=1e-5,
        ),
    }
ADASUM["adasum of each tensor for itself"] = Case(
    ltx.adasum,
    lambda gs: on_all({key: adasum([g[key] for g in gs]) for key in gs[0]}, len(gs)),
    lambda n: [{key: torch.randn(5, dtype=torch.float64) for key in "abc"} for _ in range(n)],
    worlds=(2, 4),
)

# --- the optimizer ----------------------------------------------------------------------------------------------------


def gradients(n: int) -> list[dict[str, Tensor]]:
    return [
        {name: torch.randn(shape, dtype=torch.float64) for name, shape in (("a", (3, 4)), ("b", (4,)), ("c", ()))}
        for _ in range(n)
    ]


def synchronised(**fields: Any) -> Callable[[Any], Any]:
    return lambda grads: ltx.sync_gradients(grads, ltx.HorovodStrategy(**fields))[0]


def averages(groups: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    return each(lambda xs: total(xs) / len(xs), groups)


def used(params: dict[str, Tensor], x: Tensor, which: Tensor) -> Tensor:
    """Of three parameters rank 0 uses two, the others one: Horovod's test_force_allreduce."""
    return (x * (params["a"] if which == 0 else params["b"])).sum() + (params["c"] * x.sum() if which == 0 else 0)


def grads_of_used(given: dict[str, Any]) -> Any:
    step = ltx.data_parallel(used, ltx.HorovodStrategy())
    return torch.func.grad(step)(given["params"], given["x"], given["which"])


def some_use(n: int) -> list[dict[str, Any]]:
    params = {"a": torch.randn(3, dtype=torch.float64), "b": torch.randn(3, dtype=torch.float64)}
    params["c"] = torch.randn((), dtype=torch.float64)
    return [
        {"params": params, "x": torch.randn(3, dtype=torch.float64), "which": torch.tensor(rank)} for rank in range(n)
    ]


def mean_of_used(given: list[dict[str, Any]]) -> list[Any]:
    n = len(given)
    others = sum(of_rank["x"] for of_rank in given[1:])
    first = given[0]["x"]
    return on_all({"a": first / n, "b": others / n, "c": first.sum() / n}, n)


def trained(given: dict[str, Tensor], *, clip: float | None = None, **fields: Any) -> Tensor:
    """Parameters after calls of a train step with the gradients x[0], x[1], ..."""
    optimizer = ltx.optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)
    if clip is not None:
        optimizer = ltx.optim.chain(ltx.optim.clip_by_global_norm(clip), optimizer)
    step = ltx.data_parallel(lambda params, x: params["w"] @ x, ltx.HorovodStrategy(**fields))
    train = ltx.train_step(step, optimizer)
    state = train.init({"w": given["w"]})
    for x in given["x"]:
        state = train(state, x)[0]
    return train.finish(state).params["w"].clone()


def training_of(calls: int) -> Callable[[int], list[dict[str, Tensor]]]:
    """Start values are rank 0's, whatever the others have."""
    return lambda n: [
        {"w": torch.randn(5, dtype=torch.float64), "x": torch.randn(calls, 5, dtype=torch.float64)} for _ in range(n)
    ]


def momentum(w: Tensor, gradients: list[Tensor]) -> Tensor:
    velocity = torch.zeros_like(w)
    for gradient in gradients:
        velocity = 0.9 * velocity + gradient
        w = w - 0.1 * velocity
    return w


def mean_at(given: list[dict[str, Tensor]], call: int) -> Tensor:
    return torch.stack([of_rank["x"][call] for of_rank in given]).mean(0)


def clipped(gradient: Tensor, most: float) -> Tensor:
    return gradient * min(1.0, most / float(gradient.norm()))


def joined(x: Tensor) -> Tensor:
    """The mean at each turn: rank r has r + 1 batches, and gives zeros when it has no more."""
    return torch.stack([ltx.psum(weight * row) / ltx.axis_size() for row, weight in ltx.uneven(list(x), divisor="all")])


def means_while_some_have_data(xs: list[Tensor]) -> list[Any]:
    most = max(map(len, xs))
    return on_all(torch.stack([sum(x[turn] for x in xs if turn < len(x)) / len(xs) for turn in range(most)]), len(xs))


def sparse_of(n: int) -> list[Tensor]:
    """An embedding's gradient: each rank looks up other rows, one of them twice."""
    rows = [torch.tensor([rank, rank + 1, 0, rank]) for rank in range(n)]
    return [torch.stack([row.double(), torch.randn(4, dtype=torch.float64)]) for row in rows]


def as_sparse(x: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(x[:1].long(), x[1], (6,), check_invariants=True)


OPTIMIZER: dict[str, Case | Refusal] = {
    "in a group of names": Case(synchronised(groups=[["a", "c"]]), averages, gradients),
    "parameters that some ranks don't use": Case(grads_of_used, mean_of_used, some_use, simulated=()),
    "clipped after the sum": Case(
        lambda given: trained(given, clip=0.2),
        lambda given: on_all(momentum(given[0]["w"], [clipped(mean_at(given, k), 0.2) for k in range(4)]), len(given)),
        training_of(4),
        simulated=(),
        tolerance=1e-6,
    ),
    "join": Case(
        joined,
        means_while_some_have_data,
        lambda n: [torch.randn(r + 1, 3, dtype=torch.float64) for r in range(n)],
        simulated=(),
    ),
    "sparse, average": Case(
        lambda x: ltx.sync_gradients({"table": as_sparse(x)}, ltx.HorovodStrategy())[0]["table"].to_dense(),
        lambda xs: on_all(sum(as_sparse(x).to_dense() for x in xs) / len(xs), len(xs)),
        sparse_of,
        simulated=(),
    ),
}

# --- process sets -----------------------------------------------------------------------------------------------------

SETS = ((0, 2), (1, 3))


@contextmanager
def process_sets() -> Any:
    """This rank's set of two: the even ranks, or the odd ones."""
    groups = [dist.new_group(list(ranks)) for ranks in SETS]
    mine = groups[int(ltx.axis_index("data")) % 2]
    axis = ltx.axis_from_group(mine, "set")
    try:
        yield axis
    finally:
        inside.close_axis(axis)
        for group in groups:
            if group != dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)


def by_set(f: Callable[[list[Tensor]], list[Any]]) -> Callable[[list[Tensor]], list[Any]]:
    def want(xs: list[Tensor]) -> list[Any]:
        found: list[Any] = [None] * 4
        for ranks in SETS:
            for rank, y in zip(ranks, f([xs[rank] for rank in ranks]), strict=True):
                found[rank] = y
        return found

    return want


def in_set(call: Callable[[Tensor], Any], want: Callable[[list[Tensor]], list[Any]]) -> Case:
    return Case(call, by_set(want), randn(6, 3), worlds=(4,), simulated=(), gradient=the_sum)


PROCESS_SETS: dict[str, Case | Refusal] = {
    "allreduce": in_set(lambda x: ltx.psum(x, "set"), lambda xs: on_all(sum(xs), 2)),
    "average": in_set(lambda x: ltx.pmean(x, "set"), lambda xs: on_all(sum(xs) / 2, 2)),
    "grouped allreduce": in_set(lambda x: ltx.psum([x, 2 * x], "set"), lambda xs: on_all([sum(xs), 2 * sum(xs)], 2)),
    "allgather": in_set(lambda x: ltx.all_gather(x, "set", tiled=True), lambda xs: on_all(torch.cat(xs), 2)),
    "broadcast": in_set(lambda x: ltx.broadcast(x, 1, "set"), lambda xs: on_all(xs[1], 2)),
    "alltoall": in_set(
        lambda x: ltx.all_to_all(x, 0, 0, "set"),
        lambda xs: [torch.cat([x.chunk(2)[r] for x in xs]) for r in range(2)],
    ),
    "reducescatter": in_set(
        lambda x: ltx.psum_scatter(x, "set", tiled=True),
        lambda xs: list(sum(xs).chunk(2)),
    ),
}
PROCESS_SETS["mean of all is the mean of means"] = Case(
    lambda x: ltx.pmean(ltx.pmean(x, "set"), "data"),
    lambda xs: on_all(sum(xs) / 4, 4),
    randn(6, 3),
    worlds=(4,),
    simulated=(),
    gradient=the_sum,
)

# --- tests ------------------------------------------------------------------------------------------------------------

TABLES: dict[str, Cases] = {
    "allreduce": ALLREDUCE,
    "moves": MOVES,
    "reducescatter": SCATTERS,
    "refusals": REFUSALS,
    "adasum": ADASUM,
    "optimizer": OPTIMIZER,
}


@pytest.mark.full(but=5)
@pytest.mark.parametrize(("table", "n"), worlds_of(TABLES))
def test_collectives(table: str, n: int, ranks: Ranks, seed: int) -> None:
    cases = TABLES[table]
    check(failures(cases, lambda xs, bars: on_rank(cases, xs, bars), ranks, n))


@pytest.mark.full(but=1)
@pytest.mark.parametrize("table", [name for name in TABLES if name != "refusals"])
def test_simulated_collectives(table: str, seed: int) -> None:
    check(failures_simulated(TABLES[table]))


@pytest.mark.full
def test_process_sets(ranks: Ranks, seed: int) -> None:
    def run(xs: Any, bars: Any) -> dict[str, Any]:
        with process_sets():
            return on_rank(PROCESS_SETS, xs, bars)

    check(failures(PROCESS_SETS, run, ranks, 4))
