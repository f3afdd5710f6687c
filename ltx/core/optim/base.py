"""What an optimizer is: two pure functions, as in optax and TorchOpt.

``init(params) -> state`` and ``update(grads, state, params) -> (updates, state)``; the new parameters are ``params +
updates``. A gradient transformation (clipping, scaling) is the same pair of functions; its updates are gradients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, filterfalse
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import optree
import torch
from torch import Tensor

from ltx.core.base import private, traced
from ltx.core.base.arguments import Offering, brief, checked, shown
from ltx.core.base.errors import OptimError
from ltx.core.base.tree import check_tensors, describe, flatten, leaf_paths, register_node, unflatten
from ltx.core.comm.operations import SUMMED
from ltx.core.gradients.planning import in_step
from ltx.typing import Tree

Tensors = list[Tensor]
Rate = float | Tensor
#: Each leaf's own part of an optimizer's state.
LeafStates = list[dict[str, Tensor]]
T = TypeVar("T")
_NOT_LEAFWISE = (
    "{} can't be applied leaf by leaf: an update of one leaf may depend on the others. Use apply(grads, state, params) "
    "on the whole tree."
)


@dataclass(frozen=True)
class OptimizerOffers:
    """What an optimizer says of itself.

    Attributes:
        elementwise: each element of an update depends on that element's gradient and state alone.
        leafwise: each leaf is updated from that leaf alone, so that ``update_leaves`` can take any of the leaves.
        moves_params: True if its updates are to be added to the parameters; no gradient transformation may follow it in
            a chain. False if its updates are still gradients, which would move parameters uphill. None if unknown.
        strategy: the name of the only strategy class that the optimizer works with; None if it works with any.
    """

    elementwise: bool = False
    leafwise: bool = False
    moves_params: bool | None = None
    strategy: str | None = None


class Optimizer(Offering[OptimizerOffers], ABC, kind=OptimizerOffers):
    """An immutable value with two pure methods. It compares, hashes, pickles and prints by its arguments.

    Make one with :func:`from_torch`, :func:`chain`, :func:`clip_by_global_norm` or :func:`from_functions`. Or write a
    subclass with :meth:`init` and :meth:`update`; as a frozen dataclass it compares by value.

    Every tree in these methods has the structure of `params`, with ``None`` allowed in `grads` for a parameter that got
    no gradient. ``donate=True`` lets a method overwrite the tensors of `state` (:meth:`apply`: of `params` too) and
    return them, as JAX's buffer donation does. `grads` are never written to: ``torch.func.grad`` may return one tensor
    for two parameters, and scaling it in place would scale it twice.

    Attributes:
        offers: an :class:`ltx.extend.OptimizerOffers`. A subclass overrides a field's default by a class attribute of
            the same name, such as ``elementwise = True``.
    """

    @abstractmethod
    def init(self, params: Tree) -> Tree:
        """The state before the first update. Its tensors are new, and every later state has the same structure."""

    @abstractmethod
    def update(self, grads: Tree, state: Tree, params: Tree, *, donate: bool = False) -> tuple[Tree, Tree]:
        """``(updates, new_state)``: what to add to `params`. Never writes to `params`, even with ``donate=True``."""

    def apply(self, grads: Tree, state: Tree, params: Tree, *, donate: bool = False) -> tuple[Tree, Tree]:
        """``(new_params, new_state)``: :meth:`update`, then :func:`apply_updates`."""
        updates, state = self.update(grads, state, params, donate=donate)
        return apply_updates(params, updates, donate=donate), state

    def leaf_states(self, state: Tree, params: Tree) -> LeafStates:
        """Each leaf's own part of `state`, in the order of the leaves of `params`. Only if ``offers.leafwise``."""
        raise OptimError(_NOT_LEAFWISE.format(self))

    def update_leaves(self, grads: Tensors, states: LeafStates, params: Tensors, state: Tree) -> Tensors | None:
        """The updates of some leaves. Overwrites these leaves' `states` (from :meth:`leaf_states`). An optimizer with
        ``moves_params`` may instead write the new values into `params` and return None. Only if ``offers.leafwise``.

        It reads the number of updates from `state`; the caller counts on, by :func:`advanced`, after the last leaves.
        """
        raise OptimError(_NOT_LEAFWISE.format(self))

    def evaluated(self, params: Tree, state: Tree) -> Tree:
        """The parameters to evaluate with, where an optimizer trains others (schedule-free ones); else `params`."""
        return params

    def _times_lr(self, factor: float) -> Optimizer | None:
        return None

    def _unless(self, skip: Tensor, params: Sequence[Tensor]) -> Optimizer | None:
        return None

    def _rates(self, state: Tree) -> Any:
        """What computes the learning rates of the update of `state`: a function, a dict by group, or None."""
        return None


def apply_leaves(optimizer: Optimizer, grads: Tensors, states: LeafStates, params: Tensors, state: Tree) -> None:
    """Update some leaves in place: call ``optimizer.update_leaves`` and add the updates that it returns."""
    updates = optimizer.update_leaves(grads, states, params, state)
    with torch.no_grad():
        for param, update in () if updates is None else zip(params, updates, strict=True):
            param.add_(update)


def advanced(state: Tree, by: Callable[[int], int] = lambda count: count + 1) -> Tree:
    """`state` with ``by(count)`` as the count of each :class:`TorchState`, by default one more; no tensor changes."""
    return at_nodes(state, lambda node: replace(node, count=by(node.count)), TorchState)


def at_nodes(state: Tree, made: Callable[[Any], Any], *kinds: type) -> Tree:
    """`state` with each outermost node of these classes replaced by ``made(node)``."""
    nodes, spec = flatten(state, lambda x: isinstance(x, kinds))
    return unflatten(spec, [made(x) if isinstance(x, kinds) else x for x in nodes])


def times_lr(optimizer: Optimizer, factor: float) -> Optimizer | None:
    """`optimizer` with `factor` times its learning rate; None if the rate isn't known, as in :func:`from_functions`."""
    return optimizer._times_lr(factor)


def unless(optimizer: Optimizer, skip: Tensor, params: Sequence[Tensor]) -> Optimizer:
    """`optimizer` for one update of some of `params`; no tensor changes if `skip`, which the device reads, is true."""
    return optimizer._unless(skip, params) or Unless(optimizer, skip)


@dataclass(frozen=True)
class Prepared:
    """An optimizer's update in place of some very trees, whose tensors were looked at once and are still in them."""

    optimizer: Optimizer
    params: Tree
    per_param: Tree
    runs: list[Callable[[Tensors, TorchState], bool]]  # each updates a group of leaves, or does nothing and gives False

    @staticmethod
    def of(optimizer: Optimizer, params: Tree, state: Tree, groups: Sequence[Sequence[int]] = ()) -> Prepared | None:
        """None if there is no fast way for these, or the optimizer has none. Without `groups` all leaves are one."""
        prepare = getattr(optimizer, "_prepared", None)
        if prepare is None or not isinstance(state, TorchState):
            return None
        leaves, states = flatten(params)[0], optimizer.leaf_states(state, params)
        each = groups or [range(len(leaves))]
        runs = [prepare([leaves[i] for i in group], [states[i] for i in group]) for group in each]
        return None if None in runs else Prepared(optimizer, params, state.per_param, runs)

    def holds(self, optimizer: Optimizer, params: Tree, state: Tree) -> bool:
        """Whether these are the very trees."""
        mine = optimizer is self.optimizer and params is self.params
        return mine and isinstance(state, TorchState) and state.per_param is self.per_param

    def applied(self, update: Update, grads: Tensors) -> tuple[Tree, Tree] | None:
        """``update.apply()``, if `update` is of these trees; `grads` are the leaves of its gradients."""
        state: Any = update.opt_state
        if not self.holds(update.optimizer, update.params, state) or not self.runs[0](grads, state):
            return None
        return self.params, TorchState(state.per_param, state.count + 1)


@dataclass(frozen=True)
class Unless(Optimizer):
    """Made by :func:`unless`: it keeps the old values beside the new ones, and the device chooses."""

    optimizer: Optimizer
    skip: Tensor = field(compare=False)

    @property
    def offers(self) -> OptimizerOffers:
        return self.optimizer.offers

    def init(self, params: Tree) -> Tree:
        return self.optimizer.init(params)

    def update(self, grads: Tree, state: Tree, params: Tree, *, donate: bool = False) -> tuple[Tree, Tree]:
        updates, after = self.optimizer.update(grads, state, params)  # nobody uses skipped updates
        return updates, chosen(self.skip.logical_not(), after, state)

    def apply(self, grads: Tree, state: Tree, params: Tree, *, donate: bool = False) -> tuple[Tree, Tree]:
        return chosen(self.skip.logical_not(), self.optimizer.apply(grads, state, params), (params, state))

    def update_leaves(self, grads: Tensors, states: LeafStates, params: Tensors, state: Tree) -> Tensors | None:
        gives_gradients = self.offers.moves_params is False
        written = [*(() if gives_gradients else params), *(x for own in states for x in own.values())]
        before = [x.clone() for x in written]
        update = self.optimizer.update_leaves if gives_gradients else partial(apply_leaves, self.optimizer)
        found = update(grads, states, params, state)
        with torch.no_grad():
            for x, kept in zip(written, chosen(self.skip.logical_not(), written, before), strict=True):
                x.copy_(kept)
        return found


def chosen(finite: bool | Tensor | None, new: T, old: T) -> T:
    """`old` if `finite` is False, else `new`: two trees of the same structure."""
    if not isinstance(finite, Tensor):
        return old if finite is False else new
    (leaves, spec), others = flatten(new), flatten(old)[0]
    pairs = list(zip(leaves, others, strict=True))
    # Copy `finite` to each device only once: a copy to the host, where some optimizers count steps, is slow.
    on = {device: finite.to(device) for device in {x.device for x, y in pairs if x is not y}}
    picked: T = unflatten(spec, [x if x is y else torch.where(on[x.device], x, y) for x, y in pairs])
    return picked


@dataclass(frozen=True)
class Update:
    """The arguments of a step's optimizer update, before it runs.

    Attributes:
        optimizer: the step's optimizer.
        params, opt_state: the parameters and the optimizer's state before the update.
        grads: the reduced gradients, one for each parameter.
        donate: whether :meth:`apply` overwrites `params` and `opt_state`.
        finite: with dynamic loss scaling or ``guard="skip"``, whether all gradients of all ranks are finite (a 0-dim
            tensor under transforms); else None.
        may_overwrite: whether the strategy may write into the old state once the step can no longer fail.
        on_overwriting: called before :meth:`apply` overwrites `params` and `opt_state`.
        prepared: a faster way, and the tree and the leaves of the gradients that it takes.
    """

    optimizer: Optimizer
    params: Tree
    grads: Tree
    opt_state: Tree
    donate: bool = False
    finite: bool | Tensor | None = None
    may_overwrite: bool = False
    on_overwriting: Callable[[], None] | None = None
    prepared: tuple[Prepared, Tree, Tensors] | None = None

    def apply(self) -> tuple[Tree, Tree]:
        """(new parameters, new optimizer state); the tensors of the old ones if gradients aren't finite.

        A skipped update is counted like others (schedules of the learning rate read the count), but no tensor changes.
        """
        if self.finite is False:
            return self.params, advanced(self.opt_state)
        optimizer, donate = self.optimizer, self.donate
        if donate and isinstance(self.finite, Tensor):  # `finite` is on the device, and the host doesn't wait for it
            told = unless(optimizer, self.finite.logical_not(), flatten(self.params)[0])
            donate = not isinstance(told, Unless)
            optimizer = told if donate else optimizer
        if donate and self.on_overwriting is not None:
            self.on_overwriting()
        if donate and optimizer is self.optimizer and self.prepared is not None:
            prepared, of, grads = self.prepared
            if of is self.grads and (at_once := prepared.applied(self, grads)) is not None:
                return at_once
        updated = optimizer.apply(self.grads, self.opt_state, self.params, donate=donate)
        return updated if donate else self.if_finite(updated, (self.params, self.opt_state))

    def if_finite(self, new: T, old: T) -> T:
        """`old` if gradients aren't finite, else `new`."""
        return chosen(self.finite, new, old)


@checked("donate")
def apply_updates(params: Tree, updates: Tree, *, donate: bool = False) -> Tree:
    """``params + updates``, leaf by leaf, in the dtype of the parameters.

    A ``None`` in `updates` leaves its parameter as it is. ``donate=True`` adds in place and returns `params` itself.

    >>> import torch
    >>> apply_updates({"w": torch.zeros(2)}, {"w": torch.ones(2)})
    {'w': tensor([1., 1.])}

    Raises:
        ltx.errors.OptimError: if `updates` hasn't the structure of `params`, or torch can't add one to its parameter.
    """
    check_tensors(params, "params")
    leaves, spec = flatten(params)
    pairs = list(zip(leaves, leaves_like(spec, updates, "updates"), strict=True))
    for index, (p, u) in enumerate(pairs):
        if u is not None and not (isinstance(u, Tensor) and u.shape == p.shape and u.device == p.device):
            got = f"{describe(u)} on {u.device}" if isinstance(u, Tensor) else shown(u)
            raise OptimError(
                f"the update of {leaf_name(params, index)} must be a {describe(p)} on {p.device}, or None; got {got}."
            )
        if u is not None and not ({p.dtype, u.dtype} <= SUMMED and u.is_complex() <= p.is_complex()):
            raise OptimError(
                f"the update of {leaf_name(params, index)} is {describe(u)}, which can't be added to {describe(p)}. "
                "Cast both to dtypes that have sums (float8 has none), and give a real parameter a real update."
            )
    if not (donate and donated(leaves, [u for _, u in pairs if u is not None])):
        return spec.unflatten([p.clone() if u is None else (p + u).to(p.dtype) for p, u in pairs])
    with torch.no_grad():
        for p, u in pairs:
            if u is not None:
                p.add_(u)
    return params


def leaves_like(spec: optree.PyTreeSpec, tree: Tree, what: str) -> list[Any]:
    """The subtrees of `tree` at the leaves of `spec`, which is the structure of the parameters."""
    try:
        return spec.flatten_up_to(tree)
    except (ValueError, TypeError, RecursionError) as error:
        raise OptimError(f"{what} must have the tree structure of params: {error}") from None


def check_grads(grads: Sequence[Tensor | None], params: Sequence[Tensor], tree: Tree = None) -> None:
    """Refuse, by name and before anything is written, gradients that don't fit their parameters."""
    with suppress(AttributeError):  # a leaf that isn't a tensor has no shape; the loop below names it
        kind = attrgetter("shape", "dtype")
        if not traced.recording() and [*map(kind, grads)] == [*map(kind, params)]:  # Dynamo traces the loop faster
            return
    for index, (grad, param) in enumerate(zip(grads, params, strict=True)):
        if not isinstance(param, Tensor):
            raise OptimError(f"params: {leaf_name(tree, index)} must be a tensor, got {brief(param)}.")
        if grad is None:
            continue
        if not isinstance(grad, Tensor):
            raise OptimError(f"the gradient of {leaf_name(tree, index)} must be a tensor or None, got {brief(grad)}.")
        if grad.shape != param.shape or grad.dtype != param.dtype:
            raise OptimError(
                f"the gradient of {leaf_name(tree, index)} is {describe(grad)}, but the parameter is "
                f"{describe(param)}: cast or reshape the gradient first."
            )


def differentiated(*lists: Iterable[Tensor]) -> bool:
    """Whether somebody may differentiate what is made of these tensors: then nothing is written in place."""
    if private.is_transforming():  # below, a data-parallel step runs on plain autograd, where tensors say it
        return True
    return torch.is_grad_enabled() and any(map(attrgetter("requires_grad"), chain.from_iterable(lists)))


def donated(params: Iterable[Tensor], *lists: Iterable[Tensor]) -> bool:
    """Whether an update that may overwrite `params` does so: no derivative is taken through it."""
    # outside of a train step they may be autograd leaves that require grad, as in ``torch.optim``
    return not differentiated(params if in_step.get() else filterfalse(attrgetter("is_leaf"), params), *lists)


def check_state(optimizer: Optimizer, state: Any, kind: type) -> None:
    """Raise if `state` isn't of the class `kind`, which ``optimizer.init`` returns."""
    if not isinstance(state, kind):
        raise OptimError(f"{optimizer} expected the state that its init(params) made, got {brief(state)}.")


def leaf_name(tree: Tree, index: int) -> str:
    """A leaf's name in errors: its path if the tree is known, else its place in the list."""
    return f"leaf {index} of the list" if tree is None else f"leaf {leaf_paths(tree)[index]!r}"


@dataclass(frozen=True)
class TorchState:
    """State of :func:`from_torch`'s optimizers: a pytree node both for optree and for ``torch.func``.

    Attributes:
        per_param: the tree of the parameters with, in place of each, a dict of that parameter's own state tensors under
            torch's names (``exp_avg``, ``exp_avg_sq``, ``step``, ...). No update changes its structure.
        count: the number of updates done. It is a Python integer in the tree's structure, not a leaf, so that a
            schedule can read it under every transformation.
        hyper: the hyperparameters that the state keeps, by name (:func:`adjustable`); () if it keeps none.
    """

    per_param: Tree
    count: int = 0
    hyper: Tree = ()


register_node(
    TorchState,
    lambda state: ((state.per_param, state.hyper), state.count),
    lambda children, count: TorchState(children[0], count, children[1]),
    ("per_param", "hyper"),
)


def all_of(state: Tree, *kinds: type) -> list[Any]:
    """The outermost nodes of some classes in an optimizer's state, none inside of a TorchState, which may be large."""
    if type(state) is TorchState:
        return [state] if TorchState in kinds else []
    nodes = flatten(state, lambda node: isinstance(node, (*kinds, TorchState)))[0]
    return [node for node in nodes if isinstance(node, kinds)]


class ClipState(NamedTuple):
    """State of :func:`ltx.optim.clip_by_global_norm` and :func:`ltx.optim.measure_global_norm`.

    Attributes:
        norm: 0-dim tensor on the first leaf's device: the norm of the last gradients before clipping, 0 at the start.
    """

    norm: Tensor


def global_norm(leaves: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm of all `leaves` as one vector: a 0-dim tensor on the first leaf's device; 0 for no leaves."""
    if not leaves:
        return torch.tensor(0.0, device="cpu")
    if not differentiated(leaves):
        return torch.nn.utils.get_total_norm(leaves)  # one foreach pass; it has no derivative
    norms = [torch.linalg.vector_norm(leaf).to(leaves[0].device) for leaf in leaves]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def grad_norm(state: Tree) -> Tensor | None:
    """The gradient norm in an optimizer's `state`, from clipping or :func:`ltx.optim.measure_global_norm`; else None.

    If each group of a :func:`ltx.optim.partition` has measured its norm, the norm of all groups together; None if only
    some groups have.

    >>> import torch
    >>> grad_norm((ClipState(torch.tensor(5.0)), ()))
    tensor(5.)
    >>> grad_norm({"matrices": ClipState(torch.tensor(3.0)), "rest": (ClipState(torch.tensor(4.0)), ())})
    tensor(5.)
    """
    first = next((node for node in all_of(state, ClipState, dict) if all_of(node, ClipState)), None)
    if first is None or isinstance(first, ClipState):
        return first and first.norm
    norms = [grad_norm(group) for group in first.values()]
    return None if any(norm is None for norm in norms) else global_norm([norm for norm in norms if norm is not None])
