"""``python -m tests.restarts folder step rank``: the program of the how-to, a rank of which is killed at a step.

It is killed in its first attempt, before it does that step, and with a fourth argument its launcher too. Each rank
writes down what it does into the folder, where the program keeps its checkpoints, and the parameters that it ends with.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ltx

PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "elastic.md"
SAMPLES, BATCH, EPOCHS = 96, 24, 5
STEPS = SAMPLES // BATCH * EPOCHS


def program() -> str:
    return PAGE.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]


def check_end(folder: Path, sizes: list[int]) -> None:
    """All ranks of the end have the values of a plain loop with so many ranks at each step, bit for bit."""
    found: dict[str, Any] = {}
    exec(program().partition("with ltx.init()")[0], found)
    model, x, y = found["model"], found["inputs"], found["labels"]
    plain = replayed(
        model,
        lambda indices: torch.nn.functional.cross_entropy(model(x[indices]), y[indices]),
        ltx.optim.from_torch(torch.optim.AdamW, lr=3e-3),
        ltx.DataPosition(SAMPLES, BATCH),
        [(1, size) for size in sizes],
    )
    ends = [torch.load(file) for file in folder.glob("end.*.pt")]
    assert len(ends) == sizes[-1]
    for params in ends:
        torch.testing.assert_close(params, plain, rtol=0.0, atol=0.0)


def main(folder: str, at: str, who: str, *launcher: str) -> None:
    os.chdir(folder)
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    take = ltx.DataPosition.indices

    def indices(position: ltx.DataPosition, rank: int = 0, size: int = 1) -> torch.Tensor:
        step = (position.epoch * SAMPLES + position.done) // BATCH
        entry = {"attempt": attempt, "step": step, "rank": rank, "size": size, "pid": os.getpid(), "time": time.time()}
        with open(f"{attempt}.{rank}.jsonl", "a") as log:  # closed at once: a rank that is killed has written it
            log.write(json.dumps(entry) + "\n")
        time.sleep(float(os.environ.get("LTX_TEST_PAUSE", "0")))
        if (attempt, step, rank) == (0, int(at), int(who)):
            if launcher:
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        return take(position, rank, size)

    ltx.DataPosition.indices = indices  # type: ignore[method-assign]
    found: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(program(), PAGE.name, "exec"), found)
    torch.save(found["state"].params, f"end.{found['world'].rank}.pt")


def replayed(
    model: torch.nn.Module,
    loss: Callable[[Tensor], Tensor],
    optimizer: ltx.optim.Optimizer,
    position: ltx.DataPosition,
    sizes: Iterable[tuple[int, int]],
) -> dict[str, Tensor]:
    """The parameters at the end. `loss` gives that of some samples; `sizes`: by step, (replicas, ranks of each).

    The sum of a replica's ranks comes before that over replicas, and then a division, which is exact for powers of two.
    """
    params = dict(model.named_parameters())
    opt_state = optimizer.init(params)
    for replicas, ranks in sizes:
        total = {path: torch.zeros_like(p) for path, p in params.items()}
        for replica in range(replicas):
            mean = {path: torch.zeros_like(p) for path, p in params.items()}
            for rank in range(ranks):
                indices = position.indices(replica * ranks + rank, replicas * ranks)
                grads = torch.autograd.grad(loss(indices), list(params.values()))
                for own, grad in zip(mean.values(), grads, strict=True):
                    own += grad / ranks
            for path, own in mean.items():
                total[path] += own
        grads = {path: grad / replicas for path, grad in total.items()}
        with torch.no_grad():
            params, opt_state = optimizer.apply(grads, opt_state, params, donate=True)
        position = position.after_step()
    return {path: p.detach() for path, p in params.items()}


if __name__ == "__main__":
    main(*sys.argv[1:])
