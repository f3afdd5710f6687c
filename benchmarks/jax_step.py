"""The step of :mod:`benchmarks.step_time` in JAX: ``shard_map`` over two CPU devices of one process.

    python -m benchmarks.jax_step [--steps 60]

The same transformer, batch and AdamW; the first loss is compared with torch's. Prints the median seconds of a step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.models import Transformer, batch, cross_entropy

Params = dict[str, jax.Array]
DEVICES, HEADS, LAYERS = 2, 4, 6


def _normed(x: jax.Array, params: Params, name: str) -> jax.Array:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * params[f"{name}.weight"] + params[f"{name}.bias"]


def _linear(x: jax.Array, params: Params, name: str) -> jax.Array:
    return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]


def _attention(x: jax.Array, params: Params, name: str) -> jax.Array:
    samples, length, width = x.shape
    packed = x @ params[f"{name}.in_proj_weight"].T + params[f"{name}.in_proj_bias"]
    q, k, v = (part.reshape(samples, length, HEADS, -1) for part in jnp.split(packed, 3, -1))
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(width / HEADS))
    mixed = jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(x.shape)
    return _linear(mixed, params, f"{name}.out_proj")


def loss(params: Params, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    """torch's post-norm encoder, and the mean cross entropy."""
    x = params["embed.weight"][inputs]
    for layer in range(LAYERS):
        name = f"encoder.layers.{layer}"
        x = _normed(x + _attention(x, params, f"{name}.self_attn"), params, f"{name}.norm1")
        inner = jax.nn.relu(_linear(x, params, f"{name}.linear1"))
        x = _normed(x + _linear(inner, params, f"{name}.linear2"), params, f"{name}.norm2")
    logits = jax.nn.log_softmax(_linear(x, params, "head"))
    return -jnp.take_along_axis(logits, targets[..., None], -1).mean()


def adamw(params: Params, grads: Params, state: Any) -> tuple[Params, Any]:
    """torch.optim.AdamW with lr 1e-4."""
    first, second, count = state
    count = count + 1
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
    second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, grads)

    def update(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        scaled = (m / (1 - 0.9**count)) / (jnp.sqrt(v / (1 - 0.999**count)) + 1e-8)
        return p * (1 - 1e-4 * 0.01) - 1e-4 * scaled

    return jax.tree.map(update, params, first, second), (first, second, count)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    torch.manual_seed(0)
    model = Transformer()
    batches = [batch(rank) for rank in range(DEVICES)]
    expected = sum(cross_entropy(model(x), y).item() for x, y in batches) / DEVICES
    mesh = Mesh(np.array(jax.devices()), ("data",))
    everywhere, split = PartitionSpec(), PartitionSpec("data")

    @partial(jax.jit, donate_argnums=(0, 1))
    @partial(jax.shard_map, mesh=mesh, in_specs=(everywhere, everywhere, split, split), out_specs=everywhere)
    def step(params: Params, state: Any, x: jax.Array, y: jax.Array) -> tuple[Params, Any, jax.Array]:
        # Replicated arguments: their gradients are summed over the axis.
        value, grads = jax.value_and_grad(lambda p: jax.lax.pmean(loss(p, x, y), "data"))(params)
        return (*adamw(params, grads, state), value)

    params = {name: jnp.asarray(p.detach().numpy()) for name, p in model.named_parameters()}
    params = jax.device_put(params, NamedSharding(mesh, everywhere))
    zeros = jax.tree.map(jnp.zeros_like, params)
    state = (zeros, jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.int32))
    x, y = (
        jax.device_put(np.concatenate([b[i].numpy() for b in batches]), NamedSharding(mesh, split)) for i in range(2)
    )
    params, state, value = step(params, state, x, y)
    assert abs(float(value) - expected) < 1e-4, f"JAX's loss is {float(value)}, torch's {expected}"
    taken = []
    for count in range(10 + steps):
        began = time.perf_counter()
        params, state, value = jax.block_until_ready(step(params, state, x, y))
        if count >= 10:
            taken.append(time.perf_counter() - began)
    print(statistics.median(taken))


if __name__ == "__main__":
    main()
