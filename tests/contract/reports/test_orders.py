"""Derivatives of every order: words over {forward, reverse}, the first letter the outermost derivative.

What is right comes from torch.func in one process, on one stacked tensor of all ranks' values, by the convention of
tests/contract/conformance: a derivative is that of the sum over ranks of each one's own loss.
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
from torch.func import grad, jvp, vmap

import ltx
from ltx import hooks
from tests.contract.conformance.table import OPS, Fn, Op, bend, draw, wide
from tests.contract.hooks.table import HOOKS
from tests.covering import some
from tests.kinds import Ranks

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
