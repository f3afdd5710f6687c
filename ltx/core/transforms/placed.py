"""Steps of DTensors: data parallelism over one dimension of a mesh, with parameters that are split over others.

    data_parallel(f)(params) = (tie ∘ f ∘ place ∘ mark ∘ local)(params)

`local` takes each DTensor's part on this rank, so that all between is plain tensors: buckets, hooks, states. `place`
makes DTensors of the marked parts for the user's step; its transpose gives a gradient the placements of its parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

from ltx.core.base import tree
from ltx.core.base.errors import UnsupportedError
from ltx.core.base.placements import Placements, dtensor_class, is_dtensor, local, whole
from ltx.core.gradients.comm_hook import CommHook
from ltx.core.gradients.marker import MARKER_PRIORITY, raise_priority
from ltx.core.ranks.axis import Axis
from ltx.core.transforms.strategy import Strategy
from ltx.typing import Tree


def local_parts(value: Tree) -> Tree:
    """`value` with this rank's parts in place of DTensors; differentiable."""
    return value if dtensor_class() is None else tree.map(local, value)


def placed(placements: Placements, parts: Tree) -> Tree:
    """The tree of `parts` as the user's step is given it."""
    leaves, spec = tree.flatten(parts)
    dtensors = placements.placed(leaves)
    for x, part in zip(dtensors, leaves, strict=True):
        if x is not part and x.grad_fn is not None:
            # Made before the step, these nodes would come last in the backward pass, and nothing would overlap.
            raise_priority(x, MARKER_PRIORITY)
    return tree.unflatten(spec, dtensors)


def whole_scalars(output: Any) -> Any:
    """`output` with plain tensors for 0-dim DTensors: a loss is its value, the same on all ranks of the mesh."""
    if dtensor_class() is None:
        return output
    leaves, spec = tree.flatten(output)
    if not any(is_dtensor(x) and x.ndim == 0 for x in leaves):
        return output
    return tree.unflatten(spec, [whole(x) if is_dtensor(x) and x.ndim == 0 else x for x in leaves])


def check_placements(
    axis: Axis, placements: Placements, strategy: Strategy, step: int, paths: Callable[[], list[str]], what: str
) -> None:
    """Raise unless `strategy` can reduce the gradients of leaves that lie on meshes so over `axis`.

    Looked at are the hooks that `strategy` holds, and those that it uses at `step` and in its cycle.

    `paths`: the leaves'; `what` begins the error.

    Raises:
        UnsupportedError: names a leaf, and says what to do instead.
    """
    placements.check(None if axis.comm is None else axis.comm.group, paths, what)
    place = None if axis.size == 1 else placements.first_split
    found = None if place is None else next((hook for hook in _hooks_of(strategy, step) if hook.needs_whole), None)
    if place is not None and found is not None:
        raise UnsupportedError(
            f"{what}: {found!r} works on whole parameters, and leaf {paths()[place]!r} is a DTensor of which ranks "
            "hold parts, so that its result would depend on how many these are. Use a hook that works on numbers "
            "wherever they lie: ltx.hooks.FP16()."
        )
    shared = None if place is None else placements.first_shared
    lossy = (hook for hook in _hooks_of(strategy, step) if not (hook.exact or hook.elementwise))
    if place is not None and shared is not None and (found := next(lossy, None)) is not None:
        raise UnsupportedError(
            f"{what}: what {found!r} makes of a gradient depends on those in the same bucket. Of leaf "
            f"{paths()[place]!r} (a DTensor) ranks hold parts, so that leaf {paths()[shared]!r}, which they share, "
            "would become different on them. Use a hook that works on each number by itself, such as "
            "ltx.hooks.FP16(), or place all parameters alike."
        )


def _hooks_of(strategy: Strategy, step: int) -> Iterator[CommHook]:
    """The hooks that a strategy holds, those that it uses at `step` and later, and those that they are made of."""
    yield from _hooks_in(vars(strategy).values())
    yield from _hooks_in([strategy.hook(step)])
    yield from _hooks_in(_hooks_ahead(strategy))


@lru_cache(maxsize=64)  # each step of DTensors asks, and a cycle may be long
def _hooks_ahead(strategy: Strategy) -> tuple[CommHook | None, ...]:
    return tuple(dict.fromkeys(map(strategy.hook, strategy.steps_ahead)))


def _hooks_in(values: Iterable[Any]) -> Iterator[CommHook]:
    for value in values:
        if isinstance(value, CommHook):
            yield value
            yield from _hooks_in(vars(value).values())
