"""The texts of failures: of one exception, with the user's frames alone, and of a call that failed on some ranks."""

from __future__ import annotations

import pickle
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

import cloudpickle

from ltx.core.base.errors import message_of
from ltx.errors import CallFailedError, CallTimeoutError, WorkerError
from ltx.runtime.messages import At, Failure, Idle, Result
from ltx.runtime.tracebacks import in_words, is_hidden, label, place_of, place_of_error


def failure_of(error: BaseException, doing: str = "", *, cancelled: bool = False, in_world: bool = False) -> Failure:
    """The message that tells the driver of `error`; `doing` is put before the error's text."""
    at_s = time.monotonic()
    message = message_of(error)
    text, pickled = message, None
    with suppress(Exception):
        text = text_of(error)
    with suppress(Exception):
        pickled = cloudpickle.dumps(error)
    where = place_of_error(error)
    return Failure(type(error).__qualname__, doing + message, text, at_s, where, pickled, cancelled, in_world)


def text_of(error: BaseException) -> str:
    """The traceback as Python prints it, without ltx's frames."""
    told = traceback.TracebackException.from_exception(error, compact=True)
    _filter(told)
    return "".join(told.format())


def places_of(frame: FrameType) -> str:
    """Where a thread is: the user's innermost frame, and the innermost frame of all, such as one of torch."""
    trace = traceback.extract_stack(frame)
    own, innermost = place_of(trace), in_words(trace[-1])
    return own if own == innermost else f"{own}, which has come to {innermost}"


def _filter(told: traceback.TracebackException) -> None:
    """Leave ltx's frames out of `told` and out of the exceptions that caused it."""
    kept = [frame for frame in told.stack if not is_hidden(frame.filename)] or told.stack
    for frame in kept:  # frames are renamed in place: a new FrameSummary would lose the columns
        _ = frame.line  # Python finds the source line by the old name, and keeps it once it was read
        frame.filename = label(frame.filename)
    told.stack = traceback.StackSummary.from_list(kept)
    for other in (told.__cause__, told.__context__, *(getattr(told, "exceptions", None) or ())):
        if other is not None:
            _filter(other)


# A rank raises these errors because a peer has failed.
CONSEQUENCES = ("PeerLostError", "StoreGoneError", "DeadlockDetectedError", "CollectiveTimeoutError")


def exit_text(code: int) -> str:
    if code >= 0:
        return f"exited with status {code}"
    return f"was killed by {signal.Signals(-code).name if -code in set(signal.Signals) else -code}"


#: What became of the workers in a call that failed or was interrupted, by whether it kept them.
OF_WORKERS = {
    True: "The workers keep their state, and the next run begins with a new world.",
    False: "The workers were ended, with what they had kept; the next run starts new ones.",
    None: "",
}


def failure_error(
    name: str, answers: Mapping[int, Any], ranks: Sequence[int], size: int, timeout_s: float | None, kept: bool | None
) -> WorkerError:
    """The error for a run of `name` on `ranks` of `size`: the first failure in full, the other ranks in one line.
    `answers`: those of ``WorkerGroup.collect``. `kept`: whether the workers still run; None to say nothing of them.
    """
    # The first failure is the cause. A process that ended comes before exceptions, which its peers raise because of
    # it; errors in CONSEQUENCES come last; a rank that gave up because it was asked to isn't a cause.
    silent = [rank for rank in ranks if isinstance(answers.get(rank), At | None)]
    came = {rank: answer for rank, answer in answers.items() if rank not in silent}
    failed = {rank: answer for rank, answer in came.items() if not isinstance(answer, Result)}
    genuine = [rank for rank in failed if not getattr(came[rank], "cancelled", False)]
    if not genuine:
        late = sorted({*silent, *failed})
        listed, done = (", ".join(map(str, some)) for some in (late, sorted(came.keys() - failed.keys())))
        return CallTimeoutError(
            f"{name} didn't return on rank{'s' * (len(late) > 1)} {listed} of {size} within {timeout_s:g} s"
            + (f", while it returned on {done}" if done else "")
            + f": {'; '.join(f'rank {rank} {told_where(answers.get(rank))}' for rank in late)}. A rank that waits in a "
            "collective waits for one that doesn't take part. Give a longer timeout if the ranks only need more time."
            + f" {OF_WORKERS[kept]}".rstrip()
        )
    told_s = {r: (a.type_name in CONSEQUENCES, a.at_s) for r, a in failed.items() if isinstance(a, Failure)}
    first = min(genuine, key=lambda rank: (*told_s.get(rank, (False, 0.0)), rank))
    answer = answers[first]
    others = [f"rank {r} {told_where(answers.get(r), asked=False)}" for r in (*sorted(failed), *silent) if r != first]
    rest = f"\nOther ranks: {'; '.join(others)}." if others else ""
    if kept is False:
        rest += f"\n{OF_WORKERS[kept]}"
    error = CallFailedError()
    error.rank = first
    if isinstance(answer, str):
        when = f"before it could run {name}" if isinstance(answer, Idle) else f"while it ran {name}"
        error.args = (f"rank {first} of {size} {answer} {when}.{rest}",)
        return error
    error.type_name, error.traceback_text = answer.type_name, answer.traceback_text
    error.args = (
        f"rank {first} of {size} raised {answer.type_name}: {answer.message}\n\nOn rank {first}: "
        f"{answer.traceback_text.rstrip()}\n{rest}".rstrip(),
    )
    with suppress(Exception):  # the exception's class may take other arguments, or may not be importable in the driver
        original = pickle.loads(answer.pickled) if answer.pickled is not None else None
        error.__cause__ = original if isinstance(original, BaseException) else None
    return error


def told_where(answer: Any, asked: bool = True) -> str:
    """What a rank has answered: where it was, if it was `asked` to give up; None and an At are of one that didn't."""
    if answer is None:
        return "didn't give up (it is in code that Python can't interrupt)"
    if isinstance(answer, At):
        catches = "catches KeyboardInterrupt, as BaseException, and goes on"
        deaf = "is in code that Python can't interrupt"
        return f"didn't give up (it {catches if answer.raised else deaf}, at {answer.where})"
    if isinstance(answer, Result):
        return "had returned"
    if isinstance(answer, str):
        return answer
    if answer.cancelled and answer.where:
        return f"was at {answer.where}" if asked else f"was given up at {answer.where}"
    if answer.cancelled:
        return "was given up"
    line: str = answer.message.partition("\n")[0].rstrip(".")
    return f"raised {answer.type_name}: {line[:160]}{'...' * (len(line) > 160)}"
