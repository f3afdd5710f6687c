"""ZeroStrategy: optimizer state sharded over the ranks, and each rank updates its part of every parameter.

    g~_r = (mean_s g_s)[r]                 reduce-scatter, during the backward pass
    w~_r, m_r = update(g~_r, m_r, w[r])    on rank r alone, whose optimizer state m_r has 1/n of the elements
    w = [w~_0, ..., w~_{n-1}]              all-gather

Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter models", SC 2020, section 5: P_os,
with gradients reduced where they are needed (section 7.1). x[r] is the r-th part of a tensor: flattened and padded with
zeros, it has n parts of ceil(size / n) elements. So state has the same paths and shapes on every rank.

With a lossy hook C, both halves of its all-reduce stay, with the optimizer between them:

    s = C(g_s / n + e_s),    e_s = g_s / n + e_s - s              on every rank s, for each part r apart
    g~_r = (sum_s s)[r]                                           all-to-all, during the backward pass
    w~_r, m_r = update(g~_r, m_r, w[r]) on rank r alone
    w = w + [C(w~_0 + u_0 - w[0]), ..., C(w~_{n-1} + u_{n-1} - w[n-1])]           all-gather
    u_r = w~_r + u_r - w[r]                                       what of its part rank r hasn't sent yet

All ranks add the same differences, so replicas have the same bits. No update is lost: u is sent later, as e is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ltx.errors import StrategyError
from ltx.extend import (
    Axis,
    LeafState,
    Optimizer,
    StateLayout,
    States,
    StepInfo,
    Strategy,
    Update,
    Updated,
    communicate_after_update,
    exchange,
    needs,
    optimizers,
    tree,
)
from ltx.hooks import AllReduce, CommHook
from ltx.hooks.half import HalfHook
from ltx.hooks.lossy import CompressedAllReduce, finite
from ltx.hooks.plain import EXACT, resolve_hook, resolved
from ltx.strategies.zero_parts import (
    AllParts,
    CodedPart,
    CodedParts,
    CodedShards,
    MeanPart,
    PartUpdated,
    Shards,
    as_shards,
    in_messages,
    own_parts,
    own_shards,
    part,
    whole,
)
from ltx.typing import Tree


@dataclass(frozen=True, kw_only=True)
class ZeroStrategy(Strategy):
    """ZeRO-1: parameters as with :class:`ltx.DDPStrategy`, with 1/n of the optimizer state on each of n ranks.

    A step sends as many bytes as DDP's: a reduce-scatter of gradients during the backward pass, and an all-gather of
    parameters after the update; with ``overlap="update"`` a bucket's all-gather follows its own update, while other
    gradients are still on their way. Parameters are the same bits on every rank. For optimizers that work element by
    element (``optimizer.offers.elementwise``: SGD, Adam, AdamW, ...), and for chains of them with
    :func:`ltx.optim.clip_by_global_norm` or :func:`ltx.optim.measure_global_norm`, which use the norm of the whole mean
    gradient.

    Outside of :func:`ltx.train_step`, a step's gradients are the exact mean on every rank. A state holds this rank's
    part of the optimizer state (``state.layout.opt_state == "sharded"``), and a checkpoint's paths name the part.
    ``train.gather(state)`` gives every rank the whole state, under paths that don't depend on the number of ranks; a
    step on any number of ranks can go on from such a state, and keeps its part of it.

    Args:
        comm_hook: how gradients are coded on their way to the rank that updates them, and the differences between new
            and old parameters on their way back: "fp16", "bf16", or a hook of :mod:`ltx.hooks` that sends messages
            (ByteGrad, Quantize, QSGD, OneBit, TopK), also after others (:func:`ltx.hooks.after`). What a message leaves
            out of a parameter is always sent later (`unsent` in the optimizer's state, 1/n of the parameters); of a
            gradient, if the hook has error feedback. It doesn't go with ``overlap="update"``.
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

    layout: ClassVar[StateLayout] = StateLayout(opt_state="sharded")

    comm_hook: str | CommHook = EXACT

    def __post_init__(self) -> None:
        super().__post_init__()
        needs.require("ZeRO, hook", hook := resolve_hook(self, "comm_hook"), "", in_messages(hook))

    @property
    def updates_in_buckets(self) -> bool:
        return self.comm_hook == EXACT

    @property
    def cycle(self) -> tuple[int, int] | None:
        start = resolved(self.comm_hook).constant_after
        return None if start is None else (start, 1)

    def hook(self, step: int) -> CommHook:
        hook = resolved(self.comm_hook).at(step)
        if isinstance(hook, HalfHook) and not hook.error_feedback:
            return MeanPart(hook.short)
        return CodedPart(hook) if isinstance(hook, CompressedAllReduce) else MeanPart()

    def init(self, param: Tensor, path: str = "") -> LeafState:
        return resolved(self.comm_hook).init(param, path)

    def communicates_after_update(self, step: int) -> bool:
        return True

    def post_update_hook(self, step: int) -> PartUpdated | None:
        return PartUpdated() if self.updates_in_buckets else None

    def check(self, optimizer: Optimizer, axis: Axis | None = None) -> None:
        super().check(optimizer, axis)
        for member in optimizers.members_of(optimizer):
            if not (isinstance(member, optimizers.ClipByGlobalNorm) and member.takes_parts):
                needs.require("ZeRO, optimizer", member)

    def init_optimizer(self, optimizer: Optimizer, params: Tree, axis: Axis) -> Shards:
        parts = own_parts(params, axis)
        state = optimizer.init(parts)
        for path, leaf in zip(tree.leaf_paths(state), tree.flatten(state)[0], strict=True):
            if leaf.ndim > 1:
                raise StrategyError(
                    f"ZeroStrategy: the state {path!r} of {optimizer!r} is {tree.describe(leaf)}. State of parameters "
                    "given as vectors must be vectors like them, and counters 0-dim tensors."
                )
        if self.updates_in_buckets:
            return as_shards(state, axis)
        own = as_shards(state, axis)
        if any(x.is_complex() for x in tree.flatten(parts)[0]):
            raise StrategyError(
                f"{self!r} codes differences of real parameters, and some are complex. Leave comm_hook out, or keep "
                "their real and imaginary parts apart (torch.view_as_real)."
            )
        unsent = tree.map(lambda x: torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)), parts)
        return CodedShards(own.state, own.ranks, own.rank, unsent)

    def rates(self, optimizer: Optimizer, opt_state: Shards, axis: Axis) -> Any:
        return super().rates(optimizer, opt_state.state, axis)

    def update(self, update: Update, states: States, info: StepInfo, pending: Any) -> Updated:
        axis, (leaves, spec) = info.axis, tree.flatten(update.params)
        params, grads = own_parts(update.params, axis), own_parts(update.grads, axis)
        optimizer, mine = self._together(update.optimizer, info), own_shards(update.opt_state, axis)
        if isinstance(mine, CodedShards) and axis.size == 1:  # the optimizer writes to the parameters themselves
            params = tree.map(torch.clone, params)
        own = replace(update, optimizer=optimizer, params=params, grads=grads, opt_state=mine.state)
        parts, opt_state = own.apply()
        del own, grads  # frees the gradients' memory for the new parameters
        if isinstance(mine, CodedShards):
            return self._coded(update, tree.flatten(parts)[0], replace(mine, state=opt_state), states, info, pending)
        if axis.size == 1:
            after = [whole(new, old) for new, old in zip(tree.flatten(parts)[0], leaves, strict=True)]
            return Updated(tree.unflatten(spec, after), as_shards(opt_state, axis), states, pending)
        shared = communicate_after_update(self, AllParts(), update, parts, opt_state, states, info)
        return replace(shared, opt_state=as_shards(opt_state, axis), pending=pending)

    def _coded(
        self, update: Update, parts: list[Tensor], mine: CodedShards, states: States, info: StepInfo, pending: Any
    ) -> Updated:
        """The end of a step whose ranks send differences; `parts`: this rank's new parameters."""
        axis, (leaves, spec) = info.axis, tree.flatten(update.params)
        hook, (unsent, of_unsent) = resolved(self.comm_hook).at(info.step), tree.flatten(mine.unsent)
        wanted = [new + rest for new, rest in zip(parts, unsent, strict=True)]  # in the dtype of what isn't sent yet
        changes = [new - part(old, axis.rank, axis.size) for new, old in zip(wanted, leaves, strict=True)]
        coded = CodedParts(hook) if isinstance(hook, CompressedAllReduce) else AllParts()
        sent = exchange(self, coded, changes, tree.leaf_paths(update.params), info, like=update.params)
        after, left = list(leaves), list(unsent)
        for bucket, (rows, _) in sent.wait_buckets():
            for member, block in zip(bucket.members, rows.split(bucket.sizes, 1), strict=True):
                old = leaves[member]
                after[member] = (old + whole(block, old)).to(old.dtype)
                left[member] = finite(wanted[member] - part(after[member], axis.rank, axis.size))
        after, left = update.if_finite((after, left), (leaves, unsent))
        shards = replace(mine, unsent=tree.unflatten(of_unsent, left))
        return Updated(tree.unflatten(spec, after), shards, states, pending)

    def gather_optimizer(self, optimizer: Optimizer, params: Tree, opt_state: Shards, info: StepInfo) -> Shards:
        if opt_state.ranks == 1:
            return opt_state
        new = self.init_optimizer(optimizer, params, Axis("whole", 1))
        like, paths = tree.flatten(new)[0], tree.leaf_paths(new)
        leaves, spec = tree.flatten(own_shards(opt_state, info.axis))
        places = [place for place, leaf in enumerate(leaves) if leaf.ndim == 1]
        mine, names = [leaves[place] for place in places], [paths[place] for place in places]
        for bucket, (rows, _) in exchange(self, AllParts(), mine, names, info).wait_buckets():
            for member, block in zip(bucket.members, rows.split(bucket.sizes, 1), strict=True):
                leaves[places[member]] = whole(block, like[places[member]])
        own: Shards = tree.unflatten(spec, leaves)
        return replace(own, ranks=1, rank=0)

    def _together(self, optimizer: Optimizer, info: StepInfo) -> Optimizer:
        """`optimizer`, in which clipping uses the norm over all ranks' parts."""

        def norm(member: optimizers.ClipByGlobalNorm, parts: Sequence[Tensor]) -> Tensor:
            own = member.norm(parts)  # this norm is already over a mesh's other dimensions
            if info.axis.size == 1:
                return own
            # the exchange takes the mean, and a sum is needed
            squares = [own.double().square().reshape(1) * info.axis.size]
            squares, _ = exchange(self, AllReduce(), squares, ["the squared norm of the gradients"], info).wait()
            return squares[0].sqrt().reshape(()).to(own.dtype)

        found = optimizers.members_of(optimizer)
        each = [replace(m, norm=partial(norm, m)) if isinstance(m, optimizers.ClipByGlobalNorm) else m for m in found]
        return optimizers.with_members(optimizer, each)
