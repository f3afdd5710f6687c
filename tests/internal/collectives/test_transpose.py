"""Every linear rule against the definition of its transpose: sum_r <ȳ_r, (A x)_r> = sum_r <(A^T ȳ)_r, x_r>."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import ltx
from ltx import Pool
from ltx.core import comm
from ltx.core.collectives.linear import RULES, Static, apply

Ranks = Callable[[int], Pool]


@dataclass(frozen=True)
class Case:
    """A rule with arguments; `shape` is that of one rank's tensor when there are n ranks."""

    rule: str
    static: Static = ()
    shape: Callable[[int], tuple[int, ...]] = lambda n: (3, 2)

    def __str__(self) -> str:
        return "-".join([self.rule, *map(str, self.static)])


# A new rule needs a row here: test_every_rule_is_listed says so.
CASES = (
    Case("psum"),
    Case("psum", shape=lambda n: ()),
    Case("pvary"),
    Case("broadcast", (0,)),
    Case("broadcast", (1,)),
    Case("psum_to", (1,)),
    Case("all_gather", (0, 0)),
    Case("all_gather", (1, 0)),
    Case("all_gather", (2, 0)),
    Case("all_gather", (1, 1)),
    Case("all_gather", (0, 0), lambda n: ()),
    Case("psum_scatter", (0, 0), lambda n: (n, 3)),
    Case("psum_scatter", (1, 0), lambda n: (2, n, 3)),
    Case("psum_scatter", (0, 1), lambda n: (2 * n, 3)),
    Case("psum_scatter", (1, 1), lambda n: (2, 3 * n)),
    Case("psum_scatter", (0, 0), lambda n: (n,)),
    Case("gather", (1, 0, 0)),
    Case("gather", (0, 1, 1)),
    Case("gather", (0, 0, 0), lambda n: ()),
    Case("scatter", (1, 0, 0), lambda n: (n, 3)),
    Case("scatter", (0, 1, 1), lambda n: (2, 3 * n)),
    Case("scatter", (0, 0, 0), lambda n: (n,)),
    Case("all_to_all", (0, 0), lambda n: (2 * n, 3)),
    Case("all_to_all", (0, 1), lambda n: (2 * n, 3)),
    Case("all_to_all", (1, 0), lambda n: (1, n, 3)),
    Case("all_to_all", (2, 1), lambda n: (1, 2, 2 * n)),
    Case("ppermute", ()),
    Case("ppermute", (0, 1)),
    Case("ppermute", (0, 1, 1, 0)),
    Case("ppermute", (1, 1), lambda n: ()),
)

Found = tuple[Tensor, ...]


def _maps(case: Case, x: Tensor, bar: Tensor) -> Found:
    """On one rank, for seeds of its x and ȳ: <ȳ, Ax>, <A^T ȳ, x>, and what else must agree."""

    def forward(x: Tensor) -> Tensor:
        return apply(case.rule, case.static, comm.resolve(None), [x])[0]

    y, pull = torch.func.vjp(forward, x)
    y_bar = bar[: y.numel()].reshape(y.shape)
    (x_bar,) = pull(y_bar)
    _, push_back = torch.func.vjp(lambda y_bar: pull(y_bar)[0], y_bar)
    _, tangent = torch.func.jvp(forward, (x,), (x,))
    return (y_bar * y).sum(), (x_bar * x).sum(), y, push_back(x)[0], tangent


def _draw(case: Case, n: int, equal: bool) -> tuple[Tensor, Tensor]:
    """The ranks' x, and numbers for their ȳ, which are equal if the ranks' losses are."""
    xs = torch.randn(n, *case.shape(n), dtype=torch.float64)
    if case.rule == "pvary":  # takes one value that all share
        xs = xs[:1].expand_as(xs).contiguous()
    bars = torch.randn(n, 36, dtype=torch.float64)
    return xs, bars[:1].expand_as(bars).contiguous() if equal else bars


def _check(case: Case, xs: Tensor, found: Found) -> None:
    forward, backward, y, transposed_twice, tangent = found
    # pvary's argument is one value, not one a rank: <A^T ȳ, x> is counted once.
    total = backward[0] if case.rule == "pvary" else backward.sum()
    torch.testing.assert_close(total, forward.sum())
    torch.testing.assert_close(tangent, y)
    if case.rule != "pvary":
        torch.testing.assert_close(transposed_twice, y)


def test_every_rule_is_listed() -> None:
    assert {case.rule for case in CASES} == {name for name, rule in RULES.items() if rule.weights is None}


losses = pytest.mark.parametrize("equal", [False, True], ids=["different losses", "equal losses"])


@pytest.mark.covering(1)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("n", [2, 3])
@losses
def test_simulated(case: Case, n: int, equal: bool, seed: int) -> None:
    xs, bars = _draw(case, n, equal)
    _check(case, xs, ltx.vmap(lambda x, bar: _maps(case, x, bar))(xs, bars))


def _all_cases(drawn: list[tuple[Tensor, Tensor]]) -> list[Found]:
    rank = int(ltx.axis_index())
    return [_maps(case, xs[rank], bars[rank]) for case, (xs, bars) in zip(CASES, drawn, strict=True)]


@pytest.mark.full(but=1)
@pytest.mark.parametrize("n", [2, 3])
@losses
def test_processes_and_the_same_as_simulated(ranks: Ranks, n: int, equal: bool, seed: int) -> None:
    drawn = [_draw(case, n, equal) for case in CASES]
    by_rank = ranks(n).run(_all_cases, drawn)
    for case, (xs, bars), *found in zip(CASES, drawn, *by_rank, strict=True):
        stacked = tuple(torch.stack(parts) for parts in zip(*found, strict=True))
        _check(case, xs, stacked)
        torch.testing.assert_close(stacked, ltx.vmap(lambda x, bar, case=case: _maps(case, x, bar))(xs, bars))
