"""ZeroStrategy beyond its rows: DDP's bits, a part of the optimizer's state, its bytes, and checkpoints of parts."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx import Precision, hooks
from ltx.errors import StepError, StrategyError
from ltx.optim.clipping import ClipByGlobalNorm
from ltx.strategies.zero import MeanPart, Shards
from tests import train_on
from tests.kinds import Params, Ranks
from tests.sent import recorded

SGD = ltx.optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = ltx.optim.from_torch(torch.optim.AdamW, lr=lambda count: 0.05 / (1 + count))
CLIPPED = ltx.optim.chain(ltx.optim.clip_by_global_norm(0.5), ADAMW)
BUCKETS = {"bucket_bytes": 64, "first_bucket_bytes": 16}


def params_of_all_kinds() -> Params:
    """Several dtypes, 0-dim leaves, an empty one in a bucket of its own, leaves of fewer elements than ranks."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "matrix": normal(6, 5),
        "bias": normal(5),
        "scalar": normal(()),
        "one": normal(1),
        "empty": normal(0, 3).half(),
        "half": normal(7).bfloat16(),
        "double": normal(3).double(),
        "complex": torch.complex(normal(2, 2), normal(2, 2)),
    }


def loss(p: Params, x: Tensor) -> Tensor:
    out = p["scalar"] * torch.tanh(x @ p["matrix"] + p["bias"]) - p["one"]
    rest = (p["half"].float().square().sum(), p["double"].float().sum().sin(), p["complex"].abs().square().sum())
    return out.square().mean() + 0.1 * sum(rest) + p["empty"].sum()


def weighted(p: Params, x: Tensor) -> ltx.Weighted:
    return ltx.Weighted(loss(p, x) * len(x), len(x))


def trained(
    strategy: ltx.Strategy,
    optimizer: Any,
    of: Any = loss,
    sizes: tuple[int, ...] = (8,),
    accumulate: int = 1,
    **kwargs: Any,
) -> tuple[Params, Tensor, Tensor | None]:
    """Rank r's batches have ``sizes[r]`` samples. (parameters, last loss, last norm)"""
    rank = int(ltx.axis_index())
    step, generator = ltx.accumulate(ltx.data_parallel(of, strategy), accumulate), torch.Generator().manual_seed(rank)
    batches = [torch.randn(sizes[rank % len(sizes)], 6, generator=generator) for _ in range(6)]
    found = train_on.trained(step, optimizer, params_of_all_kinds(), batches, **kwargs)
    return found.params, found.losses[-1], found.metrics[-1].grad_norm


CASES: dict[str, dict[str, Any]] = {
    "adamw, kept": {"optimizer": ADAMW, "donate": False},
    "accumulated": {"optimizer": SGD, "accumulate": 2},
    "weighted": {"optimizer": ADAMW, "of": weighted, "sizes": (8, 3)},
    "weighted, accumulated, clipped": {"optimizer": CLIPPED, "of": weighted, "sizes": (8, 3), "accumulate": 2},
}


def assert_close(got: Params, expected: Params, tolerance: float = 1e-5) -> None:
    """To rounding: a part's elements meet other lanes of the processor than they do in the whole."""
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        close = 1e-2 if value.dtype == torch.bfloat16 else tolerance
        torch.testing.assert_close(got[name], value, rtol=close, atol=close, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.full(but=1)
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_ddp_does(case: str, ranks: Ranks) -> None:
    kwargs = CASES[case]
    params, value, norm = ranks(2).run(trained, ltx.ZeroStrategy(**BUCKETS), **kwargs).replicated()
    expected, expected_value, expected_norm = ranks(2).run(trained, ltx.DDPStrategy(**BUCKETS), **kwargs).replicated()
    close = 1e-5 if norm is None else 1e-3  # the norm of a bfloat16 gradient is rounded
    assert_close(params, expected, close)
    torch.testing.assert_close(value, expected_value, rtol=close, atol=0)
    if norm is not None:
        torch.testing.assert_close(norm, expected_norm, rtol=1e-2, atol=0)


@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=repr)
def test_two_ranks_have_ddps_bits(optimizer: Any, ranks: Ranks, seed: int) -> None:
    """Sums of two shares don't depend on their order; parts of 128 elements fill the processor's lanes."""

    start, batches = torch.randn(16, 16), torch.randn(4, 2, 5, 16)

    def on_a_rank(strategy: ltx.Strategy) -> Tensor:
        step = ltx.data_parallel(lambda w, x: (x @ w).tanh().square().mean(), strategy)
        return train_on.trained(step, optimizer, start, map(train_on.mine, batches)).params

    got = ranks(2).run(on_a_rank, ltx.ZeroStrategy()).replicated()
    assert torch.equal(got, ranks(2).run(on_a_rank, ltx.DDPStrategy()).replicated())


@pytest.mark.parametrize("n", [2, 3])
def test_each_rank_has_a_part_of_the_state(n: int, ranks: Ranks) -> None:
    def elements(strategy: ltx.Strategy) -> list[int]:
        train = ltx.train_step(ltx.data_parallel(lambda p, x: ((x @ p["a"]) @ p["b"]).square().mean(), strategy), ADAMW)
        first = train.init({"a": torch.ones(60, 30), "b": torch.ones(30, 7)})
        found = [sum(x.numel() for x in ltx.tree.flatten(first.opt_state)[0] if x.ndim)]
        state, _ = train(first, torch.ones(4, 60))
        return [*found, sum(x.numel() for x in ltx.tree.flatten(state.opt_state)[0] if x.ndim)]

    params = 60 * 30 + 30 * 7
    assert ranks(n).run(elements, ltx.ZeroStrategy()).replicated() == [2 * params // n] * 2
    assert ranks(n).run(elements, ltx.DDPStrategy()).replicated() == [2 * params] * 2


def test_clipping_by_a_norm_that_may_need_whole_parameters_is_refused() -> None:
    optimizer = ClipByGlobalNorm(1.0, norm=torch.nn.utils.get_total_norm)
    why = "ZeroStrategy needs an elementwise update, as a rank updates only some elements of a parameter, which"
    text = re.escape(f"{why} {optimizer!r} doesn't offer: use an elementwise")
    train_on.refuses(StrategyError, text, ltx.train_step, ltx.data_parallel(loss, ltx.ZeroStrategy()), optimizer)


def test_state_that_isnt_of_vectors_is_refused() -> None:
    optimizer = ltx.optim.from_functions(lambda p: torch.zeros(2, 2), lambda g, s, p: (g, s), elementwise=True)
    train = ltx.train_step(ltx.data_parallel(loss, ltx.ZeroStrategy()), optimizer)
    with pytest.raises(StrategyError, match=re.escape("is float32[2, 2]. State of parameters given as vectors")):
        train.init(params_of_all_kinds())


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_one_norm_is_measured_of_all_parts(n: int) -> None:
    x = torch.arange(1.0, 1 + 5 * n).reshape(n, 5)
    optimizer = ltx.optim.chain(ltx.optim.measure_global_norm(), ltx.optim.from_torch(torch.optim.SGD, lr=1.0))
    train = ltx.train_step(ltx.data_parallel(lambda w, x: (w * x).sum(), ltx.ZeroStrategy()), optimizer)
    state, metrics = ltx.vmap(train, in_dims=(None, 0))(train.init(torch.zeros(5)), x)
    torch.testing.assert_close(metrics.grad_norm, x.mean(0).norm().expand(n))
    torch.testing.assert_close(state.params, -x.mean(0).expand(n, 5))


def trainer() -> Any:
    return ltx.train_step(ltx.data_parallel(loss, ltx.ZeroStrategy()), ADAMW, donate=False)


def batch(step: int) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + int(ltx.axis_index())))


def test_a_part_for_other_ranks_is_refused() -> None:
    state = trainer().init(params_of_all_kinds())
    foreign = replace(state, opt_state=Shards(state.opt_state.state, 4, 1))
    text = "this optimizer state is shard_1_of_4, and this rank's is shard_0_of_1. For other ranks, or another number"
    train_on.refuses(StrategyError, re.escape(text), lambda: trainer()(foreign, torch.ones(8, 6)))
    with pytest.raises(StrategyError, match=r"shard_1_of_4, and this rank's is shard_r_of_2\. For other ranks"):
        ltx.vmap(trainer(), in_dims=(None, 0))(foreign, torch.ones(2, 8, 6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_may_travel_in_half_precision(dtype: torch.dtype, ranks: Ranks) -> None:
    def on_a_rank(strategy: ltx.Strategy) -> tuple[Tensor, int]:
        step = ltx.data_parallel(lambda w, x: (w * x).sum(), strategy)
        half = ltx.mixed_precision(step, Precision(compute=torch.float32, reduce=dtype))
        train = ltx.train_step(half, ltx.optim.from_torch(torch.optim.SGD, lr=1.0))
        x = torch.linspace(0.0, 1.0, 9) + int(ltx.axis_index())
        found, (trace,) = recorded(train, train.init(torch.zeros(9)), [x])
        return found.params, sum(e.nbytes for e in trace.events if e.label == "bucket 0")

    got, sent = ranks(2).run(on_a_rank, ltx.ZeroStrategy()).replicated()
    expected, _ = ranks(2).run(on_a_rank, ltx.DDPStrategy()).replicated()
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    assert (sent, ltx.hooks.cast(MeanPart(), dtype)) == (2 * 10 // 2, MeanPart(dtype))


LOSSY = {
    "fp16": hooks.FP16(),
    "bf16, fed back": hooks.error_feedback(hooks.BF16()),
    "bytegrad": hooks.ByteGrad(),
    "quantize": hooks.Quantize(),
    "qsgd": hooks.QSGD(),
    "onebit": hooks.OneBit(block=8),
    "topk": hooks.TopK(0.3),
    "warmed up": hooks.after(3, hooks.OneBit(block=8)),
}


def real_params() -> Params:
    return {name: x for name, x in params_of_all_kinds().items() if not x.is_complex()}


def real_loss(p: Params, x: Tensor) -> Tensor:
    return loss({**p, "complex": torch.zeros(1, dtype=torch.complex64)}, x)


def coded(hook: Any, **fields: Any) -> Any:
    return ltx.train_step(ltx.data_parallel(real_loss, ltx.ZeroStrategy(comm_hook=hook, **fields)), ADAMW, donate=False)


def moved(hook: Any, xs: Tensor) -> tuple[Params, Params]:
    """On a rank: (its parameters, and these with what no rank has sent yet, of gradients and of parameters)."""

    def linear(p: Params, x: Tensor) -> Tensor:
        return (p["a"].flatten() * x[:6]).sum() + (p["b"] * x[6:]).sum()

    step = ltx.data_parallel(linear, ltx.ZeroStrategy(comm_hook=hook))
    train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=0.5))
    state = train_on.go_on(train, train.init({"a": torch.zeros(2, 3), "b": torch.zeros(5)}), xs).state
    unsent = train.gather(state).opt_state.unsent
    left = {name: ltx.psum(own.get("residual", torch.zeros(()))) for name, own in state.sync_state.leaves.items()}
    whole = {name: p + unsent[name].view(p.shape) - 0.5 * left.get(name, 0) for name, p in state.params.items()}
    return dict(state.params), whole


@pytest.mark.full(but=3)
@pytest.mark.parametrize("name", [name for name in LOSSY if name not in ("fp16", "bytegrad", "quantize", "qsgd")])
@pytest.mark.parametrize("n", [2, 3])
def test_nothing_is_lost(name: str, n: int, ranks: Ranks, seed: int) -> None:
    """Parameters, and what ranks have kept of parts and of gradients, are the sum of all gradients, times the rate."""
    xs = torch.randn(n, 5, 11)
    expected = -0.5 * xs.mean(0).sum(0)
    found = ranks(n).run(lambda: moved(LOSSY[name], xs[int(ltx.axis_index())])).replicated()
    simulated = ltx.vmap(lambda x: moved(LOSSY[name], x))(xs)
    for params, whole in (found, tuple({key: x[0] for key, x in each.items()} for each in simulated)):
        torch.testing.assert_close(torch.cat([whole["a"].flatten(), whole["b"]]), expected, rtol=1e-5, atol=1e-5)
        if name != "bf16, fed back":
            assert not torch.allclose(torch.cat([params["a"].flatten(), params["b"]]), expected, rtol=1e-2)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_exact_hook_is_zero_itself(n: int, ranks: Ranks) -> None:
    zero = ltx.ZeroStrategy
    assert zero(comm_hook=hooks.AllReduce()) == zero() == zero(comm_hook="allreduce")

    def on_a_rank(hook: Any) -> Params:
        return train_on.go_on(coded(hook), coded(hook).init(real_params()), map(batch, range(4))).state.params

    never = ranks(n).run(on_a_rank, hooks.after(100, hooks.OneBit())).replicated()
    assert_close(never, ranks(n).run(on_a_rank, hooks.AllReduce()).replicated())


@train_on.on_ranks(2)
def test_what_wasnt_sent_is_sent_when_the_hook_becomes_exact() -> None:
    def size(tensors: Any) -> float:
        return sum(float(x.abs().sum()) for x in tensors)

    train = coded(hooks.after(3, hooks.AllReduce(), first=hooks.OneBit(block=8)))
    state = train_on.go_on(train, train.init(real_params()), map(batch, range(3))).state
    assert size(ltx.tree.flatten(state.opt_state.unsent)[0]) > 1e-2
    state, _ = train(state, batch(3))
    assert size(x for name, x in state.opt_state.unsent.items() if name != "half") < 1e-5


@pytest.mark.parametrize("name", ["bytegrad", "onebit"])
def test_coded_training_goes_on_from_a_checkpoint_on_other_ranks(name: str, ranks: Ranks, tmp_path: Path) -> None:
    def save() -> Params:
        train = coded(LOSSY[name])
        state = train_on.go_on(train, train.init(real_params()), map(batch, range(3))).state
        ltx.checkpoint.save(tmp_path, state)
        return train.gather(state).opt_state.unsent

    def load() -> tuple[Params, Params]:
        train = coded(LOSSY[name])
        state = ltx.checkpoint.load(tmp_path, train.init(real_params()), per_rank="mean").state
        return train.gather(state).opt_state.unsent, train(state, batch(3))[0].params

    saved = ranks(2).run(save).replicated()
    for n in (1, 2, 3):
        unsent, _ = ranks(n).run(load).replicated()
        assert all(torch.equal(unsent[key], x) for key, x in saved.items())


MEANS = [hooks.chain(hooks.AllReduce(), hooks.ByteGrad()), hooks.after(3, hooks.PowerSGD())]


@pytest.mark.parametrize("hook", [hooks.PowerSGD(), hooks.RandomK(), hooks.Noop(), *MEANS], ids=repr)
def test_hooks_without_messages_are_refused(hook: Any) -> None:
    with pytest.raises(StrategyError, match=r"ZeroStrategy.comm_hook needs messages, .* use FP16, BF16, ByteGrad"):
        ltx.ZeroStrategy(comm_hook=hook)


def test_what_coded_parameters_cant_do_is_refused() -> None:
    with pytest.raises(StrategyError, match='overlap="update" needs an update of each bucket by itself'):
        ltx.train_step(ltx.data_parallel(real_loss, ltx.ZeroStrategy(comm_hook="fp16")), ADAMW, overlap="update")
    with pytest.raises(StrategyError, match=r"complex64.*, needs work on complex numbers, which Zero.*apart"):
        coded("fp16").init(params_of_all_kinds())
    with pytest.raises(StepError, match=r"made for ZeroStrategy\(\), this one has .*adopt"):
        coded("fp16")(coded("allreduce").init(real_params()), torch.ones(8, 6))
    adopted = coded("fp16").adopt(coded("allreduce").gather(coded("allreduce").init(real_params())))
    coded("fp16")(adopted, torch.ones(8, 6))


def test_bytes_of_a_step(ranks: Ranks) -> None:
    def on_a_rank(hook: Any) -> int:
        train = ltx.train_step(ltx.data_parallel(lambda w, x: (w * x).sum(), ltx.ZeroStrategy(comm_hook=hook)), SGD)
        _, (trace,) = recorded(train, train.init(torch.zeros(4096)), [torch.ones(4096) * (1 + int(ltx.axis_index()))])
        return sum(e.nbytes for e in trace.events if "bucket" in e.label or "exchange" in e.label)

    by_name = {"exact": hooks.AllReduce(), **LOSSY}
    sent = {name: ranks(2).run(on_a_rank, hook).replicated() for name, hook in by_name.items()}
    assert (sent["exact"], sent["fp16"]) == (2 * 4096 * 4 // 2, sent["exact"] // 2)
    assert (sent["bytegrad"], sent["onebit"]) == (2 * (4096 // 2 + 8), 2 * (4096 // 2 // 8 * (1 + 4)))
