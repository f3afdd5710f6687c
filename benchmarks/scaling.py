"""A step's time on up to 10,000 ranks, computed: from recorded collectives, a latency and a bandwidth a level.

    python -m benchmarks.scaling [--compute 0.5] [--node 5e-6 200e9] [--network 10e-6 25e9]

Each strategy's steps are recorded (:func:`ltx.profile.record`) on 16, 24 and 32 simulated ranks in nodes of 8. What a
rank sends for a collective of ltx is a + b/n + c n bytes of n ranks, and what it takes in a row d + e n messages; so
three recordings give them for every n. A message takes the latency of its level and a byte 1/bandwidth: the node's if
all ranks of the collective are on one node, else the network's.

What this assumes: messages in a row as in a ring, 2(n-1) of a sum, or in the row that says so 2 log2(n), as in NCCL's
trees; that a rank has the whole bandwidth, and no rank is late; that nothing computes slower while it communicates;
that buckets of gradients go out beside two thirds of computing, the backward pass, and what is left of them comes on
top, as do exchanges of parameters. The recorded model is a ten-thousandth of one of 1.5 billion numbers, and so are its
buckets.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import ltx
from ltx.core.comm.ledger import Event
from ltx.core.comm.operations import OPERATIONS

NODE, RECORDED, RANKS = 8, (16, 24, 32), (8, 64, 512, 4096, 10_000)
SMALLER = 10_000  # the recorded model, and its buckets, are smaller by this factor
LEAVES, NUMBERS = 100, 1536  # of the recorded model: cut into 16, 24 or 32 parts without padding
PERIOD = 16
COMPUTE_S, BACKWARD = 0.5, 2 / 3  # of a step; the part of it beside which gradients go out

_SMALL, _LARGE = [{"bucket_bytes": size, "first_bucket_bytes": size} for size in (6_144, 61_440)]
#: name: (strategy, the steps that are recorded, which make a period)
STRATEGIES: dict[str, tuple[ltx.Strategy, int]] = {
    "DDP, buckets of 61 MB": (ltx.DDPStrategy(**_SMALL), 1),
    "DDP, buckets of 614 MB": (ltx.DDPStrategy(**_LARGE), 1),
    "DDP, buckets of 614 MB, in trees": (ltx.DDPStrategy(**_LARGE), 1),
    "DDP, FP16": (ltx.DDPStrategy(comm_hook="fp16", **_LARGE), 1),
    "ZeRO": (ltx.ZeroStrategy(**_LARGE), 1),
    "hierarchical": (ltx.BaguaStrategy("gradient_allreduce", hierarchical=True, node_size=NODE, **_LARGE), 1),
    f"DiLoCo, every {PERIOD} steps": (ltx.DiLoCoStrategy(period=PERIOD, **_LARGE), PERIOD),
}


@dataclass(frozen=True)
class Level:
    """A message's latency, in seconds, and the bytes that a rank sends a second."""

    latency_s: float
    bandwidth: float


#: NVLink inside a node; 200 Gbit/s a rank between nodes
LEVELS = Level(5e-6, 200e9), Level(10e-6, 25e9)


def recorded(strategy: ltx.Strategy, steps: int, n: int) -> list[Event]:
    """What one of `n` simulated ranks issues in so many steps of the small model."""

    def loss(params: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(p * x).sum() for p in params]).sum()

    train = ltx.train_step(ltx.data_parallel(loss, strategy), ltx.optim.from_torch(torch.optim.SGD, lr=0.1))

    def program(x: torch.Tensor) -> torch.Tensor:
        state = train.init([torch.ones(NUMBERS) for _ in range(LEAVES)])
        for _ in range(steps):
            state, _ = train(state, x)
        return x

    with ltx.profile.record() as trace:
        ltx.vmap(program)(torch.ones(n))
    return trace.events


def _through(points: Sequence[float], at: Sequence[int]) -> Callable[[int], float]:
    """The a + b/n + c n that has these values at these n."""
    basis = torch.tensor([[1.0, 1.0 / n, n] for n in at], dtype=torch.float64)
    a, b, c = torch.linalg.solve(basis, torch.tensor(points, dtype=torch.float64)).tolist()
    return lambda n: a + b / n + c * n


@dataclass(frozen=True)
class Counts:
    """What one collective of a step takes at any number of ranks."""

    inside: bool  # whether all its ranks are on one node
    beside: bool  # whether it goes on beside the backward pass: the buckets of gradients
    nbytes: Callable[[int], float]
    messages: Callable[[int], float]

    def seconds(self, n: int, levels: tuple[Level, Level]) -> float:
        level = levels[0 if self.inside or n <= NODE else 1]
        return max(0.0, self.messages(n)) * level.latency_s + max(0.0, self.nbytes(n)) / level.bandwidth


def counts(strategy: ltx.Strategy, steps: int, trees: bool = False) -> list[Counts]:
    """Of each collective of so many steps; of the whole model, in bytes. `trees`: for sums."""
    runs = [recorded(strategy, steps, n) for n in RECORDED]
    found = []
    for events in zip(*runs, strict=True):  # the same collectives at each number of ranks
        assert len({(event.label, event.operation) for event in events}) == 1, events
        messages = [OPERATIONS[event.operation].messages(event.ranks) for event in events]
        sent = _through([SMALLER * event.nbytes for event in events], RECORDED)
        in_a_row = (lambda n: 2 * math.log2(n)) if trees else _through(messages, RECORDED)
        inside = {event.ranks for event in events} == {NODE}
        found.append(Counts(inside, events[0].bucket is not None, sent, in_a_row))
    return found


def step_s(of: Sequence[Counts], steps: int, n: int, compute_s: float, levels: tuple[Level, Level]) -> float:
    """Seconds of a step, in the mean of a period of so many steps."""
    beside, after = (sum(each.seconds(n, levels) for each in of if each.beside is late) for late in (True, False))
    return compute_s + (max(0.0, beside - BACKWARD * compute_s) + after) / steps


def curves(
    ranks: Sequence[int], compute_s: float = COMPUTE_S, levels: tuple[Level, Level] = LEVELS
) -> dict[str, list[float]]:
    """The part of a step that computes, 0 to 1, by strategy, at each number of ranks."""
    made: dict[str, list[float]] = {}
    for name, (strategy, steps) in STRATEGIES.items():
        of = counts(strategy, steps, trees="in trees" in name)
        made[name] = [compute_s / step_s(of, steps, n, compute_s, levels) for n in ranks]
    return made


def markdown(found: dict[str, list[float]], ranks: Sequence[int] = RANKS) -> str:
    """A line a strategy, a column a number of ranks."""
    head = ["| | " + " | ".join(f"{n:,} ranks" for n in ranks) + " |", "|---|" + "---:|" * len(ranks)]
    rows = [f"| {name} | " + " | ".join(f"{part:.0%}" for part in parts) + " |" for name, parts in found.items()]
    return "\n".join([*head, *rows])


def main() -> None:
    """Compute, print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compute", type=float, default=COMPUTE_S, help="seconds of computing a step")
    for name, level in zip(("node", "network"), LEVELS, strict=True):
        default = (level.latency_s, level.bandwidth)
        parser.add_argument(f"--{name}", nargs=2, type=float, default=default, metavar=("SECONDS", "BYTES/S"))
    given = parser.parse_args()
    levels = Level(*given.node), Level(*given.network)
    print(markdown(curves(RANKS, given.compute, levels)))


if __name__ == "__main__":
    main()
