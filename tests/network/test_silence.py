"""A link that goes down without a word: no connection breaks, and yet both of its ends are told."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.network.hosts import NEEDS_LINKS, ROOT, links

pytestmark = NEEDS_LINKS

#: Each rank sees its own processes alone, as on a machine of its own: its kernel can't say what became of the other.
APART = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


@pytest.mark.full
def test_both_ends_of_a_link_that_goes_down_are_told() -> None:
    with links.link("1gbit", 2) as link:
        meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": link.address, "MASTER_PORT": "29500", "PYTHONPATH": str(ROOT)}
        clean = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC_")}
        processes = [
            subprocess.Popen(
                [*link.prefixes[rank], *APART, sys.executable, str(Path(__file__).with_name("silent.py"))],
                env=clean | meeting | link.environ | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == "up\n"
            subprocess.run([*link.prefixes[1], "ip", "link", "set", "eth0", "down"], check=True)
            began = time.monotonic()
            told = [process.communicate(timeout=40) for process in processes]
            took_s = time.monotonic() - began
        finally:
            for process in processes:
                process.kill()
                process.communicate()
    assert [process.returncode for process in processes] == [0, 0], told
    waited = [float(out.split()[0]) for out, _ in told]
    assert max(waited) < 10, told
    assert took_s < 30
    assert "rank 1 on axis 'data' has shown no sign of life for 2 s" in told[0][0]
    assert "the store through which the ranks meet hasn't answered for 2 s" in told[1][0]
