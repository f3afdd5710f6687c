"""Pools: results, what travels and how, state between calls, refusals."""

from __future__ import annotations

import functools
import os
import re
import resource
import sys
import threading
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

import ltx
from ltx import Pool, init, shutdown, world
from ltx.errors import CallFailedError, WorkerError
from tests.kinds import Ranks
from tests.train_on import refuses, said


@dataclass
class Point:
    """A class of a module that workers can't import."""

    x: torch.Tensor
    name: str = ""

    def doubled(self) -> Point:
        return Point(2 * self.x, self.name)


def _helper(x: torch.Tensor) -> torch.Tensor:
    return x * 10


def scaled(x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    return _helper(x) * factor


def test_results_are_in_the_order_of_ranks(ranks: Ranks) -> None:
    results = ranks(2).run(lambda: (world().rank, world().size, world().launcher))
    assert list(results) == [(0, 2, "pool"), (1, 2, "pool")]


def test_functions_of_this_module_and_what_they_call(ranks: Ranks) -> None:
    assert ranks(2).run(scaled, torch.tensor(2.0), factor=0.5).replicated().item() == 10.0
    assert ranks(2).run(functools.partial(scaled, factor=3.0), torch.tensor(1.0)).replicated().item() == 30.0


def test_closures(ranks: Ranks, seed: int) -> None:
    captured = torch.randn(4, 5)
    assert torch.equal(ranks(2).run(lambda: captured.sum(0)).replicated(), captured.sum(0))


def test_objects_of_classes_of_this_module_come_back_as_such(ranks: Ranks) -> None:
    points = ranks(2).run(lambda point: point.doubled(), Point(torch.ones(2), "p"))
    assert isinstance(points.rank(1), Point)
    assert points.rank(1).x.tolist() == [2.0, 2.0]
    assert ranks(2).run(Point(torch.ones(1)).doubled).rank(0).x.tolist() == [2.0]


def test_functions_of_installed_modules(ranks: Ranks) -> None:
    assert torch.equal(ranks(2).run(torch.full, (2,), 7).replicated(), torch.full((2,), 7))


def test_tensors_travel_by_value_with_views_and_gradients_flags(ranks: Ranks) -> None:
    x = torch.arange(6.0).reshape(2, 3).T.requires_grad_()
    back = ranks(2).run(lambda y: (y, y.stride(), y.requires_grad), x).rank(1)
    assert torch.equal(back[0], x)
    assert back[1:] == ((1, 3), True)
    back[0].detach().zero_()
    assert x[1, 0].item() == 1.0


def test_megabytes(ranks: Ranks, seed: int) -> None:
    big = torch.randn(4_000_000)
    assert torch.equal(ranks(2).run(lambda x: -x, big).replicated(), -big)


def test_workers_are_the_same_processes_at_the_next_call(ranks: Ranks) -> None:
    first = ranks(2).run(os.getpid)
    second = ranks(2).run(os.getpid)
    assert list(first) == list(second)
    assert os.getpid() not in first
    assert first[0] != first[1]


def test_what_a_module_keeps_is_there_at_the_next_call(ranks: Ranks) -> None:
    def keep() -> None:
        torch.ltx_test_note = os.getpid()  # type: ignore[attr-defined]

    def read() -> int:
        note: int = torch.__dict__.pop("ltx_test_note")
        return note

    ranks(2).run(keep)
    assert list(ranks(2).run(read)) == list(ranks(2).run(os.getpid))


def test_environment_of_a_worker(ranks: Ranks) -> None:
    def look() -> tuple[str, ...]:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
        return tuple(os.environ[name] for name in names)

    results = ranks(2).run(look)
    assert results.rank(0) == ("0", "2", "0", "2", "127.0.0.1", "1")
    assert results.rank(1) == ("1", "2", "1", "2", "127.0.0.1", "1")
    assert ranks(2).run(torch.get_num_threads).replicated() == 1


def test_init_in_the_function_uses_the_workers_world(ranks: Ranks) -> None:
    def step() -> float:
        with init() as here:
            return float(ltx.psum(torch.tensor(float(here.rank))))

    assert ranks(2).run(step).replicated() == 1.0
    assert ranks(2).run(step).replicated() == 1.0, "the inner with didn't take the worker's world down"


def test_worlds_one_after_the_other(ranks: Ranks) -> None:
    def again() -> list[float]:
        sums = []
        for turn in range(3):
            shutdown()
            init()
            sums.append(float(ltx.psum(torch.ones(turn + 1)).sum()))
        return sums

    assert ranks(2).run(again).replicated() == [2.0, 4.0, 6.0]


def test_after_a_shutdown_the_next_call_has_a_world(ranks: Ranks) -> None:
    """As errors advise to do; each rank went on alone."""
    for _ in range(2):
        ranks(2).run(shutdown)
        assert ranks(2).run(lambda: (world().size, float(ltx.psum(torch.ones(()))))).replicated() == (2, 2.0)


@pytest.mark.full
def test_a_group_of_the_user_is_adopted(ranks: Ranks, tmp_path: object) -> None:
    def adopt() -> tuple[str, float, bool]:
        shutdown()
        store = dist.FileStore(  # type: ignore[attr-defined]
            f"{tmp_path}/store", 2
        )
        dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)
        try:
            with init() as here:
                total = float(ltx.psum(torch.tensor(1.0 + here.rank)))
            return here.launcher, total, dist.is_initialized()
        finally:
            dist.destroy_process_group()
            init()

    assert ranks(2).run(adopt).replicated() == ("user", 3.0, True)


def test_runs_from_several_threads_do_not_mix(ranks: Ranks) -> None:
    pool = ranks(2)
    sums: dict[int, float] = {}

    def run(number: int) -> None:
        sums[number] = pool.run(lambda x: ltx.psum(x), torch.tensor(float(number))).replicated().item()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == {number: 2.0 * number for number in range(8)}


@pytest.mark.full
def test_what_workers_print_is_shown_with_their_rank(capfd: pytest.CaptureFixture[str]) -> None:
    def speak() -> None:
        print(f"one\ntwo of {world().size}")
        print("\rbegun", end="\rover\n\n")
        print()
        print("to stderr", file=sys.stderr)
        os.write(1, b"from below Python")

    with Pool(2, show_output=True) as pool:
        pool.run(speak)
    # lines of both are one if they come together
    out, err = (re.sub(r"\[all\] (.*)", r"[rank 0] \1\n[rank 1] \1", text) for text in capfd.readouterr())
    words = ("from below Python", "one", "over", "two of 2")
    expected = ["[rank {rank}] "] * 2 + [f"[rank {{rank}}] {word}" for word in words]  # two empty lines
    assert sorted(out.splitlines()) == [line.format(rank=rank) for rank in (0, 1) for line in expected]
    assert sorted(err.splitlines()) == ["[rank 0] to stderr", "[rank 1] to stderr"]


@pytest.mark.full
def test_megabytes_of_output_between_and_during_calls(capfd: pytest.CaptureFixture[str]) -> None:
    def speak() -> None:
        for _ in range(100):
            os.write(1, b"x" * 50_000 + b"\n")

    with Pool(1, show_output=True) as pool:
        pool.run(lambda: threading.Thread(target=speak).start())
        pool.run(speak)
        pool.run(lambda: [t.join() for t in threading.enumerate() if t.name.startswith("Thread-")] and None)
    out = capfd.readouterr().out
    assert out.count("x") == 200 * 50_000
    assert len(out.splitlines()) >= 200  # a line that hasn't ended when a call does is shown in two parts


@pytest.mark.full
def test_show_and_progress(capfd: pytest.CaptureFixture[str]) -> None:
    def steps() -> None:
        print("before")
        ltx.show({"rank": world().rank}, rank=1)
        for _ in ltx.progress(range(3), label="steps"):
            ltx.barrier()

    with Pool(2, show_output=True) as pool:
        pool.run(steps)
    out, err = (text.replace("[all]", "[rank 1]") for text in capfd.readouterr())
    assert [line for line in out.splitlines() if "rank 1" in line] == ["[rank 1] before", "[rank 1] {'rank': 1}"]
    assert re.fullmatch(r"steps \|█{30}\| 3/3 [\d.]+/s", err.strip()), "once, not once for each rank"


@pytest.mark.full
def test_a_result_that_there_is_no_file_for() -> None:
    def open_all() -> torch.Tensor:
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, lowest_free))
        return torch.ones(100_000)

    with Pool(1) as pool:
        pool.run(torch.ones, 2)
        refuses(CallFailedError, r"raised OSError: pickling the result, .*: \[Errno 24\] Too many", pool.run, open_all)


def test_a_pool_in_a_worker_is_refused(ranks: Ranks) -> None:
    texts = ranks(2).run(said, WorkerError, Pool, 2)
    assert texts.rank(1).startswith(
        "rank 1: ltx.Pool(2) was called inside a worker of an ltx.Pool, and a pool of pools"
    )


def test_arguments_that_do_not_pickle(ranks: Ranks) -> None:
    lock = threading.Lock()
    before = list(ranks(2).run(os.getpid))
    with pytest.raises(
        WorkerError, match=r"<lambda> and its arguments can't be sent to the workers: TypeError: cannot pickle"
    ):
        ranks(2).run(lambda: lock)
    assert list(ranks(2).run(os.getpid)) == before


@pytest.mark.full
def test_open_use_close() -> None:
    began = time.monotonic()
    with Pool(1) as pool:
        print(f"cold start of 1 worker: {time.monotonic() - began:.2f} s")
        assert len(pool) == 1
        assert repr(pool) == f"<ltx.Pool of 1: pids {list(pool.run(os.getpid))}>"
        assert pool.run(lambda: ltx.psum(torch.ones(1))).replicated().item() == 1.0
    assert repr(pool) == "<ltx.Pool of 1: closed>"
    assert pool._repr_html_() is None
    pool.close()
    with pytest.raises(
        WorkerError, match=r"this <ltx\.Pool of 1: closed> can't run getpid\. Make a new one: ltx\.Pool\(1\)"
    ):
        pool.run(os.getpid)
