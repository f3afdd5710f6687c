"""Federated averaging (McMahan et al., AISTATS 2017) with 64 clients, in plain torch: one client after the other."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch.func import functional_call, grad
from torch.nn.functional import cross_entropy

CLIENTS, CHOSEN, LOCAL_STEPS, RATE, LARGEST = 64, 16, 5, 0.5, 40


def clients():
    """Digits of 64 clients, of few classes each: x (64, 40, 64), y (64, 40), and how many of the 40 each one has."""
    data = load_digits()
    order = data.target.argsort(kind="stable")
    x, y = torch.tensor(data.data[order], dtype=torch.float32) / 16, torch.tensor(data.target[order])
    counts = torch.randint(10, 45, (CLIENTS,), generator=torch.Generator().manual_seed(0)).clamp(max=LARGEST)
    starts = torch.randint(len(x) - LARGEST, (CLIENTS, 1), generator=torch.Generator().manual_seed(1))
    places = starts + torch.arange(LARGEST)
    return x[places], y[places], counts, (x, y)


def chosen(turn):
    """Which clients take part in this turn: 16 of the 64, a bool for each."""
    takes_part = torch.zeros(CLIENTS, dtype=torch.bool)
    takes_part[torch.randperm(CLIENTS, generator=torch.Generator().manual_seed(100 + turn))[:CHOSEN]] = True
    return takes_part


def net():
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))


def main(steps=40):
    torch.manual_seed(0)
    model = net()
    params = {name: p.detach() for name, p in model.named_parameters()}
    x, y, counts, everything = clients()

    def loss_fn(params, x, y):
        return cross_entropy(functional_call(model, params, x), y)

    losses = []
    for turn in range(steps):
        total = {name: torch.zeros_like(p) for name, p in params.items()}
        takes_part = chosen(turn)
        for client in takes_part.nonzero().flatten().tolist():
            count, local = counts[client], params
            for _ in range(LOCAL_STEPS):
                grads = grad(loss_fn)(local, x[client, :count], y[client, :count])
                local = {name: p - RATE * grads[name] for name, p in local.items()}
            total = {name: total[name] + count * p for name, p in local.items()}
        params = {name: p / counts[takes_part].sum() for name, p in total.items()}
        losses.append(loss_fn(params, *everything).item())
        if turn % 10 == 0 or turn == steps - 1:
            print(f"turn {turn}: loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    main(parser.parse_args().steps)
