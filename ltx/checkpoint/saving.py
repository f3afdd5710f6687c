"""save, and save_async in the background of training."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from ltx.checkpoint import directory, storage
from ltx.checkpoint.storage import Piece, check_plain, check_state, digest, encode, leaves_of, owned
from ltx.checkpoint.together import OUTCOME, Together
from ltx.core import comm
from ltx.core.base.arguments import checked, seconds, shown, whole
from ltx.core.comm.backends import HostCopy
from ltx.core.training.train_state import TrainState, random_states, updates_of
from ltx.errors import CheckpointError, InputError


@dataclass(frozen=True)
class Job:
    """A save that all ranks have agreed on: each writes its part, then rank 0 turns the parts into a checkpoint."""

    together: Together
    temporary: Path
    final: Path
    pieces: list[Piece]
    manifest: dict[str, Any]
    keep: int | None
    failure: Exception | None = None  # why this rank can't write its part

    def run(self) -> Path:
        """Write all ranks' parts. If a rank fails, all ranks raise CheckpointError."""
        failed = f"the checkpoint of step {self.manifest['step']} wasn't saved to {self.final}"
        with self.together.leaving():
            self.together.conclude(self._write, self._decide, failed, " Earlier ones are as they were.")
        return self.final

    def _write(self) -> dict[str, Any]:
        if self.failure is not None:
            raise self.failure
        written = storage.write(self.temporary, self.together.rank, self.pieces)
        return {"written": written, "files": directory.describe(self.temporary, {entry[5] for entry in written})}

    def _decide(self, by_rank: Sequence[dict[str, Any]]) -> None:
        """On rank 0: make a checkpoint of the files that the ranks have written."""
        files: dict[str, Any] = {}
        for rank, said in enumerate(by_rank):
            for name, described in said["files"].items():
                written = self.temporary / name
                size = written.stat().st_size if written.exists() else None
                if size != described["bytes"]:
                    raise CheckpointError(
                        f"rank {rank} has written {written}, {described['bytes']} bytes, but rank 0 sees "
                        f"{'no such file' if size is None else f'{size} bytes'}: all ranks need the same file system"
                    )
                files[name] = described
        storage.write_metadata(self.temporary, [said["written"] for said in by_rank])
        files |= directory.describe(self.temporary, [storage.METADATA])
        try:
            directory.commit(self.temporary, self.final, {**self.manifest, "files": files})
            try:
                if self.keep is not None:
                    directory.prune(self.final.parent, self.keep, self.manifest["step"], self.manifest["run"])
            except (CheckpointError, OSError) as error:  # the new checkpoint exists all the same
                told = f"checkpoint: {self.final} is saved, but older checkpoints couldn't be removed: {error}"
                warnings.warn(told, RuntimeWarning, stacklevel=2)
        except BaseException as error:
            if not isinstance(error, Exception) and not self.temporary.exists():
                self.together.announce(OUTCOME, [[], None])  # the checkpoint exists already, so peers needn't fail
            raise


def _contents(state: TrainState, rank: int, data: Any, rng: bool) -> tuple[list[Piece], list[Piece], list[Piece]]:
    """(this rank's own pieces, the pieces that all ranks have in common, and the pieces of `data`)."""
    check_state("checkpoint", state)
    state.check_finished("checkpoint")
    own, common = list[Piece](), list[Piece]()
    for leaf in leaves_of(state):
        check_plain(f"leaf {leaf.name!r}", leaf.tensor)
        if leaf.kind == "per_rank":
            own += owned(rank, [leaf])
        else:
            (own if leaf.parts > 1 else common).append(leaf)
    if rng:
        own += owned(rank, encode(random_states(), "rng"))
    return own, common, encode(data, "data")


def begin_saving(operation: str, path: Any, state: TrainState, data: Any, rng: bool, keep: Any, axis: Any) -> Job:
    base = Path(os.path.abspath(path))
    together = Together(operation, axis)

    def offer() -> tuple[tuple[list[Piece], list[Piece], list[Piece]], dict[str, Any]]:
        if keep is not None:
            whole("checkpoint: keep", keep, 1, besides="None (all) or ")
        try:
            usable = b"\0" not in os.fsencode(path)
        except ValueError:
            usable = False
        if not usable:
            raise InputError(f"checkpoint: {shown(os.fspath(path))} isn't a valid name of a directory.")
        if together.comm is not None:  # raises if the device couldn't compute the state
            comm.read_last_summary(together.comm)
        own, common, position = _contents(state, together.rank, data, rng)
        savers = [0] if together.comm is None else together.comm.global_ranks
        if state.layout.held_by and not {*savers} <= {*state.layout.held_by}:
            raise InputError(
                "checkpoint: the state is of parts of DTensors, and ranks that hold others would overwrite these. "
                "Save those of each rank of the model in a directory of their own: "
                "ltx.checkpoint.save(f\"{path}/{mesh['model'].get_local_rank()}\", state.parts, axis=mesh['data'])."
            )
        final = directory.step_path(base, state.step)
        temporary = directory.hidden(base, final.name)
        if together.rank == 0:
            base.mkdir(parents=True, exist_ok=True)
            directory.put_back(base)
            if directory.run_of(final) not in (None, directory.runs.get(base)):
                raise CheckpointError(
                    f"{final} was saved by another run. Give another directory, go on from what is there "
                    "(ltx.checkpoint.load), or remove it"
                )
            together.undo.callback(directory.remove, temporary)
            temporary.mkdir()
        return (own, common, position), {
            "run": directory.runs.get(base),
            "to": [str(base), state.step],
            "common": digest(common, data=False),
            "data": digest(position),
            "temporary": temporary.name,
        }

    with together.leaving():
        failed, after = "the checkpoint wasn't saved", " Earlier ones are as they were."
        (own, common, position), by_rank = together.exchange(offer, failed, after)
        for what, key, fix in (
            ("where and at which step to save", "to", "save the same step to the same path on every rank"),
            ("what is replicated in the state", "common", "give every rank the state of the same train step"),
        ):
            values = {rank: str(said[key]) for rank, said in enumerate(by_rank)}
            if len(set(values.values())) > 1:
                raise comm.mismatch("of the checkpoint", what, values, fix)
        # The first rank that knows the run's name gives it; a rank that has joined later doesn't know it.
        run = next((said["run"] for said in by_rank if said["run"] is not None), by_rank[0]["temporary"])
        directory.runs[base] = run
        same_data = len({said["data"] for said in by_rank}) == 1
        if same_data:
            common += position
        else:
            own += owned(together.rank, position)
        written = [0] * together.size  # give each rank about as many bytes; all ranks compute the same
        for piece in sorted(common, key=lambda piece: (-piece.tensor.nbytes, piece.name)):
            writer = written.index(min(written))
            written[writer] += piece.tensor.nbytes
            if writer == together.rank:
                own.append(piece)
        manifest = {
            "format": directory.FORMAT,
            "step": state.step,
            "updates": updates_of(state),
            "ranks": together.size,
            "strategy": state.layout.strategy,
            "torch": torch.__version__,
            "rng": rng,
            "run": run,
            "data": "common" if same_data else "per_rank",
        }
        final = directory.step_path(base, state.step)
        return Job(together, base / by_rank[0]["temporary"], final, own, manifest, keep)


@checked("path", "rng")
def save(
    path: str | os.PathLike[str],
    state: TrainState,
    *,
    data: Any = None,
    rng: bool = True,
    keep: int | None = None,
    axis: Any = None,
) -> Path:
    """Save a training state, so that :func:`load` goes on from it bit for bit. Every rank calls it.

    Call it now and then in a training loop, so that a crash loses minutes and not days. The checkpoint exists whole or
    not at all: it is written to a hidden directory, with each file's SHA-256 in a manifest, and renamed to
    ``path/step_00000120`` once all files are on the disk. It replaces an older checkpoint of this step and run.

    Values that are the same on all ranks (``state.layout``) are written once, each rank writing about the same number
    of bytes. Each rank writes its own values, and its shards of a sharded optimizer state. The files are those of
    ``torch.distributed.checkpoint``, whose tools read them.

    Args:
        path: the directory of all checkpoints of this run, on a file system that all ranks see.
        state: the state of a train step. It is only read. data: this rank's position in its data: dicts with string
            keys, lists, tuples, tensors, numbers, strings. A position that is the same on every rank is saved once.
        rng: save each rank's default generators too: torch's (CPU, current CUDA device), Python's, NumPy's if imported.
        keep: the number of this run's latest checkpoints that stay, the new one included; None keeps all. Other runs'
            checkpoints stay. A process that has loaded a checkpoint continues its run (:func:`load`).
        axis: the ranks that save together, as in :func:`ltx.psum`: the ranks of the train step.

    Returns:
        The directory of the checkpoint.

    Raises:
        CheckpointError: a rank, which the error names, couldn't write its part, or another run has saved a checkpoint
            of this step. All ranks raise it. Earlier checkpoints stay as they were.
        DonatedStateError, InputError, StepError: the state or `data` of a rank can't be saved. All ranks raise it.
        RankMismatchError: ranks came with different paths, steps or states.

    Example:
        >>> import tempfile, torch, ltx
        >>> step = ltx.data_parallel(lambda w, x: (w * x).square().sum())
        >>> train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.Adam, lr=0.1))
        >>> state, _ = train(train.init(torch.ones(2)), torch.ones(2))
        >>> with tempfile.TemporaryDirectory() as path:
        ...     saved = ltx.checkpoint.save(path, state, data={"epoch": 0, "batch": 1})
        ...     restored = ltx.checkpoint.load(path, train.init(torch.zeros(2)))
        >>> saved.name, restored.data, restored.state.step, restored.state.params.equal(state.params)
        ('step_00000001', {'epoch': 0, 'batch': 1}, 1, True)
    """
    return begin_saving("checkpoint.save", path, state, data, rng, keep, axis).run()


class Saving:
    """A checkpoint that is being saved in the background; see :func:`save_async`."""

    def __init__(self, job: Job, copies: Sequence[HostCopy] = ()):
        self._saved: Future[Path] = Future()
        self._thread = threading.Thread(target=self._run, args=(job, copies), name="ltx-checkpoint")
        if job.together.comm is not None:
            job.together.comm.peers.store_exchange.hold(self._thread)
        self._thread.start()

    def _run(self, job: Job, copies: Sequence[HostCopy]) -> None:
        try:
            pieces = zip(job.pieces, copies, strict=job.failure is None)
            job = replace(job, pieces=[replace(piece, tensor=copy.read()) for piece, copy in pieces])
            self._saved.set_result(job.run())
        except BaseException as error:
            self._saved.set_exception(error)
            warnings.warn(f"save_async: {error}", RuntimeWarning, stacklevel=1)

    @property
    def done(self) -> bool:
        """Whether :meth:`result` would return or raise at once."""
        return not self._thread.is_alive()

    def result(self, timeout_s: timedelta | float | None = None) -> Path:
        """The directory of the checkpoint, once the save has succeeded on all ranks; raises the errors of :func:`save`.

        Args:
            timeout_s: how long to wait at most: seconds or a timedelta; None is without limit.

        Raises:
            TimeoutError: the checkpoint isn't there within `timeout_s`.
        """
        limit_s = None if timeout_s is None else seconds("Saving.result: timeout_s", timeout_s, zero=True)
        self._thread.join(None if limit_s is None else min(limit_s, threading.TIMEOUT_MAX))
        if self._thread.is_alive():
            raise TimeoutError(f"the checkpoint isn't saved within {limit_s:g} s.")
        return self._saved.result()


@checked("path", "rng")
def save_async(
    path: str | os.PathLike[str],
    state: TrainState,
    *,
    data: Any = None,
    rng: bool = True,
    keep: int | None = None,
    axis: Any = None,
) -> Saving:
    """:func:`save` in the background, while training goes on. Every rank calls it.

    It copies this rank's part and returns: `state` may be donated to the next step while a thread writes the copy.
    Ranks agree through the store alone, so the save doesn't mix with their collectives.

    Args:
        path, state, data, rng, keep, axis: as in :func:`save`.

    Each pending save holds a copy of the state: if the disk is slow, wait for the last save before the next.

    Returns:
        A handle: ``.done``, and ``.result()``, which waits and raises the save's error, on all ranks alike. A failure
        also gives a RuntimeWarning, in case nobody calls it. ``ltx.shutdown()`` and the process' end wait for the save.

    Example:
        >>> import tempfile, torch, ltx
        >>> step = ltx.data_parallel(lambda w, x: (w * x).sum())
        >>> train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=0.5))
        >>> saving = ltx.checkpoint.save_async(tempfile.mkdtemp(), train.init(torch.ones(2)))
        >>> saving.result().name
        'step_00000000'
    """
    job = begin_saving("checkpoint.save_async", path, state, data, rng, keep, axis)
    with job.together.leaving():
        try:
            tensors = [piece.tensor.detach() for piece in job.pieces]
            # From an accelerator the copy is enqueued, after the work that computes the tensor.
            copies = [HostCopy(x.clone() if x.device.type == "cpu" else x) for x in tensors]
        except Exception as error:  # :meth:`Saving.result` raises it on all ranks
            return Saving(replace(job, failure=error))
    return Saving(job, copies)
