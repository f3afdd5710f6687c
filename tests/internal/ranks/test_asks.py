"""Outside of the rooms of ranks and of the network nobody asks what the ranks of an axis are: they are told to act."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

LTX = Path(__file__).parents[3] / "ltx"
#: A kind of an axis, the names of the kinds' classes, and the communicator of one of them.
KINDS = {"simulated"}
CLASSES = {"ProcessRanks", "VmapRanks"}
#: Uses of a communicator (``axis.comm``), which only go down.
MOST = 33


def asks(tree: ast.AST) -> Counter[str]:
    """How often each of these is used in a file; fields of objects of their own (``self.comm``) aren't an axis'."""
    found = Counter[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            found[node.attr] += node.attr in {*KINDS, *CLASSES, "comm"}
        found[getattr(node, "id", "")] += isinstance(node, ast.Name) and node.id in CLASSES
    return +found


def test_nobody_asks_what_ranks_are() -> None:
    found = {
        name: asks(ast.parse(path.read_text()))
        for path in sorted(LTX.rglob("*.py"))
        if not (name := path.relative_to(LTX).as_posix()).startswith(("core/ranks/", "core/comm/"))
    }
    assert {name for name, uses in found.items() if uses.keys() - {"comm"}} == set()
    communicators = {name: uses["comm"] for name, uses in found.items() if uses["comm"]}
    assert sum(communicators.values()) <= MOST, communicators
    assert sum(communicators.values()) > MOST - 5, f"write MOST = {sum(communicators.values())}"


def test_one_file_knows_the_class_of_tensors_on_meshes() -> None:
    """The core's trees refuse them, and know nothing else of them."""
    own = {"DTensor", "to_local", "full_tensor", "from_local", "redistribute", "device_mesh", "_local_tensor"}
    files = {path.relative_to(LTX).as_posix(): ast.parse(path.read_text()) for path in LTX.rglob("*.py")}
    knowing = {
        name
        for name, file in files.items()
        for node in ast.walk(file)
        if own & {getattr(node, field, None) for field in ("attr", "id", "name")}
        or (isinstance(node, ast.Constant) and node.value in ("DTensor", "torch.distributed.tensor"))
    }
    assert knowing == {"core/base/tree.py", "tensor_parallel.py"}
