"""The suite in processes side by side: ``python -m tests.shards --full -k psum`` gives each pytest these arguments.

Each takes a module of tests when it is done with the one before, so that they end together.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import pytest

#: One is a process by itself, and much of its time it waits for the ranks that it has started.
COUNT = 2


def run(arguments: Sequence[str], count: int = COUNT) -> int:
    """Run `count` shards, show their lines as they come, then how each ended, and give the first bad exit status.

    A shard without a test is none that failed, unless all are so.
    """
    with tempfile.TemporaryDirectory() as claims:
        # With a space in place of "=", pytest would take the folder for one of tests.
        return _run([sys.executable, "-u", "-m", "pytest", *arguments, f"--claims={claims}"], count)


def claimed(items: Iterable[pytest.Item], claims: Path) -> Iterator[pytest.Item]:
    """Of `items` those of the modules that no other process has claimed in the folder `claims`, each when it is due."""
    by_module: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_module.setdefault(item.nodeid.partition("::")[0], []).append(item)
    for module, its_items in by_module.items():
        with suppress(FileExistsError):
            (claims / module.replace("/", "+")).touch(exist_ok=False)
            yield from its_items


def _run(command: list[str], count: int) -> int:
    shards = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        for _ in range(count)
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
    # The tests that failed in the shard that ends first would be far above the last lines.
    print("".join(f"{k}| {line}" for k, end in enumerate(ends, 1) for line in end), end="", flush=True)
    failed = [status for status in statuses if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)]
    return int(failed[0] if failed else min(statuses))


def _show(k: int, lines: IO[str] | None, end: list[str]) -> None:
    """Print the lines of shard `k`, and keep in `end` what failed, what waits, and the last one, with the counts."""
    line = ""
    for line in lines or ():
        print(f"{k}| {line}", end="", flush=True)
        if line.startswith(("FAILED ", "ERROR ")) or (k == 1 and line.startswith("WAITING ")):  # each says the same
            end.append(line)
    end.append(line)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
