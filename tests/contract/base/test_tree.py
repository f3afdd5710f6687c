"""Trees: the order in which leaves lie, their paths, and errors that name them."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import pytest
import torch
import torch.utils._pytree as torch_pytree

from ltx import tree
from ltx.errors import LtxError, TreeError

KEYS = ["w", "b", "a", "z", "B", "_", "10", "9", "layer.1", ""]


class Pair(NamedTuple):
    second: Any
    first: Any


def _random_tree(depth: int, built: list[int]) -> Any:
    """A tree whose leaves are numbered in the order in which they are put in."""
    kind = random.choice(["dict", "dict", "ordered", "default", "list", "tuple", "pair", "none", "leaf", "leaf"])
    if depth == 0 or kind == "leaf":
        built.append(len(built))
        return built[-1]
    keys = random.sample(KEYS, random.randrange(4))
    match kind:
        case "dict":
            return {key: _random_tree(depth - 1, built) for key in keys}
        case "ordered":
            return OrderedDict((key, _random_tree(depth - 1, built)) for key in keys)
        case "default":
            return defaultdict(list, {key: _random_tree(depth - 1, built) for key in keys})
        case "list":
            return [_random_tree(depth - 1, built) for _ in keys]
        case "tuple":
            return tuple(_random_tree(depth - 1, built) for _ in keys)
        case "pair":
            return Pair(_random_tree(depth - 1, built), _random_tree(depth - 1, built))
    return None


def test_insertion_order_of_random_trees(seed: int) -> None:
    """Position in flatten's order of each leaf, in the order in which the leaves were put in."""
    for _ in range(300):
        built: list[int] = []
        made = _random_tree(4, built)
        flat = tree.flatten(made)[0]
        assert [flat[position] for position in tree.insertion_order(made)] == built, made


def test_insertion_order_of_a_module() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    for params in (dict(module.named_parameters()), module.state_dict()):
        paths = tree.leaf_paths(params)
        assert [paths[i] for i in tree.insertion_order(params)] == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_flatten_does_not_depend_on_the_order_of_insertion(seed: int) -> None:
    """Ranks whose dicts were built in different orders pair the same leaves."""
    shuffled = dict(random.sample(sorted({key: i for i, key in enumerate(KEYS)}.items()), len(KEYS)))
    assert tree.flatten(shuffled) == tree.flatten({key: i for i, key in enumerate(KEYS)})


def test_there_and_back(seed: int) -> None:
    for _ in range(100):
        made = _random_tree(4, [])
        leaves, spec = tree.flatten(made)
        assert tree.unflatten(spec, leaves) == made
        assert len(tree.leaf_paths(made)) == len(leaves)


def test_leaf_paths() -> None:
    made = {"layers": [{"w": 1, "b": 2}, (3,)], "head": 4, "a.b": 5}
    assert tree.leaf_paths(made) == ["a.b", "head", "layers.0.b", "layers.0.w", "layers.1.0"]
    assert tree.leaf_paths(torch.ones(1)) == ["<the tree itself>"]
    assert tree.leaf_paths({}) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "the value itself is of type int."),
        ({"a": torch.ones(1), "b": [torch.ones(1), "x"]}, "leaf 'b.1' is of type str."),
        ([1.5], "leaf '0' is of type float."),
        (torch.nn.Linear(1, 1), "type Linear. Pass dict(module.named_parameters()) and call it with"),
        (torch.nn.Linear(1, 1).parameters(), "type generator. A generator is used up by its first reader"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_is_no_tree_of_tensors(value: Any, text: str) -> None:
    with pytest.raises(TreeError) as caught:
        tree.check_tensors(value, "params")
    assert str(caught.value).startswith("params must be a tree of tensors, but ")
    assert text in str(caught.value)
    assert isinstance(caught.value, LtxError)
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("value", [{}, None, [torch.ones(1), None], {"a": (torch.ones(1),)}])
def test_trees_of_tensors(value: Any) -> None:
    tree.check_tensors(value, "params")


def test_descriptions() -> None:
    assert tree.describe(torch.zeros(2, 0, dtype=torch.bfloat16)) == "bfloat16[2, 0]"
    assert tree.describe(torch.zeros((), dtype=torch.bool)) == "bool[]"


def test_nodes_are_registered_with_both_libraries() -> None:
    class Node:
        def __init__(self, x: Any, y: Any, static: str):
            self.x, self.y, self.static = x, y, static

    tree.register_node(Node, lambda n: ((n.x, n.y), n.static), lambda c, s: Node(*c, s), names=("x", "y"))
    node = Node(torch.ones(1), {"z": 2}, "kept")
    assert tree.leaf_paths(node) == ["x", "y.z"]
    doubled = optree.tree_map(lambda leaf: 2 * leaf, node)
    assert (doubled.x.item(), doubled.y, doubled.static) == (2.0, {"z": 4}, "kept")
    leaves, spec = torch_pytree.tree_flatten(node)
    assert torch_pytree.tree_unflatten([3, 4], spec).y == {"z": 4}
    assert len(leaves) == 2
    assert torch.func.grad(lambda n: (n.x**2).sum())(Node(torch.ones(1), {}, "")).x.item() == 2.0
    assert tree.flatten(node)[1] != tree.flatten(Node(node.x, node.y, "other"))[1], "static parts are structure"


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"a": {}},
        [{"k": 1}, {"n": "x", "a": {}}],
        OrderedDict(),
        defaultdict(list),
        deque([{}]),
        {"b": 2, "a": (3,)},
    ],
    ids=str,
)
def test_what_holds_no_tensor_in_a_graph(other: Any) -> None:
    """A dict of constants is one to Dynamo, which would have optree itself take it apart."""

    def flattened(x: torch.Tensor) -> Any:
        leaves, spec = tree.flatten([x, other])
        return tree.unflatten(spec, [leaves[0] + 1, *leaves[1:]]), tree.map(lambda leaf: leaf, other)

    (one, same), again = torch.compile(flattened, fullgraph=True, backend="eager")(torch.zeros(()))
    assert (one.item(), same, again) == (1.0, other, other)
    assert (type(same), list(same)) == (type(other), list(other))


def test_paths_in_a_graph() -> None:
    @dataclass
    class Pair:
        x: Any
        y: Any

    made = {"b": [None, Pair(torch.ones(2), {2: torch.ones(1), 1: {}})], "a": (torch.zeros(1),)}

    def paths(value: Any) -> Any:
        return tree.leaf_paths(value), tree.leaf_paths(value, with_none=True), value["a"][0] + 1

    assert torch.compile(paths, fullgraph=True, backend="eager")(made)[:2] == paths(made)[:2]
    assert paths(made)[0] == ["a.0", "b.1.x", "b.1.y.2"]
