"""A net on digits in plain torch, one process: what compressed gradients are to be compared with."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

BATCH = 64


def digits():
    data = load_digits()
    return torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)


def batch(x, y, step):
    chosen = torch.randint(len(x), (BATCH,), generator=torch.Generator().manual_seed(step))
    return x[chosen], y[chosen]


def net():
    layers = torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128), torch.nn.ReLU()
    return torch.nn.Sequential(*layers, torch.nn.Linear(128, 10))


def main(steps=100):
    torch.manual_seed(0)
    model = net()
    x, y = digits()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        part_x, part_y = batch(x, y, step)
        loss = cross_entropy(model(part_x), part_y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    main(parser.parse_args().steps)
