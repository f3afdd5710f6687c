"""A residual network on handwritten digits: batch norm over all ranks' samples, and an average of the weights.

    ltx run -n 2 examples/resnet_digits.py

Buffers are an argument and a result of the step. The average is torch's, of equal parameters on all ranks.
"""

import argparse

import torch
from plain.resnet_digits import DECAY, batch, digits, resnet
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import get_ema_multi_avg_fn

import ltx


def main(steps=60):
    torch.manual_seed(0)
    (images, labels), (test_images, test_labels) = digits()
    model = ltx.nn.convert_sync_batch_norm(resnet())  # statistics of the whole batch, over all ranks

    def loss_fn(params, buffers, x, y):
        logits, buffers = ltx.functional_call(model, (params, buffers), (x,), return_buffers=True)
        return cross_entropy(logits, y), buffers

    sgd = ltx.optim.from_torch(torch.optim.SGD, lr=0.05, momentum=0.9)
    train = ltx.train_step(ltx.data_parallel(loss_fn), sgd)
    move = get_ema_multi_avg_fn(DECAY)
    losses = []
    with ltx.init() as world:
        model.to(world.device)
        state = train.init(model, dict(model.named_buffers()))
        average = {name: p.clone() for name, p in state.params.items()}
        for step in range(steps):
            state, metrics = train(state, *ltx.to_device(ltx.shard(batch(images, labels, step))))
            move([*average.values()], [state.params[name] for name in average], None)
            losses.append(metrics.loss.item())
        ltx.to_module(model, average).eval()
        with torch.no_grad():  # each rank evaluates its part; parts are unequal
            mine = slice(world.rank, None, world.size)
            x, y = ltx.to_device((test_images[mine], test_labels[mine]))
            accuracy = ltx.weighted_mean((model(x).argmax(1) == y).float().mean(), len(y))
        if world.is_global_zero:
            print(f"loss {losses[-1]:.4f}, accuracy of the averaged weights {accuracy.item():.1%}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    main(parser.parse_args().steps)
