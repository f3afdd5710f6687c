"""``python -m tests.replicas folder name steps [kill]``: a rank of a replica of the example, which notes its steps.

Rank 0 is killed in its first attempt, when it has taken that many batches. Its replica comes back when another has
gone on alone. Two steps later the others wait until it is there again. ``LTX_TEST_PAUSE``: seconds before each step;
``LTX_TEST_REPLICAS``: how many begin together.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import mse_loss

import ltx
from tests.restarts import replayed

EXAMPLES = Path(__file__).parent.parent / "examples"


def digest(state: Any) -> str:
    """Equal for states that are equal bit for bit."""
    found = hashlib.sha256()
    for x in ltx.tree.flatten((state.params, state.opt_state))[0]:
        found.update(x.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def example() -> Any:
    sys.path.insert(0, str(EXAMPLES))
    try:
        return import_module("torchft_hook")
    finally:
        sys.path.remove(str(EXAMPLES))


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """What all ranks have written down, each entry with its replica, attempt and rank."""
    found = []
    for file in folder.glob("*.jsonl"):
        name, attempt, rank, _ = file.name.split(".")
        who = {"name": name, "attempt": int(attempt), "rank": int(rank)}
        found += [who | json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    return found


def check(folder: Path, ranks: int, alive: int, stray: Callable[[dict[str, Any]], bool] = lambda _: False) -> list[int]:
    """All living ranks agree after each step; samples and values are a plain loop's. Returns the replicas by step.

    `stray`: whether a rank was lost in or after the step that it has written down. Then the others may have lost it in
    that step, which doesn't count for them.
    """
    module = example()
    done = [entry for entry in steps_of(folder) if entry.get("committed")]
    position, counts = ltx.DataPosition(module.SAMPLES, module.BATCH), list[int]()
    ends = [torch.load(file) for file in folder.glob("end.*.pt")]
    assert len(ends) == alive
    for step in range(1, max(entry["step"] for entry in done) + 1):
        here = [entry for entry in done if entry["step"] == step]
        sure = [entry for entry in here if not stray(entry)] or here[:1]
        assert len({entry["state"] for entry in sure}) == 1, f"step {step}: ranks differ"
        here = [entry for entry in here if entry["state"] == sure[0]["state"]]
        (count,) = {entry["replicas"] for entry in here}
        taken = Counter(sample for entry in here for sample in entry["samples"])
        expected = Counter(position.indices().tolist())
        assert taken == expected if len(here) == count * ranks else taken < expected, f"step {step}"
        position = position.after_step()
        counts.append(count)
    model = module.network()
    plain = replayed(
        model,
        lambda indices: mse_loss(model(module.batch(indices)[0]), module.batch(indices)[1]),
        ltx.optim.from_torch(torch.optim.AdamW, lr=1e-2),
        ltx.DataPosition(module.SAMPLES, module.BATCH),
        [(count, ranks) for count in counts],
    )
    for params in ends:
        torch.testing.assert_close(params, ends[0], rtol=0.0, atol=0.0)
    exact = not any(count & (count - 1) for count in counts)  # three are summed in another order, and divided inexactly
    torch.testing.assert_close(ends[0], plain, rtol=0.0 if exact else 1e-3, atol=0.0 if exact else 1e-4)
    return counts


class Until:
    """A number of steps that is known later: the one that the folder's file `last` says."""

    def __init__(self, folder: str):
        self._file = Path(folder) / "last"

    def __gt__(self, step: int) -> bool:
        return not self._file.exists() or step < int(self._file.read_text())


def main(folder: str, name: str, steps: str, kill: str = "0") -> None:
    module, rank = example(), os.environ.get("RANK", "0")
    attempt = len(list(Path(folder).glob(f"{name}.*.{rank}.jsonl")))
    log = open(Path(folder) / f"{name}.{attempt}.{rank}.jsonl", "w", buffering=1)  # noqa: SIM115
    taken, latest = 0, list[int]()
    take, start = module.batch, module.Manager.start_quorum

    def wait_until(ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not ready() and time.monotonic() < deadline:
            time.sleep(0.02)

    def wait_for(pattern: str, count: int) -> None:
        wait_until(lambda: len(list(Path(folder).glob(pattern))) >= count)

    def started(manager: Any, *args: Any, **kwargs: Any) -> None:
        (Path(folder) / f"up {name} {attempt} {rank}").touch()
        if attempt == 0:
            wait_for(f"up * 0 {rank}", int(os.environ.get("LTX_TEST_REPLICAS", "1")))
        with suppress(FileNotFoundError):
            if manager.current_step() > int((Path(folder) / "killed").read_text()):
                wait_for(f"up * 1 {rank}", 1)
        start(manager, *args, **kwargs)

    def batch(indices: torch.Tensor) -> Any:
        nonlocal taken
        taken, latest[:] = taken + 1, indices.tolist()
        time.sleep(float(os.environ.get("LTX_TEST_PAUSE", "0")))
        if (attempt, taken, rank) == (0, int(kill), "0"):
            (Path(folder) / "killed.new").write_text(str(taken))
            (Path(folder) / "killed.new").rename(Path(folder) / "killed")
            log.write(json.dumps({"killed": time.time()}) + "\n")
            os.kill(os.getpid(), signal.SIGKILL)
        return take(indices)

    def on_step(held: dict[str, Any], manager: Any, metrics: Any) -> None:
        entry = {
            "step": manager.current_step(),
            "committed": metrics is not None,
            "replicas": manager.num_participants(),
            "state": digest(held["state"]),
            "samples": latest,
            "time": time.time(),
        }
        log.write(json.dumps(entry) + "\n")

    if attempt > 0 and (Path(folder) / "killed").exists():  # torchft misses it only after seconds
        wait_until(lambda: any(entry.get("replicas") == 1 and entry["committed"] for entry in steps_of(Path(folder))))
    module.batch, module.Manager.start_quorum = batch, started
    state = module.main(Until(folder) if steps == "?" else int(steps), on_step=on_step)
    torch.save(state.params, Path(folder) / f"end.{name}.{rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
