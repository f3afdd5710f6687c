"""Exceptions in the middle of what goes through shared memory: the ranks stay in step, or the channel fails on all."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

import ltx
from ltx.wire import pieces, shared
from ltx.wire.pieces import PIECE_BYTES, Piece
from ltx.wire.shared import COUNTERS_BYTES, PIECES, Lane, Passage

OPERATIONS: dict[str, tuple[int, ...]] = {"sum": (), "reduce_scatter": (), "broadcast": (1,)}
STRIDES = ("_fill", "_reduce", "_empty")


@contextmanager
def two_lanes() -> Iterator[list[Lane]]:
    """Both ends of a lane in this process, so that each stride is taken when the test says so."""
    arenas = [mmap.mmap(-1, COUNTERS_BYTES + PIECES * PIECE_BYTES) for _ in range(2)]
    lanes = [Lane(rank, arenas, [], []) for rank in range(2)]
    try:
        yield lanes
    finally:
        for lane in lanes:
            lane.close()


Begun = list[tuple[Passage, torch.Tensor, torch.Tensor]]


def begin(lanes: list[Lane], operations: dict[str, tuple[int, ...]], asks: bool = True) -> list[Begun]:
    """Each rank's operations, with what is expected of them."""
    begun: list[Begun] = []
    for lane in lanes:
        of_rank: Begun = []
        for place, (operation, arguments) in enumerate(operations.items()):
            xs = torch.arange(12.0).view(2, 2, 3) * (place + 1)  # rank r's is xs[r]
            expected = {
                "sum": xs.sum(0),
                "reduce_scatter": xs.sum(0)[lane.rank],
                "broadcast": xs[1],
            }[operation]
            passage, value = lane.begin(operation, xs[lane.rank].clone(), arguments, place, asks)
            of_rank.append((passage, value, expected))
        begun.append(of_rank)
    return begun


def drive(lanes: list[Lane], begun: list[Begun], stride: Callable[[Lane], object] = Lane.stride) -> None:
    for _ in range(200):
        if all(passage.landed for of_rank in begun for passage, *_ in of_rank):
            return
        for lane in lanes:
            stride(lane)
    raise AssertionError("nothing moves any more")


def check(begun: list[Begun]) -> None:
    for of_rank in begun:
        for passage, value, expected in of_rank:
            assert not passage.refused
            assert torch.equal(value, expected)
            if passage.total is not None:
                assert passage.total == float(expected.sum())


class Fault:
    """Raises once, at the `at`-th event of those that a trace sees in strides; counts them."""

    def __init__(self, error: type[BaseException], at: int, event: str, rank: int):
        self.error, self.at, self.event, self.rank, self.came = error, at, event, rank, 0

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        frame.f_trace_opcodes = self.event == "opcode"
        if frame.f_code.co_filename != shared.__file__ and not frame.f_code.co_filename.endswith("pieces.py"):
            return None
        if event == self.event:
            self.came += 1
            if self.came == self.at:
                raise self.error("from outside")
        return self._trace

    def stride(self, lane: Lane) -> None:
        if lane.rank != self.rank:
            lane.stride()
            return
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            lane.stride()
        except self.error:
            assert self.came == self.at
        finally:
            sys.settrace(before)


def interrupted(operations: dict[str, tuple[int, ...]], error: Any, event: str, at: int, on: Sequence[int]) -> int:
    """Raise at one place on some ranks; afterwards every value is right, and so is what is issued next."""
    with two_lanes() as lanes:
        begun = begin(lanes, operations)
        faults = [Fault(error, at, event, rank) for rank in on]
        by_rank = {fault.rank: fault for fault in faults}
        drive(lanes, begun, lambda lane: by_rank[lane.rank].stride(lane) if lane.rank in by_rank else lane.stride())
        check(begun)
        after = begin(lanes, {"sum": ()})
        drive(lanes, after)
        check(after)
        assert not any(lane.failures() for lane in lanes)
        return faults[0].came


@pytest.mark.full
@pytest.mark.covering(1)
@pytest.mark.parametrize("on", [(0,), (0, 1)], ids=["one", "both"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
def test_an_exception_at_any_line_leaves_ranks_in_step(error: Any, on: Sequence[int]) -> None:
    lines = interrupted(OPERATIONS, error, "line", 0, on)
    assert lines > 150
    # Some lines depend on when peers come: the count is of one run.
    for at in range(1, lines + 1, 1 if error is KeyboardInterrupt else 3):
        interrupted(OPERATIONS, error, "line", at, on)


@pytest.mark.full
def test_an_interrupt_between_any_two_instructions_of_a_sum_leaves_ranks_in_step() -> None:
    places = interrupted({"sum": ()}, KeyboardInterrupt, "opcode", 0, (0,))
    assert places > 300
    for at in range(1, places + 1):
        interrupted({"sum": ()}, KeyboardInterrupt, "opcode", at, (0,))


def broken(cut: Any, stride: str) -> Any:
    """A sum of which one stride always raises."""

    def fail(*_: Any, **__: Any) -> Any:
        raise ArithmeticError("no such sum")

    def cut_broken(*args: Any) -> Iterator[Piece]:
        for piece in cut(*args):
            yield replace(piece, **{stride: fail})

    return cut_broken


@pytest.mark.parametrize("stride", ["give", "reduce", "take"])
@pytest.mark.parametrize("on", [(0,), (0, 1)], ids=["one", "both"])
def test_a_stride_that_always_raises_fails_the_lane_and_tells(stride: str, on: Sequence[int]) -> None:
    whole = pieces.CUTS["sum"]
    with two_lanes() as lanes, pytest.MonkeyPatch.context() as patch:
        for lane in lanes:
            patch.setitem(pieces.CUTS, "sum", broken(whole, stride) if lane.rank in on else whole)
            lane.begin("sum", torch.ones(3), (), 0)
        for _ in range(20):
            for lane in lanes:
                lane.stride()
        for lane in lanes:
            assert lane.failures() == dict.fromkeys(on, "ArithmeticError: no such sum")
            assert (lane.error is not None) == (lane.rank in on)
            assert not (lane.rank in on and lane.busy)


def fail_in(stride: str, on: Sequence[int]) -> list[str]:
    """What three collectives say when one on the channel of the user fails: itself, and two that follow."""
    rank, said = int(ltx.axis_index()), []
    with pytest.MonkeyPatch.context() as patch:
        if rank in on:
            patch.setitem(pieces.CUTS, "sum", broken(pieces.CUTS["sum"], stride))
        for _ in range(3):
            try:
                said.append(str(ltx.psum(torch.ones(3)).tolist()))
            except ltx.errors.TransportError as error:
                said.append(str(error))
    return said


@pytest.mark.full(but=2)
@pytest.mark.parametrize(("stride", "on"), [("give", (0,)), ("reduce", (1,)), ("reduce", (0, 1)), ("take", (0,))])
def test_all_ranks_hear_of_it(torn: Callable[..., Any], stride: str, on: Sequence[int]) -> None:
    for rank, said in enumerate(torn(lambda: fail_in(stride, on))):
        # Who has emptied its piece before a peer fails has its sum.
        wrong = [text for text in said if text != "[2.0, 2.0, 2.0]"]
        assert len(wrong) >= 2, said
        assert said[1:] == wrong[-2:]
        assert f"rank {rank}: psum on axis 'data' failed halfway" in wrong[0]
        assert any(f"on rank {other}: ArithmeticError: no such sum" in wrong[0] for other in on)
        assert "ltx.shutdown() and start again" in wrong[0]
        assert "has been out of step since an earlier failure" in wrong[-1]


def interrupt_in(stride: str, on: Sequence[int]) -> list[float]:
    """An interrupt in the middle of a sum, and the sums that follow."""
    rank = int(ltx.axis_index())
    original = getattr(Lane, stride)
    came: list[int] = []

    def once(lane: Lane) -> bool:
        done = original(lane)
        if done and rank in on and not came:
            came.append(1)
            raise KeyboardInterrupt
        return bool(done)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lane, stride, once)
        try:
            ltx.psum(torch.ones(3))
        except KeyboardInterrupt:
            assert rank in on
    return [float(ltx.psum(torch.tensor(float(step)))) for step in range(4)]


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("on", [(0,), (0, 1)], ids=["one", "both"])
def test_sums_after_an_interrupt(ranks: Callable[[int], Any], stride: str, on: Sequence[int]) -> None:
    """On workers that others use too: nothing is left behind."""
    assert ranks(2).run(interrupt_in, stride, on).replicated() == [0.0, 2.0, 4.0, 6.0]


def no_memory(on: Sequence[int]) -> list[str]:
    """An all_gather for whose result there is no memory on some ranks, and what follows."""
    rank, said = int(ltx.axis_index()), []

    def none(*_: Any) -> Any:
        raise MemoryError("none left")

    with pytest.MonkeyPatch.context() as patch:
        if rank in on:
            patch.setattr(shared, "memory_for", none)
        for call in (ltx.all_gather, ltx.psum):
            try:
                said.append(str(call(torch.ones(3)).tolist()))
            except (MemoryError, ltx.errors.TransportError) as error:
                said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.mark.parametrize("on", [(0,), (0, 1)], ids=["one", "both"])
def test_no_memory_is_told_at_once(torn: Callable[..., Any], on: Sequence[int]) -> None:
    for rank, said in enumerate(torn(lambda: no_memory(on))):
        assert said[0].startswith("MemoryError" if rank in on else f"TransportError: rank {rank}: all_gather on axis")
        assert said[1].startswith("TransportError: ")
        assert "MemoryError: none left" in said[1]


def left_out(rank_interrupted: int) -> list[str]:
    """A rank is interrupted before its part is on its way; the same sum follows."""
    rank, said = int(ltx.axis_index()), []
    ltx.psum(torch.ones(3))

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    for place in range(3):
        with pytest.MonkeyPatch.context() as patch:
            if rank == rank_interrupted and place == 0:
                patch.setattr(shared, "memory_for", interrupt)
            try:
                said.append(str(ltx.psum(torch.ones(3)).tolist()))
            except (KeyboardInterrupt, ltx.errors.RankMismatchError) as error:
                said.append(type(error).__name__)
    return said


def test_what_an_interrupt_left_out_is_refused_at_the_next_collective(torn: Callable[..., Any]) -> None:
    """Of two equal sums, one is missing on a rank: they aren't paired."""
    by_rank = torn(lambda: left_out(0))
    assert by_rank[0] == ["KeyboardInterrupt", "RankMismatchError", "RankMismatchError"]
    assert by_rank[1] == ["RankMismatchError", "RankMismatchError", "RankMismatchError"]
