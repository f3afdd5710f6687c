"""Modules that were edited since workers imported them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ltx.errors import WorkerError
from tests.kinds import Ranks

NAME = "ltx_edited_while_it_runs"


@pytest.fixture
def edit(tmp_path: Path, ranks: Ranks) -> Iterator[Callable[..., Any]]:
    """Writes the module, which workers can import, and gives what is called on them: it doesn't travel by value."""
    folder = str(tmp_path)

    def call() -> list[Any]:
        import importlib
        import sys

        if folder not in sys.path:
            sys.path.insert(0, folder)
        return [importlib.import_module(f"{NAME}{end}") for end in ("", "_user")]

    def write(source: str, user: str = "from {} import value\ndef used(): return value()\n") -> Any:
        (tmp_path / f"{NAME}.py").write_text(source)
        (tmp_path / f"{NAME}_user.py").write_text(user.format(NAME))
        return ranks(2).run(lambda: [getattr(m, f)() for m, f in zip(call(), ("value", "used"), strict=True)])

    yield write

    def forget() -> None:
        import sys

        sys.path[:] = [path for path in sys.path if path != folder]
        for name in (NAME, f"{NAME}_user"):
            sys.modules.pop(name, None)

    ranks(2).run(forget)
    assert NAME not in sys.modules


def test_the_new_code_runs(edit: Callable[..., Any]) -> None:
    """Also where another module has taken a function of it by name; also twice within a second, of equal length."""
    for value in (1, 2, 3):
        assert edit(f"def value(): return {value}\n").replicated() == [value, value]


def test_of_two_that_were_edited_the_one_that_is_imported_is_read_first(edit: Callable[..., Any]) -> None:
    """Whatever their order: what the other takes of it, a name that is new or a number, is what it is now."""
    user = "from {} import number\ndef used(): return number\n"
    edit("number = 0\ndef value(): return number\n", user)
    for number in (10, 200):
        assert (
            edit(f"number = {number}\ndef value(): return number\n", f"# {number}\n{user}").replicated() == [number] * 2
        )
    assert edit("number = new = 3\ndef value(): return new\n", user.replace("number", "new")).replicated() == [3, 3]


def test_what_can_not_be_read_is_told_and_mended(edit: Callable[..., Any]) -> None:
    edit("def value(): return 1\n")
    with pytest.raises(WorkerError, match=f"the module '{NAME}' was edited since this worker imported it.*SyntaxError"):
        edit("def value() return 2\n")
    assert edit("def value(): return 3\n").replicated() == [3, 3]


def test_a_folder_that_was_added_since_the_workers_began(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook, after the first call: `sys.path` of the moment counts. What calls add on a worker stays."""

    def note() -> None:
        import sys

        sys.path.append("added on the worker")

    def paths() -> tuple[bool, bool]:
        import sys

        return sys.path[0] == str(tmp_path), "added on the worker" in sys.path

    def forget() -> None:
        import sys

        sys.path.remove("added on the worker")
        sys.modules.pop("ltx_added_later", None)

    pool = ranks(2)
    pool.run(note)
    (tmp_path / "ltx_added_later.py").write_text("def value(): return 7\n")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        import ltx_added_later

        assert pool.run(ltx_added_later.value).replicated() == 7
        assert pool.run(paths).replicated() == (True, True)
    assert pool.run(paths).replicated() == (False, True)
    pool.run(forget)
    sys.modules.pop("ltx_added_later")
