"""What tracers record of ltx: torch's functional collectives, which communicate anew, never what peers sent meanwhile.

What is right comes from torch.func on one stacked tensor of all ranks' values (tests/contract/conformance).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functionalize, grad, jvp, linearize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import Module

import ltx
from ltx.errors import TreeError, UnsupportedError
from tests.contract.conformance.table import OPS, Op, component, components, draw, loss, total
from tests.covering import some
from tests.kinds import OnNewAxis, Ranks
from tests.train_on import refuses, said

ROWS = {op.name: op for op in OPS if not op.rounding}
FAST = ("data_parallel", "sync_gradients", "psum", "pmax", "ppermute to one")


def functions(op: Op, ts: Tensor) -> dict[str, tuple[Any, Any]]:
    """By name: on one rank, and on all. The values, their gradient, and a number made of that."""
    return {
        "value": (lambda x, t: op.output(x), op.outputs),
        "gradient": (lambda x, t: grad(loss(op.output))(x), grad(total(op.outputs))),
        "second": (
            lambda x, t: grad(component(grad(loss(op.output)), t))(x),
            grad(components(grad(total(op.outputs)), ts)),
        ),
    }


def at(f: Callable[[Tensor, Tensor], Tensor], t: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: f(x, t)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def linearized(name: str, kinds: list[str], xs: Tensor, ts: Tensor) -> list[tuple[Tensor, Tensor]]:
    """On one rank, of each function: its value, and its derivative in the direction 2 t, asked for after t."""
    rank, results = ltx.world().rank, []
    for kind in kinds:
        on_one, _ = functions(ROWS[name], ts)[kind]
        value, push = linearize(at(on_one, ts[rank]), xs[rank])
        push(ts[rank])
        results.append((value, push(2 * ts[rank])))
    return results


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr")
@pytest.mark.parametrize(
    ("name", "backing"),
    [
        pytest.param(name, backing, marks=() if name in FAST and backing != "sockets" else pytest.mark.full)
        for name in ROWS
        for backing in ("shared memory", "sockets", "alone")
        if name in FAST or backing != "sockets"  # what is recorded is the same on both
    ],
)
def test_linearize(name: str, backing: str, seed: int, ranks: Ranks, on_new_axis: OnNewAxis, request: Any) -> None:
    xs, ts = draw(ROWS[name], 1 if backing == "alone" else 2, seed)
    # Graphs of second derivatives are recorded of all operations below.
    kinds = ["value", "gradient", "second"][: 3 if request.config.getoption("--full") and name in FAST else 2]
    if backing == "alone":
        found = [linearized(name, kinds, xs, ts)]
    elif backing == "sockets":
        found = list(on_new_axis(lambda: linearized(name, kinds, xs, ts), sockets=True))
    else:
        found = list(ranks(2).run(linearized, name, kinds, xs, ts))
    for kind, each in zip(kinds, zip(*found, strict=True), strict=True):
        _, on_all = functions(ROWS[name], ts)[kind]
        expected = jvp(on_all, (xs,), (2 * ts,))
        for place in (0, 1):
            close(torch.stack([rank[place] for rank in each]), expected[place])


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr")
@pytest.mark.parametrize("name", some([name for name, op in ROWS.items() if op.from_outside], "data_parallel"))
def test_linearize_simulated_ranks(name: str, seed: int) -> None:
    xs, ts = draw(ROWS[name], 2, seed)
    for kind, (on_one, on_all) in functions(ROWS[name], ts).items():
        if kind == "second" and name not in FAST:
            continue
        value, push = linearize(lambda xs, f=on_one: ltx.vmap(f)(xs, ts), xs)
        expected = jvp(on_all, (xs,), (ts,))
        close(torch.stack([value, push(ts)]), torch.stack(expected))


def recorded(name: str, mode: str, xs: Tensor, ts: Tensor) -> list[tuple[Tensor, list[str]]]:
    """On one rank: of graphs recorded with other values, what they give, and what they call."""
    rank, results = ltx.world().rank, []
    for on_one, _ in functions(ROWS[name], ts).values():
        graph = make_fx(on_one, tracing_mode=mode)(xs[rank] * 0 + 0.5, ts[rank])
        results.append((graph(xs[rank], ts[rank]), [str(node.target) for node in graph.graph.nodes]))
    return results


@pytest.mark.parametrize("mode", [pytest.param("real", marks=pytest.mark.full), "fake"])
@pytest.mark.parametrize("name", some(ROWS, *FAST))
def test_make_fx_records_functional_collectives(name: str, mode: str, seed: int, ranks: Ranks) -> None:
    xs, ts = draw(ROWS[name], 2, seed)
    found = list(ranks(2).run(recorded, name, mode, xs, ts))
    for each, (_, on_all) in zip(zip(*found, strict=True), functions(ROWS[name], ts).values(), strict=True):
        close(torch.stack([value for value, _ in each]), on_all(xs))
        for _, calls in each:
            assert not [call for call in calls if call.startswith(("c10d.", "ltx", "aten.copy_"))]
    if name in FAST:
        assert any("_c10d_functional" in call for call in found[0][1][1])


def shapes_of_fakes(names: list[str]) -> list[list[int]] | None:
    """On rank 0 alone: nobody else calls, so whoever waits for the network waits for ever."""
    if ltx.world().rank:
        return None
    results = []
    with torch._subclasses.FakeTensorMode() as mode:
        for name in names:
            x, t = (mode.from_tensor(torch.ones(2, 4, dtype=torch.float64)) for _ in range(2))
            for on_one, _ in functions(ROWS[name], t).values():
                result = on_one(x, t)
                assert isinstance(result, torch._subclasses.FakeTensor)
                results.append(list(result.shape))
    return results


def test_fake_tensors_wait_for_nobody(ranks: Ranks) -> None:
    names = [name for name in FAST if name != "adasum"]  # its program asks for this rank's place
    found = ranks(2).run(shapes_of_fakes, names)[0]
    each = [functions(ROWS[name], torch.ones(2, 2, 4))[kind][1] for name in names for kind in ("value", "gradient")]
    shapes = [list(f(torch.rand(2, 2, 4, dtype=torch.float64)).shape)[1:] for f in each]
    assert [found[i] for i in range(len(found)) if i % 3 < 2] == shapes


def fake_left_over() -> str:
    with torch._subclasses.FakeTensorMode() as mode:
        x = mode.from_tensor(torch.ones(2))
    return said(TreeError, ltx.psum, {"w": x})


def test_a_fake_tensor_outside_of_its_mode_is_refused(ranks: Ranks) -> None:
    for text in ranks(2).run(fake_left_over):
        assert text == "psum: leaf 'w' is a FakeTensor, outside of its FakeTensorMode, and its values are needed."


class Calls(Module):
    def __init__(self, fn: Callable[[Tensor], Tensor]):
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x)


def exported(name: str, xs: Tensor, ts: Tensor) -> tuple[Tensor, list[str]]:
    rank, on_one = ltx.world().rank, functions(ROWS[name], ts)["value"][0]
    program = torch.export.export(Calls(at(on_one, ts[rank])), (xs[rank] * 0 + 0.5,))
    return program.module()(xs[rank]), [str(node.target) for node in program.graph.nodes]


@pytest.mark.parametrize("name", some(ROWS, "psum", "sync_gradients"))
def test_export(name: str, seed: int, ranks: Ranks) -> None:
    xs, ts = draw(ROWS[name], 2, seed)
    found = ranks(2).run(exported, name, xs, ts)
    close(torch.stack([value for value, _ in found]), ROWS[name].outputs(xs))


step = ltx.data_parallel(lambda w, x: (w * x).sin().sum())
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "psum": ltx.psum,
    "pmax": ltx.pmax,
    "sync_gradients": lambda x: ltx.sync_gradients(x)[0],
    "step": grad(lambda x: step(x, x.detach())),
}
TRACERS: dict[str, tuple[str, Callable[..., Any]]] = {
    "jit.trace": ("torch.jit.trace can't record ltx", lambda f, x: torch.jit.trace(f, (x,))),
    "functionalize": ("torch.func.functionalize can't look into ltx's", lambda f, x: functionalize(f)(x)),
    "pre_dispatch": (
        r"torch.export and make_fx\(pre_dispatch=True\) can't record ltx inside a transform of torch.func",
        lambda f, x: make_fx(grad(lambda x: f(x).sum()), pre_dispatch=True)(x),
    ),
}


def all_refused(tracer: str) -> Tensor:
    text, trace = TRACERS[tracer]
    for f in CALLS.values():
        refuses(UnsupportedError, text, trace, f, torch.ones(3))
    return ltx.psum(torch.ones(3) * (1 + ltx.world().rank))  # the axis is as it was


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit.trace` is deprecated")
@pytest.mark.parametrize("tracer", TRACERS)
def test_what_cannot_be_recorded_is_refused_by_name(tracer: str, ranks: Ranks) -> None:
    for total_of_ranks in ranks(2).run(all_refused, tracer):
        assert total_of_ranks.tolist() == [3.0, 3.0, 3.0]
    if tracer == "jit.trace":
        refuses(UnsupportedError, TRACERS[tracer][0], torch.jit.trace, ltx.vmap(ltx.psum), (torch.ones(2, 3),))


@pytest.mark.parametrize("call", ["psum", "sync_gradients"])
def test_symbolic_traces_are_refused_by_name(call: str) -> None:
    with pytest.raises(TreeError, match=r"of type Proxy. torch.fx.symbolic_trace can't record ltx. Use make_fx"):
        torch.fx.symbolic_trace(Calls(CALLS[call]))


def objects_recorded() -> str:
    text = said(UnsupportedError, make_fx(lambda x: x * ltx.all_gather_object(1.0)[0]), torch.ones(2))
    assert ltx.psum(torch.ones(())) == 2
    return text


def test_what_no_graph_can_hold_is_refused_before_it_is_sent(ranks: Ranks) -> None:
    for rank, text in enumerate(ranks(2).run(objects_recorded)):
        assert text.startswith(f"rank {rank}: ")
        assert text.endswith("fake tensors can't be sent. Call it outside of what is recorded.")
