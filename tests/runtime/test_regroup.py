"""A new meeting of the ranks that are left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from ltx.runtime.placement import Placement
from ltx.runtime.regroup import Meeting

# Two nodes of two and three ranks.
NODES = [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]


def place(rank: int) -> Placement:
    node, local = NODES[rank]
    return Placement("slurm", rank, 5, local, 2 + node, node, 2, ("10.0.0.1", 29500))


def met(
    come: Sequence[int], gone: Sequence[int] = (), limit_s: float = 30.0, declined: Sequence[int] = ()
) -> dict[int, Placement | None]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    for rank in declined:
        Meeting(store, 1, place(rank)).decline()

    def hold(rank: int) -> Placement | None:
        return Meeting(store, 1, place(rank)).hold(lambda: list(gone), limit_s)

    with ThreadPoolExecutor(len(come)) as threads:
        return dict(zip(come, threads.map(hold, come), strict=True))


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
    nobody: Callable[[], list[int]] = list
    assert summary({0: Meeting(store, 7, place(0)).hold(lambda: [1, 2, 3, 4], 30)}) == {0: (0, 1, 0, 1, 0, 1)}
    assert Meeting(store, 7, place(3)).hold(nobody, 30) is None
