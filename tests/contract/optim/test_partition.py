"""Groups of parameters, against torch's own optimizers on each group."""

from __future__ import annotations

import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adafactor, AdamW

import ltx
from ltx.errors import OptimError, StrategyError
from ltx.optim import chain, clip_by_global_norm, from_functions, from_torch, identity, masked, partition
from tests.contract.optim.cases import clone, same_bits
from tests.contract.optim.test_opaque import Lion
from tests.kinds import Params, Ranks
from tests.train_on import refuses

adamw, sgd = from_torch(AdamW, lr=1e-2, weight_decay=0.1), from_torch(SGD, lr=0.1, momentum=0.9)
BIASES = {"*bias": "biases", "*": "others"}
grouped = partition({"biases": sgd, "others": adamw}, BIASES)
NET = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def label(path: str) -> str:
    return "biases" if path.endswith("bias") else "others"


def loss_fn(params: Params, x: Tensor, y: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(ltx.functional_call(NET, params, (x,)), y)


def problem() -> tuple[Params, Tensor, Tensor]:
    """Rank 0's, on every rank."""
    made: tuple[Params, Tensor, Tensor] = ltx.broadcast(
        ({name: torch.randn_like(p) for name, p in NET.named_parameters()}, torch.randn(16, 4), torch.randint(3, (16,)))
    )
    return made


@pytest.mark.parametrize("labels", [BIASES, label], ids=["patterns", "function"])
@pytest.mark.parametrize("donate", [True, False])
def test_each_group_is_as_alone(donate: bool, labels: Any, seed: int) -> None:
    made = partition({"biases": sgd, "others": adamw}, labels)
    params, _, _ = problem()
    state = made.init(params)
    parts = {group: {name: p.clone() for name, p in params.items() if label(name) == group} for group in state}
    alone = {group: member.init(parts[group]) for group, member in (("biases", sgd), ("others", adamw))}
    for turn in range(3):
        grads: Any = {name: torch.randn_like(p) for name, p in params.items()}
        grads["0.bias"] = grads["1.weight"] = None if turn == 1 else grads["0.bias"]
        grads["1.weight"] = None if turn == 1 else torch.randn(8)
        before = clone((params, state))
        after, next_state = made.apply(grads, state, params, donate=donate)
        assert (after is params) == donate
        assert donate or same_bits(before, (params, state))
        for group, member in (("biases", sgd), ("others", adamw)):
            own = {name: grads[name] for name in parts[group]}
            parts[group], alone[group] = member.apply(own, alone[group], parts[group])
        assert same_bits(after, {**parts["biases"], **parts["others"]})
        params, state = after, next_state
    assert state["others"].count == 3


def test_clipping_before_takes_the_norm_of_all_and_inside_that_of_the_group() -> None:
    params, grads = {"a": torch.zeros(1), "b": torch.zeros(1)}, {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    plain, clip = from_torch(SGD, lr=1.0), clip_by_global_norm(1.0)
    before = chain(clip, partition({"0": plain, "1": plain}, {"a": "0", "b": "1"}))
    inside = partition({"0": chain(clip, plain), "1": plain}, {"a": "0", "b": "1"})
    for made, expected in ((before, (-0.6, -0.8)), (inside, (-1.0, -4.0))):
        after, _ = made.apply(grads, made.init(params), params)
        torch.testing.assert_close(torch.cat([after["a"], after["b"]]), torch.tensor(expected), rtol=1e-5, atol=0)


def test_horovod_scales_the_rate_of_each(ranks: Ranks, seed: int) -> None:
    def moved(made: Any, scale: bool) -> Params:
        params = {"a": torch.zeros(1), "b": torch.zeros(1)}
        step = ltx.data_parallel(lambda p: p["a"].sum() + p["b"].sum(), ltx.HorovodStrategy(scale_lr=scale))
        state, _ = ltx.train_step(step, made)(ltx.train_step(step, made).init(params))
        return dict(state.params)

    made = partition({"0": from_torch(SGD, lr=1.0), "1": from_torch(SGD, lr=0.25)}, {"a": "0", "b": "1"})
    found = ranks(2).run(moved, made, True)[0]
    assert [found["a"].item(), found["b"].item()] == [-2.0, -0.5]


def test_is_a_value() -> None:
    assert pickle.loads(pickle.dumps(grouped)) == grouped
    assert grouped != partition({"biases": sgd, "others": adamw}, label)
    assert repr(partition({"0": sgd}, {"*": "0"})) == (
        "partition({'0': from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)}, {'*': '0'})"
    )
    assert grouped.leafwise
    assert grouped.elementwise
    assert not partition({"0": sgd, "1": from_torch(Adafactor)}, {"a": "0", "*": "1"}).elementwise


@pytest.mark.parametrize(
    ("optimizers", "labels", "text"),
    [
        ({"0": sgd}, {"a": "0"}, "no pattern of labels fits b"),
        ({"0": sgd}, {"c*": "0", "*": "0"}, "labels: 'c*' fits no parameter. Their paths: a, b."),
        ({"0": sgd}, {"a": "1", "*": "0"}, "the label of 'a' is '1', and there are optimizers for ['0']"),
        ({"0": sgd}, lambda path: None, "the label of 'a' is None"),
        ({"0": sgd}, {"*": 0}, "labels are a dict by patterns of paths"),
        ({0: sgd}, {"*": "0"}, "labels must be strings, got 0"),
        ({"0": sgd}, ["a"], "labels are a dict by patterns of paths, or a function, got ['a']"),
        ({"0": SGD}, {"*": "0"}, "expected optimizers, but that of '0' is <class"),
        ({}, {"*": "0"}, "expected optimizers by label, got {}"),
        ({"0": ltx.optim.qadam(1e-3, warmup_steps=2)}, {"*": "0"}, "is a part of"),
    ],
)
def test_refused(optimizers: Any, labels: Any, text: str) -> None:
    with pytest.raises(OptimError, match=re.escape(text)):
        partition(optimizers, labels).init({"a": torch.zeros(1), "b": torch.zeros(1)})


def test_nothing_may_follow_a_partition_of_optimizers() -> None:
    refuses(OptimError, "must come last in a chain", chain, grouped, identity(), clip_by_global_norm(1.0))
    assert chain(partition({"0": clip_by_global_norm(1.0)}, {"*": "0"}), sgd).init({"a": torch.zeros(1)})


@pytest.mark.parametrize(
    "transform",
    [
        identity(),
        clip_by_global_norm(1.0),
        ltx.optim.measure_global_norm(),
        ltx.optim.clip_by_value(1.0),
        chain(clip_by_global_norm(1.0), ltx.optim.clip_by_value(1.0)),
        masked(clip_by_global_norm(1.0), "*bias"),
    ],
    ids=repr,
)
def test_gradients_are_no_updates_beside_an_optimizer(transform: Any) -> None:
    labels = {"a": "trained", "b": "frozen"}
    for made in (sgd, chain(clip_by_global_norm(1.0), sgd), from_torch(Lion)):
        for members in ({"trained": made, "frozen": transform}, {"frozen": transform, "trained": made}):
            with pytest.raises(OptimError, match=r"for 'frozen', gives gradients .* uphill\. .* trainable=") as caught:
                partition(members, labels)
            assert f"chain({transform}, optimizer)" in str(caught.value)
    with pytest.raises(OptimError, match="uphill"):
        partition({"trained": partition({"0": sgd}, {"*": "0"}), "frozen": transform}, labels)


def test_transformations_in_a_partition_of_their_own_and_functions_that_may_be_optimizers(seed: int) -> None:
    params, grads = {"a": torch.zeros(2), "b": torch.zeros(2)}, {"a": torch.ones(2), "b": torch.ones(2)}
    still = from_functions(lambda params: (), lambda grads, state, params: ({"a": None, "b": None}, state))
    mixed = partition({"trained": sgd, "functions": still}, {"a": "trained", "b": "functions"})
    after, _ = mixed.apply(grads, mixed.init(params), params)
    assert same_bits(after, {"a": torch.full((2,), -0.1), "b": torch.zeros(2)})
    transforms = partition({"0": identity(), "1": ltx.optim.clip_by_value(0.5)}, {"a": "0", "b": "1"})
    assert (transforms.moves_params, mixed.moves_params, still.moves_params) == (False, True, None)
    made = chain(transforms, sgd)
    after, _ = made.apply(grads, made.init(params), params)
    assert same_bits(after, {"a": torch.full((2,), -0.1), "b": torch.full((2,), -0.05)})


def test_masked() -> None:
    grads = {"head": torch.tensor([3.0, 4.0]), "body": torch.tensor([3.0, 4.0])}
    for where in ("head", ["head"], ["h*", "*d"]):
        made = masked(clip_by_global_norm(1.0), where)
        found, _ = made.update(grads, made.init(grads), grads)
        torch.testing.assert_close(found["head"], torch.tensor([0.6, 0.8]), rtol=1e-5, atol=0)
        assert found["body"] is grads["body"]
    assert masked(clip_by_global_norm(1.0), "*").init(grads)
    double = from_functions(lambda params: (), lambda grads, state, params: (grads, state), elementwise=True)
    assert masked(double, "head").elementwise
    for bad, text in ((sgd, "train only some parameters"), (chain(clip_by_global_norm(1.0), sgd), "train only some")):
        refuses(OptimError, text, masked, bad, "head")
    refuses(OptimError, "where must be a pattern", masked, double, 3)
    refuses(OptimError, "fits no parameter", masked(double, "tail").init, grads)


def by_shape(params: Params) -> dict[str, str]:
    return {name: "matrices" if p.dim() == 2 else "rest" for name, p in params.items()}


def test_labels_may_name_frozen_parameters(ranks: Ranks, seed: int) -> None:
    def trained() -> Any:
        params, x, y = problem()
        made = partition({"matrices": sgd, "rest": adamw}, by_shape(params))
        train = ltx.train_step(ltx.data_parallel(loss_fn), made, trainable=["3.*"])
        state, _ = train(train.init(params), *ltx.shard((x, y)))
        grads = torch.func.grad(loss_fn)(params, x, y)
        expected = {**params}
        for name, optimizer in (("3.weight", sgd), ("3.bias", adamw)):
            expected[name], _ = optimizer.apply(grads[name], optimizer.init(params[name]), params[name])
        return dict(state.params), expected

    for found, expected in (trained(), *ranks(2).run(trained)):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    with pytest.raises(OptimError, match=r"labels: '4\.weight' fits no parameter"):
        partition({"matrices": sgd, "rest": adamw}, {"4.weight": "rest", "*": "rest"}).init(
            {"a": None, "b": torch.ones(1)}
        )


@pytest.mark.slow_compile
@pytest.mark.full
def test_frozen_parameters_in_a_compiled_step(seed: int) -> None:
    params, x, y = problem()
    made = partition({"matrices": sgd, "rest": adamw}, by_shape(params))
    train = ltx.train_step(ltx.data_parallel(loss_fn), made, trainable=["3.*"])
    compiled, _ = torch.compile(train, backend="aot_eager")(train.init(params), x, y)
    eager, _ = train(train.init(params), x, y)
    torch.testing.assert_close(dict(compiled.params), dict(eager.params), rtol=1e-4, atol=1e-6)


def test_a_class_of_another_author_for_a_group() -> None:
    made = partition({"others": from_torch(Lion), "biases": adamw}, BIASES)
    assert not made.leafwise
    with pytest.raises(StrategyError, match="needs an update of each parameter by itself"):
        ltx.train_step(ltx.data_parallel(loss_fn), made, overlap="update")
