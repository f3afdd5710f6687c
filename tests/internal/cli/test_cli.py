"""The command line: what is parsed, what is handed to torch's launcher, and whole runs."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.run import get_rdzv_endpoint

import ltx.__main__
from ltx.runtime.run import Ended, first_failure

torchrun = pytest.importorskip("torch.distributed.run")
Launched = list[argparse.Namespace]


def run_ltx(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "ltx", *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=110)


@pytest.fixture
def launched(here: Path, monkeypatch: pytest.MonkeyPatch) -> Launched:
    """What the elastic launcher would have been started with."""
    calls = Launched()
    monkeypatch.setattr(torchrun, "run", calls.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("LTX_KEY", "the test's own")  # or the command's would stay behind
    return calls


@pytest.fixture
def here(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a script and a package."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "script.py").touch()
    (folder / "package").mkdir()
    monkeypatch.chdir(folder)
    return folder


def stopped(*arguments: str) -> object:
    with pytest.raises(SystemExit) as raised:
        ltx.__main__.main(list(arguments))
    return raised.value.code


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert stopped("--help") == 0
    assert capsys.readouterr().out.startswith("usage: ltx")
    assert stopped("run", "--help") == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: ltx")
    assert len(said.splitlines()) < 25, "torchrun's 31 options fill two screens"
    assert re.search(r"options:\n +-n N .*\n( .*\n)* +-m", said)
    assert "All other options of torchrun" in said


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert stopped("--version") == 0
    assert capsys.readouterr().out == f"ltx {ltx.__version__}, torch {torch.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["dance"], "invalid choice: 'dance'"),
        (["run"], "the following arguments are required: training_script"),
        (["run", "-n", "0", __file__], "-n: expected a number of ranks of at least 1, or auto, cpu or gpu, got '0'"),
        (["run", "--nproc-per-node=two", __file__], "-n: expected a number of ranks of at least 1, or auto, cpu or"),
        (["run", "nowhere.py"], "there is no file 'nowhere.py' in "),
        (["run", "-m", "nowhere.at_all"], "there is no module 'nowhere.at_all' here"),
        (["run", "--no-python", "nowhere"], "there is no program 'nowhere'"),
        (["run", "--max-rest", "1", "script.py"], "unrecognized arguments: --max-rest"),
        (["run", "bad.py"], "bad.py isn't Python: invalid syntax (bad.py, line 2)"),
        (["run", "--standalone", "--nnodes", "2", "script.py"], "--standalone is of one machine, and --nnodes=2 of"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], here: Path) -> None:
    (here / "bad.py").write_text("import sys\ndef f(:\n")
    assert stopped(*arguments) == 2
    said = capsys.readouterr().err
    assert message in said
    assert arguments[:1] != ["run"] or said.count("\n") == 1


@pytest.mark.parametrize(
    "of_script",
    [["--log", "x"], ["--log=x"], ["--n", "7", "-n7"], ["--log-dir", "x", "-m", "y"], ["-n", "7", "--help"]],
)
def test_options_of_the_script_are_no_options_of_run(of_script: list[str], launched: Launched) -> None:
    """Not by a part of their name, which several of torchrun's begin with, nor by all of it."""
    assert ltx.__main__.main(["run", "-n", "3", "--max-restarts", "1", "script.py", *of_script]) == 0
    (parsed,) = launched
    assert (parsed.training_script, parsed.training_script_args) == ("script.py", of_script)
    assert (parsed.nproc_per_node, parsed.log_dir != "x", parsed.module) == ("3", True, False)
    assert (parsed.max_restarts, parsed.rdzv_backend) == (1, "ltx-loopback")


@pytest.mark.parametrize("backend", [[], ["--standalone"], ["--nnodes", "2"]])
def test_the_id_of_a_run_is_kept(backend: list[str], launched: Launched) -> None:
    ltx.__main__.main(["run", *backend, "--rdzv-id", "job7", "script.py"])
    ltx.__main__.main(["run", "script.py"])
    ltx.__main__.main(["run", "script.py"])
    given, *made = [parsed.rdzv_id for parsed in launched]
    assert given == "job7"
    assert len({"none", *made}) == 3, "runs at once on one machine have ids of their own"


def test_run_takes_a_module_and_defaults_to_one_rank(launched: Launched) -> None:
    ltx.__main__.main(["run", "-m", "package.module", "x"])
    (parsed,) = launched
    assert (parsed.module, parsed.nproc_per_node, parsed.training_script) == (True, "1", "package.module")


@pytest.mark.parametrize(
    ("arguments", "endpoint"),
    [
        (["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "host:1"], "host:1"),
        (["--nnodes", "2", "--node-rank", "1", "--master-addr", "host"], "host:29500"),
        (["--nnodes", "2", "--master-addr", "host", "--master-port", "29512"], "host:29512"),
        (["--master-port", "29511"], "127.0.0.1:29511"),
        ([], "127.0.0.1:0"),
    ],
)
def test_a_meeting_point_that_is_asked_for_is_kept(arguments: list[str], endpoint: str, launched: Launched) -> None:
    ltx.__main__.main(["run", "--nproc-per-node", "2", *arguments, "script.py"])
    assert not launched[0].standalone
    assert get_rdzv_endpoint(launched[0]) == endpoint


def test_the_port_that_the_environment_asks_for(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_MASTER_PORT", "29513")
    ltx.__main__.main(["run", "script.py"])
    ltx.__main__.main(["run", "--nnodes", "2", "--master-addr", "host", "script.py"])
    assert [get_rdzv_endpoint(parsed) for parsed in launched] == ["127.0.0.1:29513", "host:29513"]


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [(["--redirects", "3"], True), (["--tee", "0:1"], True), ([], False), (["--redirects=3", "--log-dir", "x"], False)],
)
def test_output_that_goes_to_files_is_kept(
    arguments: list[str], kept: bool, launched: Launched, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert ltx.__main__.main(["run", *arguments, "script.py"]) == 0
    assert [str(path) for path in tmp_path.iterdir()] == ([launched[0].log_dir] if kept else [])
    assert capsys.readouterr().err == (f"ltx run: the ranks' output is kept in {launched[0].log_dir}\n" if kept else "")


@pytest.mark.usefixtures("here")
def test_machines_that_are_lost(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def lose(_: argparse.Namespace) -> None:
        raise RendezvousConnectionError("the store is gone")

    monkeypatch.setattr(torchrun, "run", lose)
    assert ltx.__main__.main(["run", "--nnodes", "2", "--rdzv-backend", "c10d", "script.py"]) == 1
    said = "ltx run: this machine couldn't meet the others, or lost them: the store is gone\n"
    assert capsys.readouterr().err == said


def test_run_starts_every_rank(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, pathlib, sys\n"
        "rank = os.environ['RANK']\n"
        "pathlib.Path(f'rank{rank}').write_text(' '.join([os.environ['WORLD_SIZE'], *sys.argv[1:]]))\n"
    )
    done = run_ltx("run", "-n", "2", "script.py", "--flag", "-n", "5", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    written = {path.name: path.read_text() for path in tmp_path.glob("rank*")}
    assert written == dict.fromkeys(["rank0", "rank1"], "2 --flag -n 5")


@pytest.mark.full
def test_run_fails_when_a_rank_does(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os, sys\nsys.exit(3 if os.environ['RANK'] == '1' else 0)\n")
    done = run_ltx("run", "-n", "2", "script.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "ltx run: rank 1 exited with status 3\n" in done.stderr
    assert "Traceback" not in done.stderr


FAILING = """
import os, sys, time, torch, ltx
from contextlib import ExitStack
with ExitStack() as late:
    if os.environ["RANK"] == "1":
        late.callback(time.sleep, 8.0)  # the launcher sees its peer end first
    with ltx.init():
        ltx.psum(torch.ones(()))
        if os.environ["RANK"] == "1":
            raise ValueError("the first to raise")
        ltx.psum(torch.ones(()))
"""


@pytest.mark.full
def test_run_names_the_rank_whose_exception_came_first(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FAILING)
    done = run_ltx("run", "-n", "2", "script.py", cwd=tmp_path)
    assert done.returncode == 1
    said = done.stderr[done.stderr.index("ltx run: ") :]
    assert said.startswith("ltx run: rank 1 raised ValueError: the first to raise (script.py:10 in <module>: raise Val")
    assert "\nOther ranks: rank 0 raised DeadlockDetectedError: " in said
    assert "FAILED" not in done.stderr  # the launcher's block
    assert "Root Cause" not in done.stderr


@pytest.mark.full
def test_the_failure_of_an_earlier_run_is_not_told_again(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys, ltx\nwith ltx.init():\n    raise ValueError(sys.argv[1])\n")
    logs = ("--log-dir", "logs", "--rdzv-id", "job7")
    for said, options in (("first", ("--max-restarts", "1")), ("second", ())):
        done = run_ltx("run", *logs, *options, "script.py", said, cwd=tmp_path)
        assert f"ltx run: rank 0 raised ValueError: {said} (" in done.stderr


@pytest.mark.parametrize(
    ("ended", "first"),
    [
        ({0: Ended("", "PeerLostError", 1.0), 1: Ended("was killed by SIGKILL")}, 1),
        ({0: Ended("was killed by SIGTERM"), 1: Ended("was killed by SIGKILL")}, 1),
        ({0: Ended("was killed by SIGABRT"), 1: Ended("", "KeyError", 5.0), 2: Ended("", "ValueError", 4.0)}, 2),
        ({0: Ended("", "DeadlockDetectedError", 5.0), 1: Ended("", "DeadlockDetectedError", 4.0)}, 1),
    ],
)
def test_the_first_failure(ended: dict[int, Ended], first: int) -> None:
    assert first_failure(ended) == first


LISTENING = r"""
import os, sys, torch, ltx
with ltx.init() as world:
    ltx.psum(torch.ones(()))
    inodes = {os.readlink(f"/proc/{pid}/fd/{fd}") for pid in (os.getpid(), os.getppid())
              for fd in os.listdir(f"/proc/{pid}/fd") if os.path.exists(f"/proc/{pid}/fd/{fd}")}
    for name in ("tcp", "tcp6"):
        for line in open(f"/proc/net/{name}").read().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in inodes:
                sys.stdout.write(f"listens {local.split(':')[0]}\n")
    ltx.barrier()
"""


@pytest.mark.full
def test_on_one_machine_nothing_listens_beyond_loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "script.py").write_text(LISTENING)
    monkeypatch.setenv("LTX_KEY", "secret")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    done = run_ltx("run", "-n", "2", "script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {"listens", "0100007F"}  # 127.0.0.1
    assert done.stderr == ""
