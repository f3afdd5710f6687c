"""Process groups whose ranks can't connect: a peer is gone, or isn't reached."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from ltx.core.comm import backends
from ltx.errors import PeerLostError

THIRTY = timedelta(seconds=30) + backends.LATER


@pytest.fixture
def store() -> Any:
    """In which a peer has left the address of a group that it doesn't connect any more."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=THIRTY)  # type: ignore[attr-defined]


def test_who_connects_looks_out(store: Any) -> None:
    began = time.monotonic()

    def look() -> None:
        if time.monotonic() - began > 0.2:
            raise PeerLostError("rank 1 was lost")

    with pytest.raises(PeerLostError, match="rank 1 was lost"), backends.connecting(look):
        dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=THIRTY)
    assert not dist.is_initialized()
    assert dist.distributed_c10d.ProcessGroupGloo is dist.ProcessGroupGloo


def test_a_connection_that_doesnt_come_about_names_the_interface(store: Any) -> None:
    with pytest.raises(PeerLostError, match=r"(?s)rank 0 of 2: a connection of gloo .*set GLOO_SOCKET_IFNAME"):
        backends.connect(store, 0, 2, timedelta(seconds=0.2) + backends.LATER)
