"""The cases of JAX's tests of collectives: values, derivatives, batching, nested axes, what they refuse.

After tests/pmap_test.py, tests/shard_map_test.py and tests/batching_test.py. Every collective goes through the same
table: its value, its transpose, its tangent, a Hessian-vector product of a loss that differs among ranks, and a batch.
The formula is that of the global function of all ranks' values, as ``pmap`` and ``shard_map(check_vma=False)`` have it.

Left out, as ltx has no way to say it:

* ``pmax`` and ``pmin`` in forward mode over their indices, ``pgather``, ``pdot``, ``pshuffle``: no such operations
  (``pshuffle`` is a ``ppermute``).
* replication types (``check_vma``), shardings, layouts, donated buffers of the runtime: ranks are processes.
* ``axis_index_groups`` as an argument: groups are axes of their own, here nested ones.
* ``psum`` over positional axes (``vmap`` of an integer axis): tensors have ``sum``.
* soft_pmap, multi-host and TPU-only cases, ``lax.ragged_all_to_all`` of a given output: see Horovod's alltoall.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx.errors import AxisError, RankMismatchError, TreeError
from tests.contract.peers.cases import (
    Case,
    Cases,
    Ranks,
    Refusal,
    check,
    derivative,
    failures,
    failures_simulated,
    on_all,
    on_rank,
    randn,
    the_sum,
    whole,
    worlds_of,
)

Call = Callable[[Any], Any]
Global = Callable[[list[Tensor]], list[Tensor]]


def total(xs: list[Tensor]) -> Tensor:
    return torch.stack(xs).sum(0, dtype=xs[0].dtype)


def exchanged(split_dim: int, concat_dim: int) -> Global:
    def want(xs: list[Tensor]) -> list[Tensor]:
        n = len(xs)
        return [torch.cat([x.chunk(n, split_dim)[r] for x in xs], concat_dim) for r in range(n)]

    return want


def permuted(pairs: Callable[[int], list[tuple[int, int]]]) -> Global:
    def want(xs: list[Tensor]) -> list[Tensor]:
        source = {destination: x for x, destination in pairs(len(xs))}
        return [xs[source[r]] if r in source else torch.zeros_like(xs[r]) for r in range(len(xs))]

    return want


def ring(n: int) -> list[tuple[int, int]]:
    return [(r, (r + 1) % n) for r in range(n)]


def back(n: int) -> list[tuple[int, int]]:
    return [(r, (r - 1) % n) for r in range(n)]


def turned(n: int) -> list[tuple[int, int]]:
    return [(r, n - 1 - r) for r in range(n)]


def to_the_right(n: int) -> list[tuple[int, int]]:
    """Nobody sends to 0: it gets zeros."""
    return [(r, r + 1) for r in range(n - 1)]


def one_pair(n: int) -> list[tuple[int, int]]:
    return [(n - 1, 0)]


#: name: (what a rank calls on a tensor of shape (12, 12, 2), the same of all ranks')
OPS: dict[str, tuple[Call, Global]] = {
    "psum": (ltx.psum, lambda xs: on_all(total(xs), len(xs))),
    "pmean": (ltx.pmean, lambda xs: on_all(total(xs) / len(xs), len(xs))),
    "pmax": (ltx.pmax, lambda xs: on_all(torch.stack(xs).amax(0), len(xs))),
    "pmin": (ltx.pmin, lambda xs: on_all(torch.stack(xs).amin(0), len(xs))),
    "all_gather": (ltx.all_gather, lambda xs: on_all(torch.stack(xs), len(xs))),
    "all_gather, axis 1": (lambda x: ltx.all_gather(x, dim=1), lambda xs: on_all(torch.stack(xs, 1), len(xs))),
    "all_gather, axis -1": (lambda x: ltx.all_gather(x, dim=-1), lambda xs: on_all(torch.stack(xs, -1), len(xs))),
    "all_gather, tiled": (lambda x: ltx.all_gather(x, tiled=True), lambda xs: on_all(torch.cat(xs), len(xs))),
    "all_gather, tiled, axis 1": (
        lambda x: ltx.all_gather(x, dim=1, tiled=True),
        lambda xs: on_all(torch.cat(xs, 1), len(xs)),
    ),
    "psum_scatter": (
        lambda x: ltx.psum_scatter(x[: ltx.axis_size()]),
        lambda xs: list(total(xs)[: len(xs)].unbind()),
    ),
    "psum_scatter, axis 1": (
        lambda x: ltx.psum_scatter(x[:, : ltx.axis_size()], dim=1),
        lambda xs: list(total(xs)[:, : len(xs)].unbind(1)),
    ),
    "psum_scatter, tiled": (lambda x: ltx.psum_scatter(x, tiled=True), lambda xs: list(total(xs).chunk(len(xs)))),
    "psum_scatter, tiled, axis 1": (
        lambda x: ltx.psum_scatter(x, dim=1, tiled=True),
        lambda xs: list(total(xs).chunk(len(xs), 1)),
    ),
    **{
        f"all_to_all, {split} to {concat}": (
            lambda x, split=split, concat=concat: ltx.all_to_all(x, split, concat),
            exchanged(split, concat),
        )
        for split, concat in [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (-2, -3)]
    },
    **{
        f"ppermute, {about.__name__.replace('_', ' ')}": (
            lambda x, about=about: ltx.ppermute(x, about(ltx.axis_size())),
            permuted(about),
        )
        for about in (ring, back, turned, to_the_right, one_pair)
    },
    "pbroadcast from 0": (ltx.broadcast, lambda xs: on_all(xs[0], len(xs))),
    "pbroadcast from 1": (lambda x: ltx.broadcast(x, 1), lambda xs: on_all(xs[1], len(xs))),
    "psum of a product with the index": (
        lambda x: ltx.psum(x * (ltx.axis_index() + 1)),
        lambda xs: on_all(total([(r + 1) * x for r, x in enumerate(xs)]), len(xs)),
    ),
    "logsumexp over ranks": (
        lambda x: torch.log(ltx.psum(torch.exp(x))),
        lambda xs: on_all(torch.logsumexp(torch.stack(xs), 0), len(xs)),
    ),
    "softmax over ranks": (
        lambda x: torch.exp(x - ltx.pmax(x.detach())) / ltx.psum(torch.exp(x - ltx.pmax(x.detach()))),
        lambda xs: list(torch.softmax(torch.stack(xs), 0).unbind()),
    ),
    "variance over ranks": (
        lambda x: ltx.pmean((x - ltx.pmean(x)) ** 2),
        lambda xs: on_all(torch.stack(xs).var(0, correction=0), len(xs)),
    ),
    "gather and scatter again": (
        lambda x: ltx.psum_scatter(torch.sin(ltx.all_gather(x))),
        lambda xs: [len(xs) * torch.sin(x) for x in xs],
    ),
    "matrix product of a rank's rows with all rows": (
        lambda x: x[..., 0] @ ltx.all_gather(x[..., 1], tiled=True).T,
        lambda xs: [x[..., 0] @ torch.cat([y[..., 1] for y in xs]).T for x in xs],
    ),
    "matrix product by a ring of permutations": (
        lambda x: rotating_product(x[..., 0], x[..., 1]),
        lambda xs: [x[..., 0] @ total([y[..., 1] for y in xs]) for x in xs],
    ),
}


def rotating_product(a: Tensor, b: Tensor) -> Tensor:
    """The collective matmul of JAX's shard_map notes: what comes round is multiplied while it passes."""
    y = a @ b
    for _ in range(ltx.axis_size() - 1):
        b = ltx.ppermute(b, ring(ltx.axis_size()))
        y = y + a @ b
    return y


def weight(y: Tensor, rank: Any) -> Tensor:
    """A loss that differs from rank to rank, of which no derivative is constant."""
    return (torch.sin(y) * (rank + 1)).sum()


def pairs(n: int) -> list[tuple[Tensor, Tensor]]:
    """A point and a tangent."""
    return [(torch.randn(12, 12, 2).double(), torch.randn(12, 12, 2).double()) for _ in range(n)]


def tangents(call: Call, want: Global) -> Case:
    def by_formula(given: list[Any]) -> list[Any]:
        xs, ts = zip(*given, strict=True)
        return list(torch.func.jvp(lambda *xs: tuple(want(list(xs))), xs, ts)[1])

    return Case(lambda xt: torch.func.jvp(call, xt[:1], xt[1:])[1], by_formula, pairs, simulated=(2, 4))


def second(call: Call, want: Global) -> Case:
    """The Hessian of the sum of all ranks' losses, times a vector."""

    def here(xt: Any) -> Tensor:
        rank = ltx.axis_index()
        slope = torch.func.grad(lambda x: weight(call(x), rank))
        return torch.func.jvp(slope, xt[:1], xt[1:])[1]

    def by_formula(given: list[Any]) -> list[Any]:
        def loss(xs: Tensor) -> Tensor:
            return sum(weight(y, rank) for rank, y in enumerate(want(list(xs.unbind()))))

        xs, ts = (torch.stack(parts) for parts in zip(*given, strict=True))
        return list(torch.func.jvp(torch.func.grad(loss), (xs,), (ts,))[1].unbind())

    return Case(here, by_formula, pairs, simulated=(2, 4))


def batched(call: Call, want: Global) -> Case:
    """A batch along dimension 1: each of its elements goes through by itself."""

    def by_formula(xs: list[Tensor]) -> list[Tensor]:
        found = [want([x[:, k] for x in xs]) for k in range(3)]
        return [torch.stack([of_element[r] for of_element in found]) for r in range(len(xs))]

    return Case(torch.vmap(call, in_dims=1), by_formula, randn(12, 3, 12, 2), gradient=the_sum)


VALUES: dict[str, Case | Refusal] = {
    name: Case(call, want, randn(12, 12, 2), simulated=(2, 4), gradient=the_sum) for name, (call, want) in OPS.items()
}
TANGENTS: dict[str, Case | Refusal] = {name: tangents(*op) for name, op in OPS.items()}
SECOND: dict[str, Case | Refusal] = {name: second(*op) for name, op in OPS.items()}
BATCHED: dict[str, Case | Refusal] = {name: batched(*op) for name, op in OPS.items()}

MORE: dict[str, Case | Refusal] = {
    "axis_index": Case(
        lambda x: ltx.axis_index() + x, lambda xs: [r + x for r, x in enumerate(xs)], whole(3, dtype=torch.int64)
    ),
    "axis_size": Case(lambda x: x * ltx.axis_size(), lambda xs: [len(xs) * x for x in xs], randn(3)),
    "psum of one counts the ranks": Case(lambda x: x * ltx.psum(1), lambda xs: [len(xs) * x for x in xs], randn(3)),
    "psum of a tree": Case(
        ltx.psum,
        lambda ts: on_all({"a": total([t["a"] for t in ts]), "b": [total([t["b"][0] for t in ts])]}, len(ts)),
        lambda n: [{"a": torch.randn(3).double(), "b": [torch.randn(2, 2).double()]} for _ in range(n)],
        gradient=the_sum,
    ),
    "pmax where ranks tie shares the gradient": Case(
        lambda x: ltx.pmax(x.clamp(max=0.0)),
        lambda xs: on_all(torch.stack([x.clamp(max=0.0) for x in xs]).amax(0), len(xs)),
        lambda n: [torch.tensor([-1.0 - r, -2.0 + r / n, -3.0]).double() for r in range(n)],
        gradient=the_sum,
    ),
    "a collective of nothing": Case(ltx.psum, lambda xs: on_all(total(xs), len(xs)), randn(0, 3), gradient=the_sum),
    "a scalar": Case(ltx.psum, lambda xs: on_all(total(xs), len(xs)), randn(), gradient=the_sum),
    "a transposed view": Case(
        lambda x: ltx.all_gather(x.T, tiled=True),
        lambda xs: on_all(torch.cat([x.T for x in xs]), len(xs)),
        randn(2, 5),
        gradient=the_sum,
    ),
    "all_to_all there and back": Case(
        lambda x: ltx.all_to_all(ltx.all_to_all(x, 0, 1), 1, 0), lambda xs: xs, randn(12, 3), gradient=the_sum
    ),
    "all_gather is the transpose of psum_scatter": Case(
        lambda x: torch.func.vjp(lambda y: ltx.psum_scatter(y, tiled=True), x)[1](x[: 12 // ltx.axis_size()])[0],
        lambda xs: on_all(torch.cat([x[: 12 // len(xs)] for x in xs]), len(xs)),
        randn(12),
    ),
    "gradient of a replicated loss counts every rank": Case(
        lambda w: torch.func.grad(lambda w: ltx.pmean(w**2))(w), lambda ws: [2 * w for w in ws], randn()
    ),
    "jacobian": Case(
        lambda x: torch.func.jacrev(lambda x: ltx.psum(x) * x)(x),
        # Row i of rank r's is the derivative of the sum over ranks s of x_s[i] sum_t x_t[i].
        lambda xs: on_all(2 * torch.diag(total(xs)), len(xs)),
        randn(3),
    ),
    "jacobian in forward mode": Case(
        # Each rank moves its x[k], at the same time.
        lambda x: torch.func.jacfwd(lambda x: ltx.psum(x) * x)(x),
        lambda xs: [torch.diag(total(xs) + len(xs) * x) for x in xs],
        randn(3),
    ),
}  # fmt: skip

# Shapes that no other test has: a signature that one rank knows and another doesn't is told too late to go on.
REFUSALS: dict[str, Case | Refusal] = {
    "an axis that isn't there": Refusal(lambda r: ltx.psum(torch.ones(3), "nowhere"), AxisError, ("nowhere",)),
    "all_to_all of an axis that isn't a multiple": Refusal(
        lambda r: ltx.all_to_all(torch.ones(7, 3), 0, 1), AxisError, ("multiple of 3", "got 7"), worlds=(3,)
    ),
    "psum_scatter of an axis of another size": Refusal(
        lambda r: ltx.psum_scatter(torch.ones(6)), AxisError, ("must be 3", "got 6"), worlds=(3,)
    ),
    "all_gather beyond the last axis": Refusal(lambda r: ltx.all_gather(torch.ones(3), dim=2), AxisError, ("dim=2",)),
    "ppermute with two of one source": Refusal(
        lambda r: ltx.ppermute(torch.ones(3), [(0, 1), (0, 0)]), AxisError, ("source",)
    ),
    "ppermute with two of one destination": Refusal(
        lambda r: ltx.ppermute(torch.ones(3), [(0, 1), (1, 1)]), AxisError, ("destination",)
    ),
    "ppermute to nobody": Refusal(lambda r: ltx.ppermute(torch.ones(3), [(0, 5)]), AxisError, ("5",)),
    "permutations that differ": Refusal(
        lambda r: ltx.ppermute(torch.ones(1, 1, 29), [(0, 1), (1, 0)][r:]), RankMismatchError, ("rank 1",)
    ),
    "trees that differ": Refusal(
        lambda r: ltx.psum({"ab"[r]: torch.ones(1, 1, 31)}), RankMismatchError, ("leaf 'a'", "rank 1: no such leaf")
    ),
    "a string": Refusal(lambda r: ltx.psum("1.0"), TreeError, ("tensor",)),
}

TABLES: dict[str, Cases] = {
    "values": VALUES,
    "tangents": TANGENTS,
    "second": SECOND,
    "batched": BATCHED,
    "more": MORE,
    "refusals": REFUSALS,
}


@pytest.mark.full(but=4)
@pytest.mark.parametrize(("table", "n"), worlds_of(TABLES))
def test_collectives(table: str, n: int, ranks: Ranks, seed: int) -> None:
    cases = TABLES[table]
    check(failures(cases, lambda xs, bars: on_rank(cases, xs, bars), ranks, n))


@pytest.mark.full(but=1)
@pytest.mark.parametrize("table", [name for name in TABLES if name != "refusals"])
def test_simulated_collectives(table: str, seed: int) -> None:
    check(failures_simulated(TABLES[table]))


# --- nested axes, and groups of ranks ---------------------------------------------------------------------------------

#: name: (what rank (i, j) calls, the same of the table of all values; i along "node", j along "data")
NESTED: dict[str, tuple[Call, Callable[[Tensor], Tensor]]] = {
    "psum over the inner axis": (lambda x: ltx.psum(x, "data"), lambda x: x.sum(1, keepdim=True).expand_as(x)),
    "psum over the outer axis": (lambda x: ltx.psum(x, "node"), lambda x: x.sum(0, keepdim=True).expand_as(x)),
    "psum over both": (lambda x: ltx.psum(x, ("node", "data")), lambda x: x.sum((0, 1), keepdim=True).expand_as(x)),
    "one after the other": (
        lambda x: ltx.psum(ltx.psum(x, "data"), "node"),
        lambda x: x.sum((0, 1), keepdim=True).expand_as(x),
    ),
    "pmean over both": (lambda x: ltx.pmean(x, ("node", "data")), lambda x: x.mean((0, 1), keepdim=True).expand_as(x)),
    "pmax over the inner axis": (lambda x: ltx.pmax(x, "data"), lambda x: x.amax(1, keepdim=True).expand_as(x)),
    "all_gather over both": (
        lambda x: ltx.all_gather(x, ("node", "data")),
        lambda x: x.flatten(0, 1).expand(*x.shape[:2], *x.flatten(0, 1).shape),
    ),
    "ppermute round the inner axis": (
        lambda x: ltx.ppermute(x, ring(ltx.axis_size("data")), "data"),
        lambda x: x.roll(1, 1),
    ),
    "ppermute round the outer axis": (
        lambda x: ltx.ppermute(x, ring(ltx.axis_size("node")), "node"),
        lambda x: x.roll(1, 0),
    ),
    "psum_scatter over the inner axis": (
        lambda x: ltx.psum_scatter(x, "data", tiled=True),
        lambda x: x.sum(1).unflatten(1, (x.shape[1], -1)),
    ),
    "broadcast in each group": (
        lambda x: ltx.broadcast(x, 1, "data"),
        lambda x: x[:, 1:2].expand_as(x),
    ),
    "indices": (
        lambda x: x * 0 + 10 * ltx.axis_index("node") + ltx.axis_index("data"),
        lambda x: x * 0 + (10 * torch.arange(x.shape[0])[:, None, None] + torch.arange(x.shape[1])[:, None]),
    ),
}


@pytest.mark.parametrize("name", NESTED)
@pytest.mark.parametrize("shape", [(2, 2), (3, 2), (2, 4)], ids=str)
def test_nested_axes(name: str, shape: tuple[int, int], seed: int) -> None:
    call, want = NESTED[name]
    xs = torch.randn(*shape, 8, dtype=torch.float64, requires_grad=True)
    ys, zs = ltx.vmap(ltx.vmap(call, axis_name="data"), axis_name="node")(xs), want(xs)
    torch.testing.assert_close(ys, zs)
    bars = torch.randn_like(zs)
    slopes = [torch.autograd.grad(y, xs, bars, retain_graph=True)[0] for y in (ys, zs)]
    torch.testing.assert_close(*slopes)


@pytest.mark.parametrize("name", OPS)
def test_one_rank(name: str, seed: int) -> None:
    """A mapped axis of size 1, which JAX's tests run wherever there is but one device."""
    call, want = OPS[name]
    if name == "pbroadcast from 1":
        with pytest.raises(AxisError, match="src=1"):
            call(torch.zeros(12, 12, 2))
        return
    x = torch.randn(12, 12, 2, dtype=torch.float64, requires_grad=True)
    y, (z,) = call(x), want([x])
    torch.testing.assert_close(y, z)
    bar = torch.randn_like(z)
    torch.testing.assert_close(derivative(y, x, [bar]), derivative(z, x, [bar]))
