"""Schedules as functions of the step, against torch's schedulers."""

from __future__ import annotations

import pickle
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim import lr_scheduler as torchs

from ltx.errors import LtxError, OptimError
from ltx.optim import from_scheduler, warmup_cosine
from tests.train_on import refuses

SCHEDULERS: dict[str, Any] = {
    "step": lambda o: torchs.StepLR(o, 3, 0.5),
    "several steps": lambda o: torchs.MultiStepLR(o, [2, 5]),
    "exponential": lambda o: torchs.ExponentialLR(o, 0.9),
    "cosine": lambda o: torchs.CosineAnnealingLR(o, 10, 0.01),
    "restarts": lambda o: torchs.CosineAnnealingWarmRestarts(o, 4),
    "polynomial": lambda o: torchs.PolynomialLR(o, 7, 2.0),
    "one cycle": lambda o: torchs.OneCycleLR(o, 0.5, total_steps=12, cycle_momentum=False),
    "cyclic": lambda o: torchs.CyclicLR(o, 0.01, 0.1, 3, cycle_momentum=False),
    "a function": lambda o: torchs.LambdaLR(o, lambda step: 1 / (1 + step)),
    "warm-up, then cosine": lambda o: torchs.SequentialLR(
        o, [torchs.LinearLR(o, 0.1, total_iters=3), torchs.CosineAnnealingLR(o, 9)], [3]
    ),
    "chained": lambda o: torchs.ChainedScheduler([torchs.ConstantLR(o, 0.5, 2), torchs.ExponentialLR(o, 0.9)], o),
}


@pytest.mark.filterwarnings("ignore:.*epoch parameter:UserWarning")  # torch's own, of SequentialLR
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_schedulers_rates(name: str) -> None:
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    scheduler, rates = SCHEDULERS[name](optimizer), []
    for _ in range(12):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        if len(rates) < 12:
            scheduler.step()
    schedule = from_scheduler(SCHEDULERS[name], lr=0.3)
    assert [schedule(step) for step in (11, *range(12))] == [rates[11], *rates]


def test_a_warm_up_to_the_end_ends_where_it_should() -> None:
    assert [warmup_cosine(1.0, 2, 2, 0.25)(step) for step in range(4)] == [0.5, 1.0, 0.25, 0.25]


@pytest.mark.parametrize("kind", [IndexError, ValueError])
def test_a_scheduler_that_ends_is_only_asked_for_what_it_has(kind: type[Exception]) -> None:
    factors = [1.0, 0.5, 0.25]

    def factor(step: int) -> float:
        if step >= len(factors):
            raise kind(f"no factor of step {step}")
        return factors[step]

    schedule = from_scheduler(partial(torchs.LambdaLR, lr_lambda=factor), lr=2.0)
    assert [schedule(step) for step in range(3)] == [2.0, 1.0, 0.5]
    refuses(kind, "no factor of step 3", schedule, 5)


def test_are_values() -> None:
    step = partial(torchs.StepLR, step_size=2)
    for made in (warmup_cosine(1.0, 2, 6), from_scheduler(step, 0.1)):
        made(3)
        again = pickle.loads(pickle.dumps(made))
        assert again(5) == made(5)
    assert warmup_cosine(1, 0, 4) == warmup_cosine(1, 0, 4) != warmup_cosine(1, 0, 5)
    assert repr(warmup_cosine(1.0, 2, 6)) == "WarmupCosine(peak=1.0, warmup_steps=2, total_steps=6, end=0.0)"


def test_formulas() -> None:
    schedule = warmup_cosine(2.0, 10, 110, end=0.5)
    cosine = torchs.CosineAnnealingLR(SGD([torch.zeros(1, requires_grad=True)], lr=2.0), 100, 0.5)
    cosine.optimizer.step()
    for step in range(10, 110):
        assert schedule(step) == pytest.approx(cosine.get_last_lr()[0])
        cosine.step()
    assert [schedule(0), schedule(9), schedule(110), schedule(10**6)] == [0.2, 2.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: warmup_cosine(1.0, 1, 2, "1"), "end"),
        (lambda: warmup_cosine(1.0, 7, 6), "warmup_steps must be from 0 to total_steps, got 7 of 6."),
        (lambda: warmup_cosine(1.0, 0, 0), "total_steps must be a whole number of at least 1, got 0."),
        (lambda: from_scheduler(3, 0.1), "expected a function from an optimizer to a scheduler"),
        (lambda: from_scheduler(SCHEDULERS["step"], -1.0), "lr must be a finite number of at least 0, got -1.0."),
        (lambda: from_scheduler(lambda o: 3, 0.1)(0), "must return a scheduler of torch.optim.lr_scheduler"),
        (lambda: from_scheduler(torchs.ReduceLROnPlateau, 0.1)(0), "those of the step alone; got <torch.optim"),
        (lambda: from_scheduler(lambda o: torchs.OneCycleLR(o, 0.5, 9), 0.1)(0), "Give it cycle_momentum=False."),
    ],
)
def test_refused(make: Any, text: str) -> None:
    with pytest.raises(LtxError, match=re.escape(text)) as error:
        make()
    assert isinstance(error.value, OptimError)
