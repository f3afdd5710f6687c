"""K-FAC on digits (Martens and Grosse, ICML 2015; the Fisher of the given labels), in plain torch: one process."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

BATCH, RATE, DAMPING, DECAY, TARGET = 256, 0.3, 1e-3, 0.9, 0.97
SGD_RATE = 1.0  # the best of 0.5, 1, 2


def digits():
    data = load_digits()
    return torch.tensor(data.data) / 16, torch.tensor(data.target)


def batch(x, y, step):
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(step))[:BATCH]
    return x[chosen], y[chosen]


def net():
    """The matrices of two layers, a bias as the last column of each: (32, 64 + 1) and (10, 32 + 1)."""
    layers = torch.nn.Linear(64, 32).double(), torch.nn.Linear(32, 10).double()
    return [torch.cat([layer.weight, layer.bias[:, None]], 1).detach() for layer in layers]


def forward(params, x, probes=(0.0, 0.0)):
    """The logits, and what each layer gets; the gradient to a probe is that to the layer's output."""
    inputs = []
    for number, (matrix, probe) in enumerate(zip(params, probes, strict=True)):
        inputs.append(torch.cat([x.tanh() if number else x, torch.ones_like(x[..., :1])], -1))
        x = inputs[-1] @ matrix.t() + probe
    return x, inputs


def accuracy(params, x, y):
    return (forward(params, x)[0].argmax(-1) == y).double().mean().item()


def smoothed(old, new):
    """The moving averages of factors; `old` is None in the first step."""
    return new if old is None else [DECAY * a + (1 - DECAY) * b for a, b in zip(old, new, strict=True)]


def updated(params, grads, a, g):
    """Each layer's gradient between the inverses of its damped factors is its step."""

    def inverse(factor):
        return torch.linalg.inv(
            factor + DAMPING**0.5 * torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
        )

    layers = zip(params, grads, a, g, strict=True)
    return [p - RATE * inverse(gg) @ grad @ inverse(aa) for p, grad, aa, gg in layers]


def steps_of_sgd(most=2000):
    """How many steps SGD takes to the same accuracy."""
    torch.manual_seed(0)
    params, (x, y) = net(), digits()
    for step in range(most):
        params = [p.requires_grad_() for p in params]
        part_x, part_y = batch(x, y, step)
        grads = torch.autograd.grad(cross_entropy(forward(params, part_x)[0], part_y), params)
        params = [(p - SGD_RATE * grad).detach() for p, grad in zip(params, grads, strict=True)]
        if accuracy(params, x, y) >= TARGET:
            return step + 1
    return most


def main(steps=60):
    torch.manual_seed(0)
    params, a, g = net(), None, None
    x, y = digits()
    losses = []
    for step in range(steps):
        part_x, part_y = batch(x, y, step)
        probes = [torch.zeros(len(part_x), len(p), dtype=p.dtype, requires_grad=True) for p in params]
        logits, inputs = forward(params, part_x, probes)
        each = torch.autograd.grad(cross_entropy(logits, part_y, reduction="sum"), probes)  # a row for each sample
        inputs = [value.detach() for value in inputs]
        a = smoothed(a, [value.t() @ value / len(value) for value in inputs])
        g = smoothed(g, [value.t() @ value / len(value) for value in each])
        grads = [out.t() @ value / len(value) for out, value in zip(each, inputs, strict=True)]
        params = updated(params, grads, a, g)
        losses.append(cross_entropy(forward(params, x)[0], y).item())
    print(f"loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    main(parser.parse_args().steps)
