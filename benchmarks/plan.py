"""What ltx.profile.plan predicts of a step on a shaped link, and what a step takes there.

    python -m benchmarks.plan [--links 1gbit 100mbit] [--ranks 2] [--waiting] [--iterations 30] [--strategies ddp ...]
    python -m benchmarks.plan --scale

The model, the batch and the optimizer are those of benchmarks.step_time. The step of one rank alone and the latency are
measured in the same run, the steps in turns; the bandwidth is the link's, less what the headers of its packets take.
What processors do for a message isn't in the plan, so it is short by that. With `--waiting` the model waits instead of
computing, so that 4 or 8 ranks don't contend for two cores. `--scale` times plans for many ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch

import ltx
from benchmarks.hooks import HOOKS
from benchmarks.links import RATES
from benchmarks.models import Transformer, Waiting
from benchmarks.ranks import Variant, backend_on, found_by_ranks, interleaved, ratio
from benchmarks.step_time import Setting

STRATEGIES: dict[str, ltx.Strategy] = {
    "ddp": ltx.DDPStrategy(),
    "fp16": ltx.DDPStrategy(comm_hook="fp16"),
    "bytegrad": ltx.DDPStrategy(comm_hook=HOOKS["bytegrad"]),
    "powersgd": ltx.DDPStrategy(comm_hook=HOOKS["powersgd"]),
    "topk": ltx.DDPStrategy(comm_hook=HOOKS["topk"]),
    "local": ltx.LocalSGDStrategy(period=4),
    "gossip": ltx.BaguaStrategy("decentralized"),
    "shift_one": ltx.BaguaStrategy("decentralized", peer_selection_mode="shift_one"),
    "ring": ltx.BaguaStrategy("low_precision_decentralized"),
    "qadam": ltx.BaguaStrategy("qadam", warmup_steps=2),
    "async": ltx.BaguaStrategy("async", schedule=(4, 2)),
    "diloco": ltx.DiLoCoStrategy(period=4),
    "zero": ltx.ZeroStrategy(),
    "adasum": ltx.HorovodStrategy(op="adasum"),
}
OPTIMIZERS = {"qadam": ltx.optim.qadam(1e-4, warmup_steps=2)}

PAYLOAD = 1448 / 1514  # of an Ethernet frame
GOAL = 0.15


def cycle_of(setting: Setting, name: str) -> Variant:
    """As many steps as the strategy's schedule takes to repeat itself."""
    strategy, optimizer = STRATEGIES[name], OPTIMIZERS.get(name, setting.optimizer)
    train, length = ltx.train_step(ltx.data_parallel(setting.loss, strategy), optimizer), strategy.cycle[1]
    state = [train.init(setting.params)]

    def step() -> None:
        state[0], _ = train(state[0], setting.inputs, setting.targets)

    def steps() -> None:
        for _ in range(length):
            step()

    return steps


def alone(setting: Setting) -> Variant:
    """Steps of ltx that send nothing: the first one averages parameters, and the next would in a million."""
    step = setting.ltx_step(ltx.LocalSGDStrategy(period=1_000_000))
    step()
    return step


def worker(arguments: argparse.Namespace) -> None:
    """One rank."""
    torch.set_num_threads(1)
    with ltx.init(backend=backend_on("cpu")) as world:
        setting = Setting(world.rank, model=Waiting if arguments.waiting else Transformer)
        numbers = torch.ones(8)
        made: dict[str, Variant] = {
            "alone": alone(setting),
            "sum": lambda: ltx.psum(numbers),
        }
        made.update((name, cycle_of(setting, name)) for name in arguments.strategies)
        times = interleaved(made, arguments.iterations)
        if world.is_global_zero:
            # Under load each variant is compared with the step alone in the same turn.
            by_itself = statistics.median(times["alone"])
            took = {name: by_itself * ratio(times, name, "alone") for name in times if name != "sum"}
            print(json.dumps({**took, "sum": statistics.median(times["sum"])}))


def compare(link: str, names: list[str], ranks: int, iterations: int, waiting: bool) -> None:
    """Run on `link`, plan for it, print both."""
    command = ["-m", "benchmarks.plan", "--iterations", str(iterations), "--strategies", *names]
    command += ["--waiting"] * waiting
    took: dict[str, float] = found_by_ranks(command, link, ranks)
    by_itself, latency = took["alone"], took["sum"] / (2 * (ranks - 1))
    params = Setting(0, model=Waiting if waiting else Transformer).params
    print(f"\n{link}, {ranks} ranks: {1e3 * by_itself:.1f} ms alone, latency {1e6 * latency:.0f} us\n")
    print("| strategy | predicted ms | measured ms | ratio |\n|---|---|---|---|")
    for name in names:
        strategy = STRATEGIES[name]
        network = {"bandwidth": PAYLOAD * RATES[link], "latency": latency, "compute_s": by_itself}
        cost = ltx.profile.plan(strategy, params, world=ranks, optimizer=OPTIMIZERS.get(name), **network)
        measured = took[name] / strategy.cycle[1]
        share = cost.time_s / measured
        off = "" if abs(share - 1) <= GOAL else f" (more than {GOAL:.0%} off)"
        print(f"| {name} | {1e3 * cost.time_s:.1f} | {1e3 * measured:.1f} | {share:.3f}{off} |")


def timed(call: Callable[[], object]) -> float:
    """Seconds of this process, whoever else is there, once things are imported and cached."""
    call()
    began = time.process_time()
    call()
    return time.process_time() - began


def scale() -> None:
    """How long planning takes for many ranks: 25 M parameters in 160 leaves."""
    params = {str(i): torch.empty(160_000, device="meta") for i in range(160)}
    network = {"bandwidth": 1e10, "latency": 5e-5, "compute_s": 0.1}
    print("| ranks | plan | seconds |\n|---|---|---|")
    for world in (1024, 8192):  # Adasum wants powers of two
        for name, strategy in STRATEGIES.items():
            network["optimizer"], network["world"] = OPTIMIZERS.get(name), world
            seconds = timed(lambda s=strategy: ltx.profile.plan(s, params, **network))
            print(f"| {world} | {name} | {seconds:.3f} |")


def main() -> None:
    """Parse, run, print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", choices=list(RATES), default=list(RATES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2])
    parser.add_argument("--waiting", action="store_true", help="a model that waits instead of computing")
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--strategies", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES))
    parser.add_argument("--scale", action="store_true", help="what planning takes for many ranks")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
    elif arguments.scale:
        scale()
    else:
        for link in arguments.links:
            for ranks in arguments.ranks:
                compare(link, arguments.strategies, ranks, arguments.iterations, arguments.waiting)


if __name__ == "__main__":
    sys.exit(main())
