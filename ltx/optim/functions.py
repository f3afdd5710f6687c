"""Optimizers made of a pair of functions, as in optax and TorchOpt."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ltx.errors import OptimError
from ltx.extend import arguments, brief, optimizers, recording, tree
from ltx.typing import Tree


@dataclass(frozen=True)
class FunctionPair(optimizers.Optimizer):
    """An optimizer from two functions; made by :func:`from_functions`."""

    init_fn: Callable[[Tree], Tree]
    update_fn: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]
    elementwise: bool = False
    _keywords: ClassVar[frozenset[str]]  # keyword-only arguments of `update_fn`, which TorchOpt's functions have

    def __post_init__(self) -> None:
        keywords = frozenset[str]()
        with suppress(TypeError, ValueError):  # built-in functions may have no signature
            parameters = inspect.signature(self.update_fn).parameters.values()
            keywords = frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
        object.__setattr__(self, "_keywords", keywords)

    def init(self, params: Tree) -> Tree:
        state = self.init_fn(params)
        for place, x in enumerate(tree.flatten(state)[0]):
            if not isinstance(x, Tensor):
                raise OptimError(
                    f"{self!r}: init's state has {brief(x)} at {tree.leaf_paths(state)[place]!r}, and a state is a "
                    "tree of tensors: write torch.tensor(0.0) for a number; for a function or a text close over it."
                )
        return self._apart(state, params)

    def update(self, grads: Tree, state: Tree, params: Tree, *, donate: bool = False) -> tuple[Tree, Tree]:
        if "params" in self._keywords:
            never = {"inplace": False} if "inplace" in self._keywords else {}
            result = self.update_fn(grads, state, params=params, **never)  # type: ignore[call-arg]
        else:
            result = self.update_fn(grads, state, params)
        if not isinstance(result, tuple) or len(result) != 2:
            raise OptimError(f"{self!r}: update must return (updates, state), got {brief(result)}.")
        updates, after = result
        return updates, self._apart(after, params) if donate else after

    @staticmethod
    def _apart(state: Tree, params: Tree) -> Tree:
        """`state`, with copies of tensors that are parameters, which steps write to: ``init=lambda params: params``."""
        return state if recording() or optimizers.in_transform() else tree.unshared(state, params)

    def __repr__(self) -> str:
        names = (arguments.name_of(fn) for fn in (self.init_fn, self.update_fn))
        return f"from_functions({', '.join(names)}{', elementwise=True' if self.elementwise else ''})"


@arguments.checked("init", "update", "elementwise")
def from_functions(
    init: Callable[[Tree], Tree], update: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]], *, elementwise: bool = False
) -> optimizers.Optimizer:
    """Make an optimizer or gradient transformation from a pair of functions, as in optax.

    >>> import torch
    >>> halve = from_functions(lambda params: (), lambda grads, state, params: ({"w": -0.5 * grads["w"]}, state))
    >>> params = {"w": torch.ones(2)}
    >>> halve.apply({"w": torch.ones(2)}, halve.init(params), params)
    ({'w': tensor([0.5000, 0.5000])}, ())

    Args:
        init: ``params -> state``.
        update: ``(grads, state, params) -> (updates, state)``, pure, or TorchOpt's ``(grads, state, *, params,
            inplace)``, which is called with ``inplace=False``; so ``from_functions(*torchopt.adam(1e-3))`` will do.
            Lambdas work, but they compare by identity and can't be pickled, unlike a module's functions.
        elementwise: whether each element of an update depends on that element's gradient and state alone.
    """
    return FunctionPair(init, update, elementwise)
