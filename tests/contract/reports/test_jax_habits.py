"""Calls in JAX's order and by JAX's names, whose errors say the call to write; names that look like patterns."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx.errors import ArgumentError, LtxError
from tests.kinds import Ranks
from tests.train_on import refuses
from tests.twins.training import sgd

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
def test_calls_of_jax_name_the_call_to_write(name: str, ranks: Ranks) -> None:
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
    assert hasattr(ltx, NAMES[name])


# Names of parameters that look like patterns: a name that exists is itself, wherever patterns choose parameters.
Params = dict[str, Tensor]


def params() -> Params:
    return {name: torch.tensor([1.0, 2.0]) for name in ("a[0]", "a0", "b?", "bc", "d*", "de")}


@ltx.data_parallel
def step(params: Params) -> Tensor:
    return sum((x.square().sum() for x in params.values()), torch.zeros(()))


def moved(train: Any) -> set[str]:
    state, _ = train(train.init(params()))
    return {name for name, x in params().items() if not torch.equal(x, state.params[name])}


def by_trainable(name: str) -> set[str]:
    return moved(ltx.train_step(step, sgd(lr=0.1), trainable=[name]))


def by_labels(name: str) -> set[str]:
    groups = {"own": sgd(lr=0.1), "rest": sgd(lr=0.0)}
    return moved(ltx.train_step(step, ltx.optim.partition(groups, {name: "own", "*": "rest"})))


def by_labels_of_frozen(name: str) -> set[str]:
    """A group whose only parameter is frozen takes no other one."""
    optimizer = ltx.optim.partition({"own": sgd(lr=0.1), "rest": sgd(lr=0.0)}, {name: "own", "*": "rest"})
    frozen = moved(ltx.train_step(step, optimizer, trainable=lambda path: path != name))
    return frozen or {name} - frozen


def by_keep_params(name: str) -> set[str]:
    seen: dict[str, torch.dtype] = {}

    def look(params: Params) -> Tensor:
        seen.update({name: x.dtype for name, x in params.items()})
        return step.fn(params)

    ltx.mixed_precision(ltx.data_parallel(look), ltx.Precision(compute=torch.bfloat16, keep_params=(name,)))(params())
    return {name for name, dtype in seen.items() if dtype == torch.float32}


def by_hooks(name: str) -> set[str]:
    hook = ltx.hooks.partition({name: ltx.hooks.AllReduce(), "*": ltx.hooks.TopK(0.5, error_feedback=False)})
    run = functools.partial(ltx.sync_gradients, strategy=ltx.DDPStrategy(comm_hook=hook))
    reduced = ltx.vmap(lambda g: run(g)[0])({name: x.expand(2, 2) for name, x in params().items()})
    return {name for name, x in reduced.items() if (x != 0).all()}


WAYS: list[Callable[[str], set[str]]] = [by_trainable, by_labels, by_labels_of_frozen, by_keep_params, by_hooks]


@pytest.mark.parametrize("name", ["a[0]", "b?", "d*"])
@pytest.mark.parametrize("way", WAYS)
def test_a_name_that_exists_is_itself(way: Callable[[str], set[str]], name: str) -> None:
    assert way(name) == {name}


def test_groups_of_names_with_brackets() -> None:
    """Both are in one group each: `a[0]` had taken `a0` too, which is in another."""
    strategy = ltx.HorovodStrategy(groups=(("a[0]",), ("a0", "b?"), ("bc",)))
    reduced = ltx.vmap(lambda g: ltx.sync_gradients(g, strategy)[0])({k: x.expand(2, 2) for k, x in params().items()})
    assert all(torch.equal(x, params()[name].expand(2, 2)) for name, x in reduced.items())


def test_other_patterns_with_brackets_stay_patterns() -> None:
    assert by_trainable("[ab]*") == {"a[0]", "a0", "b?", "bc"}
    assert by_trainable("a[[]*") == {"a[0]"}
    refuses(LtxError, "fits no parameter", by_trainable, "a[9]")
