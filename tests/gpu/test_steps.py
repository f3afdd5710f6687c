"""Training steps of one rank over NCCL: the host never waits for the device, and results are plain torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from tests import train_on
from tests.gpu import device
from tests.gpu.device import ADAMW, DEVICE, HALVES, batch, check, halves_of, model, on_cpu, params_of, plain
from tests.streams.test_steps import loss_of
from tests.train_on import go_on

WARM_UP, STEPS = 3, 4


def trained(step: Any, batches: list[tuple[Tensor, ...]], **options: Any) -> tuple[Any, list[bool]]:
    """Parameters, and which steps were skipped; from the fourth step on the host doesn't wait."""
    train = ltx.train_step(step, ADAMW, **options)
    state, first = go_on(train, train.init(params_of(model())), batches[:WARM_UP])
    with device.without_waiting():
        state, then = go_on(train, state, batches[WARM_UP:])
    return on_cpu(train.finish(state).params), [bool(metrics.skipped) for metrics in [*first, *then]]


def batches(samples: int = 16) -> list[tuple[Tensor, Tensor]]:
    return [batch(step, samples) for step in range(WARM_UP + STEPS)]


def expected(samples: int = 16, weight: bool = False, without: int | None = None) -> dict[str, Tensor]:
    def grads(loss: Any, params: dict[str, Tensor], step: int) -> list[Tensor] | None:
        if step == without:
            return None
        total = loss(params, *batch(step, samples)) * (samples if weight else 1)
        found = device.as_fp16_gives(torch.autograd.grad(total, list(params.values())))
        return [g / samples for g in found] if weight else found

    return plain(WARM_UP + STEPS, grads)


@pytest.mark.parametrize("overlap", ["backward", "update"])
def test_a_step(overlap: Any, workers: Any) -> None:
    def run() -> Any:
        return trained(ltx.data_parallel(loss_of(model()), HALVES), batches(), overlap=overlap)[0], expected()

    check(workers, run)


def test_a_step_without_communication(workers: Any) -> None:
    """An exact sum of one rank is left out."""
    check(workers, lambda: (trained(ltx.data_parallel(loss_of(model())), batches())[0], plain(WARM_UP + STEPS)))


@pytest.mark.parametrize("at", [1, WARM_UP + 1])
def test_a_guarded_step(at: int, workers: Any) -> None:
    """The step with NaN is left out, as if it had never been."""

    def run() -> Any:
        given = batches()
        given[at] = given[at][0] * float("nan"), given[at][1]
        return *trained(ltx.data_parallel(loss_of(model()), HALVES), given, guard="skip"), expected(without=at)

    ((params, skipped, wanted),) = workers.run(run)
    assert skipped == [step == at for step in range(WARM_UP + STEPS)]
    torch.testing.assert_close(params, wanted)


@pytest.mark.parametrize("kind", ["number", "on the host", "on the device"])
@pytest.mark.parametrize("overlap", ["backward", "update"])
def test_a_weighted_step(kind: str, overlap: Any, workers: Any) -> None:
    def run() -> Any:
        loss = loss_of(model())
        # On the device it is there before: to make it there would be the user's wait.
        weights = {"number": 16, "on the host": torch.tensor(16), "on the device": torch.tensor(16, device=DEVICE)}

        def weighted(params: Any, x: Tensor, y: Tensor) -> ltx.Weighted:
            return ltx.Weighted(loss(params, x, y) * len(x), weights[kind])

        return trained(ltx.data_parallel(weighted, HALVES), batches(), overlap=overlap)[0], expected(weight=True)

    check(workers, run)


@pytest.mark.parametrize("guard", ["off", "skip"])
def test_a_dynamic_loss_scale(guard: Any, workers: Any) -> None:
    """It grows every other step. Powers of two change no digit."""

    def run() -> Any:
        scale = ltx.DynamicLossScale(init=2.0**8, growth_interval=2)
        step = ltx.data_parallel(loss_of(model()), HALVES)
        step = ltx.mixed_precision(step, ltx.Precision(compute=torch.bfloat16, loss_scale=scale))
        scales = [2.0 ** (8 + step // 2) for step in range(WARM_UP + STEPS)]

        def grads(loss: Any, params: dict[str, Tensor], step: int) -> list[Tensor]:
            x, y = batch(step)
            total = loss({name: p.bfloat16() for name, p in params.items()}, x.bfloat16(), y).float() * scales[step]
            return [g / scales[step] for g in device.as_fp16_gives(torch.autograd.grad(total, list(params.values())))]

        return *trained(step, batches(), guard=guard), plain(WARM_UP + STEPS, grads)

    ((params, skipped, wanted),) = workers.run(run)
    assert not any(skipped)
    torch.testing.assert_close(params, wanted)


def test_accumulation(workers: Any) -> None:
    def run() -> Any:
        def grads(loss: Any, params: dict[str, Tensor], step: int) -> list[Tensor]:
            x, y = batch(step)
            halves = [loss(params, a, b) for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]
            return device.as_fp16_gives(torch.autograd.grad(sum(halves) / 2, list(params.values())))

        step = ltx.accumulate(ltx.data_parallel(loss_of(model()), HALVES), steps=2)
        return trained(step, batches())[0], plain(WARM_UP + STEPS, grads)

    check(workers, run)


def test_gradients_alone(workers: Any) -> None:
    def run() -> Any:
        loss, params = loss_of(model()), params_of(model())
        grad, (x, y) = ltx.grad(ltx.data_parallel(loss, HALVES)), batch(0)
        for _ in range(2):
            grad(params, x, y)
        with device.without_waiting():
            found = grad(params, x, y)
        leaves = {name: p.requires_grad_() for name, p in params.items()}
        return on_cpu(found), on_cpu(dict(zip(leaves, halves_of(loss, leaves, 0), strict=True)))

    check(workers, run)


FUSED = {"SGD": {"lr": 0.1, "momentum": 0.9}, "Adam": {"lr": 1e-2}, "Adagrad": {"lr": 1e-2}}
FUSED |= {"RMSprop": {"lr": 1e-3}, "NAdam": {"lr": 1e-3}}


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("guard", ["off", "skip"])
def test_optimizers(name: str, guard: Any, workers: Any) -> None:
    """Each class with the kernels that it has on this device; with a guard those, too, that can't be told on it."""

    def run() -> Any:
        kind = getattr(torch.optim, name)
        optimizer = ltx.optim.from_torch(kind, **FUSED[name])
        step = ltx.data_parallel(loss_of(model()), HALVES)
        params = train_on.trained(step, optimizer, params_of(model()), batches()[:STEPS], guard=guard).params
        return on_cpu(params), plain(STEPS, halves_of, lambda params: kind(params, **FUSED[name]))

    check(workers, run)


def test_collectives_and_the_rank_in_a_step(workers: Any) -> None:
    """A step that asks for its rank and sums a number doesn't wait either."""

    def run() -> Any:
        loss = loss_of(model())

        def shifted(params: Any, x: Tensor, y: Tensor) -> Tensor:
            return loss(params, x + ltx.axis_index(), y) * ltx.psum(torch.ones((), device=DEVICE)) + ltx.pmean(0.0)

        return trained(ltx.data_parallel(shifted, HALVES), batches())[0], expected()

    check(workers, run)
