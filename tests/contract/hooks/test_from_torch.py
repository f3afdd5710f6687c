"""Hooks written for DistributedDataParallel: in steps of ltx they give what they give under DDP, to the last bit."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    optimizer_overlap_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

import ltx
from ltx.errors import AxisError, HookError, StrategyError, UnsupportedError
from ltx.hooks import from_torch
from tests import inside, train_on
from tests.kinds import OnNewAxis, Params, Ranks
from tests.train_on import on_ranks, refuses
from tests.twins.cases import assert_same_bits, backward, func_grad, params_of

STEPS = 6


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 20), nn.Tanh(), nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 3))


def batch(seed: int, step: int) -> Tensor:
    return torch.randn(5, 24, generator=torch.Generator().manual_seed(seed + 100 * step + ltx.world().rank))


def loss_of(module: nn.Module, params: Params, x: Tensor) -> Tensor:
    return functional_call(module, params, (x,)).square().sum()


def update(params: Params, grads: Params) -> Params:
    return {name: p - 0.01 * grads[name] for name, p in params.items()}


def with_ddp(hook: Any, state: Any, module: nn.Module, seed: int) -> list[Params]:
    """The gradients of each step, all in one bucket."""
    ddp = DistributedDataParallel(module)
    ddp.register_comm_hook(state, hook)
    found = []
    for step in range(STEPS):
        ddp.zero_grad()
        ddp(batch(seed, step)).square().sum().backward()
        found.append({name: p.grad.clone() for name, p in module.named_parameters()})
        with torch.no_grad():
            params = dict(module.named_parameters())
            for name, new in update(params, found[-1]).items():
                params[name].copy_(new)
    return found


def strategy_of(hook: Any, state: Any = None, nbytes: int = 1 << 20) -> ltx.DDPStrategy:
    return ltx.DDPStrategy(comm_hook=from_torch(hook, state), bucket_bytes=nbytes, first_bucket_bytes=nbytes)


def with_ltx(hook: Any, state: Any, module: nn.Module, seed: int, nbytes: int = 1 << 20) -> list[Params]:
    step = ltx.data_parallel(functools.partial(loss_of, module), strategy_of(hook, state, nbytes))
    params, found = params_of(module), []
    for i in range(STEPS):
        found.append((func_grad if i % 2 else backward)(step, params, batch(seed, i)))  # both ways give the same
        params = update(params, found[-1])
    return found


def both(hook: Any, make_state: Callable[[], Any], seed: int, **how: Any) -> tuple[list[Params], list[Params]]:
    torch.manual_seed(seed)
    module = model()
    return with_ltx(hook, make_state(), module, seed, **how), with_ddp(hook, make_state(), module, seed)


def post_local(after: bool) -> Any:
    def make() -> Any:
        # A subgroup of its own for each rank: from step 3 on, gradients are local.
        subgroup, _ = dist.new_subgroups(1)
        return post_localSGD_hook.PostLocalSGDState(None, subgroup, 3, after)

    return make


STATELESS = {
    "allreduce": (default_hooks.allreduce_hook, lambda: None),
    "allreduce, with a group": (default_hooks.allreduce_hook, lambda: dist.group.WORLD),
    "fp16": (default_hooks.fp16_compress_hook, lambda: None),
    "fp16 wrapper": (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), lambda: None),
    "noop": (debugging_hooks.noop_hook, lambda: None),
    "post local SGD": (post_localSGD_hook.post_localSGD_hook, post_local(True)),
    "post local SGD, local": (post_localSGD_hook.post_localSGD_hook, post_local(False)),
}


@pytest.mark.full(but=2)
@pytest.mark.parametrize("nbytes", [1 << 20, 1000], ids=["one bucket", "several"])
@pytest.mark.parametrize("name", STATELESS)
def test_as_under_ddp(name: str, nbytes: int, ranks: Ranks, seed: int) -> None:
    for ours, theirs in ranks(2).run(both, *STATELESS[name], seed, nbytes=nbytes):
        assert_same_bits(ours, theirs)


def power(**fields: Any) -> Callable[[], Any]:
    return lambda: powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, **fields)


POWER = {
    "rank 1": power(matrix_approximation_rank=1),
    "rank 3": power(matrix_approximation_rank=3, orthogonalization_epsilon=1e-8),
    "cold": power(matrix_approximation_rank=2, warm_start=False),
    "without feedback": power(matrix_approximation_rank=1, use_error_feedback=False),
    "batched shapes": power(matrix_approximation_rank=1, batch_tensors_with_same_shape=True),
}


@pytest.mark.full(but=1)
@pytest.mark.parametrize("wrapped", [False, True], ids=["", "fp16"])
@pytest.mark.parametrize("name", POWER)
def test_power_sgd_as_under_ddp(name: str, wrapped: bool, ranks: Ranks, seed: int) -> None:
    hook = powerSGD_hook.powerSGD_hook
    if wrapped:
        hook = default_hooks.fp16_compress_wrapper(hook)
    run = ranks(2).run(both, hook, POWER[name], seed)
    for ours, theirs in run:
        assert_same_bits(ours, theirs)
    # It did compress.
    exact = ranks(2).run(both, default_hooks.allreduce_hook, lambda: None, seed)
    assert not torch.equal(run.rank(0)[0][-1]["0.weight"], exact.rank(0)[0][-1]["0.weight"])


@on_ranks(2)
def test_power_sgd_in_several_buckets(seed: int) -> None:
    """Under DDP on gloo that aborts. Of full rank, it is the exact mean."""
    torch.manual_seed(seed)
    module = model().double()
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=24, start_powerSGD_iter=2, min_compression_rate=0.1
    )

    def grads(hook: Any, state: Any) -> list[Params]:
        step = ltx.data_parallel(functools.partial(loss_of, module), strategy_of(hook, state, 1000))
        params = {name: p.detach() for name, p in module.named_parameters()}
        return [torch.func.grad(step)(params, batch(seed, i).double()) for i in range(5)]

    compressed, exact = grads(powerSGD_hook.powerSGD_hook, state), grads(default_hooks.allreduce_hook, None)
    assert len(state.p_memory_dict) > 1
    for got, want in zip(compressed, exact, strict=True):
        torch.testing.assert_close(got, want)


def error_of(hook: Any, state_of: Any, seed: int, worlds: int = 2) -> tuple[str, str, str]:
    """(type, text, what a pass in the last of so many worlds raises) of a step whose hook fails."""
    torch.manual_seed(seed)
    module = model()
    params = {name: p.detach() for name, p in module.named_parameters()}
    state, found = state_of(inside.resolve(None).comm.group), []
    for _ in range(worlds):
        step = ltx.data_parallel(functools.partial(loss_of, module), strategy_of(hook, state, 1000))
        try:
            for i in range(4):
                torch.func.grad(step)(params, batch(seed, i))
        except Exception as error:
            found.append(error)
            ltx.init()
            state = state_of(inside.resolve(None).comm.group)
    return type(found[0]).__name__, str(found[0]), type(found[-1]).__name__


def batched(group: Any) -> Any:
    return powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2)


@pytest.mark.full(but=1)
@pytest.mark.parametrize(
    ("hook", "state_of", "kind", "text"),
    [
        # Once it compresses it asserts, on matrices that it hands to a function that wants batches of them.
        (powerSGD_hook.batched_powerSGD_hook, batched, "AssertionError", ""),
        (quantization_hooks.quantization_pertensor_hook, lambda group: group, "RuntimeError", "IndexError"),
        (quantization_hooks.quantization_perchannel_hook, lambda group: group, "RuntimeError", "IndexError"),
    ],
)
def test_what_fails_under_ddp_fails_on_every_rank(
    hook: Any, state_of: Any, kind: str, text: str, on_new_axis: OnNewAxis, seed: int
) -> None:
    run = list(on_new_axis(lambda: error_of(hook, state_of, seed)))
    for first, said, second in run:
        # One that is late may hear of its peer's before it comes to its own.
        assert {first, second} <= {kind, "DeadlockDetectedError"}
        assert text in said
    # On one rank at least it is its own, and the next pass' too: nothing is left behind.
    assert kind in {first for first, _, _ in run}
    assert kind in {second for _, _, second in run}


def test_bfloat16_is_refused_as_by_ddp(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)  # a build for GPUs takes these hooks, as DDP does there
    for hook in (default_hooks.bf16_compress_hook, default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)):
        with pytest.raises(TypeError, match=r"bf16_compress.* needs CUDA 11 and NCCL 2.10.*ltx\.hooks\.BF16\(\)") as e:
            from_torch(hook)
        assert isinstance(e.value, HookError)


def fails_on_rank_0(group: Any, bucket: Any) -> Any:
    if ltx.world().rank == 0 and bucket.index() == 1:
        raise ZeroDivisionError("mine")
    return default_hooks.allreduce_hook(group, bucket)


def test_a_hook_that_fails_on_one_rank(on_new_axis: OnNewAxis, seed: int) -> None:
    """The other waits for it in the hook's own collective, and is told; and nothing pairs with that afterwards."""
    (kind, text, again), (waited, told, too) = on_new_axis(lambda: error_of(fails_on_rank_0, lambda group: group, seed))
    assert (kind, text) == ("ZeroDivisionError", "mine")
    assert waited == "DeadlockDetectedError"
    assert "rank 1: rank 0 has left a backward pass" in told
    assert "ZeroDivisionError: mine" in told
    assert (again, too) == ("ZeroDivisionError", "DeadlockDetectedError")


@pytest.mark.full
def test_a_future_that_never_comes(on_new_axis: OnNewAxis, seed: int) -> None:
    def run() -> Any:
        return error_of(lambda state, bucket: torch.futures.Future(), lambda group: group, seed, worlds=1)

    for kind, text, _ in on_new_axis(run, timeout_s=4.0):
        assert kind in ("CollectiveTimeoutError", "DeadlockDetectedError")  # whoever is first tells the other
        assert "of bucket 0 on axis 'data' didn't complete within 4 s" in text


def seen_by(hook_sees: Callable[[Any], Any], nbytes: int, where: Callable[[], Any] = lambda: None) -> list[Any]:
    """What hook_sees(bucket) gives for each bucket of one pass."""
    seen: list[Any] = []

    def spy(state: Any, bucket: Any) -> Any:
        seen.append(hook_sees(bucket))
        return default_hooks.allreduce_hook(where(), bucket)

    params = {"a": torch.ones(2, 3), "b": torch.ones(()), "c": torch.ones(4), "d": torch.ones(0, 2)}
    step = ltx.data_parallel(lambda p: sum((x * (1 + i)).sum() for i, x in enumerate(p.values())))
    torch.func.grad(ltx.DataParallel(step.fn, strategy_of(spy, nbytes=nbytes)))(params)
    return seen


def test_what_the_hook_sees(ranks: Ranks) -> None:
    def look(bucket: Any) -> Any:
        gradients = bucket.gradients()
        assert all(g.untyped_storage().data_ptr() == bucket.buffer().untyped_storage().data_ptr() for g in gradients)
        return bucket.index(), bucket.is_last(), bucket.buffer().tolist(), [list(g.shape) for g in gradients]

    def halved(bucket: Any) -> Any:
        bucket.set_buffer(bucket.buffer().half())
        return bucket.buffer().dtype, [g.dtype for g in bucket.gradients()]

    # In the order in which gradients arrive, as they are on this rank.
    assert ranks(2).run(seen_by, look, 16).replicated() == [
        (0, False, [3.0] * 4, [[0, 2], [4]]),
        (1, False, [2.0], [[]]),
        (2, True, [1.0] * 6, [[2, 3]]),
    ]
    assert ranks(2).run(seen_by, look, 1000).replicated() == [
        (0, True, [3.0] * 4 + [2.0] + [1.0] * 6, [[0, 2], [4], [], [2, 3]])
    ]
    assert ranks(2).run(seen_by, halved, 1000).replicated() == [(torch.float16, [torch.float16] * 4)]


class Optimizer:
    def step_param(self, param: Tensor, grad: Tensor) -> None: ...


def resulting(result: Callable[[Tensor], Any]) -> Any:
    """A hook whose future holds this."""

    def hook(state: Any, bucket: Any) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(result(bucket.buffer()))
        return future

    return hook


OVERLAPPED = optimizer_overlap_hooks._OptimizerHookState(Optimizer())
PARAMETERS = "asks for the bucket's parameters, which a step of ltx doesn't change"
#: Hooks that don't fit, and what is said of them.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "asks for parameters": (lambda: lambda state, bucket: bucket.parameters(), PARAMETERS),
    "an optimizer's": (
        lambda: optimizer_overlap_hooks._hook_then_optimizer(default_hooks.allreduce_hook, OVERLAPPED),
        'ltx.train_step(..., overlap="update")',
    ),
    "a list": (
        lambda: resulting(lambda x: [x]),
        "bucket 0: expected its future to hold a tensor of 3 elements, got list",
    ),
    "short": (lambda: resulting(lambda x: x[1:]), "got [2]"),
    "no future": (lambda: lambda state, bucket: bucket.buffer(), "expected a torch.futures.Future, got Tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, ranks: Ranks) -> None:
    make, text = REFUSED[name]

    def on_rank() -> str:
        step = ltx.data_parallel(lambda w: (w**2).sum(), strategy_of(make()))
        return train_on.said((StrategyError, UnsupportedError), torch.func.grad(step), torch.ones(3))

    assert all(text in told for told in ranks(2).run(on_rank))


def test_where_it_cannot_run(ranks: Ranks) -> None:
    step = ltx.data_parallel(lambda w, x: (w * x).sum(), strategy_of(default_hooks.allreduce_hook))
    with pytest.raises(UnsupportedError, match=r"FromTorch\(allreduce_hook, NoneType\) .* a world of one without"):
        torch.func.grad(step)(torch.ones(2), torch.ones(2))
    with pytest.raises(UnsupportedError, match=r"can't run on simulated ranks. Use a hook of ltx.hooks"):
        ltx.vmap(torch.func.grad(step), in_dims=(None, 0))(torch.ones(2), torch.ones(3, 2))
    given = torch.vmap(torch.func.grad(step), in_dims=(None, 0)), torch.ones(2), torch.ones(3, 2)
    assert "per-sample gradients" in ranks(2).run(train_on.said, UnsupportedError, *given).rank(0)


@pytest.mark.full
@pytest.mark.slow_compile
@on_ranks(2)
def test_not_in_a_compiled_graph() -> None:
    strategy = strategy_of(default_hooks.allreduce_hook)
    step = ltx.data_parallel(lambda w: (w**2).sum(), strategy)
    compiled = torch.compile(torch.func.grad(step), backend="aot_eager", fullgraph=True)
    text = train_on.said(RuntimeError, compiled, torch.ones(2))
    assert "UnsupportedError" in text  # inside Dynamo's
    assert "can't be part of a compiled graph. Compile the step inside" in text
    inside = ltx.data_parallel(torch.compile(lambda w: (w**2).sum(), backend="aot_eager"), strategy)
    w = torch.ones(2, requires_grad=True)
    inside(w).backward()
    torch.compiler.reset()
    assert w.grad.tolist() == [2.0, 2.0]  # type: ignore[union-attr]


@on_ranks(2)
def test_group_and_axis_must_have_the_same_ranks() -> None:
    def grad(state: Any, axis: ltx.Axis) -> Tensor:
        step = ltx.data_parallel(lambda w: (w * ltx.world().rank).sum(), strategy_of(_reduces, state), axis=axis)
        return torch.func.grad(step)(torch.ones(1))

    def alone() -> tuple[Any, ltx.Axis]:
        mine = [dist.new_group([r]) for r in range(2)][dist.get_rank()]
        return mine, ltx.axis_from_group(mine, "alone")

    text = train_on.said(AxisError, grad, None, alone()[1])
    assert "FromTorch(_reduces, NoneType) communicates with ranks [0, 1] of the default process group" in text
    assert f"axis 'alone' has ranks [{ltx.world().rank}]" in text
    ltx.init()
    mine, axis = alone()
    assert grad(mine, axis).item() == ltx.world().rank
    inside.close_axis(axis)


def _reduces(state: Any, bucket: Any) -> Any:
    return default_hooks.allreduce_hook(state, bucket)


@on_ranks(2)
def test_second_derivatives_are_exact() -> None:
    step = ltx.data_parallel(
        lambda w: (w**3).sum() * (1 + ltx.axis_index()), strategy_of(default_hooks.fp16_compress_hook)
    )
    second = torch.func.jacfwd(torch.func.grad(step))(torch.tensor([1.0, 2.0]))
    torch.testing.assert_close(second, torch.diag(torch.tensor([9.0, 18.0])))


@on_ranks(2)
def test_with_an_optimizer_that_overlaps(seed: int) -> None:
    torch.manual_seed(seed)
    module = model()
    start, batches = dict(module.named_parameters()), [batch(seed, i) for i in range(3)]
    sgd, found = ltx.optim.from_torch(torch.optim.SGD, lr=0.01), []
    for comm_hook in (from_torch(default_hooks.allreduce_hook), "allreduce"):
        strategy = ltx.DDPStrategy(comm_hook=comm_hook, bucket_bytes=1000, first_bucket_bytes=1000)
        step = ltx.data_parallel(functools.partial(loss_of, module), strategy)
        found.append(train_on.trained(step, sgd, start, batches, overlap="update").params)
    torch.testing.assert_close(*found)


@on_ranks(2)
def test_ranks_that_differ_in_order_dont_wait_for_each_other() -> None:
    """On rank 0 the gradient of z comes before that of a psum, on rank 1 after it."""

    def loss(params: Params) -> Tensor:
        c, z = params["c"], params["z"]
        return (ltx.psum(c.sum()) * z).sum() if ltx.world().rank == 0 else ltx.psum(c.sum() * z.sum())

    step = ltx.data_parallel(loss, strategy_of(default_hooks.allreduce_hook, nbytes=8))
    grads = torch.func.grad(step)({name: torch.ones(2) for name in "cz"})
    # Of (z p + p) / 2 at c = z = 2, where p = c + z c is the psum.
    assert grads["z"].tolist() == [6.0, 6.0]
    assert grads["c"].tolist() == [4.5, 4.5]


def test_is_a_value() -> None:
    state = [1]
    hook = from_torch(default_hooks.allreduce_hook, state)
    assert hook == from_torch(default_hooks.allreduce_hook, state)
    assert hash(hook) == hash(from_torch(default_hooks.allreduce_hook, state))
    assert hook != from_torch(default_hooks.allreduce_hook, [1])  # equal states needn't stay equal
    assert hook != from_torch(default_hooks.fp16_compress_hook, state)
    assert repr(hook) == "FromTorch(allreduce_hook, list)"
    assert repr(from_torch(functools.partial(quantization_hooks.quantization_perchannel_hook, bucket_size=8))) == (
        "FromTorch(quantization_perchannel_hook, NoneType)"
    )
    assert pickle.loads(pickle.dumps(hook)).state == [1]
    refuses(HookError, r"from_torch takes a function .*, got str", from_torch, "powersgd")
