"""``ltx doctor``: what it says, when it is satisfied, and that it never waits without end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ltx.cli
from ltx.core.world.launchers import LAUNCHERS
from ltx.core.world.placement import Placement, why_no_slurm_task
from ltx.runtime import doctor
from ltx.runtime.doctor import Finding
from tests.forks import free_port
from tests.programs import begun, finished


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {mark for launcher in LAUNCHERS for mark in launcher.marks} | {"GLOO_SOCKET_IFNAME", "SLURM_JOB_ID"}:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.full
def test_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert ltx.cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert lines[-1] == "all is well"
    assert [line for line in lines[:-1] if line[0] != " "][:4] == ["versions", "world", "machine", "collective"]
    table = {line[2:18].strip(): line[18:] for line in lines if line.startswith("  ")}
    assert table["torch"] == torch.__version__
    assert table["launcher"] == "none, so a world of one"
    assert "SLURM_STEP_ID" in table["not set"]
    assert table["rank"] == "0 of 1, node 0 of 1, local rank 0 of 1"
    assert table["between"] == "two fresh workers of ltx.Pool"
    assert table["psum of 4 B"].endswith(" ms")
    assert table["psum of 16 MiB"].endswith(" GB/s")


@pytest.mark.full
def test_of_a_world(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": str(cores)}
    command = [sys.executable, "-m", "ltx", "run", "-n", "2", "-m", "ltx", "doctor", "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=110, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)  # once, whole
    assert (said["ok"], said["problems"]) == (True, [])
    texts = [{line["name"]: line["text"] for line in rank} for rank in said["ranks"]]
    assert [text["rank"] for text in texts] == [f"{r} of 2, node 0 of 1, local rank {r} of 2" for r in range(2)]
    assert all(text["launcher"].startswith("torchrun, by RANK=") for text in texts)
    assert texts[0]["between"] == "the 2 ranks of this world"
    assert [warning.partition(" cores")[0] for warning in said["warnings"]] == [
        f"rank {rank}: threads: 2 ranks of {cores} threads share {cores}" for rank in range(2)
    ]


def test_an_environment_that_contradicts_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PMI_RANK", "7")
    monkeypatch.setenv("PMI_SIZE", "2")
    assert ltx.cli.main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "problem: launcher: environment variable PMI_RANK='7' (launcher pmi): expected an integer" in printed
    assert "all is well" not in printed
    assert "psum" not in printed


@pytest.mark.full
def test_peers_that_do_not_come(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, str(value))
    assert ltx.cli.main(["doctor", "--timeout", "1"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "", "that is rank 0's to write to"
    assert printed.err.startswith("rank 1: psum: WorldError: rank 1 of 2 couldn't set up torch.distributed")


@pytest.mark.full
def test_it_gives_up() -> None:
    script = (
        "import time\nfrom ltx.runtime import doctor\n"
        "doctor._MORE_S = 0.1\ndoctor._examine = lambda *_: time.sleep(60)\ndoctor.doctor(timeout_s=0.1)\n"
    )
    ((status, _, said),) = finished(begun(["-c", script], [{}]))
    assert status == 1
    assert "problem: not done after 0.3 s; something hangs" in said


def the_interface(several_nodes: bool = False, master: str = "127.0.0.1", **environ: str) -> tuple[str, str]:
    _, found = doctor._interface(environ, (master, 29500), several_nodes)
    return found.text, found.problem


def test_the_interface_that_is_asked_for() -> None:
    assert the_interface(GLOO_SOCKET_IFNAME="lo") == ("lo 127.0.0.1, by GLOO_SOCKET_IFNAME", "")
    text, problem = the_interface(GLOO_SOCKET_IFNAME="nope")
    assert text == "nope without an IPv4 address, by GLOO_SOCKET_IFNAME"
    assert problem.startswith("GLOO_SOCKET_IFNAME='nope': expected one of ")
    assert "lo" in problem
    _, problem = the_interface(True, GLOO_SOCKET_IFNAME="lo")
    assert problem.startswith("127.0.0.1 can't be reached from the other nodes: unset GLOO_SOCKET_IFNAME, or set it")


def test_the_interface_from_which_the_master_is_reached() -> None:
    assert the_interface() == ("lo 127.0.0.1, from which 127.0.0.1 is reached", "")
    assert the_interface(several_nodes=True)[1] == ""  # ltx.init takes another one, where others come from outside
    assert the_interface(master="no.such.host.invalid") == (
        "none",
        "MASTER_ADDR='no.such.host.invalid' isn't reached from this machine",
    )


def test_a_sum_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [finding.problem for finding in doctor.measure()] == ["", ""]
    monkeypatch.setattr(doctor.collectives, "psum", lambda x: x + 1)
    problems = [finding.problem for finding in doctor.measure()]
    assert problems == ["the sum is wrong on rank 0: expected 1.0 everywhere"] * 2


def test_problems_of_other_ranks_are_shown() -> None:
    fine = [Finding("a", "x", "1")]
    bad = [Finding("a", "x", "2", warning="odd", problem="broken")]
    assert doctor._report([fine, bad], False) == "a\n  x  1\nwarning: rank 1: x: odd\nproblem: rank 1: x: broken"
    assert doctor._report([bad], False) == "a\n  x  2\nwarning: x: odd\nproblem: x: broken"
    assert json.loads(doctor._report([fine, bad], True))["ok"] is False


def test_why_a_process_in_an_allocation_is_alone() -> None:
    job = {"SLURM_JOB_ID": "1"}
    assert why_no_slurm_task({}) is None
    assert why_no_slurm_task(job | {"SLURM_STEP_ID": "0"}) is None
    assert why_no_slurm_task(job) == (
        "SLURM_JOB_ID is set, but not SLURM_STEP_ID: in an allocation, and not started by srun"
    )
    terminal = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PTY_PORT": "1"}
    assert "a terminal of srun --pty" in str(why_no_slurm_task(job | terminal))
    assert "job script" in str(why_no_slurm_task(job | {"SLURM_STEP_ID": "4294967291"}))
    findings = doctor._world(job, Placement("none"))
    assert [finding.text for finding in findings if finding.name == "slurm"] == [why_no_slurm_task(job)]
