"""Pools: an interrupt that each rank answers is over at once, and modules that can't be read again by their name."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ltx
from ltx.errors import CallInterruptedError
from tests.kinds import Ranks


def _sleep() -> None:
    time.sleep(60)


def _sums() -> None:
    while True:
        ltx.psum(torch.ones(4))


def _one_alone() -> None:
    if ltx.axis_index() == 0:
        ltx.psum(torch.ones(4))
    time.sleep(60)


@pytest.mark.parametrize(
    ("waits", "places"),
    [
        (_sleep, r"rank [01] was at test_pool\.py:\d+ in _sleep: time\.sleep\(60\)"),
        (_sums, r"rank [01] was at test_pool\.py:\d+ in _sums: (while True:|ltx\.psum\(torch\.ones\(4\)\))"),
        (_one_alone, r"rank [01] was at test_pool\.py:\d+ in _one_alone: (ltx\.psum|time\.sleep)\S*"),
    ],
)
def test_an_interrupt_that_all_ranks_answer_is_over_at_once(
    ranks: Ranks, waits: Callable[[], None], places: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It took as long as ranks in code that Python can't interrupt get, and said that they were in such code."""

    def run() -> None:
        (tmp_path / str(ltx.axis_index())).touch()
        waits()

    def interrupt() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        time.sleep(1.0)  # into what they wait in
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    pids = list(ranks(2).run(os.getpid))
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(CallInterruptedError) as caught:
        ranks(2).run(run)
    said = "The workers keep their state, and the next run begins with a new world."
    assert re.fullmatch(rf".*run was interrupted: {places}; {places}\. {re.escape(said)}", str(caught.value))
    assert caught.value.kept
    assert "can't interrupt" not in capfd.readouterr().err
    assert list(ranks(2).run(os.getpid)) == pids


NAME = "ltx_reloaded_by_its_user"


def _edit(file: Path, value: int) -> None:
    file.write_text(f"def f():\n    return {value}\n" + "#" * value)


def test_a_module_that_travels_by_value_is_edited_and_reloaded(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder that was put on ``sys.path`` later: every later call of the pool had failed."""
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / f"{NAME}.py"
    _edit(file, 1)
    module = importlib.import_module(NAME)
    try:
        for value in (1, 2, 3):
            _edit(file, value)
            importlib.invalidate_caches()
            assert importlib.reload(module).f() == value
            assert ranks(2).run(module.f).replicated() == value
        assert ranks(2).run(lambda x: x, 4).replicated() == 4
    finally:
        del sys.modules[NAME]


def test_a_module_that_workers_load_from_a_path_is_edited(ranks: Ranks, tmp_path: Path) -> None:
    """As programs load a configuration or a plugin: there is nothing to find by its name."""
    file = tmp_path / "config.py"

    def loads() -> Any:
        spec = importlib.util.spec_from_file_location(NAME, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[NAME] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.f()

    for value in (1, 2):
        _edit(file, value)
        assert ranks(2).run(loads).replicated() == value
    ranks(2).run(lambda: sys.modules.pop(NAME) and None)
