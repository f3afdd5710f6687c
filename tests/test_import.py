"""What ``import ltx`` costs: nothing that torch hasn't paid for. Public names, and which of them tests may use."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import requires
from pathlib import Path
from types import ModuleType

import pytest

import ltx
from tests.programs import printed

SCRIPT = """
import sys, torch
import ltx
adamw, params = ltx.optim.from_torch(torch.optim.AdamW), {"w": torch.ones(2)}
adamw.apply(params, adamw.init(params), params)
print(sorted(name for name in sys.modules if name.startswith(("torch._dynamo", "torch._inductor"))))
print(sorted(name for name in sys.modules if name.startswith("ltx.strategies.")))
print(sorted(name for name in sys.modules if name in ("numpy.testing", "matplotlib", "IPython")))
"""


def test_import_brings_in_neither_dynamo_nor_anything_optional() -> None:
    assert printed("-W", "ignore", "-c", SCRIPT).split("\n")[:3] == ["[]", "['ltx.strategies.ddp']", "[]"]


def test_without_numpy() -> None:
    """Which is no dependency: ``pip install ltx`` alone doesn't bring it."""
    script = (
        "import sys\nsys.modules['numpy'] = None\nimport ltx.__main__\nprint('quiet', file=sys.stderr)\n"
        "import torch, ltx\n"
        "train = ltx.train_step(ltx.data_parallel(lambda w: w**2), ltx.optim.from_torch(torch.optim.SGD, lr=0.1))\n"
        "with ltx.init():\n    print(train(train.init(torch.tensor(1.0)))[1].loss.item())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "1.0\n", done.stderr
    assert done.stderr.startswith("quiet\n"), "torch warns without numpy, and what ltx starts doesn't"


@pytest.mark.full
def test_with_the_oldest_torch() -> None:
    """What ltx does otherwise for older versions of torch is looked at when it is imported."""
    oldest = next(line for line in requires("ltx") or [] if line.startswith("torch")).partition(">=")[2]
    script = (
        f"import torch\ntorch.__version__ = torch.torch_version.TorchVersion({oldest!r})\nimport ltx\n"
        "print(ltx.vmap(lambda x: ltx.psum(x))(torch.ones(2)).tolist())"
    )
    assert printed("-W", "ignore", "-c", script) == "[2.0, 2.0]\n"


PUBLIC = ("ltx", "ltx.checkpoint", "ltx.errors", "ltx.extend", "ltx.hooks", "ltx.nn", "ltx.optim", "ltx.profile")
PUBLIC += ("ltx.tensor_parallel",)
MODULES = {
    "ltx": {"checkpoint", "errors", "hooks", "nn", "optim", "profile", "tensor_parallel"},
    "ltx.hooks": {"noise"},
    "ltx.extend": {"arguments", "buffers", "collectives", "comm", "needs", "optimizers", "tree"},
}


@pytest.mark.parametrize("name", PUBLIC)
def test_star_and_dir_are_all(name: str) -> None:
    module, namespace = import_module(name), dict[str, object]()
    exec(f"from {name} import *", namespace)
    assert sorted(set(namespace) - {"__builtins__"}) == sorted(module.__all__) == sorted(set(module.__all__))
    assert [shown for shown in dir(module) if not shown.startswith("__")] == sorted(module.__all__)


@pytest.mark.parametrize("name", PUBLIC)
def test_no_internal_module_is_public(name: str) -> None:
    module = import_module(name)
    modules = {shown for shown in module.__all__ if isinstance(getattr(module, shown), types.ModuleType)}
    assert modules == MODULES.get(name, set())


def test_a_name_that_is_nowhere() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'allreduce'"):
        ltx.allreduce  # noqa: B018


ROOT = Path(__file__).parents[1]
IMPORTED = (*PUBLIC, "ltx.strategies", "ltx.typing")
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
    if name in IMPORTED or not re.fullmatch(r"ltx\.[\w.]+", name):
        return True
    module = max((public for public in IMPORTED if name.startswith(f"{public}.")), key=len)
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
