"""What the checks that are always on cost: a small GPT's training step with them and without, in turns in one run.

    python -m benchmarks.checks [--iterations 200]

Ranks take turns of the same step. In every other one what only checks is replaced by nothing: the tests of arguments
and trees, the running digest and its comparison in the step summary, the guards of communication state and of the
step's output. Looking up what the ranks have agreed stays, as the plan of the step hangs on it. The figure is the
median over iterations of the ratio of the two, the slowest rank's times each; the goal is 1.01 at most. Heartbeats,
which have threads of their own, are given as their share of processor time, and the comparison of replicas, which is
done once in a world, by itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import ltx
from benchmarks.gpt import GPT
from benchmarks.ranks import backend_on, found_by_ranks, interleaved, ratio
from ltx.core import comm
from ltx.core.base import arguments, tree
from ltx.core.comm.channel import Channel
from ltx.core.transforms.closure_check import refuse_captured
from ltx.core.transforms.run import refuse_gradients
from ltx.core.transforms.sync_state import SyncState

CONTEXT, BATCH, VOCABULARY = 64, 8, 96
GOAL = 1.01


def _nothing(*args: Any, **kwargs: Any) -> None:
    """In place of a check."""


def _unchecked_summary(self: Any) -> comm.StepSummary:
    if self._summary is None:
        summed = self._work.wait()
        self._summary, self._work = comm.StepSummary(summed[0], summed[1]), None
    return self._summary


def _only_count(self: Any, agreement: Any) -> None:
    self.issued += 1


FUNCTIONS: list[Callable[..., Any]] = [
    tree.check_tensors,
    tree.check_leaves,
    tree.check_dense,
    arguments.check_fields,
    refuse_captured,
    refuse_gradients,
]
METHODS: list[tuple[type, str, Callable[..., Any]]] = [
    (comm.IssuedSummary, "wait", _unchecked_summary),
    (Channel, "advance", _only_count),
    (SyncState, "checked_step", lambda self: self.step),
]


def places() -> list[tuple[Any, str, Any, Any]]:
    """(where, name, the check, what stands there without it), wherever a module holds a check."""
    found: list[tuple[Any, str, Any, Any]] = [(cls, name, getattr(cls, name), other) for cls, name, other in METHODS]
    for module in [module for name, module in sys.modules.items() if name.split(".")[0] == "ltx"]:
        for name, value in list(vars(module).items()):
            if any(value is function for function in FUNCTIONS):
                found.append((module, name, value, _nothing))
    return found


@contextmanager
def without_checks(where: list[tuple[Any, str, Any, Any]]) -> Iterator[None]:
    """No checks in here."""
    for owner, name, _, other in where:
        setattr(owner, name, other)
    try:
        yield
    finally:
        for owner, name, check, _ in where:
            setattr(owner, name, check)


def _heartbeat_s() -> float:
    """Processor time of the threads that beat and ask the store, so far."""
    ticks = 0
    for thread in threading.enumerate():
        if thread.name in ("ltx-heartbeat", "ltx-asks-the-store"):
            fields = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / 100


def worker(iterations: int) -> None:
    """One rank."""
    torch.set_num_threads(1)
    with ltx.init(backend=backend_on("cpu")) as world:
        torch.manual_seed(0)
        model = GPT(VOCABULARY, CONTEXT)
        inputs, targets = (torch.randint(VOCABULARY, (BATCH, CONTEXT)) for _ in range(2))

        def loss(params: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            logits = ltx.functional_call(model, params, (inputs,))
            return cross_entropy(logits.flatten(0, 1), targets.flatten())

        adamw = ltx.optim.from_torch(torch.optim.AdamW, lr=1e-4)
        train = ltx.train_step(ltx.data_parallel(loss), ltx.optim.chain(ltx.optim.clip_by_global_norm(1.0), adamw))
        state = [train.init(dict(model.named_parameters()))]

        def step() -> None:
            state[0], metrics = train(state[0], inputs, targets)
            float(metrics.loss)

        step()
        began = time.perf_counter()
        ltx.check_replicas(state[0])
        replicas_ms = 1e3 * (time.perf_counter() - began)
        where = places()

        def unchecked() -> None:
            with without_checks(where):
                step()

        began, beat = time.perf_counter(), _heartbeat_s()
        times = interleaved({"checks": step, "none": unchecked}, iterations)
        share = (_heartbeat_s() - beat) / (time.perf_counter() - began)
        if world.is_global_zero:
            print(json.dumps({"times": times, "replicas_ms": replicas_ms, "heartbeats": share}))


def main() -> None:
    """Parse, run, print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker(given.iterations)
        return
    found = found_by_ranks(["-m", "benchmarks.checks", *sys.argv[1:]], "loopback", given.ranks)
    times = found["times"]
    print("| a small GPT's step | ms | ratio | goal |\n|---|---|---|---|")
    print(f"| without checks | {1e3 * statistics.median(times['none']):.2f} | 1 | |")
    checked = ratio(times, "checks", "none")
    print(f"| with checks | {1e3 * statistics.median(times['checks']):.2f} | {checked:.4f} | at most {GOAL} |")
    beats = f"{100 * found['heartbeats']:.2f} % of a processor"
    print(f"\nHeartbeats: {beats}. Comparing replicas: {found['replicas_ms']:.1f} ms, once.")


if __name__ == "__main__":
    sys.exit(main())
