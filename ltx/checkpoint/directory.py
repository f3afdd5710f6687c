"""Checkpoints on disk: a directory for each step, which exists whole or not at all, as ltx.checkpoint.save says."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ltx.core.base.arguments import shown
from ltx.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = "ltx checkpoint, version 1"
#: The errors that mean a missing file. Other errors of the system needn't be the file's fault.
MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_STEP = re.compile(r"step_(\d{8,})")
_HIDDEN = re.compile(r"\.(step_\d{8,}|old)\.(?P<host>.+)\.(?P<pid>\d+)\.[0-9a-f]+")
_REPLACED = re.compile(r"\.replaced_(step_\d{8,})\..+")


def step_path(path: Path, step: int) -> Path:
    return path / f"step_{step:08d}"


def steps(path: Path) -> list[int]:
    """The steps that have a checkpoint, latest first. They may be damaged."""
    put_back(path)
    return sorted((int(found[1]) for name in _names(path) if (found := _STEP.fullmatch(name))), reverse=True)


def _names(path: Path) -> list[str]:
    try:
        return os.listdir(path)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:  # not a directory, not readable, not a name
        raise CheckpointError(f"checkpoint: {shown(os.fspath(path))} can't be read as a directory: {error}") from error


def put_back(path: Path) -> None:
    """Give checkpoints their names back if their replacement stopped halfway (see :func:`commit`), or raise
    CheckpointError. Any process may do this at any time: a replacing one finds the name taken and tries again.
    """
    for set_aside in filter(None, map(_REPLACED.fullmatch, _names(path))):
        aside, final = path / set_aside[0], path / set_aside[1]
        if final.exists():  # replaced: the old one mustn't come back if the new one is removed
            remove(aside)
            continue
        try:
            os.rename(aside, final)
        except OSError as error:
            if aside.exists() and not final.exists():
                raise CheckpointError(
                    f"the checkpoint {final.name} was renamed to {aside} while another one took its place, and can't "
                    f"be renamed back: {error}. If the process that renamed it has ended, rename it to {final}"
                ) from error


def hidden(path: Path, what: str) -> Path:
    """A new hidden name, which contains the machine and process that made it."""
    return path / f".{what}.{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}"


def sha256(file: Path) -> str:
    """A file's digest, as ``sha256sum`` prints it."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def describe(directory: Path, names: Iterable[str]) -> dict[str, Any]:
    return {name: {"bytes": (directory / name).stat().st_size, "sha256": sha256(directory / name)} for name in names}


def commit(temporary: Path, final: Path, manifest: Mapping[str, Any]) -> None:
    """Rename `temporary` to a checkpoint's name `final`, once all files are on the disk. An old checkpoint first gets a
    hidden name, as a rename can't replace it everywhere; if this process ends in between, :func:`put_back` helps.
    """
    with open(temporary / MANIFEST, "w", encoding="utf-8") as file:
        json.dump({**manifest, "digest": _digest(manifest)}, file, indent=1)
    for name in (*manifest["files"], MANIFEST):
        _to_disk(temporary / name)
    _to_disk(temporary)
    try:
        while True:
            try:
                os.rename(temporary, final)
                break
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            with suppress(FileNotFoundError):  # make room: an old checkpoint has the name
                os.rename(final, hidden(final.parent, f"replaced_{final.name}"))
    except BaseException:
        with suppress(CheckpointError):  # the next process that calls put_back raises it
            put_back(final.parent)
        raise
    _to_disk(final.parent)
    put_back(final.parent)  # remove the replaced checkpoint
    # Now the unfinished files of processes that have ended.
    for made_by in filter(None, map(_HIDDEN.fullmatch, os.listdir(final.parent))):
        if made_by["host"] == socket.gethostname():
            try:
                os.kill(int(made_by["pid"]), 0)
            except ProcessLookupError:
                remove(final.parent / made_by[0])


def prune(path: Path, keep: int, committed: int, run: str) -> None:
    """Of `run`, keep the checkpoint of step `committed` and the latest before it, `keep` in all, no earlier ones."""
    before = list[int]()
    for step in steps(path):
        with suppress(OSError):
            if step < committed and run_of(step_path(path, step)) == run:
                before.append(step)
    for step in before[keep - 1 :]:
        remove(step_path(path, step))


def remove(directory: Path) -> None:
    """Remove a directory, as far as possible, under a hidden name: half removed, a checkpoint would look damaged."""
    going = hidden(directory.parent, "old")
    with suppress(OSError):  # another has removed it
        os.rename(directory, going)
    shutil.rmtree(going, ignore_errors=True)


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest. Raises CheckpointError if it is missing or damaged, and OSError if it can't be read now."""
    try:
        manifest = json.loads((directory / MANIFEST).read_bytes())
    except (*MISSING, ValueError) as error:
        raise CheckpointError(f"{directory / MANIFEST} can't be read: {error}") from error
    expected = manifest.pop("digest", None) if isinstance(manifest, dict) else None
    found = _digest(manifest)
    if expected != found:
        raise CheckpointError(f"{directory / MANIFEST}: expected digest {expected}, found {found}")
    if manifest["format"] != FORMAT:
        raise CheckpointError(f"{directory / MANIFEST}: expected format {FORMAT!r}, found {manifest['format']!r}")
    return dict(manifest)


def run_of(directory: Path) -> str | None:
    """The run that saved a checkpoint; None if its manifest is missing or damaged. Raises OSError as above."""
    try:
        return str(read_manifest(directory).get("run", ""))
    except CheckpointError:
        return None


def verify(directory: Path, manifest: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Error texts for those of the files `names` that differ from the manifest. Raises OSError as above."""
    problems = []
    for name in names:
        expected, file = manifest["files"][name], directory / name
        try:
            if (size := file.stat().st_size) != expected["bytes"]:
                problems.append(f"{file}: expected {expected['bytes']} bytes, found {size}")
            elif (found := sha256(file)) != expected["sha256"]:
                problems.append(f"{file}: expected SHA-256 {expected['sha256']}, found {found}")
        except MISSING as error:
            problems.append(f"{file}: {error}")
    return problems


def _digest(manifest: Any) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _to_disk(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


runs: dict[Path, str] = {}  # of this process' checkpoints, by directory; "" from before runs had names
