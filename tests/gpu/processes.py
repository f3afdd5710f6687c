"""Two processes that share the GPU: ``ltx.Pool(2)`` would have its workers compute on the CPU.

``python -m tests.gpu.processes CALL`` is one of them: it does what the file CALL says.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle

import ltx
from tests.programs import of_torchrun

TIMEOUT_S = 60.0


def on_two(fn: Callable[..., Any], folder: Path, *args: Any, backend: str | None = "gloo", **environment: str) -> Any:
    """What ``fn(*args)`` gave, or the text of what it raised, on each of two ranks. `fn`: of a file of tests."""
    call = folder / "call"
    cloudpickle.register_pickle_by_value(sys.modules[fn.__module__])
    call.write_bytes(cloudpickle.dumps((fn, args, backend)))
    common = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-m", "tests.gpu.processes", str(call)]
    processes, outputs = [], [folder / f"output of rank {rank}" for rank in range(2)]
    for output, own in zip(outputs, of_torchrun(2), strict=True):
        with open(output, "wb") as file:
            processes.append(subprocess.Popen(command, env=common | own, stdout=file, stderr=subprocess.STDOUT))
    try:
        for process in processes:
            process.wait(TIMEOUT_S + 40)
    finally:
        for process in processes:
            process.kill()
    for rank, output in enumerate(outputs):
        assert (folder / f"rank {rank}").exists(), f"rank {rank} ended: {output.read_text()[-2000:]}"
    return [pickle.loads((folder / f"rank {rank}").read_bytes()) for rank in range(2)]


def main(call: Path) -> None:
    fn, args, backend = pickle.loads(call.read_bytes())
    try:
        with ltx.init(backend=backend, timeout=timedelta(seconds=TIMEOUT_S)):
            found = fn(*args)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    (call.parent / f"rank {os.environ['RANK']}").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
