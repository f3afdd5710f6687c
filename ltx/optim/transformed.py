"""In-place update rules under ``torch.func``'s transforms.

Under ``vmap`` each example gets what it would get alone: the examples' slices become so many leaves more, which one
call of the kernel updates, so the arithmetic is that of separate runs to the last bit and ``step`` counters may differ
between examples. Under ``grad`` and ``jvp`` torch's differentiable single-tensor path runs on copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch

from ltx.optim.base import LeafStates

#: Updates states and parameters in place; the `bool` asks for torch's differentiable path.
Rule = Callable[[list[Tensor], LeafStates, list[Tensor], bool], None]


def is_transforming() -> bool:
    """Whether a ``torch.func`` transform is running."""
    return _functorch.maybe_current_level() is not None


def run_pure(
    rule: Rule,
    grads: Sequence[Tensor],
    states: Sequence[dict[str, Tensor]],
    params: Sequence[Tensor],
    tracked: bool = False,
) -> tuple[list[Tensor], LeafStates]:
    """``(new_params, new_states)`` as the in-place `rule` would leave them, under any nest of transforms.

    `tracked`: whether plain autograd, outside of transforms, is to see the update.
    """
    flat = [*grads, *params, *chain.from_iterable(state.values() for state in states)]
    wrapped = [t for t in flat if _functorch.is_functorch_wrapped_tensor(t)]
    outermost = max(wrapped, key=_functorch.maybe_get_level, default=None)
    if outermost is not None and _functorch.is_batchedtensor(outermost):
        keys = [tuple(state) for state in states]
        return _unflatten(_PerExample.apply(rule, keys, *flat), keys)  # type: ignore[no-untyped-call]
    differentiable = outermost is not None
    with torch.set_grad_enabled(torch.is_grad_enabled() and (tracked or differentiable)):
        leaves = list(zip(grads, states, params, strict=True))
        copy = _spread if differentiable else _clone
        new_params = [copy(param, grad) for grad, _, param in leaves]
        new_states = [{key: copy(own, grad, param) for key, own in state.items()} for grad, state, param in leaves]
        rule(list(grads), new_states, new_params, differentiable)
    return new_params, new_states


def _clone(tensor: Tensor, *_: Tensor) -> Tensor:
    return tensor.clone()


def _spread(tensor: Tensor, *others: Tensor) -> Tensor:
    """A copy of `tensor`, batched wherever one of `others` is, so that a sum with it can be written into the copy."""
    for other in others:
        if other.shape == tensor.shape:
            tensor = torch.where(torch.ones_like(tensor, dtype=torch.bool), tensor, other)
    return tensor.clone()


class _PerExample(torch.autograd.Function):
    """Exists for its ``vmap`` rule, the public door to a batch's physical tensors.

    :func:`run_pure` enters it only if the outermost wrapper of its tensors is a batch, so the rule is all that runs.
    """

    @staticmethod
    def forward(rule: Rule, keys: list[tuple[str, ...]], *flat: Tensor) -> tuple[Tensor, ...]:
        raise AssertionError("run_pure enters this function with batched tensors only")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], rule: Rule, keys: list[tuple[str, ...]], *flat: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        size = info.batch_size
        slices = [[x] * size if dim is None else x.unbind(dim) for x, dim in zip(flat, in_dims[2:], strict=True)]
        examples = [_parts(example, keys) for example in zip(*slices, strict=True)]
        grads, states, params = (list(chain.from_iterable(part)) for part in zip(*examples, strict=True))
        new_params, new_states = run_pure(rule, grads, states, params)
        leaves = len(keys)
        stacked = [torch.stack(new_params[leaf::leaves]) for leaf in range(leaves)]
        for leaf, names in enumerate(keys):
            stacked += [torch.stack([state[name] for state in new_states[leaf::leaves]]) for name in names]
        return tuple(stacked), (0,) * len(stacked)


def _parts(flat: Sequence[Tensor], keys: list[tuple[str, ...]]) -> tuple[list[Tensor], LeafStates, list[Tensor]]:
    """Gradients, states, parameters: the inverse of :func:`run_pure`'s flattening."""
    leaves = len(keys)
    params, states = _unflatten(flat[leaves:], keys)
    return list(flat[:leaves]), states, params


def _unflatten(flat: Sequence[Tensor], keys: list[tuple[str, ...]]) -> tuple[list[Tensor], LeafStates]:
    rest = iter(flat[len(keys) :])
    return list(flat[: len(keys)]), [{name: next(rest) for name in names} for names in keys]
