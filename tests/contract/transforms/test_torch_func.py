"""Transforms around a data-parallel step that conformance can't say. All but forward mode are linear in the step.

So what every rank gets is the mean over ranks of what the transform makes of the plain step on each rank's batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev, jvp, vmap

import ltx
from ltx.errors import DeadlockDetectedError, RankMismatchError
from tests.kinds import OnNewAxis, Ranks
from tests.train_on import on_ranks, said
from tests.twins.cases import (
    CASES,
    Batch,
    Case,
    Params,
    assert_close,
    assert_same_bits,
    backward,
    params_of,
    plain_step,
    seeded,
)
from tests.twins.feedback import STRATEGY

F = Callable[..., Any]


@dataclass(frozen=True)
class Transform:
    """``apply(step, params, x, y)``.

    Attributes:
        vectors: of a step that gives one loss a sample.
        plain: by plain autograd, which can't run inside of vmap.
        local: what each rank gets is its own.
    """

    apply: Callable[..., Any]
    vectors: bool = False
    plain: bool = False
    local: bool = False


def produced(f: F, p: Params, *batch: Tensor) -> Tensor:
    return grad(lambda z: f({name: w * z.sum() + z[0] for name, w in p.items()}, *batch))(batch[0].new_tensor([0.5, 2]))


def produced_backward(f: F, p: Params, *batch: Tensor) -> Tensor:
    z = batch[0].new_tensor([0.5, 2]).requires_grad_()
    f({name: w * z.sum() + z[0] for name, w in p.items()}, *batch).backward()
    return z.grad


def in_inference_mode(transform: F) -> F:
    def apply(f: F, p: Params, *batch: Tensor) -> Any:
        with torch.inference_mode():
            return transform(f)(p, *batch)

    return apply


TRANSFORMS = {
    "grad in inference mode": Transform(in_inference_mode(grad)),
    "jacrev of a vector in inference mode": Transform(in_inference_mode(jacrev), vectors=True),
    "jacrev of a vector": Transform(lambda f, p, *b: jacrev(f)(p, *b), vectors=True),
    "jacrev in chunks": Transform(lambda f, p, *b: jacrev(f, chunk_size=1)(p, *b), vectors=True),
    "hvp, forward over reverse, of one leaf": Transform(
        lambda f, p, *b: jvp(lambda w: grad(f)(p | {"3.bias": w}, *b), (p["3.bias"],), (torch.ones_like(p["3.bias"]),))
    ),
    "jvp of one leaf": Transform(
        lambda f, p, *b: jvp(lambda w: f(p | {"3.bias": w}, *b), (p["3.bias"],), (torch.ones_like(p["3.bias"]),)),
        local=True,
    ),
    "two steps in one loss": Transform(lambda f, p, x, y: grad(lambda p: f(p, x, y) * f(p, -x, y))(p)),
    "two steps in one loss, backward": Transform(
        lambda f, p, x, y: backward(lambda p: f(p, x, y) * f(p, -x, y), p), plain=True
    ),
    "produced parameters": Transform(produced),
    "produced parameters, backward": Transform(produced_backward, plain=True),
}


def of_samples(step: F) -> F:
    return lambda params, x, y: torch.stack([step(params, x[i : i + 1], y[i : i + 1]) for i in range(len(x))])


def build(name: str, seed: int) -> tuple[F, F, Params, list[Batch]]:
    """(the plain step, the data-parallel one, parameters, batches of two ranks), in float64."""
    transform = TRANSFORMS[name]
    module, batches = CASES["mlp"].build(seed, 2)
    step = plain_step(module.double())
    step = of_samples(step) if transform.vectors else step
    wrapped = ltx.data_parallel(step, ltx.DDPStrategy(bucket_bytes=128, first_bucket_bytes=16))
    return step, wrapped, params_of(module), [(x.double(), y.double()) for x, y in batches]


def on_a_rank(name: str, seed: int) -> Any:
    _, step, params, batches = build(name, seed)
    return TRANSFORMS[name].apply(step, params, *batches[ltx.world().rank])


def expected(name: str, seed: int) -> list[Any]:
    step, _, params, batches = build(name, seed)
    alone = [TRANSFORMS[name].apply(step, params, *batch) for batch in batches]
    return alone if TRANSFORMS[name].local else [ltx.tree.map(lambda *xs: sum(xs) / 2, *alone)] * 2


@pytest.mark.full(but=2)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_real_ranks(name: str, ranks: Ranks, seed: int) -> None:
    results = ranks(2).run(on_a_rank, name, seed)
    for got, wanted in zip(results, expected(name, seed), strict=True):
        assert_close(got, wanted, 1e-12)
    if not TRANSFORMS[name].local:
        results.replicated()


@pytest.mark.full(but=2)
@pytest.mark.parametrize("name", [name for name, transform in TRANSFORMS.items() if not transform.plain])
def test_simulated_ranks(name: str, seed: int) -> None:
    _, step, params, batches = build(name, seed)
    stacked = [torch.stack(parts) for parts in zip(*batches, strict=True)]
    results = ltx.vmap(lambda *batch: TRANSFORMS[name].apply(step, params, *batch))(*stacked)
    for rank, wanted in enumerate(expected(name, seed)):
        assert_close(ltx.tree.map(lambda g, rank=rank: g[rank], results), wanted, 1e-12)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_world_of_one(name: str, seed: int) -> None:
    plain, step, params, (batch, _) = build(name, seed)
    assert_same_bits(*(TRANSFORMS[name].apply(f, params, *batch) for f in (plain, step)))


W, X = torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 2.0], [3.0, 5.0]])
MEAN = X.mean(0).tolist()


def with_aux(w: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return (w * x).sum(), {"seen": x.sum()}


def test_on_a_plain_step_they_are_torchs() -> None:
    def plain(w: Tensor, x: Tensor) -> Tensor:
        return (w * x).square().sum()

    for mine, torchs in ((ltx.grad, torch.func.grad), (ltx.grad_and_value, torch.func.grad_and_value)):
        assert_same_bits(mine(plain)(W, X[0]), torchs(plain)(W, X[0]))
        assert_same_bits(mine(plain, argnums=(1, 0))(W, X[0]), torchs(plain, argnums=(1, 0))(W, X[0]))
        assert_same_bits(mine(with_aux, has_aux=True)(W, X[0]), torchs(with_aux, has_aux=True)(W, X[0]))


def test_aux_is_the_ranks_own() -> None:
    step = ltx.data_parallel(with_aux)
    grads, (loss, aux) = ltx.vmap(ltx.grad_and_value(step, has_aux=True), in_dims=(None, 0))(W, X)
    assert (grads.tolist(), loss.tolist(), aux["seen"].tolist()) == ([MEAN] * 2, [5.0, 13.0], [3.0, 8.0])
    grads, aux = ltx.vmap(ltx.grad(step, has_aux=True), in_dims=(None, 0))(W, X)
    assert (grads.tolist(), aux["seen"].tolist()) == ([MEAN] * 2, [3.0, 8.0])


@pytest.mark.parametrize("strategy", [ltx.DDPStrategy(), STRATEGY], ids=["stateless", "stateful"])
def test_aux_and_state(strategy: ltx.Strategy) -> None:
    step = ltx.data_parallel(with_aux, strategy)
    (grads, state), (loss, aux) = ltx.grad_and_value(step, has_aux=True)(W, X[0], sync_state=step.init(W))
    assert (grads.tolist(), loss.item(), aux["seen"].item(), state.step) == (X[0].tolist(), 5.0, 3.0, 1)
    (grads, state), aux = ltx.grad(step, has_aux=True)(W, X[0], sync_state=state)
    assert (grads.tolist(), aux["seen"].item(), state.step) == (X[0].tolist(), 3.0, 2)


# Between processes, where plain autograd takes the gradients unless something is around the call.
def torchs(step: Any, params: Any, *args: Any, sync_state: ltx.SyncState | None = None) -> Any:
    """What :func:`ltx.grad_and_value` gives, by torch.func."""
    if sync_state is None:
        return torch.func.grad_and_value(step)(params, *args)
    synced, value = torch.func.grad_and_value(step)(ltx.Synced(params, sync_state), *args)
    return (synced.params, replace(synced.sync_state, clock=sync_state.clock, step=sync_state.step + 1)), value


@pytest.mark.full(but=1)
@pytest.mark.covering(1)
@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items() if case.transforms])
@pytest.mark.parametrize("strategy", [ltx.DDPStrategy(), STRATEGY], ids=["stateless", "stateful"])
@on_ranks(2)
def test_they_are_torch_funcs_to_the_bit(strategy: ltx.Strategy, case: Case, seed: int) -> None:
    module, batches = case.build(seed, 2)
    params, batch, rank = params_of(module), batches[int(ltx.axis_index())], int(ltx.axis_index())
    step = ltx.data_parallel(plain_step(module), strategy)
    state = step.init(params) if strategy is STRATEGY else None
    for number in range(3):
        with seeded(seed + rank):
            mine = ltx.grad_and_value(step)(params, *batch, sync_state=state)
        with seeded(seed + rank):
            assert_same_bits(mine, torchs(step, params, *batch, sync_state=state))
        assert not any(x.requires_grad or type(x) is not torch.Tensor for x in ltx.tree.flatten(mine)[0])
        if state is not None:
            state = mine[0][1]
            assert state.step == state.checked_step() == number + 1


@on_ranks(2)
def test_what_is_differentiated_besides_keeps_its_gradient() -> None:
    """Arguments that require gradients, a level of torch.func around, tangents: torch.func's way."""
    step = ltx.data_parallel(lambda w, x: (w * x).square().sum())
    w, x = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]) + int(ltx.axis_index())
    mean = (torch.tensor([1.0, 3.0]).square() + torch.tensor([2.0, 4.0]).square()) / 2
    assert torch.equal(ltx.grad(step)(w, x), 2 * w * mean)
    tracked = x.clone().requires_grad_()
    ltx.grad(step)(w, tracked).sum().backward()
    assert tracked.grad is not None
    assert torch.equal(torch.func.jacrev(ltx.grad(step))(w, x), torch.diag(2 * mean))
    assert torch.equal(torch.func.jvp(lambda w: ltx.grad(step)(w, x), (w,), (torch.ones(2),))[1], 2 * mean)


@on_ranks(2)
def test_no_parameters_at_all() -> None:
    step = ltx.data_parallel(lambda p, x: x.sum())
    assert [ltx.grad_and_value(step)({}, W)[0], torch.func.grad_and_value(step)({}, W)[0]] == [{}, {}]


@on_ranks(2)
def test_aux_in_processes_has_no_graph() -> None:
    step = ltx.data_parallel(lambda w, x: ((w * x).sum(), {"product": w * x, "name": "x"}))
    grads, (loss, aux) = ltx.grad_and_value(step, has_aux=True)(W, X[int(ltx.axis_index())])
    assert (grads.tolist(), aux["name"], aux["product"].requires_grad) == (MEAN, "x", False)
    assert loss == aux["product"].sum() == (5.0, 13.0)[int(ltx.axis_index())]


def test_none_among_parameters_is_an_empty_node() -> None:
    """As Equinox's partition leaves it; to torch.func None is a leaf."""
    params, x = {"w": W, "frozen": None, "deep": [None, torch.tensor(3.0)]}, W

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return (params["w"] * x).sum() * params["deep"][1]

    right = {"w": torch.tensor([3.0, 6.0]), "frozen": None, "deep": [None, torch.tensor(5.0)]}
    step = ltx.data_parallel(loss)
    stateful = ltx.data_parallel(loss, ltx.DDPStrategy(comm_hook=ltx.hooks.PowerSGD(1)))
    simulated = ltx.tree.map(lambda g: g[0], ltx.vmap(lambda x: ltx.grad(step)(params, x))(torch.stack([x, x])))
    by_both, value = ltx.grad_and_value(loss, argnums=(-2, 1))(params, x)
    found = [ltx.grad(loss)(params, x), ltx.grad(step)(params, x), by_both[0], simulated]
    found.append(ltx.grad(stateful)(params, x, sync_state=stateful.init(params))[0])
    torch.testing.assert_close([ltx.tree.flatten(each)[0] for each in found], [ltx.tree.flatten(right)[0]] * 5)
    assert all(ltx.tree.flatten(each)[1] == ltx.tree.flatten(right)[1] for each in found)
    torch.testing.assert_close((by_both[1], value), (3 * params["w"], torch.tensor(15.0)))


step = ltx.data_parallel(lambda w, x: (w * x).sum())


def batched(w: Tensor, x: Tensor) -> Any:
    w = w.clone().requires_grad_()
    values = ltx.data_parallel(lambda w, x: x @ w)(w, x)
    return torch.autograd.grad(values, w, torch.eye(len(x)), is_grads_batched=True)[0]


WAYS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "torch.func.grad": lambda w, x: vmap(grad(step), in_dims=(None, 0))(w, x),
    "ltx.grad": lambda w, x: vmap(ltx.grad(step), in_dims=(None, 0))(w, x),
    "is_grads_batched": batched,
    "sync_gradients": lambda w, x: vmap(lambda x: ltx.sync_gradients(x)[0])(x),
    "fp16": lambda w, x: vmap(grad(ltx.data_parallel(step.fn, ltx.DDPStrategy(comm_hook="fp16"))), (None, 0))(w, x),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("width", [3, 70_000])
@pytest.mark.full(but=6)
@pytest.mark.parametrize("known", ["", "known", "known, over sockets"])
def test_unequal_numbers_of_samples_are_refused(way: str, width: int, known: str, on_new_axis: OnNewAxis) -> None:
    """Gradients of other samples, or half of one's own, were taken for means; large ones waited for ever.

    `known`: ranks have taken both numbers of samples before.
    """

    def run() -> str:
        for count in (2, 5) * (2 * bool(known)):
            WAYS[way](torch.ones(width), torch.ones(count, width))
        samples = torch.ones(2 + 3 * int(ltx.axis_index()), width)
        errors = RankMismatchError if known != "known" else (RankMismatchError, DeadlockDetectedError)  # a peer's
        return said(errors, WAYS[way], torch.ones(width), samples)

    for text in on_new_axis(run, sockets=known == "known, over sockets"):
        if known == "":
            assert "bucket 0 of a backward pass, its arguments: rank 0: [2] samples; rank 1: [5] samples" in text
        elif known == "known":
            assert "a peer has issued another collective here" in text  # shared memory compares what is issued
        else:
            assert "ranks disagree on what they call, and wait for each other" in text


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_equal_numbers(way: str) -> None:
    """One pass after the other, of other numbers: equal to the mean of both ranks' samples."""
    ones = [torch.ones(count, 2) * (1 + 2 * int(ltx.axis_index())) for count in (3, 1, 3)]

    for got, count in zip([WAYS[way](torch.ones(2), x) for x in ones], (3, 1, 3), strict=True):
        torch.testing.assert_close(got, torch.full((count, 2), 2.0))
