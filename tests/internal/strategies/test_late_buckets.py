"""UpdateThenSend strategies with overlap="update", which send a bucket as soon as its gradients are there.

What they come to is held equal, bit for bit, to what the same strategy does with whole steps.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx.core.training.backward import BackwardResult, UpdateThenSend
from ltx.errors import DeadlockDetectedError, UnsupportedError
from tests import train_on
from tests.contract.strategies.test_failures import BrokenError
from tests.contract.strategies.test_late import LATE, Overlap, adam, loss, problem, trained
from tests.kinds import OnNewAxis, Ranks

IN_BUCKETS = [name for name in LATE if name != "adasum, passes"]
#: Its kernel adds into the gradients that it is given.
NESTEROV = ltx.optim.from_torch(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True)
OF_TWO = [name for name in IN_BUCKETS if LATE[name][0] == 2]


def leaves(state: Any) -> list[Tensor]:
    return [x.clone() for x in ltx.tree.flatten(state)[0]]


def compare(ranks: Ranks, name: str, seed: int, make: Callable[[], ltx.optim.Optimizer] = adam, **more: Any) -> None:
    """Hold "update" equal to "backward", with donation and without, and see that it went by buckets."""
    n, strategy = LATE[name]

    def run(donate: bool, overlap: Overlap) -> tuple[int, list[Tensor]]:
        steps, by_buckets = 0, UpdateThenSend.result

        def counted(late: UpdateThenSend) -> BackwardResult:
            nonlocal steps
            steps += 1
            return by_buckets(late)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(UpdateThenSend, "result", counted)
            tensors = trained(seed, strategy, lambda rank: donate, make(), overlap, **more)
        return steps, tensors

    whole = ranks(n).run(run, True, "backward")
    for donate in (True, False):
        for (never, mine), (steps, other) in zip(whole, ranks(n).run(run, donate, "update"), strict=True):
            assert (never, steps) == (0, 3 if name == "ring now and then" else 5)
            torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.full(but=1)
@pytest.mark.covering(1)
@pytest.mark.parametrize("make", [adam, lambda: NESTEROV])
@pytest.mark.parametrize("name", IN_BUCKETS)
def test_it_comes_to_the_same(name: str, make: Callable[[], ltx.optim.Optimizer], ranks: Ranks, seed: int) -> None:
    compare(ranks, name, seed, make)


def of_samples(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return loss(params, x.view(7)) if x.ndim == 1 else torch.stack([loss(params, one) for one in x]).mean()


def doubled(step: Any) -> Any:
    accumulated = ltx.accumulate(step, 2)
    return ltx.data_parallel(lambda p, x: accumulated.fn(p, torch.stack([x, 2 * x])), step.strategy)


def on_rank_0(params: dict[str, Tensor], x: Tensor) -> ltx.Weighted:
    """Rank 1 has no data."""
    return ltx.Weighted(loss(params, x) * 3, torch.tensor(3.0 * (1 - ltx.world().rank)))


def odd(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """With parameters that are unused on a rank, used twice, and detached."""
    h = x @ params["w"]
    h = h @ params["w"].t() @ params["w"].detach()
    return h.square().sum() + (params["b"].sum() if ltx.world().rank else 0.0)


SCALED = ltx.Precision(compute=torch.float16, loss_scale=64.0)
#: ZeRO sums gradients so, and sends parameters whole.
REDUCED = ltx.Precision(compute=torch.float32, reduce=torch.bfloat16)
STEPS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "micro-batches": ({"fn": of_samples, "wrap": doubled}, OF_TWO),
    "weights": ({"fn": on_rank_0}, ["zero"]),
    "reduced in half precision": ({"wrap": lambda step: ltx.mixed_precision(step, REDUCED)}, ["zero"]),
    "in half precision": ({"wrap": lambda step: ltx.mixed_precision(step, SCALED)}, OF_TWO),
    "odd parameters": ({"fn": odd}, OF_TWO),
}


@pytest.mark.full(but=5)
@pytest.mark.covering(1, of=lambda how, name: (how,))
@pytest.mark.parametrize(("how", "name"), [(how, name) for how, (_, names) in STEPS.items() for name in names])
def test_other_steps_come_to_the_same(how: str, name: str, ranks: Ranks, seed: int) -> None:
    compare(ranks, name, seed, **STEPS[how][0])


@pytest.mark.full(but=1)
@pytest.mark.parametrize("name", ["ring of 2, small buckets", "adasum, small buckets"])
@pytest.mark.parametrize("sockets", [False, True])
def test_a_rank_that_fails_in_the_middle_says_that_its_state_is_invalid(
    name: str, sockets: bool, on_new_axis: OnNewAxis, seed: int
) -> None:
    """Rank 1 fails in its backward pass when buckets have been updated; both go on from rank 0's or a new state."""
    strategy = LATE[name][1]

    def run() -> tuple[str, str, list[Tensor]]:
        params, inputs = problem(2, seed)
        rank, broken = int(ltx.axis_index()), [int(ltx.axis_index()) == 1]

        def fail(_: Tensor) -> None:
            if broken and broken.pop():
                raise BrokenError

        def fragile(params: dict[str, Tensor], x: Tensor) -> Tensor:
            h = x @ params["w"]
            h.register_hook(fail)  # when all gradients are there but that of w
            # A bucket with a parameter that the loss doesn't use would wait for the end of the pass.
            rest = sum(0.0 * x.sum() for x in params.values())
            return (params["scale"] * h).square().sum() + (params["b"] - 1).square().sum() + rest

        train = ltx.train_step(ltx.data_parallel(fragile, strategy), adam(), overlap="update")
        state = train.init(params)
        told = train_on.raised_by(train, state, inputs[0][rank]), train_on.raised_by(lambda: state.params)
        ltx.init()
        return *told, leaves(train_on.go_on(train, train.init(params), inputs[:, rank]).state)

    def undisturbed() -> list[Tensor]:
        params, inputs = problem(2, seed)
        return leaves(train_on.trained(loss, adam(), params, map(train_on.mine, inputs), strategy).state)

    expected = on_new_axis(undisturbed)
    (first, _, mine), (second, held, theirs) = on_new_axis(run, sockets=sockets)
    assert first.startswith("DeadlockDetectedError"), first
    assert second.startswith("BrokenError"), second
    assert held.startswith("InvalidStateError: this TrainState (step 0) is invalid"), held
    for whole, found in zip(expected, (mine, theirs), strict=True):
        torch.testing.assert_close(whole, found, rtol=0, atol=0)


@pytest.mark.parametrize("strategy", [ltx.DDPStrategy(), LATE["ring of 2"][1], LATE["adasum"][1]], ids=repr)
def test_a_sparse_gradient_is_refused(strategy: ltx.Strategy, on_new_axis: OnNewAxis) -> None:
    def run() -> str:
        def embedded(params: dict[str, Tensor], x: Tensor) -> Tensor:
            return torch.nn.functional.embedding(x, params["e"], sparse=True).sum()

        train = ltx.train_step(ltx.data_parallel(embedded, strategy), adam(), overlap="update")
        state = train.init({"e": torch.ones(3, 2)})
        text = train_on.said((UnsupportedError, DeadlockDetectedError), train, state, torch.tensor([0, 2]))
        assert torch.equal(state.params["e"], torch.ones(3, 2))
        return text

    text = (
        r"rank \d: the gradient of leaf 'e' \(shape \[3, 2\]\) has layout torch.sparse_coo, and buckets hold dense ones"
    )
    assert all(re.search(text, told) for told in on_new_axis(run))


@pytest.mark.parametrize("donate", [True, False])
def test_zero_goes_on_from_a_gathered_state(donate: bool, ranks: Ranks, seed: int) -> None:
    """Which is whole on every rank: a step makes its part of it, in memory of its own."""

    def run(overlap: Overlap) -> list[Tensor]:
        params, inputs = problem(2, seed)
        train = ltx.train_step(ltx.data_parallel(loss, LATE["zero"][1]), adam(), overlap=overlap, donate=donate)
        state = train.init(params)
        for x in inputs:
            gathered = train.gather(state)
            whole = [x.detach() for x in ltx.tree.flatten(gathered.opt_state)[0]]
            kept = [x.clone() for x in whole]
            state, _ = train(gathered, x[ltx.world().rank])
            assert all(map(torch.equal, whole, kept))
        assert all(x.untyped_storage().nbytes() == x.nbytes for x in ltx.tree.flatten(state.opt_state)[0])
        return leaves(state)

    for mine, other in zip(ranks(2).run(run, "backward"), ranks(2).run(run, "update"), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)
