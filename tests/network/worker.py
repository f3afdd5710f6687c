"""One rank on a real link: gradients, and the bytes that its interface has sent for them. Prints JSON on rank 0."""

from __future__ import annotations

import json
from pathlib import Path

import torch

import ltx

SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


def main() -> None:
    torch.set_num_threads(1)
    step = ltx.data_parallel(lambda w, x: (w * x).sum())
    w, x = torch.ones(1_000_000), torch.arange(2.0)
    with ltx.init() as world:
        gradient = torch.func.grad(step)
        gradient(w, x[world.rank])
        ltx.barrier()
        before = int(SENT.read_text())
        with ltx.record() as trace:
            grads = [gradient(w, x[world.rank]) for _ in range(3)]
        ltx.barrier()
        sent = int(SENT.read_text()) - before
        if world.is_global_zero:
            right = all(torch.equal(g, torch.full_like(w, 0.5)) for g in grads)
            print(json.dumps({"right": right, "sent": sent, "counted": trace.bytes, "hidden": trace.hidden}))


if __name__ == "__main__":
    main()
