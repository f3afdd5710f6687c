"""Ranks that open an axis alone are told so, and can open it together afterwards."""

from __future__ import annotations

import _thread
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

import ltx
from ltx.errors import AxisError, CollectiveTimeoutError, PeerLostError, RankMismatchError
from ltx.peers.watcher import hold_watcher
from tests.forks import SILENT_S
from tests.kinds import Ranks, Started, Tell
from tests.train_on import raised_by, refuses, said

OPENINGS: dict[str, Callable[[], Callable[[], Any]]] = {
    "ranks": lambda: lambda: ltx.axis_from_group([1, 0], "both"),
    "group": lambda: (lambda group: lambda: ltx.psum(torch.ones(1), group))(dist.new_group([0, 1])),
}


@pytest.mark.full(but=1)
@pytest.mark.parametrize("known", [True, False], ids=["a known call", "a new call"])
@pytest.mark.parametrize("opening", OPENINGS)
def test_one_rank_opens_what_its_peer_does_not(opening: str, known: bool, started: Started) -> None:
    def body(tell: Tell) -> str:
        open_it, first = OPENINGS[opening](), ltx.world().is_global_zero
        if known:
            ltx.psum(torch.ones(2))
        tell("goes on")
        tell(said(RankMismatchError, open_it if first else lambda: ltx.psum(torch.ones(2))))
        open_it()
        return "opened"

    world = started(2, body)
    assert [world.told(rank) for rank in range(2)] == ["goes on"] * 2
    for rank in range(2):
        text = world.told(rank)
        assert text.startswith(f"rank {rank}: ranks disagree on what they call, and wait for each other: rank 0: ")
        assert "opening axis " in text
        assert "(test_opening.py:" in text
        assert "rank 1: psum on axis 'data'" in text
    assert [world.told(rank) for rank in range(2)] == ["opened"] * 2


def test_a_peer_that_dies(started: Started) -> None:
    def body(tell: Tell) -> str:
        if not ltx.world().is_global_zero:
            tell("ends")
            time.sleep(60)
        text = r"on axis 'both', the process of rank 1 is gone.*waited for opening axis 'both'\."
        refuses(PeerLostError, text, ltx.axis_from_group, [0, 1], "both")
        tell("found")
        os._exit(0)  # to end in order would be to wait for the peer

    world = started(2, body, heartbeat_s=SILENT_S)
    assert world.told(1) == "ends"
    world.processes[1].kill()
    assert world.told(0) == "found"


@pytest.mark.full(but=2)
@pytest.mark.parametrize(
    ("raises", "text"),
    [
        (False, "PeerLostError: rank 0: opening axis 'both' failed: rank 1 has ended its part of the world in good"),
        (True, "DeadlockDetectedError: rank 0: rank 1 has left axis 'both' because of an exception (ValueError: x)"),
    ],
    ids=["returns", "raises"],
)
def test_a_peer_whose_world_has_ended(raises: bool, text: str, started: Started) -> None:
    """Though its process may live on."""

    def body(tell: Tell) -> None:
        if ltx.world().is_global_zero:
            return tell(raised_by(ltx.axis_from_group, [0, 1], "both"))
        for _ in range(20):  # of which its record doesn't tell any more
            ltx.axis_from_group([1]).comm.close()
        if raises:
            raise ValueError("x")

    assert started(2, body).told(0).startswith(text)


def test_torch_knows_the_backend_of_a_group_that_some_ranks_make(ranks: Ranks) -> None:
    """It asks for that when the group ends, and else warns on every rank that there is no backend of type 0."""

    def name() -> str:
        with ltx.axis_from_group([0, 1]) as axis:
            return str(axis.comm.group.name())

    assert list(ranks(2).run(name)) == ["gloo", "gloo"]


def heartbeat_users() -> int:
    """How many axes hold this process' heartbeat."""
    heartbeat = hold_watcher(c10d._get_default_store(), dist.get_rank(), 1000.0)
    heartbeat.release()
    return heartbeat.users


def interrupted() -> None:
    timer = threading.Timer(0.5, _thread.interrupt_main)
    timer.start()
    said(KeyboardInterrupt, ltx.axis_from_group, [0, 1])
    timer.join()


def timed_out() -> None:
    text = r"rank 0: opening axis 'ranks \[0, 1\], 1': ranks \[1\] didn't come to open it too within 3 s\. All of its "
    refuses(CollectiveTimeoutError, text, ltx.axis_from_group, [0, 1])


@pytest.mark.parametrize("give_up", [interrupted, timed_out])
def test_a_rank_that_has_given_up_leaves_nothing_and_tries_again(give_up: Callable[[], None], started: Started) -> None:
    def body(tell: Tell) -> float:
        first = ltx.world().is_global_zero
        store, users = c10d._get_default_store(), heartbeat_users()
        if first:
            give_up()
            assert heartbeat_users() == users
            refuses(AxisError, "no axis called", ltx.psum, torch.ones(1), "ranks [0, 1], 1")
            store.set("has given up", "")
        store.wait(["has given up"], timedelta(seconds=60))
        with ltx.axis_from_group([0, 1]) as both:
            assert both.name == "ranks [0, 1], 1"
            return float(ltx.psum(torch.ones(()), both))

    world = started(2, body, timeout_s=3.0 if give_up is timed_out else 60.0)
    assert [world.told(rank) for rank in range(2)] == [2.0, 2.0]
