"""What ``import ltx`` costs: nothing that torch hasn't paid for."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys, torch
before = set(sys.modules)
import ltx
new = {name for name in set(sys.modules) - before if name.split(".")[0] == "torch"}
print(sorted(name for name in sys.modules if name.startswith(("torch._dynamo", "torch._inductor"))))
print(sorted(name for name in sys.modules if name.startswith("ltx.strategies.")))
print(sorted(name for name in sys.modules if name in ("numpy.testing", "matplotlib", "IPython")))
"""


def test_import_brings_in_neither_dynamo_nor_anything_optional() -> None:
    printed = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True, check=True)
    names = ("auto_hook", "ddp")
    strategies = str([f"ltx.strategies.{name}" for name in names])
    assert printed.stdout.split("\n")[:3] == ["[]", strategies, "[]"]


def test_without_numpy() -> None:
    """Which is no dependency: ``pip install ltx`` alone doesn't bring it."""
    script = (
        "import sys\nsys.modules['numpy'] = None\nimport torch, ltx, ltx.cli\n"
        "train = ltx.train_step(ltx.data_parallel(lambda w: w**2), ltx.optim.from_torch(torch.optim.SGD, lr=0.1))\n"
        "with ltx.init():\n    print(train(train.init(torch.tensor(1.0)))[1].loss.item())"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True)
    assert done.stdout == "1.0\n", done.stderr
