"""Parameters that aren't the same on every rank, found by debug_checks at the next step; and those that are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ltx
from ltx.errors import CallFailedError, RankMismatchError, ReplicaDivergedError
from tests import inside
from tests.kinds import OnNewAxis, Ranks
from tests.train_on import on_ranks, refuses, said
from tests.twins.training import sgd

P = {"b": torch.zeros(()), "w": torch.tensor([1.0, -2.0, 3.0])}
FIX = (
    "Fix: start from the same values on every rank (train.init(params), or ltx.broadcast(params)), and change them by "
    "synchronised steps alone."
)


def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return (params["w"] * x).square().sum() + params["b"]


def backward(step: Any, params: dict[str, Tensor], x: Tensor) -> None:
    step({name: p.clone().requires_grad_() for name, p in params.items()}, x).backward()


def train(step: Any, params: dict[str, Tensor], x: Tensor) -> None:
    stepped = ltx.train_step(step, sgd(0.1))
    state = stepped.init(params)
    for name, p in params.items():
        state.params[name].copy_(p)  # broken again, as a stray update would
    before = ltx.tree.map(torch.clone, state.params)
    try:
        stepped(state, x)
    except ReplicaDivergedError:
        assert all(torch.equal(state.params[name], before[name]) for name in params), "nothing was applied"
        raise


def over_models(step: Any, params: dict[str, Tensor], x: Tensor) -> None:
    stacked = {name: torch.stack([torch.zeros_like(p), p]) for name, p in params.items()}
    torch.func.vmap(torch.func.grad(step), in_dims=(0, None))(stacked, x)


#: A step's first differentiated call, in each way that there is.
FIRST: dict[str, Callable[[Any, dict[str, Tensor], Tensor], Any]] = {
    "backward": backward,
    "torch.func.grad": lambda step, p, x: torch.func.grad(step)(p, x),
    "ltx.grad": lambda step, p, x: ltx.grad(step)(p, x),
    "hessian": lambda step, p, x: torch.func.hessian(step)(p, x),
    "vmap": lambda step, p, x: torch.func.vmap(torch.func.grad(step), in_dims=(None, 0))(p, x.expand(2, 3)),
    "accumulate": lambda step, p, x: ltx.grad(ltx.accumulate(step, 3))(p, x),
    'returns="grads"': lambda step, p, x: ltx.data_parallel(torch.func.grad(step.fn), returns="grads")(p, x),
}
WAYS = FIRST | {
    "jvp of grad": lambda step, p, x: torch.func.jvp(lambda q: torch.func.grad(step)(q, x), (p,), (p,)),
    "vmap over models": over_models,
    "train_step": train,
}


@pytest.mark.full(but=1)
@pytest.mark.parametrize("way", WAYS)
def test_parameters_that_differ(on_new_axis: OnNewAxis, way: str) -> None:
    def run() -> tuple[str, list[float]]:
        call, x = partial(WAYS[way], ltx.data_parallel(loss)), torch.ones(3)
        call(P, x)  # known
        mine = dict(P, w=P["w"] + torch.tensor([0.0, 0.25, -0.5]) * ltx.axis_index())
        text = said(ReplicaDivergedError, ltx.debug_checks()(call), mine, x)
        with ltx.debug_checks():
            call(P, x)
        return text, ltx.psum(torch.ones(2)).tolist()

    text, after = on_new_axis(run).replicated()
    assert text.startswith(
        "axis 'data': leaf 'w' (float32[3]) should be the same on every rank, and differs on rank 1 from rank 0 (no "
        "value has a majority). This is the step called at "
    )
    assert "test_compare.py:" in text
    assert text.endswith(FIX)
    assert after == [2.0, 2.0]


def nans(payload: int) -> Tensor:
    return torch.tensor([0x7FC00000 + payload, 0], dtype=torch.int32).view(torch.float32)


#: name: (a leaf of rank 0, of rank 1)
VALUES: dict[str, tuple[Tensor, Tensor]] = {
    "0-dim": (torch.tensor(1.0), torch.tensor(2.0)),
    "order": (torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])),
    "equal pairs": (torch.ones(4), torch.zeros(4)),
    "one bit": (
        torch.ones(2, 2),
        torch.ones(2, 2).index_put_((torch.tensor(1), torch.tensor(0)), torch.tensor(1.0 + 2**-23)),
    ),
    "NaN": (torch.ones(2), torch.tensor([1.0, torch.nan])),
    "NaN and more": (torch.zeros(2), torch.tensor([9.0, torch.nan])),
    "bits of NaN": (nans(0), nans(1)),
    "infinite": (torch.ones(1), torch.tensor([torch.inf])),
    "signed zero": (torch.zeros(1), -torch.zeros(1)),
    "bfloat16": (torch.ones(3).bfloat16(), torch.zeros(3).bfloat16()),
    "float8": (torch.ones(3), torch.zeros(3)),
    "complex": (torch.ones(2, dtype=torch.complex64), torch.tensor([1, 1 + 1j])),
    "conjugate": (torch.tensor([1j]), torch.tensor([1j]).conj()),
    "bool": (torch.tensor([True]), torch.tensor([False])),
    "int64": (torch.tensor([7, 7]), torch.tensor([7, 2])),
    "strided": (torch.zeros(2, 3).T, torch.eye(2, 3).T),
    "expanded": (torch.zeros(2, 3), torch.ones(1).expand(2, 3)),
}


@pytest.mark.full(but=1)
@pytest.mark.parametrize("name", VALUES)
def test_every_dtype_and_layout(on_new_axis: OnNewAxis, name: str) -> None:
    """The differing leaf is frozen, so that integers may be tried too."""
    pair = [*VALUES[name]]

    def run() -> tuple[str, str]:
        if name == "float8":  # which can't be sent to a worker
            pair[:] = [x.to(torch.float8_e4m3fn) for x in pair]

        def step(params: dict[str, Tensor]) -> Tensor:
            return params["trained"].sum()

        def call(frozen: Tensor) -> None:
            trained = torch.ones(2, requires_grad=True)
            ltx.data_parallel(step)({"frozen": frozen, "trained": trained, "void": torch.ones(0, 2)}).backward()

        with ltx.debug_checks():
            call(pair[0])
            call(pair[1].clone(memory_format=torch.preserve_format))
        text = said(ReplicaDivergedError, ltx.debug_checks()(call), pair[int(ltx.axis_index())])
        return text, ltx.tree.describe(pair[0])

    text, what = on_new_axis(run).replicated()
    assert f"leaf 'frozen' ({what}) should be the same on every rank, and differs on rank 1" in text


def test_structures_of_frozen_leaves_that_differ(on_new_axis: OnNewAxis) -> None:
    def run() -> str:
        params = [torch.ones(2, requires_grad=True), torch.ones(2 + int(ltx.axis_index()))]
        step = ltx.data_parallel(lambda p: p[0].sum())
        return said(RankMismatchError, ltx.debug_checks()(lambda: step(params).backward()))

    text = on_new_axis(run).replicated()
    assert "the parameters of data_parallel, leaf '1': rank 0: float32[2]; rank 1: float32[3]" in text


def test_replicas_that_may_differ(on_new_axis: OnNewAxis) -> None:
    """Where gradients stay local, and where none are wanted."""

    def run() -> list[float]:
        mine = {name: p + ltx.axis_index() for name, p in P.items()}
        step = ltx.data_parallel(loss)
        x = torch.ones(3)
        with ltx.debug_checks():
            blocked = torch.func.grad(ltx.block_backward_sync(step))(mine, x)
            value = step(mine, x)
        return [blocked["w"][0].item(), value.item()]

    assert list(on_new_axis(run)) == [[2.0, 14.0], [4.0, 4.0 + 1.0 + 16.0 + 1.0]]


def test_the_first_call_compares_parameters(on_new_axis: OnNewAxis) -> None:
    """Ranks that start from their own values are told so, by name, before anything is reduced; equal ones go on."""

    def run() -> dict[str, tuple[str, bool]]:
        told = {}
        for name, call in FIRST.items():
            mine = {name: p + ltx.axis_index() for name, p in P.items()}
            step = ltx.data_parallel(lambda p, x: loss(p, x))
            text = said(ReplicaDivergedError, call, step, mine, torch.ones(3))
            call(step, ltx.broadcast(mine), torch.ones(3))
            told[name] = text, all(torch.equal(q, P[k]) for k, q in ltx.broadcast(mine).items())
        return told

    for name, (text, same) in on_new_axis(run, timeout_s=30.0).replicated().items():
        assert text.startswith("axis 'data': leaf 'b' (float32[]) should be the same on every rank, and differs"), name
        assert "params = ltx.broadcast(params)" in text
        assert "So do 1 more: 'w'" in text
        assert same


def test_each_step_is_compared_once(on_new_axis: OnNewAxis) -> None:
    """A second model of the same structure is compared too; the same step isn't again."""

    def run() -> list[int]:
        axis_comm, counts = inside.resolve("data").comm, []
        first, second = ltx.data_parallel(loss), ltx.data_parallel(lambda p, x: loss(p, x))
        for _ in range(3):
            ltx.grad(first)(P, torch.ones(3))
            counts.append(int(axis_comm.peers.store_exchange.new_place().rpartition("/")[2]) - len(counts))
        said(ReplicaDivergedError, ltx.grad(second), ltx.tree.map(lambda p: p + ltx.axis_index(), P), torch.ones(3))
        return counts

    assert len(set(on_new_axis(run).replicated())) == 1


@on_ranks(3)
def test_comparing_often_leaves_no_more_in_the_store() -> None:
    store: Any = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    counts = []
    for times in (3, 5):
        for _ in range(times):
            ltx.check_replicas(P)  # and then one that takes a second exchange
            said(ReplicaDivergedError, ltx.check_replicas, ltx.tree.map(lambda p: p + ltx.axis_index(), P))
        ltx.barrier()
        counts.append(store.num_keys())
        ltx.barrier()
    assert counts[1] <= counts[0]


@pytest.mark.full(but=1)
@pytest.mark.parametrize("simulated", [False, True])
def test_nodes_whose_parameters_may_differ(simulated: bool, ranks: Ranks) -> None:
    """Ranks that share gradients within their nodes are compared within them; a stray rank of a node is found."""
    train = ltx.train_step(ltx.data_parallel(loss, ltx.LocalSGDStrategy(4, warmup_steps=1, subgroup=2)), sgd(0.1))

    def run(x: Tensor, stray: Tensor) -> Tensor:
        state = train.init(P)
        with ltx.debug_checks():
            for step in range(5):
                if step == 4:
                    state = replace(state, params=ltx.tree.map(lambda p: p + stray, state.params))
                state, _ = train(state, x)
        return state.params["w"]

    x, none = torch.tensor([[1.0, 0.5, 0.1], [0.2, 0.1, 0.3], [0.4, 0.4, 0.1], [0.1, 0.2, 0.2]]), torch.zeros(4)
    stray = torch.tensor([0.0, 0.0, 0.0, 1.0])
    if simulated:
        w = ltx.vmap(run)(x, none)
        told = [said(ReplicaDivergedError, lambda: ltx.vmap(run)(x, stray))]
    else:
        pool = ranks(4)
        w = torch.stack(list(pool.run(lambda: run(x[ltx.world().rank], none[0]))))
        with pytest.raises(CallFailedError) as failed:  # it leaves the call, so that the next one has a new world
            pool.run(lambda: run(x[ltx.world().rank], stray[ltx.world().rank]))
        told = [text for text in str(failed.value).splitlines() if "ReplicaDivergedError" in text]
    assert torch.equal(w[0], w[1])
    assert torch.equal(w[2], w[3])
    assert not torch.equal(w[0], w[2])
    assert told
    assert all("should be the same on every rank, and differs on rank 1" in text for text in told)


@pytest.mark.parametrize("inner", ["grad", "vmap of grad", "jvp of grad"])
def test_simulated_ranks(inner: str) -> None:
    step = torch.func.grad(ltx.data_parallel(loss))
    calls: dict[str, Callable[[Any, Tensor], Any]] = {
        "grad": step,
        "vmap of grad": lambda p, x: torch.func.vmap(step, in_dims=(None, 0))(p, x.expand(2, 3)),
        "jvp of grad": lambda p, x: torch.func.jvp(lambda q: step(q, x), (p,), (p,)),
    }
    x = torch.ones(4, 3)
    stacked = {name: torch.stack([p] * 4) for name, p in P.items()}
    broken = dict(stacked, w=stacked["w"].clone())
    broken["w"][3, 1] = 0.0
    with ltx.debug_checks():
        ltx.vmap(calls[inner], in_dims=(None, 0))(P, x)
        ltx.vmap(calls[inner])(stacked, x)
        text = said(ReplicaDivergedError, lambda: ltx.vmap(calls[inner])(broken, x))
    with pytest.raises(ReplicaDivergedError, match=r"leaf 'w' .* differs on rank 3 from what 3 of 4 ranks have"):
        ltx.vmap(calls[inner])(broken, x)
    assert text == (
        "axis 'data': leaf 'w' (float32[3]) should be the same on every rank, and differs on rank 3 from what 3 of 4 "
        f"ranks have. {FIX}"
    )


@pytest.mark.parametrize(("outer", "within"), [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)])
def test_simulated_ranks_under_another_vmap(outer: int, within: int) -> None:
    """Models may differ from each other, on every rank alike, wherever the two dimensions lie."""
    step = torch.func.grad(ltx.data_parallel(lambda p, x: (p * x).square().sum()))
    p = torch.arange(5.0)[:, None] * torch.ones(3)  # 5 models
    x = torch.ones(4, 3)
    on_ranks = ltx.vmap(step, in_dims=(within, 0))
    logical = p[:, None].expand(5, 4, 3)  # (models, ranks, values)

    def stacked(broken: bool) -> Tensor:
        values = logical.clone()
        values[4, 2, 0] += broken
        return values.movedim(1, 1 + within).movedim(0, outer)  # `within` counts without the models

    call = torch.func.vmap(on_ranks, in_dims=(outer, None))
    with ltx.debug_checks():
        call(stacked(False), x)
        refuses(ReplicaDivergedError, "differs on rank 2 from what 3 of 4 ranks have", call, stacked(True), x)
