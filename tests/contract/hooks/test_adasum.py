"""hooks.Adasum: in steps, in buckets of any size, on every backing; where it has no meaning it says so."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx import hooks
from ltx.errors import StrategyError, UnsupportedError
from tests.contract.strategies.references.horovod import adasum
from tests.kinds import Ranks
from tests.train_on import refuses

SHAPES = {"matrix": (5, 3), "scalar": (), "empty": (0,), "vector": (131,)}


def strategy(bucket_bytes: int = 1 << 20, hook: hooks.CommHook | None = None) -> ltx.DDPStrategy:
    return ltx.DDPStrategy(comm_hook=hook or hooks.Adasum(), bucket_bytes=bucket_bytes, first_bucket_bytes=bucket_bytes)


def gradients(n: int) -> dict[str, Tensor]:
    return {name: torch.randn(n, *shape, dtype=torch.float64) for name, shape in SHAPES.items()}


def expected(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.tensor(adasum([x.numpy() for x in xs])) for name, xs in given.items()}


@pytest.mark.full(but=2)
@pytest.mark.parametrize("bucket_bytes", [8, 200, 1 << 20])
@pytest.mark.parametrize("n", [2, 4])
def test_processes(n: int, bucket_bytes: int, ranks: Ranks) -> None:
    given = gradients(n)

    def run() -> Any:
        mine = {name: xs[ltx.axis_index()] for name, xs in given.items()}
        step = ltx.data_parallel(lambda p: sum((p[k] * mine[k]).sum() for k in p), strategy(bucket_bytes))
        params = {name: torch.ones(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
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
    given = gradients(2)

    def run() -> Any:
        mine = {name: xs[ltx.axis_index()] for name, xs in given.items()}
        step = ltx.data_parallel(lambda p, m: sum((p[k] * m[k]).sum() for k in p), strategy())
        params = {name: torch.ones(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
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


def test_is_a_value_and_what_it_doesnt_go_with() -> None:
    hook = hooks.Adasum(torch.float16)
    assert pickle.loads(pickle.dumps(hook)) == hook != hooks.Adasum()
    assert repr(hooks.Adasum()) == "Adasum()"
    refuses(StrategyError, r"Adasum\.dtype must be a real floating dtype", hooks.Adasum, torch.int8)
    refuses(StrategyError, "needs sums of its results", hooks.chain, hooks.AllReduce(), hooks.Adasum())
    refuses(StrategyError, "needs a request for sums", hooks.cast, hooks.Adasum(), torch.float16)
    refuses(StrategyError, "needs an error to feed back", hooks.error_feedback, hooks.Adasum())
    with pytest.raises(StrategyError, match="combines real gradients"):
        ltx.sync_gradients(torch.ones(2, dtype=torch.complex64), strategy())
    assert hooks.after(2, hooks.Adasum()).at(2) == hooks.Adasum()
