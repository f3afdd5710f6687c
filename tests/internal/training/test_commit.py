"""Whatever raises while a step commits, its state is whole, or says that it is invalid."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ltx
from ltx.errors import InvalidStateError
from ltx.typing import Tree
from tests.train_on import on_ranks, refuses, said
from tests.twins.cases import assert_same_bits

SGD = ltx.optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False, fused=False)
FUSED = ltx.optim.from_torch(torch.optim.AdamW, lr=0.1)  # torch doesn't count what its kernel writes


class Oldfashioned(torch.optim.Optimizer):
    """A class that writes to ``param.data``, whose writes torch doesn't count."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-group["lr"])


class AtOperation(TorchDispatchMode):
    """Calls `interrupt` before operation number `place` of a block."""

    def __init__(self, place: int, interrupt: Callable[[], None]):
        super().__init__()
        self.place, self.interrupt = place, interrupt

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.place -= 1
        if self.place == -1:
            self.interrupt()
        return func(*args, **(kwargs or {}))


def _runs_out(*_: Any) -> Any:
    raise MemoryError("no memory")


def _loss(params: Tree, x: Tensor) -> Tensor:
    return ((x @ params["w"] + params["b"]) ** 2).mean()


def _start() -> Tree:
    return {"w": torch.linspace(-1, 1, 6).reshape(3, 2), "b": torch.tensor([0.5, -0.5])}


@contextmanager
def _handled(number: int, error: BaseException | None) -> Iterator[None]:
    def handle(*_: object) -> None:
        if error is not None:
            raise error

    before = signal.signal(number, handle)
    try:
        yield
    finally:
        signal.signal(number, before)


def _steps(optimizer: ltx.optim.Optimizer, x: Tensor, **options: Any) -> tuple[Any, list[list[Tensor]]]:
    """A train step, and the leaves of its states after 0, 1 and 2 steps."""
    train = ltx.train_step(ltx.data_parallel(_loss), optimizer, **options)
    state, found = train.init(_start()), []
    for _ in range(3):
        found.append([leaf.clone() for leaf in ltx.tree.flatten((state.params, state.opt_state))[0]])
        state, _ = train(state, x)
    return train, found


def _cut_short(train: Any, x: Tensor, place: int, interrupt: Callable[[], None]) -> tuple[str, Any, Any]:
    """The second step, cut short: what it raised, the state's step and its leaves; None if the state is invalid."""
    state, _ = train(train.init(_start()), x)
    raised = ""
    try:
        with AtOperation(place, interrupt):
            state, _ = train(state, x)
    except BaseException as error:
        raised = type(error).__name__
    try:
        return raised, state.step, ltx.tree.flatten((state.params, state.opt_state))[0]
    except InvalidStateError:
        return raised, None, None


def _same(mine: list[Tensor], expected: list[Tensor]) -> bool:
    return all(map(torch.equal, mine, expected))


@pytest.mark.parametrize("optimizer", [SGD, FUSED, ltx.optim.from_torch(Oldfashioned)], ids=["SGD", "AdamW", "data"])
@pytest.mark.parametrize("donate", [True, False])
def test_an_error_at_each_operation(donate: bool, optimizer: ltx.optim.Optimizer, seed: int) -> None:
    """One between the first write and the last had left some parameters of the next step, unmarked."""
    x = torch.randn(4, 3)
    train, after = _steps(optimizer, x, donate=donate)
    invalid = 0
    for place in range(1000):
        raised, step, leaves = _cut_short(train, x, place, _runs_out)
        if not raised:
            break
        assert raised == "MemoryError"
        invalid += leaves is None
        assert leaves is None or (step in (1, 2) and _same(leaves, after[step])), place
    assert 20 < place < 999  # all operations of a step have had their turn
    assert (invalid > 0) == donate


@pytest.mark.parametrize(
    ("number", "error", "donate"),
    [
        (signal.SIGINT, KeyboardInterrupt(), True),
        (signal.SIGINT, KeyboardInterrupt(), False),
        (signal.SIGALRM, TimeoutError("an alarm"), True),
        (signal.SIGTERM, SystemExit(143), True),
        (signal.SIGUSR1, None, True),
    ],
)
def test_a_signal_at_each_operation(number: int, error: BaseException | None, donate: bool, seed: int) -> None:
    """Handlers of other signals than Ctrl-C's had raised in the middle of a commit. Each waits until it is over."""
    x = torch.randn(4, 3)
    train, after = _steps(SGD, x, donate=donate)
    steps = set()
    with _handled(number, error):
        for place in range(1000):
            called: list[int] = []

            def interrupt() -> None:
                called.append(1)  # noqa: B023
                signal.raise_signal(number)

            raised, step, leaves = _cut_short(train, x, place, interrupt)
            assert leaves is not None
            assert _same(leaves, after[step]), place
            if not called:
                break
            assert raised == ("" if error is None else type(error).__name__)
            steps.add(step)
        assert signal.getsignal(number).__name__ == "handle"  # type: ignore[union-attr]
    assert steps == ({2} if error is None else {1, 2} if donate else {1})


def test_two_signals_in_one_commit(seed: int) -> None:
    x, came = torch.randn(4, 3), []

    class Signalled(type(SGD)):  # type: ignore[misc]
        def apply(self, *args: Any, **kwargs: Any) -> Any:
            for number in (signal.SIGTERM, signal.SIGALRM):
                signal.raise_signal(number)
            came.append("apply")
            return super().apply(*args, **kwargs)

    train = ltx.train_step(ltx.data_parallel(_loss), Signalled(torch.optim.SGD, 0.1, {}))
    state = train.init(_start())
    numbers = signal.SIGTERM, signal.SIGALRM
    before = [signal.signal(n, lambda n, _: came.append(signal.Signals(n).name)) for n in numbers]
    try:
        state, _ = train(state, x)
    finally:
        for n, handler in zip(numbers, before, strict=True):
            signal.signal(n, handler)
    assert (came[0], sorted(came[1:])) == ("apply", ["SIGALRM", "SIGTERM"])


@on_ranks(2)
def test_an_error_after_the_first_write_by_bucket() -> None:
    """With ``overlap="update"``: the state says that it is invalid even if what cleans up raises too."""
    x = torch.randn(4, 3)
    train = ltx.train_step(ltx.data_parallel(_loss), SGD, overlap="update")
    state, _ = train(train.init(_start()), x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ltx.core.gradients.pending.ProcessSchedule.abandon", _runs_out)
        patch.setattr(type(SGD), "update_leaves", _runs_out)
        said(MemoryError, train, state, x)
    refuses(InvalidStateError, r"\(step 1\) is invalid", lambda: state.params)


@pytest.mark.full(but=1)
@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("strategy", [ltx.DDPStrategy(), ltx.ZeroStrategy()])
@on_ranks(2)
def test_between_the_last_bucket_and_the_next_state(strategy: ltx.Strategy, donate: bool) -> None:
    """With overlap="update" all parameters have their new values there, and nothing else has: the state is invalid."""

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    train = ltx.train_step(ltx.data_parallel(_loss, strategy), SGD, overlap="update", donate=donate)
    state, x = train.init(_start()), torch.ones(4, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["ltx.core.training.guard"], "measured", interrupted)
        said(KeyboardInterrupt, train, state, x)
    if donate:
        refuses(InvalidStateError, "all buckets had been updated in place", lambda: state.params)
    else:
        assert_same_bits(dict(state.params), _start())
    ltx.init()
    train(train.init(_start()), x)
