"""A training on three hosts, of which one loses its link without a word: the others go on, and it is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from tests.contract.runtime.elastic_training import SAMPLES, STEPS
from tests.network.hosts import NEEDS_LINKS, ROOT, links

pytestmark = [*NEEDS_LINKS, pytest.mark.timeout(120)]
EPOCHS = 20


@pytest.mark.full
def test_a_host_whose_link_goes_down_is_gone_on_without() -> None:
    with links.link("1gbit", 3) as link:
        meeting = {"WORLD_SIZE": "3", "MASTER_ADDR": link.address, "MASTER_PORT": "29500", "PYTHONPATH": str(ROOT)}
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("TORCHELASTIC_", "LTX_"))}
        processes = [
            subprocess.Popen(
                [*link.prefixes[rank], sys.executable, "-m", "tests.network.elastic_rank"],
                env=clean | meeting | link.environ | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
            for rank in range(3)
        ]
        try:
            assert processes[2].stdout is not None
            while processes[2].stdout.readline() not in ("step 4\n", ""):
                pass
            subprocess.run([*link.prefixes[2], "ip", "link", "set", "eth0", "down"], check=True)
            told = [process.communicate(timeout=90) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.communicate()
    assert [process.returncode for process in processes] == [0, 0, 0], told
    ends = [json.loads(out.splitlines()[-1]) for out, _ in told]
    assert ends[0][:2] == ends[1][:2]
    assert ends[0][1] == 2, told
    assert ends[0][0][0] == EPOCHS * STEPS
    assert "rank 2: the process that holds the store through which the ranks meet is gone or stopped" in ends[2][0]
    for epoch in range(EPOCHS):
        steps = range(epoch * STEPS + 1, (epoch + 1) * STEPS + 1)
        # What the third took counts in steps that the others have done with it.
        shares = [end[2].get(str(step), []) for end in ends for step in steps]
        assert Counter(sample for share in shares for sample in share) == Counter(range(SAMPLES)), epoch
