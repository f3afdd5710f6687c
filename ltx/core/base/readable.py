"""Values as text, in Equinox' manner: tensors by dtype and shape, fields left out that have their default values."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import Field, fields, is_dataclass
from types import FunctionType
from typing import Any

import torch

from ltx.core.base.private import is_wrapped
from ltx.core.base.traced import recording

_WIDTH = 80


class Readable:
    """Dataclasses that derive from it are printed so."""

    _one_line = False  # however long that is

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__repr__" not in vars(cls):  # in the class itself, where dataclass leaves it alone
            cls.__repr__ = cls.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        return _by_fields(self, 1, -sys.maxsize if self._one_line else 0)


def text_of(value: Any, most: int = 1, indent: int = 0) -> str:
    """`value` on one line, or where that is too long a line for each of its parts.

    Tensors of at most `most` elements are shown with their values. Nothing is read off a device, and nothing of a
    tensor of a transformation.

    >>> text_of({"w": torch.zeros(64, 8, dtype=torch.bfloat16), "n": [1, torch.tensor(0.5)]})
    "{'w': bf16[64,8], 'n': [1, tensor(0.5000)]}"
    """
    begin, parts, end = "", list[tuple[str, Any]](), ""
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
    # In the order of the arguments: what has a place comes first.
    own = sorted((f for f in fields(value) if f.repr), key=lambda f: f.kw_only is True)
    shown = ((f.name, x) for f in own if not _is_default(f, x := getattr(value, f.name)))
    parts = [f"{name}={text_of(x, most, indent + 2)}" for name, x in shown]
    return laid_out(f"{type(value).__name__}(", parts, ")", indent)


def laid_out(begin: str, parts: Iterable[str], end: str, indent: int = 0) -> str:
    """`parts` between `begin` and `end` on one line if they fit, else on one each."""
    parts = list(parts)
    line = f"{begin}{', '.join(parts)}{end}"
    if indent + len(line) <= _WIDTH and "\n" not in line:
        return line
    pad = "\n" + " " * indent
    return f"{begin}{pad}  " + f",{pad}  ".join(parts) + f"{pad}{end}"


def _is_by_fields(value: Any) -> bool:
    """Whether it is one of these, or a dataclass, without a text of its own."""
    made_by_dataclass = is_dataclass(value) and hasattr(type(value).__repr__, "__wrapped__")
    return made_by_dataclass or (vars(type(value)).get("__repr__") is Readable.__repr__ and not value._one_line)


def _is_default(f: Field[Any], value: Any) -> bool:
    made = f.default_factory  # not compared with MISSING, of which a class that travels by value brings a copy
    default = made() if callable(made) else f.default
    if isinstance(value, torch.Tensor) or not isinstance(value, int | float | type(default)):
        return value is default
    return bool(value == default)


def _tensor(x: torch.Tensor, most: int) -> str:
    plain = type(x) in (torch.Tensor, torch.nn.Parameter)
    wrapped = is_wrapped(x) or recording()
    if x.numel() <= most and x.device.type == "cpu" and plain and not wrapped:
        return repr(x.detach())
    name = str(x.dtype).removeprefix("torch.")
    for long, short in (("complex", "c"), ("float", "f"), ("uint", "u"), ("int", "i")):
        name = name.replace(long, short)
    kind = "" if plain else f"({type(x).__name__})"
    return f"{name}[{','.join(map(str, x.shape))}]{kind}"
