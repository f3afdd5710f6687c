"""Collectives while a CUDA graph is captured: refused by name, before anything is issued."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx.errors import UnsupportedError
from tests.inside import axes_in_scope
from tests.kinds import Ranks
from tests.streams.pool import StreamedPool
from tests.train_on import on_ranks

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

    found = interrupted()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_simulated_ranks_in_a_capture() -> None:
    """They issue nothing."""
    with captured():
        assert ltx.vmap(ltx.psum)(torch.ones(3)).tolist() == [3.0] * 3
