"""A checkpoint as a rank reads it, once its files are known to be what was written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp

from ltx.checkpoint import directory, storage
from ltx.checkpoint.contents import decode
from ltx.checkpoint.storage import Piece
from ltx.errors import CheckpointError


@dataclass(frozen=True)
class Opened:
    """A checkpoint whose files are what was written, as this rank reads it."""

    path: Path
    manifest: dict[str, Any]
    metadata: dcp.Metadata
    rank: int
    size: int

    @property
    def saved_ranks(self) -> int:
        """How many ranks saved it."""
        return int(self.manifest["ranks"])

    def has(self, name: str) -> bool:
        return name in self.metadata.state_dict_metadata

    def like(self, name: str) -> tuple[torch.Size, torch.dtype]:
        """(shape, dtype) of what is saved under `name`."""
        entry = self.metadata.state_dict_metadata[name]
        assert isinstance(entry, dcp.TensorStorageMetadata)
        return entry.size, entry.properties.dtype

    def structure(self, name: str) -> Any:
        """What :func:`ltx.checkpoint.contents.encode` made of a structure."""
        names = {"": name}
        while self.has(f"{name}.{len(names) - 1}"):
            names[str(len(names) - 1)] = f"{name}.{len(names) - 1}"
        pieces = {}
        for part, full in names.items():
            shape, dtype = self.like(full)
            pieces[part] = Piece.whole(full, torch.empty(shape, dtype=dtype))
        storage.read(self.path, self.metadata, list(pieces.values()))
        try:
            return decode({part: piece.tensor for part, piece in pieces.items()})
        except (ValueError, LookupError, TypeError) as error:
            raise CheckpointError(f"{self.path}: {name!r} can't be decoded: {error}") from error


def open_checkpoint(path: Path, rank: int, size: int) -> Opened:
    """The checkpoint in `path`, of which `rank` of `size` has verified its share of files.

    Raises CheckpointError if something in it isn't what was written.
    """
    manifest = directory.read_manifest(path)
    names = sorted(manifest["files"])
    # Of what tells where the tensors are each rank: it makes objects of it.
    share = {*names[rank::size], storage.METADATA}
    if problems := directory.verify(path, manifest, sorted(share)):
        raise CheckpointError("; ".join(problems))
    metadata = storage.read_metadata(path)
    for index, where in metadata.storage_data.items():
        if where.relative_path not in manifest["files"]:
            raise CheckpointError(f"{path}: {index.fqn!r} is in {where.relative_path!r}, which isn't in the manifest")
    return Opened(path, manifest, metadata, rank, size)
