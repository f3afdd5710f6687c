"""Every Python block of README.md runs by itself on two ranks; those of a page below docs/ do so in their order.

A block of ``text`` that follows is what it prints, on the first of its ranks; numbers may differ by a hundredth.
A comment in front of a block says what else is to be done with it: ``<!-- runs: in the driver, WHY -->`` for one that
starts ranks itself, ``<!-- not run: WHY -->`` for one that can't run here.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import statistics
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import ltx
from tests.kinds import Ranks
from tests.programs import ROOT, printed
from tests.sent import sent

README, DOCS = ROOT / "README.md", ROOT / "docs"
BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*) -->\n)?```python\n(?P<code>.*?)^```$"
    r"(?P<printed>(?:[^`]*|(?:(?!```).)*? prints:\n)\n```text\n.*?^```$)?",
    re.MULTILINE | re.DOTALL,
)
NUMBER = re.compile(r"\d+\.\d+")
MARKS = {"runs: in the driver, ": "driver", "not run: ": "nowhere"}
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")


class Block(NamedTuple):
    line: int
    code: str
    runs: str  # "ranks", "driver" or "nowhere"
    printed: str | None


def blocks_of(page: Path) -> list[Block]:
    text, found = page.read_text(encoding="utf-8"), []
    for match in BLOCK.finditer(text):
        mark = match["mark"] or ""
        runs = next((runs for start, runs in MARKS.items() if mark.startswith(start)), None if mark else "ranks")
        assert runs is not None, f"{page.name}: a block is marked {mark!r}, which is none of {list(MARKS)}"
        printed = (match["printed"] or "").partition("```text\n")[2].removesuffix("```") or None
        found.append(Block(text.count("\n", 0, match.start("code")) + 1, match["code"], runs, printed))
    return found


def same_but_for_rounding(printed: str, shown: str) -> None:
    """Numbers with a point may differ by a hundredth, since a platform's sums may."""
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", shown).split(), printed
    numbers = [[float(number) for number in NUMBER.findall(text)] for text in (printed, shown)]
    assert numbers[0] == pytest.approx(numbers[1], rel=0.01, abs=2e-3), printed


def run_in_order(page: str, blocks: list[Block], folder: str) -> dict[str, Any]:
    """Run the blocks, each with the names of those before it, with the page's line numbers; gives the names."""
    before, main = os.getcwd(), sys.modules["__main__"]
    script = sys.modules["__main__"] = types.ModuleType("__main__")  # where pickle, dataclasses and Dynamo look
    os.chdir(folder)
    try:
        torch.manual_seed(torch.seed())  # pages have to make equal what is to be equal
        for block in blocks:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile("\n" * (block.line - 1) + block.code, page, "exec"), vars(script))
            if block.printed is not None and int(os.environ.get("RANK", "0")) == 0:
                same_but_for_rounding(out.getvalue(), block.printed)
        return vars(script)
    finally:
        sys.modules["__main__"] = main
        os.chdir(before)


def run_on_ranks(page: str, blocks: list[Block], folder: str, ranks: Ranks) -> None:
    def run() -> None:  # the names stay there: some can't be sent
        run_in_order(page, blocks, folder)

    ranks(2).run(run)


PAGES = [page for page in sorted(DOCS.rglob("*.md")) if "_build" not in page.parts and blocks_of(page)]


def test_there_are_blocks_to_run() -> None:
    assert len(blocks_of(README)) >= 3
    assert sum(len(blocks_of(page)) for page in PAGES) >= 40


@pytest.mark.full(but=1)
@pytest.mark.parametrize("block", blocks_of(README), ids=lambda block: f"line {block.line}")
def test_each_block_of_the_readme_runs_by_itself(block: Block, ranks: Ranks, tmp_path: Path) -> None:
    if block.runs == "driver":
        run_in_order("README.md", [block], str(tmp_path))
    else:
        run_on_ranks("README.md", [block], str(tmp_path), ranks)


@pytest.mark.full(but=3)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_a_page_runs_from_top_to_bottom(page: Path, ranks: Ranks, tmp_path: Path) -> None:
    blocks = [block for block in blocks_of(page) if block.runs == "ranks"]
    if blocks:
        run_on_ranks(str(page), blocks, str(tmp_path), ranks)
    for block in blocks_of(page):
        if block.runs == "driver":
            run_in_order(str(page), [block], str(tmp_path))


LAUNCHERS = {"ltx": ["-m", "ltx", "run", "-n", "2"], "alone": []}
LAUNCHERS["torchrun"] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.full
@pytest.mark.timeout(240)
@pytest.mark.parametrize("launcher", ["ltx", "torchrun", "alone"])
def test_the_program_of_the_readme(launcher: str, tmp_path: Path) -> None:
    """It trains, leaves a model that a bare module loads, and goes on from its checkpoint when it is started again."""
    program = next(block.code for block in blocks_of(README) if "ltx.checkpoint.save" in block.code)
    (tmp_path / "train.py").write_text(program, encoding="utf-8")

    def run() -> str:
        return printed(*LAUNCHERS[launcher], "train.py", cwd=tmp_path, timeout_s=200)

    def epochs_of(printed: str) -> list[tuple[str, str]]:
        return re.findall(r"^epoch (\d): loss [\d.]+, accuracy ([\d.]+)%$", printed, re.MULTILINE)

    epochs = epochs_of(run())
    assert [int(epoch) for epoch, _ in epochs] == [0, 1, 2, 3, 4]
    assert float(epochs[-1][1]) > 85
    assert torch.load(tmp_path / "model.pt")["0.weight"].shape == (64, 8)
    if launcher == "ltx":
        weights = torch.load(tmp_path / "model.pt")
        assert run() == "checkpoints/ has 5 of 5 epochs: nothing is left to do\n"
        assert all(torch.equal(value, weights[name]) for name, value in torch.load(tmp_path / "model.pt").items())
        (tmp_path / "train.py").write_text(program.replace("epochs = 5", "epochs = 6"))
        assert [int(epoch) for epoch, _ in epochs_of(run())] == [5]


@pytest.mark.parametrize("page", [README, *sorted(DOCS.rglob("*.md"))], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Those to files; Sphinx looks at the rest."""
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        path = (page.parent / target).resolve()
        if path.suffix == ".ipynb":  # conf.py copies them to docs/tutorials
            path = ROOT / "notebooks" / path.name
        assert path.exists(), target


@pytest.mark.full
def test_the_bytes_of_each_hook() -> None:
    from benchmarks.models import Transformer
    from ltx import hooks

    params = {name: value.detach() for name, value in Transformer().named_parameters()}
    plain = sent(ltx.DDPStrategy(), params, 4).bytes
    page = (DOCS / "how-to" / "choose-a-hook.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[A-Z].*?) \|.*\| ([0-9.]+) \|$", page, re.MULTILINE)
    assert len(rows) >= 10
    for names, ratio in rows:
        for name in re.findall(r"`(.*?)`", names):
            hook = eval(name, {known: getattr(hooks, known) for known in dir(hooks)})
            assert f"{plain / sent(ltx.DDPStrategy(comm_hook=hook), params, 4).bytes:.1f}" == ratio, name


def test_the_error_of_each_hook(seed: int) -> None:
    from ltx import hooks

    grads = torch.randn(4, 256, 256)
    mean = grads.double().mean(0)
    page = (DOCS / "how-to" / "choose-a-hook.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([A-Z].*?)` \|.*\| ([0-9.]+)%? \| [0-9.]+ \|$", page, re.MULTILINE)
    assert len(rows) == 12
    for name, percent in rows:
        hook = eval(name, {known: getattr(hooks, known) for known in dir(hooks)})
        step = ltx.data_parallel(lambda params: params, ltx.DDPStrategy(comm_hook=hook))
        found = ltx.vmap(lambda g, step=step: ltx.sync_gradients(g, step.strategy, step.init(g))[0])(grads)
        error = ((found[0].double() - mean).norm() / mean.norm()).item()
        assert abs(100 * error - float(percent)) <= 0.15 * float(percent) + 1e-5, name


def test_the_study_of_strategies() -> None:
    from benchmarks.studies import strategies as study
    from benchmarks.studies.tasks import SETTINGS

    found = study.load()
    pattern = r"^\| `(ltx\.\w+Strategy\(.*?\))` \|.*\| (\d+)% \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$"
    rows = re.findall(pattern, (DOCS / "how-to" / "choose-a-strategy.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) >= 8
    for code, percent, *losses in rows:
        strategy = eval(code, {"ltx": ltx})
        name = next(name for name, row in study.ROWS.items() if row.make(SETTINGS["gpt"], 64) == strategy)
        sent, plain = (max(study.bytes_sent(found, "gpt", 64, which).values()) for which in (name, "ddp"))
        ratios = [statistics.mean(study.ratios(found["runs"], task, 64, name)) for task in study.STUDIED]
        assert [percent, *losses] == [f"{sent / plain:.0%}"[:-1], *(f"{ratio:.2f}" for ratio in ratios)], code
