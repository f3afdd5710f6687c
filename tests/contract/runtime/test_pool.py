"""Pools: results, what travels and how, state between calls, refusals."""

from __future__ import annotations

import functools
import math
import os
import re
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ltx
from ltx import PerRank, Pool, init, shutdown, world
from ltx.errors import CallFailedError, LtxError, ReplicaDivergedError, TreeError, WorkerError
from tests.kinds import Ranks
from tests.needs import needs
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


def test_objects_of_classes_of_this_module_come_back_as_such(ranks: Ranks) -> None:
    points = ranks(2).run(lambda point: point.doubled(), Point(torch.ones(2), "p"))
    assert isinstance(points.rank(1), Point)
    assert points.rank(1).x.tolist() == [2.0, 2.0]
    assert ranks(2).run(Point(torch.ones(1)).doubled).rank(0).x.tolist() == [2.0]


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
    assert list(first) == list(ranks(2).run(os.getpid))
    assert os.getpid() not in first
    assert first[0] != first[1]


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
        store = dist.FileStore(f"{tmp_path}/store", 2)  # type: ignore[attr-defined]
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
@needs("tqdm")
def test_show_and_bars(capfd: pytest.CaptureFixture[str]) -> None:
    def steps() -> None:
        from tqdm import tqdm

        print("before")
        if world().rank == 1:
            print({"rank": 1})
        for _ in tqdm(range(3), desc="steps", disable=world().rank > 0):
            ltx.barrier()

    with Pool(2, show_output=True) as pool:
        pool.run(steps)
    out, err = (text.replace("[all]", "[rank 1]") for text in capfd.readouterr())
    assert [line for line in out.splitlines() if "rank 1" in line] == ["[rank 1] before", "[rank 1] {'rank': 1}"]
    assert re.fullmatch(r"\[rank 0\] steps: 100%\|█+\| 3/3 .*", err.strip()), "in a log the finished bar alone"


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
    text = ranks(2).run(said, WorkerError, Pool, 2).rank(1)
    assert text.startswith("rank 1: ltx.Pool(2) was called inside a worker of an ltx.Pool, and a pool of pools")


def test_arguments_that_do_not_pickle(ranks: Ranks) -> None:
    lock = threading.Lock()
    before = list(ranks(2).run(os.getpid))
    text = r"<lambda> and its arguments can't be sent to the workers: TypeError: cannot pickle"
    refuses(WorkerError, text, ranks(2).run, lambda: lock)
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
    text = r"this <ltx\.Pool of 1: closed> can't run getpid\. Make a new one: ltx\.Pool\(1\)"
    refuses(WorkerError, text, pool.run, os.getpid)


def test_it_is_a_sequence() -> None:
    results = PerRank(["a", "b", "c"])
    assert len(results) == 3
    assert list(results) == ["a", "b", "c"]
    assert results[-1] == "c"
    assert results[:2] == ("a", "b")
    assert results.rank(1) == "b"
    assert repr(results) == "PerRank(rank 0: 'a', rank 1: 'b', rank 2: 'c')"
    refuses(IndexError, "rank 3: expected one of the ranks 0 to 2", results.rank, 3)
    refuses(IndexError, "rank -1: expected", results.rank, -1)


def test_stack(seed: int) -> None:
    values: list[dict[str, Any]] = [{"w": torch.randn(2, 3), "loss": 0.5 + rank, "n": [rank]} for rank in range(4)]
    stacked = PerRank(values).stack()
    assert stacked["w"].shape == (4, 2, 3)
    assert torch.equal(stacked["w"][2], values[2]["w"])
    assert stacked["loss"].tolist() == [0.5, 1.5, 2.5, 3.5]
    assert stacked["n"][0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([{"a": 1}, {"b": 1}], "rank 1 returned a tree of another structure than rank 0"),
        ([{"w": torch.ones(30, 30)}, {"b": 1}], r"expected <dict of 1 leaf>, got \{'b': 1\}; 'w' is only in one\."),
        ([[1.0], ["x"]], "leaf '0' on rank 1 is of type str: expected a tensor or a number"),
        ([{"a": None}] * 2, "leaf 'a' on rank 0 is of type NoneType"),
        (
            [torch.ones(2), torch.ones(3)],
            r"the value itself can't be stacked: rank 0 has float32\[2\], rank 1 has float32\[3\]",
        ),
        ([torch.ones(2), torch.ones(2).int()], r"rank 1 has int32\[2\]"),
    ],
)
def test_what_cannot_be_stacked(values: list[Any], text: str) -> None:
    refuses(TreeError, text, PerRank(values).stack)


SAME: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.arange(6.0).reshape(2, 3),
    "0-dim": lambda: torch.tensor(1.5),
    "empty": lambda: torch.ones(0, 3),
    "nan": lambda: {"x": torch.tensor([math.nan, 1.0]), "y": math.nan},
    "bool": lambda: torch.tensor([True, False]),
    "bfloat16": lambda: torch.ones(3, dtype=torch.bfloat16),
    "complex": lambda: torch.tensor([1 + 2j, 3j]).conj(),
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).T,
    "one of a row": lambda: torch.arange(6.0)[::2][:1],
    "grad": lambda: torch.ones(2, requires_grad=True),
    "others": lambda: ["text", 3, None, (), {"a": 2.0}],
    "array": lambda: {"a": np.arange(3)},
}


@pytest.mark.parametrize("case", SAME)
def test_replicated(case: str) -> None:
    first, second = SAME[case](), SAME[case]()
    assert PerRank([first, second]).replicated() is first


DIFFERENT = {
    "value": (
        torch.zeros(4),
        torch.tensor([0.0, 0, 0.25, 1]),
        r"rank 1 differs from rank 0 in 2 of 4 elements of float32\[4\], by 1 at",
    ),
    "sign of zero": (torch.tensor([0.0]), torch.tensor([-0.0]), r"in 1 of 1 elements of float32\[1\], by 0 at most"),
    "last bit": (torch.tensor(1.0), torch.tensor(1.0).nextafter(torch.tensor(2.0)), r"by 1.19e-07 at most"),
    "nan": (torch.tensor([1.0]), torch.tensor([math.nan]), "by nan at most"),
    "bool": (torch.tensor([True]), torch.tensor([False]), "in 1 of 1 elements"),
    "complex": (torch.tensor([1j]), torch.tensor([2j]), "by 1 at most"),
    "dtype": (torch.ones(2), torch.ones(2).double(), r"rank 0 has float32\[2\], rank 1 has float64\[2\]"),
    "shape": (torch.ones(2), torch.ones(3), r"rank 0 has float32\[2\], rank 1 has float32\[3\]"),
    "number": (1, 2, "rank 0 has 1, rank 1 has 2"),
    "type": (1, True, "rank 0 has 1, rank 1 has True"),
    "array": (np.arange(2), np.arange(1, 3), "rank 0 has array"),
    "tensor or not": (1.0, torch.tensor(1.0), r"rank 0 has 1.0, rank 1 has tensor\(1.\)"),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_divergence_is_named(case: str) -> None:
    first, other, text = DIFFERENT[case]
    with pytest.raises(
        ReplicaDivergedError, match=r"leaf 'layers.0.w' isn't the same on all 2 ranks: .*" + text
    ) as caught:
        PerRank([{"layers": [{"w": first}]}, {"layers": [{"w": other}]}]).replicated()
    assert isinstance(caught.value, LtxError)
    assert isinstance(caught.value, RuntimeError)


def test_the_rank_that_diverged_is_named() -> None:
    refuses(ReplicaDivergedError, "rank 0 has 1, rank 2 has 5", PerRank([1, 1, 5, 1]).replicated)


NAME = "ltx_edited_while_it_runs"


@pytest.fixture
def edit(tmp_path: Path, ranks: Ranks) -> Iterator[Callable[..., Any]]:
    """Writes the module, which workers can import, and gives what is called on them: it doesn't travel by value."""
    folder = str(tmp_path)

    def call() -> list[Any]:
        import importlib
        import sys

        if folder not in sys.path:
            sys.path.insert(0, folder)
        return [importlib.import_module(f"{NAME}{end}") for end in ("", "_user")]

    def write(source: str, user: str = "from {} import value\ndef used(): return value()\n") -> Any:
        (tmp_path / f"{NAME}.py").write_text(source)
        (tmp_path / f"{NAME}_user.py").write_text(user.format(NAME))
        return ranks(2).run(lambda: [getattr(m, f)() for m, f in zip(call(), ("value", "used"), strict=True)])

    yield write

    def forget() -> None:
        import sys

        sys.path[:] = [path for path in sys.path if path != folder]
        for name in (NAME, f"{NAME}_user"):
            sys.modules.pop(name, None)

    ranks(2).run(forget)
    assert NAME not in sys.modules


def test_the_new_code_runs(edit: Callable[..., Any]) -> None:
    """Also where another module has taken a function of it by name; also twice within a second, of equal length."""
    for value in (1, 2, 3):
        assert edit(f"def value(): return {value}\n").replicated() == [value, value]


def test_of_two_that_were_edited_the_one_that_is_imported_is_read_first(edit: Callable[..., Any]) -> None:
    """Whatever their order: what the other takes of it, a name that is new or a number, is what it is now."""
    user = "from {} import number\ndef used(): return number\n"
    edit("number = 0\ndef value(): return number\n", user)
    for number in (10, 200):
        assert (
            edit(f"number = {number}\ndef value(): return number\n", f"# {number}\n{user}").replicated() == [number] * 2
        )
    assert edit("number = new = 3\ndef value(): return new\n", user.replace("number", "new")).replicated() == [3, 3]


def test_what_can_not_be_read_is_told_and_mended(edit: Callable[..., Any]) -> None:
    edit("def value(): return 1\n")
    text = f"the module '{NAME}' was edited since this worker imported it.*SyntaxError"
    refuses(WorkerError, text, edit, "def value() return 2\n")
    assert edit("def value(): return 3\n").replicated() == [3, 3]


def test_a_folder_that_was_added_since_the_workers_began(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook, after the first call: `sys.path` of the moment counts. What calls add on a worker stays."""

    def note() -> None:
        import sys

        sys.path.append("added on the worker")

    def paths() -> tuple[bool, bool]:
        import sys

        return sys.path[0] == str(tmp_path), "added on the worker" in sys.path

    def forget() -> None:
        import sys

        sys.path.remove("added on the worker")
        sys.modules.pop("ltx_added_later", None)

    pool = ranks(2)
    pool.run(note)
    (tmp_path / "ltx_added_later.py").write_text("def value(): return 7\n")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        import ltx_added_later

        assert pool.run(ltx_added_later.value).replicated() == 7
        assert pool.run(paths).replicated() == (True, True)
    assert pool.run(paths).replicated() == (False, True)
    pool.run(forget)
    sys.modules.pop("ltx_added_later")
