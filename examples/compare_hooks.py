"""What compression costs: the same training with several communication hooks, and the bytes that each one sends.

    ltx run -n 2 examples/compare_hooks.py

A hook is a value, so a comparison is a loop. Put your own model in `net` and `batch`.
"""

import argparse

import torch
from plain.compare_hooks import batch, digits, net
from torch.nn.functional import cross_entropy

import ltx
from ltx import hooks

HOOKS = [hooks.AllReduce(), hooks.BF16(), hooks.ByteGrad(), hooks.TopK(0.01), hooks.PowerSGD(rank=2, start_step=2)]


def main(steps=100):
    torch.manual_seed(0)
    model = net()
    first = {name: p.detach() for name, p in model.named_parameters()}

    def loss_fn(params, x, y):
        return cross_entropy(ltx.functional_call(model, params, x), y)

    losses = {}
    with ltx.init() as world:
        model.to(world.device)
        first, (x, y) = ltx.to_device(first), ltx.to_device(digits())
        for hook in HOOKS:
            step_fn = ltx.data_parallel(loss_fn, ltx.DDPStrategy(comm_hook=hook))
            train = ltx.train_step(step_fn, ltx.optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9))
            state, found = train.init(first), []
            for step in range(steps):
                with ltx.profile.record() as trace:
                    state, metrics = train(state, *ltx.shard(batch(x, y, step)))
                found.append(metrics.loss.item())
            losses[repr(hook)] = found
            if world.is_global_zero:
                sent = sum(bucket.nbytes for bucket in trace.buckets)  # in the last step
                print(f"{hook!r:40} {sent:9,} bytes a step, loss {found[-1]:.4f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    main(parser.parse_args().steps)
