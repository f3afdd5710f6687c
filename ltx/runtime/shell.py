"""IPython's own shell on a worker of a notebook, which displays what cells and functions display on the worker."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import IPython
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.inputtransformer2 import leading_empty_lines
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.pylabtools import print_figure
from traitlets import Type
from traitlets.config import Config

from ltx.errors import UnsupportedError
from ltx.runtime import show
from ltx.runtime.messages import Pickler

_IPYTHON = Path(IPython.__file__).parent


@dataclass(frozen=True, repr=False)
class Cell:
    """The cell `source`, as the notebook's IPython has transformed it. `main`: there, the notebook's globals."""

    source: str
    name: str
    wants_value: bool
    main: dict[str, Any] | None = None

    def __reduce__(self) -> Any:
        return Cell, (self.source, self.name, self.wants_value)

    def __call__(self, given: Mapping[str, tuple[str, Any]]) -> Any:
        """Run the cell in this worker's ``__main__``, with the notebook's values that are `given`, by name, and their
        digests; "" to take one whatever this worker has. Returns the last expression's value, or Display; or None.
        """
        shell, has = started(), own_or_brought(given)
        setattr(shell.compile, "get_code_name", lambda *_: self.name)  # noqa: B010
        taken = {name for name, (told, _) in given.items() if not told or has.get(name, "none") not in ("", told)}
        for name in taken & has.keys():  # all of them before any is replaced
            if given[name][0] and _digest(shell.user_ns[name]) != shell.arrived[name]:
                raise UnsupportedError(
                    f"{name!r} has changed in the notebook, and on the workers since it came: the cell isn't run, "
                    "since what cells have made of it would be lost. To take the notebook's: "
                    f"`%%ltx --in {name}`. To keep the workers': `{name} = {name}` in a cell."
                )
        for name in taken:
            shell.user_ns[name], shell.brought[name] = given[name][1], given[name]
            shell.arrived[name] = _digest(given[name][1])
        shell.source, shell.wants_value, shell.look = self.source, self.wants_value, None
        result = shell.run_cell(self.source, store_history=False)  # type: ignore[no-untyped-call]
        shell.raise_what_was_raised()
        return result.result if self.wants_value else shell.look

    def __repr__(self) -> str:
        return self.name


class _ByName(Pickler):
    """Classes that came from the notebook, by name: cloudpickle makes their contents anew when they come once more."""

    def persistent_id(self, obj: Any) -> str | None:
        return obj.__qualname__ if isinstance(obj, type) and obj.__module__ == "__main__" else None


def _digest(value: Any) -> str:
    with suppress(Exception):  # what can't be pickled any more, such as a loader in use, has changed
        return _ByName().digest(value)
    return ""


def own_or_brought(names: Iterable[str]) -> dict[str, str]:
    """Of those of `names` that this worker has: the digest of the notebook's value; "" for what cells have set here."""
    shell = started()
    there = {name: shell.user_ns[name] for name in names if name in shell.user_ns}
    brought = {name: shell.brought.get(name, ("", None)) for name in there}
    return {name: digest if there[name] is value else "" for name, (digest, value) in brought.items()}


@cache
def started() -> RankShell:
    """This worker's shell, the one instance that IPython allows a process."""
    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    warnings.filterwarnings("ignore", "To exit: use 'exit'")
    sys.modules["tqdm.notebook"] = sys.modules["tqdm.autonotebook"] = _Bars("tqdm.notebook")
    if InteractiveShell.initialized():  # this worker is a fork of the notebook, and has the notebook's shell
        type(InteractiveShell.instance()).clear_instance()
    main = sys.modules["__main__"]
    config = Config({"HistoryManager": {"enabled": False}})
    shell: RankShell = RankShell.instance(config=config, user_module=main, user_ns=vars(main))
    shell.builtin_trap.activate()  # functions in imported modules may call display() and get_ipython() too
    # The notebook has removed leading lines already; removing more would shift the line numbers of tracebacks.
    shell.input_transformer_manager.cleanup_transforms.remove(leading_empty_lines)
    assert shell.display_formatter is not None
    png = shell.display_formatter.formatters["image/png"]
    png.for_type_by_name("matplotlib.figure", "Figure", print_figure)  # with any matplotlib backend
    for name in ("pip", "conda", "mamba", "micromamba", "uv"):
        shell.magics_manager.magics["line"][name] = _refuse
    return shell


def _refuse(line: str) -> None:
    raise UnsupportedError(
        "%pip and its like would install on every rank at once. Write it in a cell without %%ltx; workers that start "
        "after that have it."
    )


def finish() -> None:
    """After a call: draw and close the figures that it has left open, as IPython does after a cell."""
    shell = IPython.get_ipython()
    if isinstance(shell, RankShell):
        shell.events.trigger("post_execute")
        shell.raise_what_was_raised()


class _Publisher(DisplayPublisher):
    def publish(self, data: Any, metadata: Any = None, *_: Any, **sent: Any) -> None:
        name = (sent.get("transient") or {}).get("display_id")
        show.deliver(show.Display(data, metadata or {}, name, sent.get("update", False)))

    def clear_output(self, wait: bool = False) -> None:
        show.deliver(show.Cleared(wait))


class _Hook(DisplayHook):
    """Keeps the display of a cell's last value for the driver, which shows equal displays of all ranks once."""

    shell: RankShell

    def quiet(self) -> bool:
        return not self.shell.wants_value and bool(DisplayHook.semicolon_at_end_of_expression(self.shell.source))

    def write_output_prompt(self) -> None:
        pass

    def write_format_data(self, format_dict: dict[str, Any], md_dict: dict[str, Any] | None = None) -> None:
        self.shell.look = show.Display(format_dict, md_dict or {})

    def log_output(self, format_dict: dict[str, Any]) -> None:
        pass


class RankShell(InteractiveShell):
    """IPython's shell for cells from the driver; their exceptions are raised there."""

    display_pub_class = Type(_Publisher)
    displayhook_class = Type(_Hook)
    source, wants_value = "", False  # both are those of the cell that runs
    brought: ClassVar[dict[str, tuple[str, Any]]] = {}  # by name: the notebook's values that cells brought, and digests
    arrived: ClassVar[dict[str, str]] = {}  # by name: their digests here, as they came
    look: show.Display | None = None  # the display of the cell's last expression
    raised: BaseException | None = None
    system = InteractiveShell.system_raw  # commands run without a pseudo-terminal

    def enable_gui(self, gui: Any = None) -> None:
        """Nothing: a worker has no GUI, but ``%matplotlib inline`` calls this."""

    def showtraceback(self, exc_tuple: Any = None, *_: Any, **__: Any) -> None:
        """Keep the first exception of the cell, or of drawing its figures."""
        self.raised = self.raised or (exc_tuple or sys.exc_info())[1]

    def raise_what_was_raised(self) -> None:
        error, self.raised = self.raised, None
        if error is not None:
            inner = error.__traceback__
            while inner is not None and _IPYTHON in Path(inner.tb_frame.f_code.co_filename).parents:
                inner = inner.tb_next
            raise error.with_traceback(inner or error.__traceback__)


class _Bars(ModuleType):
    """tqdm.notebook on a worker, which has no kernel for widgets: each bar is a text display instead."""

    WARN_NOIPYW, IProgress = "", object

    def __getattr__(self, name: str) -> Any:
        if name in ("tqdm", "tqdm_notebook"):
            return _bar()
        if name in ("trange", "tnrange"):
            return lambda *args, **kwargs: _bar()(range(*args), **kwargs)
        # Raise at once: pickle and inspect ask every module for names, and that mustn't import tqdm.
        raise AttributeError(f"on workers {self.__name__} has tqdm and trange, not {name!r}")


@cache
def _bar() -> Any:
    from tqdm.std import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        """tqdm's bar, which is drawn into a display of its own."""

        def __init__(self, *args: Any, **kwargs: Any):
            kwargs.pop("display", None)  # an argument that only tqdm.notebook's bar has
            super().__init__(*args, **{**kwargs, "file": io.StringIO()})

        @staticmethod
        def status_printer(file: Any) -> Callable[[str], None]:
            place = None

            def draw(text: str) -> None:
                nonlocal place
                place = show.put(place, {"text/plain": text})

            return draw

        def moveto(self, n: int) -> None:
            pass

    return Bar
