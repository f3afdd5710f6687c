"""Sums over nodes whose ranks share memory, joined by a slow link: flat against hierarchical.

    python -m benchmarks.nodes [--links 1gbit 100mbit] [--node-sizes 2 4] [--iterations 20]

Two namespaces are the nodes. "a sum" is a train step of a model that only makes 19.4 MB of constant gradients; "a step"
has the model that waits instead of computing (benchmarks.models). In a flat sum over n ranks as a ring, 2(n-1)/n of the
bytes cross the link; in a hierarchical sum 2(2-1)/2, whatever the ranks of a node. The table has that ratio too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys

import torch

import ltx
from benchmarks.links import RATES
from benchmarks.models import Waiting
from benchmarks.ranks import Variant, backend_on, found_by_ranks, interleaved, ratios
from benchmarks.step_time import Setting


class Ready(Waiting):
    """The same gradients, without waiting for them."""

    FORWARD_S = BACKWARD_S = 0.0


def worker(arguments: argparse.Namespace) -> None:
    """One rank."""
    torch.set_num_threads(1)
    (node_size,) = arguments.node_sizes
    nodes = ltx.BaguaStrategy("gradient_allreduce", hierarchical=True, node_size=node_size)
    made: dict[str, Variant] = {}
    with ltx.init(backend=backend_on("cpu")) as world:
        for what, model in (("a sum", Ready), ("a step", Waiting)):
            setting = Setting(world.rank, model=model)
            setting.optimizer = ltx.optim.identity()  # several ranks share a processor
            made[f"{what}, flat"] = setting.ltx_step(ltx.DDPStrategy())
            made[f"{what}, hierarchical"] = setting.ltx_step(nodes)
        times = interleaved(made, arguments.iterations)
        if world.is_global_zero:
            print(json.dumps(times))


def main() -> None:
    """Parse, run, print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", choices=list(RATES), default=list(RATES))
    parser.add_argument("--node-sizes", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    print("| link | ranks | | flat, ms | hierarchical, ms | ratio (quartiles) | of the bytes on the link |")
    print("|---|---|---|---|---|---|---|")
    for link in arguments.links:
        for size in arguments.node_sizes:
            command = ["-m", "benchmarks.nodes", "--node-sizes", str(size), "--iterations", str(arguments.iterations)]
            times = found_by_ranks(command, link, 2 * size, node_size=size)
            for what in ("a sum", "a step"):
                flat, nodes = f"{what}, flat", f"{what}, hierarchical"
                low, middle, high = statistics.quantiles(ratios(times, nodes, flat), n=4)
                took = " | ".join(f"{1e3 * statistics.median(times[name]):.0f}" for name in (flat, nodes))
                share = 1 / (2 - 1 / size)
                spread = f"{middle:.2f} ({low:.2f} to {high:.2f})"
                print(f"| {link} | 2 x {size} | {what} | {took} | {spread} | {share:.2f} |")


if __name__ == "__main__":
    sys.exit(main())
