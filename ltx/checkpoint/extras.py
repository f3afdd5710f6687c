"""What a checkpoint holds besides the state: the position in the data, and random number generators, as tensors.

Structures travel as JSON in a tensor of bytes, their tensors beside it. So nothing is pickled, and nothing that is read
can run code.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import random
import sys
from typing import Any

import torch

from ltx.errors import InputError

_TAG = "__ltx__"
#: A structure as tensors: "" is its JSON, "0", "1", ... its tensors.
Encoded = dict[str, torch.Tensor]


def encode(value: Any, what: str) -> Encoded:
    """`value` as tensors: dicts with string keys, lists, tuples, tensors, and what JSON has.

    Raises:
        InputError: it holds something else.
    """
    tensors: list[torch.Tensor] = []

    def walk(node: Any, path: str) -> Any:
        if isinstance(node, torch.Tensor):
            tensors.append(node.detach())
            return {_TAG: "tensor", "at": len(tensors) - 1}
        if node is None or type(node) in (bool, int, float, str):
            return node
        if type(node) in (list, tuple):
            items = [walk(child, f"{path}[{i}]") for i, child in enumerate(node)]
            return items if type(node) is list else {_TAG: "tuple", "items": items}
        if isinstance(node, dict) and all(type(key) is str for key in node) and _TAG not in node:
            return {key: walk(child, f"{path}[{key!r}]") for key, child in node.items()}
        raise InputError(
            f"checkpoint: {path} is of type {type(node).__name__}, and a checkpoint holds no pickles. Give dicts with "
            "string keys, lists, tuples, tensors, numbers, strings, booleans and None: an iterator's state_dict() or "
            "its position, not the iterator."
        )

    text = json.dumps(walk(value, what)).encode()
    encoded = {"": torch.frombuffer(bytearray(text), dtype=torch.uint8)}
    return encoded | {str(i): tensor for i, tensor in enumerate(tensors)}


def decode(encoded: Encoded) -> Any:
    """Inverse of :func:`encode`."""

    def walk(node: Any) -> Any:
        if isinstance(node, list):
            return [walk(child) for child in node]
        if not isinstance(node, dict):
            return node
        match node.get(_TAG):
            case "tensor":
                return encoded[str(node["at"])]
            case "tuple":
                return tuple(walk(child) for child in node["items"])
        return {key: walk(child) for key, child in node.items()}

    return walk(json.loads(_bytes(encoded[""])))


def digest(encoded: Encoded) -> str:
    """Equal for equal structures of equal values."""
    found = hashlib.sha256()
    for name, tensor in encoded.items():
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        found.update(_bytes(tensor))
    return found.hexdigest()


def _bytes(tensor: torch.Tensor) -> bytes:
    x = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return ctypes.string_at(x.data_ptr(), x.numel() * x.itemsize)  # without NumPy


def random_states() -> dict[str, Any]:
    """The default generators of this process: torch's, Python's, NumPy's if it is loaded."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = (str(name), [int(key) for key in keys], int(rest[0]), int(rest[1]), float(rest[2]))
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Inverse of :func:`random_states`."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])
