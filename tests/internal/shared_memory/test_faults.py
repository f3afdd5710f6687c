"""Exceptions in the middle of what goes through shared memory: the ranks stay in step, or the channel fails on all."""

from __future__ import annotations

import gc
import mmap
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ltx
from ltx import shared_memory
from ltx.core.comm.operations import Operation
from ltx.core.comm.transport import TransportWork
from ltx.shared_memory.chunks import CHUNK_BYTES, CUTS, SMALL_BYTES, Chunk, Cut
from ltx.shared_memory.transport import SEGMENT_BYTES, SLOTS, SharedMemoryTransport
from tests.kinds import OnNewAxis
from tests.train_on import on_ranks

OPERATIONS: dict[str, tuple[int, ...]] = {"psum": (), "psum_scatter": (), "broadcast": (1,)}


@contextmanager
def two_transports() -> Iterator[list[SharedMemoryTransport]]:
    """Both ends of a transport in this process, so that each makes progress when the test says so."""
    segments = [mmap.mmap(-1, SEGMENT_BYTES) for _ in range(2)]
    transports = [SharedMemoryTransport(rank, segments, [], []) for rank in range(2)]
    try:
        yield transports
    finally:
        for transport in transports:
            transport.close()


Begun = list[tuple[TransportWork, torch.Tensor, torch.Tensor]]


def begin(
    transports: list[SharedMemoryTransport],
    operations: dict[str, tuple[int, ...]],
    asks: bool = True,
    width: int = SMALL_BYTES // 4,
) -> list[Begun]:
    begun: list[Begun] = []
    for transport in transports:
        of_rank: Begun = []
        for place, (operation, arguments) in enumerate(operations.items()):
            xs = torch.arange(4.0 * width).view(2, 2, width) * (place + 1)  # rank r's is xs[r]
            expected = {"psum": xs.sum(0), "psum_scatter": xs.sum(0)[transport.rank], "broadcast": xs[1]}[operation]
            x = xs[transport.rank].clone()
            if transport.rank == 1:  # peers read its sums' inputs in place
                x = torch.empty(0).set_(transport.room(x.nbytes)).view(x.shape).copy_(x)
            work, value = transport.begin(operation, x, arguments, place, asks, ())
            of_rank.append((work, value, expected))
        begun.append(of_rank)
    return begun


def drive(
    transports: list[SharedMemoryTransport],
    begun: list[Begun],
    progress: Callable[[SharedMemoryTransport], object] = SharedMemoryTransport.progress,
) -> None:
    for _ in range(200):
        if all(work.completed for of_rank in begun for work, *_ in of_rank):
            return
        for transport in transports:
            progress(transport)
    raise AssertionError("nothing moves any more")


def check(begun: list[Begun]) -> None:
    for of_rank in begun:
        for work, value, expected in of_rank:
            assert not work.refused
            assert torch.equal(value, expected)
            if work.total is not None:
                assert work.total == float(expected.sum())


def test_a_slot_is_filled_again_only_when_all_have_emptied_it(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    xs = [torch.randn((SLOTS + 1) * CHUNK_BYTES // 4, generator=draw) for _ in range(2)]
    with two_transports() as transports:
        # Rank 0 has its results of all slots, and would go on to the next chunk, before rank 1 has read any.
        begun = [
            transport.begin("psum", x.clone(), (), 0, False, ()) for transport, x in zip(transports, xs, strict=True)
        ]
        for _ in range(4):
            for transport in transports:
                transport.progress()
        for work, value in begun:
            assert work.completed
            assert torch.equal(value, xs[0] + xs[1])


class Fault:
    """Raises once, at the `at`-th event of those that a trace sees while the transport makes progress; counts them.

    Of instructions it sees those of torch too.
    """

    def __init__(self, error: type[BaseException], at: int, event: str):
        self.error, self.at, self.event, self.came = error, at, event, 0

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        frame.f_trace_opcodes = self.event == "opcode"
        ours = frame.f_code.co_filename in (shared_memory.transport.__file__, shared_memory.chunks.__file__)
        if not ours and self.event == "line":
            return None
        if event == self.event:
            self.came += 1
            if self.came == self.at:
                raise self.error("from outside")
        return self._trace

    def progress(self, transport: SharedMemoryTransport) -> None:
        before = sys.gettrace()
        gc.disable()  # what others do in a collection isn't the transport's, and an exception of it is lost
        sys.settrace(self._trace)
        try:
            transport.progress()
        except self.error:
            assert self.came == self.at
        finally:
            sys.settrace(before)
            gc.enable()
        assert (torch.ones(1, requires_grad=True) * 2).requires_grad, f"gradients are off after {self.at}"


@pytest.mark.parametrize("width", [3, SMALL_BYTES // 4], ids=["small", "in parts"])
def test_inputs_in_the_room_and_in_slots(width: int) -> None:
    with two_transports() as transports:
        begun = begin(transports, OPERATIONS, width=width)
        drive(transports, begun)
        check(begun)


def interrupted(
    operations: dict[str, tuple[int, ...]],
    error: Any,
    event: str,
    at: int,
    on: Sequence[int],
    width: int = SMALL_BYTES // 4,
) -> int:
    """Raise at one place on some ranks; afterwards every value is right, and so is what is issued next."""
    with two_transports() as transports:
        begun = begin(transports, operations, width=width)
        by_rank = {rank: Fault(error, at, event) for rank in on}

        def progress(transport: SharedMemoryTransport) -> None:
            by_rank[transport.rank].progress(transport) if transport.rank in by_rank else transport.progress()

        drive(transports, begun, progress)
        check(begun)
        after = begin(transports, {"psum": ()})
        drive(transports, after)
        check(after)
        assert not any(transport.failures() for transport in transports)
        return by_rank[on[0]].came


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
@pytest.mark.parametrize("width", [3, SMALL_BYTES // 4], ids=["small", "in parts"])
def test_an_interrupt_between_any_two_instructions_of_a_sum_leaves_ranks_in_step(width: int) -> None:
    places = interrupted({"psum": ()}, KeyboardInterrupt, "opcode", 0, (0,), width)
    assert places > 300
    for at in range(1, places + 1):
        interrupted({"psum": ()}, KeyboardInterrupt, "opcode", at, (0,), width)


def broken(whole: Cut, phase: str) -> Cut:
    """A sum of which one round of progress always raises."""

    def fail(*_: Any, **__: Any) -> Any:
        raise ArithmeticError("no such sum")

    def cut_broken(*args: Any) -> Iterator[Chunk]:
        for chunk in whole(*args):
            yield chunk._replace(**{phase: SimpleNamespace(data_ptr=fail) if phase == "given" else fail})

    return cut_broken


@pytest.mark.parametrize("phase", ["given", "reduce", "take"])
@pytest.mark.parametrize("on", [(0,), (0, 1)], ids=["one", "both"])
def test_progress_that_always_raises_fails_the_transport_and_tells(phase: str, on: Sequence[int]) -> None:
    whole = CUTS["psum"]
    with two_transports() as transports, pytest.MonkeyPatch.context() as patch:
        for transport in transports:
            patch.setitem(CUTS, "psum", broken(whole, phase) if transport.rank in on else whole)
            transport.begin("psum", torch.ones(SMALL_BYTES), (), 0, False, ())
        for _ in range(20):
            for transport in transports:
                transport.progress()
        for transport in transports:
            assert transport.failures() == dict.fromkeys(on, "ArithmeticError: no such sum")
            assert (transport.error is not None) == (transport.rank in on)
            assert not (transport.rank in on and transport.busy)


SUM = "[2.0, 2.0, 2.0]"


def told(call: Callable[[torch.Tensor], torch.Tensor], n: int = 3) -> str:
    try:
        return str(call(torch.ones(n))[:3].tolist())
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def fail_in(phase: str, on: Sequence[int]) -> list[str]:
    """What three collectives say when one on the channel of the user fails: itself, and two that follow."""
    with pytest.MonkeyPatch.context() as patch:  # of this module: what a function within another names is a copy there
        if int(ltx.axis_index()) in on:
            patch.setitem(CUTS, "psum", broken(CUTS["psum"], phase))
        return [told(ltx.psum, SMALL_BYTES) for _ in range(3)]


@pytest.mark.full(but=2)
@pytest.mark.parametrize(("phase", "on"), [("given", (0,)), ("reduce", (1,)), ("reduce", (0, 1)), ("take", (0,))])
def test_all_ranks_hear_of_it(on_new_axis: OnNewAxis, phase: str, on: Sequence[int]) -> None:
    for rank, said in enumerate(on_new_axis(lambda: fail_in(phase, on))):
        # Who has emptied its piece before a peer fails has its sum.
        wrong = [text for text in said if text != SUM]
        assert len(wrong) >= 2, said
        assert said[1:] == wrong[-2:]
        assert wrong[0].startswith(f"TransportError: rank {rank}: psum on axis 'data' failed halfway")
        assert any(f"on rank {other}: ArithmeticError: no such sum" in wrong[0] for other in on)
        assert "ltx.shutdown() and start again" in wrong[0]
        assert "has been out of step since an earlier failure" in wrong[-1]


@pytest.mark.parametrize("phase", ["_fill", "_reduce", "_empty"])
@pytest.mark.parametrize("on", [(0,), (0, 1)], ids=["one", "both"])
@on_ranks(2)
def test_sums_after_an_interrupt(phase: str, on: Sequence[int]) -> None:
    """On workers that others use too: nothing is left behind."""
    rank, original, came = int(ltx.axis_index()), getattr(SharedMemoryTransport, phase), list[int]()

    def once(transport: SharedMemoryTransport) -> bool:
        done = original(transport)
        if done and rank in on and not came:
            came.append(1)
            raise KeyboardInterrupt
        return bool(done)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedMemoryTransport, phase, once)
        try:
            ltx.psum(torch.ones(3))
        except KeyboardInterrupt:
            assert rank in on
    assert [float(ltx.psum(torch.tensor(float(step)))) for step in range(4)] == [0.0, 2.0, 4.0, 6.0]


@pytest.mark.parametrize("on", [(0,), (0, 1)], ids=["one", "both"])
def test_no_memory_is_told_at_once(on_new_axis: OnNewAxis, on: Sequence[int]) -> None:
    def none(*_: Any) -> Any:
        raise MemoryError("none left")

    def run() -> list[str]:
        with pytest.MonkeyPatch.context() as patch:
            if int(ltx.axis_index()) in on:
                patch.setattr(Operation, "new_result", none)
            return [told(ltx.all_gather), told(ltx.psum)]

    for rank, said in enumerate(on_new_axis(run)):
        assert said[0].startswith("MemoryError" if rank in on else f"TransportError: rank {rank}: all_gather on axis")
        # who has no memory ends the world, and who hears of it by the transport has lost that
        assert said[1].startswith(
            "DeadlockDetectedError: " if rank in on else ("DeadlockDetectedError", "TransportError")
        )
        assert "MemoryError: none left" in said[1]


def test_what_an_interrupt_left_out_is_refused_at_the_next_collective(on_new_axis: OnNewAxis) -> None:
    """Of two equal sums, one is missing on a rank, whose part wasn't on its way yet: they aren't paired."""

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    def run() -> list[str]:
        ltx.psum(torch.ones(3))
        with pytest.MonkeyPatch.context() as patch:
            if int(ltx.axis_index()) == 0:
                patch.setattr("ltx.shared_memory.transport.Job", interrupt)
            first = told(ltx.psum)
        return [text.partition(":")[0] for text in (first, told(ltx.psum), told(ltx.psum))]

    interrupted, other = on_new_axis(run)
    assert interrupted == ["KeyboardInterrupt", "RankMismatchError", "RankMismatchError"]
    assert other == ["RankMismatchError"] * 3
