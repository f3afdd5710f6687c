"""A hook may start work of another engine: in bucket order, in the backward pass; it is waited for later."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import ltx
from ltx.extend import BucketInput, CollectiveRequest, CommHook, Reduction, StartedWork
from tests.kinds import Params, Ranks
from tests.train_on import on_ranks

#: What happened: ("grad", parameter), ("start", bucket) and ("wait", bucket).
LOG: list[tuple[str, Any]] = []


@dataclass
class Doubling:
    """Work of an engine that doubles."""

    flat: Tensor
    bucket: int

    def wait(self) -> None:
        LOG.append(("wait", self.bucket))
        self.flat.mul_(2)


@dataclass(frozen=True)
class Engine(CommHook):
    """Twice the mean: a sum by ltx where there are ranks, then the engine's doubling."""

    last: bool = False  # the sum comes after the doubling

    exact: ClassVar[bool] = False
    phases: ClassVar[int] = 3

    def reduce(self, inputs: BucketInput) -> Reduction:
        flat = inputs.flat
        if inputs.axis_size > 1 and not self.last:
            flat = yield CollectiveRequest("psum", flat)
        LOG.append(("start", inputs.bucket.index))
        flat = yield StartedWork(Doubling(flat, inputs.bucket.index), flat)
        if inputs.axis_size > 1 and self.last:
            flat = yield CollectiveRequest("psum", flat)
        return flat, inputs.states


class Noted(torch.autograd.Function):
    """Identity that notes when its backward pass runs."""

    @staticmethod
    def forward(x: Tensor, name: str) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.name = inputs[1]

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
        LOG.append(("grad", ctx.name))
        return cotangent, None


def loss(order: list[str], params: Params, x: Tensor) -> Tensor:
    for name in order:
        x = torch.tanh(x @ Noted.apply(params[name], name))
    return x.square().mean()


def trained(hook: CommHook, own_order: bool, seed: int) -> tuple[Params, list[tuple[str, Any]], Params]:
    """The parameters after a step, what happened in it, and the gradients of all ranks' mean loss."""
    generator = torch.Generator().manual_seed(seed)
    params = {name: torch.randn(4, 4, generator=generator) for name in "abcdef"}
    rank, size = int(ltx.axis_index()), int(ltx.axis_size())
    xs = torch.randn(size, 3, 4, generator=generator)
    orders = [list(params) for _ in range(size)]
    for place, order in enumerate(orders):
        if own_order:
            random.Random(seed + place).shuffle(order)
    strategy = ltx.DDPStrategy(comm_hook=hook, bucket_bytes=70, first_bucket_bytes=70)
    step = ltx.data_parallel(lambda p, x: loss(orders[rank], p, x), strategy)
    train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=1.0))
    state = train.init(params)
    state, _ = train(state, xs[rank])
    LOG.clear()
    before = {name: p.clone() for name, p in state.params.items()}
    state, _ = train(state, xs[rank])
    log = list(LOG)
    leaves = {name: p.clone().requires_grad_() for name, p in before.items()}
    total = sum(loss(orders[other], leaves, xs[other]) for other in range(size)) / size
    grads = torch.autograd.grad(total, list(leaves.values()))
    expected = {name: before[name] - 2 * g for name, g in zip(leaves, grads, strict=True)}
    return state.params, log, expected


def check(found: Params, log: list[tuple[str, Any]], expected: Params) -> list[str]:
    """Returns what happened, without the names."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    starts = [bucket for what, bucket in log if what == "start"]
    assert len(starts) > 3
    assert starts == sorted(starts), "peers of that engine would start in another order"
    return [what for what, _ in log]


@pytest.mark.parametrize("own_order", [False, True])
def test_in_a_world_of_one(own_order: bool, seed: int) -> None:
    kinds = check(*trained(Engine(), own_order, seed))
    assert "start" not in kinds[kinds.index("wait") :], "a bucket waits for another"
    if not own_order:
        assert "grad" in kinds[kinds.index("start") :], "nothing goes out before the pass is over"


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("own_order", [False, True])
def test_on_two_ranks(own_order: bool, last: bool, ranks: Ranks, seed: int) -> None:
    for found in ranks(2).run(trained, Engine(last), own_order, seed):
        check(*found)


def test_inside_of_another_hook(ranks: Ranks, seed: int) -> None:
    for found in ranks(2).run(trained, ltx.hooks.chain(Engine(), ltx.hooks.AllReduce()), False, seed):
        check(*found)


@pytest.mark.slow_compile
@on_ranks(2)
def test_a_compiled_graph_has_no_node_for_it() -> None:
    step = ltx.data_parallel(lambda p, x: (p * x).sum(), ltx.DDPStrategy(comm_hook=Engine()))
    grads = torch.compile(ltx.grad(step), backend="aot_eager")
    with pytest.raises(Exception, match=r"Engine\(\) starts work of its own, which a compiled graph has no node for"):
        grads(torch.ones(3), torch.ones(3))
