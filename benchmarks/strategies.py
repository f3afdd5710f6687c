"""Time of a training step with each strategy: ltx beside DDP, in turns in one run, and the loss that the time buys.

    python -m benchmarks.strategies [--link loopback|1gbit|100mbit] [--rounds 8] [--losses 30] [--strategies NAME ...]

Forward, backward and fused AdamW on the 5 M parameter transformer, one thread a rank, on windows of Python's own help
texts. A round runs each variant for some steps, a whole period for strategies that send now and then; what a step
leaves under way is waited for at the end, within its time. A figure is the median over rounds of the ratio of two
variants' mean step times in the same round, the slowest rank's each.

`--losses N` then trains each variant anew: validation loss of rank 0's parameters after N steps, and after the time
that DDP takes for N, by the ratios that were just measured. With 4 ranks two cores would time the scheduler: count
bytes on simulated ranks instead, as benchmarks.studies.strategies does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

import torch
import torch.distributed as dist
from torch import nn

import ltx
from benchmarks import links
from benchmarks.gpt import Corpus, read_topics
from benchmarks.models import Transformer, cross_entropy
from benchmarks.ranks import backend_on, found_by_ranks
from ltx import hooks

BATCH, CONTEXT, HELD_OUT = 4, 64, 64


@dataclass(frozen=True)
class Row:
    """A strategy, made when it is measured.

    Attributes:
        make: the strategy.
        period: the number of steps that a round takes of it.
        goals: link -> at most this ratio to DDP.
        overlap: the train step's.
    """

    make: Callable[[], ltx.Strategy]
    period: int = 2
    goals: tuple[tuple[str, float], ...] = (("loopback", 1.05),)
    overlap: str = "backward"
    optimizer: Callable[[], ltx.optim.Optimizer] = lambda: ltx.optim.from_torch(torch.optim.AdamW, lr=3e-4, fused=True)


def _goals(slow: float) -> tuple[tuple[str, float], ...]:
    return (("100mbit", slow), ("loopback", 1.05))


def _qadam() -> ltx.Strategy:
    return ltx.BaguaStrategy("qadam", warmup_steps=WARMUP)


WARMUP = 2

ROWS = {
    "gradient_allreduce": Row(lambda: ltx.BaguaStrategy("gradient_allreduce"), 8, _goals(0.98), "update"),
    "bytegrad": Row(lambda: ltx.BaguaStrategy("bytegrad"), 8, _goals(0.28), "update"),
    "low_precision_decentralized": Row(
        lambda: ltx.BaguaStrategy("low_precision_decentralized"), 2, _goals(0.30), "update"
    ),
    "decentralized shift_one": Row(
        lambda: ltx.BaguaStrategy("decentralized", peer_selection_mode="shift_one"), goals=_goals(0.6)
    ),
    "qadam": Row(_qadam, optimizer=lambda: ltx.optim.qadam(lr=3e-4, warmup_steps=WARMUP)),
    "async, every 20 steps": Row(lambda: ltx.BaguaStrategy("async", schedule=(20, 19)), period=20, goals=_goals(0.09)),
    "local SGD, period 8": Row(lambda: ltx.LocalSGDStrategy(period=8), period=8, goals=_goals(0.20)),
    "DiLoCo, period 32": Row(lambda: ltx.DiLoCoStrategy(period=32), period=32, goals=_goals(0.11)),
    "DiLoCo, 8 bits, 4 fragments": Row(
        lambda: ltx.DiLoCoStrategy(period=32, outer_hook=hooks.ByteGrad(), fragments=4), period=32
    ),
    "zero": Row(lambda: ltx.ZeroStrategy(), overlap="update"),
    "adasum": Row(lambda: ltx.HorovodStrategy(op="adasum"), overlap="update"),
}


class Variant:
    """One training under way: :meth:`run` does some steps of it."""

    def __init__(self, setting: Setting, row: Row | None):
        self.setting = setting
        self.batches: Iterator[int] = count()
        if row is None:
            self.module: nn.Module = nn.parallel.DistributedDataParallel(setting.fresh(), gradient_as_bucket_view=True)
            self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=3e-4, fused=True)
            self.train = None
        else:
            step = ltx.data_parallel(setting.loss, row.make())
            self.train = ltx.train_step(step, row.optimizer(), overlap=row.overlap)
            self.state = self.train.init(setting.params)

    def run(self, steps: int) -> None:
        """The next `steps` steps."""
        for _ in range(steps):
            inputs, targets = ltx.shard(self.setting.batch(next(self.batches)))
            if self.train is not None:
                self.state, _ = self.train(self.state, inputs, targets)
            else:
                self.optimizer.zero_grad()
                cross_entropy(self.module(inputs), targets).backward()
                self.optimizer.step()

    def finished_params(self) -> dict[str, torch.Tensor]:
        """The parameters, with nothing under way."""
        if self.train is None:
            return dict(self.module.module.named_parameters())
        self.state = self.train.finish(self.state)
        return self.state.params


class Causal(Transformer):
    """The benchmarks' transformer, whose positions see what is behind them."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, length) token numbers to (batch, length, vocabulary) logits."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[-1])
        return self.head(self.encoder(self.embed(tokens), mask=mask, is_causal=True))


class Setting:
    """The model and the text of all variants."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Causal()
        self.params = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.corpus = Corpus.of(read_topics())
        self.held_out = tuple(x[:HELD_OUT] for x in self.corpus.validation_windows(CONTEXT))

    def fresh(self) -> nn.Module:
        """The model as it was at the start."""
        made = Causal()
        made.load_state_dict(self.params)
        return made

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The global batch of a step."""
        return self.corpus.batch(step, BATCH * dist.get_world_size(), CONTEXT)

    def loss(self, params: dict[str, torch.Tensor], inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The user's step."""
        return cross_entropy(ltx.functional_call(self.model, params, (inputs,)), targets)

    @torch.no_grad()
    def validate(self, params: dict[str, torch.Tensor]) -> float:
        """The loss on what is held out."""
        return self.loss(params, *self.held_out).item()


def measured(variants: dict[str, tuple[Variant, int]], rounds: int) -> dict[str, list[float]]:
    """Seconds a step of each variant in each round; the slowest rank's."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(-1, rounds):
        for name, (variant, steps) in variants.items():
            dist.barrier()
            began = time.perf_counter()
            variant.run(steps)
            taken = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            if number >= 0:  # the first one warms up
                times[name].append(taken.item() / steps)
    return times


def ratio(times: dict[str, list[float]], name: str) -> float:
    """The median over rounds of a variant's time by DDP's in the same round."""
    return statistics.median(a / b for a, b in zip(times[name], times["ddp"], strict=True))


def losses(
    setting: Setting, rows: dict[str, Row | None], ratios: dict[str, float], steps: int
) -> dict[str, list[float]]:
    """(validation loss after `steps` steps, after as long as DDP takes for them), for each variant."""
    found = {}
    for name, row in rows.items():
        variant = Variant(setting, row)
        in_time = max(1, round(steps / ratios[name]))
        marks = {}
        done = 0
        for mark in sorted({steps, in_time}):
            variant.run(mark - done)
            done = mark
            marks[mark] = setting.validate(variant.finished_params())
        found[name] = [marks[steps], marks[in_time], float(in_time)]
    return found


def worker(arguments: argparse.Namespace) -> None:
    """One rank."""
    torch.set_num_threads(1)
    with ltx.init(backend=backend_on("cpu")) as world:
        setting = Setting()
        rows: dict[str, Row | None] = {"ddp": None, **{name: ROWS[name] for name in arguments.strategies}}
        variants = {name: (Variant(setting, row), row.period if row else 2) for name, row in rows.items()}
        times = measured(variants, arguments.rounds)
        ratios = {name: ratio(times, name) for name in times}
        both = torch.tensor(list(ratios.values()), dtype=torch.float64)
        dist.broadcast(both, 0)  # ranks must agree on how many steps to go
        ratios = dict(zip(ratios, both.tolist(), strict=True))
        variants.clear()
        after = losses(setting, rows, ratios, arguments.losses) if arguments.losses else {}
        if world.is_global_zero:
            start = setting.validate(setting.params)
            print(json.dumps({"times": times, "losses": after, "start": start}))


def main() -> None:
    """Parse, run, print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", choices=["loopback", *links.RATES], default="loopback")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--losses", type=int, default=0, help="train each for that many steps too")
    parser.add_argument("--strategies", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    found = found_by_ranks(["-m", "benchmarks.strategies", *sys.argv[1:]], arguments.link, arguments.ranks)
    times, after = found["times"], found["losses"]
    steps = arguments.losses
    more = [f"loss after {steps} steps", "in ddp's time"] if after else []
    columns = [arguments.link, "ms a step", "ratio to ddp", "goal", *more]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name, seconds in times.items():
        goal = dict(ROWS[name].goals).get(arguments.link, "") if name in ROWS else ""
        cells = f"| {name} | {1e3 * statistics.median(seconds):.1f} | {ratio(times, name):.3f} | {goal} |"
        if after:
            equal, in_time, its_steps = after[name]
            cells += f" {equal:.3f} | {in_time:.3f} ({its_steps:.0f} steps) |"
        print(cells)
    if after:
        print(f"\nValidation loss before the first step: {found['start']:.3f}.")


if __name__ == "__main__":
    sys.exit(main())
