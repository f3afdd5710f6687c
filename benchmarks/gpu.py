"""All that needs a GPU, in ten minutes: tests on one, and figures beside DDP's, into benchmarks/RESULTS-gpu.md.

    make gpu
    python3 -m benchmarks.gpu [--check] [--seconds 580] [--to FILE] [--only tests memory ...]

It takes the first interpreter whose torch sees a GPU, of the one that runs it, those in PATH, and .venv; if none does
and the machine has a GPU, it makes .venv. What else is missing there goes into .gpu, by pip. Then it imports ltx and
does one collective on the GPU; ``--check`` is that alone. Each part has a deadline, later by the time that those before
it haven't used; one that fails or runs out of time is written down as that. The file is written anew after each part,
and into the folder ``$OUT`` as well, if that is set, with what each part printed. The exit status is 0 if all parts
were whole.

Only Python's own library is needed to run this file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
#: Where what is missing beside torch is installed.
BESIDE = ROOT / ".gpu"
#: module: the distribution that has it. Without the first two nothing runs.
NEEDED = {"optree": "optree", "cloudpickle": "cloudpickle"}
FOR_TESTS = {
    "pytest": "pytest iniconfig packaging pluggy pygments",  # with what it needs itself
    "pytest_timeout": "pytest-timeout",
    "numpy": "numpy",
}
#: A machine with a GPU has one of these: NVIDIA's driver, its own under WSL, AMD's.
DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")

PROBE = """
import importlib.util, json, platform, sys
found = {"python": platform.python_version(), "torch": None, "gpus": 0}
try:
    import torch
    found["torch"], found["gpus"] = torch.__version__, torch.cuda.device_count()
    if found["gpus"]:
        found["gpu"] = torch.cuda.get_device_name(0)
        found["gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30)
        found["cuda"] = torch.version.cuda or f"ROCm {torch.version.hip}"
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None
        torch.ones(1, device="cuda").sum().item()
except Exception as error:
    found["error"], found["gpus"] = f"{type(error).__name__}: {error}", 0
found["missing"] = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
print(json.dumps(found))
"""


class NoGpuError(Exception):
    """There is none that a torch here sees, or something that is needed is missing; in one line."""


def environment() -> dict[str, str]:
    """That of all that is started here: this checkout, and what was installed beside torch."""
    paths = [str(ROOT), str(BESIDE), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def probe(python: str) -> dict[str, Any]:
    """What `python` has: its torch, the GPUs that this sees, and which modules are missing."""
    command = [python, "-c", PROBE, *NEEDED, *FOR_TESTS]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120, check=True
        )
        return dict(json.loads(done.stdout.strip().splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return {"torch": None, "gpus": 0, "error": f"{type(error).__name__}"}


def candidates() -> list[str]:
    """Interpreters that may have a torch for GPUs."""
    venv = ROOT / ".venv" / "bin" / "python"
    found = [sys.executable, shutil.which("python3"), shutil.which("python"), str(venv) if venv.exists() else None]
    return list(dict.fromkeys(os.path.abspath(python) for python in found if python))


def interpreter() -> tuple[str, dict[str, Any]]:
    """The interpreter that is taken, and what it has."""
    seen = []
    for python in candidates():
        facts = probe(python)
        if facts["gpus"]:
            return python, facts
        torch = f"torch {facts['torch']}, which sees no GPU" if facts["torch"] else "no torch"
        seen.append(f"{python} has {torch}" + (f" ({facts['error']})" if facts.get("error") and facts["torch"] else ""))
    if any(Path(driver).exists() for driver in DRIVERS):
        print("no torch here sees a GPU: making .venv", flush=True)
        with contextlib.suppress(FileNotFoundError):  # there may be no make
            subprocess.run(["make", "-s", ".venv/.test"], cwd=ROOT, check=False)
        venv = str(ROOT / ".venv" / "bin" / "python")
        facts = probe(venv)
        if facts["gpus"]:
            return venv, facts
        seen.append(f"the one of {venv} neither")
    raise NoGpuError(f"no GPU: {'; '.join(seen)}")


def install_missing(python: str, facts: dict[str, Any]) -> list[str]:
    """Install into :data:`BESIDE` what `python` hasn't; what is still missing."""

    def distributions(modules: Sequence[str]) -> list[str]:
        return " ".join({**NEEDED, **FOR_TESTS}[name] for name in modules).split()

    if not facts["missing"]:
        return []
    wanted = distributions(facts["missing"])
    print(f"installing {', '.join(wanted)} into {BESIDE}", flush=True)
    # Without what they depend on, which is torch's or listed here: pip would bring another torch along.
    pip = [python, "-m", "pip", "install", "-qq", "--no-input", "--disable-pip-version-check", "--no-deps"]
    pip += ["--retries", "1", "--timeout", "10", "--target", str(BESIDE), "--constraint", str(ROOT / "constraints.txt")]
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run([*pip, *wanted], cwd=ROOT, check=False, timeout=90)
    missing: list[str] = probe(python)["missing"]
    if fatal := [name for name in missing if name in NEEDED]:
        version = ".".join(facts["python"].split(".")[:2])
        raise NoGpuError(
            f"{python} hasn't {' and '.join(fatal)}, and pip couldn't install that. Without internet, fetch what is "
            f"missing elsewhere, in this folder, and bring .gpu along: python3 -m pip install --target .gpu --no-deps "
            f"--python-version {version} --only-binary :all: {' '.join(distributions(missing))}"
        )
    return missing


#: ltx is imported, and the backend sums on the GPU over a world of one, where ltx itself has nothing to send.
CHECK = """
import torch, torch.distributed as dist
import ltx
dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
with ltx.init() as world:
    x = ltx.to_device(torch.arange(4.0))
    dist.all_reduce(x)
    assert x.is_cuda and ltx.psum(x).tolist() == [0.0, 1.0, 2.0, 3.0]
    print(f"ltx {ltx.__version__} sums on {world.device} by {world.backend}")
"""


def check(python: str) -> None:
    """Raise NoGpuError if ltx can't be imported or can't sum on the GPU, before any time is spent on parts."""
    try:
        done = subprocess.run(
            [python, "-c", CHECK], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=90
        )
    except subprocess.TimeoutExpired:
        raise NoGpuError("a sum on the GPU, over a world of one, hasn't ended in 90 s") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit status {done.returncode}"]
        raise NoGpuError(f"ltx doesn't run on the GPU: {lines[-1]}")
    print(done.stdout.strip(), flush=True)


@dataclass(frozen=True)
class Part:
    """A command that prints Markdown, for so many seconds at most.

    Attributes:
        name: for ``--only``.
        title: its heading.
        arguments: those of the interpreter.
        limit_s: it is ended then.
        tests: it is pytest, whose outcomes are read instead of what it prints.
    """

    name: str
    title: str
    arguments: tuple[str, ...]
    limit_s: float
    tests: bool = False


_PYTEST = ("-m", "tests.shards", "tests/gpu", "-q", "-W", "default", "-p", "no:cacheprovider")
_TABLE = ("-m", "benchmarks.table", "--device", "cuda", "--ranks", "1", "--minutes", "0")
_COMPILED = (*_TABLE, "--compiled", "--variants")

PARTS = (
    Part("tests", "Tests", _PYTEST, 170, tests=True),
    Part(
        "overhead",
        "The host's time a step, by the number of parameters",
        ("-m", "benchmarks.overhead", "--device", "cuda", "--parameters", "100", "1000", "--iterations", "40"),
        45,
    ),
    Part("eager", "A step, eagerly: 5 M parameters", _TABLE, 40),
    Part("large", "A step, eagerly: 152 M parameters", (*_TABLE, "--large"), 50),
    Part("calls", "What a step calls: 152 M parameters", ("-m", "benchmarks.calls", "--device", "cuda", "--large"), 50),
    Part("memory", "Peak memory of torch's allocator", ("-m", "benchmarks.memory", "--device", "cuda"), 40),
    Part("compiled", "A compiled loss: 5 M parameters", (*_COMPILED, "ltx of a compiled loss, fp16"), 55),
    Part("gradients", "Gradients as one compiled graph: 5 M parameters", (*_COMPILED, "ltx compiled"), 55),
    Part("step", "A whole step as one compiled graph: 5 M parameters", (*_COMPILED, "ltx compiled step"), 55),
)


@dataclass
class Outcome:
    """How a part went: its exit status (None: it was ended), what it printed, and outcomes of its tests."""

    status: int | None
    seconds: float
    printed: str
    complained: str = ""
    tests: list[dict[str, Any]] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        return self.status == 0

    @property
    def how(self) -> str:
        """In a sentence."""
        if self.status is None:
            return f"**Out of time** after {self.seconds:.0f} s."
        if self.status:
            return f"**Failed** after {self.seconds:.0f} s, with exit status {self.status}."
        return f"Whole, in {self.seconds:.0f} s."


def run_part(python: str, part: Part, limit_s: float) -> Outcome:
    """Run it in a session of its own, which is ended with all that is in it, at the latest when `limit_s` are over."""
    with tempfile.TemporaryDirectory() as folder:
        printed, complained, outcomes = (Path(folder) / name for name in ("out", "err", "tests"))
        began = time.monotonic()
        with open(printed, "wb") as out, open(complained, "wb") as err:
            process = subprocess.Popen(
                [python, *part.arguments],
                cwd=ROOT,
                env={**environment(), "LTX_TEST_DEVICE": "cuda", "LTX_GPU_REPORT": str(outcomes)},
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            status: int | None = None
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(limit_s)
            finally:
                _end(process)
        lines = outcomes.read_text(errors="replace").splitlines() if outcomes.exists() else []
        texts = [path.read_text(errors="replace") for path in (printed, complained)]
        return Outcome(status, time.monotonic() - began, *texts, list(_entries(lines)))


def _entries(lines: Sequence[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        with contextlib.suppress(ValueError):  # it was ended in the middle of a line
            yield json.loads(line)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the session of `process`: its ranks, too, which it can't end itself any more."""
    for number, patience_s in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 10.0)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)


def of_tests(outcome: Outcome) -> str:
    """Markdown: how many passed, and what became of the others."""
    count = {name: sum(entry["outcome"] == name for entry in outcome.tests) for name in ("passed", "failed", "skipped")}
    lines = [", ".join(f"{number} {name}" for name, number in count.items()) + "."]
    others = [entry for entry in outcome.tests if entry["outcome"] != "passed"]
    if others:
        lines += ["", "| | test | |", "|---|---|---|"]
    for entry in others:
        error = " ".join(entry["error"].split()).replace("|", "\\|")[:300]
        lines.append(f"| {entry['outcome']} | {entry['test'].removeprefix('tests/gpu/')} | {error} |")
    return "\n".join(lines)


def section(part: Part, outcome: Outcome) -> str:
    """Markdown of one part."""
    lines = [f"## {part.title}", "", f"`python {shlex.join(part.arguments)}`", "", outcome.how]
    if part.tests and outcome.tests:
        lines += ["", of_tests(outcome)]
    elif not part.tests and outcome.printed.strip():
        lines += ["", outcome.printed.strip()]
    if not outcome.whole and not (part.tests and outcome.tests):
        said = (outcome.complained if part.tests or outcome.complained.strip() else outcome.printed) or outcome.printed
        lines += ["", "```text", *said.strip().splitlines()[-12:], "```"]
    return "\n".join(lines)


class Results:
    """The file of results, written anew at each change, to each of `files`."""

    def __init__(self, files: Sequence[Path], about: str):
        self._files, self._about = files, about
        self._sections: dict[str, str] = {}

    def write(self, state: str) -> None:
        """`state`: a sentence on how far it has come."""
        title = f"# Results on a GPU\n\nWritten by `make gpu`, on {self._about}. {state}"
        text = "\n\n".join([title, *self._sections.values()]) + "\n"
        for file in self._files:
            file.parent.mkdir(parents=True, exist_ok=True)
            made = file.with_suffix(".part")
            made.write_text(text)
            made.replace(file)

    def add(self, part: Part, text: str) -> None:
        self._sections[part.name] = text
        self.write(f"Not complete: {part.name} is the last of it.")


def run_all(
    python: str, parts: Sequence[Part], seconds: float, results: Results, keep: Callable[[Part, Outcome], None]
) -> bool:
    """Run `parts` one after the other within `seconds`; whether all were whole."""
    began, due, whole = time.monotonic(), 0.0, 0
    for part in parts:
        due, used = min(due + part.limit_s, seconds), time.monotonic() - began
        if seconds - used < 5:
            results.add(part, f"## {part.title}\n\n**Not run**: no time was left.")
            print(f"{part.name}: no time left", flush=True)
            continue
        print(f"{part.name} ...", end=" ", flush=True)
        outcome = run_part(python, part, due - used)
        whole += outcome.whole
        results.add(part, section(part, outcome))
        keep(part, outcome)
        print(outcome.how.replace("**", ""), flush=True)
    results.write(f"{whole} of {len(parts)} parts are whole.")
    return whole == len(parts)


def main() -> int:
    """Run all; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=580, help="for everything")
    parser.add_argument("--to", type=Path, default=HERE / "RESULTS-gpu.md")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], help="these parts alone")
    parser.add_argument("--check", action="store_true", help="only whether ltx is imported and sums on the GPU")
    arguments = parser.parse_args()
    began = time.monotonic()
    try:
        python, facts = interpreter()
        missing = install_missing(python, facts)
        check(python)
    except NoGpuError as error:
        print(f"make gpu: {error}", file=sys.stderr)
        return 1
    about = f"{facts['gpus']} x {facts['gpu']} ({facts['gib']} GiB), torch {facts['torch']}, CUDA {facts['cuda']}, "
    about += f"NCCL {facts['nccl']}, Python {facts['python']}, {os.cpu_count()} cores"
    about += f"; without {', '.join(missing)}" if missing else ""
    print(f"{python}: {about}", flush=True)
    if arguments.check:
        return 0
    out = Path(os.environ["OUT"]) if os.environ.get("OUT") else None
    results = Results([arguments.to, *([out / "RESULTS-gpu.md"] if out else [])], about)
    results.write("Nothing has run yet.")

    def keep(part: Part, outcome: Outcome) -> None:
        if out is not None:
            texts = [outcome.printed, outcome.complained, *(json.dumps(entry) for entry in outcome.tests)]
            (out / f"{part.name}.txt").write_text("\n".join(texts))

    parts = [part for part in PARTS if arguments.only is None or part.name in arguments.only]
    whole = run_all(python, parts, arguments.seconds - (time.monotonic() - began), results, keep)
    print(f"written: {arguments.to}")
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
