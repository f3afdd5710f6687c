"""Hooks in compiled graphs: the same results and states as eagerly, one graph for all steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx import hooks
from ltx.errors import SyncStateError, UnsupportedError
from ltx.hooks import noise
from tests.contract.hooks.table import HOOKS
from tests.kinds import Ranks

Params = dict[str, Any]
pytestmark = [pytest.mark.slow_compile, pytest.mark.timeout(600)]

STEPS = 3
# Of each kind; those with a schedule can't be held by a graph, as test_refused says.
RANDOM = ["randomk", "randomk, unbiased", "batched powersgd", "powersgd, cold", "randomk in eight bits"]
NAMES = [
    "powersgd 1",
    *RANDOM,
    "qsgd",
    "onebit",
    "bytegrad",
    "bytegrad, fed back",
    "topk",
    "quantize per channel",
    "bf16, fed back",
    "powersgd in bf16",
    "by path",
]
# Inductor takes three times as long: one of each kind of kernels.
BY_INDUCTOR = [
    "powersgd 1",
    "randomk in eight bits",
    "qsgd",
    "onebit",
    "topk",
    "quantize per channel",
    "bf16, fed back",
]
#: Compiled by `torch.func.grad` too, whose graph differs from that of `ltx.grad` in nothing that is a hook's.
BOTH_WAYS = {"powersgd 1", "randomk in eight bits", "bytegrad, fed back"}
CASES = [
    *(pytest.param("aot_eager", name, marks=pytest.mark.full) for name in NAMES),
    *(pytest.param("inductor", name, marks=[pytest.mark.full, pytest.mark.inductor]) for name in BY_INDUCTOR),
]
EXAMPLES = {
    **HOOKS,
    "powersgd, cold": hooks.PowerSGD(1, start_step=0, warm_start=False, seed=6),
    "by path": hooks.partition({"list.0": hooks.ByteGrad(), "*": hooks.PowerSGD(1, start_step=0)}),
}


def loss(params: Params, x: Tensor) -> Tensor:
    return (torch.tanh(x @ params["w"] + params["list"][0]) @ params["list"][1]).pow(2).mean()


def strategy_of(hook: hooks.CommHook) -> ltx.DDPStrategy:
    return ltx.DDPStrategy(comm_hook=hook, bucket_bytes=2000, first_bucket_bytes=100)


def parameters() -> Params:
    return {"w": torch.randn(6, 16).double(), "list": [torch.randn(16).double(), torch.randn(16, 12).double()]}


def run(gradient: Callable[..., Any], params: Params, state: Any, batches: list[Tensor]) -> Any:
    found = []
    for x in batches:
        grads, state = gradient(params, state, x)
        found.append(grads)
    return found, state.leaves, state.checked_step()


def by_func(step: Any) -> Callable[[Params, Any, Tensor], Any]:
    return lambda params, state, x: torch.func.grad(step)(ltx.Synced(params, state), x)


def by_ltx(step: Any) -> Callable[[Params, Any, Tensor], Any]:
    return lambda params, state, x: ltx.grad(step)(params, x, sync_state=state)


@pytest.mark.parametrize(("backend", "name"), CASES)
def test_equals_eager(backend: str, name: str, ranks: Ranks) -> None:
    params, x = parameters(), torch.randn(2, STEPS, 4, 6).double()
    step = ltx.data_parallel(loss, strategy_of(EXAMPLES[name]))

    ways = (by_func(step), by_ltx(step)) if name in BOTH_WAYS else (by_ltx(step),)

    def on_rank() -> Any:
        from torch._dynamo.utils import counters

        mine = list(x[ltx.world().rank])
        eager = run(by_ltx(step), params, step.init(params), mine)
        torch._dynamo.reset()
        counters.clear()
        compiled = [
            run(torch.compile(way, backend=backend, fullgraph=True), params, step.init(params), mine) for way in ways
        ]
        return eager, compiled, counters["stats"]["unique_graphs"]

    found = list(ranks(2).run(on_rank, timeout_s=550.0))
    for eager, compiled, graphs in found:
        assert graphs == len(ways)
        for results in compiled:
            tolerance = 0 if backend == "aot_eager" else 1e-9
            torch.testing.assert_close(results, eager, rtol=tolerance, atol=tolerance)
            assert all(
                torch.equal(a, b)
                for a, b in zip(ltx.tree.flatten(results[0])[0], ltx.tree.flatten(found[0][1][0][0])[0], strict=True)
            )


@pytest.mark.full
@pytest.mark.parametrize("name", ["qsgd", *(pytest.param(name, marks=pytest.mark.full) for name in RANDOM)])
def test_simulated(name: str) -> None:
    from torch._dynamo.utils import counters

    params, x = parameters(), torch.randn(STEPS, 3, 4, 6).double()
    step = ltx.data_parallel(loss, strategy_of(EXAMPLES[name]))
    gradient = ltx.vmap(by_func(step), in_dims=(None, 0, 0))
    state = ltx.tree.map(lambda t: torch.stack([t] * 3), step.init(params))
    counters.clear()
    compiled = run(torch.compile(gradient, backend="aot_eager", fullgraph=True), params, state, list(x))
    assert counters["stats"]["unique_graphs"] == 1
    torch.testing.assert_close(compiled, run(gradient, params, state, list(x)), rtol=0, atol=0)


@pytest.mark.full
def test_random_numbers_of_steps_taken_eagerly_and_in_graphs(ranks: Ranks) -> None:
    params, x = parameters(), torch.randn(2, 4, 4, 6).double()
    step = ltx.data_parallel(loss, strategy_of(HOOKS["randomk, unbiased"]))

    def on_rank() -> Any:
        eagerly = ltx.grad(step)
        compiled = torch.compile(eagerly, backend="aot_eager", fullgraph=True)
        mixed, eager, found = step.init(params), step.init(params), []
        for batch, way in zip(x[ltx.world().rank], (eagerly, compiled, compiled, eagerly), strict=True):
            grads, mixed = way(params, batch, sync_state=mixed)
            expected, eager = eagerly(params, batch, sync_state=eager)
            torch.testing.assert_close(grads, expected, rtol=0, atol=0)
            found.append(torch.cat([g.flatten() for g in ltx.tree.flatten(grads)[0]]) != 0)
        return found, mixed.checked_step()

    for found, steps in ranks(2).run(on_rank, timeout_s=550.0):
        assert steps == 4
        assert not any(torch.equal(found[i], found[j]) for i in range(4) for j in range(i))  # each step has its places


@pytest.mark.full
@pytest.mark.inductor
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_what_isnt_finite_arrives_by_inductor() -> None:
    """Wherever it is; Inductor takes a product with 0 for 0."""
    step = ltx.data_parallel(lambda w, x: (w * x).sum(), strategy_of(hooks.RandomK(0.1, error_feedback=False)))
    state, w = step.init(torch.ones(20)), torch.ones(20)

    compiled = torch.compile(lambda x: ltx.vmap(lambda x: ltx.grad(step)(w, x, sync_state=state)[0])(x), fullgraph=True)
    for place in range(20):
        for value in (float("nan"), float("inf")):
            x = torch.ones(2, 20)
            x[1, place] = value
            assert not compiled(x).isfinite().all(), (place, value)


@pytest.mark.full
@pytest.mark.inductor
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_random_bits_by_inductor() -> None:
    def draw(step: Tensor) -> Tensor:
        return noise.bits(noise.key_of(7, step, 3, device=step.device), 10_000)

    compiled = torch.compile(draw, fullgraph=True)
    for step in (0, 1, 2**31 - 1, 2**40 + 5):
        expected = noise.bits(noise.key_of(7, step, 3, device=torch.device("cpu")), 10_000)
        assert torch.equal(compiled(torch.tensor(step)), expected)


class Alternating(hooks.CommHook):
    reads_step = True

    def at(self, step: int) -> hooks.CommHook:
        return hooks.AllReduce() if step % 2 else hooks.FP16()


REFUSED = {
    "a schedule": (
        hooks.after(5, hooks.OneBit(block=16)),
        True,
        UnsupportedError,
        r"compiled at step 0 needs one reduction .*After.*: run the first steps eagerly",
    ),
    "a schedule of one's own": (Alternating(), True, UnsupportedError, r"needs one reduction .*Alternating"),
    "bare parameters": (hooks.OneBit(block=16), False, SyncStateError, r"was given bare parameters"),
    "bare parameters for random numbers": (hooks.QSGD(), False, SyncStateError, r"was given bare parameters"),
}


@pytest.mark.covering(1, of=lambda **_: ())
@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    hook, synced, error, text = REFUSED[case]
    params, x = parameters(), torch.randn(4, 6).double()
    step = ltx.data_parallel(loss, strategy_of(hook))
    given = ltx.Synced(params, step.init(params)) if synced else params
    with pytest.raises(Exception, match=text) as raised:
        torch.compile(torch.func.grad(step), backend="aot_eager", fullgraph=True)(given, x)
    assert isinstance(raised.value, error) or error.__name__ in str(raised.value)


@pytest.mark.full
def test_a_schedule_that_is_over_can_be_compiled() -> None:
    params, x = parameters(), torch.randn(4, 4, 6).double()
    step = ltx.data_parallel(loss, strategy_of(hooks.after(2, hooks.OneBit(block=16))))
    gradient, state = by_ltx(step), step.init(params)
    for t in range(2):
        _, state = gradient(params, state, x[t])
    compiled = run(torch.compile(gradient, backend="aot_eager", fullgraph=True), params, state, list(x[2:]))
    torch.testing.assert_close(compiled, run(gradient, params, state, list(x[2:])), rtol=1e-9, atol=1e-9)
