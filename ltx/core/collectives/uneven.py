"""Collectives of tensors whose shapes differ between ranks, and of objects; the barrier.

Tensors are padded to the largest one, and results are cut to size, by differentiable collectives and views. The ranks
of :func:`ltx.vmap` always have equal shapes, and share all objects, so these collectives refuse them.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, TypeGuard, TypeVar

import torch

from ltx.core import comm
from ltx.core.base import traced, tree
from ltx.core.base.arguments import checked, shown
from ltx.core.base.errors import AuthenticationError, AxisError, TreeError, UnsupportedError
from ltx.core.base.handed_in import HandedIn
from ltx.core.collectives.calls import check_dense, checked_index, collective, counted, movable, public, tensors_of
from ltx.core.collectives.linear import apply
from ltx.core.comm.operations import from_bytes
from ltx.core.ranks.axis import Axis
from ltx.typing import Tree

# All ranks have the same torch, and so the same order of dtypes.
_DTYPES = sorted({x for x in vars(torch).values() if isinstance(x, torch.dtype)}, key=str)
_MOST_DIMS = 32
T = TypeVar("T")
Lengths = tuple[int, ...]
Splits = Sequence[int] | str  # "infer"
_INFERRED = 'all_gather(splits="infer")'


@counted
def gather_all_tensors(tensor: torch.Tensor, axis: Any = None) -> list[torch.Tensor]:
    """Gather every rank's tensor on every rank; shapes may differ.

    Args:
        tensor: any shape, number of dimensions and strides; it may be empty; the same dtype on every rank.
        axis: as in :func:`ltx.psum`.

    Returns:
        What each rank sees: a list of new tensors by rank, each in its own shape.

    Gradient:
        Each rank gets the sum over ranks of its tensor's cotangents.

    Raises:
        AxisError: `axis` isn't in scope or is one of ``ltx.vmap``.
        RankMismatchError: ranks' dtypes differ; on all ranks.
        UnsupportedError: inside a compiled graph, where shapes are fixed.

    Example:
        >>> import torch, ltx
        >>> ltx.gather_all_tensors(torch.tensor([1.0, 2.0]))  # a world of one
        [tensor([1., 2.])]

    Source: Lightning's ``gather_all_tensors`` (1.7), whose results have no gradient.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TreeError(f"gather_all_tensors takes one tensor, got {shown(tensor)}. Call it for each leaf of a tree.")
    tree.check_dense([tensor], tensor, "gather_all_tensors")
    found = _real(axis, "gather_all_tensors", "Use ltx.all_gather, or processes: ltx.Pool(n).run(fn).")
    if tensor.ndim > _MOST_DIMS:
        raise UnsupportedError(f"gather_all_tensors: {tree.describe(tensor)} can't be sent; cast or reshape it first.")
    header = [tensor.ndim, _DTYPES.index(tensor.dtype), *tensor.shape, *(0 for _ in range(_MOST_DIMS - tensor.ndim))]
    signature = comm.Signature("gather_all_tensors", (), f"{len(header)} lengths")
    heads = told("gather_all_tensors", header, found, signature)  # at every call
    shapes = [torch.Size(head[2 : 2 + head[0]]) for head in heads]
    if len({head[1] for head in heads}) > 1:
        given = comm.Signature.of("gather_all_tensors (shapes may differ: cast to one dtype)", ["tensor"], [tensor])
        found.ranks.by_rank(given)  # raises on every rank
    agreed = comm.Agreement(signature, signature.fingerprint, None)
    moved = movable("all_gather", tensor)  # as bytes, if torch can't pad its dtype
    width = 1 if moved is tensor else tensor.itemsize
    (rows,) = gathered([moved.reshape(-1)], [0], [[shape.numel() * width for shape in shapes]], found, agreed)
    # Clone, so that elements are aligned.
    parts = rows if moved is tensor else [row.clone().view(tensor.dtype) for row in rows]
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def told(what: str, numbers: list[int], axis: Axis, call: comm.Signature | None = None) -> list[list[int]]:
    """Every rank's list of integers, which must have one length. If they are a part of a larger `call`, give its
    signature: ranks compare it the first time, and a peer that calls something else is told of it.
    """
    signature = call or comm.Signature(what, (), f"{len(numbers)} lengths")
    return axis.ranks.tell(f"{what}: lengths", numbers, lambda: signature, lambda: (what, "lengths", len(numbers)))


def _all_gather_inferred(value: Tree, axis: Any, dim: int) -> Tree:
    """all_gather(tiled=True) with lengths along `dim` that ranks send each other, for all leaves at once."""
    found = _real(axis, _INFERRED, "")
    value = tensors_of(value, found)
    leaves, spec = tree.flatten(value)
    check_dense("all_gather", leaves, value)
    fit = [-x.ndim <= dim < x.ndim for x in leaves]
    kinds = [
        (x.dtype, tuple(-1 if ok and at == dim % x.ndim else length for at, length in enumerate(x.shape)))
        for x, ok in zip(leaves, fit, strict=True)
    ]
    if found.size > 1:
        tree.check_values(leaves, value, "all_gather")

    def signature() -> comm.Signature:
        texts = [f"{str(dtype).removeprefix('torch.')}{list(shape)}".replace("-1", "any") for dtype, shape in kinds]
        return comm.Signature(_INFERRED, tuple(zip(tree.leaf_paths(value), texts, strict=True)), f"dim={dim}")

    def key() -> tuple[Any, ...]:
        return _INFERRED, tree.spec_paths(spec), tuple(kinds), dim

    agreed = found.ranks.confirm(key, signature)
    if not all(fit):  # all ranks have equal numbers of dimensions, so this raises on every rank
        dim_of("all_gather", leaves[fit.index(False)], dim)
    told_lengths = []
    if leaves:
        told_lengths = found.ranks.tell(f"{_INFERRED}: lengths", [x.shape[dim] for x in leaves], signature, key)
    ats, moved = [dim % x.ndim for x in leaves], [movable("all_gather", x) for x in leaves]
    rows = gathered(moved, ats, list(zip(*told_lengths, strict=True)), found, agreed)
    whole = zip(leaves, moved, map(torch.cat, rows, ats), strict=True)
    return tree.unflatten(spec, [y if m is x else from_bytes(y, x.dtype) for x, m, y in whole])


def gathered(
    xs: Sequence[torch.Tensor], dims: Sequence[int], lengths: Sequence[Sequence[int]], axis: Axis, agreed: Any
) -> list[list[torch.Tensor]]:
    """For each tensor, every rank's part. `lengths` along `dims` are those of all ranks, by the agreement `agreed`."""
    sent = [padded(x, dim, max(each)) for x, dim, each in zip(xs, dims, lengths, strict=True)]
    # this follows from the lengths, which are agreed
    axis.ranks.agree([comm.key_of("all_gather", x, (0, 0)) for x in sent], agreed)
    stacks = zip(apply("all_gather", (0, 0), axis, sent), dims, lengths, strict=True)
    return [[part.narrow(dim, 0, n) for part, n in zip(stack, each, strict=True)] for stack, dim, each in stacks]


def _equal_splits(x: Any, dim: int, n: int) -> tuple[int, ...]:
    """The lengths of n parts of `x` along `dim`, longer ones first; zeros without `dim`, which callers refuse."""
    length = x.shape[dim] if isinstance(x, torch.Tensor) and -x.ndim <= dim < x.ndim else 0
    return tuple(length // n + (place < length % n) for place in range(n))


def is_uneven(splits: Splits | None, what: str, axis: Any, tiled: bool) -> TypeGuard[Splits]:
    """Whether a call with `splits` has parts of unequal lengths: not if "infer" is said to simulated ranks."""
    if splits is not None and not tiled:
        raise AxisError(f"{what}: splits= needs tiled=True: parts of unequal lengths can only be concatenated.")
    return splits is not None and not (splits == "infer" and not traced.recording() and comm.resolve(axis).ranks.levels)


def all_gather_uneven(value: Tree, axis: Any, dim: int, splits: Splits) -> Tree:
    """all_gather(tiled=True) of parts with the lengths `splits` along `dim`, one per rank."""
    if isinstance(splits, str):
        return _all_gather_inferred(value, axis, dim)
    splits = tuple(splits)
    found = _real(axis, "all_gather(splits=)")
    _agree("all_gather", splits, found, _misfit("all_gather", value, dim, splits, found, of_part=True))
    even = tree.map(lambda x: padded(x, dim % x.ndim, max(splits)), value)
    gathered = collective("all_gather", even, found, lambda x, n: (0, 0))
    return tree.map(lambda x, parts: _joined(parts, splits, dim % x.ndim, dim), value, gathered)


def psum_scatter_uneven(value: Tree, axis: Any, dim: int, splits: Splits) -> Tree:
    """psum_scatter(tiled=True) into parts with the lengths `splits` along `dim`, one per rank."""
    leaves, spec = tree.flatten(value)
    tree.check_leaves(leaves, value, "psum_scatter: its argument")
    found = _real(axis, "psum_scatter(splits=)")
    given = None if isinstance(splits, str) else tuple(splits)
    lengths = [_equal_splits(x, dim, found.size) if given is None else given for x in leaves]
    misfits = [_misfit("psum_scatter", x, dim, each, found) for x, each in zip(leaves, lengths, strict=True)]
    _agree("psum_scatter", tuple(lengths) if given is None else given, found, next(filter(None, misfits), None))
    parts = [_rows(x, each, dim, max(each)) for x, each in zip(leaves, lengths, strict=True)]
    sums = tree.flatten(collective("psum_scatter", tree.unflatten(spec, parts), found, lambda x, n: (0, 0)))[0]
    here = int(found.rank)
    return tree.unflatten(spec, [y.narrow(dim % y.ndim, 0, each[here]) for y, each in zip(sums, lengths, strict=True)])


def all_to_all_uneven(
    value: Tree, split_dim: int, concat_dim: int, axis: Any, splits: Sequence[int] | str
) -> tuple[Tree, Lengths]:
    """all_to_all of chunks with the lengths `splits` along `split_dim`. Also returns the lengths received."""
    if isinstance(splits, str):
        found = _real(axis, 'all_to_all(splits="infer")', "")
        splits = _equal_splits(next(iter(tree.flatten(value)[0]), None), split_dim, found.size)
    else:
        found, splits = _real(axis, "all_to_all(splits=)"), tuple(splits)
    misfit = _misfit("all_to_all", value, split_dim, splits, found)
    table = told("all_to_all", [-1] * found.size if misfit else list(splits), found)
    if any(-1 in row for row in table):
        _agree("all_to_all", splits, found, misfit)  # raises on every rank, since the splits don't fit on all
    received = tuple(row[int(found.rank)] for row in table)
    most = max(length for row in table for length in row)
    elsewhere = any(dim_of("all_to_all", x, concat_dim) != split_dim % x.ndim for x in tree.flatten(value)[0])
    if elsewhere and any(len(set(column)) > 1 for column in zip(*table, strict=True)):
        raise AxisError(
            f"all_to_all: ranks' splits {table} along dimension {split_dim} give chunks of unequal lengths, which "
            f"can't be concatenated along dimension {concat_dim}. Use concat_dim={split_dim}."
        )
    rows = tree.map(lambda x: _rows(x, splits, split_dim, most), value)
    arrived = collective("all_to_all", rows, found, lambda x, n: (0, 0, 1))
    return tree.map(lambda x, ys: _joined(ys, received, split_dim % x.ndim, concat_dim), value, arrived), received


def _rows(x: torch.Tensor, lengths: Sequence[int], dim: int, most: int) -> torch.Tensor:
    """The parts of `x` along `dim`, of these lengths, each padded to `most`, stacked."""
    return torch.stack([padded(part, dim % x.ndim, most) for part in x.split(list(lengths), dim)])


def _joined(parts: torch.Tensor, lengths: Sequence[int], at: int, dim: int) -> torch.Tensor:
    """The ranks' parts concatenated along `dim`, each cut to its length along `at`."""
    return torch.cat([part.narrow(at, 0, length) for part, length in zip(parts, lengths, strict=True)], dim)


def _real(axis: Any, what: str, instead: str = "Leave splits out, or use processes: ltx.Pool(n).run(fn).") -> Axis:
    if traced.recording():
        traced.refuse(
            f"{what} can't be compiled: what it gives has another shape on each rank, or at each call. Call it outside."
        )
    found = comm.resolve(axis)
    found.ranks.need("objects", f"{what} has no form under ltx.vmap, whose ranks have equal shapes. {instead}")
    return found


def dim_of(what: str, x: torch.Tensor, dim: int, name: str = "dim", more: int = 0) -> int:
    """`dim`, the argument `name` of the collective `what`, made nonnegative. Raises if it is out of range, which is
    that of `x` with so many `more` dimensions.
    """
    ndim = x.ndim + more
    if not -ndim <= dim < ndim:
        hint = " Stack 0-dim tensors with tiled=False." if ndim == 0 and what in ("all_gather", "gather") else ""
        raise AxisError(f"{what}: {name}={dim} is out of range for a tensor of shape {list(x.shape)}.{hint}")
    return dim % ndim


def check_parts(what: str, x: torch.Tensor, dim: int, n: int, tiled: bool, fix: str) -> None:
    """Raise unless dimension `dim` of `x` can be cut into n equal parts, or without `tiled` is n long."""
    length = x.shape[dim]
    if length % n if tiled else length != n:
        raise AxisError(
            f"{what}: dimension {dim} of a tensor of shape {list(x.shape)} must be "
            f"{'a multiple of ' * tiled}{n}, got {length}. {fix}"
        )


def padded(x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    return torch.nn.functional.pad(x, (*[0, 0] * (x.ndim - 1 - dim), 0, length - x.shape[dim]))


def _misfit(what: str, value: Tree, dim: int, splits: Lengths, axis: Axis, of_part: bool = False) -> AxisError | None:
    """The error in this rank's splits, or in its tensors, as long as all, or with `of_part` as its own; or None."""
    leaves, here = tree.flatten(value)[0], int(axis.rank)
    tree.check_leaves(leaves, value, f"{what}: its argument")
    if len(splits) != axis.size or not all(isinstance(length, int) and length >= 0 for length in splits):
        return AxisError(f"{what}: splits must be {axis.size} lengths, one for each rank, got {list(splits)}.")
    for x in leaves:
        try:
            length = x.shape[dim_of(what, x, dim)]
        except AxisError as error:
            return error
        if of_part and length != splits[here]:
            return AxisError(
                f"{what}: rank {here}'s part has length {length} along dimension {dim}, but splits[{here}] is "
                f"{splits[here]}."
            )
        if not of_part and length != sum(splits):
            return AxisError(
                f"{what}: splits {list(splits)} add up to {sum(splits)}, but dimension {dim % x.ndim} of a tensor of "
                f"shape {list(x.shape)} has length {length}."
            )
    return None


def _agree(what: str, splits: tuple[Any, ...], axis: Axis, misfit: AxisError | None) -> None:
    """Let ranks compare their splits and misfits, which padded messages don't show. All raise if any has a misfit."""
    signature = comm.Signature(what, (), str(misfit).removeprefix(f"{what}: ") if misfit else f"splits {list(splits)}")
    # Misfits are compared at each call: peers with the same misfit before may have none now.
    key = (what, "splits", object() if misfit else splits)
    axis.ranks.announce(axis.ranks.confirm(lambda: key, lambda: signature))
    if misfit:
        raise misfit


@checked("src")
def broadcast_object(obj: T, src: int = 0, axis: Any = None) -> T:
    """Give every rank the object of rank `src`.

    The object is sent by cloudpickle, between processes that trust each other. It is authenticated with the job's key:
    ``LTX_KEY`` in the environment, which ``ltx run`` on one machine, :func:`ltx.launch` and :class:`ltx.Pool` set, else
    a key on which the ranks agree through their store.

    Args:
        obj: what cloudpickle can pickle; only `src`'s matters. Tensors of an accelerator arrive on the receiver's.
        src: an index on the axis (not a rank of the world), 0 to n - 1.
        axis: as in :func:`ltx.psum`.

    Returns:
        What each rank sees: a copy of `src`'s object; on `src` the object itself.

    Raises:
        AxisError: `axis` isn't in scope or is one of ``ltx.vmap``, or `src` isn't on it.
        AuthenticationError: the object isn't from a rank of this job.
        TypeError: `src`'s object can't be pickled; raised on every rank.

    Example:
        >>> import ltx
        >>> ltx.broadcast_object({"lr": 0.1})  # a world of one
        {'lr': 0.1}
    """
    return _objects("broadcast_object", obj, axis, src)[0]


def all_gather_object(obj: T, axis: Any = None) -> list[T]:
    """Gather every rank's object on every rank.

    Args:
        obj: any object that cloudpickle can pickle. Tensors of an accelerator arrive on the receiver's accelerator.
        axis: as in :func:`ltx.psum`.

    Returns:
        What each rank sees: a list of the ranks' objects by rank: copies, but its own object itself.

    Raises:
        AxisError: `axis` isn't in scope or is one of ``ltx.vmap``.
        AuthenticationError: as for :func:`broadcast_object`.
        TypeError: a rank's object can't be pickled; raised on every rank.

    Example:
        >>> import ltx
        >>> ltx.all_gather_object("here")  # a world of one
        ['here']
    """
    return _objects("all_gather_object", obj, axis)


@counted  # what raises later, raises once the objects have been exchanged
def _axis_for_objects(what: str, src: int | None, axis: Any) -> Axis:
    found = comm.resolve(axis)
    if src is not None:
        checked_index(what, "src", src, found.size)
    found.ranks.need(
        "objects",
        f"{what} has no form under ltx.vmap: the ranks of axis {found.name!r} share all objects. Use the object "
        "itself, or ltx.broadcast for tensors; or give each rank its own on processes, by ltx.Pool(n).run(fn).",
    )
    return found


def _objects(what: str, obj: T, axis: Any, src: int | None = None) -> list[T]:
    """The objects of all ranks, or of `src` only."""

    def dumped() -> tuple[bytes, bool]:
        try:
            return HandedIn.pickling.dumps(obj), False
        except Exception as failure:
            return f"{type(failure).__name__}: {failure}".encode(), True

    found, refused = _axis_for_objects(what, src, axis), None
    try:
        rows = found.ranks.objects(what, dumped, src)
    except AuthenticationError as error:
        rows, refused = [(b"", False)] * found.size, error
    senders = range(len(rows)) if src is None else [src]
    for rank in senders:
        text, broken = rows[rank]
        if broken:
            raise TypeError(f"{what}: rank {rank}'s object can't be pickled: {text.decode()}")
    got, failed = [obj] * len(rows), b""
    for rank in senders:
        if rank != found.ranks.rank and refused is None:
            try:
                got[rank] = pickle.loads(rows[rank][0])
            except Exception as failure:
                said = f"rank {found.ranks.rank} couldn't unpickle rank {rank}'s: {type(failure).__name__}: {failure}"
                failed = failed or said.encode()
    # If one rank alone raised, the others would go on without it.
    note = f"{what} (whether all could be unpickled)"
    if any(any(row) for row in found.ranks.tell(note, [len(failed)], lambda: comm.Signature(note, ()), lambda: note)):
        texts = [text.decode() for text, _ in found.ranks.objects(f"{what} (what couldn't)", lambda: (failed, True))]
        raise TypeError(
            f"{what}: {'; '.join(filter(None, texts))}. A class is imported by its module's name: all ranks need the "
            "same module, and its __setstate__ or __reduce__ must work there."
        )
    if refused is not None:
        raise refused
    return [got[rank] for rank in senders]


@public("name")
def barrier(name: str | None = None, axis: Any = None) -> None:
    """Wait until every rank of the axis is here, and its accelerator has done all work enqueued before.

    Args:
        name: the barrier's name in errors; all ranks must give the same name.
        axis: as in :func:`ltx.psum`. It does nothing on the ranks of :func:`ltx.vmap`, which run in lockstep.

    Raises:
        RankMismatchError: ranks are at barriers of different names, or at other collectives.

    Example:
        >>> import ltx
        >>> ltx.barrier("before evaluation")
    """
    ranks, label = comm.resolve(axis).ranks, f"barrier {name!r}" if name else "barrier"
    if ranks.device is not None and ranks.device.type != "cpu":
        ranks.read(torch.zeros(1, device=ranks.device), label)
    ranks.tell(label, [0], lambda: comm.Signature(label, ()), lambda: label)
