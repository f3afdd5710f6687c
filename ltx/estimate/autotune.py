"""Choosing a communication hook: by the bandwidth between ranks, and by what each hook would send.

The thresholds are beside the candidates (:func:`ltx.strategies.ddp.candidates`). What a hook sends is what it asks for
when it is driven on shapes (:mod:`ltx.estimate.dry_run`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ltx import comm, tree
from ltx.axis import Axis
from ltx.errors import LtxError
from ltx.estimate.dry_run import Gradients
from ltx.estimate.formats import format_bytes
from ltx.strategies.base import Strategy, in_dtype
from ltx.strategies.ddp import candidates
from ltx.typing import Tree


@dataclass(frozen=True)
class Choice:
    """What was chosen, and what it was compared with.

    Attributes:
        name: of the candidate.
        sent: bytes a step, by the name of each candidate that the bandwidth calls for; empty if there is no network.
    """

    name: str
    sent: dict[str, int]

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
    for candidate in candidates():
        if network.bandwidth > candidate.up_to:
            break
        try:
            made = strategy.with_choice(candidate.name)
            step = candidate.hook.constant_after or 0
            hook = in_dtype(made.hook(step), dtype)
            if hook is None:
                continue  # gradients stay local before it begins
            gradients = Gradients(made, params, ranks)
            buckets = gradients.buckets(hook, gradients.first_states(), step)
        except LtxError:
            if not sent:  # the all-reduce itself
                raise
            continue  # it can't be cast, or wrapped
        sent[candidate.name] = sum(collective.nbytes for bucket in buckets for collective in bucket.collectives)
    late = bool(sent) and 8 * sent["none"] <= network.bandwidth * network.start_s(ranks)
    return Choice("none" if late or not sent else min(sent, key=sent.__getitem__), sent)


def choose_on_axis(strategy: Strategy, on: Any, params: Tree, dtype: torch.dtype | None) -> str:
    """What ``step.init(params)`` puts into the state, for its strategy "auto" in one way or the other. A collective.

    Gives "" for a strategy whose hook isn't chosen, whose axis is measured all the same.
    """
    axis = comm.resolve(on)
    network = strategy.network
    if network is None and axis.comm is not None and axis.size > 1:
        network = _measured(strategy, axis, params)
    return choice_for(strategy, params, axis.size, network, dtype).name if strategy.auto_hook else ""


def _measured(strategy: Strategy, axis: Axis, params: Tree) -> comm.Network:
    axis_comm: comm.AxisComm = axis.comm
    leaves, spec = tree.flatten(params)
    shapes = tuple((x.shape, x.dtype) for x in leaves)
    axis_comm.negotiate(
        axis_comm.bucket_channel(0),
        ("init", strategy, spec, shapes),
        lambda: comm.Signature.of("init of an automatic strategy", tree.leaf_paths(params), leaves, repr(strategy)),
    )
    return comm.measured(axis_comm)


def network_of(strategy: Strategy, axis: Any) -> comm.Network | None:
    """What automatic choices go by, if that is known: nothing is measured for it."""
    if strategy.network is not None:
        return strategy.network
    axis_comm: comm.AxisComm | None = comm.resolve(axis).comm
    return None if axis_comm is None else axis_comm.network


def on_network(strategy: Strategy, params: Tree, ranks: int, network: comm.Network) -> Strategy:
    """`strategy` as it is on a network: what :func:`ltx.profile.plan` goes by."""
    if not (strategy.auto_sizes or strategy.auto_hook):
        return strategy
    strategy = replace(strategy, network=strategy.network or network)
    if not strategy.auto_hook:
        return strategy
    return strategy.with_choice(choice_for(strategy, params, ranks, strategy.network).name)
