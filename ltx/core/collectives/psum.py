"""Sums over ranks, and their transposes.

psum:       y_r = sum_s x_s                    transpose:  x̄_r = sum_s ȳ_s      (psum)
pmean:      y_r = sum_s x_s / n                transpose:  x̄_r = sum_s ȳ_s / n
pvary:      y_r = x_r                          transpose:  x̄_r = sum_s ȳ_s      (psum)
broadcast:  y_r = x_src                        transpose:  x̄_src = sum_s ȳ_s, 0 elsewhere
psum_to:    y_dst = sum_s x_s, 0 elsewhere     transpose:  x̄_r = ȳ_dst
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from ltx.core import comm
from ltx.core.base import private, traced, tree
from ltx.core.base.arguments import brief, checked
from ltx.core.base.errors import CollectiveError, InputError, TreeError, UnsupportedError
from ltx.core.collectives import calls
from ltx.core.collectives.linear import Function, add_rule, only_at
from ltx.core.collectives.uneven import gathered, told
from ltx.core.comm.operations import as_it_is
from ltx.typing import Tree

GradScale = Literal["sum", "mean"]
#: The dtypes whose sums over ranks may overflow although the mean fits.
NARROW = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32)
# The length of the message sent before sparse tensors: a digest of the tree, and the number of entries of each leaf.
_HEADER = 32

add_rule(
    name="psum",
    stacked=lambda xs, n, static: (xs.sum(0, dtype=xs.dtype), False),
    transpose=lambda shape, static: ("psum", ()),
)

add_rule(
    name="pvary",
    operation=None,
    before=lambda x, n, static: x,
    stacked=lambda xs, n, static: (xs, True),
    transpose=lambda shape, static: ("psum", ()),
)

add_rule(
    name="broadcast",
    moves=True,
    stacked=lambda xs, n, static: (xs[static[0]].clone(), False),
    transpose=lambda shape, static: ("psum_to", static),
    arguments=lambda static: static,
    keeps_strides=True,
)

add_rule(
    name="psum_to",
    operation="psum",
    after=lambda result, x, rank, n, static: result if rank == static[0] else torch.zeros_like(result),
    stacked=lambda xs, n, static: only_at(xs.sum(0, dtype=xs.dtype), n, static[0]),
    transpose=lambda shape, static: ("broadcast", static),
)


@calls.public("axis_index_groups", "prescale", "postscale")
def psum(
    value: Tree,
    axis: Any = None,
    *,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    prescale: float | torch.Tensor = 1,
    postscale: float | torch.Tensor = 1,
) -> Tree:
    """The sum over ranks of every tensor of a tree.

    Every rank (process) calls it with its own tensors, such as losses or counts, and gets the same totals.

    Args:
        value: tree of tensors, the same structure, shapes and dtypes on every rank; any strides. Numbers and NumPy
            arrays count as tensors, so ``ltx.psum(1)`` is the number of ranks. Booleans count as int64; uint16, uint32,
            uint64 and float8 have no sums. Entries of sparse COO tensors may be at different places on each rank.
        axis: name, ``ltx.Axis``, ProcessGroup, or DeviceMesh such as ``mesh["data"]``, which can be found by its
            dimension's name from then on. A tuple or list of names, as ``("node", "data")``, or a mesh of several
            dimensions is one axis of all their ranks, with the first name as the outermost; ``()`` is each rank alone.
            psum, pmean, pmax and pmin also accept simulated axes together with axes of processes. None is the axis in
            scope; of nested axes of one name, the innermost. If axes of different names are in scope, None raises, even
            if some have size 1; but simulated axes take precedence over a world of one process.
        axis_index_groups: lists of indices on the axis, the same on every rank, with each index once: a rank gets the
            sum over its own list. Lists may have unequal lengths. Processes open a communicator for each new list.
        prescale, postscale: numbers or 0-dim tensors, which may differ between ranks. This rank's tensors are
            multiplied by `prescale` before the sum, and its sums by `postscale`. For integers they must be whole.

    Returns:
        What each rank sees: the same tree of new tensors with the sums, shapes and dtypes as given.

    Gradient:
        The sum over ranks of the cotangents: psum(ȳ); with factors prescale · psum(postscale · ȳ). Factors that are
        tensors have gradients too.

    Raises:
        AxisError: `axis` isn't in scope, or is None and several are in scope; or an index is in no group, or in two.
        TreeError: a leaf is neither a tensor nor a number; or it is an integer tensor and a factor isn't whole.
        InputError: a factor is a tensor that isn't 0-dim.
        UnsupportedError: a leaf's dtype has no sums.
        RankMismatchError: ranks' structures, shapes or dtypes differ; on all ranks, before anything is sent.

    Example:
        >>> import torch, ltx
        >>> ltx.vmap(ltx.psum)(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        tensor([[4., 6.],
                [4., 6.]])

        >>> ltx.vmap(lambda x: ltx.psum(x, prescale=0.5))(torch.tensor([1.0, 2.0]))
        tensor([1.5000, 1.5000])

    Source: ``jax.lax.psum`` under ``vmap`` and ``shard_map(check_vma=False)``, whose transpose is that of the global
    linear map; Horovod's ``prescale_factor`` and ``postscale_factor``.
    """
    *others, axis = comm.kinds_of(calls.grouped(axis, axis_index_groups))
    for other in others:
        value, prescale = psum(value, other, prescale=prescale), 1
    value = countable(calls.tensors_of(value, axis))
    then: Callable[[torch.Tensor], torch.Tensor] = as_it_is
    if not (is_one(prescale) and is_one(postscale)):
        before, after = _factor(value, prescale, "prescale"), _factor(value, postscale, "postscale")
        value, then = tree.map(lambda x: _times(x, before), value), lambda total: _times(total, after)
    if not traced.recording() and any(map(is_sparse, tree.flatten(value)[0])):
        tree.check_leaves(tree.flatten(value)[0], value, "psum: its argument")
        sparse, dense = split_sparse(value)
        totals = tree.map(then, psum_sparse("psum", value, sparse, axis))
        return tree.filled(totals, calls.collective("psum", dense, axis, then=then))
    return calls.collective("psum", value, axis, then=then)


def _factor(value: Tree, factor: float | torch.Tensor, name: str) -> float | torch.Tensor:
    """Check `factor`, the argument `name` of psum, for `value`. Returns it, as an int if it is whole."""
    if isinstance(factor, torch.Tensor):
        said = tree.describe(factor)
        whole = not (factor.is_floating_point() or factor.is_complex())
        if factor.ndim != 0:
            raise InputError(f"psum: {name} must be a number or a 0-dim tensor, got {said}. Sum it.")
    elif is_one(factor):
        return 1
    elif isinstance(factor, int) and not abs(factor) < 2**63:
        raise InputError(f"psum: {name}={brief(factor)} doesn't fit into 64 bits.")
    else:
        said, whole = f"{factor:g}", float(factor).is_integer() and abs(factor) < 2**63
        factor = int(factor) if whole else factor
    leaves = tree.flatten(value)[0]
    if not traced.recording():
        tree.check_leaves(leaves, value, "psum: its argument")
        calls.check_sums("psum", leaves, value)
    if not whole:
        why = f"and {name}={said} isn't a whole number. Cast the leaf to a floating dtype."
        calls.refuse_leaves(
            "psum", leaves, value, lambda x: not (x.is_floating_point() or x.is_complex()), why, TreeError
        )
    return factor


def _times(x: Any, factor: float | torch.Tensor) -> Any:
    return x if is_one(factor) else (x * factor).to(x.dtype)


def is_one(factor: float | torch.Tensor) -> bool:
    """Whether `factor` is 1, as far as the host knows without waiting for a device."""
    return not isinstance(factor, torch.Tensor) and factor == 1


@calls.public("axis_index_groups")
def pmean(value: Tree, axis: Any = None, *, axis_index_groups: Sequence[Sequence[int]] | None = None) -> Tree:
    """The mean over ranks of every tensor of a tree. The means of integers are floats.

    Every rank calls it with its own tensors, such as the loss of its batch, and gets the same mean. Arguments, errors
    and what each rank sees are those of :func:`psum`. The means of integer and boolean tensors have the default float
    dtype; their sums are taken in int64, so that those of narrow dtypes fit.

    Gradient:
        The mean over ranks of the cotangents: psum(ȳ) / n.

    Example:
        >>> import torch, ltx
        >>> ltx.vmap(ltx.pmean)(torch.tensor([1, 2]))
        tensor([1.5000, 1.5000])
    """
    *others, axis = comm.kinds_of(calls.grouped(axis, axis_index_groups))
    for other in others:
        value = pmean(value, other)
    n = _count(axis, axis_index_groups)
    value = countable(calls.tensors_of(value, axis), NARROW)
    if not traced.recording() and any(map(is_sparse, tree.flatten(value)[0])):
        return tree.map(lambda total: total / n, psum(value, axis))
    return calls.collective("psum", value, axis, then=lambda total: total / n)


def _count(axis: Any, groups: Sequence[Sequence[int]] | None) -> int | torch.Tensor:
    """The number of ranks; a tensor if it differs between simulated ranks."""
    unequal = groups is not None and len({len(group) for group in groups}) > 1
    found = None if traced.recording() else comm.resolve(axis)
    if unequal and (found is None or found.ranks.least(found.size) < found.size):
        ranks: torch.Tensor = psum(torch.ones((), dtype=torch.int64, device="cpu"), axis)
        return ranks
    return axis_size(axis)


@checked()
def pvary(value: Tree, axis: Any = None) -> Tree:
    """Make a value that is the same on every rank each rank's own: the identity, with a gradient summed over ranks.

    Arguments and errors are those of :func:`psum`. Nothing is sent in the forward direction; whether the value is the
    same on all ranks isn't checked.

    Gradient:
        psum(ȳ).

    Example:
        >>> import torch, ltx
        >>> def loss(w, x):
        ...     return (ltx.pvary(w) * x).sum()
        >>> w, x = torch.tensor(2.0), torch.tensor([1.0, 3.0])
        >>> ltx.vmap(torch.func.grad(loss), in_dims=(None, 0))(w, x)  # each rank has the gradient of the sum
        tensor([4., 4.])

    Source: ``jax.lax.pcast(..., to="varying")`` under ``shard_map``, formerly ``pvary``;
    the f operator of Megatron-LM (arXiv:1909.08053, section 3).
    """
    return calls.collective("pvary", value, axis)


@calls.public("src")
def broadcast(value: Tree, src: int = 0, axis: Any = None, *, grad_scale: GradScale = "sum") -> Tree:
    """Give every rank the tree of rank `src`.

    Args:
        value: tree of tensors, the same structure, shapes and dtypes on every rank; only `src`'s values matter.
        src: an index on the axis (not a rank of the world), 0 to n - 1.
        axis: as in :func:`ltx.psum`.
        grad_scale: "mean" divides the gradient by n, as Horovod does.

    Returns:
        What each rank sees: new tensors with the values of rank `src`, in the memory layout of its tensors (such as
        channels last).

    Gradient:
        psum(ȳ) on rank `src`, 0 on other ranks.

    Raises:
        AxisError: `axis` isn't in scope, or `src` isn't on it.
        TreeError, RankMismatchError: as in :func:`ltx.psum`.

    Example:
        >>> import torch, ltx
        >>> ltx.vmap(lambda x: ltx.broadcast(x, src=1))(torch.tensor([1.0, 2.0]))
        tensor([2., 2.])
    """
    scaled = scale_gradient(value, axis, grad_scale, lambda n: 1 / n)
    return calls.collective("broadcast", scaled, axis, lambda x, n: (calls.checked_index("broadcast", "src", src, n),))


@calls.public("dst")
def psum_to(value: Tree, dst: int = 0, axis: Any = None) -> Tree:
    """The sum over ranks of every tensor of a tree, on rank `dst` only.

    Args:
        value: as in :func:`ltx.psum`, except that sparse tensors are refused.
        dst: an index on the axis (not a rank of the world), 0 to n - 1.
        axis: as in :func:`ltx.psum`.

    Returns:
        What each rank sees: on `dst` the same tree of new tensors with the sums; on other ranks zeros of the same
        shapes and dtypes, so that all ranks can run the same code, also under transforms and simulated.

    Gradient:
        broadcast(ȳ): the cotangent on `dst`, on every rank.

    Raises:
        AxisError: `axis` isn't in scope, or `dst` isn't on it.
        TreeError, UnsupportedError, RankMismatchError: as in :func:`ltx.psum`.

    Example:
        >>> import torch, ltx
        >>> ltx.vmap(lambda x: ltx.psum_to(x, dst=1))(torch.tensor([1.0, 2.0]))
        tensor([0., 3.])

    Source: ``torch.distributed.reduce``, which leaves unspecified values on the other ranks.
    """
    counted = countable(calls.tensors_of(value, axis))
    return calls.collective("psum_to", counted, axis, lambda x, n: (calls.checked_index("psum_to", "dst", dst, n),))


@checked()
def axis_size(axis: Any = None) -> int:
    """The number of ranks on an axis, a Python int.

    Example:
        >>> import torch, ltx
        >>> ltx.axis_size()
        1
        >>> ltx.vmap(lambda x: x / ltx.axis_size())(torch.ones(4))
        tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    if traced.recording():
        return calls.traced_size(calls.prepare_trace(axis))
    return math.prod(comm.resolve(part).size for part in comm.kinds_of(axis))


class ScaledGradient(Function):
    """The identity; its backward pass multiplies the cotangent by `factor`. Forward mode raises."""

    @staticmethod
    def forward(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, float], output: torch.Tensor) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[Any, ...]:
        return cotangents[0] * ctx.factor, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: torch.Tensor, factor: float) -> tuple[torch.Tensor, Any]:
        return ScaledGradient.apply(x, factor), in_dims[0]


@traced.node
def _scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    scaled: torch.Tensor = ScaledGradient.apply(x, factor)
    return scaled


def scale_gradient(value: Tree, axis: Any, grad_scale: GradScale, factor: Callable[[int], float]) -> Tree:
    """`value`; its gradient will be multiplied by ``factor(n)`` if `grad_scale` is "mean"."""
    if grad_scale == "sum":
        return value
    if grad_scale != "mean":
        raise CollectiveError(f'grad_scale must be "sum" or "mean", got {brief(grad_scale)}.')
    by = factor(axis_size(axis))
    return tree.map(lambda x: _scaled(x, by) if isinstance(x, torch.Tensor) else x, value)


def countable(value: Tree, dtypes: Sequence[torch.dtype] = (torch.bool,)) -> Tree:
    """`value`, with tensors of `dtypes` as int64. For booleans torch.sum does so too, and backends' sums differ."""
    return tree.map(lambda x: x.long() if isinstance(x, torch.Tensor) and x.dtype in dtypes else x, value)


def is_sparse(x: Any) -> bool:
    """Whether `x` is a tensor of torch's COO layout, as gradients of sparse embeddings are."""
    return isinstance(x, torch.Tensor) and x.layout is torch.sparse_coo


def split_sparse(value: Tree) -> tuple[Tree, Tree]:
    """(`value` with None in place of dense leaves, `value` with None in place of sparse leaves)."""
    sparse = tree.map(lambda x: x if is_sparse(x) else None, value)
    return sparse, tree.masked(value, sparse, there=False)


def psum_sparse(name: str, whole: Tree, value: Tree, axis: Any) -> Tree:
    """The sums over ranks of the COO tensors of `value`, coalesced; differentiable with respect to the values. Ranks
    compare the tree `whole`, the argument of `name`, at each call: the first message has its digest.
    """
    found = comm.resolve(axis)
    if private.in_transform():
        raise UnsupportedError(f"{name} of a sparse tensor works outside of torch.func; use x.to_dense() there.")
    leaves, spec = tree.flatten(value)
    mine = [x.coalesce() for x in leaves]
    signature = comm.Signature.of(name, tree.leaf_paths(whole), tree.flatten(whole)[0])
    counts: list[tuple[int, ...]] = []  # of each leaf, on all ranks
    for start in range(0, len(mine), _HEADER - 1):
        own = [x.values().shape[0] for x in mine[start : start + _HEADER - 1]]
        header = [signature.fingerprint, *own, *[0] * (_HEADER - 1 - len(own))]
        said = told(name, header, found, signature)
        if any(row[0] != header[0] for row in said):
            found.ranks.by_rank(signature)  # raises on every rank
        counts += list(zip(*said, strict=True))[1 : 1 + len(own)]
    parts = [part for x in mine for part in (x.indices().T, x.values())]
    lengths = [of_all for of_all in counts for _ in ("indices", "values")]
    agreed = comm.Agreement(signature, signature.fingerprint, None)
    joined = [torch.cat(each) for each in gathered(parts, [0] * len(parts), lengths, found, agreed)]
    sums = [
        torch.sparse_coo_tensor(indices.T, values, x.shape, check_invariants=False).coalesce()
        for x, indices, values in zip(mine, joined[::2], joined[1::2], strict=True)
    ]
    return tree.unflatten(spec, sums)
