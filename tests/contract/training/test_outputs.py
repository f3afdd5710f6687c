"""What a train step is given and returns: batches by keyword, models' outputs, and losses and gradients of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx.errors import ReplicaDivergedError, StepError
from tests.contract.base.test_tree import Output
from tests.inside import stateful
from tests.kinds import Ranks
from tests.train_on import in_all_worlds, on_ranks, refuses, trained

SGD = ltx.optim.from_torch(torch.optim.SGD, lr=1.0)
XS = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


@pytest.mark.full(but=1)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("outputs", ["local", "mean"])
def test_aux_and_buffers(outputs: Any, weighted: bool, ranks: Ranks) -> None:
    """With "mean" they are means over ranks, integers excepted; with "local" this rank's own."""

    def step(w: Tensor, buffer: Tensor, x: Tensor) -> Any:
        loss = (w * x).sum()
        aux = {"sum": x.sum(), "own": ltx.pmean(x.sum()), "count": x.sum().long(), "text": "kept"}
        return (ltx.Weighted(loss, 2.0) if weighted else loss), buffer + x.sum(), aux

    def run(x: Tensor) -> Any:
        plain = ltx.data_parallel(step, outputs=outputs)
        state, (metrics,) = trained(plain, SGD, torch.tensor(1.0), [x], buffers=torch.tensor(0.0), has_aux=True)
        value = plain(torch.tensor(1.0), torch.tensor(0.0), x)
        assert metrics.aux.pop("text") == value[2].pop("text") == "kept"
        return metrics.loss, metrics.aux, state.buffers, value[1], value[2]

    for found in in_all_worlds(run, ranks, XS):
        for (loss, aux, buffers, value_buffers, value_aux), own in zip(found, (3.0, 7.0), strict=True):
            want = 5.0 if outputs == "mean" else own
            assert loss == (2.5 if weighted else 5.0)
            assert aux == value_aux == {"sum": want, "own": 5.0, "count": own}
            assert buffers == value_buffers == want


@pytest.mark.parametrize("parts", [1, 2])
def test_batches_by_keyword(parts: int, ranks: Ranks) -> None:
    """Tensors that have samples are split into micro-batches, whose losses are sums over half as many."""

    def step(w: Tensor, *, x: Tensor, scale: Tensor) -> Tensor:
        return (w * x * scale).sum()

    def run(x: Tensor) -> Tensor:
        train = ltx.train_step(ltx.accumulate(ltx.data_parallel(step), parts), SGD)
        state, _ = train(train.init(torch.tensor(0.0)), x=x, scale=torch.tensor(2.0))
        return state.params

    for found in in_all_worlds(run, ranks, XS):
        assert found == [-10.0 / parts] * 2


@pytest.mark.parametrize(
    "make", [Output, lambda loss, logits: {"loss": loss, "logits": logits}], ids=["output", "dict"]
)
def test_what_a_model_returns_holds_its_loss(make: Any, ranks: Ranks) -> None:

    def run(x: Tensor) -> Any:
        w, plain = torch.tensor(1.0), ltx.data_parallel(lambda w, x: make((w * x).mean(), w * x))
        found: list[Tensor] = []
        for has_aux in (False, True):
            state, (metrics,) = trained(plain, SGD, w, [x], has_aux=has_aux)
            found += [metrics.loss, 1.0 - state.params]
        assert not metrics.aux["logits"].requires_grad
        assert type(plain(w, x)) is type(metrics.aux) is type(make(w, x))
        return [*found, torch.func.grad(lambda w: plain(w, x)["loss"])(w)], metrics.aux["logits"]

    for found in in_all_worlds(run, ranks, XS):
        assert [logits.tolist() for _, logits in found] == [[1.0, 2.0], [3.0, 4.0]]
        assert all(x == 2.5 for numbers, _ in found for x in numbers)


@on_ranks(2, alone=True)
def test_channels_last_stays_so() -> None:
    """From a model's parameters through broadcast, init, a step, and a broadcast of the state."""
    w = torch.randn(8, 4, 3, 3).to(memory_format=torch.channels_last)
    train = ltx.train_step(ltx.data_parallel(lambda p, x: (p["w"] * x).sum()), SGD)
    state = train.init({"w": ltx.broadcast(w)})
    found = [ltx.broadcast(w), state.params["w"].clone()]
    assert torch.equal(*found)
    state, _ = train(state, torch.ones(()))
    state = train.broadcast(state)
    found += [state.params["w"], train.broadcast(train.init({"w": w.contiguous()}), 0).params["w"]]
    assert [x.stride() == w.stride() for x in found] == [True, True, True, False]


@on_ranks(2, alone=True)
def test_detached_outputs_stay_detached() -> None:
    """On two ranks as alone: what a step detaches has no graph."""
    step = ltx.data_parallel(lambda w, x: ((w * x).sum(), (w * x).detach()))
    loss, seen = step(torch.ones(2, requires_grad=True), torch.ones(2))
    assert seen.numpy().tolist() == [1.0, 1.0]
    assert (loss.requires_grad, seen.requires_grad) == (True, False)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_step_that_returns_fewer_buffers(compiled: bool, ranks: Ranks) -> None:
    def step(w: Tensor, buffers: dict[str, Tensor], x: Tensor) -> Any:
        return (w * x).sum(), {"seen": buffers["seen"] + 1, "new": x}

    def run(x: Tensor) -> Tensor:
        train = ltx.train_step(ltx.data_parallel(step), SGD)
        state = train.init(torch.tensor(1.0), {"seen": torch.tensor(0.0), "target": torch.tensor(2.0)})
        call = torch.compile(train, backend="eager") if compiled else train
        refuses(StepError, r"was given a buffer .*target.* and returned none", call, state, x)
        state = train.init(torch.tensor(1.0), {"seen": torch.tensor(0.0)})
        return train(state, x)[0].buffers["seen"]  # with one more than it had

    for found in in_all_worlds(run, ranks, XS):
        assert found == [1.0, 1.0]


@on_ranks(2, alone=True)
def test_a_step_that_takes_buffers_and_a_state_that_has_none() -> None:
    def fails(w: Tensor, x: Tensor) -> Any:
        raise TypeError("of the step's own")

    w, buffer, x = torch.ones(2), torch.zeros(()), torch.ones(2, 2)
    for wrap, of_buffers in (
        (lambda step: step, r"takes \(w.*as the state has buffers"),
        (lambda step: ltx.accumulate(step, steps=2), r"would cut the buffers into micro-batches.*carry=1"),
    ):
        train = ltx.train_step(wrap(ltx.data_parallel(lambda w, buffer, x: ((w * x).sum(), buffer + 1))), SGD)
        text = r"takes \(w.*train\.init\(params, dict\(module\.named_buffers\(\)\)\)"
        refuses(StepError, text, train, train.init(w), x)
        train = ltx.train_step(wrap(ltx.data_parallel(lambda w, x: (w * x).sum())), SGD)
        refuses(StepError, of_buffers, lambda train=train: train(train.init(w, buffer), x))
        refuses(TypeError, "positional argument", train, train.init(w), x, x, x)
        refuses(TypeError, "of the step's own", ltx.train_step(wrap(ltx.data_parallel(fails)), SGD), train.init(w), x)


sgd = ltx.optim.from_torch(torch.optim.SGD, lr=0.1)

LOCAL: dict[str, Callable[[], ltx.Strategy]] = {
    "local SGD": lambda: ltx.LocalSGDStrategy(period=2),
    "DiLoCo": lambda: ltx.DiLoCoStrategy(period=2),
    "decentralized": lambda: ltx.BaguaStrategy("decentralized"),
    "asynchronous": lambda: ltx.BaguaStrategy("async"),
    "Adasum": lambda: ltx.HorovodStrategy(op="adasum"),
}


def told(strategy: ltx.Strategy, outputs: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """``metrics.loss`` and ``metrics.grad_norm`` of one step, whose gradient is x / 2."""
    measured = ltx.optim.chain(ltx.optim.measure_global_norm(), sgd)
    train = ltx.train_step(ltx.data_parallel(lambda w, x: (w * x).mean(), strategy, outputs=outputs), measured)
    metrics = train(train.init(torch.ones(2)), x)[1]
    return metrics.loss, metrics.grad_norm


@pytest.mark.parametrize("name", LOCAL)
def test_loss_and_norm_are_the_ranks_own_or_outputs_means(name: str, ranks: Ranks, seed: int) -> None:
    xs, strategy = torch.randn(2, 2), LOCAL[name]()
    norms, losses = xs.norm(dim=1) / 2, xs.mean(1)
    for outputs, wanted in (("local", losses), ("mean", losses.mean().expand(2))):
        found = [*ranks(2).run(lambda outputs=outputs: told(strategy, outputs, xs[ltx.world().rank]))]
        if name != "asynchronous":  # which leaves work under way, so that simulated ranks can't
            found += [*zip(*ltx.vmap(lambda x, outputs=outputs: told(strategy, outputs, x))(xs), strict=True)]
        for place, values in enumerate(found):
            torch.testing.assert_close(values, (wanted[place % 2], norms[place % 2]))
    for found in ranks(2).run(lambda: told(ltx.DDPStrategy(), "local", xs[ltx.world().rank])):
        torch.testing.assert_close(found, (losses.mean(), xs.mean(0).norm() / 2))


@pytest.mark.parametrize("name", LOCAL)
@on_ranks(2)
def test_a_plain_gradient_is_the_ranks_own_where_ranks_share_something_else(name: str) -> None:
    step = ltx.data_parallel(lambda w, x: (w * x).sum(), LOCAL[name]())
    w, x = torch.ones(2), torch.full((2,), 1.0 + ltx.world().rank)
    if stateful(step.strategy):
        found, _ = ltx.grad(step)(w, x, sync_state=step.init(w))
    else:
        found = ltx.grad(step)(w, x)
    torch.testing.assert_close(found, x)


def seeded(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    w = torch.randn(3)
    return ltx.grad(ltx.data_parallel(lambda w, x: (w * x).sum()))(w, x)


def test_an_equal_seed_on_simulated_ranks(ranks: Ranks) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    refuses(ReplicaDivergedError, r"make parameters outside of it, or with randomness='same'", ltx.vmap(seeded), x)
    real = ranks(2).run(lambda: seeded(x[ltx.world().rank]))
    for found in (ltx.vmap(seeded, randomness="same")(x), torch.stack(list(real))):
        torch.testing.assert_close(found, x.mean(0).expand(2, 3))


@on_ranks(2)
def test_experts_have_the_gradient_of_the_sum(seed: int) -> None:
    """Gradients with respect to an expert that each rank holds alone, and to a weight that all share."""
    experts = torch.randn(2, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    w, xs = torch.tensor(3.0, requires_grad=True), torch.tensor([1.0, 2.0])
    by_expert, by_weight = torch.autograd.grad((experts.sum() * w * xs).mean(), (experts, w))
    step = ltx.data_parallel(lambda e, w, x: (ltx.psum(e) * w * x).sum(), argnums=1)
    rank = ltx.world().rank
    found = torch.func.grad(step, argnums=(0, 1))(experts.detach()[rank], w.detach(), xs[rank])
    torch.testing.assert_close(found, (2 * by_expert[rank], by_weight))
