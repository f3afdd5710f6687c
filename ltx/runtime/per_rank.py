"""PerRank: what a function returned on each rank, which can be stacked, or checked to be the same."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar, overload

import torch

from ltx.core.base import tree as trees
from ltx.core.base.arguments import brief, shown
from ltx.core.base.readable import Table, laid_out, text_of
from ltx.core.base.tree import check_dense, describe
from ltx.core.comm.operations import as_bytes
from ltx.errors import ArgumentError, ReplicaDivergedError, TreeError

T = TypeVar("T")


class PerRank(Sequence[T], Generic[T]):
    """One value for each rank, in the order of ranks. :meth:`ltx.Pool.run` returns it.

    Example:
        >>> import torch
        >>> from ltx.runtime.per_rank import PerRank
        >>> results = PerRank([{"x": torch.tensor([1.0])}, {"x": torch.tensor([2.0])}])
        >>> results.rank(1)
        {'x': tensor([2.])}
        >>> results.stack()
        {'x': tensor([[1.],
                [2.]])}
    """

    __slots__ = ("_values",)

    def __init__(self, values: Iterable[T]):
        if not isinstance(values, Iterable) or (isinstance(values, torch.Tensor) and values.ndim == 0):
            raise ArgumentError(f"PerRank: values must be one value for each rank, got {shown(values)}.")
        self._values = tuple(values)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        return self._values[index]

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        values = (f"rank {rank}: {text_of(value, 16, 2)}" for rank, value in enumerate(self._values))
        return laid_out("PerRank(", values, ")")

    def _ipython_display_(self) -> None:
        """Show nothing if all values are None: what ran has returned nothing. IPython goes on where it isn't so."""
        if any(value is not None for value in self._values):
            raise NotImplementedError

    def _repr_html_(self) -> str:
        """A table with a row for each rank; if all values are dictionaries with the same few keys, each is a column."""
        dicts: list[dict[Any, Any]] = [x for x in self._values if isinstance(x, dict) and len(x) <= 8]
        alike = len(dicts) == len(self) and len({tuple(x) for x in dicts}) == 1
        columns = dicts if alike else [{"value": x} for x in self._values]
        rows = [(str(rank), *(text_of(x, 16) for x in row.values())) for rank, row in enumerate(columns)]
        header = ("rank", *map(str, columns[0] if columns else ()))
        return Table(header, rows, [False] * len(header))._repr_html_()

    def rank(self, index: int) -> T:
        """The value of rank `index`. Raises IndexError if there is no such rank."""
        if not 0 <= index < len(self._values):
            raise IndexError(f"rank {index}: expected one of the ranks 0 to {len(self._values) - 1}.")
        return self._values[index]

    def stack(self) -> Any:
        """One tree whose tensors have the ranks as a new dimension 0; numbers and bools become 1-dim tensors.

        Tensors on several devices are stacked on rank 0's device.

        Raises:
            TreeError: the ranks' trees have different structures, or a leaf can't be stacked; with its path and rank.
        """
        columns, paths, spec = self._columns()
        return trees.unflatten(spec, [_stack(leaves, p) for leaves, p in zip(columns, paths, strict=True)])

    def replicated(self) -> T:
        """The value that all ranks have, after checking that it is the same bit for bit (NaN equals the same NaN).

        Raises:
            ReplicaDivergedError: a rank's value differs from rank 0's; with leaf's path, rank and largest difference.
            TreeError: the ranks' trees have different structures.

        Example:
            >>> from ltx.runtime.per_rank import PerRank
            >>> PerRank([{"loss": 0.5}, {"loss": 0.25}]).replicated()
            Traceback (most recent call last):
            ltx.errors.ReplicaDivergedError: leaf 'loss' isn't the same on all 2 ranks: rank 0 has 0.5, rank 1 has \
0.25. Use .rank(i) or .stack() for values that differ; parameters that should agree may have missed a synchronisation.
        """
        columns, paths, _ = self._columns()
        for leaves, path in zip(columns, paths, strict=True):
            for rank, leaf in enumerate(leaves):
                if difference := _difference(leaves[0], leaf, rank):
                    raise ReplicaDivergedError(
                        f"leaf {path!r} isn't the same on all {len(self)} ranks: {difference}. Use .rank(i) or .stack()"
                        " for values that differ; parameters that should agree may have missed a synchronisation."
                    )
        return self._values[0]

    def _columns(self) -> tuple[list[list[Any]], tuple[str, ...], Any]:
        """(for each leaf, its values on all ranks; the leaves' paths; the tree's structure)."""
        values: tuple[Any, ...] = self._values
        if not values:
            raise TreeError("there are the values of no rank to put together.")
        flat: list[Any] = [trees.flatten(value, none_is_leaf=True) for value in values]
        spec, paths = flat[0][1], trees.paths_of(flat[0][1])
        for rank, (_, other) in enumerate(flat):
            if other != spec:
                theirs = trees.paths_of(other)
                apart = [path for path in (*paths, *theirs) if (path in paths) != (path in theirs)]
                where = f"; {apart[0]!r} is only in one" if apart else ""
                raise TreeError(
                    f"rank {rank} returned a tree of another structure than rank 0: expected "
                    f"{brief(values[0])}, got {brief(values[rank])}{where}. Use .rank(i) to look at them one by one."
                )
        return [list(leaves) for leaves in zip(*(leaves for leaves, _ in flat), strict=True)], paths, spec


def _stack(leaves: list[Any], path: str) -> torch.Tensor:
    tensors: list[torch.Tensor] = []
    for rank, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor | bool | int | float | complex):
            raise TreeError(
                f"leaf {path!r} on rank {rank} is of type {type(leaf).__name__}: expected a tensor or a number. "
                "Use .rank(i) for other values."
            )
        if isinstance(leaf, int) and not -(2**63) <= leaf < 2**63:
            raise TreeError(f"leaf {path!r} on rank {rank} is too large for an int64: {leaf}. Use .rank(i).")
        tensor = leaf if isinstance(leaf, torch.Tensor) else torch.as_tensor(leaf, device="cpu")
        check_dense([tensor], tensor, f"leaf {path!r} on rank {rank}")
        first = tensors[0] if tensors else tensor
        if tensor.is_meta != first.is_meta:
            meta, other = (rank, 0) if tensor.is_meta else (0, rank)
            raise TreeError(f"leaf {path!r} on rank {meta} is on the meta device, rank {other}'s isn't. Use .rank(i).")
        if tensor.shape != first.shape or tensor.dtype != first.dtype:
            raise TreeError(
                f"leaf {path!r} can't be stacked: rank 0 has {describe(first)}, rank {rank} has {describe(tensor)}. "
                "Use .rank(i) for values of different shapes or dtypes."
            )
        tensors.append(tensor.to(first.device))
    return torch.stack(tensors)


def _difference(first: Any, other: Any, rank: int) -> str:
    """How rank `rank`'s leaf `other` differs from rank 0's, in words; "" if they are equal."""
    if isinstance(first, torch.Tensor) and isinstance(other, torch.Tensor):
        if first.dtype != other.dtype or first.shape != other.shape:
            return f"rank 0 has {describe(first)}, rank {rank} has {describe(other)}"
        a, b = first.detach().cpu(), other.detach().cpu()
        # bytes: 0.0 differs from -0.0, and equal NaNs don't differ
        unequal = (as_bytes(a) != as_bytes(b)).any(dim=-1).reshape(-1)
        if not unequal.any():
            return ""
        wide = torch.complex128 if a.is_complex() else torch.float64
        apart = (a.to(wide).reshape(-1) - b.to(wide).reshape(-1)).abs()[unequal].max().item()
        some = f"{int(unequal.sum())} of {a.numel()} elements of {describe(a)}"
        return f"rank {rank} differs from rank 0 in {some}, by {apart:.3g} at most"
    same = type(first) is type(other)
    if same and isinstance(first, float | complex):
        same = repr(first) == repr(other)  # repr distinguishes -0.0 from 0.0, and equates NaN with NaN
    elif same:
        try:
            same = bool(first == other)
        except Exception:  # `==` of arrays gives an array, which has no truth value
            same = pickle.dumps(first) == pickle.dumps(other)
    return "" if same else f"rank 0 has {first!r}, rank {rank} has {other!r}"
