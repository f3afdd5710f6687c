"""How Sphinx builds the site: ``make docs``, or ``python -m sphinx -W docs site`` with ``pip install 'ltx[docs]'``."""

from __future__ import annotations

import inspect
import os
import shutil
import typing
from importlib import import_module
from pathlib import Path
from typing import Any

import ltx

HERE = Path(__file__).parent

project = "ltx"
author = "the authors of ltx"
copyright = author
version = release = ltx.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "README.md"]
templates_path = ["_templates"]
nitpick_ignore_regex: list[tuple[str, str]] = []

suppress_warnings = ["config.cache"]  # autosummary_context holds a function, with which nothing is cached

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
html_css_files = ["tables.css"]
html_title = f"ltx {release}"
html_show_copyright = False
html_copy_source = False
html_show_sourcelink = False


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
    return "" if hint.__name__ in dir(ltx) else f"{hint.__module__}.{hint.__qualname__}"


autosummary_context = {"returned": returned}


#: What classes that users hold do for the train step, or a step for its transformations.
INTERNAL = {
    "DataParallel": {"params_of", "run", "hook_as_chosen"},
    "DynamicLossScale": {"after", "start"},
    "SyncState": {"advanced", "checked_step", "new"},
    "TrainState": {
        "become",
        "check_owned",
        "donate",
        "invalidate",
        "parts",
        "renew",
        "seen",
        "unseen",
    },
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


def setup(app: Any) -> None:
    """The notebooks lie beside docs/, where they are used without it; Sphinx reads what is below docs/ alone."""
    app.connect("missing-reference", named_error)
    app.connect("autodoc-skip-member", skipped)
    shutil.rmtree(HERE / "reference" / "names", ignore_errors=True)  # autosummary writes them; those of old names stay
    for path in (HERE.parent / "notebooks").glob("*.ipynb"):
        shutil.copyfile(path, HERE / "tutorials" / path.name)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
