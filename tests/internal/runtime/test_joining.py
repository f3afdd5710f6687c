"""Newcomers are taken into a training that runs; no sample is lost or seen twice, and ranks agree bit for bit."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ltx
from ltx.core.comm import backends
from ltx.core.comm.axis_comm import AxisComm
from ltx.core.world import groups
from ltx.errors import PeerLostError
from ltx.runtime.elastic import ElasticRun as Run
from ltx.runtime.membership import Membership, Regroup, _asked, _asks
from tests.contract.runtime.elastic_training import (
    START,
    STEPS,
    assert_every_sample_once,
    batch,
    close_to,
    make,
    undisturbed,
    values,
)
from tests.forks import SILENT_S, Body, Ranks, noticed
from tests.kinds import Started

EPOCHS = 3


@pytest.fixture
def started(started: Started) -> Started:
    """With a heartbeat that newcomers needn't wait long for."""
    return partial(started, heartbeat_s=SILENT_S)


def nothing(who: int, step: int) -> None:
    pass


def test_who_asks_without_the_jobs_key_isnt_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    assert _asked(store, "token") == []
    monkeypatch.setenv("LTX_KEY", "the job's")
    mine, anothers = _asks(2, "token"), _asks(3, "token")
    monkeypatch.setenv("LTX_KEY", "a stranger's")
    for axis_comm in (f"2 {mine}", f"4 {_asks(4, 'token')}", f"5 {anothers}", "6", "seven", f"8 {_asks(8, 'another')}"):
        store.append("asked", f"{axis_comm}\n")  # type: ignore[attr-defined]
    monkeypatch.setenv("LTX_KEY", "the job's")
    assert _asked(store, "token") == [2]


def training(trouble: Callable[[int, int], None] = nothing, wait_for: int = 0, at: int = 4, **kwargs: Any) -> Body:
    """Trains, and tells how. Behind step `at` it waits until there are newcomers for `wait_for` ranks.

    ``trouble(first, steps)`` is called before each step: `first` is the rank at first, -1 of a newcomer.
    """
    arguments = {"epochs": EPOCHS, **kwargs}

    def body(tell: Callable[[Any], None]) -> Any:
        first = -1 if ltx.world().launcher == "join" else ltx.world().rank
        seen, sizes, taken, waiting = {}, list[int](), list[Any](), noticed()
        train, state = make(arguments.pop("strategy", None))

        def data(indices: torch.Tensor) -> Any:
            taken[:] = [indices.tolist()]
            trouble(first, max(seen, default=0))
            return batch(indices)

        def on_step(state: Any, metrics: Any, position: Any) -> None:
            seen[state.step] = taken[0]
            if state.step == 1:
                tell("begun")
            deadline = time.monotonic() + 60
            while state.step == at and ltx.world().size + waiting[0] < wait_for:
                assert time.monotonic() < deadline, "no newcomer comes"
                time.sleep(0.02)

        state, position = ltx.elastic(
            train, state, data, START, on_step=on_step, on_reset=[lambda world: sizes.append(world.size)], **arguments
        )
        here = ltx.world()
        assert ltx.psum(torch.ones(())) == here.size
        return {
            "state": values(state),
            "at": (position.epoch, position.done),
            "seen": seen,
            "sizes": sizes,
            "world": here,
        }

    return body


def all_of(world: Ranks, *which: int) -> list[Any]:
    ended = [world.told(rank) for rank in which]
    assert all(isinstance(end, dict) for end in ended), ended
    ended.sort(key=lambda end: end["world"].rank)
    assert all(end["state"] == ended[0]["state"] for end in ended), "ranks differ"
    assert {end["at"] for end in ended} == {(EPOCHS, 0)}
    assert ended[0]["state"][0] == EPOCHS * STEPS
    assert [end["world"].rank for end in ended] == list(range(len(ended)))
    assert {end["world"].size for end in ended} == {len(ended)}
    return ended


def begun(world: Ranks, size: int) -> None:
    assert [world.told(rank) for rank in range(size)] == ["begun"] * size


@pytest.mark.full(but=1)
@pytest.mark.covering(1)
@pytest.mark.parametrize("sockets", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_a_newcomer_is_taken_in(size: int, sockets: bool, started: Started) -> None:
    body = training(wait_for=size + 1)
    world = started(size, body, sockets=sockets)
    begun(world, size)
    world.join(body)
    ended = all_of(world, *range(size + 1))
    assert [end["sizes"] for end in ended] == [[size + 1]] * (size + 1)
    assert min(ended[-1]["seen"]) == 5  # the first step that it does
    assert_every_sample_once(*(end["seen"] for end in ended))
    assert close_to(ended[0]["state"], undisturbed())


@pytest.mark.full
def test_a_newcomer_to_ranks_that_were_told_by_arguments(started: Started) -> None:
    """It runs the same program, arguments and all, and is known to compare nothing that the regroup has decided."""
    body = training(wait_for=3)
    world = started(2, body, held_by="rank 0", by_arguments=True)
    begun(world, 2)
    world.join(body)
    assert_every_sample_once(*(end["seen"] for end in all_of(world, 0, 1, 2)))


@pytest.mark.full
def test_a_newcomer_whose_peers_fall_before_it_has_their_state_doesnt_train_alone(
    started: Started, tmp_path: Path
) -> None:
    """It would train from step 0, into the snapshots of the others."""

    def trouble(first: int, steps: int) -> None:
        assert first != -1, "the newcomer trains"

    def falls(tell: Callable[[Any], None]) -> Any:
        in_new_world = Run._in_new_world

        def fall(self: Run, place: Any) -> Any:
            if self.has_state:
                os.kill(os.getpid(), signal.SIGKILL)
            return in_new_world(self, place)

        Run._in_new_world = fall  # type: ignore[method-assign]
        return training(trouble, wait_for=2, snapshots=tmp_path, every=2)(tell)

    world = started(1, falls)
    begun(world, 1)
    world.join(training(trouble, snapshots=tmp_path, every=2))
    assert world.told(1).startswith("PeerLostError: elastic: the ranks that had the training's state are gone")
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_00000002", "step_00000004"]


@pytest.mark.full(but=1)
@pytest.mark.parametrize("sockets", [False, True])
@pytest.mark.parametrize(
    "point", [(groups.Meeting, "gather"), (backends, "connect"), (AxisComm, "_meet"), (AxisComm, "_open_channel")]
)
def test_a_rank_that_falls_while_a_newcomer_is_taken_in(
    point: tuple[Any, str], sockets: bool, started: Started
) -> None:
    """Whatever those that are left wait for then, they look out for it."""

    def trouble(first: int, steps: int) -> None:
        if first == 1:
            setattr(*point, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))

    world = started(2, training(trouble, wait_for=3), sockets=sockets)
    begun(world, 2)
    world.join(training())
    world.processes[1].join()
    all_of(world, 0, 2)


@pytest.mark.parametrize("newcomer", ["honest", "forged"])
def test_who_hasnt_the_key_is_refused_and_the_training_goes_on(newcomer: str, started: Started) -> None:
    """`forged`: it doesn't look whether it has the key, and asks all the same."""

    def trouble(first: int, steps: int) -> None:
        if steps == 4:
            assert refused.wait(60)

    def other(tell: Callable[[Any], None]) -> Any:
        return training(meeting_timeout=timedelta(seconds=2))(tell)

    def forger(tell: Callable[[Any], None]) -> Any:
        host, port = os.environ["LTX_JOIN"].split(":")
        store = torch.distributed.TCPStore(host, int(port), is_master=False)  # type: ignore[attr-defined]
        *_, token, _ = json.loads(store.get("ltx/elastic/now"))
        for axis_comm in ("2", f"2 {'0' * 64}", "x", "2 é"):
            store.append(f"ltx/elastic/{token}/asked", f"{axis_comm}\n")
        deadline = time.monotonic() + 60
        for rank in (0, 1):  # each beats twice more, and so has looked
            for _ in range(2):
                key = f"ltx/elastic/{token}/ltx/records//{rank}"
                before = store.get(key)
                while store.get(key) == before:
                    assert time.monotonic() < deadline, f"rank {rank} beats no more"
                    time.sleep(0.02)
        tell("asked")

    refused = get_context("fork").Event()
    world = started(2, training(trouble), environment={"LTX_KEY": "secret"})
    begun(world, 2)
    if newcomer == "honest":
        assert "AuthenticationError: elastic: the ranks of the training at 127.0.0.1:" in (
            world.told(world.join(other, LTX_KEY="guess"))
        )
    else:
        assert world.told(world.join(forger, LTX_KEY="guess")) == "asked"
    refused.set()
    assert [end["sizes"] for end in all_of(world, 0, 1)] == [[], []]


@pytest.mark.full
def test_two_newcomers_at_once(started: Started) -> None:
    body = training(wait_for=4)
    world = started(2, body)
    begun(world, 2)
    world.join(body)
    world.join(body)
    ended = all_of(world, *range(4))
    assert_every_sample_once(*(end["seen"] for end in ended))


@pytest.mark.full
def test_a_replacement_of_a_lost_rank_zero(started: Started) -> None:
    def trouble(first: int, steps: int) -> None:
        if (first, steps) == (0, 2):
            os.kill(os.getpid(), signal.SIGKILL)

    body = training(trouble, wait_for=3)
    world = started(3, body)
    begun(world, 3)
    world.join(body)
    ended = all_of(world, 1, 2, 3)
    assert ended[0]["sizes"] in ([2, 3], [3])  # the newcomer may have come to the same regroup
    position, lost = START, {}
    for step in (1, 2):
        lost[step], position = position.indices(0, 3).tolist(), position.after_step()
    assert_every_sample_once(lost, *(end["seen"] for end in ended))
    assert close_to(ended[0]["state"], undisturbed())


@pytest.mark.full
def test_one_more_than_max_ranks_waits_until_a_rank_is_lost(started: Started) -> None:
    def trouble(first: int, steps: int) -> None:
        if (first, steps) == (1, 6):
            os.kill(os.getpid(), signal.SIGKILL)

    body = training(trouble, max_ranks=2, wait_for=3)
    world = started(2, body)
    begun(world, 2)
    world.join(body)
    ended = all_of(world, 0, 2)
    assert [end["sizes"] for end in ended] == [[2], [2]]
    assert min(ended[1]["seen"]) == 7


@pytest.mark.full
def test_only_so_many_are_taken_in_as_can_share_the_samples(started: Started) -> None:
    """Steps of 12 samples on four ranks: a fifth waits for a place, and there is none."""
    start = ltx.DataPosition(48, 12)

    def body(tell: Callable[[Any], None]) -> Any:
        first, waiting, sizes = ltx.world().launcher != "join", noticed(), list[int]()
        step = ltx.data_parallel(lambda w, x: (w - x).square().mean())
        train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=0.1))

        def on_step(state: Any, *_: Any) -> None:
            if first and state.step in (2, 4):
                tell("more")
                deadline = time.monotonic() + 60
                while waiting[0] < 1:
                    assert time.monotonic() < deadline
                    time.sleep(0.02)

        x = torch.arange(48.0)
        kwargs = {"epochs": 3, "on_step": on_step, "on_reset": [lambda world: sizes.append(world.size)]}
        end, _ = ltx.elastic(train, train.init(torch.tensor(0.0)), lambda i: x[i], start, **kwargs)
        return sizes, end.params.item(), end.step

    world = started(4, body)
    assert [world.told(rank) for rank in range(4)] == ["more"] * 4
    world.join(body)
    assert [world.told(rank) for rank in range(4)] == ["more"] * 4
    ended = [world.told(rank) for rank in range(4)]
    assert ended == [([], ended[0][1], 12)] * 4
    assert "is over: there is nothing left to join" in world.told(4)


def test_a_newcomer_with_another_model_is_refused_and_nobody_else_is_disturbed(started: Started) -> None:
    def other(tell: Callable[[Any], None]) -> Any:
        train, _ = make()
        state = train.init({"w": torch.zeros(5, 8), "v": torch.zeros(8)})
        return ltx.elastic(train, state, batch, START, epochs=EPOCHS)

    def trouble(first: int, steps: int) -> None:
        if steps == 4:
            assert refused.wait(60)

    refused = get_context("fork").Event()
    world = started(2, training(trouble))
    begun(world, 2)
    assert "axis 'elastic': ranks disagree on elastic, leaf 'params.v': rank 0: float32[7]; rank 2: float32[8]" in (
        world.told(world.join(other))
    )
    said = world.told(world.join(training(epochs=EPOCHS + 1)))
    assert "RankMismatchError: axis 'elastic': ranks disagree on elastic, its arguments: rank 0: " in said
    assert "epochs=4" in said
    refused.set()
    assert [end["sizes"] for end in all_of(world, 0, 1)] == [[], []]


def test_a_training_whose_ranks_keep_state_of_their_own_takes_no_newcomers(started: Started, tmp_path: Path) -> None:
    def trouble(first: int, steps: int) -> None:
        if steps == 4:
            assert refused.wait(60)

    refused = get_context("fork").Event()
    kwargs = {"strategy": ltx.ZeroStrategy(), "snapshots": tmp_path}
    world = started(1, training(trouble, **kwargs))
    begun(world, 1)
    said = world.told(world.join(training(**kwargs)))
    assert "takes no newcomers: the opt_state of each rank is its own." in said
    refused.set()
    all_of(world, 0)


def test_who_comes_when_it_is_over_is_told(started: Started) -> None:
    """The store lives on: the launcher holds it."""
    world = started(2, training())
    begun(world, 2)
    all_of(world, 0, 1)
    said = world.told(world.join(training()))
    assert said.startswith("WorldError: elastic: the training at 127.0.0.1:")
    assert said.endswith(" is over: there is nothing left to join.")


@pytest.mark.full
def test_who_asks_when_there_is_room_no_more_is_told_at_the_end(started: Started) -> None:
    body = training(max_ranks=2, wait_for=3)
    world = started(2, body)
    begun(world, 2)
    world.join(body)
    all_of(world, 0, 1)
    assert "is over: there is nothing left to join" in world.told(2)


@pytest.mark.full
def test_who_comes_at_the_last_moment_has_the_state_too(started: Started) -> None:
    body = training(wait_for=2, at=EPOCHS * STEPS - 1)
    world = started(1, body)
    begun(world, 1)
    world.join(body)
    ended = all_of(world, 0, 1)
    assert list(ended[1]["seen"]) == [EPOCHS * STEPS]
    assert_every_sample_once(*(end["seen"] for end in ended))


@pytest.mark.full
@pytest.mark.parametrize("there", ["no store", "no training"])
def test_nothing_to_join(there: str, started: Started) -> None:
    def other(tell: Callable[[Any], None]) -> Any:
        return ltx.elastic(*make(), batch, START, epochs=1, meeting_timeout=timedelta(seconds=1))

    world = started(0, other, held_by="launcher" if there == "no training" else "rank 0")
    said = world.told(world.join(other))
    expected = "no training that can be joined has begun" if there == "no training" else "couldn't reach the store of"
    assert said.startswith("WorldError: elastic: ")
    assert expected in said


@pytest.mark.full
def test_a_newcomer_whose_training_is_lost_is_told(started: Started) -> None:
    body = training(max_ranks=1, wait_for=2)

    def trouble(first: int, steps: int) -> None:
        if steps == 6:
            os.kill(os.getpid(), signal.SIGKILL)

    world = started(1, training(trouble, max_ranks=1, wait_for=2, min_ranks=1))
    begun(world, 1)
    world.join(body)
    assert "have shown no sign of life for too long" in world.told(1)


@pytest.mark.full
@pytest.mark.parametrize("when", ["asking", "callbacks"])
def test_a_newcomer_that_is_killed_while_it_joins(when: str, started: Started) -> None:
    """Who is killed while it asks is noticed by nobody; who is in the new world already is a loss as any other."""

    def dies(tell: Callable[[Any], None]) -> Any:
        if when == "asking":
            of_newcomer = Membership.of_newcomer

            def ask(*args: Any) -> Any:
                of_newcomer(*args)
                os.kill(os.getpid(), signal.SIGKILL)

            Membership.of_newcomer = ask  # type: ignore[assignment, method-assign]
        resets = [lambda world: os.kill(os.getpid(), signal.SIGKILL)]
        return ltx.elastic(*make(), batch, START, epochs=EPOCHS, on_reset=resets)

    body = training(wait_for=3)
    world = started(2, body)
    begun(world, 2)
    world.join(dies)
    if when == "asking":
        world.processes[2].join()
        world.join(body)  # it is taken in all the same
        ended = all_of(world, 0, 1, 3)
        assert {str(end["sizes"]) for end in ended} == {"[3]"}
    else:
        ended = all_of(world, 0, 1)
        assert [end["sizes"][-1] for end in ended] == [2, 2]
    assert_every_sample_once(*(end["seen"] for end in ended))


@pytest.mark.full
def test_a_rank_that_dies_before_the_new_world_is_made_isnt_waited_for(started: Started) -> None:
    """It came to the regroup, so that the others try to make a world with it, whose timeout is 20 s."""

    def dies(tell: Callable[[Any], None]) -> Any:
        take_over = Membership._take_over

        def take(self: Membership, *args: Any) -> Any:
            if ltx.world().rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return take_over(self, *args)

        Membership._take_over = take  # type: ignore[method-assign]
        return training(trouble)(tell)

    def trouble(first: int, steps: int) -> None:
        if steps == 4 and "LTX_TEST_CUT" not in os.environ:
            os.environ["LTX_TEST_CUT"] = "1"
            raise PeerLostError("the link is down")

    world = started(3, dies)
    begun(world, 3)
    ended = all_of(world, 0, 2)
    assert [end["world"].size for end in ended] == [2, 2]


@pytest.mark.full
def test_a_rank_that_comes_to_the_regroup_and_dies_isnt_waited_for(started: Started) -> None:
    """Rank 1 comes and dies; rank 2 comes later; the limit of 60 s isn't waited for."""

    def dies(tell: Callable[[Any], None]) -> Any:
        come = Regroup.come

        def comes(self: Regroup, member: Any) -> None:
            if ltx.world().rank == 2:
                time.sleep(1.0)
            come(self, member)
            if ltx.world().rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        Regroup.come = comes  # type: ignore[method-assign]
        return training(trouble)(tell)

    def trouble(first: int, steps: int) -> None:
        if steps == 4 and "LTX_TEST_CUT" not in os.environ:
            os.environ["LTX_TEST_CUT"] = "1"
            raise PeerLostError("the link is down")

    world = started(3, dies, sockets=True)
    begun(world, 3)
    all_of(world, 0, 2)


@pytest.mark.full
def test_a_second_training_in_the_same_processes(started: Started) -> None:
    """Who was taken into the first takes part in the second; what was said in the first counts no more."""

    def body(tell: Callable[[Any], None]) -> Any:
        first = training(wait_for=2)(tell)
        second = training(trouble)(tell)
        return first["state"], second["state"], second["sizes"], ltx.world().size

    def trouble(first: int, steps: int) -> None:
        if steps == 7 and ltx.world().rank == 1 and "LTX_TEST_CUT" not in os.environ:
            os.environ["LTX_TEST_CUT"] = "1"
            raise PeerLostError("the link is down")

    world = started(1, body)
    begun(world, 1)
    world.join(body)
    assert world.told(0) == world.told(1) == "begun"
    ended = [world.told(rank) for rank in range(2)]
    assert ended[0] == ended[1]
    assert ended[0][2:] == ([2], 2)
    assert close_to(ended[0][0], ended[0][1])


def test_who_never_asks_to_be_taken_in_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LTX_JOIN", "127.0.0.1:1")
    world = ltx.init()
    with pytest.warns(RuntimeWarning, match="what was done here was done alone"), world:
        assert world.size == 1


UNDER_LTX_RUN = """
import os, sys, time
import ltx
from tests.contract.runtime.elastic_training import START, batch, make

sizes = set()
def on_step(state, metrics, position):
    if not sizes:
        print("trains", flush=True)
    sizes.add(ltx.world().size)
    if 3 not in sizes:
        time.sleep(0.05)  # a slow step, so that the others come before the end
with ltx.init():
    state, _ = ltx.elastic(*make(), batch, START, epochs=100, on_step=on_step)
    os.write(1, f"ends {state.step} {sorted(sizes)}\\n".encode())  # in one piece: both ranks write here
"""


@pytest.mark.full
@pytest.mark.timeout(150)
def test_a_newcomer_to_ltx_run(tmp_path: Path) -> None:
    """It goes where `ltx run` prints, with the key; whoever has another key is refused, and the training goes on."""
    script = tmp_path / "script.py"
    script.write_text(UNDER_LTX_RUN)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    clean |= {"PYTHONPATH": str(Path(__file__).parents[3]), "LTX_KEY": "secret"}

    def start(*command: str, **environment: str) -> subprocess.Popen[str]:
        environment = clean | environment
        return subprocess.Popen(
            [sys.executable, *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    with start("-m", "ltx", "run", "-n", "2", str(script)) as job:
        assert job.stderr is not None
        assert job.stdout is not None
        told = re.fullmatch(
            r"ltx run: processes with the same LTX_KEY may join: LTX_JOIN=(.*)\n", job.stderr.readline()
        )
        assert told is not None
        assert "trains" in job.stdout.readline()
        stranger = start(str(script), LTX_JOIN=told[1], LTX_KEY="another")
        newcomer = start(str(script), LTX_JOIN=told[1])
        _, refused = stranger.communicate(timeout=100)
        assert stranger.returncode == 1
        assert "AuthenticationError" in refused
        out, err = newcomer.communicate(timeout=100)
        assert out.splitlines()[-1] == "ends 500 [3]", err
        out, err = job.communicate(timeout=100)
        assert out.count("ends 500 [2, 3]") == 2, err
    assert job.returncode == 0
