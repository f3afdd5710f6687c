"""Bad numbers of processes are refused before anything starts, and nobody else is listened to."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ltx
from ltx import Pool
from ltx.errors import LtxError, WorkerError
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
