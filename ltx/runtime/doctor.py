"""``ltx doctor`` reports which world was chosen and why, what this machine has, and whether a collective works.

Under a launcher (``srun ltx doctor``, ``ltx run -n 4 -m ltx doctor``) the launcher's ranks try the collective, and rank
0 prints the report. Without a launcher, two new workers try it. Every wait has a time limit.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import statistics
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby, product

import torch
import torch.distributed as dist

from ltx.core import collectives
from ltx.core.world.groups import interface_of, interfaces, is_loopback, own_address_towards
from ltx.core.world.init import init
from ltx.core.world.launchers import LAUNCHERS, launcher_of, placement_from_env
from ltx.core.world.placement import LOOPBACK, Placement, why_no_slurm_task
from ltx.core.world.world import cores, world, world_of
from ltx.errors import LtxError
from ltx.runtime.pool import Pool

_SMALL_SHM = 256 << 20
_MESSAGES = (("4 B", 1, 30), ("16 MiB", 4 << 20, 5))  # name, float32 elements, repetitions
# This comes on top of the timeouts of ltx.init and of the collectives: processes start, and names are looked up.
_MORE_S = 30.0


@dataclass(frozen=True)
class Finding:
    """One line of the report: `text` is what was found, `warning` what may go wrong, `problem` what is wrong."""

    section: str
    name: str
    text: str
    warning: str = ""
    problem: str = ""


def doctor(*, as_json: bool = False, timeout_s: float = 30.0) -> int:
    """Print the report. Returns the exit status: 1 if the report names a problem, else 0."""
    watchdog = threading.Timer(2 * timeout_s + _MORE_S, _give_up, [2 * timeout_s + _MORE_S])
    watchdog.daemon = True
    watchdog.start()
    try:
        return _examine(os.environ, as_json, timeout_s)
    finally:
        watchdog.cancel()


def _give_up(after_s: float) -> None:
    print(f"ltx doctor: problem: not done after {after_s:g} s; something hangs.", file=sys.stderr, flush=True)
    os._exit(1)


def _examine(environ: Mapping[str, str], as_json: bool, timeout_s: float) -> int:
    try:
        placement = placement_from_env(environ)
        world = _world(environ, placement)
    except LtxError as error:
        placement, world = Placement("none"), [Finding("world", "launcher", "unclear", problem=str(error))]
    found = [*_versions(), *world, *_machine(environ, placement)]
    by_rank, everyone = [found], True
    if not world[0].problem:
        by_rank, everyone = _with_collectives(found, placement.size, timeout_s)
    if placement.rank == 0:
        print(_report(by_rank, as_json), flush=True)
    elif not everyone:  # rank 0's report doesn't have this rank's problems
        print(*(f"rank {placement.rank}: {note}" for note in _notes(by_rank, "problem")), sep="\n", file=sys.stderr)
    return int(any(finding.problem for findings in by_rank for finding in findings))


def _versions() -> list[Finding]:
    try:
        ours = version("ltx")
    except PackageNotFoundError:  # ltx is imported from a checkout that isn't installed
        ours = "not installed as a package"
    return [
        Finding("versions", "ltx", ours),
        Finding("versions", "torch", torch.__version__),
        Finding("versions", "python", f"{platform.python_version()}, {sys.executable}"),
    ]


def _world(environ: Mapping[str, str], placement: Placement) -> list[Finding]:
    launcher = launcher_of(environ)
    found = [] if launcher is None else [f"{mark}={environ[mark]!r}" for mark in launcher.marks if mark in environ]
    why = f"{placement.launcher}, by {', '.join(found)}" if found else "none, so a world of one"
    absent = dict.fromkeys(mark for row in LAUNCHERS for mark in row.marks if mark not in environ)
    findings = [Finding("world", "launcher", why), Finding("world", "not set", ", ".join(absent))]
    if launcher is None and (no_task := why_no_slurm_task(environ)):
        findings.append(Finding("world", "slurm", no_task))
    world = world_of(placement)
    on_node = f"node {world.node_rank} of {world.num_nodes}, local rank {world.local_rank} of {placement.local_size}"
    findings.append(Finding("world", "rank", f"{world.rank} of {world.size}, {on_node}"))
    if placement.master is not None:
        address, port = placement.master
        findings.append(Finding("world", "meets at", f"{address}, port {port}"))
    return [*findings, Finding("world", "computes on", f"{world.device}, backend {world.backend}")]


def _machine(environ: Mapping[str, str], placement: Placement) -> list[Finding]:
    devices = ["cpu", *(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))]
    available = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    available_cores, threads = cores(), torch.get_num_threads()
    local_size = placement.local_size
    crowded = ""
    if local_size > 1 and threads * local_size > available_cores:
        each = max(1, available_cores // local_size)
        crowded = (
            f"{local_size} ranks of {threads} threads share {available_cores} cores: set OMP_NUM_THREADS to {each}"
        )
    of_rank = f"{threads} for a rank, {available_cores} cores, OMP_NUM_THREADS={environ.get('OMP_NUM_THREADS')}"
    return [
        Finding("machine", "devices", ", ".join(devices)),
        Finding("machine", "backends", ", ".join(name for name, there in available.items() if there)),
        *_interface(environ, placement.master, several_nodes=placement.num_nodes > 1),
        _shared_memory(),
        Finding("machine", "threads", of_rank, warning=crowded),
    ]


def _shared_memory() -> Finding:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return Finding("machine", "/dev/shm", "none", warning=f"{error}: data loaders with workers need it")
    text = f"{usage.free / 2**20:,.0f} MiB free of {usage.total / 2**20:,.0f}"
    small = "data loaders with workers may run out of it; containers get more by --shm-size"
    return Finding("machine", "/dev/shm", text, warning=small if usage.free < _SMALL_SHM else "")


def _interface(environ: Mapping[str, str], master: tuple[str, int] | None, several_nodes: bool) -> list[Finding]:
    """gloo's interface and its address: those of GLOO_SOCKET_IFNAME, else those from which `master` is reached.

    If the address is a loopback address, ltx.init uses instead the address from which the other nodes are reached.
    """
    addresses, problem = interfaces(), ""
    if chosen := environ.get("GLOO_SOCKET_IFNAME"):
        names = chosen.split(",")
        if not addresses.keys() >= set(names):
            problem = f"GLOO_SOCKET_IFNAME={chosen!r}: expected one of {', '.join(addresses)}"
        text = ", ".join(f"{name} {addresses.get(name) or 'without an IPv4 address'}" for name in names)
        text += ", by GLOO_SOCKET_IFNAME"
        usable = next((addresses[name] for name in names if addresses.get(name)), "")
        if several_nodes and usable and is_loopback(usable):
            others = ", ".join(name for name in addresses if name != "lo")
            problem = (
                f"{usable} can't be reached from the other nodes: unset GLOO_SOCKET_IFNAME, or set it to the interface "
                f"between them, one of {others}"
            )
    else:
        host, port = master or (LOOPBACK, 0)
        address = own_address_towards(host, port)
        text = f"{interface_of(address)} {address}, from which {host} is reached".strip()
        if not address:
            text, problem = "none", f"MASTER_ADDR={host!r} isn't reached from this machine"
    return [Finding("machine", "hostname", socket.gethostname()), Finding("machine", "gloo uses", text, "", problem)]


def measure() -> list[Finding]:
    """Time psums over this world's ranks and check their results, on the CPU and on this rank's accelerator if any."""
    size, rank = collectives.axis_size(), int(collectives.axis_index())
    findings = []
    for device, (name, elements, repetitions) in product(dict.fromkeys(("cpu", str(world().device))), _MESSAGES):
        given, taken = torch.full((elements,), float(rank + 1), device=device), []
        for _ in range(repetitions + 1):
            collectives.barrier()
            began = time.perf_counter()
            summed = collectives.psum(given)
            if device != "cpu":
                torch.accelerator.synchronize(device)
            taken.append(time.perf_counter() - began)
        time_s = statistics.median(taken[1:])  # the first repetition also compares the ranks' signatures
        right = bool((summed == size * (size + 1) / 2).all())
        sent = 2 * (size - 1) / size * elements * 4
        text = f"{time_s * 1e3:.2f} ms" + (f", {sent / time_s / 1e9:.2f} GB/s" if elements > 1 else "")
        problem = "" if right else f"the sum is wrong on rank {rank}: expected {size * (size + 1) / 2} everywhere"
        what = f"psum of {name}" + (f" on {device}" if device != "cpu" else "")
        findings.append(Finding("collective", what, text, problem=problem))
    return findings


def _with_collectives(found: list[Finding], size: int, timeout_s: float) -> tuple[list[list[Finding]], bool]:
    """Try collectives. Returns all ranks' findings and True; after an error, this rank's and whether it is alone."""
    try:
        if size > 1:
            with init(timeout=timedelta(seconds=timeout_s)):
                found = [*found, Finding("collective", "between", f"the {size} ranks of this world"), *measure()]
                return collectives.all_gather_object(found), True
        with Pool(2, start_timeout_s=timeout_s, timeout_s=timeout_s) as pool:
            between = Finding("collective", "between", "two fresh workers of ltx.Pool")
            return [[*found, between, *pool.run(measure)[0]]], True
    except Exception as error:
        said = str(error).partition("\n\n")[0]  # the workers' tracebacks come after the first empty line
        failed = Finding("collective", "psum", "failed", problem=f"{type(error).__name__}: {said}")
        return [[*found, failed]], size == 1


def _notes(by_rank: Sequence[Sequence[Finding]], kind: str) -> list[str]:
    """The texts of one `kind` ("warning" or "problem") from all ranks, one a line."""
    several = len(by_rank) > 1
    return [
        f"{f'rank {rank}: ' if several else ''}{finding.name}: {getattr(finding, kind)}"
        for rank, findings in enumerate(by_rank)
        for finding in findings
        if getattr(finding, kind)
    ]


def _report(by_rank: Sequence[Sequence[Finding]], as_json: bool) -> str:
    """Rank 0's findings in aligned lines, then the warnings and problems of all ranks; or all findings as JSON."""
    warnings, problems = _notes(by_rank, "warning"), _notes(by_rank, "problem")
    if as_json:
        ranks = [[asdict(finding) for finding in findings] for findings in by_rank]
        return json.dumps({"ok": not problems, "problems": problems, "warnings": warnings, "ranks": ranks}, indent=1)
    lines, width = list[str](), max(len(finding.name) for finding in by_rank[0])
    for section, some in groupby(by_rank[0], key=lambda finding: finding.section):
        lines += [section, *(f"  {finding.name:{width}}  {finding.text}" for finding in some)]
    lines += (f"warning: {note}" for note in warnings)
    return "\n".join([*lines, *(f"problem: {note}" for note in problems), *([] if problems else ["all is well"])])
