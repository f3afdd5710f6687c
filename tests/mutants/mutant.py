"""A mutant: one plausible defect, seeded into one file of ltx."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    """`old`, which occurs exactly once in `file`, becomes `new`.

    Attributes:
        name: what `python -m tests.mutants NAME` calls it: the package, and what is wrong.
        file: below ltx/.
        old, new: the text, and what replaces it.
        breaks: what goes wrong for a user, in a line.
        tests: pytest's arguments, nearest first: files, or tests of a file, that should fail. All in the fast suite.
        full: why only the full suite kills it; empty if the fast one does.
    """

    name: str
    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]
    full: str = ""

    def applied(self, text: str) -> str:
        """The file's text with the defect in it.

        Raises:
            ValueError: `old` doesn't occur exactly once: the code has changed, and the mutant has to follow.
        """
        if (times := text.count(self.old)) != 1:
            raise ValueError(
                f"mutant {self.name}: its old text occurs {times} times in ltx/{self.file}, expected once. Write what "
                f"stands there now into tests/mutants/: {self.old!r}"
            )
        return text.replace(self.old, self.new)

    def apply(self, tree: Path) -> str:
        """Put the defect into the copy `tree` of the project; gives the text that was there."""
        path = tree / "ltx" / self.file
        text = path.read_text(encoding="utf-8")
        path.write_text(self.applied(text), encoding="utf-8")
        return text
