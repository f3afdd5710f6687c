"""Classes of ``torch.optim.Optimizer`` with a ``step()`` of their own, which may look at all parameters, as LAMB's
clipping does: ``overlap="update"`` and ZeRO refuse them.

Each update by such a class makes an instance on aliases of all parameters (of its group), puts the state into it, calls
``step()``, and takes the state out again. A class makes a parameter's state at its first gradient, while the caller's
state has one structure from the start: so that has a flag for each parameter, and only state that has begun is put in.
"""

from __future__ import annotations

import ast
import inspect
import io
import pickle
import warnings
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import starmap, takewhile
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from ltx.errors import OptimError
from ltx.extend import arguments, brief, optimizers, recording, tree
from ltx.typing import Tree

Tensors = list[Tensor]
TorchState = optimizers.TorchState

_ELSE = (
    "Write it as a pair of functions, ltx.optim.from_functions; or have an instance of the class step on the gradients "
    "of ltx.grad, in a loop of your own."
)

# Prefixes of keys mark tensors that stand for a number or for None in an instance's state, and keys that aren't plain
# text. _BEGUN is the key of the flag that says whether a parameter's state has begun, on the CPU, as the host reads it.
_NUMBER, _NONE, _KEY, _BEGUN = "number ", "none ", "key ", "has begun"
# The keys of a param group that are settings, not state.
_SETTINGS = frozenset({"lr", "initial_lr", "foreach", "fused", "capturable", "differentiable", "maximize"})

_GROUP = "the group's "
_OF_RATE = (f"{_GROUP}lr", "self.defaults['lr']")
_usual = cache(lambda: vars(torch.optim.SGD([torch.zeros(1, device="cpu")])).keys())  # called late: it imports Dynamo
_TRIALS = 12  # steps on one number, some more than Lookahead's usual period of 6
_FEW = 64  # so many numbers of a tensor are looked at; of a larger one, whether it was written to
_BY_NAME = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)


def from_class(
    cls: type[torch.optim.Optimizer], lr: Any = None, start_step: int = 0, **kwargs: Any
) -> optimizers.ClassOptimizer:
    """:func:`ltx.optim.from_torch` without groups."""
    with suppress(optimizers.NotGatheredError):
        return optimizers.TorchOptimizer(cls, lr, kwargs, start_step=start_step)
    return ThirdParty(cls, lr, kwargs, start_step=start_step)


@dataclass(frozen=True, repr=False)
class ThirdParty(optimizers.ClassOptimizer):
    """A class with a ``step()`` or constructor of its own. It updates all parameters together: see the top."""

    def __post_init__(self) -> None:
        super().__post_init__()
        instance = self._instance([torch.zeros(1, 1, requires_grad=True, device="cpu")], 0, self._hyper)
        self._refuse_kept_by_init(instance)
        if callable(getattr(instance, "eval", None)):
            warnings.warn(
                f"{self.cls.__name__} evaluates with other weights than it trains with (its eval()), and a state has "
                "the latter. The former are optimizer.evaluated(state.params, state.opt_state).",
                stacklevel=4,
            )

    def evaluated(self, params: Tree, state: TorchState) -> Tree:
        """Copies of `params` with the weights for evaluation, of a class that has ``eval()`` (schedule-free ones)."""
        leaves, spec = tree.flatten(params)
        with torch.no_grad():
            aliases = [x.detach().clone().requires_grad_() for x in leaves]
            instance = self._restored(aliases, state, spec, donate=False)
            if callable(train := getattr(instance, "train", None)):
                train()  # as in a step; before the first one there is nothing to change
            if state.count:
                instance.eval()
        return spec.unflatten([x.detach() for x in aliases])

    def init(self, params: Tree) -> TorchState:
        tree.check_tensors(params, "params")
        self._refuse_if(optimizers.differentiated())
        leaves, spec = tree.flatten(params)
        carried = self._changed_in_some_steps()
        # A trial step on gradients of ones shows which state the class keeps; the trial's values are dropped.
        probes = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        instance = self._instance(probes, 0, hyper := self._hyper)
        try:
            group = self._step(instance, probes, [torch.ones_like(leaf) for leaf in leaves], carried, learns=True)
        except (OptimError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            said = f"{type(error).__name__} on gradients of ones: {str(error).rstrip('.')}"
            raise OptimError(
                f"{self}: its step() raised {said}. ltx makes an instance and calls its train(), if it has one, and "
                f"its step(). {_ELSE}"
            ) from error
        kept = [_begun(self._taken(instance, p), False) for p in probes]
        return TorchState({"params": spec.unflatten(kept), "group": _begun(group, False)}, hyper=hyper)

    def _changed_in_some_steps(self) -> set[str]:
        """The keys of the param group that the class changes, perhaps at a later step, found on a single number."""
        probe, changed = [torch.zeros(1, 1, requires_grad=True, device="cpu")], set[str]()
        with torch.random.fork_rng(devices=[]):
            try:
                instance = self._instance(probe, 0, self._hyper)
                for _ in range(_TRIALS):
                    held = self._step(instance, probe, [torch.ones(1, 1, device="cpu")], changed, learns=True)
                    changed |= _put(held, donate=True).keys()
            except OptimError:
                raise
            except Exception:  # it takes no such parameter
                changed = set()
        return changed

    @arguments.checked("donate")
    def apply(self, grads: Tree, state: TorchState, params: Tree, *, donate: bool = False) -> tuple[Tree, TorchState]:
        leaves, spec = tree.flatten(params)
        if not isinstance(state, TorchState) or not isinstance(state.per_param, dict):
            raise OptimError(f"{self} expected the state that its init(params) made, got {brief(state)}.")
        given = optimizers.leaves_like(spec, grads, "grads")
        optimizers.check_grads(given, leaves, params)
        given = [None] * len(leaves) if self.start_step and state.count < self.start_step else given
        kept = optimizers.leaves_like(spec, state.per_param["params"], "the optimizer's state")
        shared = state.per_param["group"]
        others = [*(g for g in given if g is not None), *(x for own in (*kept, shared) for x in own.values())]
        self._refuse_if(not optimizers.donated(leaves, others) if donate else optimizers.differentiated(leaves, others))
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
        kept = optimizers.leaves_like(spec, state.per_param["params"], "the optimizer's state")
        for param, own in zip(params, kept, strict=True):
            if own and own.get(_BEGUN):  # a frozen parameter has none
                instance.state[param] = _put(own, donate)
        if shared.get(_BEGUN):
            instance.param_groups[0].update(_put(shared, donate))
        return instance

    def _instance(self, params: list[Tensor], count: int, hyper: Tree, **others: Any) -> Any:
        """An instance, of `others`, with the rate after `count` updates, made with a scheduler's first."""
        arguments = ({} if self.lr is None else {"lr": self.lr}) | self._kwargs | self._values(count, hyper)
        if isinstance(lr := arguments.get("lr"), Tensor):
            self._refuse_if(optimizers.differentiated([lr]))
            arguments["lr"] = lr = float(lr)
        base = getattr(self.lr, "base_lr", None)
        try:
            instance: Any = self.cls(params, **arguments | ({} if base is None else {"lr": base}) | others)
        except Exception as error:
            name = self.cls.__name__
            raise OptimError(f"from_torch({name}): {name} refused its arguments: {error}") from error
        for group in () if base is None else instance.param_groups:
            group["lr"] = lr if group["lr"] == base else group["lr"] * lr / base
        return instance

    def _refuse_kept_by_init(self, instance: Any) -> None:
        """Raise if ``__init__`` keeps what it makes of parameters or of the rate. `instance`: one of zeros."""
        first, ones = _kept(instance, by_value=True), [torch.ones(1, 1, requires_grad=True, device="cpu")]
        for place, look in _kept(self._instance(ones, 0, self._hyper), by_value=True).items():
            if first.get(place) != look:
                raise OptimError(
                    f"{self}: its __init__() makes {place} anew each time, of the parameters' values or by chance, and "
                    "ltx makes an instance for each update. Make it in step(), while state[parameter] hasn't got it. "
                    f"{_ELSE}"
                )
        if "lr" not in self._varying or getattr(self.lr, "base_lr", None) is not None:
            return
        rate = 1.0 + float(self._values(0, self._hyper)["lr"])
        for place, look in _kept(self._instance(ones, 0, self._hyper, lr=rate), by_value=True).items():
            if place not in _OF_RATE and first.get(place) != look:
                raise OptimError(
                    f"{self}: its __init__() keeps the rate as {place}, which a scheduler of torch doesn't change. Say "
                    "what it is: lr=ltx.optim.from_scheduler(lambda optimizer: LambdaLR(optimizer, factor), lr=rate), "
                    "ltx.optim.warmup_cosine(...) or ltx.optim.adjustable(rate)."
                )

    def _step(
        self, instance: Any, params: Tensors, grads: list[Tensor | None], carried: Collection[str], learns: bool = False
    ) -> dict[str, Tensor]:
        """Run ``step()``; return the group's values of the keys `carried`, and if it `learns`, of all that changed."""
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        closure = inspect.signature(instance.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise OptimError(
                f"{self}: its step() wants a closure, to call the loss again. ltx has the gradients by then. {_ELSE}"
            )
        if callable(train := getattr(instance, "train", None)):  # schedulefree's optimizers must be in train mode
            train()
        before, group = _kept(instance), instance.param_groups[0]
        settings = dict(group)
        instance.step()
        after = _kept(instance)
        if learns:
            changed = [key for key in settings if group[key] is not settings[key] and group[key] != settings[key]]
            carried = {*carried, *changed}
        fixed = _SETTINGS.union(inspect.signature(self.cls).parameters) - ({*carried} - self._varying.keys())
        kept = {k: x for k, x in group.items() if isinstance(x, bool | int | float | Tensor) and k not in fixed}
        held = dict(starmap(self._tensor, kept.items()))
        for place in before | after:
            name = place.removeprefix(_GROUP)
            if before.get(place) != after.get(place) and not {name, f"{_NUMBER}{name}"} & set(held):
                raise OptimError(
                    f"{self}: its step() changes {place}, and ltx carries what is in state[parameter], and what the "
                    "class itself adds to a group as numbers or tensors, from step to step. What is kept elsewhere "
                    f"would begin anew at each. {_ELSE}"
                )
        own = {id(param) for param in params}
        for key in instance.state:
            if id(key) not in own:
                raise OptimError(
                    f"{self} keeps state under {brief(key)}, which isn't a parameter, so it would begin anew at each "
                    f"step. {_ELSE}"
                )
        return held

    def _taken(self, instance: Any, param: Tensor) -> dict[str, Tensor]:
        return dict(starmap(self._tensor, instance.state[param].items()))

    def _tensor(self, key: Any, value: Any) -> tuple[str, Tensor]:
        if isinstance(value, Tensor):
            if not optimizers.has_memory(value):  # torchao's eight bits are two tensors
                raise OptimError(
                    f"{self} keeps a {type(value).__name__} in its state as {key!r}, which isn't a plain tensor: its "
                    "numbers lie in others. Take a class that keeps plain tensors."
                )
            return self._name(key), value.detach()
        if value is None:
            return f"{_NONE}{self._name(key)}", torch.zeros(0, device="cpu")
        if isinstance(value, bool | int | float):
            dtype = torch.float64 if isinstance(value, float) else None
            return f"{_NUMBER}{self._name(key)}", torch.tensor(value, dtype=dtype, device="cpu")
        raise OptimError(
            f"{self} keeps {brief(value)} in its state as {key!r}, which the caller can't hold as a tensor. {_ELSE}"
        )

    def _name(self, key: Any) -> str:
        """The text for a key of the state, which :func:`_key` reads."""
        if isinstance(key, str) and not key.startswith((_NUMBER, _NONE, _KEY, _BEGUN)):
            return key
        with suppress(ValueError, SyntaxError):
            if ast.literal_eval(repr(key)) == key:
                return f"{_KEY}{key!r}"
        raise OptimError(f"{self} keeps state under {brief(key)}. Keys are strings, numbers, or tuples of these.")

    def _refuse_if(self, is_differentiated: bool) -> None:
        if is_differentiated or recording():
            raise OptimError(
                f"{self} runs the class' own step() on tensors of its own, which neither torch.func nor torch.compile "
                "nor autograd looks into, and what it is given is under a transform or requires grad. Update outside "
                "of them: under torch.no_grad() where no derivative of the update is wanted. Else take a class of "
                "torch.optim, or write it as a pair of functions: ltx.optim.from_functions."
            )


def _kept(instance: torch.optim.Optimizer, by_value: bool = False) -> dict[str, bytes]:
    """What an instance keeps outside of its state, by place: to tell what a step, or `by_value` another, changes."""
    found = {f"self.{name}": x for name, x in vars(instance).items() if name not in _usual()}
    found |= {f"self.defaults[{key!r}]": x for key, x in instance.defaults.items()}
    for number, group in enumerate(instance.param_groups):
        where = _GROUP if number == 0 else f"group {number}'s "
        found |= {f"{where}{k}": x for k, x in group.items() if k not in _SETTINGS - {"lr"} | {"params"}}
        for place, param in enumerate(group["params"]):
            found |= {f"parameter {place}'s .{k}": x for k, x in vars(param).items()}
    for cls in takewhile(lambda cls: cls is not torch.optim.Optimizer, type(instance).__mro__):
        for name, x in vars(cls).items():
            if not (name.startswith("__") or callable(x) or hasattr(type(x), "__get__")):
                found[f"{cls.__name__}.{name}"] = x
    return {place: _Look(instance, by_value).at(x) for place, x in found.items()}


class _Look(pickle.Pickler):
    """A pickler that writes down of tensors and functions which they are, or `by_value`, what they are."""

    def __init__(self, instance: torch.optim.Optimizer, by_value: bool):
        self._written, self._by_value = io.BytesIO(), by_value
        self._owned = {id(p): "a parameter" for group in instance.param_groups for p in group["params"]}
        self._owned[id(instance)] = "the optimizer"
        super().__init__(self._written, protocol=5)

    def at(self, x: Any) -> bytes:
        self.dump(x)
        return self._written.getvalue()

    def persistent_id(self, x: Any) -> Any:
        if id(x) in self._owned:
            return self._owned[id(x)]
        if isinstance(x, Tensor):
            looks_at = x.device.type == "cpu" and x.layout is torch.strided and (self._by_value or x.numel() <= _FEW)
            numbers = x.tolist() if looks_at else None
            return numbers if self._by_value else (id(x), x._version, numbers)
        if isinstance(x, torch.Generator):
            return x.get_state().tolist()
        if isinstance(x, _BY_NAME):
            return getattr(x, "__qualname__", "") if self._by_value else id(x)
        return None

    def reducer_override(self, x: Any) -> Any:
        try:
            x.__reduce_ex__(5)
        except Exception:  # a lock, a file
            return str, (type(x).__qualname__ if self._by_value else str(id(x)),)
        return NotImplemented


def _begun(taken: Mapping[str, Tensor], has_begun: bool = True) -> dict[str, Tensor]:
    """`taken`, an instance's state after a step, with its flag; or with zeros, the state before the first step."""
    held = taken if has_begun else {name: torch.zeros_like(x) for name, x in taken.items()}
    return {**held, _BEGUN: torch.tensor(has_begun, device="cpu")} if taken else {}


def _put(kept: Mapping[str, Tensor], donate: bool) -> dict[str, Any]:
    """The state to put into an instance, which may overwrite it: the inverse of ``_tensor``."""
    found: dict[str, Any] = {}
    for name, x in kept.items():
        if name.startswith(_NUMBER):
            found[_key(name.removeprefix(_NUMBER))] = x.item()
        elif name.startswith(_NONE):
            found[_key(name.removeprefix(_NONE))] = None
        elif name != _BEGUN:
            found[_key(name)] = x if donate else x.clone()
    return found


def _key(name: str) -> Any:
    return ast.literal_eval(name.removeprefix(_KEY)) if name.startswith(_KEY) else name
