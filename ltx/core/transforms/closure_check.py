"""Checks of what a step uses without getting it as an argument.

Parameters, whose gradients would silently stay local; buffers of modules, which would stay on one rank; and values that
a surrounding transform differentiates, which have no derivative where a step runs below that transform.
"""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._C import _autograd, _functorch
from torch.overrides import TorchFunctionMode

from ltx.core.base import tree
from ltx.core.base.errors import StepError
from ltx.core.transforms.functional_call import own_buffer_text, own_written, refuse_max_norm
from ltx.core.transforms.swap import Members, same_values
from ltx.typing import Tree


class Seen:
    """What was seen of functions while they live; nothing of those that can't be hashed or weakly referenced."""

    def __init__(self) -> None:
        self._keys: WeakKeyDictionary[Any, set[Any]] = WeakKeyDictionary()

    def has(self, fn: Any, key: Any = None) -> bool:
        """Whether `key` was seen of `fn`."""
        try:
            return key in self._keys.get(fn, ())
        except TypeError:
            return False

    def add(self, fn: Any, key: Any = None) -> None:
        """Make :meth:`has` true."""
        with suppress(TypeError):
            self._keys.setdefault(fn, set()).add(key)


# The graphs of steps that were looked at, by the number of nodes that a call made. They have thousands.
_looked_at = Seen()


def nodes_made() -> int:
    """The number of nodes of graphs that this thread has made so far."""
    return int(_autograd._get_sequence_nr())


def captured(outputs: Iterable[Any], given: Iterable[Any]) -> torch.Tensor | None:
    """A leaf that requires gradients, that `outputs` depend on, and that isn't among `given`; None if there is none.

    Leaves that the step has made, such as inputs that it differentiates with respect to, don't count.
    """
    outputs = list(outputs)
    given = [x for x in given if isinstance(x, torch.Tensor)]
    known = {id(x) for x in given}
    seen: set[Any] = {x.grad_fn for x in given}  # what they were made of is the caller's business
    queue = [x.grad_fn for x in outputs if isinstance(x, torch.Tensor) and x.grad_fn is not None]
    while queue:
        node = queue.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor) and id(variable) not in known and _is_kept(variable, outputs):
            return variable
        queue.extend([parent for parent, _ in node.next_functions if parent is not None])
    return None


def _is_kept(leaf: torch.Tensor, outputs: list[Any]) -> bool:
    """Whether a leaf is a parameter, or is referred to from outside of the graph: it was there before the call."""
    if isinstance(leaf, torch.nn.Parameter):
        return True
    return any(holder is not outputs and not inspect.isframe(holder) for holder in gc.get_referrers(leaf))


def refuse_captured(fn: Any, outputs: Tree, given: Tree, made: int = 0, to_given: bool = False) -> None:
    """Raise if `outputs` of `fn` depend on parameters that aren't among `given`, what it was called with.

    Buffers of modules that require gradients count too, unless derivatives are taken with respect to `given` alone.
    Looks at each function once, and again when a call makes another number of nodes, `made`. Only under plain autograd:
    under torch.func nothing but arguments is differentiated.
    """
    if _looked_at.has(fn, made):
        return
    known, buffers = tree.flatten(given)[0], [b for m in modules_of(fn) for b in m.buffers()] if to_given else []
    variable = captured(tree.flatten(outputs)[0], [*known, *buffers])
    if variable is not None:
        raise StepError(
            f"the step uses {_name_of(fn, variable)} of shape {list(variable.shape)} that isn't one of its arguments, "
            "so its gradient would stay local to this rank without a word. Pass it in: params = "
            "dict(module.named_parameters()) and ltx.functional_call(module, params, inputs) inside the step. "
            "If it is meant to be frozen, call requires_grad_(False) on it."
        )
    _looked_at.add(fn, made)


def _name_of(fn: Any, tensor: torch.Tensor) -> str:
    """What `tensor` is to a module that `fn` refers to."""
    for module in modules_of(fn):
        for what, held in (("a parameter", module.named_parameters()), ("a buffer", module.named_buffers())):
            for path in (path for path, x in held if x is tensor):
                return f"{path!r} of {type(module).__name__}, {what}"
    return "a parameter"


class TracedValueError(Exception):
    """The step closes over a value that a surrounding transform of torch.func differentiates or maps."""


class _Watch(TorchFunctionMode):
    """Raises :class:`TracedValueError` at the first operation on a tensor of a level that isn't being run."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") != "__get__":  # looking at a shape is harmless
            here = _functorch.maybe_current_level() or 0
            for x in tree.flatten((args, tuple(kwargs.values())))[0]:
                if is_wrapped(x) and _functorch.maybe_get_level(x) > here:
                    raise TracedValueError
        return func(*args, **kwargs)


def is_wrapped(x: Any) -> bool:
    """Whether `x` is a tensor at a level of torch.func."""
    return isinstance(x, torch.Tensor) and _functorch.is_functorch_wrapped_tensor(x)


_watched = Seen()


@contextmanager
def watch_for_traced_values(fn: Any) -> Iterator[None]:
    """Watch what `fn` uses, the first time that it runs below a transform.

    A function that closes over a traced value was made inside the transform, so it is new. Watching costs microseconds
    an operation.
    """
    with nullcontext() if _watched.has(fn) else _Watch():
        yield
    _watched.add(fn)


_called = Seen()


@contextmanager
def look_at_modules(fn: Any) -> Iterator[None]:
    """While `fn` is called for the first time: what modules it uses, and whether it writes to their buffers.

    Raises:
        StepError: it wrote to one, or uses an embedding that renormalises its rows in place.
    """
    modules = [] if _called.has(fn) else modules_of(fn)
    for module in modules:
        refuse_max_norm(module)
    watched = [(module, buffer, _value(buffer.tensor)) for module in modules for buffer in Members(module).buffers]
    try:
        yield
    except RuntimeError as error:
        # On simulated ranks torch can't write what differs among ranks into a tensor that they share.
        norms = [path for module in modules for path in _running_statistics(module)]
        if norms and any(text in str(error) for text in _IN_PLACE):
            raise StepError(own_buffer_text(norms[0])) from error
        raise
    for module, buffer, value in watched:
        x = buffer.tensor
        other = not x.is_meta and x.shape == value.shape and not same_values([x], [value])
        own_written([buffer._replace(version=-1) if other else buffer], type(module).__name__)
    _called.add(fn)


def modules_of(fn: Any) -> list[nn.Module]:
    """The modules that `fn` refers to, of several inside each other the outermost."""
    found = {id(value): value for value in reached_from(fn) if isinstance(value, nn.Module)}
    inner = {id(part) for module in found.values() for part in module.modules() if part is not module}
    return [module for key, module in found.items() if key not in inner]


def reached_from(fn: Any) -> Iterator[Any]:
    """What `fn` refers to: in closures, globals, defaults, partials, and objects whose method it is."""
    seen: set[int] = set()
    queue: list[tuple[Any, int]] = [(fn, 0)]
    while queue and len(seen) < _MANY:
        value, depth = queue.pop()
        if id(value) in seen or depth > _DEPTH:
            continue
        seen.add(id(value))
        yield value
        if not isinstance(value, nn.Module):
            queue.extend((x, depth + 1) for x in _referred(value))


# A step may refer to all of a program.
_DEPTH, _MANY = 6, 10_000


def _referred(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return list(value[:100])
    if isinstance(value, dict):
        return list(value.values())[:100]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if inspect.ismethod(value):
        return [value.__self__, value.__func__]
    if inspect.isfunction(value):
        cells = [cell for cell in value.__closure__ or () if _filled(cell)]
        library = str(value.__module__).partition(".")[0] in ("torch", "ltx")
        names = () if library else _names(value.__code__)
        globals_ = [value.__globals__[name] for name in names if name in value.__globals__]
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return [*(cell.cell_contents for cell in cells), *globals_, *defaults, getattr(value, "__wrapped__", None)]
    if inspect.ismodule(value) or inspect.isclass(value) or isinstance(value, torch.Tensor):
        return []
    return list(getattr(value, "__dict__", {}).values())[:100]


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _names(code: Any) -> Sequence[str]:
    inner = [name for constant in code.co_consts if inspect.iscode(constant) for name in _names(constant)]
    return [*code.co_names, *inner]


_IN_PLACE = ("which will be updated in place, were not batched", "that would mutate a captured Tensor")


def _running_statistics(module: nn.Module) -> Iterator[str]:
    for path, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.training and part.running_mean is not None:
            yield f"{f'{path}.running_mean' if path else 'running_mean'!r} of {type(module).__name__}"


def _value(tensor: torch.Tensor) -> torch.Tensor:
    with torch._C._DisableFuncTorch(), torch.no_grad():
        return tensor.detach().clone()
