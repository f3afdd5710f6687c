"""Users' containers: mappings and dataclasses are trees, and what else holds tensors is refused by name."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import ltx
from ltx import tree
from ltx.errors import TreeError
from tests.covering import some
from tests.kinds import Ranks


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
