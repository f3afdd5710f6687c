"""A small GPT over characters, and the text that it learns.

The model is an ordinary :class:`torch.nn.Module` that knows nothing of ranks. It is called with
:func:`ltx.functional_call`, so that its parameters are an argument of the training step.

The text is :mod:`pydoc_data.topics`, which is part of every CPython: real English about Python, without a download. Its
end is held out for validation. Topics repeat one another (``compound`` contains all of ``while``), so paragraphs of the
end that also occur before it are dropped: the model never trains on what is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

PARAGRAPH = "\n\n"


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
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
    """Maps tokens (batch, time) to logits (batch, time, vocabulary)."""

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


def read_topics() -> str:
    """The topics of ``help()`` as one text, in alphabetical order of their names."""
    from pydoc_data.topics import topics

    return PARAGRAPH.join(topics[name].strip("\n") for name in sorted(topics))


def split(text: str) -> tuple[str, str]:
    """Cut ``text`` into a training part and a held-out part: its last tenth, without paragraphs of the training part.

    >>> split("a text to train on" + 9 * "\\n\\nmore of it" + "\\n\\na text to train on\\n\\nnew")[1]
    'new'
    """
    cut = text.find(PARAGRAPH, int(len(text) * 0.9) - len(PARAGRAPH))
    if cut < 0:
        raise ValueError("text: no paragraph ends in its last 10%, so nothing can be held out.")
    train, tail = text[:cut], text[cut + len(PARAGRAPH) :]
    known = set(train.split(PARAGRAPH))
    return train, PARAGRAPH.join(paragraph for paragraph in tail.split(PARAGRAPH) if paragraph not in known)


@dataclass(frozen=True)
class Corpus:
    """An encoded text: ``train`` and ``validation`` are int64 tokens, indices into ``characters``."""

    characters: str  # all characters of the text, in code point order
    train: Tensor
    validation: Tensor

    @classmethod
    def of(cls, text: str) -> Self:
        characters = "".join(sorted(set(text)))
        index = {character: token for token, character in enumerate(characters)}
        train, validation = (
            torch.tensor([index[character] for character in part], device="cpu") for part in split(text)
        )
        return cls(characters, train, validation)

    def batch(self, step: int, batch_size: int, context: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """The global batch of step ``step``: random windows of the training text, and the same one character later.

        Two int64 tensors of shape (batch_size, context). They depend only on the arguments, so every rank draws the
        same batch, and takes its own part (``ltx.shard``).
        """
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(self.train) - context, (batch_size,), generator=generator, device="cpu")
        windows = self.train[starts[:, None] + torch.arange(context + 1, device="cpu")]
        return windows[:, :-1], windows[:, 1:]

    def validation_windows(self, context: int) -> tuple[Tensor, Tensor]:
        """The held-out text cut into windows, and the same one character later: int64, of shape (windows, context)."""
        count = (len(self.validation) - 1) // context
        inputs = self.validation[: count * context].view(count, context)
        targets = self.validation[1 : count * context + 1].view(count, context)
        return inputs, targets
