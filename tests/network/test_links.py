"""Ranks on hosts of their own, as torchrun starts them and as arguments tell them: namespaces joined by a bridge."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks import links
from benchmarks.ranks import run_ranks
from tests.network import nodes

HERE = Path(__file__).parent
SCRIPT = str(HERE / "nodes.py")
PORT = 29511  # each host is a namespace of its own, where every port is free
#: Each rank sees its own processes alone, as on a machine of its own: its kernel can't say what became of the other.
APART = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")

pytestmark = [pytest.mark.full, pytest.mark.network, pytest.mark.timeout(180)]
pytestmark += [pytest.mark.skipif(links.why_not() is not None, reason=str(links.why_not()))]


def begun(command: Sequence[str], stderr: int = subprocess.STDOUT, **environ: str) -> subprocess.Popen[str]:
    launchers = [name for name in os.environ if name.startswith(("TORCHELASTIC_", "SLURM_", "OMPI_", "PMI"))]
    clean = {name: value for name, value in os.environ.items() if name not in launchers}
    # Ranks find the interface that leads to their peers by themselves: the host's name is one of the loopback here.
    env = {**clean, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environ}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True)


def ended(processes: Sequence[subprocess.Popen[str]], timeout_s: float) -> list[tuple[int, str]]:
    """(exit status, what was printed) of each; what is left of them after a time is killed."""
    try:
        printed = [process.communicate(timeout=timeout_s)[0] for process in processes]
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
            "--local-addr", f"10.77.0.{host + 1}", SCRIPT, str(folder), "4",
        ]
        for host, prefix in enumerate(link.prefixes)
    ]  # fmt: skip


def by_arguments(folder: Path, link: links.Link) -> list[list[str]]:
    return [
        [*prefix, sys.executable, SCRIPT, str(folder), "2", str(rank), f"{link.address}:{PORT}"]
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
        sums = [sum(n * each + local_rank for n in range(2)), sum(node * each + i for i in range(each))]
        assert report["mesh"]["sums"] == sums
        found = report["mesh"]["gradient"], report["trained"]
        for mine, whole in zip(found, (gradient.flatten(), expected), strict=True):
            torch.testing.assert_close(torch.tensor(mine, dtype=torch.float64), whole, rtol=1e-12, atol=1e-12)


def check_lost(folder: Path, ranks: Sequence[int], within_s: float = 10.0) -> None:
    killed = float((folder / "killed").read_text())
    for rank in ranks:
        assert float((folder / f"lost{rank}").read_text()) - killed < within_s, f"rank {rank}"


def test_two_hosts_under_torchrun(tmp_path: Path) -> None:
    with links.link("1gbit", 2) as link:
        ends = ended([begun(command) for command in by_torchrun(tmp_path, link)], 80)
    assert [status for status, _ in ends] == [1, 1], "\n".join(printed for _, printed in ends)
    check_reports(tmp_path, "torchrun", 4)
    check_lost(tmp_path, [0, 1])  # rank 2 is ended by its host's launcher, which may be quicker
    assert "PeerLostError: rank 0: " in ends[0][1]
    assert "was killed by SIGKILL" in ends[1][1]


def test_two_hosts_that_are_told_by_arguments(tmp_path: Path) -> None:
    with links.link("1gbit", 2) as link:
        ends = ended([begun(command) for command in by_arguments(tmp_path, link)], 80)
    assert [status for status, _ in ends] == [1, -signal.SIGKILL], "\n".join(printed for _, printed in ends)
    check_reports(tmp_path, "arguments", 2)
    check_lost(tmp_path, [0])
    assert "PeerLostError: rank 0: " in ends[0][1]


def test_both_ends_of_a_link_that_goes_down_are_told() -> None:
    """Without a word: no connection breaks."""
    with links.link("1gbit", 2) as link:
        meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": link.address, "MASTER_PORT": "29500", **link.environ}
        commands = [[*link.prefixes[rank], *APART, sys.executable, SCRIPT] for rank in range(2)]
        processes = [begun(of, subprocess.PIPE, RANK=str(rank), **meeting) for rank, of in enumerate(commands)]
        try:
            for process in processes:
                assert process.stdout.readline() == "up\n"
            subprocess.run([*link.prefixes[1], "ip", "link", "set", "eth0", "down"], check=True)
            began = time.monotonic()
            told = ended(processes, 40)
            took_s = time.monotonic() - began
        finally:
            for process in processes:
                process.kill()
    assert [status for status, _ in told] == [0, 0], told
    assert max(float(text.split()[0]) for _, text in told) < 10, told
    assert took_s < 30
    assert "rank 1 on axis 'data' has shown no sign of life for 2 s" in told[0][1]
    assert "the store through which the ranks meet hasn't answered for 2 s" in told[1][1]


@pytest.mark.parametrize("n", [2, 3])
def test_a_step_sends_what_is_recorded(n: int) -> None:
    """Within 3% by the count of each rank's interface without its packets' headers."""
    with links.link("1gbit", n) as link:
        everyone = json.loads(run_ranks([str(HERE / "hooks_sent.py")], link, n, timeout_s=150))
    assert len(everyone) == n
    for rank, found in enumerate(everyone):
        for name, row in found.items():
            where = f"{name}, rank {rank}: {row}"
            assert row["right"], where
            assert row["sent"] == pytest.approx(row["recorded"], rel=0.03), where
        # The reference systems all-reduce the whole cotangent of a gather and keep their part of it.
        gathered, summed = found["backward of all_gather"]["sent"] / 500_000, found["psum"]["sent"] / 1_200_000
        assert gathered < 0.55 * n * summed
    assert list(Path("/run/netns").glob(f"ltx{os.getpid()}*")) == []
