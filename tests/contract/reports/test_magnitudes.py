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
