"""Fixtures for all tests: worker pools that the whole session shares, and random seeds that a failure shows."""

from __future__ import annotations

import gc
import os
import random
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib.util import find_spec
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ltx import PerRank, Pool
from ltx.core import comm
from ltx.core.ranks.axis import axes_in_scope, set_world_axes
from ltx.errors import CallFailedError, WorkerError
from ltx.runtime.worker import starter
from tests import inside
from tests.covering import fast
from tests.forks import Ranks
from tests.needs import missing, waiting
from tests.shards import claimed
from tests.streams.pool import StreamedPool

# Below pytest's timeout of 120 s, so that the error of a run that hangs is the pool's, which names the ranks.
RUN_TIMEOUT_S = 100.0

WAITING = pytest.StashKey[str]()
#: The seed of the test that runs, once something has asked for it; and the sizes of the pools that have it.
DRAWN = pytest.StashKey[int]()
SEEDED = pytest.StashKey[set[int]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also tests marked full, and all rows of tables")
    parser.addoption("--streams", action="store_true", help="ranks(n) communicate by a backend that orders streams")
    parser.addoption("--part", default="1/1", help="with --full: k/n runs the k-th of n parts of what it adds")
    parser.addoption("--shard", default="1/1", help="k/n runs the k-th of n parts of everything; n runs do it all")
    parser.addoption("--claims", type=Path, help="runs the modules that no other process has claimed in this folder")


def pytest_configure() -> None:
    """However pytest was started, this process and those that tests start round alike, and hear SIGINT."""
    if "OMP_NUM_THREADS" not in os.environ:  # sums on several threads are other sums, and ranks get fewer than this
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
    # A shell's background jobs, such as this may be, ignore it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


#: Examples in docstrings that start processes of their own, as tests of those modules do.
START_PROCESSES = {"ltx.runtime.pool.launch", "ltx.runtime.pool.Pool"}
START_PROCESSES |= {"ltx.profile.traces.timeline"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --full, leave out what is marked full, and most rows of tables that are marked covering."""
    for item in items:
        if item.name in START_PROCESSES:
            item.add_marker(pytest.mark.full)
    kept = fast(items)
    if config.getoption("--full"):
        kept |= _share(items, config.getoption("--part"))
    kept &= _share(items, config.getoption("--shard"), "shard")
    config.stash[WAITING] = waiting(kept)
    kept -= {item for item in kept if missing(item)}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if said := config.stash.get(WAITING, ""):
        terminalreporter.write_line(said)


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """With --claims: as pytest's own, but which tests these are shows while others run their share."""
    claims = session.config.getoption("--claims")
    if claims is None or session.testsfailed or session.config.option.collectonly:
        return None
    mine = claimed(session.items, claims)
    item = next(mine, None)
    while item is not None:
        following = next(mine, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        item = following
    return True


def _share(items: list[pytest.Item], which: str, salt: str = "") -> set[pytest.Item]:
    """Of n parts the k-th, for "k/n": the same one each time. Parts by two salts cut across each other."""
    k, n = map(int, which.split("/"))
    return {item for item in items if crc32((salt + item.nodeid).encode()) % n == k - 1}


def pytest_collection_finish() -> None:
    """Modules and tests live as long as the session: the garbage collector needn't go through them over and over."""
    if find_spec("IPython") is None:  # pytest leaves a module there that it couldn't import for its doctests
        sys.modules.pop("ltx.runtime.shell", None)
    gc.collect()
    gc.freeze()


@pytest.fixture
def started() -> Iterator[Callable[..., Ranks]]:
    """``started(...)`` is a world of forks (:class:`tests.forks.Ranks`), which end with the test."""
    worlds: list[Ranks] = []

    def start(*args: Any, **kwargs: Any) -> Ranks:
        worlds.append(Ranks(*args, **kwargs))
        return worlds[-1]

    yield start
    for world in worlds:
        world.close()


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, Pool]]:
    started: dict[int, Pool] = {}
    yield started
    for pool in started.values():
        pool.close()


def forked(n: int) -> Pool:
    """A pool whose first workers are forks of a server, which has once imported what takes each process seconds.

    Those of ``ranks(2)`` start as users' do.
    """
    set_forkserver_preload(["ltx.runtime.worker", "torch._dynamo", "tests.train_on", "tests.twins.training"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ltx.runtime.pool.starter", lambda _, *how: starter("forkserver", *how))
        return Pool(n, timeout_s=RUN_TIMEOUT_S)


#: Threads of a worker beyond which it begins a new world: those of its world, and of a few groups more.
MANY_THREADS = 40


@pytest.fixture(scope="module", autouse=True)
def tidied(pools: dict[int, Pool]) -> Iterator[None]:
    """After a module that has left many process groups behind, or an axis out of step, a new world.

    Two or more threads of each group look around a hundred times a second: of those that tests make, and of the axes
    that ltx opens for them, they take most of a processor by the end of the suite.
    """
    yield
    for pool in pools.values():
        try:
            pool.run(_look_for_leftovers)
        except CallFailedError:
            pool.run(int)  # which begins with a new world, and ends the old one's groups: nobody may run here for long


def _look_for_leftovers() -> None:
    useless = [axis.name for axis in comm.communicators() if any(channel.failed for channel in axis.channels)]
    if useless:  # by an error that a test has kept from leaving its call
        raise RuntimeError(f"{useless} are out of step")
    if _threads() > MANY_THREADS:
        gc.collect()  # not each time: in a worker that has seen many tests it takes a second
        if _threads() > MANY_THREADS:
            raise RuntimeError("more threads than a world needs")


def _threads() -> int:
    """Of this process; 0 where there is no telling."""
    return len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 0


@pytest.fixture(autouse=True)
def undrawn(request: pytest.FixtureRequest) -> None:
    request.session.stash[SEEDED] = set()
    if DRAWN in request.session.stash:
        del request.session.stash[DRAWN]


def seed_of_test(session: pytest.Session) -> int:
    """The seed of the test that runs, drawn where it is first asked for; LTX_SEED fixes it.

    What is printed shows up in the report of a test that fails.
    """
    if DRAWN not in session.stash:
        session.stash[DRAWN] = int(os.environ.get("LTX_SEED") or secrets.randbelow(2**31))
        print(f"LTX_SEED={session.stash[DRAWN]} repeats this test's random numbers")
    return session.stash[DRAWN]


def _seed(seed: int) -> None:
    seed += dist.get_rank()
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@pytest.fixture(scope="session")
def ranks(pools: dict[int, Pool], request: pytest.FixtureRequest) -> Callable[[int], Any]:
    """``ranks(n)`` is a pool of n workers, started at the first call and shared by the whole session.

    ``ranks(2).run(f, x)`` gives what ``f(x)`` returned on each of two ranks. Workers keep their state between tests, so
    a test leaves no hooks or axes behind in them. At its first call in a test the workers' generators are seeded.
    """

    session, streams = request.session, request.config.getoption("--streams")

    def pool_of(n: int) -> Any:
        if n not in pools:
            pools[n] = Pool(n, timeout_s=RUN_TIMEOUT_S) if n <= 2 else forked(n)
        if n not in (seeded := session.stash.setdefault(SEEDED, set())):
            seeded.add(n)
            pools[n].run(_seed, seed_of_test(session))
        return StreamedPool(pools[n]) if streams else pools[n]

    return pool_of


@pytest.fixture(scope="session")
def on_new_axis(request: pytest.FixtureRequest) -> Iterator[Callable[..., PerRank[Any]]]:
    """``on_new_axis(f)`` is what f() gave on each of 2 ranks that share a new axis, on workers that nobody else uses.

    So f may leave that axis useless: ``on_new_axis(f, timeout_s=10.0)``. With ``sockets=True`` it does without shared
    memory.
    """

    def run(fn: Callable[[], Any], timeout_s: float, sockets: bool, seed: int) -> Any:
        """fn() where the only axis in scope is a new one.

        It is left open, since a peer may still wait in it, and closed at the next call, when nobody does. Its dozen
        threads look around all the time: those of a hundred axes would take half of a processor.
        """
        _seed(seed)
        world_axes = axes_in_scope()
        for axis in comm.open_axes():
            if axis not in world_axes:
                inside.close_axis(axis)
        gc.collect()  # groups in the tracebacks of errors
        # Not torch's half an hour: whoever lets go of a group waits for what is under way on it.
        group = dist.new_group(list(range(dist.get_world_size())), timeout=timedelta(seconds=30))
        with pytest.MonkeyPatch.context() as patch:
            # Until the end: channels for a hook's further phases are opened when they are needed.
            patch.setenv("LTX_SHARED_MEMORY", "0" if sockets else "1")
            mine = (comm.open_axis("data", group, timedelta(seconds=timeout_s)),)
            set_world_axes(mine)
            try:
                return fn()
            finally:
                if axes_in_scope() == mine:  # else fn has begun a new world
                    set_world_axes(world_axes)

    with forked(2) as pool:
        session = request.session
        yield lambda fn, timeout_s=60.0, sockets=False: pool.run(run, fn, timeout_s, sockets, seed_of_test(session))
        with pytest.raises(WorkerError):  # to end in order would be to wait for all that was left waiting
            pool.run(os._exit, 0)


@pytest.fixture(autouse=True)
def traced_anew() -> None:
    """A test finds nothing that others have compiled: Dynamo counts it, and gives up code whose tracing has raised."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The test's seed, with which torch, numpy and random are seeded."""
    drawn = seed_of_test(request.session)
    torch.manual_seed(drawn)
    np.random.seed(drawn)
    random.seed(drawn)
    return drawn


@pytest.fixture(scope="module")
def drawn() -> int:
    """A seed drawn once for a module; LTX_SEED fixes it. Tests print it, so that failures show it."""
    return int(os.environ.get("LTX_SEED") or secrets.randbelow(2**31))
