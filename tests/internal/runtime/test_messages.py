"""Messages: what goes in comes out, whatever its size, and is the receiver's own. What a call takes along."""

from __future__ import annotations

import gc
import importlib.util
import os
import pickle
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

from ltx.runtime.messages import INLINE_BYTES, LARGE_BYTES, Message, Pickler, pack, pack_call, receive
from tests.kinds import Ranks
from tests.train_on import said

Send = Callable[[Any], Any]
SMALL, LARGE = 10, INLINE_BYTES


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    ours, theirs = Pipe()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def through(ends: tuple[Connection, Connection]) -> Send:
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
    said(BrokenPipeError, message.send, ends[0])
    message.close()
    said((EOFError, OSError), receive, ends[0])


def test_sending_does_not_wait_for_the_receiver(ends: tuple[Connection, Connection]) -> None:
    message: Message = pack([torch.ones(10 * LARGE), "x" * 10_000_000])
    message.send(ends[0])  # nobody reads
    message.close()
    x, text = receive(ends[1])()
    assert (x.numel(), len(text)) == (10 * LARGE, 10_000_000)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], ModuleType]]:
    """Make modules from source; those whose names begin with "here" are where Python looks for them."""
    (tmp_path / "path").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "path"))
    made = []

    def make(name: str, source: str) -> ModuleType:
        file = tmp_path / ("path" if name.startswith("here") else "elsewhere") / f"{name}.py"
        file.write_text(source)
        spec = importlib.util.spec_from_file_location(name, file)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        made.append(name)
        spec.loader.exec_module(module)
        return module

    yield make
    for name in made:
        del sys.modules[name]


def _call_elsewhere(frame: bytes) -> str:
    """What the call gives in a process with this one's path, and which modules it has imported for that."""
    program = (
        "import sys, pickle\n"
        "sys.path[:] = pickle.loads(sys.stdin.buffer.read(int(sys.argv[1])))\n"
        "load = pickle.Unpickler(sys.stdin.buffer).load\n"
        "_, fn, (args, kwargs), _ = load(), load(), load(), load()\n"
        "print(fn(*args, **kwargs), *sorted(m for m in sys.modules if m.startswith(('here_', 'there_'))))"
    )
    path = pickle.dumps(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", program, str(len(path))], input=path + frame, capture_output=True, timeout=100
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


@pytest.mark.full
def test_other_modules_are_imported_if_they_can_be(modules: Callable[[str, str], ModuleType]) -> None:
    modules("here_other", "def g(x): return 10 * x\n")
    modules("there_other", "def h(x): return x + 1\n")
    own = modules("there_own", "from here_other import g\nfrom there_other import h\ndef f(x): return g(h(x))\n")
    assert _call_elsewhere(pack_call(1, own.f, (1,), {}).pickled) == "20 here_other"


@pytest.mark.full
def test_cached_functions_begin_with_an_empty_cache(modules: Callable[[str, str], ModuleType]) -> None:
    own = modules(
        "there_own",
        "import functools\ncalls = []\n@functools.lru_cache(maxsize=7)\ndef g(x):\n    calls.append(x)\n    return x\n"
        "def f(x): return g(x) + g(x), len(calls), g.cache_info().maxsize\n",
    )
    own.g(3)
    vars(own)["calls"].clear()
    assert _call_elsewhere(pack_call(1, own.f, (3,), {}).pickled) == "(6, 1, 7)"


@pytest.mark.full
@pytest.mark.slow_compile
def test_what_goes_by_value_can_be_compiled(modules: Callable[[str, str], ModuleType], ranks: Ranks) -> None:
    """Dynamo looks for the globals of a function that it inlines in its module, which workers don't have."""
    own = modules(
        "there_own",
        "import functools, torch, ltx\nSCALE = 2.0\n"
        "def loss(x):\n    @functools.wraps(max)\n    def square(x): return SCALE * x.square()\n"
        "    return ltx.psum(square(x).sum())\n"
        "def file(): return __file__\n"
        "def f(x): return torch.compile(torch.func.grad(loss), fullgraph=True, backend='eager')(x)\n",
    )
    for scale in (2.0, 3.0):
        vars(own)["SCALE"] = scale
        assert ranks(2).run(own.f, torch.ones(1)).replicated() == 4 * scale
    assert ranks(2).run(own.file).replicated() == own.__file__


def test_what_a_function_carries_along_is_warned_about() -> None:
    big, small = torch.zeros(LARGE_BYTES), torch.zeros(2)
    with pytest.warns(UserWarning, match=r"<lambda> carries 67 MB along to the workers at each call: 'big' with 67 MB"):
        pack_call(1, lambda: big + small, (), {}).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pack_call(1, lambda x: x + small, (big,), {}).close()


def test_nothing_stays_registered_with_cloudpickle(modules: Callable[[str, str], ModuleType]) -> None:
    own = modules("there_own", "def f(x): return x\n")
    users = modules("there_users", "def f(x): return x\n")
    cloudpickle.register_pickle_by_value(users)
    registered = set(cloudpickle.list_registry_pickle_by_value())
    try:
        pack_call(1, own.f, (users.f,), {})
        assert "there_users" in registered
        assert cloudpickle.list_registry_pickle_by_value() == registered
    finally:
        cloudpickle.unregister_pickle_by_value(users)


def test_workers_do_not_import_test_modules(ranks: Ranks) -> None:
    name = __name__
    assert ranks(2).run(lambda: name in sys.modules).replicated() is False
