"""One call of a step: its marked parameters, its tied output, and the value that the caller gets."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from ltx import collectives, comm, tree
from ltx.axis import Axis
from ltx.errors import StepError, WeightError
from ltx.gradients.schedule import Schedule
from ltx.hooks import CommHook
from ltx.placements import Placements
from ltx.transforms.sync_state import plain_values
from ltx.transforms.weighted import Weighted
from ltx.typing import Tree


@dataclass(frozen=True)
class CallOptions:
    """How the marker of one call works. A plain call of a step has none of these.

    Attributes:
        deferred: the backward pass doesn't wait for its reductions: the caller does. The caller then differentiates
            with respect to :attr:`Run.inputs`, and parameters needn't require gradients.
        next_forward: the next forward pass goes on while reductions of this one are pending.
        step: the number of steps so far, for a caller that counts them; None: the communication state counts.
        hook: what ranks share in place of gradients; None: what the strategy says.
        frozen: parameters that take the places of None among those of the step.
        around: a context manager, given the marked parameters and the step's function, that surrounds the call.
    """

    deferred: bool = False
    next_forward: bool = False
    step: int | None = None
    hook: CommHook | None = None
    frozen: Tree = None
    around: Callable[[list[Any], Any], AbstractContextManager[Any]] | None = None


PLAIN_CALL = CallOptions()


@dataclass(frozen=True)
class Marked:
    """What a step is given, and what will be done to what it returns.

    Attributes:
        leaves: the parameters, marked or as they are.
        tie: ties floating tensors to the markers; None if there are none.
        schedule: the schedule of the backward pass on an axis, if there will be one; None inside a compiled graph.
        inputs: what to differentiate with respect to, where the schedule has all that comes of it.
        as_given: `leaves` are those that the step was called with. (A list's identity can't be asked in a graph.)
    """

    leaves: list[Any]
    tie: Callable[[list[torch.Tensor]], list[torch.Tensor]] | None = None
    schedule: Schedule | None = None
    inputs: list[torch.Tensor] | None = None
    as_given: bool = False

    def tied(self, output: Any) -> Any:
        """`output` with its floating tensors tied."""
        if self.tie is None:
            return output
        leaves, spec = tree.flatten(output)
        ties = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        if not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()):
            # What is detached stays so. Where all is, the rank's loss reaches no parameter, and counts all the same.
            ties = [i for i in ties if leaves[i].requires_grad] or ties
        if ties:
            given = [leaves[i] for i in ties]
            placements = Placements.of(given)
            tied = self.tie(given if placements is None else placements.local(given))
            for i, x in zip(ties, tied if placements is None else placements.placed(tied), strict=True):
                leaves[i] = x
        elif self.schedule is not None:
            raise StepError("the step returned no floating tensor, so its parameters have no gradient.")
        return tree.unflatten(spec, leaves)


@dataclass(frozen=True)
class Run:
    """One call of a step, before its value is made.

    Attributes:
        output: what the user's function returned, tied to the markers.
        axis: the step's.
        schedule, inputs: as in :class:`Marked`.
        mean: values are means over ranks.
        blocked: the value and its gradients are this rank's own.
        local: ranks don't share gradients in this step, so a :class:`Weighted`'s mean is this rank's own too.
        within: the part of the axis whose ranks share them, if it isn't all.
    """

    output: Any
    axis: Any
    schedule: Schedule | None
    mean: bool
    blocked: bool
    local: bool = False
    within: Axis | None = None
    inputs: list[torch.Tensor] | None = None

    @property
    def weighted(self) -> bool:
        """Whether the step returned a :class:`Weighted`, alone or first in a tuple."""
        return isinstance(self.output, Weighted) or (
            isinstance(self.output, tuple) and len(self.output) > 0 and isinstance(self.output[0], Weighted)
        )

    def value(self) -> Any:
        """What the caller of the step gets."""
        output = self.output
        if self.weighted:
            first = output if isinstance(output, Weighted) else output[0]
            mean = self._weighted_mean(first)
            return mean if isinstance(output, Weighted) else (mean, *self.averaged(output[1:]))
        return self.averaged(output)

    def averaged(self, values: Tree) -> Tree:
        """`values` with the mean over ranks of floating tensors, if outputs are means."""
        if not self.mean or self.blocked:
            return values
        leaves, spec = tree.flatten(values)
        floating = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        if floating:
            for i, x in zip(floating, collectives.pmean([leaves[i] for i in floating], self.axis), strict=True):
                leaves[i] = x
        return tree.unflatten(spec, leaves)

    def _weighted_mean(self, output: Weighted) -> torch.Tensor:
        total, weight = output.checked()
        alone = self.blocked or self.local
        if not alone:
            total, weight = collectives.psum((total, weight), self.within or self.axis)
        if not torch.compiler.is_compiling() and self._is_zero(weight):
            of = "" if self.within is None else f" of {self.within.name!r}"
            whose = "this rank's weight is 0" if alone else f"the weights of all ranks{of} add up to 0"
            raise WeightError(
                f"Weighted: {whose}, so there is no mean. Give at least one rank a sample, or skip the step on all of "
                "them."
            )
        return total / weight

    def _is_zero(self, weight: torch.Tensor) -> bool:
        axis_comm: comm.AxisComm | None = comm.resolve(self.axis).comm
        with torch._C._DisableFuncTorch():
            empty = (plain_values(weight) == 0).any()
            return bool(empty if axis_comm is None else axis_comm.read(empty, "the sum of the weights"))


def refuse_gradients(output: Any, leaves: list[torch.Tensor], spec: Any) -> None:
    """Raise if `output` looks like the parameters (`leaves` and `spec`).

    A gradient or new parameters made inside the step would be local, without a word.
    """
    if isinstance(output, torch.Tensor) and output.ndim == 0:
        return  # a loss, whatever else it may be
    if len(leaves) == 1 and leaves[0].ndim == 0:
        return  # looks like a loss
    candidates = [output]
    if isinstance(output, tuple) and not hasattr(output, "_fields") and output:
        candidates.append(output[0])
    for candidate in candidates:
        outs, out_spec = tree.flatten(candidate)
        if out_spec == spec and all(
            isinstance(out, torch.Tensor) and out.shape == leaf.shape for out, leaf in zip(outs, leaves, strict=True)
        ):
            params = tree.unflatten(spec, leaves)
            path = tree.leaf_paths(params)[0] if not torch.compiler.is_compiling() else "..."
            raise StepError(
                "the step returned a tree with the structure and shapes of its parameters "
                f"(first leaf {path!r}, shape {list(leaves[0].shape)}). Gradients taken inside a data-parallel step, "
                "and parameters updated with them, are local to the rank. Either return the loss and differentiate the "
                'wrapped step; or wrap with returns="grads", which reduces the returned gradients; or call '
                "ltx.sync_gradients inside; or, if this is no gradient, return it inside a dict or a one-element list."
            )
