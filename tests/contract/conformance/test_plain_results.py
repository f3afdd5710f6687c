"""No pending tensor reaches a user: what a collective gives is a torch.Tensor and nothing else, and can be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import ltx
from tests.kinds import Ranks

OPS: dict[str, Callable[[Any], Any]] = {
    "psum": ltx.psum,
    "pmean": ltx.pmean,
    "pmax": ltx.pmax,
    "pmin": ltx.pmin,
    "pvary": ltx.pvary,
    "all_gather": ltx.all_gather,
    "psum_scatter": lambda x: ltx.psum_scatter(x, tiled=True),
    "broadcast": ltx.broadcast,
    "all_to_all": lambda x: ltx.all_to_all(x, 0, 0),
    "ppermute": lambda x: ltx.ppermute(x, [(0, 1)]),
    "reduce": lambda x: ltx.reduce(x, "product"),
}
EAGER: dict[str, Callable[[Any], Any]] = {  # not in compiled graphs
    "gather_all_tensors": lambda x: ltx.gather_all_tensors(x["a"]),
    "all_to_all": lambda x: ltx.all_to_all(x, 0, 0, splits=(2, 2))[0],
    "all_gather": lambda x: ltx.all_gather(x, tiled=True, splits=(4, 4)),
    "psum_scatter": lambda x: ltx.psum_scatter(x, tiled=True, splits=(1, 3)),
    "sync_gradients": lambda x: ltx.sync_gradients(x, ltx.DDPStrategy())[0],
}


def _all(x: Tensor) -> dict[str, Any]:
    return {name: op({"a": x, "none": x[:0]}) for name, op in OPS.items()}


def _all_gradients(x: Tensor) -> dict[str, Any]:
    def loss(x: Tensor, op: Callable[[Any], Any]) -> Tensor:
        return op({"a": x})["a"].square().sum()

    return {name: torch.func.grad(loss)(x, op) for name, op in OPS.items()}


STEP = ltx.data_parallel(lambda w, x: (w["a"] * x + w["b"]).square().mean(), ltx.DDPStrategy(bucket_bytes=8))


def _step(x: Tensor) -> dict[str, Any]:
    grads, value = torch.func.grad_and_value(STEP)(ltx.broadcast({"a": x, "b": x[0]}), x)
    return {"gradients": grads, "value": value}


def _plain(results: Any) -> dict[str, tuple[bool, Any]]:
    """By path: whether it is exactly a tensor, and its numbers, read by this process at once."""
    paths, leaves, _ = optree.tree_flatten_with_path(results)
    return {
        ".".join(map(str, path)): (type(leaf) is torch.Tensor and leaf.device.type == "cpu", leaf.tolist())
        for path, leaf in zip(paths, leaves, strict=True)
    }


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "backend",
    [None, pytest.param("aot_eager", marks=[pytest.mark.slow_compile, pytest.mark.full])],
    ids=["eager", "compiled"],
)
@pytest.mark.parametrize("what", [_all, _all_gradients, _step], ids=["values", "gradients", "step"])
def test_results_are_plain_tensors(ranks: Ranks, what: Callable[[Tensor], Any], backend: str | None, seed: int) -> None:
    def run(xs: Tensor) -> tuple[dict[str, tuple[bool, Any]], dict[str, tuple[bool, Any]]]:
        fn = what if backend is None else torch.compile(what, fullgraph=True, backend=backend)
        x = xs[ltx.axis_index()]
        return _plain(fn(x)), _plain(what(x))

    xs = torch.randint(-4, 5, (2, 4)).double()
    for found, eager in ranks(2).run(run, xs):
        assert found, "there are results"
        assert [name for name, (plain, _) in found.items() if not plain] == []
        assert found == eager


def test_eager_results_are_plain_tensors(ranks: Ranks) -> None:
    def run() -> list[str]:
        x = torch.full((4,), float(ltx.axis_index()))
        results = {name: op({"a": x}) for name, op in EAGER.items()}
        return [name for name, (plain, _) in _plain(results).items() if not plain]

    assert ranks(2).run(run).replicated() == []
