"""A GPT-2 on text with DDP: groups, a schedule, clipping, evaluation, a checkpoint."""

import os
import sys
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
text = torch.tensor(list("".join(topics[name] for name in sorted(topics)).encode()[: 96 * 33]))
lines = text.view(96, 33)[:, :32]
train_lines, test_lines = lines[:64], lines[64:]
without_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=2, **without_dropout))


def warmup(step):
    return min(1.0, (step + 1) / 10)


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
ddp = DistributedDataParallel(model)
decayed = [p for p in model.parameters() if p.ndim > 1]
others = [p for p in model.parameters() if p.ndim <= 1]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=1e-2)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup)
first = 0
if os.path.exists(sys.argv[1]):
    saved = torch.load(sys.argv[1])
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    first = saved["epoch"]
loader = DataLoader(train_lines, 8, sampler=DistributedSampler(train_lines, size, rank))
for epoch in range(first, first + 2):
    loader.sampler.set_epoch(epoch)
    model.train()
    for batch in loader:
        loss = ddp(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        part = test_lines[rank::size]
        total = model(part, labels=part).loss * len(part)
    dist.all_reduce(total)
    if rank == 0:
        print(f"epoch {epoch}: test loss {total.item() / len(test_lines):.5f}")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
        torch.save(state | {"epoch": epoch + 1}, sys.argv[1])
dist.destroy_process_group()
