"""Trees: the order of leaves, their paths, and errors that name them. Users' mappings and dataclasses are trees too."""

from __future__ import annotations

import dataclasses
import random
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import optree
import pytest
import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import ltx
from ltx import tree
from ltx.errors import TreeError
from tests.covering import some
from tests.kinds import Ranks

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


def test_random_trees_there_and_back(seed: int) -> None:
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


def test_which_nodes_are_leaves_can_be_said() -> None:
    """Also of containers, known or not, and in a graph."""

    @dataclass
    class Pair:
        x: Any
        y: Any

    def seconds(x: torch.Tensor) -> Any:
        return tree.map(lambda pair: pair[1], [(x, x + 1), {"a": (x, x + 2)}], is_leaf=lambda n: isinstance(n, tuple))

    one = torch.ones(())
    assert seconds(one) == [2, {"a": 3}] == torch.compile(seconds, fullgraph=True, backend="eager")(one)
    pair, others = Pair(1, 2), {"a": 1}
    assert tree.flatten([pair, others], is_leaf=lambda n: n in (pair, others))[0] == [pair, others]
    assert tree.flatten([pair, {"b": None}], is_leaf=lambda n: n == {"b": None})[0] == [1, 2, {"b": None}]
    assert tree.flatten([pair, None], none_is_leaf=True)[0] == [1, 2, None]


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


class Encoding(UserDict):  # type: ignore[type-arg]
    """As transformers.BatchEncoding."""

    def __init__(self, data: Any = None, encoding: Any = None):
        super().__init__(data)
        self._encodings = encoding

    def __getattr__(self, item: str) -> Any:
        try:
            return self.data[item]
        except KeyError:
            raise AttributeError(item) from None


@dataclasses.dataclass
class Output(OrderedDict):  # type: ignore[type-arg]
    """As transformers' ModelOutput: an OrderedDict whose items are attributes too, without those that are None."""

    loss: Tensor | None = None
    logits: Tensor | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("You cannot use ``update`` on a ModelOutput instance.")


class Attributes(dict):  # type: ignore[type-arg]
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Extra(dict):  # type: ignore[type-arg]
    extra: Tensor
    note: str


class Frozen(Mapping):  # type: ignore[type-arg]
    def __init__(self, items: dict[str, Any]):
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Factory(defaultdict):  # type: ignore[type-arg]
    pass


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    x: Tensor
    note: str = "kept"


@dataclasses.dataclass
class Derived:
    x: Tensor
    double: Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.double = 2 * self.x
        self.besides = 3 * self.x


@dataclasses.dataclass
class Reader:
    x: Tensor

    @cached_property
    def norm(self) -> Tensor:
        return self.x.norm()


class ReadMapping(Encoding):
    @cached_property
    def norm(self) -> Tensor:
        return self.data["x"].norm()


class ReadDict(dict):  # type: ignore[type-arg]
    @cached_property
    def norm(self) -> Any:
        return self["x"].norm()

    @cached_property
    def length(self) -> int:
        return len(self["x"])


def read(x: Tensor) -> Reader:
    made = Reader(x)
    made.norm  # noqa: B018
    return made


def extra(x: Tensor) -> Extra:
    made = Extra(x=x)
    made.extra, made.note = 2 * x, "kept"
    return made


class Holder:
    def __init__(self, x: Tensor):
        self.inner = {"x": [x]}


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Tensor):
        self.x = x


class Listed(list):  # type: ignore[type-arg]
    pass


OPEN: dict[str, Callable[[Tensor], Any]] = {
    "UserDict": lambda x: Encoding({"x": x, "n": 3}, ["kept"]),
    "ModelOutput": lambda x: Output(x.sum(), x),
    "attributes": lambda x: Attributes(x=x),
    "extra": extra,
    "OrderedDict": lambda x: OrderedDict(z=x, a=x),
    "defaultdict": lambda x: Factory(list, {"x": x}),
    "proxy": lambda x: MappingProxyType({"x": x}),
    "Mapping": lambda x: Frozen({"x": x}),
    "frozen": Batch,
    "derived": Derived,
    "cached": read,
    "nested": lambda x: Encoding({"x": [Batch(x), Attributes(y=(x,))]}),
}

CLOSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "object": (Holder, r"register_pytree_node\(Holder"),
    "slots": (Slotted, r"register_pytree_node\(Slotted"),
    "list": (lambda x: Listed([x]), "Pass a list of them"),
    "set": (lambda x: {x}, "pass a list"),
    "module": (lambda x: torch.nn.Linear(1, 1), "close over it"),
    "array": (lambda x: x.numpy(), r"torch\.as_tensor"),
    "loader": (lambda x: DataLoader(TensorDataset(x)), "Take a batch from it"),
    "generator": (lambda x: (y for y in [x]), "Take a batch from it"),
}


@pytest.mark.parametrize("kind", OPEN)
def test_there_and_back(kind: str) -> None:
    made = OPEN[kind](torch.arange(8.0))
    leaves, spec = tree.flatten(made)
    assert any(isinstance(leaf, Tensor) for leaf in leaves)
    assert len(tree.leaf_paths(made)) == len(leaves)
    again = tree.unflatten(spec, leaves)
    assert type(again) is type(made)
    assert again is not made
    assert [x for x, y in zip(tree.flatten(again)[0], leaves, strict=True) if x is not y] == []
    assert tree.flatten(again)[1] == spec
    if isinstance(made, Mapping):
        assert list(again) == list(made)


def test_they_come_back_as_what_they_were() -> None:
    x = torch.arange(8.0)
    half: dict[str, Any] = {
        kind: ltx.vmap(ltx.shard, in_dims=None, axis_size=2)(make(x)) for kind, make in OPEN.items()
    }
    stacked = x.reshape(2, 4)

    def same(got: Tensor, want: Tensor) -> bool:
        return torch.equal(got, want)

    assert same(half["UserDict"].x, stacked)
    assert half["UserDict"]._encodings == ["kept"]
    assert half["UserDict"]["n"] == 3
    assert same(half["ModelOutput"].logits, stacked)
    assert half["ModelOutput"]["logits"] is half["ModelOutput"].logits
    assert same(half["attributes"].x, stacked)
    half["attributes"].y = 1
    assert half["attributes"]["y"] == 1
    assert same(half["extra"].extra, 2 * stacked)
    assert half["extra"].note == "kept"
    assert half["defaultdict"].default_factory is list
    assert same(half["frozen"].x, stacked)
    assert half["frozen"].note == "kept"
    assert same(half["derived"].double, 2 * stacked)
    assert same(half["derived"].besides, 3 * stacked)


@pytest.mark.parametrize("make", [Reader, lambda x: ReadMapping({"x": x}), lambda x: ReadDict(x=x)])
def test_what_a_cached_property_keeps_is_no_child(make: Callable[[Tensor], Any]) -> None:
    made, fresh = make(torch.ones(4)), make(torch.ones(4))
    made.norm  # noqa: B018
    if isinstance(made, ReadDict):
        assert made.length == 4
    assert tree.flatten(made)[1] == tree.flatten(fresh)[1]
    assert tree.leaf_paths(made) == tree.leaf_paths(fresh)
    doubled: Any = tree.map(lambda t: 2 * t if isinstance(t, Tensor) else t, made)
    assert vars(doubled).keys() == vars(fresh).keys()
    assert doubled.norm == 2 * made.norm  # its own
    if isinstance(made, ReadDict):
        assert ltx.vmap(ltx.shard, in_dims=None, axis_size=2)(made).length == 2


def test_a_cached_property_is_not_trained() -> None:
    loss = ltx.data_parallel(lambda params, x: (params.x * params.norm * x).sum())
    train = ltx.train_step(loss, ltx.optim.from_torch(torch.optim.SGD, lr=0.1))
    x = torch.arange(4.0)
    want = torch.func.grad(lambda w: (w * (w.norm()) * x).sum())(torch.ones(4))
    state, _ = train(train.init(read(torch.ones(4))), x)
    torch.testing.assert_close(state.params.x, 1 - 0.1 * want)
    assert "norm" not in vars(state.params)


def step(w: Tensor, batch: Any) -> Tensor:
    return (w * batch.x).square().mean()


BATCHES: tuple[Callable[[Tensor], Any], ...] = (lambda x: Encoding({"x": x}), lambda x: Attributes(x=x), Batch)


def test_every_function_that_takes_a_tree_looks_into_them(ranks: Ranks, seed: int) -> None:
    """Against a dict's tensor by hand, on real ranks, simulated ranks and in a world of one."""
    x, w = torch.randn(8, dtype=torch.float64), torch.tensor(1.5, dtype=torch.float64)
    want = torch.func.grad(lambda w: (w * x).square().mean())(w)
    plain = ltx.data_parallel(step)
    optimizer = ltx.optim.from_torch(torch.optim.SGD, lr=1.0)

    def run() -> list[Any]:
        found: list[Any] = []
        for make in BATCHES:
            mine = ltx.shard(make(x))
            assert mine.x.numel() * ltx.axis_size() == 8
            for one in (plain, ltx.accumulate(plain, 2)):
                train = ltx.train_step(one, optimizer)
                found += [ltx.grad(one)(w, mine), w - train(train.init(w), mine)[0].params]
            seen: list[torch.dtype] = []

            def looks(w: Tensor, batch: Any, seen: list[torch.dtype] = seen) -> Tensor:
                seen.append(batch.x.dtype)
                return step(w, batch)

            ltx.mixed_precision(ltx.data_parallel(looks), ltx.Precision(compute=torch.float32))(w, mine)
            assert seen == [torch.float32]
            assert type(ltx.psum(Encoding({"x": mine.x}))) is Encoding
            found.append(ltx.broadcast(Batch(w, w)).x * 0 + want)  # type: ignore[arg-type]
        return found

    for found in (run(), *ranks(2).run(run)):
        for grad in found:
            torch.testing.assert_close(grad, want)

    for grad in ltx.vmap(lambda x: ltx.grad(ltx.accumulate(plain, 2))(w, Encoding({"x": x})))(x.reshape(2, 4)):
        torch.testing.assert_close(grad, want)


def test_placeholders_of_uneven_batches_are_zeros(ranks: Ranks) -> None:
    def run() -> Any:
        mine = [Encoding({"x": torch.ones(2)})] * (1 + int(ltx.axis_index()))
        return [(type(batch) is Encoding, batch.x.sum().item()) for batch, _ in ltx.uneven(mine)]

    assert list(ranks(2).run(run)) == [[(True, 2.0), (True, 0.0)], [(True, 2.0), (True, 2.0)]]


@pytest.mark.parametrize("kind", CLOSED)
def test_what_hides_tensors_is_refused_by_name(kind: str) -> None:
    make, fix = CLOSED[kind]
    x, w = torch.ones(4), torch.tensor(1.0)
    plain = ltx.data_parallel(lambda w, batch: w.square())
    calls: dict[str, Callable[[Any], Any]] = {
        "shard": ltx.shard,
        "accumulate": lambda batch: ltx.accumulate(plain, 2)(w, batch),
        "mixed_precision": lambda batch: ltx.mixed_precision(plain, ltx.Precision())(w, batch),
        "mapped arguments": lambda batch: ltx.vmap(lambda x, batch: x)(x, batch),
    }
    if kind == "array":
        del calls["mapped arguments"]  # which takes them
    for name, call in calls.items():
        with pytest.raises(TreeError, match=fix) as caught:
            call({"a": make(x)})
        assert isinstance(caught.value, TypeError)
        assert name in str(caught.value)
        assert "a' is of type " in str(caught.value)


def test_what_holds_no_tensors_is_passed_on() -> None:
    class Config:
        names = ("a", "b")

    given = {"config": Config(), "text": ["a", "b"], "size": torch.Size([2]), "fn": len, "number": np.float32(1.0)}
    assert ltx.shard(given) == given


def test_a_mapping_that_cannot_be_made_again_is_refused_by_name() -> None:
    class Odd(Frozen):
        def __init__(self, **items: Any):
            super().__init__(items)

    with pytest.raises(
        TreeError, match=r"a .*Odd can't be made of a dict of its items: TypeError.*register_pytree_node"
    ):
        ltx.shard(Odd(x=torch.ones(2)))


@pytest.mark.full
@pytest.mark.parametrize("kind", some(["UserDict", "attributes", "frozen", "derived", "cached"], "frozen"))
def test_in_a_compiled_graph(kind: str, seed: int) -> None:
    x, w = torch.randn(8), torch.tensor(1.5)
    one = ltx.mixed_precision(ltx.accumulate(ltx.data_parallel(step), 2), ltx.Precision(compute=torch.float64))
    compiled = torch.compile(ltx.grad(one), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(w, OPEN[kind](x)), ltx.grad(one)(w, OPEN[kind](x)))
