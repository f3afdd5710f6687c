"""Ranks whose trees differ: they all raise, naming the leaf, before anything of the tree is sent, and stay in step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx.errors import RankMismatchError
from tests.kinds import Ranks
from tests.train_on import refuses, said

Rank = int


def sparse(*values: float, size: int = 4, at: int = 0) -> Tensor:
    """A gradient of an embedding of `size` rows, with entries from row `at` on."""
    rows = torch.arange(at, at + len(values)).unsqueeze(0)
    return torch.sparse_coo_tensor(rows, torch.tensor(values), (size,), check_invariants=True)


def tables(rank: Rank) -> Any:
    """Each rank lacks one of two tables of one size, as allow_unused=True gives them."""
    return {"a": None, "b": sparse(2.0)} if rank else {"a": sparse(1.0), "b": None}


def infers(x: Any) -> Any:
    return ltx.all_gather(x, tiled=True, splits="infer")


# name -> (a call, this rank's tree, what the error names)
DIFFERENT: dict[str, tuple[Callable[[Any], Any], Callable[[Rank], Any], str]] = {
    "each lacks a table": (ltx.sync_gradients, tables, "'a'"),
    "psum of those": (ltx.psum, tables, "'a'"),
    "pmean of those": (ltx.pmean, tables, "'a'"),
    "one lacks a table": (ltx.sync_gradients, lambda r: {"a": sparse(1.0), "b": None if r else sparse(1.0)}, "'b'"),
    "a table more": (ltx.psum, lambda r: [sparse(1.0)] * (2 + r), "'2'"),
    "another metric": (ltx.psum, lambda r: {"grad": sparse(1.0), f"metric_{r}": torch.tensor(5.0 + r)}, "'metric_0'"),
    "another parameter": (ltx.sync_gradients, lambda r: {"e": sparse(1.0), f"w{r}": torch.ones(3)}, "'w0'"),
    "a sparse dtype": (ltx.psum, lambda r: sparse(1.0).double() if r else sparse(1.0), "the value itself"),
    "a sparse size": (ltx.sync_gradients, lambda r: {"e": sparse(1.0, size=4 + r)}, "'e'"),
    "dense dimensions": (ltx.psum, lambda r: {"e": torch.eye(3).to_sparse(1 + r), "other": torch.ones(9)}, "'e'"),
    "adasum": (ltx.adasum, lambda r: {"w": torch.ones(2 + r)}, "'w'"),
    "all_gather, another dtype": (infers, lambda r: {"w": torch.ones(2, dtype=[torch.int32, torch.int64][r])}, "int64"),
    "all_gather, another dimension": (infers, lambda r: {"w": torch.ones(2, 3 + r)}, "any, 4"),
    "all_gather, another number of dimensions": (infers, lambda r: {"w": torch.ones([2] * (1 + r))}, "leaf 'w'"),
    "all_gather, another name": (infers, lambda r: {f"w{r}": torch.ones(2)}, "'w0'"),
    "gather_all_tensors": (
        ltx.gather_all_tensors,
        lambda r: torch.zeros(1 + r, dtype=[torch.int32, torch.float32][r]),
        "float32",
    ),
    "reduce": (ltx.reduce, lambda r: {f"loss_{r}": torch.tensor(1.0), "name": "a"}, "'loss_0'"),
    "reduce, product": (lambda x: ltx.reduce(x, "product"), lambda r: {f"loss_{r}": torch.ones(7)}, "'loss_0'"),
    "all_gather, splits": (
        lambda x: ltx.all_gather(x, tiled=True, splits=(2, 3)),
        lambda r: {f"part_{r}": torch.ones(2 + r)},
        "'part_0'",
    ),
    "psum_scatter, splits": (
        lambda x: ltx.psum_scatter(x, tiled=True, splits=(2, 4)),
        lambda r: {f"part_{r}": torch.ones(6)},
        "'part_0'",
    ),
    "psum_scatter, inferred": (
        lambda x: ltx.psum_scatter(x, tiled=True, splits="infer"),
        lambda r: {f"part_{r}": torch.ones(7)},
        "'part_0'",
    ),
    "all_to_all, splits": (
        lambda x: ltx.all_to_all(x, 0, 0, splits=(2, 3)),
        lambda r: {f"part_{r}": torch.ones(5)},
        "'part_0'",
    ),
}


def refused(name: str) -> tuple[str, float]:
    call, tree, _ = DIFFERENT[name]
    rank = int(ltx.axis_index())
    return said(RankMismatchError, call, tree(rank)), float(ltx.psum(torch.tensor(1.0 + rank)))


@pytest.mark.parametrize("name", DIFFERENT)
def test_every_rank_raises_and_the_axis_stays_in_step(ranks: Ranks, name: str) -> None:
    (text, after), other = ranks(2).run(refused, name)
    assert other == (text, 3.0) == (text, after)
    assert DIFFERENT[name][2] in text


def loses_a_table() -> list[str]:
    """Two tables for some steps, of which a rank then misses one: what the others do is known by then."""
    rank, said = int(ltx.axis_index()), []
    both = {"a": sparse(1.0 + rank), "b": sparse(3.0, at=rank)}
    for _ in range(2):
        means, _ = ltx.sync_gradients(both)
        said.append(str([means[k].to_dense().tolist() for k in "ab"]))
    for k in "ab":
        ltx.sync_gradients({k: both[k]})
    for grads in ({"a": both["a"], "b": both["b"] if rank else None}, {"ab"[rank]: both["ab"[rank]]}):
        refuses(RankMismatchError, "rank 0: ", ltx.sync_gradients, grads)
        said.append(str(float(ltx.psum(torch.tensor(1.0)))))
    return said


def test_known_trees_are_compared_at_each_call(ranks: Ranks) -> None:
    means = str([[1.5, 0.0, 0.0, 0.0], [1.5, 1.5, 0.0, 0.0]])
    assert ranks(2).run(loses_a_table).replicated() == [means, means, "2.0", "2.0"]


def sums(count: int, size: int, seed: int) -> list[tuple[Any, Any]]:
    """Sums of a tree with `count` sparse leaves, some with dense dimensions and of some ranks without entries."""
    torch.manual_seed(seed)
    rank, found = int(ltx.axis_index()), []
    for _ in range(2):
        dense = [[torch.randn(size, 2) * (torch.rand(size, 1) < 0.3) for _ in range(2)] for _ in range(count)]
        mine: dict[str, Any] = {str(i): x[rank].to_sparse(1 + i % 2) for i, x in enumerate(dense)}
        total = ltx.psum({**mine, "n": 3 + rank, "w": [torch.ones(2) * rank]}, postscale=2.0)
        want = {str(i): 2 * (x[0] + x[1]) for i, x in enumerate(dense)}
        assert all(total[k].is_coalesced() for k in want)
        got = {k: total[k].to_dense() for k in want}
        found.append(([got, total["n"].item(), total["w"][0].tolist()], [want, 14, [2.0, 2.0]]))
    return found


@pytest.mark.parametrize("count", [1, 31, 40])
def test_sums_of_sparse_and_dense_leaves(ranks: Ranks, seed: int, count: int) -> None:
    for (got, *rest), (want, *others) in (pair for found in ranks(2).run(sums, count, 5, seed) for pair in found):
        assert rest == others
        torch.testing.assert_close(got, want)


def sparse_gradient(seed: int) -> tuple[Tensor, Tensor]:
    """The derivative of a sum of sparse tensors with respect to their values."""
    torch.manual_seed(seed)
    rank, values, weights = int(ltx.axis_index()), torch.randn(2, 3), torch.randn(2, 4)
    mine = values[rank].clone().requires_grad_()
    at = torch.arange(rank, rank + 3).unsqueeze(0)
    total = ltx.psum({"e": torch.sparse_coo_tensor(at, mine, (4,), check_invariants=True)})["e"]
    (total.to_dense() * weights[rank]).sum().backward()
    assert mine.grad is not None
    return mine.grad, weights.sum(0)[rank : rank + 3]


def test_derivatives_of_sparse_sums(ranks: Ranks, seed: int) -> None:
    for got, want in ranks(2).run(sparse_gradient, seed):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("size", [2, 3])
def test_after_comparing_for_different_channels_ranks_are_in_step(size: int, ranks: Any, seed: int) -> None:
    """One rank is at a collective of its own and the others at a step's: their next call had hung."""

    def apart() -> list[Any]:
        first = ltx.world().rank == 0

        found: list[Any] = []
        for theirs in (ltx.grad(ltx.data_parallel(lambda w: w.square().sum())), ltx.sync_gradients):
            try:
                (ltx.psum if first else theirs)(torch.ones(211 + seed % 97))  # which is new
            except RankMismatchError:
                found += [ltx.psum(torch.full((k,), 2.0)).tolist() for k in (1, 2, 1)]
        return found

    for found in ranks(size).run(apart):
        assert found == 2 * [[2.0 * size], 2 * [2.0 * size], [2.0 * size]]
