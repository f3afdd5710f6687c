"""Checkpoints that something happened to: they are seen, named and passed over, and nothing in them is run."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

import ltx
from ltx.checkpoint import directory, storage
from ltx.errors import CheckpointError
from tests.kinds import Ranks
from tests.train_on import go_on, refuses, said

STEP = ltx.data_parallel(lambda p, x: (p["w"] * x).sum().square())
TRAIN = ltx.train_step(STEP, ltx.optim.from_torch(torch.optim.Adam, lr=0.1), donate=False)


def start() -> Any:
    return TRAIN.init({"w": torch.ones(50)})


def state_of(step: int) -> Any:
    return go_on(TRAIN, start(), [torch.linspace(0, 1, 50)] * step).state


def saved(path: Path, count: int = 2, **kwargs: Any) -> list[Any]:
    """The states after 1, 2, ... steps, each saved."""
    states = [state_of(step) for step in range(count + 1)]
    for state in states[1:]:
        ltx.checkpoint.save(path, state, data={"at": state.step}, **kwargs)
    return states


def truncated(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(bytes(data))


@pytest.mark.parametrize("harm", [truncated, (lambda file: os.truncate(file, 0)), flipped, Path.unlink])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "manifest.json"])
def test_the_one_before_is_taken(name: str, harm: Callable[[Path], None], tmp_path: Path) -> None:
    states = saved(tmp_path)
    harm(tmp_path / "step_00000002" / name)
    where = re.escape(str(tmp_path / "step_00000002" / name))
    with pytest.warns(RuntimeWarning, match=f"the checkpoint of step 2 isn't whole, so it is skipped: {where}"):
        restored = ltx.checkpoint.load(tmp_path, start())
    assert (restored.step, restored.data, restored.path) == (1, {"at": 1}, tmp_path / "step_00000001")
    assert torch.equal(restored.state.params["w"], states[1].params["w"])
    text = f"no checkpoint of step 2 under .* is whole: {where}"
    with pytest.warns(RuntimeWarning):
        refuses(CheckpointError, text, ltx.checkpoint.load, tmp_path, start(), step=2)


def test_the_warning_names_file_and_digests(tmp_path: Path) -> None:
    saved(tmp_path)
    file = tmp_path / "step_00000002" / "__0_0.distcp"
    expected = hashlib.sha256(file.read_bytes()).hexdigest()
    flipped(file)
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    with pytest.warns(RuntimeWarning, match=re.escape(f"{file}: expected SHA-256 {expected}, found {found}")):
        ltx.checkpoint.load(tmp_path, start())
    truncated(file)
    size = file.stat().st_size
    with pytest.warns(RuntimeWarning, match=re.escape(f"{file}: expected {size + 1} bytes, found {size}")):
        ltx.checkpoint.load(tmp_path, start())


def test_a_flipped_digit_of_the_manifest(tmp_path: Path) -> None:
    saved(tmp_path)
    file = tmp_path / "step_00000002" / "manifest.json"
    file.write_text(file.read_text().replace('"step": 2', '"step": 3'))
    with pytest.warns(RuntimeWarning, match=r"manifest.json: expected digest [0-9a-f]{64}, found [0-9a-f]{64}"):
        assert ltx.checkpoint.load(tmp_path, start()).step == 1


def test_none_is_whole(tmp_path: Path) -> None:
    saved(tmp_path)
    for step in (1, 2):
        truncated(tmp_path / f"step_0000000{step}" / "__0_0.distcp")
    with pytest.warns(RuntimeWarning), pytest.raises(CheckpointError, match="is whole: ") as e:
        ltx.checkpoint.load(tmp_path, start())
    assert "step_00000001" in str(e.value)
    assert "step_00000002" in str(e.value)


def test_there_is_none(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        assert ltx.checkpoint.latest(path) is None
        refuses(CheckpointError, re.escape(f"there is no checkpoint under {path}."), ltx.checkpoint.load, path, start())


def test_processes_pass_over_together(ranks: Ranks, tmp_path: Path) -> None:
    """Each verifies a part of the files, and all of them know."""
    ranks(3).run(lambda: [None for _ in saved(tmp_path)])
    files = sorted((tmp_path / "step_00000002").iterdir())
    assert len(files) == 5  # of three ranks, and two for all
    whole = tmp_path / "step_00000002"
    for file in files:
        shutil.copytree(whole, tmp_path / "kept")
        flipped(file)

        def on_a_rank() -> tuple[int, list[str]]:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                step = ltx.checkpoint.load(tmp_path, start()).step
            return step, [str(w.message) for w in seen]

        (step, said), *others = ranks(3).run(on_a_rank)
        assert (step, len(said)) == (1, 1)
        assert str(file) in said[0]
        assert others == [(1, [])] * 2
        shutil.rmtree(whole)
        (tmp_path / "kept").rename(whole)


def test_keep_counts_from_the_one_just_saved(tmp_path: Path) -> None:
    """After going back from a torn checkpoint, that one doesn't push out good ones."""
    states = saved(tmp_path, 4)
    for step in (3, 4):
        truncated(tmp_path / f"step_0000000{step}" / "__0_0.distcp")
    with pytest.warns(RuntimeWarning):
        assert ltx.checkpoint.load(tmp_path, start()).step == 2
    ltx.checkpoint.save(tmp_path, states[3], keep=1)
    assert directory.steps(tmp_path) == [4, 3]
    with pytest.warns(RuntimeWarning, match="step 4 isn't whole"):
        assert ltx.checkpoint.load(tmp_path, start()).step == 3


def test_older_ones_that_cant_be_removed_are_no_reason_to_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new one is there."""
    states = saved(tmp_path, 2)

    def denied(*args: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(directory, "prune", denied)
    text = "step_00000002 is saved, but older checkpoints couldn't be removed: .*denied"
    with pytest.warns(RuntimeWarning, match=text):
        assert ltx.checkpoint.save(tmp_path, states[-1], keep=1) == tmp_path / "step_00000002"
    assert ltx.checkpoint.load(tmp_path, start()).step == 2


def test_all_of_it_is_on_the_disk_when_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[int] = set()
    missing: list[list[str]] = []
    to_disk, rename = os.fsync, os.rename

    def noted_fsync(opened: int) -> None:
        synced.add(os.fstat(opened).st_ino)
        to_disk(opened)

    def looked_rename(source: Any, target: Any) -> None:
        if re.fullmatch(r"step_\d+", Path(target).name):
            there = [Path(source), *Path(source).iterdir()]
            missing.append([file.name for file in there if file.stat().st_ino not in synced])
        rename(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", looked_rename)
    saved(tmp_path, 1)
    assert missing == [[]]
    assert tmp_path.stat().st_ino in synced, "nor is the name itself lost"


LOOP = """
import sys, torch, ltx
from pathlib import Path
train = ltx.train_step(ltx.data_parallel(lambda p, x: (p["w"] * x).sum().square()),
                       ltx.optim.from_torch(torch.optim.Adam, lr=0.1))
state = train.init({"w": torch.ones(300_000)})
while True:
    state, _ = train(state, torch.full((300_000,), 1e-3))
    saving = ltx.checkpoint.save_async(sys.argv[1], state, data=float(state.params["w"].double().sum()), keep=2)
    print(state.step, flush=True)
    state, _ = train(state, torch.full((300_000,), 1e-3))
    saving.result()
"""


@pytest.mark.full
@pytest.mark.timeout(200)  # starts processes
def test_killed_at_any_moment(tmp_path: Path, seed: int) -> None:
    """What is there after kill -9 is whole, and what isn't is swept away by the next run."""
    left = 0
    for delay in torch.rand(2).tolist():
        process = subprocess.Popen([sys.executable, "-c", LOOP, str(tmp_path)], stdout=subprocess.PIPE)
        for _ in range(3):
            process.stdout.readline()
        time.sleep(0.1 * delay)
        process.kill()
        process.wait()
        process.stdout.close()
        left += len(list(tmp_path.glob(".*")))
        restored = ltx.checkpoint.load(tmp_path, TRAIN.init({"w": torch.zeros(300_000)}))  # without a warning
        assert restored.data == float(restored.state.params["w"].double().sum())
        ltx.checkpoint.save(tmp_path, restored.state)
        assert list(tmp_path.glob(".*")) == []
        shutil.rmtree(tmp_path)
    print(f"{left} unfinished ones were left")


class Malice:
    """A pickle that makes a directory."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def resealed(path: Path, change: Callable[[Any], object]) -> None:
    """Change what the metadata says of where tensors lie, and make a manifest that fits."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        change(info)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    sealed(path)


def sealed(path: Path) -> None:
    """Make a manifest that fits the files, as whoever can write files can."""
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["digest"]
    manifest["files"] = directory.describe(path, manifest["files"])
    manifest["digest"] = directory._digest(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("where", [".metadata", "__0_0.distcp"])
def test_a_pickle_that_runs_code_is_refused(where: str, tmp_path: Path) -> None:
    saved(tmp_path / "run")
    harmed = tmp_path / "run" / "step_00000002"
    if where == ".metadata":
        (harmed / where).write_bytes(pickle.dumps(Malice(tmp_path / "made")))
        sealed(harmed)
    else:
        torch.save(Malice(tmp_path / "made"), harmed / where)
        size = (harmed / where).stat().st_size
        resealed(harmed, lambda info: vars(info).update(offset=0, length=size))  # every tensor is read from there
    with pytest.warns(RuntimeWarning, match="step 2 isn't whole") as seen:
        assert ltx.checkpoint.load(tmp_path / "run", start()).step == 1
    assert any(re.search(r"mkdir", str(w.message)) for w in seen)
    assert not (tmp_path / "made").exists()


def test_files_outside_are_not_read(tmp_path: Path) -> None:
    saved(tmp_path)
    elsewhere = "../step_00000001/__0_0.distcp"
    resealed(tmp_path / "step_00000002", lambda info: vars(info).update(relative_path=elsewhere))
    with pytest.warns(RuntimeWarning, match="which isn't in the manifest"):
        assert ltx.checkpoint.load(tmp_path, start()).step == 1


@pytest.fixture
def of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the checkpoints of steps 1, 2 and 5, of a process that has ended."""
    for step in (1, 2, 5):
        ltx.checkpoint.save(tmp_path, state_of(step))
    monkeypatch.setattr(directory, "runs", {})
    return tmp_path


def test_another_runs_checkpoints_stay(of_others: Path) -> None:
    for step in (3, 4):
        ltx.checkpoint.save(of_others, state_of(step), keep=1)
    assert directory.steps(of_others) == [5, 4, 2, 1]
    with pytest.raises(CheckpointError, match=r"step_00000005 was saved by another run\. Give another directory"):
        ltx.checkpoint.save(of_others, state_of(5), keep=1)
    assert (directory.steps(of_others), list(of_others.glob(".*"))) == ([5, 4, 2, 1], [])


def test_who_goes_on_from_them_continues_the_run(of_others: Path) -> None:
    assert ltx.checkpoint.load(of_others, state_of(0)).step == 5
    ltx.checkpoint.save(of_others, state_of(6), keep=2)
    assert directory.steps(of_others) == [6, 5]


# Checkpoints that a process can't read for reasons of its own: they count as whole, and nothing older is taken.
FAILURES: dict[str, tuple[Any, str, BaseException]] = {
    "no memory": (storage, "read", MemoryError()),
    "no memory of torch's": (storage, "read", RuntimeError("DefaultCPUAllocator: can't allocate memory")),
    "no memory for the metadata": (storage._Unpickler, "load", MemoryError()),
    "no more files": (directory, "sha256", OSError(errno.EMFILE, "Too many open files")),
    "not allowed": (Path, "read_bytes", PermissionError(errno.EACCES, "Permission denied")),
    "no network": (Path, "stat", OSError(errno.ESTALE, "Stale file handle")),
}


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("failure", FAILURES)
def test_what_says_nothing_of_a_checkpoint_is_raised(failure: str, failing: int, ranks: Ranks, tmp_path: Path) -> None:
    """On all ranks, where the one before was taken. The next time the latest is loaded."""

    def on_a_rank() -> tuple[str, int]:
        saved(tmp_path)
        ltx.barrier()
        owner, name, error = FAILURES[failure]
        done, path = getattr(owner, name), tmp_path / "step_00000002"

        def fail(*args: Any, **kwargs: Any) -> Any:
            if owner is Path and path not in args[0].parents:
                return done(*args, **kwargs)
            raise error

        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(action="error"):
            if int(ltx.axis_index()) == failing:
                patch.setattr(owner, name, fail)
            with pytest.raises(CheckpointError) as raised:
                ltx.checkpoint.load(tmp_path, start())
        return str(raised.value), ltx.checkpoint.load(tmp_path, start()).step

    (said, step), other = ranks(2).run(on_a_rank)
    assert other == (said, step)
    error = FAILURES[failure][2]
    begin = re.escape(f"checkpoint.load: {tmp_path / 'step_00000002'} can't be read: rank {failing}: ")
    end = r"The checkpoint may be whole, so no older one is loaded in its place\. "
    assert re.match(rf"{begin}{type(error).__name__}.*\. {end}", said)
    assert str(error) in said
    assert step == 2


def test_one_whose_run_cant_be_known_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be another run's, so it is neither replaced nor removed."""
    states, read = saved(tmp_path), Path.read_bytes

    def fail(path: Path) -> bytes:
        if path.parent.name == "step_00000001":
            raise PermissionError(errno.EACCES, "Permission denied")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", fail)
    refuses(CheckpointError, "the checkpoint wasn't saved: PermissionError", ltx.checkpoint.save, tmp_path, states[1])
    ltx.checkpoint.save(tmp_path, states[2], keep=1)
    assert directory.steps(tmp_path) == [2, 1]


# A checkpoint that is saved again under its name: whoever is killed meanwhile, one of the two is there.
OF_ONE = ltx.train_step(ltx.data_parallel(lambda w, x: (w * x).sum()), ltx.optim.from_torch(torch.optim.SGD, lr=0.1))


def save(path: Path, data: str, **kwargs: Any) -> None:
    ltx.checkpoint.save(path, OF_ONE.init(torch.ones(3)), data=data, **kwargs)


def loaded(path: Path) -> Any:
    """The data of the latest; a warning is an error."""
    return ltx.checkpoint.load(path, OF_ONE.init(torch.zeros(3))).data


def names(path: Path) -> list[str]:
    return sorted(os.listdir(path))


def sets_aside(source: Any, target: Any) -> bool:
    return Path(source).name.startswith("step_") and Path(target).name.startswith(".")


def killed(path: Path, after: Callable[[Any, Any], bool], host: str) -> None:
    """Save again in a process on `host` that is killed after a rename of which `after` is true."""

    def saves() -> None:
        rename = os.rename

        def last_rename(source: Any, target: Any) -> None:
            rename(source, target)
            if after(source, target):
                os.kill(os.getpid(), signal.SIGKILL)

        os.rename = last_rename
        socket.gethostname = lambda: host
        save(path, "new")

    process = get_context("fork").Process(target=saves)
    process.start()
    process.join(40)
    assert process.exitcode == -signal.SIGKILL
    process.close()


HOSTS = [socket.gethostname(), "elsewhere"]


@pytest.mark.parametrize("host", HOSTS, ids=["same host", "another host"])
@pytest.mark.parametrize("then", ["latest", "load", "save"])
def test_killed_between_the_renames(then: str, host: str, tmp_path: Path) -> None:
    save(tmp_path, "old")
    killed(tmp_path, sets_aside, host)
    assert all(name.startswith(".") for name in names(tmp_path))  # the moment in question
    if then == "latest":
        found = ltx.checkpoint.latest(tmp_path)
        assert found == tmp_path / "step_00000000"
        assert found.is_dir()
    elif then == "save":
        state, _ = OF_ONE(OF_ONE.init(torch.ones(3)), torch.ones(3))
        ltx.checkpoint.save(tmp_path, state, keep=2)
        assert directory.steps(tmp_path) == [1, 0]
        shutil.rmtree(tmp_path / "step_00000001")
    assert loaded(tmp_path) == "old"
    save(tmp_path, "newer")
    assert loaded(tmp_path) == "newer"
    assert [name for name in names(tmp_path) if "replaced" in name or ".old" in name] == []


@pytest.mark.parametrize("host", HOSTS, ids=["same host", "another host"])
def test_killed_after_the_renames(host: str, tmp_path: Path) -> None:
    """The old one is of no use any more: it doesn't come back when the new one is removed."""
    save(tmp_path, "old")
    killed(tmp_path, (lambda source, target: Path(target).name.startswith("step_")), host)
    assert (len(names(tmp_path)), loaded(tmp_path)) == (2, "new")
    shutil.rmtree(tmp_path / "step_00000000")
    assert ltx.checkpoint.latest(tmp_path) is None


def test_another_runs_is_put_back_before_it_could_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "old")
    killed(tmp_path, sets_aside, HOSTS[0])
    monkeypatch.setattr(directory, "runs", {})
    refuses(CheckpointError, "step_00000000 was saved by another run", save, tmp_path, "of another run")
    assert loaded(tmp_path) == "old"


def test_who_looks_between_the_renames_finds_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And gives it its name back, which doesn't keep the new one from replacing it."""
    save(tmp_path, "old")
    rename, found = os.rename, []

    def look(source: Any, target: Any) -> None:
        rename(source, target)
        if sets_aside(source, target) and len(found) < 2:
            found.append(loaded(tmp_path))

    monkeypatch.setattr(os, "rename", look)
    save(tmp_path, "new")
    assert (found, loaded(tmp_path), names(tmp_path)) == (["old", "old"], "new", ["step_00000000"])


def test_one_that_cant_be_replaced_is_still_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "old")
    rename = os.rename

    def fail(source: Any, target: Any) -> None:
        if Path(target).name == "step_00000000" and Path(source).name.startswith(".step_"):
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    said(CheckpointError, save, tmp_path, "new")
    monkeypatch.undo()
    assert (names(tmp_path), loaded(tmp_path)) == (["step_00000000"], "old")


def test_one_that_cant_be_put_back_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a reader that mustn't write."""
    save(tmp_path, "old")
    killed(tmp_path, sets_aside, HOSTS[0])

    def fail(source: Any, target: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "rename", fail)
    refuses(CheckpointError, r"step_00000000 was renamed to .*/\.replaced_step_.*Permission", loaded, tmp_path)
    refuses(CheckpointError, "has ended, rename it to", ltx.checkpoint.latest, tmp_path)
