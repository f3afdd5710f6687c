"""Every Python block of the README runs, in order, each with the names of those before it: alone and on two ranks."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ltx

README = Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def python_blocks(markdown: str) -> list[tuple[int, str]]:
    """The line at which each Python block begins, and its code."""
    return [(markdown.count("\n", 0, match.start(1)) + 1, match[1]) for match in BLOCK.finditer(markdown)]


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the README has defined after its last block."""
    torch.manual_seed(0)
    defined: dict[str, Any] = {"__name__": "__readme__"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("readme"))
        for line, code in python_blocks(README.read_text(encoding="utf-8")):
            # Empty lines in front, so that a traceback shows the README's own line numbers.
            exec(compile("\n" * (line - 1) + code, str(README), "exec"), defined)
    return defined


def test_there_are_blocks_to_run() -> None:
    assert len(python_blocks(README.read_text(encoding="utf-8"))) >= 4


def test_they_run(names: dict[str, Any]) -> None:
    assert names["loss"].isfinite()
    assert names["metrics"].loss.isfinite()


@pytest.mark.full
@pytest.mark.timeout(180)
def test_they_run_on_two_ranks(tmp_path: Path) -> None:
    """No seed is set: what every process draws for itself has to be made equal by what the README says."""
    blocks = [code for _, code in python_blocks(README.read_text(encoding="utf-8"))]
    script = tmp_path / "script.py"
    script.write_text("\n".join(blocks), encoding="utf-8")
    command = [sys.executable, "-m", "ltx", "run", "-n", "2", str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(re.findall(r"^loss \d", done.stdout, re.MULTILINE)) == 1


def test_per_sample_gradients_have_a_sample_dimension(names: dict[str, Any]) -> None:
    assert names["per_sample"]["0.weight"].shape == (64, 32, 8)


def test_simulated_ranks_agree_with_one_process(names: dict[str, Any]) -> None:
    x, y = names["x"].flatten(0, 1), names["y"].flatten()
    whole = torch.func.grad(names["loss_fn"])(names["params"], x, y)
    for name, per_rank in names["per_rank"].items():
        for gradient in per_rank:
            torch.testing.assert_close(gradient, whole[name])
        torch.testing.assert_close(names["grads"][name], whole[name])


def test_the_bytes_of_each_hook() -> None:
    from benchmarks.models import Transformer
    from ltx import hooks

    params = dict(Transformer().named_parameters())
    rows = re.findall(r"^\| (`[A-Z].*?) \|.*\| ([0-9.]+) \|$", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) >= 10
    for names, ratio in rows:
        for name in re.findall(r"`(.*?)`", names):
            hook = eval(name, {known: getattr(hooks, known) for known in dir(hooks)})
            step = ltx.data_parallel(lambda params: params, ltx.DDPStrategy(comm_hook=hook))
            assert f"{ltx.explain(step, params, world=4).compression:.1f}" == ratio, name


def test_the_study_of_strategies() -> None:
    from ltx.demo.studies import strategies as study
    from ltx.demo.studies.tasks import SETTINGS

    found = study.load()
    pattern = r"^\| `(ltx\.\w+Strategy\(.*?\))` \|.*\| (\d+)% \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$"
    rows = re.findall(pattern, README.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) >= 8
    for code, percent, *losses in rows:
        strategy = eval(code, {"ltx": ltx})
        name = next(name for name, row in study.ROWS.items() if row.make(SETTINGS["gpt"], 64) == strategy)
        sent, plain = (max(study.bytes_sent(found, "gpt", 64, which).values()) for which in (name, "ddp"))
        ratios = [statistics.mean(study.ratios(found["runs"], task, 64, name)) for task in study.STUDIED]
        assert [percent, *losses] == [f"{sent / plain:.0%}"[:-1], *(f"{ratio:.2f}" for ratio in ratios)], code
