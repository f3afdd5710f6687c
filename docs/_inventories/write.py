"""Writes python.inv and torch.inv: links from these pages to Python's and torch's documentation, without a network.

They aren't the inventories that those sites publish, which are large and change: they hold the names below and no
others, in Sphinx's format (version 2). A name that a page links to and that isn't here is shown without a link.
``python docs/_inventories/write.py`` writes them anew.
"""

from __future__ import annotations

import zlib
from pathlib import Path

#: By page of the site: role and names. ``$`` at the end of a location stands for the name.
PYTHON = {
    "library/functions.html#$": ("class", ["int", "float", "bool", "object", "type", "tuple", "list", "dict"]),
    "library/stdtypes.html#$": ("class", ["str", "bytes"]),
    "library/constants.html#$": ("data", ["None", "True", "False"]),
    "library/collections.abc.html#$": (
        "class",
        [
            f"collections.abc.{name}"
            for name in ("Callable", "Generator", "Iterable", "Iterator", "Mapping", "Sequence")
        ],
    ),
    "library/typing.html#$": ("data", ["typing.Any", "typing.Literal", "typing.Union"]),
    "library/datetime.html#$": ("class", ["datetime.timedelta"]),
    "library/pathlib.html#$": ("class", ["pathlib.Path"]),
    "library/fnmatch.html#module-$": ("module", ["fnmatch"]),
    "library/pickle.html#$": ("class", ["pickle.Pickler"]),
    "library/time.html#$": ("function", ["time.monotonic"]),
    "library/exceptions.html#$": (
        "exception",
        [
            *("Exception", "KeyboardInterrupt", "RuntimeError", "TypeError", "ValueError", "TimeoutError"),
            *("FloatingPointError", "ConnectionError", "OSError"),
        ],
    ),
}
TORCH = {
    "tensors.html#$": ("class", ["torch.Tensor"]),
    "tensor_attributes.html#$": ("class", ["torch.dtype", "torch.device"]),
    "generated/$.html#$": (
        "class",
        ["torch.nn.Module", "torch.nn.SyncBatchNorm", "torch.nn.parallel.DistributedDataParallel"],
    ),
    "optim.html#$": ("class", ["torch.optim.Optimizer"]),
    "distributed.html#$": ("class", ["torch.distributed.ProcessGroup"]),
    "generated/$.html#$ ": (
        "function",
        [
            f"torch.func.{name}"
            for name in ("grad", "grad_and_value", "vmap", "jvp", "vjp", "functional_call", "hessian")
        ],
    ),
}


def inventory(project: str, pages: dict[str, tuple[str, list[str]]]) -> bytes:
    """The bytes of an objects.inv with the names of `pages`."""
    lines = []
    for location, (role, names) in pages.items():
        for name in names:
            head, _, tail = location.strip().rpartition("$")
            lines.append(f"{name} py:{role} 1 {head.replace('$', name)}${tail} -")
    head = f"# Sphinx inventory version 2\n# Project: {project}\n# Version: \n"
    note = "# The remainder of this file is compressed using zlib.\n"
    return (head + note).encode() + zlib.compress("".join(f"{line}\n" for line in lines).encode(), 9)


if __name__ == "__main__":
    for name, pages in {"python": PYTHON, "torch": TORCH}.items():
        (Path(__file__).parent / f"{name}.inv").write_bytes(inventory(name, pages))
