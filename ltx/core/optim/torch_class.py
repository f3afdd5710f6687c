"""A class of ``torch.optim`` as a value: which are accepted, what is said of others, its rule under ``torch.func``.

Under ``vmap`` each example gets what it would get alone: the examples' slices become so many leaves more, which one
call of the kernel updates, so the arithmetic is that of separate runs to the last bit and ``step`` counters may differ
between examples. Under ``grad`` and ``jvp`` torch's differentiable single-tensor path runs on copies.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from numbers import Real
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._C import _functorch

from ltx.core.base.arguments import brief, checked
from ltx.core.base.errors import OptimError
from ltx.core.base.tree import describe, flatten
from ltx.core.gradients.planning import any_derivative
from ltx.core.optim.base import LeafStates, Optimizer, TorchState, differentiated, leaf_name
from ltx.typing import Tree

_REAL_ONLY = (torch.optim.Adafactor, torch.optim.Muon, torch.optim.SparseAdam)
_TAKE_SPARSE_GRADS = (torch.optim.Adagrad, torch.optim.SGD, torch.optim.SparseAdam)


@dataclass(frozen=True, eq=False, repr=False)
class ClassOptimizer(Optimizer):
    """What the optimizers of :func:`ltx.optim.from_torch` have in common."""

    moves_params: ClassVar[bool] = True

    cls: type[torch.optim.Optimizer]
    lr: float | Callable[[int], float] | None
    kwargs: Mapping[str, Any]
    _kwargs: ClassVar[dict[str, Any]]  # not a field: the same

    def __post_init__(self) -> None:
        object.__setattr__(self, "kwargs", check_arguments(self.cls, self.lr, self.kwargs))
        # For compiled steps: Dynamo refuses to read a mapping proxy once the step has changed any dict.
        object.__setattr__(self, "_kwargs", dict(self.kwargs))

    @checked("donate")
    def update(self, grads: Tree, state: TorchState, params: Tree, *, donate: bool = False) -> tuple[Tree, TorchState]:
        leaves, spec = flatten(params)
        copies = spec.unflatten([leaf.clone() for leaf in leaves]) if donate else params
        new_params, new_state = self.apply(grads, state, copies, donate=donate)
        news = flatten(new_params)[0]
        if differentiated(news, leaves):
            return spec.unflatten([new - old for new, old in zip(news, leaves, strict=True)]), new_state
        # The new ones are nobody else's.
        return spec.unflatten([new.sub_(old) for new, old in zip(news, leaves, strict=True)]), new_state

    @property
    def _given(self) -> tuple[Any, ...]:
        """The constructor's arguments."""
        return self.cls, self.lr, self.kwargs

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClassOptimizer) and type(other) is type(self) and other._given == self._given

    def __hash__(self) -> int:
        return hash((self.cls, self.lr, frozenset(self.kwargs.items())))

    def __reduce__(self) -> Any:
        cls, lr, kwargs, *others = self._given
        return type(self), (cls, lr, dict(kwargs), *others)

    def __repr__(self) -> str:
        is_torchs = getattr(torch.optim, self.cls.__name__, None) is self.cls
        arguments = ({} if self.lr is None else {"lr": self.lr}) | dict(self.kwargs)
        written = (f", {name}={getattr(value, '__qualname__', repr(value))}" for name, value in arguments.items())
        return f"from_torch({'torch.optim.' * is_torchs}{self.cls.__qualname__}{''.join(written)})"


def check_arguments(cls: Any, lr: Any, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """`kwargs` as an immutable, hashable mapping, once `cls`, `lr` and their names are found right."""
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        hint = f" Pass the class, {type(cls).__name__}." if isinstance(cls, torch.optim.Optimizer) else ""
        raise OptimError(f"from_torch expected a class of torch.optim, got {brief(cls)}.{hint}")
    name = cls.__name__
    if issubclass(cls, torch.optim.LBFGS):
        raise OptimError(
            f"from_torch({name}): {name} evaluates the loss several times a step through a closure, so it isn't a "
            "function of gradients. Use torch.optim.LBFGS itself, or another class."
        )
    if "params" in kwargs:
        raise OptimError(f"from_torch({name}): parameters aren't given here but to init(params) and apply(...).")
    signature = inspect.signature(cls.__init__).parameters
    allowed = [parameter for parameter in signature if parameter not in ("self", "params")]
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in signature.values())
    if (unknown := [key for key in kwargs if key not in allowed]) and not takes_any:
        raise OptimError(f"from_torch({name}): no argument {', '.join(unknown)}; allowed are {', '.join(allowed)}.")
    schedulers = torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau
    if isinstance(lr, schedulers) or (isinstance(lr, type) and issubclass(lr, schedulers)):
        given = lr.__name__ if isinstance(lr, type) else f"a {type(lr).__name__}"
        raise OptimError(
            f"from_torch({name}): lr is {given}, which changes a torch optimizer in place. Give a function of the "
            "number of updates done so far instead, such as lr=ltx.optim.from_scheduler(lambda optimizer: "
            "StepLR(optimizer, 30), lr=0.1) or lr=ltx.optim.warmup_cosine(3e-4, 100, 10_000)."
        )
    if isinstance(lr, type):
        raise OptimError(f"from_torch({name}): lr must be a number or a function of the step, got the class {lr}.")
    if not (lr is None or callable(lr) or isinstance(lr, Real)):
        hint = " A schedule may return a tensor: lr=lambda count: tensor." if isinstance(lr, Tensor) else ""
        raise OptimError(f"from_torch({name}): lr must be a number or a function of the step, got {brief(lr)}.{hint}")
    return MappingProxyType({key: _hashable(name, key, value) for key, value in kwargs.items()})


def _hashable(name: str, key: str, value: Any) -> Any:
    if isinstance(value, list | tuple):
        flatten(value)
        return tuple(_hashable(name, key, item) for item in value)
    if isinstance(value, Tensor):
        raise OptimError(f"from_torch({name}): {key} holds a tensor; optimizers compare by value, so give a number.")
    try:
        hash(value)
    except TypeError:
        raise OptimError(f"from_torch({name}): {key} must be hashable, got {brief(value)}.") from None
    return value


def scheduled_lr(schedule: Callable[[int], Any], count: int) -> float | Tensor:
    """The schedule's learning rate after `count` updates."""
    lr = schedule(count)
    if isinstance(lr, Tensor) and lr.dim() == 0:
        return lr
    if not isinstance(lr, Real) or not float(lr) >= 0:
        raise OptimError(f"the schedule lr({count}) must be a number >= 0 or a 0-dim tensor, got {brief(lr)}.")
    return float(lr)


def check_params(cls: type, params: Tree, fused: Sequence[bool] | None) -> None:
    """Refuse, by name, parameters that `cls` can't update. `fused`: what each leaf admits, if fusing was asked for."""
    for index, param in enumerate(flatten(params)[0]):
        problem = None
        if not (param.is_floating_point() or param.is_complex()):
            problem = "parameters must be floating or complex"
        elif param.is_complex() and issubclass(cls, _REAL_ONLY):
            problem = f"{cls.__name__} takes real parameters only"
        elif param.layout is not torch.strided:
            problem = "parameters must be dense"
        elif param.dim() != 2 and issubclass(cls, torch.optim.Muon):
            problem = "Muon takes 2-D parameters only; give the others to an optimizer of their own, such as AdamW"
        elif fused is not None and not fused[index]:
            problem = f"torch has no fused kernel that works for it on {param.device.type}; leave fused out"
        if problem:
            raise OptimError(f"from_torch({cls.__name__}): {leaf_name(params, index)} is {describe(param)}: {problem}.")


def check_grad_layouts(cls: type, grads: Sequence[Tensor | None], params: Tree = None) -> None:
    """Refuse, by name, sparse gradients for classes that take dense ones and the other way round."""
    wants_sparse = issubclass(cls, torch.optim.SparseAdam)
    for index, grad in enumerate(grads):
        if grad is None or grad.is_sparse == wants_sparse:
            continue
        if wants_sparse:
            problem = "is dense, but SparseAdam takes sparse gradients only: use Adam"
        elif not issubclass(cls, _TAKE_SPARSE_GRADS):
            problem = f"is sparse, but {cls.__name__} takes dense ones only: use SparseAdam, SGD or Adagrad"
        else:
            continue
        raise OptimError(f"from_torch({cls.__name__}): the gradient of {leaf_name(params, index)} {problem}.")


#: Updates states and parameters in place; the `bool` asks for torch's differentiable path.
Rule = Callable[[list[Tensor], LeafStates, list[Tensor], bool], None]


def run_pure(
    rule: Rule,
    grads: Sequence[Tensor],
    states: Sequence[dict[str, Tensor]],
    params: Sequence[Tensor],
) -> tuple[list[Tensor], LeafStates]:
    """``(new_params, new_states)`` as the in-place `rule` would leave them, under any nest of transforms."""
    flat = [*grads, *params, *chain.from_iterable(state.values() for state in states)]
    wrapped = [t for t in flat if _functorch.is_functorch_wrapped_tensor(t)]
    outermost = max(wrapped, key=_functorch.maybe_get_level, default=None)
    if outermost is not None and _functorch.is_batchedtensor(outermost):
        keys = [tuple(state) for state in states]
        return _unflatten(_PerExample.apply(rule, keys, *flat), keys)  # type: ignore[no-untyped-call]
    differentiable = outermost is not None or any_derivative(flat)
    with torch.set_grad_enabled(torch.is_grad_enabled() and differentiable):
        leaves = list(zip(grads, states, params, strict=True))
        copy = _spread if outermost is not None else _clone
        new_params = [copy(param, grad) for grad, _, param in leaves]
        new_states = [{key: copy(own, grad, param) for key, own in state.items()} for grad, state, param in leaves]
        if differentiable:
            # Powers of the decays are taken of the count of steps, in its dtype here and in float64 in torch's others.
            new_states = [{key: x.double() if key == "step" else x for key, x in state.items()} for state in new_states]
        rule(list(grads), new_states, new_params, differentiable)
        for old, new in zip(states, new_states, strict=True):
            new.update({key: new[key].to(own.dtype) for key, own in old.items()})
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
