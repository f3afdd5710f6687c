"""torch.compile of a train step: right, or refused with what to do, before anything of Dynamo's own shows."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import ltx
from ltx.errors import DonatedStateError, StepError
from tests.contract.training.compiled import MODULES, SGD, taken_over
from tests.kinds import Ranks
from tests.train_on import refuses, said

pytestmark = [pytest.mark.slow_compile, pytest.mark.filterwarnings("ignore:Dynamo does not know:UserWarning")]


@pytest.mark.full(but=1)
@pytest.mark.parametrize("name", MODULES)
def test_a_module_taken_over(name: str, seed: int) -> None:
    torch.testing.assert_close(*taken_over(name, "eager" if name == "linear" else "aot_eager", seed, name == "linear"))


@pytest.mark.full
@pytest.mark.parametrize("name", ["linear", "checkpointed"])
def test_a_module_taken_over_by_two_ranks(name: str, ranks: Ranks, seed: int) -> None:
    for got, want in ranks(2).run(taken_over, name, "aot_eager", seed, name == "linear"):
        torch.testing.assert_close(got, want)


def on(module: torch.nn.Module) -> Callable[..., Tensor]:
    return lambda params, x: ltx.functional_call(module, params, x)


class Last(torch.nn.Module):
    def __init__(self, kind: type[torch.nn.RNNBase]):
        super().__init__()
        self.layer = kind(3, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[None])[0][0, -1]


class Counted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9)
        return self.layer(x) - self.mean


counted, given = Counted(), torch.ones(3)
looked_up = torch.nn.Embedding(3, 3, max_norm=1.0)


def with_buffers(params: Any, x: Tensor) -> Tensor:
    return ltx.functional_call(counted, (params, {"mean": given}), x)


def raises(params: Any, x: Tensor) -> Tensor:
    raise ValueError("the user's own error")


linear = torch.nn.Linear(3, 3)
TAKEN = r"compiled steps don't move a module: this Linear has no present values"

#: From torch 2.14 on Dynamo leaves the step to Python, where ltx tells what is wrong.
OWN_BUFFER: tuple[Any, str] = (
    (StepError, "'mean' of Counted: the module wrote to this buffer of its own")
    if torch.torch_version.TorchVersion(torch.__version__) >= "2.14"
    else (torch._dynamo.exc.TorchRuntimeError, "in-place operation")
)

#: What can't be one graph: a loss of the module that train.init has taken over, the error's type and text.
REFUSED: dict[str, tuple[torch.nn.Module, Callable[..., Any], Any, str]] = {
    **{
        kind.__name__: (
            (module := Last(kind)),
            on(module),
            torch._dynamo.exc.InternalTorchDynamoError,
            rf"can't trace the gradient of a {kind.__name__}, 'layer' of this Last\. Don.t compile the step",
        )
        for kind in (torch.nn.LSTM, torch.nn.GRU)
    },
    "item": (linear, lambda p, x: float(p["bias"].sum()) * x, torch._dynamo.exc.Unsupported, r"Tensor\.item\(\)"),
    "branch": (linear, lambda p, x: x if p["bias"].sum() > 0 else -x, torch._dynamo.exc.Unsupported, "Data-dependent"),
    "random": (linear, lambda p, x: x * random.random(), torch._dynamo.exc.Unsupported, "Random.random"),
    "own buffer": (counted, on(counted), *OWN_BUFFER),
    "given buffer": (counted, with_buffers, torch._dynamo.exc.TorchRuntimeError, "in-place operation"),
    "max_norm": (
        looked_up,
        lambda p, x: ltx.functional_call(looked_up, p, x.argmax(1)),
        torch._dynamo.exc.InternalTorchDynamoError,
        r"'weight' of Embedding: Embedding\(max_norm=1\.0\) renormalises, in place, the rows",
    ),
    "the user's error": (linear, raises, ValueError, "the user's own error"),
    "the module itself": (linear, lambda p, x: linear(x), DonatedStateError, TAKEN),
}


@pytest.mark.full(but=2)
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, seed: int) -> None:
    module, loss, error, text = REFUSED[name]
    train = ltx.train_step(ltx.data_parallel(lambda p, x: loss(p, x).square().mean()), SGD)
    state = train.init(ltx.to_module(module, {k: torch.randn(p.shape) for k, p in module.named_parameters()}))
    refuses(error, text, torch.compile(train, backend="eager"), state, torch.randn(4, 3))
    again = error if error in (ValueError, DonatedStateError, StepError) else torch._dynamo.exc.TorchDynamoException
    said(again, torch.compile(train, backend="eager"), state, torch.randn(4, 3))
    assert state.step == 0
    assert ltx.tree.flatten(state.params)[0][0].isfinite().all()


@dataclass(frozen=True)
class CountsSteps(ltx.hooks.AllReduce):
    reads_step: ClassVar[bool] = True


@pytest.mark.full
def test_steps_of_trainings_that_are_at_different_steps_compile(seed: int) -> None:
    """In one process: Dynamo takes what has been another number for a variable, and hooks need a constant."""
    torch.manual_seed(seed)
    w = torch.randn(3)
    for before in (0, 1, 5):
        loss = ltx.data_parallel(lambda p, x: (p * x).square().mean(), ltx.DDPStrategy(comm_hook=CountsSteps()))
        train = ltx.train_step(loss, ltx.optim.from_torch(torch.optim.SGD, lr=0.1))
        state, expected = train.init(w), w
        for step in range(before + 3):
            x = torch.randn(3)
            run = train if step < before else torch.compile(train, backend="eager", fullgraph=True)
            state, _ = run(state, x)
            expected = expected - 0.1 * 2 / 3 * expected * x * x
        torch.testing.assert_close(state.params, expected)
        assert state.step == before + 3


client = torch.func.grad(ltx.data_parallel(lambda params, x: torch.tanh(x @ params["w"]).square().mean()))


def a_round(params: dict[str, Tensor], xs: Tensor) -> dict[str, Tensor]:
    grads = ltx.vmap(client, in_dims=(None, 0), out_dims=None)(params, xs)
    return {name: param - 0.1 * grads[name] for name, param in params.items()}


@pytest.mark.full
def test_what_simulated_ranks_share_is_one_output_of_a_graph(seed: int) -> None:
    params, xs = {"w": torch.randn(3, 2)}, torch.randn(4, 5, 3)
    w = params["w"].clone().requires_grad_()
    torch.tanh(xs @ w).square().mean().backward()
    found = torch.compile(a_round, fullgraph=True, backend="aot_eager")(params, xs)
    torch.testing.assert_close(found["w"], params["w"] - 0.1 * w.grad)

    rest = ltx.vmap(lambda x: {"rest": ltx.psum(x) - x}, out_dims=None)
    f = torch.compile(lambda xs: rest(xs)["rest"], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(f(xs[:1].expand(4, 5, 3)), 3 * xs[0])
    refuses(RuntimeError, r"AxisError: out_dims=None: the output 'rest' differs between ranks\. Give it", f, xs)


def test_simulated_ranks_are_compiled_as_a_whole() -> None:
    def step(w: Tensor, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return (x @ w).sum()

    gradients = ltx.vmap(torch.func.grad(ltx.data_parallel(step)), in_dims=(None, 0))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        torch.compile(lambda w, x: gradients(w, x), backend="eager")(torch.ones(3), torch.ones(2, 4, 3))
