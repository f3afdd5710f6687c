"""Numbers, NumPy's arrays and objects of a program's classes as leaves."""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import numpy
import pytest
import torch

import ltx
from ltx.errors import TreeError
from tests.kinds import Ranks
from tests.train_on import on_ranks, refuses


def called(rank: int) -> dict[str, Any]:
    tree = {"int": 1, "float": 0.5 + rank, "bool": rank == 0, "array": numpy.full((2,), rank, numpy.float32)}
    gathered = ltx.all_gather({"int": rank, "scalar": numpy.int64(rank)})
    return {
        "sum": ltx.tree.map(lambda x: (x.tolist(), x.dtype), ltx.psum(tree)),
        "mean": ltx.pmean(rank).item(),
        "max": ltx.pmax(rank + 0.5).item(),
        "gathered": ltx.tree.map(torch.Tensor.tolist, gathered),
        "sent": ltx.broadcast(rank, 1).item(),
        "ranks": ltx.psum(1).item(),
        "at one": ltx.broadcast(ltx.psum_to(2, 1), 1).item(),
    }


WANT = {
    "sum": {
        "array": ([1.0, 1.0], torch.float32),
        "bool": (1, torch.int64),
        "float": (2.0, torch.float32),
        "int": (2, torch.int64),
    },
    "mean": 0.5,
    "max": 1.5,
    "gathered": {"int": [0, 1], "scalar": [0, 1]},
    "sent": 1,
    "ranks": 2,
    "at one": 4,
}


def test_on_processes(ranks: Ranks) -> None:
    assert ranks(2).run(lambda: called(ltx.world().rank)).replicated() == WANT


def test_alone_and_simulated() -> None:
    assert ltx.psum(1).item() == 1
    assert ltx.all_gather(2.5).tolist() == [2.5]
    assert ltx.vmap(lambda x: x / ltx.psum(1))(torch.tensor([2.0, 4.0, 6.0])).tolist() == pytest.approx(
        [2 / 3, 4 / 3, 2]
    )
    assert ltx.vmap(lambda x: x * ltx.pmax(3))(torch.ones(2)).tolist() == [3.0, 3.0]


@on_ranks(2)
def test_compiled() -> None:
    scaled = torch.compile(lambda x: x * ltx.psum(1), backend="aot_eager", fullgraph=True)
    assert scaled(torch.ones(2)).tolist() == [2.0, 2.0]


def test_arrays_however_they_lie_in_memory(ranks: Ranks) -> None:

    def run() -> Any:
        plain = numpy.arange(6.0, dtype="f4").reshape(2, 3)
        fixed = plain.copy()
        fixed.flags.writeable = False
        arrays = [plain[:, ::-1], plain.T, fixed, numpy.broadcast_to(numpy.float32(2), (2,)), plain.astype(">f4")]
        for x, old, total in zip(arrays, [x.copy() for x in arrays], ltx.psum(arrays), strict=True):
            assert total.dtype == torch.float32
            assert total.tolist() == (int(ltx.psum(1)) * old).tolist()
            total.zero_()
            assert (x == old).all(), "the result has memory of its own"

    run()
    ranks(2).run(run)
    for array, text in (
        (numpy.array(["a"]), "Its dtype is <U1, and torch has no such tensors"),
        (numpy.array([object()]), "Its dtype is object"),
        (numpy.datetime64("2020-01-01"), r"Its dtype is datetime64\[D\]"),
    ):
        refuses(TreeError, text, ltx.psum, {"x": array})


def test_arrays_are_what_tensors_are(ranks: Ranks, seed: int) -> None:
    """Also where a collective does something to its argument ahead of what all of them do."""
    x = torch.randint(0, 9, (2, 2, 2))

    def run(as_leaf: Callable[[Any], Any]) -> Any:
        mine = x[rank := int(ltx.axis_index())]
        turned, flags = as_leaf(mine.numpy()), as_leaf((mine > 4).numpy())
        unequal = ltx.all_gather(as_leaf(mine[: 1 + rank].numpy()), tiled=True, splits=[1, 2])
        return ltx.all_to_all(turned, 1, 0, tiled=False), ltx.psum_scatter(flags), ltx.pmean(flags), unequal

    for array, tensor in zip(
        ranks(2).run(lambda: run(numpy.array)), ranks(2).run(lambda: run(torch.tensor)), strict=True
    ):
        for found, want in zip(array, tensor, strict=True):
            assert found.dtype == want.dtype
            assert torch.equal(found, want)


def test_weighted_means_of_numbers(ranks: Ranks) -> None:
    def run() -> Any:
        rank = int(ltx.axis_index())
        return ltx.weighted_mean({"accuracy": 0.5 + rank, "hits": 2 * rank}, 1 + rank)

    assert run() == {"accuracy": 0.5, "hits": 0.0}
    for found in ranks(2).run(run):
        assert found == {"accuracy": pytest.approx((0.5 + 2 * 1.5) / 3), "hits": pytest.approx(4 / 3)}
    assert ltx.vmap(lambda w: ltx.weighted_mean(3.0, w))(torch.tensor([1.0, 2.0])).tolist() == [3.0, 3.0]


#: By the collective's name: what is given to it.
GATHERING: dict[str, Callable[[Any], Any]] = {
    "psum": ltx.psum,
    "weighted_mean": lambda x: ltx.weighted_mean(x, 2),
    "pvary": ltx.pvary,
    "all_gather": ltx.all_gather,
    "psum_scatter": lambda x: ltx.psum_scatter(x, tiled=True),
    "broadcast": ltx.broadcast,
    "psum_to": ltx.psum_to,
    "gather": ltx.gather,
    "scatter": lambda x: ltx.scatter(x, tiled=True),
}


@pytest.mark.parametrize("name", GATHERING)
def test_what_is_no_number(name: str) -> None:
    for leaf in ("1", object()):
        text = f"{name}: its .* must be a tree of tensors, but leaf 'x.1' is of type"
        refuses(TreeError, text, GATHERING[name], {"x": [torch.ones(2), leaf]})
    assert GATHERING[name](None) is None  # an empty tree


@on_ranks(2)
def test_classes_of_main_are_the_receivers_own() -> None:
    """As in a script: an enum's member of a peer was another one, and dataclasses compared unequal."""
    main = sys.modules["__main__"]
    split = enum.Enum("Split", ["TRAIN", "TEST"], module="__main__")
    hit = dataclasses.make_dataclass("Hit", ["id"], frozen=True)
    inner = type("Inner", (), {"__module__": "__main__", "__qualname__": "Hit.Inner"})
    hit.__module__, hit.Inner = "__main__", inner
    main.Split, main.Hit = split, hit
    try:
        assert ltx.all_gather_object([hit(3), inner]) == [[hit(3), inner]] * 2
        assert ltx.broadcast_object({split.TRAIN: hit}) == {split.TRAIN: hit}
    finally:
        del main.Split, main.Hit


class Meter:
    seen: ClassVar[list[int]] = []
    count = 0


Meter.__module__ = "__main__"  # as if a notebook had defined it: it comes with the function that uses it


def test_a_class_of_the_driver_keeps_what_a_rank_has_set(ranks: Ranks) -> None:
    """A peer's object came with its class, whose attributes replaced the rank's own."""

    def run() -> tuple[list[int], int, bool]:
        rank = int(ltx.axis_index())
        Meter.seen.append(rank)
        Meter.count = 10 + rank
        found = ltx.all_gather_object(Meter())
        return Meter.seen, Meter.count, all(type(x) is Meter for x in found)

    assert list(ranks(2).run(run)) == [([0], 10, True), ([1], 11, True)]


def test_a_class_that_one_rank_alone_has(ranks: Ranks) -> None:
    """Of a cell that ran on one rank, or inside of a function: it travels with the object."""

    def run() -> tuple[str, int]:
        main: Any = sys.modules["__main__"]
        if ltx.axis_index() == 0:
            main.Lone = dataclasses.make_dataclass("Lone", ["id"])
            main.Lone.__module__ = "__main__"
        try:
            got = ltx.broadcast_object(main.Lone(5) if ltx.axis_index() == 0 else None)
            return type(got).__name__, got.id
        finally:
            vars(main).pop("Lone", None)

    assert list(ranks(2).run(run)) == [("Lone", 5)] * 2
