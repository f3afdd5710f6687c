"""Published results at a small scale: what papers say that averaging, compression and rare communication cost.

    python -m benchmarks.studies.published [--fresh] [--table] [--studies fedavg ...] [--out FILE]

Each study repeats the comparison of one paper on scikit-learn's digits, with the seeds 0, 1, 2, ..., which were fixed
before anything was run. Learning rates were chosen on the seed 100, each row's for itself in "fedavg", as in the paper,
else one for all rows. Ranks and clients are simulated, but for "slow link": there two processes train, joined by a link
of 100 Mbit/s (benchmarks/links.py, which needs root), and a run is timed, so nothing else should run on the machine.

A figure is the median over the seeds, with the least and the greatest. Bytes are those that rank 0 sends in the whole
training. Claims are judged from the runs, by `CLAIMS`; the page docs/how-to/published-results.md has what this prints.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad

import ltx
from benchmarks.ranks import backend_on, found_by_ranks
from benchmarks.studies.strategies import on_ranks
from benchmarks.studies.tasks import Digits, Params, Task, parser_of, read, where
from ltx import hooks

RESULTS = Path(__file__).parent / "published.json"
SEEDS = (0, 1, 2, 3, 4)

Run = dict[str, Any]


class WideDigits(Digits):
    """The digits with two hidden layers of 1536: 2.5 million parameters, 9.9 MB of gradients."""

    def model(self) -> nn.Module:
        hidden = [nn.Linear(64, 1536), nn.ReLU(), nn.Linear(1536, 1536), nn.ReLU()]
        return nn.Sequential(*hidden, nn.Linear(1536, 10))


class ShiftedDigits(Digits):
    """The digits, each in nine places: so 64 clients have 202 images each, and the task is harder."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.held_out, self.train = _shifted(*self.held_out), _shifted(*self.train)


def _shifted(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    padded = nn.functional.pad(x.unflatten(1, (8, 8)), (1, 1, 1, 1))
    places = [padded[:, i : i + 8, j : j + 8].flatten(1) for i in range(3) for j in range(3)]
    return torch.cat(places), y.repeat(len(places))


@cache
def task_with(kind: type[Digits], steps: int, batch_size: int, peak_lr: float) -> Digits:
    """The digits, trained so."""
    task = kind("digits")
    task.settings = replace(task.settings, steps=steps, batch_size=batch_size, peak_lr=peak_lr)
    return task


@torch.no_grad()
def accuracy(task: Task, params: Params) -> float:
    """The part of the held-out digits that are told right, in percent."""
    x, y = task.held_out
    right: Tensor = ltx.functional_call(task.skeleton, params, (x,)).argmax(-1) == y
    return 100 * right.float().mean().item()


# --- federated averaging ----------------------------------------------------------------------------------------------

CLIENTS, CHOSEN, TARGET, MOST_ROUNDS = 64, 16, 90.0, 500


@dataclass(frozen=True)
class Turn:
    """What a client does in a round: `epochs` over its samples in batches of `batch`, or of all it has."""

    epochs: int
    batch: int | None
    lr: float


def federated(seed: int, turn: Turn) -> Run:
    """Rounds of federated averaging until the target; McMahan et al., 2017, algorithm 1, with IID clients."""
    task = task_with(ShiftedDigits, 1, 1, 0.1)
    generator = torch.Generator().manual_seed(seed)
    x, y = task.train
    each = len(x) // CLIENTS
    of_clients = torch.randperm(len(x), generator=generator)[: each * CLIENTS].view(CLIENTS, each)
    grad_fn = grad(task.loss)

    def turn_of_a_client(params: Params, x: Tensor, y: Tensor, orders: Tensor) -> Params:
        for order in orders:
            for some in order.split(turn.batch or each):
                grads = grad_fn(params, x[some], y[some])
                params = {name: p - turn.lr * grads[name] for name, p in params.items()}
        mean: Params = ltx.pmean(params, "clients")
        return mean

    turn_of_all = ltx.vmap(turn_of_a_client, axis_name="clients", in_dims=(None, 0, 0, 0))
    params, best = task.params(seed), 0.0
    for number in range(1, MOST_ROUNDS + 1):
        taken = of_clients[torch.randperm(CLIENTS, generator=generator)[:CHOSEN]]
        orders = torch.rand(CHOSEN, turn.epochs, each, generator=generator).argsort(-1)
        params = {name: p[0] for name, p in turn_of_all(params, x[taken], y[taken], orders).items()}  # equal on all
        best = max(best, accuracy(task, params))
        if best >= TARGET:
            return {"rounds": number, "accuracy": best}
    return {"rounds": None, "accuracy": best}


# --- trainings on simulated ranks -------------------------------------------------------------------------------------


def trained(seed: int, task: Task, strategy: ltx.Strategy, ranks: int) -> Run:
    """Train on simulated ranks; the outcome is that of the mean of all ranks' parameters."""
    train = ltx.train_step(ltx.data_parallel(task.loss, strategy), task.optimizer())
    state, sent = train.init(task.params(seed)), 0
    for index in range(task.settings.steps):
        with ltx.profile.record() as trace:
            state = on_ranks(train, ranks, index)(state, *task.batch(index, seed))
        sent += trace.bytes
    mean = {name: leaf.mean(0) for name, leaf in state.params.items()}
    return {"accuracy": accuracy(task, mean), "loss": task.validate(mean), "bytes": sent}


# --- a slow link ------------------------------------------------------------------------------------------------------

LINK, LINK_RANKS = "100mbit", 2


def one_process(seed: int, task: Task, strategy: ltx.Strategy) -> Run:
    """Train on this process and its peers, and time it from the second step on: the first one makes connections."""
    train = ltx.train_step(ltx.data_parallel(task.loss, strategy), task.optimizer())
    state, sent, began = train.init(task.params(seed)), 0, 0.0
    for index in range(task.settings.steps):
        if index == 1:
            began = time.perf_counter()
        with ltx.profile.record() as trace:
            state, _ = train(state, *ltx.shard(task.batch(index, seed)))
        sent += sum(event.nbytes for event in trace.buckets)
    seconds = time.perf_counter() - began
    return {"accuracy": accuracy(task, state.params), "bytes": sent, "seconds": round(seconds, 2)}


def on_link(seed: int, row: str) -> Run:
    """Train on processes that the link joins; what rank 0 found."""
    command = ["-m", "benchmarks.studies.published", "--row", row, "--seed", str(seed)]
    found: Run = found_by_ranks(command, LINK, LINK_RANKS)
    return found


def worker(row: str, seed: int) -> None:
    """One rank of a slow link."""
    _ready()
    with ltx.init(backend=backend_on("cpu")) as world:
        found = one_process(seed, SLOW, ltx.DDPStrategy(comm_hook=HOOKS_ON_LINK[row]))
        if world.is_global_zero:
            print(json.dumps(found))


# --- the studies ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One of the things that a paper compares.

    Attributes:
        paper: the paper's figures, one for each column of the study.
        made: what is trained, in words; a run in the file that was made otherwise is repeated.
        run: from the seed to what came of it.
    """

    paper: tuple[str, ...]
    made: str
    run: Callable[[int], Run] = field(compare=False)


@dataclass(frozen=True)
class Study:
    """A paper's comparison.

    Attributes:
        source: the paper and where it trained.
        columns: what is told of a run, and how it is written.
        rows: by name.
        base: the row that others are compared with.
    """

    source: str
    columns: dict[str, str]
    rows: dict[str, Row]
    base: str
    seeds: tuple[int, ...] = SEEDS


def of_clients(paper: str, turn: Turn) -> Row:
    made = f"{turn}, {CHOSEN} of {CLIENTS} clients, to {TARGET}%"
    return Row((paper,), made, lambda seed: federated(seed, turn))


def of_ranks(task: Task, ranks: int, strategy: ltx.Strategy, *paper: str) -> Row:
    made = f"{strategy}, {ranks} ranks, {_settings_of(task)}"
    return Row(paper, made, lambda seed: trained(seed, task, strategy, ranks))


def on_a_link(row: str, *paper: str) -> Row:
    made = f"{HOOKS_ON_LINK[row]}, {LINK_RANKS} processes, {LINK}, {_settings_of(SLOW)}"
    return Row(paper, made, lambda seed: on_link(seed, row))


def _settings_of(task: Task) -> str:
    settings = task.settings
    return f"{settings.steps} steps of {settings.batch_size}, peak lr {settings.peak_lr}"


RANKS = 4
SLOW = task_with(WideDigits, steps=60, batch_size=64, peak_lr=0.3)
HOOKS_ON_LINK: dict[str, hooks.CommHook] = {
    "exact": hooks.AllReduce(),
    "onebit": hooks.OneBit(),
    "randomk": hooks.RandomK(0.05),
    "topk": hooks.TopK(0.01),
}
SIGNS: dict[str, hooks.CommHook] = {
    "exact": hooks.AllReduce(),
    "signs with feedback": hooks.OneBit(),
    "signs without": hooks.OneBit(error_feedback=False),
}
BATCHES = {8: ("", "-0.6 points", "-36 points"), 32: ("", "", ""), 128: ("", "", "")}
LONG = task_with(Digits, steps=800, batch_size=128, peak_lr=0.5)
LOW_RANK = task_with(Digits, steps=200, batch_size=128, peak_lr=0.5)


def ddp(hook: hooks.CommHook) -> ltx.Strategy:
    return ltx.DDPStrategy(comm_hook=hook)


#: Under ZeRO and under DDP.
UNDER_ZERO: dict[str, hooks.CommHook] = {
    "FP16": hooks.FP16(),
    "ByteGrad": hooks.ByteGrad(),
    "OneBit": hooks.OneBit(),
    "TopK(0.1)": hooks.TopK(0.1),
    "TopK(0.01)": hooks.TopK(0.01),
}


STUDIES = {
    "fedavg": Study(
        "McMahan et al., 2017, table 2: a CNN on MNIST, 100 clients of 600 images, rounds to 99%",
        {"rounds": "{:.0f}"},
        {
            "FedSGD (E = 1, B = all)": of_clients("626", Turn(1, None, 1.5)),
            "E = 5, B = all": of_clients("179", Turn(5, None, 1.0)),
            "E = 1, B = 10": of_clients("34", Turn(1, 10, 0.4)),
            "E = 5, B = 10": of_clients("20", Turn(5, 10, 0.4)),
        },
        "FedSGD (E = 1, B = all)",
    ),
    "error feedback": Study(
        "Karimireddy et al., 2019: a ResNet-18 on CIFAR-100, test accuracy beside exact SGD's",
        {"accuracy": "{:.1f}%"},
        {
            f"{name}, batch {batch}": of_ranks(task_with(Digits, 300, batch, 0.2), RANKS, ddp(hook), paper)
            for batch, papers in BATCHES.items()
            for (name, hook), paper in zip(SIGNS.items(), papers, strict=True)
        },
        "exact, batch 8",
    ),
    "slow link": Study(
        "BytePS, gradient compression: 100 Mbit/s between workers",
        {"seconds": "{:.1f} s", "accuracy": "{:.1f}%"},
        {
            "exact": on_a_link("exact", "518 s", "71.4%"),
            "onebit": on_a_link("onebit", "195 s", "70.6%"),
            "randomk": on_a_link("randomk", "90 s", "69.9%"),
            "topk": on_a_link("topk", "84 s", "70.4%"),
        },
        "exact",
        (0, 1, 2),
    ),
    "streaming DiLoCo": Study(
        "Douillard et al., 2025, table 1: language models, bytes at equal loss",
        {"bytes": "{:.0f}", "loss": "{:.4f}", "accuracy": "{:.1f}%"},
        {
            "exact, every step": of_ranks(LONG, RANKS, ltx.DDPStrategy(), "1", "", ""),
            "two fragments, 8 bits": of_ranks(
                LONG,
                RANKS,
                ltx.DiLoCoStrategy(100, outer_momentum=0.5, fragments=2, outer_hook=hooks.ByteGrad()),
                "1/400",
                "equal",
                "",
            ),
            "two fragments, bf16, sent 10 steps ahead": of_ranks(
                LONG,
                RANKS,
                ltx.DiLoCoStrategy(
                    100, outer_momentum=0.5, fragments=2, outer_hook="bf16", fragment_sync_delay=10, update_alpha=0.5
                ),
                "",
                "",
                "",
            ),
        },
        "exact, every step",
    ),
    "powersgd": Study(
        "Vogels et al., 2019, table 3: a ResNet-18 on CIFAR-10",
        {"bytes": "{:.0f}", "accuracy": "{:.1f}%"},
        {
            "exact": of_ranks(LOW_RANK, RANKS, ltx.DDPStrategy(), "1", "94.3%"),
            **{
                f"rank {rank}": of_ranks(
                    LOW_RANK, RANKS, ddp(hooks.PowerSGD(rank=rank, start_step=0, min_compression_rate=1.0)), *paper
                )
                for rank, paper in {1: ("1/243", "93.6%"), 2: ("1/136", "94.4%"), 4: ("1/72", "94.5%")}.items()
            },
        },
        "exact",
    ),
    "sharded": Study(
        "Tang et al., 2021, and DeepSpeed: compression, which there doesn't go with a sharded optimizer",
        {"bytes": "{:.0f}", "loss": "{:.4f}", "accuracy": "{:.1f}%"},
        {
            "exact": of_ranks(LOW_RANK, RANKS, ltx.ZeroStrategy(), "", "", ""),
            **{
                f"{name}, {under}": of_ranks(LOW_RANK, RANKS, strategy(comm_hook=hook), "", "", "")
                for name, hook in UNDER_ZERO.items()
                for under, strategy in {"DDP": ltx.DDPStrategy, "ZeRO": ltx.ZeroStrategy}.items()
            },
        },
        "exact",
    ),
}


@dataclass(frozen=True)
class Case:
    """One training."""

    study: str
    row: str
    seed: int


def cases() -> list[Case]:
    """All trainings, seed by seed, so that what disturbs some of them disturbs all rows."""
    return [Case(name, row, seed) for name, study in STUDIES.items() for seed in study.seeds for row in study.rows]


def _key(case: Case) -> Run:
    return {**asdict(case), "made": STUDIES[case.study].rows[case.row].made}


def load(path: Path = RESULTS) -> dict[str, Any]:
    """The results file: torch's version, and the runs."""
    return read(path)


# --- what came of them ------------------------------------------------------------------------------------------------


def values(runs: list[Run], study: str, row: str, column: str) -> list[float]:
    """The figure of each seed; a target that wasn't reached is infinitely far."""
    return [float("inf") if r[column] is None else r[column] for r in where(runs, study=study, row=row)]


def median(runs: list[Run], study: str, row: str, column: str) -> float:
    return statistics.median(values(runs, study, row, column))


def less(runs: list[Run], study: str, row: str, base: str) -> float:
    """By how many points the accuracy is less than the base's, the median over seeds of the difference."""
    pairs = zip(values(runs, study, base, "accuracy"), values(runs, study, row, "accuracy"), strict=True)
    return statistics.median(before - after for before, after in pairs)


def times_fewer(runs: list[Run], study: str, row: str, column: str) -> float:
    """The base's figure by the row's, medians."""
    return median(runs, study, STUDIES[study].base, column) / median(runs, study, row, column)


Verdict = tuple[bool, str]


def _in_order(runs: list[Run], study: str, column: str) -> Verdict:
    found = [median(runs, study, row, column) for row in STUDIES[study].rows]
    form = STUDIES[study].columns[column]
    return found == sorted(set(found), reverse=True), ", ".join(form.format(value) for value in found)


def _fewer_rounds(runs: list[Run]) -> Verdict:
    found = times_fewer(runs, "fedavg", "E = 5, B = 10", "rounds")
    return found >= 10, f"{found:.1f} times"


def _at_most_less(runs: list[Run], study: str, most: float, pairs: dict[str, str]) -> Verdict:
    found = {row: less(runs, study, row, base) for row, base in pairs.items()}
    said = [f"{row}: {round(-value, 1) + 0.0:+.1f}" for row, value in found.items()]
    return max(found.values()) <= most, ", ".join(said)


def _collapses(runs: list[Run]) -> Verdict:
    found = less(runs, "error feedback", "signs without, batch 8", "exact, batch 8")
    return found >= 20, f"{-found:+.1f} points"


def _bytes_of_diloco(runs: list[Run]) -> Verdict:
    found = times_fewer(runs, "streaming DiLoCo", "two fragments, 8 bits", "bytes")
    return found >= 380, f"{found:.0f} times"


def _loss_of_diloco(runs: list[Run]) -> Verdict:
    found = 1 / times_fewer(runs, "streaming DiLoCo", "two fragments, 8 bits", "loss")
    return found <= 1.02, f"{found:.3f} of the exact loss"


def _bytes_of_powersgd(runs: list[Run]) -> Verdict:
    found = [times_fewer(runs, "powersgd", f"rank {rank}", "bytes") for rank in (1, 2, 4)]
    return min(found) >= 10, ", ".join(f"{value:.1f}" for value in found)


def _gaps_under_zero(runs: list[Run]) -> Verdict:
    """By how much the loss is above the exact one: under ZeRO at most a tenth more than under DDP, or 0.001."""

    def gap(row: str) -> float:
        pairs = zip(values(runs, "sharded", row, "loss"), values(runs, "sharded", "exact", "loss"), strict=True)
        return statistics.median(lossy - exact for lossy, exact in pairs)

    found = {name: (gap(f"{name}, DDP"), gap(f"{name}, ZeRO")) for name in UNDER_ZERO}
    said = [f"{name}: {under_zero:+.4f} (DDP {under_ddp:+.4f})" for name, (under_ddp, under_zero) in found.items()]
    return all(zero <= max(1.1 * ddp, ddp + 1e-3) for ddp, zero in found.values()), ", ".join(said)


def _bytes_under_zero(runs: list[Run]) -> Verdict:
    found = [
        median(runs, "sharded", f"{name}, ZeRO", "bytes") / median(runs, "sharded", f"{name}, DDP", "bytes")
        for name in UNDER_ZERO
    ]
    return max(found) <= 1.02, ", ".join(f"{value:.3f}" for value in found)


WITH = {f"signs with feedback, batch {batch}": f"exact, batch {batch}" for batch in BATCHES}
#: study -> (claim, how it is judged)
CLAIMS: dict[str, list[tuple[str, Callable[[list[Run]], Verdict]]]] = {
    "fedavg": [
        ("Each row takes fewer rounds than the one above.", lambda runs: _in_order(runs, "fedavg", "rounds")),
        ("E = 5 with B = 10 takes a tenth of FedSGD's rounds, or less.", _fewer_rounds),
    ],
    "error feedback": [
        ("Without feedback, batch 8 loses 20 points or more.", _collapses),
        ("With feedback, at most 1.5 points are lost.", lambda runs: _at_most_less(runs, "error feedback", 1.5, WITH)),
    ],
    "slow link": [
        ("Each row takes less time than the one above.", lambda runs: _in_order(runs, "slow link", "seconds")),
        (
            "Compression costs at most 1.5 points.",
            lambda runs: _at_most_less(
                runs, "slow link", 1.5, {row: "exact" for row in HOOKS_ON_LINK if row != "exact"}
            ),
        ),
    ],
    "streaming DiLoCo": [
        ("About 400 times fewer bytes are sent.", _bytes_of_diloco),
        ("The loss is no more than 2% above that of exact steps.", _loss_of_diloco),
    ],
    "powersgd": [
        (
            "Ranks 1, 2 and 4 cost at most a point.",
            lambda runs: _at_most_less(runs, "powersgd", 1.0, {f"rank {rank}": "exact" for rank in (1, 2, 4)}),
        ),
        ("Each sends a tenth of the bytes, or less.", _bytes_of_powersgd),
    ],
    "sharded": [
        ("ZeRO's loss is above the exact one by at most a tenth more than DDP's with the same hook.", _gaps_under_zero),
        ("It sends as many bytes as DDP with the same hook.", _bytes_under_zero),
    ],
}


def _spread(found: list[float], form: str) -> str:
    least, most = form.format(min(found)), form.format(max(found))
    middle = form.format(statistics.median(found))
    return middle if least == most else f"{middle} ({least} to {most})"


def _cell(runs: list[Run], study: str, row: str, column: str) -> str:
    if column == "bytes":
        return f"1/{times_fewer(runs, study, row, column):.1f}" if row != STUDIES[study].base else "1"
    return _spread(values(runs, study, row, column), STUDIES[study].columns[column])


def table(runs: list[Run], study: str) -> str:
    """Markdown: a row for each of what the paper compares."""
    plan = STUDIES[study]
    head = [cell for column in plan.columns for cell in (f"{column}, paper", f"{column}, here")]
    lines = [f"| {study} | {' | '.join(head)} |", "|---" * (1 + len(head)) + "|"]
    for name, row in plan.rows.items():
        cells = [
            cell
            for column, paper in zip(plan.columns, row.paper, strict=True)
            for cell in (paper, _cell(runs, study, name, column))
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def claims(runs: list[Run], study: str) -> str:
    """Markdown: whether the paper's claims hold here."""
    lines = ["| claim | here | |", "|---|---|---|"]
    for text, judge in CLAIMS[study]:
        holds, found = judge(runs)
        lines.append(f"| {text} | {found} | {'holds' if holds else '**does not hold**'} |")
    return "\n".join(lines)


def tables(runs: list[Run]) -> dict[str, list[str]]:
    """What the page shows, by study."""
    return {study: [table(runs, study), claims(runs, study)] for study in STUDIES if where(runs, study=study)}


def _ready() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("error")


def main() -> None:
    """Parse, run what isn't in the file, print Markdown."""
    parser = parser_of(__doc__, RESULTS)
    parser.add_argument("--studies", nargs="+", choices=list(STUDIES), default=list(STUDIES))
    for hidden in ("--row", "--seed"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.row, int(arguments.seed))
        return
    _ready()

    begun = next((path for path in (arguments.out, RESULTS) if path.exists()), None)
    runs: list[Run] = [] if arguments.fresh or begun is None else load(begun)["runs"]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for case in [] if arguments.table else cases():
        if case.study not in arguments.studies or where(runs, **_key(case)):
            continue
        found = STUDIES[case.study].rows[case.row].run(case.seed)
        print(*asdict(case).values(), found, file=sys.stderr, flush=True)
        runs = [r for r in runs if r not in where(runs, **asdict(case))] + [{**_key(case), **found}]
        lines = ",\n".join(json.dumps(r) for r in runs)
        arguments.out.write_text(f'{{"torch": "{torch.__version__}", "runs": [\n{lines}\n]}}\n')

    for study, both in tables(runs).items():
        print(f"{STUDIES[study].source}\n")
        print("\n\n".join(both), end="\n\n")


if __name__ == "__main__":
    main()
