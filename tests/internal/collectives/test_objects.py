"""broadcast_object and barrier; the table of collectives is complete, and the page is what it prints."""

from __future__ import annotations

import inspect
import os
import runpy
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import ltx
from ltx.core import collectives, comm
from ltx.errors import AuthenticationError, AxisError
from ltx.peers.pickling import opened, sealed
from tests.contract.conformance.table import OPS
from tests.kinds import Ranks
from tests.train_on import on_ranks, raised_by, refuses, said

OBJECTS = {"dict": {"lr": 0.1, "steps": [1, 2]}, "none": None, "empty": "", "tensor": torch.arange(3), "def": lambda: 7}


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_arrive(ranks: Ranks, name: str) -> None:
    obj = OBJECTS[name]

    def run() -> Any:
        mine = obj if int(ltx.axis_index()) == 1 else "not this one"
        got = ltx.broadcast_object(mine, src=1)
        return (got() if callable(got) else got), int(ltx.axis_index()) != 1 or got is mine

    for got, same in ranks(2).run(run):
        want = obj() if callable(obj) else obj
        assert torch.equal(got, want) if isinstance(want, torch.Tensor) else got == want
        assert same, "src keeps its own object"


@on_ranks(2)
def test_an_object_that_cannot_be_pickled_raises_on_every_rank() -> None:
    rank = int(ltx.axis_index())
    text = said(TypeError, lambda: ltx.broadcast_object(None if rank else threading.Lock()))
    assert text.startswith("broadcast_object: rank 0's object can't be pickled: TypeError: cannot pickle")
    gathered = said(TypeError, lambda: ltx.all_gather_object((i for i in range(3)) if rank else 1))
    assert "rank 1's object can't be pickled" in gathered
    # What only the receivers can't pickle doesn't matter.
    assert ltx.broadcast_object(threading.Lock() if rank else "still in step") == "still in step"


def test_objects_have_no_simulated_form() -> None:
    for call in (ltx.broadcast_object, ltx.all_gather_object):
        text = rf"{call.__name__} has no form under ltx\.vmap: the ranks of axis 'data'"
        refuses(AxisError, text, ltx.vmap(call), torch.ones(2))


def test_barriers(ranks: Ranks) -> None:
    def run() -> int:
        for name in ("one", "two", "one", None):
            ltx.barrier(name)
        return int(ltx.psum(torch.tensor(1)))

    assert ranks(2).run(run).replicated() == 2
    ltx.vmap(lambda x: ltx.barrier("simulated"))(torch.ones(2))
    ltx.barrier("alone")


def test_all_gather_object(ranks: Ranks) -> None:
    """Objects of unequal sizes; at its own place each rank finds its very object."""

    def run() -> Any:
        rank = int(ltx.axis_index())
        mine = {"rank": rank, "text": "x" * 1000 * rank, "tensor": torch.full((rank,), 1.0), "fn": lambda: rank}
        found = ltx.all_gather_object(mine)
        assert found[rank] is mine
        return [(x["rank"], len(x["text"]), x["tensor"].tolist(), x["fn"]()) for x in found]

    assert ranks(3).run(run).replicated() == [(0, 0, [], 0), (1, 1000, [1.0], 1), (2, 2000, [1.0, 1.0], 2)]
    assert ltx.all_gather_object("alone") == ["alone"]


def test_what_isnt_from_a_rank_of_this_job_is_not_unpickled(ranks: Ranks, tmp_path: Path) -> None:
    """Rank 1 has another key: the others look at nothing that it sends, and it at nothing of theirs."""
    unsealed, sealed_ = tmp_path / "unsealed", tmp_path / "sealed"

    def run() -> list[str]:
        with pytest.MonkeyPatch.context() as patch:
            if int(ltx.axis_index()) == 1:
                patch.setenv("LTX_KEY", "another")
            evil = Evil(unsealed)
            texts = [raised_by(ltx.broadcast_object, evil, src=1), raised_by(ltx.all_gather_object, evil)]
        ltx.broadcast_object(Evil(sealed_))
        return [*texts, ltx.broadcast_object("still in step")]

    (first, *others), (sent, *of_rank_1) = ranks(2).run(run)
    assert (unsealed.exists(), sealed_.exists()) == (False, True)
    wrong = "AuthenticationError: rank 0: an object from rank 1 on axis 'data' isn't sealed with the key of"
    assert first.startswith(wrong)
    assert sent == ""
    for gathered, after in (others, of_rank_1):
        assert "This rank's LTX_KEY is set" in gathered
        assert after == "still in step"


@dataclass
class Evil:
    path: Path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@on_ranks(2)
def test_a_seal_is_for_one_rank_issue_and_world() -> None:
    axis_comm: Any = comm.resolve(None).comm  # type: ignore[union-attr]
    data, rank = sealed(axis_comm, b"data", 7), axis_comm.rank
    assert opened(axis_comm, data, rank, 7) == b"data"
    for received, of, issue in [(data, 1 - rank, 7), (data, rank, 8), (data[:-1] + b"b", rank, 7), (b"", rank, 7)]:
        said(AuthenticationError, opened, axis_comm, received, of, issue)


DOCS = Path(__file__).parents[3] / "docs"
PAGE = DOCS / "reference" / "collectives.md"
TABLE = runpy.run_path(str(DOCS / "collectives_table.py"))
#: Not collectives: they move nothing by themselves.
LOCAL = {"axis_index", "axis_size", "rank_seed", "shard"}
#: For who writes collectives, by ltx.extend.collectives.
FOR_AUTHORS = {"begun", "collective", "counted", "told", "wide"}


def test_the_page_is_what_the_table_prints() -> None:
    assert PAGE.read_text() == TABLE["markdown"](), f"print it anew: python docs/collectives_table.py > {PAGE}"


def test_every_collective_has_a_row() -> None:
    functions = [value for value in (*vars(collectives).values(), ltx.adasum) if inspect.isfunction(value)]
    public = {f.__name__ for f in functions if f.__module__.startswith(("ltx.core.collectives.", "ltx.hooks."))}
    assert public - LOCAL - FOR_AUTHORS == {row.name for row in TABLE["ROWS"]}


def test_every_row_with_a_gradient_is_tested_under_all_transforms() -> None:
    tested = {op.name.split()[0] for op in OPS}
    assert {row.name for row in TABLE["ROWS"] if row.simulated and TABLE["gradient_of"](row) != "none"} <= tested
