"""A different optimizer for each group of parameters, as with optax's ``multi_transform`` and ``masked``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import optree
import torch
from torch import Tensor

from ltx.errors import OptimError
from ltx.extend import LeafState, Optimizer, OptimizerOffers, arguments, brief, optimizers, recording, tree
from ltx.optim.combine import LeafPart, identity
from ltx.optim.third_party import from_class
from ltx.typing import Tree

Labels = Callable[[str], str] | tuple[tuple[str, str], ...]
States = dict[str, Tree]  #: by label
Tensors = list[Tensor]


@dataclass(frozen=True, repr=False)
class Partition(Optimizer):
    """Optimizers and leaves by label; made by :func:`partition`. Its state is a dict of its members' states."""

    members: tuple[tuple[str, Optimizer], ...]
    labels: Labels

    @property
    def offers(self) -> OptimizerOffers:
        each = [member.offers for _, member in self.members]
        moves = {one.moves_params for one in each}
        moved = True if True in moves else None if None in moves else False
        return OptimizerOffers(all(one.elementwise for one in each), all(one.leafwise for one in each), moved)

    def init(self, params: Tree) -> States:
        (leaves, spec), places = tree.flatten(params), self._places(params)
        return {label: member.init(_only(spec, leaves, places[label])) for label, member in self.members}

    def update(self, grads: Tree, state: States, params: Tree, *, donate: bool = False) -> tuple[Tree, States]:
        return self._each(lambda member, *own: member.update(*own, donate=donate), grads, state, params)

    def apply(self, grads: Tree, state: States, params: Tree, *, donate: bool = False) -> tuple[Tree, States]:
        return self._each(lambda member, *own: member.apply(*own, donate=donate), grads, state, params)

    def evaluated(self, params: Tree, state: States) -> Tree:
        return self._each(lambda member, _, own, part: (member.evaluated(part, own), own), params, state, params)[0]

    def _times_lr(self, factor: float) -> Partition | None:
        members = tuple((label, optimizers.times_lr(member, factor)) for label, member in self.members)
        known = tuple((label, scaled) for label, scaled in members if scaled is not None)
        return Partition(known, self.labels) if len(known) == len(members) else None

    def _rates(self, state: States) -> Any:
        return {label: member._rates(state[label]) for label, member in self.members if label in state}

    def _unless(self, skip: Tensor, params: Sequence[Tensor]) -> Partition:
        members = tuple((label, optimizers.unless(one, skip, params)) for label, one in self.members)
        return Partition(members, self.labels)

    def leaf_states(self, state: States, params: Tree) -> list[LeafState]:
        (leaves, spec), places = tree.flatten(params), self._places(params)
        parts: dict[int, dict[str, Tensor]] = {}
        for label, member in self.members:
            own = member.leaf_states(state[label], _only(spec, leaves, places[label]))
            for place, part in zip(places[label], own, strict=True):
                parts[place] = LeafPart(part, label=label)
        return [parts[place] for place in range(len(leaves))]

    def update_leaves(self, grads: Tensors, states: list[LeafState], params: Tensors, state: States) -> Tensors | None:
        found, parts = list(grads), cast(list[LeafPart], states)
        gives_gradients = self.offers.moves_params is False
        for label, member in self.members:
            at = [i for i, part in enumerate(parts) if part.label == label]
            lists = [grads[i] for i in at], [parts[i].parts[0] for i in at], [params[i] for i in at]
            if at and not gives_gradients:
                optimizers.apply_leaves(member, *lists, state[label])
            elif at:
                for i, new in zip(at, member.update_leaves(*lists, state[label]) or (), strict=True):
                    found[i] = new
        return found if gives_gradients else None

    def _each(self, call: Callable[..., Any], grads: Tree, state: States, params: Tree) -> tuple[Tree, States]:
        labels = [label for label, _ in self.members]
        if not isinstance(state, dict) or {*state} != {*labels}:
            raise OptimError(f"{self} expected a state with the parts {labels}, got {brief(state)}.")
        (leaves, spec), places = tree.flatten(params), self._places(params)
        results: list[Any] = [None] * len(leaves)
        given, after = optimizers.leaves_like(spec, grads, "grads"), {}
        for label, member in self.members:
            own, wanted = (_only(spec, each, places[label]) for each in (leaves, given))
            result, after[label] = call(member, wanted, state[label], own)
            found = optimizers.leaves_like(tree.flatten(own)[1], result, "updates")
            for place, leaf in zip(places[label], found, strict=True):
                results[place] = leaf
        # Even with ``donate=True`` a member needn't have overwritten its parameters.
        in_place = all(new is old for new, old in zip(results, leaves, strict=True))
        return params if in_place else spec.unflatten(results), after

    def _places(self, params: Tree) -> dict[str, list[int]]:
        """For each label, the indices of its leaves among the leaves of `params`."""
        if recording():
            return _places_of(self, tuple(tree.leaf_paths(params)), tuple(tree.leaf_paths(params, with_none=True)))
        return _remembered(self, tree.flatten(params)[1])

    def __repr__(self) -> str:
        members = ", ".join(f"{label!r}: {member!r}" for label, member in self.members)
        labels = repr(dict(self.labels)) if isinstance(self.labels, tuple) else arguments.name_of(self.labels)
        return f"partition({{{members}}}, {labels})"


def _only(spec: optree.PyTreeSpec, leaves: list[Any], places: list[int]) -> Tree:
    """The tree with the leaves at `places`, and None in place of the other leaves."""
    kept: list[Any] = [None] * len(leaves)
    for place in places:
        kept[place] = leaves[place]
    return spec.unflatten(kept)


@optimizers.at_trace_time
def _places_of(partition: Partition, paths: tuple[str, ...], with_none: tuple[str, ...]) -> dict[str, list[int]]:
    """For each label, the indices of its `paths`. `with_none` are these and the paths of None (frozen parameters)."""
    known = [label for label, _ in partition.members]
    if isinstance(partition.labels, tuple):
        of, rest = dict(partition.labels), 'a label, {..., "*": "the rest"}, or a group, {"params": "*"}'
        found = tree.first_fitting(tuple(of), paths, OptimError, "partition: labels: ", rest, with_none)
        labels = [of[found[path]] for path in paths]
    else:
        labels = [partition.labels(path) for path in paths]
    for path, label in zip(paths, labels, strict=True):
        if not isinstance(label, str) or label not in known:
            raise OptimError(
                f"partition: the label of {path!r} is {brief(label)}, and there are optimizers for {known}."
            )
    return {label: [place for place, other in enumerate(labels) if other == label] for label in known}


@lru_cache(maxsize=64)
def _remembered(partition: Partition, spec: optree.PyTreeSpec) -> dict[str, list[int]]:
    """The places, cached by tree structure: making all paths takes longer than some updates."""
    numbered = spec.unflatten(range(spec.num_leaves))
    return _places_of(partition, tuple(tree.leaf_paths(numbered)), tuple(tree.leaf_paths(numbered, with_none=True)))


def partition(optimizers: Mapping[str, Optimizer], labels: Mapping[str, str] | Callable[[str], str]) -> Optimizer:
    """An optimizer for each group of parameters, such as Muon for matrices and AdamW for the rest.

    >>> import torch, ltx
    >>> slow, fast = (ltx.optim.from_torch(torch.optim.SGD, lr=lr) for lr in (0.1, 1.0))
    >>> sgd = partition({"slow": slow, "fast": fast}, {"*bias": "slow", "*": "fast"})
    >>> params = {"weight": torch.zeros(1), "bias": torch.zeros(1)}
    >>> params, state = sgd.apply({"weight": torch.ones(1), "bias": torch.ones(1)}, sgd.init(params), params)
    >>> params, list(state)
    ({'weight': tensor([-1.]), 'bias': tensor([-0.1000])}, ['slow', 'fast'])

    Every member sees the tree with None in place of the other groups' parameters, so clipping inside a member takes the
    norm of its group. To clip by the norm of all: ``chain(clip_by_global_norm(1.0), partition(...))``. Overlap and
    :class:`ltx.ZeroStrategy` work if they work with every member.

    Args:
        optimizers: a mapping from labels (strings) to optimizers.
        labels: a mapping from patterns of paths (as in :mod:`fnmatch`, such as ``"*.norm.*"``) to labels; the first
            pattern that matches counts. Or a function from a path to a label; it must be importable if the optimizer is
            to be pickled. A pattern may match frozen parameters, which get no optimizer. Paths are those of
            ``module.named_parameters()``. By shape: ``{name: "matrix" if p.ndim == 2 else "rest" for name, p in ...}``.

    Raises:
        ltx.errors.OptimError: an argument has another type, or some groups have optimizers and others only gradient
            transformations. In ``init``: a pattern matches no parameter, or a parameter has no label with an optimizer.
    """
    if not isinstance(optimizers, Mapping) or not optimizers:
        raise OptimError(f"partition expected optimizers by label, got {brief(optimizers)}.")
    for label, member in optimizers.items():
        if not isinstance(label, str):
            raise OptimError(f"partition: labels must be strings, got {brief(label)}.")
        if not isinstance(member, Optimizer):
            raise OptimError(f"partition expected optimizers, but that of {label!r} is {brief(member)}.")
        if member.offers.strategy is not None:
            raise OptimError(f"partition: {member} is a part of {member.offers.strategy}, and updates all parameters.")
        # A partition of gradient transformations only is a transformation itself.
        if member.offers.moves_params is False and any(other.offers.moves_params for other in optimizers.values()):
            raise OptimError(
                f"partition: {member}, for {label!r}, gives gradients where others give updates: its group would move "
                f"uphill. To leave it: ltx.train_step(..., trainable=). To train it: chain({member}, optimizer)."
            )
    if isinstance(labels, Mapping) and all(isinstance(each, str) for pair in labels.items() for each in pair):
        return Partition(tuple(optimizers.items()), tuple(labels.items()))
    if isinstance(labels, Mapping) or not callable(labels):
        raise OptimError(f"partition: labels are a dict by patterns of paths, or a function, got {brief(labels)}.")
    return Partition(tuple(optimizers.items()), labels)


def from_torch(
    cls: type[torch.optim.Optimizer],
    groups: Mapping[str, Mapping[str, Any]] | Sequence[Mapping[str, Any]] | None = None,
    *,
    lr: float | Callable[[int], float] | None = None,
    start_step: int = 0,
    **kwargs: Any,
) -> Optimizer:
    """Any ``torch.optim`` class as an optimizer with explicit state. Its results equal the class's to the bit.

    >>> import torch, ltx
    >>> optimizer = from_torch(torch.optim.SGD, lr=0.5, momentum=0.9)
    >>> params = {"w": torch.ones(2)}
    >>> state = optimizer.init(params)
    >>> params, state = optimizer.apply({"w": torch.tensor([1.0, 2.0])}, state, params)
    >>> params, state.count
    ({'w': tensor([0.5000, 0.0000])}, 1)
    >>> optimizer
    from_torch(torch.optim.SGD, lr=0.5, momentum=0.9)

    Groups of parameters are a :func:`partition` of such optimizers:

    >>> sgd = from_torch(torch.optim.SGD, {"*bias": {"momentum": 0.0}, "head*": {"start_step": 100}}, lr=0.5)
    >>> list(sgd.init({"bias": torch.zeros(1), "head": torch.zeros(1), "body": torch.zeros(1)}))
    ['*bias', 'head*', '*']

    Nothing is communicated: ranks with the same parameters, state and gradients get the same results to the bit.
    ``init`` makes the complete state (:class:`TorchState`). ``apply`` returns what ``cls.step()`` computes. ``update``
    returns the difference; adding it may round differently in the last bit. A class that draws random numbers draws
    those of this rank.

    torch's fused kernels are used wherever there are some, unless ``fused=False``, ``foreach=True`` or
    ``differentiable=True`` turns them off. With ``donate=True`` parameters and state are updated in place. Under
    ``vmap`` every example's result equals that of a separate run to the bit. The update is differentiable: under
    ``grad`` and ``jvp``, and by plain autograd if gradients are enabled and the gradients, parameters (but autograd
    leaves), state or the schedule's rate require grad. It then takes torch's ``differentiable`` path, equal up to
    rounding, and ignores ``donate``. For no derivative detach its inputs, or run it under ``torch.no_grad()``.

    Args:
        cls: the class, not an instance. LBFGS raises an error, since it calls the loss. A class with a ``step()`` of
            its own (timm's, a ten-line Lion, an Adam that clips), or a constructor, hooks or groups of its own, works
            with that, on all parameters together. It can't be compiled or differentiated, and ``overlap="update"`` and
            ZeRO refuse it. If it has a ``train()`` method (schedulefree's), ltx calls it before each step; the weights
            that its ``eval()`` would leave are ``optimizer.evaluated(state.params, state.opt_state)``.
        groups: hyperparameters by patterns of paths, as in :func:`partition`. A parameter is in the group of the first
            pattern that fits; where none does, the keywords hold. Or torch's list of groups, ``[{"params": names,
            "weight_decay": 0.0}, {"params": "*"}]``: names (or patterns), or pairs of ``named_parameters()``, and each
            parameter in a group. The state is a dict by pattern, or by place in the list ("0", "1", ...). A class that
            looks at all parameters in its step (LAMB's clipping, Prodigy's rate) sees those of one group.
        lr: a number, or a schedule as in optax: a function from the number of updates done so far (0 at first) to a
            number or 0-dim tensor. Or a rate that the state keeps, :func:`adjustable`. None is torch's default. ASGD
            and Rprop keep a rate of their own in the state, which starts as the schedule's value at `start_step`.
        start_step: the first steps, so many, have no update, as if there were no gradients: the state of torch's class
            (Adam's own count) begins with the first real one, and a schedule counts all steps. For a group, too.
        kwargs: the hyperparameters of `cls`, by torch's names. A number, or a tuple of numbers such as ``betas``, may
            also be a schedule or be kept in the state, as `lr` may.

    Raises:
        ltx.errors.OptimError: if torch refuses the hyperparameters, if one is unknown, if `cls` can't run with explicit
            state, or if a parameter in a list has no name or two groups. The optimizer's methods raise it if a pattern
            fits no parameter, and for parameters or gradients that `cls` doesn't take; they have written nothing.
    """
    shared = {"lr": lr, "start_step": start_step, **kwargs}
    if groups is None:
        return from_class(cls, **shared)
    what = f"from_torch({getattr(cls, '__name__', None) or brief(cls)}): "
    named = groups.values() if isinstance(groups, Mapping) else ()
    own: Mapping[str, Mapping[str, Any]]
    if not isinstance(groups, Iterable) or isinstance(groups, Tensor) or not all(isinstance(g, Mapping) for g in named):
        raise OptimError(f"{what}groups are dicts by patterns of paths, or torch's list of dicts, got {brief(groups)}.")
    if isinstance(groups, Mapping):
        own, labels = {**groups, "*": groups.get("*", {})}, {pattern: pattern for pattern in (*groups, "*")}
    else:
        own, labels = _torch_groups(what, groups)
    return partition({label: from_class(cls, **{**shared, **group}) for label, group in own.items()}, labels)


def _torch_groups(what: str, groups: Any) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The hyperparameters by label, and the labels by name, of a list of torch's param groups."""
    own: dict[str, dict[str, Any]] = {}
    labels: dict[str, str] = {}
    for place, group in enumerate(groups):
        own[str(place)] = {**group} if isinstance(group, Mapping) else {"params": group}
        params = own[str(place)].pop("params", ())
        for each in [params] if isinstance(params, str | Tensor) or not isinstance(params, Iterable) else params:
            name = each[0] if isinstance(each, tuple) and each else each
            if not isinstance(name, str):
                raise OptimError(
                    f"{what}group {place} has {brief(name)} among its params, which ltx knows by their names. Write "
                    '{"params": [name for name, p in model.named_parameters() if ...], ...}.'
                )
            if name in labels:
                raise OptimError(f"{what}{name!r} is in group {labels[name]} and in group {place}.")
            labels[name] = str(place)
    return own, labels


def masked(transform: Optimizer, where: str | Sequence[str]) -> Optimizer:
    """`transform` for the gradients of some parameters; the other gradients pass unchanged.

    >>> import torch, ltx
    >>> clip = masked(ltx.optim.clip_by_global_norm(1.0), "head.*")
    >>> grads = {"head": {"w": torch.tensor([3.0, 4.0])}, "body": torch.tensor([3.0, 4.0])}
    >>> clip.update(grads, clip.init(grads), grads)[0]
    {'head': {'w': tensor([0.6000, 0.8000])}, 'body': tensor([3., 4.])}

    Args:
        transform: a gradient transformation, not an optimizer, since the other parameters' gradients would then be
            taken for updates: ``ltx.train_step(trainable=)`` leaves them alone, :func:`partition` has one for each.
        where: a pattern of paths, or several of them, as in :func:`partition`.

    Raises:
        ltx.errors.OptimError: `transform` isn't a gradient transformation. In ``init``: a pattern matches no parameter.
    """
    if not isinstance(transform, Optimizer) or transform.offers.moves_params:
        raise OptimError(
            f"masked expected a transformation of gradients, got {brief(transform)}. To train only some parameters: "
            "ltx.train_step(..., trainable=); to give others another optimizer: ltx.optim.partition."
        )
    patterns = (where,) if isinstance(where, str) else where
    if not isinstance(patterns, list | tuple) or not all(isinstance(pattern, str) for pattern in patterns):
        raise OptimError(f"masked: where must be a pattern of paths or a list of them, got {brief(where)}.")
    labels = dict.fromkeys(patterns, "masked") | ({} if "*" in patterns else {"*": "others"})
    return partition({"masked": transform} | ({} if "*" in patterns else {"others": identity()}), labels)
