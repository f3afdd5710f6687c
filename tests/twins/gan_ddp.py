"""A GAN with batch norm, with DDP."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, softplus
from torch.nn.parallel import DistributedDataParallel


def bce(logits, is_real):
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(is_real)))


torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
data, noise = torch.randn(20, 32, 2) + 2, torch.randn(20, 32, 4)

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
generator = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(generator))
critic = DistributedDataParallel(critic, broadcast_buffers=False)
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-2)
optimizer_c = torch.optim.Adam(critic.parameters(), lr=1e-2)
for real, z in zip(data.chunk(size, dim=1)[rank], noise.chunk(size, dim=1)[rank], strict=True):
    fake = generator(z)
    loss_c = bce(critic(real), True) + bce(critic(fake.detach()), False)
    optimizer_c.zero_grad()
    loss_c.backward()
    optimizer_c.step()
    loss_g = softplus(-critic(fake)).mean()
    optimizer_g.zero_grad()
    loss_g.backward()
    optimizer_g.step()
