"""Time of a codec by itself: 10.5 million float32 numbers, one thread, beside a copy of them in the same run.

    python -m benchmarks.codecs [--iterations 15] [--numel 10485760]

`encode` makes the message that is sent, `encode and keep` leaves in the numbers what isn't in it (error feedback),
`decode` makes numbers of the message in new memory. A figure is the median over iterations of the thread's own time,
and of its ratio to that of the copy in the same iteration.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch

from benchmarks.ranks import KEEP_MEMORY
from ltx import hooks
from ltx.hooks.lossy import CompressedAllReduce

CODECS: dict[str, CompressedAllReduce] = {
    "bf16": hooks.BF16(),
    "int8, one grid": hooks.ByteGrad(),
    "int8, blocks of 512": hooks.Quantize(per="channel", channel=512),
    "1 bit, blocks of 512": hooks.OneBit(block=512),
    "top-k, 1%": hooks.TopK(0.01),
}

#: (codec, what it does) -> at most this many ms for 10.5 million numbers
GOALS = {
    ("int8, blocks of 512", "encode"): 15.0,
    ("1 bit, blocks of 512", "encode and keep"): 10.0,
    ("top-k, 1%", "encode"): 40.0,
}


def actions(codec: CompressedAllReduce, rows: torch.Tensor, kept: torch.Tensor) -> dict[str, Callable[[], object]]:
    """What is timed of a codec on `rows`, of shape ``(1, m)``; `kept` holds the same anew each time."""
    message = codec.encode(rows, None)
    return {
        "encode": lambda: codec.encode(rows, None),
        "encode and keep": lambda: codec.encode_and_keep(kept, None),
        "decode": lambda: codec.decode(message, rows.shape[1], rows.dtype),
    }


def main() -> None:
    """Parse, measure, print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument("--numel", type=int, default=10 * 1024 * 1024)
    arguments = parser.parse_args()
    if arguments.numel < 1 or arguments.numel % 512:
        parser.error(f"--numel: whole blocks of 512, got {arguments.numel:,}")
    if not KEEP_MEMORY.items() <= os.environ.items():  # which is read when a process starts
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.codecs", *sys.argv[1:]], os.environ | KEEP_MEMORY)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = torch.randn(1, arguments.numel)
    copied, kept = torch.empty_like(rows), torch.empty_like(rows)
    timed: dict[tuple[str, str], Callable[[], object]] = {("copy", ""): lambda: copied.copy_(rows)}
    for name, codec in CODECS.items():
        timed.update(((name, what), action) for what, action in actions(codec, rows, kept).items())
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in timed}
    for iteration in range(2 + arguments.iterations):
        for key, action in timed.items():
            kept.copy_(rows)
            began = time.thread_time()
            action()
            if iteration >= 2:
                seconds[key].append(time.thread_time() - began)
    copies = seconds["copy", ""]
    print("| codec | | ms | ratio to a copy | goal, ms |\n|---|---|---|---|---|")
    for key, taken in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(taken, copies, strict=True))
        ms = 1e3 * statistics.median(taken)
        print(f"| {key[0]} | {key[1]} | {ms:.1f} | {ratio:.2f} | {GOALS.get(key, '')} |")


if __name__ == "__main__":
    sys.exit(main())
