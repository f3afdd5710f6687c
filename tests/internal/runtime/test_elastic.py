"""elastic: training goes on after a loss of ranks; no sample is lost or seen twice, and ranks agree bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import ltx
from ltx.core.training.train_step import TrainStep
from ltx.errors import InputError, PeerLostError, StrategyError, UnsupportedError
from tests.contract.runtime.elastic_training import (
    SAMPLES,
    START,
    STEPS,
    assert_every_sample_once,
    batch,
    close_to,
    make,
    undisturbed,
    values,
)
from tests.forks import SILENT_S, open_now, settles
from tests.kinds import Started


def training(trouble: Callable[[int, int], None], epochs: int = 3, **kwargs: Any) -> Callable[..., Any]:
    """Trains, and calls ``trouble(rank, step)`` before each step; tells (rank, samples) of it, and how it ended."""

    def body(tell: Callable[[Any], None]) -> Any:
        first, taken, seen, resets = ltx.world().rank, [], {}, []
        train, state = make()

        def data(indices: Any) -> Any:
            taken[:] = [indices.tolist()]
            trouble(first, len(seen))
            return batch(indices)

        def on_step(state: Any, metrics: Any, position: Any) -> None:
            seen[state.step] = taken[0]

        state, position = ltx.elastic(
            train, state, data, START, epochs=epochs, on_step=on_step, on_reset=[resets.append], **kwargs
        )
        return {"state": values(state), "position": position, "seen": seen, "resets": resets, "world": ltx.world()}

    return body


def shares(rank: int, size: int, steps: int) -> dict[int, list[int]]:
    """What `rank` takes in the first `steps` steps."""
    position, found = START, {}
    for step in range(1, steps + 1):
        found[step] = position.indices(rank, size).tolist()
        position = position.after_step()
    return found


@pytest.mark.full(but=1)
@pytest.mark.covering(1)
@pytest.mark.parametrize("sockets", [False, True])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_killed_or_stopped(how: signal.Signals, sockets: bool, started: Started) -> None:
    def trouble(rank: int, step: int) -> None:
        if rank == 1 and step == 7:
            os.kill(os.getpid(), how)

    world = started(3, training(trouble), sockets=sockets, heartbeat_s=SILENT_S)
    ended = [world.told(rank) for rank in (0, 2)]
    assert all(isinstance(end, dict) for end in ended), ended
    assert ended[0]["state"] == ended[1]["state"]
    assert [end["world"].size for end in ended] == [2, 2]
    assert [end["world"].rank for end in ended] == [0, 1]
    assert [len(end["resets"]) for end in ended] == [1, 1]
    assert ended[0]["state"][0] == 3 * STEPS
    assert_every_sample_once(shares(1, 3, 7), *(end["seen"] for end in ended))
    assert close_to(ended[0]["state"], undisturbed())
    if how == signal.SIGSTOP:  # it comes back too late
        os.kill(world.processes[1].pid, signal.SIGCONT)
        assert "the others have gone on without this rank" in world.told(1)


@pytest.mark.full
def test_two_losses_until_one_is_left(started: Started) -> None:
    def trouble(rank: int, step: int) -> None:
        if (rank, step) in ((0, 3), (2, 9)):
            os.kill(os.getpid(), signal.SIGKILL)

    world = started(3, training(trouble))
    end = world.told(1)
    assert isinstance(end, dict), end
    assert (end["world"].size, len(end["resets"])) == (1, 2)
    assert close_to(end["state"], undisturbed())


@pytest.mark.full
def test_a_connection_that_breaks_costs_no_rank(started: Started) -> None:
    """Every process lives: all meet anew, and the end is that of an undisturbed run, bit for bit."""

    def trouble(rank: int, step: int) -> None:
        if rank == 1 and step == 4 and "LTX_TEST_CUT" not in os.environ:
            os.environ["LTX_TEST_CUT"] = "1"
            raise PeerLostError("the link is down")

    ends = {}
    for name, body in {"cut": training(trouble), "undisturbed": training(lambda rank, step: None)}.items():
        world = started(2, body, sockets=True)
        ends[name] = [world.told(rank) for rank in range(2)]
        assert all(isinstance(end, dict) for end in ends[name]), ends
    assert [end["world"].size for end in ends["cut"]] == [2, 2]
    assert [len(end["resets"]) for end in ends["cut"]] == [1, 1]
    assert {str(end["state"]) for run in ends.values() for end in run} == {str(ends["cut"][0]["state"])}
    assert_every_sample_once(*(end["seen"] for end in ends["cut"]))


@pytest.mark.full
def test_a_rank_that_lives_and_doesnt_come_is_left_behind_at_the_limit(started: Started) -> None:
    def trouble(rank: int, step: int) -> None:
        if rank == 1 and step == 4:
            time.sleep(12)
        if rank == 0 and step == 4 and "LTX_TEST_CUT" not in os.environ:
            os.environ["LTX_TEST_CUT"] = "1"
            raise PeerLostError("the link is down")

    world = started(2, training(trouble, meeting_timeout=timedelta(seconds=3)))
    end = world.told(0)
    assert isinstance(end, dict), end
    assert end["world"].size == 1
    assert "rank 1: the others have gone on without this rank, which they took for lost" in world.told(1)


@pytest.mark.full
def test_a_loss_that_comes_again_and_again_is_raised_on_all(started: Started) -> None:
    def trouble(rank: int, step: int) -> None:
        if rank == 1 and step == 4:
            raise PeerLostError("this link never works")

    world = started(2, training(trouble))
    assert world.told(1) == "PeerLostError: this link never works"
    assert "rank 1 has left axis 'data' because of an exception (PeerLostError: this link" in world.told(0)


@pytest.mark.full
@pytest.mark.parametrize("snapshots", [False, True])
def test_replicas_that_come_apart(snapshots: bool, started: Started, tmp_path: Path) -> None:
    """Of three, the one that differs gets the others' state; of two that differ, a snapshot knows what is right."""
    size = 2 if snapshots else 3

    def body(tell: Callable[[Any], None]) -> Any:
        train, state = make(check_every=1)

        def on_step(state: Any, *_: Any) -> None:
            if (ltx.world().rank, state.step) == (1, 7) and "LTX_TEST_FLIPPED" not in os.environ:
                os.environ["LTX_TEST_FLIPPED"] = "1"
                state.params["v"][3] += 1e-3  # as memory that has flipped a bit

        kwargs = {"snapshots": tmp_path, "every": 3} if snapshots else {}
        return values(ltx.elastic(train, state, batch, START, epochs=3, on_step=on_step, **kwargs)[0])

    world = started(size, body)
    ended = [world.told(rank) for rank in range(size)]
    assert all(isinstance(end, list) for end in ended), ended
    assert all(end == ended[0] for end in ended), ended
    assert close_to(ended[0], undisturbed())


def test_two_that_differ_and_no_snapshot(started: Started) -> None:
    def body(tell: Callable[[Any], None]) -> Any:
        train, state = make(check_every=1)
        if ltx.world().rank == 1:
            state.params["v"][3] += 1e-3
        return ltx.elastic(train, state, batch, START, epochs=1)

    world = started(2, body)
    for rank in range(2):
        assert f"ReplicaDivergedError: elastic: rank {rank}: ranks have done as many steps" in world.told(rank)


@pytest.mark.full
def test_a_rank_that_raises_is_left_behind_at_once(started: Started) -> None:
    def trouble(rank: int, step: int) -> None:
        if rank == 1 and step == 4:
            raise ValueError("a bad sample")

    world = started(3, training(trouble))
    ended = [world.told(rank) for rank in range(3)]
    assert ended.pop(1) == "ValueError: a bad sample", ended
    assert all(isinstance(end, dict) for end in ended), ended
    assert_every_sample_once(shares(1, 3, 4), *(end["seen"] for end in ended))


def test_who_holds_the_store_is_needed(started: Started) -> None:
    def trouble(rank: int, step: int) -> None:
        if rank == 0 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    world = started(3, training(trouble), held_by="rank 0")
    for rank in (1, 2):
        told = world.told(rank)
        assert f"PeerLostError: rank {rank}: the process that holds the store through which the ranks meet" in told
        assert "Start all of them again, from the last snapshot" in told


def test_too_few_are_left(started: Started) -> None:
    def trouble(rank: int, step: int) -> None:
        if rank == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    world = started(3, training(trouble, min_ranks=3))
    for rank in (0, 2):
        assert f"PeerLostError: rank {rank}: 2 of 3 ranks are left, fewer than min_ranks=3." in world.told(rank)


@pytest.mark.full
@pytest.mark.covering(1, of=lambda **_: ())
@pytest.mark.parametrize("sockets", [False, True])
def test_nothing_is_left_of_worlds_that_have_ended(sockets: bool, started: Started) -> None:
    """Files, sockets, shared memory and threads don't grow with the number of worlds, and in the end all are gone."""

    def body(tell: Callable[[Any], None]) -> Any:
        train, state = make()
        counts: list[dict[str, int]] = []

        def on_step(state: Any, *_: Any) -> None:
            if ltx.world().rank == 0 and len(counts) <= state.step // 2 - 1:
                counts.append(open_now())
                if state.step < 12:
                    raise PeerLostError("the link is down")

        ltx.elastic(train, state, batch, START, epochs=3, on_step=on_step)
        if ltx.world().rank == 0:
            assert len(counts) >= 6
            first = counts[1]
            most = settles(open_now, lambda now: all(now[kind] <= first.get(kind, 0) for kind in now))
            assert all(most[kind] <= first.get(kind, 0) for kind in most), (first, counts, most)
            ltx.shutdown()
        return open_now()

    world = started(2, body, sockets=sockets)
    left = [world.told(rank) for rank in range(2)]
    assert all(isinstance(each, dict) for each in left), left
    assert [kind for kind in left[0] if kind.startswith(("thread gloo", "/memfd"))] == []


class Behind(TrainStep):
    """A train step whose result rank 1 loses once, so that its peers are a step further."""

    def __call__(self, state: Any, *batch: Any) -> Any:
        done = super().__call__(state, *batch)
        if (ltx.world().rank, state.step) == (1, 6) and "LTX_TEST_BEHIND" not in os.environ:
            os.environ["LTX_TEST_BEHIND"] = "1"
            raise PeerLostError("the link is down")
        return done


def test_a_rank_that_is_behind_gets_the_state(started: Started) -> None:
    def body(tell: Callable[[Any], None]) -> Any:
        train, state = make(donate=False)
        train, steps, resets = Behind(train.step, train.optimizer, donate=False), [], []
        end, position = ltx.elastic(
            train,
            state,
            batch,
            START,
            epochs=2,
            on_step=lambda state, *_: steps.append(state.step),
            on_reset=[resets.append],
        )
        return values(end), position, len(resets), steps

    world = started(2, body)
    ended = [world.told(rank) for rank in range(2)]
    assert ended[0][:3] == ended[1][:3]
    assert ended[0][2] == 1
    assert ended[0][3] == list(range(1, 11))
    assert ended[1][3] == [1, 2, 3, 4, 5, 6, 8, 9, 10]  # the seventh was its peer's
    assert close_to(ended[0][0], undisturbed(2))


# --- snapshots -------------------------------------------------------------------------------------------------------


def test_snapshots_are_gone_on_from(tmp_path: Path) -> None:
    train, state = make()
    ltx.elastic(train, state, batch, START, epochs=1, snapshots=tmp_path, every=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000004", "step_00000005"]
    steps = []
    train, state = make()
    end, position = ltx.elastic(
        train, state, batch, START, epochs=3, snapshots=tmp_path, on_step=lambda state, *_: steps.append(state.step)
    )
    assert steps == list(range(6, 16))
    assert values(end) == undisturbed()
    assert (position.epoch, position.done) == (3, 0)


def test_a_snapshot_of_other_data_is_refused(tmp_path: Path) -> None:
    train, state = make()
    ltx.elastic(train, state, batch, START, epochs=1, snapshots=tmp_path)
    other = ltx.DataPosition(SAMPLES, 12, weighted=True)
    with pytest.raises(InputError, match=r"a run over other data .*batch_size=10.*batch_size=12"):
        ltx.elastic(*make(), batch, other, epochs=2, snapshots=tmp_path)


def test_a_snapshot_that_a_loss_has_interrupted_is_made_up_for_at_the_end(started: Started, tmp_path: Path) -> None:
    def body(tell: Callable[[Any], None]) -> Any:
        save, rank = ltx.checkpoint.save, ltx.world().rank

        def interrupted(*args: Any, **kwargs: Any) -> Path:
            if rank == 1 and "LTX_TEST_CUT" not in os.environ:
                os.environ["LTX_TEST_CUT"] = "1"
                raise PeerLostError("the link is down")
            return save(*args, **kwargs)

        ltx.checkpoint.save = interrupted
        resets: list[Any] = []
        kwargs = {"snapshots": tmp_path, "every": STEPS, "on_reset": [resets.append]}
        return values(ltx.elastic(*make(), batch, START, epochs=1, **kwargs)[0]), len(resets)

    world = started(2, body)
    ended = [world.told(rank) for rank in range(2)]
    assert ended[0] == ended[1]
    assert ended[0][1] == 1
    assert ltx.checkpoint.load(tmp_path, make()[1], rng=False).step == STEPS


@pytest.mark.full
def test_a_loss_while_the_snapshot_is_read(started: Started, tmp_path: Path) -> None:
    ltx.elastic(*make(), batch, START, epochs=1, snapshots=tmp_path)

    def body(tell: Callable[[Any], None]) -> Any:
        load, rank = ltx.checkpoint.load, ltx.world().rank

        def dies(*args: Any, **kwargs: Any) -> Any:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return load(*args, **kwargs)

        ltx.checkpoint.load, steps = dies, list[int]()
        on_step = lambda state, *_: steps.append(state.step)  # noqa: E731
        state, _ = ltx.elastic(*make(), batch, START, epochs=3, snapshots=tmp_path, on_step=on_step)
        return values(state), steps, ltx.world().size

    world = started(3, body)
    ended = [world.told(rank) for rank in (0, 2)]
    assert ended[0] == ended[1]
    assert ended[0][1:] == (list(range(STEPS + 1, 3 * STEPS + 1)), 2)
    assert close_to(ended[0][0], undisturbed())


SCRIPT = """
import json, os, signal, sys
import ltx
from tests.contract.runtime.elastic_training import START, batch, make, values

folder, begun = sys.argv[1], []
def on_step(state, metrics, position):
    begun.append(state.step)
    if ltx.world().rank == 1 and state.step == 7 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
with ltx.init() as world:
    train, state = make()
    state, position = ltx.elastic(
        train, state, batch, START, epochs=3, snapshots=f"{folder}/snapshots", every=3, min_ranks=2, on_step=on_step
    )
    with open(f"{folder}/{world.rank}.json", "w") as file:
        json.dump([begun[0], world.size, values(state)], file)
"""


@pytest.mark.full
@pytest.mark.timeout(150)
def test_ltx_run_starts_again_from_the_last_snapshot(tmp_path: Path) -> None:
    """Rank 1 kills itself with -9 behind step 7; the last snapshot is of step 6, and nothing is skipped."""
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    found = subprocess.run(
        [sys.executable, "-m", "ltx", "run", "-n", "2", "--max-restarts", "1", str(tmp_path / "script.py"), tmp_path],
        env=environment | {"PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=140,
    )
    assert found.returncode == 0, found.stderr
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert told[0] == told[1]
    assert told[0][:2] == [7, 2]
    assert close_to(told[0][2], undisturbed())


# --- what is refused when it is called -------------------------------------------------------------------------------


def test_a_step_that_doesnt_commit_whole_is_refused() -> None:
    train, state = make(overlap="update")
    with pytest.raises(UnsupportedError, match=r"overlap='update', which doesn't commit a step whole.*\"backward\""):
        ltx.elastic(train, state, batch, START, epochs=1)


@pytest.mark.full
def test_what_a_rank_keeps_for_itself_needs_snapshots(started: Started, tmp_path: Path) -> None:
    def body(tell: Callable[[Any], None]) -> Any:
        for strategy in (ltx.ZeroStrategy(), ltx.LocalSGDStrategy(period=2)):
            try:
                ltx.elastic(*make(strategy), batch, START, epochs=1)
            except StrategyError as error:
                tell(str(error))
        return ltx.elastic(*make(ltx.ZeroStrategy()), batch, START, epochs=1, snapshots=tmp_path)[0].step

    world = started(2, body)
    assert "the opt_state of a lost rank is lost with it" in world.told(0)
    assert "with LocalSGDStrategy(" in (told := world.told(0))
    assert "of a lost rank are lost with it, so the others can't go on" in told
    assert world.told(0) == STEPS


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"epochs": 0}, "elastic: epochs must be a whole number of at least 1, got 0"),
        ({"epochs": 1, "every": True}, "elastic: every must be a whole number"),
        ({"epochs": 1, "min_ranks": 2}, "min_ranks=2, and there are 1 ranks"),
        ({"epochs": 1, "meeting_timeout": 0}, "elastic: meeting_timeout must be a number of seconds or .*, got 0"),
    ],
)
def test_arguments_out_of_range(kwargs: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        ltx.elastic(*make(), batch, START, **kwargs)
