"""Starting a benchmark's ranks on a link, and timing what they do in turns."""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.links import Link, link

Variant = Callable[[], object]

# glibc gives freed memory back to the system and faults it in again at the next step, a few milliseconds a step that
# fall on one variant or another by the order of their frees. Kept memory is the same for all.
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "4000000000", "MALLOC_MMAP_THRESHOLD_": "4000000000"}


def found_by_ranks(
    arguments: list[str], link_name: str, ranks: int, *, keep_memory: bool = True, node_size: int = 1
) -> Any:
    """Run ``python *arguments --worker`` as each rank on a link of that name: the last line rank 0 prints, as JSON."""
    with link(link_name, ranks, node_size) as made:
        printed = run_ranks([*arguments, "--worker"], made, ranks, keep_memory=keep_memory)
    return json.loads(printed.strip().splitlines()[-1])


def run_ranks(
    arguments: list[str], link: Link, ranks: int, *, keep_memory: bool = True, timeout_s: float = 3000
) -> str:
    """Run ``python *arguments`` as each rank on `link`; gives what rank 0 printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(ranks):
        environ = {
            **os.environ,
            **link.environ,
            **(KEEP_MEMORY if keep_memory else {}),
            "OMP_NUM_THREADS": "1",
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": link.address,
            "MASTER_PORT": str(port),
        }
        command = [*link.prefixes[rank], sys.executable, *arguments]
        processes.append(
            subprocess.Popen(command, env=environ, stdout=subprocess.PIPE if rank == 0 else None, text=True)
        )
    try:
        printed, _ = processes[0].communicate(timeout=timeout_s)
        for rank, process in enumerate(processes):
            if process.wait(timeout=60):
                raise RuntimeError(f"rank {rank} failed with exit code {process.returncode}: {' '.join(arguments)}")
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return printed


def backend_on(device: str) -> str | None:
    """What ``ltx.init`` is told: gloo on the CPU, of whatever machine, and where ranks share a GPU; else nothing."""
    shared = int(os.environ.get("WORLD_SIZE", "1")) > torch.cuda.device_count()
    return "gloo" if device == "cpu" or shared else None


def interleaved(
    variants: Mapping[str, Variant],
    iterations: int,
    warmup: int = 5,
    block: int = 1,
    host: dict[str, list[float]] | None = None,
) -> dict[str, list[float]]:
    """Seconds of each variant at each iteration, taken in turns; each the slowest rank's.

    Turns are of `block` iterations, of which the mean is taken. `host`: is given this rank's seconds by the time that
    the host was done, before it waited for a GPU.
    """
    times: dict[str, list[float]] = {name: [] for name in variants}
    for iteration in range(warmup + iterations):
        for name, variant in variants.items():
            if dist.is_initialized():
                dist.barrier()
            began = time.perf_counter()
            for _ in range(block):
                variant()
            if host is not None and iteration >= warmup:
                host.setdefault(name, []).append((time.perf_counter() - began) / block)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            taken = torch.tensor((time.perf_counter() - began) / block)
            if dist.is_initialized():
                dist.all_reduce(taken, dist.ReduceOp.MAX)
            if iteration >= warmup:
                times[name].append(taken.item())
    return times


def ratios(times: Mapping[str, list[float]], name: str, base: str) -> list[float]:
    """At each iteration `name`'s time by `base`'s."""
    return [a / b for a, b in zip(times[name], times[base], strict=True)]


def ratio(times: Mapping[str, list[float]], name: str, base: str) -> float:
    """Their median."""
    return statistics.median(ratios(times, name, base))
