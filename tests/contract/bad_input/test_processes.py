"""Bad input on one rank alone: an error there and a named one on its peers, soon. And nobody else is listened to."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ltx
from ltx import Pool
from ltx.errors import LtxError, WorkerError
from tests.kinds import Ranks

BAD_ON_ONE: dict[str, Callable[[bool], Any]] = {
    "dtype": lambda bad: ltx.psum(torch.ones(2, dtype=torch.int8 if bad else torch.float32)),
    "shape": lambda bad: ltx.psum(torch.ones(3 if bad else 2)),
    "tree": lambda bad: ltx.psum({"w": torch.ones(2)} if bad else [torch.ones(2)]),
    "no tensor": lambda bad: ltx.psum({"w": "text" if bad else torch.ones(2)}),
    "a sparse tensor": lambda bad: ltx.all_gather(torch.eye(2).to_sparse() if bad else torch.eye(2)),
    "a meta tensor": lambda bad: ltx.psum(torch.ones(2, device="meta" if bad else "cpu")),
    "src": lambda bad: ltx.broadcast(torch.ones(2), src="first" if bad else 0),
    "dim": lambda bad: ltx.all_gather(torch.ones(2), dim=1.5 if bad else 0),
    "perm": lambda bad: ltx.ppermute(torch.ones(2), "ab" if bad else [(0, 1)]),
    "a name": lambda bad: ltx.barrier(3 if bad else "three"),
    "params": lambda bad: torch.func.grad(ltx.data_parallel(lambda p: p["w"].sum()))(
        {"w": torch.ones(3 if bad else 2)}
    ),
    "grads": lambda bad: ltx.sync_gradients({"w": torch.ones(2), **({"b": None} if not bad else {"b": torch.ones(1)})}),
}


@pytest.mark.full(but=1)
@pytest.mark.parametrize("case", BAD_ON_ONE)
def test_bad_input_on_one_rank(on_new_axis: Callable[..., Any], case: str) -> None:
    """The one that was given it says so, its peer that it waits for nothing; the world may have failed by then."""

    def run() -> tuple[str, float]:
        began = time.monotonic()
        try:
            BAD_ON_ONE[case](bool(ltx.axis_index() == 1))
        except LtxError as error:
            return type(error).__name__, time.monotonic() - began
        return "returned", time.monotonic() - began

    (first, first_s), (second, second_s) = on_new_axis(run, timeout_s=0.5)
    assert second != "returned"
    assert first in ("RankMismatchError", "CollectiveTimeoutError", "PeerLostError", "DeadlockDetectedError")
    assert max(first_s, second_s) < 10


@pytest.mark.parametrize("n", [0, -1, 1.5, "2", None, torch.ones(2)])
def test_numbers_of_processes(n: Any) -> None:
    for start in (lambda: Pool(n), lambda: ltx.launch(print, n)):
        with pytest.raises(WorkerError, match="number of workers must be a whole number of at least 1"):
            start()


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
