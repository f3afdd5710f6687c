"""The contents of a checkpoint, their names, and its files, which are those of ``torch.distributed.checkpoint`` (DCP).

DCP's ``save`` and ``load`` aren't used: they plan by collectives (see ltx.checkpoint.together), and their unpickler of
metadata is unrestricted. The position in the data and the states of generators are saved as JSON in a tensor of bytes,
and their tensors as pieces of their own. Nothing else is pickled, so reading can't run code.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ltx.checkpoint.directory import MISSING
from ltx.core.base import private, tree
from ltx.core.training.train_state import TrainState
from ltx.core.transforms import compare
from ltx.core.transforms.compare import bytes_of, values
from ltx.core.transforms.strategy import LeafLayout
from ltx.errors import CheckpointError, InputError, StepError
from ltx.strategies.zero import Shards

METADATA = ".metadata"


@dataclass(frozen=True)
class Piece:
    """A tensor of this rank; it may be a part of a larger tensor, the whole."""

    name: str  # the leaf's path; for per-rank values see name_on
    tensor: torch.Tensor
    kind: LeafLayout = "replicated"
    parts: int = 1  # the number of equal parts of the whole; 1 unless it is sharded
    part: int = 0  # the number of this part

    @property
    def size(self) -> torch.Size:
        """The shape of the whole, of which `tensor` is a part."""
        shape = self.tensor.shape
        return torch.Size((self.parts * shape[0],)) if self.kind == "sharded" else shape

    @property
    def offsets(self) -> torch.Size:
        """The place of `tensor` in the whole."""
        shape = self.tensor.shape
        return torch.Size((self.part * shape[0],) if self.kind == "sharded" else (0,) * len(shape))


def name_on(rank: int, path: str) -> str:
    """The name under which `rank`'s own value of the leaf at `path` is saved."""
    return f"rank_{rank}.{path}"


def owned(rank: int, pieces: Iterable[Piece]) -> list[Piece]:
    return [replace(piece, name=name_on(rank, piece.name)) for piece in pieces]


def check_state(what: str, state: Any) -> None:
    if not isinstance(state, TrainState):
        raise StepError(
            f"{what}: the state is the ltx.TrainState of a train step (train.init(params)), got {type(state).__name__}."
        )
    state.check_owned()


def leaves_of(state: TrainState) -> list[Piece]:
    """The leaves of `state`, as it is flattened. Their paths are the same for any shard, and any number of ranks."""
    shards = state.opt_state if isinstance(state.opt_state, Shards) else None
    if shards is not None and shards.rank is None:
        shards = None  # simulated ranks: all parts in one tensor
    tree.check_paths(state, "ltx.checkpoint")
    layout, leaves = state.layout, []
    for path, tensor in zip(tree.leaf_paths(state), tree.flatten(state)[0], strict=True):
        part, _, rest = path.partition(".")
        kind: LeafLayout = getattr(layout, part, "replicated")
        if part == "opt_state" and shards is not None:
            path = f"opt_state.{rest.removeprefix(shards.name + '.')}"
            cut = (shards.ranks, shards.rank or 0) if tensor.ndim == 1 else None  # others are counters
            leaves.append(Piece(path, tensor, "sharded", *cut) if cut else Piece(path, tensor))
        elif path in ("sync_state.uses", "sync_state.clock"):
            # Guards are equal in all states that can be saved. Files have a 0-dim clock, and loading sets a new one.
            leaves.append(Piece(path, tensor if path == "sync_state.uses" else tensor.reshape(tensor.shape[:-1])))
        elif kind == "sharded" and not (part == "opt_state" and isinstance(state.opt_state, Shards)):
            leaves.append(Piece(path, tensor, "per_rank"))  # only the strategy knows how the parts fit together
        else:
            leaves.append(Piece(path, tensor, "replicated" if kind == "sharded" else kind))
    return leaves


_TAG = "__ltx__"


def encode(value: Any, what: str) -> list[Piece]:
    """The pieces of `value`, or InputError: JSON, called `what`, then its tensors: `what`.0, `what`.1, and so on."""
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
            f"checkpoint: {path} is of type {type(node).__name__}, which a checkpoint can't hold without a pickle. "
            "Give dicts with string keys, lists, tuples, tensors, numbers, strings, booleans and None: an iterator's "
            "state_dict(), not the iterator; dataclasses.asdict(position) for an ltx.DataPosition."
        )

    text = json.dumps(walk(value, what)).encode()
    described = Piece(what, torch.frombuffer(bytearray(text), dtype=torch.uint8))
    return [described, *(Piece(f"{what}.{i}", tensor) for i, tensor in enumerate(tensors))]


def check_plain(what: str, tensor: torch.Tensor) -> None:
    """Raise unless `tensor`, called `what` in the error, is a plain tensor: others could be written but not read."""
    known = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    kinds = (
        (not known, f"a {type(tensor).__name__}, a class of tensors of its own"),
        (private.is_wrapped(tensor), "a tensor inside of a transform of torch.func"),
        (tensor.is_nested, "a nested tensor"),
        (tensor.layout != torch.strided, f"a tensor of the layout {tensor.layout}"),
        (tensor.is_quantized, f"a quantized tensor ({tensor.dtype})"),
        (tensor.is_meta, "a tensor on the meta device"),
    )
    if found := next((kind for holds, kind in kinds if holds), ""):
        raise InputError(
            f"checkpoint: {what} is {found}, and a checkpoint holds the values of plain tensors. Give one of those: "
            "to_dense() of a sparse one, dequantize() of a quantized one, unbind() of a nested one, to_local() of a "
            "DTensor, as_subclass(torch.Tensor) of another class. Tensors on the meta device have no values."
        )


def decode(described: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Any:
    """The structure from its pieces' tensors: the inverse of :func:`encode`."""

    def made(node: dict[str, Any]) -> Any:
        match node.get(_TAG):
            case "tensor":
                return tensors[node["at"]]
            case "tuple":
                return tuple(node["items"])
        return node

    return json.loads(bytes_of(values(described)), object_hook=made)  # the innermost dicts first


def digest(pieces: Sequence[Piece], data: bool = True) -> str:
    """A digest of the pieces' names, dtypes and sizes, and with `data` of their values."""
    described = [f"{piece.name} {piece.tensor.dtype} {list(piece.size)} " for piece in pieces]
    return compare.hash_of(described + [compare.digest(values(piece.tensor)) for piece in pieces if data])


Written = list[list[Any]]  #: for rank 0: (name, dtype, size, offsets, sizes, file, position, length) of each piece


def write(directory: Path, rank: int, pieces: Sequence[Piece]) -> Written:
    """Write `pieces` to this rank's file in `directory`, and sync it to the disk."""
    if not pieces:
        return []
    written, name = list[list[Any]](), f"__{rank}_0.distcp"
    with open(directory / name, "wb") as file:
        for piece in pieces:
            tensor, begin = values(piece.tensor).cpu(), file.tell()
            if tensor.untyped_storage().nbytes() != tensor.nbytes:  # else torch would write the whole storage
                tensor = tensor.clone()
            torch.save(tensor, file)
            dtype = str(tensor.dtype).removeprefix("torch.")
            where = [name, begin, file.tell() - begin]
            written.append([piece.name, dtype, list(piece.size), list(piece.offsets), list(tensor.shape), *where])
        file.flush()
        os.fsync(file.fileno())
    return written


def write_metadata(directory: Path, by_rank: Sequence[Written]) -> None:
    found: dict[str, dcp.TensorStorageMetadata] = {}
    places: dict[dcp.MetadataIndex, _StorageInfo] = {}
    for name, dtype, size, offsets, sizes, *where in (entry for written in by_rank for entry in written):
        like = torch.empty((), dtype=getattr(torch, dtype), device="cpu")
        properties = dcp.TensorProperties.create_from_tensor(like)
        entry = found.setdefault(name, dcp.TensorStorageMetadata(properties, torch.Size(size), []))
        entry.chunks.append(dcp.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        places[dcp.MetadataIndex(name, offsets)] = _StorageInfo(*where)
    metadata = dcp.Metadata(dict(found), {name: (name,) for name in found}, places)  # flat, for DCP's tools
    with open(directory / METADATA, "wb") as file:
        pickle.dump(metadata, file)


_ALLOWED = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex"),
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a checkpoint's metadata")


def read_metadata(directory: Path) -> dcp.Metadata:
    """The checkpoint's metadata; raises CheckpointError if the file isn't DCP's metadata."""
    try:
        metadata = _Unpickler(io.BytesIO((directory / METADATA).read_bytes())).load()
    except Exception as error:  # an unpickler may raise any error for a damaged file
        if isinstance(error, (OSError, MemoryError)) and not isinstance(error, MISSING):
            raise
        raise CheckpointError(f"{directory / METADATA} can't be read: {error}") from error
    if not isinstance(metadata, dcp.Metadata):
        raise CheckpointError(f"{directory / METADATA} holds a {type(metadata).__name__}, not DCP's metadata.")
    return metadata


class _Loading(DefaultLoadPlanner):
    """Tells DCP's reader into which tensors of `pieces` it reads."""

    def __init__(self, pieces: Sequence[Piece]):
        super().__init__()
        self._tensors = {piece.name: piece.tensor for piece in pieces}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(f"{read_item.storage_index.fqn!r} is a pickled object, and pickles aren't read.")

    def lookup_tensor(self, index: dcp.MetadataIndex) -> torch.Tensor:
        return self._tensors[index.fqn]


def read(directory: Path, metadata: dcp.Metadata, pieces: Sequence[Piece]) -> None:
    """Fill `pieces` with the values of their names, from the files of all ranks; CheckpointError if one is damaged."""
    items: list[ReadItem] = []
    for piece in pieces:
        entry: Any = metadata.state_dict_metadata[piece.name]
        wanted = dcp.ChunkStorageMetadata(piece.offsets, piece.tensor.shape)
        items.extend(create_read_items_for_chunk_list(piece.name, entry, [wanted]))
    reader = FileSystemReader(directory)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    try:
        with torch.no_grad():
            reader.read_data(LoadPlan(items), _Loading(pieces)).wait()
    except (*MISSING, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{directory}: what is in its files can't be read: {error}") from error
