"""Derivatives of every order, and what tracers record: torch's functional collectives, which communicate anew.

Orders are words over {forward, reverse}, the first letter the outermost derivative. What is right comes from torch.func
in one process, on one stacked tensor of all ranks' values, by the convention of tests/contract/conformance: a
derivative is that of the sum over ranks of each one's own loss.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functionalize, grad, jvp, linearize, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import Module

import ltx
from ltx import hooks
from ltx.errors import TreeError, UnsupportedError
from tests.contract.conformance.table import OPS, Fn, Op, bend, component, components, draw, loss, total, wide
from tests.contract.hooks.table import HOOKS
from tests.covering import some
from tests.kinds import OnNewAxis, Ranks
from tests.train_on import on_ranks, refuses, said

WORDS = ["".join(letters) for length in (1, 2, 3, 4) for letters in product("FR", repeat=length)]
#: The fast suite's: every pair of letters, and forward mode three times.
SHORT = ["F", "R", "FF", "FR", "RF", "RR", "FFR", "FRF", "RFF", "FFFR"]
ROWS = {op.name: op for op in OPS if not op.rounding}
FAST = ("data_parallel", "sync_gradients", "psum", "pmean", "pmax", "pmin", "all_gather", "psum_scatter", "all_to_all")
FAST += ("ppermute in a ring", "broadcast", "pvary", "adasum", "weighted_mean", "data_parallel Weighted")


def of_rank(word: str, f: Callable[..., Tensor], x: Tensor, t: Tensor, state: Any = ()) -> Tensor:
    """One rank's number: the derivatives of `f(x, state)`, a scalar, at x, each in the direction t."""
    for letter in reversed(word):
        if letter == "F":
            f = partial(lambda f, x, state: jvp(lambda x: f(x, state), (x,), (t,))[1], f)
        else:  # of the state too, which would be lost otherwise
            f = partial(lambda f, *at: wide(grad(f, (0, 1))(*at)[0] * t).sum() * (1 + ltx.axis_index()), f)
    return f(x, state)


def of_all(word: str, fs: Fn, xs: Tensor, ts: Tensor) -> Tensor:
    """The same of all ranks: `fs` gives a number for each, and a reverse derivative is that of their sum."""
    weights = 1 + torch.arange(len(xs))
    for letter in reversed(word):
        if letter == "F":
            fs = partial(lambda fs, xs: jvp(fs, (xs,), (ts,))[1], fs)
        else:
            fs = partial(lambda fs, xs: (grad(lambda xs: fs(xs).sum())(xs) * ts).flatten(1).sum(1) * weights, fs)
    return fs(xs)


def curved(x: Tensor) -> Tensor:
    """What goes into an operation: no tangent of a derivative is lost in it unless this has a second derivative."""
    return x + x.sin() / 2


def each_word(words: list[str], op: Op, x: Tensor, t: Tensor) -> Tensor:
    return torch.stack([of_rank(word, lambda x, _: bend(op.output(curved(x))), x, t) for word in words])


def each_word_of_process(words: list[str], name: str, xs: Tensor, ts: Tensor) -> Tensor:
    rank = ltx.world().rank
    return each_word(words, ROWS[name], xs[rank], ts[rank])


def check(words: list[str], found: Tensor, expected: Tensor) -> None:
    """`found` and `expected` have a row a rank and a column a word."""
    wrong = {
        word: (got.tolist(), want.tolist())
        for word, got, want in zip(words, found.T, expected.T, strict=True)
        if not torch.allclose(got, want, rtol=1e-8, atol=1e-8)
    }
    assert not wrong, f"word: (found on each rank, right): {wrong}"


def words_of(request: pytest.FixtureRequest) -> list[str]:
    """With ``--full`` all of up to three letters, and a few of four, which take most of the time, drawn anew."""
    if not request.config.getoption("--full"):
        return SHORT
    return [word for word in WORDS if len(word) < 4] + random.sample([word for word in WORDS if len(word) == 4], 4)


@pytest.mark.covering(1)
@pytest.mark.parametrize("backing", ["processes", "simulated", "alone"])
@pytest.mark.parametrize("name", some(ROWS, *FAST))
def test_every_word(name: str, backing: str, seed: int, ranks: Ranks, request: Any) -> None:
    op, words = ROWS[name], words_of(request)
    xs, ts = draw(op, 1 if backing == "alone" else 2, seed)
    expected = torch.stack([of_all(word, lambda xs: vmap(bend)(op.outputs(curved(xs))), xs, ts) for word in words], 1)
    if backing == "processes":
        found = torch.stack(list(ranks(2).run(each_word_of_process, words, name, xs, ts)))
    elif backing == "simulated":
        found = ltx.vmap(partial(each_word, words, op))(xs, ts)
    else:
        found = each_word(words, op, xs[0], ts[0])[None]
    check(words, found, expected)


def model_loss(params: list[Tensor], x: Tensor) -> Tensor:
    w, v = params
    return ((x @ w).tanh() @ v.sin() + w.square().sum() ** 2 / 50).sin().mean()


#: Derivatives that go through a reduction and aren't the first, which rounds: they count it as the mean.
BEYOND = [word for word in WORDS if "R" in word and word != "R"]
EACH_HOOK: dict[str, hooks.CommHook] = {
    "exact": hooks.AllReduce(),
    "fp16": hooks.FP16(),
    "onebit, not fed back": hooks.OneBit(block=8, error_feedback=False),
    "partition of two": hooks.partition({"0": hooks.OneBit(block=8), "*": hooks.FP16()}),
    **HOOKS,
}
#: What rounds a lot, with states and without: every word with --full.
SEVERE = ("fp16", "bytegrad", "onebit, not fed back", "topk", "powersgd 1", "qsgd", "partition of two")


def along_a_line(words: list[str], name: str, params: list[Tensor], directions: list[Tensor], x: Tensor) -> Tensor:
    """One rank's derivatives by the place on a line through the parameters; a first gradient is no factor in them."""
    step = ltx.data_parallel(model_loss, ltx.DDPStrategy(comm_hook=EACH_HOOK[name], first_bucket_bytes=8))
    state = step.init(params)

    def at(s: Tensor, state: Any) -> Tensor:
        return step(ltx.Synced([p + s * d for p, d in zip(params, directions, strict=True)], state), x)

    return torch.stack([of_rank(word, at, ZERO, ONE, state) for word in words])


@pytest.mark.parametrize("backing", ["simulated", "processes"])
@pytest.mark.parametrize("name", [*some(EACH_HOOK, *SEVERE)])
def test_every_hook_counts_as_the_mean(name: str, backing: str, seed: int, ranks: Ranks, request: Any) -> None:
    words = [word for word in BEYOND if word in [*words_of(request), "RFR"]]
    if request.config.getoption("--full") and name in SEVERE:
        words = BEYOND
    params = [torch.randn(5, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)]
    directions, xs = [torch.randn_like(p) for p in params], torch.randn(2, 4, 5, dtype=torch.float64)

    def on_all(ss: Tensor) -> Tensor:
        return torch.stack(
            [model_loss([p + ss.mean() * d for p, d in zip(params, directions, strict=True)], x) for x in xs]
        )

    expected = torch.stack([of_all(word, on_all, ZERO.expand(2, 1), ONE.expand(2, 1)) for word in words], 1)
    if backing == "simulated":
        found = ltx.vmap(lambda x: along_a_line(words, name, params, directions, x))(xs)
    else:
        rows = ranks(2).run(lambda: along_a_line(words, name, params, directions, xs[ltx.world().rank]))
        found = torch.stack(list(rows))
    check(words, found, expected)


def test_what_a_gradient_is_made_of_stays_reduced_by_the_hook(seed: int) -> None:
    """A first gradient is what the hook says, also beside its own derivative and inside of a transform around it."""
    step = ltx.data_parallel(model_loss, ltx.DDPStrategy(comm_hook=hooks.OneBit(block=8, error_feedback=False)))
    params = [torch.randn(5, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)]
    xs = torch.randn(2, 4, 5, dtype=torch.float64)
    first = ltx.vmap(partial(grad(step), params))(xs)
    beside = ltx.vmap(lambda x: jvp(lambda p: grad(step)(p, x), (params,), (params,))[0])(xs)
    torch.testing.assert_close(beside, first, rtol=0, atol=0)


@pytest.mark.parametrize("word", ["RF", "RFF", "FRF", "RR"])
def test_tangents_that_reach_no_parameter_on_one_rank(word: str, seed: int, ranks: Ranks) -> None:
    """A loss that is linear on rank 1 leaves nothing there to differentiate again, and the ranks don't part."""
    params, directions = ([torch.randn(n, dtype=torch.float64) for n in (2, 3)] for _ in range(2))

    def loss(params: list[Tensor], rank: int) -> Tensor:
        return sum(((p.sin() * (i + 2)).sum() if rank == 0 else p.sum() for i, p in enumerate(params)), ZERO)

    def derivative(word: str, f: Callable[[list[Tensor]], Tensor]) -> Callable[[list[Tensor]], Tensor]:
        if not word:
            return f
        inner = derivative(word[1:], f)
        if word[0] == "F":
            return lambda params: jvp(inner, (params,), (directions,))[1]
        return lambda params: sum(
            ((g * d).sum() for g, d in zip(grad(inner)(params), directions, strict=True)), torch.zeros(())
        )

    step = ltx.data_parallel(loss, ltx.DDPStrategy(comm_hook="fp16", first_bucket_bytes=8))
    expected = derivative(word, lambda params: (loss(params, 0) + loss(params, 1)) / 2)(params)
    for found in ranks(2).run(lambda: derivative(word, lambda params: step(params, ltx.world().rank))(params)):
        torch.testing.assert_close(found, expected)


ZERO, ONE = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)


def in_a_dual_level(loss: Callable[[list[Tensor], Tensor], Tensor], params: list[Tensor], x: Tensor) -> list[Tensor]:
    """A plain backward pass whose gradients have tangents, by the batch; and that of its tangents."""
    leaves = [p.clone().requires_grad_() for p in params]
    with forward_ad.dual_level():
        grads = torch.autograd.grad(
            loss(leaves, forward_ad.make_dual(x, torch.ones_like(x))), leaves, create_graph=True
        )
        tangents = [forward_ad.unpack_dual(grad).tangent for grad in grads]
        first = torch.autograd.grad(loss(leaves, forward_ad.make_dual(x, torch.ones_like(x))), leaves)
        again = torch.autograd.grad(sum(t.sum() for t in tangents), leaves)
        return [x.detach() for x in (*tangents, *(forward_ad.unpack_dual(grad).tangent for grad in first), *again)]


@pytest.mark.parametrize("bucket_bytes", [8, 2**20])
def test_plain_backward_passes_with_dual_numbers(bucket_bytes: int, seed: int, ranks: Ranks) -> None:
    params = [torch.randn(5, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)]
    xs = torch.randn(2, 4, 5, dtype=torch.float64)
    step = ltx.data_parallel(model_loss, ltx.DDPStrategy(bucket_bytes=bucket_bytes, first_bucket_bytes=bucket_bytes))
    expected = in_a_dual_level(lambda w, xs: (model_loss(w, xs[0]) + model_loss(w, xs[1])) / 2, params, xs)
    for found in ranks(2).run(lambda: in_a_dual_level(step, params, xs[ltx.world().rank])):
        torch.testing.assert_close(found, expected)


RECORDED = ("data_parallel", "sync_gradients", "psum", "pmax", "ppermute to one")


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
        pytest.param(name, backing, marks=() if name in RECORDED and backing != "sockets" else pytest.mark.full)
        for name in ROWS
        for backing in ("shared memory", "sockets", "alone")
        if name in RECORDED or backing != "sockets"  # what is recorded is the same on both
    ],
)
def test_linearize(name: str, backing: str, seed: int, ranks: Ranks, on_new_axis: OnNewAxis, request: Any) -> None:
    xs, ts = draw(ROWS[name], 1 if backing == "alone" else 2, seed)
    # Graphs of second derivatives are recorded of all operations below.
    kinds = ["value", "gradient", "second"][: 3 if request.config.getoption("--full") and name in RECORDED else 2]
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
        if kind == "second" and name not in RECORDED:
            continue
        value, push = linearize(lambda xs, f=on_one: ltx.vmap(f)(xs, ts), xs)
        close(torch.stack([value, push(ts)]), torch.stack(jvp(on_all, (xs,), (ts,))))


def recorded(name: str, mode: str, xs: Tensor, ts: Tensor) -> list[tuple[Tensor, list[str]]]:
    """On one rank: of graphs recorded with other values, what they give, and what they call."""
    rank, results = ltx.world().rank, []
    for on_one, _ in functions(ROWS[name], ts).values():
        graph = make_fx(on_one, tracing_mode=mode)(xs[rank] * 0 + 0.5, ts[rank])
        results.append((graph(xs[rank], ts[rank]), [str(node.target) for node in graph.graph.nodes]))
    return results


@pytest.mark.parametrize("mode", [pytest.param("real", marks=pytest.mark.full), "fake"])
@pytest.mark.parametrize("name", some(ROWS, *RECORDED))
def test_make_fx_records_functional_collectives(name: str, mode: str, seed: int, ranks: Ranks) -> None:
    xs, ts = draw(ROWS[name], 2, seed)
    found = list(ranks(2).run(recorded, name, mode, xs, ts))
    for each, (_, on_all) in zip(zip(*found, strict=True), functions(ROWS[name], ts).values(), strict=True):
        close(torch.stack([value for value, _ in each]), on_all(xs))
        for _, calls in each:
            assert not [call for call in calls if call.startswith(("c10d.", "ltx", "aten.copy_"))]
    if name in RECORDED:
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
    names = [name for name in RECORDED if name != "adasum"]  # its program asks for this rank's place
    found = ranks(2).run(shapes_of_fakes, names)[0]
    each = [functions(ROWS[name], torch.ones(2, 2, 4))[kind][1] for name in names for kind in ("value", "gradient")]
    shapes = [list(f(torch.rand(2, 2, 4, dtype=torch.float64)).shape)[1:] for f in each]
    assert [found[i] for i in range(len(found)) if i % 3 < 2] == shapes


@on_ranks(2)
def test_a_fake_tensor_outside_of_its_mode_is_refused() -> None:
    with torch._subclasses.FakeTensorMode() as mode:
        x = mode.from_tensor(torch.ones(2))
    text = "psum: leaf 'w' is a FakeTensor, outside of its FakeTensorMode, and its values are needed."
    assert said(TreeError, ltx.psum, {"w": x}) == text


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
    close(torch.stack([value for value, _ in ranks(2).run(exported, name, xs, ts)]), ROWS[name].outputs(xs))


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
    text = r"of type Proxy. torch.fx.symbolic_trace can't record ltx. Use make_fx"
    refuses(TreeError, text, torch.fx.symbolic_trace, Calls(CALLS[call]))


@on_ranks(2)
def test_what_no_graph_can_hold_is_refused_before_it_is_sent() -> None:
    text = said(UnsupportedError, make_fx(lambda x: x * ltx.all_gather_object(1.0)[0]), torch.ones(2))
    assert text.startswith(f"rank {ltx.world().rank}: ")
    assert text.endswith("fake tensors can't be sent. Call it outside of what is recorded.")
    assert ltx.psum(torch.ones(())) == 2
