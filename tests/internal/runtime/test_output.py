"""What workers write, and what the driver makes of it: nothing is lost, and nothing stands in the way of a call."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest

from ltx import Pool
from ltx.errors import CallFailedError
from ltx.runtime.show import Line, Printed, Writer
from ltx.runtime.worker_group import Output, open_pipe

ROOT = Path(__file__).parents[3]


def shown(stream: str, *pieces: bytes) -> None:
    reading, writing = open_pipe()
    output = Output()
    output.sources[reading] = (0, stream)
    for piece in pieces:
        os.write(writing, piece)
        output.show()
    os.close(writing)
    output.show()
    output.show(finish=True)
    output.close()


def test_the_last_words_of_a_process_that_ends_in_the_middle_of_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    shown("stderr", b"a line\nlast words")
    assert capsys.readouterr().err == "[rank 0] a line\n[rank 0] last words\n"


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("0a 1a 1b 0b", "[all] a [all] b"),
        ("0a 0b 1b 1c", "[rank 0] a [all] b [rank 1] c"),
        ("0a 0b 1b 1a", "[rank 0] a [all] b [rank 1] a"),
        ("0a 0a 1a", "[all] a [rank 0] a"),
    ],
)
def test_a_line_of_all_ranks_is_shown_once(printed: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(2)
    for rank, line in printed.split():
        output.hold(int(rank), "stdout", line)
        output.show()
    output.show(finish=True)
    assert capsys.readouterr().out.split() == shown.split()
    assert not any(output._counts), "nothing is kept"


@pytest.mark.parametrize("wait", [True, False])
def test_a_line_waits_for_its_equals_but_not_for_long(wait: bool, capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(2)
    output.hold(0, "stdout", "a")
    output.show(wait=wait)
    assert capsys.readouterr().out == ("" if wait else "[rank 0] a\n")
    time.sleep(output.due_s())
    output.show()
    assert capsys.readouterr().out == ("[rank 0] a\n" if wait else "")


@pytest.mark.parametrize("before", [Printed("stdout", "plain\n"), Line("stdout", "Grü")])
def test_letters_that_the_drivers_encoding_has_not(before: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, drawn = io.BytesIO(), dict[Any, Any]()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    before.shown(0, 1, drawn)
    Printed("stdout", "Grüße, \udcff\n").shown(0, 1, drawn)
    assert raw.getvalue().splitlines()[-1] == rb"[rank 0] Gr\xfc\xdfe, \udcff"


def test_threads_that_write_at_once() -> None:
    delivered: list[Any] = []
    writer = Writer("stdout", 1, delivered.append)
    other = threading.Thread(target=writer.write, args=("other\n",))

    class Meanwhile(str):
        """The other thread begins to write when this is put behind what there is."""

        def __radd__(self, begun: str) -> str:
            other.start()
            other.join(0.2)  # it can't write yet
            return begun + str(self)

    writer.write("begun ")
    writer.write(Meanwhile("and ended\n"))
    other.join()
    assert "".join(message.text for message in delivered) == "begun and ended\nother\n"


@pytest.mark.full
def test_forks_of_a_worker_write_beside_it(capfd: pytest.CaptureFixture[str]) -> None:
    long = 30_000  # a message to the driver takes several writes

    def speak() -> int:
        print("begun, ", end="")
        children = []
        for child in range(3):
            pid = os.fork()
            if pid == 0:
                for _ in range(100):
                    print("c" * long)
                print(f"shown by child {child}", flush=True)
                print("the end", end="", flush=True)
                os._exit(0)
            children.append(pid)
        for _ in range(100):
            print("p" * long)
        return sum(os.waitpid(pid, 0)[1] for pid in children)

    with Pool(1, show_output=True) as pool:
        assert pool.run(speak)[0] == 0
    out = capfd.readouterr().out
    assert out.count("c") == 300 * long + 3  # long lines of several children mix, as in any pipe
    assert (out.count("p" * long), out.count("begun, "), out.count("the end")) == (100, 1, 3)
    assert all(f"shown by child {child}" in out for child in range(3))


@pytest.fixture
def pids(tmp_path: Path) -> Iterator[Path]:
    """A file for the id of a process that is to be ended with the test."""
    file = tmp_path / "pid"
    yield file
    os.kill(int(file.read_text()), signal.SIGKILL)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["fork", "command"])
def test_the_end_of_a_worker_whose_children_live_on(kind: str, pids: Path) -> None:
    def end() -> None:
        if kind == "fork":
            child = os.fork()
            if child == 0:
                time.sleep(100)
        else:
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], close_fds=False).pid
        pids.write_text(str(child))
        os.kill(os.getpid(), signal.SIGKILL)

    with Pool(1) as pool, pytest.raises(CallFailedError, match=r"^rank 0 of 1 was killed by SIGKILL"):
        pool.run(end)


@pytest.mark.full
@pytest.mark.parametrize("shows", [False, True])
def test_a_process_that_was_started_without_stdout(shows: bool) -> None:
    script = f"""
import sys, ltx
def speak():
    print("to nobody")
    return sys.stdout is None
with ltx.Pool(1, show_output={shows}) as pool:
    print(pool.run(speak), file=sys.stderr)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = [sys.executable, "-c", script]
    ended = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *run], env=environment, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (0, f"PerRank(rank 0: {not shows})\n")


def test_letters_that_come_in_two_parts(capsys: pytest.CaptureFixture[str]) -> None:
    shown("stdout", *(bytes([byte]) for byte in "Grüße, 世界".encode()))
    assert capsys.readouterr().out == "[rank 0] Grüße, 世界\n"


class Terminal(io.StringIO):
    """Says that it is one. A real one hands over what is written in its own time."""

    def isatty(self) -> bool:
        return True


def test_a_line_that_is_written_over_on_a_terminal() -> None:
    drawn = dict[Any, Any]()
    with redirect_stderr(Terminal()) as stream:
        for message in (Line("stderr", "1 of 2"), Line("stderr", "2 of 2"), Printed("stderr", "2 of 2\nafter\n")):
            message.shown(0, 1, drawn)
    lines = [line.rpartition("\r\x1b[K")[2] for line in stream.getvalue().split("\n")]
    assert lines == ["[rank 0] 2 of 2", "[rank 0] after", ""]
