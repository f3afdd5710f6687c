"""What a batch is, to `shard` and `accumulate`: cut between samples, or refused; and to the network: plain, in memory.

The right values are those of one process on the whole batch, by a loop over samples.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict, UserDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import allow_mutation_on_saved_tensors, save_on_cpu
from torch.func import grad, jvp, linearize
from torch.nn.utils.rnn import pack_sequence
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import ltx
from ltx.errors import AxisError, StepError, TreeError, UnsupportedError
from tests.contract.conformance.test_properties import each_fixed
from tests.kinds import Ranks
from tests.train_on import refuses, said, trained
from tests.twins.training import sgd


class Sample(NamedTuple):
    image: Tensor
    boxes: Tensor


@dataclasses.dataclass
class Record:
    image: Tensor
    boxes: Tensor


class Data:
    """As PyTorch Geometric's."""

    def __init__(self, x: Tensor, edge_index: Tensor):
        self.x, self.edge_index = x, edge_index


Data.__module__ = "torch_geometric.data.data"


class Pair(Data):
    """A user's own."""


def images(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Samples of one size, and of boxes that each has another number of; both numbers divide by 2."""
    return [(torch.randn(2, 3), torch.randn(2 + 2 * (i % 2), 3)) for i in range(count)]


#: How a batch of samples is written, and how a step reads them.
WRITTEN: dict[str, tuple[Callable[[list[Any]], Any], Callable[[Any], list[Any]]]] = {
    "dicts": (
        lambda samples: [{"image": a, "boxes": b} for a, b in samples],
        lambda batch: [(x["image"], x["boxes"]) for x in batch],
    ),
    "a tuple of dicts": (
        lambda samples: tuple({"image": a, "boxes": b, "name": "kept"} for a, b in samples),
        lambda batch: [(x["image"], x["boxes"]) for x in batch],
    ),
    "tuples": (lambda samples: samples, lambda batch: batch),
    "lists": (lambda samples: [[a, b] for a, b in samples], lambda batch: batch),
    "named tuples": (lambda samples: [Sample(*x) for x in samples], lambda batch: batch),
    "dataclasses": (lambda samples: [Record(*x) for x in samples], lambda batch: [(x.image, x.boxes) for x in batch]),
    "mappings": (
        lambda samples: [UserDict(image=a, boxes=b) for a, b in samples],
        lambda batch: [(x["image"], x["boxes"]) for x in batch],
    ),
    "beside labels": (
        lambda samples: {"targets": [{"boxes": b} for _, b in samples], "image": torch.stack([a for a, _ in samples])},
        lambda batch: [(a, x["boxes"]) for a, x in zip(batch["image"], batch["targets"], strict=True)],
    ),
    "beside a record's number": (
        lambda samples: ([{"of": (a, b), "n": 3, "scale": torch.ones(())} for a, b in samples], {"y": torch.ones(4)}),
        lambda batch: [x["of"] for x, _ in zip(batch[0], batch[1]["y"], strict=True)],
    ),
    "graphs": (lambda samples: [Pair(a, b) for a, b in samples], lambda batch: [(x.x, x.edge_index) for x in batch]),
}


def loss(w: Tensor, samples: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Of the mean and the largest number of a sample: cut elsewhere it is another."""
    return torch.stack([((w * a).mean() - (w * b).amax()).square() for a, b in samples]).mean()


def by_rank(name: str, samples: list[Any]) -> list[Tensor]:
    write, read = WRITTEN[name]
    w, step = torch.tensor(1.5), ltx.data_parallel(lambda w, batch: loss(w, read(batch)))
    train = ltx.train_step(ltx.accumulate(step, 2), ltx.optim.from_torch(torch.optim.SGD, lr=1.0))
    whole, mine = write(samples), ltx.shard(write(samples))
    return [
        ltx.grad(step)(w, mine),
        ltx.grad(ltx.accumulate(step, 2))(w, mine),
        ltx.grad(ltx.accumulate(step, 4))(w, whole),
        w - train(train.init(w), mine)[0].params,
    ]


@pytest.mark.parametrize("name", WRITTEN)
def test_records_are_cut_between_samples(name: str, ranks: Ranks, seed: int) -> None:
    samples = images()
    expected = grad(loss)(torch.tensor(1.5), samples)
    for found in [by_rank(name, samples), *ranks(2).run(by_rank, name, samples)]:
        for value in found:
            torch.testing.assert_close(value, expected)


#: Records as unequal inside as annotations are.
UNEQUAL: dict[str, list[Any]] = {
    "dicts": [{"id": 0, "labels": [1]}, {"id": 1, "labels": [2, 3]}, {"id": 2, "labels": []}, {"id": 3, "labels": [4]}],
    "dicts of dicts": [{"of": {"box": [i] * i} if i else None} for i in range(4)],
    "dicts of tensors": [{"boxes": list(torch.ones(i, 3))} for i in range(4)],
}


@pytest.mark.parametrize("name", UNEQUAL)
def test_records_that_are_unequal_inside(name: str, ranks: Ranks) -> None:
    records, seen = UNEQUAL[name], list[Any]()
    for rank, found in enumerate(ranks(2).run(ltx.shard, {"x": torch.arange(4), "of": records})):
        assert (found["x"].tolist(), str(found["of"])) == ([2 * rank, 2 * rank + 1], str(records[2 * rank :][:2]))
    ltx.accumulate(lambda w, batch: seen.append(batch["of"]) or w * 1.0, 2)(
        torch.ones(()), {"x": torch.ones(4), "of": records}
    )
    assert str(seen) == str([records[:2], records[2:]])


def test_records_on_simulated_ranks(seed: int) -> None:
    samples = [(torch.randn(2, 3), torch.randn(6)) for _ in range(4)]
    batch = ([{"of": sample, "name": "kept"} for sample in samples], torch.arange(4))
    w = torch.tensor(1.5)

    def run() -> Tensor:
        mine, numbers = ltx.shard(batch)
        assert (len(mine), len(numbers), mine[1]["name"]) == (2, 2, "kept")
        step = ltx.data_parallel(lambda w, xs, numbers: loss(w, [x["of"] for x in xs]))
        return ltx.grad(ltx.accumulate(step, 2))(w, mine, numbers)

    for found in ltx.vmap(run, axis_size=2)():
        torch.testing.assert_close(found, grad(loss)(w, samples))
    with pytest.raises(ltx.errors.UnsupportedError, match=r"these records differ\. .*ltx\.Pool\(n\)\.run\(fn\)"):
        ltx.vmap(lambda: ltx.shard([(torch.ones(2 + i),) for i in range(4)])[0][0].sum(), axis_size=2)()


def test_unequal_micro_batches_of_records_are_those_of_the_tensors(seed: int) -> None:
    samples, w = images(7), torch.tensor(1.5)

    def step(w: Tensor, batch: dict[str, Any]) -> ltx.Weighted:
        assert [int(x["n"]) for x in batch["xs"]] == batch["n"].tolist()
        return ltx.Weighted(loss(w, [x["of"] for x in batch["xs"]]) * len(batch["xs"]), len(batch["xs"]))

    batch = {"xs": [{"of": x, "n": n} for n, x in enumerate(samples)], "n": torch.arange(7)}
    for steps in (2, 3):
        found = grad(ltx.accumulate(ltx.data_parallel(step), steps))(w, batch)
        torch.testing.assert_close(found, grad(loss)(w, samples))


def test_gradients_of_records(seed: int) -> None:
    samples = [(a.requires_grad_(), b.requires_grad_()) for a, b in images()]
    leaves, w = [x for pair in samples for x in pair], torch.tensor(1.5)
    found = torch.autograd.grad(ltx.accumulate(loss, 2)(w, samples), leaves)
    torch.testing.assert_close(found, torch.autograd.grad(loss(w, samples), leaves))


#: What is cut in its tensors, as ever.
FIELDS: dict[str, Callable[[Tensor], Any]] = {
    "a list of tensors": lambda x: [x, 2 * x],
    "two tensors of two": lambda x: (x[:2], x[:2]),
    "dicts of other keys": lambda x: [{"x": x}, {"y": x, "z": x}],
    "pairs beside a tensor": lambda x: {"states": ((x, x), (x, x)), "y": x},
    "a dict of dicts": lambda x: {"a": {"x": x}, "b": {"x": x}},
    "an OrderedDict": lambda x: OrderedDict(b=x, a=x),
    "numbers and texts": lambda x: {"x": x, "n": 3, "names": ["a", "b"], "scale": torch.ones(()), "none": None},
    "texts in pairs": lambda x: [x, {"names": [("a", "b"), ("c", "d")]}],
}


@pytest.mark.parametrize("name", FIELDS)
def test_fields_are_cut(name: str, ranks: Ranks, seed: int) -> None:
    batch = FIELDS[name](torch.randn(8, 3))
    for rank, mine in enumerate(ranks(2).run(ltx.shard, batch)):
        whole, part = ltx.tree.flatten(batch)[0], ltx.tree.flatten(mine)[0]
        expected = [x.chunk(2)[rank] if isinstance(x, Tensor) and x.ndim else x for x in whole]
        for found, wanted in zip(part, expected, strict=True):
            assert found.equal(wanted) if isinstance(found, Tensor) else found == wanted


def nested(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(4)], layout=layout)


#: What is refused, and what the error says.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "lengths": (
        lambda: {"x": torch.ones(4, 2), "y": torch.ones(4), "weights": torch.ones(2)},
        r"got 2: 'weights'; 4: 'x', 'y'\..*close over what isn't part of the batch",
    ),
    "CSR": (lambda: (torch.tensor([0, 2, 4]), torch.ones(4), torch.ones(4)), r"got 3: '0'; 4: '1', '2'\."),
    "a list too short": (
        lambda: {"x": torch.ones(4, 2), "targets": [{"boxes": torch.ones(2, 4)}, {"boxes": torch.ones(6, 4)}]},
        r"2 records of tensors of 2 and 6: 'targets'; 4: 'x'\.",
    ),
    "images and targets": (
        lambda: ([torch.ones(2, 8, 8)] * 4, [{"boxes": torch.ones(2 + i, 4)} for i in range(4)]),
        r"as a list of records",
    ),
    "records or fields": (
        lambda: [{"image": torch.ones(2, 8)}] * 4,
        r"is a list of 4 containers in which all tensors have length 2.*Pass fields in a dict.*Stack the tensors",
    ),
    "as many as they are long": (lambda: ([(torch.ones(4),)] * 4, torch.ones(4)), r"'0' is a list of 4 containers"),
    "PackedSequence": (
        lambda: pack_sequence([torch.ones(4, 2), torch.ones(2, 2)]),
        r"is of type PackedSequence, whose tensors belong together.*pack_padded_sequence",
    ),
    "Data": (lambda: Data(torch.ones(4, 2), torch.ones(2, 4)), r"of type Data.*a list with one object a graph"),
    "Pair": (lambda: Pair(torch.ones(4, 2), torch.ones(2, 4)), r"of type Pair.*a list with one object a graph"),
    "jagged": (lambda: nested(torch.jagged), r"of type NestedTensor.*nested\.unbind\(\)"),
    "nested": (lambda: nested(torch.strided), r"nested\.unbind\(\)"),
    "sparse": (lambda: torch.eye(4).to_sparse(), r"of type Tensor.*x\.to_dense\(\)"),
    "csr": (lambda: torch.eye(4).to_sparse_csr(), r"x\.to_dense\(\)"),
}


@pytest.mark.filterwarnings("ignore:.*prototype|.*beta state")
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_cut_inside_of_samples(name: str) -> None:
    make, text = REFUSED[name]
    batch, step = make(), ltx.accumulate(ltx.data_parallel(lambda w, batch: w.square()), 2)
    calls: list[Callable[[], Any]] = [
        lambda: ltx.shard(batch),
        lambda: ltx.vmap(lambda: ltx.shard(batch), axis_size=2)(),
        lambda: step(torch.ones((), requires_grad=True), batch),
        lambda: step(torch.ones(()), batch=batch),
    ]
    for call in calls:
        assert said(TreeError, call).startswith(("shard: ", "accumulate: "))
    refuses(TreeError, text, ltx.shard, batch)


def test_arguments_are_one_batch() -> None:
    step = ltx.accumulate(lambda w, x, *others, **named: (w * x).mean(), 2)
    with pytest.raises(TreeError, match=r"got 4: 'argument 1', 'y'; 2: 'argument 2.table'\."):
        step(torch.ones(()), torch.ones(4), {"table": torch.ones(2)}, y=torch.ones(4))


def test_records_that_do_not_divide() -> None:
    records = images(5)
    with pytest.raises(AxisError, match=r"the value itself is a list of 5 records, which can't be split into 2"):
        ltx.vmap(lambda: ltx.shard(records), axis_size=2)()
    with pytest.raises(StepError, match="a batch of 5 samples can't be split into 2 equal micro-batches"):
        ltx.accumulate(loss, 2)(torch.ones(()), records)


def test_other_dimensions_have_lengths_of_their_own(ranks: Ranks) -> None:
    source, target = torch.randn(3, 8), torch.randn(3, 4)
    for rank, mine in enumerate(ranks(2).run(ltx.shard, (source, target), dim=1)):
        torch.testing.assert_close(mine, (source.chunk(2, 1)[rank], target.chunk(2, 1)[rank]))


@pytest.mark.full
def test_in_a_compiled_graph(seed: int) -> None:
    samples, w = images(), torch.tensor(1.5)
    compiled = torch.compile(grad(ltx.accumulate(loss, 2)), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(w, samples), grad(loss)(w, samples))


# What is beside the tensors of a batch: lists with an entry per sample are cut, too; nodes of torch's pytree.
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


def loss_of(name: str) -> Callable[..., Tensor]:
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
    step = ltx.data_parallel(loss_of(name))
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


class Couple:
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
    torch_pytree.register_pytree_node(Couple, lambda p: ([p.first, p.second], None), lambda xs, _: Couple(*xs))
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
    part = ltx.vmap(lambda pair: ltx.shard(pair).second, in_dims=None, axis_size=2)(Couple(a, b))
    assert torch.equal(part, b.view(2, 2))
    table = ltx.vmap(ltx.psum, out_dims=None)(Table(z=a, a=b))
    assert list(table.columns) == ["z", "a"]
    assert torch.allclose(table.columns["z"], a.sum())
    assert ltx.tree.leaf_paths(Table(z=a, a=b)) == ["a", "z"]  # sorted, as all names
    grads = ltx.grad(ltx.data_parallel(lambda p, x: (p.columns["z"] * x.first).sum()))(Table(z=a, a=b), Couple(b, 0.0))
    assert torch.equal(grads.columns["z"], b)
    assert not grads.columns["a"].any()
    state, _ = trained(lambda p, x: (p.first * x + 0 * p.second).sum(), sgd(1.0), Couple(a, b), [b])
    assert torch.allclose(state.params.first, a - b)
    assert torch.equal(state.params.second, b)


double = partial(torch.tensor, dtype=torch.float64)
COLLECTIVES: dict[str, Callable[..., Tensor]] = {name: op for name, (op, _) in each_fixed(2, dim=0).items()}
COLLECTIVES |= {"adasum": ltx.adasum, "sync_gradients": lambda x: ltx.sync_gradients(x)[0]}
#: How ranks communicate, by the argument of `on_new_axis`.
BOTH = pytest.mark.parametrize("sockets", [False, True])
OnNewAxis = Callable[..., Any]


def all_kinds(make: Callable[[], Tensor], plain: Callable[[Tensor], Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Of each collective: the result for an odd tensor, and for the same numbers in a plain one."""
    return {name: (f(make()), f(plain(make()))) for name, f in COLLECTIVES.items()}


def equal(results: dict[str, tuple[Tensor, Tensor]]) -> bool:
    return all(torch.equal(odd, plain) and type(odd) is type(plain) for odd, plain in results.values())


ODD: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]] = {
    "zeros without memory": (lambda: torch._efficientzerotensor(4), torch.Tensor.clone),
    "negative view": (lambda: torch._neg_view(torch.arange(4.0) + ltx.axis_index()), torch.Tensor.resolve_neg),
    "expanded": (lambda: (1.0 + ltx.axis_index()).expand(4), torch.Tensor.clone),
}


@BOTH
@pytest.mark.parametrize("name", ODD)
def test_odd_tensors(name: str, sockets: bool, on_new_axis: OnNewAxis) -> None:
    make, plain = ODD[name]
    assert all(equal(each) for each in on_new_axis(lambda: all_kinds(make, plain), sockets=sockets))


@BOTH
def test_the_gradient_of_a_curvature_penalty(sockets: bool, on_new_axis: OnNewAxis) -> None:
    """vᵀ H v of the mean loss of data 1 and 2; some of its cotangents are torch's zeros without memory."""
    p, v = double([0.5, 0.7]), double([0.3, 0.4])

    def loss(p: Tensor, x: Any) -> Tensor:
        return (p * x).sum().sin() + (p**3 * x).sum()

    def penalty(loss: Callable[[Tensor], Tensor], p: Tensor) -> Tensor:
        return jvp(lambda p: (grad(loss)(p) * v).sum(), (p,), (v,))[1]

    def on_rank() -> Tensor:
        step, x = ltx.data_parallel(loss), 1.0 + ltx.axis_index()
        return grad(partial(penalty, lambda p: step(p, x)))(p)

    expected = grad(partial(penalty, lambda p: (loss(p, 1.0) + loss(p, 2.0)) / 2))(p)
    for found in on_new_axis(on_rank, sockets=sockets):
        torch.testing.assert_close(found, expected)


class Looks(TorchDispatchMode):
    """At the version of each tensor, which tensors of inference mode don't have."""

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert all(x._version >= 0 for x in args if isinstance(x, Tensor))
        return f(*args, **(kwargs or {}))


class SeesNoMessages(TorchFunctionMode):
    """Of torch's functions it sees none by which numbers come to shared memory, or from it."""

    def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame: Any = sys._getframe(1)
        moves = f in (Tensor.copy_, torch.add, torch.sum, torch.empty, Tensor.view)
        assert not (moves and frame.f_code.co_filename.endswith("shared_memory/transport.py")), f
        return f(*args, **(kwargs or {}))


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "one that looks": Looks,
    "one of functions": SeesNoMessages,
    "mutation of what is saved": allow_mutation_on_saved_tensors,
    "flops": partial(FlopCounterMode, display=False),
    "saved on the CPU": save_on_cpu,
    "inference": torch.inference_mode,
}


def training(mode: Callable[[], AbstractContextManager[Any]]) -> list[Any]:
    """Collectives and their gradients, a step whose hook computes, and two training steps."""
    x = 1.0 + ltx.axis_index()
    with mode():
        found = [f(torch.arange(4.0) * x) for f in COLLECTIVES.values()]
        if torch.is_inference_mode_enabled():
            return found
        w = torch.ones(4, requires_grad=True)
        for f in COLLECTIVES.values():
            f(w * x).square().sum().backward()
        p = torch.ones(4, 4, requires_grad=True)
        step = ltx.data_parallel(lambda p, x: (p @ p * x).sum(), ltx.DDPStrategy(comm_hook=ltx.hooks.ByteGrad()))
        step(p, x).backward()
        after = trained(step, ltx.optim.from_torch(torch.optim.Adam), torch.ones(4, 4), [x] * 2)
    return [*found, w.grad, p.grad, after.params]


@BOTH
@pytest.mark.parametrize("mode", MODES)
def test_modes(mode: str, sockets: bool, on_new_axis: OnNewAxis) -> None:
    def alike() -> bool:
        found, right = training(MODES[mode]), training(nullcontext)
        return all(torch.equal(x, y) for x, y in zip(found, right, strict=mode != "inference"))

    assert list(on_new_axis(alike, sockets=sockets)) == [True, True]


def checkpointed(policy: CheckpointPolicy) -> list[Tensor]:
    """The gradient of a sum between two functions, by selective checkpointing and without it."""
    grads = []
    for kwargs in (
        {"context_fn": lambda: create_selective_checkpoint_contexts(lambda ctx, op, *args, **kwargs: policy)},
        {},
    ):
        w = torch.arange(3.0, requires_grad=True)
        f = lambda x: ltx.psum((x * (1 + ltx.axis_index())).sin()).sin()  # noqa: E731
        (checkpoint(f, w, use_reentrant=False, **kwargs) if kwargs else f(w)).sum().backward()
        assert w.grad is not None
        grads.append(w.grad)
    return grads


@BOTH
@pytest.mark.parametrize("policy", ["MUST_SAVE", "PREFER_RECOMPUTE"])
def test_selective_checkpointing(policy: str, sockets: bool, on_new_axis: OnNewAxis) -> None:
    for found, right in on_new_axis(lambda: checkpointed(CheckpointPolicy[policy]), sockets=sockets):
        assert torch.equal(found, right)


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr")
@BOTH
def test_linearized_numbers(sockets: bool, on_new_axis: OnNewAxis) -> None:
    """Tensors without a dimension, in a recorded graph."""

    def both(name: str) -> bool:
        x, t = double(1.0 + ltx.world().rank), double(2.0 + ltx.world().rank)
        value, push = linearize(COLLECTIVES[name], x)
        found, right = (value, push(t)), jvp(COLLECTIVES[name], (x,), (t,))
        return all(torch.equal(a, b) for a, b in zip(found, right, strict=True))

    left_out = ("all_gather tiled", "psum_scatter", "gather", "scatter", "all_to_all", "weighted_mean")
    names = [name for name in COLLECTIVES if name not in left_out]
    assert list(on_new_axis(lambda: [name for name in names if not both(name)], sockets=sockets)) == [[], []]


def refused() -> list[str]:
    """What is said of tensors of a class that holds them in others, and of fake tensors; then a sum goes on."""
    given = {"a": torch.ones(3), "b": TwoTensor(torch.ones(3), torch.ones(3))}
    texts = [said(UnsupportedError, f, given) for f in (ltx.psum, ltx.all_gather, ltx.broadcast)]
    with FakeTensorMode():
        assert ltx.psum(torch.ones(3)).shape == (3,)  # recorded: what is known of fake tensors
        refuses(UnsupportedError, "fake tensors can't be sent", ltx.barrier)
    assert ltx.psum(torch.ones(())).item() == 2
    return texts


@BOTH
def test_what_has_no_memory_is_refused(sockets: bool, on_new_axis: OnNewAxis) -> None:
    right = [
        f"{name}: leaf 'b' is a TwoTensor, which holds its numbers in other tensors, and a plain tensor was expected. "
        "Pass those."
        for name in ("psum", "all_gather", "broadcast")
    ]
    assert list(on_new_axis(refused, sockets=sockets)) == [right, right]
