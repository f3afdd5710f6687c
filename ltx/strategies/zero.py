"""ZeroStrategy: optimizer state sharded over the ranks, and each rank updates its part of every parameter.

    g~_r = (mean_s g_s)[r]                 reduce-scatter, during the backward pass
    w~_r, m_r = update(g~_r, m_r, w[r])    on rank r alone, whose optimizer state m_r has 1/n of the elements
    w = [w~_0, ..., w~_{n-1}]              all-gather

Rajbhandari et al., "ZeRO", SC 2020, section 5: P_os, with gradients reduced where they are needed (section 7.1). x[r]
is the r-th part of a tensor: flattened and padded with zeros, it has n parts of ceil(size / n) elements.

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
from torch.nn.functional import pad

from ltx import extend
from ltx.errors import StrategyError
from ltx.extend import Axis, Bucket, LeafState, Optimizer, Packing, Update, around, exchange, needs, tree
from ltx.hooks import AllReduce, BucketInput, CollectiveRequest, CommHook, Reduction
from ltx.hooks.combined import After, in_half
from ltx.hooks.half import HalfHook
from ltx.hooks.lossy import CompressedAllReduce, finite, with_residuals
from ltx.hooks.plain import EXACT, resolve_hook, resolved
from ltx.optim.clipping import ClipByGlobalNorm
from ltx.optim.combine import members_of, with_members
from ltx.strategies import StateLayout, States, StepInfo, Strategy, Updated
from ltx.strategies.nodes import refuse_complex
from ltx.typing import Tree


@dataclass(frozen=True, kw_only=True)
class ZeroStrategy(Strategy):
    """ZeRO-1: parameters as with :class:`ltx.DDPStrategy`, with 1/n of the optimizer state on each of n ranks.

    A step sends as many bytes as DDP's: a reduce-scatter of gradients during the backward pass, and an all-gather of
    parameters after the update; with ``overlap="update"`` a bucket's all-gather follows its own update, while other
    gradients are still on their way. Parameters are the same bits on every rank. For optimizers that work element by
    element (``optimizer.offers.elementwise``: SGD, Adam, AdamW, ...), and for chains of them with
    :func:`ltx.optim.clip_by_global_norm` or :func:`ltx.optim.measure_global_norm`: the norm of the whole mean gradient.

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
        for member in members_of(optimizer):
            if not (isinstance(member, ClipByGlobalNorm) and member.takes_parts):
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
        refuse_complex(self, params)  # the hook codes real differences
        unsent = tree.map(lambda x: torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)), parts)
        return CodedShards(**vars(as_shards(state, axis)) | {"unsent": unsent})

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
        shared = extend.communicate_after_update(self, AllParts(), update, parts, opt_state, states, info)
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

        def norm(member: ClipByGlobalNorm, parts: Sequence[Tensor]) -> Tensor:
            own = member.norm(parts)  # this norm is already over a mesh's other dimensions
            if info.axis.size == 1:
                return own
            squares = [own.double().square().reshape(1) * info.axis.size]  # the exchange takes the mean
            squares, _ = exchange(self, AllReduce(), squares, ["the squared norm of the gradients"], info).wait()
            return squares[0].sqrt().reshape(()).to(own.dtype)

        found = members_of(optimizer)
        each = [replace(m, norm=partial(norm, m)) if isinstance(m, ClipByGlobalNorm) else m for m in found]
        return with_members(optimizer, each)


@dataclass(frozen=True)
class Shards:
    """One rank's part of an optimizer state. Paths name the part, so that parts don't collide in a checkpoint."""

    state: Tree  # the optimizer's state for this rank's parts of the parameters, which are vectors
    ranks: int  # the number of parts; 1 for a whole state
    rank: int | None  # the rank whose part this is; None on simulated ranks, which hold all parts together
    unsent: Tree = ()  # with a lossy hook: what this rank hasn't sent yet of its part, vectors as the parameters' parts

    @property
    def name(self) -> str:
        return f"shard_{'r' if self.rank is None else self.rank}_of_{self.ranks}"


class CodedShards(Shards):
    """:class:`Shards` of a strategy with a lossy hook, which a step of another strategy refuses by their class."""


for _cls in (Shards, CodedShards):
    tree.register_node(
        _cls,
        lambda shards: ((shards.state, shards.unsent), (shards.ranks, shards.rank)),
        lambda children, static, cls=_cls: cls(children[0], *static, children[1]),  # type: ignore[misc]
        lambda shards: (shards.name, f"{shards.name}.unsent"),
    )


def width(numel: int, ranks: int) -> int:
    """The number of elements of each part of a parameter."""
    return -(-numel // ranks)


def part(x: Tensor, rank: int | Tensor, ranks: int) -> Tensor:
    """x[rank], a vector; a view unless it needs padding. `rank` is a tensor on simulated ranks."""
    m, flat = width(x.numel(), ranks), x.reshape(-1)
    if isinstance(rank, int):
        mine = flat[rank * m : (rank + 1) * m]
        return mine if mine.numel() == m else pad(mine, (0, m - mine.numel()))
    return _rows(flat, ranks).index_select(0, rank.reshape(1)).squeeze(0)


def _rows(flat: Tensor, ranks: int) -> Tensor:
    """All parts, of shape (ranks, width); a view unless they need padding."""
    missing = width(flat.numel(), ranks) * ranks - flat.numel()
    return (pad(flat, (0, missing)) if missing else flat).view(ranks, -1) if flat.numel() else flat.view(ranks, 0)


@dataclass(frozen=True)
class MeanPart(CommHook):
    """Reduce-scatter: rank r gets the r-th part of every mean gradient, in its place, and zeros elsewhere."""

    alike: ClassVar[bool] = False
    sums: ClassVar[bool] = False

    short: torch.dtype | None = None  # the half-precision dtype in which gradients are sent; None for their own dtype

    @property
    def exact(self) -> bool:
        return self.short is None

    def packing(self, dtype: torch.dtype, axis_size: int) -> Packing:
        narrow = dtype if self.short is None or dtype.itemsize < 4 or dtype.is_complex else self.short
        return Packing(narrow, 1.0 / axis_size, 1.0 / axis_size)

    def reduce(self, inputs: BucketInput) -> Reduction:
        return _placed((yield CollectiveRequest("psum_scatter", _side_by_side(inputs))), inputs), inputs.states


in_half.register(MeanPart, lambda hook, dtype: replace(hook, short=dtype))


@around("codec")
@dataclass(frozen=True)
class CodedPart(CommHook):
    """As :class:`MeanPart`, in messages of `codec`: rank r gets the r-th part of the sum of what ranks sent."""

    exact: ClassVar[bool] = False
    alike: ClassVar[bool] = False
    reach: ClassVar[str] = "bucket"
    sums: ClassVar[bool] = False
    phases: ClassVar[int] = 1

    codec: CompressedAllReduce

    def reduce(self, inputs: BucketInput) -> Reduction:
        if not inputs.flat.numel():
            return inputs.flat, inputs.states
        codec, rows = self.codec, _side_by_side(inputs)
        m, rows = rows.shape[1], torch.stack([_in_blocks(codec, row) for row in rows])
        messages, left = codec.encoded(rows, codec.keys(inputs)[0])
        mine = codec.decoded_sum((yield CollectiveRequest("all_to_all", messages)), rows.shape[1], rows.dtype)
        states = inputs.states
        if codec.error_feedback:
            states = with_residuals(states, finite(_in_order(left, inputs)), inputs.bucket)
        return _placed(mine[:m], inputs), states


in_half.register(CodedPart, lambda hook, dtype: in_half(hook.codec, dtype))


def in_messages(hook: CommHook) -> bool:
    if isinstance(hook, After):
        return all(map(in_messages, hook.members))
    return isinstance(hook, AllReduce | CompressedAllReduce)


def _in_blocks(codec: CompressedAllReduce, row: Tensor) -> Tensor:
    length = -(-len(row) // codec.multiple()) * codec.multiple()
    return codec.filled(row, length, length)


def _side_by_side(inputs: BucketInput) -> Tensor:
    """The parts of all parameters of a bucket, a row for each rank. One copy; none for a single large parameter."""
    blocks = [_rows(flat, inputs.axis_size) for flat in inputs.flat.split(inputs.bucket.sizes)]
    return torch.cat(blocks, 1) if len(blocks) > 1 else blocks[0]


def _placed(mine: Tensor, inputs: BucketInput) -> Tensor:
    """A flat bucket of zeros with this rank's parts, `mine`, in their places."""
    n, sizes, rank = inputs.axis_size, inputs.bucket.sizes, inputs.rank
    widths = [width(size, n) for size in sizes]
    if not isinstance(rank, int):  # simulated ranks can't write in place
        rows = torch.where((torch.arange(n, device=mine.device) == rank)[:, None], mine, torch.zeros_like(mine))
        return _in_order(rows, inputs)
    flat = mine.new_zeros(inputs.bucket.numel)
    for whole, own, m in zip(flat.split(sizes), mine.split(widths), widths, strict=True):
        there = whole[rank * m : (rank + 1) * m]
        there.copy_(own[: there.numel()])
    return flat


def _in_order(rows: Tensor, inputs: BucketInput) -> Tensor:
    """A flat bucket from the parts of all ranks, as :func:`_side_by_side` lays them out."""
    widths = [width(size, inputs.axis_size) for size in inputs.bucket.sizes]
    blocks = zip(rows[:, : sum(widths)].split(widths, 1), inputs.bucket.sizes, strict=True)
    return torch.cat([block.reshape(-1)[:size] for block, size in blocks])


@dataclass(frozen=True)
class PartUpdated(MeanPart, extend.PostUpdateHook):
    """Reduce-scatters gradients, updates this rank's part, and all-gathers the new parameters."""

    phases: ClassVar[int] = 2
    shares_gradients: ClassVar[bool] = True

    def part(self, param: Tensor, axis: Axis) -> Tensor:
        return part(param, axis.rank, axis.size)

    def own(self, opt_state: Shards, axis: Axis) -> Tree:
        mine = own_shards(opt_state, axis).state
        return mine if opt_state.ranks == axis.size else tree.map(torch.clone, mine)  # a whole state's part is a view

    def held(self, opt_state: Tree, axis: Axis) -> Shards:
        return as_shards(opt_state, axis)

    def reduce(self, inputs: BucketInput) -> Reduction:
        n, sizes, update = inputs.axis_size, inputs.bucket.sizes, inputs.update
        assert update is not None
        widths = [width(size, n) for size in sizes]
        mine = yield CollectiveRequest("psum_scatter", _side_by_side(inputs))
        given = update(mine.to(inputs.bucket.dtype).split(widths))
        return (yield CollectiveRequest("all_gather", torch.cat(given) if len(given) > 1 else given[0])), ()

    def finish_bucket(self, bucket: Bucket, reduced: extend.Reduced, old: extend.Old) -> extend.PostUpdateResult:
        blocks = reduced[0].split([width(x.numel(), old.axis_size) for x in old.params], 1)
        if old.may_overwrite:
            return extend.PostUpdateResult(old.params, old.states, partial(_joined, blocks, old.params))
        return extend.PostUpdateResult(
            [whole(block, x) for block, x in zip(blocks, old.params, strict=True)], old.states
        )


@dataclass(frozen=True)
class AllParts(PartUpdated):
    """Only all-gathers the new parameters: gradients were reduced before, and the optimizer has run."""

    phases: ClassVar[int] = 1
    shares_gradients: ClassVar[bool] = False

    def packing(self, dtype: torch.dtype, axis_size: int) -> Packing:
        return super().packing(dtype, axis_size)._replace(scale=1.0)

    def reduce(self, inputs: BucketInput) -> Reduction:
        return (yield CollectiveRequest("all_gather", inputs.flat)), ()


@dataclass(frozen=True)
class CodedParts(CodedPart):
    """Gathers the messages of all ranks; the result is what they hold, a row for each rank."""

    alike: ClassVar[bool] = True
    state_names: ClassVar[tuple[str, ...]] = ()

    def packing(self, dtype: torch.dtype, axis_size: int) -> Packing:
        return Packing(self.codec.packing(dtype, axis_size).dtype, 1.0, None)

    def reduce(self, inputs: BucketInput) -> Reduction:
        codec, flat = self.codec, inputs.flat
        if not flat.numel():
            return flat.new_zeros((inputs.axis_size, 0)), ()
        row = _in_blocks(codec, flat)
        messages = yield CollectiveRequest("all_gather", codec.encode(row[None], codec.keys(inputs)[1])[0])
        return codec.decode(messages, len(row), row.dtype)[:, : len(flat)], ()


def whole(parts: Tensor, like: Tensor) -> Tensor:
    """A tensor of the shape of `like` from all ranks' parts, which may be columns of a bucket."""
    return parts.contiguous().view(-1)[: like.numel()].view(like.shape)  # contiguous: a column of a bucket has strides


def _joined(blocks: Sequence[Tensor], params: Sequence[Tensor]) -> None:
    """Copy the parts of all ranks, one row each, into their parameters."""
    for block, param in zip(blocks, params, strict=True):
        flat, m = param.view(-1), block.shape[1]
        full = flat.numel() // m if m else 0  # the number of rows without padding
        flat[: full * m].view(full, m).copy_(block[:full])
        if full < len(block):
            flat[full * m :].copy_(block[full:].reshape(-1)[: flat.numel() - full * m])


def own_parts(tensors: Tree, axis: Axis) -> Tree:
    return tree.map(lambda x, rank=axis.rank: part(x, rank, axis.size), tensors)


def as_shards(state: Tree, axis: Axis) -> Shards:
    return Shards(state, axis.size, axis.rank if isinstance(axis.rank, int) else None)


def own_shards(shards: Shards, axis: Axis) -> Shards:
    """This rank's part of an optimizer state, which may be this part already, or a whole state."""
    here = as_shards((), axis)
    if (shards.ranks, shards.rank) == (here.ranks, here.rank):
        return shards
    if shards.ranks > 1:
        raise StrategyError(
            f"ZeroStrategy: this optimizer state is {shards.name}, and this rank's is {here.name}. For other "
            "ranks, or another number of them, gather it first, where it was made: state = train.gather(state)."
        )
    mine: Shards = tree.map(lambda x, rank=axis.rank: part(x, rank, axis.size) if x.ndim == 1 else x, shards)
    return replace(mine, ranks=here.ranks, rank=here.rank)
