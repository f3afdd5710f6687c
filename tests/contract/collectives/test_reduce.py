"""reduce, reduce_boolean_decision, sums of sparse tensors, psum's factors, weighted means, and extrema."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ltx
from ltx.errors import AxisError, CollectiveError, InputError, TreeError, UnsupportedError, WeightError
from tests.kinds import OnNewAxis, Ranks
from tests.train_on import on_ranks, refuses, said


def test_defaults_and_what_passes_through() -> None:
    """The default is the mean; None is the sum; torch's own names work; what isn't a tensor stays as it is."""
    tree = {"loss": torch.tensor([1.0, 3.0]), "name": "run 7", "none": None, "count": 3}

    def run(loss: Tensor, op: Any) -> Any:
        reduced = ltx.reduce({**tree, "loss": loss}, op)
        assert {key: value for key, value in reduced.items() if key != "loss"} == {
            "name": "run 7",
            "none": None,
            "count": 3,
        }
        return reduced["loss"]

    x = torch.tensor([1.0, 4.0])
    assert ltx.vmap(lambda x: run(x, "mean"))(x).tolist() == [2.5, 2.5]
    assert ltx.vmap(ltx.reduce)(x).tolist() == [2.5, 2.5]
    assert ltx.vmap(lambda x: run(x, None))(x).tolist() == [5.0, 5.0]
    assert ltx.vmap(lambda x: run(x, dist.ReduceOp.MAX))(x).tolist() == [4.0, 4.0]


@pytest.mark.parametrize(("values", "mean", "truncated"), [([-3, 0], -1.5, -1), ([1, 2], 1.5, 1), ([-1, -2], -1.5, -1)])
@on_ranks(2)
def test_means_of_integers(values: list[int], mean: float, truncated: int) -> None:
    x = torch.tensor(values[int(ltx.axis_index())])
    found, kept = ltx.reduce(x), ltx.reduce(x, keep_dtype=True)
    assert (found.item(), found.dtype) == (mean, torch.float32)
    assert (kept.item(), kept.dtype) == (truncated, torch.int64)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32], ids=str)
def test_means_of_integers_whose_sums_are_too_large(ranks: Ranks, dtype: torch.dtype, seed: int) -> None:
    most = torch.iinfo(dtype).max
    xs = torch.randint(most // 2 + 1, most, (2, 5), dtype=dtype)
    mean = xs.double().mean(0)
    want = [mean.float(), mean.float(), mean.trunc().to(dtype)]

    def run(x: Tensor) -> list[Tensor]:
        return [ltx.pmean(x), ltx.reduce(x), ltx.reduce(x, keep_dtype=True)]

    assert all(map(torch.equal, ranks(2).run(lambda: run(xs[int(ltx.axis_index())])).replicated(), want))
    assert all(torch.equal(found[0], x) for found, x in zip(ltx.vmap(run)(xs), want, strict=True))
    of_sparse = ranks(2).run(lambda: ltx.pmean(xs[int(ltx.axis_index())].to_sparse()).to_dense())
    assert torch.equal(of_sparse.replicated(), want[0])


def test_an_unknown_op() -> None:
    with pytest.raises(CollectiveError, match="op must be one of avg, band, bor, bxor, max, mean, min, product, sum"):
        ltx.reduce(torch.ones(1), "median")
    refuses(TreeError, "works on integers and booleans", ltx.reduce, torch.ones(1), "band")
    assert ltx.vmap(lambda x: (ltx.reduce(x, "MAX"), ltx.reduce(x, "Bor")))(torch.tensor([1, 2]))[1].tolist() == [3, 3]


@pytest.mark.parametrize("said", [[True, True], [True, False], [False, False]], ids=str)
@on_ranks(2)
def test_boolean_decisions(said: list[bool]) -> None:
    mine = said[int(ltx.axis_index())]
    found = ltx.reduce_boolean_decision(mine), ltx.reduce_boolean_decision(torch.tensor(mine), all=False)
    assert found == (all(said), any(said))
    assert [type(x) for x in found] == [bool, bool]


def test_a_boolean_decision_alone_and_simulated() -> None:
    assert ltx.reduce_boolean_decision(False, all=False) is False
    with pytest.raises(AxisError, match=r"no form under ltx\.vmap"):
        ltx.vmap(lambda x: ltx.reduce_boolean_decision(True) or x)(torch.ones(2))


def _sparse(rank: int) -> Tensor:
    """Entries at other places on each rank, one of them twice; none at all on rank 1."""
    if rank == 1:
        return torch.sparse_coo_tensor(
            torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0, 2), (5, 2), check_invariants=True
        )
    indices = torch.tensor([[rank, rank, 4]])
    return torch.sparse_coo_tensor(indices, torch.arange(6.0).reshape(3, 2) + rank, (5, 2), check_invariants=True)


def test_sparse_sums(ranks: Ranks) -> None:
    def run() -> Any:
        x = {"s": _sparse(int(ltx.axis_index())), "d": torch.ones(2)}
        return ltx.psum(x), ltx.pmean(x)["s"], ltx.reduce(x["s"], "sum")

    whole = sum(_sparse(rank).to_dense() for rank in range(3))
    for total, mean, reduced in ranks(3).run(run):
        assert total["s"].is_coalesced()
        torch.testing.assert_close(total["s"].to_dense(), whole)
        torch.testing.assert_close(mean.to_dense(), whole / 3)
        torch.testing.assert_close(reduced.to_dense(), whole)
        assert total["d"].tolist() == [3.0, 3.0]
    torch.testing.assert_close(ltx.psum(_sparse(0)).to_dense(), _sparse(0).to_dense())


def test_sparse_tensors_elsewhere() -> None:
    with pytest.raises(UnsupportedError, match=r"all_gather: leaf 's' has layout torch.sparse_coo.*to_dense"):
        ltx.all_gather({"s": _sparse(0)})
    refuses(UnsupportedError, "to_dense", ltx.pmax, _sparse(0))


#: what differs in Horovod: op -> (call, the factor that Horovod's backward pass has beside ltx's)
SCALED: dict[str, tuple[Callable[..., Tensor], Callable[[int], float]]] = {
    "all_gather": (lambda x, **how: ltx.all_gather(x, tiled=True, **how), lambda n: 1 / n),
    "broadcast": (lambda x, **how: ltx.broadcast(x, 1, **how), lambda n: 1 / n),
    "psum_scatter": (lambda x, **how: ltx.psum_scatter(x, tiled=True, **how), lambda n: n),
}


@pytest.mark.parametrize("op", list(SCALED))
def test_horovod_s_gradients(ranks: Ranks, op: str) -> None:
    call, factor = SCALED[op]
    xs, weights = torch.randn(2, 4), torch.randn(2, 8)

    def grads(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        def gradient(**how: Any) -> Tensor:
            def loss(x: Tensor) -> Tensor:
                y = call(x, **how)
                return (y**2 * weight[: y.numel()]).sum()

            return torch.func.grad(loss)(x)

        return gradient(), gradient(grad_scale="mean")

    for plain, scaled in ranks(2).run(lambda: grads(xs[ltx.axis_index()], weights[ltx.axis_index()])):
        torch.testing.assert_close(scaled, plain * factor(2))
    plain, scaled = ltx.vmap(grads)(xs, weights)
    torch.testing.assert_close(scaled, plain * factor(2))
    refuses(CollectiveError, 'grad_scale must be "sum" or "mean"', call, xs[0], grad_scale="average")


@pytest.mark.full
@on_ranks(2)
def test_horovod_s_gradients_compiled() -> None:
    fn = torch.func.grad(lambda x: (ltx.all_gather(x, grad_scale="mean") ** 2).sum())
    assert torch.compile(fn, fullgraph=True, backend="aot_eager")(torch.ones(2)).tolist() == [2.0, 2.0]


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
        return (torch.tensor([1.0, 2.0])[:, None] * (b[:, None] * (a[:, None] * xs).sum(0)).sin()).sum()

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
        return (
            ltx.psum(large, prescale=0.5),
            ltx.psum(torch.tensor([1, 2]), prescale=3.0, postscale=torch.tensor(2)),
            ltx.psum(torch.tensor(True), postscale=-1),
            ltx.psum(torch.ones(2, dtype=torch.bfloat16), postscale=torch.tensor(0.5, dtype=torch.float64)),
            ltx.psum(torch.ones(2, 2).to_sparse(), prescale=0.5, postscale=3).to_dense(),
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


def _mean_and_gradients(x: Tensor, w: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """On one rank, for a loss that weighs rank r by r + 1."""

    def loss(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        mean = ltx.weighted_mean(x, w)
        return (1 + ltx.axis_index()) * mean.sin().sum(), mean

    gradients, mean = torch.func.grad(loss, argnums=(0, 1), has_aux=True)(x, w)
    return mean, gradients


def _expected(xs: Tensor, ws: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    n = len(xs)

    def loss(xs: Tensor, ws: Tensor) -> tuple[Tensor, Tensor]:
        mean = (xs * ws.reshape(n, *[1] * (xs.ndim - 1))).sum(0) / ws.sum()
        return n * (n + 1) / 2 * mean.sin().sum(), mean

    gradients, mean = torch.func.grad(loss, argnums=(0, 1), has_aux=True)(xs, ws)
    return mean.expand(n, *mean.shape), gradients


@pytest.mark.parametrize("nothing", [torch.nan, torch.inf, -torch.inf])
def test_a_weight_of_zero_silences_whatever_there_is(ranks: Ranks, nothing: float, seed: int) -> None:
    xs, ws = torch.randn(3, 4), torch.tensor([2.0, 0.0, 3.0])
    xs[1, :2] = nothing
    finite = xs.clone()
    finite[1, :2] = 0.0
    means, (dx, dw) = ltx.vmap(_mean_and_gradients)(xs, ws)
    torch.testing.assert_close((means, (dx, dw)), _expected(finite, ws))
    assert dx[1].tolist() == [0.0] * 4
    for rank, got in enumerate(ranks(3).run(lambda: _mean_and_gradients(xs[ltx.axis_index()], ws[ltx.axis_index()]))):
        torch.testing.assert_close(got, (means[rank], (dx[rank], dw[rank])))


def test_finite_values_of_weight_zero_keep_the_weights_gradient(seed: int) -> None:
    xs, ws = torch.randn(2, 3, dtype=torch.float64), torch.tensor([0.0, 1.5], dtype=torch.float64)
    got, want = ltx.vmap(_mean_and_gradients)(xs, ws), _expected(xs, ws)
    torch.testing.assert_close(got, want)
    assert want[1][1][0].abs() > 1e-6, "the weight that is 0 has a gradient"


@on_ranks(2)
def test_a_tree_of_every_dtype_goes_in_one_call() -> None:
    rank = int(ltx.axis_index())
    value = {
        "loss": torch.tensor(float(rank)),
        "right": torch.tensor([rank, 7]),
        "half": torch.full((2,), 60000.0, dtype=torch.float16),
        "done": torch.tensor(rank == 0),
        "wide": torch.tensor(rank, dtype=torch.float64),
    }
    with ltx.profile.record() as trace:
        means = ltx.weighted_mean(value, [1, torch.tensor(3, dtype=torch.int32)][rank])
    found = ltx.tree.map(Tensor.tolist, means)
    assert found == {"done": 0.25, "half": [60000.0] * 2, "loss": 0.75, "right": [0.75, 7.0], "wide": 0.75}
    assert [e.operation for e in trace.events] == ["psum"] * 6, "one psum: the five leaves, and the weights"
    assert {m.dtype for m in means.values()} == {torch.float16, torch.float32, torch.float64}


def test_a_tree_without_leaves() -> None:
    assert ltx.weighted_mean({"a": []}, 2) == {"a": []}


NONE = (
    "weighted_mean: the weights of all ranks add up to 0, so there is no mean. Give at least one rank a weight, or "
    "leave the call out on all of them."
)


def _error(x: Tensor, w: Any) -> str:
    return said(WeightError, ltx.weighted_mean, x, w)


def test_without_any_weight(ranks: Ranks) -> None:
    assert ranks(2).run(_error, torch.ones(2), 0).replicated() == NONE
    assert _error(torch.ones(()), 0.0) == NONE
    refuses(WeightError, "add up to 0", ltx.vmap(ltx.weighted_mean), torch.ones(2), torch.zeros(2))
    with pytest.raises(WeightError, match="add up to 0"):
        ltx.vmap(torch.vmap(torch.func.grad(ltx.weighted_mean)))(torch.ones(2, 2), torch.tensor([[1.0, 0.0]] * 2))


def test_a_negative_weight_raises_on_every_rank(ranks: Ranks) -> None:
    first, second = ranks(2).run(lambda: (_error(torch.ones(2), [2, -1][ltx.axis_index()]), ltx.psum(torch.ones(()))))
    assert first[0] == (
        "weighted_mean: 1 of the 2 ranks' weights is negative; that of rank 0 is 2. Weights count samples: give 0 to a "
        "rank whose value is to count for nothing."
    )
    assert "that of rank 1 is -1." in second[0]
    assert first[1] == second[1] == 2, "ranks go on in step"
    with pytest.raises(WeightError, match=r"1 of the 2 ranks' weights is negative; they are \[2.0, -1.0\]"):
        ltx.vmap(ltx.weighted_mean)(torch.ones(2), torch.tensor([2.0, -1.0]))


def test_weights_of_another_shape() -> None:
    with pytest.raises(WeightError, match=r"the weight must be a number or a 0-dim tensor, got shape \[1\]\. Sum it\."):
        ltx.weighted_mean(torch.ones(2), torch.ones(1))


@pytest.mark.full
@pytest.mark.slow_compile
@pytest.mark.parametrize("weight", [1.0, torch.tensor(1)], ids=["number", "tensor"])
@on_ranks(2)
def test_in_a_compiled_graph_there_is_nan_instead_of_errors(weight: Any) -> None:
    compiled = torch.compile(ltx.weighted_mean, fullgraph=True, backend="aot_eager")
    rank = int(ltx.axis_index())
    x = torch.tensor(float(rank))
    mean, *rest = [compiled(x, w * weight).item() for w in ([1, 3][rank], 0, [1, -3][rank])]
    torch._dynamo.reset()
    assert mean == 0.75
    assert torch.tensor(rest).isnan().tolist() == [True, True]


def _both(x: Tensor) -> tuple[Tensor, Tensor]:
    return ltx.pmax(x), ltx.pmin(x)


@pytest.mark.full
@pytest.mark.covering(1)
@pytest.mark.parametrize("whose", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_nan_on_one_rank_is_nan_on_all(ranks: Ranks, whose: int, dtype: torch.dtype) -> None:
    xs = torch.randn(3, 7).to(dtype)
    xs[whose, 2], xs[(whose + 1) % 3, 4], xs[0, 5] = torch.nan, torch.inf, -torch.inf
    want = (xs.amax(0), xs.amin(0))
    real = ranks(3).run(lambda xs: _both(xs[ltx.axis_index()]), xs).replicated()
    torch.testing.assert_close(real, want, rtol=0, atol=0, equal_nan=True)
    compiled = ranks(3).run(lambda xs: torch.compile(_both, backend="aot_eager")(xs[ltx.axis_index()]), xs)
    torch.testing.assert_close(compiled.replicated(), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.full(but=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_nan_over_sockets(on_new_axis: OnNewAxis, dtype: torch.dtype) -> None:
    """gloo keeps or drops it by the order in which it meets it."""
    xs = torch.tensor([[torch.nan, 1.0, torch.inf], [2.0, torch.nan, -torch.inf]]).to(dtype)
    found = on_new_axis(lambda: (*_both(xs[ltx.axis_index()]), *_both(xs[:0])), sockets=True).replicated()
    torch.testing.assert_close(found, (xs.amax(0), xs.amin(0), xs[:0], xs[:0]), rtol=0, atol=0, equal_nan=True)


def test_a_backward_graph_waits_for_all_that_it_issues(ranks: Ranks) -> None:
    """torch computes what depends on no cotangent in the forward graph, and issues it in the backward graph too."""
    unwaited: Callable[[], int] = torch._C._distributed_c10d._get_work_registry_size

    def gradient(x: Tensor) -> tuple[Tensor, int]:
        before, x = unwaited(), x.clone().requires_grad_()
        torch.compile(lambda x: (ltx.pmax(x) * x).sum(), backend="aot_eager_decomp_partition")(x).backward()
        assert x.grad is not None
        return x.grad, unwaited() - before

    xs = torch.tensor([[4.0, 1.0], [3.0, 1.0]])
    for rank, (grad, left) in enumerate(ranks(2).run(lambda xs: gradient(xs[ltx.axis_index()]), xs)):
        assert (grad.tolist(), left) == ([[4.0 + 7.0, 1.0 + 1.0], [4.0, 1.0 + 1.0]][rank], 0)


def test_complex_numbers_have_no_order() -> None:
    with pytest.raises(UnsupportedError, match=r"leaf 'z' is complex64\[2\]"):
        ltx.pmax({"a": torch.ones(1), "z": torch.zeros(2, dtype=torch.complex64)})


def test_no_gradient_for_integers() -> None:
    assert not operator.attrgetter("requires_grad")(ltx.pmax(torch.arange(3)))
