"""A contrastive loss over pairs (Radford et al., "CLIP", ICML 2021), in plain torch: one process, whole batches.

A pair is the upper and the lower half of a handwritten digit; each has a tower of its own.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, normalize

BATCH = 128


def halves():
    pixels = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    return pixels[:, :32], pixels[:, 32:]


def batch(upper, lower, step):
    chosen = torch.randperm(len(upper), generator=torch.Generator().manual_seed(step))[:BATCH]
    return upper[chosen], lower[chosen]


class Towers(nn.Module):
    """Two halves to two unit vectors each, and a temperature."""

    def __init__(self, width=64, out=16):
        super().__init__()
        self.upper = nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.Linear(width, out))
        self.lower = nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.Linear(width, out))
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, upper, lower):
        return normalize(self.upper(upper), dim=1), normalize(self.lower(lower), dim=1), self.log_scale.exp()


def main(steps=200):
    torch.manual_seed(0)
    model = Towers()
    upper, lower = halves()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        one, two, scale = model(*batch(upper, lower, step))
        logits = scale * one @ two.t()
        targets = torch.arange(len(one))
        loss = (cross_entropy(logits, targets) + cross_entropy(logits.t(), targets)) / 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    main(parser.parse_args().steps)
