"""Bad numbers of processes, and pickles that are cut short, are refused; and nobody else is listened to."""

from __future__ import annotations

import ast
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ltx
from ltx import Pool, hooks
from ltx.errors import LtxError, WorkerError
from tests.contract.bad_input import public
from tests.kinds import Ranks
from tests.train_on import refuses


@pytest.mark.parametrize("n", [0, -1, 1.5, 2.0, "2", None, torch.ones(2)])
def test_numbers_of_processes(n: Any) -> None:
    for start in (lambda: Pool(n), lambda: ltx.launch(print, n)):
        refuses(WorkerError, "number of workers must be a whole number of at least 1", start)


@pytest.mark.parametrize(
    "call",
    [
        lambda: ltx.launch("main", 1),
        lambda: ltx.launch(print, 1, timeout="soon"),
        lambda: Pool(1, timeout_s="soon"),
        lambda: Pool(1, threads="all"),
        lambda: ltx.axis_from_group("no group", "data"),
    ],
)
def test_refused_before_anything_starts(call: Callable[[], Any]) -> None:
    with pytest.raises(LtxError):
        call()


def _listening() -> set[str]:
    """What this process listens on: ports, and paths of Unix sockets."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[len("socket:[") : -1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(f"port {int(fields[1].rpartition(':')[2], 16)}")
    for line in Path("/proc/self/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        accepts = int(fields[3], 16) & 0x10000
        if accepts and fields[6] in inodes:
            found.add(fields[7] if len(fields) > 7 else "a Unix socket")
    return found


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="Linux's list of sockets")
def test_nothing_listens_besides_the_store_and_the_backend(ranks: Ranks) -> None:
    """The driver and its workers communicate through pairs of sockets without a name, to which nothing can connect."""
    before = _listening()
    pool = ranks(2)

    def run() -> tuple[list[str], str, int]:
        ltx.psum(torch.ones(2))
        return sorted(_listening()), os.environ["MASTER_PORT"], len([1 for name in _listening() if "port" not in name])

    (first, port, paths), (second, _, others) = pool.run(run)
    assert _listening() == before, "the driver listens on nothing"
    assert f"port {port}" in first, "the store"
    assert f"port {port}" not in second
    assert paths == others == 0, "no Unix socket has a path"
    print(f"rank 0 listens on {first}, rank 1 on {second}")


# Pickles of ltx's values that are cut short, or of other fields, load or raise; and where ltx unpickles at all.
VALUES: dict[str, Any] = {
    "TrainState": lambda: public.trained()[1],
    "SyncState": lambda: ltx.data_parallel(public.loss, ltx.DDPStrategy(comm_hook=hooks.TopK(0.5))).init(
        public.params()
    ),
    "DDPStrategy": lambda: ltx.DDPStrategy(comm_hook=hooks.PowerSGD(2)),
    "LocalSGDStrategy": lambda: ltx.LocalSGDStrategy(4),
    "PerRank": lambda: ltx.PerRank([torch.ones(2), torch.zeros(2)]),
    "Precision": lambda: ltx.Precision(),
    "an optimizer": lambda: ltx.optim.from_torch(torch.optim.AdamW, lr=0.1),
}


@pytest.mark.parametrize("name", VALUES)
def test_cut_short(name: str) -> None:
    """What a crash left of a pickle is never taken for the whole."""
    whole = pickle.dumps(VALUES[name]())
    assert type(pickle.loads(whole)) is type(VALUES[name]())

    @settings(max_examples=30, deadline=None, database=None, print_blob=True)
    @given(st.integers(0, len(whole) - 1))
    def loads_or_raises(length: int) -> None:
        with pytest.raises(Exception):  # noqa: B017, PT011 - pickle's own, of a dozen classes
            pickle.loads(whole[:length])

    loads_or_raises()


@pytest.mark.parametrize("name", ["DDPStrategy", "LocalSGDStrategy"])
def test_strategies_of_other_fields(name: str) -> None:
    """A field that this version doesn't know, or one too few: the strategy shows what it has, or raises, by name."""
    made = VALUES[name]()
    fields = dict(made.__dict__)
    fields.pop("bucket_bytes")
    foreign = object.__new__(type(made))
    foreign.__dict__.update(fields, unknown=3)
    again = pickle.loads(pickle.dumps(foreign))
    assert again.bucket_bytes == type(made).bucket_bytes, "what is missing has its default"


def _unpickling(path: Path) -> set[str]:
    """The functions of a file that unpickle something."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            for inner in ast.walk(node):
                named = isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name)
                if named and (inner.value.id, inner.attr) in {
                    ("pickle", "loads"),
                    ("pickle", "load"),
                    ("pickle", "Unpickler"),
                    ("cloudpickle", "loads"),
                    ("cloudpickle", "load"),
                    ("torch", "load"),
                }:
                    found.add(f"{path.name}:{node.name}")
                called = inner.func if isinstance(inner, ast.Call) else None
                if isinstance(called, ast.Name) and called.id.endswith("Unpickler"):
                    found.add(f"{path.name}:{node.name}")
    return found


def test_where_ltx_unpickles() -> None:
    """docs/concepts/security.md lists these. The store holds JSON; a new entry here needs a reason there."""
    package = Path(ltx.__file__).parent
    found = {entry for path in package.rglob("*.py") for entry in _unpickling(path)}
    assert found == {
        "uneven.py:_objects",
        "pickling.py:_of_peer",
        "messages.py:receive",
        "failures.py:failure_error",
        "storage.py:read_metadata",
    }
