"""What the first call of a step refuses: buffers written behind the state, renormalised rows, captured parameters."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import ltx
from ltx.errors import StepError
from tests.kinds import Ranks
from tests.train_on import said
from tests.twins.training import sgd

X = torch.arange(8.0).view(4, 2)


class Hidden:
    def __init__(self, module: nn.Module) -> None:
        self.modules = {"net": module}

    def loss(self, params: Any, x: Tensor) -> Tensor:
        return functional_call(self.modules["net"], params, (x,)).square().mean()


class Stats(nn.Module):
    """Statistics that nothing counts: torch's batch norm writes past the count of writes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("var", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(self.layer(x), self.mean, self.var, training=self.training)


def writing(how: str, module: nn.Module) -> Any:
    """The error of a step that writes to the module's buffers; the one in eval mode has none."""

    step = {
        "closure": lambda params, x: functional_call(module, params, (x,)).square().mean(),
        "method": Hidden(module).loss,
        "partial": functools.partial(lambda m, p, x: functional_call(m, p, (x,)).square().mean(), module),
        "ltx": lambda params, x: ltx.functional_call(module, params, (x,)).square().mean(),
    }[how]
    texts = []
    for mode in (True, False):
        module.train(mode)
        train = ltx.train_step(ltx.data_parallel(step), sgd())
        state = train.init(dict(module.named_parameters()))
        if not mode:
            train(state, X)
            continue
        texts.append(said(StepError, train, state, X))
    return texts


@pytest.mark.full(but=2)
@pytest.mark.parametrize("how", ["closure", "method", "partial", "ltx"])
@pytest.mark.parametrize("module", [lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), Stats])
def test_a_module_that_writes_to_its_own_buffers(how: str, module: Any, ranks: Ranks) -> None:
    if how == "ltx" or how == "closure":
        texts = [*ranks(2).run(lambda: writing(how, module())), writing(how, module())]
    else:
        texts = [writing(how, module())]
    for (text,) in texts:
        assert "the module wrote to this buffer of its own" in text
        assert "'mean' of Stats" in text or "'1." in text
        assert "return_buffers=True" in text
        assert "ltx.nn.convert_sync_batch_norm(module)" in text


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "in place": lambda p, x: p.add_(x),
    "through .data": lambda p, x: p.data.copy_(x),
    "another .data": lambda p, x: setattr(p, "data", x.clone()),
    "the same values": lambda p, x: p.mul_(1),
}


class Writing(nn.Module):
    """Writes to a parameter in its forward pass: as weight constraints, ActNorm's first batch, MoCo's second encoder.

    A train step gives few parameters as leaves, and many as views that a marker has made.
    """

    def __init__(self, how: str, trained: bool, layers: int) -> None:
        super().__init__()
        self.how, self.layers = how, nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))
        self.shift = nn.Parameter(torch.ones(2), requires_grad=trained)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.how == "anew":
                self.shift = nn.Parameter(x.mean(0), requires_grad=self.shift.requires_grad)
            else:
                WRITES[self.how](self.shift, x.mean(0))
        output: Tensor = self.layers(x - self.shift).square().mean()
        return output


def of_writing(how: str, trained: bool, layers: int) -> str:
    """The error or the warning of the first step."""
    module = Writing(how, trained, layers)
    train = ltx.train_step(ltx.data_parallel(lambda p, x: ltx.functional_call(module, p, (x,))), sgd())
    state = train.init(module)
    if trained or how == "anew":
        return said(StepError, train, state, X)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(state, X)
    (text,) = {str(each.message) for each in caught if "the step writes to" in str(each.message)}
    return text


@pytest.mark.full(but=3)
@pytest.mark.parametrize("layers", [1, 20])
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("how", [*WRITES, "anew"])
def test_a_module_that_writes_to_its_parameters(how: str, trained: bool, layers: int, ranks: Ranks) -> None:
    for text in (*ranks(2).run(of_writing, how, trained, layers), of_writing(how, trained, layers)):
        if how == "anew":
            assert "Writing lost the 'shift' that it was given, during the call. It was assigned another" in text
        elif trained:
            assert "the step writes to " in text
            assert "Write to it between two steps" in text
        else:
            assert "the step writes to 'shift', frozen parameters" in text


def test_on_simulated_ranks() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    params = {name: p.detach() for name, p in module.named_parameters()}
    step = ltx.data_parallel(lambda p, x: functional_call(module, p, (x,)).square().mean())
    with pytest.raises(StepError, match=r"'1\.running_mean' of Sequential: the module wrote to this buffer"):
        ltx.vmap(ltx.grad(step), in_dims=(None, 0))(params, torch.stack([X, X + 1]))


def renormalising() -> str:
    module = nn.Sequential(nn.Embedding(5, 2, max_norm=1.0))
    step = ltx.data_parallel(lambda p, i: functional_call(module, p, (i,)).sum())
    params = ltx.broadcast({name: 9 * p.detach() + 9 for name, p in module.named_parameters()})
    before = {name: p.clone() for name, p in params.items()}
    text = said(StepError, lambda: ltx.grad(step)(params, torch.tensor([0, 1])))
    torch.testing.assert_close(params, before)
    return text


def test_embeddings_that_renormalise(ranks: Ranks) -> None:
    for text in (*ranks(2).run(renormalising), renormalising()):
        assert text.startswith("'0.weight' of Sequential: Embedding(max_norm=1.0) renormalises, in place, the rows")


def penalised() -> Any:
    """The gradient of a step that differentiates with respect to a leaf of its own."""
    w = torch.tensor([1.0, 2.0])

    def step(w: Tensor, x: Tensor) -> Tensor:
        leaf = (2 * x.detach()).requires_grad_()
        (slope,) = torch.autograd.grad((leaf * w).square().sum(), leaf, create_graph=True)
        return slope.square().mean() + (leaf.sin() * w).sum()

    return ltx.grad(ltx.data_parallel(step))(w, X + ltx.axis_index())


def later() -> str:
    """The error of a step that captures a parameter from its second call on."""
    layer, calls = nn.Linear(2, 2), []

    def step(p: Any, x: Tensor) -> Tensor:
        calls.append(0)
        y = x * p["w"]
        return (layer(y) if len(calls) > 1 else y).square().mean()

    train = ltx.train_step(ltx.data_parallel(step), sgd())
    state, _ = train(train.init({"w": torch.ones(2)}), X)
    return said(StepError, train, state, X)


@pytest.mark.full
def test_leaves_of_the_step_and_late_captures(ranks: Ranks) -> None:
    results = ranks(2).run(lambda: (penalised(), later()))
    want = ltx.vmap(lambda _: penalised_by_hand())(torch.zeros(2))[0]
    for grad, text in results:
        torch.testing.assert_close(grad, want)
        assert "that isn't one of its arguments" in text


def penalised_by_hand() -> Tensor:
    """mean over ranks of d/dw [mean((2 leaf w^2)^2) + sum(sin(leaf) w)]"""
    w, leaf = torch.tensor([1.0, 2.0]), 2 * (X + ltx.axis_index())
    return ltx.pmean(16 * (leaf.square() * w**3).sum(0) / leaf.numel() + leaf.sin().sum(0))


class Quantizer(nn.Module):
    """As vector-quantize-pytorch's: a buffer that the module differentiates with respect to, and trains itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("codes", torch.tensor([1.0, 3.0]))

    def forward(self, x: Tensor) -> Tensor:
        self.codes.requires_grad_()
        return ((self.scale * x - self.codes) ** 2).sum()


def own_gradients() -> tuple[float, float, str, str]:
    net, x = Quantizer(), torch.tensor([1.0, 2.0]) + ltx.axis_index()
    step = ltx.data_parallel(lambda p, x: ltx.functional_call(net, p, (x,)))
    params = {"scale": net.scale.detach().clone().requires_grad_()}
    sgd = ltx.optim.from_torch(torch.optim.SGD, lr=1.0)
    train = ltx.train_step(step, sgd)
    state, _ = train(train.init(params), x)
    given = ltx.data_parallel(lambda p, b, x: ltx.functional_call(Quantizer(), (p, b), (x,), return_buffers=True))
    train = ltx.train_step(given, sgd)
    with_buffers, _ = train(train.init(params, {"codes": torch.tensor([1.0, 3.0])}), x)
    assert not with_buffers.buffers["codes"].requires_grad
    other = Quantizer()
    calls = (
        lambda: ltx.data_parallel(lambda p, x: ltx.functional_call(other, p, (x,)))(params, x),
        lambda: ltx.data_parallel(lambda p, x: (p["scale"] * x).sum() + other(x))(params, x),
    )
    texts = [said(StepError, call).split(" of shape")[0] for call in calls]
    return float(2.0 - state.params["scale"]), float(2.0 - with_buffers.params["scale"]), *texts


def test_a_buffer_that_requires_gradients(ranks: Ranks) -> None:
    xs, codes = torch.tensor([[1.0, 2.0], [2.0, 3.0]]), torch.tensor([1.0, 3.0])
    mean = float((2 * (2.0 * xs - codes) * xs).sum() / 2)
    found = ranks(2).run(own_gradients).replicated()
    assert found[:2] == (pytest.approx(mean), pytest.approx(mean))
    assert found[2] == "the step uses 'codes' of Quantizer, a buffer"
    assert found[3].startswith("the step uses 'scale' of Quantizer, a parameter") or "'codes'" in found[3]


def writing_later(call: Callable[..., Any]) -> str:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
    train = ltx.train_step(ltx.data_parallel(lambda p, x: call(module, p, (x,)).square().mean()), sgd())
    state = train.init({name: x.detach() for name, x in module.named_parameters()})
    for _ in range(2):
        state, _ = train(state, X)
    module.train()
    return said(StepError, train, state, X)


@pytest.mark.parametrize("call", [functional_call, ltx.functional_call])
def test_a_module_that_writes_to_its_buffers_only_later(call: Any, ranks: Ranks) -> None:
    for text in ranks(2).run(writing_later, call):
        assert "'1.num_batches_tracked' of Sequential: the module wrote to this buffer of its own" in text


def unfrozen_later(how: str) -> str:
    layer, x = nn.Linear(2, 1, bias=False), torch.tensor([1.0, 2.0])
    weight = nn.Parameter(torch.ones(2))
    used = {"a module": lambda: layer(x).sum(), "a parameter": lambda: (weight * x).sum()}[how]
    step, p = ltx.data_parallel(lambda p: (p * used()).sum()), torch.ones(2, requires_grad=True)
    captured = layer.weight if how == "a module" else weight
    captured.requires_grad_(False)
    for _ in range(2):
        step(p).backward()
    captured.requires_grad_(True)
    return said(StepError, step, p)


@pytest.mark.parametrize("how", ["a module", "a parameter"])
def test_captured_parameters_that_are_unfrozen_later(how: str, ranks: Ranks) -> None:
    """As when the layers of a network are freed one by one: each rank had a gradient of its own."""
    for text in ranks(2).run(unfrozen_later, how):
        assert "isn't one of its arguments, so its gradient would stay local" in text
