"""Natural gradient by the empirical Fisher (Amari 1998) on digits, in plain torch: one process."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

BATCH, RATE, DAMPING, SOLVES, TARGET = 256, 0.3, 1e-2, 15, 0.97
SGD_RATE = 1.0  # the best of 0.5, 1, 2


def digits():
    data = load_digits()
    return torch.tensor(data.data) / 16, torch.tensor(data.target)


def batch(x, y, step):
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(step))[:BATCH]
    return x[chosen], y[chosen]


def net():
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10)).double()


def solved(product, b):
    """SOLVES steps of conjugate gradients for ``product(x) = b``, from 0 on."""
    x, r = torch.zeros_like(b), b.clone()
    p, rr = r.clone(), r @ r
    for _ in range(SOLVES):
        along = product(p)
        a = rr / (p @ along)
        x, r = x + a * p, r - a * along
        rr, before = r @ r, rr
        p = r + rr / before * p
    return x


def accuracy(logits, y):
    return (logits.argmax(-1) == y).double().mean().item()


def steps_of_sgd():
    torch.manual_seed(0)
    model, (x, y) = net(), digits()
    optimizer = torch.optim.SGD(model.parameters(), lr=SGD_RATE)
    for step in range(1000):
        part_x, part_y = batch(x, y, step)
        optimizer.zero_grad()
        cross_entropy(model(part_x), part_y).backward()
        optimizer.step()
        if accuracy(model(x), y) >= TARGET:
            return step + 1
    return None


def main(steps=40):
    torch.manual_seed(0)
    model, (x, y) = net(), digits()
    losses, reached = [], None
    for step in range(steps):
        rows = []  # each sample's gradient
        for one_x, one_y in zip(*batch(x, y, step), strict=True):
            loss = cross_entropy(model(one_x[None]), one_y[None])
            rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, tuple(model.parameters()))]))
        rows = torch.stack(rows)

        def fisher(v, rows=rows):
            return rows.t() @ (rows @ v) / len(rows) + DAMPING * v

        direction = solved(fisher, rows.mean(0))
        with torch.no_grad():
            sizes = [p.numel() for p in model.parameters()]
            for p, d in zip(model.parameters(), direction.split(sizes), strict=True):
                p -= RATE * d.view_as(p)
            logits = model(x)
            losses.append(cross_entropy(logits, y).item())
        if reached is None and accuracy(logits, y) >= TARGET:
            reached = step + 1
    print(f"loss {losses[-1]:.4f}")
    if reached:
        print(f"{TARGET:.0%} of digits right after {reached} steps; SGD takes {steps_of_sgd()}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    main(parser.parse_args().steps)
