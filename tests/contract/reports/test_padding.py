"""Codecs compute sizes and ranges over blocks, and the last block of a bucket is filled up: of that nothing shows.

What a codec can say exactly arrives exactly, whatever the bucket's length.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ltx
from ltx import hooks
from ltx.hooks import CommHook
from tests.contract.hooks.table import HOOKS
from tests.kinds import Ranks

SIZES = (1, 8, 100, 511, 512, 513, 600)
#: What of 1 to 600 numbers each hook says without an error: equal ones, or a single one among zeros.
SINGLE = ("qsgd", "topk", "functions, fed back", "warm-up in halves")
NEITHER = ("randomk", "randomk, unbiased", "randomk in eight bits", "a chain of three")
ALL: dict[str, CommHook] = {
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
QUICK = ("bytegrad", "qsgd", "onebit", "topk", "powersgd 1", "onebit, blocks of 512", "batched powersgd 1")
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in ALL]


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


def check(name: str, grad: Tensor, results: list[Tensor]) -> None:
    for result in results:
        torch.testing.assert_close(result, grad, rtol=1e-6, atol=0, msg=lambda text: f"{name}, {len(grad)}: {text}")


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.full(but=1))])
@pytest.mark.parametrize("name", NAMES)
def test_what_a_hook_can_say_arrives_on_simulated_ranks(name: str, n: int) -> None:
    for grad in cases(name):
        results = ltx.vmap(lambda g: three_steps(ALL[name], g))(grad.expand(n, -1))
        check(name, grad, [result[n - 1] for result in results])


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.full)])
def test_what_a_hook_can_say_arrives_on_real_ranks(n: int, ranks: Ranks, request: pytest.FixtureRequest) -> None:
    names = list(ALL) if request.config.getoption("--full") else QUICK

    for found in ranks(n).run(lambda: [[three_steps(ALL[name], grad) for grad in cases(name)] for name in names]):
        for name, of_name in zip(names, found, strict=True):
            for grad, results in zip(cases(name), of_name, strict=True):
                check(name, grad, results)


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

    simulated = [one[3] for one in ltx.vmap(on_rank, axis_size=4)()]
    for found in (simulated, *ranks(2).run(on_rank)):
        for grad, params in zip(grads, found, strict=True):
            assert (-params - grad).abs().max() <= 1e-3 / 255 + 2e-6
