"""What holds for every collective: inputs stay as they are, results are new, errors say what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx.errors import InputError, TreeError
from tests.kinds import Ranks
from tests.train_on import refuses

COLLECTIVES: dict[str, Callable[[Any], Any]] = {
    "psum": ltx.psum,
    "pmean": ltx.pmean,
    "weighted_mean": lambda x: ltx.weighted_mean(x, 2),
    "pvary": ltx.pvary,
    "all_gather": ltx.all_gather,
    "all_gather tiled": lambda x: ltx.all_gather(x, tiled=True),
    "psum_scatter tiled": lambda x: ltx.psum_scatter(x, tiled=True),
    "broadcast": ltx.broadcast,
    "psum_to": ltx.psum_to,
    "gather": ltx.gather,
    "scatter tiled": lambda x: ltx.scatter(x, tiled=True),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_leaves_that_are_no_tensors(name: str) -> None:
    with pytest.raises(TreeError, match=r"must be a tree of tensors, but leaf 'b.1' is of type str"):
        COLLECTIVES[name]({"a": torch.ones(2), "b": [torch.ones(2), "3"]})


def test_a_module_is_no_tree() -> None:
    refuses(TreeError, r"is of type Linear\. Pass dict\(module.named_parameters\(\)\)", ltx.psum, torch.nn.Linear(2, 2))


def test_pvary_seen_from_outside_the_simulated_axis() -> None:
    """A value that all ranks share gets the sum; copies are inputs of their own, and get each its own."""
    losses = ltx.vmap(lambda w, r: (r + 1) * ltx.pvary(w), in_dims=(None, 0))
    copies = ltx.vmap(lambda w, r: (r + 1) * ltx.pvary(w))
    ranks = torch.arange(3.0)
    assert torch.func.grad(lambda w: losses(w, ranks).sum())(torch.tensor(1.0)).item() == 6.0
    assert torch.func.grad(lambda w: copies(w, ranks).sum())(torch.ones(3)).tolist() == [1.0, 2.0, 3.0]


def test_values_that_all_simulated_ranks_share() -> None:
    """Tensors that aren't mapped count once a rank."""
    shared = torch.tensor([1.0, 2.0])
    sums = ltx.vmap(lambda r: (ltx.psum(shared), ltx.all_gather(shared), ltx.broadcast(shared)), axis_size=3)
    psum, gathered, sent = sums(torch.arange(3))
    assert psum.tolist() == [[3.0, 6.0]] * 3
    assert gathered.shape == (3, 3, 2)
    assert torch.equal(sent, shared.expand(3, 2))


def _scaled(x: Tensor, a: Tensor) -> tuple[Tensor, ...]:
    """A sum with factors of the rank's own, its gradients, and a derivative of these."""

    def loss(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return ((1 + ltx.axis_index()) * ltx.psum(x, prescale=a, postscale=b).sin()).sum()

    b = a.square()
    grads = torch.func.grad(loss, (0, 1, 2))
    second = torch.func.jvp(lambda x: grads(x, a, b)[0], (x,), (torch.ones_like(x),))[1]
    return ltx.psum(x, prescale=a, postscale=b), *grads(x, a, b), second


def test_prescale_and_postscale(ranks: Ranks, seed: int) -> None:
    """Each rank has its own; against plain torch on the stack of both."""
    xs, a = torch.randn(2, 3, dtype=torch.float64), torch.randn(2, dtype=torch.float64)

    def total(xs: Tensor, a: Tensor, b: Tensor) -> Tensor:
        weights = torch.tensor([1.0, 2.0])
        return (weights[:, None] * (b[:, None] * (a[:, None] * xs).sum(0)).sin()).sum()

    grads = torch.func.grad(total, (0, 1, 2))
    second = torch.func.jvp(lambda xs: grads(xs, a, a.square())[0], (xs,), (torch.ones_like(xs),))[1]
    want = (a.square()[:, None] * (a[:, None] * xs).sum(0), *grads(xs, a, a.square()), second)
    torch.testing.assert_close(ltx.vmap(_scaled)(xs, a), want)
    for rank, found in enumerate(ranks(2).run(lambda: _scaled(xs[ltx.axis_index()], a[ltx.axis_index()]))):
        torch.testing.assert_close(found, tuple(y[rank] for y in want))


def test_scaled_dtypes(ranks: Ranks) -> None:
    """Sums keep theirs; a float16 sum that would overflow doesn't, if it is scaled before."""

    def run() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        large = torch.full((2,), 6e4, dtype=torch.float16)
        sparse = torch.ones(2, 2).to_sparse()
        return (
            ltx.psum(large, prescale=0.5),
            ltx.psum(torch.tensor([1, 2]), prescale=3.0, postscale=torch.tensor(2)),
            ltx.psum(torch.tensor(True), postscale=-1),
            ltx.psum(torch.ones(2, dtype=torch.bfloat16), postscale=torch.tensor(0.5, dtype=torch.float64)),
            ltx.psum(sparse, prescale=0.5, postscale=3).to_dense(),
        )

    half, whole, flag, brain, sparse = ranks(2).run(run).replicated()
    assert (half.dtype, half.tolist()) == (torch.float16, [6e4, 6e4])
    assert (whole.dtype, whole.tolist()) == (torch.int64, [12, 24])
    assert flag.item() == -2
    assert (brain.dtype, brain.tolist()) == (torch.bfloat16, [1.0, 1.0])
    assert sparse.tolist() == [[3.0, 3.0], [3.0, 3.0]]
    assert ltx.psum(torch.ones(2), prescale=2, postscale=0.25).tolist() == [0.5, 0.5]


@pytest.mark.parametrize("factor", [0.5, torch.tensor(2.0), float("nan")])
@pytest.mark.parametrize("name", ["prescale", "postscale"])
def test_integers_take_whole_factors(name: str, factor: Any) -> None:
    named: Any = {name: factor}
    text = rf"psum: leaf 'n' is int64\[2\], and {name}=.* isn't a whole number\. Cast the leaf to a floating dtype\."
    refuses(TreeError, text, ltx.psum, {"n": torch.ones(2, dtype=torch.int64), "x": torch.ones(2)}, **named)
    with pytest.raises(InputError, match=rf"psum: {name} must be a number or a 0-dim tensor, got float32\[2\]\."):
        ltx.psum(torch.ones(2), **{name: torch.ones(2)})
