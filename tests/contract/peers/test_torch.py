"""The cases of torch's own tests: c10d, nn.functional, DDP and its hooks, averagers, Join, ZeRO.

After test/distributed: test_c10d_gloo.py, test_functional_api.py, test_c10d_spawn.py, algorithms/test_join.py,
algorithms/quantization, algorithms/ddp_comm_hooks, optim/test_zero_redundancy_optimizer.py, and the averagers' and
DDP's parts of torch/testing/_internal/distributed/distributed_test.py. Collectives of every dtype, what follows a
refused one, and their gradients are rows of tests/contract/conformance; DDP and its hooks of strategies/table.py and
hooks/table.py; Join of training/test_uneven.py.

Left out, as ltx has no way to say it:

* ``reduce``, ``gather`` and ``scatter`` with one root, ``send`` and ``recv``, ``monitored_barrier``, stores, work
  objects and their futures: collectives give every rank its result.
* ``premul_sum``, tags, coalescing managers: a tree is one call.
* ``Join(throw_on_early_termination=True)``: a loop over ``ltx.uneven`` may raise at a weight of 0 itself.
* averagers without an optimizer, and of part of the parameters: averaging is a strategy of a train step.
* ZeRO over lists of groups with options of their own (``add_param_group``), ``consolidate_state_dict``,
  ``parameters_as_bucket_view``, and its overlap with DDP by hooks: it is one strategy here, which overlaps.
* DDP's reducer: ``static_graph``, ``find_unused_parameters``, rebuilt buckets, views of gradients, logging data.
* hooks that return futures of their own: a hook is a generator (``ltx.hooks.from_torch`` takes torch's).
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
from ltx.errors import AxisError, RankMismatchError, TreeError, UnsupportedError
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

Params = dict[str, Tensor]
STEPS = 9

# --- collectives ------------------------------------------------------------------------------------------------------


def total(xs: list[Tensor]) -> Tensor:
    return torch.stack(xs).sum(0, dtype=xs[0].dtype)


COLLECTIVES: dict[str, Case | Refusal] = {
    "nn.functional.all_to_all of the rank's own scale": Case(
        lambda x: ltx.all_to_all(x * (ltx.axis_index() + 1), 0, 0),
        lambda xs: [torch.cat([(s + 1) * x.chunk(len(xs))[r] for s, x in enumerate(xs)]) for r in range(len(xs))],
        randn(12, 5),
        gradient=the_sum,
    ),
    "nn.functional.broadcast": Case(
        lambda x: torch.cos(ltx.broadcast(x, 1)),
        lambda xs: on_all(torch.cos(xs[1]), len(xs)),
        randn(5, 5),
        gradient=the_sum,
    ),
    "all_reduce_coalesced": Case(
        lambda xs: ltx.psum(xs),
        lambda trees: on_all([total(list(xs)) for xs in zip(*trees, strict=True)], len(trees)),
        lambda n: [[torch.randn(4, 4).double(), torch.randn(1).double(), torch.randn(3)] for _ in range(n)],
        gradient=the_sum,
    ),
    "all_gather_into_tensor_coalesced": Case(
        lambda xs: ltx.all_gather(xs, tiled=True),
        lambda trees: on_all([torch.cat(xs) for xs in zip(*trees, strict=True)], len(trees)),
        lambda n: [[torch.randn(4, 4).double(), torch.randn(1).double()] for _ in range(n)],
        gradient=the_sum,
    ),
}

REFUSALS: dict[str, Case | Refusal] = {
    "the greatest of complex numbers": Refusal(
        lambda r: ltx.pmax(torch.ones(3, dtype=torch.complex64)), UnsupportedError, ("complex64",)
    ),
    "bits of floats": Refusal(lambda r: ltx.reduce(torch.ones(3), "band"), TreeError, ("float32[3]",)),
    "lists of different lengths": Refusal(
        lambda r: ltx.psum([torch.ones(1, 1, 37)] * (r + 1)), RankMismatchError, ("rank 0",)
    ),
    "no such rank": Refusal(lambda r: ltx.broadcast(torch.ones(3), -1), AxisError, ("src=-1",)),
    "parameters of different shapes": Refusal(
        lambda r: ltx.train_step(
            ltx.data_parallel(lambda p, x: p.sum() * x), ltx.optim.from_torch(torch.optim.SGD)
        ).init(torch.ones(2 + r, 1, 41)),
        RankMismatchError,
        ("float32[2, 1, 41]", "float32[3, 1, 41]"),
    ),
    "gradients of different structure": Refusal(
        lambda r: ltx.sync_gradients({"ab"[r]: torch.ones(1, 43)}), RankMismatchError, ("'a'",)
    ),
}

# --- training ---------------------------------------------------------------------------------------------------------


def loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
    """DDP's toy net, with a weight that is used twice."""
    h = torch.tanh(functional.linear(x, params["w1"], params["b1"]))
    return functional.mse_loss(functional.linear(torch.tanh(functional.linear(h, params["w2"])), params["w2"]), y)


def data(n: int, steps: int = STEPS) -> list[dict[str, Any]]:
    """Each rank's own start and batches; training must begin with rank 0's."""
    return [
        {
            "start": {
                "w1": torch.randn(5, 3).double(),
                "b1": torch.randn(5).double(),
                "w2": torch.randn(5, 5).double(),
            },
            "x": torch.randn(steps, 4, 3).double(),
            "y": torch.randn(steps, 4, 5).double(),
        }
        for _ in range(n)
    ]


def slope(params: Params, x: Tensor, y: Tensor) -> Params:
    leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
    return dict(zip(leaves, torch.autograd.grad(loss(leaves, x, y), list(leaves.values())), strict=True))


def slopes(xs: list[Params], given: list[dict[str, Any]], step: int) -> list[Params]:
    return [slope(x, of_rank["x"][step], of_rank["y"][step]) for x, of_rank in zip(xs, given, strict=True)]


def mean(trees: list[Params]) -> Params:
    return {name: torch.stack([tree[name] for tree in trees]).mean(0) for name in trees[0]}


def training(
    strategy: ltx.Strategy, of: Any = loss, kind: Any = torch.optim.SGD, options: Any = None, **kwargs: Any
) -> Any:
    """What a rank calls: its parameters after each step."""

    def call(given: dict[str, Any]) -> list[Params]:
        options_of = {"lr": 0.1} if options is None else options
        train = ltx.train_step(ltx.data_parallel(of, strategy), ltx.optim.from_torch(kind, **options_of), **kwargs)
        state = train.init(given["start"])
        history = []
        for x, y in zip(given["x"], given["y"], strict=True):
            state = train(state, x, y)[0]
            history.append({name: p.clone() for name, p in state.params.items()})
        return history

    return call


class Optimized:
    """One rank's parameters, under one of torch's optimizers."""

    def __init__(self, start: Params, kind: Any, options: dict[str, Any]):
        self.params = {name: p.detach().clone().requires_grad_() for name, p in start.items()}
        self.optimizer = kind(self.params.values(), **options)

    def step(self, gradients: Params) -> None:
        for name, p in self.params.items():
            p.grad = gradients[name].clone()
        self.optimizer.step()

    @property
    def now(self) -> Params:
        return {name: p.detach().clone() for name, p in self.params.items()}

    def put(self, params: Params) -> None:
        with torch.no_grad():
            for name, p in self.params.items():
                p.copy_(params[name])


def local(kind: Any = torch.optim.SGD, reduced: Any = mean, **options: Any) -> Callable[[list[Any]], list[Any]]:
    """One process that steps along the reduced gradients of all ranks' batches."""

    def want(given: list[Any]) -> list[Any]:
        one, history = Optimized(given[0]["start"], kind, options or {"lr": 0.1}), []
        for step in range(STEPS):
            one.step(reduced(slopes([one.now] * len(given), given, step)))
            history.append(one.now)
        return on_all(history, len(given))

    return want


def averaged(
    groups: Callable[[int, int], int | None], warmup: int = 0, node: int | None = None
) -> Callable[[list[Any]], list[Any]]:
    """torch's averagers: after step t, groups(t, n) neighbours take their mean, if any.

    Before `warmup` gradients are the mean of all ranks', from then on a rank's own, or of its node of so many.
    """

    def want(given: list[Any]) -> list[Any]:
        n, options = len(given), {"lr": 0.1, "momentum": 0.9}
        each = [Optimized(given[0]["start"], torch.optim.SGD, options) for _ in given]
        histories: list[list[Params]] = [[] for _ in given]
        for step in range(STEPS):
            gradients = slopes([one.now for one in each], given, step)
            shared = n if step < warmup else (node or 1)
            for rank, one in enumerate(each):
                first = rank // shared * shared
                one.step(mean(gradients[first : first + shared]))
            size = groups(step, n)
            if size:
                now = [one.now for one in each]
                for rank, one in enumerate(each):
                    first = rank // size * size
                    one.put(mean(now[first : first + size]))
            for history, one in zip(histories, each, strict=True):
                history.append(one.now)
        return histories

    return want


def periodic(period: int, warmup: int) -> Callable[[int, int], int | None]:
    return lambda step, n: n if step >= warmup and (step - warmup) % period == 0 else None


def hierarchical(levels: dict[int, int], warmup: int) -> Callable[[int, int], int | None]:
    """The longest period that divides the step decides how many take part; steps count from 0."""

    def groups(step: int, n: int) -> int | None:
        sizes = [size for period, size in levels.items() if step >= warmup and step % period == 0]
        return max(sizes, default=None)

    return groups


def case(call: Any, want: Any, **options: Any) -> Case:
    return Case(call, want, data, **{"tolerance": 1e-9, "worlds": (2,), "simulated": (2,), **options})


MOMENTUM = {"lr": 0.1, "momentum": 0.9}
TRAINING: dict[str, Case | Refusal] = {}
for kind, options in [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"lr": 0.01, "betas": (0.8, 0.9)}),
    (torch.optim.RMSprop, {"lr": 0.01}),
    (torch.optim.Adagrad, {"lr": 0.1}),
]:
    # 15, 5 and 25 elements: parts of different lengths, whatever the number of ranks.
    TRAINING[f"ZeRO, {kind.__name__}, {', '.join(options)}"] = case(
        training(ltx.ZeroStrategy(), kind=kind, options=options), local(kind, **options), worlds=(2, 3), simulated=(2,)
    )
for period, warmup in [(1, 0), (2, 0), (3, 2), (4, 3), (100, 5)]:
    TRAINING[f"PeriodicModelAverager, period {period}, warm-up {warmup}"] = case(
        training(ltx.LocalSGDStrategy(period, warmup), options=MOMENTUM),
        averaged(periodic(period, warmup), warmup),
        worlds=(2,) if period == 1 else (3,),
    )
for levels, warmup in [({2: 2, 4: 4}, 0), ({1: 2, 3: 4}, 0), ({2: 2, 4: 4}, 3)]:
    TRAINING[f"HierarchicalModelAverager, {levels}, warm-up {warmup}"] = case(
        training(ltx.LocalSGDStrategy(levels, warmup), options=MOMENTUM),
        averaged(hierarchical(levels, warmup), warmup),
        worlds=(4,) if warmup == 3 else (),
        simulated=(4,),
    )
TRAINING |= {
    "HierarchicalModelAverager of three levels": case(
        training(ltx.LocalSGDStrategy({1: 2, 2: 4, 4: 8}), options=MOMENTUM),
        averaged(hierarchical({1: 2, 2: 4, 4: 8}, 0)),
        worlds=(),
        simulated=(8,),
    ),
    "post_localSGD_hook within a node": case(
        training(ltx.LocalSGDStrategy(3, 2, subgroup=2), options=MOMENTUM),
        averaged(periodic(3, 2), 2, node=2),
        worlds=(4,),
        simulated=(4,),
    ),
}

# --- gradients --------------------------------------------------------------------------------------------------------


def matrices(n: int) -> list[Params]:
    return [{"m": torch.randn(8, 6).double(), "v": torch.randn(7).double()} for _ in range(n)]


def of_low_rank(n: int) -> list[Params]:
    """Matrices of rank 2, whose columns are all of one plane."""
    plane = torch.randn(8, 2).double()
    return [{"m": plane @ torch.randn(2, 6).double(), "v": torch.randn(7).double()} for _ in range(n)]


def reduced_by(hook: Any) -> Callable[[Params], Params]:
    """What a hook makes of gradients at its first step."""

    def call(gradients: Params) -> Params:
        strategy = ltx.DDPStrategy(comm_hook=hook)
        step = ltx.data_parallel(lambda p, g: sum((p[name] * g[name]).sum() for name in p), strategy)
        zeros = {name: torch.zeros_like(g) for name, g in gradients.items()}
        found = ltx.grad_and_value(step)(zeros, gradients, sync_state=step.init(zeros))
        return found[0][0]

    return call


def means(trees: list[Params]) -> list[Params]:
    return on_all(mean(trees), len(trees))


def affine(x: Tensor) -> Tensor:
    """torch's per-tensor quantization: 256 levels of the range, extended to 0, which is one of them."""
    low, high = x.min().clamp(max=0), x.max().clamp(min=0)
    scale = (high - low) / 255
    zero = (-low / scale).round()
    return ((x / scale).round() + zero).clamp(0, 255).sub(zero) * scale


def quantized_means(trees: list[Params]) -> list[Params]:
    """To a half of one step each way: what is sent, and what is sent back."""
    n = len(trees)
    rows = [torch.cat([tree["v"].flatten(), tree["m"].flatten()]) / n for tree in trees]
    length = -(-len(rows[0]) // n)
    rows = [functional.pad(row, (0, n * length - len(row))) for row in rows]
    parts = [affine(sum(affine(row[r * length : (r + 1) * length]) for row in rows)) for r in range(n)]
    flat = torch.cat(parts)
    return on_all({"v": flat[:7], "m": flat[7:55].view(8, 6)}, n)


def with_auxiliary(given: dict[str, Any]) -> Any:
    """A detached output is one on two ranks as on one: numpy() works."""

    def both(params: Params, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return loss(params, x, y), x.detach() * 2

    step = ltx.data_parallel(both)
    _, (_, aux) = ltx.grad_and_value(step, has_aux=True)(given["start"], given["x"][0], given["y"][0])
    return torch.from_numpy(aux.numpy().copy())


GRADIENTS: dict[str, Case | Refusal] = {
    "PowerSGD before it starts": Case(
        reduced_by(hooks.PowerSGD(rank=1, start_step=3)), means, matrices, simulated=(2,)
    ),
    "PowerSGD of matrices of its rank": Case(
        reduced_by(hooks.PowerSGD(rank=2, start_step=0, min_compression_rate=1.0)),
        means,
        of_low_rank,
        simulated=(2,),
        tolerance=1e-9,
    ),
    "quantization_pertensor_hook": Case(
        reduced_by(hooks.Quantize(per="tensor")), quantized_means, matrices, simulated=(2,), tolerance=1e-9
    ),
    "a detached output has no graph": Case(
        with_auxiliary,
        lambda given: [2 * of_rank["x"][0] for of_rank in given],
        lambda n: same_start(data(n)),
        simulated=(),
        worlds=(2,),
    ),
}


def same_start(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**of_rank, "start": {n: p.clone() for n, p in given[0]["start"].items()}} for of_rank in given]


TABLES: dict[str, Cases] = {
    "collectives": COLLECTIVES,
    "refusals": REFUSALS,
    "training": TRAINING,
    "gradients": GRADIENTS,
}


@pytest.mark.full(but=1)
@pytest.mark.parametrize(("table", "n"), worlds_of(TABLES))
def test_on_ranks(table: str, n: int, ranks: Ranks, seed: int) -> None:
    cases = TABLES[table]
    check(failures(cases, lambda xs, bars: on_rank(cases, xs, bars), ranks, n))


@pytest.mark.full(but=1)
@pytest.mark.parametrize("table", [name for name in TABLES if name != "refusals"])
def test_on_simulated_ranks(table: str, seed: int) -> None:
    check(failures_simulated(TABLES[table]))
