"""A mutant: one plausible defect, seeded into one function of ltx, in whichever file that is."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

# What Python code is made of, as far as it takes to compare it whatever its line breaks: strings, words, signs.
_TOKEN = re.compile(
    r'[rbuf]{0,2}(?:"""(?s:.*?)"""|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\')|\w+|#[^\n]*|[^\w\s]', re.IGNORECASE
)


class Token(NamedTuple):
    """A piece of code, and where in the text it stands."""

    text: str
    start: int
    end: int


def tokens(text: str) -> list[Token]:
    """The code of `text` without comments, and without commas that stand before a bracket that closes."""
    found = [Token(m[0], m.start(), m.end()) for m in _TOKEN.finditer(text) if not m[0].startswith("#")]
    after = [*found[1:], Token("", 0, 0)]
    return [x for x, following in zip(found, after, strict=True) if x.text != "," or following.text not in (*")]}",)]


class Place(NamedTuple):
    """Where a definition stands: its file, and its characters there."""

    path: Path
    start: int
    end: int


@lru_cache
def definitions(root: Path) -> dict[str, list[Place]]:
    """All functions, classes and variables below `root` by their qualified names, such as ``ProcessSchedule.start``."""
    found: dict[str, list[Place]] = {}
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        begins = [0]
        for line in text.encode().splitlines(keepends=True):
            begins.append(begins[-1] + len(line.decode()))

        def collect(node: ast.AST, prefix: str, path: Path = path, begins: list[int] = begins) -> None:
            for child in ast.iter_child_nodes(node):
                names, above = named(child, top=not prefix), prefix
                for name in names:
                    first = min([child.lineno, *(d.lineno for d in getattr(child, "decorator_list", ()))])  # type: ignore[attr-defined]
                    place = Place(path, begins[first - 1], begins[child.end_lineno])  # type: ignore[attr-defined]
                    found.setdefault(prefix + name, []).append(place)
                    above = f"{prefix}{name}."
                collect(child, above)

        collect(ast.parse(text), "")
    return found


def named(node: ast.AST, top: bool) -> list[str]:
    """What a statement defines. A call at the `top` of a file is called as in ``add_rule psum``."""
    if top and isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        said = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        return [f"{ast.unparse(node.value.func)} {said[0]}"] if said else []
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


class At(NamedTuple):
    """`old`, which occurs exactly once in what `where` names, becomes `new`.

    Attributes:
        where: the qualified name of a function, class or variable, without its module: that may change.
        old, new: the code, and what replaces it; line breaks and comments don't count.
    """

    where: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """A change of the code.

    Attributes:
        says: "NAME -> what goes wrong for a user"; the name says the room, and what is wrong.
        at: what is changed.
        tests: pytest's argument, or some, nearest first: files, or tests of a file, that should fail. All in the fast
            suite.
        full: why only the full suite kills it; empty if the fast one does.
    """

    says: str
    at: At
    tests: str | tuple[str, ...]
    full: str = ""

    @property
    def name(self) -> str:
        """What `python -m tests.mutants NAME` calls it."""
        return self.says.partition(" -> ")[0]

    @property
    def breaks(self) -> str:
        return self.says.partition(" -> ")[2]

    @property
    def nearest(self) -> tuple[str, ...]:
        return (self.tests,) if isinstance(self.tests, str) else self.tests

    def place(self, root: Path) -> Place:
        """Where `old` stands below `root`.

        Raises:
            ValueError: not in exactly one place: the code has changed, and the mutant has to follow.
        """
        where, old, _ = self.at
        wanted = [token.text for token in tokens(old)]
        found = set()
        for path, start, end in definitions(root).get(where, ()):
            code = tokens(path.read_text(encoding="utf-8")[start:end])
            for i in range(len(code) - len(wanted) + 1):
                if [token.text for token in code[i : i + len(wanted)]] == wanted:
                    found.add(Place(path, start + code[i].start, start + code[i + len(wanted) - 1].end))
        if len(found) != 1:
            files = ", ".join(sorted({str(p.path.relative_to(root)) for p in definitions(root).get(where, ())}))
            raise ValueError(
                f"mutant {self.name}: its old code occurs {len(found)} times in {where} ({files or 'no file'}), "
                f"expected once. Write what stands there now into tests/mutants/: {old!r}"
            )
        return found.pop()

    def applied(self, root: Path) -> tuple[Path, str]:
        """The file below `root` that it changes, and its text with the defect in it."""
        path, start, end = self.place(root)
        text = path.read_text(encoding="utf-8")
        line = text[text.rfind("\n", 0, start) + 1 :]
        indent = line[: len(line) - len(line.lstrip())]
        return path, text[:start] + self.at.new.replace("\n", f"\n{indent}") + text[end:]

    def apply(self, tree: Path) -> tuple[Path, str]:
        """Put the defect into the copy `tree` of the project; gives the file, and the text that was there."""
        path, text = self.applied(tree / "ltx")
        before = path.read_text(encoding="utf-8")
        path.write_text(text, encoding="utf-8")
        return path, before
