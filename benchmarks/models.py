"""The benchmarks' models: a 5 M parameter transformer, a larger one for GPUs, one that waits instead of computing."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

VOCABULARY, WIDTH = 512, 256


class Transformer(nn.Module):
    """6 post-norm encoder layers, width 256, 4 heads, feed-forward 1024, vocabulary 512, no dropout."""

    SAMPLES, LENGTH = 4, 64

    def __init__(self, width: int = WIDTH, layers: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, length) token numbers to (batch, length, vocabulary) logits."""
        return self.head(self.encoder(self.embed(tokens)))


class Large(Transformer):
    """12 layers of width 1,024: 152 M parameters, with a batch that keeps a GPU busy."""

    SAMPLES, LENGTH = 16, 256

    def __init__(self) -> None:
        super().__init__(1024, 12)


class _Wait(torch.autograd.Function):
    """Waits, forwards and backwards; the gradient of the weights is a constant."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weights: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.weights, ctx.backward_s = weights.shape, backward_s
        time.sleep(forward_s)
        return x + weights[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        time.sleep(ctx.backward_s)
        return grad, torch.full(ctx.weights, 1e-3), None, None


class Waiting(nn.Module):
    """12 layers with a twelfth of the transformer's parameters each, which wait as long as its layers compute.

    So ranks contend for nothing but the link, and what a step takes is what its schedule makes of that.
    """

    LAYERS, FORWARD_S, BACKWARD_S = 12, 0.040, 0.080
    SAMPLES, LENGTH = 4, 64

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            numel = sum(p.numel() for p in Transformer().parameters()) // self.LAYERS
        self.layers = nn.ParameterList(torch.zeros(numel) for _ in range(self.LAYERS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, length) token numbers to logits of 0."""
        x = torch.zeros((), device=tokens.device)
        for weights in self.layers:
            x = _Wait.apply(x, weights, self.FORWARD_S / self.LAYERS, self.BACKWARD_S / self.LAYERS)
        return x.expand(*tokens.shape, VOCABULARY)


def batch(rank: int, shape: tuple[int, int] = (4, 64)) -> tuple[torch.Tensor, torch.Tensor]:
    """4 x 64 tokens of this rank, and their targets."""
    draw = torch.Generator().manual_seed(rank)
    return tuple(torch.randint(0, VOCABULARY, shape, generator=draw) for _ in range(2))


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over tokens."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
