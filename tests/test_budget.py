"""Lines and files of each room of ltx: ``python -m tests.test_budget`` writes today's, if lower.

The sum only goes down: what one room gains for a new promise, others pay.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

#: So many lines below its figure a room's figure has to follow it.
SLACK = 60

ALL = "all"


class Size(NamedTuple):
    lines: int
    files: int


BUDGET = {
    ".": Size(1944, 10),
    "all": Size(36000, 170),
    "checkpoint": Size(1314, 7),
    "core": Size(1, 1),
    "core/base": Size(2189, 13),
    "core/collectives": Size(2401, 9),
    "core/comm": Size(3113, 14),
    "core/gradients": Size(2364, 9),
    "core/optim": Size(1325, 5),
    "core/ranks": Size(918, 5),
    "core/training": Size(3614, 17),
    "core/transforms": Size(3373, 12),
    "core/world": Size(619, 4),
    "hooks": Size(2587, 14),
    "optim": Size(1516, 8),
    "peers": Size(2156, 12),
    "profile": Size(478, 3),
    "runtime": Size(3107, 13),
    "shared_memory": Size(545, 3),
    "strategies": Size(2433, 11),
}


def sizes(root: Path) -> dict[str, Size]:
    """Of each room below `root`: a folder, or a folder of `core`; files that lie beside them are one."""
    lines, files = Counter[str](), Counter[str]()
    for path in root.rglob("*.py"):
        *folders, _ = path.relative_to(root).parts
        room = "/".join(folders[: 2 if folders[0] == "core" else 1]) if folders else "."
        for each in (room, ALL):
            lines[each] += len(path.read_text(encoding="utf-8").splitlines())
            files[each] += 1
    return {room: Size(lines[room], files[room]) for room in sorted(lines)}


def grown(now: dict[str, Size], budget: dict[str, Size]) -> list[str]:
    """What is above its figure, and by how much."""
    above = []
    for room, size in now.items():
        for what, n, most in zip(Size._fields, size, budget.get(room, Size(0, 0)), strict=True):
            if n > most:
                above.append(f"{room}: {n} {what}, {n - most} more than its {most}")
    return above


def shrunk(now: dict[str, Size], budget: dict[str, Size]) -> list[str]:
    """Whose figure is too high by now."""
    sizes_now = {room: now.get(room, Size(0, 0)) for room in budget}
    return [
        f"{room}: {size.lines} lines, {budget[room].lines - size.lines} fewer than its figure"
        for room, size in sizes_now.items()
        if room not in now or size.lines < budget[room].lines - SLACK
    ]


def lowered(now: dict[str, Size], budget: dict[str, Size]) -> dict[str, Size]:
    """The figures, none of them higher than it was; rooms that are gone have none."""
    return {room: Size(*map(min, budget[room], now[room])) for room in budget if room in now}


def test_no_room_grows() -> None:
    assert not (above := grown(sizes(ROOT / "ltx"), BUDGET)), "\n".join(
        ["ltx has grown. Take lines out where you put some in, or out of a neighbour of theirs.", *above]
    )


def test_figures_go_down() -> None:
    if below := shrunk(sizes(ROOT / "ltx"), BUDGET):
        pytest.skip("; ".join(["ltx has shrunk: python -m tests.test_budget writes the new figures", *below]))


def test_what_is_said_of_rooms(tmp_path: Path) -> None:
    for name, lines in {"a/x.py": 90, "a/b/y.py": 20, "core/comm/z.py": 3, "tree.py": 2}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n" * lines)
    now = sizes(tmp_path)
    assert now == {".": (2, 1), "a": (110, 2), ALL: (115, 4), "core/comm": (3, 1)}
    budget = {".": Size(2, 1), "a": Size(100, 1), ALL: Size(175, 4), "gone": Size(9, 1)}
    assert grown(now, budget) == [
        "a: 110 lines, 10 more than its 100",
        "a: 2 files, 1 more than its 1",
        "core/comm: 3 lines, 3 more than its 0",
        "core/comm: 1 files, 1 more than its 0",
    ]
    assert shrunk(now, budget) == ["gone: 0 lines, 9 fewer than its figure"]
    assert shrunk(now, budget | {ALL: Size(176, 4)})[0] == "all: 115 lines, 61 fewer than its figure"
    assert lowered(now, budget) == {".": (2, 1), "a": (100, 1), ALL: (115, 4)}


def written(text: str, budget: dict[str, Size]) -> str:
    """`text`, this file's, with these figures."""
    rows = "".join(f'    "{room}": Size({size.lines}, {size.files}),\n' for room, size in budget.items())
    return re.sub(r"(?ms)^BUDGET = \{\n.*?^\}", f"BUDGET = {{\n{rows}}}", text, count=1)


def main(arguments: list[str]) -> int:
    """Write today's figures, where they are lower; ``--rooms``: also of rooms that are new."""
    now = sizes(ROOT / "ltx")
    budget = {room: BUDGET.get(room, size) for room, size in now.items()} if "--rooms" in arguments else BUDGET
    path = Path(__file__)
    path.write_text(written(path.read_text(encoding="utf-8"), lowered(now, budget)), encoding="utf-8")
    print("\n".join(above := grown(now, budget)))
    return bool(above)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
