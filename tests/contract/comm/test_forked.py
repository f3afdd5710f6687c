"""A fork of a rank takes no part in its collectives, and what forks are for goes on working."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import ltx
from ltx.errors import PeerLostError, WorldError
from tests import forks
from tests.inside import resolve
from tests.kinds import Ranks


class Shifted(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that a worker of a DataLoader makes, knowing whose it is."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(10 * ltx.world().rank + index)


@dataclass
class Samples:
    """What a worker of a DataLoader returns, of a class that came to the rank by value."""

    x: torch.Tensor


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_loaders_worker_returns_objects_of_the_programs_classes(start: str, ranks: Ranks) -> None:
    def on_each() -> Any:
        loader = DataLoader(
            Shifted(), 2, num_workers=1, collate_fn=lambda xs: Samples(torch.stack(xs)), multiprocessing_context=start
        )
        return [(type(batch) is Samples, batch.x.tolist()) for batch in loader]

    for rank, got in enumerate(ranks(2).run(on_each)):
        assert got == [(True, [10 * rank + i, 10 * rank + i + 1]) for i in (0, 2)]


def test_a_fork_is_refused_by_name(ranks: Ranks, tmp_path: Path) -> None:
    def on_each() -> Any:
        one = torch.ones(())
        step = ltx.data_parallel(lambda w, x: (w * x).square())
        train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=0.1))
        state, _ = train(train.init(one.clone()), one)
        before = ltx.psum(one).item()  # agreed: a fork needn't compare it any more

        calls = [
            lambda: ltx.psum(torch.tensor(100.0)),
            lambda: ltx.pmax(one),
            lambda: ltx.barrier(),
            lambda: ltx.all_gather_object(1),
            lambda: train(state, one),
            lambda: ltx.checkpoint.save(tmp_path, state),
            lambda: ltx.init(),
        ]
        mine, end = get_context("fork").Pipe(duplex=False)
        child = get_context("fork").Process(target=lambda: end.send([_refused(call) for call in calls]))
        child.start()
        assert mine.poll(60), "the fork hangs"
        told = mine.recv()
        child.join(60)
        ltx.checkpoint.save(tmp_path, state)  # to which the fork has said nothing in the rank's name
        axis_comm = resolve(None).comm
        assert axis_comm is not None
        axis_comm.peers.check_peers("a look")  # nor that the rank has left the step
        return before, told, child.exitcode, ltx.psum(one).item(), train(state, one)[0].step

    for rank, (before, told, code, after, steps) in enumerate(ranks(2).run(on_each)):
        assert (before, code, after, steps) == (2.0, 0, 2.0, 2)
        assert len(told) == 7
        assert all(f"rank {rank}: this process (" in text and "is a fork of the rank's own (" in text for text in told)


def test_workers_of_a_data_loader_go_on_working(ranks: Ranks) -> None:
    def on_each() -> Any:
        loader = torch.utils.data.DataLoader(Shifted(), batch_size=2, num_workers=1, multiprocessing_context="fork")
        return [ltx.psum(batch).tolist() for batch in loader]

    assert ranks(2).run(on_each).replicated() == [[10, 12], [14, 16]]


@pytest.mark.parametrize("sockets", [False, True])
def test_a_rank_that_has_ended_is_known_to_have_though_a_fork_of_it_lives(sockets: bool) -> None:
    """The fork, such as a worker of a DataLoader, shares the rank's connections and its lock in shared memory."""

    def body(tell: Callable[[Any], None]) -> str:
        ltx.psum(torch.ones(3))
        if ltx.world().rank == 1:
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            tell(child)
            return "ended"
        try:
            ltx.psum(torch.ones(3))
        except PeerLostError as error:
            return str(error)
        return "completed"

    # Shared memory shows it before any heartbeat is missed.
    world = forks.Ranks(2, body, sockets=sockets, heartbeat_s=forks.SILENT_S if sockets else 40.0)
    child = world.told(1)
    try:
        text = world.told(0)
    finally:
        os.kill(child, signal.SIGKILL)
        world.close()
    assert "rank 1 has ended its part of the world in good order" in text
    assert "ltx.uneven(batches)" in text
    assert "sign of life" not in text


def test_a_fork_that_closes_its_copy_of_an_axis_does_not_end_the_rank(ranks: Ranks) -> None:
    def on_each() -> Any:
        axis_comm = resolve(None).comm
        assert axis_comm is not None
        assert axis_comm.user.transport is not None
        child = get_context("fork").Process(target=axis_comm.user.transport.close)
        child.start()
        child.join(60)
        return child.exitcode, ltx.psum(torch.ones(())).item(), axis_comm.peers.gone("dead")

    assert ranks(2).run(on_each).replicated() == (0, 2.0, [])


def _refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except WorldError as error:
        return str(error)
    return "it wasn't refused"
