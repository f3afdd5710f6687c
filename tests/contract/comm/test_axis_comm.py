"""Ranks that disagree: the same error on all of them, before anything has moved, and what can be done after it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ltx
from ltx.errors import CollectiveTimeoutError, LtxError, RankMismatchError, TreeError, UnsupportedError
from tests import inside, train_on
from tests.forks import settles
from tests.inside import axes_in_scope
from tests.kinds import OnNewAxis
from tests.train_on import on_ranks

Call = Callable[[int], Any]

#: name: (what rank r does, what the error says)
MISMATCHES: dict[str, tuple[Call, tuple[str, ...]]] = {
    "shape": (lambda r: ltx.psum(torch.ones(2 + r)), ("on psum", "rank 0: float32[2]", "rank 1: float32[3]")),
    "dtype": (
        lambda r: ltx.psum(torch.ones(2, dtype=[torch.float32, torch.float64][r])),
        ("on psum", "rank 0: float32[2]", "rank 1: float64[2]"),
    ),
    "operation": (
        lambda r: [ltx.psum, ltx.all_gather][r](torch.ones(2)),
        ("on the operation", "rank 0: psum", "rank 1: all_gather"),
    ),
    "arguments": (
        lambda r: ltx.broadcast(torch.ones(2), src=r),
        ("on broadcast, its arguments", "rank 0: ", "rank 1: "),
    ),
    "leaf": (
        lambda r: ltx.psum({"w": torch.ones(2), "b": torch.ones(1 + r)}),
        ("on psum, leaf 'b'", "rank 0: float32[1]", "rank 1: float32[2]"),
    ),
    "names of leaves": (lambda r: ltx.psum({"ab"[r]: torch.ones(2)}), ("on psum, leaf 'a'", "rank 1: no such leaf")),
    "number of leaves": (lambda r: ltx.psum([torch.ones(2)] * (2 + r)), ("on psum, leaf '2'", "rank 0: no such leaf")),
    "object": (lambda r: ltx.broadcast_object(1, src=r), ("on broadcast_object", "rank 0: src=0", "rank 1: src=1")),
    "barrier": (lambda r: ltx.barrier(["load", "save"][r]), ("rank 0: barrier 'load'; rank 1: barrier 'save'",)),
}


@pytest.mark.full(but=2)
@pytest.mark.parametrize("name", MISMATCHES)
@pytest.mark.parametrize("known", [None, 0, 1], ids=["", "rank 0's is known", "rank 1's is known"])
def test_signatures_that_differ(on_new_axis: OnNewAxis, name: str, known: int | None) -> None:
    """New ones; or one rank waits in a call that both know, and answers when the other compares its own."""
    call, expected = MISMATCHES[name]

    def run() -> str:
        if known is not None:
            call(known)
        text = train_on.said(RankMismatchError, call, int(ltx.axis_index()))
        if known is None:
            assert ltx.psum(torch.ones(()), axis="data").item() == 2.0, "nothing has moved: the axis works as before"
        return text

    text = on_new_axis(run).replicated()
    assert text.startswith("axis 'data': ranks disagree on ")
    assert [part for part in expected if part not in text] == []


@pytest.mark.parametrize("call", [ltx.psum, ltx.broadcast, lambda x: ltx.all_gather(x, tiled=True, splits="infer")])
def test_a_list_on_one_rank_and_a_tuple_on_the_other(on_new_axis: OnNewAxis, call: Callable[..., Any]) -> None:
    """One call, also where one of them is known: the ranks stay in step."""

    def run() -> list[float]:
        rank = int(ltx.axis_index())
        call([torch.ones(2)])
        (first,) = call((torch.ones(2),) if rank else [torch.ones(2)])
        return [first.sum().item(), *(ltx.psum(torch.ones(n)).sum().item() for n in (3, 2, 3))]

    assert on_new_axis(run).replicated()[1:] == [6.0, 4.0, 6.0]


UNLIKE: dict[str, Callable[[int], object]] = {
    "a dtype without sums": lambda r: ltx.psum(torch.ones(2, dtype=torch.uint16 if r else torch.float32)),
    "no tensor": lambda r: ltx.pmax("a" if r else torch.ones(2)),
    "an argument": lambda r: ltx.all_gather(torch.ones(2), dim="a" if r else 0),  # type: ignore[arg-type]
    "a dimension": lambda r: ltx.all_gather(torch.ones(2), dim=5 * r),
    "another shape": lambda r: ltx.psum(torch.ones(2 + r)),
    "a source": lambda r: ltx.broadcast(torch.ones(2), src="first" if r else 0),  # type: ignore[arg-type]
    "pairs": lambda r: ltx.ppermute(torch.ones(2), "ab" if r else [(0, 1)]),  # type: ignore[arg-type]
    "a barrier's name": lambda r: ltx.barrier(3 if r else "three"),  # type: ignore[arg-type]
    "an object's source": lambda r: ltx.broadcast_object(1, src=7 if r else 0),
    "a meta tensor": lambda r: ltx.psum(torch.ones(2, device="meta" if r else "cpu")),
    "a sparse tensor": lambda r: ltx.all_gather(torch.eye(2).to_sparse() if r else torch.eye(2)),
    "of reduce": lambda r: ltx.reduce(torch.ones(2), "no such" if r else "sum"),
}


@pytest.mark.full(but=2)
@pytest.mark.parametrize(
    ("name", "known"),  # what both compare leaves them in step: see test_signatures_that_differ
    [(name, known) for name in UNLIKE for known in (False, True) if known or name != "another shape"],
)
def test_after_what_one_rank_alone_has_issued(on_new_axis: OnNewAxis, name: str, known: bool) -> None:
    """Whoever catches the errors and goes on gets no other call's sums."""

    def run() -> list[str]:
        if known:
            UNLIKE[name](0)
            ltx.psum(torch.ones(3))
        with pytest.raises(LtxError):
            UNLIKE[name](int(ltx.axis_index()))
        return [train_on.said(RankMismatchError, ltx.psum, torch.full((n,), float(n))) for n in (3, 4, 3, 2)]

    for texts in on_new_axis(run):
        assert [text for text in texts[1:] if "has been out of step since an earlier failure" not in text] == []


def test_what_all_ranks_refuse_leaves_them_in_step(on_new_axis: OnNewAxis) -> None:
    def run() -> float:
        bad = ["a", torch.ones(2, dtype=torch.uint16)][int(ltx.axis_index())]
        with pytest.raises((TreeError, UnsupportedError)):
            ltx.psum(bad)
        return ltx.psum(torch.ones(2)).sum().item()

    assert on_new_axis(run).replicated() == 4.0


def test_the_same_new_call_after_a_broadcast_that_one_rank_skipped(on_new_axis: OnNewAxis) -> None:
    """The source needn't wait for the others, and goes on to what they are at: it would pair with its broadcast."""

    def run() -> str:
        ltx.broadcast(torch.ones(2))
        with pytest.raises(RankMismatchError) as caught:
            [ltx.broadcast(torch.ones(2)) for _ in range(1 - int(ltx.axis_index()))], ltx.psum(torch.ones(3))
        return str(caught.value)

    text = on_new_axis(run).replicated()
    assert "ranks disagree on the operation: rank 0: " in text
    assert "rank 1: psum" in text


def test_the_same_new_call_after_other_comparisons(on_new_axis: OnNewAxis) -> None:
    """As when one rank was interrupted while it compared something: the two calls don't meet, and both say so."""

    def run() -> str:
        axes_in_scope()[-1].comm.user.compared += int(ltx.axis_index())
        return train_on.said(RankMismatchError, ltx.psum, torch.ones(3))

    for text in on_new_axis(run):
        assert "ranks disagree on the operation: rank " in text
        assert "psum (after other calls)" in text


@pytest.mark.full
def test_a_step_on_one_rank_and_a_new_collective_on_the_other(on_new_axis: OnNewAxis) -> None:
    """They use different channels, but each one's wait sees where the other stands or gives up in time."""
    step = ltx.data_parallel(lambda w: (w**2).sum())

    def run() -> str:
        torch.func.grad(step)(torch.ones(2))
        call = torch.func.grad(step) if int(ltx.axis_index()) == 0 else ltx.psum
        with pytest.raises((RankMismatchError, CollectiveTimeoutError)) as caught:
            call(torch.ones(2))
        return type(caught.value).__name__

    on_new_axis(run, timeout_s=8.0)


def test_what_is_pending_never_counts_as_completed(on_new_axis: OnNewAxis) -> None:
    """A second wait for a collective that failed fails too: its buffer holds this rank's share alone."""

    def run() -> list[str]:
        axis_comm = inside.resolve(None).comm
        if axis_comm.rank == 1:
            return []
        work = axis_comm.background.issue("psum", torch.ones(2), "a sum of one")
        return [train_on.said(CollectiveTimeoutError, work.wait) for _ in range(2)]

    said = on_new_axis(run, timeout_s=1.0).rank(0)
    assert len(said) == 2
    assert all("a sum of one (issue 1) on axis 'data'" in text for text in said)


@pytest.mark.parametrize("usual", [None, 0, 1], ids=["new", "rank 0's is usual", "rank 1's is usual"])
@pytest.mark.parametrize("second", [(3, 2), (5,), (200_000,)], ids=str)
def test_known_collectives_in_another_order_are_refused_over_sockets(
    on_new_axis: OnNewAxis, second: Any, usual: int | None
) -> None:
    """Before anything is sent, by name: a backend would mix equal sizes, and end the process where they differ."""

    def run() -> str:
        calls = [lambda: ltx.psum(torch.ones(2, 3)), lambda: ltx.psum(torch.ones(second))]
        for call in calls * (1 if usual is None else 5):
            call()
        return train_on.said(RankMismatchError, calls[int(ltx.axis_index()) != (usual or 0)])

    first, said = f"float32{[2, 3]}", f"float32{[*second]}"
    for text in on_new_axis(run, sockets=True):
        order = (said, first) if usual == 1 else (first, said)
        assert f"ranks disagree on psum, the value itself: rank 0: {order[0]}; rank 1: {order[1]}." in text


def test_what_comes_as_before_is_not_compared_again_over_sockets(on_new_axis: OnNewAxis) -> None:
    """Of epochs that train and evaluate, the third and later ones compare a call at each turn, and no other."""

    def run() -> list[int]:
        train = ltx.train_step(ltx.data_parallel(lambda w: (w**2).sum()), ltx.optim.from_torch(torch.optim.SGD, lr=0.1))
        state, counts, channels = train.init(torch.ones(3)), [], inside.resolve(None).comm.channels
        for _ in range(5):
            before = sum(channel.compared for channel in channels)
            for _ in range(20):
                state, metrics = train(state)
                ltx.pmean(metrics.loss)
            for _ in range(7):
                ltx.psum({"right": torch.ones(()), "of": torch.ones(2)})
            counts.append(sum(channel.compared for channel in channels) - before)
        return counts

    for counts in on_new_axis(run, sockets=True):
        assert all(count <= 3 for count in counts[2:]), counts


@pytest.mark.parametrize("sizes", [(3, 5), (5, 200_000)], ids=str)
@pytest.mark.parametrize("differentiate", ["train_step", "ltx.grad", "torch.func.grad", "backward"])
def test_steps_of_two_models_in_another_order_are_refused_over_sockets(
    on_new_axis: OnNewAxis, differentiate: str, sizes: tuple[int, int]
) -> None:
    """As of a generator and a critic: the order is known, and one rank leaves a step out."""
    step = ltx.data_parallel(lambda w: (w**2).sum())

    def run() -> tuple[str, list[float]]:
        train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=0.1))
        values: list[Any] = [torch.ones(size) for size in sizes]
        states = [train.init(value) for value in values] if differentiate == "train_step" else values

        def one(which: int) -> None:
            if differentiate == "train_step":
                states[which], _ = train(states[which])
            elif differentiate == "backward":
                step(values[which].requires_grad_()).backward()
            else:
                (ltx.grad if differentiate == "ltx.grad" else torch.func.grad)(step)(values[which].detach())

        for which in (0, 1) * 4:
            one(which)
        text = train_on.said(RankMismatchError, lambda: one(int(ltx.axis_index())))
        return text, [x.params[0].item() for x in states] if differentiate == "train_step" else []

    (text, values), (other, others) = on_new_axis(run, sockets=True)
    assert values == others
    for said in (text, other):
        assert f"rank 0: float32[{sizes[0]}]; rank 1: float32[{sizes[1]}]" in said


def test_known_collectives_in_swapped_order_are_caught_at_the_fence(on_new_axis: OnNewAxis) -> None:
    """Two sums of equal sizes pair and mix, where nobody compares them; the next step's header tells."""

    def run() -> tuple[str, float, list[float]]:
        inside.resolve(None).comm.user.habit = None
        step = ltx.data_parallel(lambda w: (w**2).sum())
        first, second = torch.ones(2, 3), torch.full((3, 2), 2.0)
        ltx.psum(first), ltx.psum(second)
        grads = torch.func.grad(step)(torch.ones(2))
        mixed = [ltx.psum(x).sum().item() for x in [first, second][:: 1 - 2 * int(ltx.axis_index())]]
        return train_on.said(RankMismatchError, lambda: torch.func.grad(step)(torch.ones(2))), grads.sum().item(), mixed

    text, grads, mixed = on_new_axis(run, sockets=True).replicated()
    assert "ranks have issued different collectives, or the same ones in another order" in text
    assert "Wrap the program in ltx.debug_checks()" in text
    assert grads == 4.0
    assert mixed == [18.0, 18.0], "the sum of both, twice"


@pytest.mark.full(but=2)
@pytest.mark.parametrize(
    "shapes", [((2, 3), (3, 2)), ((2, 3), (400_000,)), ((2, 3), (40, 50)), ((0, 3), (3,))], ids=str
)
def test_known_collectives_in_swapped_order_are_refused_by_shared_memory(on_new_axis: OnNewAxis, shapes: Any) -> None:
    """At once, whatever their sizes, and with the values as they were."""

    def run() -> tuple[str, Tensor]:
        calls = [lambda: ltx.psum(torch.ones(shapes[0])), lambda: ltx.all_gather(torch.ones(shapes[1]))]
        for call in calls:
            call()
        x = torch.ones(shapes[int(ltx.axis_index())])
        here = calls[:: 1 - 2 * int(ltx.axis_index())]
        return train_on.said(RankMismatchError, lambda: [call() for call in here]), x

    for rank, (text, x) in enumerate(on_new_axis(run)):
        assert f"rank {rank}: " in text
        assert "a peer has issued another collective here" in text
        assert torch.equal(x, torch.ones(shapes[rank]))


def test_the_longer_of_two_collectives_is_refused_at_once(on_new_axis: OnNewAxis, tmp_path: Path) -> None:
    """It had waited for chunks that no peer fills, for as long as that peer did something else."""

    def run() -> bool:
        calls = [lambda: ltx.psum(torch.ones(5)), lambda: ltx.psum(torch.ones(400_000))]
        for call in calls:
            call()
        rank = int(ltx.axis_index())
        train_on.said(RankMismatchError, calls[rank])
        (tmp_path / f"{rank}").touch()
        began = time.monotonic()
        while not (told := (tmp_path / f"{1 - rank}").exists()) and time.monotonic() - began < 20:
            time.sleep(0.01)
        return told

    assert list(on_new_axis(run)) == [True, True]


@pytest.mark.full(but=2)
@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
@pytest.mark.parametrize("operation", ["psum", "data_parallel", "barrier 'end'"])
def test_a_peer_that_does_not_come(on_new_axis: OnNewAxis, operation: str, known: bool, tmp_path: Path) -> None:
    done = tmp_path / "done"  # until then the peer is busy with something else

    def run() -> tuple[str, float]:
        step = ltx.data_parallel(lambda w: (w**2).sum())
        calls: dict[str, Callable[[], Any]] = {
            "psum": lambda: ltx.psum(torch.ones(2)),
            "data_parallel": lambda: torch.func.grad(step)(torch.ones(2)),
            "barrier 'end'": lambda: ltx.barrier("end"),
        }
        if known:
            calls[operation]()
        if int(ltx.axis_index()) == 1:
            settles(done.exists, bool)
            return "", 0.0
        began = time.monotonic()
        with pytest.raises(CollectiveTimeoutError) as caught:
            calls[operation]()
        done.touch()
        assert isinstance(caught.value, TimeoutError)
        return str(caught.value), time.monotonic() - began

    limit_s = 6.0 if known else 1.5  # the call before, in which both compile and open channels, has as long
    text, took_s = on_new_axis(run, timeout_s=limit_s).rank(0)
    assert text.startswith("rank 0: ")
    assert f"within {limit_s:g} s" in text
    assert "on axis 'data'" in text
    assert operation in text or (known and operation == "data_parallel" and ("bucket 0" in text or "summary" in text))
    assert ("ranks [1] didn't come to compare it" in text) != known
    assert limit_s - 0.1 < took_s


def test_a_signal_is_seen_while_a_rank_waits(on_new_axis: OnNewAxis) -> None:
    class StopError(Exception):
        pass

    def run() -> float:
        ltx.psum(torch.ones(2))
        if int(ltx.axis_index()) == 1:
            return 0.0

        def stop(*_: object) -> None:
            raise StopError

        before = signal.signal(signal.SIGALRM, stop)
        began = time.monotonic()
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(StopError):
                ltx.psum(torch.ones(2))
        finally:
            signal.signal(signal.SIGALRM, before)
        return time.monotonic() - began

    assert 0.2 <= on_new_axis(run).rank(0) < 30


def test_orders_of_arrival_that_differ_are_rank_0_s(on_new_axis: OnNewAxis) -> None:
    """Dicts built in different orders: the same leaves, paired by path, in the buckets that rank 0 planned."""

    def run() -> dict[str, Tensor]:
        names = ["x", "y", "z"][:: 1 - 2 * int(ltx.axis_index())]
        grads = {name: torch.full((2,), float("xyz".index(name))) * (1 + ltx.axis_index()) for name in names}
        return dict(sorted(ltx.sync_gradients(grads, ltx.DDPStrategy(bucket_bytes=8, first_bucket_bytes=8))[0].items()))

    got = on_new_axis(run).replicated()
    assert {name: x.tolist() for name, x in got.items()} == {"x": [0.0, 0.0], "y": [1.5, 1.5], "z": [3.0, 3.0]}


@on_ranks(3)
def test_ranks_that_differ_in_their_other_groups() -> None:
    """Ranks 0 and 1 hold a pair's channels besides, so the next line is not the same number of groups away."""
    pair, everyone = dist.new_group([0, 1]), dist.new_group([0, 1, 2])
    opened = [inside.open_axis("pair", pair, timedelta(seconds=60))] if dist.get_rank() < 2 else []
    opened.append(inside.open_axis("everyone", everyone, timedelta(seconds=60)))
    try:
        assert ltx.psum(torch.tensor(1.0 + dist.get_rank()), opened[-1]) == 6.0
    finally:
        for axis in opened:
            inside.close_axis(axis)


@on_ranks(2)
def test_an_axis_closes_whatever_is_found_on_the_way() -> None:
    """An error or an interrupt half-way leaves no process group, no part and no heartbeat behind."""
    groups = len(dist.distributed_c10d._world.pg_map)
    axis = inside.open_axis("interrupted", dist.new_group([0, 1]), timedelta(seconds=60))
    ltx.psum(torch.ones(1), axis, axis_index_groups=[[0], [1]])
    ltx.psum(torch.ones(1), axis, axis_index_groups=[[1, 0]])
    users = axis.comm.peers.watcher.users

    def interrupted(exchange: Any) -> None:
        raise KeyboardInterrupt

    axis.comm.background.history.append("a round")
    axis.comm.background.drain = interrupted
    with pytest.raises(KeyboardInterrupt):
        inside.close_axis(axis)
    inside.close_axis(axis)  # nothing is left to do
    ended = users - axis.comm.peers.watcher.users
    assert (ended, len(dist.distributed_c10d._world.pg_map) - groups, len(axis.comm.parts)) == (2, 0, 1)
