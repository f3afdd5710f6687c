"""Numbers of any magnitude: each hook is as right for 1e20 and 1e-30 as for 1, or what it gives isn't finite.

What hooks divide by are norms and ranges, whose squares overflow and vanish long before the numbers themselves. Sums
of many numbers in 16 bits are those of float64, rounded once. Values that no training can be of are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import jvp
from torch.optim import Adam, AdamW

import ltx
from ltx import hooks
from ltx.errors import AxisError, NotFiniteError, OptimError, TreeError, WeightError
from ltx.hooks import CommHook
from ltx.optim import from_torch
from tests.contract.hooks.table import HOOKS
from tests.kinds import Ranks
from tests.train_on import on_ranks, reduced, refuses, trained
from tests.twins.training import by_train_step, sgd

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
    results, state = reduced(ltx.DDPStrategy(comm_hook=hook), [grads] * 2)
    return results[-1], state.leaves


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
NEITHER = ("randomk", "randomk, unbiased", "randomk in eight bits", "randomk in two phases", "a chain of three")
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
    return reduced(ltx.DDPStrategy(comm_hook=hook), [grad] * 3)[0]


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


MANY = 64
NARROW = [torch.bfloat16, torch.float16]
ADDS = from_torch(torch.optim.SGD, lr=1.0)


def numbers(count: int, dtype: torch.dtype) -> Tensor:
    """Small ones between two large ones, in a narrow sum with which each of them is lost, from either end."""
    x = torch.rand(count)
    x[0] = x[-1] = 2 / torch.finfo(dtype).eps
    return x.to(dtype)


def assert_right(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=torch.finfo(found.dtype).eps, atol=0)


def mean(w: Tensor, x: Tensor) -> Tensor:
    return (w * x).mean()


def by_backward(f: Any, w: Tensor, *others: Tensor) -> Tensor:
    leaf = w.clone().requires_grad_()
    f(leaf, *others).backward()
    assert leaf.grad is not None
    return leaf.grad


WAYS: dict[str, Callable[..., Tensor]] = {
    "backward": by_backward,
    "grad": lambda f, w, x: torch.func.grad(f)(w, x),
    "jvp": lambda f, w, x: jvp(lambda w: f(w, x), (w,), (torch.ones_like(w),))[1],
    "vmap": lambda f, w, x: torch.vmap(torch.func.grad(f), (None, 0))(w, x[None])[0],
    "hvp": lambda f, w, x: jvp(
        lambda w: torch.func.grad(ltx.accumulate(lambda w, x: (w * w * x).mean() / 2, len(x)))(w, x),
        (w,),
        (torch.ones_like(w),),
    )[1],
    "second": lambda f, w, x: by_backward(
        lambda w, x: torch.autograd.grad(
            ltx.accumulate(lambda w, x: (w * w * x).mean() / 2, len(x))(w, x), w, create_graph=True
        )[0],
        w,
        x,
    ),
    "train step": by_train_step,
}


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_many_micro_batches(way: str, dtype: torch.dtype, seed: int) -> None:
    x = numbers(MANY, dtype)
    w, expected = torch.ones((), dtype=dtype), x.double().mean()
    found = WAYS[way](ltx.accumulate(mean, MANY), w, x)
    assert found.dtype == dtype
    assert_right(found, expected)


@pytest.mark.full
def test_in_a_compiled_graph(seed: int) -> None:
    x = numbers(MANY, torch.bfloat16)
    step = torch.compile(torch.func.grad(ltx.accumulate(lambda w, x: (w * x).sum(), MANY)), backend="aot_eager")
    assert_right(step(torch.ones((), dtype=torch.bfloat16), x), x.double().mean())


def on_a_rank(step: Any, w: Tensor, x: Tensor) -> Any:
    mine = ltx.shard(x)
    return by_backward(step, w, mine), ltx.grad(step)(w, mine), step(w, mine)


@pytest.mark.parametrize("f", [mean, (lambda w, x: ltx.Weighted((w * x).sum(), len(x)))])
def test_on_ranks(f: Any, ranks: Ranks, seed: int) -> None:
    x, w = numbers(MANY, torch.bfloat16).repeat(2), torch.ones((), dtype=torch.bfloat16)
    step = ltx.accumulate(ltx.data_parallel(f, outputs="mean"), MANY)
    simulated = ltx.vmap(lambda: (torch.func.grad(step)(w, ltx.shard(x)), step(w, ltx.shard(x))), axis_size=2)()
    for found in (*ranks(2).run(on_a_rank, step, w, x), [one[0] for one in simulated]):
        for value in found:
            assert_right(value.bfloat16(), x.double().mean())


def test_float16_gradients_whose_sum_is_too_large() -> None:
    w, x = torch.ones((), dtype=torch.float16), torch.full((4,), 30000.0, dtype=torch.float16)
    assert torch.func.grad(ltx.accumulate(mean, 4))(w, x) == 30000


def passes(op: Any, count: int, **fields: Any) -> Tensor:
    """How far one update of `count` passes moves: the first gradient is 256, the others are 1."""
    strategy = ltx.HorovodStrategy(op=op, backward_passes_per_step=count, **fields)
    batches = [torch.full((2,), x, dtype=torch.bfloat16) for x in [256.0] + [1.0] * (count - 1)]
    return -trained(lambda w, x: (w * x).sum(), ADDS, torch.zeros(2, dtype=torch.bfloat16), batches, strategy).params


@pytest.mark.parametrize(("op", "fields"), [("average", {}), ("adasum", {}), ("average", {"compression": "fp16"})])
def test_horovods_passes(op: str, fields: Any, ranks: Ranks) -> None:
    for found in (passes(op, 64, **fields), *ranks(2).run(passes, op, 64, **fields)):
        assert found.equal(torch.full((2,), 256.0 + 63).bfloat16())


def many_tokens(strategy: ltx.Strategy | None, dtype: torch.dtype) -> Tensor:
    """The gradient of a mean over 100,001 tokens, of which each rank has 100,001."""

    def loss(w: Tensor, x: Tensor) -> ltx.Weighted:
        return ltx.Weighted((w.float() * x).sum() * 100_001, 100_001)

    return -trained(loss, ADDS, torch.zeros(1, dtype=dtype), [torch.full((1,), 0.25)], strategy).params


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("strategy", [ltx.DDPStrategy(), ltx.BaguaStrategy("gradient_allreduce")])
def test_numbers_of_tokens(strategy: ltx.Strategy, dtype: torch.dtype, ranks: Ranks) -> None:
    for found in (many_tokens(strategy, dtype), *ranks(2).run(many_tokens, strategy, dtype)):
        torch.testing.assert_close(found.float(), torch.tensor([0.25]), rtol=0.01, atol=0)


NONE = [math.nan, math.inf, -math.inf, -1.0]


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("weight", NONE)
@on_ranks(2, alone=True)
def test_weights_that_count_nothing(weight: float, as_tensor: bool) -> None:
    """Each kind of step refuses rank 0's weight, the other rank's being 4; the state is as before."""
    mine = weight if int(ltx.axis_index()) == 0 else 4.0
    given = torch.tensor(mine) if as_tensor else mine
    step = ltx.data_parallel(lambda w, x: ltx.Weighted((w * x).sum(), given))
    train = ltx.train_step(step, sgd(lr=0.1))
    state = train.init(torch.ones(()))
    calls: list[Callable[[], Any]] = [
        lambda: ltx.grad(step)(torch.ones(()), torch.ones(2)),
        lambda: torch.func.grad(step)(torch.ones(()), torch.ones(2)),
        lambda: ltx.grad(ltx.accumulate(step, 2))(torch.ones(()), torch.ones(2)),
        lambda: train(state, torch.ones(2)),
    ]
    for call in calls:
        refuses(WeightError, "is negative, infinite or NaN", call)
    assert float(state.params) == 1.0


@pytest.mark.parametrize("weight", NONE)
def test_weights_of_simulated_ranks_that_count_nothing(weight: float) -> None:
    step = ltx.data_parallel(lambda w, x, weight: ltx.Weighted((w * x).sum(), weight))
    call, weights = ltx.vmap(torch.func.grad(step), in_dims=(None, 0, 0)), torch.tensor([weight, 4.0])
    refuses(WeightError, "is negative, infinite or NaN", call, torch.ones(()), torch.ones(2), weights)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda x: sgd(x), "lr"),
        (lambda x: sgd(0.1, momentum=x), "momentum"),
        (lambda x: sgd(0.1, momentum=0.9, dampening=x), "dampening"),
        (lambda x: from_torch(AdamW, weight_decay=x), "weight_decay"),
        (lambda x: from_torch(Adam, betas=(0.9, x)), "betas"),
        (lambda x: from_torch(Adam, betas=[x, 0.9]), "betas"),
        (lambda x: from_torch(Adam, eps=x), "eps"),
    ],
)
def test_hyperparameters_that_are_no_numbers(make: Callable[[float], Any], name: str, value: float) -> None:
    refuses(OptimError, f"{name} must be a finite number, got {value}", make, value)


@pytest.mark.parametrize("value", NONE)
@pytest.mark.parametrize("of", [float, torch.tensor])
def test_schedules_that_give_no_numbers(of: Callable[[float], Any], value: float) -> None:
    train = ltx.train_step(ltx.data_parallel(lambda w: w.sum()), sgd(lambda count: of(value) if count else 0.5))
    state, _ = train(train.init(torch.ones(())))
    text = rf"the schedule lr\(1\) must be a finite number >= 0 or a 0-dim tensor, got \S*{value:g}"
    refuses(OptimError, text, train, state)


@pytest.mark.parametrize("size", [0, -1, -2])
@pytest.mark.parametrize("given", [(), (torch.ones(2),)])
def test_sizes_of_an_axis(given: tuple[Tensor, ...], size: int) -> None:
    text = rf"axis_size is the number of ranks, at least 1, got {size}"
    refuses(AxisError, text, ltx.vmap(lambda *x: ltx.axis_index(), axis_size=size), *given)


OVERLAPS: dict[str, tuple[Callable[[Tensor], Any], bool]] = {
    "a part": (lambda a: {"a": a, "b": a[1:]}, True),
    "parts of one that isn't there": (lambda a: {"a": a[:5], "b": a[3:]}, True),
    "a row and a column": (lambda a: {"a": a.view(4, 4)[1], "b": a.view(4, 4)[:, 2]}, True),
    "another dtype": (lambda a: {"a": a, "b": a.view(torch.complex64)[1:2]}, True),
    "transposed": (lambda a: {"a": a.view(4, 4), "b": a.view(4, 4).T}, True),
    "three": (lambda a: {"a": a[:2], "b": a[4:], "c": a[1:4]}, True),
    "pieces": (lambda a: {"a": a[:4], "b": a[4:]}, False),
    "columns": (lambda a: {"a": a.view(4, 4)[:, 0], "b": a.view(4, 4)[:, 1], "c": a.view(4, 4)[:, 2]}, False),
    "every other one": (lambda a: {"a": a[::2], "b": a[1::2]}, False),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_parameters_that_share_memory(name: str) -> None:
    make, overlap = OVERLAPS[name]
    train = ltx.train_step(ltx.data_parallel(lambda p: sum(x.abs().sum() for x in p.values())), sgd(lr=0.1))
    if overlap:
        text = r"'[abc]' and '[abc]' share memory .* would be trained apart"
        refuses(TreeError, text, train.init, make(torch.ones(16)))
    else:
        state, _ = train(train.init(make(torch.ones(16))))
        assert all((x == 0.9).all() for x in state.params.values())
