"""debug_checks: one test for each kind of fault, that nothing is left behind, and what is found without it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ltx
from ltx.core import comm
from ltx.core.ranks.axis import axes_in_scope
from ltx.errors import LtxError, RankMismatchError
from tests.kinds import OnNewAxis
from tests.train_on import go_on, on_ranks, raised_by, said


def step(w: torch.Tensor) -> torch.Tensor:
    return (w**2).sum()


def checked(call: Callable[..., Any], *args: Any) -> Any:
    with ltx.debug_checks():
        return call(*args)


#: name: (what rank r calls, what the error says). Both ranks have called each of the two before, or the first alone.
FAULTS: dict[str, tuple[Callable[[int], Any], tuple[str, ...]]] = {
    "order of equal shapes": (
        lambda r: [ltx.psum({name: torch.ones(2)}) for name in "ab"[:: 1 - 2 * r]],
        ("on psum, leaf 'a'", "rank 0: psum(a: float32[2]) at ", "rank 1: psum(b: float32[2]) at "),
    ),
    "sizes that a backend dies of": (
        lambda r: ltx.psum(torch.ones(2 + r)),
        ("on psum, the value itself", "rank 0: float32[2]; rank 1: float32[3]"),
    ),
    "src of an object": (
        lambda r: ltx.broadcast_object(1, src=r),
        ("on broadcast_object, its arguments", "rank 0: src=0; rank 1: src=1"),
    ),
    "dim": (
        lambda r: ltx.all_gather(torch.ones(2, 2), dim=r),
        ("on all_gather, its arguments", "rank 0: arguments [(0, 0)]; rank 1: arguments [(1, 0)]"),
    ),
    "barriers": (lambda r: ltx.barrier(["a", "b"][r]), ("on the operation: rank 0: barrier 'a'; rank 1: barrier 'b'",)),
    "hooks": (
        lambda r: ltx.sync_gradients(torch.ones(2), ltx.DDPStrategy(comm_hook=["fp16", "bf16"][r])),
        ("on sync_gradients, its arguments", "rank 0: FP16()", "rank 1: BF16()"),
    ),
    "a step and a collective": (
        lambda r: [torch.func.grad(ltx.data_parallel(step)), ltx.psum][r](torch.ones(2)),
        ("on the operation: rank 0: data_parallel; rank 1: psum",),
    ),
    "a new call and a known one": (lambda r: ltx.psum(torch.ones(2 + r)), ("rank 0: float32[2]; rank 1: float32[3]",)),
    "one call more before another": (
        lambda r: [[ltx.psum(torch.ones(2)) for _ in range(2 + r)], ltx.barrier("end")],
        ("on the operation: rank 0: barrier 'end'; rank 1: psum",),
    ),
    "one call more at the end": (
        lambda r: [ltx.psum(torch.ones(2)) for _ in range(2 + r)],
        ("on the operation: rank 0: the end of debug_checks(); rank 1: psum",),
    ),
    "derivatives": (
        lambda r: [[torch.func.grad, lambda f: f][r](lambda x: ltx.psum(x).sum())(torch.ones(2)), ltx.barrier("end")],
        ("on the operation: rank 0: psum; rank 1: barrier 'end'",),
    ),
}


@pytest.mark.full(but=1)
@pytest.mark.parametrize("name", FAULTS)
def test_known_calls_that_differ(on_new_axis: OnNewAxis, name: str) -> None:
    call, expected = FAULTS[name]

    def run() -> tuple[str, float]:
        for r in range(1 if name == "a new call and a known one" else 2):
            call(r)
        text = said(RankMismatchError, checked, call, int(ltx.axis_index()))
        after = ltx.psum(torch.ones(()), axis="data").item()
        with ltx.debug_checks():  # the ranks find together again
            after += ltx.psum(torch.ones(())).item()
        return text, after

    text, after = on_new_axis(run).replicated()
    assert text.startswith("axis 'data': ranks disagree on ")
    assert [part for part in expected if part not in text] == []
    assert len(re.findall(r"test_debug\.py:\d+", text)) == 2 if "at the end" not in name else "test_debug.py" in text
    assert after == 4.0, "nothing of the call has moved: the axis works as before"


def test_a_steady_step_is_compared_too(on_new_axis: OnNewAxis) -> None:
    """Its buckets are those of the step before, which asks nothing anew."""

    def run() -> str:
        train = ltx.train_step(ltx.data_parallel(step), ltx.optim.from_torch(torch.optim.SGD, lr=0.1))
        state = train.init(torch.ones(2))
        ltx.psum(torch.ones(2))
        state = go_on(train, state, [()] * 3).state
        assert state.resolved is not None
        return said(RankMismatchError, checked, *((ltx.psum, torch.ones(2)) if ltx.axis_index() else (train, state)))

    assert "on the operation: rank 0: data_parallel; rank 1: psum" in on_new_axis(run).replicated()


def test_equal_calls_from_different_lines(on_new_axis: OnNewAxis) -> None:
    def run(same_lines: bool) -> tuple[list[float], str]:
        a, b = torch.ones(2), torch.full((2,), 2.0)
        sums = []
        try:
            with ltx.debug_checks(same_lines=same_lines):
                if int(ltx.axis_index()) == 0:
                    sums.append(ltx.psum(a)[0].item())
                    ltx.barrier()
                    sums.append(ltx.psum(b)[0].item())
                else:
                    sums.append(ltx.psum(b)[0].item())
                    ltx.barrier()
                    sums.append(ltx.psum(a)[0].item())
        except RankMismatchError as error:
            return sums, str(error)
        return sums, ""

    sums, text = on_new_axis(lambda: run(True)).replicated()
    assert sums == []
    assert re.search(
        r"ranks disagree on the line that calls psum: rank 0: test_debug.py:\d+; rank 1: test_debug.py:\d+\. Fix: call "
        r"the same collectives in the same order; if these calls belong together, "
        r"ltx.debug_checks\(same_lines=False\)\.",
        text,
    ), text
    assert on_new_axis(lambda: run(False)).replicated() == ([3.0, 3.0], "")


def test_what_ranks_may_call_from_different_lines(on_new_axis: OnNewAxis) -> None:
    def run() -> tuple[str, float]:
        with ltx.debug_checks():
            if int(ltx.axis_index()) == 0:
                ltx.barrier("first")
                got = ltx.broadcast_object("x"), ltx.broadcast(torch.ones(()))
            else:
                ltx.barrier("first")
                got = ltx.broadcast_object(""), ltx.broadcast(torch.zeros(()))
        return got[0], got[1].item()

    assert on_new_axis(run).replicated() == ("x", 1.0)


@pytest.mark.full
def test_a_peer_that_comes_to_nothing(on_new_axis: OnNewAxis) -> None:
    """Rank 1 calls one psum fewer and then nothing for as long as rank 0 waits."""

    def run() -> str:
        axis_comm, place = axes_in_scope()[-1].comm, f"checks/call/{2**32 + 2}"

        @ltx.debug_checks()
        def calls() -> None:
            ltx.psum({"w": torch.ones(2)})
            while int(ltx.axis_index()) == 1 and "nothing: " not in str(axis_comm.peers.peek(place, 0)):
                time.sleep(0.01)
            ltx.all_gather(torch.ones(2))

        return raised_by(calls)

    text, told = on_new_axis(run, timeout_s=4.0)
    assert text.startswith("CollectiveTimeoutError: ")
    assert told.startswith("RankMismatchError: ")
    assert "rank 0: all_gather on axis 'data': ranks [1] didn't come to compare it within 4 s." in text
    assert re.search(r"This is all_gather\(.*: float32\[2\], .*\) at \S+test_debug.py:\d+\.", text)
    assert re.search(r"Rank 1 was last at psum\(w: float32\[2\]\) at \S+test_debug.py:\d+\.", text)
    assert "rank 0: nothing: CollectiveTimeoutError: rank 0: all_gather" in told


def test_a_rank_that_leaves_by_an_exception(on_new_axis: OnNewAxis) -> None:
    def run() -> tuple[str, float]:
        @ltx.debug_checks()
        def calls() -> None:
            ltx.psum(torch.ones(2))
            if int(ltx.axis_index()) == 1:
                raise ZeroDivisionError("no data")
            ltx.psum(torch.ones(2))

        return raised_by(calls), checked(ltx.psum, torch.ones(())).item()

    (text, after), other = on_new_axis(run)
    assert other == ("ZeroDivisionError: no data", 2.0)
    assert text.startswith("RankMismatchError: ")
    assert after == 2.0
    assert "rank 1: nothing: it has left debug_checks() by ZeroDivisionError: no data at " in text


@pytest.mark.full(but=1)
@pytest.mark.parametrize("peer", ["new", "known", "step", "nothing"])
def test_entered_by_one_rank(on_new_axis: OnNewAxis, peer: str, tmp_path: Path) -> None:
    answered = tmp_path / "answered"

    def run() -> tuple[str, str]:
        stepped = torch.func.grad(ltx.data_parallel(step))
        stepped(torch.ones(2)), ltx.psum(torch.ones(2))
        error = None
        try:
            if int(ltx.axis_index()) == 0:
                with ltx.debug_checks():
                    pass
            elif peer == "step":
                stepped(torch.ones(2))
            elif peer != "nothing":
                ltx.psum(torch.ones(2 if peer == "known" else 3))
            else:  # it stays in the call, or the pool tells rank 0 that it has left
                while not answered.exists():
                    time.sleep(0.01)
        except LtxError as raised:
            error = raised
            answered.touch()
        assert not comm.peers.under_way
        if peer == "new":  # nothing has moved: the ranks find together again
            with ltx.debug_checks():
                assert ltx.psum(torch.ones(())).item() == 2.0
        return type(error).__name__, str(error)

    (kind, text), (other, same) = on_new_axis(run, timeout_s=6.0 if peer == "nothing" else 60.0)
    if peer == "nothing":
        assert (kind, other) == ("CollectiveTimeoutError", "NoneType")
        assert "debug_checks on axis 'data': ranks [1] didn't come to compare it" in text
        assert "Rank 1 hasn't entered." in text
        return
    assert (kind, other, text) == ("RankMismatchError", "RankMismatchError", same)
    calls = {"new": "psum", "known": "psum (outside ltx.debug_checks())"}
    called = calls.get(peer, "data_parallel (outside ltx.debug_checks())")
    assert f"ranks disagree on the operation: rank 0: debug_checks; rank 1: {called}. Fix" in text


def test_a_backward_pass_on_one_rank(on_new_axis: OnNewAxis) -> None:
    def run() -> str:
        stepped = ltx.data_parallel(step)
        torch.func.grad(stepped)(torch.ones(2)), ltx.psum(torch.ones(2))
        w = torch.ones(2, requires_grad=True)

        @ltx.debug_checks()
        def calls() -> None:
            loss = stepped(w)
            if int(ltx.axis_index()) == 0:
                loss.backward()
            ltx.psum(torch.ones(2))

        return said(RankMismatchError, calls)

    text = on_new_axis(run).replicated()
    assert "on the operation: rank 0: data_parallel (under way, unlike its peer); rank 1: psum." in text


def everything(x: torch.Tensor) -> list[torch.Tensor]:
    """Calls of all kinds that agree."""
    stepped = ltx.data_parallel(lambda w, x: (w["a"] * ltx.psum(x)).sum() + w["b"])
    w = {"a": torch.ones(3), "b": torch.ones(())}
    train = ltx.train_step(stepped, ltx.optim.from_torch(torch.optim.SGD, lr=0.1))
    state, metrics = train(train.init(w), x)
    got = [
        *ltx.psum([x, x.new_empty(0), x.double()]),
        ltx.pvary(x),
        torch.func.grad(lambda x: (ltx.psum(x) ** 2).sum())(x),
        torch.func.jvp(ltx.psum, (x,), (x,))[1],
        torch.func.vmap(lambda y: ltx.psum({"y": y, "z": y})["z"])(x),
        torch.func.hessian(lambda x: (ltx.all_gather(x) ** 3).sum())(x),
        ltx.broadcast(x, src=1),
        *torch.func.grad(stepped)(w, x).values(),
        *state.params.values(),
        metrics.loss,
    ]
    ltx.barrier("end")
    return [t.detach() for t in got]


@pytest.mark.full
def test_calls_that_agree_are_let_through(on_new_axis: OnNewAxis, seed: int) -> None:
    x = torch.randn(2, 3)

    def run() -> list[tuple[list[torch.Tensor], int]]:
        mine = x[int(ltx.axis_index())]
        axis_comm = axes_in_scope()[-1].comm
        first = everything(mine), axis_comm.user.digest
        with ltx.debug_checks():
            checked = everything(mine), axis_comm.user.digest
            again = ltx.debug_checks()(everything)(mine), axis_comm.user.digest  # nested, as a decorator
        assert not comm.peers.under_way
        return [first, checked, again, (everything(mine), axis_comm.user.digest)]

    by_rank = list(on_new_axis(run))
    for results in by_rank:
        for values, _ in results[1:]:
            torch.testing.assert_close(values, results[0][0], rtol=0, atol=0)
    first, second = ([digest for _, digest in results] for results in by_rank)
    assert first == second


def test_new_under_the_checks_is_known_after_them(on_new_axis: OnNewAxis) -> None:
    """The order of buckets too, which is rank 0's."""

    def run() -> tuple[int, list[float]]:
        names = "xyz"[:: 1 - 2 * int(ltx.axis_index())]
        grads = {name: torch.full((2,), float("xyz".index(name))) * (1 + ltx.axis_index()) for name in names}
        strategy = ltx.DDPStrategy(bucket_bytes=8, first_bucket_bytes=8)
        got = []
        with ltx.debug_checks():
            got += [ltx.sync_gradients(grads, strategy)[0] for _ in range(2)]
        got.append(ltx.sync_gradients(grads, strategy)[0])
        return axes_in_scope()[-1].comm.bucket_channel(0).compared, [g[n][0].item() for g in got for n in "xyz"]

    assert on_new_axis(run).replicated() == (0, [0.0, 1.5, 3.0] * 3)


def test_a_world_of_one_and_simulated_ranks() -> None:
    with ltx.debug_checks():
        assert ltx.psum(torch.ones(())).item() == 1.0
        assert ltx.vmap(ltx.psum)(torch.ones(3)).tolist() == [3.0] * 3
    with pytest.raises(ZeroDivisionError), ltx.debug_checks():
        raise ZeroDivisionError
    assert not comm.peers.under_way


@on_ranks(3)
def test_three_ranks_of_which_one_differs() -> None:
    ltx.psum(torch.ones(2)), ltx.barrier("odd")
    call = (ltx.barrier, "odd") if int(ltx.axis_index()) == 1 else (ltx.psum, torch.ones(2))
    text = said(RankMismatchError, checked, *call)
    assert "on the operation: ranks 0, 2: psum; rank 1: barrier 'odd'. Fix" in text


def test_one_comparison_a_call_and_a_store_that_stays_small(on_new_axis: OnNewAxis) -> None:
    def run() -> list[bool]:
        axis_comm = axes_in_scope()[-1].comm
        with ltx.debug_checks():
            for _ in range(5):
                ltx.psum([torch.ones(2), torch.ones(3), torch.ones(2)])
            # The entry is call 0; of the last call the peers may still read.
            calls = [f"checks/call/{2**32 + call}" for call in range(6)]
            return [axis_comm.peers.peek(call, axis_comm.rank) is not None for call in calls]

    assert on_new_axis(run).replicated() == [False] * 5 + [True]


@pytest.mark.full
@pytest.mark.slow_compile
def test_compiled_calls_are_not_compared(on_new_axis: OnNewAxis) -> None:
    def run() -> tuple[list[float], int]:
        compiled = torch.compile(torch.func.grad(ltx.data_parallel(step)), fullgraph=True, backend="aot_eager")
        with ltx.debug_checks():
            return compiled(torch.ones(2) * (1 + ltx.axis_index())).tolist(), axes_in_scope()[-1].comm.peers.next_check

    assert on_new_axis(run).replicated() == ([3.0, 3.0], 2**32 + 1)
