"""An MLP with DDP."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.manual_seed(0)
x = torch.randn(256, 8)
data = TensorDataset(x, x[:, :3].argmax(dim=1))
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(data, 16, sampler=DistributedSampler(data, size, rank))
for epoch in range(3):
    loader.sampler.set_epoch(epoch)
    for x, y in loader:
        loss = cross_entropy(ddp(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.all_reduce(mean := loss.detach())
    if rank == 0:
        print(f"epoch {epoch}: loss {mean.item() / size:.5f}")
dist.destroy_process_group()
