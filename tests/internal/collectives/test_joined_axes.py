"""A tuple of names is one axis of all their ranks: the same as one flat axis, on processes and on simulated ranks.

The world is a table of 2 x 2 ranks, rank r at ``divmod(r, 2)``. Without a name, several axes are no axis.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx import Axis
from ltx.core import comm
from ltx.core.base import private
from ltx.core.ranks import axis as axis_module
from ltx.core.ranks.axis import axes_in_scope
from ltx.core.ranks.backings import Levels
from ltx.core.ranks.batched import VmapRanks
from ltx.errors import AxisError
from tests import train_on
from tests.contract.collectives.test_groups import of_each
from tests.contract.conformance.test_properties import each_fixed
from tests.kinds import Ranks
from tests.train_on import on_ranks

BOTH = ("node", "data")
TURNED = ("data", "node")

OPS: dict[str, Callable[..., Tensor]] = {name: op for name, (op, _) in each_fixed(4, dim=1).items()} | {
    "adasum": ltx.adasum,
    "weighted_mean": lambda x, axis: ltx.weighted_mean(x, 1.0 + ltx.axis_index(axis), axis),
    "ppermute": lambda x, axis: ltx.ppermute(x, [(1, 0), (3, 1), (0, 2)], axis),
    "axis_index": lambda x, axis: x * ltx.axis_index(axis),
    "axis_size": lambda x, axis: x * ltx.axis_size(axis),
    "shard": ltx.shard,
}


def _of_each(x: Tensor, axis: Any) -> dict[str, tuple[Tensor, Tensor]]:
    return of_each(x, OPS, axis=axis)


def _trained(x: Tensor, axis: Any) -> tuple[Tensor, Tensor, Tensor]:
    step = ltx.data_parallel(lambda w, x: (w * x - 1).square().mean(), axis=axis)
    after = train_on.trained(step, ltx.optim.from_torch(torch.optim.Adam, lr=0.1), torch.ones_like(x), [x] * 3)
    return torch.func.grad(step)(torch.ones_like(x), x), after.params, after.losses[-1]


def _draw() -> Tensor:
    return torch.randn(2, 2, 4, 4, dtype=torch.float64)


def _on_flat(f: Callable[[Tensor, Any], Any], xs: Tensor) -> Any:
    return ltx.vmap(lambda x: f(x, None))(xs.flatten(0, 1))


def _assert_same(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.full(but=1)
@pytest.mark.parametrize("outer", ["node", "data"], ids=["outermost first", "innermost first"])
def test_nested_simulated_axes_are_as_a_flat_one(outer: str, seed: int) -> None:
    """Whichever is nested in the other: the order of ranks is that of the tuple."""
    inner = "data" if outer == "node" else "node"
    xs, at = _draw(), int(outer == "data")  # the place of the outer dimension in xs
    for f in (_of_each, _trained):
        nested = ltx.vmap(ltx.vmap(lambda x, f=f: f(x, BOTH), axis_name=inner), axis_name=outer, in_dims=at)(xs)
        _assert_same(ltx.tree.map(lambda y: y.transpose(0, at).flatten(0, 1), nested), _on_flat(f, xs))


def test_transforms_between_nested_levels(seed: int) -> None:
    """A batch, and a gradient, between the two levels of one axis; second derivatives of a marked step."""
    xs, w = torch.randn(2, 3, 2, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    step = ltx.data_parallel(lambda w, x: (w * x).sin().sum(), axis=BOTH)

    def of_loss(x: Tensor, axis: Any) -> Tensor:
        return torch.func.grad(lambda x: ((1 + ltx.axis_index(axis)) * ltx.pmax(x * ltx.psum(x, axis), axis)).sum())(x)

    batched = ltx.vmap(torch.vmap(ltx.vmap(lambda x: of_loss(x, BOTH), axis_name="data")), axis_name="node")(xs)
    for i in range(3):
        _assert_same(batched[:, i].flatten(0, 1), _on_flat(of_loss, xs[:, i]))

    def twice(grad: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return torch.func.grad(lambda w, xs: grad(w, xs).sin().sum())

    first = torch.func.grad(lambda w, xs: ltx.vmap(lambda x: step(w, x), axis_name="data")(xs).sum())
    # The two ranks of a node share what is differentiated: their gradients, each the mean over all four, add up.
    mean = torch.func.grad(lambda w: 2 * (w * xs[:, 0]).sin().sum() / 4)
    for grad, expected in ((first, mean), (twice(first), torch.func.grad(lambda w: mean(w).sin().sum()))):
        _assert_same(ltx.vmap(lambda xs, grad=grad: grad(w, xs), axis_name="node")(xs[:, 0]), expected(w).expand(2, 4))


@contextmanager
def _mesh(**sizes: int) -> Iterator[None]:
    ltx.shutdown()
    try:
        with ltx.init(mesh=sizes):
            yield
    finally:
        ltx.init()


@pytest.mark.full
def test_processes_of_a_mesh_are_as_a_flat_world(ranks: Ranks, seed: int) -> None:
    """Bit for bit, as the same ranks send the same buckets; in the other order of axes, as that order has it."""

    def objects(axis: Any) -> tuple[Any, ...]:
        at = int(ltx.axis_index(axis))
        ltx.barrier("here", axis)
        ltx.check_replicas({"w": torch.ones(2)}, axis)
        return (
            ltx.all_gather_object(at, axis),
            ltx.broadcast_object(at, 3, axis),
            ltx.reduce_boolean_decision(at < 3, all=True, axis=axis),
            [x.tolist() for x in ltx.gather_all_tensors(torch.full((at,), at), axis)],
            ltx.rank_seed(7, axis),
            [weight for _, weight in ltx.uneven([1] * (2 + at), axis=axis)],
            ltx.sync_params(torch.tensor(float(at)), 2, axis).item(),
        )

    def run(xs: Tensor) -> tuple[Any, ...]:
        x = xs.flatten(0, 1)[ltx.world().rank]
        flat = _of_each(x, None), _trained(x, "data"), objects(None)
        with _mesh(node=2, data=2):
            joined = _of_each(x, BOTH), _trained(x, BOTH), objects(BOTH)
            turned = _of_each(x, TURNED)
            text = train_on.said(AxisError, ltx.psum, x)
            text += train_on.said(AxisError, ltx.vmap(lambda x: ltx.all_gather(x, ("data", "r")), axis_name="r"), x)
        return flat, joined, turned, text

    xs = _draw()
    in_turn = ltx.vmap(lambda x: _of_each(x, None))(xs.transpose(0, 1).flatten(0, 1))
    for rank, (flat, joined, turned, text) in enumerate(ranks(4).run(run, xs)):
        torch.testing.assert_close(joined, flat, rtol=0, atol=0)
        place = (rank % 2) * 2 + rank // 2
        _assert_same(turned, ltx.tree.map(lambda y, place=place: y[place], in_turn))
        assert "several are in scope: 'node' (2), 'data' (2), outermost first" in text
        assert "Write axis='data' for one of them, or axis=('node', 'data') for all." in text
        assert "axis=('data', 'r') mixes axes of different kinds" in text


def test_as_many_messages_as_on_a_flat_axis(ranks: Ranks, seed: int) -> None:
    """Not one for each name; also over some of the mesh's axes, in either order, and with axes of one rank."""

    def sent(x: Tensor, axis: Any) -> dict[str, list[tuple[str, str, int]]]:
        found = {}
        for name, op in OPS.items():
            op(x, axis=axis)  # opens what it needs
            with ltx.profile.record() as trace:
                op(x, axis=axis)
            found[name] = [(event.operation, event.label, event.nbytes) for event in trace.events]
        return found

    def run(x: Tensor) -> tuple[Any, ...]:
        flat = sent(x, None)
        with _mesh(pod=2, one=1, data=2):
            several = [sent(x, axis) for axis in (("pod", "data"), ("data", "one", "pod"))]
            some = {name: OPS[name](x, ("data", "one")) for name in ("psum", "all_gather")}
            with ltx.profile.record() as trace:
                for name in some:
                    OPS[name](x, ("data", "one"))
            opened = len(comm.resolve(("pod", "data")).comm.parts)
        return flat, several, some, [event.operation for event in trace.events], opened

    xs = torch.randn(4, 4, 4, dtype=torch.float64)
    for rank, (flat, several, some, on_some, opened) in enumerate(ranks(4).run(lambda: run(xs[ltx.axis_index()]))):
        assert (several, flat["psum"]) == ([flat, flat], [("psum", "psum", flat["psum"][0][2])])
        assert len(flat["pmean"]) == len(flat["all_gather"]) == len(flat["reduce"]) == 1
        row = xs[rank - rank % 2 : rank - rank % 2 + 2]
        torch.testing.assert_close(some, {"psum": row.sum(0), "all_gather": row.movedim(0, 1)})
        assert on_some == ["psum", "all_gather"]
        assert opened == 1  # for ("data", "one", "pod"), whose ranks have another order


def test_what_none_means() -> None:
    xs = torch.ones(2, 3)

    def nested(axis: Any, inner: str = "data") -> Tensor:
        return ltx.vmap(ltx.vmap(lambda x: ltx.psum(x, axis), axis_name=inner), axis_name="node")(xs)

    deep: Any = "data"
    for _ in range(5000):
        deep = [deep]
    for axis, text in (
        (None, r"'node' \(2\), 'data' \(3\), outermost first.* axis=\('node', 'data'\)"),
        (("data", "data"), "'data' occurs more than once"),
        (("data", 1), "a tuple of axes holds names"),
        ((deep,), "a tuple of axes holds names"),
        (("node", "x"), "no axis called 'x' is in scope"),
    ):
        train_on.refuses(AxisError, text, nested, axis)
    assert nested(None, inner="node").unique().item() == 3  # the inner one hides the outer one of its name
    with ltx.init(mesh={"node": 1, "data": 1}):  # of one process, whose axes have nobody on them
        assert ltx.vmap(ltx.psum)(torch.ones(3)).tolist() == [3.0] * 3
        assert ltx.psum(torch.ones(()), ("node", "data")).item() == 1.0
        train_on.refuses(AxisError, r"'node' \(1\), 'data' \(1\)", ltx.psum, torch.ones(()))


@pytest.mark.full
def test_in_a_compiled_graph(seed: int) -> None:
    xs = torch.randn(2, 2, 3)

    def f(xs: Tensor) -> Tensor:
        inner = ltx.vmap(lambda x: ltx.psum(x, BOTH) * ltx.axis_index(BOTH), axis_name="data")
        return ltx.vmap(inner, axis_name="node")(xs)

    torch.testing.assert_close(torch.compile(f, fullgraph=True, backend="aot_eager")(xs), f(xs))


@on_ranks(2)
def test_processes_and_simulated_ranks_together(seed: int) -> None:
    torch.manual_seed(seed)
    xs, rank = torch.randn(2, 3, 4), int(ltx.axis_index())  # by process, simulated rank, element
    axis, mine = ("data", "sim"), xs[rank]

    def of(f: Any, axis: Any = axis, x: Tensor = mine) -> Tensor:
        return ltx.vmap(lambda x: f(x, axis), axis_name="sim")(x)

    whole, w = xs.flatten(0, 1), ltx.broadcast(torch.randn(4))
    found = [
        (of(ltx.psum), whole.sum(0)),
        (of(ltx.psum, list(axis)), whole.sum(0)),
        (of(ltx.psum, axis[::-1]), whole.sum(0)),
        (of(ltx.pmean), whole.mean(0)),
        (of(ltx.pmax), whole.amax(0)),
        (of(ltx.pmin), whole.amin(0)),
        (of(partial(ltx.psum, prescale=0.5, postscale=3.0)), 1.5 * whole.sum(0)),
        (of(lambda x, axis: x * ltx.axis_size(axis)), 6 * mine),
        (ltx.psum(mine, ()), mine),
        (mine * ltx.axis_size(()), mine),
        (of(ltx.pmean, ()), mine),
        (of(ltx.psum, ["sim"]), mine.sum(0)),
        (torch.func.grad(lambda x: (of(ltx.psum, x=x) * w).sum())(mine), 6 * w),
    ]
    for got, want in found:
        torch.testing.assert_close(got, want.expand(3, 4))


@on_ranks(2)
def test_what_does_not_take_both_refuses_both_and_none_means_neither() -> None:
    assert comm.resolve(("data",)) is comm.resolve("data")
    either = train_on.said(AxisError, ltx.vmap(lambda x: ltx.psum(x), axis_name="r"), torch.ones(2))
    assert "several are in scope: 'data' (2), 'r' (2)" in either
    assert either.endswith("Write axis='r'.")
    of_groups = partial(partial, axis=("data", "sim"), axis_index_groups=[[0], [1]])
    for call in (partial(ltx.all_gather, axis=("data", "sim")), *map(of_groups, (ltx.psum, ltx.pmean, ltx.pmax))):
        said = train_on.said(AxisError, ltx.vmap(call, axis_name="sim"), torch.ones(2))
        assert "mixes axes of different kinds ('data', 'sim')" in said


XS = torch.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize("name", [None, "data"])
def test_of_nested_axes_of_one_name_the_innermost_is_meant(name: str | None) -> None:
    assert ltx.vmap(ltx.vmap(lambda x: ltx.psum(x, name)))(torch.tensor([[1, 2], [3, 4]])).tolist() == [[3, 3], [7, 7]]


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
        opened = [(Axis("data", 3, VmapRanks(Levels((0,)))), None)]
        patched.setitem(axis_module._opened_axes, threading.get_ident(), opened)
        at_once(look)
        patched.setattr(private, "graph_task", lambda: 7)
        at_once(look)
        patched.delitem(axis_module._opened_axes, threading.get_ident())
        at_once(look)
    assert [len(axes) for axes in seen] == [0, 1, 0]
