"""A small GPT on the text of Python's manual: AdamW, a schedule, clipping, a checkpoint, and text at the end.

    ltx run -n 2 examples/train_gpt.py --steps 300 --checkpoints gpt

Started again with the same directory it goes on where it has ended. Model and data are those of the plain script.
"""

import argparse
from functools import partial

import torch
from plain.train_gpt import GPT, batch, learning_rate, write
from torch.nn.functional import cross_entropy

import ltx


def main(steps=300, checkpoints=None):
    torch.manual_seed(0)
    model = GPT()

    def loss_fn(params, x, y):
        logits = ltx.functional_call(model, params, (x,))
        return cross_entropy(logits.flatten(0, 1), y.flatten())

    optimizer = ltx.optim.chain(
        ltx.optim.clip_by_global_norm(1.0),
        ltx.optim.from_torch(torch.optim.AdamW, lr=partial(learning_rate, total=steps), weight_decay=0.1),
    )
    train = ltx.train_step(ltx.data_parallel(loss_fn), optimizer)
    losses = []
    with ltx.init() as world, ltx.checkpoint.preemption(every=10) as preempted:
        state = train.init(model.to(world.device))
        if checkpoints and ltx.checkpoint.latest(checkpoints):
            state = ltx.checkpoint.load(checkpoints, state).state
        while state.step < steps:
            step = state.step
            state, metrics = train(state, *ltx.to_device(ltx.shard(batch(step))))  # this rank's part of the batch
            losses.append(metrics.loss.item())
            if world.is_global_zero and (step % 20 == 0 or step == steps - 1):
                print(f"step {step}: loss {losses[-1]:.4f}")
            stop = preempted()  # SIGTERM came to some rank: all stop after the same step
            if checkpoints and (stop or state.step % 100 == 0 or state.step == steps):
                ltx.checkpoint.save(checkpoints, state, keep=2)
            if stop:
                preempted.exit()  # with code 75: start me again
        ltx.to_module(model, state)
        if world.is_global_zero:
            print(write(model.eval(), "The ", 200))
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--checkpoints", help="a directory that all ranks see")
    options = parser.parse_args()
    main(options.steps, options.checkpoints)
