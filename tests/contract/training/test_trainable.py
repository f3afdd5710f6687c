"""Frozen parameters, tied ones, and modules whose tensors a state takes over."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.func import functional_call

import ltx
from ltx.errors import OptimError, StepError, TreeError, UnsupportedError
from tests.train_on import go_on, on_ranks, refuses, trained
from tests.twins.training import adamw, sgd


def model() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def loss_of(net: torch.nn.Module) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    return lambda params, x: functional_call(net, params, (x,)).square().mean()


STRATEGIES = [
    ltx.DDPStrategy(),
    ltx.DDPStrategy(comm_hook=ltx.hooks.OneBit()),
    ltx.ZeroStrategy(),
    ltx.LocalSGDStrategy(2),
    ltx.BaguaStrategy("decentralized"),
    ltx.BaguaStrategy("low_precision_decentralized"),
    ltx.HorovodStrategy(op="adasum"),
]


@on_ranks(2, alone=True)
def test_frozen_parameters_stay(seed: int) -> None:
    """On every kind of strategy and overlap, with an optimizer that decays weights; what is trained is trained."""
    torch.manual_seed(seed)
    x = torch.randn(4, 6, 4)[ltx.axis_index()]
    for strategy in STRATEGIES:
        for overlap in ("backward", "update"):
            by_bucket = strategy.updates_in_buckets or strategy.communicates_after_update(0)
            if overlap != "backward" and not by_bucket:
                continue
            net = model()
            net[0].requires_grad_(False)
            optimizer = adamw(lr=0.1, weight_decay=0.5)
            try:
                train = ltx.train_step(ltx.data_parallel(loss_of(net), strategy), optimizer, overlap=overlap)
            except ltx.errors.StrategyError:
                continue
            state = train.init(dict(net.named_parameters()))
            before = {name: value.clone() for name, value in state.params.items()}
            state, _ = go_on(train, state, [x] * 3)
            frozen = {name for name in before if torch.equal(before[name], state.params[name])}
            assert frozen == {"0.weight", "0.bias"}, (strategy, overlap)
            paths = ltx.tree.leaf_paths((state.opt_state, state.sync_state))
            assert not any("0.weight" in path or "0.bias" in path for path in paths), (strategy, overlap, paths)


def test_on_simulated_ranks(seed: int) -> None:
    net = model()
    net[2].requires_grad_(False)
    train = ltx.train_step(ltx.data_parallel(loss_of(net)), sgd(lr=0.1))
    state, x = train.init(dict(net.named_parameters())), torch.randn(3, 6, 4)
    after = ltx.vmap(lambda x: train(state, x)[0].params)(x)
    whole, _ = train(state, x.flatten(0, 1))  # which no step of a simulated rank has taken over
    for name, value in whole.params.items():
        torch.testing.assert_close(after[name], value.expand(3, *value.shape))


@pytest.mark.parametrize(
    ("trainable", "moved"),
    [("2.*", {"2.weight", "2.bias"}), (["*.bias"], {"0.bias", "2.bias"}), (lambda path: "0" in path, {"0.bias"})],
)
def test_trainable(trainable: Any, moved: set[str]) -> None:
    net = model()
    net[0].weight.requires_grad_(False)
    own = dict(net.named_parameters())
    after, _ = trained(loss_of(net), sgd(lr=0.1), own, [torch.randn(6, 4)], trainable=trainable)
    assert {name for name, p in net.named_parameters() if not torch.equal(p, after.params[name])} == moved
    assert {path.removeprefix("params.") for path in ltx.tree.leaf_paths(after) if path.startswith("params")} == moved


def test_plain_tensors_are_all_trained() -> None:
    """A dict of tensors without gradients says nothing of what is frozen; beside some with gradients it does."""
    train = ltx.train_step(ltx.data_parallel(lambda p, x: (p["a"] * p["b"] * x).sum()), sgd(lr=1.0))
    for says, b in ((False, 0.0), (True, 1.0)):
        after, _ = train(train.init({"a": torch.ones(2, requires_grad=says), "b": torch.ones(2)}), torch.ones(2))
        assert [after.params[name].tolist() for name in "ab"] == [[0.0, 0.0], [b, b]]


@pytest.mark.parametrize(
    ("trainable", "text"),
    [
        ("3.*", r"trainable='3\.\*' fits no parameter\. Their paths: 0\.bias, 0\.weight, "),
        (lambda _: False, "every parameter is frozen, so there is nothing to train"),
        (3, r"trainable must be a pattern of paths, a list of patterns, a function of a path, or None, got 3"),
    ],
)
def test_what_is_refused(trainable: Any, text: str) -> None:
    step, params = ltx.data_parallel(loss_of(model())), dict(model().named_parameters())
    refuses(StepError, text, lambda: ltx.train_step(step, sgd(), trainable=trainable).init(params))


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.embedding(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_state_of_fewer_parameters_and_a_scripted_module() -> None:
    net = model()
    step = ltx.data_parallel(loss_of(net))
    few, whole = (ltx.train_step(step, adamw(0.1), trainable=part) for part in (["2.*"], ["*"]))
    fewer = copy.deepcopy(few.init(net).opt_state)
    state = replace(whole.init(net), opt_state=fewer)
    refuses(OptimError, "the state has nothing for '0.bias', which was frozen when", whole, state, torch.ones(3, 4))
    refuses(UnsupportedError, "train.init can't put tensors into a", whole.init, torch.jit.script(net))


def test_tied_leaves_are_refused_by_name_and_kept_by_one_name() -> None:
    net = Tied()
    train = ltx.train_step(ltx.data_parallel(loss_of(net)), sgd(lr=0.1))
    text = r"leaves 'embedding\.weight' and 'head\.weight' are one tensor \(tied weights\)"
    refuses(TreeError, text, train.init, dict(net.named_parameters(remove_duplicate=False)))
    x = torch.tensor([1, 2])
    state, _ = train(train.init(dict(net.named_parameters())), x)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(x).square().mean().backward()
    optimizer.step()
    torch.testing.assert_close(state.params["embedding.weight"], net.head.weight.detach())


def test_to_module_refuses_another_model() -> None:
    for name, text in (
        ("x", "the state has 'x', and Linear has no parameter or buffer of that name"),
        ("bias", r"'bias' has shape \[3\] in the state, and \[2\] in the Linear"),
    ):
        refuses(TreeError, text, ltx.to_module, torch.nn.Linear(2, 2), {name: torch.ones(3)})


def test_to_module_takes_a_state_dict_with_all_names_of_tied_parameters() -> None:
    net, given = Tied(), {name: torch.full((5, 3), torch.nan) for name in ("embedding.weight", "head.weight")}
    for values in ({name: torch.full((5, 3), 2.0) for name in given}, dict(Tied().state_dict()), given):
        back = ltx.to_module(net, values)
        assert back.head.weight is back.embedding.weight
        torch.testing.assert_close(back.head.weight.detach(), values["head.weight"], equal_nan=True)
    given["head.weight"] = torch.zeros(5, 3)
    text = r"'embedding\.weight' and 'head\.weight' are one parameter of the module .* Give one of them"
    refuses(TreeError, text, ltx.to_module, net, given)


def test_a_module_given_its_values_in_inference_mode_can_be_trained() -> None:
    net = torch.nn.Linear(2, 2)
    with torch.inference_mode():
        ltx.to_module(net, {"weight": torch.ones(2, 2), "bias": torch.zeros(2)})
    net(torch.ones(1, 2)).sum().backward()
    assert net.weight.grad is not None


@on_ranks(2)
def test_values_of_the_meta_device_are_named() -> None:
    with torch.device("meta"):
        net = torch.nn.Linear(2, 2)
    train = ltx.train_step(ltx.data_parallel(loss_of(net)), sgd())
    for given, text in ((net, r"train\.init\(module\): leaf 'bias'"), (dict(net.named_parameters()), "leaf 'bias'")):
        refuses(TreeError, f"{text} is on the meta device, and its values are needed", train.init, given)
