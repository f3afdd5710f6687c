"""Private names of torch are in one file, which says with which versions it was tried; others are few, each known."""

from __future__ import annotations

import ast
import importlib.util
import pkgutil
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from ltx.core.base import private
from ltx.errors import UnsupportedError

LTX = Path(__file__).parents[3] / "ltx"
#: Uses elsewhere, by file. They only go down.
ELSEWHERE = {
    "checkpoint/storage.py": 1,
    "core/base/containers.py": 1,
    "core/base/traced.py": 4,
    "core/base/tree.py": 1,
    "core/comm/operations.py": 2,
    "core/optim/kernel.py": 1,
    "core/transforms/checkpoints.py": 1,
    "core/transforms/functional_call.py": 1,
    "hooks/ddp.py": 1,
    "nn.py": 2,
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith(("__", "_foreach_"))


def uses(tree: ast.AST) -> int:
    """On how many lines a file imports private names from torch, or looks them up there."""
    lines = set()
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
            names = [node.attr]
        lines |= {node.lineno for name in names if is_private(name)}
    return len(lines)


def test_private_names_of_torch() -> None:
    found = Counter({path.relative_to(LTX).as_posix(): uses(ast.parse(path.read_text())) for path in LTX.rglob("*.py")})
    assert found.pop("core/base/private.py")
    assert dict(+found) == ELSEWHERE


PATHS = sorted(set(re.findall(r'"(torch[\w.]*:[\w.]+)"', Path(private.__file__).read_text())))


def test_every_name_is_looked_up_in_one_way() -> None:
    assert len(PATHS) > 40
    assert private._gone == []


@pytest.mark.parametrize("path", PATHS)
def test_a_name_that_is_gone_is_told_with_the_version(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(name: str, found: Any = pkgutil.resolve_name) -> Any:
        if name == path:
            raise AttributeError(name)
        return found(name)

    monkeypatch.setattr(pkgutil, "resolve_name", without)
    spec = importlib.util.spec_from_file_location("private_once_more", private.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.warns(UserWarning, match=re.escape(path.replace(":", "."))) as caught:
        spec.loader.exec_module(module)
    (told,) = caught
    assert str(told.message).startswith(f"torch {torch.__version__} doesn't have these private names")
    for stand_in in (x for x in vars(module).values() if type(x).__name__ == "_Gone"):
        assert not isinstance(torch.ones(1), stand_in)
        for use in (stand_in, lambda x=stand_in: x.try_get()):
            with pytest.raises(UnsupportedError, match="a private name that torch"):
                use()


LATER = """
import warnings
import torch
del torch._assert_async, torch._C._will_engine_execute_node
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import ltx
    import ltx.checkpoint, ltx.profile
print(*(one.message for one in caught), sep="\\n")
print(ltx.vmap(ltx.psum)(torch.ones(2)).tolist())
"""


def test_ltx_is_imported_all_the_same() -> None:
    done = subprocess.run([sys.executable, "-c", LATER], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    told, value = done.stdout.splitlines()
    assert "torch._C._will_engine_execute_node, torch._assert_async" in told
    assert value == "[2.0, 2.0]"
