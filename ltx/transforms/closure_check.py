"""Checks of what a step uses without getting it as an argument.

Parameters, whose gradients would silently stay local; and values that a surrounding transform differentiates, which
have no derivative where a step runs below that transform.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch._C import _autograd, _functorch
from torch.overrides import TorchFunctionMode

from ltx import tree
from ltx.errors import StepError
from ltx.typing import Tree

# The graphs of steps that were looked at, by the number of nodes that a call made. They have thousands.
_looked_at: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()


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


def refuse_captured(fn: Any, outputs: Tree, given: Tree, made: int = 0) -> None:
    """Raise if `outputs` of `fn` depend on parameters that aren't among `given`, what it was called with.

    Looks at each function once, and again when a call makes another number of nodes, `made`. Only under plain autograd:
    under torch.func nothing but arguments is differentiated.
    """
    try:
        if made in _looked_at.setdefault(fn, set()):
            return
    except TypeError:  # can't be hashed, or weakly referenced
        return
    variable = captured(tree.flatten(outputs)[0], tree.flatten(given)[0])
    if variable is not None:
        raise StepError(
            f"the step uses a parameter of shape {list(variable.shape)} that isn't one of its arguments, so its "
            "gradient would stay local to this rank without a word. Pass it in: params = "
            "dict(module.named_parameters()) and ltx.functional_call(module, params, inputs) inside the step. "
            "If it is meant to be frozen, call requires_grad_(False) on it."
        )
    _looked_at[fn].add(made)


class TracedValueError(Exception):
    """The step closes over a value that a surrounding transform of torch.func differentiates or maps."""


class _Watch(TorchFunctionMode):
    """Raises :class:`TracedValueError` at the first operation on a tensor of a level that isn't being run."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") != "__get__":  # looking at a shape is harmless
            here = _functorch.maybe_current_level() or 0
            for x in tree.flatten((args, tuple(kwargs.values())))[0]:
                if _is_wrapped(x) and _functorch.maybe_get_level(x) > here:
                    raise TracedValueError
        return func(*args, **kwargs)


def _is_wrapped(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and _functorch.is_functorch_wrapped_tensor(x)


_watched: WeakSet[Any] = WeakSet()


@contextmanager
def watch_for_traced_values(fn: Any) -> Iterator[None]:
    """Watch what `fn` uses, the first time that it runs below a transform.

    A function that closes over a traced value was made inside the transform, so it is new. Watching costs microseconds
    an operation.
    """
    try:
        known = fn in _watched
    except TypeError:  # can't be hashed
        known = False
    with nullcontext() if known else _Watch():
        yield
    if not known:
        with suppress(TypeError):
            _watched.add(fn)
