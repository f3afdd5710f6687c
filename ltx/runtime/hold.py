"""A directory held by one run, so that no second one writes its snapshots there."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
import warnings
from contextlib import suppress
from pathlib import Path

from ltx.errors import CheckpointError

_LOCK = ".in-use"


class Hold:
    """This process' share of a run's hold on a directory: while one of its processes has one, no other run gets any.

    It keeps out who asks for a hold, and nobody else: a checkpoint can be saved there all the same.

    The lock is the operating system's, on a file in the directory, so it ends with the process, however that ends.
    Forks don't have it. It is a process', not a thread's: two holds in one process don't keep each other out, and the
    first to be released ends both.

    Args:
        base: the directory, which is made if it isn't there.
        token: what tells the run from all others, which its processes tell one another.
        first: this process begins the run, and raises if it can't; those that come after it share its hold as far as
            they can.

    Raises:
        CheckpointError: another run holds the directory, or it can't be written to.

    Warns:
        RuntimeWarning: the file system has no locks, so nothing is kept out.
    """

    def __init__(self, base: Path, token: str, first: bool):
        self.token = token
        self._path = base / _LOCK
        self._file: int | None = None
        try:
            base.mkdir(parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            if first:
                raise CheckpointError(f"{base} can't be written to: {type(error).__name__}: {error}") from error
            return  # this rank's part of a checkpoint tells, if it can't be written either
        try:
            self._lock(first)
            while not self._is_there():  # the last holder has removed it meanwhile
                self._open()
                self._lock(first)
        except OSError as error:
            assert self._file is not None
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

    def _open(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def _is_there(self) -> bool:
        assert self._file is not None
        with suppress(FileNotFoundError):
            return os.stat(self._path).st_ino == os.fstat(self._file).st_ino
        return False

    def _lock(self, first: bool) -> None:
        assert self._file is not None
        if first:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            who = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.ctime()}
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, json.dumps(who).encode(), 0)
        fcntl.lockf(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def release(self) -> None:
        """This process uses the directory no longer. The last of its run removes the lock's file."""
        if self._file is not None:
            with suppress(OSError):  # another process holds it too
                # In two steps: else of two that release it at once each finds the other's share, and it stays.
                fcntl.lockf(self._file, fcntl.LOCK_UN)
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_there():
                    os.unlink(self._path)
            os.close(self._file)
            self._file = None


def _begun(written: bytes) -> str:
    try:
        who = json.loads(written)
        return f"process {who['pid']} on {who['host']} at {who['since']}"
    except (ValueError, LookupError, TypeError):  # it is just beginning
        return "a process that hasn't told its name"
