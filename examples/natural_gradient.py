"""Natural gradient: the empirical Fisher over all ranks' samples, whose products are means, solved for the gradient.

    ltx run -n 2 examples/natural_gradient.py

F = E[g gᵀ] of each sample's gradient g is never made: F v is the mean of g (g · v), each rank's samples by
themselves and then over ranks, and conjugate gradients need no more. Each product sends one vector.
"""

import argparse

import torch
from plain.natural_gradient import DAMPING, RATE, TARGET, accuracy, batch, digits, net, solved, steps_of_sgd
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

import ltx


def main(steps=40):
    torch.manual_seed(0)
    model = net()
    names, shapes = zip(*((name, p.shape) for name, p in model.named_parameters()), strict=True)

    def named(vector):
        parts = vector.split([shape.numel() for shape in shapes])
        return {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}

    def of_one_sample(vector, x, y):
        return cross_entropy(functional_call(model, named(vector), (x,)), y)

    losses, reached = [], None
    with ltx.init() as world:
        model.to(world.device)
        vector = torch.cat([p.detach().flatten() for p in model.parameters()])
        x, y = ltx.to_device(digits())
        for step in range(steps):
            rows = vmap(grad(of_one_sample), in_dims=(None, 0, 0))(vector, *ltx.shard(batch(x, y, step)))

            def fisher(v, rows=rows):
                return ltx.pmean(rows.t() @ (rows @ v) / len(rows)) + DAMPING * v

            vector = vector - RATE * solved(fisher, ltx.pmean(rows.mean(0)))
            logits = functional_call(model, named(vector), (x,))
            losses.append(cross_entropy(logits, y).item())
            if reached is None and accuracy(logits, y) >= TARGET:
                reached = step + 1
        if world.is_global_zero:
            print(f"loss {losses[-1]:.4f}")
            if reached:
                print(f"{TARGET:.0%} of digits right after {reached} steps; SGD takes {steps_of_sgd()}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    main(parser.parse_args().steps)
