"""A loss with a penalty of its curvature, λ ‖H v‖² for a random v: three derivatives, one over another, over all ranks.

    ltx run -n 2 examples/curvature_penalty.py

H is that of the loss over all ranks' samples, so H v is averaged over ranks before it is squared: a mean of squares of
each rank's own H v is larger. The train step differentiates through that mean.
"""

import argparse

import torch
from plain.curvature_penalty import PENALTY, RATE, batch, digits, directions, net
from torch.func import grad, jvp
from torch.nn.functional import cross_entropy

import ltx


def main(steps=100):
    torch.manual_seed(0)
    model = net()

    def own_loss(params, x, y):
        return cross_entropy(ltx.functional_call(model, params, x), y)

    def loss_fn(params, x, y, direction):
        # Forward over reverse, of this rank's samples alone; pmean makes it that of all.
        _, own = jvp(lambda params: grad(own_loss)(params, x, y), (params,), (direction,))
        product = ltx.pmean(own)
        return own_loss(params, x, y) + PENALTY * sum(part.square().sum() for part in product.values())

    train = ltx.train_step(ltx.data_parallel(loss_fn), ltx.optim.from_torch(torch.optim.SGD, lr=RATE))
    losses = []
    with ltx.init() as world:
        state = train.init(model.to(world.device))
        x, y = digits()
        for step in range(steps):
            part = ltx.shard(batch(x, y, step))
            state, metrics = train(state, *ltx.to_device((*part, directions(dict(model.named_parameters()), step))))
            losses.append(metrics.loss.item())
        if world.is_global_zero:
            print(f"loss with its penalty {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    main(parser.parse_args().steps)
