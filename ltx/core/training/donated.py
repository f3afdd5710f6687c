"""Donated tensors: a use of one raises, as in JAX.

A step with ``donate=True`` writes into the tensors of its state. Their objects become :class:`DonatedTensor`, and the
next state gets new objects on the same memory. This is done only to tensors that the user may hold: those of parts that
were read off the state or put into it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, ClassVar

import torch
from torch._guards import TracingContext

from ltx.core.base import tree
from ltx.core.base.errors import DonatedStateError
from ltx.core.base.placements import own_part
from ltx.core.training.train_state import TrainState

# What may be asked of a donated tensor: nothing of it is a value.
_HARMLESS = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "is_sparse")
) | {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.is_floating_point, torch.Tensor.is_complex}


class DonatedTensor(torch.Tensor):
    """A tensor whose memory belongs to a later state. Any use raises, except for its shape, dtype and device."""

    _why: ClassVar[str] = ""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Dynamo looks at all tensors of a module, also at those in whose places functional_call puts others.
        looked_at = not torch.compiler.is_dynamo_compiling() and TracingContext.try_get() is not None
        if func in _HARMLESS or looked_at:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise DonatedStateError(next(kind._why for kind in types if issubclass(kind, DonatedTensor)))


def _gone(x: Any, *args: Any, **kwargs: Any) -> Any:
    raise DonatedStateError(type(x)._why)


# What DTensors do without torch's functions.
_OF_DTENSORS = {"__slots__": (), "__module__": __name__} | dict.fromkeys(
    ("to_local", "full_tensor", "redistribute", "__repr__"), _gone
)


def give_away(tensors: Iterable[torch.Tensor], why: str) -> None:
    """Make each of `tensors` raise DonatedStateError with the text `why` wherever it is used."""
    kind = type("DonatedTensor", (DonatedTensor,), {"_why": why, "__module__": __name__})
    for x in tensors:
        part = own_part(x)
        if x.layout is torch.strided and (x.is_floating_point() or x.is_complex()):
            # functorch's wrappers don't ask the class: a read through them finds NaN, which takes no memory.
            part.data = torch.full((), float("nan"), dtype=x.dtype, device=x.device).expand(part.shape)
        with suppress(TypeError):  # a subclass of tensors with a layout of its own
            x.__class__ = kind if part is x else type("DonatedTensor", (kind, type(x)), _OF_DTENSORS)


def hand_over(state: TrainState, following: TrainState, seen: Sequence[str]) -> TrainState:
    """`following`, which shares the memory of `state`, with tensor objects of its own; `state` is donated.

    `seen`: the parts of `state` whose tensors the user may hold.
    """
    leaves = [x for part in state.parts(seen) for x in tree.flatten(part)[0] if isinstance(x, torch.Tensor)]
    held = {id(x): x for x in leaves}  # parameters may be communication state too
    state.donate()
    if held:
        following.renew(lambda part: tree.map(lambda x: x.detach() if id(x) in held else x, part))
        give_away(
            held.values(),
            f"this tensor was read off the TrainState of step {state.step}, and that state was donated to the step "
            f"that made state {state.step + 1}: its memory holds other values now. Read it off the state that the step "
            "returned; to keep old values copy them before the step, such as {name: x.clone() for name, x in "
            "state.params.items()}, or use train_step(..., donate=False).",
        )
    return following
