"""ltx.simulate: ranks that take turns give what processes and ltx.vmap give, and never wait for nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ltx
from ltx.errors import (
    AxisError,
    NotFiniteError,
    ReplicaDivergedError,
    UnsupportedError,
)
from tests.kinds import Ranks

XS = torch.tensor([[1.0, -2.0], [3.0, 4.0]])


def here() -> int:
    return int(ltx.axis_index())


def assert_same(a: Any, b: Any) -> None:
    """Bit for bit."""
    (xs, spec), (ys, other) = ltx.tree.flatten(a), ltx.tree.flatten(b)
    assert spec == other
    for x, y in zip(xs, ys, strict=True):
        assert torch.equal(x, y) if isinstance(x, Tensor) else x == y


# --- arguments and results -------------------------------------------------------------------------------------------


def test_each_rank_returns_something_of_its_own() -> None:
    results = ltx.simulate(lambda x: {"name": f"rank {here()}", "x": x[: here()], "n": ltx.axis_size()})(XS)
    assert isinstance(results, ltx.PerRank)
    assert [r["name"] for r in results] == ["rank 0", "rank 1"]
    assert [r["x"].tolist() for r in results] == [[], [3.0]]
    assert [r["n"] for r in results] == [2, 2]


@pytest.mark.parametrize(
    ("in_dims", "args", "expected"),
    [
        (0, (XS,), XS.sum(0)),
        (1, (XS,), XS.sum(1)),
        ((0, None), (XS, {"a": torch.ones(2)}), XS.sum(0) + 2),
        (({"x": -1, "kept": None},), ({"x": XS, "kept": 5},), XS.sum(1)),
    ],
)
def test_in_dims_are_those_of_vmap(in_dims: Any, args: Any, expected: Tensor) -> None:
    def f(x: Any, more: Any = None) -> Tensor:
        x = x["x"] if isinstance(x, dict) else x
        return ltx.psum(x if more is None else x + more["a"])

    got = ltx.simulate(f, in_dims)(*args)
    assert torch.equal(got.replicated(), expected)
    assert torch.equal(got.stack(), ltx.vmap(f, in_dims)(*args))


def test_keyword_arguments_are_mapped() -> None:
    assert ltx.simulate(lambda *, x: ltx.psum(x))(x=XS).replicated().tolist() == [4.0, 2.0]


def test_a_value_for_each_rank_of_any_shape() -> None:
    lengths = ltx.simulate(lambda: torch.arange(here() + 1), ranks=3)()
    totals = ltx.simulate(lambda x, scale: (len(x), ltx.psum(x.sum()) * scale))(lengths, torch.tensor([1, 2, 3]))
    assert totals.stack()[0].tolist() == [1, 2, 3]
    assert totals.stack()[1].tolist() == [4, 8, 12]
    with pytest.raises(AxisError, match="axis 'data' has 2 ranks, but an argument has the values of 3"):
        ltx.simulate(ltx.psum, ranks=2)(lengths)
    with pytest.raises(AxisError, match="needs one size"):
        ltx.simulate(lambda a, b: a)(lengths, XS)


def test_the_number_of_ranks() -> None:
    assert len(ltx.simulate(lambda: None, ranks=5)()) == 5
    with pytest.raises(AxisError, match=r"needs one size, got no mapped tensor\. .* or give ranks\."):
        ltx.simulate(lambda: None)()
    with pytest.raises(AxisError, match=r"needs one size, got sizes \[2, 3\]"):
        ltx.simulate(ltx.psum, ranks=3)(XS)
    with pytest.raises(AxisError, match="at least 1, got 0"):
        ltx.simulate(lambda: None, ranks=0)()


def test_one_rank_alone() -> None:
    assert ltx.simulate(lambda x: (ltx.psum(x), ltx.all_gather_object("a")), ranks=1)(XS[:1]).rank(0)[1] == ["a"]


def test_ranks_have_copies_of_their_arguments() -> None:
    model, x = nn.Linear(2, 1), torch.ones(2)

    def f(model: nn.Linear, params: dict[str, Tensor], optimizer: torch.optim.SGD, x: Tensor) -> Any:
        assert params["weight"] is model.weight  # one object in several places still is
        assert optimizer.param_groups[0]["params"][0] is model.weight
        model(x * (1 + here())).sum().backward()
        optimizer.step()
        x.zero_()
        return model.weight, model

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    nn.init.zeros_(model.weight)
    found = ltx.simulate(f, None, ranks=2)(model, dict(model.named_parameters()), optimizer, x)
    assert [moved.tolist() for moved, _ in found] == [[[-1.0, -1.0]], [[-2.0, -2.0]]]
    assert found.rank(0)[1] is not found.rank(1)[1]
    assert not model.weight.any()
    assert model.weight.grad is None
    assert x.tolist() == [1.0, 1.0]


def test_results_are_detached_and_nothing_flows_through() -> None:
    w = torch.ones(2, requires_grad=True)
    assert not any(y.requires_grad for y in ltx.simulate(lambda w: ltx.psum(w * 2), None, ranks=2)(w))
    with pytest.raises(UnsupportedError, match=r"the argument '0\.a' is part of a graph"):
        ltx.simulate(ltx.psum, None, ranks=2)({"a": w * 2})


def test_the_callers_modes_are_on() -> None:
    def modes() -> tuple[bool, bool, bool]:
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")

    assert ltx.simulate(modes, ranks=2)().replicated() == (True, False, False)
    with torch.no_grad():
        assert ltx.simulate(modes, ranks=2)().replicated() == (False, False, False)
    with torch.inference_mode():
        assert ltx.simulate(modes, ranks=2)().replicated() == (False, True, False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ltx.simulate(modes, ranks=2)().replicated() == (True, False, True)
        total = ltx.simulate(lambda x: ltx.psum(x.half()), ranks=2)(XS)
    assert total.rank(0).dtype == torch.float16


# --- random numbers --------------------------------------------------------------------------------------------------


def test_each_rank_has_a_stream_of_its_own(seed: int) -> None:
    def draws(meet: bool) -> list[float]:
        found = []
        for _ in range(3):
            found.append(float(torch.rand(())))
            if meet:
                ltx.barrier()
        return found

    def together(randomness: Any = "different", meet: bool = True) -> ltx.PerRank[list[float]]:
        torch.manual_seed(seed)
        return ltx.simulate(lambda: draws(meet), ranks=3, randomness=randomness)()

    found = together()
    assert len({x for of_rank in found for x in of_rank}) == 9
    assert list(found) == list(together()) == list(together(meet=False))  # whatever runs in between
    assert together("same").replicated() == together("same", meet=False).replicated()


def test_a_seed_that_ranks_set_is_each_ranks_own() -> None:
    def f() -> list[float]:
        torch.manual_seed(7)
        found = [float(torch.rand(()))]
        ltx.barrier()
        return [*found, float(torch.rand(()))]

    found = ltx.simulate(f, ranks=3)().replicated()
    torch.manual_seed(7)
    assert found == torch.rand(2).tolist()


def test_the_callers_generator_advances_by_one_number(seed: int) -> None:
    torch.randint(2**62, ())
    expected = torch.rand(3)
    for f in (lambda: torch.rand(5), lambda: torch.manual_seed(1), lambda: 1 / 0):
        torch.manual_seed(seed)
        with suppress(ZeroDivisionError):
            ltx.simulate(f, ranks=2)()
        assert torch.equal(torch.rand(3), expected)


# --- what vmap can't run ---------------------------------------------------------------------------------------------


def test_values_decide_the_way_but_not_the_collectives() -> None:
    def f(x: Tensor) -> Tensor:
        kept = x[x > 0]
        y = ltx.psum(kept.sum()) if kept.sum().item() > 2 else ltx.psum(-kept.sum())
        for _ in range(here()):
            y = y * 2
        return ltx.pmax(y)

    assert ltx.simulate(f)(XS).replicated() == 12.0  # (-1 + 7), twice that on rank 1


def convolutions() -> nn.Sequential:
    torch.manual_seed(3)
    # Without a bias, whose gradient before a batch norm is rounding alone, which Adam makes a step of.
    return nn.Sequential(
        nn.Conv1d(2, 3, 2, bias=False), nn.BatchNorm1d(3), nn.ReLU(), nn.Flatten(), nn.Linear(9, 1)
    ).train()


def train_with_batch_norm(xs: Tensor) -> Any:
    """Three steps on rank r's xs[r], of a model of the rank's own: parameters, buffers, losses."""
    model, x = convolutions(), xs[here()]

    def loss(params: Any, buffers: Any, x: Tensor) -> Any:
        y, buffers = ltx.functional_call(model, (params, buffers), x, return_buffers=True)
        return y.square().mean(), buffers

    train = ltx.train_step(ltx.data_parallel(loss), ltx.optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9))
    state, losses = train.init(dict(model.named_parameters()), dict(model.named_buffers())), []
    for _ in range(3):
        state, metrics = train(state, x)
        losses.append(metrics.loss)
    return state.params, state.buffers, losses


def test_batch_norm_in_training_gives_what_processes_give(ranks: Ranks, seed: int) -> None:
    xs = torch.randn(2, 4, 2, 4)
    for got, want in zip(
        ltx.simulate(train_with_batch_norm, None, ranks=2)(xs), ranks(2).run(train_with_batch_norm, xs), strict=True
    ):
        assert_same(got, want)


def ordinary_loop(xs: Tensor) -> Any:
    """A loop of torch's own, with ltx for its gradients."""
    model, x = convolutions(), xs[here()]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        grads = {name: p.grad for name, p in model.named_parameters()}
        grads, _ = ltx.sync_gradients(grads)
        for name, p in model.named_parameters():
            p.grad = grads[name]
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def test_a_loop_with_backward_gives_what_processes_give(ranks: Ranks, seed: int) -> None:
    xs = torch.randn(2, 4, 2, 4)
    got = ltx.simulate(ordinary_loop, None, ranks=2)(xs)
    for of_rank, want in zip(got, ranks(2).run(ordinary_loop, xs), strict=True):
        assert_same(of_rank, want)
    assert got.replicated()


class Recomputed(nn.Module):
    """With a checkpointed block, in which ranks communicate; in its second pass too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(2, 4), nn.Linear(4, 1)

    def block(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        return torch.tanh(h - ltx.pmean(h.mean(0)))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.block, x, use_reentrant=False))


class Kept(Recomputed):
    """Without a checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(x))


@pytest.mark.parametrize("n", [1, 2, 5])
def test_checkpoints_and_collectives_in_a_module_that_ranks_share(n: int, seed: int) -> None:
    model, kept, xs = Recomputed(), Kept(), torch.randn(n, 3, 2)
    kept.load_state_dict(model.state_dict())
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    starts = {name: torch.randn(n, *p.shape) for name, p in own.items()}

    def local(model: nn.Module) -> Callable[[Any, Tensor], Any]:
        def gradients(params: dict[str, Tensor], x: Tensor) -> Any:
            loss = lambda p: ltx.functional_call(model, p, x).square().mean()  # noqa: E731
            leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
            loss(leaves).backward()
            return {name: p.grad for name, p in leaves.items()}, loss(params)

        return gradients

    got = ltx.simulate(local(model))(starts, xs).stack()  # each rank's parameters are others
    assert_same(got, ltx.simulate(local(kept))(starts, xs).stack())
    want = ltx.vmap(torch.func.grad_and_value(lambda p, x: ltx.functional_call(kept, p, x).square().mean()))(starts, xs)
    torch.testing.assert_close(got, want)
    assert_same(dict(model.named_parameters()), own)  # it has its own back


def test_torchs_functional_call_around_a_collective_is_refused() -> None:
    model = Kept()

    def f(x: Tensor) -> Tensor:
        return torch.func.functional_call(model, dict(model.named_parameters()), x)

    with pytest.raises(UnsupportedError, match=r"functional_call of Kept: .* Write ltx\.functional_call"):
        ltx.simulate(f)(torch.ones(2, 3, 2))


def test_collectives_of_unequal_shapes_and_of_objects() -> None:
    def f() -> Any:
        rank = here()
        mine = torch.arange(float(rank + 1), requires_grad=True)
        gathered = ltx.gather_all_tensors(mine)
        sum((1 + rank) * x.sum() for x in gathered).backward()  # type: ignore[union-attr]
        parts = ltx.psum_scatter(torch.ones(6), tiled=True, splits=[1, 2, 3])
        together = ltx.all_gather(torch.full((rank,), rank), tiled=True, splits=[0, 1, 2])
        exchanged, received = ltx.all_to_all(torch.full((3,), rank), 0, 0, splits=[1, 1, 1] if rank else [3, 0, 0])
        return {
            "gathered": [len(x) for x in gathered],
            "grad": mine.grad.tolist(),  # type: ignore[union-attr]
            "parts": parts.tolist(),
            "together": together.tolist(),
            "exchanged": (exchanged.tolist(), received),
            "objects": ltx.all_gather_object({"rank": rank}),
            "object": ltx.broadcast_object(f"of {rank}", src=2),
            "all": ltx.reduce_boolean_decision(rank > 0),
            "any": ltx.reduce_boolean_decision(rank > 0, all=False),
        }

    found = ltx.simulate(f, ranks=3)()
    assert [r["gathered"] for r in found] == [[1, 2, 3]] * 3
    assert [r["grad"] for r in found] == [[6.0], [6.0] * 2, [6.0] * 3]
    assert [r["parts"] for r in found] == [[3.0], [3.0] * 2, [3.0] * 3]
    assert [r["together"] for r in found] == [[1, 2, 2]] * 3
    assert [r["exchanged"] for r in found] == [([0, 0, 0, 1, 2], (3, 1, 1)), ([1, 2], (0, 1, 1)), ([1, 2], (0, 1, 1))]
    assert [r["objects"] for r in found] == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * 3
    assert [(r["object"], r["all"], r["any"]) for r in found] == [("of 2", False, True)] * 3


def test_objects_are_copies() -> None:
    def f() -> Any:
        mine = [here()]
        first = ltx.broadcast_object(mine)
        first.append("mine")
        return first, mine

    found = ltx.simulate(f, ranks=2)()
    assert list(found) == [([0, "mine"], [0, "mine"]), ([0, "mine"], [1])]
    with pytest.raises(TypeError, match="broadcast_object: rank 1's object can't be pickled"):
        ltx.simulate(lambda: ltx.broadcast_object(threading.Lock(), src=1), ranks=2)()


def test_uneven_batches() -> None:
    def f() -> list[tuple[float, float]]:
        batches = [torch.tensor([float(1 + here())])] * here()
        return [(float(ltx.psum(x * weight)), float(weight)) for x, weight in ltx.uneven(batches)]

    found = ltx.simulate(f, ranks=3)()
    assert [[total for total, _ in turns] for turns in found] == [[7.5, 9.0]] * 3
    assert [[weight for _, weight in turns] for turns in found] == [[0.0, 0.0], [1.5, 0.0], [1.5, 3.0]]


# --- the same as vmap ------------------------------------------------------------------------------------------------


def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return (torch.tanh(x @ params["w"]) @ params["v"]).square().mean()


SGD = ltx.optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)


def weighted(params: dict[str, Tensor], x: Tensor) -> ltx.Weighted:
    return ltx.Weighted((1 + ltx.axis_index()) * loss(params, x), 1 + ltx.axis_index())


#: Strategies by themselves are rows of tests/contract/strategies.
TRAINS: dict[str, Any] = {
    "weighted": ltx.train_step(ltx.data_parallel(weighted), SGD),
    "weighted, accumulated": ltx.train_step(ltx.accumulate(ltx.data_parallel(weighted), steps=2), SGD),
    "accumulated": ltx.train_step(ltx.accumulate(ltx.data_parallel(loss), steps=2), SGD),
    "bucket by bucket": ltx.train_step(ltx.data_parallel(loss, ltx.ZeroStrategy()), SGD, overlap="update"),
    "compared": ltx.train_step(ltx.data_parallel(loss), SGD, donate=False, guard="skip", check_every=1),
    "scaled": ltx.train_step(
        ltx.mixed_precision(ltx.data_parallel(loss), ltx.Precision(loss_scale=ltx.DynamicLossScale(init=8.0))),
        ltx.optim.chain(ltx.optim.clip_by_global_norm(0.1), SGD),
    ),
}


@pytest.mark.parametrize("name", TRAINS)
def test_train_steps_give_what_they_give_under_vmap(name: str, seed: int) -> None:
    train = TRAINS[name]
    params = {"w": torch.randn(3, 4, dtype=torch.float64), "v": torch.randn(4, dtype=torch.float64)}
    xs = torch.randn(3, 4, 2, 3, dtype=torch.float64)  # step, rank

    def run(params: dict[str, Tensor], xs: Tensor) -> Any:
        state, losses = train.init(params), []
        for x in xs:
            state, metrics = train(state, x)
            losses.append(metrics.loss)
        return train.finish(state).params, losses

    got = ltx.simulate(run, (None, 1))(params, xs).stack()
    torch.testing.assert_close(got, ltx.vmap(run, (None, 1))(params, xs), rtol=1e-9, atol=1e-9)


def test_a_state_goes_in_and_out(seed: int) -> None:
    train = ltx.train_step(ltx.data_parallel(loss, ltx.ZeroStrategy()), SGD)
    params = {"w": torch.randn(3, 4), "v": torch.randn(4)}
    xs = torch.randn(2, 4, 2, 3)
    states = ltx.simulate(train.init, None, ranks=4)(params)
    for x in xs:
        states, _ = zip(*ltx.simulate(train)(ltx.PerRank(states), x), strict=True)
    state, ys = train.init(params), xs
    stacked, _ = ltx.vmap(train, (None, 0))(state, ys[0])
    stacked, _ = ltx.vmap(train)(stacked, ys[1])
    torch.testing.assert_close(ltx.PerRank([s.params for s in states]).stack(), stacked.params)


def test_parameters_that_differ_are_found() -> None:
    step = ltx.data_parallel(loss)

    def f(w: Tensor) -> Any:
        return ltx.grad(step)({"w": w, "v": torch.ones(4)}, torch.ones(2, 3))

    with pytest.raises(ReplicaDivergedError, match=r"leaf 'w' .* differs on rank 2 from what 2 of 3 ranks have"):
        ltx.simulate(f)(torch.stack([torch.ones(3, 4), torch.ones(3, 4), torch.zeros(3, 4)]))
    with ltx.debug_checks(), pytest.raises(ReplicaDivergedError, match=r"leaf 'w' .* isn't rank 0's on rank 1"):
        ltx.simulate(f)(torch.stack([torch.ones(3, 4), torch.zeros(3, 4)]))


def test_the_guard_names_ranks() -> None:
    train = ltx.train_step(ltx.data_parallel(loss), SGD, guard="raise")

    def f(x: Tensor) -> Any:
        return train(train.init({"w": torch.ones(3, 4), "v": torch.ones(4)}), x)

    xs = torch.ones(3, 2, 3)
    xs[1, 0] = torch.nan
    with pytest.raises(NotFiniteError, match=r"step 0 aren't finite\. rank 1: leaf 'v' \(NaN"):
        ltx.simulate(f)(xs)


def test_a_state_is_broadcast() -> None:
    train = ltx.train_step(ltx.data_parallel(loss), SGD)

    def f(x: Tensor) -> Any:
        state = train.init({"w": torch.ones(3, 4), "v": torch.ones(4)})
        state = replace(state, params=ltx.tree.map(lambda p: p + here(), state.params))
        state = train.broadcast(state, src=1)
        before = ltx.tree.map(torch.clone, state.params)
        return before, train(state, x)[0].params

    before, _ = ltx.simulate(f)(torch.ones(3, 2, 3)).replicated()
    assert before["v"].tolist() == [2.0] * 4


def test_arrival_is_rank_0s(seed: int) -> None:
    """Ranks whose parameters were made in another order put them into the same buckets."""
    step = ltx.data_parallel(loss, ltx.DDPStrategy(bucket_bytes=8, first_bucket_bytes=8))
    w, v = torch.randn(4, 4), torch.randn(4)

    def f(x: Tensor) -> Any:
        params = {"w": w, "v": v} if here() else {"v": v, "w": w}
        return ltx.grad(step)(params, x)

    got = ltx.simulate(f)(xs := torch.randn(2, 3, 4)).replicated()
    torch.testing.assert_close(got["w"], torch.func.grad(lambda p: loss(p, xs.flatten(0, 1)))({"w": w, "v": v})["w"])


def test_vmap_and_transforms_inside(seed: int) -> None:
    xs = torch.randn(3, 4, 2, dtype=torch.float64)

    def nested(x: Tensor) -> Tensor:
        inner = ltx.vmap(lambda y: ltx.psum(y, ("ranks", "inner")[1]) + ltx.psum(y, "ranks"), axis_name="inner")(x)
        return inner + torch.func.grad(lambda y: torch.func.grad(lambda z: ltx.psum((z**3).sum(), "ranks"))(y).sum())(x)

    got = ltx.simulate(nested, axis_name="ranks")(xs).stack()
    assert torch.equal(got, ltx.vmap(nested, axis_name="ranks")(xs))


def test_many_ranks(seed: int) -> None:
    train = ltx.train_step(ltx.data_parallel(loss), SGD)
    params, xs = {"w": torch.randn(3, 4), "v": torch.randn(4)}, torch.randn(64, 2, 3)

    def f(x: Tensor) -> Any:
        state = train.init(params)
        for _ in range(2):
            state, _ = train(state, x)
        return state.params

    got = ltx.simulate(f)(xs).replicated()
    plain = {name: p.clone().requires_grad_() for name, p in params.items()}
    optimizer = torch.optim.SGD(plain.values(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        loss(plain, xs.flatten(0, 1)).backward()
        optimizer.step()
    torch.testing.assert_close(got, {name: p.detach() for name, p in plain.items()})
