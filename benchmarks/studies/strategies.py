"""Convergence with each strategy: validation loss after a fixed number of steps, steps to a target, and bytes.

    python -m benchmarks.studies.strategies [--fresh] [--table] [--jobs 1] [--seeds 0 1] [--out FILE]

Tasks of tasks.py, trained by whole training steps on 8 and 64 simulated ranks, over seeds that were fixed
before anything was run; what isn't a default was chosen on another one. Each strategy trains from the same parameters
on the same global batches as `ddp` does. "digits by label" has the batches of "digits" in the order of their labels,
so that no two ranks see alike data. A loss is that of the mean of all ranks' parameters, which is what one would keep;
rank 0's own stands beside it. Where gradients stay local, so does the clipping of the GPT's: each rank clips by the
norm of its own gradient.

`qadam` brings its own Adam, so `adam` is beside it: the same learning rates and eps with exact mean gradients, without
clipping and weight decay. `zero` is one seed only, to see that it is `ddp`. `alone` sends nothing: each rank trains on
its own part of every batch, and the models' mean is taken at the end.

Bytes are those that rank 0 sends in all, from recordings of simulated ranks. A run that stands in the results file with
the same settings isn't repeated; `--fresh` begins anew. The notebook 03_strategies reads that file.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ltx
from benchmarks.studies.tasks import SETTINGS, Params, Settings, Task, drift, parser_of, read, task_of, where
from ltx import hooks

SEEDS = (0, 1)
RANKS = (8, 64)
STUDIED = ("digits", "digits by label", "gpt")
RESULTS = Path(__file__).parent / "strategies.json"
KEYS = ("task", "ranks", "strategy", "made", "settings")  # of bytes sent

EVERY = 10  # steps between validation losses
#: On every so many of the held-out samples, but after the last step.
PART = {"digits": 1, "digits by label": 1, "gpt": 4}
TARGET = 1.05  # by ddp's last loss

#: Peak learning rates of Adam, without weight decay and clipping. Its eps is large because qadam freezes the second
#: moment after the warm-up: where that is next to nothing (pixels that are always white), a small one lets rounding
#: errors of the 8-bit momentum through as whole steps.
ADAM_LR = {"digits": 1e-2, "digits by label": 1e-2, "gpt": 4e-3}
ADAM_EPS = 1e-3


def _adam(task: Task) -> dict[str, Any]:
    by_peak = ADAM_LR[task.name] / task.settings.peak_lr
    return {"lr": lambda step: by_peak * task.lr(step), "eps": ADAM_EPS}


def _plain_adam(task: Task) -> ltx.optim.Optimizer:
    return ltx.optim.from_torch(torch.optim.Adam, **_adam(task))


def _qadam(task: Task) -> ltx.optim.Optimizer:
    return ltx.optim.qadam(**_adam(task), warmup_steps=task.settings.warm_up)


@dataclass(frozen=True)
class Row:
    """A strategy of the study.

    Attributes:
        make: from the task's settings and the number of ranks.
        optimizer: what it trains with; the task's own unless it says otherwise.
        base: the row that its loss is compared with.
        seeds: at most so many.
    """

    make: Callable[[Settings, int], ltx.Strategy]
    optimizer: Callable[[Task], ltx.optim.Optimizer] = lambda task: task.optimizer()
    base: str = "ddp"
    seeds: int = len(SEEDS)


ROWS = {
    "ddp": Row(lambda s, n: ltx.DDPStrategy()),
    "zero": Row(lambda s, n: ltx.ZeroStrategy(), seeds=1),
    "bytegrad": Row(lambda s, n: ltx.BaguaStrategy("bytegrad")),
    "adasum": Row(lambda s, n: ltx.HorovodStrategy(op="adasum")),
    "decentralized": Row(lambda s, n: ltx.BaguaStrategy("decentralized")),
    "shift_one": Row(lambda s, n: ltx.BaguaStrategy("decentralized", peer_selection_mode="shift_one")),
    "low precision ring": Row(lambda s, n: ltx.BaguaStrategy("low_precision_decentralized")),
    "local SGD": Row(lambda s, n: ltx.LocalSGDStrategy(8)),
    "post-local SGD": Row(lambda s, n: ltx.LocalSGDStrategy(8, warmup_steps=s.warm_up)),
    "hierarchical": Row(lambda s, n: ltx.LocalSGDStrategy({4: 4 if n < 64 else 8, 16: n})),
    "DiLoCo": Row(lambda s, n: ltx.DiLoCoStrategy(16, outer_momentum=0.8, outer_hook=hooks.ByteGrad())),
    "async": Row(lambda s, n: ltx.BaguaStrategy("async", schedule=(20, 10))),
    "adam": Row(lambda s, n: ltx.DDPStrategy(), _plain_adam),
    "qadam": Row(lambda s, n: ltx.BaguaStrategy("qadam", warmup_steps=s.warm_up), _qadam, base="adam"),
    "alone": Row(lambda s, n: ltx.DDPStrategy(comm_hook=hooks.Noop())),
}


def train_of(task: Task, strategy: str, ranks: int) -> ltx.core.training.TrainStep:
    """The whole training step."""
    row = ROWS[strategy]
    return ltx.train_step(ltx.data_parallel(task.loss, row.make(task.settings, ranks)), row.optimizer(task))


def sent(task: Task, strategy: str, ranks: int) -> list[int]:
    """Bytes that rank 0 has sent after 1, 2, ... steps, without step summaries."""
    train, steps = train_of(task, strategy, ranks), task.settings.steps
    first, length = train.step.strategy.cycle
    again = first + length  # a cycle that begins here has what the one before left under way
    state, found = train.init(task.params(0)), list[int]()
    for index in range(min(steps, again + length)):
        with ltx.profile.record() as trace:
            state = on_ranks(train, ranks, index)(state, *task.batch(index, 0))
        found.append(trace.bytes)
    return list(accumulate(found[step if step < again else again + (step - again) % length] for step in range(steps)))


def on_ranks(train: ltx.core.training.TrainStep, ranks: int, index: int) -> Callable[..., Any]:
    """The step of that number on simulated ranks, each with its part of a batch."""

    def one_rank(state: Any, x: Tensor, y: Tensor) -> Any:
        return train(state, *ltx.shard((x, y)))[0]

    # What ranks have in common before the first step is each rank's own after it.
    return ltx.vmap(one_rank, in_dims=(0 if index else None, None, None), axis_size=ranks)


@dataclass(frozen=True)
class Outcome:
    """What a training came to, in validation losses.

    Attributes:
        first_loss: before the first step.
        loss: of the mean of all ranks' parameters, after the last step.
        own_loss: of rank 0's own ones.
        curve: (steps done, loss of the mean), on a part of what is held out.
        apart: how far ranks' parameters are from their mean at the end, by its norm; 0 where they are equal to the bit.
        seconds: for the whole training, on simulated ranks; says nothing about real ones.
    """

    first_loss: float
    loss: float
    own_loss: float
    curve: list[tuple[int, float]]
    apart: float
    seconds: float


def simulated(task: Task, strategy: str, seed: int, ranks: int) -> Outcome:
    """Train on simulated ranks."""
    began = time.perf_counter()
    train = train_of(task, strategy, ranks)

    def mean(params: Params) -> Params:
        return {name: leaf.mean(0) for name, leaf in params.items()}

    state = train.init(task.params(seed))
    first_loss, curve = task.validate(state.params), []
    for index in range(task.settings.steps):
        state = on_ranks(train, ranks, index)(state, *task.batch(index, seed))
        if (index + 1) % EVERY == 0:
            curve.append((index + 1, task.validate(mean(state.params), PART[task.name])))
    equal = all((leaf == leaf[:1]).all() for leaf in state.params.values())
    if not equal and train.step.strategy.layout.params == "replicated" and strategy != "alone":
        raise RuntimeError(f"{strategy}, {ranks} ranks, seed {seed}: parameters differ between the ranks.")
    own = task.validate({name: leaf[0] for name, leaf in state.params.items()})
    apart = 0.0 if equal else drift(list(state.params.values()))
    seconds = round(time.perf_counter() - began, 1)
    return Outcome(first_loss, task.validate(mean(state.params)), own, curve, apart, seconds)


@dataclass(frozen=True)
class Case:
    """One training of the study."""

    task: str
    ranks: int
    strategy: str
    seed: int


def cases(seeds: tuple[int, ...] = SEEDS) -> list[Case]:
    """The study, seed by seed."""
    return [
        Case(task, ranks, name, seed)
        for number, seed in enumerate(seeds)
        for task in STUDIED
        for ranks in reversed(RANKS)
        for name, row in ROWS.items()
        if number < row.seeds
    ]


def run(case: Case) -> dict[str, Any]:
    """Train, and tell everything about it."""
    outcome = simulated(task_of(case.task), case.strategy, case.seed, case.ranks)
    return {**_settings(case), **asdict(outcome)}


def _settings(case: Case) -> dict[str, Any]:
    settings, row = SETTINGS[case.task], ROWS[case.strategy]
    more = {"adam_lr": ADAM_LR[case.task], "adam_eps": ADAM_EPS} if row.optimizer in (_plain_adam, _qadam) else {}
    return {**asdict(case), "made": repr(row.make(settings, case.ranks)), "settings": asdict(settings), **more}


def load(path: Path = RESULTS) -> dict[str, Any]:
    """The results file: torch's version, the runs, and bytes sent by task, ranks and strategy."""
    return read(path)


def _save(path: Path, runs: list[dict[str, Any]], traffic: list[dict[str, Any]]) -> None:
    parts = [",\n".join(json.dumps(r) for r in rows) for rows in (runs, traffic)]
    text = f'{{"torch": "{torch.__version__}", "runs": [\n{parts[0]}\n], "sent": [\n{parts[1]}\n]}}\n'
    path.write_text(text)


def ratios(runs: list[dict[str, Any]], task: str, ranks: int, strategy: str) -> list[float]:
    """Validation loss by that of the row's base with the same seed, a ratio a seed."""
    base = {r["seed"]: r["loss"] for r in where(runs, task=task, ranks=ranks, strategy=ROWS[strategy].base)}
    found = where(runs, task=task, ranks=ranks, strategy=strategy)
    return [r["loss"] / base[r["seed"]] for r in found if r["seed"] in base]


def curve(runs: list[dict[str, Any]], task: str, ranks: int, strategy: str) -> list[tuple[int, float]]:
    """(steps done, validation loss), mean over the seeds."""
    each = [r["curve"] for r in where(runs, task=task, ranks=ranks, strategy=strategy)]
    return [(points[0][0], statistics.mean(loss for _, loss in points)) for points in zip(*each, strict=True)]


def target(runs: list[dict[str, Any]], task: str, ranks: int) -> float:
    """The loss whose steps and bytes are counted."""
    return TARGET * curve(runs, task, ranks, "ddp")[-1][1]


def steps_to_target(runs: list[dict[str, Any]], task: str, ranks: int, strategy: str) -> int | None:
    """The first mark at which the mean loss is at most the target; None if it never is."""
    goal = target(runs, task, ranks)
    return next((steps for steps, loss in curve(runs, task, ranks, strategy) if loss <= goal), None)


def bytes_sent(found: dict[str, Any], task: str, ranks: int, strategy: str) -> dict[int, int]:
    """Steps done -> bytes that rank 0 has sent, at the marks; empty if the file doesn't say."""
    rows = where(found["sent"], task=task, ranks=ranks, strategy=strategy)
    return {int(steps): count for row in rows for steps, count in row["bytes"]}


def table(found: dict[str, Any], task: str, ranks: int) -> list[str]:
    """Markdown: a row a strategy."""
    runs = found["runs"]
    plain = list(bytes_sent(found, task, ranks, "ddp").values())[-1]
    goal = target(runs, task, ranks)
    lines = [
        f"| {task}, {ranks} simulated ranks | bytes of ddp's | loss of the mean | to ddp's | seed by seed "
        f"| rank 0's own loss | ranks apart | steps to {goal:.3f} | bytes till then, of ddp's |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    till_ddp = bytes_sent(found, task, ranks, "ddp")[steps_to_target(runs, task, ranks, "ddp") or 0]
    for name in ROWS:
        rows = where(runs, task=task, ranks=ranks, strategy=name)
        if not rows:
            continue
        sums = bytes_sent(found, task, ranks, name)
        total = list(sums.values())[-1] if sums else math.nan
        steps = steps_to_target(runs, task, ranks, name)
        till = f"{sums[steps] / till_ddp:.3f}" if steps and sums else ""
        each = ratios(runs, task, ranks, name)
        loss, own, apart = (statistics.mean(r[key] for r in rows) for key in ("loss", "own_loss", "apart"))
        to = f"{statistics.mean(each):.4f}" + (f" ({ROWS[name].base}'s)" if ROWS[name].base != "ddp" else "")
        seeds = ", ".join(f"{value:.4f}" for value in each)
        lines.append(
            f"| {name} | {total / plain:.3f} | {loss:.4f} | {to} | {seeds} | {own:.4f} | {apart:.1e} | "
            f"{steps or 'never'} | {till} |"
        )
    first = statistics.mean(r["first_loss"] for r in where(runs, task=task, ranks=ranks))
    return [*lines, "", f"Validation loss before the first step: {first:.4f}."]


def _ready() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("error")


def _outcomes(todo: list[Case], jobs: int) -> Iterator[dict[str, Any]]:
    """Each case's run, as it ends."""
    if jobs == 1:
        _ready()
        yield from map(run, todo)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _ready) as pool:
        yield from (future.result() for future in as_completed([pool.submit(run, case) for case in todo]))


def main() -> None:
    """Parse, run what isn't in the file, count bytes, print Markdown."""
    parser = parser_of(__doc__, RESULTS)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--strategies", nargs="+", choices=list(ROWS), default=list(ROWS))
    arguments = parser.parse_args()

    known = load(arguments.out if arguments.out.exists() else RESULTS)
    runs, traffic = ([], []) if arguments.fresh else (known["runs"], known["sent"])
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    wanted = [] if arguments.table else [c for c in cases(tuple(arguments.seeds)) if c.strategy in arguments.strategies]
    todo = [case for case in wanted if not where(runs, **_settings(case))]
    for outcome in _outcomes(todo, arguments.jobs):
        case = Case(*(outcome[key] for key in ("task", "ranks", "strategy", "seed")))
        print(*asdict(case).values(), f"{outcome['loss']:.4f}", outcome["seconds"], file=sys.stderr, flush=True)
        runs = [r for r in runs if r not in where(runs, **asdict(case))] + [outcome]
        _save(arguments.out, runs, traffic)

    for case in wanted:
        key = {name: value for name, value in _settings(case).items() if name in KEYS}
        if not where(traffic, **key):
            total = sent(task_of(case.task), case.strategy, case.ranks)
            place = {name: key[name] for name in ("task", "ranks", "strategy")}
            marks = [(steps, total[steps - 1]) for steps in range(EVERY, len(total) + 1, EVERY)]
            traffic = [r for r in traffic if r not in where(traffic, **place)] + [{**key, "bytes": marks}]
            _save(arguments.out, runs, traffic)

    found = {"runs": runs, "sent": traffic}
    for task, ranks in dict.fromkeys((r["task"], r["ranks"]) for r in runs):
        print("\n".join(table(found, task, ranks)), end="\n\n")


if __name__ == "__main__":
    main()
