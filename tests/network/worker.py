"""One rank on a real link: results, and the bytes that its interface has sent for them. Prints JSON on rank 0."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ltx

SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


def measured(call: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    """What `call` gives, and the bytes sent meanwhile: by the interface, and by the ledger's count."""
    call()  # signatures are compared, connections opened
    ltx.barrier()
    before = int(SENT.read_text())
    with ltx.profile.record() as trace:
        found = call()
    ltx.barrier()
    return found, {"sent": int(SENT.read_text()) - before, "counted": trace.bytes}


def backward_of_all_gather() -> Callable[[], Tensor]:
    """Only the backward pass sends, if each call takes a graph of its own that was built before."""
    leaf = torch.ones(500_000, requires_grad=True)
    graphs = [ltx.all_gather(leaf).sum() for _ in range(2)]
    return lambda: torch.autograd.grad(graphs.pop(), leaf)[0]


def main() -> None:
    torch.set_num_threads(1)
    step = ltx.data_parallel(lambda w, x: (w * x).sum())
    w, x = torch.ones(1_000_000), torch.arange(2.0)
    with ltx.init() as world:
        gradient = torch.func.grad(step)
        calls: dict[str, tuple[Callable[[], Tensor], float]] = {
            "gradients": (lambda: gradient(w, x[world.rank]), 0.5),
            "psum": (lambda: ltx.psum(w), 2.0),
            "all_gather": (lambda: ltx.all_gather(w), 1.0),
            "psum_scatter": (lambda: ltx.psum_scatter(w, tiled=True), 2.0),
            "all_to_all": (lambda: ltx.all_to_all(w, 0, 0), 1.0),
            "ppermute": (lambda: ltx.ppermute(w, [(0, 1), (1, 0)]), 1.0),
            "backward of all_gather": (backward_of_all_gather(), 2.0),
        }
        report = {}
        for name, (call, value) in calls.items():
            found, sent = measured(call)
            report[name] = {"right": bool((found == value).all()), **sent}
        if world.is_global_zero:
            print(json.dumps(report))


if __name__ == "__main__":
    main()
