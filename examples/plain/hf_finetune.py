"""A small Llama with LoRA on paragraphs of Python's manual, in plain torch: one process, whole batches."""

import argparse
from pydoc_data.topics import topics

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

BATCH, LONGEST, PAD = 7, 96, 256
PARAGRAPHS = [
    paragraph.encode()[:LONGEST]
    for name in sorted(topics)
    for paragraph in topics[name].split("\n\n")
    if len(paragraph) > 20
]


def paragraphs(step):
    """Step `step`'s paragraphs, a list of bytes of unequal lengths."""
    chosen = torch.randint(len(PARAGRAPHS), (BATCH,), generator=torch.Generator().manual_seed(step))
    return [PARAGRAPHS[index] for index in chosen.tolist()]


def padded(texts):
    """Tokens and weights, (len(texts), longest): padding weighs nothing, lines of code weigh two."""
    longest = max(map(len, texts), default=1)
    tokens, weights = torch.full((len(texts), longest), PAD), torch.zeros(len(texts), longest)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(list(text))
        weights[row, : len(text)] = 2.0 if b">>>" in text or b"::" in text else 1.0
    return tokens, weights


def summed_loss(logits, tokens, weights):
    """The sum of the weighted losses of all tokens but the first ones, and the sum of the weights."""
    losses = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    weights = weights[:, 1:].flatten()
    return (losses * weights).sum(), weights.sum()


def language_model():
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LONGEST,
    )
    lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"], modules_to_save=["lm_head"])
    return get_peft_model(LlamaForCausalLM(config), lora)


def main(steps=60):
    torch.manual_seed(0)
    model = language_model()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(steps):
        tokens, weights = padded(paragraphs(step))
        logits = model(input_ids=tokens, attention_mask=(weights > 0).long()).logits
        total, count = summed_loss(logits, tokens, weights)
        loss = total / count
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step}: loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    main(parser.parse_args().steps)
