"""Checkpoints on disk: one directory a step, that is there whole or not at all.

A checkpoint is written to a hidden directory beside the others, with a manifest that lists every file with its size and
SHA-256, and renamed when all of it has reached the disk. What a crash leaves behind has no name that anybody looks for;
what the disk spoils later doesn't match its manifest.

Nobody replaces or removes another run's checkpoints. A run is what goes on from its own checkpoints, through as many
processes as it takes: who loads one continues its run.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import time
import uuid
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ltx.core.base.arguments import shown
from ltx.errors import CheckpointError, InputError

MANIFEST = "manifest.json"
FORMAT = "ltx checkpoint, version 1"
#: What is raised for a file that isn't there. Other errors of the system's may have nothing to do with the file.
MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
#: How the names of files begin through which ranks save whose store is gone; and how old one is that nobody uses.
EXCHANGE, _EXCHANGE_S = ".ltx-exchange-", 3600.0
_STEP = re.compile(r"step_(\d{8,})")
_HIDDEN = re.compile(r"\.(step_\d{8,}|old)\.(?P<host>.+)\.(?P<pid>\d+)\.[0-9a-f]+")
_REPLACED = re.compile(r"\.replaced_(step_\d{8,})\..+")


def check_name(path: str | os.PathLike[str]) -> None:
    """Raise unless `path` can be the name of a directory."""
    try:
        usable = b"\0" not in os.fsencode(path)
    except ValueError:
        usable = False
    if not usable:
        raise InputError(f"checkpoint: {shown(os.fspath(path))} isn't a valid name of a directory.")


def step_path(path: Path, step: int) -> Path:
    """Where the checkpoint of `step` is."""
    return path / f"step_{step:08d}"


def steps(path: Path) -> list[int]:
    """The steps of which there is a checkpoint, the latest first. Whether they are whole is another question."""
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
    """Give checkpoints their names back whose replacement was cut off halfway (see :func:`commit`).

    Anybody may, at any time, since nobody can tell from another machine whether that process lives: one that does finds
    the name taken, and begins again. Raises CheckpointError where this process mustn't write.
    """
    for name in _names(path):
        set_aside = _REPLACED.fullmatch(name)
        if set_aside is None:
            continue
        aside, final = path / name, path / set_aside[1]
        if final.exists():  # the new one has its name, so the old one must not come back, should that be removed
            _remove(aside)
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
    """A new name that nobody looks for, which says who made it."""
    return path / f".{what}.{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}"


def sha256(file: Path) -> str:
    """A file's digest, as ``sha256sum`` prints it."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def describe(directory: Path, names: Iterable[str]) -> dict[str, Any]:
    """Size and digest of the files `names`, for the manifest."""
    return {name: {"bytes": (directory / name).stat().st_size, "sha256": sha256(directory / name)} for name in names}


def commit(temporary: Path, final: Path, manifest: Mapping[str, Any]) -> None:
    """Give `temporary` the name of a checkpoint, once all of it is on the disk. One of that name is replaced.

    No rename that all file systems have replaces a directory that isn't empty. So the old one gets a hidden name first,
    which says what it was: whatever ends this process in between, who looks next puts it back (:func:`put_back`).
    """
    sealed = dict(manifest, digest=_digest(manifest))
    with open(temporary / MANIFEST, "w", encoding="utf-8") as file:
        json.dump(sealed, file, indent=1)
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
            with suppress(FileNotFoundError):  # the old one has the name, or has been given it back
                os.rename(final, hidden(final.parent, f"replaced_{final.name}"))
    except BaseException:
        with suppress(CheckpointError):  # who looks next is told
            put_back(final.parent)
        raise
    _to_disk(final.parent)
    put_back(final.parent)  # the old one's end
    sweep(final.parent)


def prune(path: Path, keep: int, committed: int, run: str) -> None:
    """Remove all but `keep` checkpoints of `run`: that of step `committed`, which is whole, and the latest before it.

    Those of other runs stay, and those that are ahead.
    """
    before = [step for step in steps(path) if step < committed and _is_of(run, step_path(path, step))]
    for step in before[keep - 1 :]:
        _remove(step_path(path, step))


def _remove(directory: Path) -> None:
    """Remove a directory that somebody looks for: at once, since one half removed would look incomplete."""
    going = hidden(directory.parent, "old")
    with suppress(OSError):  # another has removed it
        os.rename(directory, going)
    discard(going)


def sweep(path: Path) -> None:
    """Remove what processes that are no more have left unfinished."""
    for file in path.glob(f"{EXCHANGE}*"):
        with suppress(OSError):  # another has removed it
            if time.time() - file.stat().st_mtime > _EXCHANGE_S:
                file.unlink()
    for name in os.listdir(path):
        made_by = _HIDDEN.fullmatch(name)
        if made_by and made_by["host"] == socket.gethostname() and not _is_alive(int(made_by["pid"])):
            discard(path / name)


def discard(directory: Path) -> None:
    """Remove a directory that nobody looks for, as far as that is possible."""
    shutil.rmtree(directory, ignore_errors=True)


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest; raises CheckpointError if there is none that is whole, and OSError if that can't be known."""
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
    """The run that saved a checkpoint; None if there is no manifest that is whole. Raises OSError as above."""
    try:
        return str(read_manifest(directory).get("run", ""))
    except CheckpointError:
        return None


def _is_of(run: str, directory: Path) -> bool:
    try:
        return run_of(directory) == run
    except OSError:
        return False


def check_replaceable(directory: Path, run: str | None) -> None:
    """Raise if a checkpoint of the name `directory` is there, and another run's than `run`."""
    saved_by = run_of(directory)
    if saved_by is not None and saved_by != run:
        raise CheckpointError(
            f"{directory} was saved by another run. Give another directory, go on from what is there "
            "(ltx.checkpoint.load), or remove it"
        )


def verify(directory: Path, manifest: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """What is wrong with the files `names`: nothing, if they are what was written. Raises OSError as above."""
    problems = []
    for name in names:
        expected, file = manifest["files"][name], directory / name
        try:
            size = file.stat().st_size
            if size != expected["bytes"]:
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


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno != errno.ESRCH
    return True


# The run that this process' checkpoints in a directory belong to: of a whole process, as the files are. Checkpoints
# from before runs had names belong to the run "".
_runs: dict[Path, str] = {}


def run_in(base: Path) -> str | None:
    """The run that this process continues in the directory `base`; None if it has neither saved nor loaded there."""
    return _runs.get(base)


def continue_run(base: Path, run: str | None) -> None:
    """From now on this process' checkpoints in `base` belong to `run`."""
    if run is not None:
        _runs[base] = run


_LOCK = ".in-use"


class Hold:
    """This process' share of a run's hold on a directory: while one of its processes has one, no other run gets any.

    It keeps out who asks for a hold, and nobody else: a checkpoint can be saved there all the same.

    The lock is the operating system's, on a file in the directory, so it ends with the process, however that ends.
    Forks don't have it. It is a process', not a thread's: two holds in one process don't keep each other out, and the
    first to be released ends both.

    The `first` process begins the run, and raises CheckpointError if another run holds the directory, or it can't be
    written to. Those that come after it share its hold as far as they can.
    """

    def __init__(self, base: Path, first: bool):
        self._path = base / _LOCK
        self._file: int | None = None
        try:
            base.mkdir(parents=True, exist_ok=True)
            self._file = self._open()
        except OSError as error:
            if first:
                raise CheckpointError(f"{base} can't be written to: {type(error).__name__}: {error}") from error
            return  # this rank's part of a checkpoint tells, if it can't be written either
        try:
            while not self._lock(self._file, first):
                removed, self._file = self._file, self._open()
                os.close(removed)
        except OSError as error:
            begun = _begun(os.pread(self._file, 1000, 0))
            os.close(self._file)
            self._file = None
            if first and error.errno in (errno.EACCES, errno.EAGAIN):
                raise CheckpointError(
                    f"{base} is in use by another run, begun by {begun}. Wait for its end, or give another directory. "
                    "If that process is gone, another rank of its run is left."
                ) from error
            if first:
                warnings.warn(
                    f"{base} can't be locked against a second run ({error}). Give no two runs the same directory.",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def _open(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def _is_there(self, file: int) -> bool:
        with suppress(FileNotFoundError):
            return os.stat(self._path).st_ino == os.fstat(file).st_ino
        return False

    def _lock(self, file: int, first: bool) -> bool:
        """Whether that is the directory's lock, once it is locked: the last holder may have removed it meanwhile."""
        if first:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            who = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.ctime()}
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps(who).encode(), 0)
        fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return self._is_there(file)

    def release(self) -> None:
        """This process uses the directory no longer. The last of its run removes the lock's file."""
        if self._file is not None:
            with suppress(OSError):  # another process holds it too
                # In two steps: else of two that release it at once each finds the other's share, and it stays.
                fcntl.lockf(self._file, fcntl.LOCK_UN)
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_there(self._file):
                    os.unlink(self._path)
            os.close(self._file)
            self._file = None


def _begun(written: bytes) -> str:
    try:
        who = json.loads(written)
        return f"process {who['pid']} on {who['host']} at {who['since']}"
    except (ValueError, LookupError, TypeError):  # it is just beginning
        return "a process that hasn't told its name"
