"""The average in the optimizer's state, against torch's AveragedModel."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ltx
from ltx.errors import OptimError, StrategyError
from ltx.optim import averaged, chain, clip_by_global_norm, ema, from_torch, partition
from tests.contract.optim.cases import clone, same_bits
from tests.kinds import Ranks
from tests.train_on import refuses, trained
from tests.twins.training import sgd

adamw = from_torch(AdamW, lr=1e-2)


def loss_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return (x @ params["weight"].t() + params["bias"]).square().mean()


@pytest.mark.parametrize("donate", [True, False])
def test_as_torchs(donate: bool, seed: int) -> None:
    net = torch.nn.Linear(4, 3)
    params = {name: p.detach().clone() for name, p in net.named_parameters()}
    model = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    model.update_parameters(net)  # its first call copies
    optimizer, made = SGD(net.parameters(), lr=0.1), ema(sgd(0.1), 0.9)
    state = made.init(params)
    for _ in range(3):
        for p in net.parameters():
            p.grad = torch.randn_like(p)
        grads = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
        before = clone((params, state))
        after, next_state = made.apply(grads, state, params, donate=donate)
        assert donate or same_bits(before, (params, state))
        params, state = after, next_state
        optimizer.step()
        model.update_parameters(net)
    assert same_bits(params, {name: p.detach() for name, p in net.named_parameters()})
    torch.testing.assert_close(averaged(state), {n: p.detach() for n, p in model.module.named_parameters()})


def test_update_averages_what_the_parameters_become(seed: int) -> None:
    made, params = ema(sgd(0.5), 0.5), {"w": torch.randn(3)}
    updates, state = made.update({"w": torch.ones(3)}, made.init(params), params)
    torch.testing.assert_close(averaged(state)["w"], params["w"] + 0.5 * updates["w"])


LABELS = {"bias": "0", "*": "1"}
#: Each group's average of its own, at any depth; with what one optimizer of all would have.
IN_GROUPS = {
    "one decay": partition({"0": ema(sgd(0.1), 0.8), "1": ema(adamw, 0.8)}, LABELS),
    "in a chain": chain(clip_by_global_norm(1e6), partition({"0": ema(sgd(0.1), 0.8), "1": ema(adamw, 0.8)}, LABELS)),
    "nested": partition(
        {
            "0": ema(sgd(0.1), 0.8),
            "1": partition({"w": ema(chain(clip_by_global_norm(1e6), adamw), 0.8)}, {"*": "w"}),
        },
        LABELS,
    ),
}


def in_groups(name: str, overlap: Any) -> tuple[Any, Any]:
    first, x = ltx.broadcast(({"weight": torch.randn(3, 4), "bias": torch.randn(3)}, torch.randn(8, 4)))
    found = []
    for made in (IN_GROUPS[name], ema(partition({"0": sgd(0.1), "1": adamw}, LABELS), 0.8)):
        state, _ = trained(ltx.data_parallel(loss_fn), made, clone(first), [ltx.shard(x)] * 3, overlap=overlap)
        found.append(dict(averaged(state.opt_state)))
    return found[0], found[1]


@pytest.mark.parametrize(("name", "overlap"), [(name, "backward") for name in IN_GROUPS] + [("one decay", "update")])
def test_averages_of_groups_are_those_of_all(name: str, overlap: str, ranks: Ranks, seed: int) -> None:
    for found, expected in (in_groups(name, overlap), *ranks(2).run(in_groups, name, overlap)):
        assert None not in found.values()
        torch.testing.assert_close(found, expected)


def test_groups_without_an_average_and_frozen_parameters(seed: int) -> None:
    params = {"weight": torch.randn(3, 4), "bias": torch.randn(3)}
    some = partition({"0": adamw, "1": ema(adamw, 0.9)}, LABELS)
    for made, of in ((some, lambda s: s), (chain(clip_by_global_norm(1.0), some), lambda s: s[1])):
        state = made.init(params)
        refuses(OptimError, r"the parameters of '0' have no average, .* ema\(partition", averaged, state)
        assert same_bits(averaged(of(state)["1"]), {"weight": params["weight"], "bias": None})
    frozen = {"weight": params["weight"], "bias": None}
    each = partition({"0": ema(adamw, 0.9), "1": ema(adamw, 0.9)}, LABELS)
    assert same_bits(averaged(each.init(frozen)), frozen)


def test_averages_of_other_trees_are_not_put_together(seed: int) -> None:
    states = [ema(adamw, 0.9).init({name: torch.zeros(1)}) for name in "ab"]
    refuses(OptimError, "holds 2 averages, which aren't of groups of one tree", averaged, states)


def test_is_found_wherever_it_is_and_refused_where_it_cant_be(seed: int) -> None:
    params = {"w": torch.zeros(2)}
    made = ema(adamw, 0.9)
    assert pickle.loads(pickle.dumps(made)) == made
    assert repr(made) == "ema(from_torch(torch.optim.AdamW, lr=0.01), 0.9)"
    inside = partition({"0": made}, {"*": "0"})
    assert same_bits(averaged(inside.init(params)), params)
    refuses(OptimError, "holds no average", averaged, adamw.init(params))
    refuses(OptimError, r"decay must be from 0 to 1, got 1\.5", ema, adamw, 1.5)
    refuses(OptimError, "expected an optimizer", ema, AdamW, 0.9)
    refuses(OptimError, "must come last", chain, made, clip_by_global_norm(1.0))
    with pytest.raises(StrategyError, match="ZeroStrategy needs an elementwise update"):
        ltx.train_step(ltx.data_parallel(loss_fn, ltx.ZeroStrategy()), made)
