"""The messages between a pool's driver and its workers, and how they travel.

The driver sends one :class:`Setup`, then calls; the worker answers each with a :class:`Result` or a :class:`Failure`.
Meanwhile it may send things to show: objects with a method ``shown(rank, size, drawn)``, see :mod:`ltx.runtime.show`.

A message is pickles and their buffers: the memory of tensors and arrays. What is larger than :data:`INLINE_BYTES` goes
through anonymous shared memory (``memfd_create``: no file, freed with its last user), which the receiver maps copy on
write. So few bytes go through the socket that sending never blocks, even if the receiver has been stopped.

Functions and classes are sent by value (cloudpickle) if they belong to the called function's own module, which may have
changed since a worker imported it, or to a module that the workers can't import. Others are imported by the workers,
and reloaded by :class:`Modules` after an edit. Of cells the source is sent too, for tracebacks.
"""

from __future__ import annotations

import ast
import dis
import functools
import hashlib
import importlib.util
import inspect
import io
import linecache
import mmap
import os
import pickle
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import cloudpickle
import torch

from ltx.core.base.arguments import name_of
from ltx.errors import WorkerError
from ltx.peers.pickling import TensorPickler
from ltx.runtime.show import ipython
from ltx.runtime.tracebacks import is_installed


class Setup(NamedTuple):
    """The settings that a worker takes over from the driver before its first call."""

    search_path: list[str]
    shows_output: bool
    in_notebook: bool


class Rendezvous(NamedTuple):
    """The port of the store that rank 0's worker hosts: rank 0 tells the driver, the driver tells the others."""

    port: int


class Ready:
    """The worker's world is up."""


class Call(NamedTuple):
    """Do a call. The function, ``(args, kwargs)`` and sources of cells follow in the message, but for a fork."""

    number: int
    search_path: Sequence[str] = ()  # the driver's ``sys.path`` at the call


class Cancel(NamedTuple):
    """Give call `number` up: the worker raises KeyboardInterrupt in it."""

    number: int


class At(NamedTuple):
    """Where a call was when it was asked to give up. Sent before the call's answer, in case it never answers."""

    where: str
    raised: bool | None = None  # after a wait: whether KeyboardInterrupt was raised in the call


class Renew(NamedTuple):
    """Take the world down and make a new one, the `number`-th: a call failed in the old one."""

    number: int


class Others(NamedTuple):
    """To a worker that isn't in call `number`, or has answered it: others are busy with it for long. 0: no longer."""

    number: int


class Stop:
    """The worker has to end."""


class Idle(str):
    """How a worker's process ended while it had no call to do, in words."""


class Result(NamedTuple):
    """A call returned."""

    value: Any
    in_world: bool = True  # the call hasn't shut the world down, nor has an exception ended it


class Failure(NamedTuple):
    """A call raised. The fields are text, so that they arrive whatever the exception holds."""

    type_name: str
    message: str
    traceback_text: str  # the user's frames, without ltx's and the worker's
    at_s: float  # on the monotonic clock, which all processes of a machine share: the driver compares the ranks' times
    where: str = ""  # where it was raised: the innermost frame, in words
    pickled: bytes | None = None  # the exception itself, if it can be pickled
    cancelled: bool = False  # whether the call gave up because the driver asked for it
    in_world: bool = False  # whether the call had sent nothing: if all ranks raise so, the world goes on


INLINE_BYTES = 1 << 16  #: a message whose buffers have more bytes than this sends them through shared memory
_ALIGNMENT = 64


class Message:
    """Pickled objects and their buffers; it can be sent more than once. OSError: there is no shared memory left."""

    def __init__(self, pickled: bytes, buffers: Sequence[memoryview] = ()):
        self.pickled = pickled
        self._views = [*buffers, memoryview(pickled)]
        large = sum(view.nbytes for view in self._views) > INLINE_BYTES
        self._shared = _written(self._views) if large and hasattr(os, "memfd_create") else None

    def send(self, connection: Connection) -> None:
        """Write the message to `connection`. Raises OSError if the other end is closed."""
        if self._shared is None:
            connection.send([bytearray(view) for view in self._views])
        else:
            connection.send([view.nbytes for view in self._views])
            reduction.send_handle(connection, self._shared.fileno(), 0)

    def close(self) -> None:
        """Close the shared memory; receivers keep their mappings of it."""
        if self._shared is not None:
            self._shared.close()


def pack(value: Any) -> Message:
    """`value` as a message."""
    pickler = Pickler()
    pickler.dump(value)
    return pickler.message()


def names_in(code: CodeType) -> tuple[set[str], set[str]]:
    """The global names that `code` uses, functions in it included, but doesn't assign; those that it assigns."""
    done = [(step.opname, step.argval) for step in dis.get_instructions(code)]
    loaded = {name for kind, name in done if kind in ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")}
    assigned = {name for kind, name in done if kind in ("STORE_NAME", "DELETE_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")}
    inner = set[str]().union(*(names_in(each)[0] for each in code.co_consts if isinstance(each, CodeType)))
    # what a class body assigns are no globals of its methods
    return (loaded | inner) - assigned if code.co_name == "<module>" else (loaded - assigned) | inner, assigned


def receive(connection: Connection) -> Callable[[], Any]:
    """Read a message; calls of the result unpickle its objects. Raises EOFError or OSError if the sender is gone."""
    buffers: list[Any] = connection.recv()
    if isinstance(buffers[-1], int):  # the sizes of buffers in shared memory
        sizes, handle = buffers, reduction.recv_handle(connection)
        offsets = _offsets(sizes)
        try:
            whole = memoryview(mmap.mmap(handle, offsets[-1], access=mmap.ACCESS_COPY))
        finally:
            os.close(handle)
        buffers = [whole[offset : offset + size] for offset, size in zip(offsets, sizes, strict=False)]
    return pickle.Unpickler(io.BytesIO(buffers.pop()), buffers=buffers).load


class Pickler(TensorPickler):
    """cloudpickle's pickler; the memory of tensors and arrays becomes buffers of the message. `main`: a notebook's
    globals, in whose functions' place the receiver's are; `uses`: names that they use. `parts`: modules and parameters.
    """

    def __init__(self, main: dict[str, Any] | None = None) -> None:
        self._main, self.uses, self.parts = main, set[str](), dict[int, weakref.ref[Any]]()
        self._stream, self._buffers = io.BytesIO(), list[memoryview]()
        super().__init__(self._stream, protocol=5, buffer_callback=lambda buffer: self._buffers.append(buffer.raw()))

    def reducer_override(self, obj: Any) -> Any:
        """A storage becomes one buffer, also if several tensors share it."""
        if isinstance(obj, torch.nn.Module | torch.nn.Parameter):
            self.parts[id(obj)] = weakref.ref(obj)
        if isinstance(obj, torch.storage.TypedStorage):
            typed = functools.partial(torch.storage.TypedStorage, dtype=obj.dtype, _internal=True)
            return functools.partial(typed, wrap_storage=obj._untyped_storage), ()
        if isinstance(obj, torch.UntypedStorage) and obj.device.type == "cpu":
            flat: Any = torch.empty(0, dtype=torch.uint8, device="cpu").set_(obj)
            return _storage, (pickle.PickleBuffer(flat.numpy()),)
        if isinstance(obj, _Main):
            return vars, (sys.modules["__main__"],)
        if isinstance(obj, FunctionType) and obj.__globals__ is self._main and obj.__module__ == "__main__":
            self.uses |= names_in(obj.__code__)[0]
            self.globals_ref[id(self._main)] = _Main()
            make, made_of, (attributes, slots), *rest = super().reducer_override(obj)
            return make, made_of, (attributes, {**slots, "__globals__": {}}), *rest
        return super().reducer_override(obj)

    def digest(self, value: Any) -> str:
        """Pickle `value`; what tells it from what it was."""
        self.dump(value)
        found = hashlib.sha256(self._stream.getbuffer())
        for view in self._buffers:
            found.update(view)
        return found.hexdigest()

    def message(self) -> Message:
        return Message(self._stream.getvalue(), self._buffers)

    @property
    def nbytes(self) -> int:
        return self._stream.tell() + sum(view.nbytes for view in self._buffers)


class _Main(dict[str, Any]):
    """The globals of a notebook's functions: on a worker its own ``__main__``'s."""


def _storage(buffer: Any) -> torch.UntypedStorage:
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage() if len(buffer) else torch.UntypedStorage(0)


def _offsets(sizes: Sequence[int]) -> list[int]:
    """Where each buffer begins in the shared memory, and where the last one ends."""
    return [*accumulate(sizes, lambda at, size: -(-(at + size) // _ALIGNMENT) * _ALIGNMENT, initial=0)]


def _written(views: Sequence[memoryview]) -> io.FileIO:
    """New shared memory that holds `views`; Python warns if the caller doesn't close it."""
    offsets = _offsets([view.nbytes for view in views])
    file = io.FileIO(os.memfd_create("ltx-message", os.MFD_CLOEXEC), "r+")
    try:
        file.truncate(offsets[-1])
        for view, offset in zip(views, offsets, strict=False):
            done = 0
            while done < view.nbytes:
                done += os.pwrite(file.fileno(), view[done:], offset + done)
    except BaseException:
        file.close()
        raise
    return file


# --- calls -----------------------------------------------------------------------------------------------------------

LARGE_BYTES = 16 << 20  #: a function with more bytes than this in its closure and globals is warned about


def pack_call(number: int, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Message:
    """The message of the `number`-th call: a :class:`Call`, then its objects; WorkerError if one can't be pickled."""
    pickler = _Pickler(number, getattr(_unwrapped(fn), "__module__", None) or "", getattr(fn, "main", None))
    try:
        pickler.dump(Call(number, search_path()))
        pickler.dump(fn)
        _warn_if_large(fn, pickler.nbytes)
        pickler.dump((args, kwargs))
        pickler.dump(pickler.sources)
    except Exception as error:
        raise WorkerError(
            f"{name_of(fn)} and its arguments can't be sent to the workers: {type(error).__name__}: {error}{stuck(fn)}"
            ". Open files, locks, process groups and generators can't be sent: make them inside the function."
        ) from error
    finally:
        pickler.unregister()
    return pickler.message()


def search_path() -> list[str]:
    """This process' ``sys.path``, as another process can use it."""
    return [path or os.getcwd() for path in sys.path]


class _Pickler(Pickler):
    """The pickler of one call: until :meth:`unregister`, modules that workers can't import go by value."""

    def __init__(self, number: int, own_module: str, main: dict[str, Any] | None):
        super().__init__(main)
        self._number, self._own_module = number, own_module
        self.sources: dict[str, tuple[str, list[str]]] = {}  # code that is in no file: {file name: (label, lines)}
        self._by_value: dict[str, bool] = {}  # by the name of a module: whether its functions and classes go by value
        self._registered: list[ModuleType] = []
        self._goes_by_value(own_module)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, _Globals):
            return _new_globals, (self._number, dict(obj))
        if isinstance(obj, FunctionType | type | functools._lru_cache_wrapper):
            by_value = self._goes_by_value(getattr(obj, "__module__", None) or "")
            if by_value and isinstance(obj, functools._lru_cache_wrapper):
                return _cached, (obj.__wrapped__, obj.cache_parameters())
            if by_value and isinstance(obj, FunctionType) and obj.__globals__ is not self._main:
                self.globals_ref.setdefault(id(obj.__globals__), _Globals(obj.__globals__))
        if isinstance(obj, FunctionType):
            name = obj.__code__.co_filename
            entry = linecache.cache.get(name)
            if entry is not None and len(entry) == 4 and entry[1] is None:  # without a time it isn't a file
                cell = getattr(getattr(ipython(), "compile", None), "_filename_map", {}).get(name)  # of a notebook
                self.sources[name] = (name if cell is None else f"<cell In[{cell}]>", entry[2])
        return super().reducer_override(obj)

    def unregister(self) -> None:
        for module in self._registered:
            with suppress(ValueError):
                cloudpickle.unregister_pickle_by_value(module)

    def _goes_by_value(self, name: str) -> bool:
        """Whether functions and classes of the module `name` go by value; if so, cloudpickle is told."""
        if name not in self._by_value:
            module: Any = sys.modules.get(name)
            by_value = name == "__main__" or name in cloudpickle.list_registry_pickle_by_value()
            users = module is not None and not is_installed(getattr(module, "__file__", None))
            if users and not by_value and (name == self._own_module or not _finds(name, module.__file__)):
                cloudpickle.register_pickle_by_value(module)
                self._registered.append(module)
                by_value = True
            self._by_value[name] = by_value
        return self._by_value[name]


class _Globals(dict[str, Any]):
    """The globals of functions that go by value: only a module's names. On the worker a new module holds them."""

    def __init__(self, of: dict[str, Any]):
        super().__init__({key: of.get(key) for key in ("__name__", "__package__", "__path__", "__file__") if key in of})


_SENT = "ltx_call_"  #: the prefix of the names of these new modules


def _new_globals(number: int, said: dict[str, Any]) -> dict[str, Any]:
    """The globals of a new module, of a name of its own, for the functions that call `number` sends from one module.

    torch.compile looks for a function's globals in the module that they name: in the worker's own it would find others.
    """
    mine = f"{_SENT}{number}_"
    for other in [other for other in sys.modules if other.startswith(_SENT) and not other.startswith(mine)]:
        del sys.modules[other]
    module = ModuleType(mine + str(said.get("__name__")).replace(".", "_"))
    vars(module).update({key: value for key, value in said.items() if key != "__name__"})
    sys.modules[module.__name__] = module
    return vars(module)


def _cached(fn: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(fn)


def _warn_if_large(fn: Any, nbytes: int) -> None:
    if nbytes <= LARGE_BYTES:
        return
    sizes = Counter({name: _nbytes(value) for name, value in _held(fn).items()})
    named = ", ".join(f"{name!r} with {size / 1e6:.0f} MB" for name, size in sizes.most_common(3) if size)
    warnings.warn(
        f"{name_of(fn)} carries {nbytes / 1e6:.0f} MB along to the workers at each call"
        + (f": {named}" if named else "")
        + ". Make it on the workers (in a %%ltx cell, or kept in a module), or pass only the part that they need.",
        stacklevel=5,
    )


def _held(fn: Any) -> dict[str, Any]:
    """The globals and nonlocals that a Python function uses."""
    with suppress(TypeError, ValueError):  # `fn` is another callable, or a nonlocal isn't set yet
        found = inspect.getclosurevars(_unwrapped(fn))
        return {**found.globals, **found.nonlocals}
    return {}


def stuck(fn: Any) -> str:
    """Which name that `fn` uses can't be pickled, in words."""
    for name, value in _held(fn).items():
        try:
            Pickler().digest(value)
        except Exception:
            return f" ({name!r}, which {name_of(fn)} uses)"
    return ""


def _nbytes(value: Any) -> int:
    """The bytes of `value`: a tensor, an array or a module; 0 for anything else."""
    if isinstance(value, torch.nn.Module):
        return sum(p.nbytes for p in (*value.parameters(), *value.buffers()))
    size = getattr(value, "nbytes", 0)
    return size if isinstance(size, int) else 0


def _unwrapped(fn: Any) -> Any:
    """The user's function inside partials, decorators and bound methods."""
    while isinstance(fn, functools.partial) or hasattr(fn, "__wrapped__") or inspect.ismethod(fn):
        fn = getattr(fn, "func", None) or getattr(fn, "__wrapped__", None) or getattr(fn, "__func__", None)
    return fn


def _finds(name: str, file: str | None) -> bool:
    """Whether importing the module `name` afresh, with this process' ``sys.path``, would find its file."""
    path, spec, parts = None, None, name.split(".")
    for end in range(1, len(parts) + 1):
        finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
        specs = (find(".".join(parts[:end]), path) for find in finders if find is not None)
        spec = next((found for found in specs if found is not None), None)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return spec is not None and file is not None and spec.origin == file


class Modules:
    """The user's modules in this process, with the state of each file when it was read."""

    def __init__(self) -> None:
        #: Of each module that was imported: the state of its file; None if it isn't the user's, and isn't reloaded.
        self._stamps: dict[str, tuple[int, int] | None] = dict.fromkeys(sys.modules)
        self._old: dict[Any, Any] = {}  # functions and classes of modules before a reload

    def note(self) -> None:
        for name in sys.modules.keys() - self._stamps.keys():
            file = getattr(sys.modules.get(name), "__file__", None) or ""
            self._stamps[name] = _stamp(file) if file.endswith(".py") and not is_installed(file) else None

    def refresh(self) -> None:
        """Reload modules whose files have changed. Other modules then hold their new functions and classes, though no
        other values. Raises WorkerError if a module can't be reloaded: the next call tries again.
        """
        self.note()
        known = [name for name, stamp in self._stamps.items() if stamp is not None]
        now = {name: _stamp(getattr(sys.modules.get(name), "__file__", None) or "") for name in known}
        edited = {name for name, stamp in now.items() if stamp not in (None, self._stamps[name])}
        uses = {name: edited & _imports(sys.modules[name]) if len(edited) > 1 else () for name in edited}
        order: Iterable[str] = edited
        with suppress(CycleError):  # a module is reloaded after the modules that it imports from
            order = [*TopologicalSorter(uses).static_order()]
        for name in order:
            module = sys.modules[name]
            with suppress(OSError, NotImplementedError):
                # A stale .pyc would be used: it keeps the source's time in whole seconds.
                os.unlink(importlib.util.cache_from_source(module.__file__ or ""))
            importlib.invalidate_caches()
            try:
                self._reload(module)
            except Exception as error:
                if isinstance(error, ModuleNotFoundError) and error.name == name:
                    continue  # the module was sent by value or loaded from a path, so it can't be imported by name
                raise WorkerError(
                    f"the module {name!r} was edited since this worker imported it, and reading it again raised "
                    f"{type(error).__name__}: {error}. Mend {module.__file__}, or start new workers."
                ) from error
            self._stamps[name] = now[name]

    def _reload(self, module: ModuleType) -> None:
        try:
            from IPython.extensions.autoreload import superreload
        except ImportError:
            importlib.reload(module)  # other modules that did `from module import f` keep the old f
        else:
            superreload(module, importlib.reload, self._old)


def _imports(module: ModuleType) -> set[str]:
    """The names that `module`'s file imports now, anywhere in it: of modules, and of what it takes from them."""
    found: set[str] = set()
    with suppress(OSError, SyntaxError, ValueError, ImportError):  # the reload raises the same error
        for node in ast.walk(ast.parse(Path(module.__file__ or "").read_bytes())):
            if isinstance(node, ast.Import):
                found.update(each.name for each in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = importlib.util.resolve_name("." * node.level + (node.module or ""), module.__package__)
                found.update((base, *(f"{base}.{each.name}" for each in node.names)))
    return found


def _stamp(file: str) -> tuple[int, int] | None:
    """The file's modification time and size, which an edit changes; None if there is no file."""
    with suppress(OSError):
        found = os.stat(file)
        return found.st_mtime_ns, found.st_size
    return None
