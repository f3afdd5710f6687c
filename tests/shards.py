"""The suite in parts side by side: ``python -m tests.shards --full -k psum`` gives pytest these arguments in each."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

import pytest

#: One is a process by itself, and much of its time it waits for the ranks that it has started.
COUNT = 2


def run(arguments: Sequence[str], count: int = COUNT) -> int:
    """Run `count` shards, show their lines as they come, then how each ended, and give the first bad exit status.

    A shard without a test is none that failed, unless all are so. Where `arguments` name a shard, it is run alone.
    """
    named = any(argument.startswith("--shard") for argument in arguments)
    parts = [[]] if named else [["--shard", f"{k}/{count}"] for k in range(1, count + 1)]
    shards = [
        subprocess.Popen(
            [sys.executable, "-u", "-m", "pytest", *arguments, *part],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        for part in parts
    ]
    ends: list[list[str]] = [[] for _ in shards]
    readers = [
        threading.Thread(target=_show, args=(k, shard.stdout, end))
        for k, (shard, end) in enumerate(zip(shards, ends, strict=True), 1)
    ]
    for reader in readers:
        reader.start()
    try:
        statuses = [shard.wait() for shard in shards]
    except KeyboardInterrupt:  # which the terminal has sent to them too
        with suppress(KeyboardInterrupt):
            statuses = [shard.wait() for shard in shards]
        return int(pytest.ExitCode.INTERRUPTED)
    finally:
        for shard in shards:
            shard.kill()
        for reader in readers:
            reader.join()
    # The shards end minutes apart, and the tests that failed in the first would be far above the last lines.
    print("".join(f"{k}| {line}" for k, end in enumerate(ends, 1) for line in end), end="", flush=True)
    failed = [status for status in statuses if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)]
    return int(failed[0] if failed else min(statuses))


def _show(k: int, lines: IO[str] | None, end: list[str]) -> None:
    """Print the lines of shard `k`, and keep in `end` those that name what failed and the last one, with the counts."""
    line = ""
    for line in lines or ():
        print(f"{k}| {line}", end="", flush=True)
        if line.startswith(("FAILED ", "ERROR ")):
            end.append(line)
    end.append(line)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
