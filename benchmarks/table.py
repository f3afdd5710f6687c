"""One table: a training step of ltx, DDP, Fabric, accelerate and JAX, on loopback and two shaped links.

    python -m benchmarks.table [--links loopback 1gbit 100mbit] [--minutes 6] [--write]
    python -m benchmarks.table --device cuda --ranks 1 [--compiled] [--large] [--variants "ltx, fp16"]

Forward, backward and fused AdamW of the 5 M parameter transformer on two ranks of one thread each. Variants take turns
in rounds of fresh processes (:mod:`benchmarks.step_time`), as many as the minutes of a link hold, one at least; a ratio
is the median over turns, with its quartiles. Interrupted, it prints and writes what it has. JAX's ``shard_map`` runs on
two devices of one process, on loopback alone, before each round. The bound is what no step of these two ranks can beat:
the longer of its arithmetic, which is the local step's time, and its message on the link. ``--write`` puts the table
into benchmarks/RESULTS.md and the plot beside it.

With ``--device cuda`` one rank has the GPU alone over NCCL (``--ranks 1``), or two share it over gloo, by way of the
host. ltx leaves out the exact sum of one rank, which DDP does; so both are compared with their FP16 hooks as well,
which neither leaves out. ``--compiled`` compares what torch.compile makes of them, ``--large`` has a model of 152 M
parameters and a batch that keeps a GPU busy. ``--variants`` measures these alone, and what they are compared with.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import links
from benchmarks.ranks import ratios
from benchmarks.step_time import NBYTES, measure

HERE = Path(__file__).parent
VARIANTS = ["local", "ddp", "fabric", "accelerate", "ltx", "ltx update", "ltx update, fp16"]
# On one rank, where ltx leaves out exact sums.
ALONE = ["local", "ddp", "ltx", "ltx update", "ddp, fp16", "ltx, fp16", "ltx update, fp16"]
ALONE += ["ltx, large buckets, fp16", "ltx guarded, fp16"]
COMPILED = ["local compiled", "ddp compiled", "ltx of a compiled loss", "ltx compiled", "ltx compiled step"]
COMPILED += ["ddp compiled, fp16", "ltx of a compiled loss, fp16"]
NEEDS = {"fabric": "lightning_fabric", "accelerate": "accelerate", "JAX": "jax"}
# (turns, steps a turn) of a round
TURNS = {"loopback": (4, 16), "1gbit": (4, 10), "100mbit": (4, 4)}


class Row(NamedTuple):
    """A variant on a link. Ratios are to DDP in the same way: compiled, with the same hook."""

    name: str
    ms: float
    to_ddp: float
    low: float  # the quartiles of the ratios
    high: float


def jax_s() -> float:
    """JAX's median step."""
    command = [sys.executable, "-m", "benchmarks.jax_step", "--steps", "40"]
    environ = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    return float(subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout)


def names_of(ranks: int, device: str, compiled: bool, wanted: Sequence[str] | None = None) -> list[str]:
    """The variants that are measured; all, or those `wanted` and what they are compared with."""
    if wanted:
        every = names_of(ranks, device, compiled)
        return list(dict.fromkeys([*(base_of(name, every) for name in wanted), *wanted]))
    if compiled:
        return COMPILED
    if ranks == 1:
        return ALONE
    if device == "cuda":  # the others' own processes would want a GPU each
        return [name for name in VARIANTS if name not in NEEDS]
    return [name for name in VARIANTS if find_spec(NEEDS.get(name, "torch"))]


def base_of(name: str, names: Sequence[str]) -> str:
    """DDP's variant that `name` is compared with."""
    exact = "ddp compiled" if any(each.startswith("ddp compiled") for each in names) else "ddp"
    return f"{exact}, fp16" if name.endswith(", fp16") and f"{exact}, fp16" in names else exact


def collect(
    times: dict[str, list[float]],
    link: str,
    ranks: int,
    minutes: float,
    device: str,
    names: Sequence[str],
    with_jax: bool,
    large: bool,
) -> None:
    """Add to `times` each variant's of the rounds that the minutes of a link hold, one at least."""
    turns, steps = TURNS[link]
    began, round_s = time.monotonic(), 0.0
    while not times or time.monotonic() - began + round_s < 60 * minutes:
        started = time.monotonic()
        jax = jax_s() if with_jax else 0.0
        found = measure(list(names), link, ranks, turns, 1, True, steps, device, large=large)["times"]
        if with_jax:
            found["JAX shard_map"] = [jax] * turns
        for name, taken in found.items():
            times.setdefault(name, []).extend(taken)
        round_s = time.monotonic() - started


def rows(times: dict[str, list[float]], link: str, ranks: int, device: str, names: Sequence[str]) -> list[Row]:
    """The rows of one link."""
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    made = [_row(name, times, base_of(name, names)) for name in times]
    if ranks == 1 or device == "cuda" or "local" not in medians or "ddp" not in medians:
        return made
    bound = max(medians["local"], links.wire_s(link, ranks, NBYTES))
    return [*made, Row("the bound", 1e3 * bound, *[bound / medians["ddp"]] * 3)]


def _row(name: str, times: dict[str, list[float]], base: str) -> Row:
    low, middle, high = statistics.quantiles(ratios(times, name, base), n=4, method="inclusive")
    return Row(name, 1e3 * statistics.median(times[name]), middle, low, high)


def markdown(tables: dict[str, list[Row]]) -> str:
    """A line for each variant, a pair of columns for each link."""
    names = list(dict.fromkeys(row.name for found in tables.values() for row in found))
    lines = [
        "| | " + " | ".join(f"{link}, ms | to DDP (quartiles)" for link in tables) + " |",
        "|---|" + "---:|---:|" * len(tables),
    ]
    for name in names:
        cells = []
        for found in tables.values():
            row = next((row for row in found if row.name == name), None)
            spread = "" if row is None or row.low == row.high else f" ({row.low:.2f} to {row.high:.2f})"
            cells += (
                ["", ""] if row is None else [f"{row.ms:.{0 if row.ms >= 20 else 2}f}", f"{row.to_ddp:.2f}{spread}"]
            )
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def hardware() -> str:
    """The processor's name."""
    about = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    named = [line.partition(":")[2].strip() for line in about.splitlines() if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def not_measured() -> str:
    """A line on what isn't installed, if anything isn't."""
    missing = [name for name, module in NEEDS.items() if not find_spec(module)]
    return f"\n\nNot installed, so not measured: {', '.join(missing)}." if missing else ""


def plot(tables: dict[str, list[Row]], to: Path) -> None:
    """Bars of the ratios to DDP, a panel for each link, below one another: words can be read on a telephone."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(tables), 1, figsize=(4.2, 2.3 * len(tables)), squeeze=False)
    for axes, (link, found) in zip(panels[:, 0], tables.items(), strict=True):
        names = [row.name for row in found]
        for name, _, to_ddp, low, high in found:
            colour = "C0" if name.startswith("ltx") else "0.35" if name == "the bound" else "0.7"
            axes.barh(names.index(name), to_ddp, color=colour)
            axes.hlines(names.index(name), low, high, color="0.2", linewidth=1)
            axes.text(max(to_ddp, high) + 0.02, names.index(name), f"{to_ddp:.2f}", va="center", fontsize=8)
        axes.axvline(1, color="0.5", linewidth=0.8, linestyle=":")
        axes.set_title(link, fontsize=10)
        axes.set_xlim(0, 1.25 * max(1.0, *(row.high for row in found)))
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_yticks(range(len(names)), names, fontsize=9)
        axes.invert_yaxis()
    figure.supxlabel("time of a step, ratio to DDP", fontsize=9)
    figure.tight_layout()
    figure.savefig(to, metadata={"Date": None})


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", choices=list(TURNS), help="all; with one rank or a GPU loopback")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=6.0, help="for each link (default: %(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--compiled", action="store_true", help="what torch.compile makes of them")
    parser.add_argument("--large", action="store_true", help="a model of 152 M parameters, for GPUs")
    parser.add_argument("--variants", nargs="+", help="only these, and what they are compared with")
    parser.add_argument("--write", action="store_true")
    parsed = parser.parse_args()
    if parsed.write and parsed.device == "cuda":
        parser.error("make gpu writes those of a GPU")
    on_one = parsed.ranks == 1 or parsed.device == "cuda"
    chosen = parsed.links or (["loopback"] if on_one else list(TURNS))
    names = names_of(parsed.ranks, parsed.device, parsed.compiled, parsed.variants)
    compared = parsed.device == "cpu" and parsed.ranks > 1 and not parsed.compiled and not parsed.variants
    jax = compared and find_spec(NEEDS["JAX"]) is not None
    collected: dict[str, dict[str, list[float]]] = {}
    print(f"{', '.join(chosen)}: {parsed.minutes:g} minutes each", file=sys.stderr, flush=True)
    try:
        for link in chosen:
            times = collected.setdefault(link, {})
            with_jax = jax and link == "loopback"
            collect(times, link, parsed.ranks, parsed.minutes, parsed.device, names, with_jax, parsed.large)
    except KeyboardInterrupt:
        print("interrupted: what there is", file=sys.stderr)
    tables = {link: rows(times, link, parsed.ranks, parsed.device, names) for link, times in collected.items() if times}
    text = markdown(tables) + ("" if on_one or parsed.compiled or parsed.variants else not_measured())
    print(text)
    if parsed.write:
        about = f"{parsed.ranks} ranks, {hardware()}, {os.cpu_count()} cores, torch {torch.__version__}"
        plot(tables, HERE / "results.svg")
        HERE.joinpath("RESULTS.md").write_text(
            f"# Time of a training step\n\nWritten by `python -m benchmarks.table --write`: {about}.\n\n{text}\n\n"
            "![Ratios to DDP](results.svg)\n"
        )


if __name__ == "__main__":
    main()
