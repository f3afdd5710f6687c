"""The hooks that ``comm_hook="auto"`` chooses among, by name: what a communication state says of its choice."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from ltx import hooks
from ltx.errors import SyncStateError


@dataclass(frozen=True)
class Candidate:
    """A hook that may be chosen.

    Attributes:
        name: what a state says.
        hook: as it is used.
        worth: it is taken if it needs at most this part of the time of those that change less.
    """

    name: str
    hook: hooks.CommHook
    worth: float = 1.0


# What changes gradients least comes first. ltx.demo.studies.hooks has losses with bfloat16 and eight bits that are
# those of the exact mean; PowerSGD's, of rank 4, were half a percent higher on one of two tasks.
@cache
def candidates() -> tuple[Candidate, ...]:
    """All of them. Made when first asked for, as most programs use none."""
    return (
        Candidate("none", hooks.AllReduce()),
        Candidate("bf16", hooks.BF16(), worth=0.7),
        Candidate("bytegrad", hooks.ByteGrad(), worth=0.7),
        Candidate("powersgd", hooks.PowerSGD(rank=2), worth=0.3),
    )


def hook_of(choice: str) -> hooks.CommHook:
    """The hook that a communication state says was chosen.

    Raises:
        SyncStateError: there is none of that name.
    """
    found = next((candidate for candidate in candidates() if candidate.name == choice), None)
    if found is None:
        names = ", ".join(repr(candidate.name) for candidate in candidates())
        raise SyncStateError(
            f'comm_hook="auto": this communication state says that {choice!r} was chosen, and there are {names}. A '
            "state that another strategy has made says nothing of it: take that of step.init(params), on every rank."
        )
    return found.hook
