"""MAML on sine waves (Finn et al., "Model-Agnostic Meta-Learning", ICML 2017), in plain torch: one process."""

import argparse

import torch
from torch.func import functional_call, grad, vmap
from torch.nn.functional import mse_loss

TASKS, SHOTS, INNER = 16, 10, 0.02


def net():
    layers = torch.nn.Linear(1, 40), torch.nn.Tanh(), torch.nn.Linear(40, 40), torch.nn.Tanh(), torch.nn.Linear(40, 1)
    return torch.nn.Sequential(*layers)


def tasks(step):
    """Sine waves of random amplitude and phase: points to adapt with and points to be judged by, (TASKS, SHOTS, 1)."""
    generator = torch.Generator().manual_seed(step)
    amplitude = 0.1 + 4.9 * torch.rand(TASKS, 1, 1, generator=generator)
    phase = 3.14 * torch.rand(TASKS, 1, 1, generator=generator)
    x = 10 * torch.rand(TASKS, 2 * SHOTS, 1, generator=generator) - 5
    y = amplitude * torch.sin(x - phase)
    return x[:, :SHOTS], y[:, :SHOTS], x[:, SHOTS:], y[:, SHOTS:]


def meta_loss(call, params, x, y, query_x, query_y):
    """The loss of a task's queries after one step of gradient descent on its shots."""

    def loss(params, x, y):
        return mse_loss(call(params, (x,)), y)

    inner = grad(loss)(params, x, y)
    return loss({name: value - INNER * inner[name] for name, value in params.items()}, query_x, query_y)


def main(steps=300):
    torch.manual_seed(0)
    model = net()
    params = dict(model.named_parameters())
    optimizer = torch.optim.Adam(params.values(), lr=1e-3)

    def one_task(params, *task):
        return meta_loss(lambda params, x: functional_call(model, params, x), params, *task)

    losses = []
    for step in range(steps):
        loss = vmap(one_task, in_dims=(None, 0, 0, 0, 0))(params, *tasks(step)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step}: loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    main(parser.parse_args().steps)
