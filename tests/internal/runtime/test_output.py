"""What workers write, and what the driver makes of it: nothing is lost, and nothing stands in the way of a call."""

from __future__ import annotations

import io
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch

import ltx
from ltx import Pool
from ltx.errors import CallFailedError
from ltx.runtime.show import Line, Printed, Reached, Writer
from ltx.runtime.worker_group import Output, open_pipe
from tests.kinds import Ranks
from tests.train_on import said

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
                ltx.show(f"shown by child {child}")
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
    ltx.show("to nobody")
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


# The bar of progress on a terminal: one line, written over, as far as the slowest rank is.
def screen(written: str) -> list[str]:
    """What a terminal shows of `written`: lines, where a carriage return goes back and an erasure empties."""
    lines = [""]
    for part in re.split(r"(\n|\r\x1b\[K)", written):
        if part == "\n":
            lines.append("")
        elif part == "\r\x1b[K":
            lines[-1] = ""
        else:
            lines[-1] += part
    return lines


class Terminal(io.StringIO):
    """Says that it is one. A real one hands over what is written in its own time."""

    def isatty(self) -> bool:
        return True


@contextmanager
def terminal() -> Iterator[Callable[[], str]]:
    """``sys.stderr`` is one; gives what reads what has been written there since the last time."""
    stream = Terminal()

    def read() -> str:
        written = stream.getvalue()
        stream.seek(0)
        stream.truncate()
        return written

    with redirect_stderr(stream):
        yield read


def test_a_line_that_is_written_over() -> None:
    bars, drawn = dict[Any, Any](), []
    with terminal() as read:
        for rank, done, finished in [(0, 2, False), (1, 1, False), (0, 4, True), (1, 4, True)]:
            Reached("steps", done, 4, finished).shown(rank, 2, bars)
            drawn.append(read())
    shown = screen("".join(drawn))
    assert re.fullmatch(r"steps \|█{30}\| 4/4 [\d.]+/s", shown[0]), shown
    assert shown[1:] == [""], "the cursor is below it"
    assert "0/4" in drawn[0], "rank 1 hasn't begun"
    assert re.search(r"1/4 [\d.]+/s, rank 1 last$", drawn[1])
    assert all("\n" not in text for text in drawn[:-1])


def fail_at_the_second() -> None:
    for step in ltx.progress(range(3), label="steps"):
        1 // (1 - step)


def test_it_ends_with_a_loop_that_raises() -> None:
    with terminal() as read:
        said(ZeroDivisionError, fail_at_the_second)
        shown = screen(read())
    assert re.fullmatch(r"steps \|█{10} {20}\| 1/3 [\d.]+/s", shown[0]), shown
    assert shown[1:] == [""]


def test_a_log_gets_it_once(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w") as log, redirect_stderr(log):
        assert list(ltx.progress(iter("abc"), label="letters")) == ["a", "b", "c"]
    assert re.fullmatch(r"letters 3 [\d.]+/s\n", (tmp_path / "log").read_text())


def test_a_bar_in_a_bar_is_below_it_and_goes() -> None:
    drawn = []
    with terminal() as read:
        for _ in (outer := ltx.progress(range(2), label="epochs")):
            for step in (inner := ltx.progress(range(2), label="steps")):
                inner.set_postfix(loss=0.5 * step, kind="warm")
            drawn.append(read())
            outer.set_postfix(step=step)
        drawn.append(read())
    up = "\x1b[A"
    assert re.fullmatch(
        r"\r\x1b\[Kepochs \| {30}\| 0/2 0.0/s\n\r\x1b\[Ksteps \| {30}\| 0/2 0.0/s\x1b\[A",
        drawn[0].partition(up)[0] + up,
    ), drawn[0]
    assert drawn[0].endswith(f"\n\r\x1b[K{up}"), "it goes when it is done"
    last = screen(drawn[-1].rpartition(up)[2])
    assert re.fullmatch(r"epochs \|█{30}\| 2/2 [\d.]+/s, step=1", last[0]), last
    with terminal() as read:
        for step in (bar := ltx.progress(range(2), label="steps")):
            bar.set_postfix(loss=torch.tensor(0.5 * step), kind="warm")
        assert screen(read())[0].endswith(", loss=0.5, kind=warm")


def told(losses: dict[int, list[float]]) -> str:
    """What a notebook shows of ranks that have set these losses, one a step."""
    bars = dict[Any, Any]()
    with terminal():
        for rank, values in losses.items():
            for done, loss in enumerate(values):
                Reached("steps", done, 9, False, 0, {"loss": loss, "wait": "3 <ms"}, live=True).shown(rank, 2, bars)
    return str(bars["steps", 0]._repr_html_())


def test_a_table_of_ranks_and_the_curves_of_what_they_set_first() -> None:
    html = told({0: [2.0, math.nan, 1.5, 1.0], 1: [3.0, math.inf, 2.0]})
    assert re.search(r"^<div><pre>steps .* 2/9 [\d.]+/s, rank 1 last, loss=2, wait=3 &lt;ms</pre><table>", html), html
    assert re.findall(r"<td [^>]*>(.*?)</td>", html) == ["0", "3", "1", "3 &lt;ms", "1", "2", "2", "3 &lt;ms"]
    lines = re.findall(r"points='([^']*)'", html)
    assert lines == ["0.0,40.0 200.0,60.0 300.0,80.0", "0.0,0.0 200.0,40.0"], "steps 0 to 3 by losses 3 to 1"
    assert [re.sub("<.*?>", "", text) for text in re.findall("<text .*?</text>", html)] == ["1", "3", "1", "0", "3"]
    assert "<svg" not in told({0: [math.nan]})
    assert "0.0,0.0" in told({0: [2.0]}), "one point is a curve too"


def test_a_long_curve_has_few_points() -> None:
    (line,) = re.findall(r"points='([^']*)'", told({0: [1.0 + n for n in range(5000)]}))[:1]
    points = [tuple(map(float, point.split(","))) for point in line.split()]
    assert 100 < len(points) <= 400
    assert points[0] == (0, 80)
    assert points[-1][0] > 298
    assert all(abs(y - (80 - 80 / 300 * x)) < 0.3 for x, y in points)


def test_a_live_bar_says_how_long_its_rank_has_waited(ranks: Ranks) -> None:
    def waits(steps: int) -> float:
        bar = ltx.progress(range(steps), live=True)
        for _ in bar:
            time.sleep(0.5 * int(ltx.axis_index()))
            ltx.psum(torch.ones(1))
        number, unit = str(bar._besides["wait"]).split()
        return float(number) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[unit]

    first, late = ranks(2).run(waits, 2)
    assert first > 0.1
    assert late < first
