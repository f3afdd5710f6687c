"""mixed_precision: which dtypes a step computes, reduces and returns, and loss scaling against torch's GradScaler."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

import ltx
from ltx.errors import NotFiniteError, StepError, StrategyError, UnsupportedError
from tests.contract.bad_input.public import loss
from tests.contract.strategies.test_failures import BrokenError
from tests.contract.strategies.test_protocol import Gossip, LocalSGD
from tests.covering import some
from tests.inside import QAdam, shares_gradients
from tests.kinds import OnNewAxis, Params, Ranks
from tests.train_on import go_on, on_ranks, refuses, said, trained
from tests.twins.cases import assert_same_bits
from tests.twins.training import adamw, mean_step, on_a_rank, sgd

BF16 = ltx.Precision(compute=torch.bfloat16)
DYNAMIC = ltx.DynamicLossScale(init=2.0**10, growth_interval=3)
FP16 = ltx.Precision(compute=torch.float16, loss_scale=DYNAMIC)


def params() -> Params:
    return {"w": torch.linspace(-1.0, 1.0, 12).reshape(4, 3), "b": torch.zeros(3)}


STEP = ltx.data_parallel(loss)


def half(strategy: ltx.Strategy | None = None, **precision: Any) -> ltx.DataParallel:
    return ltx.mixed_precision(ltx.data_parallel(loss, strategy), replace(BF16, **precision))


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16, torch.float64])
def test_the_step_computes_in_another_dtype_than_its_parameters(compute: torch.dtype, seed: int) -> None:
    seen: dict[str, Any] = {}

    def fn(p: Params, batch: dict[str, Tensor], scale: Tensor, *, extra: Tensor) -> Any:
        seen.update(p=p, x=batch["x"], n=batch["n"], c=batch["c"], scale=scale, extra=extra)
        return loss(p, batch["x"]) * scale * extra, {"own": batch["x"].sum().double(), "n": batch["n"], "text": "kept"}

    step = ltx.mixed_precision(ltx.data_parallel(fn), ltx.Precision(compute=compute))
    batch = {"x": torch.randn(5, 4), "n": torch.tensor(3), "c": torch.ones(1, dtype=torch.complex64)}
    p = {name: value.requires_grad_() for name, value in params().items()}
    value, aux = step(p, batch, torch.tensor(2.0), extra=torch.tensor(1.0))
    value.backward()
    assert {x.dtype for x in (*seen["p"].values(), seen["x"], seen["scale"], seen["extra"])} == {compute}
    assert (seen["n"].dtype, seen["c"].dtype) == (torch.int64, torch.complex64)
    assert value.dtype == torch.float32
    assert aux["own"].dtype == (torch.float32 if compute == torch.float64 else torch.float64)
    assert aux["text"] == "kept"
    by_hand = {name: x.detach().to(compute).requires_grad_() for name, x in p.items()}
    (2 * loss(by_hand, batch["x"].to(compute))).backward()
    for name, x in p.items():
        assert x.grad.dtype == torch.float32
        torch.testing.assert_close(x.grad, by_hand[name].grad.float(), rtol=1e-2, atol=1e-2)


def test_outputs_may_stay_as_they_are() -> None:
    assert ltx.mixed_precision(STEP, ltx.Precision(output=None))(params(), torch.ones(2, 4)).dtype == torch.bfloat16
    weighted = ltx.data_parallel(lambda p, x: ltx.Weighted(loss(p, x) * len(x), len(x)))
    assert ltx.mixed_precision(weighted, BF16)(params(), torch.ones(2, 4)).dtype == torch.float32


def test_autocast_works_inside() -> None:
    def fn(w: Tensor, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ w
        assert (w.dtype, y.dtype) == (torch.float32, torch.bfloat16)
        return y.float().sum()

    step = ltx.mixed_precision(ltx.data_parallel(fn), ltx.Precision(compute=torch.float32))
    assert torch.func.grad(step)(torch.ones(3, 2), torch.ones(4, 3)).dtype == torch.float32


@pytest.mark.parametrize("transform", ["grad", "vmap", "hessian", "jvp"])
def test_torch_func(transform: str, seed: int) -> None:
    """In float64 that rounds to nothing: the transforms of a cast step are those of the step."""
    step = ltx.mixed_precision(STEP, ltx.Precision(compute=torch.float64, output=torch.float64))
    p, x = params(), torch.randn(6, 4)
    double = {name: value.double() for name, value in p.items()}
    transforms: dict[str, Callable[..., Any]] = {
        "grad": torch.func.grad,
        "vmap": lambda f: torch.vmap(torch.func.grad(lambda p, x: f(p, x[None])), in_dims=(None, 0)),
        "hessian": torch.func.hessian,
        "jvp": lambda f: lambda p, x: torch.func.jvp(lambda p: f(p, x), (p,), (p,)),
    }
    got, expected = transforms[transform](step)(p, x), transforms[transform](loss)(double, x.double())
    torch.testing.assert_close(
        ltx.tree.map(torch.Tensor.double, got), ltx.tree.map(torch.Tensor.double, expected), rtol=1e-6, atol=1e-6
    )


@pytest.mark.full
@pytest.mark.parametrize("inside", [True, False])
def test_micro_batches_add_up_in_the_parameters_dtype(inside: bool) -> None:
    """512 gradients of 1 + 2^-7, a sum that bfloat16 can't hold."""

    step = ltx.data_parallel(lambda w, x: (w * x).sum())
    both = ltx.mixed_precision(step if inside else ltx.accumulate(step, 512), BF16)
    both = ltx.accumulate(both, 512) if inside else both
    assert torch.func.grad(both)(torch.tensor(1.0), torch.full((512,), 1 + 2.0**-7)) == 1 + 2.0**-7


@pytest.mark.parametrize(
    ("reduce", "nbytes", "strategy"),
    [
        (None, 60, ltx.DDPStrategy()),
        (torch.bfloat16, 30, ltx.DDPStrategy()),
        (torch.float16, 30, ltx.DDPStrategy(comm_hook=ltx.hooks.RandomK(1.0, error_feedback=False))),
    ],
    ids=["own", "bf16", "RandomK"],
)
@on_ranks(2)
def test_gradients_travel_in_the_reduce_dtype(reduce: torch.dtype | None, nbytes: int, strategy: ltx.Strategy) -> None:
    train = ltx.train_step(half(strategy, reduce=reduce), sgd())
    state = train.init(params())
    with ltx.profile.record() as trace:
        state, _ = train(state, torch.randn(6, 4))
    assert [e.nbytes for e in trace.events if e.label == "bucket 0"] == [nbytes]
    assert state.params["w"].dtype == torch.float32


@pytest.mark.parametrize("overlap", ["backward", "update"])
def test_a_scale_that_is_a_power_of_two_changes_no_bit(overlap: Any, ranks: Ranks, seed: int) -> None:
    def run(scale: float | None) -> Any:
        def build(m: nn.Module) -> Any:
            precision = ltx.Precision(compute=torch.float32, loss_scale=scale)
            return ltx.train_step(ltx.mixed_precision(mean_step(m), precision), adamw(), overlap=overlap)

        return on_a_rank(build, seed, (7, 5), 8)

    plain, scaled = ranks(2).run(lambda: (run(None), run(256.0))).replicated()
    assert_same_bits(plain, scaled)


def test_a_scale_leaves_no_trace_without_a_wire() -> None:
    """In a world of one and on simulated ranks. SGD's updates, unlike Adam's, would be larger."""
    xs = torch.randn(2, 3)

    def trained(scale: float | None, ranks: int) -> Tensor:
        step = ltx.data_parallel(lambda w, x: (w * x).square().sum())
        precision = ltx.Precision(compute=torch.float32, loss_scale=scale)
        train = ltx.train_step(ltx.mixed_precision(step, precision), ltx.optim.from_torch(torch.optim.SGD, lr=0.1))
        call = ltx.vmap(train, in_dims=(None, 0)) if ranks > 1 else train
        return call(train.init(torch.ones(3)), xs if ranks > 1 else xs[0])[0].params

    for ranks in (1, 2):
        assert torch.equal(trained(256.0, ranks), trained(None, ranks))


def test_buffers_are_kept_or_refused() -> None:
    norm = nn.Sequential(nn.BatchNorm1d(3))

    def fn(p: Params, buffers: Params, x: Tensor) -> Any:
        held = {name: value.clone() for name, value in buffers.items()}
        return functional_call(norm, (p, held), (x.to(p["0.weight"].dtype),)).square().mean(), held

    given = dict(norm.named_parameters()), dict(norm.named_buffers())
    step = ltx.data_parallel(fn)
    with pytest.raises(StepError, match=re.escape("'0.running_mean' is float32[3], and would be rounded to")) as raised:
        ltx.train_step(ltx.mixed_precision(step, BF16), sgd()).init(*given)
    assert "ltx.Precision(..., keep=(1,)); with batch norm its parameters too" in str(raised.value)
    kept = ltx.Precision(compute=torch.float64, keep=(1,))
    train = ltx.train_step(
        ltx.mixed_precision(ltx.data_parallel(lambda p, b, x: (p["w"].sum() * x.sum(), b)), kept), sgd()
    )
    state = train.init({"w": torch.ones(2)}, {"mean": torch.full((2,), 1 / 3)})
    state, _ = train(state, torch.ones(3))
    assert torch.equal(state.buffers["mean"], torch.full((2,), 1 / 3))


@pytest.mark.parametrize("accumulated", [False, True])
def test_what_is_kept_is_kept_by_name_too(accumulated: bool) -> None:
    def fn(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        assert (w.dtype, x.dtype, y.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
        return (w * x).sum() + y.sum()

    step = ltx.mixed_precision(ltx.data_parallel(fn), ltx.Precision(keep=(2,)))
    step, ones = ltx.accumulate(step, 2) if accumulated else step, torch.ones(2)
    for found in (step(ones, ones, ones), step(ones, ones, y=ones), step(ones, x=ones, y=ones)):
        assert found.item() == (3 if accumulated else 4)


#: (step, rank) whose batch overflows.
OVERFLOWS = {(1, 0), (5, 1), (6, 0), (6, 1), (13, 1)}
STEPS = 16


def batch(step: int, rank: int) -> Tensor:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * step + rank))
    return x * 1e5 if (step, rank) in OVERFLOWS else x  # inf in float16


@dataclass(frozen=True, kw_only=True)
class Now(ltx.Strategy):
    """One that compresses in the middle of its cycle alone."""

    cycle = (2, 3)

    def hook(self, step: int) -> ltx.hooks.CommHook:
        return ltx.hooks.TopK(0.01) if step % 3 == 0 and step else ltx.hooks.AllReduce()


class Half(nn.Module):
    """The step as a module that casts: what DDP and GradScaler train."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = (nn.Parameter(x) for x in params().values())

    def forward(self, x: Tensor) -> Tensor:
        return loss({"w": self.w.half(), "b": self.b.half()}, x.half()).float()


def with_torch(rank: int, **kwargs: Any) -> tuple[Params, list[float], list[bool]]:
    """DDP and GradScaler: (parameters, each step's scale, whether it was skipped)"""
    module = Half()
    replica, scales, skipped = DistributedDataParallel(module), [], []
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, **kwargs)
    for step in range(STEPS):
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
        scaler.scale(replica(batch(step, rank))).backward()
        before = module.w.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        skipped.append(torch.equal(before, module.w))
    return {name: x.detach() for name, x in module.named_parameters()}, scales, skipped


def with_ltx(
    strategy: ltx.Strategy, rank: int, reload_at: int = -1, **kwargs: Any
) -> tuple[Params, list[float], list[bool]]:
    train = ltx.train_step(ltx.mixed_precision(ltx.data_parallel(loss, strategy), FP16), adamw(), **kwargs)
    state, scales, skipped = train.init(params()), [], []
    for step in range(STEPS):
        state = pickle.loads(pickle.dumps(state)) if step == reload_at else state
        before = ltx.tree.map(torch.clone, (state.params, state.opt_state, state.sync_state))
        state, metrics = train(state, batch(step, rank))
        scales.append(metrics.loss_scale.item())
        skipped.append(bool(metrics.skipped))
        after = state.params, state.opt_state, state.sync_state
        assert all(map(torch.equal, ltx.tree.flatten(before)[0], ltx.tree.flatten(after)[0])) == skipped[-1]
        assert bool(metrics.loss.isfinite()) != skipped[-1] or not shares_gradients(strategy, step)
        assert state.step == step + 1
    return state.params, scales, skipped


SKIPPED = [any((step, rank) in OVERFLOWS for rank in (0, 1)) for step in range(STEPS)]


@pytest.mark.full(but=2)
@pytest.mark.parametrize("kwargs", [{}, {"donate": False}, {"reload_at": 5}], ids=str)
@on_ranks(2)
def test_scales_and_skips_are_those_of_gradscaler(kwargs: dict[str, Any]) -> None:
    got, scales, skipped = with_ltx(ltx.DDPStrategy(), ltx.world().rank, **kwargs)
    expected, their_scales, their_skipped = with_torch(ltx.world().rank, fused=True)
    assert scales == their_scales
    assert skipped == their_skipped == SKIPPED
    assert len(set(scales)) > 2
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


STRATEGIES = {
    "ddp": ltx.DDPStrategy(bucket_bytes=16, first_bucket_bytes=16),
    "zero": ltx.ZeroStrategy(),
    "bf16": ltx.DDPStrategy(comm_hook="bf16"),
    "ByteGrad": ltx.DDPStrategy(comm_hook=ltx.hooks.ByteGrad(error_feedback=True)),
    "local SGD": LocalSGD(period=100),
}


def test_what_overflows_in_one_ranks_part_is_skipped_by_all(ranks: Ranks) -> None:
    """The only gradient that isn't finite belongs to rank 0, or to rank 1."""
    step = ltx.data_parallel(lambda w, x: (w * x).sum(), ltx.ZeroStrategy())
    train = ltx.train_step(ltx.mixed_precision(step, FP16), sgd(), donate=False)

    def run(place: int) -> Any:
        x = torch.ones(4)
        x[place] = 1e5 if ltx.world().rank == 0 else 1.0
        state, metrics = train(train.init(torch.zeros(4)), x)
        return state.params.tolist(), bool(metrics.skipped), state.loss_scale.scale.item()

    for place in (0, 3):
        assert list(ranks(2).run(run, place)) == [([0.0] * 4, True, 512.0)] * 2
        x = torch.ones(2, 4)
        x[0, place] = 1e5
        state, metrics = ltx.vmap(train, in_dims=(None, 0))(train.init(torch.zeros(4)), x)
        assert (state.params.any(), metrics.skipped.tolist()) == (False, [True, True])


def test_a_skipped_step_still_averages(ranks: Ranks) -> None:
    """Local SGD with period 7: parameters are averaged after steps 6, which is skipped, and 13, too."""

    def run() -> Any:
        train = ltx.train_step(ltx.mixed_precision(ltx.data_parallel(loss, LocalSGD(period=7)), FP16), sgd(lr=0.1))
        state, after = train.init(params()), []
        for step in range(8):
            state, metrics = train(state, batch(step, ltx.world().rank))
            after.append((state.params["w"].clone(), bool(metrics.skipped)))
        return after

    first, second = ranks(2).run(run)
    assert [torch.equal(a, b) for (a, _), (b, _) in zip(first, second, strict=True)] == [False] * 6 + [True, False]
    assert first[6][1]


@pytest.mark.full(but=1)
@pytest.mark.parametrize("name", some(STRATEGIES, "zero", "ByteGrad"))
def test_what_overflows_on_one_rank_is_skipped_by_all(name: str, ranks: Ranks) -> None:
    train = ltx.train_step(ltx.mixed_precision(ltx.data_parallel(loss, STRATEGIES[name]), FP16), adamw())
    state, scales, skipped = train.init(params()), [], []
    for step in range(STEPS):
        x = torch.stack([batch(step, rank) for rank in (0, 1)])
        before = state
        state, metrics = ltx.vmap(train, in_dims=(0 if step else None, 0))(state, x)
        scales.append(metrics.loss_scale.tolist())
        skipped.append(metrics.skipped.tolist())
        if step and skipped[-1][0]:
            old, new = ((s.params, s.opt_state) for s in (before, state))
            assert all(map(torch.equal, ltx.tree.flatten(old)[0], ltx.tree.flatten(new)[0]))
    assert skipped == [[s, s] for s in SKIPPED]
    real = ranks(2).run(lambda: with_ltx(STRATEGIES[name], ltx.world().rank))
    assert all(torch.equal(real[0][0][key], real[1][0][key]) for key in ("w", "b")) == (name != "local SGD")
    for rank, (expected, their_scales, their_skipped) in enumerate(real):
        assert their_skipped == SKIPPED
        assert [s[rank] for s in scales] == their_scales
        torch.testing.assert_close({k: x[rank] for k, x in state.params.items()}, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.full
@pytest.mark.parametrize("compute", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.full)])
@on_ranks(2)
def test_a_compiled_step(compute: torch.dtype) -> None:
    step = ltx.mixed_precision(ltx.accumulate(STEP, 2), ltx.Precision(compute=compute, reduce=torch.bfloat16))
    compiled = torch.compile(torch.func.grad(step), backend="aot_eager", fullgraph=True)
    x = batch(0, 1 + ltx.world().rank)
    torch.testing.assert_close(compiled(params(), x), torch.func.grad(step)(params(), x), rtol=1e-2, atol=1e-2)


@pytest.mark.full
@on_ranks(2)
def test_scaling_around_a_compiled_loss() -> None:
    batches = [batch(step, ltx.world().rank) for step in (0, 5, 7)]
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=False)
    got, expected = (
        trained(ltx.mixed_precision(ltx.data_parallel(fn), FP16), sgd(), params(), batches) for fn in (compiled, loss)
    )
    assert got.skipped == expected.skipped == [False, True, False]
    torch.testing.assert_close(got.params, expected.params, rtol=1e-3, atol=1e-3)


def test_schedules_count_skipped_steps() -> None:
    seen: list[int] = []

    def lr(count: int) -> float:
        seen.append(count)
        return 0.1

    train = ltx.train_step(ltx.mixed_precision(STEP, FP16), sgd(lr=lr))
    state = train.init(params())
    seen.clear()
    state, _ = go_on(train, state, [batch(step, 0) for step in range(4)])
    assert sorted(set(seen)) == [0, 2, 3]
    assert state.opt_state.count == 4


def test_the_scale_itself_doesnt_overflow() -> None:
    rule = ltx.DynamicLossScale(init=3e38, growth_interval=1)
    assert rule.after(rule.start(), True).scale == rule.start().scale
    assert rule.after(rule.start(), False).scale == rule.start().scale / 2


def test_the_scale_stays_above_its_least_value_and_then_raises() -> None:
    rule = ltx.DynamicLossScale(init=32.0, least=10.0)
    step = ltx.data_parallel(lambda w, x: (w * x).sum())
    half = ltx.mixed_precision(step, ltx.Precision(compute=torch.float16, loss_scale=rule))
    x = torch.tensor([torch.inf, 1.0])
    state, metrics = trained(half, adamw(), torch.ones(2), [x] * 4)
    assert [float(each.loss_scale) for each in metrics] == [32.0, 16.0, 10.0, 10.0]
    said(NotFiniteError, lambda: ltx.train_step(half, adamw(), guard="raise")(state, x))


def test_metrics_without_dynamic_scaling_have_none() -> None:
    for precision in (BF16, replace(BF16, loss_scale=8)):
        _, (metrics,) = trained(ltx.mixed_precision(STEP, precision), sgd(), params(), [torch.ones(2, 4)])
        assert (metrics.loss_scale, metrics.skipped) == (None, None)


def test_a_rank_that_fails_in_a_local_step_is_told_of_to_those_who_ask(on_new_axis: OnNewAxis) -> None:
    """Without loss scaling a rank may fail alone in such a step; with it, peers wait for its word."""

    def run() -> Any:
        def fn(p: Params, x: Tensor) -> Tensor:
            if int(ltx.axis_index()) == 1 and x.shape[0] == 1:
                raise BrokenError
            return loss(p, x)

        train = ltx.train_step(ltx.mixed_precision(ltx.data_parallel(fn, LocalSGD(period=100)), FP16), sgd())
        state, _ = train(train.init(params()), batch(0, 0))
        before = state.params["w"].clone()
        try:
            train(state, batch(0, 0)[:1])
        except Exception as error:
            return type(error).__name__, torch.equal(state.params["w"], before)

    assert list(on_new_axis(run)) == [("DeadlockDetectedError", True), ("BrokenError", True)]


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: ltx.mixed_precision(loss, BF16), StepError, "takes a step made by ltx.data_parallel, got function"),
        (lambda: ltx.mixed_precision(STEP, torch.bfloat16), StepError, "must be an ltx.Precision, got torch.bfloat16"),
        (lambda: ltx.mixed_precision(ltx.mixed_precision(STEP, BF16), BF16), StepError, "has Precision() already"),
        (lambda: ltx.mixed_precision(ltx.data_parallel(loss, returns="grads"), BF16), StepError, 'returns="grads"'),
        *(
            (partial(half, strategy, reduce=torch.bfloat16), StrategyError, f"needs a request for sums, which {hook}")
            for strategy, hook in (
                (ltx.DDPStrategy(comm_hook=ltx.hooks.ByteGrad()), "ByteGrad()"),
                (ltx.DDPStrategy(comm_hook=ltx.hooks.after(10, ltx.hooks.TopK(0.01))), "TopK()"),
                (QAdam(warmup_steps=3), "MeanMomentum(beta1=0.9)"),
                (Now(), "TopK()"),
            )
        ),
        (
            lambda: ltx.train_step(ltx.mixed_precision(STEP, FP16), sgd(), overlap="update"),
            StrategyError,
            "growth_interval=3, least=0.0) needs all gradients before the optimizer runs",
        ),
        *(
            (
                partial(ltx.train_step, half(strategy, compute=torch.float16, loss_scale=scale), optimizer),
                UnsupportedError,
                "needs gradients that it can divide by the scale",
            )
            for strategy, optimizer in (
                (QAdam(warmup_steps=3), ltx.optim.qadam(warmup_steps=3)),
                (ltx.HorovodStrategy(backward_passes_per_step=2), sgd()),
            )
            for scale in (1024.0, ltx.DynamicLossScale())
        ),
        (
            lambda: ltx.train_step(ltx.mixed_precision(STEP, FP16), sgd())(
                ltx.train_step(STEP, sgd()).init(params()), torch.ones(2, 4)
            ),
            StepError,
            "precision: made for no dynamic loss scaling, this one has Precision(",
        ),
    ],
)
def test_errors(make: Callable[[], Any], error: type[Exception], text: str) -> None:
    refuses(error, re.escape(text), make)


def test_asking_cant_be_compiled() -> None:
    train = ltx.train_step(ltx.mixed_precision(ltx.data_parallel(loss, LocalSGD()), FP16), sgd(), donate=False)
    compiled = torch.compile(train, backend="aot_eager", fullgraph=True)
    refused = UnsupportedError, torch._dynamo.exc.TorchDynamoException
    refuses(refused, "needs equal gradients on all ranks", compiled, train.init(params()), batch(0, 0))


SCALE = "None, an ltx.DynamicLossScale or a finite number of more than 0"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        *(
            (fields, f"DynamicLossScale.{next(iter(fields))} must be a")
            for fields in (
                {"init": 0},
                {"growth": 1.0},
                {"backoff": 1.0},
                {"growth_interval": 0},
                {"init": float("inf")},
                {"least": 2.0**16},
            )
        ),
        ({"compute": torch.int8}, "Precision.compute must be one of torch.float16, "),
        ({"compute": "bf16"}, "Precision.compute must be one of torch.float16, "),
        ({"reduce": torch.float32}, "Precision.reduce must be None (the parameters' own dtype"),
        ({"output": 3}, "Precision.output must be None or one of "),
        ({"loss_scale": 0}, f"Precision.loss_scale must be {SCALE}, got 0"),
        ({"loss_scale": True}, f"Precision.loss_scale must be {SCALE}, got T"),
        ({"loss_scale": "dynamic"}, "of more than 0, got 'dynamic'"),
        ({"keep": 1}, "Precision.keep must be a tuple of positions of arguments, such as (1,), got 1"),
    ],
    ids=str,
)
def test_bad_fields(fields: dict[str, Any], text: str) -> None:
    made = ltx.DynamicLossScale if text.startswith("DynamicLossScale") else ltx.Precision
    refuses(StrategyError, re.escape(text), made, **fields)


def test_values() -> None:
    step = ltx.mixed_precision(STEP, FP16)
    assert step == ltx.mixed_precision(STEP, FP16) != STEP
    assert pickle.loads(pickle.dumps(FP16)) == FP16
    assert eval(repr(FP16), {"torch": torch, **{n: getattr(ltx, n) for n in ("Precision", "DynamicLossScale")}}) == FP16
    other = replace(step, strategy=ltx.DDPStrategy(comm_hook="fp16"))
    assert (other.precision, other.hook(0)) == (FP16, ltx.hooks.FP16())
    assert not shares_gradients(Gossip(), 0)


@pytest.mark.full(but=2)
@pytest.mark.covering(1)
@pytest.mark.parametrize("keep", [("b*",), lambda path: path == "b"], ids=["patterns", "function"])
@pytest.mark.parametrize("wrap", ["plain", "accumulated", "compiled"])
def test_parameters_kept_by_path(keep: Any, wrap: str) -> None:
    seen: list[tuple[torch.dtype, ...]] = []

    def fn(p: Params, x: Tensor) -> Tensor:
        seen.append((p["w"].dtype, p["b"].dtype, x.dtype))
        return (x @ p["w"]).float().square().mean() + p["b"].sum()

    step = ltx.mixed_precision(ltx.data_parallel(fn), ltx.Precision(keep_params=keep))
    step = ltx.accumulate(step, 2) if wrap == "accumulated" else step
    take = ltx.grad(step)
    if wrap == "compiled":
        take = torch.compile(take, fullgraph=True, backend="eager")
    grads = take(params(), torch.ones(2, 4))
    assert set(seen) == {(torch.bfloat16, torch.float32, torch.bfloat16)}
    assert {g.dtype for g in grads.values()} == {torch.float32}
    if not callable(keep):
        wrong = ltx.data_parallel(fn), ltx.Precision(keep_params=(*keep, "nrom*"))
        with pytest.raises(Exception, match=r"keep_params: 'nrom\*' fits no parameter. Their paths: b, w"):
            ltx.grad(ltx.mixed_precision(*wrong))(params(), torch.ones(2, 4))
    refuses(StrategyError, "keep_params must be a tuple of patterns", ltx.Precision, keep_params="b*")
