"""One table: a training step of ltx, DDP, Fabric, accelerate and JAX, on loopback and two shaped links.

    python -m benchmarks.table [--links loopback 1gbit 100mbit] [--rounds N] [--write]

Forward, backward and fused AdamW of the 5 M parameter transformer on two ranks of one thread each. Variants take turns
in one run for each link (:mod:`benchmarks.step_time`); a ratio is the median over turns. JAX's ``shard_map`` runs on
two devices of one process, on loopback alone, before each round. The bound is what no step of these two ranks can beat:
the longer of its arithmetic, which is the local step's time, and its message on the link. ``--write`` puts the table
into benchmarks/RESULTS.md and the plot beside it. With ``--device cuda`` the ranks share a GPU over gloo, or one has it
alone over NCCL (``--ranks 1``).
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks import links
from benchmarks.ranks import ratio
from benchmarks.step_time import NBYTES, measure

HERE = Path(__file__).parent
VARIANTS = ["local", "ddp", "fabric", "accelerate", "ltx", "ltx update", "ltx step"]
VARIANTS += ["ltx step, auto buckets", "ltx step, fp16", "ltx auto update"]
NEEDS = {"fabric": "lightning_fabric", "accelerate": "accelerate", "JAX": "jax"}
# (rounds, turns, steps a turn): a turn of one that leaves something under way waits for it at its end.
TURNS = {"loopback": (3, 4, 20), "1gbit": (2, 3, 20), "100mbit": (1, 3, 8)}
Row = tuple[str, float, float]  # name, milliseconds, ratio to DDP


def jax_s() -> float:
    """JAX's median step."""
    command = [sys.executable, "-m", "benchmarks.jax_step", "--steps", "40"]
    environ = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    return float(subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout)


def rows(link: str, ranks: int, rounds: int | None, device: str) -> list[Row]:
    """The rows of one link."""
    names = [name for name in VARIANTS if find_spec(NEEDS.get(name, "torch"))]
    if ranks == 1:
        names = [name for name in names if not name.startswith(("ltx step", "ltx auto"))]
    with_jax = link == "loopback" and device == "cpu" and find_spec(NEEDS["JAX"]) is not None
    usual, turns, steps = TURNS[link]
    times: dict[str, list[float]] = {}
    for _ in range(rounds or usual):
        jax = jax_s() if with_jax else 0.0
        found = measure(names, link, ranks, turns, 1, True, steps, device)["times"]
        if with_jax:
            found["JAX shard_map"] = [jax] * turns
        for name, taken in found.items():
            times.setdefault(name, []).extend(taken)
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    made = [(name, 1e3 * medians[name], ratio(times, name, "ddp")) for name in times]
    bound = max(medians["local"], links.wire_s(link, ranks, NBYTES))
    return [*made, ("the bound", 1e3 * bound, bound / medians["ddp"])]


def markdown(tables: dict[str, list[Row]]) -> str:
    """A line for each variant, a pair of columns for each link."""
    names = list(dict.fromkeys(name for found in tables.values() for name, _, _ in found))
    lines = [
        "| | " + " | ".join(f"{link}, ms | to DDP" for link in tables) + " |",
        "|---|" + "---:|---:|" * len(tables),
    ]
    for name in names:
        cells = []
        for found in tables.values():
            row = next((row for row in found if row[0] == name), None)
            cells += ["", ""] if row is None else [f"{row[1]:.0f}", f"{row[2]:.2f}"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    missing = [name for name, module in NEEDS.items() if not find_spec(module)]
    return "\n".join(lines) + (f"\n\nNot installed, so not measured: {', '.join(missing)}." if missing else "")


def plot(tables: dict[str, list[Row]], to: Path) -> None:
    """Bars of the ratios to DDP, a panel for each link."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(tables), figsize=(4.2 * len(tables), 3), sharey=True, squeeze=False)
    names = list(dict.fromkeys(name for found in tables.values() for name, _, _ in found))
    for axes, (link, found) in zip(panels[0], tables.items(), strict=True):
        for name, _, to_ddp in found:
            colour = "C0" if name.startswith("ltx") else "0.35" if name == "the bound" else "0.7"
            axes.barh(names.index(name), to_ddp, color=colour)
            axes.text(to_ddp + 0.02, names.index(name), f"{to_ddp:.2f}", va="center", fontsize=8)
        axes.axvline(1, color="0.5", linewidth=0.8, linestyle=":")
        axes.set_title(link, fontsize=10)
        axes.set_xlim(0, 1.25 * max(1.0, *(to_ddp for _, _, to_ddp in found)))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_yticks(range(len(names)), names)
    panels[0][0].invert_yaxis()
    figure.supxlabel("time of a step, ratio to DDP", fontsize=9)
    figure.tight_layout()
    figure.savefig(to, metadata={"Date": None})


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", choices=list(TURNS), default=list(TURNS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, help="runs of each link")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--write", action="store_true")
    parsed = parser.parse_args()
    tables = {link: rows(link, parsed.ranks, parsed.rounds, parsed.device) for link in parsed.links}
    text = markdown(tables)
    print(text)
    if parsed.write:
        hardware = (
            torch.cuda.get_device_name() if parsed.device == "cuda" else platform.processor() or platform.machine()
        )
        about = f"{parsed.ranks} ranks, {hardware}, {os.cpu_count()} cores, torch {torch.__version__}"
        name = "results" if parsed.device == "cpu" else "results_cuda"
        plot(tables, HERE / f"{name}.svg")
        HERE.joinpath(f"{name.upper()}.md").write_text(
            f"# Time of a training step\n\nWritten by `python -m benchmarks.table --write`: {about}.\n\n{text}\n\n"
            f"![Ratios to DDP]({name}.svg)\n"
        )


if __name__ == "__main__":
    main()
