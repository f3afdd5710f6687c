"""Private names of torch are in one file, which says with which versions it was tried; others are few, each known."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

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
    "runtime/simulation.py": 3,
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
