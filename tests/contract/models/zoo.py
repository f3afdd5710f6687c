"""Small random models of other people's libraries, and batches for them.

Models are in float64 where they compute in their parameters' dtype, so that "to rounding" leaves no room for an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing is downloaded

import torch
from torch import Tensor, nn

VOCABULARY, LENGTH, CLASSES = 48, 8, 3
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Model:
    """A model by name.

    Attributes:
        build: makes it; random numbers are torch's.
        batch: ``batch(n)`` makes n samples, as the model's forward takes them.
        rtol: how near parameters come to those of the twin: some normalise, or take their loss, in float32
            whatever their dtype.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    rtol: float = 1e-8
    dtype: torch.dtype = torch.float64

    def made(self) -> nn.Module:
        return self.build().to(self.dtype).train()


def tokens(n: int) -> Tensor:
    return torch.randint(1, VOCABULARY, (n, LENGTH))


def causal(n: int) -> Batch:
    x = tokens(n)
    return {"input_ids": x, "labels": x.clone()}


def pairs(n: int) -> Batch:
    return {"input_ids": tokens(n), "labels": tokens(n)}


def sentences(n: int) -> Batch:
    mask = (torch.arange(LENGTH) < torch.randint(2, LENGTH + 1, (n, 1))).long()
    return {"input_ids": tokens(n), "attention_mask": mask, "labels": torch.randint(CLASSES, (n,))}


def images(n: int, size: int = 8) -> Batch:
    return {"pixel_values": torch.randn(n, 3, size, size, dtype=torch.float64), "labels": torch.randint(CLASSES, (n,))}


def larger_images(n: int) -> Batch:
    """Batch norm of few numbers, some of which ReLU has made equal, blows rounding up."""
    return images(n, size=48)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=LENGTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=CLASSES,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=CLASSES,
    )  # fmt: skip
    return ViTForImageClassification(config)


def resnet(depths: list[int], layer_type: str, width: int) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = [width, width, 2 * width, 2 * width]
    config = ResNetConfig(
        embedding_size=8, hidden_sizes=sizes, depths=depths, layer_type=layer_type, num_labels=CLASSES
    )
    return ResNetForImageClassification(config)


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, target_modules=["c_attn"], fan_in_fan_out=True)
    return get_peft_model(gpt2(), config)


MODELS = {
    "gpt2": Model(gpt2, causal, rtol=1e-5),
    "llama": Model(llama, causal, rtol=1e-4),
    "bert": Model(bert, sentences),
    "t5": Model(t5, pairs, rtol=1e-4),
    "vit": Model(vit, images),
    "resnet18": Model(lambda: resnet([2, 2, 2, 2], "basic", 8), larger_images, rtol=1e-6),
    "resnet50": Model(lambda: resnet([3, 4, 6, 3], "bottleneck", 16), larger_images, rtol=1e-6),
    "lora": Model(lora, causal, rtol=1e-5),
}
