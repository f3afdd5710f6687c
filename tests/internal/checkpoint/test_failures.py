"""A rank that can't write, dies, or is told to stop: all ranks know, and what was there before still is."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx.checkpoint import RESUMABLE, directory, storage
from ltx.checkpoint.together import Together
from ltx.errors import CheckpointError, InputError, RankMismatchError, TreeError
from ltx.peers.store_exchange import StoreExchange
from tests import train_on
from tests.kinds import OnNewAxis, Ranks, Started, Tell
from tests.programs import begun, end, finished, of_torchrun

SIZE = 20_000
ADAM = ltx.optim.from_torch(torch.optim.Adam, lr=0.1)


def trainer(**kwargs: Any) -> Any:
    return ltx.train_step(ltx.data_parallel(lambda p, x: (p["w"] * x).sum().square()), ADAM, **kwargs)


def start(train: Any) -> Any:
    return train.init({name: torch.ones(SIZE) for name in ("w", "x", "y", "z")})


def is_one() -> bool:
    return int(ltx.axis_index()) == 1


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Writing beyond fails, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


SAVES: dict[str, Callable[..., Path]] = {
    "save": ltx.checkpoint.save,
    "save_async": lambda *args, **kwargs: ltx.checkpoint.save_async(*args, **kwargs).result(),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("how", SAVES)
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.filterwarnings("ignore:save_async:RuntimeWarning")
def test_a_full_disk_on_one_rank_is_the_same_error_on_all(how: str, failing: int, ranks: Ranks, tmp_path: Path) -> None:
    def on_a_rank() -> tuple[str, int]:
        train, rank = trainer(donate=False), int(ltx.axis_index())
        first = start(train)
        ltx.checkpoint.save(tmp_path, first)
        state, _ = train(first, torch.ones(SIZE))
        with files_of_at_most(10_000) if rank == failing else contextlib.nullcontext():
            text = train_on.said(CheckpointError, SAVES[how], tmp_path, state, keep=1)
        ltx.barrier()
        back = ltx.checkpoint.load(tmp_path, first).step
        ltx.checkpoint.save(tmp_path, state)  # the next one works
        return text, back + 10 * ltx.checkpoint.load(tmp_path, first).step

    results = ranks(2).run(on_a_rank)
    (said,) = {said for said, _ in results}
    where = re.escape(str(tmp_path / "step_00000001"))
    assert re.match(f"the checkpoint of step 1 wasn't saved to {where}: rank {failing}: ", said)
    assert "File too large" in said
    assert said.endswith("Earlier ones are as they were.")
    assert ([steps for _, steps in results], list(tmp_path.glob(".*"))) == ([10, 10], [])


# In the first nothing can be made, even by root.
@pytest.mark.parametrize("place", ["/proc/ltx", "file/under", "file"])
@pytest.mark.parametrize("how", ["save", "save_async", "load"])
def test_an_impossible_place_is_one_error_on_all(how: str, place: str, ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path, call = tmp_path / place, SAVES.get(how, ltx.checkpoint.load)
    first, second = ranks(2).run(lambda: train_on.raised_by(call, path, start(trainer())))
    assert first == second
    assert first.startswith("CheckpointError: ")
    assert str(path) in first


def donated(path: Path, state: Any, alone: bool) -> None:
    following, _ = trainer()(state, torch.ones(SIZE))
    ltx.checkpoint.save(path, state if alone else following)


save, load = ltx.checkpoint.save, ltx.checkpoint.load
MISTAKES: dict[str, tuple[Callable[[Path, Any, bool], object], str]] = {
    "keep": (lambda path, state, alone: save(path, state, keep=0 if alone else 1), "InputError: .*keep must"),
    "data": (lambda path, state, alone: save(path, state, data=open if alone else 1), "InputError: .*data"),
    "per_rank": (lambda path, state, alone: load(path, state, per_rank="?" if alone else "mean"), "InputError: "),
    "no state": (lambda path, state, alone: load(path, None if alone else state), "StepError: .*rank 1: "),
    "donated": (donated, "DonatedStateError: the checkpoint wasn't saved: rank 1: "),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_one_rank_is_one_error_on_all(mistake: str, ranks: Ranks, tmp_path: Path) -> None:
    wrong, said = MISTAKES[mistake]
    first, second = ranks(2).run(lambda: train_on.raised_by(wrong, tmp_path, start(trainer()), is_one()))
    assert first == second
    assert re.match(said, first)
    assert "rank 1: " in first
    assert list(tmp_path.iterdir()) == []


def test_another_file_system(ranks: Ranks, tmp_path: Path) -> None:
    """Rank 1's files aren't where rank 0 looks."""

    def on_a_rank() -> str:
        describe = directory.describe

        def described(path: Path, names: Any) -> Any:
            """Seen by rank 1 alone: gone when rank 0 looks."""
            found = describe(path, names)
            for name in found:
                (path / name).unlink()
            return found

        with pytest.MonkeyPatch.context() as patch:
            if is_one():
                patch.setattr(directory, "describe", described)
            return train_on.said(CheckpointError, lambda: ltx.checkpoint.save(tmp_path, start(trainer())))

    (said,) = set(ranks(2).run(on_a_rank))
    assert re.search("rank 1 has written .*, but rank 0 sees no such file: all ranks need the same file system", said)


@pytest.mark.full
@pytest.mark.parametrize("then", ["step", "psum", "barrier"])
def test_one_rank_that_saves_alone_is_told(then: str, on_new_axis: OnNewAxis, tmp_path: Path) -> None:
    """The mistake that everyone makes once: `if rank == 0: save(...)`, and then the next step, which all ranks know."""

    def on_a_rank() -> str:
        train = trainer(donate=False)
        state = start(train)
        going_on = {
            "step": lambda: train(state, torch.ones(SIZE)),
            "psum": lambda: ltx.psum(torch.ones(3)),
            "barrier": ltx.barrier,
        }[then]
        going_on()
        call = going_on if is_one() else lambda: ltx.checkpoint.save(tmp_path, state)
        return train_on.said(RankMismatchError, call)

    what = {"step": "data_parallel"}.get(then, then)
    for sockets in (False, True):
        said = on_new_axis(on_a_rank, sockets=sockets).replicated()
        assert "ranks disagree on the operation: rank 0: checkpoint.save; rank 1: " + what in said
    assert list(tmp_path.iterdir()) == []


@train_on.on_ranks(2)
def test_a_round_under_way_is_refused_by_name(tmp_path: Path) -> None:
    strategy = ltx.BaguaStrategy("async", schedule=(4, 2))
    train = ltx.train_step(ltx.data_parallel(lambda w, x: (w * x).sum(), strategy), ADAM)
    state, _ = train(train.init(torch.ones(3)), torch.ones(3))
    text = r"^checkpoint: BaguaStrategy\(.* has an exchange under way between two steps"
    train_on.refuses(InputError, text, ltx.checkpoint.save, tmp_path, state)
    ltx.checkpoint.save(tmp_path, train.finish(state))
    assert ltx.checkpoint.load(tmp_path, train.init(torch.ones(3))).step == 1


def test_nothing_is_read_after_the_last_exchange(ranks: Ranks, tmp_path: Path) -> None:
    """Rank 0 may go on and remove the checkpoint before rank 1 has returned from loading it."""

    def on_a_rank() -> int:
        train = trainer()
        ltx.checkpoint.save(tmp_path, start(train), data=int(ltx.axis_index()))
        with pytest.MonkeyPatch.context() as patch:
            if is_one():
                exchange, done = Together.exchange, list[Any]()

                def exchanges(*args: Any) -> Any:
                    done.append(exchange(*args))
                    if len(done) == 3:  # of the steps, the files, the tensors
                        ltx.barrier("removed")
                    return done[-1]

                patch.setattr(Together, "exchange", exchanges)
            data: int = ltx.checkpoint.load(tmp_path, start(train)).data
        if not is_one():
            shutil.rmtree(tmp_path)
            ltx.barrier("removed")
        return data

    assert list(ranks(2).run(on_a_rank)) == [0, 1]


def test_rank_0_stays_until_all_have_heard(ranks: Ranks, tmp_path: Path) -> None:
    """Its process may end next, and with it the store in which the others would read what came of it."""

    def on_a_rank() -> float:
        with pytest.MonkeyPatch.context() as patch:
            collect, heard = StoreExchange.collect, [0.0]

            def late(exchange: StoreExchange, place: str, *args: Any, **kwargs: Any) -> list[Any]:
                if place.endswith("/3"):
                    time.sleep(0.5)
                    heard[0] = time.monotonic()
                return collect(exchange, place, *args, **kwargs)

            if is_one():
                patch.setattr(StoreExchange, "collect", late)
            ltx.checkpoint.save(tmp_path, start(trainer()))
            return heard[0] or time.monotonic()

    end, heard = ranks(2).run(on_a_rank)
    assert end > heard


def writer_that_waits() -> tuple[Callable[..., Any], threading.Event]:
    write, may_write = storage.write, threading.Event()

    def waits(*args: Any) -> Any:
        assert may_write.wait(60)
        return write(*args)

    return waits, may_write


@pytest.mark.parametrize("strategy", [ltx.DDPStrategy(), ltx.ZeroStrategy()], ids=["ddp", "zero"])
def test_steps_overwrite_nothing_that_is_being_saved(strategy: Any, ranks: Ranks, seed: int, tmp_path: Path) -> None:
    """Donated steps race with writers, of which every other one begins when the steps are done."""

    def on_a_rank() -> list[bool]:
        train = ltx.train_step(ltx.data_parallel(lambda p, x: (p["w"] * x).sum().square(), strategy), ADAM)
        state, kept, savings = train.init({"w": torch.randn(100_000)}), [], []
        write, (waits, may_write) = storage.write, writer_that_waits()
        with pytest.MonkeyPatch.context() as patch:
            for at in range(6):
                kept.append(ltx.tree.map(torch.clone, (state.params, state.opt_state)))
                patch.setattr(storage, "write", waits if at % 2 else write)
                savings.append(ltx.checkpoint.save_async(tmp_path, state))
                for _ in range(2):
                    state, _ = train(state, torch.rand(100_000))
                    ltx.psum(torch.ones(3))
            may_write.set()
            names = [saving.result().name for saving in savings]
        assert names == [f"step_{2 * at:08d}" for at in range(6)]
        same = []
        for at, expected in enumerate(kept):
            got = ltx.checkpoint.load(tmp_path, train.init({"w": torch.zeros(100_000)}), step=2 * at).state
            leaves = ltx.tree.flatten((got.params, got.opt_state))[0]
            same.append(all(map(torch.equal, leaves, ltx.tree.flatten(expected)[0])))
        return same

    assert list(ranks(2).run(on_a_rank)) == [[True] * 6] * 2


def test_it_returns_before_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits, may_write = writer_that_waits()
    monkeypatch.setattr(storage, "write", waits)
    saving = ltx.checkpoint.save_async(tmp_path, start(trainer()))
    assert not saving.done
    for limit in (0.01, timedelta(seconds=0.01)):
        train_on.refuses(TimeoutError, re.escape("isn't saved within 0.01 s"), saving.result, timeout_s=limit)
    train_on.refuses(InputError, r"Saving\.result: timeout_s must be a number of seconds or a", saving.result, -1)
    assert ltx.checkpoint.latest(tmp_path) is None
    may_write.set()
    assert saving.result(timedelta(days=365 * 500)) == ltx.checkpoint.latest(tmp_path)
    assert saving.done


# torch's, of a file that it flushes again when it forgets it; Python says so since 3.13.
@pytest.mark.filterwarnings("ignore:.*NoCloseWriter:pytest.PytestUnraisableExceptionWarning")
def test_a_failure_that_nobody_asks_for_is_a_warning(tmp_path: Path) -> None:
    def saves() -> None:
        with files_of_at_most(10_000):
            saving = ltx.checkpoint.save_async(tmp_path, start(trainer()))
            while not saving.done:
                time.sleep(0.01)

    with pytest.warns(RuntimeWarning, match="save_async: the checkpoint of step 0 wasn't saved to"):
        saves()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_a_rank_that_dies_while_it_saves(started: Started, tmp_path: Path) -> None:
    def body(tell: Tell) -> None:
        train = trainer(donate=False)
        first = train.init({"w": torch.ones(SIZE)})
        ltx.checkpoint.save(tmp_path, first)
        if is_one():
            storage.write = lambda *_: os._exit(9)
        tell(train_on.raised_by(ltx.checkpoint.save, tmp_path, train(first, torch.ones(SIZE))[0]))
        os._exit(0)  # to end in order would be to wait for the peer

    said = "PeerLostError: rank 0: checkpoint.save failed: the process of rank 1 is gone, or shows no sign of life."
    assert started(2, body).told(0) == said
    assert [file.name for file in tmp_path.iterdir()] == ["step_00000000"]


@pytest.mark.full
def test_the_end_of_the_world_waits_for_it(started: Started, tmp_path: Path) -> None:
    def body(tell: Tell) -> None:
        ltx.checkpoint.save_async(tmp_path, start(trainer()))

    world = started(2, body)
    assert [world.told(rank) for rank in range(2)] == [None, None]
    assert [file.name for file in tmp_path.iterdir()] == ["step_00000000"]


TRAINS = """
import sys, torch, ltx
path, last = sys.argv[1], int(sys.argv[2])
def loss(p, x):
    return torch.nn.functional.dropout(p["w"] * x, 0.3).square().sum()
def run():
    rank = ltx.world().rank
    torch.manual_seed(rank)
    train = ltx.train_step(ltx.data_parallel(loss), ltx.optim.from_torch(torch.optim.Adam, lr=0.01))
    state = train.init({"w": torch.ones(100)})
    if ltx.checkpoint.latest(path):
        restored = ltx.checkpoint.load(path, state)
        state = restored.state
        assert restored.data == state.step
    with ltx.checkpoint.preemption() as preempted:
        while state.step < last:
            state, _ = train(state, torch.full((100,), 1.0 + rank + state.step % 7))
            if state.step == 3:
                print("begun", flush=True)
            if preempted():
                ltx.checkpoint.save(path, state, data=state.step)
                print("stopped after", state.step, flush=True)
                preempted.exit()
    return state.params["w"]
"""


@pytest.mark.full
@pytest.mark.timeout(200)  # starts processes
def test_a_signal_to_one_process_stops_all_after_the_same_step(ranks: Ranks, tmp_path: Path) -> None:
    processes = begun(["-c", f"{TRAINS}\nwith ltx.init():\n    run()", str(tmp_path), "1000000000"], of_torchrun(2))
    try:
        for process in processes:
            assert process.stdout.readline() == "begun\n"
        processes[1].send_signal(signal.SIGTERM)
    except BaseException:
        end(processes)
        raise
    (code, said, errors), (other_code, other_said, other_errors) = finished(processes, 150)
    assert (errors, other_errors) == ("", "")
    assert (code, other_code) == (RESUMABLE, RESUMABLE) == (75, 75)
    assert said == other_said
    stopped = int(re.fullmatch(r"stopped after (\d+)\n", said)[1])  # type: ignore[index]
    assert [file.name for file in tmp_path.iterdir()] == [f"step_{stopped:08d}"]

    def again(path: Path) -> Tensor:
        """In processes that were there before, whose generators are elsewhere."""
        names: dict[str, Any] = {}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["", str(path), str(stopped + 5)])
            exec(TRAINS, names)
        return names["run"]()

    resumed, undisturbed = (ranks(2).run(again, path).replicated() for path in (tmp_path, tmp_path / "new"))
    assert torch.equal(resumed, undisturbed)


def test_signals_do_afterwards_what_they_did() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        with ltx.checkpoint.preemption(signals=(signal.SIGUSR1,), every=2) as preempted:
            assert not preempted()
            os.kill(os.getpid(), signal.SIGUSR1)
            assert (preempted.received, [preempted() for _ in range(3)]) == (signal.SIGUSR1, [True] * 3)
            assert seen == []
            with pytest.raises(SystemExit) as raised:
                preempted.exit()
            assert raised.value.code == 75
        os.kill(os.getpid(), signal.SIGUSR1)
        assert seen == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_that_cant_be_handled_leaves_the_others_as_they_were() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    for signals in ((signal.SIGUSR1, signal.SIGKILL), (signal.SIGUSR1, signal.SIGUSR1)):
        with contextlib.suppress(OSError), ltx.checkpoint.preemption(signals=signals):
            pass
        assert signal.getsignal(signal.SIGUSR1) is before


def test_preemption_refuses() -> None:
    def enter(**given: int) -> None:
        with ltx.checkpoint.preemption(**given):
            pass

    train_on.refuses(InputError, "every must be a whole number of at least 1, got 0", enter, every=0)
    with ThreadPoolExecutor(1) as other:
        said = other.submit(train_on.said, InputError, enter).result()
    assert "signals are handled by the main thread alone" in said


@pytest.mark.parametrize("tree", [{"a.b": 1.0, "a": {"b": 2.0}}, {"a": [1.0, 2.0], "a.1": 3.0}])
def test_two_leaves_with_one_path(tree: Any) -> None:
    params = ltx.tree.map(torch.tensor, tree)
    for init in (trainer().init, ltx.data_parallel(lambda params: 0.0).init):
        train_on.refuses(TreeError, r"params: two leaves have the path 'a\.(b|1)'", init, params)
