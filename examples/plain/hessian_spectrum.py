"""The largest eigenvalues of a loss's Hessian, in plain torch: the whole matrix, in one process."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch.func import functional_call, hessian
from torch.nn.functional import cross_entropy

SHOWN = 6


def digits():
    """1,796 digits, which two, three and four ranks divide."""
    data = load_digits()
    return torch.tensor(data.data[:1796]) / 16, torch.tensor(data.target[:1796])


def trained(steps=200):
    """A small net in float64 that has seen some steps of gradient descent."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 6), torch.nn.Tanh(), torch.nn.Linear(6, 10)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, y = digits()
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def main(steps=200):
    model = trained(steps)
    x, y = digits()
    names, values = zip(*((name, p.detach()) for name, p in model.named_parameters()), strict=True)

    def loss_fn(flat):
        parts = flat.split([value.numel() for value in values])
        params = {name: part.view_as(value) for name, part, value in zip(names, parts, values, strict=True)}
        return cross_entropy(functional_call(model, params, x), y)

    matrix = hessian(loss_fn)(torch.cat([value.flatten() for value in values]))
    largest = torch.linalg.eigvalsh(matrix).flip(0)[:SHOWN].tolist()
    print("largest eigenvalues: " + ", ".join(f"{value:.4f}" for value in largest))
    return largest


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    main(parser.parse_args().steps)
