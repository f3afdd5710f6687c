"""A GAN with batch norm, with ltx."""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.functional import softplus

import ltx

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
data, noise = torch.randn(20, 32, 2) + 2, torch.randn(20, 32, 4)

world = ltx.init()
rank, size = world.rank, world.size
labels = torch.arange(2.0).repeat_interleave(32 // size)[:, None]


def loss_g(params, buffers, critic_params, z):
    fake, buffers = ltx.functional_call(generator, (params, buffers), z, return_buffers=True)
    return softplus(-ltx.functional_call(critic, critic_params, fake)).mean(), buffers


adam = ltx.optim.from_torch(torch.optim.Adam, lr=1e-2)
train_g = ltx.train_step(ltx.data_parallel(loss_g), adam)
train_c = ltx.train_step(ltx.data_parallel(lambda params, x: bce(ltx.functional_call(critic, params, x), labels)), adam)
state_g, state_c = train_g.init(generator, dict(generator.named_buffers())), train_c.init(critic)
for epoch, (real, z) in enumerate(zip(data.chunk(size, dim=1)[rank], noise.chunk(size, dim=1)[rank], strict=True)):
    fake, _ = ltx.functional_call(generator, (state_g.params, state_g.buffers), z, return_buffers=True)
    state_c, _ = train_c(state_c, torch.cat([fake, real]))
    state_g, metrics = train_g(state_g, state_c.params, z)
    if rank == 0:
        print(f"epoch {epoch}: loss {metrics.loss.item():.4f}")
