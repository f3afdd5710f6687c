"""The studies of convergence: each of their trainings runs, on a few steps of the digits."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

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


@pytest.fixture(scope="module")
def published() -> Any:
    """It loads the digits, which takes seconds, and so isn't imported where tests are collected."""
    return import_module("benchmarks.studies.published")


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


def test_a_federated_round_reaches_clients_and_misses_the_target(published: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(published, "MOST_ROUNDS", 2)
    found = published.federated(0, published.Turn(1, None, lr=1.0))
    assert found["rounds"] is None
    assert 5 < found["accuracy"] < published.TARGET


def test_a_published_comparison_trains(published: Any) -> None:
    digits = published.task_with(Digits, steps=4, batch_size=16, peak_lr=0.2)
    sent = [published.trained(0, digits, published.ddp(hook), ranks=4)["bytes"] for hook in published.SIGNS.values()]
    assert sent[0] > 10 * sent[1] == 10 * sent[2]


def test_the_page_of_published_results_has_what_the_script_prints(published: Any) -> None:
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "published-results.md").read_text(encoding="utf-8")
    found = published.tables(published.load()["runs"])
    assert list(found) == list(published.STUDIES)
    for study, tables in found.items():
        assert all(table in text for table in tables), study


def test_what_the_files_have_is_what_would_be_run(published: Any) -> None:
    kept = hooks.load()["runs"]
    assert [case for case in hooks.cases() if not hooks.where(kept, **hooks._settings(case))] == []
    kept = strategies.load()["runs"]
    assert [case for case in strategies.cases() if not strategies.where(kept, **strategies._settings(case))] == []
    kept = published.load()["runs"]
    assert [case for case in published.cases() if not published.where(kept, **published._key(case))] == []
