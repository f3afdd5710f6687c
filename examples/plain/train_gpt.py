"""A small GPT on the text of Python's manual, in plain torch: one process, whole batches."""

import argparse
import math
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn.functional import cross_entropy

CONTEXT, BATCH, WARM_UP, PEAK = 64, 16, 20, 3e-3
TEXT = "\n\n".join(topics[name].strip("\n") for name in sorted(topics))
CHARACTERS = sorted(set(TEXT))
CODE = {character: token for token, character in enumerate(CHARACTERS)}
TOKENS = torch.tensor([CODE[character] for character in TEXT])


def batch(step):
    """Step `step`'s windows of the text, and the same moved on by one character: two tensors (BATCH, CONTEXT)."""
    starts = torch.randint(len(TOKENS) - CONTEXT, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    windows = TOKENS[starts + torch.arange(CONTEXT + 1)]
    return windows[:, :-1], windows[:, 1:]


def learning_rate(step, total):
    warm_up = min(1.0, (step + 1) / WARM_UP)
    return PEAK * warm_up * (0.55 + 0.45 * math.cos(math.pi * step / total))


class GPT(nn.Module):
    """Characters (batch, time) to logits (batch, time, character)."""

    def __init__(self, width=96, layers=3, heads=4):
        super().__init__()
        self.token, self.position = nn.Embedding(len(CHARACTERS), width), nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, len(CHARACTERS), bias=False)

    def forward(self, tokens):
        time = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(time, device=tokens.device)
        hidden = self.token(tokens) + self.position.weight[:time]
        return self.head(self.layers(hidden, mask, is_causal=True))


@torch.no_grad()
def write(model, start, length):
    """`length` characters after `start`, drawn from the model."""
    tokens = torch.tensor([[CODE[character] for character in start]], device=model.head.weight.device)
    for _ in range(length):
        logits = model(tokens[:, -CONTEXT:])[:, -1]
        tokens = torch.cat([tokens, logits.softmax(-1).multinomial(1)], dim=1)
    return "".join(CHARACTERS[token] for token in tokens[0].tolist())


def main(steps=300):
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    losses = []
    for step in range(steps):
        x, y = batch(step)
        loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step}: loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    main(parser.parse_args().steps)
