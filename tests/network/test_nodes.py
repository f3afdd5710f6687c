"""Ranks on two hosts, as torchrun starts them and as arguments tell them: network namespaces joined by a bridge."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.network import nodes
from tests.network.hosts import NEEDS_LINKS, links

SCRIPT = Path(__file__).with_name("nodes.py")
PORT = 29511  # each host is a namespace of its own, where every port is free

pytestmark = [*NEEDS_LINKS, pytest.mark.timeout(100)]


def run(commands: Sequence[Sequence[str]], link: links.Link) -> list[tuple[int, str]]:
    """(exit status, what was printed) of each command; what is left of them after a time is killed."""
    launchers = [name for name in os.environ if name.startswith(("TORCHELASTIC_", "SLURM_", "OMPI_", "PMI"))]
    clean = {name: value for name, value in os.environ.items() if name not in launchers}
    # Ranks find the interface that leads to their peers by themselves: the host's name is one of the loopback here.
    env = {**clean, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    processes = [
        subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        for command in commands
    ]
    try:
        printed = [process.communicate(timeout=80)[0] for process in processes]
        return [(process.returncode, text) for process, text in zip(processes, printed, strict=True)]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()


def by_torchrun(folder: Path, link: links.Link) -> list[list[str]]:
    address = link.address
    return [
        [
            *prefix, sys.executable, "-m", "ltx", "run", "--nnodes", "2", "--nproc-per-node", "2",
            "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{address}:{PORT}", "--rdzv-conf", f"is_host={host == 0}",
            "--local-addr", f"10.77.0.{host + 1}", str(SCRIPT), str(folder), "4",
        ]
        for host, prefix in enumerate(link.prefixes)
    ]  # fmt: skip


def by_arguments(folder: Path, link: links.Link) -> list[list[str]]:
    return [
        [*prefix, sys.executable, str(SCRIPT), str(folder), "2", str(rank), f"{link.address}:{PORT}"]
        for rank, prefix in enumerate(link.prefixes)
    ]


def check_reports(folder: Path, launcher: str, size: int) -> None:
    """Each rank's world and mesh; training as one process does it on the whole batch."""
    params, batches = nodes.start(), [nodes.batch()] * nodes.STEPS
    gradient = torch.func.grad(nodes.loss)(params, batches[0])["w"]
    for batch in batches:
        grads = torch.func.grad(nodes.loss)(params, batch)
        params = {name: p - 0.3 * grads[name] for name, p in params.items()}
    expected = torch.cat([params["w"].flatten(), params["s"].reshape(1)])
    each = size // nodes.HOSTS
    for rank in range(size):
        report = json.loads((folder / f"rank{rank}").read_text())
        node, local_rank = divmod(rank, each)
        place = {"rank": rank, "size": size, "local_rank": local_rank, "node_rank": node, "num_nodes": 2}
        assert report["world"] == place | {"launcher": launcher, "backend": "gloo", "is_global_zero": rank == 0}
        assert report["mesh"]["index"] == [node, local_rank]
        assert report["mesh"]["sums"] == [
            sum(n * each + local_rank for n in range(2)),
            sum(node * each + i for i in range(each)),
        ]
        found = report["mesh"]["gradient"], report["trained"]
        for mine, whole in zip(found, (gradient.flatten(), expected), strict=True):
            torch.testing.assert_close(torch.tensor(mine, dtype=torch.float64), whole, rtol=1e-12, atol=1e-12)


def check_lost(folder: Path, ranks: Sequence[int], within_s: float = 10.0) -> None:
    killed = float((folder / "killed").read_text())
    for rank in ranks:
        assert float((folder / f"lost{rank}").read_text()) - killed < within_s, f"rank {rank}"


@pytest.mark.full
def test_two_hosts_under_torchrun(tmp_path: Path) -> None:
    with links.link("1gbit", 2) as link:
        ends = run(by_torchrun(tmp_path, link), link)
    text = "\n".join(printed for _, printed in ends)
    assert [status for status, _ in ends] == [1, 1], text
    check_reports(tmp_path, "torchrun", 4)
    check_lost(tmp_path, [0, 1])  # rank 2 is ended by its host's launcher, which may be quicker
    assert "PeerLostError: rank 0: " in ends[0][1]
    assert "was killed by SIGKILL" in ends[1][1]


@pytest.mark.full
def test_two_hosts_that_are_told_by_arguments(tmp_path: Path) -> None:
    with links.link("1gbit", 2) as link:
        ends = run(by_arguments(tmp_path, link), link)
    text = "\n".join(printed for _, printed in ends)
    assert [status for status, _ in ends] == [1, -signal.SIGKILL], text
    check_reports(tmp_path, "arguments", 2)
    check_lost(tmp_path, [0])
    assert "PeerLostError: rank 0: " in ends[0][1]
