"""A residual network on handwritten digits: batch norm over all ranks' samples, and an average of the weights.

    ltx run -n 2 examples/resnet_digits.py

Buffers are an argument and a result of the step. The average is a value beside the state.
"""

import argparse

import torch
from plain.resnet_digits import DECAY, batch, digits, resnet
from torch.nn.functional import cross_entropy

import ltx


def main(steps=60):
    torch.manual_seed(0)
    (images, labels), (test_images, test_labels) = digits()
    model = ltx.nn.convert_sync_batch_norm(resnet())  # statistics of the whole batch, over all ranks

    def loss_fn(params, buffers, x, y):
        logits, buffers = ltx.functional_call(model, (params, buffers), (x,), return_buffers=True)
        return cross_entropy(logits, y), buffers

    train = ltx.train_step(ltx.data_parallel(loss_fn), ltx.optim.from_torch(torch.optim.SGD, lr=0.05, momentum=0.9))
    losses, average = [], None
    with ltx.init() as world:
        model.to(world.device)
        state = train.init(dict(model.named_parameters()), dict(model.named_buffers()))
        for step in range(steps):
            state, metrics = train(state, *ltx.to_device(ltx.shard(batch(images, labels, step))))
            losses.append(metrics.loss.item())
            # lerp makes new tensors: the state's own are updated in place by the next step.
            last = {k: v.clone() for k, v in {**state.params, **state.buffers}.items()}
            average = (
                last
                if average is None
                else {k: average[k].lerp(v, 1 - DECAY) if v.is_floating_point() else v for k, v in last.items()}
            )
        model.load_state_dict(average)
        model.eval()
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
