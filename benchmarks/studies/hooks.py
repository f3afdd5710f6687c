"""Convergence with each communication hook: validation loss after a fixed number of steps, and the bytes that it took.

    python -m benchmarks.studies.hooks [--fresh] [--table] [--out FILE]

Two tasks: a small GPT on the characters of Python's own help texts, and scikit-learn's digits. Each hook
trains from the same parameters on the same batches as fp32 does, over the seeds 0, 1 and 2, which were fixed before
anything was run; learning rates, warm-ups and block sizes were chosen on other seeds. Ranks are simulated, and for some
of the runs two processes. All worlds share the same global batches, so that they differ in communication alone.

Bytes are those that rank 0 sends for gradients in the whole training, from recordings of simulated ranks; on processes
what was recorded has to match. Every run is written to the results file as it ends, and one that stands there with the
same settings isn't repeated; `--fresh` begins anew. The notebook 02_communication_hooks reads that file.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import warnings
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ltx
from benchmarks.studies.tasks import SETTINGS, Params, Settings, Task, drift, parser_of, read, task_of, where
from benchmarks.studies.tasks import TASKS as TASKS
from ltx import hooks

SEEDS = (0, 1, 2)
RANKS = (16, 64)
PROCESSES = 2
RESULTS = Path(__file__).parent / "hooks.json"


def hooks_of(settings: Settings) -> dict[str, hooks.CommHook]:
    """Every hook, by the name that the tables use."""
    k, block = settings.warm_up, settings.block
    return {
        "fp32": hooks.AllReduce(),
        "fp16": hooks.FP16(),
        "bf16": hooks.BF16(),
        "bytegrad": hooks.ByteGrad(),
        "quantize": hooks.Quantize(),
        "quantize per channel": hooks.Quantize("channel", block),
        "qsgd": hooks.QSGD(block=block),
        "powersgd 4": hooks.PowerSGD(rank=4, start_step=k),
        "powersgd 4 in bf16": hooks.cast(hooks.PowerSGD(rank=4, start_step=k), torch.bfloat16),
        "batched powersgd 4": hooks.BatchedPowerSGD(rank=4, start_step=k),
        "onebit": hooks.after(k, hooks.OneBit(block)),
        "topk 5%": hooks.after(k, hooks.TopK(0.05)),
        "randomk 20%": hooks.after(k, hooks.RandomK(0.2)),
        "randomk 20% in bytes": hooks.after(k, hooks.chain(hooks.RandomK(0.2), hooks.ByteGrad())),
        "onebit, no feedback": hooks.after(k, hooks.OneBit(block, error_feedback=False)),
        "topk 5%, no feedback": hooks.after(k, hooks.TopK(0.05, error_feedback=False)),
        "randomk 20%, no feedback": hooks.after(k, hooks.RandomK(0.2, error_feedback=False)),
        "onebit from step 0": hooks.OneBit(block),
        "noop": hooks.Noop(),
    }


#: hook -> how far its mean validation loss may be above fp32's
GOALS = {"powersgd 4": 0.01, "bytegrad": 0.01, "quantize": 0.01, "quantize per channel": 0.01, "onebit": 0.02}

#: What is also run on the larger simulated world and on processes.
CHOSEN = ("fp32", *GOALS)

#: What shows why Adam's eps matters.
WITH_SMALL_EPS = ("fp32", "powersgd 4", "bytegrad", "quantize", "onebit")


def strategy_of(task: Task, hook: str) -> ltx.DDPStrategy:
    """The strategy with the hook of that name."""
    return ltx.DDPStrategy(comm_hook=hooks_of(task.settings)[hook])


def bytes_of_step(task: Task, hook: str, ranks: int, step: int) -> int:
    """What rank 0 sends for gradients in that step."""
    strategy, params = strategy_of(task, hook), task.params(0)
    state = replace(ltx.data_parallel(task.loss, strategy).init(params), step=step)
    with ltx.profile.record() as trace:
        ltx.vmap(lambda grads: ltx.sync_gradients(grads, strategy, state)[0], in_dims=None, axis_size=ranks)(params)
    return trace.bytes


def bytes_of(task: Task, hook: str, ranks: int) -> int:
    """What rank 0 sends for gradients in the whole training."""
    strategy = strategy_of(task, hook)
    by_hook: dict[hooks.CommHook | None, int] = {}
    total = 0
    for count in range(task.settings.steps):
        in_force = strategy.hook(count)
        if in_force not in by_hook:
            by_hook[in_force] = bytes_of_step(task, hook, ranks, count)
        total += by_hook[in_force]
    return total


@dataclass(frozen=True)
class Outcome:
    """What a training came to: validation losses of rank 0's parameters.

    Attributes:
        first_loss, loss: before the first step and after the last one.
        curve: (steps done, loss on a part of what is held out).
        apart: how far ranks' parameters are from their mean at the end, by its norm; 0 where they are equal to the bit.
    """

    first_loss: float
    loss: float
    curve: list[tuple[int, float]]
    apart: float


def simulated(task: Task, hook: str, seed: int, ranks: int) -> Outcome:
    """Train on simulated ranks."""
    step, drifting = ltx.data_parallel(task.loss, strategy_of(task, hook)), hook == "noop"
    if drifting:  # a data-parallel step refuses parameters that differ between ranks
        step = ltx.block_backward_sync(step)
    optimizer, params = task.optimizer(), task.params(seed)

    def one_rank(params: Params, sync_state: Any, x: Tensor, y: Tensor) -> Any:
        (grads, sync_state), _ = ltx.grad_and_value(step)(params, *ltx.shard((x, y)), sync_state=sync_state)
        return grads, sync_state

    def each(leaf: Tensor) -> Tensor:
        return leaf.expand(ranks, *leaf.shape).clone()

    # What ranks have in common is held once: parameters and the optimizer's state, as long as gradients are equal.
    sync_state = ltx.tree.map(each, step.init(params))
    params = ltx.tree.map(each, params) if drifting else params
    opt_state = optimizer.init(params)
    on_ranks = ltx.vmap(one_rank, in_dims=(0 if drifting else None, 0, None, None), axis_size=ranks)

    def rank_0(tree: Params) -> Params:
        return {name: leaf[0] for name, leaf in tree.items()}

    def validate(every: int = 1) -> float:
        return task.validate(rank_0(params) if drifting else params, every)

    first_loss, curve = validate(), []
    for index in range(task.settings.steps):
        grads, sync_state = on_ranks(params, sync_state, *task.batch(index, seed))
        if not drifting:
            if not all((g == g[:1]).all() for g in grads.values()):
                raise RuntimeError(f"{hook}, seed {seed}, step {index}: gradients differ between the ranks.")
            grads = rank_0(grads)
        params, opt_state = optimizer.apply(grads, opt_state, params)
        if _is_mark(index + 1, task.settings.steps):
            curve.append((index + 1, validate(every=8)))
    return Outcome(first_loss, validate(), curve, drift(list(params.values())) if drifting else 0.0)


def _is_mark(done: int, steps: int, marks: int = 15) -> bool:
    return done * marks // steps > (done - 1) * marks // steps


def one_process(task: Task, hook: str, seed: int) -> tuple[Outcome, list[int]]:
    """Train on this process and its peers; and the bytes that each step sent for gradients."""
    step = ltx.data_parallel(task.loss, strategy_of(task, hook))
    train = ltx.train_step(step, task.optimizer())
    state = train.init(task.params(seed))
    first_loss, curve, sent = task.validate(state.params), [], []
    for index in range(task.settings.steps):
        with ltx.profile.record() as trace:
            state, _ = train(state, *ltx.shard(task.batch(index, seed)))
        sent.append(sum(event.nbytes for event in trace.buckets))
        if _is_mark(index + 1, task.settings.steps):
            curve.append((index + 1, task.validate(state.params, every=8)))
    everyone = [ltx.all_gather(leaf) for leaf in state.params.values()]
    apart = 0.0 if all((leaf == leaf[:1]).all() for leaf in everyone) else drift(everyone)
    return Outcome(first_loss, task.validate(state.params), curve, apart), sent


@cache
def _pool() -> ltx.Pool:
    return ltx.Pool(PROCESSES)


def on_processes(task: Task, hook: str, seed: int) -> Outcome:
    """Train on processes; the outcome of rank 0."""
    outcome, sent = _pool().run(one_process, task, hook, seed).rank(0)
    if any(sent[step] != bytes_of_step(task, hook, PROCESSES, step) for step in (0, task.settings.steps - 1)):
        raise RuntimeError(f"{hook}: processes didn't send what simulated ranks do.")
    return outcome


@dataclass(frozen=True)
class Case:
    """One training of the study."""

    task: str
    ranks: int
    backing: str  # "simulated" or "processes"
    hook: str
    seed: int


def cases() -> list[Case]:
    """The study: the chosen hooks on every world, then the others on the smallest simulated one."""
    found = []
    for task in ("digits", "gpt"):
        for ranks, backing in [*((n, "simulated") for n in RANKS), (PROCESSES, "processes")]:
            found += [Case(task, ranks, backing, hook, seed) for hook in CHOSEN for seed in SEEDS]
    found += [Case("gpt, eps 1e-8", RANKS[0], "simulated", hook, seed) for hook in WITH_SMALL_EPS for seed in SEEDS]
    for task in ("digits", "gpt"):
        others = [hook for hook in hooks_of(SETTINGS[task]) if hook not in CHOSEN]
        found += [Case(task, RANKS[0], "simulated", hook, seed) for seed in SEEDS for hook in others]
    return found


def run(case: Case) -> dict[str, Any]:
    """Train, and tell everything about it."""
    task = task_of(case.task)
    if case.backing == "processes":
        outcome = on_processes(task, case.hook, case.seed)
    else:
        outcome = simulated(task, case.hook, case.seed, case.ranks)
    return {**_settings(case), **asdict(outcome), "bytes": bytes_of(task, case.hook, case.ranks)}


def _settings(case: Case) -> dict[str, Any]:
    settings = SETTINGS[case.task]
    return {**asdict(case), "made": repr(hooks_of(settings)[case.hook]), "settings": asdict(settings)}


def load(path: Path = RESULTS) -> dict[str, Any]:
    """The results file: torch's version, and the runs."""
    return read(path)


def ratios(runs: list[dict[str, Any]], task: str, ranks: int, hook: str) -> list[float]:
    """Validation loss by fp32's of the same seed, a ratio a seed."""
    found = where(runs, task=task, ranks=ranks)
    base = {r["seed"]: r["loss"] for r in where(found, hook="fp32")}
    return [r["loss"] / base[r["seed"]] for r in where(found, hook=hook) if r["seed"] in base]


def table(runs: list[dict[str, Any]], task: str, ranks: int) -> list[str]:
    """Markdown: a row a hook."""
    found = where(runs, task=task, ranks=ranks)
    backing = "processes" if ranks == PROCESSES else "simulated ranks"
    lines = [
        f"| {task}, {ranks} {backing} | bytes of fp32's | validation loss | to fp32's | seed by seed | goal |",
        "|---|---|---|---|---|---|",
    ]
    plain = next((r["bytes"] for r in found if r["hook"] == "fp32"), math.nan)
    for hook in dict.fromkeys(r["hook"] for r in found):
        rows = where(found, hook=hook)
        loss = statistics.mean(r["loss"] for r in rows)
        each = ratios(runs, task, ranks, hook)
        mean = statistics.mean(each) if each else math.nan
        seeds = ", ".join(f"{value:.4f}" for value in each)
        goal = GOALS.get(hook)
        said = "" if goal is None else f"{1 + goal:.2f}, {'met' if mean <= 1 + goal else 'missed'}"
        lines.append(f"| {hook} | {rows[0]['bytes'] / plain:.3f} | {loss:.4f} | {mean:.4f} | {seeds} | {said} |")
    first = statistics.mean(r["first_loss"] for r in found)
    return [*lines, "", f"Validation loss before the first step: {first:.4f}."]


def main() -> None:
    """Parse, run what isn't in the file, print Markdown."""
    arguments = parser_of(__doc__, RESULTS).parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("error")

    known = load(arguments.out if arguments.out.exists() else RESULTS)
    runs = [] if arguments.fresh else known["runs"]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for case in [] if arguments.table else cases():
        if where(runs, **_settings(case)):
            continue
        found = run(case)
        print(*asdict(case).values(), f"{found['loss']:.4f}", file=sys.stderr, flush=True)
        runs = [r for r in runs if r not in where(runs, **asdict(case))] + [found]
        lines = ",\n".join(json.dumps(r) for r in runs)
        arguments.out.write_text(f'{{"torch": "{torch.__version__}", "runs": [\n{lines}\n]}}\n')

    for task, ranks in dict.fromkeys((r["task"], r["ranks"]) for r in runs):
        print("\n".join(table(runs, task, ranks)), end="\n\n")


if __name__ == "__main__":
    main()
