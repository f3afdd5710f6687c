"""load: read the latest whole checkpoint into a state for the present ranks."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch.distributed.checkpoint import metadata as dcp

from ltx.checkpoint import directory, storage
from ltx.checkpoint.storage import Piece, check_state, decode, leaves_of, name_on
from ltx.checkpoint.together import Together
from ltx.core.base import tree
from ltx.core.base.arguments import brief, checked
from ltx.core.training.train_state import TrainState, counted, set_random_states
from ltx.core.transforms.strategy import StateLayout
from ltx.errors import CheckpointError, InputError

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Restored:
    """What :func:`load` gives.

    Attributes:
        state: the training state for the next step.
        data: the position that this rank gave to :func:`ltx.checkpoint.save`; with ``data="all"`` those of all, a list.
        step: the number of steps that the state has done.
        path: the directory of the checkpoint.
    """

    state: TrainState
    data: Any
    step: int
    path: Path


@checked("path")
def latest(path: str | os.PathLike[str]) -> Path | None:
    """The directory of the latest checkpoint under `path`, or None. It doesn't communicate, nor verify the files.

    Example:
        >>> import ltx
        >>> ltx.checkpoint.latest("no/such/directory") is None
        True
    """
    found = directory.steps(Path(path))
    return directory.step_path(Path(os.path.abspath(path)), found[0]) if found else None


@checked("path", "step", "rng")
def load(
    path: str | os.PathLike[str],
    state: TrainState,
    *,
    step: int | None = None,
    data: Literal["own", "all"] = "own",
    rng: bool | Literal["same ranks"] = True,
    per_rank: Literal["refuse", "mean"] = "refuse",
    axis: Any = None,
) -> Restored:
    """Load the latest checkpoint under `path` that is whole. Every rank calls it.

    Make a state as at the start of training, pass it in, and go on training from ``.state``. Every file is compared
    with its SHA-256 first (the ranks share that work). A checkpoint with a missing, truncated or changed file is
    skipped with a warning that names the file, and the one before it is taken. Only tensors and the metadata's own
    classes are unpickled; files with other objects are refused.

    On the same number of ranks training goes on bit for bit as without the interruption. Sizes of buckets and the order
    of hooks may have changed: communication state is kept by parameter. On another number of ranks every rank gets the
    replicated values, sharded optimizer state is resharded, and random number generators stay, with a warning.

    Args:
        path: as in :func:`ltx.checkpoint.save`.
        state: one of the same structure, such as ``train.init(params)``: what to read, and where to. It isn't changed.
        step: load only the checkpoint of this step. None: the latest whole one.
        data: "own" returns the data position that this rank saved; the number of ranks must be the same, or all
            positions equal. "all" returns a list of the positions of all ranks that saved, for you to divide.
        rng: restore the default random number generators, if they were saved. ``"same ranks"``: restore them on the
            same number of ranks; on another number leave them alone without a warning.
        per_rank: what to do with per-rank values (local SGD's parameters, batch norm's buffers, error feedback) on
            another number of ranks, or if `state` has one value for all ranks instead: "refuse" raises; "mean" gives
            every rank the mean of the saved values, or rank 0's value for integers: training isn't bit-equal.
        axis: as in :func:`ltx.checkpoint.save`.

    Returns:
        A :class:`Restored`: ``.state``, ``.data``, ``.step``, ``.path``.

    Raises:
        CheckpointError: there is no whole checkpoint, or a rank couldn't read one (too little memory). All raise it.
        InputError: (a ValueError) the checkpoint doesn't fit `state` or the number of ranks; it names leaf and way out.

    Example:
        >>> import tempfile, torch, ltx
        >>> step = ltx.data_parallel(lambda w, x: (w * x).sum())
        >>> train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=0.5))
        >>> state, _ = train(train.init(torch.ones(2)), torch.ones(2))
        >>> folder = tempfile.mkdtemp()
        >>> _ = ltx.checkpoint.save(folder, state, data={"epoch": 3})
        >>> restored = ltx.checkpoint.load(folder, train.init(torch.ones(2)))
        >>> restored.state.params, restored.step, restored.data
        (tensor([0.5000, 0.5000]), 1, {'epoch': 3})
    """
    together, passed_over = Together("checkpoint.load", axis), list[str]()
    with together.leaving():
        base = Path(os.path.abspath(path))
        _, (found, *_) = together.exchange(partial(_wanted, base, state, step, data, per_rank), "checkpoint.load")
        for at in found:
            where = directory.step_path(base, at)
            opened, problems = _attempt(together, where, partial(open_checkpoint, where, together.rank, together.size))
            if opened is not None and not problems:
                # All reads come before the ranks' last exchange: afterwards a rank may remove the checkpoint.
                read, problems = _attempt(together, where, partial(_read, opened, state, data, per_rank, bool(rng)))
                if read is not None and not problems:
                    restored, drawn = read
                    directory.runs[base] = str(opened.manifest.get("run", ""))
                    if drawn is not None:
                        set_random_states(drawn)
                    elif rng and rng != "same ranks" and opened.manifest["rng"] and together.rank == 0:
                        _warn(
                            f"the states of random number generators were saved by {opened.saved_ranks} ranks, and "
                            f"this world has {together.size}, so they are left alone. Seed them (torch.manual_seed("
                            'ltx.rank_seed(seed))), and say so with rng=False, or with rng="same ranks".'
                        )
                    return restored
            passed_over += problems
            if together.rank == 0:
                _warn(f"the checkpoint of step {at} isn't whole, so it is skipped: {'; '.join(problems)}.")
        asked = "" if step is None else f" of step {step}"
        if not found:
            raise CheckpointError(f"there is no checkpoint{asked} under {base}.")
        raise CheckpointError(f"no checkpoint{asked} under {base} is whole: {'; '.join(passed_over)}.")


def _warn(text: str) -> None:
    warnings.warn(f"checkpoint.load: {text}", RuntimeWarning, stacklevel=4)  # at the caller's line


class Opened(NamedTuple):
    """A verified checkpoint, opened by this rank."""

    path: Path
    manifest: dict[str, Any]
    metadata: dcp.Metadata
    rank: int
    size: int

    @property
    def saved_ranks(self) -> int:
        return int(self.manifest["ranks"])

    def has(self, name: str) -> bool:
        return name in self.metadata.state_dict_metadata

    def like(self, name: str) -> torch.Tensor:
        """A tensor without values, of the shape and dtype of what is saved as `name`."""
        entry: Any = self.metadata.state_dict_metadata[name]
        return torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")

    def structure(self, name: str) -> Any:
        parts = takewhile(self.has, (f"{name}.{number}" for number in count()))
        pieces = [Piece(each, torch.empty_like(self.like(each), device="cpu")) for each in (name, *parts)]
        storage.read(self.path, self.metadata, pieces)
        try:
            described, *tensors = (piece.tensor for piece in pieces)
            return decode(described, tensors)
        except (ValueError, LookupError, TypeError) as error:
            raise CheckpointError(f"{self.path}: {name!r} can't be decoded: {error}") from error


def open_checkpoint(path: Path, rank: int, size: int) -> Opened:
    """Open the checkpoint in `path`. Raises if of this `rank`'s share of the files, one of `size`, one is damaged."""
    manifest = directory.read_manifest(path)
    share = {*sorted(manifest["files"])[rank::size], storage.METADATA}  # which every rank decodes
    if problems := directory.verify(path, manifest, sorted(share)):
        raise CheckpointError("; ".join(problems))
    metadata = storage.read_metadata(path)
    for index, where in metadata.storage_data.items():
        if where.relative_path not in manifest["files"]:
            raise CheckpointError(f"{path}: {index.fqn!r} is in {where.relative_path!r}, which isn't in the manifest")
    return Opened(path, manifest, metadata, rank, size)


def _wanted(base: Path, state: TrainState, step: int | None, data: str, per_rank: str) -> tuple[None, list[int]]:
    if data not in ("own", "all"):
        raise InputError(f'checkpoint.load: data must be "own" or "all", got {brief(data)}.')
    if per_rank not in ("refuse", "mean"):
        raise InputError(f'checkpoint.load: per_rank must be "refuse" or "mean", got {brief(per_rank)}.')
    check_state("checkpoint.load", state)
    return None, [at for at in directory.steps(base) if step in (None, at)]


def _attempt(together: Together, path: Path, make: Callable[[], T]) -> tuple[T | None, list[str]]:
    """The result of `make`, and all ranks' list of the CheckpointErrors that it has raised. Other errors concern a
    process or its machine: all ranks raise them, rather than load an older checkpoint.
    """

    def tried() -> tuple[T | None, str]:
        try:
            return make(), ""
        except CheckpointError as error:
            return None, str(error)

    after = " The checkpoint may be whole, so no older one is loaded in its place. Mend that, or name another step."
    made, told = together.exchange(tried, f"checkpoint.load: {path} can't be read", after)
    return made, list(dict.fromkeys(filter(None, told)))


def _check_names(opened: Opened, wanted: set[str]) -> None:
    """Raise unless the checkpoint has leaves of the paths `wanted`, and no others."""
    names = (re.sub(r"^rank_\d+\.", "", name) for name in opened.metadata.state_dict_metadata)
    saved = {path for path in names if path.partition(".")[0] not in ("data", "rng")}
    for what, paths in (("isn't in the checkpoint", wanted - saved), ("isn't in the state", saved - wanted)):
        if paths:
            first, *others = sorted(paths)
            more = f", nor {'are' if len(others) > 1 else 'is'} {', '.join(others[:7])}" if others else ""
            raise InputError(
                f"checkpoint.load: leaf {first!r} {what}{more}. It was saved by {opened.saved_ranks} ranks with "
                f"{opened.manifest['strategy']}. Build the state with the model, optimizer and strategy of then."
            )


def _pieces(opened: Opened, leaf: Piece, per_rank: str, layout: StateLayout) -> list[Piece]:
    """The pieces that this rank reads for `leaf`: one, or all ranks' for a mean. Raises InputError for misfits."""
    is_shard = getattr(layout, leaf.name.partition(".")[0], None) == "sharded"  # a mean of shards would be useless
    if opened.has(leaf.name):  # saved as one value, of which this rank needs all or a part
        names = [leaf.name]
    elif leaf.kind == "per_rank" and opened.saved_ranks == opened.size:
        names = [name_on(opened.rank, leaf.name)]
    elif per_rank == "refuse" or is_shard:
        replicated = "in this state it should be the same on every rank"
        how = f"this world has {opened.size} ranks" if leaf.kind == "per_rank" else replicated
        raise InputError(
            f"checkpoint.load: leaf {leaf.name!r} was each rank's own, saved by {opened.saved_ranks} ranks with "
            f"{opened.manifest['strategy']}, and {how}. Load it on {opened.saved_ranks} ranks"
            + ("." if is_shard else ', or give every rank the mean of the saved values: per_rank="mean".')
        )
    else:
        names = [name_on(rank, leaf.name) for rank in range(opened.saved_ranks)]
    wanted = torch.empty(leaf.size, dtype=leaf.tensor.dtype, device="meta")
    for saved in map(opened.like, names):
        if leaf.kind == "sharded" and saved.ndim == 1:
            fits = abs(len(saved) - len(wanted)) < max(opened.saved_ranks, leaf.parts)  # each is padded for its ranks
        else:
            fits = saved.shape == wanted.shape
        if not fits or saved.dtype != wanted.dtype:
            raise InputError(
                f"checkpoint.load: leaf {leaf.name!r} was saved as {tree.describe(saved)}, and is "
                f"{tree.describe(wanted)} in the state. Build the state with the model, optimizer and strategy that it "
                f"was saved with ({opened.manifest['strategy']})."
            )
    averaged = leaf.tensor.is_floating_point() or leaf.tensor.is_complex()
    room = torch.clone if leaf.kind == "sharded" else torch.empty_like  # padding that wasn't saved stays as from init
    return [replace(leaf, name=x, tensor=room(leaf.tensor.detach())) for x in (names if averaged else names[:1])]


def _read(opened: Opened, state: TrainState, data: str, per_rank: str, rng: bool) -> tuple[Restored, Any]:
    """Read the state, and this rank's random number generators; raises InputError if the checkpoint doesn't fit."""
    manifest, leaves = opened.manifest, leaves_of(state)
    _check_names(opened, {leaf.name for leaf in leaves})
    plan = [_pieces(opened, leaf, per_rank, state.layout) for leaf in leaves]
    common, same_size = manifest["data"] == "common", opened.saved_ranks == opened.size
    if data == "own" and not common and not same_size:
        raise InputError(
            f"checkpoint.load: {opened.saved_ranks} ranks saved different positions in their data, and this world has "
            f'{opened.size} ranks. Take all of them with data="all", and divide them anew.'
        )
    storage.read(opened.path, opened.metadata, [pieces[0] for pieces in plan if len(pieces) == 1])
    tensors = []
    for pieces in plan:
        tensor = pieces[0].tensor
        if len(pieces) > 1:  # leaf by leaf, since all ranks' values of all leaves may not fit into memory
            storage.read(opened.path, opened.metadata, pieces)
            total = torch.zeros_like(tensor, dtype=torch.complex128 if tensor.is_complex() else torch.float64)
            for piece in pieces:
                total += piece.tensor
            tensor = (total / len(pieces)).to(tensor.dtype)
        tensors.append(tensor)
    read = tree.unflatten(tree.flatten(state)[1], tensors)
    sync_state = replace(read.held_sync_state, clock=state.held_sync_state.clock)
    read = replace(read, module=state.module, sync_state=sync_state)
    restored = counted(read, manifest["step"], manifest["updates"])
    ranks = range(opened.saved_ranks) if data == "all" else [opened.rank]
    positions = [opened.structure("data" if common else name_on(rank, "data")) for rank in ranks]
    drawn = opened.structure(name_on(opened.rank, "rng")) if rng and manifest["rng"] and same_size else None
    return Restored(restored, positions if data == "all" else positions[0], manifest["step"], opened.path), drawn
