"""MAML, a part of the tasks on each rank: the gradient through a gradient is the mean over all ranks.

    ltx run -n 2 examples/maml.py

torch DDP would leave each rank with gradients of its own tasks here, without an error: torch.func never touches .grad.
"""

import argparse

import torch
from plain.maml import meta_loss, net, tasks
from torch.func import vmap

import ltx


def main(steps=300):
    torch.manual_seed(0)
    model = net()

    def one_task(params, *task):
        return meta_loss(lambda params, x: ltx.functional_call(model, params, x), params, *task)

    def loss_fn(params, *part):
        return vmap(one_task, in_dims=(None, 0, 0, 0, 0))(params, *part).mean()

    train = ltx.train_step(ltx.data_parallel(loss_fn), ltx.optim.from_torch(torch.optim.Adam, lr=1e-3))
    losses = []
    with ltx.init() as world:
        state = train.init(model.to(world.device))
        for step in range(steps):
            state, metrics = train(state, *ltx.to_device(ltx.shard(tasks(step))))
            losses.append(metrics.loss.item())
            if world.is_global_zero and (step % 100 == 0 or step == steps - 1):
                print(f"step {step}: loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    main(parser.parse_args().steps)
