"""What is beside the tensors of a batch: lists with an entry per sample are cut, too; nodes of torch's pytree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor

import ltx
from ltx.errors import TreeError
from tests.kinds import Ranks
from tests.train_on import refuses, trained
from tests.twins.training import sgd

LENGTHS = {"one": 1.0, "three": 3.0, "five": 5.0, "seven": 7.0}

# name -> (what is beside the tensor of four samples, and how a step reads a sample's number off it)
BESIDE: dict[str, tuple[Any, Callable[[Any], float]]] = {
    "texts": (list(LENGTHS), LENGTHS.__getitem__),
    "a tuple of texts": (tuple(LENGTHS), LENGTHS.__getitem__),
    "numbers": ([1, 3, 5, 7], float),
    "texts and None": ([None, "three", "five", "seven"], lambda x: 1.0 if x is None else LENGTHS[x]),
    "lists of texts": ([["one"], ["three", "x"], ["five"], ["seven"]], lambda x: LENGTHS[x[0]]),
    "dicts of several keys": (
        [{"a": 1}, {"b": 3}, {"a": 5, "b": 0}, {"c": 7}],
        lambda x: float(next(iter(x.values()))),
    ),
    "an array's list": (numpy.array(list(LENGTHS)).tolist(), LENGTHS.__getitem__),
}


def loss(name: str) -> Callable[..., Tensor]:
    def of(w: Tensor, batch: dict[str, Any]) -> Tensor:
        numbers = [BESIDE[name][1](x) for x in batch["beside"]["deep"]]
        assert len(numbers) == len(batch["x"])
        assert batch["classes"] == ["cat", "dog", "cow"]
        return (w * batch["x"] * torch.tensor(numbers)).mean()

    return of


def given(name: str) -> tuple[float, float]:
    """The gradient of a batch that ranks share, and in micro-batches."""
    batch = {
        "x": torch.tensor([1.0, 2.0, 3.0, 4.0]),
        "beside": {"deep": BESIDE[name][0]},
        "classes": ["cat", "dog", "cow"],
    }
    step = ltx.data_parallel(loss(name))
    part, w = ltx.shard(batch), torch.ones(())
    return float(ltx.grad(step)(w, part)), float(ltx.grad(ltx.accumulate(step, 2))(w, part))


@pytest.mark.parametrize("name", BESIDE)
def test_lists_with_an_entry_per_sample(ranks: Ranks, name: str) -> None:
    right = (1 + 2 * 3 + 3 * 5 + 4 * 7) / 4
    assert given(name) == (right, right)
    assert list(ranks(2).run(given, name)) == [(right, right)] * 2


@pytest.mark.parametrize(
    "cut", [ltx.shard, lambda batch: ltx.accumulate(lambda w, b: b["x"].sum(), 2)(torch.ones(()), batch)]
)
def test_what_cant_be_decided_is_refused(cut: Callable[[Any], Any]) -> None:
    with pytest.raises(TreeError, match="these can be samples, or fields of a batch"):
        cut({"x": torch.ones(2), "names": [["a", "b"], ["c", "d"]]})
    refuses(TreeError, r"Pass array.tolist\(\), a list", cut, {"x": torch.ones(2), "names": numpy.array(["a", "b"])})


class Pair:
    """A node that torch knows, and optree doesn't."""

    def __init__(self, first: Any, second: Any):
        self.first, self.second = first, second


class Table:
    """Named columns, as a TensorDict's: its keys are in the order in which they were put in."""

    def __init__(self, **columns: Any):
        self.columns = columns

    def __iter__(self) -> Any:
        raise TypeError("iteration over rows")

    def __bool__(self) -> bool:
        raise RuntimeError("Converting a table to boolean value is not permitted.")


def of_table(table: Table) -> tuple[list[Any], Any]:
    return list(table.columns.values()), {"keys": list(table.columns)}


def test_nodes_of_torchs_pytree(seed: int) -> None:
    torch_pytree.register_pytree_node(Pair, lambda p: ([p.first, p.second], None), lambda xs, _: Pair(*xs))
    torch_pytree.register_pytree_node(
        Table,
        of_table,
        lambda xs, context: Table(**dict(zip(context["keys"], xs, strict=True))),
        flatten_with_keys_fn=lambda t: (
            [(torch_pytree.MappingKey(key), x) for key, x in t.columns.items()],
            of_table(t)[1],
        ),
    )
    a, b = torch.randn(4), torch.randn(4)
    part = ltx.vmap(lambda pair: ltx.shard(pair).second, in_dims=None, axis_size=2)(Pair(a, b))
    assert torch.equal(part, b.view(2, 2))
    table = ltx.vmap(ltx.psum, out_dims=None)(Table(z=a, a=b))
    assert list(table.columns) == ["z", "a"]
    assert torch.allclose(table.columns["z"], a.sum())
    assert ltx.tree.leaf_paths(Table(z=a, a=b)) == ["a", "z"]  # sorted, as all names
    grads = ltx.grad(ltx.data_parallel(lambda p, x: (p.columns["z"] * x.first).sum()))(Table(z=a, a=b), Pair(b, 0.0))
    assert torch.equal(grads.columns["z"], b)
    assert not grads.columns["a"].any()
    state, _ = trained(lambda p, x: (p.first * x + 0 * p.second).sum(), sgd(1.0), Pair(a, b), [b])
    assert torch.allclose(state.params.first, a - b)
    assert torch.equal(state.params.second, b)
