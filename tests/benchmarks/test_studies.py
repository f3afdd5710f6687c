"""The studies of convergence: each of their trainings runs, on a few steps of the digits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.studies import hooks, strategies
from benchmarks.studies.tasks import SETTINGS, Digits, Task
from tests.covering import some
from tests.needs import needs

pytestmark = needs("sklearn")

RANKS = 8


@pytest.fixture(scope="module")
def task() -> Task:
    digits = Digits("digits")
    digits.settings = replace(digits.settings, steps=4, warm_up=2)
    return digits


@pytest.mark.parametrize("hook", some(hooks.hooks_of(SETTINGS["digits"]), "onebit", "noop"))
def test_each_hook_trains(hook: str, task: Task) -> None:
    outcome = hooks.simulated(task, hook, 0, RANKS)
    assert outcome.loss < outcome.first_loss
    assert (outcome.apart > 0) == (hook == "noop") == (hooks.bytes_of(task, hook, RANKS) == 0)


@pytest.mark.parametrize("strategy", some(strategies.ROWS, "ddp", "alone"))
def test_each_strategy_trains(strategy: str, task: Task) -> None:
    outcome = strategies.simulated(task, strategy, 0, RANKS)
    assert outcome.loss < outcome.first_loss
    assert (strategies.sent(task, strategy, RANKS)[-1] == 0) == (strategy in ("alone", "DiLoCo"))


def test_what_the_files_have_is_what_would_be_run() -> None:
    kept = hooks.load()["runs"]
    assert [case for case in hooks.cases() if not hooks.where(kept, **hooks._settings(case))] == []
    kept = strategies.load()["runs"]
    assert [case for case in strategies.cases() if not strategies.where(kept, **strategies._settings(case))] == []
