"""A GAN with batch norm, with DDP."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
data, noise = torch.randn(20, 32, 2) + 2, torch.randn(20, 32, 4)

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
labels = torch.arange(2.0).repeat_interleave(32 // size)[:, None]
ddp_g = DistributedDataParallel(generator, broadcast_buffers=False)
ddp_c = DistributedDataParallel(critic)
adam_g = torch.optim.Adam(generator.parameters(), lr=1e-2)
adam_c = torch.optim.Adam(critic.parameters(), lr=1e-2)
for epoch, (real, z) in enumerate(zip(data.chunk(size, dim=1)[rank], noise.chunk(size, dim=1)[rank], strict=True)):
    fake = ddp_g(z)
    loss_c = bce(ddp_c(torch.cat([fake.detach(), real])), labels)
    adam_c.zero_grad()
    loss_c.backward()
    adam_c.step()
    loss_g = softplus(-ddp_c(fake)).mean()
    adam_g.zero_grad()
    loss_g.backward()
    adam_g.step()
    dist.all_reduce(mean := loss_g.detach())
    if rank == 0:
        print(f"epoch {epoch}: loss {mean.item() / size:.4f}")
dist.destroy_process_group()
