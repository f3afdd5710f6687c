"""DP-SGD on digits (Abadi et al., "Deep Learning with Differential Privacy", CCS 2016), in plain torch: one process."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

BATCH, CLIP, NOISE = 128, 1.0, 0.8


def digits():
    data = load_digits()
    return torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)


def batch(x, y, step):
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(step))[:BATCH]
    return x[chosen], y[chosen]


def net():
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))


def clipped_mean(per_sample):
    """The mean of gradients for each sample, each cut to a norm of CLIP."""
    norms = torch.stack([g.reshape(len(g), -1).square().sum(1) for g in per_sample.values()]).sum(0).sqrt()
    factors = (CLIP / norms).clamp(max=1.0) / len(norms)
    return {name: torch.einsum("n,n...->...", factors, g) for name, g in per_sample.items()}


def noise(like, step):
    """Gaussian noise for the mean over a batch, from a seed: the same one wherever it is drawn."""
    generator = torch.Generator().manual_seed(1_000_000 + step)
    return {
        name: torch.randn(g.shape, generator=generator).to(g.device) * (NOISE * CLIP / BATCH)
        for name, g in like.items()
    }


def main(steps=150):
    torch.manual_seed(0)
    model = net()
    x, y = digits()
    params = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(params.values(), lr=1.0, momentum=0.5)

    def loss_fn(params, x, y):
        return cross_entropy(functional_call(model, params, x), y)

    losses = []
    for step in range(steps):
        part_x, part_y = batch(x, y, step)
        per_sample = vmap(grad(loss_fn), in_dims=(None, 0, 0))(params, part_x[:, None], part_y[:, None])
        grads = clipped_mean(per_sample)
        for (name, p), extra in zip(params.items(), noise(grads, step).values(), strict=True):
            p.grad = (grads[name] + extra).detach()
        optimizer.step()
        losses.append(loss_fn(params, x, y).item())
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    main(parser.parse_args().steps)
