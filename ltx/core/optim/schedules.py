"""Learning rates as functions of the number of updates done so far."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ltx.core.base.arguments import brief, check_fields, number, whole
from ltx.core.base.errors import OptimError


@dataclass(frozen=True)
class Linear:
    """Made by :func:`linear`."""

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        check_fields(self, OptimError, "start", "end")
        whole("linear: steps", self.steps, 1, OptimError)

    def __call__(self, step: int) -> float:
        return self.start + (self.end - self.start) * min(step / self.steps, 1.0)


def linear(start: float, end: float, steps: int) -> Callable[[int], float]:
    """From `start` to `end` in so many steps, and `end` from then on, as optax's ``linear_schedule``.

    >>> schedule = linear(1.0, 0.0, 4)
    >>> [schedule(step) for step in range(6)]
    [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    return Linear(start, end, steps)


@dataclass(frozen=True)
class WarmupCosine:
    """Made by :func:`warmup_cosine`."""

    peak: float
    warmup_steps: int
    total_steps: int
    end: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, OptimError, "peak", "warmup_steps", "end")
        whole("warmup_cosine: total_steps", self.total_steps, 1, OptimError)
        if not 0 <= self.warmup_steps <= self.total_steps:
            raise OptimError(
                f"warmup_cosine: warmup_steps must be from 0 to total_steps, got {self.warmup_steps} of "
                f"{self.total_steps}."
            )

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if step >= self.total_steps:
            return self.end
        done = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        return self.end + (self.peak - self.end) * 0.5 * (1.0 + math.cos(math.pi * done))


def warmup_cosine(peak: float, warmup_steps: int, total_steps: int, end: float = 0.0) -> Callable[[int], float]:
    """Up to `peak` in equal parts, then down to `end` along half a cosine.

    The first step has ``peak / warmup_steps``, not 0, so that it isn't wasted; step ``total_steps`` and those after it
    have `end`. Loshchilov, Hutter: SGDR (2017), equation 5, for the cosine.

    >>> schedule = warmup_cosine(1.0, warmup_steps=2, total_steps=6)
    >>> [round(schedule(step), 3) for step in range(8)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0, 0.0]
    """
    return WarmupCosine(peak, warmup_steps, total_steps, end)


@dataclass(frozen=True)
class FromScheduler:
    """Made by :func:`from_scheduler`."""

    make: Callable[[torch.optim.Optimizer], LRScheduler]
    lr: float
    # The rates found so far: a scheduler gives them one after the other. They are the same whoever asks.
    _rates: list[float] = field(init=False, default_factory=list, compare=False, repr=False)

    def __call__(self, step: int) -> float:
        if step >= len(self._rates):
            self._rates[:] = self._found(step)
        return self._rates[step]

    def _found(self, step: int) -> list[float]:
        """The rates up to `step`, and some of those behind it, which the next calls ask for."""
        count = max(2 * step, 64)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=self.lr)
        momentum = optimizer.param_groups[0]["momentum"]
        scheduler = self.make(optimizer)
        if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
            raise OptimError(
                "from_scheduler: the function must return a scheduler of torch.optim.lr_scheduler whose rates are "
                f"those of the step alone, not ReduceLROnPlateau; got {brief(scheduler)}."
            )
        rates = []
        for _ in range(count):
            group = optimizer.param_groups[0]
            if group["momentum"] != momentum:
                raise OptimError(
                    f"from_scheduler: {type(scheduler).__name__} changes the momentum too, which a learning rate "
                    "can't. Give it cycle_momentum=False."
                )
            rates.append(float(group["lr"]))
            optimizer.step()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's, of schedulers within schedulers
                try:
                    scheduler.step()
                except Exception as error:
                    if isinstance(error, ValueError) and str(error).startswith("Tried to step"):  # OneCycleLR's end
                        return rates + rates[-1:] * (count - len(rates))
                    if len(rates) <= step:
                        raise
                    return rates  # nobody has asked for the rest yet
        return rates

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.make, self.lr)


def from_scheduler(make: Callable[[torch.optim.Optimizer], LRScheduler], lr: float) -> Callable[[int], float]:
    """The learning rates of a scheduler of ``torch.optim.lr_scheduler``, as a function of the step.

    >>> import torch
    >>> schedule = from_scheduler(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2), lr=1.0)
    >>> [round(schedule(step), 4) for step in range(5)]
    [1.0, 1.0, 0.1, 0.1, 0.01]
    >>> import ltx
    >>> adamw = ltx.optim.from_torch(torch.optim.AdamW, lr=schedule)

    Args:
        make: given an optimizer with the rate `lr`, it returns the scheduler: a function, or
            ``functools.partial(StepLR, step_size=2)``, which pickles.
        lr: the rate that it begins with.

    Raises:
        ltx.errors.OptimError: at the first step, where `make` returns something else, or a scheduler that changes the
            momentum as well.
    """
    if not callable(make) or isinstance(make, LRScheduler):
        raise OptimError(
            f"from_scheduler expected a function from an optimizer to a scheduler, such as lambda optimizer: "
            f"StepLR(optimizer, 30), got {brief(make)}."
        )
    return FromScheduler(make, float(number("from_scheduler: lr", lr, 0, OptimError)))
