"""One rank on a real link: what is recorded of collectives and hooks, and what its interface sends. JSON on rank 0."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import ltx
from ltx import hooks
from ltx.hooks import CommHook

COUNTERS = Path("/sys/class/net/eth0/statistics")
PACKET_HEADERS = 14 + 20 + 32  # Ethernet, IPv4, TCP with time stamps


@dataclass(frozen=True)
class Row:
    """A hook, and what its steps are measured on.

    Attributes:
        hook: its `at(sync_step)` must be in force for all steps that are measured.
        shapes: of the float32 parameters, each in a bucket of its own.
        sync_step: the number of synchronised steps before the first one that is measured.
        tolerance: relative, of the mean; 0 for those that give it exactly for small integers.
    """

    hook: CommHook
    shapes: tuple[tuple[int, ...], ...] = ((400, 500), (500, 400), (200_000,))
    sync_step: int = 0
    tolerance: float = 0.0


STEPS = 4
LARGE = ((2500, 2000), (2000, 1500), (99,))

#: A further hook joins by its row. Besides what is recorded, the interface sends what gloo puts in front of each
#: message and the barriers around the steps: 2 to 4.4 kB a step, whatever the sizes. So it is within 3% where a rank
#: sends 150 kB a step or more: give a hook that sends less of its gradients larger ones.
ROWS: dict[str, Row] = {
    "AllReduce": Row(hooks.AllReduce()),
    "FP16": Row(hooks.FP16()),
    "ByteGrad": Row(hooks.ByteGrad(), tolerance=1e-5),
    "Quantize": Row(hooks.Quantize("channel"), tolerance=1e-5),
    "PowerSGD": Row(hooks.PowerSGD(16, start_step=2), LARGE, sync_step=2, tolerance=1e-3),
    # These are far off at one step, and make up for it later.
    "OneBit": Row(hooks.OneBit(), LARGE, tolerance=STEPS + 1.0),
    "TopK": Row(hooks.TopK(0.1), tolerance=STEPS + 1.0),
    "RandomK": Row(hooks.RandomK(0.25), tolerance=STEPS + 1.0),
    "RandomK in eight bits": Row(hooks.chain(hooks.RandomK(0.5), hooks.ByteGrad()), tolerance=STEPS + 1.0),
}


def sent() -> int:
    """Bytes that the interface has sent so far, without the headers of its packets. Acknowledgements count nothing."""
    nbytes, packets = (int((COUNTERS / name).read_text()) for name in ("tx_bytes", "tx_packets"))
    return nbytes - PACKET_HEADERS * packets


def metered(run: Callable[[int], Any], steps: int) -> tuple[Any, dict[str, float]]:
    """What `run` gives, and what is recorded of it and sent for it, a step."""
    run(1)  # signatures are compared, connections opened
    ltx.barrier()
    before = sent()
    with ltx.profile.record() as trace:
        found = run(steps)
    ltx.barrier()
    return found, {"recorded": trace.bytes / steps, "sent": (sent() - before) / steps}


def measured(row: Row, rank: int, size: int) -> dict[str, object]:
    """A step of `row`."""
    params = {str(i): torch.zeros(shape) for i, shape in enumerate(row.shapes)}
    step = ltx.data_parallel(
        lambda params, x: sum((w * x).sum() for w in params.values()),
        ltx.DDPStrategy(comm_hook=row.hook, bucket_bytes=1, first_bucket_bytes=1),
    )
    start = replace(step.init(params), step=row.sync_step)
    x = torch.tensor(float(size * rank))

    def run(steps: int) -> dict[str, torch.Tensor]:
        state, grads = start, {}
        for _ in range(steps):
            grads, state = ltx.grad(step)(params, x, sync_state=state)
        return grads

    grads, found = metered(run, STEPS)
    mean = torch.tensor(size * (size - 1) / 2)
    right = all(torch.allclose(g, mean.expand_as(g), rtol=row.tolerance, atol=0.0) for g in grads.values())
    return {"right": right, **found}


def collectives(size: int) -> dict[str, dict[str, object]]:
    """Of ones on every rank; of the last one only the backward pass sends."""
    w, leaf = torch.ones(1_200_000), torch.ones(500_000, requires_grad=True)
    graphs = [ltx.all_gather(leaf).sum() for _ in range(2)]
    calls: dict[str, tuple[Callable[[], torch.Tensor], float]] = {
        "psum": (lambda: ltx.psum(w), size),
        "all_gather": (lambda: ltx.all_gather(w), 1.0),
        "psum_scatter": (lambda: ltx.psum_scatter(w, tiled=True), size),
        "all_to_all": (lambda: ltx.all_to_all(w, 0, 0), 1.0),
        "ppermute": (lambda: ltx.ppermute(w, [(rank, (rank + 1) % size) for rank in range(size)]), 1.0),
        "backward of all_gather": (lambda: torch.autograd.grad(graphs.pop(), leaf)[0], size),
    }
    found = {}
    for name, (call, value) in calls.items():
        given, counts = metered(lambda _, call=call: call(), 1)
        found[name] = {"right": bool((given == value).all()), **counts}
    return found


def main() -> None:
    torch.set_num_threads(1)
    with ltx.init() as world:
        found = collectives(world.size)
        found |= {name: measured(row, world.rank, world.size) for name, row in ROWS.items()}
        everyone = ltx.all_gather_object(found)
        if world.is_global_zero:
            print(json.dumps(everyone))


if __name__ == "__main__":
    main()
