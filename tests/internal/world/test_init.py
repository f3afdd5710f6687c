"""``ltx.init`` in one process: a world of one, calls repeated, groups adopted; and ranks that can't make their part."""

from __future__ import annotations

import gc
import json
import math
import os
import re
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import ltx
from ltx import World, init, shutdown, to_device, world
from ltx.core.comm import backends
from ltx.core.ranks.axis import axes_in_scope
from ltx.core.world import init as world_init
from ltx.errors import WorldError
from ltx.peers import meeting
from ltx.peers.store_exchange import StoreExchange
from ltx.runtime.launchers import LAUNCHERS, placement_beside_group
from tests.forks import free_port, open_now, settles
from tests.internal.runtime.test_launchers import openmpi
from tests.kinds import Started
from tests.programs import begun, finished
from tests.train_on import raised_by, refuses


@pytest.fixture(autouse=True)
def _no_world_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in {mark for launcher in LAUNCHERS for mark in launcher.marks}:
        monkeypatch.delenv(name, raising=False)
    yield
    shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def user_group(_no_world_is_left: None) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def _told(patch: pytest.MonkeyPatch, **variables: object) -> None:
    for name, value in variables.items():
        patch.setenv(name, str(value))


@pytest.fixture
def torchrun_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    _told(monkeypatch, RANK=0, WORLD_SIZE=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())


def test_world_of_one_makes_no_process_group() -> None:
    with init() as entered:
        assert not dist.is_initialized()
        assert entered is world()
        assert (entered.rank, entered.size, entered.launcher) == (0, 1, "none")
        assert ltx.psum(torch.tensor(3.0)).item() == 3.0
    assert axes_in_scope() == ()


@pytest.mark.usefixtures("torchrun_of_one")
def test_teardown_after_an_exception_and_again() -> None:
    """Of the group that one process under torchrun has too."""

    def fails() -> None:
        with init(timeout=timedelta(seconds=30)) as entered:
            assert (entered.launcher, entered.size, dist.is_initialized()) == ("torchrun", 1, True)
            ltx.psum(torch.ones(2)) / (1 // 0)

    for _ in range(3):
        assert raised_by(fails).startswith("ZeroDivisionError")
        assert not dist.is_initialized()
        assert axes_in_scope() == ()
    shutdown()
    shutdown()


@pytest.mark.usefixtures("torchrun_of_one")
def test_a_group_that_the_user_destroys_is_made_again() -> None:
    with init():
        dist.destroy_process_group()  # as accelerate's end_training()
        assert ltx.psum(torch.tensor(3.0)).item() == 3.0
        with init():
            assert dist.is_initialized()
            assert ltx.psum(torch.tensor(3.0)).item() == 3.0


def test_second_call_gives_the_same_world() -> None:
    first = init(backend="gloo")
    assert init(backend="gloo") is first
    assert init() is first, "what is left out agrees with what is there"


def test_inner_with_leaves_the_outer_world_and_all_axes_of_its_mesh() -> None:
    with init(mesh={"node": 1, "data": 1}) as outer:
        with init() as inner:
            assert inner is outer
        assert [axis.name for axis in axes_in_scope()] == ["node", "data"]
        assert ltx.psum(torch.tensor(2.0), axis="node").item() == 2.0
    assert axes_in_scope() == ()


OTHERS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"backend": "gloo"}, {"backend": "mpi"}, r"backend='gloo' and now with backend='mpi'\. Call ltx\.shutdown\(\)"),
    ({"mesh": {"data": 1}}, {"mesh": {"a": 1, "b": 1}}, r"mesh=\{'data': 1\} and now with mesh=\{'a': 1, 'b': 1\}"),
    ({"mesh": {"b": 1, "a": 1}}, {"mesh": {"a": 1, "b": 1}}, r"mesh=\{'b': 1, 'a': 1\} and now with mesh=\{'a': 1"),
    ({}, {"timeout": 5}, r"timeout=datetime.timedelta\(seconds=1800\) and now with timeout=.*=5\)"),
]


@pytest.mark.parametrize(("old", "new", "text"), OTHERS)
def test_second_call_with_other_arguments_says_which(old: dict[str, Any], new: dict[str, Any], text: str) -> None:
    init(**old)
    refuses(WorldError, r"rank 0: ltx\.init was called before with " + text, lambda: init(**new))
    shutdown()
    init(**new)


def test_process_fields_of_a_strategy() -> None:
    strategy = ltx.DDPStrategy(process_group_backend="mpi", timeout=timedelta(seconds=7))
    init(strategy)
    assert world().backend == "mpi"
    refuses(WorldError, r"timeout=datetime.timedelta\(seconds=7\) and now", lambda: init(timeout=timedelta(seconds=8)))
    assert init(strategy) is world()
    shutdown()
    assert init(strategy, backend="gloo").backend == "gloo", "the argument goes before the field"


def test_seconds_are_durations_too() -> None:
    asked = {"timeout": 30, "heartbeat_timeout": 2.5}
    with init(ltx.DDPStrategy(timeout=7), **asked):  # type: ignore[arg-type]
        init(timeout=timedelta(seconds=30), heartbeat_timeout=timedelta(seconds=2.5))
        refuses(WorldError, r"timeout=datetime.timedelta\(seconds=30\) and now with", init, timeout=8)


NO_STRATEGY = r"ltx.init: strategy must be an ltx.Strategy or None, got .*: backend="
NO_TIME = "ltx.init: {} must be a number of seconds or a datetime.timedelta, more"
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({"strategy": given}, NO_STRATEGY) for given in ("gloo", {"node": 1, "data": 1}, 30, ltx.DDPStrategy)),
    *(
        ({name: given}, NO_TIME.format(name))
        for name in ("timeout", "heartbeat_timeout")
        for given in ("30", True, 0, math.nan, math.inf, timedelta(0), timedelta(seconds=-1))
    ),
    ({"mesh": {"a": 2, "b": 4}}, r"is for 2 \* 4 = 8 ranks, but the world has 1 \(launcher 'none'\)\. Start 8 ranks"),
    ({"mesh": {}}, r"mesh=\{\} is for no axes"),
    ({"mesh": {"data": 0}}, r"sizes of at least 1, got 'data': 0"),
    ({"mesh": {"data": -1}}, r"sizes of at least 1, got 'data': -1"),
    ({"mesh": {"": 1}}, r"expected axis names"),
]


@pytest.mark.parametrize(("given", "text"), REFUSED)
def test_what_it_refuses(given: dict[str, Any], text: str) -> None:
    refuses(WorldError, text, lambda: init(**given))
    assert axes_in_scope() == ()
    init()


FABRIC = {"MASTER_ADDR": "h", "MASTER_PORT": "1", "WORLD_SIZE": "4"}


@pytest.mark.usefixtures("user_group")
@pytest.mark.parametrize("told", [{}, {**FABRIC, "WORLD_SIZE": "1", "LOCAL_RANK": "0", "NODE_RANK": "0"}])
def test_a_group_of_the_user_is_adopted_and_left_alone(told: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside Fabric's own launcher, which sets no RANK; and once more."""
    _told(monkeypatch, **told)
    group = dist.group.WORLD
    for _ in range(2):
        with init() as entered:
            assert (entered.launcher, entered.rank, entered.size, entered.local_rank) == ("user", 0, 1, 0)
            assert (entered.backend, ltx.psum(torch.tensor(2.0)).item()) == ("gloo", 2.0)
        assert dist.group.WORLD is group


@pytest.mark.parametrize(
    ("environ", "local_rank"),
    [
        ({**FABRIC, "LOCAL_RANK": "1", "NODE_RANK": "1"}, 1),
        ({"LOCAL_RANK": "1"}, 1),  # by which its launcher says which device is whose
        ({**FABRIC, "RANK": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}, 0),  # torchrun's, of another world
        ({"WORLD_SIZE": "4", "LOCAL_RANK": "nonsense"}, 3),
    ],
)
def test_where_a_group_is_and_the_environment_says_half(environ: dict[str, str], local_rank: int) -> None:
    found = placement_beside_group(environ, 3, 4)
    assert (found.rank, found.size, found.local_rank) == (3, 4, local_rank)


@pytest.mark.usefixtures("user_group")
def test_arguments_that_contradict_an_adopted_group() -> None:
    text = r"initialised already with backend='gloo', and ltx.init was asked for backend='nccl'"
    refuses(WorldError, text, init, backend="nccl")
    refuses(WorldError, r"initialised already with 1 ranks, .* rank=1, size=2", init, rank=1, size=2, master="h:80")
    assert init(rank=0, size=1).launcher == "user"


@pytest.mark.usefixtures("user_group")
def test_a_group_that_the_user_destroys_too_early() -> None:
    init()
    dist.destroy_process_group()
    shutdown()
    assert axes_in_scope() == ()


def test_a_world_that_has_ended_cannot_be_entered() -> None:
    ended = init()
    shutdown()
    with pytest.raises(WorldError, match=r"isn't the one that is initialised now.*with ltx\.init"), ended:
        pass


@pytest.mark.full
def test_peers_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    _told(monkeypatch, RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    text = r"rank 0 of 2 couldn't set up .*\(gloo\) at 127.0.0.1:\d+ within 1 s: (.|\n)*all 2 ranks"
    refuses(WorldError, text, lambda: init(timeout=timedelta(seconds=1)))
    assert not dist.is_initialized()
    del os.environ["RANK"], os.environ["WORLD_SIZE"]
    assert init().size == 1


def test_an_unknown_host_is_told_at_once() -> None:
    text = r"meet at 'no-such-host.invalid', a host that isn't known here: .*MASTER_ADDR"
    refuses(WorldError, text, init, rank=1, size=2, master="no-such-host.invalid:29500")
    assert init(rank=0, size=1).size == 1


@pytest.mark.full
def test_ranks_that_disagree_about_their_number_are_told() -> None:
    """Rank 0 holds the store, so it is the one that leaves first; its peer is told by it or by the store's end."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = _processes([{**common, "RANK": str(rank), "WORLD_SIZE": str(2 + rank)} for rank in range(2)])
    for rank, (status, _, errors) in enumerate(done):
        assert status == 1
        said = f"WorldError: rank {rank}: the ranks disagree about how many they are: rank 0 says 2; rank 1 says 3."
        assert said in errors, errors


def test_an_unknown_backend(torchrun_of_one: None) -> None:
    refuses(WorldError, r"rank 0 of 1 couldn't set up torch.distributed \(smoke\)", init, backend="smoke")
    assert not dist.is_initialized()


def test_to_device_moves_what_can_move() -> None:
    moved = to_device({"x": torch.ones(2), "n": 3, "pair": (torch.zeros(1), "text"), "none": None})
    assert (moved["n"], moved["pair"][1], moved["x"].device) == (3, "text", world().device)
    assert moved["none"] is None


def test_arguments_go_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    _told(monkeypatch, RANK=5, WORLD_SIZE=8)
    with init(rank=0, size=1) as entered:
        assert (entered.launcher, entered.size) == ("arguments", 1)
        assert not dist.is_initialized()
        assert init() is entered
        assert init(rank=0, size=1) is entered
        text = r"called before with \(rank, size, master\)=\(0, 1, None\) and now with .*\(1, 2, 'h:80'\)"
        refuses(WorldError, text, init, rank=1, size=2, master="h:80")


def test_arguments_with_a_meeting_point_make_a_group() -> None:
    with init(rank=0, size=1, master=f"127.0.0.1:{free_port()}", timeout=timedelta(seconds=30)) as entered:
        assert dist.is_initialized()
        assert (entered.launcher, entered.num_nodes) == ("arguments", 1)
    assert not dist.is_initialized()


def _processes(environments: list[dict[str, str]]) -> list[tuple[int, str, str]]:
    """(exit status, output, errors) of a process in each of `environments` that prints its world."""
    script = (
        "import datetime, ltx, torch\n"
        "with ltx.init(timeout=datetime.timedelta(seconds=30)) as w:\n"
        "    print(w.rank, w.local_rank, w.node_rank, w.num_nodes, w.launcher, int(ltx.psum(torch.tensor(w.rank))))\n"
    )
    return finished(begun(["-c", script], [{"GLOO_SOCKET_IFNAME": "lo", **environ} for environ in environments]), 50)


@pytest.mark.full
def test_ranks_that_disagree_about_their_nodes_all_say_so() -> None:
    """Nodes of 2, 1 and 1: each rank alone fits an equal layout, which differ."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    layout = enumerate([(0, 2), (1, 2), (0, 1), (0, 1)])
    for rank, (status, _, errors) in enumerate(_processes([openmpi(r, 4, *place, **common) for r, place in layout])):
        assert status == 1
        assert f"WorldError: rank {rank} of 4 (launcher openmpi): rank 0 takes itself for local rank 0 of 2" in errors
        assert "Under mpirun, set GROUP_RANK" in errors


@pytest.mark.full
def test_worlds_that_meet_at_one_address_after_the_other_leave_nothing(started: Callable[..., Any]) -> None:
    """As those of a pool that is begun again and again: files, sockets and threads don't grow."""
    ports = [free_port() for _ in range(8)]

    def body(tell: Callable[[Any], None]) -> Any:
        rank, counts = ltx.world().rank, list[dict[str, int]]()
        ltx.shutdown()
        for port in ports:
            with ltx.init(rank=rank, size=2, master=f"127.0.0.1:{port}"):
                ltx.psum(torch.ones(2))
            counts.append(open_now())
        first = counts[1]
        return first, settles(open_now, lambda now: all(now[kind] <= first.get(kind, 0) for kind in now))

    world = started(2, body, held_by="rank 0")
    for rank in range(2):
        first, last = world.told(rank)
        assert all(last[kind] <= first.get(kind, 0) for kind in last), (first, last)


@pytest.mark.parametrize(
    ("there", "text"),
    [
        (True, "takes connections and doesn't answer as rank 0's store does"),
        (False, "nothing listens there(.|\n)*rank 0 hasn't come to ltx.init"),
    ],
    ids=["silent", "nobody"],
)
def test_where_no_store_answers(there: bool, text: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) if there else nullcontext() as silent:
        port = silent.getsockname()[1] if silent else free_port()
        text = rf"rank 1 of 2 couldn't set up torch.distributed \(gloo\)(.|\n)*{text}"
        refuses(WorldError, text, init, rank=1, size=2, master=f"127.0.0.1:{port}", timeout=1.0)


def test_ctrl_c_while_a_silent_port_is_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        meets = f"import ltx\nltx.init(rank=1, size=2, master='127.0.0.1:{silent.getsockname()[1]}', timeout=600)"
        (process,) = begun(["-c", meets], [{}])
        with silent.accept()[0]:  # it connects now
            process.send_signal(signal.SIGINT)
            ((_, _, printed),) = finished([process])
    assert "KeyboardInterrupt" in printed


FAILS: dict[str, tuple[str, dict[str, Any]]] = {
    "its mesh": (r"WorldError: mesh=\{'a': 5\} is for 5 = 5 ranks", {"mesh": {"a": 5}}),
    "as they meet": (r"couldn't set up torch.distributed .* ValueError: no", {}),
    "as axes are opened": ("ValueError: no", {}),
}


@pytest.mark.full(but=1)
@pytest.mark.parametrize("fails", [0, 1])
@pytest.mark.parametrize("how", FAILS)
def test_a_rank_that_fails_in_init_is_named(how: str, fails: int, started: Started) -> None:
    """The others waited until the timeout, and then named rank 0, with which the store had gone."""
    port, (why, given) = free_port(), FAILS[how]

    def no(*_: Any) -> Any:
        raise ValueError("no")

    def body(tell: Callable[[Any], None]) -> str:
        rank = ltx.world().rank
        ltx.shutdown()
        if rank == fails and how == "as they meet":
            meeting.Meeting.gather = no  # type: ignore[method-assign]
        if rank == fails and how == "as axes are opened":
            world_init.open_axes = no
        its = given if rank == fails else {}
        return raised_by(ltx.init, rank=rank, size=3, master=f"127.0.0.1:{port}", timeout=60.0, **its)

    world = started(3, body, held_by="rank 0")
    for rank in {0, 1, 2} - {fails}:
        said = world.told(rank)  # the store may end before the rank has asked again
        assert re.search(rf"rank {rank}: .*[rR]ank {fails} (couldn't make its|had left because of) .*{why}", said), said


# Ranks that compute on one accelerator are refused on all of them, where the backend takes one rank a device.
NCCL = "cpu:gloo,cuda:nccl"


def of_cuda(rank: int, size: int = 3, backend: str = NCCL) -> World:
    return World(rank, size, rank, 0, 1, torch.device("cuda", 0), backend, "torchrun", size)


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> dist.HashStore:
    """Where ranks 1 and 2 have said that they have one device."""
    store = dist.HashStore()
    host = meeting.socket.gethostname()
    for rank, uuid in enumerate("abb"):
        store.set(f"device/{rank}", json.dumps(f"{host} {uuid}"))
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    return store


def refuse(rank: int, met: dist.HashStore, monkeypatch: pytest.MonkeyPatch, backend: str = NCCL) -> None:
    device = SimpleNamespace(get_device_properties=lambda _: SimpleNamespace(uuid="abb"[rank]))
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    meeting._refuse_shared_devices(StoreExchange(cast(Any, met), rank, 3, 5.0, list), of_cuda(rank, backend=backend))


@pytest.mark.parametrize("rank", range(3))
def test_all_ranks_raise(rank: int, met: dist.HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorldError, match=rf"rank {rank}: ranks 1 and 2 are both on one device, .*CUDA_VISIBLE_DEVICES"):
        refuse(rank, met, monkeypatch)


def test_over_gloo_they_may(met: dist.HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(1, met, monkeypatch, "gloo")


@pytest.mark.parametrize(("version", "refused"), [((2, 28, 9), True), ((2, 30, 3), False)])
def test_nccl_that_is_told_to(
    version: tuple[int, ...], refused: bool, met: dist.HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    if refused:
        refuses(WorldError, "both on one device", refuse, 1, met, monkeypatch)
    else:
        refuse(1, met, monkeypatch)


def test_garbage_is_collected_apart_from_the_wait_for_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a program with many objects that takes longer than peers may, and a rank isn't to say that they don't come."""

    class Group:
        def __init__(self) -> None:
            self.itself = self  # only the collector finds it

    groups, seen = [Group()], list[tuple[bool, bool]]()
    ref = weakref.ref(groups[0])
    collects = gc.collect

    def collect() -> int:
        seen.append((threading.current_thread() is threading.main_thread(), ref() is not None))
        return collects()

    monkeypatch.setattr(gc, "collect", collect)
    backends.let_go([SimpleNamespace(release=lambda: [groups.pop()])])
    assert seen == [(True, True)]
