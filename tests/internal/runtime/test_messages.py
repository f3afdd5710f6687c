"""Messages: what goes in comes out, whatever its size, and is the receiver's own."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe
from typing import Any

import numpy as np
import pytest
import torch

from ltx.runtime.messages import INLINE_BYTES, Message, Pickler, pack, receive

Send = Callable[[Any], Any]
SMALL, LARGE = 10, INLINE_BYTES


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    ours, theirs = Pipe()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def through(ends: tuple[Connection, Connection]) -> Send:
    """Send a value as a message, and give what comes out."""

    def send(value: Any) -> Any:
        message = pack(value)
        sender = threading.Thread(target=message.send, args=(ends[0],))
        sender.start()
        load = receive(ends[1])
        sender.join()
        message.close()
        return load()

    return send


@pytest.mark.parametrize("n", [SMALL, LARGE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool])
def test_tensors(n: int, dtype: torch.dtype, through: Send, seed: int) -> None:
    x = torch.randn(n).to(dtype) if dtype != torch.bool else torch.randn(n) > 0
    sent = {"x": x, "empty": x[:0], "one": x[0], "strided": x[::2], "wide": x.reshape(2, -1).T}
    back = through(sent)
    for name, expected in sent.items():
        torch.testing.assert_close(back[name], expected, rtol=0, atol=0, check_stride=True)


@pytest.mark.parametrize("n", [SMALL, LARGE])
def test_what_shares_memory_shares_it_afterwards_and_with_nobody_else(n: int, through: Send) -> None:
    x, a = torch.zeros(n), np.zeros(n)
    whole, part, array = through((x, x[1:], a))
    whole[1], array[0] = 5.0, 7.0
    assert part[0].item() == 5.0
    assert x.sum().item() == a.sum() == 0.0


@pytest.mark.parametrize("n", [SMALL, LARGE])
def test_kinds_of_tensors(n: int, through: Send) -> None:
    turned = torch.full((n,), 1 + 2j).conj()
    sent = [torch.nn.Parameter(torch.ones(n)), torch.eye(3).to_sparse(), turned, torch.empty(0, 3), np.zeros((0, 2))]
    parameter, sparse, conj, empty, array, meta = through([*sent, torch.ones(2, device="meta")])
    assert isinstance(parameter, torch.nn.Parameter)
    assert torch.equal(sparse.to_dense(), torch.eye(3))
    assert torch.equal(conj, turned)
    assert (empty.shape, array.shape, meta.device.type) == ((0, 3), (0, 2), "meta")


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support")  # torch says so once a process, of whichever is first
@pytest.mark.parametrize(
    "layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc]
)
def test_sparse_tensors_and_their_memory(layout: torch.layout, through: Send, seed: int) -> None:
    blocks = {"blocksize": (2, 2)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}
    x = (torch.randn(LARGE, 2) * (torch.rand(LARGE, 2) > 0.5)).to_sparse(layout=layout, **blocks).requires_grad_()
    for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.int16, torch.bool):
        before = x.detach().to(dtype)
        back = through({"of": [before]})["of"][0]
        assert (back.layout, back.dtype, back.shape) == (layout, dtype, x.shape)
        assert torch.equal(back.to_dense(), before.to_dense())
    back = through(x)
    assert back.requires_grad
    assert layout is not torch.sparse_coo or back.is_coalesced()
    gone = weakref.ref(back)
    del back
    assert gone() is None, "torch's own unpickling keeps it"


def test_a_message_goes_to_several_receivers(seed: int) -> None:
    x = torch.randn(LARGE)
    message, pairs = pack(x), [Pipe() for _ in range(3)]
    for ours, _ in pairs:
        message.send(ours)
    message.close()
    first, *others = [receive(theirs)() for _, theirs in pairs]
    first.zero_()
    assert all(torch.equal(other, x) for other in others)
    for end in (end for pair in pairs for end in pair):
        end.close()


def test_several_objects_in_one(ends: tuple[Connection, Connection]) -> None:
    x, pickler = torch.ones(LARGE), Pickler()
    for value in ("first", x, [x]):
        pickler.dump(value)
    message = pickler.message()
    message.send(ends[0])
    message.close()
    load = receive(ends[1])
    assert load() == "first"
    first, [second] = load(), load()
    first.zero_()
    assert second.sum().item() == 0.0, "one storage"


def test_nothing_is_left_open(through: Send) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        through(torch.ones(LARGE))
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_receiver_that_is_gone(ends: tuple[Connection, Connection]) -> None:
    ends[1].close()
    message = pack(torch.ones(LARGE))
    with pytest.raises(BrokenPipeError):
        message.send(ends[0])
    message.close()
    with pytest.raises((EOFError, OSError)):
        receive(ends[0])


def test_sending_does_not_wait_for_the_receiver(ends: tuple[Connection, Connection]) -> None:
    message: Message = pack([torch.ones(10 * LARGE), "x" * 10_000_000])
    message.send(ends[0])  # nobody reads
    message.close()
    x, text = receive(ends[1])()
    assert (x.numel(), len(text)) == (10 * LARGE, 10_000_000)
