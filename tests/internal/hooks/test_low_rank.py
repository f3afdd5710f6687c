"""Products, norms and orthonormal rows of many matrices at once, as accelerators take them, are those one by one."""

from __future__ import annotations

import pytest
import torch

from ltx.core.gradients import comm_hook
from ltx.hooks.powersgd import multiply_all, orthonormal_all, row_norms

#: (rows, columns, rank): two of one shape apart from each other, and one that is too large to be copied for it.
SHAPES = [(6, 5, 2), (3, 9, 1), (6, 5, 2), (2000, 600, 2), (3, 9, 1), (6, 5, 2)]


def test_accelerators(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    lefts = [torch.randn(rows, columns, dtype=torch.float64) for rows, columns, _ in SHAPES]
    rights = [torch.randn(r, columns, dtype=torch.float64).mT for _, columns, r in SHAPES]

    def run() -> list[list[torch.Tensor]]:
        products = multiply_all(lefts, rights)
        return [products, row_norms(products), orthonormal_all(products)]

    one_by_one = run()
    monkeypatch.setattr(comm_hook, "IN_PIECES", frozenset())
    for mine, expected in zip(run(), one_by_one, strict=True):
        torch.testing.assert_close(mine, expected)
    assert (multiply_all([], []), row_norms([]), orthonormal_all([])) == ([], [], [])
