"""``tests/contract`` holds what is promised: it imports public names alone, and outlives what is behind them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
PUBLIC = ("ltx", "ltx.checkpoint", "ltx.errors", "ltx.extend", "ltx.hooks", "ltx.nn", "ltx.optim", "ltx.profile")
PUBLIC += ("ltx.strategies", "ltx.tensor_parallel", "ltx.typing")
FILES = sorted((ROOT / "tests" / "contract").rglob("*.py"))


def internal(source: str) -> Iterator[str]:
    """What a test names that isn't public, and tests that may go."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        yield from (name for name in names if not is_public(name))


def is_public(name: str) -> bool:
    """Whether it is public: a name that a public module lists, or that isn't of ltx."""
    if name.startswith("tests.internal"):
        return False
    if name in PUBLIC or not re.fullmatch(r"ltx\.[\w.]+", name):
        return True
    module = max((public for public in PUBLIC if name.startswith(f"{public}.")), key=len)
    first = name.removeprefix(f"{module}.").partition(".")[0]
    # Of modules, those that are listed are public; a file such as `ltx/hooks/lossy.py` is nobody's business.
    owner = import_module(module)
    found, listed = getattr(owner, first, None), (*getattr(owner, "__all__", ()), "tree")
    return found is not None and (not isinstance(found, ModuleType) or first in listed)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT / "tests" / "contract")))
def test_public_names_alone(path: Path) -> None:
    assert sorted(internal(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import ltx.core.comm",
        "from ltx.core import comm",
        "from ltx.hooks import lossy",
        "from ltx.runtime.pool import Pool",
        "import ltx\nltx.core.comm.resolve(None)",
        "from tests.internal.optim import cases",
    ],
)
def test_others_are_found(source: str) -> None:
    assert list(internal(source))
