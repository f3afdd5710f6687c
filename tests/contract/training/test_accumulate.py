"""accumulate: the same numbers as the whole batch, one synchronisation, one micro-batch's graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar
from weakref import WeakSet

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, jvp

import ltx
from ltx.errors import StepError, UnsupportedError
from tests.contract.reports.test_magnitudes import by_backward
from tests.kinds import Ranks
from tests.train_on import refuses, said, trained
from tests.twins.cases import CASES, FUNC_WAYS, WAYS, Params, assert_close, gradient, params_of, plain_step, seeded

BUCKETS = ltx.DDPStrategy(bucket_bytes=128, first_bucket_bytes=16)
NESTINGS: dict[str, Callable[[Any, int], Any]] = {
    "outside": lambda f, k: ltx.accumulate(ltx.data_parallel(f, BUCKETS), k),
    "inside": lambda f, k: ltx.data_parallel(ltx.accumulate(f, k), BUCKETS),
}


def on_a_rank(nesting: str, way: str, steps: int, seed: int) -> tuple[Params, list[list[Any]]]:
    """(gradients, what was issued for them, what is issued without accumulation)"""
    module, batches = CASES["mlp"].build(seed, 2)
    issued = []
    for step in (ltx.data_parallel(plain_step(module), BUCKETS), NESTINGS[nesting](plain_step(module), steps)):
        with ltx.profile.record() as trace:
            grads = WAYS[way](step, params_of(module), *batches[ltx.world().rank])
        issued.append([(event.label, event.channel, event.nbytes) for event in trace.events])
    return grads, issued


@pytest.mark.covering(1)
@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("nesting", NESTINGS)
def test_equal_to_the_whole_batch_with_one_synchronisation(
    nesting: str, way: str, steps: int, ranks: Ranks, seed: int
) -> None:
    grads, issued = ranks(2).run(on_a_rank, nesting, way, steps, seed).replicated()
    module, batches = CASES["mlp"].build(seed, 2)
    assert_close(grads, gradient(module, CASES["mlp"].loss(module, batches)))
    assert issued[0] == issued[1]
    assert [label for label, *_ in issued[0]] == ["summary", "bucket 0", "bucket 1", "bucket 2"]


@pytest.mark.parametrize("way", FUNC_WAYS)
@pytest.mark.parametrize("nesting", NESTINGS)
def test_simulated(nesting: str, way: str, seed: int) -> None:
    module, batches = CASES["mlp"].build(seed, 3)
    step = NESTINGS[nesting](plain_step(module), 2)
    params, stacked = params_of(module), [torch.stack(parts) for parts in zip(*batches, strict=True)]
    grads = ltx.vmap(lambda *batch: FUNC_WAYS[way](step, params, *batch))(*stacked)
    expected = gradient(module, CASES["mlp"].loss(module, batches))
    for rank in range(3):
        assert_close({name: g[rank] for name, g in grads.items()}, expected)


#: What the table of conformance can't say of an accumulated step.
TRANSFORMS: dict[str, Callable[..., Any]] = {
    "gradient of the batch": lambda f, p, *b: grad(f, argnums=1)(p, *b),
    "gradients of both": lambda f, p, *b: grad(f, argnums=(0, 1))(p, *b),
    "vmap of grad": lambda f, p, x, y: torch.vmap(grad(f), (None, 0, 0))(p, torch.stack([x, -x]), torch.stack([y, y])),
}


@pytest.mark.parametrize("steps", [2, 4])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str, steps: int, seed: int) -> None:
    module, (batch,) = CASES["mlp"].build(seed, 1)
    batch = [x.double() for x in batch]
    step, params = plain_step(module.double()), params_of(module)
    expected = TRANSFORMS[name](step, params, *batch)
    assert_close(TRANSFORMS[name](ltx.accumulate(step, steps), params, *batch), expected, 1e-12)
    assert_close(TRANSFORMS[name](ltx.accumulate(ltx.data_parallel(step), steps), params, *batch), expected, 1e-12)


def test_second_derivatives_draw_the_same_random_numbers(seed: int) -> None:
    """Dropout keeps what it kept: of w^3 the second derivative is 6 w where the first is 3 w^2."""
    step = ltx.accumulate(lambda w, x: torch.nn.functional.dropout(w**3 * x, 0.5).sum(), 3)
    w, x = torch.rand(50) + 0.5, torch.ones(6, 50)
    w.requires_grad_()
    (first,) = torch.autograd.grad(step(w, x), w, create_graph=True)
    drawn = torch.get_rng_state()
    (second,) = torch.autograd.grad(first.sum(), w)
    torch.testing.assert_close(second, 2 * first / w)
    assert torch.get_rng_state().equal(drawn)


class Token:
    """Lives as long as the graph that holds it."""


class Probe(torch.autograd.Function):
    """Identity whose node in the graph holds a token."""

    alive: ClassVar[WeakSet[Token]] = WeakSet()

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.token = Token()
        Probe.alive.add(ctx.token)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        assert ctx.token in Probe.alive
        return cotangent


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("nesting", NESTINGS)
def test_only_one_micro_batchs_graph_is_alive(nesting: str, way: str, seed: int) -> None:
    alive: list[int] = []

    def loss(params: Params, x: Tensor) -> Tensor:
        alive.append(len(Probe.alive))  # graphs of earlier micro-batches
        return Probe.apply(params["w"] * x).square().mean()

    Probe.alive.clear()
    params = {"w": torch.randn(3)}
    WAYS[way](NESTINGS[nesting](loss, 5), params, torch.randn(10, 3))
    assert alive == [0] * 5
    assert len(Probe.alive) == 0


def test_outputs_besides_the_loss_are_stacked() -> None:
    step = ltx.accumulate(lambda w, x, s: ((w * x).mean() * s, {"sum": x.sum(), "n": len(x)}), 2)
    w, x = torch.tensor(2.0), torch.tensor([1.0, 2.0, 3.0, 6.0])
    for loss, rest in (step(w, x, torch.tensor(3.0)), step(w.requires_grad_(), x, torch.tensor(3.0))):
        assert (loss.item(), rest["sum"].tolist(), rest["n"]) == (18.0, [3.0, 9.0], [2, 2])


def test_buffers_that_nobody_carries_are_refused() -> None:
    """As many buffers as samples would be cut like the batch."""
    step = ltx.data_parallel(lambda params, buffers, x: ((params * x + buffers.mean()).mean(), buffers + 1))
    sgd, params, buffers = ltx.optim.from_torch(torch.optim.SGD, lr=1.0), torch.ones(()), torch.zeros(4)
    text = r"ltx\.accumulate\(step, 2, carry=1\); each micro-batch begins with those of"
    refuses(StepError, text, ltx.train_step(ltx.accumulate(step, 2), sgd).init, params, buffers)
    state, _ = trained(ltx.accumulate(step, 2, carry=1), sgd, params, [torch.arange(4.0)], buffers=buffers)
    torch.testing.assert_close((state.params, state.buffers), (torch.tensor(-0.5), torch.full((4,), 2.0)))


def test_the_carry_goes_from_one_micro_batch_to_the_next(seed: int) -> None:
    with seeded(seed):
        module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        x = torch.randn(8, 3)

    def step(params: Params, buffers: Params, x: Tensor) -> Any:
        buffers = {name: b.clone() for name, b in buffers.items()}
        return functional_call(module, (params, buffers), (x,)).square().mean(), buffers, x.sum()

    accumulated = ltx.accumulate(ltx.data_parallel(step), 4, carry=1)
    buffers = {name: b.clone() for name, b in module.named_buffers()}
    leaves = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    loss, after, sums = accumulated(leaves, buffers, x)
    loss.backward()
    expected = torch.stack([module(part).square().mean() for part in x.split(2)]).mean()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(after, dict(module.named_buffers()))
    assert after["1.num_batches_tracked"] == 4
    torch.testing.assert_close(sums, torch.stack([part.sum() for part in x.split(2)]))
    for name, p in module.named_parameters():
        torch.testing.assert_close(leaves[name].grad, p.grad)
    grads, (_, (carried, _)) = torch.func.grad_and_value(
        lambda p: (lambda out: (out[0], out[1:]))(accumulated(p, buffers, x)), has_aux=True
    )(params_of(module))
    assert_close(grads, {name: p.grad for name, p in module.named_parameters()}, 1e-5)
    torch.testing.assert_close(carried["1.running_var"], module[1].running_var)


CARRYING: dict[str, Callable[..., Tensor]] = {
    "backward": by_backward,
    "grad": lambda f, w, h, x: grad(f)(w, h, x),
    "jvp": lambda f, w, h, x: jvp(lambda w: f(w, h, x), (w,), (torch.ones(()),))[1],
    "vmap": lambda f, w, h, x: torch.vmap(grad(f), in_dims=(None, None, 0))(w, h, x[None])[0],
    "compile": lambda f, w, h, x: torch.compile(grad(f), backend="eager", fullgraph=True)(w, h, x),
}


@pytest.mark.parametrize("way", CARRYING)
def test_the_carry_is_a_constant_to_the_next_micro_batch(way: str, seed: int) -> None:
    def step(w: Tensor, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(w * h + x.mean())
        return h.square(), h

    w, first, x = torch.rand(()), torch.rand(()), torch.rand(6)
    h, expected = first, torch.zeros(())
    for part in x.split(2):
        expected = expected + grad(lambda w, h=h, part=part: step(w, h, part)[0])(w) / 3
        h = step(w, h, part)[1]
    found = CARRYING[way](lambda *args: ltx.accumulate(step, 3, carry=1)(*args)[0], w, first, x)
    torch.testing.assert_close(found, expected)


def test_weighted_chunks_may_be_unequal(seed: int) -> None:
    x, w = torch.randn(7, 3), torch.randn(3)
    step = ltx.data_parallel(lambda w, x: ltx.Weighted((w * x).square().sum(), len(x)))
    for steps in (1, 2, 3, 7):
        torch.testing.assert_close(grad(ltx.accumulate(step, steps))(w, x), grad(step)(w, x))


def mean(w: Tensor, x: Tensor) -> Tensor:
    return (w * x).mean()


UNEQUAL = (
    "accumulate: a batch of 5 samples can't be split into {} equal micro-batches, and a mean of unequal means isn't "
    "the mean. Return ltx.Weighted(total, weight) from the step, or choose a batch size that divides."
)
ONE = torch.ones(())

ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    **{
        f"steps={steps}": (
            lambda steps=steps: ltx.accumulate(mean, steps),
            f"accumulate: steps must be a whole number of at least 1, got {steps}.",
        )
        for steps in (0, True)
    },
    "indivisible": (lambda: grad(ltx.accumulate(mean, 2))(ONE, torch.ones(5)), UNEQUAL.format(2)),
    "indivisible, not differentiated": (lambda: ltx.accumulate(mean, 3)(ONE, torch.ones(5)), UNEQUAL.format(3)),
    "no scalar": (
        lambda: grad(ltx.accumulate(lambda w, x: w * x, 2))(ONE, torch.ones(4)),
        "accumulate needs a step that returns a 0-dim loss (or ltx.Weighted), alone or first in a tuple; got a tensor "
        "of shape [2].",
    ),
    "parameters elsewhere": (
        lambda: ltx.data_parallel(ltx.accumulate(lambda x, w: (w * x).mean(), 2), argnums=1),
        "data_parallel: the step takes argument 0 for its parameters, and argnums=1, so it would split the parameters "
        "and leave the batch whole. Wrap the plain step first: ltx.accumulate(ltx.data_parallel(step, argnums=1), "
        "steps).",
    ),
    "no carry": (
        lambda: ltx.accumulate(mean, 2, carry=1)(ONE, torch.ones(4)),
        "accumulate(carry=...): the step must return (loss, next carry, ...).",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    call, text = ERRORS[name]
    assert said(StepError, call) == text


def closing_over(s: Tensor, w: Tensor | None = None) -> Tensor:
    w = torch.ones((), requires_grad=True) if w is None else w
    return ltx.accumulate(lambda w, x: (w * w * s * x).mean(), 2)(w, torch.ones(4))


CLOSURES: dict[str, Callable[[], Any]] = {
    "grad": lambda: grad(closing_over)(torch.tensor(3.0)),
    "grad of grad": lambda: grad(lambda s: grad(lambda w: closing_over(s, w))(torch.ones(())))(torch.tensor(3.0)) / 2,
    "jvp": lambda: jvp(closing_over, (torch.tensor(3.0),), (torch.tensor(1.0),))[1],
    "jvp of grad": lambda: (
        jvp(lambda s: grad(lambda w: closing_over(s, w))(torch.ones(())), (torch.tensor(3.0),), (torch.ones(()),))[1]
        / 2
    ),
    "vmap": lambda: torch.vmap(closing_over)(torch.ones(2)).mean(),
}


@pytest.mark.parametrize("name", CLOSURES)
def test_a_closure_over_a_traced_value_is_refused_or_right(name: str) -> None:
    try:
        result = CLOSURES[name]()
    except UnsupportedError as error:
        result = str(error)
    assert result == 1.0 or result == (
        "accumulate: the step uses a value from a surrounding torch.func transform that isn't one of its arguments, "
        "which would have no derivative here. Pass it as an argument (a 0-dim tensor goes to every micro-batch)."
    )


@pytest.mark.parametrize("by_keyword", [False, True])
@pytest.mark.parametrize("nesting", NESTINGS)
def test_what_the_closure_should_be_an_argument_for(nesting: str, by_keyword: bool) -> None:
    split = NESTINGS[nesting](lambda w, x, s: (w * w * s * x).mean(), 2)
    step = (lambda w, x, s: split(w, x, s=s)) if by_keyword else split
    w, x, s = torch.tensor(2.0), torch.ones(4), torch.tensor(3.0)
    assert grad(step, argnums=2)(w, x, s) == 4.0
    assert grad(lambda s: grad(step)(w, x, s))(s) == 4.0
    assert jvp(lambda s: step(w, x, s), (s,), (torch.tensor(1.0),))[1] == 4.0
    assert torch.vmap(lambda s: grad(step)(w, x, s))(torch.tensor([1.0, 2.0])).tolist() == [4.0, 8.0]
    step(w.requires_grad_(), x, s.requires_grad_()).backward()
    assert (w.grad, s.grad) == (12.0, 4.0)
