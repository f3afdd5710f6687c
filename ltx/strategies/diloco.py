"""DiLoCoStrategy: each rank has an inner optimizer, and an outer optimizer communicates once in H steps.

    w_r    <- update(w_r, grad f_r(w_r))                        H times, each rank for itself
    d      =  mean_r (a - w_r)                                  the outer gradient; all ranks began at the anchor a
    v      <- mu v + d,    a <- a - lr (d + mu v)               Nesterov's momentum, as torch.optim.SGD has it
    w_r    <- (1 - alpha) a + alpha w_r                         alpha is 0 except in "Streaming DiLoCo"

With lr = 1 and mu = 0 it is local SGD.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, count, pairwise

import torch

from ltx import extend, hooks
from ltx.errors import StrategyError
from ltx.extend import Exchange, LeafState, Update, arguments, exchange, needs, negotiate, optimizers, states_of, tree
from ltx.hooks.plain import EXACT, resolve_hook, resolved
from ltx.optim import Optimizer
from ltx.strategies import StateLayout, States, StepInfo, Strategy, Updated
from ltx.strategies.nodes import refuse_complex
from ltx.typing import Tree

#: The keys of a parameter's communication state beside that of `outer_hook`: where all ranks began, the outer velocity.
ANCHOR, VELOCITY = "anchor", "velocity"
OUTER = "outer.{}"  #: the keys of the state of an `outer` optimizer, numbered
SENT = "sent"  #: the key, with `fragment_sync_delay`, of a 1 while the parameter's outer gradient is being sent, else 0


@dataclass(frozen=True)
class DiLoCoStrategy(Strategy):
    """DiLoCo: `period` steps with local gradients, then an outer optimizer's step along the mean of the ranks' moves.

    What each rank sees: its own parameters, equal to the others' after every `period` steps (with `fragments`, only one
    fragment's are equal at a time). In between nothing is sent, and no rank waits. ``metrics.loss`` is always the
    rank's own; :func:`ltx.pmean` gives the mean. Optimizer states stay local.

    The communication state has two tensors per parameter, "anchor" and "velocity", the same on every rank, of the
    parameter's shape; they are float32 if the parameter is narrower. With an `outer` optimizer its state, "outer.0" and
    so on, replaces "velocity". With `fragment_sync_delay` the state also has a number, "sent".

    Args:
        period: the number of inner steps between two outer steps; the papers use 30 to 500.
        outer_lr, outer_momentum: those of the outer optimizer, SGD with Nesterov's momentum.
        outer_hook: how outer gradients are averaged: "allreduce", "fp16", "bf16", or a hook from :mod:`ltx.hooks`, like
            ``ByteGrad(error_feedback=True)``. A hook that counts steps counts outer steps.
        fragments: parameters are cut into this many groups, in the order of their paths and balanced by their bytes.
            Group j takes its outer step when ``(steps so far + j * period // fragments) % period == 0``, so that only
            one group, with about 1/fragments of the bytes, is sent at a time.
        outer: an outer optimizer to use instead of SGD with `outer_lr` and `outer_momentum`: its gradient is minus the
            mean of the ranks' moves, and its schedules count outer steps. It is SlowMo with
            ``from_torch(torch.optim.SGD, lr=1.0, momentum=0.5)``, FedAdam with ``from_torch(torch.optim.Adam, ...)``.
        update_alpha: in an outer step a rank keeps this fraction of its own parameters, and takes the rest from the
            anchor, so parameters stay different between ranks.
        fragment_sync_delay: a fragment's outer gradients are sent this many steps before its outer step, which waits
            for them; meanwhile ranks go on with inner steps. The delay is less than ``period // fragments``. Of what a
            rank learns in these steps, the fraction `update_alpha` stays. In between a state can't be copied:
            ``train.finish(state)``, called by every rank, waits for the outer gradients and changes no parameters.
            Training that goes on from a checkpoint of the finished state gives the same bits.
        bucket_bytes, first_bucket_bytes, process_group_backend, timeout: as in :class:`Strategy`.

    Raises:
        StrategyError: (a ValueError) a field's value isn't allowed. Not allowed are also: an `outer` optimizer that
            uses several parameters together or the loss, or has whole numbers in its state; with `fragment_sync_delay`
            an `outer_hook` of two phases, as ByteGrad or error feedback; at the initialisation of training, more
            fragments than parameters, or complex parameters; a step from a state that was broadcast during a send.

    Source: Douillard et al., "DiLoCo: Distributed low-communication training of language models", 2023, algorithm 1;
    "Streaming DiLoCo with overlapping communication", 2025, algorithm 2. Schedule, names: torchft's ``DiLoCo``.

    Example:
        >>> import torch, ltx
        >>> strategy = ltx.DiLoCoStrategy(period=1, outer_lr=1.0, outer_momentum=0.0)
        >>> step = ltx.data_parallel(lambda w, x: (w - x).square() / 2, strategy)
        >>> train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=0.5))
        >>> state, x = train.init(torch.tensor(0.0)), torch.tensor([0.0, 4.0])  # two ranks want 0 and 4
        >>> state, _ = ltx.vmap(train, in_dims=(None, 0))(state, x)
        >>> state.params
        tensor([1., 1.])
    """

    period: int
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    outer_hook: str | hooks.CommHook = EXACT
    fragments: int = 1
    outer: Optimizer | None = None
    update_alpha: float = 0.0
    fragment_sync_delay: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.check_whole(self, 1, "period", "fragments")
        arguments.check_number(self, 0, "outer_lr")
        arguments.check_number(self, 0, "outer_momentum", below=1)
        arguments.check_number(self, 0, "update_alpha", below=1)
        arguments.check_whole(self, 0, "fragment_sync_delay")
        hook = resolve_hook(self, "outer_hook")
        arguments.check_fields(self, StrategyError, "outer")
        needs.require("outer, optimizer", self.outer)
        if self.outer is not None and (self.outer_lr, self.outer_momentum) != (0.7, 0.9):
            raise StrategyError(
                f"DiLoCoStrategy.outer has a rate and a momentum of its own, so leave out outer_lr={self.outer_lr!r}, "
                f"outer_momentum={self.outer_momentum!r}."
            )
        if self.fragments > self.period:
            raise StrategyError(
                f"DiLoCoStrategy.fragments must be at most the period, {self.period}, as one is sent at a time, got "
                f"{self.fragments!r}."
            )
        if self.fragment_sync_delay >= (between := self.period // self.fragments):
            raise StrategyError(
                f"DiLoCoStrategy.fragment_sync_delay must be less than period // fragments, {between}, as one fragment "
                f"is under way at a time, got {self.fragment_sync_delay!r}."
            )
        if self.fragment_sync_delay:
            needs.require("background, hook", hook, "DiLoCoStrategy.fragment_sync_delay")

    def hook(self, step: int) -> None:
        return None

    def init(self, param: torch.Tensor, path: str = "") -> LeafState:
        anchor = param.detach().to(torch.promote_types(param.dtype, torch.float32), copy=True)
        own = dict(resolved(self.outer_hook).init(anchor, path))
        if self.fragment_sync_delay:
            own[SENT] = anchor.new_zeros(())
        if self.outer is None:
            return {**own, ANCHOR: anchor, VELOCITY: torch.zeros_like(anchor)}
        begun = self.outer.init({path: anchor})
        if not all(map(torch.is_floating_point, tree.flatten(begun)[0])):
            raise StrategyError(
                f"DiLoCoStrategy.outer: {self.outer} keeps whole numbers in its state. Count in a floating tensor."
            )
        return {**own, ANCHOR: anchor, **_named(begun)}

    @property
    def cycle(self) -> tuple[int, int]:
        return 0, self.period

    @property
    def layout(self) -> StateLayout:
        hook = resolved(self.outer_hook)
        own = hook.state_names or hook.reads_step
        return StateLayout("per_rank", "per_rank", "per_rank", "per_rank" if own else "replicated")

    def init_optimizer(self, optimizer: Optimizer, params: Tree, axis: extend.Axis) -> Tree:
        refuse_complex(self, params)
        leaves = tree.flatten(params)[0]
        if self.fragments > max(1, len(leaves)):
            raise StrategyError(
                f"DiLoCoStrategy.fragments must be at most the number of parameters, {len(leaves)}, got "
                f"{self.fragments!r}."
            )
        hook = resolved(self.outer_hook)
        hook.each(tree.leaf_paths(params))  # raises for paths that the hook doesn't fit
        for at in range(self.period if self.fragment_sync_delay else 0):
            # all ranks are here; at the first send, ranks would have to wait for each other to agree
            if self.due(at) is not None:
                members, _ = self._fragment(params, at)
                given = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in members.values()]
                held = [hook.init(x, path) for path, x in zip(members, given, strict=True)]
                negotiate(self, hook, given, list(members), StepInfo(0, axis), held, background=True)
        return super().init_optimizer(optimizer, params, axis)

    def due(self, step: int) -> int | None:
        """The fragment that takes an outer step after the update of `step`; there is at most one."""
        return next((j for j in range(self.fragments) if self._since(step, j) % self.period == 0), None)

    def _since(self, step: int, fragment: int) -> int:
        """`step + 1` plus the fragment's offset: a multiple of the period if the fragment takes an outer step."""
        return step + 1 + fragment * self.period // self.fragments

    @property
    def updates_in_buckets(self) -> bool:
        return not self.fragment_sync_delay

    def communicates_after_update(self, step: int) -> bool:
        return not self.fragment_sync_delay and self.due(step) is not None

    def after_update(self, params: Tree, states: States, info: StepInfo) -> tuple[Tree, States]:
        if self.due(info.step) is None:
            return params, states
        states = self._moved(params, states, info.step, self._send(params, states, info, info.step))
        return self._mixed(params, states, info.step), states

    def update(self, update: Update, states: States, info: StepInfo, pending: Exchange | None) -> Updated:
        if not self.fragment_sync_delay:
            return super().update(update, states, info, pending)
        ready = self.due(info.step) is not None
        if ready:  # before the optimizer's update: if a peer is lost, the state is unchanged
            states, pending = self._arrived(update.params, states, info, pending), None
        params, opt_state = update.apply()
        if ready:
            params = self._mixed(params, states, info.step)
        elif self.due(at := info.step + self.fragment_sync_delay) is not None:
            pending = self._send(params, states, info, at)
            if info.axis.ranks.overlaps:
                own = {path: states[path] for path in self._fragment(params, at)[0]}
                states = {**states, **{path: {**own[path], SENT: torch.ones_like(own[path][SENT])} for path in own}}
            else:  # collectives complete at once: the state holds the next anchors, as after finish
                states, pending = self._moved(params, states, at, pending), None
        return Updated(params, opt_state, states, pending)

    def finish(self, params: Tree, states: States, info: StepInfo, pending: Exchange | None) -> tuple[Tree, States]:
        return params, self._arrived(params, states, info, pending)

    def _arrived(self, params: Tree, states: States, info: StepInfo, pending: Exchange | None) -> States:
        """Wait for the outer gradients that are being sent. Returns the states with the anchors moved by them."""
        if not self.fragment_sync_delay:
            return states
        at = next(step for step in count(info.step) if self.due(step) is not None)
        if pending is not None:
            return self._moved(params, states, at, pending)
        path = next(iter(self._fragment(params, at)[0]))
        if info.axis.ranks.overlaps and bool(states[path][SENT]):
            raise StrategyError(
                f"rank {info.axis.rank}: DiLoCoStrategy: the outer gradient of parameter {path!r} is under way, and "
                "this state, which train.broadcast gave, hasn't got it. Broadcast what finish gives, called by all "
                "ranks: state = train.finish(state)."
            )
        return states

    def _fragment(self, params: Tree, at: int) -> tuple[dict[str, torch.Tensor], int]:
        """The parameters, by path, that take an outer step after the update of step `at`, and its number."""
        fragment = self.due(at)
        assert fragment is not None
        leaves, paths = tree.flatten(params)[0], tree.leaf_paths(params)
        members = cut([x.numel() * x.dtype.itemsize for x in leaves], self.fragments)[fragment]
        return {paths[i]: leaves[i] for i in members}, self._since(at, fragment) // self.period - 1

    def _send(self, params: Tree, states: States, info: StepInfo, at: int) -> Exchange:
        """Send the outer gradients for the outer step after the update of step `at`."""
        members, outer_step = self._fragment(params, at)
        anchors = [states[path][ANCHOR] for path in members]
        # The anchor is rounded to the parameter's dtype first: the rounding isn't a move of the rank.
        moved = [a.to(x.dtype).to(a.dtype) - x for a, x in zip(anchors, members.values(), strict=True)]
        hook = resolved(self.outer_hook).at(outer_step)
        held, info = [states_of(hook, states[path]) for path in members], StepInfo(outer_step, info.axis)
        return exchange(self, hook, moved, list(members), info, held, background=self.fragment_sync_delay > 0)

    def _moved(self, params: Tree, states: States, at: int, sent: Exchange) -> States:
        """The states after the outer step that follows the update of step `at`."""
        members, outer_step = self._fragment(params, at)
        states = dict(states)
        for path, grad, after in zip(members, *sent.wait(), strict=True):
            states[path] = {**states[path], **after, **self._outer_step(path, grad, states[path], outer_step)}
            if self.fragment_sync_delay:
                states[path][SENT] = torch.zeros_like(states[path][SENT])
        return states

    def _mixed(self, params: Tree, states: States, at: int) -> Tree:
        """The parameters, with those of the fragment moved to their anchors, or partly with `update_alpha`."""
        members, _ = self._fragment(params, at)
        for path, x in members.items():
            anchor = states[path][ANCHOR]
            mixed = anchor.lerp(x.to(anchor.dtype), self.update_alpha) if self.update_alpha else anchor
            members[path] = mixed.to(x.dtype, copy=mixed is anchor)  # the program may write to the parameters
        (leaves, spec), paths = tree.flatten(params), tree.leaf_paths(params)
        return tree.unflatten(spec, [members.get(path, x) for path, x in zip(paths, leaves, strict=True)])

    def _outer_step(self, path: str, grad: torch.Tensor, state: LeafState, step: int) -> LeafState:
        """The next anchor of a parameter, and the outer optimizer's state for it."""
        if self.outer is None:
            v = self.outer_momentum * state[VELOCITY] + grad
            return {ANCHOR: state[ANCHOR] - self.outer_lr * (grad + self.outer_momentum * v), VELOCITY: v}
        params = {path: state[ANCHOR]}
        spec = tree.flatten(self.outer.init(params))[1]
        own = tree.unflatten(spec, [state[OUTER.format(place)] for place in range(spec.num_leaves)])
        params, own = self.outer.apply({path: grad}, optimizers.advanced(own, lambda count: step), params)
        return {ANCHOR: params[path], **_named(own)}


def _named(outer: Tree) -> LeafState:
    return {OUTER.format(place): x for place, x in enumerate(tree.flatten(outer)[0])}


def cut(sizes: Sequence[int], parts: int) -> list[range]:
    """Cut `sizes` into `parts` runs of about the same sum; no run is empty if there are enough sizes.

    >>> cut([1, 1, 1, 9, 2, 2], 3)
    [range(0, 3), range(3, 4), range(4, 6)]
    """
    middles = [end - size / 2 for end, size in zip(accumulate(sizes), sizes, strict=True)]
    cuts = [0]
    for part in range(1, parts):
        fair = bisect(middles, sum(sizes) * part / parts)  # at most half a size off: so no sum is above mean + largest
        cuts.append(min(max(fair, cuts[-1] + 1), max(len(sizes) - parts + part, cuts[-1])))
    return [range(*run) for run in pairwise([*cuts, len(sizes)])]
