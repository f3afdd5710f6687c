"""Every ``torch.optim`` class as a pair of pure functions, with bit-equal results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

import optree
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ltx.core.base import private, traced, tree
from ltx.core.base.arguments import checked
from ltx.core.base.errors import OptimError, UnsupportedError
from ltx.core.gradients.planning import any_derivative
from ltx.core.optim.base import LeafStates, OptimizerOffers, Tensors, TorchState, check_state, donated, leaves_like
from ltx.core.optim.kernel import Kernel, build, fusable, run_aligned, run_pure, side_by_side, spread, unpacked
from ltx.core.optim.torch_class import ClassOptimizer, Hyperparameter, check_class_grads, check_params
from ltx.typing import Tree

_ELEMENTWISE: frozenset[type[torch.optim.Optimizer]] = frozenset(
    getattr(torch.optim, name)
    for name in ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)
#: Classes whose updates are proportional to the learning rate.
_PROPORTIONAL = _ELEMENTWISE - {torch.optim.ASGD, torch.optim.Rprop} | {torch.optim.Muon, torch.optim.SparseAdam}
#: Classes whose fused kernels read `found_inf` on the device, and change nothing if it is 1.
_SKIPPING = frozenset({torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW})


@dataclass(frozen=True, repr=False)
class TorchOptimizer(ClassOptimizer):
    """A ``torch.optim`` class with its hyperparameters; made by :func:`ltx.optim.from_torch`."""

    kernel: Kernel = field(init=False, compare=False)
    _skip: Tensor | None = field(default=None, init=False, compare=False)  # set for one update by `_unless`

    def __post_init__(self) -> None:
        super().__post_init__()
        fixed_lr = {} if self.lr is None or "lr" in self._varying else {"lr": self.lr}
        values = self._values(0, self._hyper, but="lr")
        # the schedule may start at 0, but torch makes the momentum's buffer only if momentum isn't 0
        if not values.get("momentum", 1):
            values["momentum"] = 0.9
        object.__setattr__(self, "kernel", build(self.cls, fixed_lr | self._kwargs | values))

    @property
    def offers(self) -> OptimizerOffers:
        return OptimizerOffers(elementwise=self.cls in _ELEMENTWISE, leafwise=True, moves_params=True)

    def _times_lr(self, factor: float) -> TorchOptimizer | None:
        if isinstance(self.lr, Hyperparameter):
            return None
        if callable(self.lr):
            return replace(self, lr=partial(_times, self.lr, factor))
        fixed = self.kernel.group.get("lr")
        return None if fixed is None else replace(self, lr=fixed * factor)

    def init(self, params: Tree) -> TorchState:
        tree.check_tensors(params, "params")
        leaves, spec = tree.flatten(params)
        fused = self._fused(leaves)
        check_params(self.cls, params, fused if self.kwargs.get("fused") else None)
        hyper = self._hyper
        lr = self._values(self.start_step, hyper).get("lr", self.kernel.group["lr"])
        self._traced(lr, 0)  # may be refused
        # the first state depends on shapes alone, so every example of a batch shares it unbatched
        if private.is_transforming():
            leaves = [torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device) for leaf in leaves]
        states = [self.kernel.materialise(*leaf, lr=lr) for leaf in zip(leaves, fused, strict=True)]
        return TorchState(spec.unflatten(side_by_side(states)), hyper=hyper)

    @checked("donate")
    def apply(self, grads: Tree, state: TorchState, params: Tree, *, donate: bool = False) -> tuple[Tree, TorchState]:
        leaves, spec = tree.flatten(params)
        grad_leaves = leaves_like(spec, grads, "grads")
        states = self._per_param(state, spec)
        check_class_grads(self.cls, grad_leaves, leaves, params)
        if (self._varying or self.start_step) and traced.recording():
            _prepare_trace(self)  # refuses it
        if self.start_step and state.count < self.start_step:  # a graph mustn't ask for the count
            grad_leaves = [None] * len(leaves)
        has_grad: Sequence[int] = range(len(leaves))
        picked: tuple[Tensors, LeafStates, Tensors] = (grad_leaves, states, leaves)
        if type(None) in [*map(type, grad_leaves)]:
            has_grad = [index for index, grad in enumerate(grad_leaves) if grad is not None]
            picked = ([grad_leaves[i] for i in has_grad], [states[i] for i in has_grad], [leaves[i] for i in has_grad])
        next_count, hyper = traced.one_more(state.count), state.hyper
        values = self._values(state.count, state.hyper)
        rate = self._traced(values.get("lr"), state.count)
        rule = partial(self._run, state.count, values if rate is None else values | {"lr": 1.0})
        if donate and rate is None and donated(picked[2], picked[0], *map(dict.values, picked[1])):
            increment_version(picked[2])  # fused kernels don't do this themselves
            rule(*picked)
            return params, TorchState(state.per_param, next_count, hyper)
        pure = self._in_graph if traced.recording() else partial(run_pure, rule)
        by_index = dict(zip(has_grad, zip(*pure(*picked), strict=True), strict=True))
        pairs = [
            by_index[index] if index in by_index else (leaf.clone(), {key: t.clone() for key, t in own.items()})
            for index, (leaf, own) in enumerate(zip(leaves, states, strict=True))
        ]
        if rate is not None:
            pairs = [
                ((old + rate.to(old.device) * (new - old)).to(old.dtype), own)
                for old, (new, own) in zip(leaves, pairs, strict=True)
            ]
        per_param = spec.unflatten([own for _, own in pairs])
        return spec.unflatten([leaf for leaf, _ in pairs]), TorchState(per_param, next_count, hyper)

    def _prepared(self, leaves: Tensors, states: LeafStates) -> Callable[[Tensors, TorchState], bool] | None:
        if self._hyper != () or not leaves or not all(self._fused(leaves)):
            return None
        tensors = chain(leaves, chain.from_iterable(map(dict.values, states)))
        if not all(map(Tensor.is_contiguous, tensors)) or (given := self.kernel.gathered(states, leaves)) is None:
            return None
        fixed = None if self._varying else given.row.numbers_of(self.kernel.group)

        def run(grads: Tensors, state: TorchState) -> bool:
            if state.count < self.start_step or {*map(attrgetter("layout"), grads)} != {torch.strided}:
                return False
            numbers = fixed or given.row.numbers_of({**self.kernel.group, **self._values(state.count, ())})
            if numbers is None or not all([*map(Tensor.is_contiguous, grads)]):
                return False
            increment_version(leaves)  # fused kernels don't do this themselves
            return self.kernel.run_gathered(given, numbers, grads, None)

        return run

    def _in_graph(self, grads: Tensors, states: LeafStates, params: Tensors) -> tuple[Tensors, LeafStates]:
        names = tuple(tuple(state) for state in states)
        flat = [t for state in states for t in state.values()]
        return unpacked(apply_in_graph(_prepare_trace(self), names, *grads, *params, *flat), names)

    def leaf_states(self, state: TorchState, params: Tree) -> LeafStates:
        return self._per_param(state, tree.flatten(params)[1])

    def update_leaves(self, grads: Tensors, states: LeafStates, params: Tensors, state: TorchState) -> None:
        check_class_grads(self.cls, grads, params)
        if self.start_step and state.count < self.start_step:  # a graph mustn't ask for the count
            return
        values = self._values(state.count, state.hyper)
        if isinstance(lr := values.get("lr"), Tensor) and lr.requires_grad:
            raise OptimError(
                f"{self}: the learning rate of step {state.count} requires grad, and this update is in place, which "
                'has no derivative. Use overlap="backward", or detach the rate.'
            )
        self._run(state.count, values, grads, states, params)

    def _unless(self, skip: Tensor, params: Sequence[Tensor]) -> TorchOptimizer | None:
        changes = self._hyper != ()  # hyperparameters in the state change too, and a kernel's skip doesn't cover them
        if changes or self.cls not in _SKIPPING or self.kernel.dampened or not all(self._fused(params)):
            return None
        conditional = object.__new__(type(self))  # a copy would be made by the constructor, each step
        vars(conditional).update(vars(self), _skip=skip)
        return conditional

    def _run(
        self, count: int, values: Any, grads: Tensors, states: LeafStates, params: Tensors, differentiable: bool = False
    ) -> None:
        """One update in place; each leaf goes through the fastest kernel that works for it."""
        run = partial(self.kernel.run, hyper=values, skip=self._skip)
        if differentiable:
            run(grads, states, params, "differentiable")
            return
        fused = self._fused(params)
        if any(map(attrgetter("is_sparse"), grads)):
            fused = [can and not grad.is_sparse for can, grad in zip(fused, grads, strict=True)]
        for choice in sorted(set(fused), reverse=True):
            lists = (grads, states, params)
            if fused.count(choice) < len(fused):
                picked = [index for index, is_fused in enumerate(fused) if is_fused is choice]
                lists = ([grads[i] for i in picked], [states[i] for i in picked], [params[i] for i in picked])
            if choice:
                run_aligned(partial(run, way="fused"), *lists)
            else:
                run(*lists, "plain")

    def _fused(self, params: Sequence[Tensor]) -> list[bool]:
        options = self.kernel.group
        wanted = options.get("fused", False) is not False and not options.get("foreach")
        return fusable(self.cls, params) if wanted and not options.get("differentiable") else [False] * len(params)

    def _per_param(self, state: TorchState, spec: optree.PyTreeSpec) -> LeafStates:
        check_state(self, state, TorchState)
        states = leaves_like(spec, state.per_param, "the optimizer's state")
        if type(None) in (kinds := [*map(type, states)]):
            path = tree.leaf_paths(spec.unflatten([*range(len(states))]))[kinds.index(type(None))]
            raise OptimError(
                f"{self}: the state has nothing for {path!r}, which was frozen when it was made. A train state for"
                " what is trained now is train_step(...).adopt(state), which begins anew what that lacks."
            )
        if not all(issubclass(kind, Tensor) for kind in {type(value) for own in states for value in own.values()}):
            raise OptimError(
                f"{self} expected the state that its init(params) made; this one is that of other parameters, "
                "which have containers where these have tensors."
            )
        if {*map(type, states)} - {dict}:  # a TensorDict makes a TensorDict of what is put into it
            return [own if type(own) is dict else {name: own[name] for name in own.keys()} for own in states]  # noqa: SIM118
        return states

    def _traced(self, lr: float | Tensor | None, count: int) -> Tensor | None:
        """The learning rate if it is differentiated or batched, which most classes would cut to a number; else None."""
        if not isinstance(lr, Tensor) or traced.recording() or not (any_derivative([lr]) or private.is_wrapped(lr)):
            return None
        if self.cls not in _PROPORTIONAL:
            raise OptimError(
                f"{self}: the learning rate of step {count} is differentiated or batched, and an update of "
                f"{self.cls.__name__} isn't proportional to its rate. Detach it, or use another class, such as Adam."
            )
        return lr


def _times(lr: Callable[[int], Any], factor: float, count: int) -> Any:
    return lr(count) * factor


@traced.at_trace_time
def _prepare_trace(optimizer: TorchOptimizer) -> str:
    """The key under which a compiled graph looks up `optimizer`."""
    if optimizer._varying or optimizer.start_step:
        names = " and ".join(sorted([*optimizer._varying, *["start_step"] * (optimizer.start_step > 0)]))
        raise UnsupportedError(
            f"{optimizer!r}: a compiled step can't ask for the {names} of each step, as Python doesn't run "
            "there. Give numbers, or compile the loss alone: ltx.data_parallel(torch.compile(loss), strategy)."
        )
    if not optimizer.kernel.traceable:
        raise UnsupportedError(
            f"{optimizer!r} reads numbers off its state, which a compiled step can't do. Compile the loss alone: "
            "ltx.data_parallel(torch.compile(loss), strategy)."
        )
    return traced.keep(f"{optimizer!r} {id(optimizer)}", optimizer)


@traced.node
def apply_in_graph(key: str, names: tuple[tuple[str, ...], ...], *tensors: Tensor) -> tuple[Tensor, ...]:
    """The new parameters and states, from ``tensors = (*gradients, *parameters, *states)``."""
    optimizer, count = traced.kept(key), len(names)
    # Compilers make one kernel of an operation on lists (foreach), and sooner. torch.func has no rules for it.
    traced_in_lists = traced.recording() and not private.in_transform()
    if traced_in_lists and traced.only_asked_for_shapes():
        return tuple(map(torch.empty_like, tensors[count:]))
    grads, (params, states) = tensors[:count], unpacked(tensors[count:], names)
    params = [spread(x, grad) for x, grad in zip(params, grads, strict=True)]
    # Bias corrections are ``beta ** step``. This path computes them in the dtype of `step`; torch's others use float64.
    news = [
        {name: x.double() if name == "step" else spread(x, grad) for name, x in state.items()}
        for state, grad in zip(states, grads, strict=True)
    ]
    with torch.no_grad():
        # Neither path reads a number off a tensor.
        optimizer.kernel.run(list(grads), news, params, "traced" if traced_in_lists else "differentiable")
    after = (new[name].to(x.dtype) for state, new in zip(states, news, strict=True) for name, x in state.items())
    return *params, *after
