"""What a step uses without being given it.

Parameters, whose gradients would silently stay local; and values that a surrounding transform differentiates, which
have no derivative where a step runs below that transform.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any
from weakref import WeakSet

import torch
from torch._C import _functorch
from torch.overrides import TorchFunctionMode

from ltx import tree
from ltx.errors import StepError
from ltx.typing import Tree

# Steps whose graph was looked at once. The graph of a step has thousands of nodes; its captures don't change.
_looked_at: WeakSet[Any] = WeakSet()


def captured(outputs: Iterable[Any], given: Iterable[Any]) -> torch.Tensor | None:
    """A leaf that requires gradients, that `outputs` depend on, and that isn't among `given`; None if there is none."""
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
        if isinstance(variable, torch.Tensor) and id(variable) not in known:
            return variable
        queue.extend([parent for parent, _ in node.next_functions if parent is not None])
    return None


def refuse_captured(fn: Any, outputs: Tree, given: Tree) -> None:
    """Raise if `outputs` of `fn` depend on parameters that aren't among `given`, what it was called with.

    Looks once at each function, and only under plain autograd: under torch.func nothing but arguments is
    differentiated.
    """
    try:
        if fn in _looked_at:
            return
    except TypeError:  # can't be hashed
        return
    variable = captured(tree.flatten(outputs)[0], tree.flatten(given)[0])
    if variable is not None:
        raise StepError(
            f"the step uses a parameter of shape {list(variable.shape)} that isn't one of its arguments, so its "
            "gradient would stay local to this rank without a word. Pass it in: params = "
            "dict(module.named_parameters()) and torch.func.functional_call(module, params, inputs) inside the step. "
            "If it is meant to be frozen, call requires_grad_(False) on it."
        )
    with suppress(TypeError):  # can't be weakly referenced
        _looked_at.add(fn)


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
