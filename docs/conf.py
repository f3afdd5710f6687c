"""How Sphinx builds the site: ``make docs``, or ``python -m sphinx -W docs site`` with ``pip install 'ltx[docs]'``."""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import sys
import tomllib
import typing
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from docutils import nodes
from sphinx import addnodes

import ltx

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from dark import write_if_new  # noqa: E402

project = "ltx"
author = "the authors of ltx"
copyright = author
version = release = ltx.__version__

extensions = [
    "api_pages",
    "dark",
    "myst_nb",
    "notfound.extension",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_codeautolink",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build", "README.md"]
templates_path = ["_templates"]
nitpick_ignore_regex: list[tuple[str, str]] = []

# autosummary_context holds a function, with which nothing is cached; cells with magics are no Python.
suppress_warnings = ["config.cache", "codeautolink.parse_block", "codeautolink.match_block"]

# --- pages
source_suffix = {".rst": "restructuredtext", ".md": "myst-nb", ".ipynb": "myst-nb"}  # autosummary writes the first
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True

# --- notebooks: executed, and kept until they change. `-D nb_execution_mode=off` shows the outputs that they carry.
nb_execution_mode = "cache"
nb_execution_cache_path = str(HERE / "_build" / "executed")
nb_execution_timeout = 600
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_merge_streams = True

# --- docstrings
autosummary_generate = True
autosummary_imported_members = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 90
add_module_names = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_custom_sections = ["Gradient", "Source"]

# --- other sites, without a network: see _inventories/write.py
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", str(HERE / "_inventories" / "python.inv")),
    "torch": ("https://docs.pytorch.org/docs/stable", str(HERE / "_inventories" / "torch.inv")),
}

# --- looks
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = f"ltx {release}"
html_logo = html_favicon = "_static/logo.svg"
html_show_copyright = False
html_show_sourcelink = True  # the eye on top of a page: its text, as it was written

# --- addresses: the repository's is pyproject's, once it is known; the site's is said by who publishes it
PROJECT = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
repository = PROJECT.get("urls", {}).get("Repository")
if repository:
    html_theme_options = {"source_repository": repository, "source_branch": "main", "source_directory": "docs/"}
html_baseurl = os.environ.get("SITE_URL", "")
notfound_urls_prefix = urlsplit(html_baseurl).path.rstrip("/") + "/"


def returned(name: str) -> str:
    """The class that the public function `name` returns, if it has no public name: its page shows that class too."""
    module, _, attribute = name.rpartition(".")
    function = getattr(import_module(module), attribute)
    hint = typing.get_type_hints(function).get("return") if inspect.isfunction(function) else None
    if (
        not inspect.isclass(hint)
        or not hint.__module__.startswith("ltx.")
        or hint.__name__ in dir(import_module(module))
    ):
        return ""
    named = {*dir(ltx), *dir(import_module("ltx.extend"))}
    return "" if hint.__name__ in named else f"{hint.__module__}.{hint.__qualname__}"


autosummary_context = {"returned": returned}


#: What classes that users hold do for the train step, or a step for its transformations.
INTERNAL = {
    "DataParallel": {"run"},
    "DynamicLossScale": {"after", "start"},
    "SyncState": {"advanced", "checked_step", "new"},
    "TrainState": {"check_owned", "invalidate", "seen"},
    "Weighted": {"checked"},
}


def skipped(app: Any, what: str, name: str, member: Any, skip: bool, options: Any) -> bool | None:
    """What a hook or strategy does otherwise than others is on the base's page, once; what is internal on none."""
    function = getattr(member, "fget", None) or getattr(member, "__func__", member)
    owner, _, method = getattr(function, "__qualname__", "").rpartition(".")
    if method in INTERNAL.get(owner, ()):
        return True
    cls = getattr(inspect.getmodule(function), owner, None)
    bases = cls.__mro__[1:] if inspect.isclass(cls) else ()
    return True if any(method in vars(base) for base in bases if base.__module__.startswith("ltx.")) else None


def named_error(app: Any, env: Any, node: Any, shown: Any) -> Any:
    """``Raises:`` sections name errors without their module: a link to ltx.errors if there is one of that name."""
    if node.get("reftype") in ("exc", "class", "obj") and hasattr(ltx.errors, str(node.get("reftarget"))):
        node["reftarget"] = f"ltx.errors.{node['reftarget']}"
        return env.domains["py"].resolve_xref(env, node["refdoc"], app.builder, "exc", node["reftarget"], node, shown)
    return None


@functools.cache
def listed_names() -> set[str]:
    """The names that pages of reference/ list, each of which has a page."""
    block = re.compile(r"^\.\. currentmodule:: (\S+)\n+\.\. autosummary::\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    found = [pair for page in (HERE / "reference").rglob("*.md") for pair in block.findall(page.read_text())]
    return {f"{module}.{name}" for module, body in found for name in re.findall(r"^   (\w+)$", body, re.MULTILINE)}


def linked(app: Any, doctree: nodes.document) -> None:
    """`ltx.psum(x)` in a page's text links to the page of that name. sphinx_codeautolink does it for names in code."""
    for node in [*doctree.findall(nodes.literal)]:
        name = re.match(r"[\w.]*", node.astext()).group()  # type: ignore[union-attr]
        linked_already = isinstance(node.parent, nodes.title | nodes.reference | addnodes.pending_xref)
        if name in listed_names() and not linked_already:
            options = {"refdomain": "py", "reftype": "obj", "reftarget": name, "refdoc": app.env.docname}
            node.replace_self(addnodes.pending_xref("", node.deepcopy(), **options))


def one_signature(app: Any, domain: str, what: str, content: Any) -> None:
    """Overloads tell a type checker of a decorator with arguments. The page shows the first, that of a call."""
    for again in [x for x in content.parent if isinstance(x, addnodes.desc_signature)][1:]:
        content.parent.remove(again)


def with_download(notebook: Path) -> str:
    """A notebook as its page shows it: a link to the file comes after the title."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))
    link = f"{{download}}`Download this notebook <../../notebooks/{notebook.name}>`, and run it where ltx is installed."
    cells["cells"].insert(1, {"cell_type": "markdown", "id": "download", "metadata": {}, "source": [link]})
    return json.dumps(cells)


def without_edit_link(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Pages that aren't written by hand: there is nothing to edit in the repository's docs/."""
    if page.startswith(("reference/names/", "tutorials/0")):
        context["theme_source_repository"] = ""


def setup(app: Any) -> None:
    """The notebooks lie beside docs/, where they are used without it; Sphinx reads what is below docs/ alone."""
    app.connect("missing-reference", named_error)
    app.connect("doctree-read", linked)
    app.connect("object-description-transform", one_signature)
    app.connect("autodoc-skip-member", skipped)
    app.connect("html-page-context", without_edit_link)
    for path in (HERE / "reference" / "names").glob("*.rst"):  # autosummary writes them; those of old names would stay
        if path.stem not in listed_names():
            path.unlink()
    for path in (HERE.parent / "notebooks").glob("*.ipynb"):
        write_if_new(HERE / "tutorials" / path.name, with_download(path))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # codeautolink imports what examples import
