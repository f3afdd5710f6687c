"""psum, pmean and pvary: sums over ranks.

    psum:   y_r = sum_s x_s        transpose:  x̄_r = sum_s ȳ_s      (psum)
    pmean:  y_r = sum_s x_s / n    transpose:  x̄_r = sum_s ȳ_s / n
    pvary:  y_r = x_r              transpose:  x̄_r = sum_s ȳ_s      (psum)

pvary is the identity on a value that is the same on every rank and from here on counts as each rank's own: its
gradient is the sum over all ranks' copies.
"""

from __future__ import annotations

from typing import Any

import torch

from ltx import comm, tree
from ltx.collectives.calls import collective, prepare_trace, tensors_of, traced_size
from ltx.collectives.linear import Rule, add_rule
from ltx.collectives.sparse import is_sparse, psum_sparse
from ltx.typing import Tree

add_rule(
    Rule(
        name="psum",
        operation="psum",
        before=lambda x, n, static: x.clone(memory_format=torch.contiguous_format),
        after=lambda result, rank, n, static: result,
        stacked=lambda xs, n, static: (xs.sum(0, dtype=xs.dtype), False),
        alone=lambda x, static: x,
        transpose=lambda shape, static: ("psum", ()),
        batched=lambda static: static,
    )
)

add_rule(
    Rule(
        name="pvary",
        operation=None,
        before=lambda x, n, static: x,
        after=lambda result, rank, n, static: result,
        stacked=lambda xs, n, static: (xs, True),
        alone=lambda x, static: x,
        transpose=lambda shape, static: ("psum", ()),
        batched=lambda static: static,
    )
)


def psum(value: Tree, axis: Any = None) -> Tree:
    """The sum over ranks of every tensor of a tree.

    Args:
        value: tree of tensors, the same structure, shapes and dtypes on every rank; any strides. Numbers and NumPy's
            arrays count as tensors, so ``ltx.psum(1)`` is the number of ranks. Booleans count as int64; uint16, uint32,
            uint64 and float8 have no sums, here as in torch. Sparse COO tensors may have their entries at other places
            on each rank; their sum is a coalesced COO tensor again, which moves the entries alone.
        axis: name, ``ltx.Axis``, ProcessGroup, or DeviceMesh such as ``mesh["data"]``, by whose dimension's name it is
            found from then on. A tuple of names, as ``("node", "data")``, is one axis of all their ranks, the first
            name the outermost; so is a mesh of several dimensions, ``mesh["node", "data"]``. None is the axis in scope:
            of several with different names there is none, even if some have size 1, so that a program means the same
            everywhere. Two exceptions: the simulated axes inside a world of one process, and the innermost of nested
            ones of one name.

    Returns:
        What each rank sees: the same tree of new tensors with the sums, shapes and dtypes as given.

    Gradient:
        The sum over ranks of the cotangents: psum(ȳ).

    Raises:
        AxisError: `axis` isn't in scope, or is None where several are.
        TreeError: a leaf is neither a tensor nor a number.
        UnsupportedError: its dtype has no sums.
        RankMismatchError: ranks' structures, shapes or dtypes differ; on all ranks, before anything is sent.

    Example:
        >>> import torch, ltx
        >>> ltx.vmap(ltx.psum)(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        tensor([[4., 6.],
                [4., 6.]])

    Source: ``jax.lax.psum`` under ``vmap``, ``pmap`` and ``shard_map(check_vma=False)``: the transpose is that of the
    global linear map. (Default ``shard_map`` counts a loss that is the same on all ranks once, ltx once a rank.)
    """
    value = countable(tensors_of(value, axis))
    if not torch.compiler.is_compiling() and any(map(is_sparse, tree.flatten(value)[0])):
        return tree.map(lambda x: psum_sparse(x, axis) if is_sparse(x) else psum(x, axis), value)
    return collective("psum", value, axis, lambda x, n: ())


def pmean(value: Tree, axis: Any = None) -> Tree:
    """The mean over ranks of every tensor of a tree; integers give floats.

    Arguments, errors and what each rank sees are those of :func:`psum`. Integer and boolean tensors give the default
    float dtype.

    Gradient:
        The mean over ranks of the cotangents: psum(ȳ) / n.

    Example:
        >>> import torch, ltx
        >>> ltx.vmap(ltx.pmean)(torch.tensor([1, 2]))
        tensor([1.5000, 1.5000])
    """
    n = axis_size(axis)
    return tree.map(lambda total: total / n, psum(value, axis))


def pvary(value: Tree, axis: Any = None) -> Tree:
    """Mark a value that is the same on every rank as each rank's own: identity, whose gradient is summed over ranks.

    Args, errors: as :func:`psum`. Nothing is sent in the forward direction, and equality isn't checked.

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
    return collective("pvary", value, axis, lambda x, n: ())


def axis_size(axis: Any = None) -> int:
    """The number of ranks on an axis, a Python int.

    Example:
        >>> import torch, ltx
        >>> ltx.axis_size()
        1
        >>> ltx.vmap(lambda x: x / ltx.axis_size())(torch.ones(4))
        tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    if torch.compiler.is_compiling():
        return traced_size(prepare_trace(axis))
    return comm.resolve(axis).size


def countable(value: Tree) -> Tree:
    """Booleans as int64, by torch.sum's rule; backends differ in their sums of booleans."""
    return tree.map(lambda x: x.long() if isinstance(x, torch.Tensor) and x.dtype == torch.bool else x, value)
