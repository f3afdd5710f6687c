"""Hyperparameters that change: by schedules, by hand, and by the loss; against torch's own classes and scheduler."""

from __future__ import annotations

import dataclasses
import pickle
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Muon, RMSprop

import ltx
from ltx.errors import LtxError
from ltx.optim import (
    LossState,
    adjust,
    adjustable,
    chain,
    clip_by_global_norm,
    from_functions,
    from_torch,
    partition,
    reduce_on_plateau,
    with_loss,
)
from tests.contract.optim.cases import same_bits
from tests.contract.optim.test_opaque import Lion
from tests.kinds import Ranks
from tests.train_on import refuses, trained


class Row(NamedTuple):
    cls: Any
    fixed: dict[str, Any]
    values: dict[str, Callable[[int], Any]]  # what each hyperparameter is at each update


ROWS = {
    "betas and decay": Row(
        AdamW, {"lr": 0.1}, {"betas": lambda n: (0.5 + n / 20, 0.99), "weight_decay": lambda n: 0.3 / (1 + n)}
    ),
    "momentum from 0": Row(SGD, {"lr": 0.1}, {"momentum": ltx.optim.linear(0.0, 0.9, 3)}),
    "momentum to 0": Row(SGD, {"lr": 0.1, "nesterov": True}, {"momentum": lambda n: 0.9 if n < 2 else 0.8}),
    "single tensors": Row(Adam, {"foreach": False, "fused": False}, {"eps": lambda n: 10.0**-n, "lr": lambda n: 0.1}),
    "alpha": Row(RMSprop, {"momentum": 0.5}, {"alpha": lambda n: 0.9 + n / 100, "lr": lambda n: 0.01 * (1 + n)}),
    "muon": Row(Muon, {}, {"momentum": lambda n: 0.8 + n / 50, "weight_decay": lambda n: 0.1 * n}),
    "another author's": Row(Lion, {}, {"betas": lambda n: (0.8 + n / 50, 0.9), "lr": lambda n: 0.1 / (1 + n)}),
}


def by_torch(row: Row, params: dict[str, Tensor], grads: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    leaves = {name: x.clone().requires_grad_() for name, x in params.items()}
    for n, each in enumerate(grads):
        now = {name: value(n) for name, value in row.values.items()}
        if n == 0:  # a momentum of 0 gets a buffer later: torch makes one when it is wanted
            optimizer = row.cls(leaves.values(), **row.fixed, **now)
        optimizer.param_groups[0].update(now)
        for name, leaf in leaves.items():
            leaf.grad = each[name].clone()
        optimizer.step()
    return {name: leaf.detach() for name, leaf in leaves.items()}


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("name", ROWS)
def test_as_torchs_groups_changed_by_hand(name: str, donate: bool, seed: int) -> None:
    row = ROWS[name]
    first = {"w": torch.randn(3, 4), "v": torch.randn(2, 5)}
    grads = [{key: torch.randn_like(x) for key, x in first.items()} for _ in range(5)]
    expected = by_torch(row, first, grads)
    kept = {name: adjustable(value(0)) for name, value in row.values.items()}
    for made in (from_torch(row.cls, **row.fixed, **row.values), from_torch(row.cls, **row.fixed, **kept)):
        optimizer = partition({"all": chain(clip_by_global_norm(1e6), made)}, {"*": "all"})
        params = {key: x.clone() for key, x in first.items()}
        state = optimizer.init(params)
        for n, each in enumerate(grads):
            if state["all"][1].hyper:
                state = adjust(state, **{name: value(n) for name, value in row.values.items()})
            params, state = optimizer.apply(each, state, params, donate=donate)
        torch.testing.assert_close(params, expected, rtol=1e-5, atol=1e-6)  # of fused kernels, where torch has them


def loss_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return ((x @ params["w"] + params["b"]) ** 2).mean()


ADAM = from_torch(AdamW, lr=adjustable(0.1), betas=adjustable((0.9, 0.99)), weight_decay=lambda n: 0.1 * n)
KINDS: dict[str, dict[str, Any]] = {
    "backward": {},
    "update": {"overlap": "update"},
    "kept": {"donate": False, "guard": "skip"},
    "zero": {"strategy": ltx.ZeroStrategy()},
    "zero, update": {"strategy": ltx.ZeroStrategy(), "overlap": "update"},
}


def adjusted(kind: str, first: Any, xs: Tensor, mine: bool = True) -> dict[str, Tensor]:
    """Training whose rate and betas are changed by hand after two steps; with `mine` on this rank's part."""
    options = dict(KINDS[kind])
    train = ltx.train_step(ltx.data_parallel(loss_fn, options.pop("strategy", None)), ADAM, **options)
    state = train.init({name: x.clone() for name, x in first.items()})
    for n, x in enumerate(xs):
        if n == 2:
            state = dataclasses.replace(state, opt_state=adjust(state.opt_state, lr=0.02, betas=(0.5, 0.9)))
        state, _ = train(state, ltx.shard(x) if mine else x)
    return {name: x.clone() for name, x in state.params.items()}


def by_hand(first: Any, xs: Tensor) -> dict[str, Tensor]:
    leaves = {name: x.clone().requires_grad_() for name, x in first.items()}
    optimizer = AdamW(leaves.values(), lr=0.1, betas=(0.9, 0.99))
    for n, x in enumerate(xs):
        optimizer.param_groups[0].update(
            {"weight_decay": 0.1 * n} | ({"lr": 0.02, "betas": (0.5, 0.9)} if n > 1 else {})
        )
        optimizer.zero_grad()
        loss_fn(leaves, x).backward()
        optimizer.step()
    return {name: x.detach() for name, x in leaves.items()}


@pytest.mark.full(but=3)
@pytest.mark.parametrize("kind", KINDS)
def test_changed_between_steps_on_ranks(kind: str, ranks: Ranks, seed: int) -> None:
    first, xs = {"w": torch.randn(4, 3), "b": torch.randn(3)}, torch.randn(4, 8, 4)
    expected = by_hand(first, xs)
    for found in ranks(2).run(adjusted, kind, first, xs):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    if "update" not in kind:  # after the first step the values are simulated ranks', all alike
        simulated = ltx.vmap(lambda x: adjusted(kind, first, x, False), in_dims=1)(xs.unflatten(1, (2, 4)))
        for rank in range(2):
            got = {name: x[rank] for name, x in simulated.items()}
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_rates_of_a_population(seed: int) -> None:
    """Examples of a batch may have rates of their own, but no other hyperparameters."""
    sgd, params = from_torch(SGD, lr=adjustable(0.1), momentum=adjustable(0.9)), {"w": torch.randn(3)}
    rates, grads = torch.rand(4, dtype=torch.float64), {"w": torch.randn(3)}

    def updated(**values: Any) -> Tensor:
        state = sgd.init(params)
        hyper = {name: kept._replace(value=values.get(name, kept.value)) for name, kept in state.hyper.items()}
        return sgd.apply(grads, dataclasses.replace(state, hyper=hyper), params)[0]["w"]

    found = torch.vmap(lambda lr: updated(lr=lr))(rates)
    torch.testing.assert_close(found, params["w"] - rates.float()[:, None] * grads["w"])
    with pytest.raises(LtxError, match="momentum in the optimizer's state is differentiated or batched"):
        torch.vmap(lambda x: updated(momentum=x))(rates)


# --- the loss ---------------------------------------------------------------------------------------------------------

LOSSES = torch.tensor([3.0, 2.0, 2.5, 2.4, 2.3, 1.0, 1.2, 1.1, 1.1, 1.3, 1.4, 1.0, 0.5, 0.7, 0.7, 0.7, 0.9, 0.8])
PLATEAUS: dict[str, dict[str, Any]] = {
    "every": {"factor": 0.5, "patience": 1},
    "at once": {"factor": 0.9, "patience": 0, "cooldown": 2},
    "least": {"factor": 0.1, "patience": 0, "least": 0.05},
    "threshold": {"factor": 0.5, "patience": 1, "threshold": 0.5},
    "of two": {"factor": 0.5, "patience": 0, "every": 2},
}


def torchs_rates(every: int = 1, least: float = 0.0, **options: Any) -> list[float]:
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, min_lr=least, **options)
    rates = []
    for n in range(len(LOSSES)):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if (n + 1) % every == 0:
            plateau.step(sum(LOSSES.tolist()[n + 1 - every : n + 1]) / every)
    return rates


def plateaued(name: str, strategy: Any = None, **options: Any) -> list[float]:
    """The moves of a parameter whose gradient is 1, on ranks whose own losses differ."""
    sgd = from_torch(SGD, lr=reduce_on_plateau(1.0, **PLATEAUS[name]))
    train = ltx.train_step(ltx.data_parallel(lambda w, x: w.sum() - w.detach().sum() + x, strategy), sgd, **options)
    state, moves = train.init(torch.zeros(2, dtype=torch.float64)), []
    for n, loss in enumerate(LOSSES):
        before = state.params.clone()
        mine = loss + (2 * ltx.axis_index() - 1) * n * (ltx.axis_size() - 1)  # better there, worse here
        state, _ = train(state, mine)
        moves.append((before - state.params)[0])
    return torch.stack(moves)


OPTIONS: tuple[dict[str, Any], ...] = ({"strategy": ltx.ZeroStrategy()}, {"donate": False}, {"guard": "skip"})


@pytest.mark.parametrize(
    ("name", "options"), [(name, {}) for name in PLATEAUS] + [("every", o) for o in OPTIONS], ids=str
)
def test_all_ranks_decide_by_the_loss_that_they_share(name: str, options: Any, ranks: Ranks) -> None:
    expected = torch.tensor(torchs_rates(**PLATEAUS[name]), dtype=torch.float64)
    assert len(expected.unique()) > 1
    for found in (plateaued(name, **options), *ranks(2).run(plateaued, name, **options)):
        torch.testing.assert_close(found, expected)


def test_on_simulated_ranks() -> None:
    expected = torch.tensor(torchs_rates(**PLATEAUS["every"]), dtype=torch.float64)
    found = ltx.vmap(lambda _: plateaued("every"), in_dims=0)(torch.zeros(2))
    torch.testing.assert_close(found, expected.expand(2, -1))


def test_a_skipped_step_is_no_decision(seed: int) -> None:
    sgd, xs = (
        from_torch(SGD, lr=reduce_on_plateau(1.0, 0.5, patience=0)),
        torch.tensor([1.0, *[torch.nan] * 2, torch.inf]),
    )
    kept = trained(lambda w, x: w * x, sgd, torch.tensor(1.0), xs, guard="skip").state.opt_state.hyper["lr"]
    assert (kept.value, kept.more["best"]) == (1.0, 1.0)


def polyak(grads: Any, state: LossState, params: Any) -> Any:
    return -state.loss / grads.square().sum() * grads, state


def of_the_loss(xs: Tensor) -> Any:
    own = from_functions(lambda p: LossState(), polyak)
    found = trained(lambda w, x: ((w - x) ** 2).sum(), own, torch.ones(3), xs)
    assert same_bits(found.state.opt_state.loss, found.metrics[-1].loss)
    return found.params


def test_an_optimizer_of_ones_own_sees_the_loss(ranks: Ranks, seed: int) -> None:
    xs, w = torch.randn(3, 2, 3), torch.ones(3)  # step, rank, numbers
    for x in xs:
        loss, grad = ((w - x) ** 2).sum(1).mean(), 2 * (w - x).mean(0)
        w = w - loss / grad.square().sum() * grad
    for found in (*ranks(2).run(lambda: of_the_loss(xs[:, ltx.axis_index()])), *ltx.vmap(of_the_loss, in_dims=1)(xs)):
        torch.testing.assert_close(found, w, rtol=1e-3, atol=1e-4)
    told = with_loss((LossState(), {"a": torch.ones(1)}), torch.tensor(2.0))
    assert same_bits(told, (LossState(torch.tensor(2.0)), {"a": torch.ones(1)}))


class Watched:
    """A node of a state, which counts how often somebody looks into it."""

    looks = 0

    def __init__(self, inside: Any):
        self.inside = inside

    @staticmethod
    def flatten(node: Watched) -> Any:
        Watched.looks += 1
        return (node.inside,), None


ltx.tree.register_node(Watched, Watched.flatten, lambda children, _: Watched(*children), ("inside",))


@pytest.mark.parametrize("guard", ["off", "skip"])
def test_a_place_for_the_loss_is_looked_for_once(guard: Any) -> None:
    def update(grads: Tensor, state: Watched, params: Tensor) -> Any:
        return -state.inside.loss * grads if isinstance(state.inside, LossState) else -grads, state

    def looks(state: Any) -> tuple[Any, int]:
        Watched.looks = 0
        return train(state, torch.ones(1))[0], Watched.looks

    optimizer = from_functions(lambda params: Watched(torch.zeros(1)), update)
    train = ltx.train_step(ltx.data_parallel(lambda w, x: (w * x).sum()), optimizer, guard=guard)
    state, first = looks(train.init(torch.tensor([3.0])))
    state, later = looks(state)
    assert later == first
    ltx.tree.flatten(state)  # as making one by hand does, so that its tensors may be held by the user
    state, held = looks(state)
    state, by_hand = looks(dataclasses.replace(state))
    assert by_hand == held + 1
    assert looks(state)[1] == first
    state, _ = looks(dataclasses.replace(train.init(torch.tensor([3.0])), opt_state=Watched(LossState())))
    assert looks(state)[0].params.item() == 3 - 3 - 0  # the loss is 3, and then 0


def test_goes_on_from_a_checkpoint(tmp_path: Any) -> None:
    sgd = from_torch(SGD, lr=reduce_on_plateau(1.0, 0.5, patience=0), momentum=adjustable(0.5))
    train = ltx.train_step(ltx.data_parallel(lambda w, x: (w * x) ** 2), sgd)
    state, _ = train(train.init(torch.tensor(1.0)), torch.tensor(0.5))
    state, _ = train(state, torch.tensor(5.0))
    state = dataclasses.replace(state, opt_state=adjust(state.opt_state, momentum=0.25))
    ltx.checkpoint.save(tmp_path / "kept", state)
    loaded = ltx.checkpoint.load(tmp_path / "kept", train.init(torch.tensor(1.0))).state
    assert {name: kept.value.item() for name, kept in loaded.opt_state.hyper.items()} == {"lr": 0.5, "momentum": 0.25}
    assert same_bits(train(state, torch.tensor(3.0))[0].params, train(loaded, torch.tensor(3.0))[0].params)
    assert pickle.loads(pickle.dumps(sgd)) == sgd


def test_values_that_are_tensors() -> None:
    """Of any dtype that holds real numbers; the state has a copy, and its derivative."""
    sgd = from_torch(SGD, lr=adjustable(0.1), momentum=adjustable(0.0))
    w, lr = torch.tensor(1.0), torch.tensor(0.5, requires_grad=True)
    state = adjust(sgd.init(w), lr=lr, momentum=torch.tensor(0))
    with torch.no_grad():
        lr.fill_(7.0)
    moved, _ = sgd.apply(torch.tensor(2.0), state, w)
    moved.backward()
    assert (moved.item(), lr.grad) == (0.0, torch.tensor(-2.0))
    by_rank = torch.vmap(lambda lr: sgd.apply(torch.tensor(2.0), adjust(sgd.init(w), lr=lr), w)[0])
    assert by_rank(torch.tensor([0.5, 1.0])).tolist() == [0.0, -1.0]
    adam = from_torch(torch.optim.Adam, lr=0.1, betas=adjustable((0.9, 0.99)))
    kept = adjust(adam.init(w), betas=(torch.tensor(0.5, dtype=torch.float64), 0.9)).hyper["betas"].value
    assert [x.item() for x in kept] == [0.5, 0.9]


PLATEAU = from_torch(SGD, lr=reduce_on_plateau(0.1))
ADJUSTABLE = from_torch(SGD, lr=adjustable(0.1)).init({})
STEP = ltx.data_parallel(lambda w, x: (w * x).sum())


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: adjustable("0.1"), "adjustable: value must be a finite number of at least 0, got '0.1'"),
        (lambda: reduce_on_plateau(0.1, 1.0), "factor must be a finite number of at least 0, and less than 1, got 1.0"),
        (lambda: reduce_on_plateau(0.1, least=0.2), "lr must be a finite number of at least 0.2, got 0.1"),
        (lambda: reduce_on_plateau(0.1, every=0), "every must be a whole number of at least 1, got 0"),
        (
            lambda: adjust(ADJUSTABLE, lr=torch.tensor(-1.0)),
            "adjust: lr must be a finite number of at least 0, got -1.0",
        ),
        (
            lambda: adjust(ADJUSTABLE, lr=torch.tensor(True)),
            "adjust: lr must be a finite number of at least 0, got True",
        ),
        (lambda: adjust(ADJUSTABLE, lr=torch.ones(1)), "adjust: lr must be a finite number of at least 0, got tensor("),
        (lambda: adjust(from_torch(SGD).init({}), lr=0.1), "keeps no lr. Make the optimizer with it: ltx.optim.from_"),
        (
            lambda: from_torch(SGD, momentum=lambda n: "1").init({}),
            "the schedule momentum(0) must be a finite number >= 0 or",
        ),
        (
            lambda: from_torch(SGD, lr=adjustable(0.1)).apply({}, from_torch(SGD).init({}), {}),
            "expected the state that its init(params) made; this one keeps []",
        ),
        (
            lambda: ltx.train_step(STEP, PLATEAU, overlap="update").init(torch.zeros(1)),
            'needs the loss of all ranks before the first update, which overlap="update" doesn\'t offer: use',
        ),
        (
            lambda: ltx.train_step(ltx.data_parallel(STEP.fn, ltx.LocalSGDStrategy(period=2)), PLATEAU).init(
                torch.zeros(1)
            ),
            "needs the same loss on all ranks, as they share the optimizer's state, which LocalSGDStrategy(",
        ),
        (
            lambda: ltx.train_step(ltx.data_parallel(STEP.fn, ltx.HorovodStrategy(scale_lr=True)), PLATEAU),
            "Scale its rate yourself",
        ),
        (
            lambda: ltx.train_step(ltx.data_parallel(STEP.fn, ltx.HorovodStrategy(op="adasum")), PLATEAU).init(
                torch.zeros(1)
            ),
            "needs the same loss on all ranks, as they share the optimizer's state, which HorovodStrategy(",
        ),
        (lambda: ltx.optim.qadam(weight_decay=lambda n: 0.1, warmup_steps=1), "weight_decay must be"),
    ],
)
def test_refused(make: Any, text: str) -> None:
    refuses(LtxError, re.escape(text), make)
