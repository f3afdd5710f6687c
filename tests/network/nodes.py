"""One rank on one of two hosts: what it is told, nested axes, training, and the end of a peer.

``nodes.py FOLDER SIZE`` reads the launcher's environment, ``nodes.py FOLDER SIZE RANK MASTER`` is told by arguments. It
writes what it found to the folder as JSON. ``nodes.py`` adds up until its link goes down.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ltx
from ltx.errors import PeerLostError

HOSTS, SAMPLES, STEPS = 2, 12, 3
TIMEOUT = timedelta(seconds=40)


def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return ((x @ params["w"]).tanh() * params["s"]).square().mean()


def start() -> dict[str, Tensor]:
    w = torch.randn(5, 3, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return {"w": w, "s": torch.tensor(1.5, dtype=torch.float64)}


def batch() -> Tensor:
    return torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(8), dtype=torch.float64)


def trained(strategy: ltx.Strategy) -> list[float]:
    """The parameters after a few steps, each rank on its part of the batch."""
    train = ltx.train_step(ltx.data_parallel(loss, strategy), ltx.optim.from_torch(torch.optim.SGD, lr=0.3))
    state = train.init(start())
    for _ in range(STEPS):
        state, _ = train(state, ltx.shard(batch()))
    return [*state.params["w"].flatten().tolist(), float(state.params["s"])]


def nested(size: int) -> dict[str, Any]:
    """Sums over either axis of a mesh, and gradients reduced over one after the other."""
    index = torch.tensor([ltx.axis_index("node"), ltx.axis_index("data")], dtype=torch.float64)
    rank = size // HOSTS * index[0] + index[1]
    gradient = torch.func.grad(ltx.data_parallel(loss, axis="data"))(start(), batch().chunk(size)[int(rank)])
    return {
        "index": index.tolist(),
        "sums": [float(ltx.psum(rank, axis)) for axis in ("node", "data")],
        "gradient": ltx.pmean(gradient, "node")["w"].flatten().tolist(),
    }


def until_the_end(rank: int, size: int, folder: Path) -> None:
    """Collectives, in the middle of which the last rank is killed."""
    ltx.psum(torch.ones(10))
    if rank == size - 1:
        (folder / "killed").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            ltx.psum(torch.ones(10))
    except PeerLostError:
        (folder / f"lost{rank}").write_text(str(time.time()))
        raise


def until_silence() -> None:
    """Sum after sum, until one fails."""
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


def main() -> None:
    torch.set_num_threads(1)
    folder, size = Path(sys.argv[1]), int(sys.argv[2])
    told: dict[str, Any] = {}
    if len(sys.argv) > 3:
        told = {"rank": int(sys.argv[3]), "size": size, "master": sys.argv[4], "local_size": size // HOSTS}
    report: dict[str, Any] = {}
    with ltx.init(mesh={"node": HOSTS, "data": size // HOSTS}, timeout=TIMEOUT, **told):
        report["mesh"] = nested(size)
    with ltx.init(timeout=TIMEOUT, **told) as world:
        fields = ("rank", "size", "local_rank", "node_rank", "num_nodes", "launcher", "backend", "is_global_zero")
        report["world"] = {name: getattr(world, name) for name in fields}
        report["trained"] = trained(ltx.BaguaStrategy("gradient_allreduce", hierarchical=True, node_size=size // HOSTS))
        (folder / f"rank{world.rank}").write_text(json.dumps(report))
        until_the_end(world.rank, size, folder)


if __name__ == "__main__":
    main() if len(sys.argv) > 1 else until_silence()
