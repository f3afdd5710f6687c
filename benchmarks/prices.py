"""What a rank's core takes for the work around a message, for the tables of ltx.estimate.costs.

    python -m benchmarks.prices [--rounds 15] [--only NAME ...]

A hook by itself, with its numbers in the cache, takes a fraction of what it adds to a step: it empties the caches of
the backward pass and of the optimizer, and finds its own empty. So its price is taken of whole steps: two ranks on
loopback, the step of benchmarks.step_time in turns with one that sends nothing, the time of the rank's own thread
less what it spends on copies through shared memory. The lower quartile over rounds, as others' work only adds to it.

Then, through sockets: what all of a process takes for a byte that it sends by each operation, to that of a sum of
float32 numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import ltx
from benchmarks.plan import OPTIMIZERS, STRATEGIES
from benchmarks.ranks import Variant, backend_on, found_by_ranks
from benchmarks.step_time import Setting
from ltx import hooks
from ltx.comm.transports.shared_memory import SharedMemoryTransport

NAMES: dict[str, ltx.Strategy] = {
    "Noop": ltx.DDPStrategy(comm_hook=hooks.Noop()),
    "AllReduce": STRATEGIES["ddp"],
    "FP16": STRATEGIES["fp16"],
    "BF16": ltx.DDPStrategy(comm_hook=hooks.BF16()),
    "PowerSGD": STRATEGIES["powersgd"],
    "ByteGrad": STRATEGIES["bytegrad"],
    "Quantize": ltx.DDPStrategy(comm_hook=hooks.Quantize(per="channel")),
    "OneBit": ltx.DDPStrategy(comm_hook=hooks.OneBit()),
    "TopK": STRATEGIES["topk"],
    "RandomK": ltx.DDPStrategy(comm_hook=hooks.RandomK(0.01)),
    "ring": STRATEGIES["ring"],
    "qadam": STRATEGIES["qadam"],
    "gossip": STRATEGIES["gossip"],
    "shift_one": STRATEGIES["shift_one"],
    "adasum": STRATEGIES["adasum"],
}


def striding() -> Callable[[], float]:
    """From now on, seconds that this thread has spent on copies through shared memory."""
    spent, progress = [0.0], SharedMemoryTransport.progress

    def timed(transport: SharedMemoryTransport) -> bool:
        began = time.thread_time()
        try:
            return progress(transport)
        finally:
            spent[0] += time.thread_time() - began

    SharedMemoryTransport.progress = timed  # type: ignore[method-assign]
    return lambda: spent[0]


def steps_of(setting: Setting, name: str | None) -> Variant:
    """A step with the strategy of a name; one that sends nothing for None."""
    strategy = ltx.LocalSGDStrategy(period=1_000_000) if name is None else NAMES[name]
    optimizer = OPTIMIZERS.get(name or "", setting.optimizer)
    train = ltx.train_step(ltx.data_parallel(setting.loss, strategy), optimizer)
    state = [train.init(setting.params)]

    def step() -> None:
        state[0], _ = train(state[0], setting.inputs, setting.targets)

    return step


def in_steps(names: list[str], rounds: int) -> dict[str, float]:
    """Seconds a number that each adds to a step."""
    setting, copies = Setting(ltx.world().rank), striding()
    made: dict[str | None, Variant] = {name: steps_of(setting, name) for name in (None, *names)}
    times: dict[str | None, list[float]] = {name: [] for name in made}
    for number in range(-2, rounds):
        for name, step in made.items():
            dist.barrier()
            step()  # the first of a turn finds the caches of another
            began, copied = time.thread_time(), copies()
            step()
            step()
            taken = (time.thread_time() - began - (copies() - copied)) / 2
            if number >= 0:
                times[name].append(taken)
    numel = sum(x.numel() for x in setting.params.values())
    low = {name: statistics.quantiles(taken, n=4)[0] for name, taken in times.items()}
    return {name: (low[name] - low[None]) / numel for name in names} | {"step alone, ms": 1e3 * low[None]}


def by_operation(numel: int = 1 << 20, repetitions: int = 25) -> dict[str, float]:
    """What a byte that is sent takes to one of a sum of float32 numbers; that one in seconds."""
    ring = [(0, 1), (1, 0)]
    calls: dict[str, tuple[torch.dtype, float, Callable[[torch.Tensor], object]]] = {
        "sum": (torch.float32, 1.0, ltx.psum),
        "sum, float16": (torch.float16, 1.0, ltx.psum),
        "sum, bfloat16": (torch.bfloat16, 1.0, ltx.psum),
        "all_gather": (torch.uint8, 1.0, ltx.all_gather),
        "exchange": (torch.uint8, 0.5, lambda x: ltx.all_to_all(x.view(2, -1), 0, 0)),
        "reduce_scatter": (torch.float32, 0.5, lambda x: ltx.psum_scatter(x.view(2, -1))),
        "permute": (torch.uint8, 1.0, lambda x: ltx.ppermute(x, ring)),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    given = {name: torch.ones(4 * numel // dtype.itemsize, dtype=dtype) for name, (dtype, *_) in calls.items()}
    for number in range(-2, repetitions):
        for name, (_, sent, call) in calls.items():
            began = time.process_time()
            call(given[name])
            if number >= 0:
                times[name].append((time.process_time() - began) / (4 * numel * sent))
    low = {name: statistics.quantiles(taken, n=4)[0] for name, taken in times.items()}
    return {name: taken / low["sum"] for name, taken in low.items()} | {"sum": low["sum"]}


def worker(arguments: argparse.Namespace) -> None:
    """One rank."""
    torch.set_num_threads(1)
    with ltx.init(backend=backend_on("cpu")) as world:
        found = by_operation() if arguments.wire else in_steps(arguments.only, arguments.rounds)
        if world.is_global_zero:
            print(json.dumps(found))


def main() -> None:
    """Parse, run, print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="+", choices=list(NAMES), default=list(NAMES))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--wire", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    command = ["-m", "benchmarks.prices", *sys.argv[1:]]
    steps = found_by_ranks(command, "loopback", 2)
    os.environ["LTX_SHARED_MEMORY"] = "0"
    wire = found_by_ranks([*command, "--wire"], "loopback", 2)
    print(f"A step alone: {steps.pop('step alone, ms'):.1f} ms.\n\n| hook | ns a number, in a step |\n|---|---|")
    for name, seconds in steps.items():
        print(f"| {name} | {1e9 * seconds:.1f} |")
    print(f"\nA sum of float32: {1e9 * wire.pop('sum'):.2f} ns a byte.\n\n| operation | to that |\n|---|---|")
    for name, share in wire.items():
        print(f"| {name} | {share:.2f} |")


if __name__ == "__main__":
    sys.exit(main())
