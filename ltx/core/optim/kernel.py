"""Run one update of a ``torch.optim`` class: its own ``step()`` on a bare copy of an instance, which has the caller's
state, aliases of the caller's parameters and their gradients. :func:`run_pure` does so without writing to these.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from ltx.core.base import private, traced
from ltx.core.base.errors import OptimError
from ltx.core.gradients.planning import any_derivative
from ltx.core.optim.base import LeafStates, Rate, Tensors

Way = Literal["fused", "plain", "differentiable", "traced"]
#: Updates states and parameters in place, by torch's differentiable path if the bool is true.
Rule = Callable[[Tensors, LeafStates, Tensors, bool], None]


class NotGatheredError(OptimError):
    """The class doesn't make its state in ``_init_group``, so :mod:`ltx.optim.third_party` has to run it."""


@dataclass(frozen=True)
class Kernel:
    """An optimizer class that makes its state in ``_init_group``, with its hyperparameters; made by :func:`build`."""

    shell: Any  # an instance with a placeholder parameter; each call copies it and steps the copy
    group: Mapping[str, Any]  # the instance's param group, without parameters
    step: Callable[[Any], Any]  # the class's ``step`` without torch's wrappers, which import Dynamo (1.5 s)

    @property
    def traceable(self) -> bool:
        """Whether an update can run without reading a number off a tensor. Adagrad always reads its step count."""
        return "differentiable" in self.group and not self._is(torch.optim.Adagrad)

    @cached_property
    def dampened(self) -> bool:
        """Whether this is SGD with dampening, which dampens all of a parameter's gradients but the first."""
        return bool(self._is(torch.optim.SGD) and self.group["momentum"] and self.group["dampening"])

    @cached_property
    def _counts(self) -> bool:
        """Whether a count of steps has to be added to the state, because the class keeps it in no tensor."""
        return self.dampened or self._is(torch.optim.SparseAdam)

    def materialise(self, param: Tensor, fused: bool, lr: Rate | None) -> dict[str, Tensor]:
        """The state that torch would create at the first step of `param`, from its shape, dtype and device alone."""
        counted = {"step": torch.tensor(0.0, device="cpu")} if self._counts else {}
        if self._is(torch.optim.SGD):
            # torch starts with a copy of the first gradient, to which momentum * -0.0 + gradient is bit-equal.
            return {"momentum_buffer": torch.full_like(param, -0.0)} | counted if self.group["momentum"] else {}
        if self._is(torch.optim.SparseAdam):
            return {key: torch.zeros_like(param) for key in ("exp_avg", "exp_avg_sq")} | counted
        alias = param.detach()  # ``_init_group`` needs a parameter with a gradient
        options = {key: x for key, x in (("lr", lr), ("fused", fused)) if key in self.group and x is not None}
        instance = self._instance({**self.group, **options}, [alias], [param.detach()], [])
        if self.shell.state:  # in torch 2.11 Adagrad's constructor makes the state
            instance.state.update(type(self.shell)([alias], **{**self.group, **options}).state)
        lists = list(inspect.signature(instance._init_group).parameters)[1:]
        instance._init_group(instance.param_groups[0], *([] for _ in lists))
        return dict(instance.state[alias])

    def run(
        self, grads: Tensors, states: LeafStates, params: Tensors, way: Way, hyper: Any = (), skip: Tensor | None = None
    ) -> None:
        """Update in place; fused kernels change nothing if `skip` is true. `hyper`: scheduled hyperparameters' values.
        "traced": read no number off a tensor, and use foreach if the class then can.
        """
        changes: dict[str, Any] = dict(hyper, fused=way == "fused")
        if way == "traced" and "foreach" in self.group and ("capturable" in self.group or self._is(torch.optim.SGD)):
            changes |= {"foreach": True, "capturable": True}
            way = "plain"
        if differentiable := way in ("differentiable", "traced"):
            if "differentiable" not in self.group:
                raise OptimError(
                    f"{type(self.shell).__name__}'s update can't be differentiated: torch has no differentiable path "
                    "for it. Detach what it is given, or run it under torch.no_grad() and outside of torch.func."
                )
            changes |= {"foreach": False, "differentiable": True}
        group = {**self.group, **{key: value for key, value in changes.items() if key in self.group}}
        given = self.gathered(states, params) if way == "fused" else None
        numbers = None if given is None else given.row.numbers_of(group)
        if given is not None and numbers is not None and self.run_gathered(given, numbers, grads, skip):
            return
        if group.get("nesterov") and group.get("foreach"):  # foreach Nesterov writes into the gradients
            grads = [grad.clone() for grad in grads]
        counts = [int(state["step"].item()) for state in states] if self._counts else []
        held = [{**state, "step": n} for state, n in zip(states, counts, strict=True)] if counts else states
        # Under a transform keep the caller's grad mode; else use the one that torch's own ``step`` would set.
        own_rule = bool(self.group.get("differentiable", False))
        with torch.set_grad_enabled(torch.is_grad_enabled() if differentiable else own_rule):
            aliases = params if differentiable else [param.detach() for param in params]
            instance = self._instance(group, aliases, grads, held)
            if self.dampened:  # two groups, because a parameter's first gradient isn't dampened
                first = [param for param, count in zip(aliases, counts, strict=True) if not count]
                later = [param for param, count in zip(aliases, counts, strict=True) if count]
                instance.param_groups = [{**group, "params": first, "dampening": 0.0}, {**group, "params": later}]
            if skip is not None:
                # as GradScaler does
                instance.grad_scale, instance.found_inf = None, skip.float()
            try:
                self.step(instance)
            finally:
                for param in params if differentiable else ():
                    param.grad = None
            for state, _ in zip(states, counts, strict=False):
                state["step"].add_(1)

    def gathered(self, states: LeafStates, params: Tensors) -> Gathered | None:
        """What torch's fused kernel takes for these contiguous leaves, which have one; None if one call won't do."""
        row = _FUSED.get(type(self.shell).__base__)
        if row is None or self.dampened or len({*map(attrgetter("dtype", "device"), params)}) != 1:
            return None
        lists = [[*map(itemgetter(key), states)] if key in states[0] else [] for key in row.keys]
        shapes = [*map(attrgetter("shape"), params)]
        for key, held in zip(row.keys, lists, strict=True):
            # a fused kernel would read and write behind the end of a smaller one
            if held and key != "step" and (found := [*map(attrgetter("shape"), held)]) != shapes:
                place = next(i for i, shape in enumerate(shapes) if found[i] != shape)
                raise OptimError(
                    f"{type(self.shell).__name__}: {key} of parameter {place} has shape {list(found[place])} in the "
                    f"state, and the parameter has {list(shapes[place])}. Make a state of these parameters: "
                    "optimizer.init(params), or train.init(params)."
                )
        return Gathered(row, params, lists, _joined(lists[-1]) if row.keys[-1] == "step" else None)

    def run_gathered(self, given: Gathered, numbers: Mapping[str, Any], grads: Tensors, skip: Tensor | None) -> bool:
        """Update in place by one call of a fused kernel. False, and nothing is done, while a graph captures it."""
        row, device = given.row, given.params[0].device
        if device.type != "cpu" and private.capturing():
            return False
        found_inf = None if skip is None else skip.to(device, torch.float32)
        with private.no_grad():
            if given.steps is not None:
                torch._foreach_add_(given.steps, 1)
            kernel = row.decoupled if self.group.get("decoupled_weight_decay") else row.kernel
            lists = given.lists if numbers.get("momentum", 1) else [[]]
            kernel(given.params, grads, *lists, **numbers, grad_scale=None, found_inf=found_inf)
            if given.steps is not None and found_inf is not None:
                torch._foreach_sub_(given.steps, [found_inf] * len(given.steps))
        return True

    def _instance(self, group: dict[str, Any], params: Tensors, grads: Tensors, states: Sequence[Any]) -> Any:
        """A bare copy with one param group. A step of the copy writes only to the tensors that are given here."""
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        instance = object.__new__(type(self.shell))
        instance.__dict__.update(self.shell.__dict__)
        instance.param_groups = [{**group, "params": params}]
        instance.state = defaultdict(dict, zip(params, states, strict=False))
        return instance

    def _is(self, cls: type[torch.optim.Optimizer]) -> bool:
        return isinstance(self.shell, cls)


class _Fused(NamedTuple):
    """A fused kernel: the keys of the state that it takes as lists, and the numbers of a group that it takes."""

    kernel: Any
    keys: tuple[str, ...]
    numbers: tuple[str, ...]
    decoupled: Any = None  # that with decoupled weight decay

    def numbers_of(self, group: Mapping[str, Any]) -> dict[str, Any] | None:
        """The kernel's numbers in a param group; None if one is a tensor."""
        numbers = {name: group[name] for name in self.numbers}
        if "betas" in group:
            numbers["beta1"], numbers["beta2"] = group["betas"]
        return None if any(isinstance(x, Tensor) for x in numbers.values()) else numbers


_ADAM = _Fused(
    private.fused_adam,
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"),
    ("lr", "weight_decay", "eps", "amsgrad", "maximize"),
    private.fused_adamw,
)
#: The classes whose update is one kernel and a count. What torch's ``step()`` does around it took four times as long.
_FUSED: dict[type | None, _Fused] = {
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
    torch.optim.SGD: _Fused(
        partial(private.fused_sgd, is_first_step=False),
        ("momentum_buffer",),
        ("lr", "weight_decay", "momentum", "dampening", "nesterov", "maximize"),
    ),
    torch.optim.Adagrad: _Fused(
        private.fused_adagrad, ("sum", "step"), ("lr", "lr_decay", "weight_decay", "eps", "maximize")
    ),
}


class Gathered(NamedTuple):
    """The arguments of a fused kernel for some leaves: the leaves, their states key by key, and their counts."""

    row: _Fused
    params: Tensors
    lists: list[Tensors]
    steps: Tensors | None  # what is counted: one tensor if the leaves' counts lie :func:`side_by_side`


def _joined(steps: Tensors) -> Tensors:
    """Tensors that cover all `steps`, 0-dim ones: a single one if they lie side by side."""
    first, width = steps[0].data_ptr(), steps[0].dtype.itemsize
    if [*map(Tensor.data_ptr, steps)] == [*range(first, first + len(steps) * width, width)]:
        return [steps[0].as_strided((len(steps),), (1,))]
    return steps


def side_by_side(states: LeafStates) -> LeafStates:
    """`states`, with their counts of steps as elements of one tensor for each dtype and device."""
    groups: dict[Any, list[int]] = {}
    for place, state in enumerate(states):
        if (step := state.get("step")) is not None and step.ndim == 0:
            groups.setdefault((step.dtype, step.device), []).append(place)
    made = [*states]
    for places in groups.values():
        for place, step in zip(places, torch.stack([states[i]["step"] for i in places]).unbind(), strict=True):
            made[place] = {**states[place], "step": step}
    return made


def build(cls: type[torch.optim.Optimizer], hyperparameters: Mapping[str, Any]) -> Kernel:
    """Raises OptimError for hyperparameters that torch refuses, NotGatheredError for what torch's classes don't do."""

    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:  # torch's own method imports Dynamo
        self.param_groups.append({**self.defaults, **param_group})

    # Each call makes a subclass, because torch patches the class's `step`.
    shell_cls = type(cls.__name__, (cls,), {"add_param_group": add_param_group})
    try:
        shell: Any = shell_cls([torch.zeros(1, 1, device="cpu")], **hyperparameters)
    except Exception as error:
        raise OptimError(f"from_torch({cls.__name__}): {cls.__name__} refused its arguments: {error}") from error
    group = {key: value for key, value in shell.param_groups[0].items() if key != "params"}
    kernel = Kernel(shell, group, inspect.unwrap(cls.step))
    # A step of its own may look at all parameters, and a constructor make groups by their shapes.
    own = [getattr(cls, name, cls) for name in ("step", "_init_group", "__init__", "add_param_group")]
    torchs = [getattr(inspect.unwrap(each), "__module__", "") for each in own]
    hooked = shell._optimizer_step_pre_hooks or shell._optimizer_step_post_hooks
    if hooked or len(shell.param_groups) > 1 or not all(module.startswith("torch.optim") for module in torchs):
        raise NotGatheredError(f"{cls.__name__} has a step, hooks or groups of its own.")
    return kernel


def fusable(cls: type[torch.optim.Optimizer], params: Sequence[Tensor]) -> list[bool]:
    """For each parameter, whether torch has a fused kernel of `cls` that works for its dtype and device."""
    kinds, devices = list(map(attrgetter("dtype", "device"), params)), _get_fused_kernels_supported_devices()
    if issubclass(cls, torch.optim.Adagrad) and traced.TORCH < "2.13":  # it got one for CUDA then
        devices.remove("cuda")
    # Fused SGD on CPU is wrong for 16 bits up to torch 2.13 (torch issue 191763): parameters stay, momentum is garbage.
    broken = ((torch.float16, "cpu"), (torch.bfloat16, "cpu")) if issubclass(cls, torch.optim.SGD) else ()
    answers = {
        (dtype, device): dtype.is_floating_point and device.type in devices and (dtype, device.type) not in broken
        for dtype, device in set(kinds)
    }
    return list(map(answers.__getitem__, kinds))


def run_aligned(run: Callable[..., None], grads: Tensors, states: LeafStates, params: Tensors) -> None:
    """``run(grads, states, params)``, in place, for a `run` that assumes the same strides for all tensors of a leaf."""
    if all(map(Tensor.is_contiguous, chain(grads, params, chain.from_iterable(map(dict.values, states))))):
        run(grads, states, params)
        return
    leaves = [_aligned(*leaf) for leaf in zip(grads, states, params, strict=True)]
    run([leaf[0] for leaf in leaves], [leaf[1] for leaf in leaves], [leaf[2] for leaf in leaves])
    with torch.no_grad():
        for (_, new_state, new_param), state, param in zip(leaves, states, params, strict=True):
            for new, old in ((new_param, param), *((new_state[key], state[key]) for key in state)):
                if new is not old:
                    old.copy_(new)


def _aligned(grad: Tensor, state: dict[str, Tensor], param: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """The leaf's tensors with equal, dense strides: the tensors themselves if possible, else contiguous copies."""

    def alike(tensor: Tensor) -> bool:
        pairs = zip(param.shape, tensor.stride(), param.stride(), strict=True)
        # strides of length 1 don't matter
        return all(its == own for length, its, own in pairs if length > 1)

    dense = alike(torch.empty_like(param, device="meta"))  # ``empty_like`` keeps the strides only if they are dense
    if dense and all(alike(tensor) for tensor in state.values() if tensor.shape == param.shape):
        return grad if alike(grad) else torch.empty_like(param).copy_(grad), state, param
    return grad.contiguous(), {key: tensor.contiguous() for key, tensor in state.items()}, param.contiguous()


def run_pure(rule: Rule, grads: Tensors, states: LeafStates, params: Tensors) -> tuple[Tensors, LeafStates]:
    """``(new_params, new_states)`` that the in-place `rule` computes, under any nest of transforms. Under ``vmap`` each
    example's slices become leaves of their own, updated by one call of the kernel: bits are those of separate runs, and
    ``step`` counts may differ. Under ``grad`` and ``jvp`` torch's differentiable path runs on copies.
    """
    flat = [*grads, *params, *chain.from_iterable(state.values() for state in states)]
    outermost = max(filter(private.is_wrapped, flat), key=private.level_of, default=None)
    if outermost is not None and private.is_batched(outermost):
        keys = [tuple(state) for state in states]
        return unpacked(_PerExample.apply(rule, keys, *flat), keys)  # type: ignore[no-untyped-call]
    differentiable = outermost is not None or any_derivative(flat)
    with torch.set_grad_enabled(torch.is_grad_enabled() and differentiable):
        leaves = list(zip(grads, states, params, strict=True))
        copy = spread if outermost is not None else lambda tensor, *others: tensor.clone()
        new_params = [copy(param, grad) for grad, _, param in leaves]
        new_states = [{key: copy(own, grad, param) for key, own in state.items()} for grad, state, param in leaves]
        if differentiable:
            # This path computes ``beta ** step`` in the dtype of `step`; torch's others use float64.
            new_states = [{key: x.double() if key == "step" else x for key, x in state.items()} for state in new_states]
        rule(grads, new_states, new_params, differentiable)
        for old, new in zip(states, new_states, strict=True):
            new.update({key: new[key].to(own.dtype) for key, own in old.items()})
    return new_params, new_states


def spread(tensor: Tensor, *others: Tensor) -> Tensor:
    """A copy of `tensor`, batched if one of `others` is, so that in-place operations with `others` work on it."""
    for other in others:
        if other.shape == tensor.shape:
            tensor = torch.where(torch.ones_like(tensor, dtype=torch.bool), tensor, other)
    return tensor.clone()


class _PerExample(torch.autograd.Function):
    """Its ``vmap`` rule, the only one that ever runs, is the public way to get at a batch's physical tensors."""

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
        leaves = len(keys)
        grads, states, params = Tensors(), LeafStates(), Tensors()
        for example in zip(*slices, strict=True):
            its_params, its_states = unpacked(example[leaves:], keys)
            grads.extend(example[:leaves])
            states.extend(its_states)
            params.extend(its_params)
        new_params, new_states = run_pure(rule, grads, states, params)
        stacked = [torch.stack(new_params[leaf::leaves]) for leaf in range(leaves)]
        for leaf, names in enumerate(keys):
            stacked += [torch.stack([state[name] for state in new_states[leaf::leaves]]) for name in names]
        return tuple(stacked), (0,) * len(stacked)


def unpacked(flat: Sequence[Tensor], keys: Sequence[tuple[str, ...]]) -> tuple[Tensors, LeafStates]:
    """(parameters, states) from ``(*parameters, *states)``; `keys` are those of each parameter's state."""
    rest = iter(flat[len(keys) :])
    return list(flat[: len(keys)]), [{name: next(rest) for name in names} for names in keys]
