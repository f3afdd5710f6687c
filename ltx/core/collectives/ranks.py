"""axis_index, rank_seed and shard: each rank's index, random seed, and part of a batch.

:func:`ltx.accumulate` cuts a batch by the rule of :func:`ltx.shard`. A list of containers of one structure is one of
records, as long as the batch, or of fields, in which tensors are as long as the batch. If it could be either, the call
raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ltx.core import comm
from ltx.core.base import traced, tree
from ltx.core.base.arguments import checked
from ltx.core.base.containers import PLAIN, advice_for
from ltx.core.base.errors import AxisError, TreeError, UnsupportedError
from ltx.core.collectives import calls
from ltx.core.collectives.psum import axis_size
from ltx.typing import Tree


@checked()
def axis_index(axis: Any = None) -> torch.Tensor:
    """This rank's index on an axis: a 0-dim int64 tensor on this rank's device.

    All ranks run the same program. With this number, 0 to ``ltx.axis_size() - 1``, a rank can choose its own samples.

    Args:
        axis: as in :func:`ltx.psum`.

    Example:
        >>> import torch, ltx
        >>> ltx.axis_index()
        tensor(0)
        >>> ltx.vmap(lambda x: x * ltx.axis_index())(torch.ones(3))
        tensor([0., 1., 2.])
    """
    return calls.in_graph_index(calls.prepare_trace(axis)) if traced.recording() else comm.resolve(axis).index()


def begun(
    name: str, value: Tree, axis: Any, is_bad: Callable[[Any], bool], why: str
) -> tuple[list[torch.Tensor], Any, int | torch.Tensor]:
    """Of a collective `name` that is made of others: the leaves of `value`, of which none `is_bad` and which ranks have
    compared, their structure, and this rank's index; a 0-dim tensor on simulated ranks and in graphs.
    """
    leaves, spec = tree.flatten(value)
    tree.check_leaves(leaves, value, f"{name}: its argument")
    calls.refuse_leaves(name, leaves, value, is_bad, why, TreeError)
    if traced.recording():
        return leaves, spec, axis_index(axis)
    calls.check_dense(name, leaves, value)
    calls.check_sums(name, leaves, value)
    found = comm.resolve(axis)
    calls.negotiate_tree(name, value, leaves, spec, [() for _ in leaves], found)
    return leaves, spec, found.rank


@checked("seed")
def rank_seed(seed: int, axis: Any = None) -> int:
    """A different seed for each rank, made from a seed that all ranks share, as for ``torch.Generator.manual_seed``.

    Args:
        seed: any Python int, the same on every rank.
        axis: as in :func:`ltx.psum`. On simulated ranks use ``ltx.vmap(..., randomness="different")`` instead.

    Returns:
        An int of 63 bits; those of different ranks and of different seeds are unrelated (SplitMix64).

    Example:
        >>> import ltx
        >>> ltx.rank_seed(0) == ltx.rank_seed(0), ltx.rank_seed(0) == ltx.rank_seed(1)
        (True, False)

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    found = comm.resolve(axis)
    found.ranks.need(
        "objects",
        f"rank_seed: the simulated ranks of axis {found.name!r} share one generator. They draw different numbers "
        'under ltx.vmap(f, randomness="different"), the default.',
    )
    z = (seed + (found.ranks.rank + 1) * 0x9E3779B97F4A7C15) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (z ^ (z >> 31)) >> 1


@checked("dim")
def shard(value: Tree, axis: Any = None, dim: int = 0) -> Tree:
    """This rank's part of a batch that every rank has.

    Every rank loads the same batch, calls ``ltx.shard(batch)`` and computes on its part: of 32 samples on 4 ranks
    (processes), rank 0 gets the first 8 and rank 1 the next 8.

    Args:
        value: a tree of dicts, lists, tuples, and any mappings or dataclasses, such as a ``BatchEncoding``. Every
            tensor with dimensions is split along `dim` into as many equal parts as there are ranks; other leaves
            (numbers, strings) aren't split. Along dim 0 all tensors must have one length, with an entry per sample. A
            list or tuple of that length that holds records, containers of one structure, or no tensors at all (texts,
            numbers), is split between its entries.
        axis: as in :func:`ltx.psum`.
        dim: the dimension to split.

    Returns:
        What each rank sees: part ``axis_index`` of every tensor; a view, except on a simulated axis.

    Gradient:
        That of indexing: the cotangent in this rank's part, 0 in the others.

    Raises:
        AxisError: a tensor can't be divided into equal parts.
        TreeError: tensors have unequal lengths along dim 0; a list could be one of records or of fields; a leaf holds
            tensors but isn't one (PackedSequence, graphs), or is a NumPy array, or a nested or sparse tensor.
        UnsupportedError: under ``ltx.vmap``, records differ in shapes, or in leaves that aren't tensors.

    Example:
        >>> import torch, ltx
        >>> ltx.vmap(lambda x: ltx.shard(x), in_dims=None, axis_size=2)(torch.tensor([1, 2, 3, 4]))
        tensor([[1, 2],
                [3, 4]])
    """
    size = axis_size(axis)
    rank, name = calls.known_rank(axis), axis if traced.recording() else comm.resolve(axis).name

    def part(path: str, x: Any) -> Any:
        parts: Sequence[Any]
        if isinstance(x, Records):
            if len(x.items) % size:
                raise AxisError(
                    f"shard: {path!r} is a list of {len(x.items)} records, which can't be split into {size} equal "
                    f"parts, one for each rank of axis {name!r}. Drop the remainder."
                )
            parts = [portion(x.items, size, each) for each in range(size)]
        elif isinstance(x, torch.Tensor) and x.ndim:
            if not -x.ndim <= dim < x.ndim or x.shape[dim] % size:
                raise AxisError(
                    f"shard: leaf {path!r} of shape {list(x.shape)} can't be split along dim {dim} into {size} equal "
                    f"parts, one for each rank of axis {name!r}. Drop or pad the remainder. Processes can take unequal "
                    "parts in place of this, x[rank::size]; an ltx.Weighted step then counts each sample alike."
                )
            if not traced.recording():
                tree.check_dense([x], x, f"shard: {path}")
            parts = x.tensor_split(size, dim)
        else:
            return x
        return parts[rank] if rank is not None else tree.map(chosen, *parts)

    def chosen(*parts: Any) -> Any:
        if all(isinstance(x, torch.Tensor) and x.shape == parts[0].shape for x in parts):
            return torch.stack(parts).index_select(0, axis_index(axis).reshape(1)).squeeze(0)
        if any(isinstance(x, torch.Tensor) for x in parts) or any(x != parts[0] for x in parts):
            raise UnsupportedError(
                "shard: the ranks of ltx.vmap have equal shapes and share all objects, and these records differ. Give "
                "them equal shapes and objects, or run on processes, ltx.Pool(n).run(fn)."
            )
        return parts[0]

    value, _ = opened(value, "shard", dim)
    parts, spec = cells(value)
    paths = [""] * len(parts) if traced.recording() else tree.leaf_paths(value, is_leaf=is_records)
    return tree.unflatten(spec, [part(path, x) for path, x in zip(paths, parts, strict=True)])


class Records(NamedTuple):
    """A list or tuple with one record per sample."""

    items: Sequence[Any]


def is_records(node: object) -> bool:
    return isinstance(node, Records)


def cells(batch: Tree) -> tuple[list[Any], Any]:
    """(cells, structure) of an opened batch. Its cells are :class:`Records` and other leaves."""
    return tree.flatten(batch, is_records)


def portion(items: Sequence[Any], parts: int, part: int) -> Sequence[Any]:
    """The `items` that ``torch.tensor_split`` would give to `part`."""
    least, more = divmod(len(items), parts)
    start = part * least + min(part, more)
    return items[start : start + least + (part < more)]


def cut(batch: Tree, parts: int, part: int) -> Tree:
    """An opened batch whose tensors are cut already, with its records cut to match."""
    found, spec = cells(batch)
    return tree.unflatten(spec, [portion(x.items, parts, part) if isinstance(x, Records) else x for x in found])


def opened(batch: Tree, what: str, dim: int = 0) -> tuple[Tree, int | None]:
    """(`batch` with its lists of records as :class:`Records`, the batch's length, or None if it has no such length), as
    `what` is going to cut it along `dim`. Along others than 0 tensors have any lengths, and no list is cut.
    """
    found, spec = tree.flatten(batch, _is_cell)
    lengths: set[int] = set()
    lists: dict[int, set[int]] = {}
    for place, cell in enumerate(found):
        if advice := advice_for(cell):
            raise TreeError(
                f"{what}: leaf {_paths(batch)[place]!r} is of type {type(cell).__name__}, whose tensors belong "
                f"together, and would be cut inside of samples. {advice}"
            )
        if isinstance(cell, torch.Tensor):
            lengths.update(cell.shape[:1])
        elif type(cell) in (list, tuple):
            lists[place] = {x.shape[0] for x in tree.flatten(cell)[0] if isinstance(x, torch.Tensor) and x.ndim}
    length, records = _read(batch, found, lengths, lists, what) if dim == 0 else (None, [])
    leaves: list[Any] = []
    for place, cell in enumerate(found):
        within = tree.flatten(cell)[0] if place in lists else [cell]
        leaves += [None] * len(within) if place in records else within
    tree.check_open(leaves, batch, what, "split")
    if records:
        batch = tree.unflatten(spec, [Records(x) if place in records else x for place, x in enumerate(found)])
    if not length or all(isinstance(x, torch.Tensor) for x in leaves):
        return batch, length

    def of_samples(node: Any) -> bool:
        return is_records(node) or (type(node) in (list, tuple) and len(node) == length and not _has_tensors(node))

    found, spec = tree.flatten(batch, of_samples)
    for place, cell in enumerate(found):
        if of_samples(cell):
            items = cell.items if is_records(cell) else cell
            if all(type(x) in (list, tuple) and len(x) == length for x in items) and not _has_tensors(items):
                path = tree.leaf_paths(batch, is_leaf=of_samples)[place]
                raise TreeError(
                    f"{what}: leaf {path!r} is a {type(items).__name__} of {length} lists of {length}, as many as "
                    "samples: these can be samples, or fields of a batch. Pass fields in a dict, {'a': ..., 'b': ...}, "
                    "and samples as a list of dicts."
                )
            found[place] = Records(items)
    return tree.unflatten(spec, found), length


def _has_tensors(node: Any) -> bool:
    return any(isinstance(x, torch.Tensor) for x in tree.flatten(node)[0])


def _read(
    batch: Tree, found: list[Any], lengths: set[int], lists: dict[int, set[int]], what: str
) -> tuple[int | None, list[int]]:
    """(length of a batch, places of its lists of records). `lists`: {place of a list: lengths of the tensors in it}."""
    telling = [place for place, inner in lists.items() if inner or advice_for(found[place][0])]
    possible = lengths or {n for place in telling for n in (len(found[place]), *lists[place])}
    fitting = [n for n in possible if lengths <= {n} and all(len(found[i]) == n or lists[i] == {n} for i in telling)]
    if possible and not fitting:
        said: dict[str, list[str]] = {}
        for path, cell, place in zip(_paths(batch), found, range(len(found)), strict=True):
            if isinstance(cell, torch.Tensor) and cell.ndim:
                said.setdefault(f"{cell.shape[0]}", []).append(repr(path))
            elif place in telling:
                of = f" of tensors of {' and '.join(map(str, sorted(lists[place])))}" if lists[place] else ""
                said.setdefault(f"{len(cell)} records{of}", []).append(repr(path))
        raise TreeError(
            f"{what}: the tensors of a batch have one length along dim 0, with an entry a sample, got "
            f"{'; '.join(f'{n}: ' + ', '.join(paths) for n, paths in said.items())}. Pass what has a length of its own "
            "for each sample (boxes, edges, tokens without padding) as a list of records, one dict a sample, and let "
            "the step close over what isn't part of the batch."
        )
    for place in telling:
        n, inner = len(found[place]), lists[place]
        if len(fitting) > 1 or inner == {n}:
            raise TreeError(
                f"{what}: leaf {_paths(batch)[place]!r} is a {type(found[place]).__name__} of {n} containers in which "
                f"all tensors have length {' or '.join(map(str, inner))}: these can be {n} samples, or fields of "
                "a batch. Pass fields in a dict, {'a': ..., 'b': ...}. Stack the tensors of samples."
            )
    length = fitting[0] if fitting else None
    return length, [place for place, inner in lists.items() if len(found[place]) == length and inner != {length}]


def _paths(batch: Tree) -> list[str]:
    return tree.leaf_paths(batch, is_leaf=_is_cell)


def _is_cell(node: Any) -> bool:
    """Whether `node` may be a list of records, or is an object whose inside isn't cut."""
    if type(node) not in (list, tuple):
        return bool(advice_for(node))
    if not node or isinstance(node[0], torch.Tensor) or type(node[0]) in PLAIN:
        return False
    if advice_for(node[0]):
        return all(type(item) is type(node[0]) for item in node)
    specs = [tree.flatten(item)[1] for item in node]
    if type(node[0]) not in (list, tuple):  # compare only keys, since records may hold lists of unequal lengths
        specs = [(type(item), tuple(spec.entries())) for item, spec in zip(node, specs, strict=True)]
    return not tree.flatten(node[0])[1].is_leaf() and all(spec == specs[0] for spec in specs)
