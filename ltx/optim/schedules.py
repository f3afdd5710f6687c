"""Hyperparameters that change: functions of the number of updates, and values that the optimizer's state keeps."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ltx.errors import OptimError
from ltx.extend import arguments, brief, optimizers, tree, unwrapped
from ltx.typing import Tree


@dataclass(frozen=True)
class WarmupCosine:
    peak: float
    warmup_steps: int
    total_steps: int
    end: float = 0.0

    def __post_init__(self) -> None:
        arguments.check_fields(self, OptimError, "peak", "warmup_steps", "end")
        arguments.whole("warmup_cosine: total_steps", self.total_steps, 1, OptimError)
        if not 0 <= self.warmup_steps <= self.total_steps:
            raise OptimError(
                f"warmup_cosine: warmup_steps must be from 0 to total_steps, got {self.warmup_steps} of "
                f"{self.total_steps}."
            )

    @property
    def base_lr(self) -> float:
        return self.peak

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if step >= self.total_steps:
            return self.end
        done = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        return self.end + (self.peak - self.end) * 0.5 * (1.0 + math.cos(math.pi * done))


def warmup_cosine(peak: float, warmup_steps: int, total_steps: int, end: float = 0.0) -> Callable[[int], float]:
    """A linear warm-up to `peak`, then half a cosine down to `end`.

    The first step has ``peak / warmup_steps``, not 0, so that it isn't wasted; step ``total_steps`` and those after it
    have `end`. Loshchilov, Hutter: SGDR (2017), equation 5, for the cosine.

    >>> schedule = warmup_cosine(1.0, warmup_steps=2, total_steps=6)
    >>> [round(schedule(step), 3) for step in range(8)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0, 0.0]
    """
    return WarmupCosine(peak, warmup_steps, total_steps, end)


@dataclass(frozen=True)
class FromScheduler:
    make: Callable[[torch.optim.Optimizer], LRScheduler]
    base_lr: float
    # A cache of the rates by step: a scheduler computes them only in order. Every call would compute the same rates.
    _rates: list[float] = field(init=False, default_factory=list, compare=False, repr=False)

    def __call__(self, step: int) -> float:
        if step >= len(self._rates):
            self._rates[:] = self._found(step)
        return self._rates[step]

    def _found(self, step: int) -> list[float]:
        """The rates up to `step`, and some later ones, for the next calls."""
        count = max(2 * step, 64)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros((), device="cpu"))], lr=self.base_lr)
        momentum = optimizer.param_groups[0]["momentum"]
        scheduler = self.make(optimizer)
        if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
            raise OptimError(
                "from_scheduler: the function must return a scheduler of torch.optim.lr_scheduler whose rates are "
                f"those of the step alone; got {brief(scheduler)}. Give another library's as a function of the step; a "
                "rate that follows the loss is changed between steps: ltx.optim.adjustable and ltx.optim.adjust."
            )
        rates = []
        for _ in range(count):
            group = optimizer.param_groups[0]
            if group["momentum"] != momentum:
                what = f"{type(scheduler).__name__} changes the momentum too"
                raise OptimError(f"from_scheduler: {what}. Give it cycle_momentum=False.")
            rates.append(float(group["lr"]))
            optimizer.step()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's nested schedulers warn
                try:
                    scheduler.step()
                except Exception as error:
                    if isinstance(error, ValueError) and str(error).startswith("Tried to step"):  # OneCycleLR's end
                        return rates + rates[-1:] * (count - len(rates))
                    if len(rates) <= step:
                        raise
                    return rates  # the error may concern later steps, which nobody has asked for yet
        return rates

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.make, self.base_lr)


def from_scheduler(make: Callable[[torch.optim.Optimizer], LRScheduler], lr: float) -> Callable[[int], float]:
    """The learning rates of a ``torch.optim.lr_scheduler`` scheduler, as a function of the step.

    >>> import torch
    >>> schedule = from_scheduler(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2), lr=1.0)
    >>> [round(schedule(step), 4) for step in range(5)]
    [1.0, 1.0, 0.1, 0.1, 0.01]
    >>> import ltx
    >>> adamw = ltx.optim.from_torch(torch.optim.AdamW, lr=schedule)

    Args:
        make: a function from an optimizer with the rate `lr` to the scheduler, such as ``functools.partial(StepLR,
            step_size=2)``, which can be pickled.
        lr: the first rate.

    Raises:
        ltx.errors.OptimError: at the first step: `make` returns something else, or what changes the momentum too.
    """
    if not callable(make) or isinstance(make, LRScheduler):
        raise OptimError(
            f"from_scheduler expected a function from an optimizer to a scheduler, such as lambda optimizer: "
            f"StepLR(optimizer, 30), got {brief(make)}."
        )
    return FromScheduler(make, float(arguments.number("from_scheduler: lr", lr, 0, OptimError)))


@dataclass(frozen=True)
class Adjustable(optimizers.Hyperparameter):
    """A hyperparameter that is kept in the state of :func:`from_torch`'s optimizer; made by :func:`adjustable`."""

    start: float | tuple[float, ...]

    @property
    def base_lr(self) -> float | None:
        return self.start if isinstance(self.start, float) else None

    def __post_init__(self) -> None:
        self.init()

    def init(self) -> optimizers.Kept:
        return optimizers.Kept(_tensors("adjustable: value", self.start))


def _tensors(what: str, value: Any) -> Tree:
    if isinstance(value, tuple):
        return tuple(_tensors(what, each) for each in value)
    if not isinstance(value, Tensor) or value.ndim:
        return torch.tensor(arguments.number(what, value, 0, OptimError), dtype=torch.float64, device="cpu")
    for each in unwrapped(value).detach().flatten().tolist():  # one for each simulated rank
        arguments.number(what, each, 0, OptimError)
    return value.to("cpu", torch.float64, copy=True)  # a copy, so that the caller may overwrite `value` later


def adjustable(value: float | tuple[float, ...]) -> Any:
    """A hyperparameter that :func:`from_torch`'s optimizer keeps in its state; :func:`adjust` changes it between steps.

    >>> import torch, ltx
    >>> sgd = ltx.optim.from_torch(torch.optim.SGD, lr=adjustable(0.5), momentum=adjustable(0.0))
    >>> state = adjust(sgd.init({"w": torch.zeros(1)}), lr=2.0)
    >>> sgd.apply({"w": torch.ones(1)}, state, {"w": torch.zeros(1)})[0], state.hyper["lr"].value.item()
    ({'w': tensor([-2.])}, 2.0)

    It works for every hyperparameter that is a number or a tuple of numbers (Adam's ``betas``), as optax's
    ``inject_hyperparams`` does. A schedule needn't be kept in the state.

    Raises:
        ltx.errors.OptimError: the value is neither a number >= 0 nor a tuple of such numbers.
    """
    return Adjustable(value)


def adjust(state: Tree, **values: float | Tensor | tuple[float | Tensor, ...]) -> Tree:
    """An optimizer's `state` with new values of :func:`adjustable` hyperparameters, the same on all ranks.

    A value is a number, a 0-dim tensor (the state keeps a copy), or a tuple of these.

    In a train state: ``dataclasses.replace(state, opt_state=ltx.optim.adjust(state.opt_state, lr=0.01))``. For one
    group of a :func:`partition`: ``opt_state | {label: adjust(opt_state[label], lr=0.01)}``.

    Raises:
        ltx.errors.OptimError: the state keeps no hyperparameter of that name, or keeps a tuple of another length.
    """
    found = set[str]()

    def changed(node: optimizers.TorchState) -> optimizers.TorchState:
        hyper = dict(node.hyper)
        mine = {
            name: hyper[name]._replace(value=_tensors(f"adjust: {name}", values[name]))
            for name in values.keys() & hyper.keys()
        }
        for name, own in mine.items():
            if tree.flatten(own.value)[1] != tree.flatten(hyper[name].value)[1]:
                raise OptimError(f"adjust: {name} is kept as {brief(hyper[name].value)}, got {brief(values[name])}.")
        found.update(mine)
        return replace(node, hyper=hyper | mine or ())

    after = optimizers.at_nodes(state, changed, optimizers.TorchState)
    if missing := sorted(values.keys() - found):
        raise OptimError(
            f"adjust: this state keeps no {' and no '.join(missing)}. Make the optimizer with it: "
            f"ltx.optim.from_torch(cls, {missing[0]}=ltx.optim.adjustable(value))."
        )
    return after
