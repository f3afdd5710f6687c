"""Collectives on trees, and on tensors of every kind: the same on every backing, values, dtypes and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import ltx
from ltx import Pool

Ranks = Callable[[int], Pool]
Apply = Callable[[Any], Any]


def _everywhere(y: Tensor, n: int) -> Tensor:
    return y.expand(n, *y.shape)


def _sum(xs: Tensor) -> Tensor:
    return xs.sum(0, dtype=torch.int64 if xs.dtype == torch.bool else xs.dtype)


def _weighted_mean(xs: Tensor) -> Tensor:
    """With weights 1, 2, ... of the ranks."""
    weights = torch.arange(1, len(xs) + 1, dtype=torch.float64).reshape(-1, *[1] * (xs.ndim - 1))
    dtype = xs.dtype if xs.is_floating_point() or xs.is_complex() else torch.get_default_dtype()
    wide = torch.promote_types(dtype, torch.float64)
    return ((xs.to(wide) * weights).sum(0) / weights.sum()).to(dtype)


#: name: (what one rank calls, the same on the stacked leaves of all ranks)
OPS: dict[str, tuple[Apply, Callable[[Tensor], Tensor]]] = {
    "psum": (ltx.psum, lambda xs: _everywhere(_sum(xs), len(xs))),
    "pmean": (ltx.pmean, lambda xs: _everywhere(_sum(xs) / len(xs), len(xs))),
    "weighted_mean": (
        lambda t: ltx.weighted_mean(t, 1 + ltx.axis_index()),
        lambda xs: _everywhere(_weighted_mean(xs), len(xs)),
    ),
    "pvary": (ltx.pvary, lambda xs: xs),
    "all_gather": (ltx.all_gather, lambda xs: _everywhere(xs, len(xs))),
    "all_gather last": (lambda t: ltx.all_gather(t, dim=-1), lambda xs: _everywhere(xs.movedim(0, -1), len(xs))),
    "broadcast": (ltx.broadcast, lambda xs: _everywhere(xs[0], len(xs))),
    "psum_scatter": (lambda t: ltx.psum_scatter(t, tiled=True), lambda xs: torch.stack(_sum(xs).chunk(len(xs)))),
}

#: name: the tree of all ranks' stacked tensors, drawn afresh; n ranks
INPUTS: dict[str, Callable[[int], Any]] = {
    "tree": lambda n: {"b": [torch.randn(n, 6), (torch.randn(n, 12, 2),)], "a": torch.randn(n, 6)},
    "no leaves": lambda n: {"a": [], "b": ()},
    "non-contiguous": lambda n: [torch.randn(5, 6, n).permute(2, 1, 0), torch.randn(n, 6, 8)[:, :, ::3]],
    "expanded": lambda n: torch.randn(n, 6, 1).expand(n, 6, 4),
    "0-dim": lambda n: torch.randn(n),
    "empty": lambda n: {"none": torch.zeros(n, 0), "flat": torch.zeros(n, 6, 0), "some": torch.randn(n, 6)},
    "floats": lambda n: [torch.randn(n, 6, dtype=dtype) for dtype in (torch.float64, torch.float32)],
    "half": lambda n: [torch.randn(n, 6).to(dtype) for dtype in (torch.bfloat16, torch.float16)],
    "complex": lambda n: torch.randn(n, 6, dtype=torch.complex64),
    "integers": lambda n: [torch.randint(-9, 9, (n, 6), dtype=dtype) for dtype in (torch.int64, torch.int32)],
    "int64 beyond float": lambda n: torch.randint(2**53, 2**55, (n, 6)),
    "bool": lambda n: torch.randn(n, 6) > 0,
    "mixed": lambda n: {
        "w": torch.randn(n, 6, dtype=torch.float64),
        "count": torch.randint(9, (n, 6)),
        "half": torch.randn(n, 6).bfloat16(),
    },
}

IMPOSSIBLE = {("psum_scatter", "0-dim"), ("psum_scatter", "bool")}  # no dimension to split; no sum of bits
CASES = [(op, name) for op in OPS for name in INPUTS if (op, name) not in IMPOSSIBLE]


def _values_and_gradients(op: str, tree: Any, rank: Any) -> tuple[Any, list[Tensor]]:
    """Outputs; and the gradients of a loss that weighs rank r by r + 1, for the leaves that can have one."""
    leaves, spec = optree.tree_flatten(tree)
    floating = [i for i, leaf in enumerate(leaves) if leaf.is_floating_point()]

    def loss(moving: list[Tensor]) -> Tensor:
        filled = list(leaves)
        for i, leaf in zip(floating, moving, strict=True):
            filled[i] = leaf
        outputs = optree.tree_leaves(OPS[op][0](optree.tree_unflatten(spec, filled)))
        return sum(
            ((1 + rank) * out.double().sin().sum() for out in outputs if out.is_floating_point()), torch.zeros(())
        )

    values = OPS[op][0](tree)
    return values, torch.func.grad(loss)([leaves[i] for i in floating]) if floating else []


def _expected(op: str, stacked: Any) -> tuple[Any, list[Tensor]]:
    """The same in one process, for all ranks; pvary's gradient is the sum over ranks' copies by definition."""
    reference = OPS[op][1]
    gradients = []
    for xs in optree.tree_leaves(stacked):
        if xs.is_floating_point():
            found = torch.func.grad(
                lambda xs: sum((1 + r) * y.double().sin().sum() for r, y in enumerate(reference(xs)))
            )(xs)
            gradients.append(_everywhere(found.sum(0), len(xs)) if op == "pvary" else found)
    return optree.tree_map(reference, stacked), gradients


def _everything(inputs: dict[str, Any]) -> dict[tuple[str, str], Any]:
    """All cases on the real rank that this process is."""
    rank = int(ltx.axis_index())
    mine = {name: optree.tree_map(lambda xs: xs[rank], stacked) for name, stacked in inputs.items()}
    return {(op, name): _values_and_gradients(op, mine[name], rank) for op, name in CASES}


@pytest.fixture(scope="module")
def inputs(drawn: int) -> dict[str, Any]:
    torch.manual_seed(drawn)
    return {name: make(2) for name, make in INPUTS.items()}


@pytest.fixture(scope="module")
def on_processes(ranks: Ranks, inputs: dict[str, Any]) -> Any:
    return ranks(2).run(_everything, inputs)


def _check(got: Any, want: Any) -> None:
    assert optree.tree_structure(got) == optree.tree_structure(want)
    for a, b in zip(optree.tree_leaves(got), optree.tree_leaves(want), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("op", "name"), CASES, ids=lambda s: s.replace(" ", "_"))
def test_on_processes(op: str, name: str, inputs: dict[str, Any], on_processes: Any, drawn: int) -> None:
    print(f"LTX_SEED={drawn} repeats this test's random numbers")
    got = [by_case[op, name] for by_case in on_processes]
    _check(optree.tree_map(lambda *xs: torch.stack(xs), *got), _expected(op, inputs[name]))


@pytest.mark.covering(1)
@pytest.mark.parametrize(("op", "name"), CASES, ids=lambda s: s.replace(" ", "_"))
@pytest.mark.parametrize("n", [2, 3])
def test_on_simulated_ranks(op: str, name: str, n: int, seed: int) -> None:
    stacked = INPUTS[name](n)
    got = ltx.vmap(lambda tree: _values_and_gradients(op, tree, ltx.axis_index()), axis_size=n)(stacked)
    _check(got, _expected(op, stacked))


@pytest.mark.parametrize(("op", "name"), CASES, ids=lambda s: s.replace(" ", "_"))
def test_alone(op: str, name: str, seed: int) -> None:
    stacked = INPUTS[name](1)
    got = _values_and_gradients(op, optree.tree_map(lambda xs: xs[0], stacked), 0)
    _check(optree.tree_map(lambda x: x.unsqueeze(0), got), _expected(op, stacked))
