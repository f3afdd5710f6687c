"""Train steps of steps that return gradients: what the same training with the loss comes to."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad_and_value
from torch.nn.functional import cross_entropy

import ltx
from ltx.errors import StepError
from ltx.optim import from_torch
from tests.contract.optim.test_partition import NET, loss_fn, problem
from tests.kinds import Params, Ranks
from tests.train_on import refuses, trained

SGD = from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)


def gradients(params: Params, x: Tensor, y: Tensor) -> tuple[Params, Tensor]:
    return grad_and_value(loss_fn)(params, x, y)


def by_backward(params: Params, x: Tensor, y: Tensor) -> tuple[Params, Tensor]:
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    loss = loss_fn(leaves, x, y)
    loss.backward()
    return {name: p.grad for name, p in leaves.items() if p.grad is not None}, loss


def both(
    strategy: ltx.Strategy, overlap: Any, fn: Any = gradients, steps: int = 0, guard: Any = "off"
) -> list[tuple[Params, Tensor]]:
    """Parameters and last loss of a training by gradients, and by the loss; in so many micro-batches, if any."""
    params, x, y = problem()
    found = []
    for step in (ltx.data_parallel(fn, strategy, returns="grads"), ltx.data_parallel(loss_fn, strategy)):
        step = ltx.accumulate(step, steps) if steps else step
        after = trained(step, SGD, params, [ltx.shard((x, y))] * 4, overlap=overlap, guard=guard)
        found.append((dict(after.params), after.losses[-1]))
    return found


STRATEGIES = {
    "ddp": ltx.DDPStrategy(),
    "small buckets": ltx.DDPStrategy(bucket_bytes=64, first_bucket_bytes=64),
    "bytegrad": ltx.DDPStrategy(comm_hook=ltx.hooks.ByteGrad()),
    "powersgd": ltx.DDPStrategy(comm_hook=ltx.hooks.PowerSGD(1, start_step=1)),
    "zero": ltx.ZeroStrategy(),
    "local sgd": ltx.LocalSGDStrategy(2),
}
ROWS = [(name, "backward") for name in STRATEGIES] + [(name, "update") for name in ("ddp", "small buckets", "zero")]


@pytest.mark.full(but=4)
@pytest.mark.parametrize(("name", "overlap"), ROWS)
def test_real_ranks(name: str, overlap: str, ranks: Ranks, seed: int) -> None:
    given, expected = ranks(2).run(both, STRATEGIES[name], overlap)[1]
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-6)


def test_gradients_of_a_backward_pass(ranks: Ranks, seed: int) -> None:
    given, expected = ranks(2).run(both, STRATEGIES["ddp"], "backward", by_backward)[0]
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.full(but=1)
@pytest.mark.parametrize(("name", "overlap", "guard"), [(*row, "off") for row in ROWS] + [("ddp", "backward", "raise")])
def test_in_micro_batches(name: str, overlap: str, guard: str, ranks: Ranks, seed: int) -> None:
    by_grads, by_loss = ranks(2).run(both, STRATEGIES[name], overlap, steps=4, guard=guard).rank(1)
    torch.testing.assert_close(by_grads, by_loss)


def test_in_micro_batches_on_simulated_ranks(seed: int) -> None:
    def run(x: Tensor, y: Tensor) -> tuple[Params, Params]:
        params = {name: p.detach() for name, p in NET.named_parameters()}
        accumulated = ltx.accumulate(ltx.data_parallel(gradients, returns="grads"), 2)
        return ltx.grad(accumulated)(params, x, y), ltx.grad(ltx.data_parallel(loss_fn))(params, x, y)

    by_grads, by_loss = ltx.vmap(run)(torch.randn(3, 8, 4), torch.randint(3, (3, 8)))
    torch.testing.assert_close(by_grads, by_loss)


def test_unequal_batches(ranks: Ranks, seed: int) -> None:
    def summed(params: Params, x: Tensor, y: Tensor) -> tuple[Params, ltx.Weighted]:
        grads, loss = grad_and_value(lambda p: len(x) * loss_fn(p, x, y))(params)
        return grads, ltx.Weighted(loss, len(x))

    def both() -> tuple[Params, Tensor, Params, Tensor]:
        params, x, y = problem()
        own = slice(0, 11) if ltx.world().rank == 0 else slice(11, 16)
        found = trained(ltx.data_parallel(summed, returns="grads"), SGD, params, [(x[own], y[own])])
        grads, loss = gradients(params, x, y)
        return dict(found.params), found.losses[0], {k: p - 0.1 * grads[k] for k, p in params.items()}, loss

    found, mean, expected, loss = ranks(2).run(both)[1]
    torch.testing.assert_close((found, mean), (expected, loss), rtol=1e-4, atol=1e-6)


def antithetic(params: Params, noise: Tensor) -> tuple[Params, Tensor]:
    """Evolution strategies' estimate from pairs of perturbations; `noise` has one a row."""
    scores = [
        torch.vmap(lambda e, sign=sign: (params["w"] + sign * e - 3.0).abs().sum())(noise) for sign in (0.1, -0.1)
    ]
    return {"w": ((scores[0] - scores[1])[:, None] * noise / 0.2).mean(0)}, torch.cat(scores).mean()


def evolved(noises: Tensor) -> tuple[Tensor, Tensor]:
    """The parameter after three steps, in which each rank tries perturbations of its own; and the losses."""
    start = {"w": torch.zeros(2, dtype=noises.dtype)}
    sgd = from_torch(torch.optim.SGD, lr=0.3)
    found = trained(ltx.data_parallel(antithetic, returns="grads"), sgd, start, noises)
    return found.params["w"], found.losses


def test_ranks_that_try_perturbations_of_their_own_are_as_one_that_tries_all(ranks: Ranks, seed: int) -> None:
    noises = torch.randn(3, 2, 5, 2, dtype=torch.float64)  # step, rank, pair
    alone = evolved(noises.flatten(1, 2))
    together = ranks(2).run(lambda: evolved(noises[:, ltx.axis_index()])).replicated()
    for found in (together, *zip(*ltx.vmap(evolved, in_dims=1)(noises), strict=True)):
        torch.testing.assert_close(found, alone)


def test_buffers_aux_and_frozen_parameters(seed: int) -> None:
    def step(params: Params, buffers: Params, x: Tensor) -> Any:
        grads, loss = grad_and_value(lambda p: (p["w"] * x * p["frozen"]).sum())(params)
        return grads, loss, {"seen": buffers["seen"] + len(x)}, {"largest": x.amax()}

    params = {"w": nn.Parameter(torch.tensor(1.0)), "frozen": nn.Parameter(torch.tensor(2.0), requires_grad=False)}
    train = ltx.train_step(ltx.data_parallel(step, returns="grads"), from_torch(torch.optim.SGD, lr=1.0), has_aux=True)
    state, metrics = train(train.init(params, {"seen": torch.tensor(0)}), torch.tensor([1.0, 3.0]))
    assert state.params["w"].item() == 1.0 - 8.0
    assert state.params["frozen"].item() == 2.0
    assert state.buffers["seen"].item() == 2
    assert metrics.aux["largest"].item() == 3.0
    assert metrics.loss.item() == 8.0


@pytest.mark.filterwarnings("ignore::ltx.errors.UnusedParameterWarning")
def test_complex_parameters_and_none() -> None:
    def step(params: Params) -> Any:
        return {"z": torch.full((2,), 1 + 2j, dtype=torch.complex64), "unused": None}, torch.tensor(5.0)

    params = {"z": torch.zeros(2, dtype=torch.complex64), "unused": torch.ones(3)}
    train = ltx.train_step(ltx.data_parallel(step, returns="grads"), from_torch(torch.optim.SGD, lr=1.0))
    state, metrics = train(train.init(params))
    assert state.params["z"].tolist() == [-1 - 2j, -1 - 2j]
    assert state.params["unused"].tolist() == [1, 1, 1]
    assert metrics.loss.item() == 5.0


def test_the_first_parameters_dtype_rounds_no_other_gradient() -> None:
    """A third, the part of a micro-batch, is a number that bfloat16 doesn't have."""

    def step(params: Params, x: Tensor) -> Any:
        return grad_and_value(lambda p: p["a"].sum().float() + (p["b"] * x).sum())(params)

    in_three = ltx.accumulate(ltx.data_parallel(step, returns="grads"), 3)
    start = {"a": torch.zeros(2, dtype=torch.bfloat16), "b": torch.zeros(())}
    found = trained(in_three, from_torch(torch.optim.SGD, lr=1.0), start, [torch.ones(3)])
    torch.testing.assert_close(found.params["b"], torch.tensor(-1.0))


def test_gradients_that_are_not_finite_are_seen() -> None:
    step = ltx.data_parallel(lambda p: ({"w": p["w"] * torch.inf}, p["w"].sum()), returns="grads")
    state, (metrics,) = trained(step, SGD, {"w": torch.ones(2)}, [()], guard="skip")
    assert metrics.skipped
    assert state.params["w"].tolist() == [1.0, 1.0]


def test_a_modules_own_parameters_are_refused() -> None:
    def forgetful(params: Params, x: Tensor, y: Tensor) -> Any:
        loss = cross_entropy(NET(x), y)  # not with the given parameters
        return {name: torch.zeros_like(p) for name, p in params.items()}, loss

    train = ltx.train_step(ltx.data_parallel(forgetful, returns="grads"), SGD)
    state = train.init(dict(NET.named_parameters()))
    text = r"'3\.weight' of Sequential, a parameter of shape .* that isn't one of its arguments"
    refuses(StepError, text, train, state, torch.randn(2, 4), torch.tensor([0, 1]))


@pytest.mark.parametrize("way", ["loss.backward()", "torch.autograd.grad"])
def test_a_step_that_differentiates_by_plain_autograd_is_told_how(way: str) -> None:
    def step(params: Params, x: Tensor) -> Any:
        loss = (params["w"] * x).sum()
        if way == "loss.backward()":
            loss.backward()
        return dict(zip(params, torch.autograd.grad(loss, [*params.values()]), strict=True)), loss.detach()

    wrapped = ltx.data_parallel(step, returns="grads")
    text = r"gets require no gradient\. Take torch.func.grad_and_value"
    params, x = {"w": torch.ones(2)}, torch.ones(2)
    refuses(StepError, text, wrapped, params, x)
    train = ltx.train_step(wrapped, SGD)
    refuses(StepError, text, train, train.init(params), x)


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (lambda p: p, "returns (grads, loss), as ltx.grad_and_value"),
        (lambda p: ltx.Weighted(p["w"].sum(), 1), "returns (grads, loss), as ltx.grad_and_value"),
        (lambda p: (p, p["w"]), "a 0-dim tensor or ltx.Weighted as its loss, got"),
        (lambda p: (p, 3.0), "a 0-dim tensor or ltx.Weighted as its loss, got 3.0"),
        (lambda p: ([p["w"]], p["w"].sum()), "gradients in the structure of its parameters"),
        (
            lambda p: ({}, p["w"].sum()),
            "None for those that have none, such as {name: grads.get(name) for name in params}",
        ),
        (lambda p: (p["w"].sum(), p), "returns (grads, loss), with gradients in the structure"),
        (lambda p: ({"w": p["w"][:1]}, p["w"].sum()), "the gradient of 'w' must be"),
        (lambda p: ({"w": p["w"].double()}, p["w"].sum()), "the gradient of 'w' must be"),
        (lambda p: ({"w": 1.0}, p["w"].sum()), "the gradient of 'w' must be"),
        (lambda p: ({"w": None}, p["w"].sum()), "returned no gradient at all"),
    ],
)
def test_what_is_refused(returned: Any, text: str) -> None:
    train = ltx.train_step(ltx.data_parallel(returned, returns="grads"), SGD)
    state = train.init({"w": torch.ones(2)})
    refuses(StepError, re.escape(text), train, state)
    assert state.params["w"].tolist() == [1.0, 1.0]  # as it was


@pytest.mark.filterwarnings(
    "ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning"
)  # Dynamo
@pytest.mark.slow_compile
@pytest.mark.full
def test_compiled(seed: int) -> None:
    params, x, y = problem()
    train = ltx.train_step(ltx.data_parallel(gradients, returns="grads"), SGD)
    eager, _ = train(train.init(params), x, y)
    compiled, _ = torch.compile(train, fullgraph=True, backend="aot_eager")(train.init(params), x, y)
    torch.testing.assert_close(dict(compiled.params), dict(eager.params))
