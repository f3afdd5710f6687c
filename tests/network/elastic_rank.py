"""What each rank runs while the link of one goes down: a training that goes on after a loss. Prints what it came to."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import Any

import torch

import ltx
from ltx.errors import PeerLostError
from tests.contract.runtime.elastic_training import START, batch, make, values


def main() -> None:
    """One rank."""
    torch.set_num_threads(1)
    seen: dict[int, list[int]] = {}
    with ltx.init(timeout=timedelta(seconds=20), heartbeat_timeout=timedelta(seconds=3)) as world:
        taken: list[Any] = []

        def data(indices: torch.Tensor) -> Any:
            taken[:] = indices.tolist()
            if ltx.world().size == world.size and len(seen) >= 4:
                time.sleep(0.2)  # until the link is down
            return batch(indices)

        def on_step(state: Any, *_: Any) -> None:
            seen[state.step] = list(taken)
            print(f"step {state.step}", flush=True)

        try:
            state, _ = ltx.elastic(*make(), data, START, epochs=20, on_step=on_step)
            print(json.dumps([values(state), ltx.world().size, seen]), flush=True)
        except PeerLostError as error:
            print(json.dumps([str(error), world.rank, seen]), flush=True)


if __name__ == "__main__":
    main()
