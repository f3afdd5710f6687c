"""What a checkpoint holds, under which names, and which rank writes it.

Besides the tensors of a train state these are the position in the data, and the states of random number generators:
structures that travel as JSON in a tensor of bytes, with their tensors beside it. So nothing is pickled, and nothing
that is read can run code.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ltx.core.base import tree
from ltx.core.base.placements import is_dtensor
from ltx.core.training.train_state import TrainState
from ltx.core.transforms.strategy_update import LeafLayout
from ltx.errors import InputError, StepError, UnsupportedError
from ltx.strategies.zero import Shards


@dataclass(frozen=True)
class Leaf:
    """A tensor of a state, this rank's, and what it is a part of."""

    path: str  # what errors call it, and the name under which it is saved if it is the same on every rank
    tensor: torch.Tensor
    kind: LeafLayout = "replicated"
    ranks: int = 1  # how many parts it has, if it is sharded
    rank: int = 0  # which of them this is

    @property
    def size(self) -> torch.Size:
        """That of the whole, of which `tensor` is a part."""
        shape = self.tensor.shape
        return torch.Size((self.ranks * shape[0],)) if self.kind == "sharded" else shape

    @property
    def offsets(self) -> torch.Size:
        """Where in the whole `tensor` is."""
        shape = self.tensor.shape
        return torch.Size((self.rank * shape[0],) if self.kind == "sharded" else (0,) * len(shape))


def name_on(rank: int, path: str) -> str:
    """The name under which `rank`'s own value of the leaf at `path` is saved."""
    return f"rank_{rank}.{path}"


def check_state(what: str, state: Any) -> None:
    """Raise unless `state` is a train step's, which can be read."""
    if not isinstance(state, TrainState):
        raise StepError(
            f"{what}: the state is the ltx.TrainState of a train step, such as train.init(params), got "
            f"{type(state).__name__}."
        )
    state.check_owned()


def leaves_of(state: TrainState) -> list[Leaf]:
    """The leaves of `state`, in the order of its flattening.

    Paths don't say which part of a sharded optimizer state this is, so that another number of ranks finds them.
    """
    shards = state.opt_state if isinstance(state.opt_state, Shards) else None
    if shards is not None and shards.rank is None:
        shards = None  # simulated ranks: all parts in one tensor
    tree.check_paths(state, "ltx.checkpoint")
    layout, leaves = state.layout, []
    for path, tensor in zip(tree.leaf_paths(state), tree.flatten(state)[0], strict=True):
        if is_dtensor(tensor):
            raise UnsupportedError(
                f"ltx.checkpoint: leaf {path!r} is a DTensor, of which this format would keep one rank's part. Use "
                "torch's, which keeps each part once: torch.distributed.checkpoint.save({'state': state}, "
                "checkpoint_id=path), and load(...) the same."
            )
        part, _, rest = path.partition(".")
        if part == "opt_state" and shards is not None:
            path = f"opt_state.{rest.removeprefix(shards.name + '.')}"
            cut = tensor.ndim == 1  # others are counters
            leaves.append(Leaf(path, tensor, "sharded", shards.ranks, shards.rank or 0) if cut else Leaf(path, tensor))
        elif path in ("sync_state.uses", "sync_state.clock"):
            leaves.append(Leaf(path, tensor))  # guards, which are the same in every state that can be saved
        else:
            kind: LeafLayout = getattr(layout, part, "replicated")
            leaves.append(Leaf(path, tensor, "replicated" if kind == "sharded" else kind))
    return leaves


def shared_out(replicated: Sequence[tuple[str, int]], ranks: int) -> list[int]:
    """Which rank writes each of (name, bytes): about as many bytes on each; the same answer on all of them.

    >>> shared_out([("a", 4), ("b", 1), ("c", 3)], 2)
    [0, 1, 1]
    """
    loads, writers = [0] * ranks, [0] * len(replicated)
    for place in sorted(range(len(replicated)), key=lambda i: (-replicated[i][1], replicated[i][0])):
        rank = loads.index(min(loads))
        writers[place] = rank
        loads[rank] += replicated[place][1]
    return writers


_TAG = "__ltx__"
#: A structure as tensors: "" is its JSON, "0", "1", ... its tensors.
Encoded = dict[str, torch.Tensor]


def encode(value: Any, what: str) -> Encoded:
    """`value` as tensors: dicts with string keys, lists, tuples, plain tensors, and what JSON has; else InputError."""
    tensors: list[torch.Tensor] = []

    def walk(node: Any, path: str) -> Any:
        if isinstance(node, torch.Tensor):
            check_plain(path, node)
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


def check_plain(what: str, tensor: torch.Tensor) -> None:
    """Raise unless `tensor`, called `what`, is all in its bytes: another could be written, and never be read again."""
    if found := _kind_of(tensor):
        raise InputError(
            f"checkpoint: {what} is {found}, and a checkpoint holds the values of plain tensors. Give one of those: "
            "to_dense() of a sparse one, dequantize() of a quantized one, unbind() of a nested one, to_local() of a "
            "DTensor, as_subclass(torch.Tensor) of another class. What is on the meta device has no values."
        )


def _kind_of(tensor: torch.Tensor) -> str:
    """What a tensor is that isn't plain; "" of one that is."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"a {type(tensor).__name__}, a class of tensors of its own"
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "a tensor inside of a transform of torch.func"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout != torch.strided:
        return f"a tensor of the layout {tensor.layout}"
    if tensor.is_quantized:
        return f"a quantized tensor ({tensor.dtype})"
    return "a tensor on the meta device" if tensor.is_meta else ""


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
