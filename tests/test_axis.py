"""The axes in scope."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ltx
from ltx.axis import Axis, axes_in_scope, find, set_world_axes
from ltx.errors import AxisError, LtxError

XS = torch.arange(6.0).reshape(2, 3)


def test_an_axis_error_is_a_value_error() -> None:
    assert issubclass(AxisError, LtxError)
    assert issubclass(AxisError, ValueError)


@pytest.mark.parametrize("name", [None, "data"])
def test_of_nested_axes_of_one_name_the_innermost_is_meant(name: str | None) -> None:
    found = ltx.vmap(ltx.vmap(lambda x: ltx.psum(x, name)))(torch.tensor([[1, 2], [3, 4]]))
    assert found.tolist() == [[3, 3], [7, 7]]


def test_axes_in_scope() -> None:
    seen: list[list[tuple[str, int]]] = []

    def look(x: Tensor) -> Tensor:
        seen.append([(axis.name, axis.size) for axis in axes_in_scope()])
        with pytest.raises(AxisError, match=r"'outer' \(2\), 'inner' \(3\), outermost first"):
            find(None)
        assert find("outer").size == 2
        return x

    ltx.vmap(ltx.vmap(look, axis_name="inner"), axis_name="outer")(XS)
    assert seen == [[("outer", 2), ("inner", 3)]]
    assert axes_in_scope() == ()
    assert find(None) == find("data") == Axis("data", 1)


def test_simulated_axes_lie_inside_the_world_s() -> None:
    set_world_axes((Axis("node", 1), Axis("data", 1)))
    try:
        with pytest.raises(AxisError, match="Write axis='data'"):
            find(None)
        ltx.vmap(lambda x: (ltx.psum(x, "node"), ltx.psum(x, "r")), axis_name="r")(XS)
        with pytest.raises(AxisError, match=r"no axis called 'x' is in scope; in scope: 'node', 'data'\."):
            find("x")
    finally:
        set_world_axes(())


@pytest.mark.slow_compile
def test_a_failed_trace_leaves_no_axis_open() -> None:
    def breaks(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return ltx.psum(x)

    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(ltx.vmap(breaks, axis_name="gone"), fullgraph=True, backend="eager")(XS)
    assert axes_in_scope() == ()
