"""A save that all ranks have agreed on: each writes its part, and rank 0 makes a checkpoint of them or of none."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ltx.checkpoint import directory, storage
from ltx.checkpoint.storage import Piece
from ltx.checkpoint.together import Together
from ltx.errors import CheckpointError


@dataclass(frozen=True)
class Job:
    """A save that all ranks have agreed on, ready to be written."""

    together: Together
    temporary: Path
    final: Path
    pieces: list[Piece]
    manifest: dict[str, Any]
    keep: int | None
    failure: Exception | None = None  # why this rank can't write its part

    def run(self) -> Path:
        """Write, on all ranks; raises CheckpointError on all of them if one fails."""
        failed = f"the checkpoint of step {self.manifest['step']} wasn't saved to {self.final}"
        try:
            self.together.conclude(self._write, self._decide, failed, " Earlier ones are as they were.")
        except BaseException as error:
            self.give_up(error)
            raise
        return self.final

    def give_up(self, error: BaseException) -> None:
        """Tell the peers that this rank does no more."""
        self.together.leave(error)
        self.together.let_go()
        if self.together.rank == 0:
            directory.discard(self.temporary)

    def _write(self) -> dict[str, Any]:
        if self.failure is not None:
            raise self.failure
        written = storage.write(self.temporary, self.together.rank, self.pieces)
        return {"written": written, "files": directory.describe(self.temporary, {entry[5] for entry in written})}

    def _decide(self, by_rank: Sequence[dict[str, Any]]) -> None:
        """On rank 0: make a checkpoint of what the ranks have written."""
        try:
            self._commit(by_rank)
        except BaseException as error:
            if not isinstance(error, Exception) and not self.temporary.exists():
                self.together.tell([])  # it has its name, so nothing went wrong but on this rank
            raise

    def _commit(self, by_rank: Sequence[dict[str, Any]]) -> None:
        files: dict[str, Any] = {}
        for rank, said in enumerate(by_rank):
            for name, described in said["files"].items():
                written = self.temporary / name
                size = written.stat().st_size if written.exists() else None
                if size != described["bytes"]:
                    raise CheckpointError(
                        f"rank {rank} has written {written}, {described['bytes']} bytes, and rank 0 sees "
                        f"{'no such file' if size is None else f'{size} bytes'}: all ranks need the same file system"
                    )
                files[name] = described
        storage.write_metadata(self.temporary, [said["written"] for said in by_rank])
        files |= directory.describe(self.temporary, [storage.METADATA])
        directory.commit(self.temporary, self.final, {**self.manifest, "files": files})
        if self.keep is None:
            return
        try:
            directory.prune(self.final.parent, self.keep, self.manifest["step"], self.manifest["run"])
        except (CheckpointError, OSError) as error:  # no reason to say that this one isn't there
            warnings.warn(
                f"checkpoint: {self.final} is saved, and older ones weren't removed: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
