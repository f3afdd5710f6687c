"""The shared-memory transport: sums, order, death of a peer, and when there is none."""

from __future__ import annotations

import math
import mmap
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from typing import Any

import pytest
import torch

import ltx
from ltx.core.base.handed_in import HandedIn
from ltx.core.comm.peers import Peers
from ltx.core.comm.transport import progress_everywhere
from ltx.shared_memory.chunks import CHUNK_BYTES, SMALL_BYTES
from ltx.shared_memory.transport import NOTE_WORDS, SEGMENT_BYTES, SLOTS, SharedMemoryTransport
from tests.forks import settles
from tests.kinds import OnNewAxis, Ranks, Started
from tests.train_on import on_ranks


def bucket_channel() -> Any:
    return ltx.core.ranks.axis.find(None).comm.bucket_channel(0)


def sums(seed: int, sizes: list[int], dtype: torch.dtype, in_room: list[int]) -> list[torch.Tensor]:
    """Several buffers under way at once, from small to larger than all slots; those of ranks `in_room` lie there."""
    rank, channel = int(ltx.axis_index()), bucket_channel()
    assert channel.transport is not None
    draw = torch.Generator().manual_seed(seed + rank)
    buffers = [torch.randn(size, generator=draw).to(dtype) for size in sizes]
    if rank in in_room:
        buffers = [roomy(channel.transport, buffer) for buffer in buffers]
    totals = [work.wait() for work in [channel.issue("psum", buffer, "test") for buffer in buffers]]
    kept = [total.clone() for total in totals]
    for total in totals:  # whoever has the result may overwrite it at once: peers may still be reading theirs
        total.fill_(float("nan"))
    return kept


def roomy(transport: SharedMemoryTransport, x: torch.Tensor) -> torch.Tensor:
    """`x` in the room of `transport`, where peers read it in place."""
    return torch.empty(0, dtype=x.dtype).set_(transport.room(x.nbytes)).view(x.shape).copy_(x)


@pytest.mark.full(but=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "in_room"), [(2, []), (3, []), (2, [0, 1]), (3, [1])])
def test_sums_are_those_of_the_buffers_in_rank_order(
    ranks: Ranks, seed: int, n: int, in_room: list[int], dtype: Any
) -> None:
    sizes = [1, 7, 1000, SMALL_BYTES, CHUNK_BYTES // 4 + 3, (SLOTS + 2) * CHUNK_BYTES // dtype.itemsize]
    got = ranks(n).run(sums, seed, sizes, dtype, in_room).replicated()  # bitwise equal on all ranks
    draws = [torch.Generator().manual_seed(seed + rank) for rank in range(n)]
    for size, total in zip(sizes, got, strict=True):
        assert torch.equal(total, reduce(torch.add, [torch.randn(size, generator=draw).to(dtype) for draw in draws]))


def test_room_is_used_again_once_nobody_looks_at_it() -> None:
    transport = SharedMemoryTransport(0, [mmap.mmap(-1, SEGMENT_BYTES)], [], [])
    first, second = (roomy(transport, torch.full((1025,), number)) for number in (1.0, 2.0))
    part, places = first[3:5], [first.data_ptr(), second.data_ptr()]
    del second
    third, fourth = roomy(transport, torch.full((1100,), 3.0)), roomy(transport, torch.zeros(3000))
    assert third.data_ptr() == places[1]  # it takes as many pages
    assert fourth.data_ptr() not in places
    del first
    assert roomy(transport, torch.zeros(1025)).data_ptr() not in places
    assert part.tolist() == [1.0, 1.0]
    assert transport.room(0) is None
    assert transport.room(SEGMENT_BYTES) is None
    transport.close()
    assert transport.room(8) is None
    assert (part.tolist(), third[:2].tolist()) == ([1.0, 1.0], [3.0, 3.0])


def test_buckets_are_packed_where_peers_read_them(on_new_axis: OnNewAxis) -> None:
    def run() -> tuple[bool, bool]:
        step = ltx.data_parallel(lambda p, x: (p["w"] * x).sum())
        grads = torch.func.grad(step)({"w": torch.ones(5000)}, torch.ones(5000))["w"]
        again = roomy(bucket_channel().transport, torch.ones(3))
        return torch.equal(grads, torch.ones(5000)), 0 < again.data_ptr() - grads.data_ptr() < 1 << 20

    assert on_new_axis(run, timeout_s=30.0, sockets=False).replicated() == (True, True)


def totals(seed: int, sizes: list[int], dtype: torch.dtype, asks: Sequence[bool]) -> list[tuple[Any, torch.Tensor]]:
    rank, channel = int(ltx.axis_index()), bucket_channel()
    draw = torch.Generator().manual_seed(seed + rank)
    buffers = [torch.randn(size, generator=draw, dtype=dtype) for size in sizes]
    works = [channel.issue("psum", buffer, "test", summed=asks[rank]) for buffer in buffers]
    return [(work.total, value) for work in works for value in [work.wait()]]


@pytest.mark.full(but=1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.complex128])
@pytest.mark.parametrize("n", [2, 3])
def test_the_sum_of_all_elements(ranks: Ranks, seed: int, n: int, dtype: Any) -> None:
    sizes = [SMALL_BYTES // dtype.itemsize + 1, SMALL_BYTES, (SLOTS + 2) * CHUNK_BYTES // dtype.itemsize + 5]
    for total, value in ranks(n).run(totals, seed, sizes, dtype, [True] * n).replicated():
        parts = torch.view_as_real(value) if value.is_complex() else value
        rounding = 1e-13 if dtype.itemsize >= 8 else 1e-6
        assert total == pytest.approx(parts.double().sum().item(), abs=rounding * parts.double().abs().sum().item())


def test_the_sum_is_known_only_to_who_asks_and_if_all_do(ranks: Ranks, seed: int) -> None:
    """Of a large buffer, of which each rank sums its part."""
    for rank, own in enumerate(ranks(3).run(totals, seed, [SMALL_BYTES], torch.float32, [True, False, True])):
        assert own[0][0] is None if rank == 1 else math.isnan(own[0][0])


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.full)])
def test_a_note_beside_a_buffer(ranks: Ranks, seed: int, n: int) -> None:
    """Buffers of one chunk and of many, with a note and without, all under way at once."""

    def run() -> list[list[float]]:
        channel, draw = bucket_channel(), torch.Generator().manual_seed(seed + int(ltx.axis_index()))
        works = []
        for size in (3, CHUNK_BYTES, (SLOTS + 2) * CHUNK_BYTES // 4, 5):
            note = torch.randn(NOTE_WORDS, generator=draw, dtype=torch.float64).tolist()
            works.append(channel.issue("psum", torch.ones(size), "test", note=note))
            works.append(channel.issue("psum", torch.ones(size), "test"))
        assert all(value.eq(n).all() for value in [work.wait() for work in works])
        return [list(work.note) for work in works]

    draws = [torch.Generator().manual_seed(seed + rank) for rank in range(n)]
    for place, note in enumerate(ranks(n).run(run).replicated()):
        own = () if place % 2 else [torch.randn(NOTE_WORDS, generator=d, dtype=torch.float64).tolist() for d in draws]
        assert note == [sum(numbers) for numbers in zip(*own, strict=True)]


@pytest.mark.parametrize("operation", ["all_gather", "psum_scatter", "ppermute"])
@on_ranks(2)
def test_what_isnt_summed_has_no_sum(operation: str) -> None:
    """Nobody adds it up, and what lies there is of another piece."""
    arguments, x = (0, 1, 1, 0) if operation == "ppermute" else (), torch.full((2, 3), float("nan"))
    work = bucket_channel().issue(operation, x, "test", arguments, summed=True)
    work.wait()
    assert work.total is None


@pytest.mark.full(but=1)
@pytest.mark.parametrize("waits", [True, False], ids=["waits", "is the first to come to a new collective"])
def test_a_survivor_names_the_peer(tmp_path: Any, ranks: Ranks, waits: bool) -> None:
    note = tmp_path / "survivor"
    ranks(2).run(lambda: None)

    def run() -> None:
        axis_comm, x = ltx.core.ranks.axis.find(None).comm, torch.ones(10)
        channel = axis_comm.bucket_channel(0)
        if int(ltx.axis_index()) == 1:
            os.kill(os.getpid(), 9)
        with pytest.raises(ltx.errors.PeerLostError) as raised:
            channel.issue("psum", x, "test").wait() if waits else ltx.psum(x)
        # The transport knows it too, without the store, once the process' last thread has let go of its lock.
        note.write_text(f"{raised.value} {settles(lambda: axis_comm.peers.gone('dead'), bool)}")

    with pytest.raises(ltx.errors.WorkerError):
        ranks(2).run(run)
    said = settles(lambda: note.read_text() if note.exists() else "", bool)
    assert "the process of rank 1 is gone" in said
    assert said.endswith("[1]")


@pytest.mark.full
def test_several_threads_may_wait_at_once(on_new_axis: OnNewAxis, seed: int) -> None:
    """Each advances every transport while it waits for something else."""

    def run() -> int:
        rank, size, channel = int(ltx.axis_index()), ltx.axis_size(), ltx.core.ranks.axis.find(None).comm.user
        assert channel.transport is not None
        draws = [torch.Generator().manual_seed(seed + other) for other in range(size)]
        ended, wrong = threading.Event(), 0

        def waits() -> None:
            while not ended.is_set():
                progress_everywhere()
                time.sleep(0.0001)

        with ThreadPoolExecutor() as beside:
            for _ in range(2):
                beside.submit(waits)
            try:
                for _ in range(100):
                    given = [torch.randint(100, (3, 1000), generator=draw) for draw in draws]
                    works = [channel.issue("psum", row.clone(), "test") for row in given[rank]]
                    wrong += not torch.equal(torch.stack([work.wait() for work in works]), torch.stack(given).sum(0))
            finally:
                ended.set()
        return wrong

    assert on_new_axis(run).replicated() == 0


@pytest.mark.full
def test_nothing_is_left_in_a_file_system(ranks: Ranks) -> None:
    assert ranks(2).run(lambda: bucket_channel().transport is not None).replicated()
    assert not [name for name in os.listdir("/dev/shm") if "ltx" in name]


@pytest.mark.parametrize("sockets", [False, True])
def test_first_used_in_inference_mode(on_new_axis: OnNewAxis, sockets: bool) -> None:
    """The tensors of its segments are made in that mode then; they are written outside of it, too."""

    def run() -> tuple[Any, ...]:
        with torch.inference_mode():
            first = ltx.psum(torch.ones(3), axis_index_groups=[[1, 0]])
        bytes_ = ltx.psum(torch.ones(3, dtype=torch.uint8), axis_index_groups=[[1, 0]])
        return first.tolist(), bytes_.tolist(), bytes_.is_inference()

    assert on_new_axis(run, sockets=sockets).replicated() == ([2.0] * 3, [2] * 3, False)


def trained(seed: int) -> list[list[float]]:
    draw = torch.Generator().manual_seed(seed)
    step = ltx.data_parallel(lambda p, x: (x @ p["w"]).square().mean())
    train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.Adam, lr=0.1))
    state, seen = train.init({"w": torch.randn(5, 3, generator=draw)}), []
    for _ in range(3):
        x = ltx.shard(torch.randn(8, 5, generator=draw))
        beside = ltx.all_gather(x.sum())
        state, _ = train(state, x)
        seen += [state.params["w"].flatten().tolist(), beside.tolist()]
    return seen


#: What isn't handed in, and what the kernel has then.
WITHOUT = {"nothing": {}, "transport": {"transport": lambda rank, exchange: None}, "peers": {"peers": Peers}}


@pytest.mark.parametrize("what", WITHOUT)
def test_without_what_is_handed_in_training_is_the_same(
    started: Started, ranks: Ranks, seed: int, what: str, monkeypatch: Any
) -> None:
    """Without a transport all goes over sockets; without who knows the peers a rank knows as much as torch's DDP."""
    for name, stub in WITHOUT[what].items():
        monkeypatch.setattr(HandedIn, name, stub)
    kinds = lambda on: (on.transport is not None, type(on.peers) is not Peers)  # noqa: E731
    world = started(2, lambda tell: (kinds(bucket_channel()), trained(seed)))
    expected = ranks(2).run(trained, seed).replicated()
    assert [world.told(rank) for rank in range(2)] == [((what != "transport", what != "peers"), expected)] * 2
