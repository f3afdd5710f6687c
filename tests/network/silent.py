"""What each rank runs while its link goes down: sum after sum, until one fails."""

from __future__ import annotations

import time
from datetime import timedelta

import torch

import ltx
from ltx.errors import PeerLostError


def main() -> None:
    """One rank."""
    with ltx.init(heartbeat_timeout=timedelta(seconds=2)):
        ltx.psum(torch.ones(3))
        print("up", flush=True)
        try:
            while True:
                began = time.monotonic()
                ltx.psum(torch.ones(3))
                time.sleep(0.01)
        except PeerLostError as error:
            print(f"{time.monotonic() - began:.1f} {error}", flush=True)


if __name__ == "__main__":
    main()
