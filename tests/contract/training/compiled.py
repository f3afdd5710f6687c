"""Training steps that are compiled as a whole. A module that ranks import by its name, as Dynamo does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ltx
from ltx import hooks
from tests.train_on import refuses

#: How many calls of a step compile something: before torch 2.13 Dynamo takes a count for a constant until it changes.
COMPILING = 1 if torch.torch_version.TorchVersion(torch.__version__) >= "2.13" else 2

ADAMW = ltx.optim.from_torch(torch.optim.AdamW, lr=0.1)
SGD = ltx.optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)

#: What is compiled: a strategy and what the train step is made with.
STEPS: dict[str, tuple[ltx.Strategy, dict[str, Any]]] = {
    "adamw": (ltx.DDPStrategy(), {"optimizer": ADAMW}),
    "sgd": (ltx.DDPStrategy(bucket_bytes=64, first_bucket_bytes=64), {"optimizer": SGD}),
    "clipped": (ltx.DDPStrategy(), {"optimizer": ltx.optim.chain(ltx.optim.clip_by_global_norm(0.5), ADAMW)}),
    "powersgd": (ltx.DDPStrategy(comm_hook=hooks.PowerSGD(rank=1, start_step=0)), {"optimizer": SGD}),
    "guarded": (ltx.DDPStrategy(), {"optimizer": ADAMW, "guard": "skip"}),
    "stateless": (ltx.DDPStrategy(), {"optimizer": ltx.optim.from_torch(torch.optim.SGD, lr=0.1), "guard": "skip"}),
    "frozen": (ltx.DDPStrategy(), {"optimizer": ADAMW, "trainable": ["w", "b"]}),
}


def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return (torch.tanh(x @ params["w"]) @ params["v"] + params["b"] - y).square().mean()


def make(name: str) -> tuple[Any, Any]:
    strategy, made_with = STEPS[name]
    train = ltx.train_step(ltx.data_parallel(loss, strategy), **made_with)
    draw = torch.Generator().manual_seed(4)
    shapes = {"w": (5, 7), "v": (7, 3), "b": (3,)}
    params = {k: torch.randn(shape, generator=draw, dtype=torch.float64) for k, shape in shapes.items()}
    return train, train.init(params)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
    return x, x[:, :3].sin()


def trained(name: str, backend: str) -> tuple[Any, Any]:
    """States after 4 steps, eagerly and compiled, of which the first alone compiles."""
    torch._dynamo.reset()  # it compiles a function eight times at most
    (train, state), rank = make(name), int(ltx.axis_index())
    compiled = torch.compile(train, fullgraph=True, backend=backend)
    other = state if not train.donate else make(name)[1]
    for step in range(4):
        with torch.compiler.set_stance("fail_on_recompile" if step >= COMPILING else "default"):
            following, metrics = compiled(other, *batch(step, rank))
        assert all(x.isfinite().all() for x in ltx.tree.flatten(other.params)[0]), "the old state can still be used"
        state, expected = train(state, *batch(step, rank))
        other = following
        assert following.step == state.step == step + 1
        torch.testing.assert_close(metrics.loss, expected.loss)
    return state, other


class Checkpointed(torch.nn.Module):
    """Tied weights, a frozen one, and a checkpoint of the kind that `reentrant` says."""

    def __init__(self, reentrant: bool):
        super().__init__()
        self.first, self.second, self.last = (torch.nn.Linear(4, 4) for _ in range(3))
        self.second.weight, self.last.bias.requires_grad = self.first.weight, False
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(lambda h: self.second(self.first(h).tanh()), x, use_reentrant=self.reentrant)
        return self.last(hidden.relu())


#: Modules that train.init takes over.
MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    "linear": lambda: torch.nn.Linear(4, 4),
    "checkpointed": lambda: Checkpointed(False),
    "checkpointed reentrant": lambda: Checkpointed(True),
    "parametrized": lambda: torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 4)),
    "attention": lambda: torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
}


def taken_over(name: str, backend: str, seed: int, after_failure: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters after 3 steps: of a compiled train step that took a module over, of torch on the whole batch."""
    torch._dynamo.reset()
    torch.manual_seed(seed)
    module = MODULES[name]().double()
    twin, x = copy.deepcopy(module), torch.randn(4, 3, 4, dtype=torch.float64)
    twin.reentrant = False  # torch's other kind has no gradients of what it closes over

    def squares(params: Any, x: Tensor) -> Tensor:
        return ltx.functional_call(module, params, x).square().mean()

    train = ltx.train_step(ltx.data_parallel(squares), SGD)
    state = train.init(module)
    if after_failure:
        fails = ltx.train_step(ltx.data_parallel(lambda params, x: squares(params, x) * float(params["bias"][0])), SGD)
        refuses(torch._dynamo.exc.Unsupported, r"Tensor\.item", torch.compile(fails, backend=backend), state, x)
    compiled = torch.compile(train, backend=backend)
    sgd = torch.optim.SGD([p for p in twin.parameters() if p.requires_grad], lr=0.1, momentum=0.9, nesterov=True)
    for _ in range(3):
        state, _ = compiled(state, ltx.shard(x))
        twin(x).square().mean().backward()
        sgd.step()
        sgd.zero_grad()
    return dict(state.params), {name: p.detach() for name, p in twin.named_parameters()}
