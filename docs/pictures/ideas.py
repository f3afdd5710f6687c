"""Pictures of ideas: `python docs/pictures/ideas.py [NAME ...]`."""

from __future__ import annotations

from itertools import pairwise

import matplotlib.pyplot as plt
from drawing import BLUE, GREEN, INK, ORANGE, PAPER, RED, SOFT, arrow, box, canvas, main, words
from matplotlib.axes import Axes


def landing() -> None:
    """A function becomes a step on ranks, whose gradients meet."""
    axes = canvas(3.5)
    box(axes, 50, 77, 56, 9, "loss_fn(params, x, y)", edge=ORANGE, code=True)
    arrow(axes, (50, 72), (50, 60), color=ORANGE)
    words(axes, 53, 66, "ltx.data_parallel", code=True, ha="left")
    for rank, x in enumerate((18, 50, 82)):
        box(axes, x, 50, 27, 19, edge=BLUE)
        words(axes, x, 56, f"rank {rank}", weight="bold")
        words(axes, x, 50.5, "params", code=True, size=8)
        words(axes, x, 45, f"part {rank} of x, y", size=8)
        arrow(axes, (x - 3, 40), (46 + 4 * (rank - 1) * 4, 28.5), color=GREEN)
        arrow(axes, (52 + 4 * (rank - 1) * 4, 28.5), (x + 3, 40), color=GREEN)
    words(axes, 5, 33, "gradients", size=8, color=GREEN, ha="left")
    box(axes, 50, 23, 60, 10, "mean over all ranks", edge=GREEN)
    arrow(axes, (50, 18), (50, 11))
    words(axes, 50, 6.5, "the same new parameters on every rank")


def cell() -> None:
    """A still of two notebook cells that run on workers: a bar, a curve, an error."""
    axes = canvas(4.6)
    box(axes, 50, 93, 96, 27, fill=PAPER)
    code = (
        "%%ltx -n 2",
        "for step in trange(200):",
        "    state, metrics = train(state, *part())",
        "    losses.append(metrics.loss.item())",
        "plt.plot(losses)",
    )
    for line, text in enumerate(code):
        words(axes, 4, 102.5 - 5 * line, text, code=True, size=8, ha="left", color=ORANGE if text[0] == "%" else INK)
    words(axes, 4, 74, "100%", code=True, size=8, ha="left")
    axes.add_patch(plt.Rectangle((14, 72.3), 45, 3.4, color=BLUE))
    words(axes, 62, 74, "200/200", code=True, size=8, ha="left")
    curve = axes.inset_axes((0.12, 0.37, 0.6, 0.25))
    curve.plot(
        [2.4 * 0.97**step + 0.25 + 0.06 * ((step * 37) % 11 - 5) / 5 for step in range(200)], color=BLUE, linewidth=1.2
    )
    curve.set_xlabel("step", fontsize=8)
    curve.set_ylabel("loss", fontsize=8)
    curve.tick_params(labelsize=7)
    curve.patch.set_alpha(0)
    curve.spines[["top", "right"]].set_visible(False)
    box(axes, 50, 23, 96, 12, fill=PAPER)
    words(axes, 4, 26, "%%ltx", code=True, size=8, ha="left", color=ORANGE)
    words(axes, 4, 21, "y = x.reshape(3, -1)    # 16 samples a rank", code=True, size=8, ha="left")
    error = (
        "CallFailedError: rank 0 of 2 raised RuntimeError: ...",
        'On rank 0: File "Cell In[2]", line 2',
        "    y = x.reshape(3, -1)",
    )
    for line, text in enumerate(error):
        words(axes, 4, 13 - 5 * line, text, code=True, size=8, ha="left", color=RED)


def axes() -> None:
    """Eight processes as a mesh of two axes, and who takes part in a sum over which."""
    drawn = canvas(4.0)
    rows = [
        ('ltx.psum(x, "data")', [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ('ltx.psum(x, "node")', [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ('ltx.psum(x, ("node", "data"))', [list(range(8))]),
    ]
    colours = (BLUE, ORANGE, GREEN, "#a05fb4")
    for row, (call, groups) in enumerate(rows):
        top = 88 - 31 * row
        words(drawn, 3, top + 4, call, code=True, ha="left")
        for group, members in enumerate(groups):
            for rank in members:
                x, y = 30 + 16 * (rank % 4), top - 5 - 9 * (rank // 4)
                box(drawn, x, y, 13, 7.2, f"rank {rank}", edge=colours[group], size=8)
            first, last = members[0], members[-1]
            start = 30 + 16 * (first % 4), top - 5 - 9 * (first // 4)
            if first // 4 == last // 4 or len(members) == 8:
                for y in sorted({top - 5 - 9 * (rank // 4) for rank in members}):
                    for x in (38, 54, 70):
                        drawn.plot([x - 1.6, x + 1.6], [y, y], color=colours[group], linewidth=2)
            if first // 4 != last // 4:
                for x in sorted({30 + 16 * (rank % 4) for rank in members}):
                    drawn.plot([x, x], [start[1] - 3.6, start[1] - 5.4], color=colours[group], linewidth=2)
        words(drawn, 20, top - 5, "node 0", size=8, color=SOFT, ha="right")
        words(drawn, 20, top - 14, "node 1", size=8, color=SOFT, ha="right")


def collectives() -> None:
    """What four ranks have before and after. A column is a rank's, a colour whose value it was, a number which part."""
    drawn, ranks, side = canvas(5.5), range(4), 4.6
    everything = {(rank, part): (rank, str(part)) for rank in ranks for part in ranks}
    of_all = {(rank, part): (part, "") for rank in ranks for part in ranks}
    of_each, sums = {(rank, rank): (rank, "") for rank in ranks}, dict.fromkeys(everything, (4, "\u03a3"))
    first = {(rank, 0): (rank, "") for rank in ranks}
    shown = [
        ("psum(x)", everything, sums),
        ("psum_scatter(x, tiled=True)", everything, {at: sums[at] for at in of_each}),
        ("all_gather(x, tiled=True)", of_each, of_all),
        ("all_to_all(x, 0, 0)", everything, {(rank, part): (part, str(rank)) for rank in ranks for part in ranks}),
        ("ppermute(x, ring)", first, {(rank, 0): ((rank - 1) % 4, "") for rank in ranks}),
        ("broadcast(x, src=1)", first, {(rank, 0): (1, "") for rank in ranks}),
        ("gather(x, dst=0)", of_each, {(0, part): (part, "") for part in ranks}),
        ("scatter(x, src=0)", {(0, part): (0, str(part)) for part in ranks}, {(r, r): (0, str(r)) for r in ranks}),
    ]
    colours = (BLUE, ORANGE, GREEN, "#a05fb4", PAPER)
    for number, (call, *grids) in enumerate(shown):
        x, y = 3 + 50 * (number % 2), 128 - 30 * (number // 2)
        words(drawn, x, y, call, code=True, size=7.5, ha="left")
        for left, grid in zip((x, x + 24), grids, strict=True):
            for (rank, part), (owner, text) in grid.items():
                corner = left + side * rank, y - 7.5 - side * part
                colour, edge = colours[owner], SOFT if owner == 4 else colours[owner]
                drawn.add_patch(plt.Rectangle(corner, side - 0.6, side - 0.6, facecolor=colour, edgecolor=edge))
                middle = corner[0] + side / 2 - 0.3, corner[1] + side / 2 - 0.6
                words(drawn, *middle, text, size=7.5, color=INK if owner == 4 else "#ffffff")
        middle_y = y - 3.2 - side * (1 + max(part for grid in grids for _, part in grid)) / 2
        arrow(drawn, (x + 19.2, middle_y), (x + 23.2, middle_y))
    words(drawn, 3, 7.5, "columns: ranks 0 to 3, before and after; a colour: whose value it was;", size=7.5, ha="left")
    words(drawn, 3, 3.5, "a number: which part of it; \u03a3: the sum over ranks", size=7.5, ha="left")


def state() -> None:
    """Each step gives its state's memory on to the next one; a copy stays."""
    axes = canvas(2.7)
    for number, x in enumerate((14, 50, 86)):
        old = number < 2
        box(axes, x, 48, 22, 13, edge=SOFT if old else ORANGE, dashed=old)
        words(axes, x, 50.5, f"state {number}", weight="normal" if old else "bold", color=SOFT if old else INK)
        words(axes, x, 45, "given away" if old else "in use", size=8, color=SOFT if old else INK)
        arrow(axes, (x, 41), (x, 29), color=SOFT if old else ORANGE, linestyle="--" if old else "-")
        if old:
            arrow(axes, (x + 11.5, 48), (x + 24.5, 48))
            words(axes, x + 18, 52, "train", code=True, size=8)
    box(axes, 50, 24, 94, 9, "one piece of memory, updated in place", edge=ORANGE)
    words(axes, 14, 58, "reading it raises DonatedStateError", size=8, color=RED, ha="left")
    arrow(axes, (50, 19), (50, 11), color=GREEN)
    words(axes, 53, 15.5, "copy.deepcopy(state)", code=True, size=8, ha="left")
    box(axes, 50, 6.5, 40, 8, "best: memory of its own", edge=GREEN, size=8)


def lanes(axes: Axes, x: float, y: float, title: str, note: str) -> tuple[list[float], list[float]]:
    """Four ranks as lines, and eight steps on each: their places."""
    steps, ranks = [x + 4 + 5.2 * step for step in range(8)], [y - 6 - 4.6 * rank for rank in range(4)]
    words(axes, x, y + 3, title, size=8.5, ha="left", weight="bold")
    words(axes, x, y - 1, note, size=7.5, ha="left", color=SOFT)
    for lane in ranks:
        axes.plot([x + 1, x + 43], [lane, lane], color="#cccccc", linewidth=1)
        axes.plot(steps, [lane] * 8, "o", color=BLUE, markersize=3)
    return steps, ranks


def strategies() -> None:
    """Who talks to whom, and when: ranks are lines, dots are steps, green joins those that exchange something."""
    axes = canvas(6.0)

    def joined(at: float, members: list[float], colour: str = GREEN) -> None:
        axes.plot([at, at], [min(members), max(members)], color=colour, linewidth=2.2, solid_capstyle="round")

    left, right, tops = 2, 53, (136, 102, 68, 34)
    steps, ranks = lanes(axes, left, tops[0], "DDPStrategy", "gradients, at every step")
    for at in steps:
        joined(at + 1.8, ranks)
    steps, ranks = lanes(axes, right, tops[0], "ZeroStrategy", "gradients in parts, then weights")
    for at in steps:
        joined(at + 1.5, ranks)
        joined(at + 2.9, ranks, ORANGE)
    steps, ranks = lanes(axes, left, tops[1], "LocalSGDStrategy(4)", "weights, every fourth step")
    for at in steps[::4]:
        joined(at + 1.8, ranks, ORANGE)
    steps, ranks = lanes(axes, right, tops[1], "... warmup_steps=3", "gradients at first, then weights")
    for at in steps[:3]:
        joined(at + 1.8, ranks)
    for at in steps[3::4]:
        joined(at + 1.8, ranks, ORANGE)
    steps, ranks = lanes(axes, left, tops[2], "DiLoCoStrategy(8)", "an outer step, every eighth step")
    joined(steps[7] + 1.8, ranks, "#a05fb4")
    steps, ranks = lanes(axes, right, tops[2], "decentralized, shift_one", "weights, with one other rank")
    for number, at in enumerate(steps):
        for place, peer in enumerate((3, 2) if number % 2 else (2, 3)):  # each of the lower half with one of the upper
            joined(at + 1.5 + 1.5 * place, [ranks[place], ranks[peer]], ORANGE)
    steps, ranks = lanes(axes, left, tops[3], "low_precision_decentralized", "8 bits, to the ring's neighbours")
    for at in steps:
        for first in range(3):
            axes.plot([at + 1.8] * 2, [ranks[first] - 0.6, ranks[first + 1] + 0.6], color=ORANGE, linewidth=1.4)
        axes.plot([at + 3.0] * 2, [ranks[0], ranks[3]], color=ORANGE, linewidth=0.7)
    steps, ranks = lanes(axes, right, tops[3], "async", "weights, in the background")
    for at in (steps[1], steps[5]):
        axes.add_patch(
            plt.Rectangle((at, ranks[3] - 1), 11, ranks[0] - ranks[3] + 2, color=ORANGE, alpha=0.25, linewidth=0)
        )
    words(axes, left, 5.5, "dots: steps of each rank, in time", size=7.5, ha="left", color=SOFT)
    for x, colour, what in ((2, GREEN, "gradients"), (22, ORANGE, "weights"), (40, "#a05fb4", "outer gradients")):
        axes.plot([x, x + 2.5], [1.8, 1.8], color=colour, linewidth=2.2)
        words(axes, x + 4, 1.8, what, size=7.5, ha="left")


def hang() -> None:
    """The calls of two ranks side by side: the first line on which they differ is the bug."""
    axes = canvas(3.3)
    for x, rank in ((26, 0), (74, 1)):
        words(axes, x, 74, f"rank {rank}", weight="bold")
    calls = [("train(state, ...)", "train(state, ...)"), ("train(state, ...)", "train(state, ...)")]
    calls += [("ltx.pmean(loss)", "train(state, ...)")]
    places = ("fit.py:31", "fit.py:31"), ("fit.py:31", "fit.py:31"), ("fit.py:34", "fit.py:31")
    for row, (pair, where) in enumerate(zip(calls, places, strict=True)):
        y, alike = 64 - 14 * row, pair[0] == pair[1]
        for x, call, line in zip((26, 74), pair, where, strict=True):
            box(axes, x, y, 42, 11, edge=BLUE if alike else RED)
            words(axes, x, y + 2, call, code=True, size=8)
            words(axes, x, y - 3, line, code=True, size=7, color=SOFT)
        arrow(axes, (47.5, y), (52.5, y), color=GREEN if alike else RED, arrowstyle="<->" if alike else "-")
    words(axes, 50, 23, "33    if world.rank == 0:", code=True, size=8)
    words(axes, 50, 18, "34        print(ltx.pmean(loss))", code=True, size=8)
    words(axes, 50, 9, "RankMismatchError, on both ranks,", size=8.5, color=RED)
    words(axes, 50, 4.5, "with both lines, after some four seconds", size=8.5, color=RED)


def step() -> None:
    """A step: identities on the way down, and on the way up what their transposes do."""
    drawn = canvas(4.4)
    words(drawn, 20, 101, "forward", weight="bold")
    words(drawn, 68, 101, "backward", weight="bold")
    rows = [
        ("params", "update: the next params", ORANGE),
        ("fence", "wait for all buckets", GREEN),
        ("buckets", "start a bucket's sum over ranks\nonce its gradients are there", GREEN),
        ("your function", "gradients, the last layer's first", BLUE),
        ("tie", "zeros for what has no gradient", SOFT),
        ("loss", "1", SOFT),
    ]
    places = [91 - 16.5 * row for row in range(len(rows))]
    for y, (there, back, edge) in zip(places, rows, strict=True):
        box(drawn, 20, y, 34, 10, there, edge=edge)
        box(drawn, 68, y, 58, 10, back, edge=edge, size=8)
    for above, below in pairwise(places):
        arrow(drawn, (20, above - 5), (20, below + 5))
        arrow(drawn, (68, below + 5), (68, above - 5))
    arrow(drawn, (37, places[-1]), (39, places[-1]))
    words(drawn, 14, places[1] - 8.2, "mark", size=8, color=SOFT)


if __name__ == "__main__":
    main({f.__name__: f for f in (landing, cell, axes, collectives, state, strategies, hang, step)})
