"""A Hugging Face model with LoRA: weights for tokens, and ranks with unequal numbers of paragraphs.

    ltx run -n 2 examples/hf_finetune.py --save adapter

The step returns a sum and a weight, so that the gradient is that of all tokens of all ranks together. Frozen
parameters are neither differentiated nor sent.
"""

import argparse

import torch
from plain.hf_finetune import language_model, padded, paragraphs, summed_loss

import ltx


def main(steps=60, save=None):
    torch.manual_seed(0)
    model = language_model()

    def loss_fn(params, tokens, weights):
        inputs = {"input_ids": tokens, "attention_mask": (weights > 0).long()}
        logits = ltx.functional_call(model, params, (), inputs).logits
        return ltx.Weighted(*summed_loss(logits, tokens, weights))

    train = ltx.train_step(ltx.data_parallel(loss_fn), ltx.optim.from_torch(torch.optim.AdamW, lr=1e-2))
    losses = []
    with ltx.init() as world:
        state = train.init(model.to(world.device))
        for step in range(steps):
            mine = paragraphs(step)[world.rank :: world.size]  # seven on two ranks: four and three
            state, metrics = train(state, *ltx.to_device(padded(mine)))
            losses.append(metrics.loss.item())
            if world.is_global_zero and (step % 20 == 0 or step == steps - 1):
                print(f"step {step}: loss {losses[-1]:.4f}")
        ltx.to_module(model, state)
        if save and world.is_global_zero:
            model.save_pretrained(save)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save", help="where the adapter is written")
    options = parser.parse_args()
    main(options.steps, options.save)
