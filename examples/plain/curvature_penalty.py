"""A loss with a penalty of its curvature, λ ‖H v‖² for a random v, on digits, in plain torch: one process."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

BATCH, RATE, PENALTY = 256, 0.3, 0.01


def digits():
    data = load_digits()
    return torch.tensor(data.data) / 16, torch.tensor(data.target)


def batch(x, y, step):
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(step))[:BATCH]
    return x[chosen], y[chosen]


def net():
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10)).double()


def directions(params, step):
    """Of a standard normal distribution: the mean of ‖H v‖² is the squared Frobenius norm of H."""
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(p.shape, generator=generator, dtype=p.dtype) for name, p in params.items()}


def main(steps=100):
    torch.manual_seed(0)
    model, (x, y) = net(), digits()
    params = dict(model.named_parameters())
    optimizer = torch.optim.SGD(params.values(), lr=RATE)
    losses = []
    for step in range(steps):
        part_x, part_y = batch(x, y, step)
        loss = cross_entropy(model(part_x), part_y)
        grads = torch.autograd.grad(loss, params.values(), create_graph=True)
        along = sum((g * v).sum() for g, v in zip(grads, directions(params, step).values(), strict=True))
        product = torch.autograd.grad(along, params.values(), create_graph=True)
        loss = loss + PENALTY * sum(part.square().sum() for part in product)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss with its penalty {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    main(parser.parse_args().steps)
