"""adasum: a sum of vectors in which what they have in common counts once.

    adasum(a, b) = (1 - <a,b> / 2|a|^2) a + (1 - <a,b> / 2|b|^2) b
    adasum(x_0, ..., x_{n-1}) = adasum(adasum of the first half, adasum of the second half)

Orthogonal vectors are added, equal ones averaged, and so are collinear ones. Maleki et al., "Scaling distributed
training with adaptive summation", MLSys 2021; the recursion over ranks r xor l for l = 1, 2, 4, ... is its figure 4.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import pairwise
from typing import Any

import torch

from ltx import tree, wire
from ltx.axis import GroupBacking
from ltx.collectives.gather import all_gather
from ltx.collectives.index import axis_index
from ltx.collectives.linear import Static, check_dense, meet_as_tree
from ltx.collectives.permute import ppermute
from ltx.collectives.psum import axis_size, psum
from ltx.errors import AxisError, TreeError
from ltx.typing import Tree

#: Yields (operation, contiguous buffer, arguments of a permutation), is sent its result, returns the value.
Asking = Generator[tuple[str, torch.Tensor, Static], torch.Tensor, torch.Tensor]

# A smaller square is that of a vector of zeros: Horovod's bound, the root of the least normal float64.
_LEAST_SQUARE = 2.2250738585072014e-308**0.5


def levels(n: int) -> int:
    """log2 of the number of ranks, which must be a power of two."""
    if n & (n - 1):
        raise AxisError(
            f"adasum pairs ranks with ranks, and works on 1, 2, 4, 8, ... of them, got {n}. Use ltx.pmean, or an axis "
            "of so many ranks."
        )
    return n.bit_length() - 1


def recursive_halving(flat: torch.Tensor, sizes: Sequence[int], n: int, rank: int | torch.Tensor) -> Asking:
    """The adasum of every rank's `flat`, each of its parts for itself.

    At level l = 1, 2, 4, ... a rank holds 1/l of the adasum of a block of l ranks. It gives half of that to rank r xor
    l for half of the other block's, the 2l ranks add up their parts of the inner products, and each has 1/2l of the
    adasum of both blocks. In the end everybody gathers everybody's. So a rank sends 2(n-1)/n of `flat`, as the ring
    does, and 48 n bytes for each part, at most, in 2 log2 n + 1 collectives.

    Args:
        flat: floating, 1-dimensional.
        sizes: lengths of its parts, which are the vectors.
        n: the number of ranks, a power of two.
        rank: this one's place; a 0-dim tensor where the ranks are simulated.
    """
    depth = levels(n)
    if depth == 0 or not flat.numel():
        return flat.clone()
    # Each part is laid out in n rows, so that a piece, which is some rows, has a piece of every part.
    parts = [torch.nn.functional.pad(part, (0, -len(part) % n)).view(n, -1) for part in flat.split(list(sizes))]
    widths = [part.shape[1] for part in parts]
    piece = torch.cat(parts, dim=1)
    for level in range(depth):
        distance = 1 << level
        upper = rank & distance != 0  # is this rank in the second of the two blocks?
        halves = piece.view(2, -1, piece.shape[1])
        partners = tuple(r for source in range(n) for r in (source, source ^ distance))
        received = yield "permute", _pick(upper, halves[1], halves[0]).contiguous(), partners
        mine, theirs = _pick(upper, halves[0], halves[1]).double(), received.double()
        a, b = _pick(upper, theirs, mine), _pick(upper, mine, theirs)
        # Each pair of blocks has a row of its own in one small sum over all ranks.
        here = (torch.arange(n >> (level + 1), device=flat.device) == rank >> (level + 1))[:, None, None]
        products = torch.stack([_by_part(x * y, widths) for x, y in ((a, b), (a, a), (b, b))])
        summed = yield "sum", torch.where(here, products, 0.0), ()
        dot, square_a, square_b = torch.where(here, summed, 0.0).sum(0)
        piece = (_weights(dot, square_a, widths) * a + _weights(dot, square_b, widths) * b).to(flat.dtype)
    rows = yield "all_gather", piece[0], ()
    # Bit l of a rank has chosen between halves of 1/2l: the row that it ended with is its number read backwards.
    order = [int(f"{row:0{depth}b}"[::-1], 2) for row in range(n)]
    ends = [0, *torch.tensor(widths).cumsum(0).tolist()]
    rows = rows[torch.tensor(order, device=rows.device)]
    return torch.cat([rows[:, i:j].reshape(-1)[:size] for (i, j), size in zip(pairwise(ends), sizes, strict=True)])


def _pick(second: bool | torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`b` on ranks for which `second` is true, `a` on others."""
    if isinstance(second, torch.Tensor):
        return torch.where(second, b, a)
    return b if second else a


def _by_part(products: torch.Tensor, widths: list[int]) -> torch.Tensor:
    """The sum over each part's columns."""
    return torch.stack([part.sum() for part in products.split(widths, dim=1)])


def _weights(dot: torch.Tensor, square: torch.Tensor, widths: list[int]) -> torch.Tensor:
    """What a vector of that squared norm is multiplied by: 1 - dot / 2 square, by columns; 1 for a vector of zeros."""
    zero = square < _LEAST_SQUARE
    weights = torch.where(zero, 1.0, 1 - dot / (2 * torch.where(zero, 1.0, square)))
    return torch.cat([weight.expand(width) for weight, width in zip(weights, widths, strict=True)])


def adasum(value: Tree, axis: Any = None) -> Tree:
    """The adaptive sum over ranks of every tensor of a tree: a sum in which common directions count once.

    Two ranks' tensors a and b give ``(1 - <a,b> / 2|a|²) a + (1 - <a,b> / 2|b|²) b``: their sum if they are orthogonal,
    their mean if they are collinear, the other one if one is zero. More ranks are combined in pairs, neighbours first;
    the result depends on their order. Every tensor of the tree counts for itself.

    Args:
        value: tree of real floating tensors, the same structure, shapes and dtypes on every rank.
        axis: as in :func:`ltx.psum`; of 1, 2, 4, 8, ... ranks.

    Returns:
        What each rank sees: the same tree of new tensors, shapes and dtypes as given, the same bits on every rank.
        Products and norms are taken in float64, so float32 can't overflow; float64 values beyond 1e150 give NaN.

    Gradient:
        The exact one of this function of all ranks' tensors, to any order, where the loss is the sum over ranks of
        each rank's loss.

    Raises:
        AxisError: `axis` isn't in scope, or has another number of ranks.
        TreeError: a leaf isn't a real floating tensor.
        RankMismatchError: ranks' structures, shapes or dtypes differ; on all ranks, before anything is sent.

    Example:
        >>> import torch, ltx
        >>> ltx.vmap(ltx.adasum)(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))  # orthogonal: the sum
        tensor([[1., 2.],
                [1., 2.]])
        >>> ltx.vmap(ltx.adasum)(torch.tensor([[1.0, 1.0], [3.0, 3.0]]))  # collinear: the mean
        tensor([[2., 2.],
                [2., 2.]])

    Sends 2(n-1)/n of the tensors and 48 n bytes a tensor at most, in 2 log2 n + 1 collectives for each dtype.

    Source: Maleki et al., "Scaling distributed training with adaptive summation", MLSys 2021, sections 3 and 4;
    Horovod's ``op=hvd.Adasum``.
    """
    leaves, spec = tree.flatten(value)
    tree.check_leaves(leaves, value, "adasum: its argument")
    for place, x in enumerate(leaves):
        if not x.is_floating_point():
            path = (tree.plain_paths if torch.compiler.is_compiling() else tree.leaf_paths)(value)[place]
            raise TreeError(
                f"adasum: leaf {path!r} is {tree.describe(x)}, and only real floating tensors have an adaptive sum."
            )
    n = axis_size(axis)
    levels(n)
    if torch.compiler.is_compiling():
        rank: int | torch.Tensor = axis_index(axis)
    else:
        check_dense("adasum", leaves, value)
        found = wire.resolve(axis)
        meet_as_tree("adasum", value, leaves, spec, [() for _ in leaves], found)
        rank = found.backing.rank if isinstance(found.backing, GroupBacking) else found.index()
    results = list(leaves)
    for kind in dict.fromkeys((x.dtype, x.device) for x in leaves):
        places = [i for i, x in enumerate(leaves) if (x.dtype, x.device) == kind]
        sizes = [leaves[i].numel() for i in places]
        flat = _driven(recursive_halving(torch.cat([leaves[i].reshape(-1) for i in places]), sizes, n, rank), axis)
        for i, part in zip(places, flat.split(sizes), strict=True):
            results[i] = part.reshape(leaves[i].shape)
    return tree.unflatten(spec, results)


def _driven(asking: Asking, axis: Any) -> torch.Tensor:
    """Answer with differentiable collectives until the value is there."""
    try:
        operation, buffer, arguments = next(asking)
        while True:
            match operation:
                case "permute":
                    answer = ppermute(buffer, list(zip(arguments[::2], arguments[1::2], strict=True)), axis)
                case "sum":
                    answer = psum(buffer, axis)
                case _:
                    answer = all_gather(buffer, axis)
            operation, buffer, arguments = asking.send(answer)
    except StopIteration as end:
        result: torch.Tensor = end.value
        return result
