"""Objects between ranks: classes of the program itself."""

from __future__ import annotations

import dataclasses
import enum
import sys
from typing import Any, ClassVar

import ltx
from tests.kinds import Ranks


def test_classes_of_main_are_the_receivers_own(ranks: Ranks) -> None:
    """As in a script: an enum's member of a peer was another one, and dataclasses compared unequal."""

    def run() -> list[bool]:
        main = sys.modules["__main__"]
        split = enum.Enum("Split", ["TRAIN", "TEST"], module="__main__")
        hit = dataclasses.make_dataclass("Hit", ["id"], frozen=True)
        inner = type("Inner", (), {"__module__": "__main__", "__qualname__": "Hit.Inner"})
        hit.__module__, hit.Inner = "__main__", inner
        main.Split, main.Hit = split, hit
        try:
            hits = ltx.all_gather_object([hit(3), inner])
            got = ltx.broadcast_object({split.TRAIN: hit})
            return [*(found == [hit(3), inner] for found in hits), got == {split.TRAIN: hit}]
        finally:
            del main.Split, main.Hit

    assert all(all(found) for found in ranks(2).run(run))


class Meter:
    seen: ClassVar[list[int]] = []
    count = 0


Meter.__module__ = "__main__"  # as if a notebook had defined it: it comes with the function that uses it


def test_a_class_of_the_driver_keeps_what_a_rank_has_set(ranks: Ranks) -> None:
    """A peer's object came with its class, whose attributes replaced the rank's own."""

    def run() -> tuple[list[int], int, bool]:
        rank = int(ltx.axis_index())
        Meter.seen.append(rank)
        Meter.count = 10 + rank
        found = ltx.all_gather_object(Meter())
        return Meter.seen, Meter.count, all(type(x) is Meter for x in found)

    assert list(ranks(2).run(run)) == [([0], 10, True), ([1], 11, True)]


def test_a_class_that_one_rank_alone_has(ranks: Ranks) -> None:
    """Of a cell that ran on one rank, or inside of a function: it travels with the object."""

    def run() -> tuple[str, int]:
        main: Any = sys.modules["__main__"]
        if ltx.axis_index() == 0:
            main.Lone = dataclasses.make_dataclass("Lone", ["id"])
            main.Lone.__module__ = "__main__"
        try:
            got = ltx.broadcast_object(main.Lone(5) if ltx.axis_index() == 0 else None)
            return type(got).__name__, got.id
        finally:
            vars(main).pop("Lone", None)

    assert list(ranks(2).run(run)) == [("Lone", 5)] * 2
