"""K-FAC with a vmapped model: Kronecker factors of each layer, as means over all ranks' samples.

    ltx run -n 2 examples/kfac.py

The model is written for one sample. Its layers' inputs a and the gradients g to their outputs give the factors
E[a aᵀ] and E[g gᵀ], and the gradient E[g aᵀ] too; one call averages all of them over ranks.
"""

import argparse

import torch
from plain.kfac import TARGET, accuracy, batch, digits, forward, net, smoothed, steps_of_sgd, updated
from torch.func import grad, vmap
from torch.nn.functional import cross_entropy

import ltx


def of_one_sample(probes, params, x, y):
    logits, inputs = forward(params, x, probes)
    return cross_entropy(logits, y), inputs


def means(params, x, y):
    """Per layer the gradient and the two factors, over this rank's samples."""
    probes = [torch.zeros(len(p), dtype=p.dtype, device=p.device) for p in params]
    g, a = vmap(grad(of_one_sample, has_aux=True), in_dims=(None, None, 0, 0))(probes, params, x, y)
    return [
        [one.t() @ other / len(x) for one, other in zip(ones, others, strict=True)]
        for ones, others in ((g, a), (a, a), (g, g))
    ]


def main(steps=60):
    torch.manual_seed(0)
    losses, reached = [], None
    with ltx.init() as world:
        params, (x, y) = ltx.to_device((net(), digits()))
        a = g = None
        for step in range(steps):
            grads, new_a, new_g = ltx.pmean(means(params, *ltx.shard(batch(x, y, step))))
            a, g = smoothed(a, new_a), smoothed(g, new_g)
            params = updated(params, grads, a, g)
            losses.append(cross_entropy(forward(params, x)[0], y).item())
            if reached is None and accuracy(params, x, y) >= TARGET:
                reached = step + 1
        if world.is_global_zero:
            print(f"loss {losses[-1]:.4f}")
            if reached:
                print(f"{TARGET:.0%} of digits right after {reached} steps; SGD takes {steps_of_sgd()}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    main(parser.parse_args().steps)
