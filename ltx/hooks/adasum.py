"""adasum: an adaptive sum of vectors, in which their common component counts once; and the hook that takes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch

from ltx.errors import AxisError, StrategyError
from ltx.extend import BucketInput, CollectiveRequest, CommHook, Packing, Reduction, brief, buffers, collectives, tree
from ltx.typing import Tree

# A vector with a smaller square is treated as zeros. The bound is Horovod's, the root of the least normal float64.
_LEAST_SQUARE = 2.2250738585072014e-308**0.5
_PIECE = 1 << 16
_DTYPES = (None, torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Halving:
    """A rank's computations between the collectives of an adasum of flat tensors, part by part.

    At level l = 0, 1, 2, ... a rank has 1/2^l of the adasum of a block of 2^l ranks. It sends half of its piece to rank
    r xor 2^l and gets half of that rank's piece (permute); the ranks of both blocks add up their parts of the inner
    products (sum), and each then has 1/2^(l+1) of the adasum of both blocks. In the end every rank gets the pieces of
    all ranks (all_gather). :func:`adasum` is the loop over levels.

    `sizes`: lengths of the tensor's parts, each a vector; `rank`: a 0-dim tensor on simulated ranks and in graphs.
    """

    def __init__(self, sizes: Sequence[int], n: int, rank: int | torch.Tensor):
        self.sizes = list(sizes)
        self.n = n
        self.rank = rank
        self.depth = self.levels(n)
        self._numel = sum(sizes)
        self._width = -(-self._numel // n)
        ends = list(accumulate(self.sizes))
        self._bounds = [0, *ends[:-1], n * self._width]  # the padding is counted as a part of the last vector

    @staticmethod
    def levels(n: int) -> int:
        """log2 of the number of ranks, which must be a power of two."""
        if n & (n - 1):
            raise AxisError(
                f"adasum pairs ranks with ranks, and works on 1, 2, 4, 8, ... of them, got {n}. Use ltx.pmean, or an "
                "axis of so many ranks."
            )
        return n.bit_length() - 1

    def rows(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensor, padded and cut into n rows. A piece consists of some of the rows."""
        more = self.n * self._width - self._numel
        return (torch.nn.functional.pad(flat, (0, more)) if more else flat).view(self.n, self._width)

    def partners(self, level: int) -> tuple[int, ...]:
        """The pairs of the permutation as a flat tuple: source, destination, source, ..."""
        return tuple(r for source in range(self.n) for r in (source, source ^ (1 << level)))

    def given(self, piece: torch.Tensor, level: int) -> torch.Tensor:
        """The half of this rank's piece that is sent to the partner."""
        lower, upper = piece.chunk(2)
        return _pick((self.rank >> level) % 2 == 1, upper, lower)

    def pair(self, piece: torch.Tensor, received: torch.Tensor, level: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first and the second block's values."""
        is_second = (self.rank >> level) % 2 == 1  # whether this rank is in the second of the two blocks
        mine = _pick(is_second, *piece.chunk(2))
        return _pick(is_second, mine, received), _pick(is_second, received, mine)

    def _first_row(self, level: int) -> int | torch.Tensor:
        """The index, among all rows, of the pair's first row."""
        return sum(((self.rank >> bit) % 2) * (self.n >> (bit + 1)) for bit in range(level + 1))

    def segments(self, level: int) -> list[slice]:
        """The elements of each part that are in the pair, as slices. The rank must be an int."""
        start, length = self._first_row(level) * self._width, (self.n >> (level + 1)) * self._width
        assert isinstance(start, int)
        return [slice(*span) for span in pairwise(min(max(bound - start, 0), length) for bound in self._bounds)]

    def _part_of(self, level: int, device: torch.device) -> torch.Tensor:
        """For each element, the index of its part; for simulated ranks and compiled graphs."""
        lengths = torch.tensor([end - start for start, end in pairwise(self._bounds)], device=device)
        parts = torch.arange(len(lengths), device=device)
        numbers = torch.repeat_interleave(parts, lengths, output_size=self.n * self._width)
        rows = self._first_row(level) + torch.arange(self.n >> (level + 1), device=device)
        return numbers.view(self.n, self._width)[rows].reshape(-1)

    def here(self, level: int, device: torch.device) -> torch.Tensor:
        """A mask of this rank's pair of blocks, since each pair has its own row in the sum over all ranks."""
        return (torch.arange(self.n >> (level + 1), device=device) == self.rank >> (level + 1))[:, None, None]

    def products(self, a: torch.Tensor, b: torch.Tensor, level: int) -> torch.Tensor:
        """This rank's part of <a,b>, <a,a> and <b,b> for each part of the tensor, in float64."""
        a, b = a.reshape(-1).double(), b.reshape(-1).double()
        sums = torch.stack([self._sums(x * y, level) for x, y in ((a, b), (a, a), (b, b))])
        return torch.where(self.here(level, a.device), sums, 0.0)

    def _sums(self, values: torch.Tensor, level: int) -> torch.Tensor:
        if isinstance(self.rank, torch.Tensor):
            zeros = torch.zeros(len(self.sizes), dtype=values.dtype, device=values.device)
            return zeros.index_add(0, self._part_of(level, values.device), values)
        return torch.stack([values[segment].sum() for segment in self.segments(level)])

    def weights(self, summed: torch.Tensor, level: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The factors for each part of a and of b: 1 - dot / 2 square, or 1 for a part of zeros."""
        dot, *squares = torch.where(self.here(level, summed.device), summed, 0.0).sum(0)
        square = torch.stack(squares)
        zero = square < _LEAST_SQUARE
        weight_a, weight_b = torch.where(zero, 1.0, 1 - dot / (2 * torch.where(zero, 1.0, square)))
        return weight_a, weight_b

    def combined(self, a: torch.Tensor, b: torch.Tensor, summed: torch.Tensor, level: int) -> torch.Tensor:
        """The adasum of the two blocks."""
        weight_a, weight_b = (self._by_element(weights, level) for weights in self.weights(summed, level))
        return (weight_a.view(a.shape) * a + weight_b.view(b.shape) * b).to(a.dtype)

    def _by_element(self, weights: torch.Tensor, level: int) -> torch.Tensor:
        if isinstance(self.rank, torch.Tensor):
            return weights[self._part_of(level, weights.device)]
        return torch.cat([w.expand(s.stop - s.start) for w, s in zip(weights, self.segments(level), strict=True)])

    def joined(self, rows: torch.Tensor) -> torch.Tensor:
        """The flat tensor, from the ranks' last rows. The inverse of :meth:`rows`."""
        if self.n > 2:
            # Bit l of a rank chose between halves at level l, so the row is the rank with its bits reversed.
            bits = range(self.depth)
            order = [sum((row >> bit & 1) << (self.depth - 1 - bit) for bit in bits) for row in range(self.n)]
            rows = torch.stack([rows[place] for place in order])
        return rows.reshape(-1)[: self._numel]


def _pick(second: bool | torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`b` on ranks for which `second` is true, `a` on others."""
    if isinstance(second, torch.Tensor):
        return torch.where(second, b, a)
    return b if second else a


@collectives.counted
def adasum(value: Tree, axis: Any = None) -> Tree:
    """The adaptive sum over ranks of every tensor of a tree: a sum in which common directions count once.

    Two ranks' tensors a and b give ``(1 - <a,b> / 2|a|²) a + (1 - <a,b> / 2|b|²) b``: which is their sum if they are
    orthogonal, their mean if they are collinear, and the other one if one is zero. More ranks are combined in pairs,
    neighbours first; the result depends on their order. Each tensor of the tree is combined separately.

    Args:
        value: tree of real floating tensors, the same structure, shapes and dtypes on every rank.
        axis: as in :func:`ltx.psum`; of 1, 2, 4, 8, ... ranks.

    Returns:
        What each rank sees: the same tree of new tensors, shapes and dtypes as given, the same bits on every rank.
        Products and norms are taken in float64, so float32 can't overflow; float64 values beyond 1e150 give NaN.

    Gradient:
        The exact gradient, to any order, of this function of all ranks' tensors, for the sum of all ranks' losses.

    Raises:
        AxisError: `axis` isn't in scope, or its number of ranks isn't a power of two.
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

    A rank sends 2(n-1)/n of the tensors and at most 48 n bytes a tensor, in 2 log2 n + 1 collectives for each dtype.

    Source: Maleki et al., "Scaling distributed training with adaptive summation", MLSys 2021, sections 3 and 4,
    figure 4 for the recursion; Horovod's ``op=hvd.Adasum``.
    """
    n = collectives.axis_size(axis)
    Halving.levels(n)
    real = "and only real floating tensors have an adaptive sum."
    leaves, spec, rank = collectives.begun("adasum", value, axis, lambda x: not x.is_floating_point(), real)
    results = list(leaves)
    for kind in dict.fromkeys((x.dtype, x.device) for x in leaves):
        places = [i for i, x in enumerate(leaves) if (x.dtype, x.device) == kind]
        sizes = [leaves[i].numel() for i in places]
        halving = Halving(sizes, n, rank)
        piece = halving.rows(torch.cat([leaves[i].reshape(-1) for i in places]))
        for level in range(halving.depth):
            partners = halving.partners(level)
            pairs = list(zip(partners[::2], partners[1::2], strict=True))
            a, b = halving.pair(piece, collectives.ppermute(halving.given(piece, level), pairs, axis), level)
            piece = halving.combined(a, b, collectives.psum(halving.products(a, b, level), axis), level)
        flat = halving.joined(collectives.all_gather(piece[0], axis))
        for i, part in zip(places, flat.split(sizes), strict=True):
            results[i] = part.reshape(leaves[i].shape)
    return tree.unflatten(spec, results)


@dataclass(frozen=True)
class Adasum(CommHook):
    """The adaptive sum of the ranks' gradients, parameter by parameter: :func:`ltx.adasum` in a step.

    Each rank sends 2(n-1)/n of a bucket, as for the mean, and at most 48 n bytes for each parameter in it. The adaptive
    sum lies between mean and sum, nearer to the sum the more ranks disagree; the paper keeps one worker's rate.

    The result isn't the gradient of any loss: its derivatives raise :class:`ltx.errors.UnsupportedError`
    (:func:`ltx.adasum` is differentiable). Horovod takes that of optimizers' updates: ``HorovodStrategy(op="adasum")``.

    Args:
        dtype: the floating dtype in which wider gradients are sent and combined (None: their own); norms in float64.

    Raises:
        AxisError: in a step, the number of ranks isn't a power of two.
        StrategyError: `dtype` isn't one of these; in a step, gradients are complex.

    Example:
        >>> import torch, ltx
        >>> strategy = ltx.DDPStrategy(comm_hook=ltx.hooks.Adasum())
        >>> ltx.vmap(lambda g: ltx.sync_gradients(g, strategy)[0])(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
        tensor([[1., 2.],
                [1., 2.]])
    """

    exact: ClassVar[bool] = False
    sums: ClassVar[bool] = False
    reach: ClassVar[str] = "parameter"

    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype not in _DTYPES:
            raise StrategyError(f"Adasum.dtype must be a real floating dtype or None, got {brief(self.dtype)}.")

    def phases(self, axis_size: int) -> int:
        return 2 * Halving.levels(axis_size) + 1

    def packing(self, dtype: torch.dtype, axis_size: int) -> Packing:
        if dtype.is_complex:
            raise StrategyError(f"{self!r} combines real gradients, a parameter is {dtype}: see torch.view_as_real.")
        narrow = dtype if self.dtype is None or dtype.itemsize <= self.dtype.itemsize else self.dtype
        return Packing(narrow, 1.0, None)

    def reduce(self, inputs: BucketInput) -> Reduction:
        flat = inputs.flat
        halving = Halving(inputs.bucket.sizes, inputs.axis_size, inputs.rank)
        if halving.n == 1 or not flat.numel():
            return flat, inputs.states
        piece = halving.rows(flat)
        for level in range(halving.depth):
            given = halving.given(piece, level).contiguous()
            received = yield CollectiveRequest("ppermute", given, arguments=halving.partners(level))
            a, b = halving.pair(piece, received, level)
            plain = buffers.is_plain(a)
            products = _products(halving, a, b, level) if plain else halving.products(a, b, level)
            summed = yield CollectiveRequest("psum", products)
            piece = _combined(halving, a, b, summed, level) if plain else halving.combined(a, b, summed, level)
        return halving.joined((yield CollectiveRequest("all_gather", piece[0]))), inputs.states


def _products(halving: Halving, a: torch.Tensor, b: torch.Tensor, level: int) -> torch.Tensor:
    """As :meth:`Halving.products`, on the CPU, eagerly: in pieces that stay in the cache."""
    sums = [[0.0, 0.0, 0.0] for _ in halving.sizes]
    a, b = a.view(-1), b.view(-1)
    memory = torch.empty((2, min(_PIECE, a.numel())), dtype=torch.float64, device="cpu")
    for part, at in _pieces(halving, level):
        x, y = (row[: at.stop - at.start].copy_(given[at]) for row, given in zip(memory, (a, b), strict=True))
        for place, (u, v) in enumerate(((x, y), (x, x), (y, y))):
            sums[part][place] += torch.dot(u, v).item()
    by_product = torch.tensor(sums, dtype=torch.float64, device="cpu").T.contiguous()
    return torch.where(halving.here(level, a.device), by_product, 0.0)


def _combined(halving: Halving, a: torch.Tensor, b: torch.Tensor, summed: torch.Tensor, level: int) -> torch.Tensor:
    """As :meth:`Halving.combined`, piece by piece, in the memory of `a`, which only this rank uses."""
    weights = list(zip(*(w.tolist() for w in halving.weights(summed, level)), strict=True))
    flat, other = a.view(-1), b.view(-1)
    memory = torch.empty(min(_PIECE, flat.numel()), dtype=torch.float64, device="cpu")
    for part, at in _pieces(halving, level):
        weight_a, weight_b = weights[part]
        flat[at].copy_(memory[: at.stop - at.start].copy_(flat[at]).mul_(weight_a).add_(other[at], alpha=weight_b))
    return a


def _pieces(halving: Halving, level: int) -> Iterator[tuple[int, slice]]:
    """Yields (index of the part, slice); a slice fits into the cache as float64."""
    for part, segment in enumerate(halving.segments(level)):
        for start in range(segment.start, segment.stop, _PIECE):
            yield part, slice(start, min(start + _PIECE, segment.stop))
