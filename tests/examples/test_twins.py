"""Loops moved from DDP: how many lines are written for it, and that both print the same losses."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.needs import needs

TWINS = Path(__file__).parents[2] / "examples" / "from_ddp"


def code(name: str) -> list[str]:
    """The lines of a twin below its docstring, without empty ones."""
    return [line for line in (TWINS / f"{name}.py").read_text(encoding="utf-8").splitlines()[1:] if line.strip()]


@pytest.mark.parametrize(("name", "most"), [("mlp", 8), ("gpt2", 16), ("gan", 14)])
def test_few_lines_are_new(name: str, most: int) -> None:
    told = list(difflib.unified_diff(code(f"{name}_ddp"), code(f"{name}_ltx"), n=0))[2:]
    new, gone = (sum(line.startswith(sign) for line in told) for sign in "+-")
    assert new <= most, told
    assert new < gone


@pytest.mark.full
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["mlp", "gan", pytest.param("gpt2", marks=needs("transformers"))])
def test_they_print_the_same(name: str, tmp_path: Path) -> None:
    """The second time they go on from what the first has saved, where they save."""

    def printed(kind: str) -> str:
        launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = subprocess.run(
            [*launched, str(TWINS / f"{name}_{kind}.py"), str(tmp_path / kind)],
            env=os.environ | {"PYTHONPATH": str(TWINS.parents[1]), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    for _ in range(2):
        assert (same := printed("ddp")) == printed("ltx")
        assert same.startswith("epoch ")
