"""Gradients of any magnitude: each hook is as right for 1e20 and 1e-30 as for 1, or what it gives isn't finite.

What hooks divide by are norms and ranges, whose squares overflow and vanish long before the numbers themselves.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx import hooks
from ltx.errors import NotFiniteError
from ltx.hooks import CommHook
from tests.contract.hooks.table import HOOKS
from tests.kinds import Ranks
from tests.train_on import refuses

Grads = dict[str, Tensor]
#: At most these errors, relative in norm, of gradients whose matrix has rank one, at the second step.
ALL: dict[str, tuple[CommHook, float]] = {
    "exact": (hooks.AllReduce(), 1e-6),
    "bf16": (hooks.BF16(), 2**-7),
    "bf16, fed back": (hooks.error_feedback(hooks.BF16()), 2**-7),
    "bytegrad": (hooks.ByteGrad(), 0.1),
    "bytegrad, fed back": (hooks.error_feedback(hooks.ByteGrad()), 0.1),
    "quantize": (hooks.Quantize(), 0.1),
    "quantize, channels": (hooks.Quantize("channel", 64), 0.1),
    "qsgd": (hooks.QSGD(block=64), 0.1),
    "qsgd, blocks of 512": (hooks.QSGD(), 0.25),
    "topk": (hooks.TopK(1.0), 1e-6),
    "randomk": (hooks.RandomK(1.0), 1e-6),
    "powersgd": (hooks.PowerSGD(1, start_step=0), 1e-3),
    "powersgd 2": (hooks.PowerSGD(2, start_step=0), 1e-3),
    "powersgd, started anew": (hooks.PowerSGD(1, start_step=0, warm_start=False), 1e-3),
    "powersgd, not fed back": (hooks.PowerSGD(1, start_step=0, error_feedback=False), 1e-3),
    "batched powersgd": (hooks.BatchedPowerSGD(40, start_step=0), 1e-3),
    # Of rank 4, so that one column at least isn't nearly orthogonal to the gradients and rounded to nothing.
    "powersgd in bf16": (hooks.cast(hooks.PowerSGD(4, start_step=0), torch.bfloat16), 0.05),
    "powersgd in eight bits": (hooks.chain(hooks.PowerSGD(4, start_step=0), hooks.Quantize()), 0.1),
    "randomk in eight bits": (hooks.chain(hooks.RandomK(1.0), hooks.ByteGrad()), 0.1),
}
SCALES = (1e20, 1e30, 1e-30, 1e-37, 1e-40)
QUICK = ("qsgd", "powersgd", "quantize, channels", "batched powersgd")
TINY = torch.finfo(torch.float32).tiny  # numbers below may arrive as 0


def gradients(scale: float, n: int = 2) -> Grads:
    """Stacked over ranks; one matrix whose sum over ranks has rank one, and a bias."""
    matrix = torch.randn(30).sign()[:, None] * torch.randn(n, 1, 40)
    return {"w": scale * matrix, "b": scale * torch.randn(n, 17)}


def two_steps(hook: CommHook, grads: Grads) -> tuple[Grads, Any]:
    strategy = ltx.DDPStrategy(comm_hook=hook)
    state = ltx.data_parallel(lambda p: p, strategy).init(ltx.tree.map(torch.zeros_like, grads))
    for _ in range(2):
        result, state = ltx.sync_gradients(grads, strategy, state)
    return result, state.leaves


def check(name: str, grads: Grads, result: Grads, states: Any) -> None:
    mean = torch.cat([x.double().mean(0).flatten() for x in grads.values()])
    error = torch.cat([x.flatten() for x in result.values()]).double() - mean
    off = error.norm() / mean.norm()
    assert off <= ALL[name][1] or error.abs().max() <= TINY, f"{name}: {off} at {mean.abs().max()}"
    assert all(x.isfinite().all() for x in ltx.tree.flatten(states)[0])


@pytest.mark.full(but=4)
@pytest.mark.parametrize("name", [*QUICK, *(name for name in ALL if name not in QUICK)])
def test_hooks_are_as_right_at_any_magnitude(name: str, seed: int) -> None:
    mixed = gradients(1e20)
    mixed["b"] *= 1e-30
    apart = ltx.tree.map(lambda x: x * torch.tensor([1.0, 1e-30]).view(2, *[1] * (x.ndim - 1)), gradients(1e15))
    for grads in (mixed, apart, *map(gradients, SCALES)):
        result, states = ltx.vmap(lambda g: two_steps(ALL[name][0], g))(grads)
        check(name, grads, ltx.tree.map(lambda x: x[1], result), states)


def test_hooks_are_as_right_at_any_magnitude_on_real_ranks(ranks: Ranks, seed: int) -> None:
    given = [(name, gradients(scale)) for name in ("qsgd", "powersgd", "batched powersgd") for scale in (1e20, 1e-30)]

    def on_rank() -> Any:
        rank = ltx.world().rank
        return [two_steps(ALL[name][0], ltx.tree.map(lambda x: x[rank], grads)) for name, grads in given]

    for found in ranks(2).run(on_rank):
        for (name, grads), (result, states) in zip(given, found, strict=True):
            check(name, grads, result, states)


@pytest.mark.parametrize("hook", [hooks.FP16(), hooks.cast(hooks.PowerSGD(1, start_step=0), torch.float16)], ids=repr)
def test_what_half_precision_cannot_hold_is_refused(hook: CommHook, ranks: Ranks) -> None:
    grads = gradients(1e20)
    result, _ = ltx.vmap(lambda g: two_steps(hook, g))(grads)
    assert not any(x.isfinite().any() for x in result.values())
    step = ltx.data_parallel(lambda p, x: (p * x).sum(), ltx.DDPStrategy(comm_hook=hook))
    train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=0.1), guard="raise")

    def on_rank() -> None:
        refuses(NotFiniteError, "finite", train, train.init(torch.zeros(30, 40)), grads["w"][ltx.world().rank])

    ranks(2).run(on_rank)


@pytest.mark.parametrize("block", [8, 512, 600])
def test_one_bit_has_a_size_where_the_sum_of_a_block_overflows(block: int, ranks: Ranks, seed: int) -> None:
    """A constant of any sign pattern arrives exactly: from real ranks, simulated ones, and in the padded last block."""
    grads = {"w": 1e38 * torch.randn(700).sign().expand(2, -1)}
    hook = hooks.OneBit(block)
    found = [ltx.vmap(lambda g: two_steps(hook, g)[0]["w"])(grads)[0]]
    found += ranks(2).run(lambda: two_steps(hook, ltx.tree.map(lambda x: x[0], grads))[0]["w"])
    for w in found:
        torch.testing.assert_close(w, grads["w"][0], rtol=1e-6, atol=0)


# Codecs compute sizes and ranges over blocks, and the last block of a bucket is filled up: of that nothing shows.
SIZES = (1, 8, 100, 511, 512, 513, 600)
#: What of 1 to 600 numbers each hook says without an error: equal ones, or a single one among zeros.
SINGLE = ("qsgd", "topk", "functions, fed back", "warm-up in halves")
NEITHER = ("randomk", "randomk, unbiased", "randomk in eight bits", "a chain of three")
EVERY: dict[str, CommHook] = {
    **{name: hook for name, hook in HOOKS.items() if name not in NEITHER},
    "onebit, blocks of 512": hooks.OneBit(),
    "onebit, not fed back": hooks.OneBit(error_feedback=False),
    "qsgd, blocks of 512": hooks.QSGD(),
    "quantize, channels of 512": hooks.Quantize("channel"),
    "batched powersgd 1": hooks.BatchedPowerSGD(1, start_step=0),
    "randomk, all": hooks.RandomK(1.0),
    "onebit in eight bits after powersgd": hooks.after(
        1, hooks.OneBit(), first=hooks.chain(hooks.PowerSGD(1, start_step=0), hooks.ByteGrad())
    ),
    "bf16": hooks.BF16(),
    "fp16": hooks.FP16(),
    "exact": hooks.AllReduce(),
}
QUICK_SHORT = ("bytegrad", "qsgd", "onebit", "topk", "powersgd 1", "onebit, blocks of 512", "batched powersgd 1")
NAMES = [name if name in QUICK_SHORT else pytest.param(name, marks=pytest.mark.full) for name in EVERY]


def cases(name: str) -> list[Tensor]:
    """Gradients that are the same on all ranks; the values are exact in sixteen bits."""
    found = [torch.zeros(size) for size in SIZES]
    for size in SIZES:
        if name.startswith(SINGLE):
            found.append(torch.zeros(size).index_fill(0, torch.tensor(size - 1), -0.375))
        else:
            found += [torch.full((size,), 1.0), torch.full((size,), -0.375)]
    return found


def three_steps(hook: CommHook, grad: Tensor) -> list[Tensor]:
    strategy = ltx.DDPStrategy(comm_hook=hook)
    state = ltx.data_parallel(lambda p: p, strategy).init(torch.zeros(len(grad)))
    results = []
    for _ in range(3):
        result, state = ltx.sync_gradients(grad, strategy, state)
        results.append(result)
    return results


def check_short(name: str, grad: Tensor, results: list[Tensor]) -> None:
    for result in results:
        torch.testing.assert_close(result, grad, rtol=1e-6, atol=0, msg=lambda text: f"{name}, {len(grad)}: {text}")


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.full(but=1))])
@pytest.mark.parametrize("name", NAMES)
def test_what_a_hook_can_say_arrives_on_simulated_ranks(name: str, n: int) -> None:
    for grad in cases(name):
        results = ltx.vmap(lambda g: three_steps(EVERY[name], g))(grad.expand(n, -1))
        check_short(name, grad, [result[n - 1] for result in results])


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.full)])
def test_what_a_hook_can_say_arrives_on_real_ranks(n: int, ranks: Ranks, request: pytest.FixtureRequest) -> None:
    names = list(EVERY) if request.config.getoption("--full") else QUICK_SHORT

    for found in ranks(n).run(lambda: [[three_steps(EVERY[name], grad) for grad in cases(name)] for name in names]):
        for name, of_name in zip(names, found, strict=True):
            for grad, results in zip(cases(name), of_name, strict=True):
                check_short(name, grad, results)


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.full)])
def test_onebit_settles_where_a_bucket_is_shorter_than_a_block(n: int, seed: int) -> None:
    """Nine numbers, each rank with a target of its own: the least sum of squares is at the targets' mean."""
    targets = torch.randn(n, 9)
    strategy = ltx.DDPStrategy(comm_hook=hooks.OneBit())

    def on_rank(target: Tensor) -> Tensor:
        state = ltx.data_parallel(lambda p: p, strategy).init(torch.zeros(9))
        w = torch.zeros(9)
        for step in range(300):
            gradient, state = ltx.sync_gradients(w - target, strategy, state)
            w = w - 0.1 / (1 + step / 30) * gradient
        return w

    assert (ltx.vmap(on_rank)(targets)[0] - targets.mean(0)).norm() <= 0.08


@pytest.mark.parametrize("size", [8, 100])
def test_bytegrad_takes_its_step_from_the_numbers_alone(size: int, seed: int) -> None:
    """Far from zero two roundings are off by a step of the numbers' range, not of the range from zero on."""
    grads = (1 + 1e-3 * torch.rand(size)).expand(3, -1)
    found = ltx.vmap(lambda g: ltx.sync_gradients(g, ltx.DDPStrategy(comm_hook=hooks.ByteGrad()))[0])(grads)
    assert (found - grads).abs().max() <= 1e-3 / 255 + 1e-6


@pytest.mark.parametrize("name", ["bytegrad", "low_precision_decentralized"])
def test_parts_of_a_nodes_ranks_have_ranges_of_their_numbers_alone(name: str, ranks: Ranks, seed: int) -> None:
    strategy = ltx.BaguaStrategy(name, hierarchical=True, node_size=2)
    sgd = ltx.optim.from_torch(torch.optim.SGD, lr=1.0)
    train = ltx.train_step(ltx.data_parallel(lambda w, x: (w * x).sum(), strategy), sgd)
    grads = [1 + 1e-3 * torch.rand(size) for size in (1, 7, 511)]

    def on_rank() -> list[Tensor]:
        return [train(train.init(torch.zeros_like(grad)), grad)[0].params for grad in grads]

    for found in ([one[3] for one in ltx.vmap(on_rank, axis_size=4)()], *ranks(2).run(on_rank)):
        for grad, params in zip(grads, found, strict=True):
            assert (-params - grad).abs().max() <= 1e-3 / 255 + 2e-6
