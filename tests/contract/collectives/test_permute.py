"""all_to_all and ppermute: what the conformance table can't say. For uneven splits see test_uneven."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import ltx
from ltx.errors import AxisError
from tests.kinds import Ranks
from tests.train_on import refuses, said


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(("split", "concat"), [(0, 0), (1, 0), (0, -1), (-1, 1)])
def test_untiled(ranks: Ranks, n: int, split: int, concat: int, seed: int) -> None:
    """As in JAX by default: the dimension of the parts goes away, one of the sources comes in."""
    xs = torch.randn(n, *(n if dim == split % 3 else 3 + dim for dim in range(3)))
    want = [torch.stack([x.select(split, rank) for x in xs], concat) for rank in range(n)]

    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        y, pull = torch.func.vjp(lambda x: ltx.all_to_all(x, split, concat, tiled=False), x)
        return y, pull(y)[0]  # the transpose brings every part back to where it came from

    real = ranks(n).run(lambda xs: call(xs[ltx.axis_index()]), xs)
    simulated = ltx.vmap(call)(xs)
    for rank in range(n):
        for y, back in (real.rank(rank), [part[rank] for part in simulated]):
            assert torch.equal(y, want[rank])
            assert torch.equal(back, xs[rank])


def test_untiled_wants_one_part_a_rank() -> None:
    with pytest.raises(AxisError, match=r"tiled=False: dimension 0 of a tensor of shape \[4\] must be 2, got 4"):
        ltx.vmap(lambda x: ltx.all_to_all(x, 0, 0, tiled=False))(torch.ones(2, 4))
    refuses(AxisError, "need tiled=True", ltx.all_to_all, torch.ones(1), 0, 0, tiled=False, splits=[1])
    refuses(AxisError, "split_dim=2 is out of range", ltx.all_to_all, torch.ones(1), 2, 0, tiled=False)


def test_pairs_of_any_kind(ranks: Ranks) -> None:
    pairs = [(0, 1), (1, 0)]
    kinds: dict[str, Callable[[], Any]] = {
        "zip": lambda: zip([0, 1], [1, 0], strict=True),
        "generator": lambda: (pair for pair in pairs),
        "set": lambda: set(pairs),
        "items": lambda: {0: 1, 1: 0}.items(),
        "lists": lambda: [[0, 1], [1, 0]],
        "array": lambda: numpy.array(pairs),
        "numbers of NumPy": lambda: [(numpy.int64(a), numpy.int32(b)) for a, b in pairs],
        "rows of an array": lambda: list(numpy.array(pairs)),
    }

    def run(x: Tensor) -> Any:
        return [ltx.ppermute(x, make()) for make in kinds.values()]

    xs = torch.tensor([3.0, 4.0])
    real = ranks(2).run(lambda: run(xs[ltx.axis_index()]))
    for kind, simulated, *both in zip(kinds, ltx.vmap(run)(xs), *real, strict=True):
        assert torch.equal(simulated, xs.flip(0)), kind
        assert torch.equal(torch.stack(both), xs.flip(0)), kind
    assert ltx.ppermute(xs, numpy.zeros((1, 2), int)).tolist() == xs.tolist()  # alone


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ltx.all_to_all(x, 0, 0), "dimension 0 of a tensor of shape [3, 4] must be a multiple of 2, got 3"),
        (lambda x: ltx.all_to_all(x, 1, 2), "concat_dim=2 is out of range for a tensor of shape [3, 4]"),
        (lambda x: ltx.all_to_all(x, -3, 0), "split_dim=-3 is out of range"),
        (lambda x: ltx.ppermute(x, [(0, 2)]), "perm holds (0, 2), not a (source, destination) of ranks 0 to 1"),
        (lambda x: ltx.ppermute(x, [(0, 1), (0, 0)]), "rank 0 is the source of more than one pair"),
        (lambda x: ltx.ppermute(x, [(0, 1), (1, 1)]), "rank 1 is the destination of more than one pair"),
        (lambda x: ltx.ppermute(x, [(0, 1, 1)]), "perm holds (0, 1, 1)"),
        (lambda x: ltx.ppermute(x, [(0, 1.0)]), "perm holds (0, 1.0)"),
        (lambda x: ltx.ppermute(x, {0: 1, 1: 0}), "got {0: 1, 1: 0} of type dict. Give perm.items()."),
        (lambda x: ltx.ppermute(x, torch.tensor(1)), "got tensor(1) of type Tensor. Give perm.tolist()."),
    ],
)
def test_arguments(call: Callable[[Tensor], Tensor], message: str) -> None:
    assert message in said(AxisError, lambda: ltx.vmap(call)(torch.ones(2, 3, 4)))
