"""The schedule: buckets overlap with the backward pass and go out in one order, as does work that a hook starts."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import ltx
from ltx.extend import BucketInput, CollectiveRequest, CommHook, Reduction, StartedWork
from tests import inside
from tests.kinds import Params, Ranks
from tests.train_on import in_backward, on_ranks
from tests.twins.phases import InTwoPhases, OftenInTwoPhases

NAMES = ["e", "c", "a", "f", "b", "d"]  # in the order of the forward pass


@dataclass(frozen=True)
class InThreePhases(CommHook):
    """A sum between two that add nothing."""

    phases: ClassVar[int] = 3

    def reduce(self, inputs: BucketInput) -> Reduction:
        zero = yield CollectiveRequest("psum", torch.zeros_like(inputs.flat[:1]))
        total = yield CollectiveRequest("psum", inputs.flat)
        zero = zero + (yield CollectiveRequest("psum", torch.zeros_like(inputs.flat[:2])))[:1]
        return total + zero.sum(), inputs.states


HOOKS: tuple[CommHook, ...] = (ltx.hooks.AllReduce(), InTwoPhases(), OftenInTwoPhases(), InThreePhases())


def delayed(x: Tensor, delay_s: float, log: list[Any] | None = None, name: str = "") -> Tensor:
    """x, whose backward pass takes some milliseconds, so that gradients arrive when they like."""

    def late() -> None:
        time.sleep(delay_s)
        if log is not None:
            log.append((time.perf_counter(), name))

    return in_backward(x, late)


def _params() -> Params:
    return {name: torch.randn(3, 5 + i % 2) for i, name in enumerate(NAMES)}


def _loss(params: Params, rank: Any, delays_s: list[float], log: list[Any], summed: bool) -> Tensor:
    """A loss whose branches, one a parameter, come back after their delays; on rank 1 one of them is left out."""
    total = torch.zeros(())
    for i, (name, w) in enumerate(params.items()):
        if isinstance(rank, int) and rank == 1 and name == "b":
            continue
        used = delayed(w, delays_s[i], log, name) if delays_s else w
        if summed and i % 3 == 0:
            used = ltx.psum(used) / 2
        weight = 1 + rank if name != "b" else (rank != 1) * (1 + rank)
        total = total + torch.sin(used * weight).sum()
    return total


def _strategy(hook: CommHook) -> ltx.DDPStrategy:
    """One bucket a parameter, two in the last."""
    return ltx.DDPStrategy(comm_hook=hook, first_bucket_bytes=60, bucket_bytes=100)


def _gradients(params: Params, hooks: tuple[CommHook, ...], seed: int, summed: bool) -> list[Params]:
    """On one real rank: each hook's gradients, three times, with delays of its own each time."""
    rank = int(ltx.axis_index())
    drawn = random.Random(seed + rank)
    found = []
    for hook in hooks:
        step = ltx.data_parallel(_loss, _strategy(hook))
        for _ in range(3):
            delays_s = [drawn.choice([0.0, 0.002, 0.006]) for _ in NAMES]
            found.append(torch.func.grad(step)(params, rank, delays_s, [], summed))
            leaves = {name: w.clone().requires_grad_() for name, w in params.items()}
            step(leaves, rank, delays_s, [], summed).backward()
            found.append({name: w.grad for name, w in leaves.items()})
    return found


def _simulated(params: Params, hook: CommHook, n: int, summed: bool) -> Params:
    step = ltx.data_parallel(_loss, _strategy(hook))
    return ltx.vmap(lambda p: torch.func.grad(step)(p, ltx.axis_index(), [], [], summed), in_dims=None, axis_size=n)(
        params
    )


def _expected(params: Params, n: int, summed: bool) -> Params:
    """In one process: the mean of gradients. A psum of equal copies is n of them, forward and backward."""

    def mean_loss(params: Params) -> Tensor:
        scaled = {name: w * n / 2 if summed and i % 3 == 0 else w for i, (name, w) in enumerate(params.items())}
        return sum((_loss(scaled, r, [], [], False) for r in range(n)), torch.zeros(())) / n

    return torch.func.grad(mean_loss)(params)


@pytest.mark.full(but=2)
@pytest.mark.parametrize("summed", [False, True], ids=["", "with a psum inside"])
@pytest.mark.parametrize("n", [2, 3])
def test_any_order_of_arrival_on_processes(ranks: Ranks, n: int, summed: bool, seed: int) -> None:
    params = _params()
    want = _expected(params, n, summed)
    for got in ranks(n).run(_gradients, params, HOOKS, seed, summed).replicated():
        torch.testing.assert_close(got, want)


@pytest.mark.full
def test_channels_of_later_phases_open_while_peers_wait(ranks: Ranks, seed: int) -> None:
    """On new axes, where the second and third phase of a hook have no channel yet when the first gradients arrive."""
    params = _params()

    def run() -> list[Params]:
        rank = int(ltx.axis_index())
        drawn = random.Random(seed + rank)
        found = []
        for _ in range(8):
            with inside.new_axis("fresh", range(3), timedelta(seconds=60)) as axis:
                step = ltx.data_parallel(_loss, _strategy(InThreePhases()), axis=axis)
                delays_s = [drawn.choice([0.0, 0.01, 0.03]) for _ in NAMES]
                found.append(torch.func.grad(step)(params, rank, delays_s, [], False))
        return found

    for got in ranks(3).run(run).replicated():
        torch.testing.assert_close(got, _expected(params, 3, False))


@dataclass(frozen=True)
class SaysTwoAsksThree(InThreePhases):
    phases: ClassVar[int] = 2


def test_a_hook_that_asks_for_more_than_it_says(ranks: Ranks) -> None:
    params = _params()

    def run() -> str:
        axis = inside.new_axis("fresh", [0, 1], timedelta(seconds=60))
        step = ltx.data_parallel(_loss, _strategy(SaysTwoAsksThree()), axis=axis)
        with axis, pytest.raises(ltx.errors.LtxError) as caught:
            torch.func.grad(step)(params, int(ltx.axis_index()), [0.0] * len(NAMES), [], False)
        return f"{type(caught.value).__name__}: {caught.value}"

    # Whoever comes to it first tells the other, who may be waiting.
    found = list(ranks(2).run(run))
    assert any(text.startswith("StrategyError") for text in found)
    assert all("asks for more than 2 collectives" in text and "phases" in text for text in found)


def no_derivative(grad: Tensor) -> Tensor:
    raise ZeroDivisionError("no derivative")


@pytest.mark.full(but=2)
@pytest.mark.parametrize("where", list(NAMES))
@pytest.mark.parametrize("how", ["backward", "func.grad", "train_step"])
def test_a_backward_pass_that_one_rank_leaves_halfway(ranks: Ranks, where: str, how: str) -> None:
    """The other is told so, and nothing that comes after pairs with what the pass left behind."""
    params = _params()

    def run() -> tuple[str, list[Params]]:
        axis = inside.new_axis("fresh", [0, 1], timedelta(seconds=60))
        rank = ltx.axis_index(axis)

        def loss(params: Params, fail: bool) -> Tensor:
            squares = {name: (p**2).sum() for name, p in params.items()}
            if fail:
                squares[where].register_hook(no_derivative)
            return sum(squares.values())

        def once(fail: bool, axis: ltx.Axis) -> Params:
            step = ltx.data_parallel(loss, _strategy(ltx.hooks.AllReduce()), axis=axis)
            train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=1.0), donate=False)
            state = train.init(params)
            if how == "train_step":
                after = train(state, fail)[0].params
                return {name: p - after[name] for name, p in params.items()}
            if how == "func.grad":
                return torch.func.grad(step)(params, fail)
            leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
            step(leaves, fail).backward()
            return {name: p.grad for name, p in leaves.items()}

        once(False, axis)
        # Rank 1 waits for the rest of the pass that rank 0 has left, and is told so.
        with pytest.raises(ZeroDivisionError if rank == 0 else ltx.errors.DeadlockDetectedError) as caught:
            once(rank == 0, axis)
        ltx.init()
        again = ltx.axis_from_group([0, 1], "fresh")
        results = [once(False, again), once(False, again)]
        again.close()
        return str(caught.value), results

    (left, results), (waited, others) = ranks(2).run(run)
    assert left == "no derivative"
    what = "step 0 of the training" if how == "train_step" else "a backward pass"
    assert f"rank 1: rank 0 has left {what} on axis 'fresh' halfway" in waited
    torch.testing.assert_close(results, others, rtol=0, atol=0)
    torch.testing.assert_close(results, [{name: 2 * p for name, p in params.items()}] * 2)


@on_ranks(2)
def test_gradients_of_the_batch_alone_leave_the_axis_in_step() -> None:
    step = ltx.data_parallel(lambda p, x: (p["w"] * x).sum())
    p = {"w": torch.ones(3, requires_grad=True)}
    found = []
    for _ in range(3):
        x = torch.full((3,), 1.0 + float(ltx.axis_index()), requires_grad=True)
        found.append(torch.autograd.grad(step(p, x), x)[0])
        found.append(torch.autograd.grad(step(p, x), p["w"])[0])

    torch.testing.assert_close(found, [torch.ones(3), torch.full((3,), 1.5)] * 3)


@pytest.mark.full(but=2)
@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: type(hook).__name__)
@pytest.mark.parametrize("n", [2, 3])
def test_simulated(hook: CommHook, n: int, seed: int) -> None:
    params = _params()
    for summed in (False, True):
        got = _simulated(params, hook, n, summed)
        torch.testing.assert_close(got, {k: g.expand(n, *g.shape) for k, g in _expected(params, n, summed).items()})


@on_ranks(2)
def test_issues_go_out_in_bucket_order_on_each_channel(seed: int) -> None:
    torch.manual_seed(seed)
    step, rank = ltx.data_parallel(_loss, _strategy(InThreePhases())), int(ltx.axis_index())
    delays_s = [0.004 * ((i + rank) % 3) for i in range(len(NAMES))]
    with ltx.profile.record() as trace:
        torch.func.grad(step)(_params(), rank, delays_s, [], False)
    by_channel: dict[str, list[str]] = {}
    for event in trace.events:
        by_channel.setdefault(event.channel, []).append(event.label)
    in_order = [f"bucket {i}" for i in range(len(NAMES))]
    assert by_channel == {"buckets 0": ["summary", *in_order], "buckets 1": in_order, "buckets 2": in_order}


@pytest.mark.parametrize("functional", [True, False], ids=["torch.func.grad", "backward"])
@on_ranks(2)
def test_buckets_are_sent_during_the_backward_pass(functional: bool) -> None:
    """In a chain of layers, each layer's bucket goes out before the layer before it is differentiated."""
    log: list[tuple[float, str]] = []

    def chain(params: Params) -> Tensor:
        x = torch.ones(4)
        for name, w in params.items():
            x = torch.tanh(delayed(x, 0.0, log, name) @ w)
        return x.sum()

    params = {name: torch.eye(4) for name in NAMES}
    step = ltx.data_parallel(chain, ltx.DDPStrategy(first_bucket_bytes=64, bucket_bytes=64))
    with ltx.profile.record() as trace:
        if functional:
            torch.func.grad(step)(params)
        else:
            step({name: w.requires_grad_() for name, w in params.items()}).backward()
    log.extend((event.issued_s, event.label) for event in trace.events)
    seen = [label for _, label in sorted(log)]
    order = [label for i, name in enumerate(reversed(NAMES)) for label in (f"bucket {i}", name)]
    assert [label for label in seen if label != "summary"] == [label for label in order if label in seen]
    assert seen.index("summary") < seen.index("bucket 0")
    assert len([label for label in seen if label.startswith("bucket")]) == len(NAMES)


def test_a_graph_that_is_used_twice(ranks: Ranks) -> None:
    """retain_graph: each backward pass has launches of its own."""

    def run(hook: CommHook) -> list[float]:
        w = torch.tensor([1.0, 2.0], requires_grad=True)
        loss = ltx.data_parallel(lambda w: (w**2).sum() * (1 + ltx.axis_index()), _strategy(hook))(w)
        return [torch.autograd.grad(loss, w, retain_graph=True)[0].sum().item() for _ in range(3)]

    for hook in HOOKS:
        assert ranks(2).run(run, hook).replicated() == [9.0, 9.0, 9.0]


@pytest.mark.full
@pytest.mark.parametrize("hook", [InTwoPhases(), InThreePhases()], ids=["two phases", "three phases"])
def test_two_steps_in_one_loss_whose_hooks_take_several_phases(hook: CommHook, ranks: Ranks, seed: int) -> None:
    """Later phases are issued whenever something is complete; those of one step mustn't pair with the other's."""
    params = [_params(), _params()]

    def loss(p: Params, rank: int, delays_s: list[float]) -> Tensor:
        return sum(
            (torch.sin(delayed(w, d) * (1 + rank)).sum() for w, d in zip(p.values(), delays_s, strict=True)),
            torch.zeros(()),
        )

    def around(p: Params, inner: Params, rank: int, delays_s: list[float]) -> Tensor:
        """Its buckets begin before those of the step inside, and end after them."""
        halves = [{name: w for name, w in p.items() if (name in NAMES[:3]) is first} for first in (True, False)]
        before = loss(halves[0], rank, delays_s[:3])
        inside = ltx.data_parallel(loss, _strategy(hook))(inner, rank, delays_s[3:9])
        return before + inside + loss(halves[1], rank, delays_s[9:])

    def on_rank() -> Any:
        rank = int(ltx.axis_index())
        drawn, found = random.Random(seed + rank), []
        for _ in range(6):
            delays_s = [drawn.choice([0.0, 0.002, 0.006]) for _ in 2 * NAMES]
            step = ltx.data_parallel(around, _strategy(hook))
            found.append(torch.func.grad(step, argnums=(0, 1))(*params, rank, delays_s))
        return found

    expected = [
        {name: sum((1 + r) * torch.cos(w * (1 + r)) for r in range(3)) / 3 for name, w in p.items()} for p in params
    ]
    for found in ranks(3).run(on_rank):
        for grads in found:
            torch.testing.assert_close(list(grads), expected, rtol=1e-5, atol=1e-6)


def test_two_steps_in_one_loss(ranks: Ranks) -> None:
    """Two graphs whose backward passes interleave pair by step, not by arrival."""

    def run(hook: CommHook) -> Tensor:
        rank = int(ltx.axis_index())
        step = ltx.data_parallel(lambda w, k: (w**2).sum() * (1 + ltx.axis_index()) * k, _strategy(hook))

        def both(w: Tensor) -> Tensor:
            return delayed(step(w, 1.0), 0.004 * rank) + delayed(step(2 * w, 10.0), 0.004 * (1 - rank))

        return torch.func.grad(both)(torch.tensor([1.0, 2.0]))

    for hook in HOOKS:
        assert ranks(2).run(run, hook).replicated().tolist() == [3 * 1.0 * (1 + 40), 3 * 2.0 * (1 + 40)]


#: What happened: ("grad", parameter), ("start", bucket) and ("wait", bucket).
LOG: list[tuple[str, Any]] = []


@dataclass
class Doubling:
    """Work of an engine that doubles."""

    flat: Tensor
    bucket: int

    def wait(self) -> None:
        LOG.append(("wait", self.bucket))
        self.flat.mul_(2)


@dataclass(frozen=True)
class Engine(CommHook):
    """Twice the mean: a sum by ltx where there are ranks, then the engine's doubling."""

    last: bool = False  # the sum comes after the doubling

    exact: ClassVar[bool] = False
    phases: ClassVar[int] = 3

    def reduce(self, inputs: BucketInput) -> Reduction:
        flat = inputs.flat
        if inputs.axis_size > 1 and not self.last:
            flat = yield CollectiveRequest("psum", flat)
        LOG.append(("start", inputs.bucket.index))
        flat = yield StartedWork(Doubling(flat, inputs.bucket.index), flat)
        if inputs.axis_size > 1 and self.last:
            flat = yield CollectiveRequest("psum", flat)
        return flat, inputs.states


def loss(order: list[str], params: Params, x: Tensor) -> Tensor:
    for name in order:
        x = torch.tanh(x @ in_backward(params[name], partial(LOG.append, ("grad", name))))
    return x.square().mean()


def trained(hook: CommHook, own_order: bool, seed: int) -> tuple[Params, list[tuple[str, Any]], Params]:
    """The parameters after a step, what happened in it, and the gradients of all ranks' mean loss."""
    generator = torch.Generator().manual_seed(seed)
    params = {name: torch.randn(4, 4, generator=generator) for name in "abcdef"}
    rank, size = int(ltx.axis_index()), int(ltx.axis_size())
    xs = torch.randn(size, 3, 4, generator=generator)
    orders = [list(params) for _ in range(size)]
    for place, order in enumerate(orders):
        if own_order:
            random.Random(seed + place).shuffle(order)
    strategy = ltx.DDPStrategy(comm_hook=hook, bucket_bytes=70, first_bucket_bytes=70)
    step = ltx.data_parallel(lambda p, x: loss(orders[rank], p, x), strategy)
    train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=1.0))
    state = train.init(params)
    state, _ = train(state, xs[rank])
    LOG.clear()
    before = {name: p.clone() for name, p in state.params.items()}
    state, _ = train(state, xs[rank])
    log = list(LOG)
    leaves = {name: p.clone().requires_grad_() for name, p in before.items()}
    total = sum(loss(orders[other], leaves, xs[other]) for other in range(size)) / size
    grads = torch.autograd.grad(total, list(leaves.values()))
    return state.params, log, {name: before[name] - 2 * g for name, g in zip(leaves, grads, strict=True)}


def check(found: Params, log: list[tuple[str, Any]], expected: Params) -> list[str]:
    """Returns what happened, without the names."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    starts = [bucket for what, bucket in log if what == "start"]
    assert len(starts) > 3
    assert starts == sorted(starts), "peers of that engine would start in another order"
    return [what for what, _ in log]


@pytest.mark.parametrize("own_order", [False, True])
def test_in_a_world_of_one(own_order: bool, seed: int) -> None:
    kinds = check(*trained(Engine(), own_order, seed))
    assert "start" not in kinds[kinds.index("wait") :], "a bucket waits for another"
    if not own_order:
        assert "grad" in kinds[kinds.index("start") :], "nothing goes out before the pass is over"


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("own_order", [False, True])
def test_on_two_ranks(own_order: bool, last: bool, ranks: Ranks, seed: int) -> None:
    for found in ranks(2).run(trained, Engine(last), own_order, seed):
        check(*found)


def test_inside_of_another_hook(ranks: Ranks, seed: int) -> None:
    for found in ranks(2).run(trained, ltx.hooks.chain(Engine(), ltx.hooks.AllReduce()), False, seed):
        check(*found)


@pytest.mark.slow_compile
@on_ranks(2)
def test_a_compiled_graph_has_no_node_for_it() -> None:
    step = ltx.data_parallel(lambda p, x: (p * x).sum(), ltx.DDPStrategy(comm_hook=Engine()))
    grads = torch.compile(ltx.grad(step), backend="aot_eager")
    with pytest.raises(Exception, match=r"Engine\(\) starts work of its own, which a compiled graph has no node for"):
        grads(torch.ones(3), torch.ones(3))
