"""Bagua's ranks that share weights: which communicate, what they send, that they notice when apart; and QAdam."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ltx
from ltx import hooks, optim
from ltx.errors import DeadlockDetectedError, RankMismatchError, StrategyError, UnsupportedError
from tests import train_on
from tests.contract.strategies.problem import loss, make_problem
from tests.contract.strategies.table import NODES
from tests.contract.strategies.test_failures import BrokenError
from tests.inside import QAdam
from tests.kinds import OnNewAxis, Ranks
from tests.sent import recorded
from tests.train_on import go_on, loop_of_torch, on_ranks, refuses, said
from tests.twins.cases import assert_same_bits

SGD = ltx.optim.from_torch(torch.optim.SGD, lr=0.1)


def trainer(algorithm: str, **fields: Any) -> Any:
    return ltx.train_step(ltx.data_parallel(loss, ltx.BaguaStrategy(algorithm, **fields)), SGD)


@pytest.mark.parametrize(("n", "fields", "what"), [(3, {}, "ranks"), (6, NODES, "nodes")])
def test_an_odd_number_cant_pair(n: int, fields: dict[str, Any], what: str) -> None:
    train, problem = trainer("decentralized", peer_selection_mode="shift_one", **fields), make_problem(0, n)
    text = f"\"shift_one\" pairs {what}, and axis 'data' has 3 of them. Use an even number of {what}, or "
    with pytest.raises(StrategyError, match=re.escape(text)):
        ltx.vmap(lambda x: train.init({k: torch.tensor(v) for k, v in problem.start.items()}))(torch.ones(n))


def sent(algorithm: str, steps: int = 4, **fields: Any) -> list[list[tuple[str, int]]]:
    """What each step issues, without headers: (operation, bytes)."""
    train = trainer(algorithm, **fields)
    state = train.init({"w": torch.ones(3, 4), "b": torch.ones(3), "s": torch.ones(()), "pad": torch.ones(1000)})
    batches = [(x.float(), y.float()) for x, y in make_problem(0, int(ltx.axis_size()), steps).batches()]
    _, traces = recorded(train, state, batches)
    return [[(e.operation, e.nbytes) for e in trace.events if " " in e.label] for trace in traces]


def by_node(algorithm: str, *issued: tuple[str, int], **fields: Any) -> tuple[int, str, dict[str, Any], Any]:
    """What ranks of two nodes of two issue in one step."""
    return 4, algorithm, {"steps": 1, **NODES, **fields}, [list(issued)]


NUMEL, TAG = 1016, 40
#: Half of the weights and tags of a node, and of its gradients.
HALF, HALF_GRADIENTS = 2 * (NUMEL + TAG), 2 * NUMEL
#: In 8 bits, with a grid of two numbers: all, half, and a quarter.
ALL_8, HALF_8, QUARTER_8 = NUMEL + 8, NUMEL // 2 + 8, NUMEL // 4 + 8
SHIFT: dict[str, Any] = {"peer_selection_mode": "shift_one"}

#: Of so many ranks an algorithm, and the operations and bytes of each of its steps.
SENT: dict[str, tuple[int, str, dict[str, Any], list[list[tuple[str, int]]]]] = {
    "shift_one, each parameter once": (
        4,
        "decentralized",
        {**SHIFT, "communication_interval": 2},
        [[("ppermute", 2 * HALF)], []] * 2,
    ),
    "all, in one all-reduce": (2, "decentralized", {}, [[("psum", 2 * HALF)]] * 4),
    **{
        f"low precision, messages of a quarter, to {k}": (
            k + 1,
            "low_precision_decentralized",
            {"communication_interval": 3},
            [[("ppermute", ALL_8)] * k, [], [], [("ppermute", ALL_8)] * k],
        )
        for k in (1, 2)
    },
    "a node as one, whose two ranks send a half each": by_node(
        "decentralized", ("psum_scatter", HALF), ("ppermute", HALF), ("all_gather", HALF), **SHIFT
    ),
    "gradients of a node, of which each rank shares a half": by_node(
        "gradient_allreduce", ("psum_scatter", HALF_GRADIENTS), ("psum", HALF_GRADIENTS), ("all_gather", HALF_GRADIENTS)
    ),
    "gradients of a node, halves in 8 bits": by_node(
        "bytegrad",
        ("psum_scatter", HALF_GRADIENTS),
        ("all_to_all", QUARTER_8),
        ("all_gather", QUARTER_8),
        ("all_gather", HALF_GRADIENTS),
    ),
    "low precision by node, its own message and the other one's": by_node(
        "low_precision_decentralized", ("psum_scatter", 2 * NUMEL), ("ppermute", HALF_8), ("all_gather", 2 * HALF_8)
    ),
}


@pytest.mark.parametrize("name", SENT)
def test_what_is_sent(name: str, ranks: Ranks) -> None:
    n, algorithm, fields, expected = SENT[name]
    for issued in ranks(n).run(sent, algorithm, **fields):
        assert issued == expected


def trained(algorithm: str, seed: int, **fields: Any) -> list[tuple[Any, Any]]:
    """After each step: (parameters, communication state); parameters of several dtypes and strides."""
    generator, rank = torch.Generator().manual_seed(seed), int(ltx.axis_index())
    train = ltx.train_step(ltx.data_parallel(odd_loss, ltx.BaguaStrategy(algorithm, **fields)), SGD)
    state, history = train.init(odd_params(generator)), []
    for _ in range(5):
        state, _ = train(state, torch.randn(8, generator=generator)[rank])
        history.append(ltx.tree.map(torch.clone, (state.params, state.sync_state.leaves)))
    return history


def written_between(overlap: Any, seed: int) -> list[Tensor]:
    """The weights, and the copy of the left neighbour's, of steps between which the program halves a module's weights.

    With n = 2 both neighbours are the same.
    """
    model = torch.nn.Linear(3, 2)
    loss = ltx.data_parallel(
        lambda p, x: ltx.functional_call(model, p, x).square().mean(), ltx.BaguaStrategy("low_precision_decentralized")
    )
    train, draw = (
        ltx.train_step(loss, SGD, overlap=overlap),
        torch.Generator().manual_seed(seed + int(ltx.axis_index())),
    )
    state = train.init(model)
    for number in range(6):
        if number == 3:
            with torch.no_grad():
                model.weight.mul_(0.5)
        state, _ = train(state, torch.randn(4, 3, generator=draw))
    return [state.params["weight"].clone(), state.sync_state.leaves["weight"]["left"].clone()]


@pytest.mark.parametrize("overlap", ["backward", "update"])
def test_what_neighbours_know_is_right_after_a_write_between_steps(overlap: Any, ranks: Ranks, seed: int) -> None:
    (mine, of_other), (other, of_mine) = ranks(2).run(written_between, overlap, seed)
    assert torch.equal(of_mine, mine)
    assert torch.equal(of_other, other)


def odd_params(generator: torch.Generator) -> dict[str, Tensor]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "turned": normal(5, 3).t(),
        "half": normal(7).bfloat16(),
        "none": normal(0, 2),
        "one": normal(),
        "wide": normal(4).double(),
    }


def odd_loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return sum(((p.double() - x) * (1 + x)).square().sum() for p in params.values())


@pytest.mark.full(but=1)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_neighbours_know_each_other_to_the_last_bit(n: int, ranks: Ranks, seed: int) -> None:
    small = {"first_bucket_bytes": 40, "bucket_bytes": 40}
    assert_ring(list(ranks(n).run(trained, "low_precision_decentralized", seed, **small)))


@pytest.mark.full
def test_nodes_know_each_other_to_the_last_bit(ranks: Ranks, seed: int) -> None:
    first, same, second, other = ranks(4).run(trained, "low_precision_decentralized", seed, **NODES)
    assert_ring([first, second])
    assert_same_bits((first, second), (same, other))


def assert_ring(results: list[list[tuple[Any, Any]]]) -> None:
    n = len(results)
    for step in range(5):
        params, states = zip(*(result[step] for result in results), strict=True)
        for rank in range(n):
            for path, mine in states[rank].items():
                assert torch.equal(mine["own"], states[(rank - 1) % n][path]["right"])
                assert torch.equal(mine["own"], states[(rank + 1) % n][path]["left"])
                assert mine["own"].dtype == (torch.float64 if path == "wide" else torch.float32)
                assert torch.equal(params[rank][path], mine["own"].to(params[rank][path].dtype))
    assert not torch.equal(params[0]["turned"], params[1]["turned"])  # they are each one's own


RING = ltx.train_step(
    ltx.data_parallel(lambda w, x: (w * x).sum(), ltx.BaguaStrategy("low_precision_decentralized")), SGD
)


@on_ranks(2)
def test_a_broadcast_state_knows_its_neighbours() -> None:
    """Ranks that all have one rank's weights know them of each other: copies of others would pull at every step."""
    x = torch.full((3,), float(ltx.axis_index()))
    state = RING.broadcast(go_on(RING, RING.init(torch.ones(3)), [x] * 3).state, src=1)
    before, after = [state.params.clone(), go_on(RING, state, [torch.zeros(3)] * 10).params]
    torch.testing.assert_close(after, before)


@pytest.mark.parametrize("fields", [{}, {"peer_selection_mode": "shift_one"}, NODES], ids=str)
def test_weights_of_several_dtypes_travel(fields: dict[str, Any], ranks: Ranks, seed: int) -> None:
    results = list(ranks(2).run(trained, "decentralized", seed, first_bucket_bytes=40, **fields))
    for rank, history in enumerate(results):
        for step in range(1, 5):
            x, other = history[step - 1][0], results[1 - rank][step - 1][0]
            grads = torch.func.grad(odd_loss)(x, inputs_of(seed, step, rank))
            expected = {k: (x[k].double() + other[k].double()) / 2 - 0.1 * grads[k].double() for k in x}
            for k, got in history[step][0].items():
                off = 3e-2 if k == "half" else 1e-5
                torch.testing.assert_close(got.double(), expected[k], rtol=off, atol=off)


def inputs_of(seed: int, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    odd_params(generator)
    return [torch.randn(8, generator=generator)[rank] for _ in range(step + 1)][-1]


def test_complex_weights() -> None:
    def step(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return (params["w"] * x).abs().square().sum()

    start = {"w": torch.tensor([1 + 1j, 2.0])}
    train = ltx.train_step(ltx.data_parallel(step, ltx.BaguaStrategy("decentralized")), SGD)
    state = train.init(start)
    for _ in range(2):
        x = torch.tensor([1.0, 2.0])
        state, _ = ltx.vmap(train, in_dims=(0 if state.step else None, 0))(state, x)
    w = start["w"] * (1 - 0.2 * x[:, None] ** 2)
    torch.testing.assert_close(state.params["w"], w.mean(0) - 0.2 * x[:, None] ** 2 * w)
    train = ltx.train_step(ltx.data_parallel(step, ltx.BaguaStrategy("low_precision_decentralized")), SGD)
    refuses(StrategyError, r"parameter 'w', complex64\[.*\], needs work on complex numbers", train.init, start)


def behind(algorithm_fields: dict[str, Any]) -> tuple[str, bool, float]:
    """Rank 1 goes back to an earlier state by itself. (what is raised, whether the state is kept, that it goes on)"""
    problem, rank = make_problem(0, 2, steps=4), int(ltx.axis_index())
    train = trainer("decentralized", communication_interval=2, **algorithm_fields)
    state = train.init({k: torch.tensor(v) for k, v in problem.start.items()})
    for step, batch in enumerate(problem.batches()):
        if step == 2 and rank == 1:
            state = replace(state, sync_state=replace(state.sync_state, step=0))
        before = ltx.tree.map(torch.clone, state.params)
        try:
            state, _ = train(state, *batch)
        except RankMismatchError as error:
            kept = all(map(torch.equal, ltx.tree.flatten(before)[0], ltx.tree.flatten(state.params)[0]))
            ltx.init()
            state = replace(state, sync_state=replace(state.sync_state, step=2))  # now they agree
            state, metrics = train(state, *batch)
            return str(error), kept, float(metrics.loss)
    raise AssertionError("the ranks' steps were mixed up without a word")


@pytest.mark.parametrize("sockets", [False, True], ids=["shared memory", "sockets"])
def test_weights_of_another_step_are_refused(sockets: bool, on_new_axis: OnNewAxis) -> None:
    (text, kept, loss), (text_1, kept_1, loss_1) = on_new_axis(
        lambda: behind({"peer_selection_mode": "shift_one"}), sockets=sockets
    )
    assert text.startswith(
        "rank 0: its parameters, at step 2, were averaged with those of rank 1, which was at its step 0. Ranks must"
    )
    assert text_1.startswith("rank 1: its parameters, at step 0, were averaged with those of rank 0, which was at its ")
    assert kept
    assert kept_1
    assert loss > 0
    assert loss_1 > 0


@pytest.mark.parametrize("fields", [{}, NODES], ids=str)
def test_means_over_different_steps_are_refused(fields: dict[str, Any], on_new_axis: OnNewAxis) -> None:
    for rank, (text, kept, _) in enumerate(on_new_axis(lambda: behind(fields))):
        step = 0 if rank else 2
        assert text.startswith(f"rank {rank}: its parameters, at step {step}, were averaged with others, which were at")
        assert kept


def fails_in_the_optimizer() -> tuple[list[str], float]:
    """Rank 1's optimizer raises, when its peer has all that it needs. What is raised, and a sum in the last world."""
    problem, rank, calls = make_problem(0, 2), int(ltx.axis_index()), []

    def descend(grads: Any, state: Any, params: Any) -> Any:
        calls.append(state)
        if rank == 1 and len(calls) == 3:
            raise BrokenError
        return ltx.tree.map(lambda g: -0.1 * g, grads), state

    optimizer = ltx.optim.from_functions(lambda params: (), descend)
    train = ltx.train_step(ltx.data_parallel(loss, ltx.BaguaStrategy("decentralized", **NODES)), optimizer)
    state, raised = train.init({k: torch.tensor(v) for k, v in problem.start.items()}), []
    while "RankMismatchError" not in raised:
        try:
            state, _ = train(state, *problem.batches()[0])
        except (BrokenError, DeadlockDetectedError, RankMismatchError) as error:
            raised.append(type(error).__name__)
            ltx.init()
    return raised, ltx.psum(torch.ones(())).item()


def test_a_rank_that_waits_in_the_next_step_is_told(on_new_axis: OnNewAxis) -> None:
    """And if both go on as if nothing had happened, one of them a step behind, both hear that they have parted."""
    (raised, works), (raised_1, works_1) = on_new_axis(fails_in_the_optimizer)
    assert raised == ["DeadlockDetectedError", "RankMismatchError"]
    assert raised_1 == ["BrokenError", "RankMismatchError"]
    assert works == works_1 == 2.0


ADAM = {"lr": 0.01, "betas": (0.8, 0.99), "weight_decay": 0.1}
NEVER = QAdam(warmup_steps=100, betas=ADAM["betas"])


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2)).double()


@pytest.mark.full(but=1)
@pytest.mark.parametrize("n", [2, 3])
def test_the_warm_up_is_adam_under_ddp_bit_for_bit(n: int, ranks: Ranks) -> None:
    """With torch's fused kernel, which ltx uses where there is one; its default differs in the last bits."""

    def run() -> Any:
        module, rank = net(), int(ltx.axis_index())
        ddp = DistributedDataParallel(net())
        theirs = torch.optim.Adam(ddp.parameters(), fused=True, **ADAM)
        step = ltx.data_parallel(lambda p, x: torch.func.functional_call(module, p, x).square().mean(), NEVER)
        train = ltx.train_step(step, optim.qadam(warmup_steps=100, **ADAM))
        xs = torch.randn(8, 5, 6, generator=torch.Generator().manual_seed(17 + rank)).double()
        state, _ = go_on(train, train.init(dict(module.named_parameters())), xs)
        loop_of_torch(theirs, lambda x: ddp(x).square().mean(), xs)
        return state.params, {name: p.detach() for name, p in ddp.module.named_parameters()}

    for mine, expected in ranks(n).run(run):
        if n == 2:
            assert all(torch.equal(mine[name], x) for name, x in expected.items())
        else:  # sums of three may be added up in another order
            torch.testing.assert_close(mine, expected)


def sent_by_qadam(strategy: QAdam, optimizer: optim.Optimizer) -> tuple[list[int], list[torch.dtype]]:
    """(bytes of each step's buckets, dtypes of the momenta)"""
    params = {"w": torch.randn(30, 40), "h": torch.randn(50).bfloat16()}
    step = ltx.data_parallel(lambda p, x: sum((x * p[k].float()).square().mean() for k in p), strategy)
    train = ltx.train_step(step, optimizer)
    found, traces = recorded(train, train.init(params), [torch.tensor(1.0 + int(ltx.axis_index()))] * 4)
    nbytes = [sum(event.nbytes for event in trace.buckets) for trace in traces]
    return nbytes, [entry["momentum"].dtype for _, entry in sorted(found.state.sync_state.leaves.items())]


def test_a_quarter_of_the_bytes_after_the_warm_up(ranks: Ranks) -> None:
    nbytes, dtypes = ranks(2).run(sent_by_qadam, QAdam(warmup_steps=2), optim.qadam(warmup_steps=2)).replicated()
    assert nbytes[0] == nbytes[1] == 1200 * 4 + 50 * 2
    assert nbytes[2] == nbytes[3] < 1200 + 50 + 2 * 2 * 8 + 1
    assert dtypes == [torch.float32, torch.float32], "momenta of half-precision parameters are kept in float32"


def test_the_momentum_and_the_optimizers_are_one(seed: int) -> None:
    """After the switch both hold the same numbers; the second moment stays."""
    step = ltx.data_parallel(lambda p, x: (p["w"] * x).square().sum(), QAdam(warmup_steps=2))
    train = ltx.train_step(step, optim.qadam(warmup_steps=2))
    state, frozen = train.init({"w": torch.randn(3)}), None
    for t in range(5):
        state, _ = train(state, torch.randn(3))
        momentum, adam = state.sync_state.leaves["w"]["momentum"], state.opt_state.per_param["w"]
        assert torch.equal(momentum, adam["exp_avg"]) == (t >= 1)
        # Adam writes into its own during the warm-up. After it, nobody writes into the one that both hold.
        assert (momentum.data_ptr() == adam["exp_avg"].data_ptr()) == (t >= 2)
        assert adam["step"].item() == state.opt_state.count == t + 1
        assert frozen is None or torch.equal(frozen, adam["exp_avg_sq"])
        frozen = adam["exp_avg_sq"].clone() if t == 1 else frozen


@pytest.mark.parametrize(
    "hook", [hooks.OneBit(), hooks.BF16(error_feedback=True), "fp16", hooks.PowerSGD(start_step=0)]
)
def test_momenta_by_another_hook(hook: Any, ranks: Ranks, seed: int) -> None:
    """Momenta are the same on every rank, what a hook keeps is each rank's own, and the loss falls."""
    strategy = QAdam(warmup_steps=2, momentum_hook=hook)

    def run(start: Tensor, target: Tensor) -> Any:
        step = ltx.data_parallel(lambda w, x: (w - x).square().sum(), strategy)
        found = train_on.trained(step, optim.qadam(0.01, warmup_steps=2), start, [target[int(ltx.axis_index())]] * 12)
        return found.params, found.state.sync_state.leaves, found.losses.tolist()

    (params, leaves, losses), (same, others, _) = ranks(2).run(
        run, torch.zeros(40, 30), 1 + 0.1 * torch.randn(2, 40, 30)
    )
    assert torch.equal(params, same)
    assert losses == sorted(losses, reverse=True)
    for path, state in leaves.items():
        assert torch.equal(state["momentum"], others[path]["momentum"])
        if "residual" in state:
            assert not torch.equal(state["residual"], others[path]["residual"])
    assert strategy.layout.sync_state == ("replicated" if hook == "fp16" else "per_rank")


def test_one_bit_sends_a_sixteenth_of_few_numbers(ranks: Ranks) -> None:
    strategy = QAdam(warmup_steps=2, momentum_hook=hooks.OneBit(block=128))
    nbytes, _ = ranks(2).run(sent_by_qadam, strategy, optim.qadam(warmup_steps=2)).rank(0)
    assert nbytes[2] == nbytes[3] < nbytes[1] / 16


@on_ranks(2, alone=True)
def test_weighted_losses_are_refused_once_momenta_travel() -> None:
    """What is divided by the sum of the weights, after the reduction, wouldn't be a gradient."""
    weighted = lambda w, x: ltx.Weighted((w * x).square().sum(), torch.tensor(float(len(x))))  # noqa: E731
    train = ltx.train_step(ltx.data_parallel(weighted, QAdam(warmup_steps=1)), optim.qadam(warmup_steps=1))
    for run, x in ((train, torch.ones(2)), (ltx.vmap(train, in_dims=(None, 0)), torch.ones(3, 2))):
        state, _ = run(train.init(torch.tensor(1.0)), x)
        run = train if run is train else ltx.vmap(train)
        with pytest.raises(
            UnsupportedError, match=re.escape("divide by the weights, which MeanMomentum(beta1=0.9) doesn't offer")
        ):
            run(state, x)


def test_hooks_that_dont_fit() -> None:
    with pytest.raises(StrategyError, match=r"^QAdam.momentum_hook needs a result that is a mean, which Adasum"):
        QAdam(warmup_steps=2, momentum_hook=hooks.Adasum())
    by_node = {"warmup_steps": 2, "hierarchical": True, "node_size": 2}
    with pytest.raises(StrategyError, match=r"needs a hook without per-parameter state, .* which OneBit\(\) doesn't"):
        QAdam(**by_node, momentum_hook=hooks.OneBit())
    assert QAdam(**by_node, momentum_hook=hooks.OneBit(error_feedback=False)).layout.sync_state == "replicated"


STEP = ltx.data_parallel(lambda w, x: (w * x).sum(), QAdam(warmup_steps=5))


NEEDS = "QAdam(warmup_steps=5) needs an ltx.optim.qadam with its warmup_steps and betas"


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (
            optim.from_torch(torch.optim.SGD, lr=0.1),
            f"{NEEDS}, not in a chain, as others take momenta for gradients, which from_torch(torch.optim.SGD, lr=0.1) "
            "doesn't offer: use",
        ),
        (optim.chain(optim.clip_by_global_norm(1.0), optim.qadam(warmup_steps=5)), NEEDS),
        (optim.qadam(warmup_steps=6), NEEDS),
        (optim.qadam(warmup_steps=5, betas=(0.5, 0.999)), NEEDS),
    ],
)
def test_other_optimizers_are_refused(optimizer: optim.Optimizer, text: str) -> None:
    assert said(StrategyError, ltx.train_step, STEP, optimizer).startswith(text)


@pytest.mark.parametrize("made", [ltx.DDPStrategy, ltx.HorovodStrategy, ltx.ZeroStrategy])
@pytest.mark.parametrize("chained", [False, True])
def test_other_strategies_refuse_its_optimizer(chained: bool, made: Callable[[], ltx.Strategy]) -> None:
    strategy = made()
    optimizer: optim.Optimizer = optim.qadam(warmup_steps=5)
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optimizer) if chained else optimizer
    assert said(
        StrategyError, lambda: ltx.train_step(ltx.data_parallel(lambda w, x: (w * x).sum(), strategy), optimizer)
    ) == (
        f"{type(strategy).__name__} needs an optimizer for gradients at every step, which {optimizer!r} doesn't "
        "offer: train with the optimizer's own strategy, or use another optimizer."
    )


def test_states_that_have_counted_other_steps_are_refused() -> None:
    train = ltx.train_step(STEP, optim.qadam(warmup_steps=5))
    first = train.init(torch.ones(2))
    later, _ = train(train.init(torch.ones(2)), torch.ones(2))
    with pytest.raises(StrategyError, match="optimizer's state has counted 0 steps and the communication state 1, so"):
        train(replace(later, opt_state=first.opt_state), torch.ones(2))
