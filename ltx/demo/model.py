"""The model: a small GPT over characters, an ordinary :class:`torch.nn.Module`.

Nothing in it knows of ranks. It is called with :func:`ltx.functional_call`, so that its parameters are an
argument of the training step.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Mix each position with those before it."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x_BTC).chunk(3, dim=-1))
        mixed_BHTD = scaled_dot_product_attention(q, k, v, is_causal=True)
        out_BTC: Tensor = self.out(mixed_BHTD.transpose(1, 2).flatten(2))
        return out_BTC


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self.attention(self.attention_norm(x_BTC))
        hidden_BTF = gelu(self.mlp_in(self.mlp_norm(x_BTC)), approximate="tanh")
        out_BTC: Tensor = self.mlp_out(hidden_BTF)
        return x_BTC + out_BTC


class GPT(nn.Module):
    """Tokens (batch, time) to logits (batch, time, vocabulary)."""

    def __init__(self, vocabulary: int, context: int = 64, width: int = 128, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.context = context
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("attention.out.weight", "mlp_out.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if residual else 0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.token(tokens_BT) + self.position.weight[: tokens_BT.shape[1]]
        for block in self.blocks:
            x_BTC = block(x_BTC)
        logits_BTV: Tensor = self.head(self.norm(x_BTC))
        return logits_BTV
