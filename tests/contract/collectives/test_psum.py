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
    with pytest.raises(TreeError, match=r"is of type Linear\. Pass dict\(module.named_parameters\(\)\)"):
        ltx.psum(torch.nn.Linear(2, 2))


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
    with pytest.raises(TreeError, match=text):
        ltx.psum({"n": torch.ones(2, dtype=torch.int64), "x": torch.ones(2)}, **named)
    with pytest.raises(InputError, match=rf"psum: {name} must be a number or a 0-dim tensor, got float32\[2\]\."):
        ltx.psum(torch.ones(2), **{name: torch.ones(2)})


# --- Numbers and NumPy's arrays as leaves, as in JAX -----------------------------------------------------------------


def called(rank: int) -> dict[str, Any]:
    numpy = pytest.importorskip("numpy")
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


def test_on_processes(ranks: Callable[[int], Any]) -> None:
    assert ranks(2).run(lambda: called(ltx.world().rank)).replicated() == WANT


def test_alone_and_simulated() -> None:
    assert ltx.psum(1).item() == 1
    assert ltx.all_gather(2.5).tolist() == [2.5]
    assert ltx.vmap(lambda x: x / ltx.psum(1))(torch.tensor([2.0, 4.0, 6.0])).tolist() == pytest.approx(
        [2 / 3, 4 / 3, 2]
    )
    assert ltx.vmap(lambda x: x * ltx.pmax(3))(torch.ones(2)).tolist() == [3.0, 3.0]


def test_compiled(ranks: Callable[[int], Any]) -> None:
    def run() -> Any:
        return torch.compile(lambda x: x * ltx.psum(1), backend="aot_eager", fullgraph=True)(torch.ones(2)).tolist()

    assert ranks(2).run(run).replicated() == [2.0, 2.0]


def test_arrays_however_they_lie_in_memory(ranks: Callable[[int], Any]) -> None:
    numpy = pytest.importorskip("numpy")

    def run() -> Any:
        plain = numpy.arange(6.0, dtype="f4").reshape(2, 3)
        fixed = plain.copy()
        fixed.flags.writeable = False
        arrays = [plain[:, ::-1], plain.T, fixed, numpy.broadcast_to(numpy.float32(2), (2,)), plain.astype(">f4")]
        before = [x.copy() for x in arrays]
        sums = ltx.psum(arrays)
        for x, old, total in zip(arrays, before, sums, strict=True):
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
        with pytest.raises(TreeError, match=text):
            ltx.psum({"x": array})


def test_arrays_are_what_tensors_are(ranks: Callable[[int], Any], seed: int) -> None:
    """Also where a collective does something to its argument ahead of what all of them do."""
    numpy = pytest.importorskip("numpy")
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


def test_weighted_means_of_numbers(ranks: Callable[[int], Any]) -> None:
    def run() -> Any:
        rank = int(ltx.axis_index())
        return ltx.weighted_mean({"accuracy": 0.5 + rank, "hits": 2 * rank}, 1 + rank)

    assert run() == {"accuracy": 0.5, "hits": 0.0}
    for found in ranks(2).run(run):
        assert found == {"accuracy": pytest.approx((0.5 + 2 * 1.5) / 3), "hits": pytest.approx(4 / 3)}
    assert ltx.vmap(lambda w: ltx.weighted_mean(3.0, w))(torch.tensor([1.0, 2.0])).tolist() == [3.0, 3.0]


@pytest.mark.parametrize("leaf", ["1", None, object()], ids=["str", "None", "object"])
def test_what_is_no_number(leaf: Any) -> None:
    if leaf is None:
        assert ltx.psum(None) is None  # an empty tree
        return
    with pytest.raises(TreeError, match="psum: its argument must be a tree of tensors, but leaf 'x' is of type"):
        ltx.psum({"x": leaf})
