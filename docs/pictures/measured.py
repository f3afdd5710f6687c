"""Pictures of measurements, and of what is computed from counts: `python docs/pictures/measured.py [NAME ...]`."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from drawing import BLUE, GREEN, INK, ORANGE, RED, WIDTH, main
from torch.nn.parallel import DistributedDataParallel

import ltx

sys.path.insert(0, str(Path(__file__).parents[2]))

BATCH, FEATURES, LAYERS, STEPS = 64, 512, 8, 120


def hooks() -> None:
    """Loss against bytes, of the study that the notebook on hooks reads: the GPT on 16 simulated ranks."""
    from benchmarks.studies import hooks as study

    runs = [run for run in study.load()["runs"] if (run["task"], run["ranks"]) == ("gpt", 16)]
    names = dict.fromkeys(run["hook"] for run in runs)
    mean = {
        name: [statistics.mean(run[what] for run in runs if run["hook"] == name) for what in ("bytes", "loss")]
        for name in names
    }
    plain_bytes, plain_loss = mean["fp32"]
    shown = [
        name for name, (sent, _) in mean.items() if sent and not set(name.split()) & {"no", "in", "step", "channel"}
    ]
    points = {name: (mean[name][0] / plain_bytes, mean[name][1] / plain_loss) for name in shown}
    _, axes = plt.subplots(figsize=(WIDTH, 3.4), layout="constrained")
    axes.axhline(1, color="#cccccc", linewidth=1)
    top = max(loss for _, loss in points.values())
    for place, (name, at) in enumerate(sorted(points.items(), key=lambda item: (round(item[1][1], 2), -item[1][0]))):
        axes.plot(*at, "o", color=INK if name == "fp32" else BLUE, markersize=6)
        column = 1.45, 1.004 + (top - 1) * place / (len(points) - 1)  # above the line at 1
        line = {"arrowstyle": "-", "color": "#b0b0b0", "linewidth": 0.7, "shrinkA": 0, "shrinkB": 3}
        axes.annotate(name, at, column, fontsize=8.5, va="center", color=INK, arrowprops=line)
    axes.set_xscale("log")
    axes.set_xlim(0.18, 4.2)
    axes.set_xticks([0.25, 0.35, 0.5, 1], ["25%", "35%", "50%", "100%"], fontsize=8)
    axes.minorticks_off()
    axes.tick_params(labelsize=8)
    axes.set_xlabel("bytes of the whole training, to those of fp32", fontsize=9)
    axes.set_ylabel("loss in the end, to that of fp32", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def published() -> None:
    """A panel for each published result: a dot a seed; a cross is the paper's figure, where it can be compared."""
    from benchmarks.studies import published as study

    runs = study.load()["runs"]
    short = {"FedSGD (E = 1, B = all)": "FedSGD", "exact, every step": "exact", "two fragments, 8 bits": "8 bits"}
    short["two fragments, bf16, sent 10 steps ahead"] = "bf16, ahead"
    short |= {f"{name}, batch 8": name for name in study.SIGNS}
    panels = {
        "fedavg": ("rounds", "rounds to the target", True),
        "error feedback": ("accuracy", "accuracy, batch 8, %", False),
        "slow link": ("seconds", "time, to exact", True),
        "streaming DiLoCo": ("loss", "loss in the end, to exact", False),
        "powersgd": ("accuracy", "accuracy, %", False),
    }
    _, columns = plt.subplots(len(panels), 1, figsize=(WIDTH, 7.2), layout="constrained")
    for axes, (name, (column, label, log)) in zip(columns, panels.items(), strict=True):
        plan = study.STUDIES[name]
        rows = [row for row in plan.rows if name != "error feedback" or row.endswith("batch 8")]
        scale = study.median(runs, name, plan.base, column) if "to exact" in label else 1.0
        place = list(plan.columns).index(column)
        for y, row in enumerate(rows):
            found = [value / scale for value in study.values(runs, name, row, column)]
            axes.plot(found, [y] * len(found), "o", color=BLUE, markersize=4.5, alpha=0.7)
            if name in ("fedavg", "slow link"):
                numbers = [float(plan.rows[which].paper[place].split()[0]) for which in (row, plan.base)]
                said = numbers[0] / numbers[1] if scale != 1 else numbers[0]
                axes.plot(said, y, "x", color=ORANGE, markersize=6)
        if log:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
            axes.minorticks_off()
        axes.set_yticks(range(len(rows)), [short.get(row, row) for row in rows], fontsize=8)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.tick_params(labelsize=8)
        axes.set_xlabel(label, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)


def scaling() -> None:
    """The part of a step that computes against the number of ranks, computed from recorded collectives."""
    from benchmarks import scaling as computed

    ranks = sorted({*computed.RANKS, *(2**k for k in range(3, 14))})
    _, axes = plt.subplots(figsize=(WIDTH, 4.0), layout="constrained")
    colours = (ORANGE, ORANGE, ORANGE, INK, GREEN, BLUE, RED)
    for (name, parts), colour in zip(computed.curves(ranks).items(), colours, strict=True):
        style = ":" if "trees" in name else "--" if "61 MB" in name else "-"
        axes.plot(ranks, [100 * part for part in parts], style, color=colour, linewidth=1.4, label=name)
    axes.set_xscale("log")
    axes.set_xticks(computed.RANKS, [f"{n:,}" for n in computed.RANKS])
    axes.minorticks_off()
    axes.tick_params(labelsize=8)
    axes.set_ylim(0, 103)
    axes.set_xlabel("ranks, in nodes of 8", fontsize=9)
    axes.set_ylabel("part of a step that computes, %", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.figure.legend(loc="outside lower center", ncols=1, fontsize=8, frameon=False, labelcolor=INK)


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(LAYERS):
        layers += [torch.nn.Linear(FEATURES, FEATURES), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers)


def step_s(trace: Any) -> float:
    return trace.spans[0].ended_s - trace.spans[0].began_s


def steps_of_ltx() -> Iterator[Any]:
    """Recordings of steps whose optimizer runs on buckets as they arrive."""
    net = model()
    strategy = ltx.DDPStrategy(bucket_bytes=2 * 2**20)
    step = ltx.data_parallel(lambda p, x: ltx.functional_call(net, p, (x,)).square().mean(), strategy)
    train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.AdamW, lr=1e-3), overlap="update")
    state, x = train.init(net), torch.randn(BATCH, FEATURES)
    while True:
        with ltx.profile.record() as trace:
            state, _ = train(state, x)
        yield trace


def steps_of_ddp() -> Iterator[Any]:
    """The same steps with DDP, as recordings: its hook is told of each bucket, and a future of its end."""
    from ltx.core.comm.ledger import Event, Span

    ddp = DistributedDataParallel(model(), bucket_cap_mb=2)
    optimizer, x = torch.optim.AdamW(ddp.parameters(), lr=1e-3), torch.randn(BATCH, FEATURES)
    events: list[Event] = []

    def timed(state, bucket):  # DDP reads annotations, which mustn't be words
        share = bucket.buffer().div_(2)
        event = Event("buckets 0", "psum", f"bucket {bucket.index()}", share.nbytes, time.perf_counter())
        events.append(event)

        def done(future: Any) -> torch.Tensor:
            event.completed_s = time.perf_counter()
            return future.value()[0]

        return dist.all_reduce(share, async_op=True).get_future().then(done)

    ddp.register_comm_hook(None, timed)
    while True:
        events.clear()
        began = time.perf_counter()
        loss = ddp(x).square().mean()
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        ended = time.perf_counter()
        stretches = (("step", began, ended), ("forward", began, forward), ("backward", forward, backward))
        spans = [Span(*stretch) for stretch in (*stretches, ("update", backward, ended))]
        yield ltx.profile.Trace(list(events), spans)


def in_turns() -> list[Any]:
    """Of each the shortest of its steps, in which least else went on."""
    turns = list(zip(steps_of_ltx(), steps_of_ddp(), range(STEPS), strict=False))
    return [min(column[1:], key=step_s) for column in list(zip(*turns, strict=True))[:2]]


def overlap() -> None:
    """One rank's step of two: ltx, whose update overlaps too, above DDP's; both by `timeline(...).plot()`."""
    os.environ["LTX_SHARED_MEMORY"] = "0"  # both through gloo's sockets
    with ltx.Pool(2) as pool:
        traces = pool.run(in_turns)[0]
    for trace in traces:
        trace.epoch_s = -trace.spans[0].began_s  # both begin at 0
    figure, axes = plt.subplots(figsize=(WIDTH, 3.2), layout="constrained")
    timeline = ltx.profile.timeline(traces)
    timeline.plot(axes)
    names = [
        f"{who}: {what.get_text().split('  ')[1]}"
        for who, what in zip(("ltx",) * 2 + ("DDP",) * 2, axes.get_yticklabels(), strict=True)
    ]
    axes.set_yticks(axes.get_yticks(), names, fontsize=8)
    axes.set_title("")
    axes.tick_params(labelsize=8)
    axes.get_legend().remove()
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False, labelcolor=INK)


if __name__ == "__main__":
    main({f.__name__: f for f in (hooks, published, scaling, overlap)})
