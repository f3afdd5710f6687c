"""ZeroStrategy: optimizer state sharded over the ranks, each of which updates its part of every parameter.

    g~_r = (mean_s g_s)[r]                 reduce-scatter, during the backward pass
    w~_r, m_r = update(g~_r, m_r, w[r])    on rank r alone, whose optimizer state m_r has 1/n of the elements
    w = [w~_0, ..., w~_{n-1}]              all-gather

Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter models", SC 2020, section 5: P_os,
with gradients reduced where they are needed (section 7.1), so that a step sends what one all-reduce does.

x[r] is the r-th part of a parameter: flattened and padded with zeros to n parts of ceil(size / n) elements. So state is
kept by parameter path, and its shapes are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ltx import tree
from ltx.axis import Axis
from ltx.errors import StrategyError
from ltx.hooks import AllReduce, CommHook
from ltx.optim.base import Optimizer
from ltx.optim.chain import members_of, with_members
from ltx.optim.clip import ClipByGlobalNorm, ClipTogether, global_norm
from ltx.optim.update import Update
from ltx.strategies.base import Strategy
from ltx.strategies.update import StateLayout, States, StepInfo, Updated
from ltx.strategies.zero_hooks import AllParts, MeanPart, PartUpdated, Shards, _whole, as_shards, own_parts, own_state
from ltx.typing import Tree


@dataclass(frozen=True, kw_only=True)
class ZeroStrategy(Strategy):
    """ZeRO-1: parameters as with :class:`ltx.DDPStrategy`, with 1/n of the optimizer state on each of n ranks.

    A step sends as many bytes as DDP's: a reduce-scatter of gradients during the backward pass, and an all-gather of
    parameters after the update; with ``overlap="update"`` a bucket's all-gather follows its own update, while others
    are still on their way. Parameters are the same bits on every rank. For optimizers that work element by element
    (``optimizer.elementwise``: SGD, Adam, AdamW, ...), and for chains of them with
    :func:`ltx.optim.clip_by_global_norm` or :func:`ltx.optim.measure_global_norm`, whose norm is that of the whole mean
    gradient.

    Sharding belongs to training steps: gradients of a step outside of :func:`ltx.train_step` are the exact mean on
    every rank. A state's optimizer part is this rank's (``state.kinds.opt_state == "sharded"``), and so are the paths
    under which a checkpoint keeps it. ``train.gather(state)`` has all of it on every rank, under paths that don't
    depend on the number of ranks; a step on any number of ranks takes such a state and goes on with its part.

    Args:
        bucket_bytes, first_bucket_bytes, process_group_backend, timeout: as in :class:`ltx.Strategy`.

    Raises:
        StrategyError: (a ValueError) a field's value isn't allowed; in ``train_step``: the optimizer isn't elementwise.

    Example:
        >>> import torch, ltx
        >>> step = ltx.data_parallel(lambda w, x: (w * x).sum(), ltx.ZeroStrategy())
        >>> train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.Adam, lr=0.1))
        >>> state = train.init(torch.ones(4))
        >>> after, _ = ltx.vmap(train, in_dims=(None, 0))(state, torch.tensor([1.0, -3.0]))  # two ranks
        >>> after.params, after.opt_state.state.per_param["exp_avg"].shape
        (tensor([[1.1000, 1.1000, 1.1000, 1.1000],
                [1.1000, 1.1000, 1.1000, 1.1000]]), torch.Size([2, 2]))
    """

    def hook(self, step: int) -> CommHook:
        return AllReduce()

    def hook_in_training(self, step: int) -> CommHook:
        return MeanPart()

    def shares_gradients(self, step: int) -> bool:
        return False

    def communicates_after_update(self, step: int) -> bool:
        return True

    def post_update_hook(self, optimizer: Optimizer, step: int) -> PartUpdated:
        return PartUpdated()

    @property
    def updates_in_buckets(self) -> bool:
        return True

    @property
    def layout(self) -> StateLayout:
        return StateLayout(opt_state="sharded")

    def check_optimizer(self, optimizer: Optimizer) -> None:
        for member in members_of(optimizer):
            if not (member.elementwise or isinstance(member, ClipByGlobalNorm)):
                raise StrategyError(
                    f"ZeroStrategy gives each rank a part of every parameter, and {member!r} needs whole ones. Use an "
                    "elementwise optimizer (SGD, Adam, AdamW, ...; from_functions(..., elementwise=True)), alone or in "
                    "a chain with clip_by_global_norm, or ltx.DDPStrategy()."
                )

    def init_optimizer(self, optimizer: Optimizer, params: Tree, axis: Axis) -> Shards:
        state = optimizer.init(own_parts(params, axis))
        for path, leaf in zip(tree.leaf_paths(state), tree.flatten(state)[0], strict=True):
            if leaf.ndim > 1:
                raise StrategyError(
                    f"ZeroStrategy: the state {path!r} of {optimizer!r} is {tree.describe(leaf)}. State of parameters "
                    "given as vectors must be vectors like them, and counters 0-dim tensors."
                )
        return as_shards(state, axis)

    def update(self, update: Update, states: States, info: StepInfo, pending: Any) -> Updated:
        axis, paths, (leaves, spec) = info.axis, tree.leaf_paths(update.params), tree.flatten(update.params)
        mine = replace(
            update,
            optimizer=self._together(update.optimizer, info),
            params=own_parts(update.params, axis),
            grads=own_parts(update.grads, axis),
            opt_state=own_state(update.opt_state, axis),
        )
        params, opt_state = mine.apply()
        del update, mine  # the gradients' memory is the new parameters'
        parts = tree.flatten(params)[0]
        if axis.size > 1:
            parts, _ = self.exchange(AllParts(), parts, paths, info).wait()
        whole = [_whole(new, old) for new, old in zip(parts, leaves, strict=True)]
        return Updated(tree.unflatten(spec, whole), as_shards(opt_state, axis), states, pending)

    def gather_optimizer(self, optimizer: Optimizer, params: Tree, opt_state: Shards, info: StepInfo) -> Shards:
        if opt_state.ranks == 1:
            return opt_state
        like = tree.flatten(optimizer.init(own_parts(params, Axis("whole", 1))))[0]
        leaves, spec = tree.flatten(own_state(opt_state, info.axis))
        split = [i for i, leaf in enumerate(leaves) if leaf.ndim == 1]
        paths = tree.leaf_paths(opt_state.state)
        given = [leaves[i] for i in split]
        for i, rows in zip(
            split, self.exchange(AllParts(), given, [paths[i] for i in split], info).wait()[0], strict=True
        ):
            leaves[i] = rows.reshape(-1)[: like[i].numel()]
        return Shards(tree.unflatten(spec, leaves), 1, 0)

    def _together(self, optimizer: Optimizer, info: StepInfo) -> Optimizer:
        """`optimizer`, clipping by the norm of all ranks' parts."""

        def norm(parts: Sequence[Tensor]) -> Tensor:
            own = global_norm(list(parts))
            squares = [own.double().square().reshape(1) * info.axis.size]  # an exchange gives the mean
            if info.axis.size > 1:
                squares, _ = self.exchange(AllReduce(), squares, ["the squared norm of the gradients"], info).wait()
                return squares[0].sqrt().reshape(()).to(own.dtype)
            return own

        members = [ClipTogether(m, norm) if isinstance(m, ClipByGlobalNorm) else m for m in members_of(optimizer)]
        return with_members(optimizer, members)
