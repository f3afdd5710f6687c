"""The benchmarks' model: a 5 M parameter transformer, and a batch for it."""

from __future__ import annotations

import torch
from torch import nn

VOCABULARY, WIDTH = 512, 256


class Transformer(nn.Module):
    """6 post-norm encoder layers, width 256, 4 heads, feed-forward 1024, vocabulary 512, no dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 1024, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, length) token numbers to (batch, length, vocabulary) logits."""
        return self.head(self.encoder(self.embed(tokens)))


def batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """4 x 64 tokens of this rank, and their targets."""
    draw = torch.Generator().manual_seed(rank)
    return tuple(torch.randint(0, VOCABULARY, (4, 64), generator=draw) for _ in range(2))


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over tokens."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
