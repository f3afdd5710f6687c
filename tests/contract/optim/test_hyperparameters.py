"""Hyperparameters that change: by schedules, by hand, and by the loss; against torch's own classes and scheduler."""

from __future__ import annotations

import dataclasses
import pickle
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Muon, RMSprop
from torch.optim import lr_scheduler as torchs

import ltx
from ltx.errors import ArgumentError, LtxError, OptimError
from ltx.optim import (
    adjust,
    adjustable,
    chain,
    clip_by_global_norm,
    from_scheduler,
    from_torch,
    partition,
    warmup_cosine,
)
from tests.contract.optim.cases import same_bits
from tests.contract.optim.test_opaque import Lion
from tests.kinds import Ranks
from tests.train_on import refuses


class Row(NamedTuple):
    cls: Any
    fixed: dict[str, Any]
    values: dict[str, Callable[[int], Any]]  # what each hyperparameter is at each update


ROWS = {
    "betas and decay": Row(
        AdamW, {"lr": 0.1}, {"betas": lambda n: (0.5 + n / 20, 0.99), "weight_decay": lambda n: 0.3 / (1 + n)}
    ),
    "momentum from 0": Row(SGD, {"lr": 0.1}, {"momentum": lambda step: 0.3 * min(step, 3)}),
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
            torch.testing.assert_close({name: x[rank] for name, x in simulated.items()}, expected, rtol=1e-4, atol=1e-5)


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


def test_a_rate_that_follows_the_loss_by_torchs_own_rule(ranks: Ranks) -> None:
    """All ranks decide alike, since the loss of the metrics is that of all ranks."""
    losses = [3.0, 2.0, 2.5, 2.4, 2.3, 1.0, 1.2, 1.1, 1.1, 1.3]

    def watching() -> tuple[SGD, Any]:
        watched = SGD([torch.zeros(1)], lr=1.0)
        return watched, torchs.ReduceLROnPlateau(watched, factor=0.5, patience=1)

    def rates() -> list[float]:
        watched, plateau = watching()
        train = ltx.train_step(
            ltx.data_parallel(lambda w, x: w.sum() - w.detach().sum() + x), from_torch(SGD, lr=adjustable(1.0))
        )
        state, found = train.init(torch.zeros(2)), []
        for n, loss in enumerate(losses):
            mine = torch.tensor(loss) + (2 * int(ltx.axis_index()) - 1) * n * (int(ltx.axis_size()) - 1)
            state, metrics = train(state, mine)
            plateau.step(metrics.loss)
            state = dataclasses.replace(state, opt_state=adjust(state.opt_state, lr=watched.param_groups[0]["lr"]))
            found.append(state.opt_state.hyper["lr"].value.item())
        return found

    (watched, plateau), expected = watching(), []
    for loss in losses:
        plateau.step(loss)
        expected.append(watched.param_groups[0]["lr"])
    assert len({*expected}) > 1
    assert [rates(), *ranks(2).run(rates)] == [expected] * 3


def test_goes_on_from_a_checkpoint(tmp_path: Any) -> None:
    sgd = from_torch(SGD, lr=adjustable(1.0), momentum=adjustable(0.5))
    train = ltx.train_step(ltx.data_parallel(lambda w, x: (w * x) ** 2), sgd)
    state, _ = train(train.init(torch.tensor(1.0)), torch.tensor(0.5))
    state = dataclasses.replace(state, opt_state=adjust(state.opt_state, lr=0.5, momentum=0.25))
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


SCHEDULERS: dict[str, Any] = {
    "step": lambda o: torchs.StepLR(o, 3, 0.5),
    "several steps": lambda o: torchs.MultiStepLR(o, [2, 5]),
    "exponential": lambda o: torchs.ExponentialLR(o, 0.9),
    "cosine": lambda o: torchs.CosineAnnealingLR(o, 10, 0.01),
    "restarts": lambda o: torchs.CosineAnnealingWarmRestarts(o, 4),
    "polynomial": lambda o: torchs.PolynomialLR(o, 7, 2.0),
    "one cycle": lambda o: torchs.OneCycleLR(o, 0.5, total_steps=12, cycle_momentum=False),
    "cyclic": lambda o: torchs.CyclicLR(o, 0.01, 0.1, 3, cycle_momentum=False),
    "a function": lambda o: torchs.LambdaLR(o, lambda step: 1 / (1 + step)),
    "warm-up, then cosine": lambda o: torchs.SequentialLR(
        o, [torchs.LinearLR(o, 0.1, total_iters=3), torchs.CosineAnnealingLR(o, 9)], [3]
    ),
    "chained": lambda o: torchs.ChainedScheduler([torchs.ConstantLR(o, 0.5, 2), torchs.ExponentialLR(o, 0.9)], o),
}


@pytest.mark.filterwarnings("ignore:.*epoch parameter:UserWarning")  # torch's own, of SequentialLR
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_schedulers_rates(name: str) -> None:
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    scheduler, rates = SCHEDULERS[name](optimizer), []
    for _ in range(12):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        if len(rates) < 12:
            scheduler.step()
    schedule = from_scheduler(SCHEDULERS[name], lr=0.3)
    assert [schedule(step) for step in (11, *range(12))] == [rates[11], *rates]


def test_a_warm_up_to_the_end_ends_where_it_should() -> None:
    assert [warmup_cosine(1.0, 2, 2, 0.25)(step) for step in range(4)] == [0.5, 1.0, 0.25, 0.25]


@pytest.mark.parametrize("kind", [IndexError, ValueError])
def test_a_scheduler_that_ends_is_only_asked_for_what_it_has(kind: type[Exception]) -> None:
    factors = [1.0, 0.5, 0.25]

    def factor(step: int) -> float:
        if step >= len(factors):
            raise kind(f"no factor of step {step}")
        return factors[step]

    schedule = from_scheduler(partial(torchs.LambdaLR, lr_lambda=factor), lr=2.0)
    assert [schedule(step) for step in range(3)] == [2.0, 1.0, 0.5]
    refuses(kind, "no factor of step 3", schedule, 5)


def test_are_values() -> None:
    for made in (warmup_cosine(1.0, 2, 6), from_scheduler(partial(torchs.StepLR, step_size=2), 0.1)):
        made(3)
        assert pickle.loads(pickle.dumps(made))(5) == made(5)
    assert warmup_cosine(1, 0, 4) == warmup_cosine(1, 0, 4) != warmup_cosine(1, 0, 5)
    assert repr(warmup_cosine(1.0, 2, 6)) == "WarmupCosine(peak=1.0, warmup_steps=2, total_steps=6, end=0.0)"


def test_formulas() -> None:
    schedule = warmup_cosine(2.0, 10, 110, end=0.5)
    cosine = torchs.CosineAnnealingLR(SGD([torch.zeros(1, requires_grad=True)], lr=2.0), 100, 0.5)
    cosine.optimizer.step()
    for step in range(10, 110):
        assert schedule(step) == pytest.approx(cosine.get_last_lr()[0])
        cosine.step()
    assert [schedule(0), schedule(9), schedule(110), schedule(10**6)] == [0.2, 2.0, 0.5, 0.5]


FIXED, KEPT = from_torch(SGD), from_torch(SGD, lr=adjustable(0.1))
AT_LEAST_0 = "must be a finite number of at least 0, got"
REFUSED: list[tuple[Any, str]] = [
    (lambda: adjustable("0.1"), f"adjustable: value {AT_LEAST_0} '0.1'"),
    (lambda: adjust(KEPT.init({}), lr=torch.tensor(-1.0)), f"adjust: lr {AT_LEAST_0} -1.0"),
    (lambda: adjust(KEPT.init({}), lr=torch.tensor(True)), f"adjust: lr {AT_LEAST_0} True"),
    (lambda: adjust(KEPT.init({}), lr=torch.ones(1)), f"adjust: lr {AT_LEAST_0} tensor("),
    (lambda: adjust(FIXED.init({}), lr=0.1), "keeps no lr. Make the optimizer with it: ltx.optim.from_"),
    (lambda: KEPT.apply({}, FIXED.init({}), {}), "expected the state that its init(params) made; this one keeps []"),
    (lambda: from_torch(SGD, momentum=lambda n: "1").init({}), "the schedule momentum(0) must be a finite number >= 0"),
    (lambda: ltx.optim.qadam(weight_decay=lambda n: 0.1, warmup_steps=1), "weight_decay must be"),
    (lambda: warmup_cosine(1.0, 1, 2, "1"), "end"),
    (lambda: warmup_cosine(1.0, 7, 6), "warmup_steps must be from 0 to total_steps, got 7 of 6."),
    (lambda: warmup_cosine(1.0, 0, 0), "total_steps must be a whole number of at least 1, got 0."),
    (lambda: from_scheduler(3, 0.1), "expected a function from an optimizer to a scheduler"),
    (lambda: from_scheduler(SCHEDULERS["step"], -1.0), f"lr {AT_LEAST_0} -1.0."),
    (lambda: from_scheduler(lambda o: 3, 0.1)(0), "must return a scheduler of torch.optim.lr_scheduler"),
    (lambda: from_scheduler(torchs.ReduceLROnPlateau, 0.1)(0), "those of the step alone; got <torch.optim"),
    (lambda: from_scheduler(lambda o: torchs.OneCycleLR(o, 0.5, 9), 0.1)(0), "Give it cycle_momentum=False."),
]


@pytest.mark.parametrize(("make", "text"), REFUSED)
def test_refused(make: Any, text: str) -> None:
    refuses((OptimError, ArgumentError), re.escape(text), make)
