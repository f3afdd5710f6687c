"""ltx.vmap's arguments and results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx.errors import AxisError, TreeError, UnsupportedError
from tests.train_on import refuses, said

XS = torch.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize(
    ("in_dims", "args", "expected"),
    [
        (0, (XS,), XS.sum(0).expand(2, 3)),
        (1, (XS,), XS.sum(1).expand(3, 2)),
        (-1, (XS,), XS.sum(1).expand(3, 2)),
        ((0,), (XS,), XS.sum(0).expand(2, 3)),
    ],
)
def test_in_dims(in_dims: Any, args: Any, expected: Tensor) -> None:
    assert torch.equal(ltx.vmap(ltx.psum, in_dims=in_dims)(*args), expected)


def test_in_dims_of_several_arguments() -> None:
    f = ltx.vmap(lambda a, b, c: ltx.psum(a * b) + c, in_dims=(None, 0, 1))
    a, b, c = torch.tensor(2.0), torch.tensor([1.0, 2.0]), torch.tensor([[10.0, 20.0]])
    assert f(a, b, c).tolist() == [[16.0], [26.0]]


def test_in_dims_as_prefixes_of_trees() -> None:
    batch = {"x": [XS, 2 * XS], "y": torch.tensor(1.0), "t": (XS.T,), "name": "kept"}
    in_dims = ({"x": 0, "y": None, "t": (1,), "name": None}, None)

    def f(batch: dict[str, Any], extra: dict[str, Any]) -> Any:
        assert (batch["name"], extra) == ("kept", {"n": None, "flag": True})
        assert [x.shape for x in (*batch["x"], *batch["t"])] == [(3,)] * 3
        return ltx.psum(batch["x"][1] + batch["t"][0]) + batch["y"]

    got = ltx.vmap(f, in_dims=in_dims)(batch, {"n": None, "flag": True})
    assert torch.equal(got, (3 * XS.sum(0) + 1).expand(2, 3))


@pytest.mark.parametrize("out_dims", [0, 1, -1])
def test_out_dims(out_dims: int) -> None:
    got = ltx.vmap(lambda x: {"a": x, "same": ltx.psum(x)}, out_dims=out_dims)(XS)
    assert torch.equal(got["a"], XS.movedim(0, out_dims))
    assert torch.equal(got["same"], XS.sum(0).expand(2, 3).movedim(0, out_dims))


def test_out_dims_for_each_output() -> None:
    got = ltx.vmap(lambda x: {"a": x, "b": [2 * x, ltx.psum(x)]}, out_dims={"a": 1, "b": [0, None]})(XS)
    assert torch.equal(got["a"], XS.T)
    assert torch.equal(got["b"][0], 2 * XS)
    assert torch.equal(got["b"][1], XS.sum(0))
    total, same = ltx.vmap(lambda x: (ltx.psum(x), torch.ones(2)), out_dims=None)(XS)
    assert torch.equal(total, XS.sum(0))
    assert torch.equal(same, torch.ones(2))
    nested = ltx.vmap(ltx.vmap(lambda x: ltx.psum(x, "inner"), out_dims=None, axis_name="inner"), axis_name="outer")
    assert torch.equal(nested(XS), XS.sum(1))
    sums = torch.vmap(ltx.vmap(ltx.psum, out_dims=None))(XS)  # of ranks in a batch
    assert torch.equal(sums, XS.sum(1))


@pytest.mark.parametrize(
    ("out_dims", "text"),
    [
        ((0, None), "out_dims=None: the output '1' differs between ranks. Give it a dimension"),
        ((0, 5), "out_dims=5 is out of range for an output of 2 dimensions"),
        ((0,), "isn't a prefix of its output"),
        ("data", "out_dims must be an int, None or a tree of them, got 'data'"),
        ((0, 1.5), "out_dims must be an int, None or a tree of them, got 1.5"),
    ],
)
def test_out_dims_that_do_not_fit(out_dims: Any, text: str) -> None:
    assert text in said(AxisError, lambda: ltx.vmap(lambda x: (x, 2 * x), out_dims=out_dims)(XS))


def test_an_error_about_outputs_does_not_hold_all_of_them() -> None:
    with pytest.raises(AxisError, match="isn't a prefix of its output") as caught:
        ltx.vmap(lambda x: (x, torch.outer(torch.ones(1000), x)), out_dims=(0,))(XS)
    assert len(str(caught.value)) < 1000


def test_keyword_arguments_are_mapped_over_their_first_dimension() -> None:
    def f(x: torch.Tensor, *, scale: torch.Tensor, name: str = "") -> Any:
        return ltx.psum(x * scale), name

    scale = torch.tensor([1.0, 10.0])
    total, name = ltx.vmap(f, out_dims=None)(XS, scale=scale, name="n")
    assert torch.equal(total, (XS * scale[:, None]).sum(0))
    assert name == "n"
    assert ltx.vmap(lambda *, x: ltx.psum(x))(x=XS).shape == XS.shape
    assert torch.equal(ltx.vmap(lambda x, *, y: x + y, in_dims=(None,))(XS, y=scale)[1], XS + 10)
    refuses(AxisError, r"needs one size, got sizes \[2, 3\]", ltx.vmap(lambda x, y: x), XS, y=XS.T)


def test_chunks_are_refused() -> None:
    refuses(UnsupportedError, "ranks of one axis wait for each other", ltx.vmap, lambda x: x, chunk_size=2)
    with pytest.raises(TypeError):
        ltx.vmap(lambda x: x, 0, 0, "data")  # type: ignore[misc]


def test_outputs_that_are_no_tensors() -> None:
    assert ltx.vmap(lambda x: ("text", None, {"n": 3}))(XS) == ("text", None, {"n": 3})
    label, x, size = ltx.vmap(lambda x: ("text", x, ltx.axis_size()))(XS)
    assert (label, size) == ("text", 2)
    assert torch.equal(x, XS)


def test_an_output_in_which_tensors_are_out_of_sight() -> None:
    """They would hold all ranks' values, with a rank's shape, in a batch that has ended."""

    class Holds:
        def __init__(self, x: Tensor):
            self.x = x

    with pytest.raises(TreeError, match=r"axis 'data': the output: leaf 'a' is of type Holds, which holds tensors"):
        ltx.vmap(lambda x: {"a": Holds(x)})(torch.ones(2))


def test_no_mapped_argument_needs_a_size() -> None:
    assert ltx.vmap(lambda: ltx.axis_index(), axis_size=3)().tolist() == [0, 1, 2]
    assert ltx.vmap(lambda x: x + ltx.axis_index(), axis_size=2, in_dims=None)(torch.tensor(1)).tolist() == [1, 2]
    assert ltx.vmap(lambda n: ltx.psum(torch.ones(())) * n, axis_size=2)(5).tolist() == [10.0, 10.0]


@pytest.mark.parametrize(
    ("kwargs", "args", "text"),
    [
        ({}, (), "axis 'data' needs one size, got no mapped tensor. Stack one entry for each rank, or give axis_size."),
        ({"in_dims": None}, (XS,), "axis 'data' needs one size, got no mapped tensor."),
        ({}, (XS, XS.T), "axis 'data' needs one size, got sizes [2, 3]."),
        ({"axis_size": 4, "axis_name": "r"}, (XS,), "axis 'r' needs one size, got sizes [2, 4]."),
        ({}, (XS, torch.tensor(1.0)), "axis 'data': a 0-dim tensor has no dimension to map over; use in_dims=None"),
        ({"in_dims": (0, 0)}, (XS,), "in_dims has 2 entries for 1 arguments."),
    ],
)
def test_axes_without_one_size(kwargs: dict[str, Any], args: tuple[Any, ...], text: str) -> None:
    assert text in said(AxisError, lambda: ltx.vmap(lambda *xs: xs, **kwargs)(*args))


@pytest.mark.parametrize(
    ("in_dims", "args"),
    [(2, (XS,)), ((-3,), (XS,)), (({"x": 0},), ({"y": XS},)), (({"x": [0, 0]},), ({"x": [XS]},))],
    ids=["too large", "too small", "other keys", "other length"],
)
def test_in_dims_that_do_not_fit(in_dims: Any, args: tuple[Any, ...]) -> None:
    with pytest.raises(AxisError):
        ltx.vmap(lambda x: x, in_dims=in_dims)(*args)


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_random_numbers(randomness: str, seed: int) -> None:
    first, second = ltx.vmap(lambda: torch.rand(8), axis_size=2, randomness=randomness)()
    assert torch.equal(first, second) == (randomness == "same")


def test_it_composes_with_torch_func(seed: int) -> None:
    xs = torch.randn(2, 3, dtype=torch.float64)

    def f(x: Tensor) -> Tensor:
        return (ltx.psum(x) ** 3).sum()

    hessian = torch.func.hessian(lambda xs: ltx.vmap(f)(xs).sum())(xs)
    assert torch.allclose(hessian, torch.func.hessian(lambda xs: 2 * (xs.sum(0) ** 3).sum())(xs))
    outside = torch.vmap(ltx.vmap(f), in_dims=2)(torch.stack([xs, -xs], 2))
    assert torch.allclose(outside[1], -ltx.vmap(f)(xs))
