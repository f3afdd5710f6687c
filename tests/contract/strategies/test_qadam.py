"""QAdam against DDP with torch's Adam during its warm-up; what it sends after; what it refuses."""

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
from ltx.errors import StrategyError, UnsupportedError
from tests.inside import QAdam
from tests.kinds import Ranks
from tests.train_on import on_ranks, said, trained

ADAM = {"lr": 0.01, "betas": (0.8, 0.99), "weight_decay": 0.1}
NEVER = QAdam(warmup_steps=100, betas=ADAM["betas"])


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2)).double()


def mean_loss(module: nn.Module) -> Callable[..., Tensor]:
    return lambda p, x: torch.func.functional_call(module, p, x).square().mean()


@pytest.mark.full(but=1)
@pytest.mark.parametrize("n", [2, 3])
def test_the_warm_up_is_adam_under_ddp_bit_for_bit(n: int, ranks: Ranks) -> None:
    """With torch's fused kernel, which ltx uses where there is one; its default differs in the last bits."""

    def run() -> Any:
        module, rank = net(), int(ltx.axis_index())
        ddp = DistributedDataParallel(net())
        theirs = torch.optim.Adam(ddp.parameters(), fused=True, **ADAM)
        train = ltx.train_step(ltx.data_parallel(mean_loss(module), NEVER), optim.qadam(warmup_steps=100, **ADAM))
        state = train.init(dict(module.named_parameters()))
        for step in range(8):
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(17 * step + rank)).double()
            state, _ = train(state, x)
            theirs.zero_grad()
            ddp(x).square().mean().backward()
            theirs.step()
        return state.params, {name: p.detach() for name, p in ddp.module.named_parameters()}

    for mine, expected in ranks(n).run(run):
        if n == 2:
            assert all(torch.equal(mine[name], x) for name, x in expected.items())
        else:  # sums of three may be added up in another order
            torch.testing.assert_close(mine, expected)


def sent(strategy: QAdam, optimizer: optim.Optimizer) -> tuple[list[int], list[torch.dtype]]:
    """(bytes of each step's buckets, dtypes of the momenta)"""
    params = {"w": torch.randn(30, 40), "h": torch.randn(50).bfloat16()}
    step = ltx.data_parallel(lambda p, x: sum((x * p[k].float()).square().mean() for k in p), strategy)
    train = ltx.train_step(step, optimizer)
    state, nbytes = train.init(params), []
    for _ in range(4):
        with ltx.profile.record() as trace:
            state, _ = train(state, torch.tensor(1.0 + int(ltx.axis_index())))
        nbytes.append(sum(event.nbytes for event in trace.buckets))
    return nbytes, [entry["momentum"].dtype for _, entry in sorted(state.sync_state.leaves.items())]


def test_a_quarter_of_the_bytes_after_the_warm_up(ranks: Ranks) -> None:
    nbytes, dtypes = ranks(2).run(sent, QAdam(warmup_steps=2), optim.qadam(warmup_steps=2)).replicated()
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
        mine = target[int(ltx.axis_index())]
        found = trained(step, optim.qadam(0.01, warmup_steps=2), start, [mine] * 12)
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
    nbytes, _ = ranks(2).run(sent, strategy, optim.qadam(warmup_steps=2)).rank(0)
    assert nbytes[2] == nbytes[3] < nbytes[1] / 16


def weighted(w: Tensor, x: Tensor) -> ltx.Weighted:
    return ltx.Weighted((w * x).square().sum(), torch.tensor(float(len(x))))


@on_ranks(2, alone=True)
def test_weighted_losses_are_refused_once_momenta_travel() -> None:
    """What is divided by the sum of the weights, after the reduction, wouldn't be a gradient."""
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
