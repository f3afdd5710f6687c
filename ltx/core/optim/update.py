"""An optimizer's part of a step, as a value: what strategies do something before or after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from ltx.core.base import tree
from ltx.core.optim.base import Optimizer, chosen
from ltx.typing import Tree

T = TypeVar("T")


@dataclass(frozen=True)
class Update:
    """The optimizer's part of a step, before it is done.

    Attributes:
        optimizer: the step's.
        params, opt_state: those before the update.
        grads: the reduced gradients; one for each parameter.
        donate: whether :meth:`apply` overwrites `params` and `opt_state`.
        finite: with dynamic loss scaling or ``guard="skip"``, whether all gradients of all ranks are finite (a 0-dim
            tensor under transforms); else None.
        may_overwrite: whether the strategy may write into the old state, once nothing can fail any more.
        on_overwriting: called before :meth:`apply` overwrites `params` and `opt_state`.
    """

    optimizer: Optimizer
    params: Tree
    grads: Tree
    opt_state: Tree
    donate: bool = False
    finite: bool | torch.Tensor | None = None
    may_overwrite: bool = False
    on_overwriting: Callable[[], None] | None = None

    def apply(self) -> tuple[Tree, Tree]:
        """(new parameters, new optimizer state); the old ones where gradients aren't finite.

        A skipped update is counted like others (schedules of the learning rate read the count), but no tensor changes.
        """
        if self.finite is False:
            return self.params, self.optimizer.advance(self.opt_state)
        optimizer, donate = self.optimizer, self.donate
        if donate and isinstance(self.finite, torch.Tensor):  # on the device, which the host doesn't wait for
            conditional = optimizer.unless(self.finite.logical_not(), tree.flatten(self.params)[0])
            donate = conditional is not None
            optimizer = optimizer if conditional is None else conditional
        if donate and self.on_overwriting is not None:
            self.on_overwriting()
        updated = optimizer.apply(self.grads, self.opt_state, self.params, donate=donate)
        return updated if donate else self.if_finite(updated, (self.params, self.opt_state))

    def if_finite(self, new: T, old: T) -> T:
        """`new`, or `old` where gradients aren't finite."""
        return chosen(self.finite, new, old)
