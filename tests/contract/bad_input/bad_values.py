"""What nobody should pass, and some will."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ltx
from tests.inside import Levels, VmapRanks


class RefusedError(Exception):
    """Raised by objects of the caller's own."""


class Evil:
    """Compares, hashes, counts, prints and says yes or no by raising."""

    def _refuse(self, *args: Any) -> Any:
        raise RefusedError("an object of the caller's that can't do this")

    __eq__ = __hash__ = __bool__ = __len__ = __int__ = __float__ = __index__ = _refuse  # type: ignore[assignment]


class Subclass(torch.Tensor):
    """A tensor of the caller's own kind."""


def _cyclic_list() -> list[Any]:
    made: list[Any] = [torch.ones(2)]
    made.append(made)
    return made


def _cyclic_dict() -> dict[str, Any]:
    made: dict[str, Any] = {"w": torch.ones(2)}
    made["self"] = made
    return made


def _deep() -> Any:
    made: Any = torch.ones(2)
    for _ in range(5000):
        made = [made]
    return made


#: By name, made anew each time.
BAD: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "minus one": lambda: -1,
    "zero": lambda: 0,
    "seven": lambda: 7,
    "a fraction": lambda: 1.5,
    "NaN": lambda: math.nan,
    "minus infinity": lambda: -math.inf,
    "a huge number": lambda: 10**30,
    "a complex number": lambda: 1j,
    "an empty text": lambda: "",
    "a text": lambda: "nonsense",
    "a text of NUL and half a character": lambda: "\0\ud800",
    "bytes": lambda: b"bytes",
    "a path": lambda: Path("/nonexistent/of/nobody"),
    "an object": lambda: object(),
    "a class": lambda: Evil,
    "a function of anything": lambda: lambda *args, **kwargs: 0,
    "a generator": lambda: (x for x in [torch.ones(1)]),
    "an empty list": list,
    "an empty dict": dict,
    "a list of None": lambda: [None],
    "a tuple of texts": lambda: ("a", "b"),
    "a tuple of fractions": lambda: (0.5, math.nan),
    "a set": lambda: {1, 2},
    "a dict of other keys": lambda: {1: torch.ones(1), "a": torch.ones(1), None: torch.ones(1)},
    "a dict of numbers": lambda: {"data": -3, "w": "x"},
    "a list in itself": _cyclic_list,
    "a dict in itself": _cyclic_dict,
    "a deep list": _deep,
    "an evil object": lambda: Evil(),
    "a dict of an evil object": lambda: {"w": Evil()},
    "a 0-dim tensor": lambda: torch.tensor(2.0),
    "a tensor of NaN": lambda: torch.full((4, 4), math.nan),
    "an empty tensor": lambda: torch.ones(0, 3),
    "whole numbers": lambda: torch.ones(3, dtype=torch.int64),
    "a tensor of booleans": lambda: torch.ones(4, 4, dtype=torch.bool),
    "a tensor of complex numbers": lambda: torch.ones(4, 4, dtype=torch.complex64),
    "a tensor of bytes in 8 bit floats": lambda: torch.ones(4, 4).to(torch.float8_e4m3fn),
    "a meta tensor": lambda: torch.ones(4, 4, device="meta"),
    "a sparse tensor": lambda: torch.eye(4).to_sparse(),
    "a CSR tensor": lambda: torch.eye(4).to_sparse_csr(),
    "a quantized tensor": lambda: torch.quantize_per_tensor(torch.ones(4, 4), 0.1, 0, torch.qint8),
    "a nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "a tensor subclass": lambda: torch.ones(4, 4).as_subclass(Subclass),
    "a tree of odd tensors": lambda: {"w": torch.ones(3, 2, device="meta"), "b": torch.ones(2, dtype=torch.int8)},
    "a tree with None": lambda: {"w": None, "b": torch.zeros(2)},
    "a tree of one dtype too many": lambda: {"w": torch.ones(3, 2), "b": torch.ones(2, dtype=torch.float64)},
    "a module": lambda: torch.nn.Identity(),
    "a dtype": lambda: torch.int8,
    "a device": lambda: torch.device("meta"),
    "a closed axis": lambda: ltx.Axis("data", 3, VmapRanks(Levels((7,)))),
    "the name of another axis": lambda: "model",
}
