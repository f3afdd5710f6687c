"""The site: every public name has a page in docs/reference/api, every error a cause and a cure, and it all builds."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import types
from importlib import import_module
from pathlib import Path

import pytest

import ltx

DOCS = Path(__file__).parents[2] / "docs"
PUBLIC = ("ltx", "ltx.extend", "ltx.hooks", "ltx.optim", "ltx.nn", "ltx.errors", "ltx.checkpoint", "ltx.profile")
FLAGS = re.MULTILINE | re.DOTALL
BLOCK = re.compile(r"^```\{eval-rst\}\n\.\. currentmodule:: (\S+)\n+\.\. autosummary::\n(.*?)^```$", FLAGS)


def public_names(module: str) -> set[str]:
    """The functions and classes that `module` offers."""
    owner = import_module(module)
    found = {name: getattr(owner, name) for name in dir(owner) if not name.startswith("_")}
    return {
        f"{module}.{name}"
        for name, value in found.items()
        if not isinstance(value, types.ModuleType) and str(getattr(value, "__module__", "")).startswith("ltx")
    }


def documented_names() -> list[str]:
    pages = [page.read_text(encoding="utf-8") for page in (DOCS / "reference").rglob("*.md")]
    blocks = [match for page in pages for match in BLOCK.findall(page)]
    return [f"{module}.{name}" for module, body in blocks for name in re.findall(r"^   (\w+)$", body, re.MULTILINE)]


def test_every_public_name_has_one_page() -> None:
    """What `ltx.extend` offers besides has its page elsewhere."""
    of_extend = vars(import_module("ltx.extend"))
    others = set().union(*(public_names(module) for module in PUBLIC if module != "ltx.extend"))
    again = [getattr(import_module(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in others]
    own = {name for name in public_names("ltx.extend") if of_extend[name.rpartition(".")[2]] not in again}
    assert sorted(documented_names()) == sorted(others | own)


def test_methods_that_pages_leave_out_are_there() -> None:
    for name, methods in runpy.run_path(str(DOCS / "conf.py"))["INTERNAL"].items():
        assert methods <= set(dir(getattr(ltx, name))), name


def test_every_error_has_a_cause_and_a_cure() -> None:
    page = (DOCS / "reference" / "errors.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \|$", page, re.MULTILINE)
    assert {name for name, *_ in rows} == {name.rpartition(".")[2] for name in public_names("ltx.errors")}


@pytest.mark.full
@pytest.mark.timeout(300)
def test_it_builds_without_a_warning(tmp_path: Path) -> None:
    """With the outputs that the notebooks carry; test_notebooks.py executes them."""
    options = ["-W", "--keep-going", "-q", "-D", "nb_execution_mode=off", "-d", str(tmp_path / "doctrees")]
    command = [sys.executable, "-m", "sphinx", *options, "-b", "html", str(DOCS), str(tmp_path / "html")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "html" / "search.html").exists()
    assert (tmp_path / "html" / "tutorials" / "04_ranks_in_a_notebook.html").exists()


def test_every_environment_variable_of_ltx_is_listed() -> None:
    package = Path(ltx.__file__).parent
    read = {name for file in package.rglob("*.py") for name in re.findall(r'"(LTX_[A-Z_]+)"', file.read_text())}
    page = (DOCS / "reference" / "environment.md").read_text(encoding="utf-8")
    assert read == set(re.findall(r"^\| `(LTX_\w+)`", page, re.MULTILINE))


def test_every_command_is_listed() -> None:
    from ltx.cli import _parser

    shown = re.findall(r"^    (\w+) ", _parser().format_help(), re.MULTILINE)
    page = (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")
    assert set(shown) == set(re.findall(r"^\| `ltx (\w+)", page, re.MULTILINE))
