"""HorovodStrategy: its fields, and what the conformance suite can't say."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx import hooks
from ltx.errors import StrategyError, UnsupportedError
from tests.kinds import Params, Ranks
from tests.sent import sent
from tests.train_on import go_on, mine, on_ranks, refuses, said, trained
from tests.twins.cases import assert_same_bits

SGD = ltx.optim.from_torch(torch.optim.SGD, lr=0.1)


def loss(params: Params, x: Tensor) -> Tensor:
    return ((params["w"] * x).sum() + params["b"] - 1).square()


def params_of(dtype: torch.dtype = torch.float32) -> Params:
    return {"w": torch.ones(3, dtype=dtype), "b": torch.zeros((), dtype=dtype)}


def trainer(optimizer: ltx.optim.Optimizer = SGD, **fields: Any) -> Any:
    return ltx.train_step(ltx.data_parallel(loss, ltx.HorovodStrategy(**fields)), optimizer)


def reduced(g: Tensor, **fields: Any) -> Tensor:
    return ltx.vmap(lambda g: ltx.sync_gradients(g, ltx.HorovodStrategy(**fields))[0])(g)[0]


def test_half_precision_doesnt_overflow_where_the_mean_doesnt() -> None:
    g = torch.full((4, 2), 40000.0)
    assert reduced(g, compression="fp16").tolist() == [40000.0, 40000.0]
    assert reduced(g, compression="fp16", gradient_predivide_factor=1.0).isinf().all()  # Horovod's order
    assert reduced(g, compression="fp16", gradient_predivide_factor=4.0).tolist() == [40000.0, 40000.0]
    assert reduced(g, compression="fp16", op="sum").isinf().all()
    assert reduced(g, op="sum").tolist() == [160000.0, 160000.0]


@pytest.mark.full(but=1)
@pytest.mark.parametrize("hook", [hooks.ByteGrad(), hooks.TopK(0.5), hooks.PowerSGD(1, start_step=0)], ids=repr)
def test_any_hook_compresses(hook: hooks.CommHook) -> None:
    """A sum is n times the mean, by whatever hook, and so are its states."""
    x = torch.randn(6, 4, 3)

    def run(n: float, **fields: Any) -> Tensor:
        train = trainer(ltx.optim.from_torch(torch.optim.SGD, lr=0.01 / n), compression=hook, **fields)
        state = train.init(params_of())
        for t, batch in enumerate(x):
            state, _ = ltx.vmap(train, in_dims=(0 if t else None, 0))(state, batch)
        return state.params["w"]

    torch.testing.assert_close(run(4.0, op="sum"), run(1.0))
    torch.testing.assert_close(run(1.0, gradient_predivide_factor=2.0), run(1.0))
    assert ltx.HorovodStrategy(op="sum", gradient_predivide_factor=1.0) == ltx.HorovodStrategy(op="sum")


@pytest.mark.full
@pytest.mark.parametrize(("op", "times"), [("sum", 2.0), ("average", 1.0)])
def test_second_derivatives_are_of_the_same_scale(op: str, times: float, ranks: Ranks) -> None:
    strategy = ltx.HorovodStrategy(op=op, compression="bf16")

    def product(x: Tensor, strategy: ltx.Strategy) -> Params:
        gradient = torch.func.grad(lambda p: ltx.data_parallel(loss, strategy)(p, x))
        return torch.func.jvp(gradient, (params_of(),), (ltx.tree.map(torch.ones_like, params_of()),))[1]

    def transposed(mine: Tensor, strategy: ltx.Strategy) -> Tensor:
        return torch.func.grad(lambda g: (ltx.sync_gradients(g, strategy)[0] * mine).sum())(mine)

    x = torch.randn(2, 3)

    def run() -> Any:
        mine = x[ltx.axis_index()]
        return [(product(mine, s), transposed(mine, s)) for s in (strategy, ltx.DDPStrategy())]

    simulated = ltx.vmap(lambda x: (product(x, strategy), product(x, ltx.DDPStrategy())))(x)
    torch.testing.assert_close(simulated[0], ltx.tree.map(lambda h: times * h, simulated[1]))
    for found, plain in ranks(2).run(run):
        torch.testing.assert_close(found, ltx.tree.map(lambda h: times * h, plain))


@pytest.mark.parametrize("op", ["average", "adasum"])
@on_ranks(2)
def test_calls_in_between_send_nothing_and_leave_parameters_alone(op: str) -> None:
    train = trainer(op=op, backward_passes_per_step=2)
    state = train.init(params_of())
    for number, batch in enumerate(torch.randn(5, 3)):
        before = state.params["w"].clone()
        with ltx.profile.record() as trace:
            state, _ = train(state, batch)
        waits = number % 2 == 0
        assert (not trace.events, torch.equal(before, state.params["w"])) == (waits, waits)
    assert (state.step, state.opt_state.count) == (5, 2)


@pytest.mark.parametrize("op", ["average", "adasum"])
@on_ranks(2, alone=True)
def test_a_skipped_update_keeps_the_passes_before_it(op: Any) -> None:
    """They are added to those after it. A bad pass that isn't an update's last counts for nothing."""
    step = ltx.data_parallel(lambda w, x: w * x, ltx.HorovodStrategy(op=op, backward_passes_per_step=2))
    batches = torch.tensor([1.0, torch.nan, 2.0, 3.0, torch.nan, 4.0])
    found = trained(step, SGD, torch.tensor(0.0), batches, guard="skip")
    assert found.skipped == [False, True, False, False, True, False]
    torch.testing.assert_close(found.params, torch.tensor(-0.1 * (1 + 2 + 3) - 0.1 * 4))


@pytest.mark.parametrize("fields", [{"op": "adasum"}, {"backward_passes_per_step": 2}])
@on_ranks(2)
def test_groups_are_of_parameters(fields: dict[str, Any]) -> None:
    """What a guard sends where gradients are local is in none, and is looked for in none."""
    strategy = ltx.HorovodStrategy(groups=[["w"]], **fields)
    x = torch.full((3,), torch.nan if ltx.axis_index() else 1.0)
    assert trained(loss, SGD, params_of(), [x], strategy, guard="skip").skipped == [True]


def test_a_checkpoint_knows_how_often_the_optimizer_has_run() -> None:
    train = trainer(
        ltx.optim.from_torch(torch.optim.Adam, lr=lambda count: 0.1 / (1 + count)), backward_passes_per_step=2
    )
    x, other = torch.randn(7, 3), train.init(params_of())
    state, _ = go_on(train, train.init(params_of()), x[:3])
    other.load_state_dict({name: value.clone() for name, value in state.state_dict().items()})
    assert (other.step, other.opt_state.count) == (3, 1)
    assert_same_bits(go_on(train, state, x[3:]).params, go_on(train, other, x[3:]).params)


def test_several_passes_and_what_they_dont_go_with() -> None:
    fields = {"backward_passes_per_step": 2}
    weighted = ltx.data_parallel(lambda p, x: ltx.Weighted(loss(p, x), 3.0), ltx.HorovodStrategy(**fields))
    train = ltx.train_step(weighted, SGD)
    with pytest.raises(StrategyError, match=r"ltx\.Weighted .* ltx\.accumulate\(step, k\)"):
        train(train.init(params_of()), torch.ones(3))
    with pytest.raises(StrategyError, match="needs an update of each bucket"):
        ltx.train_step(ltx.data_parallel(loss, ltx.HorovodStrategy(**fields)), SGD, overlap="update")
    assert ltx.train_step(ltx.data_parallel(loss, ltx.HorovodStrategy()), SGD, overlap="update") is not None
    complex_one = ltx.train_step(ltx.data_parallel(lambda p: p["c"].abs().sum(), ltx.HorovodStrategy(**fields)), SGD)
    with pytest.raises(UnsupportedError, match="leaf 'c' has no sum of gradients"):
        complex_one(complex_one.init({"c": torch.ones(2, dtype=torch.complex64)}))


@pytest.mark.full(but=1)
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"backward_passes_per_step": 2}, "backward_passes_per_step=2"),
        ({"op": "adasum"}, "needs a training step that only reduces"),
        ({"scale_lr": True}, "needs a training step that only reduces"),
    ],
    ids=str,
)
def test_what_compiled_graphs_cant_hold(fields: dict[str, Any], text: str) -> None:
    train = trainer(**fields)
    state = train.init(params_of())
    refuses(Exception, text, torch.compile(train, backend="eager", fullgraph=True), state, torch.ones(3))


@on_ranks(3)
def test_adasum_pairs_ranks() -> None:
    assert said(StrategyError, trainer(op="adasum").init, params_of()) == (
        'HorovodStrategy(op="adasum") pairs ranks with ranks, and works on 1, 2, 4, 8, ... of them; '
        "axis 'data' has 3."
    )


def test_adasum_in_half_precision() -> None:
    train = trainer(op="adasum", compression="bf16")
    state, _ = ltx.vmap(train, in_dims=(None, 0))(train.init(params_of()), torch.randn(4, 3))
    assert state.params["w"].dtype == torch.float32
    move = state.params["w"][0] - 1
    torch.testing.assert_close(move, move.bfloat16().float(), rtol=1e-5, atol=1e-6)


def buckets_of(groups: Any, **fields: Any) -> list[tuple[str, ...]]:
    """The parameters of each bucket. Their sizes are powers of two, so that a bucket's size says which it has."""
    sizes = {"z": 1, "y": 2, "x": 4, "w": 8, "v": 16}  # in the order of the forward pass
    params = {name: torch.zeros(size) for name, size in sizes.items()}
    found = sent(ltx.HorovodStrategy(groups=groups, **fields), params).packed
    return [tuple(sorted(name for name, size in sizes.items() if bucket.nbytes // 4 & size)) for bucket in found]


def test_groups_are_buckets() -> None:
    small = {"bucket_bytes": 1, "first_bucket_bytes": 1}
    assert buckets_of(None) == [("v", "w", "x", "y", "z")]
    assert buckets_of(2) == [("v", "w"), ("x", "y", "z")]  # Horovod: the first groups have one more
    assert buckets_of(1, **small) == [("v", "w", "x", "y", "z")]
    assert buckets_of(9) == [("v",), ("w",), ("x",), ("y",), ("z",)]
    assert buckets_of([["z", "v"]], **small) == [("w",), ("x",), ("y",), ("v", "z")]
    assert buckets_of([["[w-x]"], ["z", "y"]]) == [("v",), ("w", "x"), ("y", "z")]


def test_groups_that_dont_fit() -> None:
    refuses(StrategyError, r"'q\*' fits no parameter. Their paths: v, w, x, y, z", buckets_of, [["q*"]])
    refuses(StrategyError, "parameter 'v' is in groups 0 and 1", buckets_of, [["v"], ["*"]])


def sparse(rank: int) -> Tensor:
    values = torch.arange(6.0).reshape(3, 2) + rank
    return torch.sparse_coo_tensor(torch.tensor([[rank, 3, 3]]), values, (5, 2), check_invariants=True)


@pytest.mark.parametrize(("op", "divisor"), [("average", 2), ("sum", 1)])
@on_ranks(2)
def test_sparse_gradients(op: str, divisor: int) -> None:
    strategy, own = ltx.HorovodStrategy(op=op, compression="fp16"), sparse(int(ltx.axis_index()))
    grads, _ = ltx.sync_gradients({"dense": torch.ones(2), "table": own}, strategy)
    only, _ = ltx.sync_gradients([own], strategy)
    assert grads["table"].layout is torch.sparse_coo
    for found in (grads["table"], only[0]):
        torch.testing.assert_close(found.to_dense(), (sparse(0).to_dense() + sparse(1).to_dense()) / divisor)
    torch.testing.assert_close(grads["dense"], torch.ones(2) * 2 / divisor)


def test_sparse_gradients_that_cant_be_reduced() -> None:
    with pytest.raises(
        UnsupportedError, match=r"leaf 'table', which is sparse, needs a mean of gradients, which Adasum\(\)"
    ):
        ltx.sync_gradients({"table": sparse(0)}, ltx.DDPStrategy(comm_hook=hooks.Adasum()))
    grads = ltx.sync_gradients({"table": sparse(0)}, ltx.HorovodStrategy(op="adasum"))[0]  # stays local
    assert grads["table"].is_sparse


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD])
def test_a_state_restored_on_one_rank_is_broadcast(optimizer: Any, ranks: Ranks) -> None:
    """Horovod's broadcast_parameters and broadcast_optimizer_state; the count of steps and other leaves come along."""
    x = torch.randn(2, 4, 3)
    train = trainer(ltx.optim.from_torch(optimizer, lr=0.1), compression=hooks.TopK(0.5))
    saved = ranks(2).run(lambda: pickle.dumps(go_on(train, train.init(params_of()), mine(x)[:3]).state)).rank(1)

    def restore() -> Any:
        own = train.init(params_of())
        state = train.broadcast(pickle.loads(saved) if ltx.axis_index() == 1 else own, src=1)
        counts = state.step, state.sync_state.checked_step(), state.opt_state.count
        return counts, [leaf.clone() for leaf in ltx.tree.flatten(state)[0]], train(state, mine(x)[3])[0].params

    expected = ltx.tree.flatten(pickle.loads(saved))[0]
    results = ranks(2).run(restore)
    for counts, leaves, params in results:
        assert counts == (3, 3, 3)
        assert_same_bits(leaves, expected)
        assert_same_bits(params, results.rank(0)[2], of="rank")


@pytest.mark.parametrize(
    ("fields", "factor"),
    [({"op": "sum"}, 2.0), ({"gradient_predivide_factor": 2.0}, 1.0), ({"backward_passes_per_step": 2}, 1.0)],
)
def test_error_feedback_within_scales_and_passes(fields: dict[str, Any], factor: float) -> None:
    """What TopK leaves out is sent later: updates and what is left add up to all gradients."""
    grad, topk = torch.tensor([1.0, 8.0, 4.0, 2.0]), hooks.TopK(ratio=0.25, error_feedback=True)
    step = ltx.data_parallel(lambda w, x: (w * x).sum(), ltx.HorovodStrategy(compression=topk, **fields))
    train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=1.0))
    state = train.init(torch.zeros(4))
    for i in range(8):
        state, _ = ltx.vmap(train, in_dims=(None if i == 0 else 0, 0))(state, grad.expand(2, 4))
    (kept,) = state.sync_state.leaves.values()
    left = kept["residual"].sum(0) * fields.get("gradient_predivide_factor", 2.0) / 2
    torch.testing.assert_close(left - state.params[0], factor * 8 * grad)


def test_reduced_in_half_precision_by_its_compression() -> None:
    """Scales go around the cast hook, whose error feedback stays."""
    hook = ltx.HorovodStrategy(op="sum", compression=hooks.PowerSGD(start_step=0)).hook(0)
    assert hook is not None
    cast = hooks.cast(hook, torch.bfloat16)
    assert cast.state_names == hook.state_names
    assert cast.packing(torch.float32, 2).scale == 1.0
    assert cast.reach == "parameter"
    eight_bits = ltx.HorovodStrategy(op="sum", compression=hooks.ByteGrad()).hook(0)
    assert eight_bits is not None
    refuses(StrategyError, r"needs a request for sums, which ByteGrad\(\)", hooks.cast, eight_bits, torch.bfloat16)
