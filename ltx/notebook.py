"""``%%ltx`` runs a cell of a notebook on the workers of a pool, which the notebook keeps."""

from __future__ import annotations

import argparse
import ast
import keyword
import re
import shlex
import traceback
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from typing import Any
from weakref import ref

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class

from ltx.errors import CallFailedError
from ltx.runtime.messages import Pickler, names_in, stuck
from ltx.runtime.per_rank import PerRank
from ltx.runtime.pool import Pool, cores
from ltx.runtime.shell import Cell, own_or_brought
from ltx.runtime.show import Display


def load_ipython_extension(ipython: Any) -> None:
    """IPython calls this for ``%load_ext ltx`` and ``%reload_ext ltx``; a reload keeps the workers."""
    # a registered magic keeps its pool
    if not isinstance(ipython.magics_manager.registry.get(LtxMagics.__name__), LtxMagics):
        ipython.register_magics(LtxMagics)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise UsageError(f"%%ltx: {message}\n{self.format_usage()}")


def _parser() -> argparse.ArgumentParser:
    count = _kind("a number of workers of at least 1", int, lambda n: n >= 1)
    name = _kind("a name to assign to", str, lambda text: text.isidentifier() and not keyword.iskeyword(text))
    seconds = _kind("seconds above 0", float, lambda s: 0 < s < float("inf"))
    parser = _Parser(prog="%%ltx", add_help=False, description="Run the cell on every worker.")
    parser.add_argument("-h", "--help", action="store_true", help="print this, and run nothing")
    parser.add_argument("-n", type=count, help="number of workers; add --restart to change it")
    parser.add_argument("--restart", action="store_true", help="end the workers, and lose what they keep")
    parser.add_argument("--rank", type=int, help="run on this rank alone")
    parser.add_argument("--out", type=name, help="assign the last value of each rank, a PerRank, to this name")
    parser.add_argument("--in", dest="given", default="", help="names in the notebook whose values to send: model,data")
    parser.add_argument("--timeout", type=seconds, help="seconds that the cell may take")
    return parser


def _kind(what: str, read: Callable[[str], Any], fits: Callable[[Any], bool]) -> Callable[[str], Any]:
    """An ``argparse`` type: `what` errors expect, how to read it, and whether that is one."""

    def parse(text: str) -> Any:
        with suppress(ValueError):
            if fits(value := read(text)):
                return value
        raise argparse.ArgumentTypeError(f"expected {what}, got {text!r}")

    return parse


@magics_class
class LtxMagics(Magics):
    """The magic ``%%ltx``, and its pool of workers."""

    shell: Any

    def __init__(self, shell: Any):
        super().__init__(shell)
        self.pool: Pool | None = None
        self._parts: dict[str, dict[int, ref[Any]]] = {}  # of the values that the workers have got, by name

    @line_cell_magic
    def ltx(self, line: str, cell: str | None = None) -> None:
        """``%%ltx [-n N] [--restart] [--rank k] [--out name] [--in names] [--timeout s]``: run the cell on the workers.

        Workers keep what cells define. What they print or ``display`` appears in the notebook with their rank,
        and so does the value of the last expression, only once if it looks the same on all ranks. The first cell
        starts the workers: `N` of them, by default one for each processor, but at least 2 and at most 4.

        ``%ltx`` alone prints the state of the workers; ``%ltx stop`` ends them.
        """
        if cell is None:
            if (line := line.strip()) not in ("", "stop"):
                raise UsageError(f"%ltx {line}: expected nothing, or `stop`. A cell for the workers begins with %%ltx.")
            if line and self.pool is not None:
                self.pool.close()
                self.pool = None
            print(self.pool or "no workers; the next %%ltx cell starts some")
            return
        asked = (parser := _parser()).parse_args(shlex.split(line))
        if asked.help:
            print(parser.format_help(), end="")
            return
        # All mistakes are found before workers end or start.
        size = asked.n or (len(self.pool) if self.pool is not None else min(4, max(2, cores())))
        if asked.rank is not None and not 0 <= asked.rank < size:
            raise UsageError(f"%%ltx --rank {asked.rank}: there are the ranks 0 to {size - 1}.")
        if asked.rank is not None and asked.out is not None:
            raise UsageError(
                f"%%ltx --rank {asked.rank} --out {asked.out}: --out takes a value of every rank. Leave --rank out and "
                f"take {asked.out}.rank({asked.rank})."
            )
        forced = [name for name in asked.given.split(",") if name]
        missing = [name for name in forced if name not in self.shell.user_ns]
        if missing:
            raise UsageError(f"%%ltx --in: the notebook has no {', '.join(map(repr, missing))}.")
        # Not from execution_count, which is one ahead while a cell runs.
        name = f"Cell In[{len(self.shell.history_manager.input_hist_parsed) - 1}]"
        # The magic is the cell's line 1, and IPython drops blank lines after it: both are added for the line numbers.
        source = "\n" * (1 + len(cell) - len(cell.lstrip("\n"))) + self.shell.transform_cell(cell)
        try:
            code = compile(source, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        except SyntaxError as error:
            raise UsageError("".join(traceback.format_exception_only(error)).rstrip()) from None
        ranks = range(size) if asked.rank is None else [asked.rank]
        asks = None
        if self.pool is not None and not asked.restart and size == len(self.pool):
            pool = self.pool
            asks = lambda names: pool._call(ranks, own_or_brought, (names,), {}, None)  # noqa: E731
        given = self._given(forced, *names_in(code), asks)
        pool, call = self._pool(size, asked.restart), Cell(source, name, asked.out is not None, self.shell.user_ns)
        try:
            values = pool._call(ranks, call, (given,), {}, asked.timeout)
        except CallFailedError as error:  # of a name that only the notebook has: everybody's first mistake
            found = re.fullmatch(r"name '(\w+)' is not defined", str(error.__cause__))
            if (lacks := found and found[1]) in self.shell.user_ns:
                error.args = (
                    f"{error}\n\n{lacks!r} is defined in the notebook, not on the workers. A cell brings the names "
                    "that it uses, but none that it assigns, or that only a magic or a string has: "
                    f"`%%ltx --in {lacks}` sends it.",
                )
            raise
        if asked.out is not None:
            self.shell.user_ns[asked.out] = PerRank(values)
            return
        shown: dict[Any, Display] = {r: value for r, value in zip(ranks, values, strict=True) if value is not None}
        if len(shown) == size and len({str(value) for value in shown.values()}) == 1:
            shown = {None: next(iter(shown.values()))}  # only once, as all look the same
        for rank, value in shown.items():
            value.shown(rank, size, {})

    def _given(self, forced: list[str], used: set[str], assigned: set[str], asks: Any) -> dict[str, tuple[str, Any]]:
        """What a cell brings along, with digests: names `forced`, and those that a worker lacks of those that it has
        `used`, or functions use, but not `assigned`. `asks`: :func:`own_or_brought` of the workers; None for new ones.
        """
        given, seen, main, parts = {}, {*assigned}, self.shell.user_ns, dict[str, dict[int, ref[Any]]]()
        names = [*forced, *sorted(used & main.keys() - {*forced})]
        while names:
            seen |= {*names}
            has = [{}] if asks is None else asks(names)
            after: set[str] = set()
            for name in names:
                if name not in forced and all(there.get(name) == "" for there in has):
                    continue
                value = main[name]
                try:
                    found = (pickled := Pickler(main)).digest(value)
                except Exception as error:
                    why = f" --in {name}" if name in forced else f": the cell uses {name!r} of the notebook"
                    what = f"a {type(value).__name__} can't be sent to the workers: {error}{stuck(value)}"
                    raise UsageError(f"%%ltx{why}: {what}. Make one in the cell.") from None
                after |= pickled.uses
                if name in forced or any(there.get(name) not in ("", found) for there in has):
                    given[name], parts[name] = ("" if name in forced else found, value), pickled.parts
            names = sorted(after & main.keys() - seen)
        for name, other in product(given, self._parts.keys() - given.keys() if asks else ()):
            both = [self._parts[other][key]() for key in parts[name].keys() & self._parts[other].keys()]
            if any(part is not None for part in both) and any(there.keys() for there in asks([other])):
                raise UsageError(
                    f"%%ltx: {name!r} and {other!r} share a {type(both[0]).__name__}, and {other!r} came to the "
                    f"workers in an earlier cell: {name!r} would have a copy of its own. Make {name!r} in the cell, of "
                    f"the workers' {other!r}; or bring the notebook's together: `%%ltx --in {other},{name}`."
                )
        self._parts = {**(self._parts if asks else {}), **parts}
        return given

    def _pool(self, size: int, restart: bool) -> Pool:
        if self.pool is not None and (restart or size != len(self.pool)):
            if not restart and self.pool.pids:
                raise UsageError(
                    f"%%ltx -n {size}: there are {len(self.pool)} workers, which keep what cells have made. "
                    f"`%%ltx -n {size} --restart` ends them, and starts {size}."
                )
            self.pool.close()
            self.pool = None
        if self.pool is None:
            self.pool = Pool(size, show_output=True)
        return self.pool
