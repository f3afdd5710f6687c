"""DP-SGD on all ranks: each sample's gradient is clipped where it is, and all ranks add the same noise.

    ltx run -n 2 examples/dp_sgd.py

The step returns gradients instead of a loss, and `returns="grads"` reduces those. In real use the seed of the noise
has to be secret.
"""

import argparse

import torch
from plain.dp_sgd import batch, clipped_mean, digits, net, noise
from torch.func import grad, vmap
from torch.nn.functional import cross_entropy

import ltx


def main(steps=150):
    torch.manual_seed(0)
    model = net()

    def loss_fn(params, x, y):
        return cross_entropy(ltx.functional_call(model, params, x), y)

    @ltx.data_parallel(returns="grads")
    def private_step(params, x, y, step):
        grads = clipped_mean(vmap(grad(loss_fn), in_dims=(None, 0, 0))(params, x[:, None], y[:, None]))
        noisy = {name: grads[name] + extra for name, extra in noise(grads, step).items()}  # the same on all ranks
        return noisy, loss_fn(params, x, y)

    train = ltx.train_step(private_step, ltx.optim.from_torch(torch.optim.SGD, lr=1.0, momentum=0.5))
    losses = []
    with ltx.init() as world:
        x, y = ltx.to_device(digits())
        state = train.init({name: p.detach() for name, p in model.to(world.device).named_parameters()})
        for step in range(steps):
            state, _ = train(state, *ltx.shard(batch(x, y, step)), step)
            losses.append(loss_fn(state.params, x, y).item())
            if world.is_global_zero and (step % 50 == 0 or step == steps - 1):
                print(f"step {step}: loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    main(parser.parse_args().steps)
