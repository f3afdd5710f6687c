"""Every mutant still is one: its text stands in the code once, and what replaces it compiles."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants import MUTANTS
from tests.mutants.mutant import At, Mutant
from tests.mutants.runs import ROOT, failure


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_applies_and_compiles(mutant: Mutant) -> None:
    path, text = mutant.applied(ROOT / "ltx")
    compile(text, path, "exec")
    for test in mutant.nearest:
        path, _, name = test.partition("::")
        assert not name or name.split("[")[0] in (ROOT / path).read_text(encoding="utf-8"), test
        assert (ROOT / path).exists(), test


def test_names_differ() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


LAID_OUT = """        return divided(
            x,
            2,  # parts
        )
"""
HALF = f"""
class Half:
    @staticmethod
    def half(x):
        # a comment, and another layout
        if x is None:
            return 0
{LAID_OUT}"""


@pytest.mark.parametrize("name", ["a.py", "other/b.py"])
def test_code_may_move_and_be_laid_out_otherwise(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(HALF + "\n\ndef half(x):\n    return divided(x, 2)\n")
    mutant = Mutant("half", At("Half.half", "return divided(x, 2)", "x = x\nreturn x"), "tests")
    found, text = mutant.applied(tmp_path)
    assert found == path
    assert text == path.read_text().replace(LAID_OUT, "        x = x\n        return x\n")


def test_code_that_has_changed_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(HALF)
    for where, old, times, there in [
        ("Half.half", "return x / 2", 0, "a.py"),
        ("Half.half", "x", 3, "a.py"),
        ("half", "return", 0, "no file"),
    ]:
        mutant = Mutant("half", At(where, old, ""), "tests")
        with pytest.raises(ValueError, match=rf"old code occurs {times} times in {where} \({there}\), expected once"):
            mutant.applied(tmp_path)


@pytest.mark.full
def test_the_first_test_that_fails_is_the_killer(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text("def test_a():\n    pass\n\n\ndef test_b():\n    assert False\n")
    assert failure(tmp_path, ["test_it.py"], 60.0) == "test_it.py::test_b"
    assert failure(tmp_path, ["test_it.py::test_a"], 60.0) == ""
