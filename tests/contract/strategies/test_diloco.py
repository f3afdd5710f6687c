"""DiLoCo: fragments, the outer optimizer against torch's, bytes, and what is refused."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx import hooks
from ltx.errors import StrategyError
from tests import inside
from tests.kinds import Params, Ranks
from tests.sent import recorded, ring
from tests.train_on import on_ranks, refuses
from tests.twins.cases import assert_same_bits

SIZES = {"a": 40, "b": 8, "c": 24, "d": 24}
SGD = ltx.optim.from_torch(torch.optim.SGD, lr=0.1)


def start() -> Params:
    return {name: torch.linspace(-1, 1, size) for name, size in SIZES.items()}


def trainer(strategy: ltx.Strategy, optimizer: ltx.optim.Optimizer = SGD, **kwargs: Any) -> Any:
    step = ltx.data_parallel(lambda params, x: sum(((p - x) ** 2).mean() for p in params.values()), strategy)
    return ltx.train_step(step, optimizer, **kwargs)


def trained(strategy: ltx.Strategy, steps: int = 12) -> Any:
    """(the last state, the bytes that each step sent)"""
    train, generator = trainer(strategy), torch.Generator().manual_seed(int(ltx.axis_index()))
    found, traces = recorded(train, train.init(start()), torch.randn(steps, generator=generator))
    return found.state, [sum(event.nbytes for event in trace.events) for trace in traces]


OUTER = {
    "slowmo": partial(torch.optim.SGD, lr=1.0, momentum=0.5),
    "fedadam": partial(torch.optim.Adam, lr=0.1, eps=1e-3),
    "adamw": partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1),
}


@pytest.mark.parametrize("rate", ["fixed", "scheduled"])
@pytest.mark.parametrize("alpha", [0.0, 0.3])
@pytest.mark.parametrize("name", OUTER)
def test_another_outer_optimizer(name: str, alpha: float, rate: str) -> None:
    """Against torch's on the anchors of two fragments that take turns; each rank keeps `alpha` of its own."""
    made = OUTER[name]
    lr = made.keywords["lr"]
    schedule = (lambda count: lr / (count + 1)) if rate == "scheduled" else lr
    outer = ltx.optim.from_torch(made.func, **{**made.keywords, "lr": schedule})
    train = trainer(ltx.DiLoCoStrategy(4, outer=outer, update_alpha=alpha, fragments=2))
    begin = {"a": torch.randn(5, dtype=torch.float64), "b": torch.randn(5, dtype=torch.float64)}
    state = train.init(begin)
    anchors = {name: p.clone().requires_grad_() for name, p in begin.items()}
    optimizers = {name: made([anchor]) for name, anchor in anchors.items()}
    params, outer_steps = {name: torch.stack([p] * 3) for name, p in begin.items()}, dict.fromkeys(begin, 0)
    for step in range(12):
        x = torch.randn(3, dtype=torch.float64)
        state, _ = ltx.vmap(train, in_dims=(0 if step else None, 0))(state, x)
        params = {name: p - 0.1 * 2 * (p - x[:, None]) / 5 for name, p in params.items()}
        if step % 2:
            due = "b" if step % 4 == 1 else "a"
            anchor, optimizer = anchors[due], optimizers[due]
            if rate == "scheduled":
                optimizer.param_groups[0]["lr"] = lr / (outer_steps[due] + 1)
            anchor.grad = anchor.detach() - params[due].mean(0)
            optimizer.step()
            outer_steps[due] += 1
            params[due] = (1 - alpha) * anchor.detach() + alpha * params[due]
        torch.testing.assert_close(state.params, params)


#: What ranks share of the communication state, and what is each one's own.
STATES = {
    "Adam outside": (
        ltx.DiLoCoStrategy(2, outer=ltx.optim.from_torch(torch.optim.Adam, lr=0.1), update_alpha=0.5),
        ["anchor", "outer.0", "outer.1", "outer.2"],
        [],
    ),
    "fragments, fed back": (
        ltx.DiLoCoStrategy(4, outer_hook=hooks.ByteGrad(error_feedback=True), fragments=3),
        ["anchor", "velocity"],
        ["residual"],
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_what_is_the_same_everywhere(name: str, ranks: Ranks) -> None:
    strategy, shared, own = STATES[name]
    (one, _), (other, _) = ranks(2).run(trained, strategy, 5)
    for path, state in one.sync_state.leaves.items():
        assert sorted(state) == sorted([*shared, *own])
        assert [key for key, x in sorted(state.items()) if x.equal(other.sync_state.leaves[path][key])] == shared
    assert strategy.layout.sync_state == ("per_rank" if own else "replicated")
    assert not one.params["a"].equal(other.params["a"])


def test_half_precision_has_wide_anchors() -> None:
    """Where nobody moves, the anchor stays as it is: what bfloat16 rounds off of it is no outer gradient."""
    still = trainer(ltx.DiLoCoStrategy(1), ltx.optim.from_torch(torch.optim.SGD, lr=0.0))
    state = still.init({"w": torch.randn(100).bfloat16()})
    anchors = {"w": {**state.sync_state.leaves["w"], "anchor": torch.randn(100)}}
    params = {"w": anchors["w"]["anchor"].bfloat16()}
    state = ltx.TrainState(params, None, state.opt_state, ltx.SyncState.new(anchors))
    before, rounded = anchors["w"]["anchor"].clone(), params["w"].clone()
    after, _ = still(state, torch.zeros(()))
    assert after.sync_state.leaves["w"]["anchor"].equal(before)
    assert after.params["w"].equal(rounded)


def test_local_steps_copy_no_anchors() -> None:
    """They are as large as the model, and pass through."""
    train = trainer(ltx.DiLoCoStrategy(3, outer_hook=hooks.ByteGrad(error_feedback=True)))
    state = train.init(start())
    before = [x.data_ptr() for x in ltx.tree.flatten(state.sync_state.leaves)[0]]
    state, _ = train(state, torch.ones(()))
    assert [x.data_ptr() for x in ltx.tree.flatten(state.sync_state.leaves)[0]] == before


@pytest.mark.parametrize("_", range(5))
def test_every_fragment_is_due_once_a_period_and_alone(_: int, seed: int) -> None:
    period = int(torch.randint(1, 20, ()))
    k = int(torch.randint(1, period + 1, ()))
    strategy = ltx.DiLoCoStrategy(period, fragments=k)
    for step in range(3 * period):
        due = [j for j in range(k) if (step + 1 + j * period // k) % period == 0]
        assert len(due) <= 1
        assert strategy.due(step) == (due[0] if due else None)
        assert strategy.communicates_after_update(step) == bool(due)


HEADER, GRIDS = ring(inside.SUMMARY_BYTES, 2), 2 * 8  # a grid a message: centre and step
#: What two ranks send in four steps. Two fragments, (a, b) and (c, d), are of 48 numbers each: half of the model.
SENT = {
    "whole": (ltx.DiLoCoStrategy(4), [0, 0, 0, ring(4 * 96, 2) + HEADER]),
    "fragments": (ltx.DiLoCoStrategy(4, fragments=2), [0, ring(4 * 48, 2) + HEADER] * 2),
    "8 bits": (ltx.DiLoCoStrategy(4, outer_hook=hooks.ByteGrad()), [0, 0, 0, ring(96, 2) + GRIDS + HEADER]),
}


@pytest.mark.parametrize("name", SENT)
def test_bytes(name: str, ranks: Ranks) -> None:
    strategy, expected = SENT[name]
    for _, nbytes in ranks(2).run(trained, strategy):
        assert nbytes == expected * 3


def test_outer_hooks_count_outer_steps(ranks: Ranks) -> None:
    """Plain for one outer step of each fragment, then in 8 bits."""
    strategy = ltx.DiLoCoStrategy(4, outer_hook=hooks.after(1, hooks.ByteGrad(error_feedback=True)), fragments=2)
    sent = ranks(2).run(trained, strategy).rank(0)[1]
    assert sent[1] == sent[3] > sent[5] == sent[7] == sent[9] == sent[11] > 0


#: torchft's golden values: test_fixtures/*DiLoCoMockedUpdateTest.test_diloco_mocked_updates_*.json, of 2 replicas, a
#: gradient of 2 everywhere, an inner rate of 1, an outer one of 2, sync_every=6. By (fragment_sync_delay,
#: fragment_update_alpha): the first and the second layer before steps 0 to 15.
TORCHFT: dict[tuple[int, float], tuple[list[float], list[float]]] = {
    (0, 0.0): (
        [1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41, -43, -45, -59],
        [1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47, -49, -51, -53],
    ),
    (0, 0.5): (
        [1, -1, -3, -8, -10, -12, -14, -16, -18, -24.5, -26.5, -28.5, -30.5, -32.5, -34.5, -40.25],
        [1, -1, -3, -5, -7, -9, -17, -19, -21, -23, -25, -27, -32, -34, -36, -38],
    ),
    (1, 0.0): (
        [1, -1, -3, -7, -9, -11, -13, -15, -17, -27, -29, -31, -33, -35, -37, -47],
        [1, -1, -3, -5, -7, -9, -19, -21, -23, -25, -27, -29, -39, -41, -43, -45],
    ),
    (1, 0.5): (
        [1, -1, -3, -6, -8, -10, -12, -14, -16, -21.5, -23.5, -25.5, -27.5, -29.5, -31.5, -35.75],
        [1, -1, -3, -5, -7, -9, -15, -17, -19, -21, -23, -25, -29, -31, -33, -35],
    ),
}


@pytest.mark.parametrize(("delay", "alpha"), TORCHFT)
def test_torchfts_golden_values(delay: int, alpha: float) -> None:
    """Their first fragment is ltx's last: it takes its outer step first."""
    strategy = ltx.DiLoCoStrategy(6, 2.0, 0.0, fragments=2, update_alpha=alpha, fragment_sync_delay=delay)
    step = ltx.data_parallel(lambda p, x: 2 * (p["a"] + p["b"]) + 0 * x, strategy)
    train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=1.0))
    state = train.init({"a": torch.tensor(1.0), "b": torch.tensor(1.0)})
    for time, (first, second) in enumerate(zip(*TORCHFT[delay, alpha], strict=True)):
        assert torch.equal(state.params["b"], torch.full_like(state.params["b"], first)), time
        assert torch.equal(state.params["a"], torch.full_like(state.params["a"], second)), time
        state, _ = ltx.vmap(train, in_dims=(0 if time else None, 0))(state, torch.zeros(2))


AHEAD = ltx.DiLoCoStrategy(6, fragments=2, update_alpha=0.5, fragment_sync_delay=2, outer_hook=hooks.RandomK(0.5))


def ahead(xs: Tensor, folder: Path | None = None) -> Any:
    """(parameters after each step, the last communication state, whether something was under way after each step)

    With a `folder` the state is finished, saved there and loaded after every step.
    """
    train, rank = trainer(AHEAD), int(ltx.axis_index())
    state, history, under_way = train.init(start()), [], []
    for step, x in enumerate(xs[rank]):
        state, _ = train(state, x)
        under_way.append(state.pending is not None)
        history.append({name: p.clone() for name, p in state.params.items()})
        if folder is not None:
            ltx.checkpoint.save(folder / str(step), train.finish(state))
            state = ltx.checkpoint.load(folder / str(step), train.init(start())).state
    return history, ltx.tree.flatten(train.finish(state).sync_state.leaves)[0], under_way


def test_every_backing_and_checkpoint_gives_the_same_bits(ranks: Ranks, tmp_path: Path, seed: int) -> None:
    xs = torch.randn(2, 14)
    plain, saved = ranks(2).run(ahead, xs), ranks(2).run(ahead, xs, tmp_path)
    train = trainer(AHEAD)
    state, simulated = train.init(start()), []
    for step, x in enumerate(xs.T):
        state, _ = ltx.vmap(train, in_dims=(0 if step else None, 0))(state, x)
        simulated.append({name: p.clone() for name, p in state.params.items()})
    for rank, (one, other) in enumerate(zip(plain, saved, strict=True)):
        assert one[2] == [step % 3 != 2 for step in range(14)]
        by_step = ltx.tree.map(lambda x, rank=rank: x[rank], simulated)
        assert_same_bits(one[:2], other[:2], (by_step, [x[rank] for x in ltx.tree.flatten(state.sync_state.leaves)[0]]))


@on_ranks(2)
def test_a_state_that_was_broadcast_has_nothing_under_way() -> None:
    train = trainer(AHEAD, donate=False)
    state, _ = train(train.init(start()), torch.ones(()))
    given = train.broadcast(state)  # whose exchange was each rank's own
    refuses(StrategyError, r"^rank \d: DiLoCoStrategy: the outer gradient of parameter", train.finish, given)
    finished = train.finish(state)
    assert_same_bits(pickle.loads(pickle.dumps(finished)), finished)


def test_parameters_that_dont_fit() -> None:
    with pytest.raises(StrategyError, match=r"fragments must be at most the number of parameters, 4, got 5\."):
        trainer(ltx.DiLoCoStrategy(5, fragments=5)).init(start())
    with pytest.raises(StrategyError, match=r"parameter 'c', complex64\[2\], needs .*: keep its real and imaginary"):
        trainer(ltx.DiLoCoStrategy(5)).init({**start(), "c": torch.zeros(2, dtype=torch.complex64)})


def test_what_doesnt_go_with_sending_ahead() -> None:
    with pytest.raises(
        StrategyError, match=r"^DiLoCoStrategy.fragment_sync_delay needs one collective for each bucket.*ByteGrad"
    ):
        ltx.DiLoCoStrategy(4, fragment_sync_delay=1, outer_hook=hooks.ByteGrad())
    refuses(StrategyError, "needs an update of each bucket by itself", trainer, AHEAD, overlap="update")


def counted() -> Any:
    return ltx.optim.from_functions(
        lambda params: torch.tensor(0), lambda grads, state, params: (grads, state), elementwise=True
    )


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("which chain.* doesn't offer", {"outer": ltx.optim.chain(ltx.optim.clip_by_global_norm(1.0), SGD)}),
        ("which clip_by_global_norm.* doesn't offer", {"outer": ltx.optim.clip_by_global_norm(1.0)}),
        ("which qadam.* doesn't offer", {"outer": ltx.optim.qadam(0.1, warmup_steps=2)}),
        ("so leave out outer_lr=0.5, outer_momentum=0.9", {"outer": SGD, "outer_lr": 0.5}),
        ("keeps whole numbers", {"outer": counted()}),
    ],
)
def test_outer_optimizers_that_dont_fit(text: str, fields: Any) -> None:
    refuses(StrategyError, text, lambda: trainer(ltx.DiLoCoStrategy(2, **fields)).init(start()))
