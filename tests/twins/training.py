"""Fifty steps of a small regression, by ltx and by its slow twins: torch's DDP, and one process with all the data."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

import ltx
from ltx.optim import TorchState
from tests.train_on import go_on, loop_of_torch
from tests.twins.cases import MLP, Params, params_of, plain_step, seeded

STEPS = 50
LR = 1e-2


def problem(
    seed: int, sizes: tuple[int, ...], steps: int = STEPS
) -> tuple[nn.Module, list[list[tuple[Tensor, Tensor]]]]:
    """(model, batches by step and rank); rank r has ``sizes[r]`` samples a step. The same in every process."""
    with seeded(seed):
        module, teacher = MLP(), nn.Linear(5, 3)
        inputs = [[torch.randn(n, 5) for n in sizes] for _ in range(steps)]
        return module, [[(x, teacher(x).detach().sin() + 1) for x in by_rank] for by_rank in inputs]


def sgd(lr: Any = LR, **kwargs: Any) -> ltx.optim.Optimizer:
    return ltx.optim.from_torch(torch.optim.SGD, lr=lr, **kwargs)


def adamw(lr: Any = LR, **kwargs: Any) -> ltx.optim.Optimizer:
    return ltx.optim.from_torch(torch.optim.AdamW, lr=lr, **kwargs)


def after_some_updates(opt_state: Any) -> Any:
    """`opt_state` as if its parts had been updated before, each another number of times."""
    counts = itertools.count(2)

    def older(node: Any) -> Any:
        return replace(node, count=next(counts)) if isinstance(node, TorchState) else node

    return ltx.tree.map(older, opt_state, is_leaf=lambda node: isinstance(node, TorchState))


def run(train: Any, module: nn.Module, batches: list[Any]) -> tuple[Tensor, Params]:
    """(losses, parameters) after one step on each batch."""
    found = go_on(train, train.init(params_of(module)), batches)
    return found.losses, found.params


def by_train_step(step: Callable[..., Any], params: Any, *batch: Any) -> Any:
    """The gradients by which a train step has moved the parameters."""
    train = ltx.train_step(step if isinstance(step, ltx.DataParallel) else ltx.data_parallel(step), sgd(1.0))
    state, _ = train(train.init(params), *batch)
    return ltx.tree.map(lambda before, now: before - now, params, state.params)


def mean_step(module: nn.Module, strategy: ltx.Strategy | None = None, **kwargs: Any) -> ltx.DataParallel:
    return ltx.data_parallel(plain_step(module), strategy, **kwargs)


def weighted_step(module: nn.Module, strategy: ltx.Strategy | None = None) -> ltx.DataParallel:
    """Sums over samples instead of means: a rank may have any number of them."""

    def step(params: Params, x: Tensor, y: Tensor) -> ltx.Weighted:
        return ltx.Weighted((functional_call(nn.Sequential(*module), params, (x,)) - y).square().mean(-1).sum(), len(x))

    return ltx.data_parallel(step, strategy)


def on_a_rank(build: Callable[[nn.Module], Any], seed: int, sizes: tuple[int, ...], steps: int = STEPS) -> Any:
    """Train what `build` makes, with this rank's batches."""
    module, batches = problem(seed, sizes, steps)
    return run(build(module), module, [by_rank[ltx.world().rank] for by_rank in batches])


def ddp(seed: int, sizes: tuple[int, ...], steps: int = STEPS) -> tuple[Tensor, Params]:
    module, batches = problem(seed, sizes, steps)
    replica = DistributedDataParallel(module)
    losses, parameters = one_process(module, [by_rank[ltx.world().rank] for by_rank in batches], replica)
    return ltx.pmean(losses), parameters


def one_process(
    module: nn.Module, batches: list[tuple[Tensor, Tensor]], call: nn.Module | None = None, **kwargs: Any
) -> tuple[Tensor, Params]:
    optimizer = torch.optim.AdamW(module.parameters(), **{"lr": LR, **kwargs})
    return loop_of_torch(optimizer, call or module, batches), params_of(module)


def whole(batches: list[list[tuple[Tensor, Tensor]]]) -> list[tuple[Tensor, Tensor]]:
    """All ranks' samples as one batch a step."""
    return [tuple(torch.cat(parts) for parts in zip(*by_rank, strict=True)) for by_rank in batches]
