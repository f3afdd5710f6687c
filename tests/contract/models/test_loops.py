"""Other people's loops on two ranks and alone, each against the same loop in one process on all samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ltx
from tests.kinds import Params, Ranks
from tests.train_on import go_on, trained

Pair = tuple[Params, Params]

NET = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def loss(p: Params, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(ltx.functional_call(NET, p, (x,)), y)


def problem() -> tuple[Params, Tensor, Tensor]:
    """Rank 0's, on every rank."""
    params = {name: torch.randn_like(p) for name, p in NET.named_parameters()}
    made: tuple[Params, Tensor, Tensor] = ltx.broadcast((params, torch.randn(32, 4), torch.randint(3, (32,))))
    return made


def data_loader() -> Pair:
    """With a sampler and workers, which are forks."""
    world, (params, x, y) = ltx.world(), problem()
    sampler: Any = DistributedSampler(TensorDataset(x, y), num_replicas=world.size, rank=world.rank, shuffle=False)
    loader: Any = DataLoader(TensorDataset(x, y), batch_size=4, sampler=sampler, num_workers=2)
    train = ltx.train_step(ltx.data_parallel(loss), ltx.optim.from_torch(torch.optim.SGD, lr=0.1))
    state, alone = train.init(params), params
    state, _ = go_on(train, state, [tuple(batch) for batch in loader])
    for step in range(32 // (4 * world.size)):
        places = [rank + world.size * (4 * step + k) for rank in range(world.size) for k in range(4)]
        gradients = grad(loss)(alone, x[places], y[places])
        alone = {k: p - 0.1 * gradients[k] for k, p in alone.items()}
    return state.params, alone


def clipped_mean(per_sample: Params) -> Params:
    norms = torch.stack([g.flatten(1).square().sum(1) for g in per_sample.values()]).sum(0).sqrt()
    return {k: torch.einsum("n,n...->...", (1 / norms).clamp(max=1), g) / len(g) for k, g in per_sample.items()}


def dp_sgd() -> Pair:
    params, x, y = problem()
    local = ltx.block_backward_sync(ltx.data_parallel(loss))
    mine, labels = ltx.shard((x, y))
    clipped = clipped_mean(vmap(grad(local), in_dims=(None, 0, 0))(params, mine[:, None], labels[:, None]))
    whole = clipped_mean(vmap(grad(loss), in_dims=(None, 0, 0))(params, x[:, None], y[:, None]))
    return ltx.sync_gradients(clipped, ltx.DDPStrategy())[0], whole


def physics() -> Pair:
    """A loss of derivatives with respect to the batch, which the step makes a leaf."""

    def residual(p: Params, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        u = ltx.functional_call(NET, p, (x,))
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        return (bend.sum(1) + u.sum(1)).square().mean()

    params, x, _ = problem()
    leaves = {k: p.clone().requires_grad_() for k, p in params.items()}
    found = torch.autograd.grad(residual(leaves, x), list(leaves.values()), materialize_grads=True)
    state, _ = trained(residual, ltx.optim.from_torch(torch.optim.SGD, lr=0.01), params, [ltx.shard(x)])
    return state.params, {k: p - 0.01 * g for (k, p), g in zip(params.items(), found, strict=True)}


def contrastive() -> Pair:
    def over(gather: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
        def clip(p: Params, images: Tensor, texts: Tensor) -> Tensor:
            one, two = gather(images @ p["0.weight"].t()), gather(texts @ p["0.weight"].t().sin())
            return cross_entropy(one @ two.t(), torch.arange(len(one)))

        return clip

    params, x, _ = problem()
    params, images, texts = {"0.weight": params["0.weight"]}, x[:16], x[16:]
    step = ltx.data_parallel(over(lambda rows: ltx.all_gather(rows, tiled=True)))
    return ltx.grad(step)(params, *ltx.shard((images, texts))), grad(over(lambda rows: rows))(params, images, texts)


LOOPS = {"DataLoader": data_loader, "DP-SGD": dp_sgd, "PINN": physics, "CLIP": contrastive}


@pytest.mark.parametrize("name", LOOPS)
def test_like_one_process(name: str, ranks: Ranks, seed: int) -> None:
    for found, expected in (LOOPS[name](), *ranks(2).run(LOOPS[name])):
        torch.testing.assert_close(
            {k: v.detach() for k, v in found.items()}, {k: v.detach() for k, v in expected.items()}
        )
