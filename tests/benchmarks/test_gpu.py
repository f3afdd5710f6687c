"""``make gpu`` where there is no GPU, and what it writes of parts that fail or take too long."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu
from benchmarks.gpu import Outcome, Part, Results
from tests.train_on import refuses

ROOT = Path(__file__).parents[2]
NONE = {"python": "3.11.9", "torch": None, "gpus": 0, "missing": []}
CPU = {"python": "3.11.9", "torch": "2.13.0+cpu", "gpus": 0, "missing": []}
CUDA = {"python": "3.12.1", "torch": "2.13.0", "gpus": 1, "missing": []}


def found(monkeypatch: pytest.MonkeyPatch, facts: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Have the machine have the interpreters `facts`, and no driver; what was run besides."""
    ran: list[list[str]] = []
    monkeypatch.setattr(gpu, "candidates", lambda: list(facts))
    monkeypatch.setattr(gpu, "probe", lambda python: facts.get(python, CUDA))
    monkeypatch.setattr(gpu, "DRIVERS", ())
    monkeypatch.setattr(gpu.subprocess, "run", lambda command, **_: ran.append(command))
    return ran


def test_the_first_interpreter_that_sees_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = found(monkeypatch, {"a": NONE, "b": CPU, "c": CUDA, "d": CUDA})
    assert (gpu.interpreter(), ran) == (("c", CUDA), [])


def test_none_sees_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = found(monkeypatch, {"a": NONE, "b": CPU})
    refuses(gpu.NoGpuError, r"^no GPU: a has no torch; b has torch 2.13.0\+cpu, which sees no GPU$", gpu.interpreter)
    assert ran == []


def test_a_machine_with_a_gpu_and_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = found(monkeypatch, {"a": NONE})
    monkeypatch.setattr(gpu, "DRIVERS", (__file__,))
    python, facts = gpu.interpreter()
    assert (python, facts) == (str(ROOT / ".venv" / "bin" / "python"), CUDA)
    assert ran == [["make", "-s", ".venv/.test"]]


def test_what_an_interpreter_has() -> None:
    facts = gpu.probe("no such interpreter")
    assert (facts["torch"], facts["gpus"], facts["error"]) == (None, 0, "FileNotFoundError")


@pytest.mark.parametrize("still", [[], ["pytest"], ["optree", "pytest"]])
def test_what_is_missing_is_installed_beside_torch(still: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {**CUDA, "missing": ["optree", "pytest_timeout"]}
    ran = found(monkeypatch, {"c": {**CUDA, "missing": still}})
    if "optree" in still:
        with pytest.raises(gpu.NoGpuError, match=r"c hasn't optree, .*--target .gpu --no-deps") as raised:
            gpu.install_missing("c", facts)
        # What is missing alone, for that Python, and with what pytest needs.
        wanted = "--python-version 3.12 --only-binary :all: optree pytest iniconfig packaging pluggy pygments"
        assert str(raised.value).endswith(wanted)
    else:
        assert gpu.install_missing("c", facts) == still
    [command] = ran
    assert command[command.index("--target") + 1] == str(gpu.BESIDE)
    assert (command[-2:], gpu.install_missing("c", CUDA), len(ran)) == (["optree", "pytest-timeout"], [], 1)


@pytest.mark.full
def test_what_is_tried_first(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    refuses(gpu.NoGpuError, "ltx doesn't run on the GPU: ", gpu.check, sys.executable)
    monkeypatch.setattr(gpu, "CHECK", gpu.CHECK.replace("cpu:gloo,cuda:nccl", "gloo").replace("x.is_cuda and ", ""))
    gpu.check(sys.executable)
    assert re.fullmatch(r"ltx \S+ sums on cpu by gloo\n", capsys.readouterr().out)


def test_all_parts_have_time() -> None:
    assert sum(part.limit_s for part in gpu.PARTS) <= 560


def part(name: str, code: str, limit_s: float = 30.0, tests: bool = False) -> Part:
    return Part(name, name.capitalize(), ("-c", code), limit_s, tests)


WRITES = "import os; file = open(os.environ['LTX_GPU_REPORT'], 'w'); "
TABLE = "| a | b |\\n|---|---|\\n| 1 | 2 |"
SLEEPS = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(100)"


def test_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that is whole, one that fails halfway, one that is too slow, with what it has started, and tests."""
    alive = tmp_path / "alive"
    child = f"import time\nwhile True: open({str(alive)!r}, 'w').write(str(time.time())); time.sleep(0.05)"
    passed = json.dumps({"test": "tests/gpu/test_a.py::test_b", "outcome": "passed", "error": ""})
    failed = json.dumps({"test": "tests/gpu/test_a.py::test_c", "outcome": "failed", "error": "a | b\nc"})
    said = "\n".join([passed, failed, failed[:20]])
    parts = [
        part("slow", f"print('| first |', flush=True); {SLEEPS.format(child=child)}", 1.5),
        part("good", f"print('{TABLE}')"),
        part("bad", "print('| half |', flush=True); raise ValueError('why')"),
        part("tests", f"{WRITES} file.write({said!r}); exit(1)", tests=True),
        part("no tests", "print('nothing to collect'); exit(5)", tests=True),
    ]
    files = [tmp_path / "results.md", tmp_path / "out" / "results.md"]
    results, kept, written = Results(files, "a machine"), [], []

    def keep(part: Part, outcome: Outcome) -> None:
        kept.append((part.name, outcome.status))
        written.append(files[0].read_text())

    assert not gpu.run_all(sys.executable, parts, 60, results, keep)
    assert kept == [("slow", None), ("good", 0), ("bad", 1), ("tests", 1), ("no tests", 5)]
    text = files[0].read_text()
    assert files[1].read_text() == text
    sections = dict(each.split("\n", 1) for each in text.split("\n## ")[1:])
    assert "Whole, in" in sections["Good"]
    assert "| 1 | 2 |" in sections["Good"]
    assert "**Failed** after" in sections["Bad"]
    assert "| half |" in sections["Bad"]
    assert "ValueError: why" in sections["Bad"]
    assert "**Out of time** after" in sections["Slow"]
    assert "| first |" in sections["Slow"]
    assert "1 passed, 1 failed, 0 skipped." in sections["Tests"]
    assert "| failed | test_a.py::test_c | a \\| b c |" in sections["Tests"]
    assert "nothing to collect" in sections["No tests"]
    assert "1 of 5 parts are whole." in text
    # Written as they came.
    assert "Not complete: bad is the last of it." in written[2]
    assert "## Tests" not in written[2]
    # What the slow one had started is gone.
    last = alive.read_text()
    time.sleep(0.3)
    assert alive.read_text() == last


def test_no_time_left(tmp_path: Path) -> None:
    results = Results([tmp_path / "results.md"], "a machine")
    assert not gpu.run_all(sys.executable, [part("late", "print(1)")], 1.0, results, lambda *_: pytest.fail("ran"))
    assert "**Not run**: no time was left." in (tmp_path / "results.md").read_text()


def test_the_parts_are_there() -> None:
    assert len({each.name for each in gpu.PARTS}) == len(gpu.PARTS)
    for each in gpu.PARTS:
        assert (each.arguments[0], each.tests) == ("-m", each.arguments[1] == "tests.shards")
        if not each.tests:
            assert (ROOT / f"{each.arguments[1].replace('.', '/')}.py").exists()


@pytest.mark.parametrize("out", [None, "out"])
def test_a_whole_run(out: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {**CUDA, "gpu": "A Card", "gib": 80, "cuda": "13.0", "nccl": "2.28.9"}
    monkeypatch.setattr(gpu, "interpreter", lambda: (sys.executable, facts))
    monkeypatch.setattr(gpu, "check", lambda python: None)
    monkeypatch.setattr(gpu, "PARTS", (part("one", "print('| 1 |')"), part("two", "exit(3)")))
    monkeypatch.setattr(sys, "argv", ["gpu", "--to", str(tmp_path / "results.md"), "--only", "one"])
    monkeypatch.delenv("OUT", raising=False)
    if out:
        monkeypatch.setenv("OUT", str(tmp_path / out))
    assert gpu.main() == 0
    text = (tmp_path / "results.md").read_text()
    assert "1 x A Card (80 GiB), torch 2.13.0, CUDA 13.0, NCCL 2.28.9" in text
    assert "| 1 |" in text
    assert "Two" not in text
    if out:
        assert (tmp_path / out / "RESULTS-gpu.md").read_text() == text
        assert (tmp_path / out / "one.txt").read_text().startswith("| 1 |")
