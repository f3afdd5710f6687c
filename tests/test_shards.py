"""Processes that share the suite run each module once, and say what waits for packages that are missing."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.needs import missing, needs, waiting
from tests.programs import printed
from tests.shards import claimed


def test_each_module_is_run_by_one_process_alone(tmp_path: Path) -> None:
    names = [f"tests/{m}.py::test_{k}" for m in "abcda" for k in range(1 + ord(m) % 3)]
    items: list[Any] = [SimpleNamespace(nodeid=name) for name in names]
    shares = list(zip_longest(claimed(items, tmp_path), claimed(items, tmp_path)))  # in turns
    first, second = ([item.nodeid for item in share if item] for share in zip(*shares, strict=True))
    assert sorted([*first, *second]) == sorted(names)
    assert not {name.partition("::")[0] for name in first} & {name.partition("::")[0] for name in second}
    assert first
    assert second


def test_rows_whose_packages_are_missing_are_counted() -> None:
    marks = [needs(*names).mark for names in (("torch",), ("torch", "not_here"), ("not_here",))]
    items: list[Any] = [SimpleNamespace(iter_markers=lambda _, mark=mark: [mark]) for mark in marks]
    assert [missing(item) for item in items] == [[], ["not_here"], ["not_here"]]
    assert waiting(items) == "WAITING 2 rows wait for .ci/run, which installs what they need: 2 for not_here"
    assert waiting(items[:1]) == ""


@pytest.mark.full
@pytest.mark.timeout(500)
def test_gpu_on_cpu() -> None:
    run = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--full", "tests/gpu")
    assert " passed" in printed(*run, timeout_s=500, LTX_TEST_DEVICE="cpu")
