"""``torch.optim`` classes with their arguments as values: checks of arguments, and classes without ``_init_group``.

torch's own classes make a parameter's state in ``_init_group`` and update each parameter by itself:
:mod:`ltx.core.optim.kernel` runs them. A third-party class may do neither. Each update by such a class makes an
instance on aliases of all parameters, puts the state into it, calls ``step()``, and takes the state out again.

Such a class makes a parameter's state at its first gradient, if there is no state yet. But the caller's state has one
structure from the start. So the caller's state also has a flag for each parameter that says whether its state has
begun. State that hasn't begun isn't put into the instance: the parameter had no gradient yet, or its step was skipped.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
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
from ltx.core.base.tree import check_tensors, describe, flatten
from ltx.core.gradients.planning import any_derivative
from ltx.core.optim.base import Optimizer, TorchState, check_grads, differentiated, donated, leaf_name, leaves_like
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
        leaves, spec = flatten(params)
        copies = spec.unflatten([leaf.clone() for leaf in leaves]) if donate else params
        new_params, new_state = self.apply(grads, state, copies, donate=donate)
        news = flatten(new_params)[0]
        if differentiated(news, leaves):
            return spec.unflatten([new - old for new, old in zip(news, leaves, strict=True)]), new_state
        # Nobody else holds `news`, so they can be overwritten.
        return spec.unflatten([new.sub_(old) for new, old in zip(news, leaves, strict=True)]), new_state

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
        flatten(value)
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
    """Raise for sparse gradients if the class takes dense ones, and for dense gradients if it takes sparse ones."""
    wants_sparse = issubclass(cls, torch.optim.SparseAdam)
    sparse = [*map(getattr, grads, repeat("is_sparse"), repeat(wants_sparse))]  # a gradient of None is allowed
    if (not wants_sparse) not in sparse or (not wants_sparse and issubclass(cls, _TAKE_SPARSE_GRADS)):
        return
    problem = f"is sparse, but {cls.__name__} takes dense ones only: use SparseAdam, SGD or Adagrad"
    if wants_sparse:
        problem = "is dense, but SparseAdam takes sparse gradients only: use Adam"
    name = leaf_name(params, sparse.index(not wants_sparse))
    raise OptimError(f"from_torch({cls.__name__}): the gradient of {name} {problem}.")


# Prefixes of keys mark tensors that stand for a number or for None in an instance's state. _BEGUN is the key of the
# flag that says whether a parameter's state has begun. The flag is a CPU tensor, as the host reads it.
_NUMBER, _NONE, _BEGUN = "number ", "none ", "has begun"


@dataclass(frozen=True, repr=False)
class OpaqueOptimizer(ClassOptimizer):
    """A class without ``_init_group``; made by :func:`ltx.optim.from_torch`. It updates all parameters together (in a
    :func:`ltx.optim.partition` those of its group), since one's update may depend on the others, as LAMB's clipping
    does: ``overlap="update"`` and ZeRO refuse it.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        instance = self._instance([torch.zeros(1, 1, requires_grad=True, device="cpu")], 0, self._hyper)
        if callable(getattr(instance, "eval", None)):
            warnings.warn(
                f"{self.cls.__name__} evaluates with other weights than it trains with (its eval()), and a state has "
                "the latter. The former are optimizer.evaluated(state.params, state.opt_state).",
                stacklevel=4,
            )

    def evaluated(self, params: Tree, state: TorchState) -> Tree:
        """Copies of `params` with the weights for evaluation, of a class that has ``eval()`` (schedule-free ones)."""
        leaves, spec = flatten(params)
        with torch.no_grad():
            aliases = [x.detach().clone().requires_grad_() for x in leaves]
            instance = self._restored(aliases, state, spec, donate=False)
            if callable(train := getattr(instance, "train", None)):
                train()  # as in a step; before the first one there is nothing to change
            if state.count:
                instance.eval()
        return spec.unflatten([x.detach() for x in aliases])

    def init(self, params: Tree) -> TorchState:
        check_tensors(params, "params")
        self._refuse_if(differentiated())
        leaves, spec = flatten(params)
        # A trial step on gradients of ones shows which state the class keeps; the trial's values are dropped.
        probes = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        instance = self._instance(probes, 0, hyper := self._hyper)
        try:
            group = self._step(instance, probes, [torch.ones_like(leaf) for leaf in leaves], None)
        except (OptimError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise OptimError(
                f"{self}: its step() raised {type(error).__name__} on gradients of ones: {error} ltx makes an instance "
                "and calls its train(), if it has one, and its step(). What needs more can be written as a pair of "
                "functions: ltx.optim.from_functions."
            ) from error
        kept = [_before(self._taken(instance, p)) for p in probes]
        return TorchState({"params": spec.unflatten(kept), "group": _before(group)}, hyper=hyper)

    @checked("donate")
    def apply(self, grads: Tree, state: TorchState, params: Tree, *, donate: bool = False) -> tuple[Tree, TorchState]:
        leaves, spec = flatten(params)
        if not isinstance(state, TorchState) or not isinstance(state.per_param, dict):
            raise OptimError(f"{self} expected the state that its init(params) made, got {brief(state)}.")
        given = leaves_like(spec, grads, "grads")
        check_grads(given, leaves, params)
        given = [None] * len(leaves) if self.start_step and state.count < self.start_step else given
        kept = leaves_like(spec, state.per_param["params"], "the optimizer's state")
        shared = state.per_param["group"]
        others = [*(g for g in given if g is not None), *(x for own in (*kept, shared) for x in own.values())]
        self._refuse_if(not donated(leaves, others) if donate else differentiated(leaves, others))
        targets = leaves if donate else [leaf.clone() for leaf in leaves]
        with torch.no_grad():
            aliases = [x.detach().requires_grad_() for x in targets]
        instance = self._restored(aliases, state, spec, donate)
        if donate:  # autograd doesn't count writes to `param.data`
            torch.autograd.graph.increment_version(targets)
        own_grads = [None if g is None else g.detach().clone() for g in given]
        group = self._step(instance, aliases, own_grads, _put(shared, donate=True).keys())
        for target, alias in zip(targets, aliases, strict=True):
            if alias.data_ptr() != target.data_ptr():  # the step has set `param.data` to another tensor
                target.copy_(alias.detach())
        after = [_begun(self._taken(instance, alias)) or own for alias, own in zip(aliases, kept, strict=True)]
        per_param = {"params": spec.unflatten(after), "group": _begun(group)}
        return spec.unflatten(targets), TorchState(per_param, state.count + 1, state.hyper)

    def _restored(self, params: list[Tensor], state: TorchState, spec: Any, donate: bool) -> Any:
        instance, shared = self._instance(params, state.count, state.hyper), state.per_param["group"]
        kept = leaves_like(spec, state.per_param["params"], "the optimizer's state")
        for param, own in zip(params, kept, strict=True):
            if own.get(_BEGUN):
                instance.state[param] = _put(own, donate)
        if shared.get(_BEGUN):
            instance.param_groups[0].update(_put(shared, donate))
        return instance

    def _instance(self, params: list[Tensor], count: int, hyper: Tree) -> Any:
        arguments = ({} if self.lr is None else {"lr": self.lr}) | self._kwargs | self._values(count, hyper)
        if isinstance(lr := arguments.get("lr"), Tensor):
            self._refuse_if(differentiated([lr]))
            arguments["lr"] = float(lr)
        try:
            return self.cls(params, **arguments)
        except (ValueError, TypeError, RuntimeError) as error:
            name = self.cls.__name__
            raise OptimError(f"from_torch({name}): {name} refused its arguments: {error}") from error

    def _step(
        self, instance: Any, params: list[Tensor], grads: list[Tensor | None], carried: Collection[str] | None
    ) -> dict[str, Tensor]:
        """Run ``step()``; return the param group's values of the keys `carried`, or of all that the step changed."""
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        closure = inspect.signature(instance.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise OptimError(
                f"{self}: its step() wants a closure, to call the loss again. ltx has the gradients by then: write the "
                "optimizer as a pair of functions, ltx.optim.from_functions."
            )
        if callable(train := getattr(instance, "train", None)):  # schedulefree's optimizers must be in train mode
            train()
        before, group = _kept_elsewhere(instance), instance.param_groups[0]
        settings = dict(group)
        instance.step()
        after = _kept_elsewhere(instance)
        if carried is None:
            carried = [key for key in settings if group[key] is not settings[key] and group[key] != settings[key]]
        held = self._group(group, [key for key in carried if key not in self._varying])
        for place in before | after:
            name = place.removeprefix(_GROUP)
            if before.get(place) != after.get(place) and not {name, f"{_NUMBER}{name}"} & set(held):
                raise OptimError(
                    f"{self}: its step() changes {place}, and ltx carries what is in state[parameter], and what the "
                    "class itself adds to a group as numbers or tensors, from step to step. What is kept elsewhere "
                    "would begin anew at each. Write it as a pair of functions: ltx.optim.from_functions."
                )
        own = {id(param) for param in params}
        for key in instance.state:
            if id(key) not in own:
                raise OptimError(
                    f"{self} keeps state under {brief(key)}, which isn't a parameter, so it would begin anew at each "
                    "step. Write it as a pair of functions: ltx.optim.from_functions."
                )
        return held

    def _taken(self, instance: Any, param: Tensor) -> dict[str, Tensor]:
        return {name: value for key, x in instance.state[param].items() for name, value in [self._tensor(key, x)]}

    def _group(self, group: Mapping[str, Any], carried: Collection[str]) -> dict[str, Tensor]:
        """The numbers and tensors that the class keeps in its param group, such as a count of steps."""
        settings = _SETTINGS.union(inspect.signature(self.cls).parameters).difference(carried)
        numbers = {k: x for k, x in group.items() if isinstance(x, bool | int | float | Tensor) and k not in settings}
        return dict(self._tensor(key, x) for key, x in numbers.items())

    def _tensor(self, key: Any, value: Any) -> tuple[str, Tensor]:
        if isinstance(value, Tensor):
            if not private.has_memory(value):  # torchao's eight bits are two tensors
                raise OptimError(
                    f"{self} keeps a {type(value).__name__} in its state as {key!r}, which isn't a plain tensor: its "
                    "numbers lie in others. Take a class that keeps plain tensors."
                )
            return str(key), value.detach()
        if value is None:
            return f"{_NONE}{key}", torch.zeros(0, device="cpu")
        if isinstance(value, bool | int | float):
            dtype = torch.float64 if isinstance(value, float) else None
            return f"{_NUMBER}{key}", torch.tensor(value, dtype=dtype, device="cpu")
        raise OptimError(
            f"{self} keeps {brief(value)} in its state as {key!r}, which the caller can't hold as a tensor. Write it "
            "as a pair of functions: ltx.optim.from_functions."
        )

    def _refuse_if(self, is_differentiated: bool) -> None:
        if is_differentiated or traced.recording():
            raise OptimError(
                f"{self} runs the class' own step() on tensors of its own, which neither torch.func nor torch.compile "
                "nor autograd looks into, and what it is given is under a transform or requires grad. Update outside "
                "of them: under torch.no_grad() where no derivative of the update is wanted. Else take a class of "
                "torch.optim, or write it as a pair of functions: ltx.optim.from_functions."
            )


# The keys of a param group that are settings, not state.
_SETTINGS = frozenset({"lr", "initial_lr", "foreach", "fused", "capturable", "differentiable", "maximize"})

_GROUP = "the group's "
_DEPTH = 3


def _kept_elsewhere(instance: torch.optim.Optimizer) -> dict[str, Any]:
    """A snapshot of everything that an instance keeps outside of its state, to see whether a step changes it."""
    usual = {"state", "param_groups", "defaults", *vars(torch.optim.SGD([torch.zeros(1, device="cpu")]))}
    found = {f"self.{name}": _looks(x) for name, x in vars(instance).items() if name not in usual}
    for number, group in enumerate(instance.param_groups):
        where = _GROUP if number == 0 else f"group {number}'s "
        found |= {f"{where}{k}": _looks(x) for k, x in group.items() if k not in _SETTINGS - {"lr"} | {"params"}}
    return found


def _looks(x: Any, depth: int = 0) -> Any:
    if isinstance(x, Tensor):
        return id(x), x._version
    if isinstance(x, bool | int | float | complex | str | None):
        return repr(x)
    if isinstance(x, Mapping) and depth < _DEPTH:
        return [(repr(key), _looks(value, depth + 1)) for key, value in x.items()]
    if isinstance(x, list | tuple | deque) and depth < _DEPTH:
        return [_looks(value, depth + 1) for value in x]
    return id(x)


def _before(taken: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state before the first step, with the structure of `taken`, an instance's state after a step."""
    return _begun({name: torch.zeros_like(x) for name, x in taken.items()}, False)


def _begun(taken: dict[str, Tensor], has_begun: bool = True) -> dict[str, Tensor]:
    return {**taken, _BEGUN: torch.tensor(has_begun, device="cpu")} if taken else {}


def _put(kept: Mapping[str, Tensor], donate: bool) -> dict[str, Any]:
    """The state to put into an instance, which may overwrite it: the inverse of ``_tensor``."""
    found: dict[str, Any] = {}
    for name, x in kept.items():
        if name == _BEGUN:
            continue
        if name.startswith(_NUMBER):
            found[name.removeprefix(_NUMBER)] = x.item()
        elif name.startswith(_NONE):
            found[name.removeprefix(_NONE)] = None
        else:
            found[name] = x if donate else x.clone()
    return found
