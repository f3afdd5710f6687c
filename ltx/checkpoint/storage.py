"""Tensors in files, in the format of ``torch.distributed.checkpoint`` (DCP).

DCP's files, metadata and readers are used, but neither its ``save`` nor its ``load``: these plan by collectives of
their own on a process group, and read metadata with an unrestricted unpickler. Here each rank knows what it writes and
reads, and metadata may name nothing but the classes that DCP's metadata is made of. DCP's own tools can read what is
written.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ltx.checkpoint.directory import MISSING
from ltx.errors import CheckpointError

METADATA = ".metadata"


@dataclass(frozen=True)
class Piece:
    """A tensor that is saved under `name`, and where in the whole of that name it is."""

    name: str
    tensor: torch.Tensor
    size: torch.Size
    offsets: torch.Size

    @staticmethod
    def whole(name: str, tensor: torch.Tensor) -> Piece:
        """All that is saved under `name`."""
        return Piece(name, tensor, tensor.shape, torch.Size((0,) * tensor.ndim))


#: What a rank has written, for rank 0: JSON of (name, dtype, size, offsets, sizes, file, position, length) for a piece.
Written = list[list[Any]]


class _Saving(DefaultSavePlanner):
    """Gives DCP's writer the tensors of `pieces`."""

    def __init__(self, pieces: Sequence[Piece]):
        super().__init__()
        self._tensors = {_index(piece): piece.tensor for piece in pieces}

    def lookup_object(self, index: dcp.MetadataIndex) -> torch.Tensor:
        return self._tensors[index].detach().resolve_conj().resolve_neg()


def _index(piece: Piece) -> dcp.MetadataIndex:
    return dcp.MetadataIndex(piece.name, piece.offsets)


def write(directory: Path, rank: int, pieces: Sequence[Piece]) -> Written:
    """Write `pieces` to this rank's file in `directory`, and through to the disk."""
    if not pieces:
        return []
    writer = FileSystemWriter(directory, sync_files=True)
    writer.set_up_storage_writer(rank == 0)
    items = [
        WriteItem(
            _index(piece),
            WriteItemType.TENSOR if piece.tensor.shape == piece.size else WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                dcp.ChunkStorageMetadata(piece.offsets, piece.tensor.shape),
                dcp.TensorProperties.create_from_tensor(piece.tensor),
                piece.size,
            ),
        )
        for piece in pieces
    ]
    # DCP names files by the place of a plan among the ranks'.
    plan = writer.prepare_global_plan([*(SavePlan([]) for _ in range(rank)), SavePlan(items)])[rank]
    results = {result.index: result.storage_data for result in writer.write_data(plan, _Saving(pieces)).wait()}
    written = []
    for piece in pieces:
        info = results[_index(piece)]
        dtype = str(piece.tensor.dtype).removeprefix("torch.")
        where = [info.relative_path, info.offset, info.length]
        written.append([piece.name, dtype, list(piece.size), list(piece.offsets), list(piece.tensor.shape), *where])
    return written


def write_metadata(directory: Path, by_rank: Sequence[Written]) -> None:
    """Write what DCP needs to find all that the ranks have written."""
    found: dict[str, dcp.TensorStorageMetadata] = {}
    places: dict[dcp.MetadataIndex, _StorageInfo] = {}
    for name, dtype, size, offsets, sizes, *where in (entry for written in by_rank for entry in written):
        like = torch.empty((), dtype=getattr(torch, dtype))
        properties = dcp.TensorProperties.create_from_tensor(like)
        entry = found.setdefault(name, dcp.TensorStorageMetadata(properties, torch.Size(size), []))
        entry.chunks.append(dcp.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        places[dcp.MetadataIndex(name, offsets)] = _StorageInfo(*where)
    # In which structure DCP's tools put them: flat, by name.
    metadata = dcp.Metadata(dict(found), {name: (name,) for name in found}, places)
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
    """Of DCP's metadata and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a checkpoint's metadata")


def read_metadata(directory: Path) -> dcp.Metadata:
    """What is in the checkpoint; raises CheckpointError for what isn't DCP's metadata."""
    try:
        written = (directory / METADATA).read_bytes()
    except MISSING as error:
        raise CheckpointError(f"{directory / METADATA} can't be read: {error}") from error
    try:
        metadata = _Unpickler(io.BytesIO(written)).load()
    except MemoryError:
        raise
    except Exception as error:  # of bytes that are no pickle an unpickler may raise anything
        raise CheckpointError(f"{directory / METADATA} can't be read: {error}") from error
    if not isinstance(metadata, dcp.Metadata):
        raise CheckpointError(f"{directory / METADATA} holds a {type(metadata).__name__}, not DCP's metadata.")
    return metadata


class _Loading(DefaultLoadPlanner):
    """Gives DCP's reader the places in `pieces` where what is read belongs."""

    def __init__(self, pieces: Sequence[Piece]):
        super().__init__()
        self._tensors = {piece.name: piece.tensor for piece in pieces}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(f"{read_item.storage_index.fqn!r} is a pickled object, which isn't read.")

    def lookup_tensor(self, index: dcp.MetadataIndex) -> torch.Tensor:
        return self._tensors[index.fqn]


def read(directory: Path, metadata: dcp.Metadata, pieces: Sequence[Piece]) -> None:
    """Fill the tensors of `pieces`, each with what of its name lies there, whoever has written it.

    Raises CheckpointError where a file is missing or isn't what a checkpoint holds.
    """
    items: list[ReadItem] = []
    for piece in pieces:
        entry = metadata.state_dict_metadata[piece.name]
        assert isinstance(entry, dcp.TensorStorageMetadata)
        wanted = dcp.ChunkStorageMetadata(piece.offsets, piece.tensor.shape)
        items.extend(create_read_items_for_chunk_list(piece.name, entry, [wanted]))
    reader = FileSystemReader(directory)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    try:
        with torch.no_grad():
            reader.read_data(LoadPlan(items), _Loading(pieces)).wait()
    except (*MISSING, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{directory}: what is in its files can't be read: {error}") from error
