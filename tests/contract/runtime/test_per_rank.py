"""Results per rank: looked at one by one, stacked, and checked to be the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ltx import PerRank
from ltx.errors import LtxError, ReplicaDivergedError, TreeError
from tests.train_on import refuses


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
