"""What API pages say besides the docstrings: fields that another class explains, and the algorithm of the module."""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
from importlib import import_module
from typing import Any

import ltx

#: ``a, b: as in :class:`Name`.``, and what differs here.
AS_IN = re.compile(r"^(?P<names>[\w, ]+): as in :\w+:`~?(?P<target>[\w.]+)`(?P<rest>.*)$", re.DOTALL)
ENTRY = re.compile(r"^(?P<names>\w+(?:, \w+)*): (?P<text>.*)$", re.DOTALL)
#: Where an algorithm is a module: its docstring has a formula, which is indented, and papers.
ROOMS = re.compile(r"ltx\.(?:hooks|strategies|(?:core\.)?optim)\.\w+")


def entries(doc: str) -> list[str]:
    """The entries of a docstring's sections (Args, Attributes, Raises), each on one line."""
    found: list[str] = []
    for line in doc.splitlines():
        if re.match(r"    \w", line):
            found.append(line.strip())
        elif re.match(r"     +\S", line) and found:
            found[-1] += " " + line.strip()
    return found


def explained(obj: Any, names: list[str]) -> dict[str, str]:
    """What the docstring of `obj` says of `names`; a text that covers several stands under the first of them."""
    texts: dict[str, str] = {}
    for entry in entries(inspect.getdoc(obj) or ""):
        if match := AS_IN.match(entry):
            there = explained(found_object(match["target"], obj), match["names"].split(", "))
            texts |= {name: text for name, text in there.items() if name in names}
        elif match := ENTRY.match(entry):
            texts |= {name: match["text"] for name in match["names"].split(", ") if name in names}
    return texts


def found_object(target: str, seen_from: Any) -> Any:
    """What a docstring of `seen_from` calls `target`."""
    first, *others = target.removeprefix("ltx.").split(".")
    known = vars(ltx) | vars(import_module(inspect.unwrap(seen_from).__module__))
    return functools.reduce(getattr, others, known[first] if first in known else getattr(ltx, first))


def with_fields(obj: Any, lines: list[str]) -> list[str]:
    """`lines`, where what is explained elsewhere is explained here."""
    result: list[str] = []
    at = 0
    while at < len(lines):
        line, at = lines[at], at + 1
        entry = line.strip()
        indent = line[: len(line) - len(line.lstrip())]
        if ": as in :" in entry:
            while at < len(lines) and lines[at].startswith(indent + " "):
                entry, at = f"{entry} {lines[at].strip()}", at + 1
        if not (match := AS_IN.match(entry)):
            result.append(line)
            continue
        names = match["names"].split(", ")
        texts = explained(found_object(match["target"], obj), names)
        rest = match["rest"].strip(" .;,")
        for name in names:
            text = texts.get(name, "").rstrip(".") + ("; here: " + rest if rest else "")
            result.append(f"{indent}{name}: {text}.")
    return result


def algorithm(module: str) -> list[str]:
    """The docstring of a module, as reStructuredText: its title, the formula as it is written, the papers."""
    title, *paragraphs = (inspect.getdoc(import_module(module)) or "").split("\n\n")
    if not any(paragraph.startswith("    ") for paragraph in paragraphs):
        return []
    shown = [".. rubric:: The algorithm", "", *title.splitlines(), ""]
    for paragraph in paragraphs:
        if paragraph.startswith("    ") and not re.match(r"    \d\.", paragraph):
            shown += [".. code-block:: text", "", *textwrap.indent(textwrap.dedent(paragraph), "   ").splitlines(), ""]
        else:
            shown += [*textwrap.dedent(re.sub(r"\|(?=\S)", r"\\|", paragraph)).splitlines(), ""]
    return shown


def complete(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """autodoc-process-docstring, before napoleon reads sections."""
    if what in ("class", "function", "method", "exception"):
        lines[:] = with_fields(obj, lines)


def with_algorithm(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """autodoc-process-docstring, after napoleon: the algorithm stands where the reader is."""
    module = getattr(obj, "__module__", None) or ""
    if what in ("class", "function") and ROOMS.fullmatch(module):
        lines += ["", *algorithm(module)]


def setup(app: Any) -> None:
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("autodoc-process-docstring", complete, priority=400)
    app.connect("autodoc-process-docstring", with_algorithm, priority=600)
