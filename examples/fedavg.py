"""Federated averaging with 64 simulated clients in one process: weights by samples, and 16 clients a turn.

    python examples/fedavg.py

`turn_of_a_client` is written as one client sees it, and `ltx.vmap` runs all at once. A client that doesn't take part
has the weight 0.
"""

import argparse

import torch
from plain.fedavg import LARGEST, LOCAL_STEPS, RATE, chosen, clients, net
from torch.func import grad
from torch.nn.functional import cross_entropy

import ltx


def main(steps=40):
    torch.manual_seed(0)
    model = net()
    params = {name: p.detach() for name, p in model.named_parameters()}
    x, y, counts, everything = clients()

    def loss_fn(params, x, y, weights):
        losses = cross_entropy(ltx.functional_call(model, params, x), y, reduction="none")
        return (losses * weights).sum() / weights.sum()

    def turn_of_a_client(params, x, y, count, takes_part):
        weights = (torch.arange(LARGEST) < count).float()  # clients have unequal numbers of samples
        for _ in range(LOCAL_STEPS):
            grads = grad(loss_fn)(params, x, y, weights)
            params = {name: p - RATE * grads[name] for name, p in params.items()}
        return ltx.weighted_mean(params, count * takes_part, axis="clients")

    turn_of_all = ltx.vmap(turn_of_a_client, axis_name="clients", in_dims=(None, 0, 0, 0, 0))
    losses = []
    for turn in range(steps):
        params = {name: p[0] for name, p in turn_of_all(params, x, y, counts, chosen(turn)).items()}  # equal on all
        losses.append(loss_fn(params, *everything, torch.ones(len(everything[1]))).item())
        if turn % 10 == 0 or turn == steps - 1:
            print(f"turn {turn}: loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    main(parser.parse_args().steps)
