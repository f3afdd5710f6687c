"""A fork takes no part in its rank's collectives, and works; nor does a captured CUDA graph, which is told so."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import ltx
from ltx.errors import PeerLostError, UnsupportedError, WorldError
from tests import forks
from tests.inside import axes_in_scope, resolve
from tests.kinds import Ranks
from tests.streams.pool import StreamedPool
from tests.train_on import on_ranks


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
    """And goes on to do so beside the rank's collectives."""

    def on_each() -> Any:
        loader = DataLoader(
            Shifted(), 2, num_workers=1, collate_fn=lambda xs: Samples(torch.stack(xs)), multiprocessing_context=start
        )
        return [(type(batch) is Samples, batch.x.tolist(), ltx.psum(batch.x).tolist()) for batch in loader]

    for rank, got in enumerate(ranks(2).run(on_each)):
        assert got == [(True, [10 * rank + i, 10 * rank + i + 1], [10 + 2 * i, 12 + 2 * i]) for i in (0, 2)]


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


@on_ranks(2)
def test_a_fork_that_closes_its_copy_of_an_axis_does_not_end_the_rank() -> None:
    axis_comm = resolve(None).comm
    assert axis_comm is not None
    assert axis_comm.user.transport is not None
    child = get_context("fork").Process(target=axis_comm.user.transport.close)
    child.start()
    child.join(60)
    assert (child.exitcode, ltx.psum(torch.ones(())).item(), axis_comm.peers.gone("dead")) == (0, 2.0, [])


def _refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except WorldError as error:
        return str(error)
    return "it wasn't refused"


SGD = ltx.optim.from_torch(torch.optim.SGD, lr=0.1)


@contextmanager
def captured() -> Iterator[None]:
    """What torch says while it captures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        yield


def loss(w: Tensor, x: Tensor) -> Tensor:
    return (w * x).square().sum()


def trained(hook: Any = "fp16", **options: Any) -> Callable[[], Any]:
    train = ltx.train_step(ltx.data_parallel(loss, ltx.DDPStrategy(comm_hook=hook)), SGD, **options)
    state = [train.init(torch.ones(3))]

    def step() -> Tensor:
        state[0], _ = train(state[0], torch.ones(3) * (1 + ltx.axis_index()))
        return train.finish(state[0]).params + 0

    return step


#: name: (makes the call, what the error calls it)
CALLS: dict[str, tuple[Callable[[], Callable[[], Any]], str]] = {
    "psum": (lambda: lambda: ltx.psum(torch.ones(2)), "psum"),
    "pmax": (lambda: lambda: ltx.pmax(torch.ones(2)), "pmax"),
    "barrier": (lambda: ltx.barrier, "barrier"),
    "objects": (lambda: lambda: ltx.all_gather_object("x"), "all_gather_object"),
    "gradients": (lambda: lambda: ltx.grad(ltx.data_parallel(loss))(torch.ones(3), torch.ones(3)), "data_parallel"),
    "a step": (trained, "data_parallel"),
    "a step that updates in the backward pass": (lambda: trained(overlap="update"), "data_parallel"),
    "a step of PowerSGD": (lambda: trained(ltx.hooks.PowerSGD(1, start_step=0)), "data_parallel"),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("streams", [False, True])
def test_a_collective_in_a_capture(name: str, streams: bool, ranks: Ranks) -> None:
    """A new one and a known one; what has been refused can be called after it."""
    made, called = CALLS[name]

    def run() -> list[str]:
        call, said = made(), []
        axis_comm: Any = axes_in_scope()[0].comm
        for _ in range(2):
            begun = [channel.begun for channel in axis_comm.channels]
            with captured(), pytest.raises(UnsupportedError) as caught:
                call()
            assert begun == [channel.begun for channel in axis_comm.channels]
            said.append(str(caught.value))
            call()
        return said

    pool: Any = StreamedPool(ranks(2)) if streams else ranks(2)
    for rank, said in enumerate(pool.run(run)):
        for text in said:
            assert text.startswith(f"rank {rank}: {called}")
            assert "in the capture of a CUDA graph" in text
            assert 'torch.compile(loss, mode="reduce-overhead")' in text


@on_ranks(2)
def test_what_the_refused_step_leaves() -> None:
    """The state is as before."""
    plain, interrupted = trained(), trained()
    plain()
    expected = plain()
    interrupted()
    with captured(), pytest.raises(UnsupportedError):
        interrupted()
    torch.testing.assert_close(interrupted(), expected, rtol=0, atol=0)


def test_simulated_ranks_in_a_capture() -> None:
    """They issue nothing."""
    with captured():
        assert ltx.vmap(ltx.psum)(torch.ones(3)).tolist() == [3.0] * 3
