"""What the host does for one bucket on a backend that orders streams, beside DDP with its FP16 hook."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from benchmarks import bucket
from ltx.core.base import private
from tests.kinds import Ranks
from tests.streams.backend import NAME
from tests.streams.clocks import Clocks
from tests.streams.pool import on_streams

#: Of ltx at most; "calls of Python" beyond DDP's.
MOST = {
    "calls of Python": 46,
    "events": 2,
    "waits of a stream": 2,
    "record_stream": 1,
    "operations": 9,
    "allocations": 3,
}


def test_a_bucket_takes_few_calls_and_never_waits(ranks: Ranks) -> None:
    def run(name: str) -> Any:
        def count() -> dict[str, float]:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(private, "count_of_modes", lambda: 0)  # the host's is the device, not a user's
                group = dist.new_group(backend=NAME)
                ddp, mine = (lambda n: bucket.ddp_step("cpu", n, group)), (lambda n: bucket.ltx_step("cpu", n))
                try:
                    return bucket.counted(name, ddp if name == "ddp" else mine)
                finally:
                    dist.destroy_process_group(group)

        return on_streams(count, host=Clocks)

    found = {name: ranks(2).run(run, name).rank(0) for name in bucket.ONCE}
    print(bucket.table(found, {}))
    most = {**dict.fromkeys(bucket.NAMES, 0), **MOST, "calls of C": 1000}
    most["calls of Python"] += found["ddp"]["calls of Python"]
    assert {row: count for row, count in found["ltx"].items() if count > most[row]} == {}
