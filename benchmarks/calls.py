"""What a step calls on a GPU: where its time goes, if it is longer than DDP's.

    python -m benchmarks.calls --device cuda [--large]

One rank. For each variant of :mod:`benchmarks.step_time`: how long the host is busy with a step, how long the step
takes if nothing runs ahead, and in a row of steps; the time that kernels take together, and calls of CUDA's by what
they do. Waits of the host, and memory that torch's allocator asks the driver for, cost the most.

Before that, what the host does for one bucket with an FP16 hook (:mod:`benchmarks.bucket`), in ltx and in DDP: counts,
and times from a bucket's being ready, with the part of them in which the thread didn't run, because it waited for
Python's lock or in the driver. ``--variants`` without any leaves it at that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

import torch
from torch.profiler import ProfilerActivity, profile

import ltx
from benchmarks import bucket
from benchmarks.models import Large, Transformer
from benchmarks.ranks import Variant, backend_on, found_by_ranks
from benchmarks.step_time import Setting, variants

NAMES = ["local", "ddp", "ltx", "ddp, fp16", "ltx, fp16", "ltx, large buckets, fp16", "ltx guarded, fp16"]
#: heading: the beginnings of the names of calls
CALLS = {
    "kernels": ("cudaLaunch", "cuLaunch"),
    "copies": ("cudaMemcpy", "cudaMemset"),
    "events": ("cudaEvent", "cudaStreamWaitEvent"),
    "memory": ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaFreeHost"),
    "waits": ("cudaStreamSynchronize", "cudaEventSynchronize"),
}
WARM_UP, STEPS, PROFILED = 8, 12, 4


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measured(step: Variant) -> dict[str, float]:
    """Milliseconds and calls a step."""
    host, whole = [], []
    for number in range(WARM_UP + STEPS):
        synchronize()
        began = time.perf_counter()
        step()
        done = time.perf_counter()
        synchronize()
        if number >= WARM_UP:
            host.append(done - began)
            whole.append(time.perf_counter() - began)
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    synchronize()
    row = time.perf_counter() - began
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        for _ in range(PROFILED):
            step()
        synchronize()
    events = recorded.key_averages()
    found = {
        "host, ms": 1e3 * statistics.median(host),
        "step, ms": 1e3 * statistics.median(whole),
        "in a row, ms": 1e3 * row / STEPS,
        "GPU, ms": sum(event.self_device_time_total for event in events) / 1e3 / PROFILED,
    }
    for heading, names in CALLS.items():
        called = [event for event in events if event.key.startswith(names)]
        found[heading] = sum(event.count for event in called) / PROFILED
        found[f"{heading}, ms"] = sum(event.self_cpu_time_total for event in called) / 1e3 / PROFILED
    return found


def worker(arguments: argparse.Namespace) -> None:
    """The rank."""
    if arguments.large:
        torch.set_float32_matmul_precision("high")
    with ltx.init(backend=backend_on(arguments.device)):
        if not arguments.variants:
            print(json.dumps(bucket.found(arguments.device, synchronize)))
            return
        setting = Setting(0, arguments.device, Large if arguments.large else Transformer)
        print(json.dumps({name: measured(step) for name, step in variants(setting, arguments.variants).items()}))


def main() -> None:
    """Run, print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--large", action="store_true", help="a model of 152 M parameters")
    parser.add_argument("--variants", nargs="*", default=NAMES)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    given = ["--device", arguments.device, *["--large"] * arguments.large, "--variants"]
    print(bucket.table(*found_by_ranks(["-m", "benchmarks.calls", *given], "loopback", 1)), "\n", flush=True)
    if not arguments.variants:
        return
    given += arguments.variants
    found: dict[str, dict[str, float]] = found_by_ranks(["-m", "benchmarks.calls", *given], "loopback", 1)
    headings = list(next(iter(found.values())))
    print("| a step | " + " | ".join(headings) + " |\n|---|" + "---:|" * len(headings))
    for name, figures in found.items():
        print(
            f"| {name} | "
            + " | ".join(f"{figures[heading]:.{1 if 'ms' in heading else 0}f}" for heading in headings)
            + " |"
        )


if __name__ == "__main__":
    sys.exit(main())
