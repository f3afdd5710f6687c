"""An MLP with ltx."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ltx

torch.manual_seed(0)
x = torch.randn(256, 8)
data = TensorDataset(x, x[:, :3].argmax(dim=1))
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))

world = ltx.init()
rank, size = world.rank, world.size
step = ltx.data_parallel(lambda params, x, y: cross_entropy(ltx.functional_call(model, params, x), y))
train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9))
state = train.init(model)
loader = DataLoader(data, 16, sampler=DistributedSampler(data, size, rank))
for epoch in range(3):
    loader.sampler.set_epoch(epoch)
    for x, y in loader:
        state, metrics = train(state, x, y)
    if rank == 0:
        print(f"epoch {epoch}: loss {metrics.loss.item():.5f}")
