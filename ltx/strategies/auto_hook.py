"""Choosing a communication hook: by the bandwidth between ranks, and by what each hook would send.

What a hook sends is what it asks for when it is driven on shapes (:mod:`ltx.estimate`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch

from ltx import hooks
from ltx.errors import LtxError, SyncStateError
from ltx.estimate import Steps, format_bytes
from ltx.extend import Strategy, comm
from ltx.typing import Tree


# What changes gradients least comes first. Measured on two cores, a step of 5 M parameters to DDP's in turns:
#
#               shared memory  1 Gbit/s  100 Mbit/s
#     none          0.96         0.86       1.02
#     half          0.94         0.61       0.51
#     bytegrad      1.06         0.55       0.28
#     powersgd      1.02         0.57       0.10
#
# and codecs by themselves, a float32 number on one core: none 0.4, half 0.7, bytegrad 2.7, powersgd 3.0 ns. Each takes
# over where its codec and its bytes take at most 0.7 of the time of the one before it, alone on the link of two ranks:
# 15 and 1.5 Gbit/s. Losses with half and eight bits were those of the exact mean; PowerSGD's, of rank 4, were half a
# percent higher on one of two tasks, so it has to save more. An accelerator encodes faster, which only moves these up.
@cache
def candidates() -> dict[str, tuple[hooks.CommHook, float]]:
    """The hooks that may be chosen, by what a state calls them, each with the bandwidth up to which it may be.

    Made when first asked for, as most programs use none.
    """
    return {
        "none": (hooks.AllReduce(), math.inf),
        "bf16": (hooks.BF16(), 15e9),
        "bytegrad": (hooks.ByteGrad(), 1.5e9),
        "powersgd": (hooks.PowerSGD(rank=2), 0.5e9),
    }


def hook_of(choice: str) -> hooks.CommHook:
    """The hook that a communication state says was chosen. Raises SyncStateError if there is none of that name."""
    if choice not in candidates():
        raise SyncStateError(
            f'comm_hook="auto": this communication state says that {choice!r} was chosen, and there are '
            f"{', '.join(map(repr, candidates()))}. A state that another strategy has made says nothing of it: take "
            "that of step.init(params), on every rank."
        )
    return candidates()[choice][0]


class Choice(NamedTuple):
    """What was chosen, and what it was compared with."""

    name: str
    sent: dict[str, int]  # bytes a step of each candidate that the bandwidth calls for; empty if there is no network

    @property
    def reason(self) -> str:
        """Why, in a line."""
        if not self.sent:
            return "there is nothing to choose by"
        sizes = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in self.sent.items())
        return f"of those for such a bandwidth the one that sends least, unless latency counts for more: {sizes}"


def choice_for(
    strategy: Strategy, params: Tree, ranks: int, network: comm.Network | None, dtype: torch.dtype | None = None
) -> Choice:
    """What ``comm_hook="auto"`` comes to on a network. `dtype`: in which mixed precision reduces gradients."""
    if network is None or ranks == 1:
        return Choice("none", {})
    strategy = replace(strategy, network=network)
    sent: dict[str, int] = {}
    for name, (candidate, up_to) in candidates().items():
        if network.bandwidth > up_to:
            break
        try:
            made = strategy.with_choice(name)
            step = candidate.constant_after or 0
            hook = made.hook(step)
            if hook is None:
                continue  # gradients stay local before it begins
            hook = hook if dtype is None else hooks.cast(hook, dtype)
            buckets = Steps(made, params, ranks).gradients(hook, step).rows
        except LtxError:
            if not sent:  # the all-reduce itself
                raise
            continue  # it can't be cast, or wrapped
        sent[name] = sum(collective.nbytes for bucket in buckets for collective in bucket.collectives)
    late = bool(sent) and 8 * sent["none"] <= network.bandwidth * network.start_s(ranks)
    return Choice("none" if late or not sent else min(sent, key=sent.__getitem__), sent)
