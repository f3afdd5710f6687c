"""Values as text, as Equinox prints them: tensors as dtype and shape, and no fields that have their default values.

Notebooks show dataclasses as tables.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import Field, fields, is_dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ltx.core.base.errors import ArgumentError, LtxError
from ltx.core.base.private import is_wrapped
from ltx.core.base.slips import lacks
from ltx.core.base.traced import recording

_WIDTH = 80
_TALL = 6  # a table cell with more lines is folded


class Readable:
    """Base class of dataclasses that :func:`text_of` prints."""

    _one_line = False  # however long that is

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__repr__" not in vars(cls):  # dataclass replaces an inherited __repr__, but not the class's own
            cls.__repr__ = cls.__repr__  # type: ignore[method-assign]

    if not TYPE_CHECKING:  # type checkers know all that there is

        def __getattr__(self, name: str) -> Any:
            raise lacks(f"{type(self).__name__!r} object", name)

        def __getitem__(self, key: object) -> Any:
            called = {"TrainState": "state", "Metrics": "metrics"}.get(type(self).__name__)
            part = f"{'params' if called == 'state' else 'aux'}[{key!r}]"
            said = f". Write {called}.{key if key in [f.name for f in fields(self)] else part}" if called else ""
            raise ArgumentError(f"{type(self).__name__!r} object has no entry {key!r}{said}.")

    def __repr__(self) -> str:
        return _by_fields(self, 1, -sys.maxsize if self._one_line else 0)

    def _repr_html_(self) -> str | None:
        try:
            rows = [(name, text_of(x)) for name, x in _shown_fields(self)]
        except LtxError:  # its text says so
            return None
        return Table((type(self).__name__, ""), rows, (False, False))._repr_html_() if rows else None


def text_of(value: Any, most: int = 1, indent: int = 0) -> str:
    """`value` as text on one line; if that is too long, with a line for each part.

    Tensors of at most `most` elements are shown with their values, unless on a device or under a transform.

    >>> text_of({"w": torch.zeros(64, 8, dtype=torch.bfloat16), "n": [1, torch.tensor(0.5)]})
    "{'w': bf16[64,8], 'n': [1, tensor(0.5000)]}"
    """
    if isinstance(value, torch.Tensor):
        return _tensor(value, most)
    if isinstance(value, FunctionType):
        return f"<function {value.__qualname__}>"
    if type(value) is dict:
        begin, parts, end = "{", [(f"{key!r}: ", x) for key, x in value.items()], "}"
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        begin, parts, end = f"{type(value).__name__}(", [(f"{n}=", getattr(value, n)) for n in value._fields], ")"
    elif type(value) in (list, tuple):
        begin, end = ("[", "]") if isinstance(value, list) else ("(", ",)" if len(value) == 1 else ")")
        parts = [("", x) for x in value]
    elif _is_by_fields(value):
        return _by_fields(value, most, indent)
    else:
        return repr(value)
    return laid_out(begin, [lead + text_of(x, most, indent + 2) for lead, x in parts], end, indent)


def _by_fields(value: Any, most: int, indent: int) -> str:
    try:
        parts = [f"{name}={text_of(x, most, indent + 2)}" for name, x in _shown_fields(value)]
    except LtxError as error:  # a donated state, which debuggers and notebooks should still print
        return f"<{error}>"
    return laid_out(f"{type(value).__name__}(", parts, ")", indent)


def _shown_fields(value: Any) -> Iterator[tuple[str, Any]]:
    # In the order of the constructor's arguments: keyword-only fields come last.
    own = sorted((f for f in fields(value) if f.repr), key=lambda f: f.kw_only is True)
    return ((f.name, x) for f in own if not _is_default(f, x := getattr(value, f.name)))


def laid_out(begin: str, parts: Iterable[str], end: str, indent: int = 0) -> str:
    """`parts` between `begin` and `end`, on one line if they fit, else with a line for each."""
    parts = list(parts)
    line = f"{begin}{', '.join(parts)}{end}"
    if indent + len(line) <= _WIDTH and "\n" not in line:
        return line
    pad = "\n" + " " * indent
    return f"{begin}{pad}  " + f",{pad}  ".join(parts) + f"{pad}{end}"


def _is_by_fields(value: Any) -> bool:
    """Whether `value` is a Readable or a dataclass that doesn't define its own __repr__."""
    made_by_dataclass = is_dataclass(value) and hasattr(type(value).__repr__, "__wrapped__")
    return made_by_dataclass or (vars(type(value)).get("__repr__") is Readable.__repr__ and not value._one_line)


def _is_default(f: Field[Any], value: Any) -> bool:
    made = f.default_factory  # not compared with MISSING: a class pickled by value has its own copy of it
    default = made() if callable(made) else f.default
    if isinstance(value, torch.Tensor) or not isinstance(value, int | float | type(default)):
        return value is default
    return bool(value == default)


def _tensor(x: torch.Tensor, most: int) -> str:
    plain = type(x) in (torch.Tensor, torch.nn.Parameter)
    if x.numel() <= most and x.device.type == "cpu" and plain and not (is_wrapped(x) or recording()):
        return repr(x.detach())
    name = str(x.dtype).removeprefix("torch.")
    for long, short in (("complex", "c"), ("float", "f"), ("uint", "u"), ("int", "i")):
        name = name.replace(long, short)
    return f"{name}[{','.join(map(str, x.shape))}]" + ("" if plain else f"({type(x).__name__})")


class Table(NamedTuple):
    """Rows of cells; `to_the_right` says which columns are right-aligned."""

    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    to_the_right: Sequence[bool]

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.header, *self.rows, strict=True)]
        lines = []
        for cells in (self.header, tuple("-" * width for width in widths), *self.rows):
            columns = zip(cells, widths, self.to_the_right, strict=True)
            lines.append("  ".join(x.rjust(width) if right else x.ljust(width) for x, width, right in columns).rstrip())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        def row(cells: tuple[str, ...], tag: str) -> str:
            sides = (f"text-align: {'right' if right else 'left'}" for right in self.to_the_right)
            said = zip(map(_cell, cells), sides, strict=True)
            return "<tr>" + "".join(f"<{tag} style='{side}'>{x}</{tag}>" for x, side in said) + "</tr>"

        body = "".join(row(cells, "td") for cells in self.rows)
        return f"<table><thead>{row(self.header, 'th')}</thead><tbody>{body}</tbody></table>"


def _cell(text: str) -> str:
    """`text` as HTML; many lines (a model has hundreds of tensors) are folded."""
    from html import escape  # imported late: only notebooks need it

    if "\n" not in text:
        return escape(text)
    lines = f"<pre style='margin: 0; background: none; white-space: pre-wrap'>{escape(text)}</pre>"
    begin = escape(" ".join(text.split())[:_WIDTH])
    return lines if text.count("\n") < _TALL else f"<details><summary>{begin} ...</summary>{lines}</details>"
