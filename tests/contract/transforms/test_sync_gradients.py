"""The reduction of gradients at hand; tests/contract/transforms/test_block.py has it after blocked steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import grad

import ltx
from ltx.errors import TreeError
from tests.kinds import Ranks
from tests.train_on import said


def test_trees_with_other_leaves_and_their_derivative() -> None:
    def reduce(x: Tensor) -> Any:
        return ltx.sync_gradients({"g": [x, (2 * x).double()], "n": x.long(), "none": None})[0]

    out = ltx.vmap(reduce)(torch.tensor([[1.0], [4.0]]))
    assert out["g"][0].tolist() == [[2.5], [2.5]]
    assert (out["g"][1].tolist(), out["g"][1].dtype) == ([[5.0], [5.0]], torch.float64)
    assert (out["n"].tolist(), out["none"]) == ([[1], [4]], None)
    scale = torch.tensor([1.0, 5.0])
    square = ltx.vmap(grad(lambda x, s: s * reduce(x)["g"][0].sum()))
    assert square(torch.tensor([[1.0], [4.0]]), scale).tolist() == [[3.0], [3.0]]  # the mean of the cotangents


def test_what_is_given_is_left_alone(ranks: Ranks) -> None:
    def on_rank() -> tuple[Tensor, Tensor]:
        given = {"a": torch.arange(6.0).view(2, 3).T, "b": torch.ones(2)}
        reduced, state = ltx.sync_gradients(given)
        assert state is None
        assert given["a"].tolist() == [[0, 3], [1, 4], [2, 5]]
        reduced["b"].zero_()
        return given["b"], reduced["a"]

    b, a = ranks(2).run(on_rank).replicated()
    assert (b.tolist(), a.tolist()) == ([1, 1], [[0, 3], [1, 4], [2, 5]])


def test_error() -> None:
    assert (
        said(TreeError, ltx.sync_gradients, {"a": [torch.ones(1), 2.0]})
        == "grads must be a tree of tensors, but leaf 'a.1' is of type float."
    )


def test_in_inference_mode(ranks: Ranks) -> None:
    def on_rank() -> list[float]:
        with torch.inference_mode():
            mean, _ = ltx.sync_gradients(torch.ones(2) * (1 + ltx.axis_index()))
        return mean.tolist()

    assert ranks(2).run(on_rank).replicated() == [1.5, 1.5]
