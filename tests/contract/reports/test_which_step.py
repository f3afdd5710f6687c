"""Ranks that are at different steps: the first step apart raises on all of them, and says who left what, and why."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx.errors import CallFailedError, LtxError
from ltx.typing import Tree
from tests.kinds import Ranks
from tests.train_on import on_ranks, refuses

LR, STEPS, BROKEN = 0.1, 6, 2


@dataclass(frozen=True)
class BreaksOnce(ltx.optim.Optimizer):
    """SGD, which raises once before it has written anything, in its update number BROKEN."""

    left: list[int]

    def init(self, params: Tree) -> Tree:
        return {"count": torch.zeros((), dtype=torch.long)}

    def update(self, grads: Tree, state: Tree, params: Tree, *, donate: bool = False) -> tuple[Tree, Tree]:
        if self.left and int(state["count"]) == BROKEN:
            self.left.pop()
            raise MemoryError("no memory for the update")
        return ltx.tree.map(lambda g: -LR * g, grads), {"count": state["count"] + 1}


def _batches(seed: int, rank: int) -> Tensor:
    return torch.randn(STEPS + 2, 4, generator=torch.Generator().manual_seed(seed + rank))


def _alone(seed: int, skipped: set[int]) -> float:
    """One process on the batches of both ranks, where those of `skipped` are left out on both."""
    w = torch.tensor(0.5, requires_grad=True)
    for i in (i for i in range(STEPS) if i not in skipped):
        x = torch.cat([_batches(seed, rank)[i] for rank in (0, 1)])
        ((w * x - 1) ** 2).mean().backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            w -= LR * w.grad  # type: ignore[operator]
        w.grad = None
    return w.item()


def _loss(w: Tensor, x: Tensor, fails: bool = False, later: bool = False) -> Tensor:
    if fails and not later:
        raise torch.OutOfMemoryError("no memory for the batch")
    error = w * x - 1
    if fails:
        error.register_hook(_raises)
    return (error**2).mean()


def _raises(grad: Tensor) -> None:
    raise MemoryError(f"no memory for pass {BROKEN}")


def _train(seed: int, where: str, **options: Any) -> tuple[list[str], int, float, Tensor]:
    """STEPS batches, where rank 1 fails at BROKEN; what raised, the step and the parameter, and the same shared again.

    The loop skips a batch that raises, in a new world, and gives up when it has been told at two steps.
    """
    rank = int(ltx.axis_index())
    patience = 2
    step = ltx.data_parallel(_loss, options.pop("strategy", None))
    fails_later = where == "update" and rank == 1
    sgd = ltx.optim.from_torch(torch.optim.SGD, lr=LR)
    train = ltx.train_step(step, BreaksOnce([0] * fails_later) if where == "update" else sgd, **options)
    state = train.init(torch.tensor(0.5))
    said: list[str] = []
    for i in range(STEPS):
        try:
            state, _ = train(state, _batches(seed, rank)[i], where == "forward" and (rank, i) == (1, BROKEN))
        except (MemoryError, torch.OutOfMemoryError, LtxError) as error:
            said.append(f"{type(error).__name__}: {error}")
            ltx.init()
            if len(said) == patience:
                break
    at, w = state.step, state.params.item()
    for i in (STEPS, STEPS + 1):
        state, _ = train(train.broadcast(state), _batches(seed, rank)[i])
    return said, at, w, state.params


@pytest.mark.parametrize("options", [{}, {"overlap": "update"}, {"guard": "skip"}, {"donate": False}], ids=str)
def test_a_forward_pass_that_fails_on_one_rank_is_left_on_all(options: Any, ranks: Ranks, seed: int) -> None:
    """Its next step had been averaged with its peers' current one, to the end of the epoch."""
    (waited, *theirs), (failed, *mine) = ranks(2).run(_train, seed, "forward", **options)
    assert failed == ["OutOfMemoryError: no memory for the batch"]
    assert [text[:56] for text in waited] == ["DeadlockDetectedError: rank 0: rank 1 has left step 2 of"]
    assert "(OutOfMemoryError: no memory for the batch)" in waited[0]
    assert theirs[:2] == mine[:2]
    assert theirs[0] == STEPS - 1
    torch.testing.assert_close(theirs[1], _alone(seed, {BROKEN}), rtol=1e-5, atol=1e-6)


def test_an_update_that_fails_on_one_rank_parts_them_once(ranks: Ranks, seed: int) -> None:
    """Rank 0 had ended a step ahead, and all later gradients were means over different models."""
    (ahead, at, _, after), (behind, at_1, _, after_1) = ranks(2).run(_train, seed, "update")
    assert (at, at_1) == (BROKEN + 1, BROKEN)
    assert behind[0] == "MemoryError: no memory for the update"
    assert ahead[0].startswith("DeadlockDetectedError: rank 0: rank 1 has left step 2 of the training on axis 'data'")
    assert "(MemoryError: no memory for the update)" in ahead[0]
    assert "Go on there from a state that all ranks share, by train.broadcast(state)" in ahead[0]
    for text in (ahead[1], behind[1]):  # whoever goes on all the same is told in the new world too
        assert text.startswith("ReplicaDivergedError: axis 'data': leaf 'params' (float32[]) should be the same on ")
        assert "3 more: 'opt_state.count', 'step', 'updates'" in text
    assert after.equal(after_1)


def test_a_state_of_an_earlier_step_on_one_rank(ranks: Ranks, seed: int) -> None:
    """Nothing has raised in a step: a loop that takes over the next state after its logging, which failed once."""

    def run() -> None:
        rank = int(ltx.axis_index())
        train = ltx.train_step(ltx.data_parallel(_loss), BreaksOnce([]), donate=False)
        state = train.init(torch.tensor(0.5))
        for i in range(3):
            following, _ = train(state, _batches(seed, rank)[i])
            if (rank, i) != (1, 1):
                state = following

    refuses(CallFailedError, r"rank 0 is at step 2; rank 1 is at step 1\. Gradients", ranks(2).run, run)


def _compiled(seed: int, backend: str, weighted: bool) -> tuple[list[str], int, Tensor]:
    """Compiled steps, where rank 1 doesn't take over the state after BROKEN; all go on from rank 0's."""
    torch._dynamo.reset()
    rank, said = int(ltx.axis_index()), list[str]()

    def loss(w: Tensor, x: Tensor) -> Any:
        return ltx.Weighted(_loss(w, x) * len(x), len(x)) if weighted else _loss(w, x)

    train = ltx.train_step(ltx.data_parallel(loss), ltx.optim.from_torch(torch.optim.SGD, lr=LR))
    step, state = torch.compile(train, fullgraph=True, backend=backend), train.init(torch.tensor(0.5))
    for i in range(STEPS):
        try:
            following, metrics = step(state, _batches(seed, rank)[i])
        except LtxError as error:
            said.append(f"{type(error).__name__}: {error}")
            state = train.broadcast(state)
            continue
        if i == 0:
            both = torch.cat([_batches(seed, r)[0] for r in (0, 1)])
            torch.testing.assert_close(metrics.loss, _loss(torch.tensor(0.5), both))
        if (rank, i) != (1, BROKEN):
            state = following
    return said, state.step, state.params


@pytest.mark.slow_compile
@pytest.mark.full(but=1)
@pytest.mark.parametrize(("backend", "weighted"), [("eager", False), ("aot_eager", True), ("inductor", False)])
def test_compiled_steps(backend: str, weighted: bool, ranks: Ranks, seed: int) -> None:
    """Ranks had averaged gradients at different parameters, to the end."""
    (said, at, w), (said_1, at_1, w_1) = ranks(2).run(_compiled, seed, backend, weighted)
    assert said == said_1
    (text,) = said
    assert text.startswith(
        "ReplicaDivergedError: axis 'data': ranks are at different steps of the training: rank 0 is at step 3; rank 1 "
        "is at step 2. Gradients of different parameters have no mean. Nothing of this step was applied."
    )
    assert (at, at_1) == (STEPS - 1, STEPS - 1)
    assert w.equal(w_1)
    torch.testing.assert_close(w.item(), _alone(seed, {BROKEN + 1}), rtol=1e-5, atol=1e-6)


FAILING: list[int] = []


@dataclass(frozen=True)
class RaisesOnce(ltx.hooks.CommHook):
    """An exact mean, which raises in the backward pass of the batches in FAILING."""

    reach = "element"

    def reduce(self, inputs: Any) -> Any:
        if FAILING:
            raise MemoryError(f"no memory for pass {FAILING.pop()}")
        return ltx.hooks.AllReduce().reduce(inputs)


def _plain(seed: int, handles: str, how: str) -> tuple[list[str], float]:
    """A loop of plain steps, whose forward or backward pass fails on rank 1 at BROKEN, which the loop leaves out."""
    rank, said, later = int(ltx.axis_index()), list[str](), handles == "in its own backward pass"
    step = ltx.data_parallel(_loss, ltx.DDPStrategy(comm_hook=RaisesOnce()))
    w = torch.tensor(0.5, requires_grad=how == "backward")
    for i in range(STEPS):
        x, fails = _batches(seed, rank)[i], (rank, i) == (1, BROKEN)
        if fails and handles == "in the backward pass":
            FAILING.append(i)
            fails = False
        if rank == 0:  # evaluates alone, as it may: with and without gradients
            step(w, x)
            torch.no_grad()(step)(w, x)
        try:
            loss = step(w, x, fails, later) if how == "backward" else None
            ok = True
        except torch.OutOfMemoryError as error:
            said.append(f"{type(error).__name__}: {error}")
            if handles == "alone":
                ltx.init()
                continue
            ok = False
        if handles == "together" and not ltx.pmin(torch.tensor(int(ok))):
            continue
        try:
            if loss is None:
                grad = ltx.grad(step)(w, x, fails, later)
            else:
                loss.backward()
                grad, w.grad = w.grad, None
        except (MemoryError, torch.OutOfMemoryError, LtxError) as error:
            said.append(f"{type(error).__name__}: {error}")
            w.grad = None
            ltx.init()
            continue
        with torch.no_grad():
            w -= LR * grad
    return said, w.item()


@pytest.mark.parametrize("how", ["backward", "ltx.grad"])
@pytest.mark.parametrize("where", ["alone", "in the backward pass", "in its own backward pass"])
def test_a_plain_step_that_one_rank_leaves_out(where: str, how: str, ranks: Ranks, seed: int) -> None:
    """Its peers hear of it once, and leave it out too: their next one is its next one."""
    (waited, w), (failed, w_1) = ranks(2).run(_plain, seed, where, how)
    why = "MemoryError: no memory for pass 2" if where != "alone" else "OutOfMemoryError: no memory for the batch"
    assert failed == [why]
    what = "a forward pass" if where == "alone" else "a backward pass"
    if (where, how) == ("in its own backward pass", "backward"):
        why = "something was raised in it"
    assert [text.partition(" The world")[0] for text in waited] == [
        f"DeadlockDetectedError: rank 0: rank 1 has left {what} on axis 'data' halfway ({why}), so what this rank "
        "waits for won't come."
    ]
    assert w == w_1
    torch.testing.assert_close(w, _alone(seed, {BROKEN}), rtol=1e-5, atol=1e-6)


def test_a_forward_pass_of_a_plain_step_that_all_skip(ranks: Ranks, seed: int) -> None:
    """As ranks do that ask each other whether all went well. Nothing is apart then, and nothing raises."""
    (said, w), (said_1, w_1) = ranks(2).run(_plain, seed, "together", "backward")
    assert (said, said_1) == ([], ["OutOfMemoryError: no memory for the batch"])
    assert w == w_1
    torch.testing.assert_close(w, _alone(seed, {BROKEN}), rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_a_trial_on_one_rank_before_training(seed: int) -> None:
    """Rank 1 tries a batch that is too large, before the training that all begin."""
    step, rank = ltx.data_parallel(_loss), int(ltx.axis_index())
    with suppress(torch.OutOfMemoryError):
        step(torch.tensor(0.5, requires_grad=True), _batches(seed, rank)[0], rank == 1)
    train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=LR))
    state, _ = train(train.init(torch.tensor(0.5)), _batches(seed, rank)[0])
    assert state.step == 1


def _agreeing(seed: int, where: str) -> tuple[list[str], int, float]:
    """Ranks ask each other after each step whether it went well on all, and go on from rank 0's state if not."""
    rank, said = int(ltx.axis_index()), list[str]()
    breaks = BreaksOnce([0] * (where == "update" and rank == 1))
    train = ltx.train_step(ltx.data_parallel(_loss), breaks)
    state = train.init(torch.tensor(0.5))
    for i in range(STEPS):
        ok = 1
        try:
            state, _ = train(state, _batches(seed, rank)[i], where == "forward" and (rank, i) == (1, BROKEN))
        except (MemoryError, torch.OutOfMemoryError, LtxError) as error:
            said.append(type(error).__name__)
            ltx.init()
            ok = 0
        try:
            all_ok = ltx.pmin(torch.tensor(ok))
        except LtxError as error:  # a peer has failed after this rank had all that it needed
            said.append(type(error).__name__)
            ltx.init()
            all_ok = ltx.pmin(torch.tensor(0))
        if not all_ok:
            state = train.broadcast(state, src=1)
    return said, state.step, state.params.item()


@pytest.mark.parametrize("where", ["forward", "update"])
def test_ranks_that_agree_after_each_step(where: str, ranks: Ranks, seed: int) -> None:
    found = list(ranks(2).run(_agreeing, seed, where))
    why = "OutOfMemoryError" if where == "forward" else "MemoryError"
    assert [said for said, *_ in found] == [["DeadlockDetectedError"], [why]]
    assert found[0][1:] == found[1][1:]
    torch.testing.assert_close(found[0][2], _alone(seed, {BROKEN}), rtol=1e-5, atol=1e-6)
