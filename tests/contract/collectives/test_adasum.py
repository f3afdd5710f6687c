"""Adasum, the collective and the hook: its properties, against NumPy, what it sends, and where it has no meaning."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import ltx
from ltx import hooks
from ltx.errors import AxisError, StrategyError, TreeError, UnsupportedError
from tests.contract.strategies.references.horovod import adasum
from tests.kinds import Ranks
from tests.train_on import refuses, said

SHAPES = {"matrix": (5, 3), "scalar": (), "empty": (0, 2), "vector": (131,), "one": (1,)}


def drawn(n: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """A tensor of each shape for each rank, transposed where there is something to transpose."""
    return {name: torch.randn(n, *shape).transpose(1, -1).to(dtype) for name, shape in SHAPES.items() if shape} | {
        "scalar": torch.randn(n).to(dtype)
    }


def of_stack(xs: Tensor) -> Tensor:
    return torch.tensor(adasum([x.numpy() for x in xs]))


@pytest.mark.full(but=1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("n", [2, 4])
def test_processes(n: int, dtype: torch.dtype, ranks: Ranks) -> None:
    given = drawn(n, dtype) | {"other dtype": torch.randn(n, 3)}
    found = ranks(n).run(lambda: ltx.adasum({name: xs[ltx.axis_index()] for name, xs in given.items()}))
    again = ranks(n).run(lambda: ltx.adasum({name: xs[ltx.axis_index()] for name, xs in given.items()}))
    few = torch.finfo(dtype).eps * 4
    for name, xs in given.items():
        for rank in range(n):
            assert torch.equal(found.rank(rank)[name], found.rank(0)[name])
            assert torch.equal(again.rank(rank)[name], found.rank(0)[name])
        assert found.rank(0)[name].dtype == xs.dtype
        torch.testing.assert_close(found.rank(0)[name], of_stack(xs), rtol=max(few, 1e-12), atol=max(few, 1e-12))


@pytest.mark.full(but=1)
@pytest.mark.parametrize("n", [1, 2, 8, 64])
def test_simulated(n: int, seed: int) -> None:
    given = drawn(n)
    for name, found in ltx.vmap(ltx.adasum)(given).items():
        for rank in range(n):
            torch.testing.assert_close(found[rank], of_stack(given[name]), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_orthogonal_tensors_are_added(n: int) -> None:
    xs = torch.diag(torch.randn(n, dtype=torch.float64))[:, torch.randperm(n)]
    torch.testing.assert_close(ltx.vmap(ltx.adasum)(xs)[0], xs.sum(0), rtol=1e-14, atol=0)


def test_collinear_tensors_are_averaged() -> None:
    found = ltx.vmap(ltx.adasum)
    assert found(torch.tensor([[1.0, 1.0], [3.0, 3.0]]))[0].tolist() == [2.0, 2.0]
    assert found(torch.tensor([[1.0, 2.0], [-1.0, -2.0]]))[0].tolist() == [0.0, 0.0]
    xs = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)[:, None] * torch.randn(7, dtype=torch.float64)
    torch.testing.assert_close(found(xs)[0], xs.mean(0))


def test_zeros_leave_the_other_side_alone() -> None:
    x = torch.randn(5)
    zero = torch.zeros(5)
    for xs in ([x, zero], [zero, x], [zero, x, zero, zero], [zero, zero]):
        assert torch.equal(ltx.vmap(ltx.adasum)(torch.stack(xs))[0], x if any(y is x for y in xs) else zero)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float16, 6e4),
        (torch.float16, 6e-8),
        (torch.float32, 3e38),
        (torch.float32, 1e-45),
        (torch.float64, 1e150),
    ],
    ids=str,
)
def test_sizes_at_the_ends_of_a_dtype(dtype: torch.dtype, size: float, ranks: Ranks) -> None:
    equal = torch.full((2, 100), size, dtype=torch.float64).to(dtype)
    alone = equal * torch.tensor([[0.0], [1.0]], dtype=dtype)
    given = [equal, alone, torch.stack([equal[0], torch.ones_like(equal[0])])]
    for rank, found in enumerate(ranks(2).run(lambda: ltx.adasum([xs[ltx.axis_index()] for xs in given]))):
        assert torch.equal(found[0], equal[0])  # collinear: the mean
        assert torch.equal(found[1], equal[0])
        assert found[2].isfinite().all()
        for one, simulated in zip(found, ltx.vmap(ltx.adasum)(given), strict=True):
            # Their sums are taken in another order.
            torch.testing.assert_close(one, simulated[rank], rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_what_is_too_small_to_have_a_norm_is_added() -> None:
    xs = torch.tensor([[1e-100, 0.0], [1e-100, 0.0]], dtype=torch.float64)
    assert torch.equal(ltx.vmap(ltx.adasum)(xs)[0], xs.sum(0))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_isnt_finite_reaches_every_rank_but_no_other_tensor(value: float) -> None:
    xs, ys = torch.randn(4, 6), torch.randn(4, 6)
    xs[2, 1] = value
    found_x, found_y = ltx.vmap(ltx.adasum)((xs, ys))
    assert not found_x.isfinite().all(1).any()
    torch.testing.assert_close(found_y[0], of_stack(ys))


@pytest.mark.parametrize("n", [2, 4])
def test_bytes(n: int, ranks: Ranks) -> None:
    """2(n-1)/n of the tensors, as the ring sends, and three numbers a tensor for each pair of blocks."""
    numel = 64 * 1024

    def run() -> tuple[int, list[str]]:
        x = [torch.randn(numel), torch.randn(numel // 2, 2)]
        ltx.adasum(x)
        with ltx.profile.record() as trace:
            ltx.adasum(x)
        return trace.bytes, [event.operation for event in trace.events]

    for sent, operations in ranks(n).run(run):
        ring = 2 * (n - 1) / n * 2 * numel * 4
        assert ring <= sent <= ring + 48 * n * 2
        assert len(operations) == 2 * (n.bit_length() - 1) + 1


def test_other_numbers_of_ranks(ranks: Ranks) -> None:
    with pytest.raises(
        AxisError, match=r"adasum pairs ranks with ranks, and works on 1, 2, 4, 8, \.\.\. of them, got 3"
    ):
        ltx.vmap(ltx.adasum)(torch.ones(3, 2))
    assert "got 3" in ranks(3).run(said, AxisError, ltx.adasum, torch.ones(2)).replicated()


@pytest.mark.parametrize("leaf", [torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.complex64)], ids=str)
def test_other_dtypes(leaf: Tensor) -> None:
    with pytest.raises(TreeError, match=r"adasum: leaf 'b\.0' is .*only real floating tensors"):
        ltx.adasum({"a": torch.ones(2), "b": [leaf]})
    refuses(UnsupportedError, "sparse", ltx.adasum, torch.ones(2).to_sparse())


def test_a_world_of_one_gets_copies() -> None:
    x = {"w": torch.randn(3), "none": None}
    found = ltx.adasum(x)
    assert torch.equal(found["w"], x["w"])
    assert found["w"] is not x["w"]
    assert ltx.adasum({}) == {}


def test_the_reference_is_the_papers() -> None:
    a, b = np.array([1.0, 2.0]), np.array([2.0, 0.0])
    np.testing.assert_allclose(adasum([a, b]), (1 - 2 / 10) * a + (1 - 2 / 8) * b)


def strategy(bucket_bytes: int = 1 << 20, hook: hooks.CommHook | None = None) -> ltx.DDPStrategy:
    return ltx.DDPStrategy(comm_hook=hook or hooks.Adasum(), bucket_bytes=bucket_bytes, first_bucket_bytes=bucket_bytes)


def expected(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: of_stack(xs) for name, xs in given.items()}


@pytest.mark.full(but=2)
@pytest.mark.parametrize("bucket_bytes", [8, 200, 1 << 20])
@pytest.mark.parametrize("n", [2, 4])
def test_steps_on_processes(n: int, bucket_bytes: int, ranks: Ranks) -> None:
    given = drawn(n)

    def run() -> Any:
        mine = {name: xs[ltx.axis_index()] for name, xs in given.items()}
        step = ltx.data_parallel(lambda p: sum((p[k] * mine[k]).sum() for k in p), strategy(bucket_bytes))
        params = ltx.tree.map(torch.ones_like, mine)
        return ltx.sync_gradients(mine, strategy(bucket_bytes))[0], torch.func.grad(step)(params)

    results = ranks(n).run(run)
    for found in results:
        for tree in found:
            torch.testing.assert_close(tree, expected(given), rtol=1e-12, atol=1e-12)
        assert all(map(torch.equal, ltx.tree.flatten(found)[0], ltx.tree.flatten(results.rank(0))[0]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision(dtype: torch.dtype) -> None:
    xs = torch.randn(2, 9)
    found = ltx.vmap(lambda g: ltx.sync_gradients(g, strategy(hook=hooks.Adasum(dtype)))[0])(xs)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found[0], ltx.vmap(ltx.adasum)(xs.to(dtype))[0].float(), rtol=0, atol=0)


@pytest.mark.full
def test_compiled(ranks: Ranks) -> None:
    given = drawn(2)

    def run() -> Any:
        mine = {name: xs[ltx.axis_index()] for name, xs in given.items()}
        step = ltx.data_parallel(lambda p, m: sum((p[k] * m[k]).sum() for k in p), strategy())
        params = ltx.tree.map(torch.ones_like, mine)
        return torch.compile(torch.func.grad(step), backend="aot_eager", fullgraph=True)(params, mine)

    for found in ranks(2).run(run):
        torch.testing.assert_close(found, expected(given), rtol=1e-12, atol=1e-12)


def test_its_derivatives_raise() -> None:
    xs = torch.randn(2, 3)

    def hessian_row(x: Tensor) -> Tensor:
        step = ltx.data_parallel(lambda w: (w * x).sum().square(), strategy())
        return torch.func.jvp(torch.func.grad(step), (torch.ones(3),), (torch.ones(3),))[1]

    refuses(UnsupportedError, r"needs a mean of gradients, which Adasum\(\) doesn't", ltx.vmap(hessian_row), xs)
    with pytest.raises(UnsupportedError, match=r"needs a mean of gradients, which Adasum\(\) doesn't"):
        ltx.vmap(torch.func.grad(lambda g: ltx.sync_gradients(g, strategy())[0].sum()))(xs)


def test_the_hook_is_a_value_and_what_it_doesnt_go_with() -> None:
    hook = hooks.Adasum(torch.float16)
    assert pickle.loads(pickle.dumps(hook)) == hook != hooks.Adasum()
    assert repr(hooks.Adasum()) == "Adasum()"
    refuses(StrategyError, r"Adasum\.dtype must be a real floating dtype", hooks.Adasum, torch.int8)
    refuses(StrategyError, "needs a request for sums", hooks.cast, hooks.Adasum(), torch.float16)
    refuses(StrategyError, "needs an error to feed back", hooks.error_feedback, hooks.Adasum())
    with pytest.raises(StrategyError, match="combines real gradients"):
        ltx.sync_gradients(torch.ones(2, dtype=torch.complex64), strategy())
    assert hooks.after(2, hooks.Adasum()).at(2) == hooks.Adasum()
