"""What ltx.plan predicts of a step on a shaped link, and what a step takes there.

    python -m benchmarks.plan [--links 1gbit 100mbit] [--iterations 30] [--strategies ddp ...]
    python -m benchmarks.plan --codecs
    python -m benchmarks.plan --scale

The model, the batch and the optimizer are those of benchmarks.step_time. The step of one rank alone and the latency
are measured in the same run, the steps in turns; the bandwidth is the link's, less what the headers of its packets
take. `--codecs` measures what hooks take a number on one core (its own time, whoever else is there), for the table in
ltx.transforms.plan. `--scale` times plans and recommendations for many ranks.
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
from benchmarks import links
from benchmarks.hooks import HOOKS
from benchmarks.ranks import Variant, interleaved, run_ranks
from benchmarks.step_time import Setting
from ltx.sync.buckets import Bucket, leaves_of
from ltx.sync.reduction import Ask, Share, pack, unpack

STRATEGIES: dict[str, ltx.Strategy] = {
    "ddp": ltx.DDPStrategy(),
    "fp16": ltx.DDPStrategy(comm_hook="fp16"),
    "bytegrad": ltx.DDPStrategy(comm_hook=HOOKS["bytegrad"]),
    "powersgd": ltx.DDPStrategy(comm_hook=HOOKS["powersgd"]),
    "topk": ltx.DDPStrategy(comm_hook=HOOKS["topk"]),
    "local": ltx.LocalSGDStrategy(period=4),
    "gossip": ltx.BaguaStrategy("decentralized"),
}

BITS_S = {"1gbit": 1e9, "100mbit": 1e8}
PAYLOAD = 1448 / 1514  # of an Ethernet frame
GOAL = 0.15


def cycle_of(setting: Setting, strategy: ltx.Strategy) -> Variant:
    """As many steps as the strategy's schedule takes to repeat itself."""
    step, length = setting.ltx_step(strategy), strategy.cycle[1]

    def steps() -> None:
        for _ in range(length):
            step()

    return steps


def worker(arguments: argparse.Namespace) -> None:
    """One rank."""
    torch.set_num_threads(1)
    with ltx.init() as world:
        setting = Setting(world.rank)
        numbers = torch.ones(8)
        made: dict[str, Variant] = {
            "alone": setting.torch_step(setting.fresh()),
            "sum": lambda: ltx.psum(numbers),
        }
        made.update((name, cycle_of(setting, STRATEGIES[name])) for name in arguments.strategies)
        times = interleaved(made, arguments.iterations)
        if world.is_global_zero:
            print(json.dumps({name: statistics.median(seconds) for name, seconds in times.items()}))


def compare(link: str, names: list[str], ranks: int, iterations: int) -> None:
    """Run on `link`, plan for it, print both."""
    command = ["-m", "benchmarks.plan", "--worker", "--iterations", str(iterations), "--strategies", *names]
    with links.link(link, ranks) as made:
        printed = run_ranks(command, made, ranks)
    took: dict[str, float] = json.loads(printed.strip().splitlines()[-1])
    alone, latency = took["alone"], took["sum"] / (2 * (ranks - 1))
    params = Setting(0).params
    print(f"\n{link}: {1e3 * alone:.1f} ms alone, latency {1e6 * latency:.0f} us\n")
    print("| strategy | predicted ms | measured ms | ratio |\n|---|---|---|---|")
    for name in names:
        strategy = STRATEGIES[name]
        cost = ltx.plan(
            strategy, params, world=ranks, bandwidth=PAYLOAD * BITS_S[link], latency=latency, compute_s=alone
        )
        measured = took[name] / strategy.cycle[1]
        ratio = cost.time_s / measured
        off = "" if abs(ratio - 1) <= GOAL else f" (more than {GOAL:.0%} off)"
        print(f"| {name} | {1e3 * cost.time_s:.1f} | {1e3 * measured:.1f} | {ratio:.3f}{off} |")


def codec_s(hook: ltx.hooks.CommHook, numel: int = 1 << 20, ranks: int = 2, repetitions: int = 20) -> float:
    """Seconds a number that a hook takes on one core, apart from what it asks of the network: the median."""
    grad = torch.randn(1 << (numel.bit_length() // 2), numel >> (numel.bit_length() // 2))
    bucket = Bucket(0, (0,), leaves_of([grad]))
    hook = hook.at(hook.settled_from)
    states = [hook.init(grad)]

    def answered(ask: Ask) -> torch.Tensor:
        if ask.operation == "all_gather":
            return torch.stack([ask.buffer] * ranks)
        return ask.buffer[0].clone() if ask.operation == "reduce_scatter" else ask.buffer.clone()

    times = []
    for _ in range(repetitions):
        spent, began = 0.0, time.process_time()
        flat = pack([grad], bucket, hook, ranks, states)
        share = Share(flat, bucket, ranks, 0, states, hook.settled_from)
        reduction = hook.reduce(share)
        try:
            ask = next(reduction)
            while True:
                spent += time.process_time() - began
                answer = answered(ask)
                began = time.process_time()
                ask = reduction.send(answer)
        except StopIteration as end:
            unpack(end.value[0], bucket)
        times.append(spent + time.process_time() - began)
    return statistics.median(times) / numel


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
    for world in (1000, 10_000):
        for name, strategy in STRATEGIES.items():
            seconds = timed(lambda s=strategy, n=world: ltx.plan(s, params, world=n, **network))
            print(f"| {world} | {name} | {seconds:.3f} |")
        seconds = timed(lambda n=world: ltx.recommend(params, world=n, **network))
        print(f"| {world} | recommend | {seconds:.3f} |")


def main() -> None:
    """Parse, run, print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", choices=list(BITS_S), default=list(BITS_S))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--strategies", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES))
    parser.add_argument("--codecs", action="store_true", help="what hooks take a number")
    parser.add_argument("--scale", action="store_true", help="what planning takes for many ranks")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker and arguments.codecs:
        torch.set_num_threads(1)
        for hook in HOOKS.values():
            print(f"{1e9 * codec_s(hook):8.2f} ns a number: {hook!r}")
    elif arguments.worker:
        worker(arguments)
    elif arguments.codecs:
        with links.link("loopback", 1) as made:
            print(run_ranks(["-m", "benchmarks.plan", "--worker", "--codecs"], made, 1))
    elif arguments.scale:
        scale()
    else:
        for link in arguments.links:
            compare(link, arguments.strategies, arguments.ranks, arguments.iterations)


if __name__ == "__main__":
    sys.exit(main())
