"""``torch.optim`` classes with their arguments as values, and the checks of these arguments.

torch's own classes make a parameter's state in ``_init_group`` and update each parameter by itself:
:mod:`ltx.core.optim.kernel` runs them. A third-party class may do neither: :mod:`ltx.optim.third_party` runs those.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import repeat
from numbers import Real
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ltx.core.base import private, traced, tree
from ltx.core.base.arguments import brief, checked, whole
from ltx.core.base.errors import OptimError
from ltx.core.gradients.planning import any_derivative
from ltx.core.optim.base import Optimizer, TorchState, check_grads, differentiated, leaf_name
from ltx.typing import Tree

_REAL_ONLY = (torch.optim.Adafactor, torch.optim.Muon, torch.optim.SparseAdam)
_TAKE_SPARSE_GRADS = (torch.optim.Adagrad, torch.optim.SGD, torch.optim.SparseAdam)


class Kept(NamedTuple):
    """A hyperparameter in an optimizer's state: its value, on the CPU."""

    value: Tree


class Hyperparameter:
    """A hyperparameter that the state keeps, and that may be changed between two updates."""

    def init(self) -> Kept:
        """The hyperparameter in the first state."""
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class ClassOptimizer(Optimizer):
    """Base of the optimizers that :func:`ltx.optim.from_torch` makes."""

    moves_params: ClassVar[bool] = True

    cls: type[torch.optim.Optimizer]
    lr: float | Callable[[int], float] | None
    kwargs: Mapping[str, Any] = field(compare=False)
    start_step: int = field(default=0, kw_only=True)
    _compared: frozenset[tuple[str, Any]] = field(init=False)  # `kwargs`, in any order
    _kwargs: ClassVar[dict[str, Any]]  # `kwargs` as a dict
    _varying: ClassVar[dict[str, Any]]  # scheduled or adjustable hyperparameters

    def __post_init__(self) -> None:
        start_step = whole("from_torch: start_step", self.start_step, 0, OptimError)
        kwargs = check_arguments(self.cls, self.lr, self.kwargs)
        varying = {name: value for name, value in {"lr": self.lr, **kwargs}.items() if _varies(self.cls, name, value)}
        vars(self).update(start_step=start_step, kwargs=MappingProxyType(kwargs), _compared=frozenset(kwargs.items()))
        # Dynamo can't read a mapping proxy in a compiled step that has changed a dict before.
        vars(self).update(_kwargs=kwargs, _varying=varying)

    @property
    def _hyper(self) -> Tree:
        """The hyperparameters that the first state keeps."""
        return {name: own.init() for name, own in self._varying.items() if isinstance(own, Hyperparameter)} or ()

    def _values(self, count: int, hyper: Tree, but: str = "") -> dict[str, Any]:
        """The values of scheduled and adjustable hyperparameters, except `but`, after `count` updates."""
        kept = dict(hyper)
        if kept.keys() != {name for name, own in self._varying.items() if isinstance(own, Hyperparameter)}:
            raise OptimError(f"{self} expected the state that its init(params) made; this one keeps {sorted(kept)}.")
        return {
            name: tree.map(partial(number_in, name), kept[name].value) if name in kept else scheduled(name, own, count)
            for name, own in self._varying.items()
            if name != but
        }

    def _rates(self, state: Tree) -> Callable[[], Any] | None:
        if not isinstance(state, TorchState):
            return None
        hyper = tree.detached(state.hyper) if state.hyper else ()  # the next step may give these tensors away
        return partial(self._rate, state.count, hyper)

    def _rate(self, count: int, hyper: Tree) -> Any:
        default = getattr(inspect.signature(self.cls).parameters.get("lr"), "default", None)
        return self._values(count, hyper).get("lr", default if self.lr is None else self.lr)

    @checked("donate")
    def update(self, grads: Tree, state: TorchState, params: Tree, *, donate: bool = False) -> tuple[Tree, TorchState]:
        leaves, spec = tree.flatten(params)
        copies = spec.unflatten([leaf.clone() for leaf in leaves]) if donate else params
        new_params, new_state = self.apply(grads, state, copies, donate=donate)
        news = tree.flatten(new_params)[0]
        # Nobody else holds `news`, so they can be overwritten.
        minus = Tensor.sub if differentiated(news, leaves) else Tensor.sub_
        return spec.unflatten(map(minus, news, leaves)), new_state

    def __reduce__(self) -> Any:
        given = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
        return partial(type(self), **given | {"kwargs": self._kwargs}), ()

    def __repr__(self) -> str:
        is_torchs = getattr(torch.optim, self.cls.__name__, None) is self.cls
        arguments = ({} if self.lr is None else {"lr": self.lr}) | self._kwargs
        arguments |= {"start_step": self.start_step} if self.start_step else {}
        written = (f", {name}={getattr(value, '__qualname__', repr(value))}" for name, value in arguments.items())
        return f"from_torch({'torch.optim.' * is_torchs}{self.cls.__qualname__}{''.join(written)})"


def check_arguments(cls: Any, lr: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Check `cls`, `lr` and the names in `kwargs`; return `kwargs` with hashable values."""
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
    if isinstance(lr, type) or not (lr is None or callable(lr) or isinstance(lr, Real | Hyperparameter)):
        hint = " A schedule may return a tensor: lr=lambda count: tensor." if isinstance(lr, Tensor) else ""
        raise OptimError(f"from_torch({name}): lr must be a number or a function of the step, got {brief(lr)}.{hint}")
    _check_finite(cls, "lr", lr)
    return {key: _hashable(cls, key, value) for key, value in kwargs.items()}


def _check_finite(cls: type, key: str, value: Any) -> None:
    """Raise for NaN, and for infinity but where a third party's class may mean something by it."""
    torchs = key == "lr" or cls.__module__.split(".")[0] == "torch"
    if isinstance(value, Real) and not (math.isfinite(value) or (math.isinf(value) and not torchs)):
        raise OptimError(f"from_torch({cls.__name__}): {key} must be a finite number, got {value}.")


def _hashable(cls: type, key: str, value: Any) -> Any:
    name = cls.__name__
    _check_finite(cls, key, value)
    if isinstance(value, list | tuple):
        tree.flatten(value)
        return tuple(_hashable(cls, key, item) for item in value)
    if isinstance(value, Tensor):
        raise OptimError(f"from_torch({name}): {key} holds a tensor; optimizers compare by value, so give a number.")
    try:
        hash(value)
    except TypeError:
        raise OptimError(f"from_torch({name}): {key} must be hashable, got {brief(value)}.") from None
    return value


def _varies(cls: type, name: str, value: Any) -> bool:
    """Whether `value` is adjustable, or a schedule: a function for an argument that should be a number or a tuple."""
    default = getattr(inspect.signature(cls).parameters.get(name), "default", None)
    takes_numbers = name == "lr" or (isinstance(default, Real | tuple) and not isinstance(default, bool))
    return isinstance(value, Hyperparameter) or (callable(value) and takes_numbers)


def scheduled(name: str, schedule: Callable[[int], Any], count: int) -> Any:
    """The schedule's value after `count` updates: a number, or a tuple of numbers such as ``betas``."""
    value = schedule(count)
    several = value if isinstance(value, tuple) and name != "lr" else (value,)
    if name == "lr" and isinstance(value, Tensor) and value.dim() == 0:
        if traced.recording() or private.is_wrapped(value) or value.device.type != "cpu":
            return value
        several = (value.item(),)
    if not all(isinstance(each, Real) and 0 <= float(each) < math.inf for each in several):
        allowed = "a 0-dim tensor" if name == "lr" else "a tuple of such numbers"
        raise OptimError(f"the schedule {name}({count}) must be a finite number >= 0 or {allowed}, got {brief(value)}.")
    if isinstance(value, Tensor):
        return value
    return tuple(map(float, several)) if several is value else float(value)


def number_in(name: str, x: Tensor) -> float | Tensor:
    """The hyperparameter's value `x` as a number, if all examples of a batch (simulated ranks) have the same one."""
    values = private.unwrapped(x).detach().flatten()
    alike = bool((values == values[0]).all()) and not any_derivative([x])
    if not (alike or name == "lr"):
        raise OptimError(f"{name} in the optimizer's state is differentiated or batched, which only the lr can be.")
    return float(values[0]) if alike else x


def check_params(cls: type, params: Tree, fused: Sequence[bool] | None) -> None:
    """Raise for parameters that `cls` can't update. `fused`: whether leaves have fused kernels, if required."""
    for index, param in enumerate(tree.flatten(params)[0]):
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
            which = f"{leaf_name(params, index)} is {tree.describe(param)}"
            raise OptimError(f"from_torch({cls.__name__}): {which}: {problem}.")


def check_class_grads(cls: type, grads: Sequence[Tensor | None], params: Sequence[Tensor], tree: Tree = None) -> None:
    """:func:`check_grads`; raise for sparse gradients if the class takes dense ones, and the other way round too."""
    check_grads(grads, params, tree)
    wants_sparse = issubclass(cls, torch.optim.SparseAdam)
    sparse = [*map(getattr, grads, repeat("is_sparse"), repeat(wants_sparse))]  # a gradient of None is allowed
    if (not wants_sparse) not in sparse or (not wants_sparse and issubclass(cls, _TAKE_SPARSE_GRADS)):
        return
    problem = f"is sparse, but {cls.__name__} takes dense ones only: use SparseAdam, SGD or Adagrad"
    if wants_sparse:
        problem = "is dense, but SparseAdam takes sparse gradients only: use Adam"
    name = leaf_name(tree, sparse.index(not wants_sparse))
    raise OptimError(f"from_torch({cls.__name__}): the gradient of {name} {problem}.")
