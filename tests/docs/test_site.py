"""The site: every public name has a page in docs/reference/api, every error a cause and a cure, and it all builds."""

from __future__ import annotations

import inspect
import re
import runpy
import tomllib
import types
from importlib import import_module
from pathlib import Path

import pytest

import ltx
from tests.needs import needs
from tests.programs import ROOT, printed
from tests.test_import import PUBLIC

DOCS = ROOT / "docs"
BLOCK = re.compile(
    r"^```\{eval-rst\}\n\.\. currentmodule:: (\S+)\n+\.\. autosummary::\n(.*?)^```$", re.MULTILINE | re.DOTALL
)


def public_names(module: str) -> set[str]:
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


def test_pages_explain_fields_where_the_reader_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a docstring leaves to another class is on the page too, and a module's formula on its classes'."""
    monkeypatch.syspath_prepend(str(DOCS))
    pages = import_module("api_pages")
    shown = {}
    for name in documented_names():
        module, _, attribute = name.rpartition(".")
        value = getattr(import_module(module), attribute)
        lines = (inspect.getdoc(value) or "").splitlines()
        pages.complete(None, "class", name, value, None, lines)
        pages.with_algorithm(None, "class", name, value, None, lines)
        shown[name] = "\n".join(lines)
    assert [name for name, text in shown.items() if ": as in :" in text or "of this file" in text] == []
    assert "    warm_start: begin each power iteration" in shown["ltx.hooks.PowerSGD"]
    assert "P = orthonormalised(M Q)" in shown["ltx.hooks.PowerSGD"]
    assert "    axis: name, " in shown["ltx.pmax"]
    assert re.search(r"    axis: name, .*; here: of 1, 2, 4, 8, \.\.\. ranks\.$", shown["ltx.adasum"], re.MULTILINE)


@needs("docutils")
def test_a_dark_picture_has_no_black_and_no_white(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    dark = import_module("dark").dark
    pictures = [*(ROOT / "examples" / "pictures").glob("*.svg"), *(DOCS / "pictures").glob("*.svg")]
    assert len(pictures) > 8
    for picture in pictures:
        svg = dark(picture.read_text(encoding="utf-8"))
        assert not re.search("#(000000|ffffff)", svg), picture
        assert re.search('<svg fill="#[c-f]', svg), picture  # what says no colour is black otherwise


def test_every_example_has_a_card_and_a_page() -> None:
    names = {picture.stem for picture in (ROOT / "examples" / "pictures").glob("*.svg")}
    gallery = (DOCS / "examples.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^:link: examples/(\w+)$", gallery, re.MULTILINE)) == names
    assert {page.stem for page in (DOCS / "examples").glob("*.md")} == names | {"ray_train"}


def test_the_version_is_one() -> None:
    """The package has it; what can't read it there says the same, and so does the newest entry of the changes."""
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\d\S+) \(", changes, re.MULTILINE)[0] == ltx.__version__
    assert f"\nversion: {ltx.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert (DOCS / "changes" / f"{ltx.__version__}.md").exists()


def test_no_page_leads_to_an_address_that_is_not_ours() -> None:
    """pyproject.toml has the repository's, once it is known; no other file says it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ours = project.get("urls", {}).get("Repository", "none yet")
    texts = [*ROOT.glob("*.md"), *ROOT.glob("*.cff"), *DOCS.glob("**/*.md"), *(ROOT / "notebooks").glob("*.ipynb")]
    for path in texts:
        assert set(re.findall(r"https://github\.com/[\w-]+/ltx", path.read_text(encoding="utf-8"))) <= {ours}, path


@needs("docutils")
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
    printed("-m", "sphinx", *options, "-b", "html", str(DOCS), str(tmp_path / "html"), timeout_s=290)
    assert (tmp_path / "html" / "search.html").exists()
    assert (tmp_path / "html" / "tutorials" / "04_ranks_in_a_notebook.html").exists()


def test_every_environment_variable_of_ltx_is_listed() -> None:
    package = Path(ltx.__file__).parent
    read = {name for file in package.rglob("*.py") for name in re.findall(r'"(LTX_[A-Z_]+)"', file.read_text())}
    page = (DOCS / "reference" / "environment.md").read_text(encoding="utf-8")
    assert read == set(re.findall(r"^\| `(LTX_\w+)`", page, re.MULTILINE))


def test_a_change_is_told_once() -> None:
    """A merge easily brings back under "Unreleased" what an older version has."""
    pages = [page.read_text("utf-8") for page in (ROOT / "CHANGELOG.md", *(DOCS / "changes").glob("*.md"))]
    told = [entry for page in pages for entry in re.findall(r"^- .*(?:\n  .*)*", page, re.MULTILINE)]
    assert len(told) > 100
    assert sorted(told) == sorted(set(told))
    assert not [line for page in pages for line in re.findall(r"(.+)\n## ", page)], "a title without an empty line"
