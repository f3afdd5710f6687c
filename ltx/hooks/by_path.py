"""partition: groups of parameters with different hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from ltx.errors import StrategyError
from ltx.extend import Axis, CommHook, LeafState, Packing, brief, needs, tree
from ltx.hooks.combined import Several


@dataclass(frozen=True, repr=False)
class Partition(Several):
    """Hooks with the patterns of the paths they are for; made by :func:`partition`."""

    patterns: tuple[str, ...]
    members: tuple[CommHook, ...]

    def of(self, make: Callable[[CommHook], CommHook]) -> Partition:
        return Partition(self.patterns, tuple(map(make, self.members)))

    def each(self, paths: Sequence[str], *, part: bool = False) -> list[CommHook]:
        others, rest = None if part else (), 'a hook: {..., "*": hooks.AllReduce()}'
        of = tree.first_fitting(self.patterns, tuple(paths), StrategyError, "hooks.partition: ", rest, others)
        found: dict[str, CommHook] = {}
        for pattern, hook in zip(self.patterns, self.members, strict=True):
            own = [path for path in paths if of[path] == pattern]
            found.update(zip(own, hook.each(own, part=part) or [hook] * len(own), strict=True))
        return [found[path] for path in paths]

    def init(self, param: torch.Tensor, path: str = "") -> LeafState:
        (hook,) = self.each([path], part=True)
        return hook.init(param, path)

    def at(self, step: int) -> Partition:
        return self.of(lambda hook: hook.at(step))

    def axes(self, axis: Axis) -> tuple[Axis, ...]:
        return tuple(dict.fromkeys(chain.from_iterable(hook.axes(axis) for hook in self.members)))

    def packing(self, dtype: torch.dtype, axis_size: int) -> Packing:
        """Of gradients that hooks pack by their own: only what all results are is asked."""
        each = [hook.packing(dtype, axis_size) for hook in self.members]
        counts_as = each[0].counts_as if all(one.counts_as is not None for one in each) else None
        return each[0]._replace(counts_as=counts_as, proportional=all(one.proportional for one in each))

    def __repr__(self) -> str:
        return f"partition({dict(zip(self.patterns, self.members, strict=True))!r})"


def partition(hooks: Mapping[str, CommHook]) -> Partition:
    """Use different hooks for groups of parameters, such as low rank for matrices, half precision for embeddings.

    All parameters of a bucket have the same hook, so a hook doesn't notice the others; state is kept by parameter.
    :func:`cast`, :func:`chain` and :func:`error_feedback` apply to each of the hooks.

    Args:
        hooks: {pattern of paths: hook}. Patterns are those of :mod:`fnmatch`, such as ``"*.norm.*"``; the first pattern
            that matches a path counts. Paths are those in errors and in ``module.named_parameters()``. To choose by
            shape: ``{name: PowerSGD() if p.ndim == 2 else BF16() for name, p in module.named_parameters()}``.

    Raises:
        StrategyError: `hooks` isn't such a dict, or a hook issues collectives of its own (:func:`from_torch`); in a
            step, a pattern matches no parameter with a gradient, or no pattern matches a parameter with a gradient.

    Example:
        >>> import torch, ltx
        >>> hook = ltx.hooks.partition({"embed": ltx.hooks.TopK(0.5, error_feedback=False), "*": ltx.hooks.AllReduce()})
        >>> grads = {"embed": torch.tensor([[1.0, 8.0, 2.0, 3.0]] * 2), "w": torch.tensor([[1.0, 8.0]] * 2)}
        >>> reduced = ltx.vmap(lambda g: ltx.sync_gradients(g, ltx.DDPStrategy(comm_hook=hook))[0])(grads)
        >>> reduced["embed"][0], reduced["w"][0]
        (tensor([0., 8., 0., 3.]), tensor([1., 8.]))
    """
    if not isinstance(hooks, Mapping) or not hooks:
        raise StrategyError(f"hooks.partition expected hooks by pattern, got {brief(hooks)}.")
    for pattern, hook in hooks.items():
        if not isinstance(pattern, str) or not isinstance(hook, CommHook):
            raise StrategyError(f"hooks.partition expected hooks by pattern, got {brief(hook)} for {brief(pattern)}.")
        needs.require("partition, hook", hook)
    return Partition(tuple(hooks), tuple(hooks.values()))
