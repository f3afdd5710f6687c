"""Every mutant still is one: its text stands in the code once, and what replaces it compiles."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants import MUTANTS
from tests.mutants.mutant import Mutant
from tests.mutants.runs import ROOT, failure


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_applies_and_compiles(mutant: Mutant) -> None:
    text = (ROOT / "ltx" / mutant.file).read_text(encoding="utf-8")
    compile(mutant.applied(text), mutant.file, "exec")
    for test in mutant.tests:
        path, _, name = test.partition("::")
        assert not name or name.split("[")[0] in (ROOT / path).read_text(encoding="utf-8"), test
        assert (ROOT / path).exists(), test


def test_names_differ() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_code_that_has_changed_is_told() -> None:
    mutant = Mutant("psum", "collectives/psum.py", "no such text", "", "nothing", ("tests/collectives",))
    with pytest.raises(ValueError, match=r"its old text occurs 0 times in ltx/collectives/psum\.py, expected once"):
        mutant.applied("x = 1")


@pytest.mark.full
def test_the_first_test_that_fails_is_the_killer(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text("def test_a():\n    pass\n\n\ndef test_b():\n    assert False\n")
    assert failure(tmp_path, ["test_it.py"], 60.0) == "test_it.py::test_b"
    assert failure(tmp_path, ["test_it.py::test_a"], 60.0) == ""
