"""Regroup: the ranks that are left agree on a new world."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import torch.distributed as dist

from ltx.core.world.placement import Placement
from ltx.runtime.membership import Member, Regroup

# Two nodes of two and three ranks.
NODES = [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]


def place(rank: int) -> Placement:
    node, local = NODES[rank]
    return Placement("slurm", rank, 5, local, 2 + node, node, 2, ("10.0.0.1", 29500))


def met(
    come: Sequence[int],
    gone: Sequence[int] = (),
    limit_s: float = 30.0,
    declined: Sequence[int] = (),
    newcomers: Mapping[int, Member] = MappingProxyType({}),
    dropped: set[int] | None = None,
    **kwargs: Any,
) -> dict[int, Placement | None]:
    """Where those who `come` find themselves; `newcomers` ask, and come if they are among these.

    Those that needn't ask any more and weren't taken in are put into `dropped`.
    """
    store = dist.HashStore()  # type: ignore[attr-defined]
    for rank in declined:
        Regroup(store, 1).decline(rank)
    for who, member in newcomers.items():
        if who in come:
            Regroup(store, 1).come(member)

    def hold(rank: int) -> Placement | None:
        asking = lambda: list(newcomers)  # noqa: E731
        member = Member.of(rank, place(rank))
        decision = Regroup(store, 1).decide(member, range(5), lambda some: gone, limit_s, asking=asking, **kwargs)
        assert decision is not None
        return decision.place(rank, place(rank)) if rank in decision.numbers else None

    members = [who for who in come if who < 5]
    with ThreadPoolExecutor(len(members)) as threads:
        found = dict(zip(members, threads.map(hold, members), strict=True))
    decision = Regroup(store, 1).decision()
    assert decision is not None
    assert decision.known >= {*range(5), *decision.numbers}
    (set() if dropped is None else dropped).update(decision.known - {*range(5), *decision.numbers})
    for who in newcomers:
        found[who] = decision.place(who, NEW) if who in decision.numbers else None
    return found


#: Where a newcomer is before it is taken in.
NEW = Placement("join", joins=("10.0.0.1", 29500))


def summary(places: dict[int, Placement | None]) -> dict[int, tuple[int, ...] | None]:
    return {
        rank: None if p is None else (p.rank, p.size, p.local_rank, p.local_size, p.node_rank, p.num_nodes)
        for rank, p in places.items()
    }


def test_all_come() -> None:
    assert met(range(5)) == {rank: place(rank) for rank in range(5)}


def test_ranks_and_nodes_are_counted_anew_and_local_ranks_stay() -> None:
    assert summary(met([0, 3, 4], gone=[1, 2])) == {
        0: (0, 3, 0, 1, 0, 2),
        3: (1, 3, 1, 2, 1, 2),
        4: (2, 3, 2, 2, 1, 2),
    }
    assert summary(met([2, 4], gone=[0, 1, 3])) == {2: (0, 2, 0, 2, 0, 1), 4: (1, 2, 2, 2, 0, 1)}


def test_who_has_declined_isnt_waited_for() -> None:
    assert summary(met([4], gone=[0, 1], declined=[2, 3])) == {4: (0, 1, 2, 1, 0, 1)}


def test_who_lives_and_doesnt_come_is_waited_for_until_the_limit() -> None:
    began = time.monotonic()
    places = met([0, 1, 2], limit_s=0.4)
    assert time.monotonic() - began >= 0.4
    assert [p and p.size for p in places.values()] == [3, 3, 3]


def test_who_comes_too_late_is_told() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    members = [Member.of(rank, place(rank)) for rank in range(5)]
    alone = Regroup(store, 7).decide(members[0], range(5), lambda some: [1, 2, 3, 4], 30)
    assert alone is not None
    assert alone.numbers == [0]
    assert Regroup(store, 7).decide(members[3], range(5), lambda some: (), 30) == alone


def test_who_has_come_and_died_isnt_waited_for_and_doesnt_go_on() -> None:
    """Rank 4 has come, and then it dies; so rank 1 is the last that is waited for."""
    store, dead = dist.HashStore(), set[int]()  # type: ignore[attr-defined]
    Regroup(store, 1).come(Member.of(4, place(4)))

    def hold(rank: int) -> Any:
        return Regroup(store, 1).decide(Member.of(rank, place(rank)), range(5), lambda some: dead, 30)

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(hold, 0)
        time.sleep(0.1)
        assert not first.done()
        dead.update({2, 3, 4})
        time.sleep(0.1)
        assert not first.done()
        assert hold(1).numbers == first.result().numbers == [0, 1]


def member(who: int, host: str = "elsewhere", local_rank: int = 0) -> Member:
    return Member(who, -1, local_rank, host)


def test_newcomers_come_last_on_their_hosts_nodes() -> None:
    here = platform.node()
    newcomers = {7: member(7), 8: member(8), 9: member(9, here, 5), 11: member(11, "third", 1)}
    places = summary(met([*range(5), 7, 8, 9, 11], newcomers=newcomers))
    assert places[4] == (4, 9, 2, 3, 1, 4)
    assert places[7] == (5, 9, 0, 2, 2, 4)
    assert places[8] == (6, 9, 1, 2, 2, 4)  # its local rank was taken
    assert places[9] == (7, 9, 5, 3, 0, 4)  # this host is taken for the first of those that have its name
    assert places[11] == (8, 9, 1, 1, 3, 4)
    found = met([0, 1, 7], gone=[2, 3, 4], newcomers={7: member(7)})[7]
    assert found == Placement("join", 2, 3, 0, 1, 1, 2, ("10.0.0.1", 29500))


def test_newcomers_that_are_lost_or_dont_come_are_left_behind() -> None:
    newcomers, dropped = {7: member(7), 8: member(8), 9: member(9)}, set[int]()
    places = met([*range(5), 7, 8], gone=[8, 9], newcomers=newcomers, dropped=dropped)
    assert dropped == {8, 9}
    assert places[7] is not None
    assert places[7].size == 6
    assert met(range(5), limit_s=0.3, newcomers={7: member(7)})[7] is None


def test_there_isnt_room_for_all_newcomers() -> None:
    newcomers, dropped = {7: member(7), 8: member(8), 9: member(9)}, set[int]()
    room: Any = lambda here, asking: min(6 - here, asking)  # noqa: E731
    places = summary(met([*range(5), 7, 8], newcomers=newcomers, dropped=dropped, room=room))
    assert places[7] is not None
    assert places[8] is None
    assert dropped == set()  # they may ask on
    assert places[4] == (4, 6, 2, 3, 1, 3)


def test_newcomers_alone_decide_nothing_and_who_has_the_state_goes_on() -> None:
    store, newcomer = dist.HashStore(), Member(7, -1, 0, "elsewhere", has_state=False)  # type: ignore[attr-defined]
    assert Regroup(store, 1).decide(newcomer, [0, 1, 7], lambda some: [0, 1], 30) is None
    decision = Regroup(store, 1).decide(Member.of(0, place(0)), [0, 1, 7], lambda some: [1], 30)
    assert decision is not None
    assert decision.numbers == [0, 7]


def test_who_has_left_the_world_before_and_has_come_goes_on_unless_it_declines_then() -> None:
    for declines in (False, True):
        store = dist.HashStore()  # type: ignore[attr-defined]
        Regroup(store, 1).come(Member.of(1, place(1)))
        if declines:
            Regroup(store, 1).decline(1)
        mine = Member.of(0, place(0))
        decision = Regroup(store, 1).decide(mine, [0, 1, 2], lambda some: (), 30, left=lambda: [1, 2])
        assert decision is not None
        assert decision.numbers == ([0] if declines else [0, 1])
