"""reduce, reduce_boolean_decision, and sums of sparse tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ltx
from ltx.errors import AxisError, CollectiveError, RankMismatchError, TreeError, UnsupportedError
from tests import train_on
from tests.kinds import Ranks
from tests.train_on import refuses


def test_defaults_and_what_passes_through() -> None:
    """The default is the mean; None is the sum; torch's own names work; what isn't a tensor stays as it is."""
    tree = {"loss": torch.tensor([1.0, 3.0]), "name": "run 7", "none": None, "count": 3}

    def run(loss: Tensor, op: Any) -> Any:
        reduced = ltx.reduce({**tree, "loss": loss}, op)
        assert {key: value for key, value in reduced.items() if key != "loss"} == {
            "name": "run 7",
            "none": None,
            "count": 3,
        }
        return reduced["loss"]

    x = torch.tensor([1.0, 4.0])
    assert ltx.vmap(lambda x: run(x, "mean"))(x).tolist() == [2.5, 2.5]
    assert ltx.vmap(ltx.reduce)(x).tolist() == [2.5, 2.5]
    assert ltx.vmap(lambda x: run(x, None))(x).tolist() == [5.0, 5.0]
    assert ltx.vmap(lambda x: run(x, dist.ReduceOp.MAX))(x).tolist() == [4.0, 4.0]


@pytest.mark.parametrize(("values", "mean", "truncated"), [([-3, 0], -1.5, -1), ([1, 2], 1.5, 1), ([-1, -2], -1.5, -1)])
def test_means_of_integers(ranks: Ranks, values: list[int], mean: float, truncated: int) -> None:
    def run() -> tuple[Tensor, Tensor]:
        x = torch.tensor(values[int(ltx.axis_index())])
        return ltx.reduce(x), ltx.reduce(x, keep_dtype=True)

    found, kept = ranks(2).run(run).replicated()
    assert found.item() == mean
    assert found.dtype == torch.float32
    assert kept.item() == truncated
    assert kept.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32], ids=str)
def test_means_of_integers_whose_sums_are_too_large(ranks: Ranks, dtype: torch.dtype, seed: int) -> None:
    most = torch.iinfo(dtype).max
    xs = torch.randint(most // 2 + 1, most, (2, 5), dtype=dtype)
    mean = xs.double().mean(0)
    want = [mean.float(), mean.float(), mean.trunc().to(dtype)]

    def run(x: Tensor) -> list[Tensor]:
        return [ltx.pmean(x), ltx.reduce(x), ltx.reduce(x, keep_dtype=True)]

    def of_sparse() -> Tensor:
        return ltx.pmean(xs[int(ltx.axis_index())].to_sparse()).to_dense()

    assert all(map(torch.equal, ranks(2).run(lambda: run(xs[int(ltx.axis_index())])).replicated(), want))
    assert all(torch.equal(found[0], x) for found, x in zip(ltx.vmap(run)(xs), want, strict=True))
    assert torch.equal(ranks(2).run(of_sparse).replicated(), want[0])


def test_an_unknown_op() -> None:
    with pytest.raises(CollectiveError, match="op must be one of avg, band, bor, bxor, max, mean, min, product, sum"):
        ltx.reduce(torch.ones(1), "median")
    refuses(TreeError, "works on integers and booleans", ltx.reduce, torch.ones(1), "band")
    assert ltx.vmap(lambda x: (ltx.reduce(x, "MAX"), ltx.reduce(x, "Bor")))(torch.tensor([1, 2]))[1].tolist() == [3, 3]


@pytest.mark.parametrize("said", [[True, True], [True, False], [False, False]], ids=str)
def test_boolean_decisions(ranks: Ranks, said: list[bool]) -> None:
    def run() -> tuple[Any, Any]:
        mine = said[int(ltx.axis_index())]
        return ltx.reduce_boolean_decision(mine), ltx.reduce_boolean_decision(torch.tensor(mine), all=False)

    found = ranks(2).run(run).replicated()
    assert found == (all(said), any(said))
    assert [type(x) for x in found] == [bool, bool]


def test_a_boolean_decision_alone_and_simulated() -> None:
    assert ltx.reduce_boolean_decision(False, all=False) is False
    with pytest.raises(AxisError, match=r"no form under ltx\.vmap"):
        ltx.vmap(lambda x: ltx.reduce_boolean_decision(True) or x)(torch.ones(2))


# --- sparse tensors --------------------------------------------------------------------------------------------------


def _sparse(rank: int) -> Tensor:
    """Entries at other places on each rank, one of them twice; none at all on rank 1."""
    if rank == 1:
        return torch.sparse_coo_tensor(
            torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0, 2), (5, 2), check_invariants=True
        )
    indices = torch.tensor([[rank, rank, 4]])
    return torch.sparse_coo_tensor(indices, torch.arange(6.0).reshape(3, 2) + rank, (5, 2), check_invariants=True)


def test_sparse_sums(ranks: Ranks) -> None:
    def run() -> Any:
        x = {"s": _sparse(int(ltx.axis_index())), "d": torch.ones(2)}
        return ltx.psum(x), ltx.pmean(x)["s"], ltx.reduce(x["s"], "sum")

    whole = sum(_sparse(rank).to_dense() for rank in range(3))
    for total, mean, reduced in ranks(3).run(run):
        assert total["s"].is_coalesced()
        torch.testing.assert_close(total["s"].to_dense(), whole)
        torch.testing.assert_close(mean.to_dense(), whole / 3)
        torch.testing.assert_close(reduced.to_dense(), whole)
        assert total["d"].tolist() == [3.0, 3.0]
    torch.testing.assert_close(ltx.psum(_sparse(0)).to_dense(), _sparse(0).to_dense())


def test_sparse_tensors_elsewhere(ranks: Ranks) -> None:
    with pytest.raises(UnsupportedError, match=r"all_gather: leaf 's' has layout torch.sparse_coo.*to_dense"):
        ltx.all_gather({"s": _sparse(0)})
    refuses(UnsupportedError, "to_dense", ltx.pmax, _sparse(0))

    def run() -> str:
        rank = int(ltx.axis_index())
        at = torch.zeros(1, 1, dtype=torch.int64)
        mine = torch.sparse_coo_tensor(at, torch.ones(1), (3 + rank,), check_invariants=True)
        return train_on.said(RankMismatchError, ltx.psum, mine)

    assert "rank 0: float32[3] (sparse in 1 dim); rank 1: float32[4]" in ranks(2).run(run).replicated()


# --- grad_scale ------------------------------------------------------------------------------------------------------

#: what differs in Horovod: op -> (call, the factor that Horovod's backward pass has beside ltx's)
SCALED: dict[str, tuple[Callable[..., Tensor], Callable[[int], float]]] = {
    "all_gather": (lambda x, **how: ltx.all_gather(x, tiled=True, **how), lambda n: 1 / n),
    "broadcast": (lambda x, **how: ltx.broadcast(x, 1, **how), lambda n: 1 / n),
    "psum_scatter": (lambda x, **how: ltx.psum_scatter(x, tiled=True, **how), lambda n: n),
}


@pytest.mark.parametrize("op", list(SCALED))
def test_horovod_s_gradients(ranks: Ranks, op: str) -> None:
    call, factor = SCALED[op]
    xs, weights = torch.randn(2, 4), torch.randn(2, 8)

    def grads(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        def gradient(**how: Any) -> Tensor:
            def loss(x: Tensor) -> Tensor:
                y = call(x, **how)
                return (y**2 * weight[: y.numel()]).sum()

            return torch.func.grad(loss)(x)

        return gradient(), gradient(grad_scale="mean")

    for plain, scaled in ranks(2).run(lambda: grads(xs[ltx.axis_index()], weights[ltx.axis_index()])):
        torch.testing.assert_close(scaled, plain * factor(2))
    plain, scaled = ltx.vmap(grads)(xs, weights)
    torch.testing.assert_close(scaled, plain * factor(2))
    refuses(CollectiveError, 'grad_scale must be "sum" or "mean"', call, xs[0], grad_scale="average")


@pytest.mark.full
def test_horovod_s_gradients_compiled(ranks: Ranks) -> None:
    def run() -> Tensor:
        fn = torch.func.grad(lambda x: (ltx.all_gather(x, grad_scale="mean") ** 2).sum())
        return torch.compile(fn, fullgraph=True, backend="aot_eager")(torch.ones(2))

    assert ranks(2).run(run).replicated().tolist() == [2.0, 2.0]
