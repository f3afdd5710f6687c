"""The cases of Lightning's tests: utilities.distributed, Fabric's and the strategies' collectives, DDP's parity.

After tests_fabric/utilities/test_distributed.py, plugins/collectives/test_torch_collective.py, parity_fabric, and 1.7's
utilities/test_distributed.py, test_all_gather_grad.py, core/test_results.py, test_ddp_strategy_with_comm_hook.py.
tests/test_migration.py goes through the documented names; here are their suites' cases.

Left out, as ltx has no way to say it:

* reductions in place: collectives are pure. ``all_gather`` of numbers and NumPy arrays that become tensors: they are
  refused, so that no rank's number passes for all ranks'.
* ``is_shared_filesystem``, the infinite barrier, destruction handlers, numbers of threads: tests/internal has these.
* the sampler that wraps a sampler (``DistributedSamplerWrapper``): each rank takes its part by ``ltx.shard``.
* connectors, precision plugins, checkpoint IO, accelerators, spawn and fork launchers, loggers: no trainer here.
* deadlock detection by files and SIGKILL: tests/internal/comm/test_deadlock.py has ltx's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import ltx
from ltx import hooks
from ltx.errors import CollectiveError, RankMismatchError, StrategyError, TreeError
from tests.contract.peers.cases import (
    Case,
    Cases,
    Ranks,
    Refusal,
    check,
    failures,
    failures_simulated,
    on_all,
    on_rank,
    randn,
    the_sum,
    worlds_of,
)

# --- reductions -------------------------------------------------------------------------------------------------------


REDUCTIONS: dict[str, Case | Refusal] = {
    "sync_ddp's default is a sum": Case(
        lambda x: ltx.reduce(x, None), lambda xs: on_all(sum(xs), len(xs)), randn(3), worlds=(2,), gradient=the_sum
    ),
    "reduce's default is a mean": Case(
        ltx.reduce, lambda xs: on_all(sum(xs) / len(xs), len(xs)), randn(3), worlds=(2,), gradient=the_sum
    ),
    "a ReduceOp": Case(
        lambda x: ltx.reduce(x, torch.distributed.ReduceOp.MAX),
        lambda xs: on_all(torch.stack(xs).amax(0), len(xs)),
        randn(3),
    ),
    "what isn't a tensor passes through": Case(
        lambda x: ltx.reduce({"loss": x, "epoch": 3, "name": "fit", "none": None})["epoch"],
        lambda xs: on_all(3, len(xs)),
        randn(2),
        worlds=(2,),
        simulated=(),
    ),
    "a collection": Case(
        lambda tree: ltx.reduce(tree, "sum"),
        lambda trees: on_all(
            {"a": sum(t["a"] for t in trees), "b": [sum(t["b"][0] for t in trees), sum(t["b"][1] for t in trees)]},
            len(trees),
        ),
        lambda n: [{"a": torch.randn(2), "b": [torch.randn(()), torch.randint(9, (3,))]} for _ in range(n)],
    ),
}

# --- gathering --------------------------------------------------------------------------------------------------------


def ones_of(*shape: Callable[[int], int]) -> Callable[[int], list[Tensor]]:
    """Rank r's tensor has the shape that it says."""
    return lambda n: [torch.ones([f(rank) for f in shape]) for rank in range(n)]


GATHERED: dict[str, Callable[[int], list[Tensor]]] = {
    "as long as the rank's index, of which 0 is empty": ones_of(lambda r: r),
    "r + 1 by 3 - r": ones_of(lambda r: r + 1, lambda r: 3 - r),
    "three dimensions": ones_of(lambda r: 2, lambda r: 1 + r % 2, lambda r: 3),
    "scalars": lambda n: list(torch.randn(n).unbind()),
    "equal": randn(3, 2, dtype=torch.float32),
    "integers": lambda n: [torch.randint(9, (rank + 1, 2)) for rank in range(n)],
    "none has any": ones_of(lambda r: 0, lambda r: r),
}


def broadcast_config(config: dict[str, Any]) -> tuple[bool, Tensor]:
    got = ltx.broadcast_object(config)
    return got["path"] == "rank 0" and got["version"] == (1, None), got["x"]


GATHERS: dict[str, Case | Refusal] = {
    f"gather_all_tensors: {name}": Case(
        ltx.gather_all_tensors, lambda xs: on_all(xs, len(xs)), inputs, worlds=(2, 3), simulated=(), tolerance=0
    )
    for name, inputs in GATHERED.items()
}
GATHERS |= {
    "AllGatherGrad by ranks' weights": Case(
        # Each rank's loss is its index times the sum of all: every gradient is the sum of the indices.
        lambda x: torch.func.grad(lambda x: (ltx.AllGatherGrad.apply(x) * ltx.axis_index()).sum())(x),
        lambda xs: [torch.full_like(x, sum(range(len(xs)))) for x in xs],
        randn(5),
        worlds=(2, 3),
    ),
    "AllGatherGrad": Case(
        lambda x: torch.sin(ltx.AllGatherGrad.apply(x)),
        lambda xs: on_all(torch.sin(torch.stack(xs)), len(xs)),
        randn(2, 2),
        worlds=(2, 3),
        gradient=the_sum,
    ),
    "AllGatherGrad of a view that isn't contiguous": Case(
        lambda x: ltx.AllGatherGrad.apply(x.T),
        lambda xs: on_all(torch.stack([x.T for x in xs]), len(xs)),
        randn(2, 5),
        gradient=the_sum,
    ),
    "all_gather without sync_grads": Case(
        lambda x: x * ltx.all_gather(x, sync_grads=False).sum(0),
        lambda xs: [x * sum(y.detach() for y in xs) for x in xs],
        randn(4),
        gradient=the_sum,
    ),
    "all_gather of a collection": Case(
        lambda tree: ltx.all_gather(tree),
        lambda trees: on_all(
            {"a": torch.stack([t["a"] for t in trees]), "b": [torch.stack([t["b"][0] for t in trees])]}, len(trees)
        ),
        lambda n: [{"a": torch.randn(2, 2).double(), "b": [torch.randint(9, (3,))]} for _ in range(n)],
        gradient=the_sum,
    ),
    "a contrastive loss over the global batch": Case(
        # What sync_grads is for: every rank's rows against all rows.
        lambda x: functional.cross_entropy(
            functional.normalize(x) @ functional.normalize(ltx.all_gather(x, tiled=True)).T,
            torch.arange(4) + 4 * ltx.axis_index(),
        ),
        lambda xs: [
            functional.cross_entropy(
                functional.normalize(x) @ functional.normalize(torch.cat(xs)).T, torch.arange(4) + 4 * rank
            )
            for rank, x in enumerate(xs)
        ],
        randn(4, 6),
        gradient=the_sum,
    ),
    "broadcast of an object": Case(
        lambda x: broadcast_config({"path": f"rank {int(ltx.axis_index())}", "x": x, "version": (1, None)}),
        lambda xs: on_all((True, xs[0]), len(xs)),
        lambda n: [torch.randn(r + 1) for r in range(n)],
        simulated=(),
        tolerance=0,
    ),
    "broadcast of a version's directory from the last": Case(
        lambda x: ltx.broadcast_object("version_3" if ltx.axis_index() == 2 else None, 2) == "version_3",
        lambda xs: on_all(True, len(xs)),
        randn(1),
        simulated=(),
    ),
    "barriers, with and without a name": Case(
        lambda x: [ltx.barrier(), ltx.barrier("fit end"), x][2], lambda xs: xs, randn(1), worlds=(2,), simulated=()
    ),
    "parts of a batch": Case(
        # What a distributed sampler's ranks have together: everything once.
        lambda x: ltx.all_gather(ltx.shard(ltx.broadcast(x)), tiled=True),
        lambda xs: on_all(xs[0], len(xs)),
        randn(12, 2),
        tolerance=0,
    ),
}

# --- DDP --------------------------------------------------------------------------------------------------------------

Params = dict[str, Tensor]
STEPS = 6


def loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
    """Fabric's parity model, small."""
    h = functional.relu(functional.linear(x, params["w1"], params["b1"]))
    return functional.cross_entropy(functional.linear(h, params["w2"]), y)


def boring(n: int) -> list[dict[str, Any]]:
    return [
        {
            "start": {
                "w1": torch.randn(8, 5).double(),
                "b1": torch.randn(8).double(),
                "w2": torch.randn(3, 8).double(),
            },
            "x": torch.randn(STEPS, 4, 5).double(),
            "y": torch.randint(3, (STEPS, 4)),
        }
        for _ in range(n)
    ]


def fitted(
    strategy: ltx.Strategy, micro_batches: int = 1, clip: float | None = None
) -> Callable[[dict[str, Any]], Any]:
    """Parameters in the end, and the mean loss of every step."""

    def call(given: dict[str, Any]) -> tuple[Params, Tensor]:
        step = ltx.accumulate(ltx.data_parallel(loss, strategy), micro_batches)
        optimizer = ltx.optim.from_torch(torch.optim.AdamW, lr=0.01)
        if clip is not None:
            optimizer = ltx.optim.chain(ltx.optim.clip_by_global_norm(clip), optimizer)
        train = ltx.train_step(step, optimizer)
        state, losses = train.init(given["start"]), []
        for x, y in zip(given["x"], given["y"], strict=True):
            state, metrics = train(state, x, y)
            losses.append(metrics.loss.detach().clone())
        return {name: p.clone() for name, p in state.params.items()}, torch.stack(losses)

    return call


def one_process(clip: float | None = None) -> Callable[[list[dict[str, Any]]], list[Any]]:
    """All ranks' batches as one: torch alone."""

    def want(given: list[dict[str, Any]]) -> list[Any]:
        params = {name: p.clone().requires_grad_() for name, p in given[0]["start"].items()}
        optimizer, losses = torch.optim.AdamW(params.values(), lr=0.01), []
        for step in range(STEPS):
            x, y = (torch.cat([of_rank[key][step] for of_rank in given]) for key in "xy")
            optimizer.zero_grad()
            value = loss(params, x, y)
            value.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(params.values(), clip)
            optimizer.step()
            losses.append(value.detach())
        return on_all(({name: p.detach() for name, p in params.items()}, torch.stack(losses)), len(given))

    return want


def gradients_of(given: dict[str, Any], blocked: bool) -> Params:
    """Inside of block_backward_sync gradients are the rank's own."""
    step = ltx.data_parallel(loss)
    params = {name: p.clone().requires_grad_() for name, p in given["start"].items()}
    if blocked:
        with ltx.block_backward_sync(step) as local:
            local(params, given["x"][0], given["y"][0]).backward()
    else:
        step(params, given["x"][0], given["y"][0]).backward()
    return {name: p.grad for name, p in params.items()}


def local_gradients(given: list[dict[str, Any]]) -> list[Params]:
    found = []
    for of_rank in given:
        params = {name: p.clone().requires_grad_() for name, p in of_rank["start"].items()}
        loss(params, of_rank["x"][0], of_rank["y"][0]).backward()
        found.append({name: p.grad for name, p in params.items()})
    return found


def same_start(n: int) -> list[dict[str, Any]]:
    given = boring(n)
    return [{**of_rank, "start": {k: p.clone() for k, p in given[0]["start"].items()}} for of_rank in given]


def mean(trees: list[Params]) -> list[Params]:
    return on_all({name: torch.stack([t[name] for t in trees]).mean(0) for name in trees[0]}, len(trees))


def case(call: Any, want: Any, **options: Any) -> Case:
    return Case(call, want, **{"inputs": boring, "tolerance": 1e-9, "worlds": (2,), "simulated": (), **options})


FIT: dict[str, Case | Refusal] = {
    "parity with one process": case(fitted(ltx.DDPStrategy()), one_process(), worlds=(2, 3)),
    "simulated ranks": case(fitted(ltx.DDPStrategy()), one_process(), worlds=(), simulated=(2, 4)),
    "with micro-batches": case(fitted(ltx.DDPStrategy(), micro_batches=2), one_process()),
    # torch adds 1e-6 to the norm.
    "with clipping": case(fitted(ltx.DDPStrategy(), clip=0.1), one_process(0.1), worlds=(2, 3), tolerance=1e-4),
    "fp16 hook": case(fitted(ltx.DDPStrategy(comm_hook="fp16")), one_process(), tolerance=3e-2),
    "fp16 wrapper": case(
        fitted(ltx.DDPStrategy(comm_hook=hooks.AllReduce(), comm_wrapper="fp16")), one_process(), tolerance=3e-2
    ),
    "PowerSGD hook before it starts": case(
        fitted(ltx.DDPStrategy(comm_hook=hooks.PowerSGD(rank=2, start_step=100))), one_process()
    ),
    "wrapped PowerSGD hook": case(
        fitted(ltx.DDPStrategy(comm_hook=hooks.PowerSGD(rank=2, start_step=100), comm_wrapper="bf16")),
        one_process(),
        tolerance=1e-1,
    ),
    "post-local SGD that hasn't begun": case(
        fitted(ltx.DDPStrategy(model_averaging_period=4, start_local_sgd_step=100)), one_process()
    ),
    "gradients by backward": case(
        lambda given: gradients_of(given, blocked=False),
        lambda given: mean(local_gradients(given)),
        inputs=same_start,
        worlds=(2, 3),
    ),
    "gradients by backward, blocked": case(
        lambda given: gradients_of(given, blocked=True), local_gradients, inputs=same_start, worlds=(2, 3)
    ),
}

REFUSALS: dict[str, Case | Refusal] = {
    "an operation that there isn't": Refusal(
        lambda r: ltx.reduce(torch.ones(2), "invalid"), CollectiveError, ("invalid", "sum")
    ),
    "gather_all_tensors of different dtypes": Refusal(
        lambda r: ltx.gather_all_tensors(torch.ones(2 + r, dtype=(torch.float32, torch.int64)[r])),
        RankMismatchError,
        ("rank 0: float32[2]", "rank 1: int64[3]"),
    ),
    "gather_all_tensors of a collection": Refusal(
        lambda r: ltx.gather_all_tensors({"a": torch.ones(2)}), TreeError, ("one tensor",)
    ),
    "all_gather of a string": Refusal(lambda r: ltx.all_gather({"a": "b"}), TreeError, ("'a'",)),
    "averaging without its start": Refusal(
        lambda r: ltx.DDPStrategy(model_averaging_period=4), StrategyError, ("start_local_sgd_step",)
    ),
    "barriers of different names": Refusal(
        lambda r: ltx.barrier(("epoch 1", "epoch 2")[r]), RankMismatchError, ("epoch 1", "epoch 2")
    ),
}

TABLES: dict[str, Cases] = {"reductions": REDUCTIONS, "gathers": GATHERS, "fit": FIT, "refusals": REFUSALS}


@pytest.mark.full(but=1)
@pytest.mark.parametrize(("table", "n"), worlds_of(TABLES))
def test_on_ranks(table: str, n: int, ranks: Ranks, seed: int) -> None:
    cases = TABLES[table]
    check(failures(cases, lambda xs, bars: on_rank(cases, xs, bars), ranks, n))


@pytest.mark.parametrize("table", [name for name in TABLES if name != "refusals"])
def test_on_simulated_ranks(table: str, seed: int) -> None:
    check(failures_simulated(TABLES[table]))


def test_alone(seed: int) -> None:
    """Without processes a gathered tensor still has its dimension, and reductions are the identity."""
    x = torch.randn(3, 2)
    assert torch.equal(ltx.all_gather(x), x[None])
    assert torch.equal(ltx.AllGatherGrad.apply(x), x[None])
    assert [y.tolist() for y in ltx.gather_all_tensors(x)] == [x.tolist()]
    assert torch.equal(ltx.reduce(x), x)
    assert torch.equal(ltx.reduce(x, "sum"), x)
    assert ltx.broadcast_object({"a": 1}) == {"a": 1}
    assert ltx.reduce_boolean_decision(True)
    assert not ltx.reduce_boolean_decision(False, all=False)
    ltx.barrier("alone")
