"""Groups of parameters and `start_step`, in one call or each alone, against torch's own optimizers and DDP."""

from __future__ import annotations

import copy
import pickle
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import ASGD, SGD, Adafactor, AdamW, Rprop

import ltx
from ltx.errors import OptimError
from ltx.extend import optimizers
from ltx.optim import (
    adjust,
    adjustable,
    chain,
    clip_by_global_norm,
    from_functions,
    from_torch,
    identity,
    masked,
    partition,
    warmup_cosine,
)
from tests.contract.optim.cases import clone, same_bits
from tests.contract.optim.test_opaque import Lion
from tests.kinds import Params, Ranks
from tests.train_on import go_on, on_ranks, refuses, trained

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
    return ltx.broadcast(
        ({name: torch.randn_like(p) for name, p in NET.named_parameters()}, torch.randn(16, 4), torch.randint(3, (16,)))
    )


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


def test_it_works_leaf_by_leaf_if_all_do() -> None:
    assert grouped.leafwise
    assert not partition({"others": from_torch(Lion), "biases": adamw}, BIASES).leafwise
    assert grouped.elementwise
    assert not partition({"0": sgd, "1": from_torch(Adafactor)}, {"a": "0", "*": "1"}).elementwise


@pytest.mark.parametrize(
    ("optimizers", "labels", "text"),
    [
        ({"0": sgd}, {"a": "0"}, "labels: no pattern fits b"),
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


@on_ranks(2, alone=True)
def test_labels_may_name_frozen_parameters(seed: int) -> None:
    params, x, y = problem()
    made = partition({"matrices": sgd, "rest": adamw}, by_shape(params))
    train = ltx.train_step(ltx.data_parallel(loss_fn), made, trainable=["3.*"])
    state, _ = train(train.init(params), *ltx.shard((x, y)))
    grads = torch.func.grad(loss_fn)(params, x, y)
    expected = {**params}
    for name, optimizer in (("3.weight", sgd), ("3.bias", adamw)):
        expected[name], _ = optimizer.apply(grads[name], optimizer.init(params[name]), params[name])
    torch.testing.assert_close(dict(state.params), expected, rtol=1e-4, atol=1e-6)
    made = partition({"matrices": sgd, "rest": adamw}, {"4.weight": "rest", "*": "rest"})
    refuses(OptimError, r"labels: '4\.weight' fits no parameter", made.init, {"a": None, "b": torch.ones(1)})


STEPS, NAMES = 5, [name for name, _ in NET.named_parameters()]
RATE = warmup_cosine(0.1, 1, 4, 0.02)
DECAYED = {"*bias": {"weight_decay": 0.0}, "3.*": {"lr": warmup_cosine(0.05, 3, 4, 0.01), "start_step": 2}, "*": {}}
LATE = {"3.weight": {"start_step": 2}, "*": {}}
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, dict[str, Any]]]] = {
    "AdamW": (AdamW, {"weight_decay": 0.1, "fused": True}, DECAYED),
    "SGD": (SGD, {"weight_decay": 0.1, "momentum": 0.9, "dampening": 0.5, "fused": False}, DECAYED),
    "ASGD": (ASGD, {"weight_decay": 0.1}, DECAYED),
    "Rprop": (Rprop, {}, LATE),
    "another author's": (Lion, {}, LATE),
}


def group_of(name: str, groups: Any) -> str:
    return next(pattern for pattern in groups if fnmatch(name, pattern))


def named(groups: Any, pairs: bool = False) -> list[dict[str, Any]]:
    """The same groups as torch's scripts have them: by names, or by pairs of ``named_parameters()``."""
    return [
        {"params": [(n, p) if pairs else n for n, p in NET.named_parameters() if group_of(n, groups) == g], **own}
        for g, own in groups.items()
    ]


SPELLED: dict[str, Any] = {
    "patterns": lambda groups: groups,
    "without the rest": lambda groups: {pattern: own for pattern, own in groups.items() if pattern != "*"},
    "names": named,
    "pairs": lambda groups: named(groups, pairs=True),
}


class Loop:
    """torch's optimizer with these groups, in a loop where the gradients of a late group are None at first."""

    def __init__(self, case: str, own: Params, lr: Any = RATE) -> None:
        cls, shared, self.groups = CASES[case]
        self.own, self.late = own, {name: self.groups[group_of(name, self.groups)].get("start_step", 0) for name in own}
        self.rates = [group.get("lr", lr) for group in self.groups.values()]
        groups = [
            {"params": [p for name, p in own.items() if group_of(name, self.groups) == pattern]}
            | {key: x for key, x in settings.items() if key not in ("lr", "start_step")}
            for pattern, settings in self.groups.items()
        ]
        self.optimizer = cls(groups, lr=lr(0), **shared)

    def step(self, count: int) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate(count)
        for name, p in self.own.items():
            p.grad = None if count < self.late[name] else p.grad
        self.optimizer.step()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("spelled", SPELLED)
@pytest.mark.parametrize("how", ["apply", "donate", "leaves"])
def test_the_same_bits_as_torchs_groups(case: str, spelled: str, how: str, seed: int) -> None:
    cls, shared, groups = CASES[case]
    made = from_torch(cls, SPELLED[spelled](groups), lr=RATE, **shared)
    assert pickle.loads(pickle.dumps(made)) == made
    if how == "leaves" and not made.leafwise:
        return
    params, _, _ = problem()
    loop, state = Loop(case, {name: p.clone().requires_grad_() for name, p in params.items()}), made.init(params)
    for count in range(STEPS):
        grads = {name: torch.randn_like(p) for name, p in params.items()}
        for name, p in loop.own.items():
            p.grad = grads[name].clone()
        loop.step(count)
        if how == "leaves":
            leaves = [optree.tree_leaves(x) for x in (grads, params)]
            made.update_leaves(leaves[0], made.leaf_states(state, params), leaves[1], state)
            state = optimizers.advanced(state)
        else:
            params, state = made.apply(grads, state, params, donate=how == "donate")
        assert same_bits(params, {name: p.detach() for name, p in loop.own.items()}), count
    if case == "AdamW":  # its own count begins with the first real update
        label = next(label for label, own in state.items() if own.per_param["3.weight"])
        assert state[label].per_param["3.weight"]["step"] == STEPS - 2


WAYS = [("ddp", "backward"), ("ddp", "update"), ("zero", "backward"), ("zero", "update")]
STRATEGIES = {"ddp": ltx.DDPStrategy(bucket_bytes=256), "zero": ltx.ZeroStrategy(bucket_bytes=256)}


def beside(spelled: str, strategy: str, overlap: str, folder: Path) -> None:
    """Trains, from a checkpoint before the late group starts, as DDP does."""
    cls, shared, groups = CASES["AdamW"]
    params, *batch = problem()
    x, y = ltx.shard(tuple(batch))
    net = copy.deepcopy(NET)
    net.load_state_dict(params)
    parallel = DistributedDataParallel(net) if dist.is_initialized() and dist.get_world_size() > 1 else net
    loop = Loop("AdamW", dict(net.named_parameters()))
    for count in range(STEPS):
        loop.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(parallel(x), y).backward()
        loop.step(count)
    made = from_torch(cls, SPELLED[spelled](groups), lr=RATE, **shared)
    train = ltx.train_step(ltx.data_parallel(loss_fn, STRATEGIES[strategy]), made, overlap=overlap)
    state, _ = go_on(train, train.init(params), [(x, y)])
    ltx.checkpoint.save(folder, state)
    state, _ = go_on(train, ltx.checkpoint.load(folder, train.init(params)).state, [(x, y)] * (STEPS - 1))
    expected = {name: p.detach() for name, p in net.named_parameters()}
    torch.testing.assert_close(dict(state.params), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.covering(1)
@pytest.mark.parametrize("spelled", SPELLED)
@pytest.mark.parametrize(("strategy", "overlap"), WAYS)
def test_as_ddp_with_gradients_of_none(
    spelled: str, strategy: str, overlap: str, ranks: Ranks, tmp_path: Path, seed: int
) -> None:
    beside(spelled, strategy, overlap, tmp_path / "alone")
    ranks(2).run(beside, spelled, strategy, overlap, tmp_path / "two")


def test_guarded_and_simulated_and_compiled(seed: int) -> None:
    params, x, y = problem()
    made = from_torch(AdamW, DECAYED, lr=RATE, weight_decay=0.1)
    expected = trained(loss_fn, made, params, [(x, y)] * STEPS)
    assert same_bits(dict(trained(loss_fn, made, params, [(x, y)] * STEPS, guard="skip").params), dict(expected.params))
    several = ltx.vmap(lambda x, y: dict(trained(loss_fn, made, params, [(x, y)] * STEPS).params))(
        x.view(2, 8, 4), y.view(2, 8)
    )
    for name, p in several.items():
        torch.testing.assert_close(p[1], expected.params[name], rtol=1e-4, atol=1e-6)
    train = ltx.train_step(ltx.data_parallel(loss_fn), from_torch(SGD, lr=0.1, start_step=1))
    with pytest.raises(Exception, match=r"UnsupportedError: .* can't ask for the start_step of each step"):
        torch.compile(train, backend="eager")(train.init(params), x, y)


# What is refused, and what the error says.
REFUSED: list[tuple[Any, str]] = [
    ({"head.*": {}}, "'head.*' fits no parameter. Their paths: a, b."),
    ({"a": {"wd": 0.0}}, "from_torch(AdamW): no argument wd; allowed are lr"),
    ({"a": {"start_step": -1}}, "from_torch: start_step must be"),
    ([{"params": ["a"]}], 'labels: no pattern fits b. Give the rest a label, {..., "*": "the rest"}, or a group'),
    ([{"params": ["c"]}, {"params": "*"}], "'c' fits no parameter"),
    ([{"params": ["a", "b"]}, {"params": ["a"]}], "from_torch(AdamW): 'a' is in group 0 and in group 1"),
    ([{"params": NET.parameters()}], 'Write {"params": [name for name, p in model.named_parameters() if ...], ...}'),
    (list(NET.parameters()), "from_torch(AdamW): group 0 has "),
    (NET.parameters(), "from_torch(AdamW): group 0 has "),
]


@pytest.mark.parametrize(("groups", "text"), REFUSED)
def test_groups_that_are_refused(groups: Any, text: str) -> None:
    with pytest.raises(OptimError, match=re.escape(text)):
        from_torch(AdamW, groups).init({"a": torch.zeros(1), "b": torch.zeros(1)})


plain = from_torch(SGD, lr=RATE)
LRS: dict[str, tuple[Any, Any]] = {
    "a number": (from_torch(SGD, lr=0.5), lambda n: 0.5),
    "torch's default": (from_torch(AdamW), lambda n: 1e-3),
    "a schedule": (plain, RATE),
    "late": (from_torch(SGD, lr=RATE, start_step=2), RATE),
    "kept": (from_torch(SGD, lr=adjustable(0.5)), lambda n: 0.5),
    "another author's": (from_torch(Lion, lr=RATE), RATE),
    "in a chain": (chain(clip_by_global_norm(1.0), plain), RATE),
    "groups": (from_torch(SGD, {"*bias": {"lr": 0.25}}, lr=RATE), lambda n: {"*bias": 0.25, "*": RATE(n)}),
    "functions": (ltx.optim.from_functions(lambda p: (), lambda g, s, p: (g, s)), lambda n: None),
}


def lrs(optimizer: Any, strategy: Any = None) -> list[Any]:
    return [each.lr for each in trained(loss_fn, optimizer, problem()[0], [problem()[1:]] * 3, strategy).metrics]


@pytest.mark.parametrize("name", LRS)
def test_the_rate_of_the_step_just_done(name: str, seed: int) -> None:
    made, expected = LRS[name]
    assert lrs(made) == [expected(n) for n in range(3)]
    params, x, y = problem()
    _, found = go_on(train := ltx.train_step(ltx.data_parallel(loss_fn), made), train.init(params), [(x, y)] * 2)
    assert pickle.loads(pickle.dumps(found[1])).lr == expected(1)
    if made.leafwise:
        two = ltx.vmap(lambda x, y: train(train.init(params), x, y)[1])(x.view(2, 8, 4), y.view(2, 8))
        assert two.lr == expected(0)
    assert ltx.tree.map(lambda a, b: a + b, *found).lr == expected(0)


def test_the_rate_on_ranks(ranks: Ranks, seed: int) -> None:
    for strategy, factor in ((ltx.HorovodStrategy(scale_lr=True), 2.0), (ltx.ZeroStrategy(), 1.0)):
        assert ranks(2).run(lrs, plain, strategy)[1] == [factor * RATE(n) for n in range(3)]


def test_nobody_computes_a_rate_that_nobody_reads_and_a_donated_one_can_be_read(seed: int) -> None:
    params, x, y = problem()
    asked: list[int] = []
    counted = trained(loss_fn, from_torch(SGD, lr=lambda n: asked.append(n) or RATE(n)), params, [(x, y)] * 3)
    before = len(asked)
    assert counted.metrics[1].lr == RATE(1)
    assert len(asked) == before + 1
    train = ltx.train_step(ltx.data_parallel(loss_fn), from_torch(SGD, lr=adjustable(0.5)))
    state = train.init(params)
    assert adjust(state.opt_state, lr=1.0).hyper  # the state's own tensors were seen, and are given away
    state, first = train(state, x, y)
    state, _ = train(state, x, y)
    assert first.lr == 0.5
