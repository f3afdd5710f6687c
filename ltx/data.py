"""The data of a run: how far it is, what of it each rank gets, and what a rank does that has no more.

With Horovod's ``join()`` and torch's ``Join`` such a rank answers the others' collectives outside of the step. With
uneven it keeps calling the step, on placeholders of weight 0, so all ranks run the same code.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal

import torch

import ltx
from ltx.errors import ArgumentError, DataError, InputError, TreeError, UnsupportedError
from ltx.extend import Axis, arguments, brief, collectives, comm, tree
from ltx.typing import Tree

_LARGEST = (1 << 62) - 1  # half of a torch.Generator's largest seed: an epoch's is the sum of two such numbers


@dataclass(frozen=True)
class DataPosition:
    """Which samples of a run come next: an immutable value, from which each step makes the next value.

    In an epoch every sample comes exactly once, even if the number of ranks changes. The order of epoch ``e`` is
    ``torch.randperm`` with the seed ``seed + e``, as in torch's DistributedSampler, but without padding. The last step
    of an epoch takes the samples that are left.

    Attributes:
        length: the number of samples in the data.
        batch_size: the number of samples of a step, on all ranks together.
        seed: the orders of samples are drawn from it; it must be the same on every rank.
        epoch: the number of epochs done.
        done: the number of this epoch's samples that are done.
        shuffle: if False, every epoch goes through the samples in the order of their indices.
        weighted: True allows ranks to get unequal numbers of samples, or none, because the step returns an
            :class:`ltx.Weighted`. Otherwise that is refused, since the mean of ranks' means would be wrong.

    Raises:
        InputError: (a ValueError) a field is out of its range.

    Source: Horovod's ``ElasticSampler``, which also counts the samples done, but pads.

    Example:
        >>> import ltx
        >>> position = ltx.DataPosition(length=6, batch_size=4, shuffle=False)
        >>> [position.indices(rank, 2).tolist() for rank in range(2)]
        [[0, 2], [1, 3]]
        >>> position = position.after_step()  # two samples are left
        >>> [position.indices(rank, 2).tolist() for rank in range(2)]
        [[4], [5]]
        >>> position.after_step()
        DataPosition(length=6, batch_size=4, seed=0, epoch=1, done=0, shuffle=False, weighted=False)
    """

    length: int
    batch_size: int
    seed: int = 0
    epoch: int = 0
    done: int = 0
    shuffle: bool = True
    weighted: bool = False

    def __post_init__(self) -> None:
        arguments.check_fields(self, InputError)
        for name, low in {"length": 1, "batch_size": 1, "seed": 0, "epoch": 0, "done": 0}.items():
            most = self.length - 1 if name == "done" else _LARGEST
            value = arguments.whole(f"DataPosition.{name}", getattr(self, name), low, most=most)
            object.__setattr__(self, name, value)

    @property
    def step_size(self) -> int:
        """The number of samples of the next step, on all ranks together."""
        return min(self.batch_size, self.length - self.done)

    def indices(self, rank: int = 0, size: int = 1) -> torch.Tensor:
        """The samples that `rank` of `size` takes in the next step: int64, 1-dim; numbers differ by at most 1.

        Raises:
            InputError: (a ValueError) the samples can't be divided equally, and the position isn't `weighted`.
        """
        if not 0 <= rank < size:
            raise InputError(f"DataPosition.indices: expected a rank from 0 to {size - 1}, got {rank}.")
        self._check_divides(self.step_size, size)
        together = _order(self.length, self.seed + self.epoch, self.shuffle)[self.done : self.done + self.step_size]
        return together[rank::size].clone()

    def after_step(self) -> DataPosition:
        """The position after the next step: after an epoch's last step, it is at the start of the next epoch."""
        done = self.done + self.step_size
        return replace(self, epoch=self.epoch + 1, done=0) if done == self.length else replace(self, done=done)

    def check_sizes(self, fewest: int, most: int) -> None:
        """Raise InputError unless each number of ranks from `fewest` to `most` can divide all steps of an epoch."""
        for size in range(fewest, most + 1):
            for taken in (min(self.batch_size, self.length), self.length % self.batch_size):  # the latter by the last
                self._check_divides(taken, size)

    def _check_divides(self, taken: int, size: int) -> None:
        if not self.weighted and taken % size:
            raise InputError(
                f"DataPosition: a step takes {taken} samples (batch_size={self.batch_size}, length={self.length}), "
                f"which {size} ranks can't share out equally, and the mean of their means isn't the mean over samples. "
                "Let the step return ltx.Weighted(total, count) and say so with weighted=True, or choose a batch_size "
                f"and a length (drop the last samples) that are multiples of {size}."
            )


@lru_cache(maxsize=2)
def _order(length: int, seed: int, shuffle: bool) -> torch.Tensor:
    """The order of an epoch. The tensor is cached: don't write to it."""
    if not shuffle:
        return torch.arange(length, device="cpu")
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed), device="cpu")


_DONE, _HAS_DATA, _FAILED = 0, 1, 2  # what a rank tells its peers at each step


def uneven(
    iterable: Iterable[Any],
    axis: Any = None,
    *,
    divisor: Literal["data", "all"] = "data",
    stop: Literal["last", "first"] = "last",
) -> Iterator[tuple[Any, torch.Tensor]]:
    """Iterate over this rank's batches, on all ranks for as long as any rank has a batch.

    A rank without further batches gets placeholders. A turn costs an all_gather of an integer, and waits for all ranks.

    Args:
        iterable: this rank's batches, trees of any structure, which may differ between ranks. It may be empty.
        axis: as in :func:`ltx.psum`, at the time of this call.
        divisor: how `weight` scales the loss ``l_r`` of a batch, if a of the n ranks have data at that step:

            ================================================  =================  ================
            what the data-parallel step returns               ``"data"``         ``"all"``
            ================================================  =================  ================
            ``weight * loss``                                 ``sum l_r / a``    ``sum l_r / n``
            ``ltx.Weighted(weight * loss, weight)``           ``sum l_r / a``    ``sum l_r / a``
            ``ltx.Weighted(weight * loss, 1.0)``              ``sum l_r / a``    ``sum l_r / n``
            ================================================  =================  ================

            Sums are over ranks with data. The table holds for gradients, and for values (with ``outputs="mean"``, if
            the step isn't Weighted). Horovod's ``join`` and torch's ``Join`` divide as "all" does, so that the last
            batches count less. To get the mean over samples with either divisor, return
            ``ltx.Weighted(sum of losses * (weight > 0), len(batch) * (weight > 0))``.
        stop: "last" goes on until the last rank has no more batches. "first" stops all ranks as soon as one has none:
            there are no placeholders, all weights are 1, and one batch that the others have taken by then is dropped.

    Yields:
        ``(batch, weight)``. `weight` is a 0-dim float32 tensor on the CPU: n / a or 1 for a batch, by `divisor`; 0 for
        a placeholder. A placeholder has the structure, shapes, dtypes and devices of this rank's last batch (of another
        rank's first batch if this rank had none). Its tensors are zeros; leaves that aren't tensors are those of that
        batch. In a world of one all weights are 1.

        A loss on zeros may be NaN, and 0 * NaN is NaN, which reaches every rank. If your loss is like that, either
        don't call it for placeholders (``ltx.Weighted(loss, 1) if weight > 0 else ltx.Weighted(torch.zeros(()), 0)``,
        if the step itself issues no collectives), or give it harmless inputs: ``x = torch.where(weight > 0, x, 1.0)``.
        ``torch.where(weight > 0, loss, 0.0)``, as in :func:`ltx.weighted_mean` for metrics, makes the value finite, but
        not the gradient. A placeholder's samples also count in what the step itself communicates, such as the
        statistics of ``ltx.nn.sync_batch_norm``: leave them out there, with ``x = x[: len(x) * int(weight > 0)]``.

    Gradient:
        Batches and weights are constants.

    Raises:
        DataError: raised on every rank when the iterable of one rank raised an error, which is its cause on that rank.
            In a world of one the error itself is raised.
        TypeError: raised on every rank if a rank has no batch at all, and that of its placeholders can't be pickled.
        AxisError: the axis is one of ``ltx.vmap``, or isn't in scope.
        InputError: `divisor` or `stop` has another value.

    Example:
        >>> import torch, ltx
        >>> for batch, weight in ltx.uneven([torch.tensor([1.0, 2.0]), torch.tensor([3.0])]):  # a world of one
        ...     print(batch, weight)
        tensor([1., 2.]) tensor(1.)
        tensor([3.]) tensor(1.)

    If a loop ends early, it must end on every rank at the same step.

    Source: Horovod's ``hvd.join``; torch.distributed.algorithms.Join, whose ``divide_by_initial_world_size`` is
    `divisor` and whose ``throw_on_early_termination`` is ``stop="first"``, without the exception.
    """
    if stop not in ("last", "first"):
        raise InputError(f'uneven: stop must be "last" or "first", got {brief(stop)}.')
    if divisor not in ("data", "all"):
        raise InputError(f'uneven: divisor must be "data" or "all", got {brief(divisor)}.')
    found = comm.resolve(axis)
    found.ranks.need(
        "objects",
        f"uneven has no form under ltx.vmap: the ranks of axis {found.name!r} share all iterables. Pad the ranks' "
        "batches to one number outside, stack them, and pass the ranks' weights, 0 for padding, as one more mapped "
        "tensor; or give each rank its own on processes, by ltx.Pool(n).run(fn).",
    )
    if found.size > 1:
        return _turns(iterable, found, divisor, stop)
    try:
        return ((batch, _weight(1.0)) for batch in iterable)
    except TypeError:
        raise ArgumentError(f"uneven: iterable must be Iterable[Any], got {brief(iterable)}.") from None


def _weight(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32, device="cpu")


def _turns(iterable: Iterable[Any], axis: Axis, divisor: str, stop: str) -> Iterator[tuple[Any, torch.Tensor]]:
    batches: Iterator[Any] | None = None
    last: Tree = None  # the structure, shapes and dtypes of the last batch
    state, error, begins = _HAS_DATA, None, True
    while True:
        batch = None
        if state == _HAS_DATA:
            try:
                batches = iter(iterable) if batches is None else batches
                batch = next(batches)
                done = "replaced by zeros in a placeholder"
                tree.check_open(tree.flatten(batch)[0], batch, "uneven", done, tensors_only=True)
                last = tree.map(_Blank.of, batch)
            except StopIteration:
                state = _DONE
            except Exception as raised:  # tell any error, since the others wait for this rank
                state, error = _FAILED, raised
        states = [states for (states,) in collectives.told("uneven", [state], axis)]
        if _FAILED in states:
            first, *more = (rank for rank, each in enumerate(states) if each == _FAILED)
            text = ltx.broadcast_object(_text(error), first, axis)
            others = f" Those of ranks {more} failed at the same step." if more else ""
            whose = f"uneven: the iterable of rank {first} on axis {axis.name!r}"
            raise DataError(f"{whose} raised {text}.{others} All ranks stop here.") from error
        if _HAS_DATA not in states or (stop == "first" and _DONE in states):
            return
        if begins and _DONE in states:
            like = ltx.broadcast_object(last, states.index(_HAS_DATA), axis)
            if state == _DONE:
                last = tree.map(lambda x: x.here() if isinstance(x, _Blank) else x, like)
        begins = False
        if state == _HAS_DATA:
            yield batch, _weight(len(states) / states.count(_HAS_DATA) if divisor == "data" else 1.0)
        else:
            yield tree.map(lambda x: x() if isinstance(x, _Blank) else x, last), _weight(0.0)
        del batch  # free the batch before the next one is made


class _Blank(partial[torch.Tensor]):
    """Makes zeros like a tensor of an earlier batch, which is no longer kept."""

    @classmethod
    def of(cls, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.is_nested:
            raise UnsupportedError("uneven: nested tensors have no placeholder. Pad them, or pass a list of tensors.")
        return cls(torch.zeros, leaf.shape, dtype=leaf.dtype, device=leaf.device, layout=leaf.layout)

    def here(self) -> _Blank:
        """On this process' own device of that kind."""
        return _Blank(self, device=torch.device(self.keywords["device"].type))


def _text(error: BaseException | None) -> str:
    return "" if error is None else "".join(traceback.format_exception_only(error)).strip()


@contextmanager
def rank_zero_first(axis: Any = None) -> Iterator[None]:
    """``with rank_zero_first():`` rank 0 runs the block first, to download a file, say; then the others run it.

    Args:
        axis: as in :func:`ltx.psum`, at the time of this call. With the axis of a node's ranks
            (:func:`ltx.axis_from_group`) the first rank of each node runs first, for files on each node's own disk.

    The others wait for at most the world's `timeout`, see :func:`ltx.init`. The block mustn't communicate.

    Raises:
        DataError: on the other ranks, when the block has raised an error on rank 0, which itself raises that error.
        AxisError: the axis is one of ``ltx.vmap``, or isn't in scope.

    Source: Fabric's ``rank_zero_first`` and accelerate's ``main_process_first``, whose others go on after an error.

    Example:
        >>> import ltx
        >>> with ltx.rank_zero_first():
        ...     print("rank", ltx.world().rank)
        rank 0
    """
    found = comm.resolve(axis)
    found.ranks.need("objects", f"rank_zero_first: the ranks of axis {found.name!r} run as one under ltx.vmap.")
    if found.ranks.rank:
        if said := ltx.broadcast_object("", 0, found):
            raise DataError(f"rank_zero_first: rank 0 of axis {found.name!r} raised {said}. All ranks stop here.")
        yield
        return
    text = ""
    try:
        yield
    except BaseException as error:
        text = _text(error)
        raise
    finally:
        ltx.broadcast_object(text, 0, found)


def to_device(tree: Tree) -> Tree:
    """`tree` with every leaf that has a ``.to(device)`` method moved to this rank's device; other leaves as they are.

    Tensors are copied to an accelerator through pinned memory, without waiting. If a tensor was pinned already, don't
    write to it before the copy is done.

    Example:
        >>> import torch, ltx
        >>> ltx.to_device({"x": torch.ones(2), "name": "a"})
        {'x': tensor([1., 1.]), 'name': 'a'}
    """
    device = ltx.world().device

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf.to(device) if callable(getattr(leaf, "to", None)) else leaf
        if leaf.is_meta and device.type != "meta":
            raise TreeError(
                f"to_device: a leaf is {ltx.tree.describe(leaf)} on the meta device, which holds no values."
            )
        return comm.to_device(leaf, device)

    leaves, spec = ltx.tree.flatten(tree)
    others = [None if hasattr(leaf, "to") else leaf for leaf in leaves]
    ltx.tree.check_open(others, tree, "to_device", "moved", tensors_only=True)
    return ltx.tree.unflatten(spec, [moved(leaf) for leaf in leaves])
