"""What a pool's workers cost: a start, a call, results of 100 MB, an interrupt, a failure on one rank, a new world.

    python -m benchmarks.runtime [--rounds 5]

Times are medians over rounds, in seconds of wall time. The goals are for a machine with two idle cores.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import torch

import ltx
from ltx.errors import LtxError, WorkerError

#: What is measured, with the goal as it is printed.
GOALS = {
    "cold start of 2 workers": "3 s at most",
    "cold start of 4 workers": "5 s at most",
    "small call, 4 workers": "2 ms at most",
    "100 MB of results, 2 workers": "1 GB/s at least",
    "100 MB of result, 1 worker": "1 GB/s at least",
    "100 MB of arguments to 2 workers": "",
    "Ctrl-C while one rank waits for the other": "1 s at most",
    "a failure on one rank, the other waits for it": "2 s at most",
    "the next call after that": "",
    "a new world after a failed step, 2 ranks": "1 s at most",
    "ltx.launch of 2, fork": "",
}


def taken_s(action: Callable[[], object]) -> float:
    """How long `action` takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def cold_start(n: int) -> Callable[[], float]:
    """Starts and ends a pool; how long the start took."""

    def measure() -> float:
        began = time.perf_counter()
        with ltx.Pool(n):
            return time.perf_counter() - began

    return measure


def small_call(pool: ltx.Pool) -> float:
    """The median over 200 calls of a function that does nothing."""
    return statistics.median(taken_s(lambda: pool.run(nothing)) for _ in range(200))


def nothing() -> None:
    """What a small call does."""


def keep(nbytes: int) -> None:
    """Have the worker keep a tensor."""
    torch.ltx_benchmark = torch.ones(nbytes // 4)  # type: ignore[attr-defined]


def kept() -> torch.Tensor:
    """It."""
    return torch.ltx_benchmark  # type: ignore[attr-defined,no-any-return]


def results(pool: ltx.Pool) -> float:
    """100 MB altogether back from all workers."""
    pool.run(keep, 100_000_000 // len(pool))
    return taken_s(lambda: pool.run(kept))


def wait_for_other(fails: bool) -> None:
    """Rank 1 doesn't join the barrier in which rank 0 waits."""
    if ltx.world().rank == 1:
        if fails:
            raise ValueError
        time.sleep(100)
    ltx.barrier()


def interrupted(pool: ltx.Pool) -> float:
    """From the signal to the exception that tells where each rank was."""
    sent: list[float] = []

    def interrupt() -> None:
        sent.append(time.perf_counter())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.5, interrupt)
    timer.start()
    with suppress(KeyboardInterrupt):
        pool.run(wait_for_other, False)
    took_s = time.perf_counter() - sent[0]
    pool.run(nothing)
    return took_s


def failed(pool: ltx.Pool) -> float:
    """From the call to the error that names both ranks."""
    began = time.perf_counter()
    with suppress(WorkerError):
        pool.run(wait_for_other, True)
    return time.perf_counter() - began


def begin_anew() -> float:
    """Leave a step on rank 1 alone, as for want of memory, and begin a new world; how long until its first sum."""

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if ltx.world().rank == 1:
            raise MemoryError
        return (w * x).sum()

    with suppress(MemoryError, LtxError):
        ltx.grad(ltx.data_parallel(loss))(torch.ones(1000), torch.ones(1000))
        raise AssertionError("rank 0 hasn't heard of it")
    return taken_s(lambda: (ltx.init(), ltx.psum(torch.ones(1))))


def new_world(pool: ltx.Pool) -> float:
    """From the failure to a sum in the new world, on the slower rank."""
    return max(pool.run(begin_anew))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    with ltx.Pool(1) as one, ltx.Pool(2) as two, ltx.Pool(4) as four:
        big = torch.ones(25_000_000)
        measures: dict[str, Callable[[], float]] = {
            "cold start of 2 workers": cold_start(2),
            "cold start of 4 workers": cold_start(4),
            "small call, 4 workers": lambda: small_call(four),
            "100 MB of results, 2 workers": lambda: results(two),
            "100 MB of result, 1 worker": lambda: results(one),
            "100 MB of arguments to 2 workers": lambda: taken_s(lambda: two.run(torch.numel, big)),
            "Ctrl-C while one rank waits for the other": lambda: interrupted(two),
            "a failure on one rank, the other waits for it": lambda: failed(two),
            "the next call after that": lambda: taken_s(lambda: two.run(nothing)),
            "a new world after a failed step, 2 ranks": lambda: new_world(two),
            "ltx.launch of 2, fork": lambda: taken_s(lambda: ltx.launch(nothing, 2, start_method="fork")),
        }
        times: dict[str, list[float]] = {name: [] for name in measures}
        for _ in range(rounds):
            for name, measure in measures.items():
                times[name].append(measure())
    print(f"{'median of ' + str(rounds):48}{'s':>9}{'':>12}  goal")
    for name, goal in GOALS.items():
        median = statistics.median(times[name])
        speed = f"{0.1 / median:.2f} GB/s" if "100 MB" in name else ""
        print(f"{name:48}{median:9.4f}{speed:>12}  {goal}")


if __name__ == "__main__":
    main()
