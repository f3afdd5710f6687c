"""A pair of functions as an optimizer, as optax and TorchOpt have them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from ltx.core.base.arguments import brief, checked, name_of
from ltx.core.base.errors import OptimError
from ltx.core.optim.base import Optimizer
from ltx.typing import Tree


@dataclass(frozen=True)
class FunctionPair(Optimizer):
    """Two functions as an :class:`Optimizer`; made by :func:`from_functions`."""

    init_fn: Callable[[Tree], Tree]
    update_fn: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]
    elementwise: bool = False
    _keywords: ClassVar[frozenset[str]]  # not a field: which of TorchOpt's the update takes

    def __post_init__(self) -> None:
        object.__setattr__(self, "_keywords", _keywords_of(self.update_fn))

    def init(self, params: Tree) -> Tree:
        return self.init_fn(params)

    def update(self, grads: Tree, state: Tree, params: Tree, *, donate: bool = False) -> tuple[Tree, Tree]:
        if "params" in self._keywords:
            never = {"inplace": False} if "inplace" in self._keywords else {}
            result = self.update_fn(grads, state, params=params, **never)  # type: ignore[call-arg]
        else:
            result = self.update_fn(grads, state, params)
        if not isinstance(result, tuple) or len(result) != 2:
            raise OptimError(f"{self!r}: update must return (updates, state), got {brief(result)}.")
        return result

    def __repr__(self) -> str:
        names = (name_of(fn) for fn in (self.init_fn, self.update_fn))
        return f"from_functions({', '.join(names)}{', elementwise=True' if self.elementwise else ''})"


def _keywords_of(update: Callable[..., Any]) -> frozenset[str]:
    try:
        parameters = inspect.signature(update).parameters.values()
    except (TypeError, ValueError):  # a built-in without a signature
        return frozenset()
    return frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name in ("params", "inplace"))


@checked("init", "update", "elementwise")
def from_functions(
    init: Callable[[Tree], Tree],
    update: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]],
    *,
    elementwise: bool = False,
) -> Optimizer:
    """An optimizer or gradient transformation of one's own, from optax's pair of functions.

    >>> import torch
    >>> halve = from_functions(lambda params: (), lambda grads, state, params: ({"w": -0.5 * grads["w"]}, state))
    >>> params = {"w": torch.ones(2)}
    >>> halve.apply({"w": torch.ones(2)}, halve.init(params), params)
    ({'w': tensor([0.5000, 0.5000])}, ())

    Args:
        init: ``params -> state``.
        update: ``(grads, state, params) -> (updates, state)``, pure, or TorchOpt's ``(grads, state, *, params,
            inplace)``, which is called with ``inplace=False``; so ``from_functions(*torchopt.adam(1e-3))`` will do.
            Lambdas work, but compare by identity and don't pickle; functions of a module do both.
        elementwise: whether each element of an update depends on that element's gradient and state alone.
    """
    return FunctionPair(init, update, elementwise)
