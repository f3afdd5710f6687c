"""A small GPT on the text of Python's manual: AdamW, a schedule, clipping, a checkpoint, and text at the end.

    ltx run -n 2 examples/train_gpt.py --steps 300 --checkpoints gpt

Started again with the same directory it goes on where it has ended. Model and data are those of the plain script.
`--out DIR` leaves there what was measured, and the loss as a picture: `make demo` does that.
"""

import argparse
import json
import time
from functools import partial
from pathlib import Path

import torch
from plain.train_gpt import BATCH, CONTEXT, GPT, batch, learning_rate, write
from torch.nn.functional import cross_entropy

import ltx


def keep(folder, rows):
    """Print how fast it went; write a line of JSON for each step, and draw the losses."""
    from matplotlib.figure import Figure

    mean = {name: sum(row[name] for row in rows) / len(rows) for name in ("seconds", "bytes", "hidden")}
    print("characters/s   MB/step   hidden   last loss")
    print(f"{BATCH * CONTEXT / mean['seconds']:12,.0f}{mean['bytes'] / 1e6:10.2f}{mean['hidden']:9.0%}", end="")
    print(f"{rows[-1]['loss']:12.4f}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([row["step"] for row in rows], [row["loss"] for row in rows])
    axes.set(xlabel="step", ylabel="loss (nats a character)")
    figure.savefig(folder / "loss.png", dpi=120)
    print(f"{folder / 'metrics.jsonl'}, {folder / 'loss.png'}")


def main(steps=300, checkpoints=None, out=None):
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
    losses, rows = [], []
    with ltx.init() as world, ltx.checkpoint.preemption(every=10) as preempted:
        state = train.init(model.to(world.device))
        if checkpoints and ltx.checkpoint.latest(checkpoints):
            state = ltx.checkpoint.load(checkpoints, state).state
        while state.step < steps:
            step = state.step
            began = time.perf_counter()
            with ltx.profile.record() as trace:
                state, metrics = train(state, *ltx.to_device(ltx.shard(batch(step))))  # this rank's part of the batch
                losses.append(metrics.loss.item())
            seconds = time.perf_counter() - began
            said = {"step": step, "loss": losses[-1], "grad_norm": metrics.grad_norm.item(), "seconds": seconds}
            rows.append(said | {"bytes": trace.bytes, "hidden": trace.hidden})
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
            if out and rows:
                keep(Path(out), rows)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--checkpoints", help="a directory that all ranks see")
    parser.add_argument("--out", help="a directory for metrics.jsonl and loss.png")
    options = parser.parse_args()
    main(options.steps, options.checkpoints, options.out)
