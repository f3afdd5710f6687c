"""What pages and errors say is so: equal losses and equal seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx.errors import ReplicaDivergedError
from tests.inside import stateful
from tests.kinds import Ranks
from tests.train_on import refuses

sgd = ltx.optim.from_torch(torch.optim.SGD, lr=0.1)

LOCAL: dict[str, Callable[[], ltx.Strategy]] = {
    "local SGD": lambda: ltx.LocalSGDStrategy(period=2),
    "DiLoCo": lambda: ltx.DiLoCoStrategy(period=2),
    "decentralized": lambda: ltx.BaguaStrategy("decentralized"),
    "asynchronous": lambda: ltx.BaguaStrategy("async"),
    "Adasum": lambda: ltx.HorovodStrategy(op="adasum"),
}


def told(strategy: ltx.Strategy, outputs: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """``metrics.loss`` and ``metrics.grad_norm`` of one step, whose gradient is x / 2."""
    measured = ltx.optim.chain(ltx.optim.measure_global_norm(), sgd)
    train = ltx.train_step(ltx.data_parallel(lambda w, x: (w * x).mean(), strategy, outputs=outputs), measured)
    metrics = train(train.init(torch.ones(2)), x)[1]
    return metrics.loss, metrics.grad_norm


@pytest.mark.parametrize("name", LOCAL)
def test_loss_and_norm_are_the_ranks_own_or_outputs_means(name: str, ranks: Ranks, seed: int) -> None:
    xs, strategy = torch.randn(2, 2), LOCAL[name]()
    norms, losses = xs.norm(dim=1) / 2, xs.mean(1)
    for outputs, wanted in (("local", losses), ("mean", losses.mean().expand(2))):
        found = [*ranks(2).run(lambda outputs=outputs: told(strategy, outputs, xs[ltx.world().rank]))]
        if name != "asynchronous":  # which leaves work under way, so that simulated ranks can't
            found += [*zip(*ltx.vmap(lambda x, outputs=outputs: told(strategy, outputs, x))(xs), strict=True)]
        for place, values in enumerate(found):
            torch.testing.assert_close(values, (wanted[place % 2], norms[place % 2]))
    for found in ranks(2).run(lambda: told(ltx.DDPStrategy(), "local", xs[ltx.world().rank])):
        torch.testing.assert_close(found, (losses.mean(), xs.mean(0).norm() / 2))


@pytest.mark.parametrize("name", LOCAL)
def test_a_plain_gradient_is_the_ranks_own_where_ranks_share_something_else(name: str, ranks: Ranks) -> None:
    step = ltx.data_parallel(lambda w, x: (w * x).sum(), LOCAL[name]())

    def on_rank() -> Tensor:
        x = torch.full((2,), 1.0 + ltx.world().rank)
        if not stateful(step.strategy):
            return ltx.grad(step)(torch.ones(2), x)
        return ltx.grad(step)(torch.ones(2), x, sync_state=step.init(torch.ones(2)))[0]

    for rank, found in enumerate(ranks(2).run(on_rank)):
        torch.testing.assert_close(found, torch.full((2,), 1.0 + rank))


def seeded(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    w = torch.randn(3)
    return ltx.grad(ltx.data_parallel(lambda w, x: (w * x).sum()))(w, x)


def test_an_equal_seed_on_simulated_ranks(ranks: Ranks) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    refuses(ReplicaDivergedError, r"make parameters outside of it, or with randomness='same'", ltx.vmap(seeded), x)
    real = ranks(2).run(lambda: seeded(x[ltx.world().rank]))
    for found in (ltx.vmap(seeded, randomness="same")(x), torch.stack(list(real))):
        torch.testing.assert_close(found, x.mean(0).expand(2, 3))


def by_experts(experts: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients with respect to an expert that each rank holds alone, and to a weight that all share."""
    step = ltx.data_parallel(lambda e, w, x: (ltx.psum(e) * w * x).sum(), argnums=1)
    rank = ltx.world().rank
    return torch.func.grad(step, argnums=(0, 1))(experts[rank], torch.tensor(3.0), torch.tensor(1.0 + rank))


def test_experts_have_the_gradient_of_the_sum(ranks: Ranks, seed: int) -> None:
    experts, w = torch.randn(2, requires_grad=True), torch.tensor(3.0, requires_grad=True)
    mean = (experts.sum() * w * torch.tensor([1.0, 2.0])).mean()
    by_expert, by_weight = torch.autograd.grad(mean, (experts, w))
    for rank, (expert, weight) in enumerate(ranks(2).run(by_experts, experts.detach())):
        torch.testing.assert_close((expert, weight), (2 * by_expert[rank], by_weight))
