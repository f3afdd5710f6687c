"""A contrastive loss over the samples of all ranks: each compares its own with everybody's.

    ltx run -n 2 examples/clip.py

`ltx.all_gather` has the right gradient, to every rank's samples; each rank computes its own rows of the matrix.
"""

import argparse

import torch
from plain.clip import Towers, batch, halves
from torch.nn.functional import cross_entropy

import ltx


def main(steps=200):
    torch.manual_seed(0)
    model = Towers()

    @ltx.data_parallel
    def loss_fn(params, upper, lower):
        one, two, scale = ltx.functional_call(model, params, (upper, lower))
        all_one, all_two = ltx.all_gather((one, two), tiled=True)
        targets = len(one) * ltx.axis_index() + torch.arange(len(one), device=one.device)  # the partners of mine
        return (
            cross_entropy(scale * one @ all_two.t(), targets) + cross_entropy(scale * two @ all_one.t(), targets)
        ) / 2

    train = ltx.train_step(loss_fn, ltx.optim.from_torch(torch.optim.AdamW, lr=1e-3))
    losses = []
    with ltx.init() as world:
        upper, lower = ltx.to_device(halves())
        state = train.init(model.to(world.device))
        for step in range(steps):
            state, metrics = train(state, *ltx.shard(batch(upper, lower, step)))
            losses.append(metrics.loss.item())
            if world.is_global_zero and (step % 50 == 0 or step == steps - 1):
                print(f"step {step}: loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    main(parser.parse_args().steps)
