"""A GPT-2 on text with ltx: groups, a schedule, clipping, evaluation, a checkpoint."""

import os
import sys
from pydoc_data.topics import topics

import torch
from torch.utils.data import DataLoader, DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel

import ltx

torch.manual_seed(0)
text = torch.tensor(list("".join(topics[name] for name in sorted(topics)).encode()[: 96 * 33]))
lines = text.view(96, 33)[:, :32]
train_lines, test_lines = lines[:64], lines[64:]
without_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=2, **without_dropout))


def warmup(step):
    return min(1.0, (step + 1) / 10)


world = ltx.init()
rank, size = world.rank, world.size
others = {name: {"weight_decay": 0.0} for name, p in model.named_parameters() if p.ndim <= 1}
adamw = ltx.optim.from_torch(torch.optim.AdamW, others, lr=lambda step: 1e-2 * warmup(step), weight_decay=0.1)
step = ltx.data_parallel(lambda params, batch: ltx.functional_call(model, params, batch, {"labels": batch}).loss)
train = ltx.train_step(step, ltx.optim.chain(ltx.optim.clip_by_global_norm(1.0), adamw))
state = train.init(model)
first = 0
if os.path.exists(sys.argv[1]):
    saved = ltx.checkpoint.load(sys.argv[1], state)
    state, first = saved.state, saved.data["epoch"]
loader = DataLoader(train_lines, 8, sampler=DistributedSampler(train_lines, size, rank))
for epoch in range(first, first + 2):
    loader.sampler.set_epoch(epoch)
    model.train()
    for batch in loader:
        state, metrics = train(state, batch)
    model.eval()
    with torch.no_grad():
        part = test_lines[rank::size]
        mean = ltx.weighted_mean(model(part, labels=part).loss, len(part))
    if rank == 0:
        print(f"epoch {epoch}: test loss {mean.item():.5f}")
    ltx.checkpoint.save(sys.argv[1], state, data={"epoch": epoch + 1})
