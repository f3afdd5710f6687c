"""A backward pass that was left halfway, seen from ltx.core.comm."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import ltx
from ltx.core import comm
from ltx.core.comm import axis_comm
from ltx.errors import (
    CollectiveTimeoutError,
    DeadlockDetectedError,
    LtxError,
    PeerLostError,
    RankMismatchError,
    ReplicaDivergedError,
)
from tests.forks import Ranks
from tests.kinds import OnNewAxis


def _axis_comm() -> comm.AxisComm:
    found: comm.AxisComm = comm.resolve("data").comm
    return found


def _scaled(w: torch.Tensor) -> torch.Tensor:
    return w * (1.0 + ltx.axis_index())


def _gradient() -> float:
    # Of one step: the first call of each compares parameters.
    return float(torch.func.grad(ltx.data_parallel(_scaled))(torch.tensor(1.0)))


def test_some_had_completed_it(on_new_axis: OnNewAxis) -> None:
    """Told once, on every rank; then the axis works."""

    def run() -> tuple[str, float]:
        _gradient()
        if _axis_comm().rank == 1:
            _axis_comm().recovery.complete()
        _axis_comm().recovery.leave("an interrupt")
        with pytest.raises(ReplicaDivergedError) as caught:
            _gradient()
        return str(caught.value), _gradient()

    for message, gradient in on_new_axis(run):
        assert "passes completed: rank 0: 1, rank 1: 2" in message
        assert gradient == 1.5


@pytest.mark.full
def test_a_peer_that_does_not_leave_it(on_new_axis: OnNewAxis) -> None:
    def run() -> str:
        _gradient()
        if _axis_comm().rank == 1:
            return ""
        _axis_comm().recovery.leave("an interrupt")
        with pytest.raises(CollectiveTimeoutError) as caught:
            _gradient()
        return str(caught.value)

    assert "ranks [1] didn't come to begin the next one within 6 s" in on_new_axis(run, timeout_s=6.0).rank(0)


@pytest.mark.full(but=1)
@pytest.mark.parametrize("how", ["killed", "raised"])
def test_a_peer_that_is_gone_before_it_leaves_it(how: str, started: Callable[..., Ranks]) -> None:
    """It is named at once, not at the timeout."""

    def body(tell: Callable[[str], None]) -> None:
        _gradient()
        if _axis_comm().rank == 1:
            if how == "raised":
                raise ValueError("no data")
            os.kill(os.getpid(), signal.SIGKILL)
        _axis_comm().recovery.leave("an interrupt")
        with pytest.raises(LtxError) as caught:
            _gradient()
        tell(f"{type(caught.value).__name__}: {caught.value}")

    text = started(2, body).told(0)
    if how == "raised":
        assert text.startswith("DeadlockDetectedError: rank 0: rank 1 has left axis 'data' because of an exception (V")
    else:
        assert (
            "PeerLostError: rank 0: recovery on axis 'data' from a backward pass that was left halfway failed" in text
        )
        assert "the process of rank 1 is gone" in text


ELSEWHERE: dict[str, tuple[bool, Callable[[], object], str]] = {
    "which it has left too, a new call": (True, lambda: ltx.psum(torch.ones(3)), "psum on axis 'data'"),
    "which it has not left, a new call": (False, lambda: ltx.psum(torch.ones(4)), "psum on axis 'data'"),
    "which it has not left, an axis": (False, lambda: ltx.axis_from_group([0, 1]), "opening axis 'ranks"),
}


@pytest.mark.full(but=2)
@pytest.mark.parametrize("row", ELSEWHERE)
def test_a_peer_that_calls_something_else_than_the_next_pass(row: str, on_new_axis: OnNewAxis) -> None:
    """Neither waits for the other until the timeout, as where a state of overlap="update" has become invalid."""

    def run() -> str:
        has_left, call, _ = ELSEWHERE[row]
        _gradient()
        if _axis_comm().rank or has_left:
            _axis_comm().recovery.leave("an interrupt")
        with pytest.raises(RankMismatchError) as caught:
            _gradient() if _axis_comm().rank else call()
        return str(caught.value)

    for text in on_new_axis(run):
        assert f"wait for each other: rank 0: {ELSEWHERE[row][2]}" in text
        assert "rank 1: recovery on axis" in text


def test_groups_that_cant_be_made_anew_are_made_at_the_next_call(on_new_axis: OnNewAxis) -> None:
    def run() -> float:
        _gradient()
        _axis_comm().recovery.leave("an interrupt")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(axis_comm, "open_group", cant)
            with pytest.raises(PeerLostError, match="no connection"):
                _gradient()
        return _gradient()

    def cant(*_: object, **__: object) -> None:
        raise PeerLostError("no connection")

    assert list(on_new_axis(run)) == [1.5, 1.5]


@pytest.mark.full
def test_left_again_and_again(on_new_axis: OnNewAxis) -> None:
    """The axis works each time, and keeps no more than the last pass' process groups, each of which has threads."""

    def groups() -> int:
        return len(dist.distributed_c10d._world.pg_map)

    def run() -> tuple[list[float], list[int]]:
        found, counts = [], []
        for _ in range(5):
            _axis_comm().recovery.leave("an interrupt")
            found.append(_gradient())
            counts.append(groups())
        return found, counts

    for found, counts in on_new_axis(run):
        assert found == [1.5] * 5
        assert len(set(counts[1:])) == 1


def _of_two_buckets(fails: bool) -> float:
    """The gradient of a step of two buckets; if `fails`, the backward pass raises between them."""

    def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
        hidden = (1.0 + ltx.axis_index()) * params["first"]
        if fails:
            hidden.register_hook(lambda _: 1 // 0)
        return (hidden + params["last"]).sum()

    strategy = ltx.DDPStrategy(bucket_bytes=8, first_bucket_bytes=8)
    step = ltx.data_parallel(loss, strategy)
    params = {name: torch.ones(2, requires_grad=True) for name in ("first", "last")}
    step(params).backward()
    return float(params["first"].grad[0])  # type: ignore[index]


def test_a_new_plan_after_ranks_have_issued_unequal_numbers(on_new_axis: OnNewAxis) -> None:
    def run() -> tuple[str, float]:
        _of_two_buckets(fails=False)
        with pytest.raises((ZeroDivisionError, DeadlockDetectedError)) as caught:
            _of_two_buckets(fails=_axis_comm().rank == 1)
        return type(caught.value).__name__, _gradient()

    results = on_new_axis(run)
    assert [name for name, _ in results] == ["DeadlockDetectedError", "ZeroDivisionError"]
    assert [gradient for _, gradient in results] == [1.5, 1.5]


def test_a_new_plan_on_a_rank_that_does_not_know_that_its_peer_has_left(on_new_axis: OnNewAxis) -> None:
    def run() -> tuple[str, float]:
        _of_two_buckets(fails=False)
        said = ""
        if _axis_comm().rank == 1:
            _axis_comm().recovery.leave("an interrupt")
        else:
            with pytest.raises(DeadlockDetectedError) as caught:
                _gradient()
            said = str(caught.value)
        return said, _gradient()

    (said, mine), (_, other) = on_new_axis(run)
    assert "rank 1 has left a backward pass on axis 'data' halfway (an interrupt)" in said
    assert (mine, other) == (1.5, 1.5)
