"""Small random models of other people's libraries, trained by ltx on a rank, and by a plain torch loop.

Models are in float64 where they compute in their parameters' dtype, so that "to rounding" leaves no room for an error.
Ranks import this by its name.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import ltx
from tests.kinds import Params
from tests.train_on import go_on

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing is downloaded

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
    "t5": Model(t5, lambda n: {"input_ids": tokens(n), "labels": tokens(n)}, rtol=1e-4),
    "vit": Model(vit, images),
    "resnet18": Model(lambda: resnet([2, 2, 2, 2], "basic", 8), larger_images, rtol=1e-6),
    "resnet50": Model(lambda: resnet([3, 4, 6, 3], "bottleneck", 16), larger_images, rtol=1e-6),
    "lora": Model(lora, causal, rtol=1e-5),
}


STEPS, SAMPLES, RANKS = 4, 4, 2
ADAMW: dict[str, Any] = {"lr": 1e-2, "eps": 1e-4}  # some gradients are zero but for rounding, which AdamW blows up
Loss = Callable[..., Any]


@dataclass
class Trained:
    """What is left of a training: losses of steps, trained and frozen parameters, and this rank's buffers."""

    losses: list[float]
    params: Params
    buffers: Params


def data(name: str, variant: str) -> list[list[Batch | None]]:
    """Batches by step and rank; None where a rank has run out. The same in every process that was seeded alike."""
    make = MODELS[name].batch
    steps: list[list[Batch | None]] = [[make(SAMPLES) for _ in range(RANKS)] for _ in range(STEPS)]
    if variant == "weights":  # sentences end early: labels of padding don't count
        for batch in (batch for step in steps for batch in step if batch is not None):
            batch["labels"][torch.arange(LENGTH) >= torch.randint(3, LENGTH + 1, (SAMPLES, 1))] = -100
    if variant == "uneven":
        steps[-2][1] = make(SAMPLES - 3)
        steps[-1][1] = None
    return steps


def whole(step: list[Batch | None]) -> Batch:
    """One step's samples of all ranks as one batch."""
    given = [batch for batch in step if batch is not None]
    return {name: torch.cat([batch[name] for batch in given]) for name in given[0]}


def counted(name: str, batch: Batch) -> Tensor:
    """How many labels a model's own loss is the mean of."""
    labels = batch["labels"][..., 1:] if name in ("gpt2", "llama", "lora") else batch["labels"]
    return (labels != -100).sum()


def by_ltx(name: str, variant: str, module: nn.Module, steps: list[list[Batch | None]]) -> Trained:
    rank = ltx.world().rank
    buffers = None
    if variant in ("local", "sync", "local bf16"):
        if variant == "sync":
            module = ltx.nn.convert_sync_batch_norm(module)
        buffers = dict(module.named_buffers())
    params = dict(module.named_parameters())
    if variant == "checkpoint":
        module.gradient_checkpointing_enable({"use_reentrant": False})
    train = ltx.train_step(transformed(variant, loss_of(name, variant, module)), optimizer())
    mine = [batch for step in steps if (batch := step[rank]) is not None]
    found = go_on(train, train.init(params, buffers), ltx.uneven(mine) if variant == "uneven" else mine)
    params = {**dict(module.named_parameters()), **found.params}
    return Trained(found.losses.tolist(), params, found.state.buffers or {})


def optimizer() -> ltx.optim.Optimizer:
    return ltx.optim.from_torch(torch.optim.AdamW, **ADAMW)


def loss_of(name: str, variant: str, module: nn.Module) -> Loss:
    """The step before it is distributed."""
    if variant in ("local", "sync", "local bf16"):

        def with_buffers(params: Params, buffers: Params, batch: Batch) -> Any:
            out, buffers = ltx.functional_call(module, (params, buffers), (), batch, return_buffers=True)
            return out.loss, buffers

        return with_buffers

    def weighted(params: Params, batch: Batch, weight: Tensor | float = 1.0) -> Any:
        loss = ltx.functional_call(module, params, (), batch).loss
        count = counted(name, batch) * (weight > 0)
        return ltx.Weighted(loss * count, count)

    def plain(params: Params, batch: Batch) -> Any:
        return ltx.functional_call(module, params, (), batch).loss

    return weighted if variant in ("weights", "uneven") else plain


def transformed(variant: str, loss: Loss) -> Any:
    if variant == "compiled":
        loss = torch.compile(loss, backend="aot_eager")
    step: Any = ltx.data_parallel(loss, ltx.DDPStrategy(bucket_bytes=4096, first_bucket_bytes=1024))
    if variant in ("accumulate", "weights"):
        step = ltx.accumulate(step, steps=2)
    if variant in ("bf16", "local bf16"):
        step = ltx.mixed_precision(step, ltx.Precision(compute=torch.bfloat16, keep=() if variant == "bf16" else (1,)))
    return step


def by_torch(variant: str, module: nn.Module, steps: list[list[Batch | None]], rank: int) -> Trained:
    """One process: the whole batch at once, or rank by rank where a rank's numbers depend on how samples are split."""
    apart = variant in ("local", "bf16", "local bf16")
    replicas = [copy.deepcopy(module) for _ in range(RANKS)] if apart else [module]
    trained = [[p for p in replica.parameters() if p.requires_grad] for replica in replicas]
    # Fused as ltx' own: parameters that differ in a last bit can be another number in bfloat16.
    optimizers = [torch.optim.AdamW(params, **ADAMW, fused="bf16" in variant) for params in trained]
    losses = []
    for step in steps:
        batches = step if apart else [whole(step)]
        parts = [
            (half if "bf16" in variant else full)(replica, batch)
            for replica, batch in zip(replicas, batches, strict=True)
        ]
        grads = [torch.autograd.grad(loss, params) for loss, params in zip(parts, trained, strict=True)]
        means = [torch.stack(each).mean(0) for each in zip(*grads, strict=True)]
        for params, update in zip(trained, optimizers, strict=True):
            for param, mean in zip(params, means, strict=True):
                param.grad = mean.clone()
            update.step()
        losses.append(torch.stack([loss.detach() for loss in parts]).mean().item())
    mine = replicas[rank if apart else 0]
    buffers = dict(mine.named_buffers()) if variant in ("local", "sync", "local bf16") else {}
    return Trained(losses, {name: p.detach() for name, p in mine.named_parameters()}, buffers)


def full(module: nn.Module, batch: Any) -> Tensor:
    return module(**batch).loss


def half(module: nn.Module, batch: Any) -> Tensor:
    """The loss in bfloat16, on parameters that stay in float32."""
    params = {name: p.to(torch.bfloat16) for name, p in module.named_parameters()}
    batch = {name: x.to(torch.bfloat16) if x.is_floating_point() else x for name, x in batch.items()}
    loss: Tensor = torch.func.functional_call(module, params, (), batch).loss
    return loss.float()


def load() -> None:
    """Import what takes long, which the first job of a worker would count as its own time."""
    for name in ("gpt2", "llama", "bert", "t5", "vit", "resnet18", "lora"):
        MODELS[name].build()


def both(name: str, variants: tuple[str, ...], seed: int) -> dict[str, tuple[Trained, Trained, Params]]:
    """By variant: what ltx has trained on this rank, what torch has, and the parameters before."""
    results = {}
    for variant in variants:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = MODELS[name]
            if "bf16" in variant:
                model = replace(model, dtype=torch.float32)
            module, steps = model.made(), data(name, variant)
        if variant == "eval":
            module.eval()
        before = {key: p.detach().clone() for key, p in module.named_parameters()}
        twin = copy.deepcopy(module)
        results[variant] = (
            by_ltx(name, variant, module, steps),
            by_torch(variant, twin, steps, ltx.world().rank),
            before,
        )
    return results
