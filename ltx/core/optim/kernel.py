"""torch's own update rules, run on explicit lists of tensors.

A ``torch.optim`` class keeps its arithmetic in a functional kernel that takes lists (parameters, gradients, one list
for each kind of state), and ``step()`` is: gather the lists with ``_init_group``, call the kernel. So a step of any
class runs on tensors that the caller holds if ``_init_group`` hands over the caller's lists. Nothing is keyed by
parameter, no ``.grad`` is set, and every call has a throw-away instance to itself, so nothing survives it.

:func:`run_pure` does the same without writing into anything, under any nest of transforms.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.optim._functional import sparse_adam
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from ltx.core.base.errors import OptimError
from ltx.core.gradients.planning import any_derivative
from ltx.core.optim.base import LeafStates, Rate, Tensors

Lr = Rate | None


class NotGatheredError(OptimError):
    """A class doesn't gather its tensors in ``_init_group``; :mod:`ltx.core.optim.torch_class` runs it."""


@dataclass(frozen=True)
class Kernel:
    """The update rule of one class with its hyperparameters; made by :func:`build`.

    Attributes:
        shell: an instance over a placeholder parameter. Never stepped: each call steps a bare copy.
        group: its param group, without parameters.
        step: the class's ``step``, free of the profiling and Dynamo wrappers (the latter take 1.5 s to import).
        slots: the state key of each list that ``_init_group`` fills after parameters and gradients; None if unused.
    """

    shell: Any
    group: Mapping[str, Any]
    step: Callable[[Any], Any]
    slots: tuple[str | None, ...]

    @property
    def traceable(self) -> bool:
        """Whether a path of it reads no number off a tensor. All of Adagrad's read the count of steps."""
        return "differentiable" in self.group and not self._is(torch.optim.Adagrad)

    @property
    def takes_lists(self) -> bool:
        """Whether its foreach path reads no number off a tensor, if it is told so."""
        return "foreach" in self.group and ("capturable" in self.group or self._is(torch.optim.SGD))

    @property
    def dampened(self) -> bool:
        """SGD whose first step differs from the others, which then has to know whether it is the first."""
        return bool(self.group.get("momentum") and self.group.get("dampening"))

    def copy(self, group: dict[str, Any]) -> Any:
        """A fresh instance with one param group, sharing nothing that a step writes to."""
        shell = object.__new__(type(self.shell))
        shell.__dict__.update(self.shell.__dict__)
        shell.param_groups, shell.state = [group], defaultdict(dict)
        return shell

    def materialise(self, param: Tensor, fused: bool, lr: Lr) -> dict[str, Tensor]:
        """The state that torch would create at the first step of `param`, from its shape, dtype and device alone."""
        if self._is(torch.optim.SGD):
            if not self.group["momentum"]:
                return {}
            # torch starts the buffer as a copy of the first gradient. Minus zero is the number that makes
            # momentum * buffer + gradient that copy, to the bit.
            state = {"momentum_buffer": torch.full_like(param, -0.0)}
            return state | {"step": torch.tensor(0.0)} if self.dampened else state
        if self._is(torch.optim.SparseAdam):
            zeros = {key: torch.zeros_like(param) for key in ("exp_avg", "exp_avg_sq")}
            return zeros | {"step": torch.tensor(0.0)}
        state, _ = self._probe(param, lr, fused)
        return state

    def run(
        self,
        grads: Tensors,
        states: LeafStates,
        params: Tensors,
        *,
        lr: Lr,
        fused: bool,
        differentiable: bool = False,
        traced: bool = False,
        skip: Tensor | None = None,
    ) -> None:
        """One update of `params` and `states`, in place; none if `skip` is true, which fused kernels look at.

        `traced`: read no number off a tensor, and take lists of tensors in one operation where the class can do both.
        """
        changes: dict[str, Any] = {"lr": lr, "fused": fused}
        if traced and self.takes_lists:
            changes |= {"foreach": True, "capturable": True}
        else:
            differentiable = differentiable or traced
        if differentiable:
            if "differentiable" not in self.group:
                raise OptimError(
                    f"{type(self.shell).__name__}'s update can't be differentiated: torch has no differentiable path "
                    "for it. Detach what it is given, or run it under torch.no_grad() and outside of torch.func."
                )
            changes |= {"foreach": False, "differentiable": True}
        group = {**self.group, **{key: value for key, value in changes.items() if key in self.group}}
        # torch.func has gradients enabled as it needs them; outside of it torch's own rule holds.
        own_rule = bool(self.group.get("differentiable", False))
        with torch.set_grad_enabled(torch.is_grad_enabled() if differentiable else own_rule):
            if self._is(torch.optim.SparseAdam):
                self._run_sparse_adam(group, grads, states, params)
            elif self.dampened:
                self._run_dampened(group, grads, states, params)
            else:
                self._run(group, grads, states, params, skip)

    def _run(
        self, group: dict[str, Any], grads: Tensors, states: LeafStates, params: Tensors, skip: Tensor | None = None
    ) -> None:
        group["params"] = params
        # torch's foreach Nesterov step adds into the gradients themselves.
        if group.get("nesterov") and self._is(torch.optim.SGD) and group["foreach"]:
            grads = [grad.clone() for grad in grads]
        # What _init_group returns: has_sparse_grad for SGD, both for Adagrad, has_complex for the others.
        returned: Any = any(param.is_complex() for param in params)
        if self._is(torch.optim.SGD, torch.optim.Adagrad):
            has_sparse = any(grad.is_sparse for grad in grads)
            returned = has_sparse if self._is(torch.optim.SGD) else (has_sparse, returned)

        def init_group(group: Any, params_out: Tensors, grads_out: Tensors, *lists: list[Any]) -> Any:
            params_out.extend(params)
            grads_out.extend(grads)
            for slot, out in zip(self.slots, lists, strict=True):
                if slot is not None:
                    out.extend([state.get(slot) for state in states])
            return returned

        shell = self.copy(group)
        shell._init_group = init_group
        if skip is not None:
            shell.grad_scale, shell.found_inf = None, skip.float()  # as torch's GradScaler says it
        self.step(shell)

    def _run_dampened(self, group: dict[str, Any], grads: Tensors, states: LeafStates, params: Tensors) -> None:
        """torch doesn't dampen a parameter's first gradient."""
        first = [state["step"].item() == 0 for state in states]
        for dampening, chosen in ((0.0, first), (group["dampening"], [not is_first for is_first in first])):
            picked = [i for i, is_chosen in enumerate(chosen) if is_chosen]
            if picked:
                lists = ([grads[i] for i in picked], [states[i] for i in picked], [params[i] for i in picked])
                self._run({**group, "dampening": dampening}, *lists)
        for state in states:
            state["step"].add_(1)

    def _run_sparse_adam(self, group: dict[str, Any], grads: Tensors, states: LeafStates, params: Tensors) -> None:
        """SparseAdam has no ``_init_group`` and counts in Python integers."""
        for state in states:
            state["step"].add_(1)
        beta1, beta2 = group["betas"]
        sparse_adam(
            params,
            grads,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [int(state["step"]) for state in states],
            beta1=beta1,
            beta2=beta2,
            **{key: group[key] for key in ("eps", "lr", "maximize")},
        )

    def _probe(self, param: Tensor, lr: Lr, fused: bool) -> tuple[dict[str, Any], list[list[Any]]]:
        """State and lists as torch's own ``_init_group`` makes them for one parameter."""
        alias = param.detach()
        alias.grad = param.detach()  # only its shape is read; an alias costs no memory
        group = {**self.group, "params": [alias]}
        group |= {key: value for key, value in (("lr", lr), ("fused", fused)) if key in group and value is not None}
        shell = self.copy(group)
        if self.shell.state:  # made by the constructor, as Adagrad's is in torch 2.11
            options = {key: value for key, value in group.items() if key != "params"}
            shell.state.update(type(self.shell)([alias], **options).state)
        lists: list[list[Any]] = [[] for _ in inspect.signature(shell._init_group).parameters][1:]
        shell._init_group(group, *lists)
        return dict(shell.state[alias]), lists[2:]

    def _is(self, *classes: type[torch.optim.Optimizer]) -> bool:
        return isinstance(self.shell, classes)


def build(cls: type[torch.optim.Optimizer], hyperparameters: Mapping[str, Any]) -> Kernel:
    """The kernel of `cls`.

    Raises:
        ltx.errors.OptimError: for hyperparameters that torch refuses.
        NotGatheredError: for classes of other authors whose ``step`` isn't built as torch's own are.
    """

    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:  # torch's imports Dynamo
        self.param_groups.append({**self.defaults, **param_group})

    # The subclass is this call's own, as torch patches `step` of the class.
    shell_cls = type(cls.__name__, (cls,), {"add_param_group": add_param_group})
    try:
        shell: Any = shell_cls([torch.zeros(1, 1)], **hyperparameters)
    except (ValueError, TypeError, RuntimeError) as error:
        raise OptimError(f"from_torch({cls.__name__}): {cls.__name__} refused its arguments: {error}") from error
    group = {key: value for key, value in shell.param_groups[0].items() if key != "params"}
    kernel = Kernel(shell, group, inspect.unwrap(cls.step), ())
    if issubclass(cls, torch.optim.SGD) and cls._init_group is not torch.optim.SGD._init_group:
        raise NotGatheredError(f"{cls.__name__} has an _init_group of its own, and SGD's lists are known to be SGD's.")
    if issubclass(cls, torch.optim.SGD):
        slots: tuple[str | None, ...] = ("momentum_buffer" if group["momentum"] else None,)
    elif issubclass(cls, torch.optim.SparseAdam):
        slots = ()
    elif hasattr(cls, "_init_group"):
        slots = _slots(kernel, cls)
    else:
        raise NotGatheredError(f"{cls.__name__} has no _init_group.")
    return Kernel(shell, group, kernel.step, slots)


def _slots(kernel: Kernel, cls: type) -> tuple[str | None, ...]:
    """Match each list of ``_init_group`` with the state key whose tensor is put into it."""
    found: list[str | None] = []
    keys: set[str] = set()
    for shape in ((1, 1), (1,)):  # Adafactor fills other lists for matrices than for vectors
        state, lists = kernel._probe(torch.zeros(shape), None, False)
        found = found or [None] * len(lists)
        key_of = {id(tensor): key for key, tensor in state.items()}
        for i, gathered in enumerate(lists):
            found[i] = found[i] or next((key_of[id(x)] for x in gathered if id(x) in key_of), None)
        keys |= state.keys()
    if missing := sorted(keys - set(found)):
        raise NotGatheredError(f"{cls.__name__} doesn't gather its state {missing} in _init_group.")
    return tuple(found)


Run = Callable[[Tensors, LeafStates, Tensors], None]


def fusable(cls: type[torch.optim.Optimizer], params: Sequence[Tensor]) -> list[bool]:
    """For each parameter, whether torch has a fused kernel of `cls` that works for its dtype and device."""
    kinds, devices = [(param.dtype, param.device.type) for param in params], _get_fused_kernels_supported_devices()
    answers = {(dtype, device): dtype.is_floating_point and device in devices for dtype, device in set(kinds)}
    if issubclass(cls, torch.optim.SGD):
        # Fused SGD on CPU leaves half-precision parameters as they are and fills momentum with garbage, where a vector
        # lane is full (torch issue 191763, in 2.13 and before).
        answers |= dict.fromkeys([(torch.float16, "cpu"), (torch.bfloat16, "cpu")], False)
    return [answers[kind] for kind in kinds]


def run_aligned(run: Run, grads: Tensors, states: LeafStates, params: Tensors) -> None:
    """``run(grads, states, params)``, in place, for a `run` that supposes that the tensors of a leaf lie alike."""
    in_states = chain.from_iterable(state.values() for state in states)
    if all(map(Tensor.is_contiguous, chain(grads, params, in_states))):
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
    """The leaf's tensors in one dense layout: the very tensors where they have it, else contiguous copies."""

    def alike(tensor: Tensor) -> bool:
        pairs = zip(param.shape, tensor.stride(), param.stride(), strict=True)
        return all(its == own for length, its, own in pairs if length > 1)  # no step is made along the others

    dense = alike(torch.empty_like(param, device="meta"))  # preserve_format keeps only dense strides
    if dense and all(alike(tensor) for tensor in state.values() if tensor.shape == param.shape):
        return grad if alike(grad) else torch.empty_like(param).copy_(grad), state, param
    return grad.contiguous(), {key: tensor.contiguous() for key, tensor in state.items()}, param.contiguous()


#: Updates states and parameters in place; the `bool` asks for torch's differentiable path.
Rule = Callable[[Tensors, LeafStates, Tensors, bool], None]


def run_pure(rule: Rule, grads: Tensors, states: LeafStates, params: Tensors) -> tuple[Tensors, LeafStates]:
    """``(new_params, new_states)`` as the in-place `rule` would leave them, under any nest of transforms.

    Under ``vmap`` each example gets what it would get alone: the examples' slices become so many leaves more, which one
    call of the kernel updates, so the arithmetic is that of separate runs to the last bit and ``step`` counters may
    differ between examples. Under ``grad`` and ``jvp`` torch's differentiable single-tensor path runs on copies.
    """
    flat = [*grads, *params, *chain.from_iterable(state.values() for state in states)]
    wrapped = [t for t in flat if _functorch.is_functorch_wrapped_tensor(t)]
    outermost = max(wrapped, key=_functorch.maybe_get_level, default=None)
    if outermost is not None and _functorch.is_batchedtensor(outermost):
        keys = [tuple(state) for state in states]
        return _unflatten(_PerExample.apply(rule, keys, *flat), keys)  # type: ignore[no-untyped-call]
    differentiable = outermost is not None or any_derivative(flat)
    with torch.set_grad_enabled(torch.is_grad_enabled() and differentiable):
        leaves = list(zip(grads, states, params, strict=True))
        copy = _spread if outermost is not None else lambda tensor, *others: tensor.clone()
        new_params = [copy(param, grad) for grad, _, param in leaves]
        new_states = [{key: copy(own, grad, param) for key, own in state.items()} for grad, state, param in leaves]
        if differentiable:
            # Powers of the decays are taken of the count of steps, in its dtype here and in float64 in torch's others.
            new_states = [{key: x.double() if key == "step" else x for key, x in state.items()} for state in new_states]
        rule(grads, new_states, new_params, differentiable)
        for old, new in zip(states, new_states, strict=True):
            new.update({key: new[key].to(own.dtype) for key, own in old.items()})
    return new_params, new_states


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
        leaves = len(keys)
        grads, states, params = Tensors(), LeafStates(), Tensors()
        for example in zip(*slices, strict=True):
            its_params, its_states = _unflatten(example[leaves:], keys)
            grads.extend(example[:leaves])
            states.extend(its_states)
            params.extend(its_params)
        new_params, new_states = run_pure(rule, grads, states, params)
        stacked = [torch.stack(new_params[leaf::leaves]) for leaf in range(leaves)]
        for leaf, names in enumerate(keys):
            stacked += [torch.stack([state[name] for state in new_states[leaf::leaves]]) for name in names]
        return tuple(stacked), (0,) * len(stacked)


def _unflatten(flat: Sequence[Tensor], keys: list[tuple[str, ...]]) -> tuple[Tensors, LeafStates]:
    """Parameters and states out of one list of both."""
    rest = iter(flat[len(keys) :])
    return list(flat[: len(keys)]), [{name: next(rest) for name in names} for names in keys]
