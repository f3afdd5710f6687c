"""Calls in JAX's order and by JAX's names: the error says the call to write, and that call works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx.errors import ArgumentError, LtxError
from tests.train_on import refuses

X = torch.arange(8.0).view(2, 4)
SWAP = [(0, 1), (1, 0)]

#: A call of JAX, what is in its error, and the call to write.
CALLS: dict[str, tuple[Callable[[Tensor], Any], str, Callable[[Tensor], Any]]] = {
    "all_gather axis": (
        lambda x: ltx.all_gather(x, "data", axis=0),
        r"all_gather: axis=0 is given twice.*JAX's axis= is dim= here\. Write all_gather\(value, axis, dim=, ",
        lambda x: ltx.all_gather(x, "data", dim=0),
    ),
    "all_gather axis alone": (
        lambda x: ltx.all_gather(x, axis=0),
        r"an axis is a name, .* got 0\. A dimension of tensors is dim= here\.",
        lambda x: ltx.all_gather(x, dim=0),
    ),
    "psum_scatter": (
        lambda x: ltx.psum_scatter(x, "data", scatter_dimension=0, tiled=True),
        r"scatter_dimension= is dim= here",
        lambda x: ltx.psum_scatter(x, "data", dim=0, tiled=True),
    ),
    "psum by name": (
        lambda x: ltx.psum(x, axis_name="data"),
        r"psum: axis_name='data' is no argument\. JAX's axis_name= is axis= here",
        lambda x: ltx.psum(x, axis="data"),
    ),
    "axis_index by name": (
        lambda x: x + ltx.axis_index(axis_name="data"),
        r"axis_index: .*is axis= here\. Write axis_index\(axis\)\.",
        lambda x: x + ltx.axis_index(axis="data"),
    ),
    "all_to_all": (
        lambda x: ltx.all_to_all(x, "data", 0, 0),
        r"split_dim must be int, got 'data' of type str\. Write all_to_all\(value, split_dim, concat_dim, axis, ",
        lambda x: ltx.all_to_all(x, 0, 0, "data"),
    ),
    "all_to_all by name": (
        lambda x: ltx.all_to_all(x, split_axis=0, concat_axis=0),
        r"split_axis= is split_dim= here",
        lambda x: ltx.all_to_all(x, split_dim=0, concat_dim=0),
    ),
    "ppermute": (
        lambda x: ltx.ppermute(x, "data", SWAP),
        r"got 'data' of type str\. Write ppermute\(value, perm, axis\)\.",
        lambda x: ltx.ppermute(x, SWAP, "data"),
    ),
    "ppermute by name": (
        lambda x: ltx.ppermute(x, "data", perm=SWAP),
        r"perm=\[\(0, 1\), \(1, 0\)\] is given twice.*Write ppermute\(value, perm, axis\)\.",
        lambda x: ltx.ppermute(x, SWAP, axis="data"),
    ),
    "broadcast": (
        lambda x: ltx.broadcast(x, "data", 0),
        r"src must be int, got 'data' of type str\. Write broadcast\(value, src, axis, ",
        lambda x: ltx.broadcast(x, 0, "data"),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_jax_name_the_call_to_write(name: str, ranks: Callable[[int], ltx.Pool]) -> None:
    wrong, text, right = CALLS[name]
    refuses(LtxError, text, ltx.vmap(wrong), X)
    expected = ltx.vmap(right)(X)

    def on_rank() -> Tensor:
        refuses(LtxError, text, wrong, X[ltx.world().rank])
        return right(X[ltx.world().rank])

    if name in ("all_gather axis", "ppermute"):
        assert torch.equal(torch.stack(list(ranks(2).run(on_rank))), expected)


def test_vmap_by_jax_names() -> None:
    with pytest.raises(ArgumentError, match=r"vmap: in_axes=0 is no argument\. JAX's in_axes= is in_dims= here"):
        ltx.vmap(lambda x: x, in_axes=0)  # type: ignore[call-arg]
    # What isn't JAX's name for anything here stays Python's error.
    refuses(TypeError, "unexpected keyword argument 'axes'", ltx.vmap, lambda x: x, axes=0)


NAMES = {
    "value_and_grad": "grad_and_value",
    "pcast": "pvary",
    "pmap": "vmap",
    "shard_map": "data_parallel",
    "pshuffle": "ppermute",
    "pswapaxes": "all_to_all",
    "pbroadcast": "broadcast",
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_jax_name_ours(name: str) -> None:
    refuses(AttributeError, rf"no attribute '{name}'\. Write ltx\.{NAMES[name]}\b", getattr, ltx, name)
    assert not hasattr(ltx, name)
    assert hasattr(ltx, NAMES[name])
    assert name not in dir(ltx)
