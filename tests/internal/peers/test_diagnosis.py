"""What follows from what ranks say of themselves: a table of records, without processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ltx.core.base import kernel
from ltx.core.base.errors import said_of
from ltx.core.comm.passes import Failed
from ltx.errors import DeadlockDetectedError, PeerLostError
from ltx.peers.diagnosis import INIT, Record, Status, ThreadWait, Told, diagnose, silent_of

AXIS = "ltx/data/1"
#: Rank 1 of three, which are ranks 4, 6 and 9 of the world.
ME = 1, "data", AXIS, [4, 6, 9], 10.0
HERE: dict[str, Any] = {"call": 5, "issue": ("user", 7)}
RAISED = Failed("ValueError: x", what="step 5 of the training", call=5)
FAILED = Failed("ValueError: x", lost=False, what="step 5 of the training")


def says(beat: float = 1.0, silent: dict[int, tuple[float, str]] | None = None, **status: object) -> Record:
    return Record(beat, 0, silent or {}, {AXIS: Status(**status)})  # type: ignore[arg-type]


FINDS_9_SILENT = says(silent={9: (3.0, kernel.UNKNOWN)})
HALFWAY = (
    "rank 1: rank {} has left step 5 of the training on axis 'data' halfway (ValueError: x), so what this rank "
    "waits for won't come. The world has ended: ltx.init() on all ranks begins a new one"
)
LEFT = "rank 1: rank 2 has left axis 'data' because of an exception (KeyError: 3), so what this rank waits for won't"
IN_ORDER = "rank 1: on axis 'data', rank 2 has ended its part of the world in good order"
#: What is said by ranks of the world; the error's type and words of it, None if there is none.
TABLE: dict[str, tuple[dict[int, Record], type[Exception] | None, str]] = {
    "nobody has said anything": ({}, None, ""),
    "all go on": ({4: says(), 6: says(), 9: says()}, None, ""),
    "a peer has left the pass": ({4: says(raised=RAISED)}, DeadlockDetectedError, HALFWAY.format(0)),
    "after it had sent something": ({9: says(failed=FAILED)}, DeadlockDetectedError, HALFWAY.format(2)),
    "because a peer is lost": ({9: says(failed=replace(FAILED, lost=True))}, PeerLostError, "rank 1: rank 2 has left"),
    "a pass before this one": ({9: says(raised=replace(RAISED, call=4))}, None, ""),
    "this rank itself has left it": ({6: says(raised=RAISED)}, None, ""),
    "a peer's world ends": ({9: says(failed=Failed("KeyError: 3", False), raised=RAISED)}, DeadlockDetectedError, LEFT),
    "a peer's world ends for a lost one": ({4: says(failed=Failed("gone", True))}, PeerLostError, "rank 0 has left"),
    "another axis": ({4: Record(1.0, axes={"ltx/data/2": Status(raised=RAISED, failed=FAILED)})}, None, ""),
    "a peer finds another silent": (
        {4: FINDS_9_SILENT, 9: says(3.0)},
        PeerLostError,
        "rank 1: rank 2 on axis 'data' has shown no sign of life for 10 s: its process has been stopped",
    ),
    "which has shown a beat since": ({4: FINDS_9_SILENT, 9: says(4.0)}, None, ""),
    "one that isn't of the axis": ({4: says(silent={5: (3.0, kernel.UNKNOWN)}), 5: says(3.0)}, None, ""),
    "this rank was silent": ({4: says(silent={6: (3.0, kernel.UNKNOWN)}), 6: says(3.0)}, None, ""),
    "one has ended": ({4: FINDS_9_SILENT, 9: says(3.0, ended=True, issued={"user": 9})}, PeerLostError, IN_ORDER),
    "a peer has ended that issued it": ({9: says(0.0, ended=True, issued={"user": 7})}, None, ""),
    "a peer has ended that didn't": ({9: says(0.0, ended=True, issued={"user": 6})}, PeerLostError, IN_ORDER),
    "a peer's world has ended, where it never had this axis": (
        {9: Record(0.0, axes={INIT: Status(ended=True), "ltx/data/2": Status(failed=Failed("KeyError: 3", False))})},
        DeadlockDetectedError,
        LEFT,
    ),
    "a peer has closed all its axes": ({9: Record(0.0, axes={"ltx/data/2": Status(ended=True)})}, None, ""),
    "on another channel": ({9: says(0.0, ended=True, issued={"buckets 0": 6})}, None, ""),
}


@pytest.mark.parametrize("row", TABLE)
def test_what_follows(row: str) -> None:
    records, kind, words = TABLE[row]
    error = diagnose(records, *ME, **HERE)
    assert type(error) is (kind or type(None))
    assert words in str(error or "")


@pytest.mark.parametrize("said", ["raised", "failed"])
def test_the_first_cause_is_said_once(said: str) -> None:
    """An error that goes from rank to rank says who raised first, and what."""
    why = "ValueError: x"
    for _ in range(3):
        error = diagnose({4: says(**{said: replace(RAISED if said == "raised" else FAILED, why=why)})}, *ME, **HERE)
        why = said_of(error)
        assert why == "after rank 0 had left: ValueError: x"
    assert str(error).count("rank 0 had left: ValueError: x") == 1
    assert said_of(ValueError("x")) == "ValueError: x"


@pytest.mark.parametrize("kind", ["the call before", "this call"])
def test_what_all_raised_in_an_earlier_call_of_a_pool_is_over(kind: str) -> None:
    """The peer's record may still say so, as this rank begins the next call before it."""
    failed = Failed("RuntimeError: everywhere", False, call=7 if kind == "this call" else 6)
    assert (diagnose({4: says(failed=failed)}, *ME, **HERE, of_pool=7) is None) == (kind == "the call before")


def test_who_waits_for_no_pass_goes_on_when_one_is_left() -> None:
    assert diagnose({4: says(raised=RAISED)}, *ME, issue=("user", 7)) is None


def test_a_record_survives_the_store() -> None:
    wait = ThreadWait(7, 3, "ltx/data/1/user", 9, [4, 6], "psum (x.py:3)")
    told = Told([wait], {"ltx/data/1/user": (8, [7, 8])}, ([(4, 7, 3)], "text"))
    full = Status("exchanges/item/3", RAISED, Failed("KeyError: 3", True), True, {"user": 7})
    whole = Record(2.5, 11, {9: (3.25, kernel.GONE)}, {AXIS: full, "other": Status()}, told, ["here", "1"])
    for record in (Record(), whole):
        assert Record.of(record.text()) == record


def test_silent_is_who_shows_no_beat_since_it_was_found_so() -> None:
    finder = Record(1.0, 0, {1: (5.0, kernel.GONE), 2: (6.0, kernel.GONE)})
    assert silent_of({0: finder, 1: Record(5.0), 2: Record(6.5)}) == {1: "its process is gone"}
