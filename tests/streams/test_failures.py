"""Peers that fail, die or stop while the host runs ahead of a device that waits for them."""

from __future__ import annotations

import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

import ltx
from ltx import Pool
from ltx.core.ranks.axis import axes_in_scope
from ltx.errors import CollectiveTimeoutError, LtxError, PeerLostError
from tests import train_on
from tests.forks import SILENT_S, Ranks, settles
from tests.streams.backend import HUNG_S, StreamGroup, StreamWork, log
from tests.streams.pool import StreamedPool, on_streams

#: Heartbeats take five seconds here, and what hangs is given up by the fake device after five.
SOON_S = 30.0
STEPS, FAILS = 8, 3
SMALL = ltx.DDPStrategy(bucket_bytes=64, first_bucket_bytes=64)
SGD = ltx.optim.from_torch(torch.optim.SGD, lr=0.1)


def squares(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return (x @ params["a"]).square().mean()


def training(
    fail: Callable[[], object], failing_rank: int = 1, steps: int = STEPS
) -> tuple[str, float, str, tuple[int, list[float]]]:
    """(error, seconds it took, what the state says, its step and a parameter if it is usable)."""
    rank = int(ltx.axis_index())

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ params["a"])
        if rank == failing_rank and step == FAILS:
            hidden.register_hook(lambda _: fail())
        return (hidden @ params["b"]).square().mean()

    train = ltx.train_step(ltx.data_parallel(loss, SMALL), SGD)
    torch.manual_seed(0)
    params = {"a": torch.randn(4, 4), "b": torch.randn(4, 4)}
    state, said, began = train.init(params), "", time.monotonic()
    for step in range(steps):  # noqa: B007 - the loss reads it
        try:
            began = time.monotonic()
            state, _ = train(state, torch.ones(2, 4) + rank)
        except (LtxError, ZeroDivisionError) as error:
            said = f"{type(error).__name__}: {error}"
            break
    took, held = time.monotonic() - began, train_on.raised_by(state.check_owned) or "usable"
    return said, took, held, (state.step, (state.params["a"] + 0).flatten().tolist() if held == "usable" else [])


def _raise() -> None:
    raise ZeroDivisionError("the model's own")


def test_a_rank_that_raises_in_its_backward_pass(started: Any, ranks: Callable[[int], Pool]) -> None:
    def run() -> Any:
        said, took, held, (at, kept) = training(_raise)
        ltx.init()
        undisturbed = [training(lambda: None, steps=steps)[-1] for steps in (FAILS, FAILS + 1)]
        assert held != "usable" or (at, kept) in undisturbed
        after = train_on.trained(squares, SGD, {"a": torch.ones(4, 4)}, [torch.ones(2, 4)] * 3, SMALL)
        return said, took, held, (after.params["a"] + 0).tolist(), float(after.losses[-1])

    (said, took, held, after, loss), (own, _, _, others, _) = StreamedPool(ranks(2), HUNG_S).run(run)
    assert own == "ZeroDivisionError: the model's own"
    assert said.startswith("DeadlockDetectedError: rank 0: rank 1 has left step 3 of the training on axis 'data'"), said
    assert took < SOON_S
    # Usable where the host hadn't run ahead when it heard.
    assert held == "usable" or "the device couldn't complete what it is made of" in held
    assert after == others
    assert loss > 0


def test_an_abort_by_another_thread_ends_what_waits_for_a_peer(ranks: Callable[[int], Pool]) -> None:
    def run() -> Any:
        axis_comm: Any = axes_in_scope()[0].comm
        assert ltx.psum(torch.ones(2)).tolist() == [2.0, 2.0]
        said, outstanding = "", [axis_comm.user.stream_group.outstanding]
        if axis_comm.rank == 0:
            never = ltx.psum(torch.ones(2))
            outstanding.append(axis_comm.user.stream_group.outstanding)
            for _ in range(2):
                threading.Timer(0.1, axis_comm.user.stream_group.abort).start()
            never.tolist()
            outstanding.append(axis_comm.user.stream_group.outstanding)
            said = train_on.said(PeerLostError, axis_comm.read, never, "a sum")
        return outstanding, said

    (outstanding, said), (others, _) = StreamedPool(ranks(2), hung_s=30).run(run)
    assert (outstanding, others) == ([False, True, False], [False])
    # Rank 1 may have ended by then.
    assert re.match(
        r"rank 0: (a sum on axis 'data' failed while waiting for its peers: .*\(its communicator was aborted\)$|"
        r"on axis 'data', rank 1 has ended its part of the world in good order)",
        said,
    )


def test_ltx_tells_before_the_backend_s_watchdog(ranks: Callable[[int], Pool]) -> None:
    def run() -> tuple[str, list[list[str]]]:
        axis_comm: Any = axes_in_scope()[0].comm
        assert ltx.psum(torch.ones(2)).tolist() == [2.0, 2.0]
        said, fired, store = "", list[list[str]](), c10d._get_default_store()
        group = axis_comm.user.stream_group.group
        if axis_comm.rank == 0:
            group._timeout_s -= axis_comm.user.timeout_s - 1.0  # both clocks are ahead by as much
            axis_comm.user.timeout_s = 1.0
            pending = axis_comm.user.issue("psum", torch.ones(2), "psum")
            said = train_on.said(CollectiveTimeoutError, lambda: axis_comm.user.wait_for_host(pending.read(), "psum"))
            fired.append(list(log().fired))
            group._timeout_s = 1.0  # as if it were ltx's own
            fired.append(settles(lambda: list(log().fired), bool))
            store.set(f"told/{axis_comm.peers.label}", "")
        else:
            store.wait([f"told/{axis_comm.peers.label}"])
        return said, fired

    (said, fired), _ = ranks(2).run(on_streams, run)
    assert fired == [[], ["allreduce"]]
    assert "didn't complete within 1 s: rank 1 is at issue 1 and never came to it." in said, said


@pytest.mark.parametrize("at", ["wait", "is_completed", "allreduce", "get_error"])
def test_errors_of_the_network_are_those_of_lost_peers(at: str, ranks: Callable[[int], Pool]) -> None:
    """And what completes because NCCL failed, which get_error tells, is garbage."""

    def run() -> str:
        def breaks(*_: Any) -> Any:
            raise dist.DistBackendError("NCCL error: remote process exited or there was a network error")

        channel: Any = axes_in_scope()[0].comm.user  # type: ignore[union-attr]
        ltx.psum(torch.ones(2))  # compared from now on: no rank leaves while another one compares it
        pending = channel.issue("psum", torch.ones(2), "psum").read()
        with pytest.MonkeyPatch.context() as patch:
            if at == "get_error":
                patch.setattr(StreamGroup, at, lambda _: SimpleNamespace(name="COMM_ERROR"), raising=False)
                patch.setattr(StreamWork, "is_completed", lambda _: True)
            else:
                patch.setattr(StreamGroup if at == "allreduce" else StreamWork, at, breaks)
            waits = at in ("is_completed", "get_error")
            call = (channel.wait_for_host, pending, "psum") if waits else (ltx.psum, torch.ones(2))
            return train_on.said(PeerLostError, *call)

    for rank, said in enumerate(StreamedPool(ranks(2)).run(run)):
        failed = "could not be issued" if at == "allreduce" else "failed while waiting for its peers"
        assert said.startswith(f"rank {rank}: psum on axis 'data' {failed}: ")
        broke = "NCCL error: remote process exited or there was a network error"
        assert said.endswith(f"({'its communicator was aborted' if at == 'get_error' else broke})")


@pytest.mark.parametrize("whose", ["ltx", "torch"])
def test_a_rank_that_leaves_doesn_t_wait_for_a_peer_that_is_gone(whose: str, started: Callable[..., Ranks]) -> None:
    def body(tell: Callable[[Any], None]) -> None:
        def add() -> None:
            if whose == "ltx":
                ltx.psum(torch.ones(2))
            else:
                dist.all_reduce(torch.ones(2), async_op=True).wait()

        for _ in range(2):  # what comes as it did before isn't compared again
            add()
            ltx.barrier()
        if ltx.world().rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        add()
        tell(time.time())
        raise ZeroDivisionError("the model's own")

    world = started(2, body, heartbeat_s=SILENT_S, streams=True)
    began_s = world.told(0)
    assert world.told(0) == "ZeroDivisionError: the model's own"
    world.processes[0].join(SOON_S)
    assert world.processes[0].exitcode == 0
    assert time.time() - began_s < SOON_S


@pytest.mark.full(but=1)
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_stops(by: signal.Signals, started: Callable[..., Ranks]) -> None:
    def body(tell: Callable[[Any], None]) -> Any:
        def die() -> None:
            tell(time.time())
            os.kill(os.getpid(), by)

        result = on_streams(training, die, hung_s=3 * HUNG_S)
        tell(time.time())
        return result

    world = started(3, body, heartbeat_s=SILENT_S)
    died_s = world.told(1)
    for rank in (0, 2):
        heard_s = world.told(rank)
        said, _, held, _ = world.told(rank)
        assert heard_s - died_s < SOON_S
        assert said.startswith(("PeerLostError: ", "DeadlockDetectedError: ")), said
        assert "rank 1" in said, said
        assert "invalid" in held or held == "usable"


FAILURES: dict[str, Callable[[], None]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raises": _raise,
    "quits": lambda: os._exit(0),
}


@pytest.mark.full(but=2)
@pytest.mark.parametrize("reads", [True, False], ids=["reads each", "reads none"])
@pytest.mark.parametrize("streams", [True, False], ids=["streams", "gloo"])
@pytest.mark.parametrize("failing", [1, 0])
@pytest.mark.parametrize("how", FAILURES)
def test_the_host_hears_of_a_peer(how: str, failing: int, streams: bool, reads: bool, started: Any, seed: int) -> None:
    """In the device's own synchronisation it can't look around, and the watcher ends that; else at the axis' end."""
    last = 4

    def loop(tell: Callable[[Any], None], seen: list[float]) -> None:
        train = ltx.train_step(ltx.data_parallel(squares), ltx.optim.from_torch(torch.optim.SGD, lr=0.01))
        state = train.init({"a": torch.ones(4, 4)})
        for step in range(last + 1):
            if ltx.world().rank == failing and step == last:
                tell(time.time())
                FAILURES[how]()
            state, metrics = train(state, torch.ones(2, 4))
            if reads:
                seen.append(metrics.loss.item())

    def body(tell: Callable[[Any], None]) -> Any:
        seen, said = list[float](), "nothing was raised"
        try:
            if streams:
                on_streams(loop, tell, seen, hung_s=60.0 if reads else 0.0)
            else:
                loop(tell, seen)
                ltx.shutdown()
        except LtxError as error:
            said = f"{type(error).__name__}: {error}"
        return time.time(), said, seen

    held_by = ["launcher", "rank 0"][seed % 2]
    world = started(3, body, held_by, heartbeat_s=SILENT_S)
    failed_s = world.told(failing)
    for rank in {0, 1, 2} - {failing}:
        heard_s, said, seen = world.told(rank)
        assert heard_s - failed_s < SOON_S, (held_by, said, seen)  # idle: within the heartbeat and two seconds
        assert said.startswith(("PeerLostError: ", "DeadlockDetectedError: ", "ReplicaDivergedError: ")), said
        assert all(math.isfinite(loss) for loss in seen[:last])
        assert not any(math.isfinite(loss) for loss in seen[last:]), "a sum that was given up halfway is no loss"
