"""Which tests catch which mutants: ``python -m tests.mutants [NAME ...] [--full]``, and ``make mutants``.

Each mutant is put into a copy of the project, and pytest runs there until a test fails: the mutant is killed. Its
nearest tests run first, then the fast suite, with --full the full one. What hangs is killed by the tests' timeouts.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from tests.mutants import MUTANTS
from tests.mutants.mutant import Mutant

ROOT = Path(__file__).parents[2]
#: Seconds that pytest may take. Each test has its own timeout; this one is for what no signal interrupts.
NEAREST_LIMIT_S, SUITE_LIMIT_S = 300, 7200


_NO_BUDGET = ("--ignore", "tests/test_budget.py")

# What an interrupt ends: sessions of their own don't get the terminal's.
_running: set[subprocess.Popen[bytes]] = set()


class CannotTellError(Exception):
    """pytest didn't run the tests: it says nothing about a mutant."""


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant. `killer`: the test that failed, empty if none did; `stage`: which tests had run."""

    mutant: Mutant
    killer: str
    stage: str
    seconds: float

    @property
    def as_expected(self) -> bool:
        """Whether the fast suite kills it, or it is marked as the full suite's."""
        return bool(self.killer) or bool(self.mutant.full)


def copied(to: Path) -> Path:
    """The project, as git knows it, in `to`: without this folder, whose own test holds the text without mutants."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0")
    for name in filter(None, names):
        if not name.startswith("tests/mutants/") and (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    return to


def failure(tree: Path, arguments: Sequence[str], limit_s: float) -> str:
    """The first test that fails in `tree`; empty if all pass.

    Raises:
        CannotTellError: pytest couldn't run them.
    """
    # Whatever else it does, a mutant may add a line.
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *_NO_BUDGET, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "COLUMNS": "240"}
    with tempfile.TemporaryFile("w+") as output:
        # A session of its own: what tests have started ends with it.
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        _running.add(process)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"no end within {limit_s} s"
        finally:
            _end(process)
            _running.discard(process)
        output.seek(0)
        text = output.read()
    if code == 0:
        return ""
    if failed := re.search(r"^(?:FAILED|ERROR) (.+?)(?: - (.*))?$", text, re.MULTILINE):
        if code == 1:
            # A timeout is a kill where the mutant makes ranks wait, and else a machine that is too busy.
            return f"{failed[1]} (timeout)" if "Timeout" in (failed[2] or "") else failed[1]
    elif code not in (1, 2, 3, 4, 5):
        return f"pytest ended with {code}"
    raise CannotTellError(f"pytest {' '.join(arguments)} ended with {code}:\n{text[-3000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def outcome(mutant: Mutant, tree: Path, nearest: bool, full: bool) -> Outcome:
    """Run the tests on a mutant, stage by stage, until one fails; `tree` is as before afterwards."""
    stages = [("nearest", [*mutant.nearest], NEAREST_LIMIT_S)]
    if not nearest:
        stages.append(("fast suite", [], SUITE_LIMIT_S))
        if full:
            stages.append(("full suite", ["--full"], SUITE_LIMIT_S))
    began, (path, original) = time.monotonic(), mutant.apply(tree)
    try:
        for stage, arguments, limit_s in stages:
            if killer := failure(tree, arguments, limit_s):
                return Outcome(mutant, killer, stage, time.monotonic() - began)
    finally:
        path.write_text(original, encoding="utf-8")
    return Outcome(mutant, "", stages[-1][0], time.monotonic() - began)


def row(found: Outcome) -> str:
    killed = f"killed by {found.killer}" if found.killer else f"SURVIVED the {found.stage}"
    if not found.killer and found.mutant.full:
        killed += f" (marked full: {found.mutant.full})"
    elif found.killer and found.stage != "nearest":
        killed += f" ({found.stage}; not by its nearest tests)"
    return f"{found.mutant.name:44} {found.seconds:6.1f} s  {killed}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run mutants and print the table. Status 1: one survived that isn't marked, 2: tests fail without a mutant."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.split("\n\n")[1])
    parser.add_argument("names", nargs="*", help="mutants, or beginnings of their names; none: all")
    parser.add_argument("--full", action="store_true", help="the full suite on what survives the fast one")
    parser.add_argument("--nearest", action="store_true", help="the nearest tests alone")
    parser.add_argument("--jobs", type=int, default=2, help="copies at work at once")
    parser.add_argument("--list", action="store_true", help="say what each breaks, and run nothing")
    given = parser.parse_args(arguments)
    chosen = [m for m in MUTANTS if not given.names or any(m.name.startswith(name) for name in given.names)]
    if unknown := [name for name in given.names if not any(m.name.startswith(name) for m in MUTANTS)]:
        parser.error(f"no mutant's name begins with {', '.join(unknown)}")
    if given.list:
        print("\n".join(f"{m.name:44} {m.breaks}" for m in chosen))
        return 0
    with tempfile.TemporaryDirectory(prefix="ltx-mutants-") as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(given.jobs):
            trees.put(copied(Path(folder) / str(number)))
        with ThreadPoolExecutor(given.jobs) as threads:

            def in_a_copy(mutant: Mutant) -> Outcome | CannotTellError:
                tree = trees.get()
                try:
                    found = outcome(mutant, tree, given.nearest, given.full)
                    print(row(found), flush=True)
                    return found
                except CannotTellError as error:
                    return error
                finally:
                    trees.put(tree)

            try:
                results = list(threads.map(in_a_copy, chosen))
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                for process in list(_running):
                    _end(process)
                raise
        # A kill means something only if the same tests pass without the mutant.
        clean = failure(trees.get(), list(dict.fromkeys(test for m in chosen for test in m.nearest)), SUITE_LIMIT_S)
    outcomes = [found for found in results if isinstance(found, Outcome)]
    survivors = [found for found in outcomes if not found.as_expected]
    killed = sum(bool(found.killer) for found in outcomes)
    print(f"\n{killed} of {len(chosen)} killed, {len(outcomes) - killed} survived, {len(survivors)} of them unmarked")
    for found in survivors:
        print(f"  {found.mutant.name} ({found.mutant.at.where}): {found.mutant.breaks}")
    for error in results:
        if isinstance(error, CannotTellError):
            print(f"\n{error}")
    if clean:
        print(f"\nWithout any mutant {clean} fails: mend it first, for kills by it mean nothing.")
    return 2 if clean or len(outcomes) < len(results) else 1 if survivors else 0
