"""The cases of Bagua's tests: its algorithms on its own test net, its eight-bit codes, its communicator.

After tests/torch_api (test_gradient_allreduce, test_decentralized, test_low_precision_decentralized, test_qadam,
test_async_model_average, test_broadcast_state, test_multi_models, test_process_group), tests/internal/compressor.py and
tests/internal/comm/test_communicator.py. The references train the same net in plain torch, all ranks in one loop.

Left out, as ltx has no way to say it:

* ``reduce``, ``gather`` and ``scatter`` with one root: collectives give every rank its result.
* ``send`` and ``recv`` by themselves: a ``ppermute`` is both ends of it.
* aborting a communicator while another thread waits: tests/internal/comm has the deadlines and interrupts.
* ``switch_to`` another algorithm in mid-training: a strategy belongs to its step; make another step.
* the load-balancing sampler, the cached dataset and stores, mixture of experts, the autotune service: not in ltx.
* the fused optimizer against the plain one: ltx fuses by itself (tests/contract/optim).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import ltx
from ltx.hooks import ByteGrad
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
    worlds_of,
)

Params = dict[str, Tensor]
STEPS = 8

# --- the net ----------------------------------------------------------------------------------------------------------


def forward(params: Params, x: Tensor) -> Tensor:
    """Bagua's test net, 2 to 10 to 50 to 4."""
    return functional.linear(
        functional.relu(functional.linear(functional.relu(functional.linear(x, params["fc1"])), params["fc2"])),
        params["fc3"],
    )


def loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
    return functional.mse_loss(forward(params, x), y)


def slope(params: Params, x: Tensor, y: Tensor) -> Params:
    leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
    return dict(zip(leaves, torch.autograd.grad(loss(leaves, x, y), list(leaves.values())), strict=True))


def runs(n: int) -> list[dict[str, Any]]:
    """Each rank's own start and data. Training must begin with rank 0's start."""
    shapes = {"fc1": (10, 2), "fc2": (50, 10), "fc3": (4, 50)}
    return [
        {
            "start": {name: torch.randn(s, dtype=torch.float64) * s[1] ** -0.5 for name, s in shapes.items()},
            "x": torch.randn(STEPS, 4, 2, dtype=torch.float64),
            "y": torch.randn(STEPS, 4, 4, dtype=torch.float64),
        }
        for _ in range(n)
    ]


def training(algorithm: str, optimizer: Any = None, seen: Callable[..., Any] | None = None, **fields: Any) -> Any:
    """What a rank calls: parameters after as many steps as it has data for."""

    def call(given: dict[str, Any]) -> Any:
        train = ltx.train_step(
            ltx.data_parallel(loss, ltx.BaguaStrategy(algorithm, **fields)),
            optimizer or ltx.optim.from_torch(torch.optim.SGD, lr=0.1),
        )
        state = train.init(given["start"])
        for x, y in zip(given["x"], given["y"], strict=True):
            state = train(state, x, y)[0]
        state = train.finish(state)
        found = {name: p.clone() for name, p in state.params.items()}
        return found if seen is None else (found, seen(state))

    return call


def lowered(params: Params, gradient: Params, lr: float = 0.1) -> Params:
    return {name: p - lr * gradient[name] for name, p in params.items()}


def mean(trees: list[Params]) -> Params:
    return {name: torch.stack([tree[name] for tree in trees]).mean(0) for name in trees[0]}


def slopes(xs: list[Params], given: list[dict[str, Any]], step: int) -> list[Params]:
    return [slope(x, of_rank["x"][step], of_rank["y"][step]) for x, of_rank in zip(xs, given, strict=True)]


# --- references -------------------------------------------------------------------------------------------------------


class MinMaxUInt8:
    """Bagua's compressor: codes of multiples of 1 / s, so that 0 has one; kept between 0 and 255."""

    def __init__(self, x: Tensor):
        self.scale = 255.0 / (x.max() - x.min() + 1e-7)
        self.upper = torch.round(x.max() * self.scale)
        self.lower = self.upper - 255.0
        self.codes = (torch.minimum(torch.round(x * self.scale), self.upper) - self.lower).clamp(0, 255)

    @property
    def decoded(self) -> Tensor:
        return (self.codes + self.lower) / self.scale


def eight_bits(x: Tensor) -> Tensor:
    return MinMaxUInt8(x).decoded


def flat(tree: Params) -> Tensor:
    """As they lie in a bucket: what the backward pass finds first comes first."""
    return torch.cat([tree[name].reshape(-1) for name in ("fc3", "fc2", "fc1")])


def unflat(vector: Tensor, like: Params) -> Params:
    parts = vector.split([like[name].numel() for name in ("fc3", "fc2", "fc1")])
    return {name: p.view(like[name].shape) for name, p in zip(("fc3", "fc2", "fc1"), parts, strict=True)}


def bytegrad(trees: list[Params], average: bool = True) -> Params:
    """Scatter and gather: rank r adds up everyone's r-th chunk, and both ways are in eight bits.

    The mean's division comes first. It changes the codes only by the 1e-7 in the scale.
    """
    n = len(trees)
    chunks = [(flat(tree) / (n if average else 1)).chunk(n) for tree in trees]
    added = [sum(eight_bits(of_rank[r]) for of_rank in chunks) for r in range(n)]
    return unflat(torch.cat([eight_bits(x) for x in added]), trees[0])


def together(reduced: Callable[[list[Params]], Params]) -> Callable[[list[Any]], list[Any]]:
    """All ranks have the same parameters, and step along what is made of their gradients."""

    def want(given: list[Any]) -> list[Any]:
        x = given[0]["start"]
        for step in range(STEPS):
            x = lowered(x, reduced(slopes([x] * len(given), given, step)))
        return on_all(x, len(given))

    return want


def total(trees: list[Params]) -> Params:
    return {name: sum(tree[name] for tree in trees) for name in trees[0]}


def peer(rank: int, n: int, k: int) -> int:
    """Bagua's shift_one: the lower half goes round the upper half."""
    half = n // 2
    return (k + rank) % half + half if rank < half else (rank - half - k) % half


def decentralized(shift_one: bool = False, interval: int = 1) -> Callable[[list[Any]], list[Any]]:
    """x_{t+1} = y_t - lr grad f(x_t), y_t the mean of all x_t or of two."""

    def want(given: list[Any]) -> list[Any]:
        n = len(given)
        xs = [given[0]["start"]] * n
        for step in range(STEPS):
            gradients, ys = slopes(xs, given, step), xs
            if step % interval == 0:
                ys = [mean([xs[r], xs[peer(r, n, step // interval)]]) if shift_one else mean(xs) for r in range(n)]
            xs = [lowered(y, gradient) for y, gradient in zip(ys, gradients, strict=True)]
        return xs

    return want


def low_precision(interval: int = 1) -> Callable[[list[Any]], list[Any]]:
    """Differences of weights in eight bits round a ring; parameters, and what each rank knows of whom."""

    def want(given: list[Any]) -> list[Any]:
        n = len(given)
        start = flat(given[0]["start"])
        xs, own, left, right = ([start.clone() for _ in range(n)] for _ in range(4))
        for step in range(STEPS):
            trees = [unflat(x, given[0]["start"]) for x in xs]
            xs = [flat(lowered(*pair)) for pair in zip(trees, slopes(trees, given, step), strict=True)]
            if step % interval == 0:
                zs = [xs[r] + left[r] / 3 + right[r] / 3 - 5 / 3 * own[r] for r in range(n)]
                ds = [eight_bits(z) for z in zs]
                left = [left[r] + ds[(r - 1) % n] for r in range(n)]
                right = [right[r] + ds[(r + 1) % n] for r in range(n)]
                own = xs = [own[r] + ds[r] for r in range(n)]
        return [
            (unflat(xs[r], given[0]["start"]), {"own": own[r], "left": left[r], "right": right[r]}) for r in range(n)
        ]

    return want


def ring(state: Any) -> dict[str, Tensor]:
    """A rank's own weights as its neighbours know them, and theirs."""
    leaves = state.sync_state.leaves
    paths = {path.strip("[']"): path for path in leaves}
    return {
        who: torch.cat([leaves[paths[name]][who].reshape(-1) for name in ("fc3", "fc2", "fc1")])
        for who in ("own", "left", "right")
    }


def qadam(warmup: int, exact: bool = False, lr: float = 1e-3) -> Callable[[list[Any]], list[Any]]:
    """Adam on mean gradients; then v stays, and momenta are averaged in eight bits.

    `exact`: at the last step of the warm-up Bagua ignores the gradients.
    """
    b1, b2, eps = 0.9, 0.999, 1e-8

    def want(given: list[Any]) -> list[Any]:
        x = given[0]["start"]
        m = v = {name: torch.zeros_like(p) for name, p in x.items()}
        for s in range(1, STEPS + 1):
            gradients = slopes([x] * len(given), given, s - 1)
            if s < warmup or (s == warmup and not exact):
                g = mean(gradients)
                m = {name: b1 * m[name] + (1 - b1) * g[name] for name in x}
                v = {name: b2 * v[name] + (1 - b2) * g[name] ** 2 for name in x}
            elif s > warmup:
                m = bytegrad([{name: b1 * m[name] + (1 - b1) * g[name] for name in x} for g in gradients])
            root = {name: v[name].sqrt() / (1 - b2**s) ** 0.5 + eps for name in x}
            x = {name: x[name] - lr / (1 - b1**s) * m[name] / root[name] for name in x}
        return on_all(x, len(given))

    return want


def adam(given: list[Any]) -> list[Any]:
    """torch's own, on mean gradients."""
    leaves = {name: p.clone().requires_grad_() for name, p in given[0]["start"].items()}
    optimizer = torch.optim.Adam(leaves.values(), lr=1e-3, weight_decay=0.1)
    for step in range(STEPS):
        g = mean(slopes([leaves] * len(given), given, step))
        for name, leaf in leaves.items():
            leaf.grad = g[name]
        optimizer.step()
    return on_all({name: leaf.detach() for name, leaf in leaves.items()}, len(given))


def case(call: Any, want: Any, **options: Any) -> Case:
    return Case(call, want, runs, **{"tolerance": 1e-8, "worlds": (2, 3), "simulated": (2,), **options})


TRAINING: dict[str, Case | Refusal] = {
    "gradient_allreduce": case(training("gradient_allreduce"), together(mean)),
    "gradient_allreduce, sum": case(training("gradient_allreduce", average=False), together(total)),
    "gradient_allreduce, hierarchical": case(
        training("gradient_allreduce", hierarchical=True, node_size=2), together(mean), worlds=(2, 4), simulated=()
    ),
    "bytegrad": case(training("bytegrad"), together(bytegrad), worlds=(2, 3, 4)),
    "bytegrad, sum": case(
        training("bytegrad", average=False), together(lambda trees: bytegrad(trees, average=False)), worlds=(2,)
    ),
    "decentralized, all": case(training("decentralized"), decentralized()),
    "decentralized, all, every third step": case(
        training("decentralized", communication_interval=3), decentralized(interval=3)
    ),
    "decentralized, shift_one": case(
        training("decentralized", peer_selection_mode="shift_one"),
        decentralized(shift_one=True),
        worlds=(2, 4),
        simulated=(4,),
    ),
    "decentralized, shift_one, every second step": case(
        training("decentralized", peer_selection_mode="shift_one", communication_interval=2),
        decentralized(shift_one=True, interval=2),
        worlds=(4,),
        simulated=(4,),
    ),
    "low_precision_decentralized": case(
        training("low_precision_decentralized", seen=ring), low_precision(), worlds=(2, 3, 4), simulated=()
    ),
    "low_precision_decentralized, every second step": case(
        training("low_precision_decentralized", seen=ring, communication_interval=2),
        low_precision(interval=2),
        worlds=(3,),
        simulated=(),
    ),
    "qadam": case(
        training("qadam", ltx.optim.qadam(lr=1e-3, warmup_steps=5), warmup_steps=5), qadam(5), tolerance=1e-7
    ),
    "qadam, as Bagua at the last step of the warm-up": case(
        training("qadam", ltx.optim.qadam(lr=1e-3, warmup_steps=5, bagua_exact=True), warmup_steps=5),
        qadam(5, exact=True),
        worlds=(2,),
        simulated=(),
        tolerance=1e-7,
    ),
    "qadam in its warm-up is Adam": case(
        training("qadam", ltx.optim.qadam(lr=1e-3, warmup_steps=2000, weight_decay=0.1), warmup_steps=2000), adam
    ),
}  # fmt: skip

# --- asynchronous averaging, several models, process groups -----------------------------------------------------------


def gradient_is_x(params: Params, x: Tensor) -> Tensor:
    return x @ params["w"]


def asynchronous(given: dict[str, Any]) -> Tensor:
    """Ranks take different numbers of steps, and finish."""
    strategy = ltx.BaguaStrategy("async", sync_interval_ms=0.0, warmup_steps=2)
    train = ltx.train_step(ltx.data_parallel(gradient_is_x, strategy), ltx.optim.from_torch(torch.optim.SGD, lr=0.1))
    state = train.init({"w": given["w"]})
    for x in given["x"]:
        state = train(state, x)[0]
    return train.finish(state).params["w"].clone()


def nothing_is_lost(given: list[dict[str, Any]]) -> list[Any]:
    """Averaging moves what ranks have learned about, and all of it is there in the end, in the mean."""
    steps = sum(of_rank["x"].sum(0) for of_rank in given)
    return on_all(given[0]["w"] - 0.1 * steps / len(given), len(given))


def of_different_lengths(n: int) -> list[dict[str, Any]]:
    return [
        {"w": torch.randn(6, dtype=torch.float64), "x": torch.randn(4 + 3 * r, 6, dtype=torch.float64)}
        for r in range(n)
    ]


def two_models(given: dict[str, Any]) -> Any:
    """Steps of two models in turns: one exact, one in eight bits."""
    sgd = ltx.optim.from_torch(torch.optim.SGD, lr=0.1)
    trains = [
        ltx.train_step(ltx.data_parallel(loss, ltx.BaguaStrategy(algorithm)), sgd)
        for algorithm in ("gradient_allreduce", "bytegrad")
    ]
    states = [train.init(given["start"]) for train in trains]
    for x, y in zip(given["x"], given["y"], strict=True):
        states = [train(state, x, y)[0] for train, state in zip(trains, states, strict=True)]
    return [{name: p.clone() for name, p in state.params.items()} for state in states]


def frozen_row(algorithm: str, optimizer: Any, **fields: Any) -> Any:
    """Rows of a table that no rank looks up, after training: they mustn't have moved."""

    def call(given: dict[str, Any]) -> Tensor:
        def table_loss(params: Params, x: Tensor, rows: Tensor) -> Tensor:
            return (params["table"][rows] * x).sum()

        train = ltx.train_step(ltx.data_parallel(table_loss, ltx.BaguaStrategy(algorithm, **fields)), optimizer)
        state = train.init({"table": given["table"]})
        for x in given["x"]:
            state = train(state, x, torch.tensor([0, 2, 4]))[0]
        return train.finish(state).params["table"][1::2].clone()

    return call


def tables(n: int) -> list[dict[str, Any]]:
    return [{"table": torch.randn(6, 5), "x": torch.randn(12, 3, 5) + 0.3} for _ in range(n)]


def rows_of_rank_0(given: list[dict[str, Any]]) -> list[Any]:
    return on_all(given[0]["table"][1::2], len(given))


ADAM = ltx.optim.from_torch(torch.optim.Adam, lr=0.01)
for name, call in {
    "bytegrad": frozen_row("bytegrad", ADAM),
    "low_precision_decentralized": frozen_row("low_precision_decentralized", ADAM),
    "qadam": frozen_row("qadam", ltx.optim.qadam(lr=0.01, warmup_steps=4), warmup_steps=4),
}.items():
    TRAINING[f"{name}: rows without gradient stay to the last bit"] = Case(
        call, rows_of_rank_0, tables, worlds=(2,), simulated=(), tolerance=0
    )
TRAINING |= {
    "async: nothing is lost": Case(asynchronous, nothing_is_lost, of_different_lengths, worlds=(2, 3), simulated=()),
    "two models in turns": case(
        two_models,
        lambda given: [list(pair) for pair in zip(together(mean)(given), together(bytegrad)(given), strict=True)],
        simulated=(),
    ),
}

# --- the communicator -------------------------------------------------------------------------------------------------


def partner(n: int) -> list[tuple[int, int]]:
    """Even ranks send to the next."""
    return [(r, r + 1) for r in range(0, n - 1, 2)]


COMMUNICATOR: dict[str, Case | Refusal] = {
    "allreduce": Case(ltx.psum, lambda xs: on_all(sum(xs), len(xs)), randn(100, dtype=torch.float32)),
    "allreduce, AVG is SUM over n": Case(
        ltx.pmean, lambda xs: on_all(torch.stack(xs).sum(0) / len(xs), len(xs)), randn(100, dtype=torch.float32)
    ),
    "send and recv": Case(
        lambda x: ltx.ppermute(x, partner(ltx.axis_size())),
        lambda xs: [xs[r - 1] if r % 2 else torch.zeros_like(x) for r, x in enumerate(xs)],
        randn(100, dtype=torch.float32),
        tolerance=0,
    ),
    "allgather": Case(
        ltx.all_gather, lambda xs: on_all(torch.stack(xs), len(xs)), randn(100, dtype=torch.float32), tolerance=0
    ),
    "alltoall": Case(
        lambda x: ltx.all_to_all(x, 0, 0),
        lambda xs: [torch.cat([x.chunk(len(xs))[r] for x in xs]) for r in range(len(xs))],
        randn(12, 3, dtype=torch.float32),
        tolerance=0,
    ),
    "alltoall_v": Case(
        lambda x: ltx.all_to_all(x, 0, 0, splits=[1, 4, 7])[0],
        lambda xs: [torch.cat([x.split([1, 4, 7])[r] for x in xs]) for r in range(3)],
        randn(12, 3, dtype=torch.float32),
        simulated=(),
        tolerance=0,
    ),
    "reduce_scatter, AVG is SUM over n": Case(
        lambda x: ltx.psum_scatter(x, tiled=True) / ltx.axis_size(),
        lambda xs: list((torch.stack(xs).sum(0) / len(xs)).chunk(len(xs))),
        randn(12 * 25, dtype=torch.float32),
    ),
    "broadcast, several at once": Case(
        lambda xs: ltx.broadcast(xs, 1),
        lambda trees: on_all(trees[1], len(trees)),
        lambda n: [[torch.randn(3), torch.randint(9, (2, 2)), torch.randn(4).half()] for _ in range(n)],
        tolerance=0,
    ),
    "broadcast_object": Case(
        lambda x: ltx.broadcast_object({"lr": 0.02, "nesterov": True} if ltx.axis_index() == 0 else {}, 0),
        lambda xs: on_all({"lr": 0.02, "nesterov": True}, len(xs)),
        randn(1),
        simulated=(),
    ),
    **{
        f"allreduce, {op}": Case(
            lambda x, op=op: ltx.reduce(x, op),
            lambda xs, f=f: on_all(f(torch.stack(xs)), len(xs)),
            lambda n: [torch.randint(-9, 9, (20,)) for _ in range(n)],
            tolerance=0,
        )
        for op, f in {
            "MIN": lambda xs: xs.amin(0),
            "MAX": lambda xs: xs.amax(0),
            "PRODUCT": lambda xs: xs.prod(0),
            "BAND": lambda xs: xs[0] & xs[1] & xs[2] & xs[-1],
            "BOR": lambda xs: xs[0] | xs[1] | xs[2] | xs[-1],
        }.items()
    },
}
TABLES: dict[str, Cases] = {"training": TRAINING, "communicator": COMMUNICATOR}


@pytest.mark.full(but=1)
@pytest.mark.parametrize(("table", "n"), worlds_of(TABLES))
def test_on_ranks(table: str, n: int, ranks: Ranks, seed: int) -> None:
    cases = TABLES[table]
    check(failures(cases, lambda xs, bars: on_rank(cases, xs, bars), ranks, n))


@pytest.mark.full(but=1)
@pytest.mark.parametrize("table", TABLES)
def test_on_simulated_ranks(table: str, seed: int) -> None:
    check(failures_simulated(TABLES[table]))


# --- eight bits -------------------------------------------------------------------------------------------------------


def sent(x: Tensor) -> tuple[Tensor, Tensor]:
    """ltx's codes of one chunk, counted from 0 as Bagua's are, and what they are decoded to."""
    message = ByteGrad().encode(x[None].clone(), None)
    codes = message[0, -x.numel() :].view(torch.int8).long() + 128
    return codes, ByteGrad().decode(message, x.numel(), x.dtype)[0]


def test_codes_of_five_numbers() -> None:
    codes, decoded = sent(torch.tensor([-1.0, -0.5, 0.0, 0.25, 1.0]))
    assert codes.tolist() == [0, 63, 127, 159, 255]
    torch.testing.assert_close(decoded, torch.tensor([-0.99607843, -0.50196081, 0.0, 0.25098041, 1.00392163]))
    assert decoded[2] == 0


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.randn(1000),
        lambda: torch.randn(1000) * 1e3,
        lambda: torch.rand(1000) - 1e-3,
        lambda: torch.where(torch.rand(1000) < 0.5, 0.0, torch.randn(1000)),
        lambda: torch.cat([torch.zeros(10), torch.rand(90)]),
        lambda: torch.cat([torch.zeros(10), -torch.rand(90)]),
        lambda: torch.randn(1000).exp() - 0.05,
        lambda: torch.tensor([-1e-3, 0.0, 1e3]),
    ],
    ids=["normal", "large", "nearly all positive", "half zeros", "from 0 up", "up to 0", "skewed", "lopsided"],
)
def test_codes_are_baguas_where_0_is_in_the_range(draw: Callable[[], Tensor], seed: int) -> None:
    """In float64, where two ways to write a formula don't round to different codes; and 0 stays 0."""
    x = draw().double()
    x[0] = 0.0
    theirs, (codes, decoded) = MinMaxUInt8(x), sent(x)
    assert torch.equal(codes, theirs.codes.long())
    torch.testing.assert_close(decoded, theirs.decoded, rtol=1e-12, atol=0)
    assert not decoded[x == 0].any()
    assert float((decoded - x).abs().max()) <= 1.001 / float(theirs.scale)


@pytest.mark.full(but=1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_error_of_codes(dtype: torch.dtype, seed: int) -> None:
    """At most one step, whatever the dtype, of the range's 255; nothing wraps around."""
    for scale, shift in [(1.0, 0.0), (1e-2, 0.0), (1.0, 3.0), (1e-1, -5.0)]:
        x = (torch.randn(500) * scale + shift).to(dtype)
        decoded = sent(x)[1]
        step = (x.double().max() - x.double().min()) / 255
        rounding = torch.finfo(dtype).eps * 2 * x.double().abs().max()
        assert (decoded.double() - x.double()).abs().max() <= step + 4 * rounding, (scale, shift)
