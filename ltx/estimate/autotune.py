"""Choosing a communication hook: the time of its codec against the time that it saves on the link.

What a hook sends is what it asks for when it is driven on shapes (:mod:`ltx.estimate.dry_run`), and what that and its
codec take is the cost model's (:mod:`ltx.estimate.costs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ltx import comm, tree
from ltx.axis import Axis
from ltx.collectives.objects import broadcast_object
from ltx.errors import LtxError
from ltx.estimate.costs import Link, codec
from ltx.estimate.dry_run import Gradients
from ltx.estimate.formats import format_seconds
from ltx.strategies.base import Strategy, in_dtype
from ltx.strategies.ddp import Candidate, candidates
from ltx.typing import Tree


@dataclass(frozen=True)
class Option:
    """What the gradients of a step take with one of the candidates.

    Attributes:
        candidate: the hook.
        link_s: seconds on the link.
        codec_s: seconds of the rank for packing, encoding and decoding.
        nbytes: of the gradients.
    """

    candidate: Candidate
    link_s: float
    codec_s: float
    nbytes: int

    @property
    def seconds(self) -> float:
        """Both together."""
        return self.link_s + self.codec_s

    def __str__(self) -> str:
        megabytes = max(self.nbytes / 1e6, 1e-9)
        link, coding = (format_seconds(s / megabytes) for s in (self.link_s, self.codec_s))
        return f"{self.candidate.name} {link} + {coding}"


@dataclass(frozen=True)
class Choice:
    """What was chosen, and what it was compared with.

    Attributes:
        name: of the candidate.
        network: what it was chosen for; None where there is none to go by.
        options: those that could be used, in the order of :func:`candidates`.
    """

    name: str
    network: comm.Network | None = None
    options: tuple[Option, ...] = ()

    @property
    def reason(self) -> str:
        """Why, in a line."""
        if not self.options:
            return "there is nothing to choose by"
        each = ", ".join(map(str, self.options))
        worth = ", ".join(f"{o.candidate.name} {o.candidate.worth:g}" for o in self.options[1:])
        return (
            f"a MB of gradients takes on the link + in the codec: {each}; of the time of what changes less one must "
            f"take at most: {worth}"
        )


def choose(options: Sequence[Option]) -> str:
    """The name of the one to use: from the first on, the next that is worth what it changes."""
    best = options[0]
    for option in options[1:]:
        if option.seconds < option.candidate.worth * best.seconds:
            best = option
    return best.candidate.name


def choice_for(
    strategy: Strategy,
    params: Tree,
    ranks: int,
    network: comm.Network | None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Choice:
    """What ``comm_hook="auto"`` comes to on a network.

    `dtype`: in which mixed precision reduces gradients. `device`: where hooks run; if None, where the parameters are.
    """
    if network is None or ranks == 1:
        return Choice("none")
    device = device_of(params) if device is None else device
    options = tuple(_options(replace(strategy, network=network), params, ranks, network, dtype, device))
    return Choice(choose(options) if options else "none", network, options)


def _options(
    strategy: Strategy,
    params: Tree,
    ranks: int,
    network: comm.Network,
    dtype: torch.dtype | None,
    device: torch.device,
) -> list[Option]:
    link = Link(network.bandwidth, network.latency)
    found: list[Option] = []
    for candidate in candidates():
        try:
            made = strategy.with_choice(candidate.name)
            step = candidate.hook.constant_after or 0
            hook = in_dtype(made.hook(step), dtype)
            if hook is None:
                continue  # gradients stay local before it begins
            gradients = Gradients(made, params, ranks)
            buckets = gradients.buckets(hook, gradients.first_states(), step)
        except LtxError:
            if not found:  # the all-reduce itself
                raise
            continue  # it can't be cast, or wrapped
        link_s = sum(link.seconds(collective) for bucket in buckets for collective in bucket.collectives)
        codec_s = sum(codec(hook, {}, device) * bucket.elements for bucket in buckets)
        found.append(Option(candidate, link_s, codec_s, sum(bucket.nbytes for bucket in buckets)))
    return found


def choose_on_axis(strategy: Strategy, on: Any, params: Tree, dtype: torch.dtype | None) -> str:
    """What ``step.init(params)`` puts into the state, for its strategy "auto" in one way or the other. A collective.

    Gives "" for a strategy whose hook isn't chosen, whose axis is measured all the same.
    """
    axis = comm.resolve(on)
    network = strategy.network
    if network is None and axis.comm is not None and axis.size > 1:
        network = _measured(strategy, axis, params)
    if not strategy.auto_hook:
        return ""
    choice = choice_for(strategy, params, axis.size, network, dtype).name
    if axis.comm is None or axis.size == 1 or device_of(params).type == "cpu":
        return choice
    # Each rank has measured hooks on its own accelerator; all take what rank 0 chose.
    chosen: str = broadcast_object(choice, axis=on)
    return chosen


def device_of(params: Tree) -> torch.device:
    """Where the rank computes: the device of the first parameter, and the CPU for those on the meta device."""
    leaves = tree.flatten(params)[0]
    device: torch.device = leaves[0].device if leaves else torch.device("cpu")
    return torch.device("cpu") if device.type == "meta" else device


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


def on_network(
    strategy: Strategy, params: Tree, ranks: int, network: comm.Network, device: torch.device | None = None
) -> Strategy:
    """`strategy` as it is on a network: what :func:`ltx.profile.plan` goes by."""
    if not (strategy.auto_sizes or strategy.auto_hook):
        return strategy
    strategy = replace(strategy, network=strategy.network or network)
    if not strategy.auto_hook:
        return strategy
    return strategy.with_choice(choice_for(strategy, params, ranks, strategy.network, device=device).name)
