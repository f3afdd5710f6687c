"""The errors of :mod:`ltx.errors`."""

from __future__ import annotations

import re

__all__ = ["ArgumentError", "AuthenticationError", "AxisError", "CallFailedError", "CallInterruptedError"]
__all__ += ["CallTimeoutError", "CheckpointError", "CollectiveError", "CollectiveTimeoutError", "DataError"]
__all__ += ["DeadlockDetectedError", "DonatedStateError", "EqualBatchesWarning", "HookError", "InputError"]
__all__ += ["InvalidStateError", "LtxError", "NotFiniteError", "OptimError", "PeerLostError", "RankMismatchError"]
__all__ += ["ReplicaDivergedError", "StepError", "StepLeftOutError", "StoreGoneError", "StrategyError"]
__all__ += ["SyncStateError", "TransportError", "TreeError", "UnsupportedError", "UnusedParameterWarning"]
__all__ += ["WeightError", "WorkerError", "WorldError"]

#: How states and checkpoints know the leaf of a tree that is one leaf; users have never heard of it.
WHOLE = "<the tree itself>"
_WHOLE = re.compile(rf"((the )?(leaf|output|parameter|buffer) )?'{WHOLE}'")


class LtxError(Exception):
    """Base of every error of ltx."""

    told = ""  # what a peer had raised, if that is why this is raised: what this rank's peers are told in its place

    def __str__(self) -> str:  # not where it is made: Dynamo can't trace a constructor above Exception's
        return _WHOLE.sub("the value itself", super().__str__())


Kind = type[LtxError]


class ArgumentError(LtxError, TypeError, ValueError):
    """An argument that isn't what the function's signature says."""


class AxisError(LtxError, ValueError):
    """An axis that isn't in scope, or that can't do what was asked of it."""


class CollectiveError(LtxError, ValueError):
    """An argument of a collective that isn't among those it knows."""


class WorldError(LtxError, RuntimeError):
    """The world of processes can't be set up as asked."""


class TreeError(LtxError, TypeError):
    """Something that should be a tree of tensors isn't one."""


class StrategyError(LtxError, ValueError):
    """A field of a strategy or hook has a value that isn't allowed."""


class HookError(LtxError, TypeError):
    """A hook written for torch's DistributedDataParallel that isn't one, or that can't run here."""


class StepError(LtxError, TypeError):
    """A step's output or arguments don't fit the transformation around it, or its loss depends on no parameter."""


class InputError(LtxError, ValueError):
    """An argument whose shape or value doesn't fit the function it was given to."""


class DataError(LtxError, RuntimeError):
    """The iterable that gives a rank its batches failed."""


class StepLeftOutError(LtxError):
    """All ranks leave a training step out, by a decision that they share, when all that they sent has arrived.

    The world goes on after it, unlike after others that leave a step. A strategy or a guard may derive its own from it.
    """


class WeightError(StepLeftOutError, ValueError):
    """Weights of a :class:`ltx.Weighted` step that admit no mean."""


class OptimError(LtxError, ValueError):
    """An optimizer that can't be built or applied as asked."""


class SyncStateError(LtxError, RuntimeError):
    """A communication state used twice, lost, or given to the wrong step."""


class UnsupportedError(LtxError, RuntimeError):
    """A combination that has no exact meaning here; the message names what to use instead."""


class RankMismatchError(LtxError, RuntimeError):
    """Ranks issued different operations, trees, shapes or dtypes where they must agree."""


class PeerLostError(LtxError, RuntimeError):
    """A peer's connection broke while this rank was waiting for it."""


class StoreGoneError(PeerLostError):
    """The store through which the ranks meet has ended with its process; the peers may live all the same."""


class TransportError(LtxError, RuntimeError):
    """A rank failed in the middle of a collective between processes of one machine, which no rank can complete."""


class CollectiveTimeoutError(LtxError, TimeoutError):
    """A collective didn't complete within the axis' timeout."""


class DeadlockDetectedError(LtxError, RuntimeError):
    """Ranks wait for each other."""


class DonatedStateError(LtxError, RuntimeError):
    """A train state whose tensors were given away to the next state was used again."""


class CheckpointError(LtxError, RuntimeError):
    """A checkpoint couldn't be written, or none could be read."""


class UnusedParameterWarning(UserWarning):
    """The loss of a training's first step doesn't depend on some parameters, which weight decay moves all the same."""


class EqualBatchesWarning(UserWarning):
    """All ranks have the same batch at the first step of a world: each computes what the others do."""


class NotFiniteError(StepLeftOutError, FloatingPointError):
    """Gradients that are NaN or infinite, in a training step that was to raise at them."""


class AuthenticationError(LtxError, RuntimeError):
    """An object that came over the network isn't from a rank of this job."""


class InvalidStateError(LtxError, RuntimeError):
    """A train state whose update in place failed halfway, or was never completed."""


class ReplicaDivergedError(LtxError, RuntimeError):
    """A value that should be the same on every rank isn't."""


class WorkerError(LtxError, RuntimeError):
    """A function failed on a worker process."""


class _OfACall:
    """Notebooks show the message alone: the frames of the driver say nothing about what happened on the workers."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class CallFailedError(_OfACall, WorkerError):
    """A call raised, or its process ended, on at least one rank; the fields are about the first to fail.

    Attributes:
        rank: the first rank to fail.
        type_name: the name of its exception's class; "" if its process ended without one.
        traceback_text: its traceback, with the frames of ltx left out.
    """

    rank: int = -1
    type_name: str = ""
    traceback_text: str = ""


class CallTimeoutError(_OfACall, WorkerError, TimeoutError):
    """A call didn't return on all ranks within its ``timeout_s``."""


class CallInterruptedError(_OfACall, KeyboardInterrupt):
    """Ctrl-C during a call, and where it found each rank.

    Attributes:
        kept: whether all ranks have given up, and so the workers are still there.
    """

    def __init__(self, message: str, kept: bool):
        super().__init__(message)
        self.kept = kept


def no_mean(
    what: str = "Weighted: the weights of all ranks add up to 0", state: str = "", odd: bool = False
) -> WeightError:
    """The error where weights leave no mean; `odd`: one is no count. `state`: what has become of a training's state."""
    if odd:
        return WeightError(
            f"Weighted: the weight of this rank or of another is negative, infinite or NaN. {state}Weights count "
            "samples: give 0 to a rank whose loss is to count for nothing."
        )
    fix = "Give at least one rank a weight, or leave the call out on all of them."
    return WeightError(f"{what}, so there is no mean. {state}{fix}")


def message_of(error: BaseException) -> str:
    """What `error` says, also if its own ``__str__`` raises."""
    try:
        return str(error)
    except Exception as broken:
        return f"<no text: its __str__ raised {type(broken).__name__}>"


def said_of(why: BaseException | str) -> str:
    """What peers are told of an error: the first cause, so that an error that goes from rank to rank doesn't nest."""
    return getattr(why, "told", "") or (why if isinstance(why, str) else f"{type(why).__name__}: {message_of(why)}")
