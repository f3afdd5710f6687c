"""Bad numbers of processes, and ranks whose trees differ, are refused."""

from __future__ import annotations

import ast
import os
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx import Pool, hooks
from ltx.errors import (
    ArgumentError,
    DonatedStateError,
    EqualBatchesWarning,
    LtxError,
    RankMismatchError,
    StepError,
    TreeError,
    WorkerError,
)
from tests.contract.bad_input.public import batch, loss, params
from tests.kinds import OnNewAxis, Ranks
from tests.train_on import on_ranks, refuses, said, trained
from tests.twins.training import sgd


@pytest.mark.parametrize("n", [0, -1, 1.5, 2.0, "2", None, torch.ones(2)])
def test_numbers_of_processes(n: Any) -> None:
    for start in (lambda: Pool(n), lambda: ltx.launch(print, n)):
        refuses(WorkerError, "number of workers must be a whole number of at least 1", start)


@pytest.mark.parametrize(
    "call",
    [
        lambda: ltx.launch("main", 1),
        lambda: ltx.launch(print, 1, timeout="soon"),
        lambda: Pool(1, timeout_s="soon"),
        lambda: Pool(1, threads="all"),
        lambda: ltx.axis_from_group("no group", "data"),
    ],
)
def test_refused_before_anything_starts(call: Callable[[], Any]) -> None:
    said(LtxError, call)


def _listening() -> set[str]:
    """What this process listens on: ports, and paths of Unix sockets."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[len("socket:[") : -1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(f"port {int(fields[1].rpartition(':')[2], 16)}")
    for line in Path("/proc/self/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        accepts = int(fields[3], 16) & 0x10000
        if accepts and fields[6] in inodes:
            found.add(fields[7] if len(fields) > 7 else "a Unix socket")
    return found


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="Linux's list of sockets")
def test_nothing_listens_besides_the_store_and_the_backend(ranks: Ranks) -> None:
    """The driver and its workers communicate through pairs of sockets without a name, to which nothing can connect."""
    before = _listening()
    pool = ranks(2)

    def run() -> tuple[list[str], str, int]:
        ltx.psum(torch.ones(2))
        return sorted(_listening()), os.environ["MASTER_PORT"], len([1 for name in _listening() if "port" not in name])

    (first, port, paths), (second, _, others) = pool.run(run)
    assert _listening() == before, "the driver listens on nothing"
    assert f"port {port}" in first, "the store"
    assert f"port {port}" not in second
    assert paths == others == 0, "no Unix socket has a path"
    print(f"rank 0 listens on {first}, rank 1 on {second}")


# Pickles of strategies of another version; and where ltx unpickles at all.
STRATEGIES = {"DDPStrategy": ltx.DDPStrategy(comm_hook=hooks.PowerSGD(2)), "LocalSGDStrategy": ltx.LocalSGDStrategy(4)}


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies_of_other_fields(name: str) -> None:
    """A field that this version doesn't know, or one too few: the strategy shows what it has, or raises, by name."""
    made = STRATEGIES[name]
    fields = dict(made.__dict__)
    fields.pop("bucket_bytes")
    foreign = object.__new__(type(made))
    foreign.__dict__.update(fields, unknown=3)
    again = pickle.loads(pickle.dumps(foreign))
    assert again.bucket_bytes == type(made).bucket_bytes, "what is missing has its default"


def _unpickling(path: Path) -> set[str]:
    """The functions of a file that unpickle something."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            for inner in ast.walk(node):
                named = isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name)
                if named and (inner.value.id, inner.attr) in {
                    ("pickle", "loads"),
                    ("pickle", "load"),
                    ("pickle", "Unpickler"),
                    ("cloudpickle", "loads"),
                    ("cloudpickle", "load"),
                    ("torch", "load"),
                }:
                    found.add(f"{path.name}:{node.name}")
                called = inner.func if isinstance(inner, ast.Call) else None
                if isinstance(called, ast.Name) and called.id.endswith("Unpickler"):
                    found.add(f"{path.name}:{node.name}")
    return found


def test_where_ltx_unpickles() -> None:
    """docs/concepts/security.md lists these. The store holds JSON; a new entry here needs a reason there."""
    found = {entry for path in Path(ltx.__file__).parent.rglob("*.py") for entry in _unpickling(path)}
    assert found == {
        "uneven.py:_objects",
        "pickling.py:_of_peer",
        "messages.py:receive",
        "worker.py:_by_value",
        "failures.py:failure_error",
        "storage.py:read_metadata",
    }


def stepped(step: Any = loss) -> Any:
    return trained(step, sgd(0.1), params(), [batch()])


def train() -> Any:
    return ltx.train_step(ltx.data_parallel(loss), sgd(0.1))


def with_old_state() -> None:
    made = train()
    state = made.init(params())
    for _ in range(2):
        made(state, batch())


def differentiates(p: Any, x: Tensor) -> Tensor:
    value = loss(p, x)
    value.backward(retain_graph=True)
    return value


net = torch.nn.Linear(3, 2)

#: {what is written: (the call, the error, what it says to write)}
SLIPS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    **{
        f"ltx.{name}": (lambda name=name: getattr(ltx, name), AttributeError, text)
        for name, text in {
            "all_reduce": "ltx.psum(x)",
            "psum_invariant": "ltx.psum(x)",
            "rank": "ltx.world().rank",
            "world_size": "ltx.world().size",
            "remat": "torch.utils.checkpoint.checkpoint(f",
            "stop_gradient": "x.detach()",
            "PartitionSpec": "ltx.init(mesh={'node': 2, 'data': 4})",
            "jit": "torch.compile",
            "tree_map": "ltx.tree.map",
            "device_put": "ltx.to_device(tree)",
            "DDP": "ltx.train_step(ltx.data_parallel(step), optimizer)",
            "DistributedDataParallel": "ltx.train_step(ltx.data_parallel(step), optimizer)",
            "no_sync": "ltx.accumulate(step, n)",
            "hessian": "torch.func.hessian",
        }.items()
    },
    **{
        f"ltx.optim.{name}": (lambda name=name: getattr(ltx.optim, name), AttributeError, text)
        for name, text in {
            "AdamW": "ltx.optim.from_torch(torch.optim.AdamW, lr=...)",
            "adam": "ltx.optim.from_torch(torch.optim.Adam, lr=...)",
        }.items()
    },
    "a module": (lambda: ltx.data_parallel(net), StepError, "ltx.functional_call(model, params, (x,))"),
    "device_ids": (lambda: ltx.data_parallel(loss, device_ids=[0]), ArgumentError, "`with ltx.init():`"),  # type: ignore[call-overload]
    "strategy=": (
        lambda: ltx.train_step(ltx.data_parallel(loss), sgd(0.1), strategy=ltx.DDPStrategy()),  # type: ignore[call-arg]
        ArgumentError,
        "ltx.train_step(ltx.data_parallel(step, strategy), ...)",
    ),
    "metrics['loss']": (lambda: stepped().metrics[0]["loss"], ArgumentError, "metrics.loss"),
    "metrics['seen']": (lambda: stepped().metrics[0]["seen"], ArgumentError, "metrics.aux['seen']"),
    "metrics.item()": (lambda: stepped().metrics[0].item(), AttributeError, "metrics.loss.item()"),
    "state['w']": (lambda: stepped().state["w"], ArgumentError, "state.params['w']"),
    "state.parameters()": (lambda: stepped().state.parameters(), AttributeError, "state.params"),
    "optimizer.step()": (lambda: sgd(0.1).step(), AttributeError, "state, metrics = train(state, batch)"),
    "optimizer.zero_grad()": (lambda: sgd(0.1).zero_grad(), AttributeError, "nothing, as each step has new gradients"),
    "state = train(state)": (lambda: train()((1, 2), batch()), StepError, "state, metrics = train(state, *batch)"),
    "the old state": (with_old_state, DonatedStateError, "state, metrics = train(state, ...)"),
    "state_dict()": (lambda: train().init(net.state_dict()), TreeError, "dict(module.named_buffers())"),
    "no parameter": (lambda: stepped(lambda p, x: x.square().mean()), StepError, "use the parameters that the step is"),
    "an odd batch": (
        lambda: ltx.vmap(ltx.shard, in_dims=None, axis_size=2)(torch.ones(3)),
        ltx.errors.AxisError,
        "x[rank::size]",
    ),
}


@pytest.mark.parametrize("name", SLIPS)
def test_the_error_names_what_to_write(name: str) -> None:
    call, error, text = SLIPS[name]
    refuses(error, re.escape(text), call)


def test_a_name_of_a_caller_s_own_goes_to_the_function(ranks: Ranks) -> None:
    """Where a function takes any keyword."""
    assert ranks(2).run(lambda strategy: strategy, strategy=3)[0] == 3


WAYS: dict[str, Callable[[Any], Any]] = {
    "train_step": stepped,
    "ltx.grad": lambda step: ltx.grad(ltx.data_parallel(step))(params(), batch()),
    "torch.func": lambda step: torch.func.grad(ltx.data_parallel(step))(params(), batch()),
}


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2, alone=True)
def test_backward_inside_a_step(way: str) -> None:
    """It had counted twice, without a word where the graph was retained or had nothing to keep."""
    refuses(StepError, r"the step has called \.backward\(\) itself.*Return the loss", WAYS[way], differentiates)


X = torch.arange(24.0).reshape(8, 3)
#: {what ranks train on, by rank: whether it is worth a warning}
BATCHES: dict[str, tuple[Callable[[int], Any], bool]] = {
    "all alike": (lambda rank: X, True),
    "a part": (lambda rank: ltx.shard(X), False),
    "one number": (lambda rank: X.index_put((torch.tensor(5), torch.tensor(1)), torch.tensor(float(rank))), False),
    "lengths": (lambda rank: torch.ones(2 + rank, 3), False),
    "no samples": (lambda rank: torch.tensor(1.0), False),
}


@pytest.mark.parametrize("name", BATCHES)
def test_equal_batches(name: str, on_new_axis: OnNewAxis) -> None:
    """Said once in a world, on rank 0; later steps compare nothing."""
    of_rank, warns = BATCHES[name]

    def on_rank() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                trained(lambda p, x: (x * p["w"][0, 0]).mean(), sgd(0.1), params(), [of_rank(ltx.world().rank)] * 2)
        return [str(one.message) for one in caught if one.category is EqualBatchesWarning]

    first, second = on_new_axis(on_rank)
    assert len(first) == warns
    assert second == []
    assert all("ltx.shard(batch)" in text and "DistributedSampler" in text for text in first)


Rank = int


def sparse(*values: float, size: int = 4, at: int = 0) -> Tensor:
    """A gradient of an embedding of `size` rows, with entries from row `at` on."""
    rows = torch.arange(at, at + len(values)).unsqueeze(0)
    return torch.sparse_coo_tensor(rows, torch.tensor(values), (size,), check_invariants=True)


def tables(rank: Rank) -> Any:
    """Each rank lacks one of two tables of one size, as allow_unused=True gives them."""
    return {"a": None, "b": sparse(2.0)} if rank else {"a": sparse(1.0), "b": None}


def infers(x: Any) -> Any:
    return ltx.all_gather(x, tiled=True, splits="infer")


# name -> (a call, this rank's tree, what the error names)
DIFFERENT: dict[str, tuple[Callable[[Any], Any], Callable[[Rank], Any], str]] = {
    "each lacks a table": (ltx.sync_gradients, tables, "'a'"),
    "psum of those": (ltx.psum, tables, "'a'"),
    "pmean of those": (ltx.pmean, tables, "'a'"),
    "one lacks a table": (ltx.sync_gradients, lambda r: {"a": sparse(1.0), "b": None if r else sparse(1.0)}, "'b'"),
    "a table more": (ltx.psum, lambda r: [sparse(1.0)] * (2 + r), "'2'"),
    "another metric": (ltx.psum, lambda r: {"grad": sparse(1.0), f"metric_{r}": torch.tensor(5.0 + r)}, "'metric_0'"),
    "another parameter": (ltx.sync_gradients, lambda r: {"e": sparse(1.0), f"w{r}": torch.ones(3)}, "'w0'"),
    "a sparse dtype": (ltx.psum, lambda r: sparse(1.0).double() if r else sparse(1.0), "the value itself"),
    "a sparse size": (ltx.sync_gradients, lambda r: {"e": sparse(1.0, size=4 + r)}, "float32[4] (sparse in 1 dim)"),
    "dense dimensions": (ltx.psum, lambda r: {"e": torch.eye(3).to_sparse(1 + r), "other": torch.ones(9)}, "'e'"),
    "adasum": (ltx.adasum, lambda r: {"w": torch.ones(2 + r)}, "'w'"),
    "all_gather, another dtype": (infers, lambda r: {"w": torch.ones(2, dtype=[torch.int32, torch.int64][r])}, "int64"),
    "all_gather, another dimension": (infers, lambda r: {"w": torch.ones(2, 3 + r)}, "any, 4"),
    "all_gather, another number of dimensions": (infers, lambda r: {"w": torch.ones([2] * (1 + r))}, "leaf 'w'"),
    "all_gather, another name": (infers, lambda r: {f"w{r}": torch.ones(2)}, "'w0'"),
    "gather_all_tensors": (
        ltx.gather_all_tensors,
        lambda r: torch.zeros(1 + r, dtype=[torch.int32, torch.float32][r]),
        "float32",
    ),
    "reduce": (ltx.reduce, lambda r: {f"loss_{r}": torch.tensor(1.0), "name": "a"}, "'loss_0'"),
    "reduce, product": (lambda x: ltx.reduce(x, "product"), lambda r: {f"loss_{r}": torch.ones(7)}, "'loss_0'"),
    "all_gather, splits": (
        lambda x: ltx.all_gather(x, tiled=True, splits=(2, 3)),
        lambda r: {f"part_{r}": torch.ones(2 + r)},
        "'part_0'",
    ),
    "psum_scatter, splits": (
        lambda x: ltx.psum_scatter(x, tiled=True, splits=(2, 4)),
        lambda r: {f"part_{r}": torch.ones(6)},
        "'part_0'",
    ),
    "psum_scatter, inferred": (
        lambda x: ltx.psum_scatter(x, tiled=True, splits="infer"),
        lambda r: {f"part_{r}": torch.ones(7)},
        "'part_0'",
    ),
    "all_to_all, splits": (
        lambda x: ltx.all_to_all(x, 0, 0, splits=(2, 3)),
        lambda r: {f"part_{r}": torch.ones(5)},
        "'part_0'",
    ),
}


def refused(name: str) -> tuple[str, float]:
    call, tree, _ = DIFFERENT[name]
    rank = int(ltx.axis_index())
    return said(RankMismatchError, call, tree(rank)), float(ltx.psum(torch.tensor(1.0 + rank)))


@pytest.mark.parametrize("name", DIFFERENT)
def test_every_rank_raises_and_the_axis_stays_in_step(ranks: Ranks, name: str) -> None:
    (text, after), other = ranks(2).run(refused, name)
    assert other == (text, 3.0) == (text, after)
    assert DIFFERENT[name][2] in text


@on_ranks(2)
def test_known_trees_are_compared_at_each_call() -> None:
    """Two tables for some steps, of which a rank then misses one: what the others do is known by then."""
    rank = int(ltx.axis_index())
    both = {"a": sparse(1.0 + rank), "b": sparse(3.0, at=rank)}
    for _ in range(2):
        means, _ = ltx.sync_gradients(both)
        assert [means[k].to_dense().tolist() for k in "ab"] == [[1.5, 0.0, 0.0, 0.0], [1.5, 1.5, 0.0, 0.0]]
    for k in "ab":
        ltx.sync_gradients({k: both[k]})
    for grads in ({"a": both["a"], "b": both["b"] if rank else None}, {"ab"[rank]: both["ab"[rank]]}):
        refuses(RankMismatchError, "rank 0: ", ltx.sync_gradients, grads)
        assert ltx.psum(torch.tensor(1.0)) == 2


@pytest.mark.parametrize("count", [1, 31, 40])
@on_ranks(2)
def test_sums_of_sparse_and_dense_leaves(seed: int, count: int) -> None:
    """Some of the sparse leaves have dense dimensions, and some have no entries on a rank."""
    torch.manual_seed(seed)
    rank = int(ltx.axis_index())
    for _ in range(2):
        dense = [[torch.randn(5, 2) * (torch.rand(5, 1) < 0.3) for _ in range(2)] for _ in range(count)]
        mine: dict[str, Any] = {str(i): x[rank].to_sparse(1 + i % 2) for i, x in enumerate(dense)}
        total = ltx.psum({**mine, "n": 3 + rank, "w": [torch.ones(2) * rank]}, postscale=2.0)
        assert (total["n"].item(), total["w"][0].tolist()) == (14, [2.0, 2.0])
        for i, x in enumerate(dense):
            assert total[str(i)].is_coalesced()
            torch.testing.assert_close(total[str(i)].to_dense(), 2 * (x[0] + x[1]))


@on_ranks(2)
def test_derivatives_of_sparse_sums(seed: int) -> None:
    """With respect to the values of sparse tensors."""
    torch.manual_seed(seed)
    rank, values, weights = int(ltx.axis_index()), torch.randn(2, 3), torch.randn(2, 4)
    mine = values[rank].clone().requires_grad_()
    at = torch.arange(rank, rank + 3).unsqueeze(0)
    total = ltx.psum({"e": torch.sparse_coo_tensor(at, mine, (4,), check_invariants=True)})["e"]
    (total.to_dense() * weights[rank]).sum().backward()
    torch.testing.assert_close(mine.grad, weights.sum(0)[rank : rank + 3])


@pytest.mark.parametrize("size", [2, 3])
def test_after_comparing_for_different_channels_ranks_are_in_step(size: int, ranks: Any, seed: int) -> None:
    """One rank is at a collective of its own and the others at a step's: their next call had hung."""

    def apart() -> list[Any]:
        first = ltx.world().rank == 0

        found: list[Any] = []
        for theirs in (ltx.grad(ltx.data_parallel(lambda w: w.square().sum())), ltx.sync_gradients):
            try:
                (ltx.psum if first else theirs)(torch.ones(211 + seed % 97))  # which is new
            except RankMismatchError:
                found += [ltx.psum(torch.full((k,), 2.0)).tolist() for k in (1, 2, 1)]
        return found

    for found in ranks(size).run(apart):
        assert found == 2 * [[2.0 * size], 2 * [2.0 * size], [2.0 * size]]
