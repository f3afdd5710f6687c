"""The axes in scope."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx import Axis
from ltx.core.base import private
from ltx.core.ranks import axis as axis_module
from ltx.core.ranks.axis import axes_in_scope
from ltx.core.ranks.backings import Levels
from ltx.core.ranks.batched import VmapRanks

XS = torch.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize("name", [None, "data"])
def test_of_nested_axes_of_one_name_the_innermost_is_meant(name: str | None) -> None:
    found = ltx.vmap(ltx.vmap(lambda x: ltx.psum(x, name)))(torch.tensor([[1, 2], [3, 4]]))
    assert found.tolist() == [[3, 3], [7, 7]]


@pytest.mark.slow_compile
def test_a_failed_trace_leaves_no_axis_open() -> None:
    def breaks(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return ltx.psum(x)

    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(ltx.vmap(breaks, axis_name="gone"), fullgraph=True, backend="eager")(XS)
    assert axes_in_scope() == ()


@pytest.fixture
def at_once() -> Iterator[Callable[..., list[Any]]]:
    """``at_once(f, g)`` calls each in a thread of its own, which take turns as often as Python can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    with ThreadPoolExecutor(2) as pool:
        yield lambda *fns: [future.result() for future in [pool.submit(fn) for fn in fns]]
    sys.setswitchinterval(before)


def means(n: int) -> None:
    xs = torch.arange(float(n))
    for _ in range(50):
        assert torch.equal(ltx.vmap(lambda x: ltx.psum(ltx.psum(x)) / ltx.axis_size())(xs), xs.sum().expand(n))


def test_threads_simulate_without_each_other(at_once: Callable[..., list[Any]]) -> None:
    at_once(lambda: means(2), lambda: means(5))


def test_a_transform_beside_a_thread_that_simulates(at_once: Callable[..., list[Any]]) -> None:
    inside, looked = threading.Event(), threading.Event()

    def simulates(x: Tensor) -> Tensor:
        inside.set()
        assert looked.wait(30)
        return ltx.psum(x)

    def grad() -> float:
        assert inside.wait(30)
        try:
            return float(torch.func.grad(lambda x: ltx.psum(x) * len(axes_in_scope()))(torch.tensor(1.0)))
        finally:
            looked.set()

    got, gradient = at_once(lambda: ltx.vmap(simulates)(torch.ones(3)), grad)
    assert got.tolist() == [3, 3, 3]
    assert gradient == 0.0, "no axis is in scope there"


def test_a_forward_pass_that_autograd_does_again_in_its_thread(at_once: Callable[..., list[Any]]) -> None:
    """Where a thread of autograd's runs the backward pass of a device, its caller's axes are those in scope."""
    seen: list[list[Axis]] = []

    def look() -> None:
        seen.append([axis for axis in axes_in_scope() if axis.size == 3])

    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(
            axis_module._opened_axes, threading.get_ident(), [(Axis("data", 3, VmapRanks(Levels((0,)))), None)]
        )
        at_once(look)
        patched.setattr(private, "graph_task", lambda: 7)
        at_once(look)
        patched.delitem(axis_module._opened_axes, threading.get_ident())
        at_once(look)
    assert [len(axes) for axes in seen] == [0, 1, 0]
