"""Programs in processes of their own, some of which are ranks by what their environment says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.forks import free_port

ROOT = Path(__file__).parents[1]
Environ = dict[str, str]


def of_torchrun(n: int) -> list[Environ]:
    """What torchrun tells each of `n` ranks on one machine."""
    common = {"WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n)}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(n)]


def begun(command: list[str], environments: list[Environ]) -> list[subprocess.Popen[str]]:
    """Python with these arguments in each of `environments`, besides this process' own without its launcher's."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("TORCHELASTIC_", "LTX_"))}
    clean |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, *command], env=clean | environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for environ in environments
    ]


def printed(*command: str, timeout_s: float = 100.0, cwd: Path = ROOT, **environ: str) -> str:
    """What Python prints with these arguments, to its end in good order."""
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environ
    whole = [sys.executable, *command]
    done = subprocess.run(whole, cwd=cwd, env=environ, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def writing(folder: Path, *command: str, **environ: str) -> subprocess.Popen[bytes]:
    """A module of Python's that runs with these arguments, and writes to the folder's output.txt."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    whole, environ = [sys.executable, "-m", *command], os.environ | {"PYTHONPATH": path} | environ
    with open(folder / "output.txt", "ab") as output:
        return subprocess.Popen(whole, env=environ, cwd=ROOT, stdout=output, stderr=output)


def end(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            stream.close()


def finished(processes: list[subprocess.Popen[str]], timeout_s: float = 100.0) -> list[tuple[int, str, str]]:
    """(exit status, output, errors) of each, none of which is left."""
    try:
        outputs = [process.communicate(timeout=timeout_s) for process in processes]
        return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]
    finally:
        end(processes)
