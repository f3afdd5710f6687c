"""What ranks exchange through the store, and the loop in which they wait for it; groups whose ranks can't connect."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from ltx.core.comm import backends, transport
from ltx.core.comm.transport import poll_until
from ltx.errors import CollectiveTimeoutError, PeerLostError
from ltx.peers.store_exchange import StoreExchange
from tests.train_on import refuses, said

SIZE = 3


def exchanges(lost: Callable[[], list[int]] = list, timeout_s: float = 20.0) -> list[StoreExchange]:
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    return [StoreExchange(store, rank, SIZE, timeout_s, lost) for rank in range(SIZE)]


def test_what_is_announced_is_there_until_it_is_forgotten() -> None:
    first, second, third = exchanges()
    assert second.peek("here", 0) is None
    first.announce("here", [1])
    first.announce("elsewhere", [2])
    assert second.peek("here", 0) == [1]
    assert second.has("here", [0])
    assert not second.has("here")
    assert second.absent("here") == [1, 2]
    first.announce("here", [3])
    second.announce("here", "x")
    third.announce("here", None)
    assert third.has("here")
    assert third.collect("here", "psum", [1, 0]) == ["x", [3]]
    first.forget("here", [1])
    assert third.absent("here") == [1]


def test_who_doesnt_come_is_named_with_the_fix() -> None:
    first, _, third = exchanges(timeout_s=0.1)
    third.announce("here", None)
    first.announce("here", None)
    asked = {"to": "compare it", "fix": " Call it everywhere."}
    assert said(CollectiveTimeoutError, first.collect, "here", "psum on axis 'data'", **asked) == (
        "rank 0: psum on axis 'data': ranks [1] didn't come to compare it within 0.1 s. Call it everywhere."
    )


def test_a_peer_that_is_gone_isnt_waited_for() -> None:
    first, *_ = exchanges(lost=lambda: [2])
    text = "^rank 0: saving failed: the process of rank 2 is gone, or shows no sign"
    refuses(PeerLostError, text, first.exchange, "here", None, "saving")


def test_a_peer_that_came_and_went_has_come() -> None:
    first, *others = exchanges(lost=lambda: [1, 2])
    for exchange in others:
        exchange.announce("here", exchange.rank)
    assert first.exchange("here", 0, "saving") == [0, 1, 2]
    first.refuse_lost("here", "saving", range(SIZE))


def test_threads_that_use_it_are_waited_for() -> None:
    exchange, done, may_end = exchanges()[0], list[int](), threading.Event()
    thread = threading.Thread(target=lambda: (may_end.wait(60), done.append(1)))
    exchange.hold(thread)
    thread.start()
    may_end.set()
    exchange.finish()
    assert done == [1]


class Clock:
    """Time that passes in sleeps alone."""

    def __init__(self) -> None:
        self.now, self.pauses = 0.0, list[float]()

    def sleep(self, seconds: float) -> None:
        self.now += seconds + 1e-6  # a sleep is never shorter
        self.pauses.append(seconds)

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(transport, "time", made)
    return made


def test_what_comes_at_the_last_moment_has_come(clock: Clock) -> None:
    assert poll_until(lambda: clock.now > 0.3, 0.3)


def test_what_a_look_raises_ends_the_wait(clock: Clock) -> None:
    def look() -> None:
        raise PeerLostError("rank 1 is gone")

    refuses(PeerLostError, "rank 1 is gone", poll_until, lambda: False, 60.0, look)
    assert clock.now < 0.1


def test_a_transport_with_work_is_advanced_without_a_pause(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers may need that to come; looks and the deadline are kept all the same."""
    looks: list[float] = []

    def progress() -> bool:
        clock.now += 1 / 64
        return clock.now < 0.3

    monkeypatch.setattr(transport, "progress_everywhere", progress)
    assert not poll_until(lambda: False, 0.21, lambda: looks.append(clock.now))
    assert (clock.pauses, looks) == ([], [4 / 64, 8 / 64, 12 / 64])


def test_a_store_that_is_shared_by_processes() -> None:
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20))  # type: ignore[attr-defined]
    ranks = [StoreExchange(store.clone(), rank, SIZE, 20.0, list) for rank in range(SIZE)]
    with ThreadPoolExecutor(SIZE) as threads:
        for place in ("a", "b"):
            found = [threads.submit(rank.exchange, place, rank.rank, "psum") for rank in ranks]
            assert [each.result() for each in found] == [[0, 1, 2]] * SIZE


THIRTY = timedelta(seconds=30) + backends.LATER


@pytest.fixture
def store() -> Any:
    """In which a peer has left the address of a group that it doesn't connect any more."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=THIRTY)  # type: ignore[attr-defined]


def test_who_connects_looks_out(store: Any) -> None:
    began = time.monotonic()

    def look() -> None:
        if time.monotonic() - began > 0.2:
            raise PeerLostError("rank 1 was lost")

    with pytest.raises(PeerLostError, match="rank 1 was lost"), backends.connecting(look):
        dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=THIRTY)
    assert not dist.is_initialized()
    assert dist.distributed_c10d.ProcessGroupGloo is dist.ProcessGroupGloo


def test_a_connection_that_doesnt_come_about_names_the_interface(store: Any) -> None:
    with pytest.raises(PeerLostError, match=r"(?s)rank 0 of 2: a connection of gloo .*set GLOO_SOCKET_IFNAME"):
        backends.connect(store, 0, 2, timedelta(seconds=0.2) + backends.LATER)
