"""What a batch is: where it is cut, for :func:`ltx.shard` and :func:`ltx.accumulate` alike.

The tensors of a batch have one length along dim 0, with one entry a sample; tensors without dimensions, numbers and
strings aren't cut. A list or tuple whose items are containers of one structure, or dicts with the same keys, is
either a list of records, one a sample: then it is as long as the batch, and cut between two of them. Or it is a list of
fields: then the tensors in it are as long as the batch, and cut. Where both can be meant the call raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optree
import torch

from ltx.core.base import tree
from ltx.core.base.containers import PLAIN, advice_for
from ltx.core.base.errors import TreeError
from ltx.typing import Tree


class Records:
    """A list or tuple with one record a sample."""

    def __init__(self, items: Sequence[Any]):
        self.items = items


tree.register_node(
    Records,
    lambda records: (tuple(records.items), type(records.items)),
    lambda children, cls: Records(cls(children)),
    names=lambda records: [str(place) for place in range(len(records.items))],
)


def is_records(node: object) -> bool:
    return isinstance(node, Records)


def cells(batch: Tree) -> tuple[list[Any], Any]:
    """The parts of an opened batch that are cut or left whole, :class:`Records` and leaves, and their structure."""
    return optree.tree_flatten(batch, is_records, namespace=tree.NAMESPACE)


def cut(batch: Tree, parts: int, part: int) -> Tree:
    """An opened batch whose tensors are cut already, with this part of its records: of torch.tensor_split's lengths.

    So unequal parts of records and tensors go together.
    """
    found, spec = cells(batch)

    def of(items: Sequence[Any]) -> Sequence[Any]:
        least, more = divmod(len(items), parts)
        start = part * least + min(part, more)
        return items[start : start + least + (part < more)]

    return tree.unflatten(spec, [of(x.items) if isinstance(x, Records) else x for x in found])


def opened(batch: Tree, what: str, dim: int = 0) -> tuple[Tree, int | None]:
    """`batch` with its lists of records as :class:`Records`, and its length; None if nothing in it says so.

    `what` is about to cut it along `dim`. Along others than the first, tensors have any lengths, and no list is cut.

    Raises:
        TreeError: tensors have unequal lengths; a list may be one of records or of fields; a leaf can't be cut.
    """
    tree.flatten(batch)  # which opens what hasn't been met
    found, spec = optree.tree_flatten(batch, _is_cell, namespace=tree.NAMESPACE)
    lengths: list[int] = []
    lists: dict[int, set[int]] = {}
    records: list[int] = []
    length: int | None = None
    for place, cell in enumerate(found):
        if advice := advice_for(cell):
            raise TreeError(
                f"{what}: leaf {_paths(batch)[place]!r} is of type {type(cell).__name__}, whose tensors belong "
                f"together, and would be cut inside of samples. {advice}"
            )
        if isinstance(cell, torch.Tensor):
            lengths += cell.shape[:1]
        elif type(cell) in (list, tuple):
            lists[place] = {x.shape[0] for x in tree.flatten(cell)[0] if isinstance(x, torch.Tensor) and x.ndim}
    if dim == 0 and (lists or any(n != lengths[0] for n in lengths)):
        length, records = _read(batch, found, set(lengths), lists, what)
    elif dim == 0 and lengths:
        length = lengths[0]
    leaves: list[Any] = []
    for place, cell in enumerate(found):
        within = tree.flatten(cell)[0] if place in lists else [cell]
        leaves += [None] * len(within) if place in records else within
    tree.check_open(leaves, batch, what, "split")
    if not records:
        return batch, length
    return tree.unflatten(spec, [Records(x) if place in records else x for place, x in enumerate(found)]), length


def _read(
    batch: Tree, found: list[Any], lengths: set[int], lists: dict[int, set[int]], what: str
) -> tuple[int | None, list[int]]:
    """The length of a batch, and the places of its lists of records; `lists`: the lengths of the tensors in them."""
    telling = [place for place, inner in lists.items() if inner or advice_for(found[place][0])]
    possible = lengths or {n for place in telling for n in (len(found[place]), *lists[place])}
    fitting = [
        n
        for n in possible
        if lengths <= {n} and all(len(found[place]) == n or lists[place] == {n} for place in telling)
    ]
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
    """Whether `node` may be a list of records, or is something that isn't cut inside."""
    if type(node) not in (list, tuple):
        return bool(advice_for(node))
    if not node or isinstance(node[0], torch.Tensor) or type(node[0]) in PLAIN:
        return False
    if advice_for(node[0]):
        return all(type(item) is type(node[0]) for item in node)
    specs = [tree.flatten(item)[1] for item in node]
    if type(node[0]) not in (list, tuple):  # by its keys: what a record holds may be lists of unequal lengths
        specs = [(type(item), tuple(spec.entries())) for item, spec in zip(node, specs, strict=True)]
    return not tree.flatten(node[0])[1].is_leaf() and all(spec == specs[0] for spec in specs)
