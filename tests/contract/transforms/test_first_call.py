"""What the first call of a step refuses or warns of: buffers behind the state, captured parameters, unused ones."""

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
from ltx.errors import StepError, UnusedParameterWarning
from tests.kinds import Params, Ranks
from tests.train_on import go_on, loop_of_torch, on_ranks, refuses, said, trained
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


def writing(how: str, module: nn.Module) -> str:
    """The error of a step that writes to the module's buffers; the one in eval mode has none."""

    loss: Any = {
        "closure": lambda params, x: functional_call(module, params, (x,)).square().mean(),
        "method": Hidden(module).loss,
        "partial": functools.partial(lambda m, p, x: functional_call(m, p, (x,)).square().mean(), module),
        "ltx": lambda params, x: ltx.functional_call(module, params, (x,)).square().mean(),
    }[how]
    step = ltx.data_parallel(loss)
    text = said(StepError, trained, step, sgd(), dict(module.named_parameters()), [X])
    trained(step, sgd(), dict(module.eval().named_parameters()), [X])
    return text


@pytest.mark.full(but=2)
@pytest.mark.parametrize("how", ["closure", "method", "partial", "ltx"])
@pytest.mark.parametrize("module", [lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), Stats])
def test_a_module_that_writes_to_its_own_buffers(how: str, module: Any, ranks: Ranks) -> None:
    if how == "ltx" or how == "closure":
        texts = [*ranks(2).run(lambda: writing(how, module())), writing(how, module())]
    else:
        texts = [writing(how, module())]
    for text in texts:
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
        return self.layers(x - self.shift).square().mean()


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


@on_ranks(2)
def test_a_buffer_that_requires_gradients() -> None:
    xs, codes = torch.tensor([[1.0, 2.0], [2.0, 3.0]]), torch.tensor([1.0, 3.0])
    mean = float((2 * (2.0 * xs - codes) * xs).sum() / 2)
    net, x = Quantizer(), xs[ltx.world().rank]
    params = {"scale": net.scale.detach().clone().requires_grad_()}
    sgd = ltx.optim.from_torch(torch.optim.SGD, lr=1.0)
    train = ltx.train_step(ltx.data_parallel(lambda p, x: ltx.functional_call(net, p, (x,))), sgd)
    state, _ = train(train.init(params), x)
    given = ltx.data_parallel(lambda p, b, x: ltx.functional_call(Quantizer(), (p, b), (x,), return_buffers=True))
    train = ltx.train_step(given, sgd)
    with_buffers, _ = train(train.init(params, {"codes": codes.clone()}), x)
    for after in (state.params, with_buffers.params):
        assert float(2.0 - after["scale"]) == pytest.approx(mean)
    assert not with_buffers.buffers["codes"].requires_grad
    other = Quantizer()
    calls = (
        lambda: ltx.data_parallel(lambda p, x: ltx.functional_call(other, p, (x,)))(params, x),
        lambda: ltx.data_parallel(lambda p, x: (p["scale"] * x).sum() + other(x))(params, x),
    )
    texts = [said(StepError, call).split(" of shape")[0] for call in calls]
    assert texts[0] == "the step uses 'codes' of Quantizer, a buffer"
    assert texts[1].startswith("the step uses 'scale' of Quantizer, a parameter") or "'codes'" in texts[1]


@pytest.mark.parametrize("call", [functional_call, ltx.functional_call])
@on_ranks(2)
def test_a_module_that_writes_to_its_buffers_only_later(call: Any) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
    train = ltx.train_step(ltx.data_parallel(lambda p, x: call(module, p, (x,)).square().mean()), sgd())
    state, _ = go_on(train, train.init({name: x.detach() for name, x in module.named_parameters()}), [X] * 2)
    module.train()
    text = "'1.num_batches_tracked' of Sequential: the module wrote to this buffer of its own"
    refuses(StepError, text, train, state, X)


@pytest.mark.parametrize("how", ["a module", "a parameter"])
@on_ranks(2)
def test_captured_parameters_that_are_unfrozen_later(how: str) -> None:
    """As when the layers of a network are freed one by one: each rank had a gradient of its own."""
    layer, x = nn.Linear(2, 1, bias=False), torch.tensor([1.0, 2.0])
    weight = nn.Parameter(torch.ones(2))
    used = {"a module": lambda: layer(x).sum(), "a parameter": lambda: (weight * x).sum()}[how]
    step, p = ltx.data_parallel(lambda p: (p * used()).sum()), torch.ones(2, requires_grad=True)
    captured = layer.weight if how == "a module" else weight
    captured.requires_grad_(False)
    for _ in range(2):
        step(p).backward()
    captured.requires_grad_(True)
    refuses(StepError, "isn't one of its arguments, so its gradient would stay local", step, p)


BATCH = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
adamw = ltx.optim.from_torch(torch.optim.AdamW, lr=0.1, weight_decay=0.5)


def start() -> Params:
    return {"used": torch.ones(2), "pooler": torch.ones(2), "zero": torch.zeros(2), "low": torch.ones(2)}


def loss(params: Params, x: Tensor) -> Tensor:
    """The gradient of "low" is zero at first, as of LoRA's second matrix."""
    return (params["used"] * x + params["low"] * params["zero"] * x).square().mean()


def by_rank(params: Params, x: Tensor) -> Tensor:
    """Rank 0 alone uses "pooler", if there is another."""
    if ltx.axis_size() == 1 or int(ltx.axis_index()):
        return loss(params, x)
    return loss(params, x) + params["pooler"].sum()


def without_data(params: Params, x: Tensor) -> Tensor:
    """Rank 0 has no data, so its loss is a constant."""
    return loss(params, x) if int(ltx.axis_index()) or ltx.axis_size() == 1 else torch.zeros(())


def given(params: Params, x: Tensor) -> Any:
    return {**torch.func.grad(loss)(params, x), "pooler": None}, loss(params, x)


STEPS: dict[str, Callable[[], Any]] = {
    "plain": lambda: ltx.data_parallel(loss),
    "accumulated": lambda: ltx.accumulate(ltx.data_parallel(loss), 2),
    "weighted": lambda: ltx.data_parallel(lambda p, x: ltx.Weighted(loss(p, x), 1.0)),
    "given": lambda: ltx.data_parallel(given, returns="grads"),
    "mixed": lambda: ltx.mixed_precision(ltx.data_parallel(loss), ltx.Precision(compute=torch.bfloat16)),
    "without data": lambda: ltx.data_parallel(without_data),
    "zero": lambda: ltx.data_parallel(loss, ltx.ZeroStrategy()),
    "local": lambda: ltx.data_parallel(loss, ltx.LocalSGDStrategy(period=2)),
    "fp16": lambda: ltx.data_parallel(loss, ltx.DDPStrategy(comm_hook=ltx.hooks.FP16())),
}


def warned(step: Any, trainable: Any = None, **options: Any) -> tuple[list[str], Params]:
    """What the steps of a training have warned of, and what has become of the parameters."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        after = trained(step, adamw, start(), [BATCH] * 3, trainable=trainable, **options)
    return [str(one.message) for one in caught if one.category is UnusedParameterWarning], after.params


def assert_said(found: list[str]) -> None:
    (text,) = found
    assert text.startswith("train_step: the loss of the first step doesn't depend on 'pooler'. ")
    assert "trainable=" in text
    assert "Keep those that other steps or ranks use, such as idle experts." in text


@pytest.mark.parametrize("name", STEPS)
def test_said_once(name: str, ranks: Ranks) -> None:
    step = STEPS[name]()
    for rank, (found, params) in enumerate((warned(step), *ranks(2).run(warned, step))):
        if name == "without data" and rank == 1:
            assert found == []
            continue
        assert_said(found)
        assert params["pooler"].eq(0.95**3).all() or name in ("mixed", "zero") or params["pooler"].lt(0.95).all()


@pytest.mark.parametrize("strategy", [ltx.DDPStrategy(), ltx.ZeroStrategy()])
def test_bucket_by_bucket(strategy: ltx.Strategy, ranks: Ranks) -> None:
    step = ltx.data_parallel(loss, strategy)
    for found, _ in (warned(step, overlap="update"), *ranks(2).run(warned, step, overlap="update")):
        assert_said(found)


def refused(step: Any, **options: Any) -> tuple[str, float]:
    train = ltx.train_step(step, adamw, donate=False, **options)
    state = train.init(start())
    return said(StepError, train, state, torch.ones(2, 2)), float(state.params["used"].sum())


@pytest.mark.parametrize("overlap", ["backward", "update"])
@pytest.mark.parametrize("strategy", [ltx.DDPStrategy(), ltx.BaguaStrategy("bytegrad")], ids=["ddp", "bytegrad"])
def test_a_loss_that_depends_on_nothing(strategy: Any, overlap: Any, ranks: Ranks) -> None:
    """On no rank: all raise, and the state is as before."""
    step = ltx.data_parallel(lambda params, x: loss(params, x).detach(), strategy)
    for text, kept in (refused(step, overlap=overlap), *ranks(2).run(refused, step, overlap=overlap)):
        assert "the loss of the first step doesn't depend on 'low', 'pooler', 'used', 'zero', on any rank. " in text
        assert "These are all: use the parameters that the step is given" in text
        assert kept == 2.0


def test_where_a_rank_does_not_see_the_gradients_of_others(ranks: Ranks) -> None:
    """It may be the only one that depends on nothing, so this is a warning."""
    step = ltx.data_parallel(without_data, ltx.LocalSGDStrategy(period=2))
    first, second = (found for found, _ in ranks(2).run(warned, step))
    assert "These are all: " in first[0]
    assert_said(second)
    of_none = ltx.data_parallel(lambda params, x: loss(params, x).detach(), ltx.ZeroStrategy())
    for found, _ in ranks(2).run(warned, of_none):
        assert "These are all: " in found[0]


def test_not_of_what_another_rank_uses(ranks: Ranks) -> None:
    step = ltx.data_parallel(by_rank)
    assert_said(warned(step)[0])
    for overlap in ("backward", "update"):
        for found, _ in ranks(2).run(warned, step, overlap=overlap):
            assert found == []


def test_trainable_leaves_them_alone(ranks: Ranks) -> None:
    """As torch does, whose .grad is None."""
    module = {name: torch.nn.Parameter(x) for name, x in start().items()}
    loop_of_torch(torch.optim.AdamW(module.values(), lr=0.1, weight_decay=0.5), loss, [(module, BATCH)] * 3)
    step = ltx.data_parallel(loss)
    for found, params in (warned(step, ["used", "zero", "low"]), *ranks(2).run(warned, step, ["used", "zero", "low"])):
        assert found == []
        assert params["pooler"].tolist() == [1, 1]
        torch.testing.assert_close(dict(params), {name: x.detach() for name, x in module.items()})


@on_ranks(2)
def test_it_costs_no_message() -> None:
    with ltx.profile.record() as trace:
        warned(ltx.data_parallel(loss))
    found = [event.label for event in trace.events if event.label in ("summary", "bucket 0")]
    assert found == ["summary", "bucket 0"] * 3
