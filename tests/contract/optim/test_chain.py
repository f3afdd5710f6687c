"""Chains of transformations; and optimizers made of others on ranks: what they make of the whole batch's gradients."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

import ltx
from ltx.errors import OptimError, RankMismatchError, TreeError
from ltx.optim import (
    ClipState,
    Optimizer,
    TorchState,
    chain,
    clip_by_global_norm,
    clip_by_value,
    from_functions,
    from_scheduler,
    from_torch,
    grad_norm,
    identity,
    masked,
    measure_global_norm,
    partition,
)
from tests.contract.optim.cases import Case, clone, random_grads, random_params, same_bits
from tests.contract.optim.test_opaque import Lion
from tests.contract.optim.test_partition import BIASES, grouped, loss_fn, problem
from tests.kinds import Params, Ranks
from tests.train_on import go_on, on_ranks, refuses
from tests.twins.training import after_some_updates


def no_state(params: Any) -> tuple[()]:
    return ()


def double(grads: Any, state: Any, params: Any) -> Any:
    return optree.tree_map(lambda g: 2 * g, grads), state


doubled = from_functions(no_state, double, elementwise=True)
clip, adamw = clip_by_global_norm(1.0), from_torch(AdamW, lr=1e-3)


def test_laws() -> None:
    assert chain() == identity()
    assert chain(adamw) is adamw
    assert chain(identity(), clip, identity()) is clip
    assert chain(chain(clip, doubled), adamw) == chain(clip, chain(doubled, adamw)) == chain(clip, doubled, adamw)
    assert chain(clip, doubled) != chain(doubled, clip)
    assert len({chain(clip, adamw), chain(clip, adamw), chain(adamw)}) == 2


@pytest.mark.parametrize("donate", [True, False])
def test_is_its_members_in_turn(donate: bool, seed: int) -> None:
    params = random_params(Case(AdamW))
    expected, made = clone(params), chain(clip_by_global_norm(1.0), doubled, adamw)
    state, own = made.init(params), adamw.init(params)
    for _ in range(3):
        grads = random_grads(Case(AdamW), params)
        before = clone((grads, params, state))
        clipped, clip_state = clip.update(grads, ClipState(torch.tensor(0.0)), params)
        expected, own = adamw.apply(double(clipped, (), params)[0], own, expected)
        new_params, new_state = made.apply(grads, state, params, donate=donate)
        assert same_bits(grads, before[0])
        assert (new_params is params) == donate
        if not donate:
            assert same_bits((params, state), before[1:])
        assert new_state[2].count == own.count
        assert same_bits((new_params, new_state[2], new_state[0]), (expected, own, clip_state))
        assert same_bits(grad_norm(new_state), clip_state.norm)
        params, state = new_params, new_state


def test_update_of_a_chain_is_the_last_members(seed: int) -> None:
    params = {"w": torch.randn(4)}
    made = chain(doubled, from_torch(SGD, lr=0.5))
    updates, state = made.update({"w": torch.ones(4)}, made.init(params), params)
    torch.testing.assert_close(updates["w"], -torch.ones(4))
    assert state[1].count == 1


def test_elementwise_if_all_are() -> None:
    assert chain(doubled, adamw).elementwise
    assert chain().elementwise
    assert not chain(clip, adamw).elementwise
    assert not chain(doubled, from_torch(torch.optim.Adafactor)).elementwise
    assert not chain(doubled, adamw).leafwise
    assert not chain(clip, adamw).leafwise
    assert chain(clip_by_value(1.0), masked(clip_by_value(0.1), "*"), adamw).leafwise


#: What is refused, and what the error says.
REFUSED: list[tuple[Any, str]] = [
    (
        lambda: chain(adamw, clip),
        "from_torch(torch.optim.AdamW, lr=0.001) must come last in a chain, before it only transformations of "
        "gradients: it updates the parameters, so clip_by_global_norm(1.0) after it would not get gradients.",
    ),
    (lambda: chain(chain(clip, adamw), doubled), "must come last in a chain"),
    (
        lambda: chain(clip, AdamW),
        "argument 1 is <class 'torch.optim.adamw.AdamW'>. Wrap the class: from_torch(AdamW, ...).",
    ),
    (lambda: chain(SGD([torch.ones(1)])), "Wrap the class: from_torch(SGD, ...)."),
    (lambda: chain(3), "chain expected optimizers, but argument 0 is 3."),
    (lambda: clip_by_global_norm(0.0), "clip_by_global_norm: max_norm must be > 0, got 0.0."),
    (lambda: clip_by_global_norm(float("nan")), "clip_by_global_norm: max_norm must be > 0, got nan."),
    (
        lambda: clip_by_global_norm(1.0, eps=-1.0),
        "clip_by_global_norm: eps must be a finite number of at least 0, got -1.0.",
    ),
    (lambda: clip_by_value(0.0), "limit must be > 0, got 0.0"),
]


@pytest.mark.parametrize(("make", "text"), REFUSED)
def test_refused(make: Any, text: str) -> None:
    refuses(OptimError, re.escape(text), make)


@pytest.mark.parametrize("state", [(), (1,), None])
def test_state_of_another_chain(state: Any) -> None:
    params = {"w": torch.ones(1)}
    with pytest.raises(OptimError, match=re.escape("expected a state of 2 parts, one a member, got")):
        chain(clip, adamw).apply(params, state, params)


def test_leaf_by_leaf_is_refused_by_name() -> None:
    made: Optimizer = chain(clip, adamw)
    text = re.escape(f"{clip} can't be applied leaf by leaf: an update of one leaf may depend on the others.")
    state = made.init({})
    for call in (lambda: made.update_leaves([], [], [], state), lambda: made.leaf_states(state, {})):
        refuses(OptimError, text, call)


# Chains all members of which work leaf by leaf.
LEAFWISE = {
    "clipped": chain(clip_by_value(0.02), adamw),
    "masked": chain(masked(clip_by_value(0.02), "*bias"), adamw),
    "in groups": chain(
        clip_by_value(0.05),
        partition({"0": chain(clip_by_value(0.03), from_torch(SGD, lr=0.1)), "1": adamw}, {"*bias": "0", "*": "1"}),
    ),
    "masked by a pattern": chain(masked(clip_by_value(0.03), "0.*"), adamw),
}
NET = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


@pytest.mark.parametrize("made", [*LEAFWISE.values(), from_torch(SGD, momentum=0.9, dampening=0.3)], ids=repr)
def test_leaf_by_leaf_is_as_together(made: Optimizer, seed: int) -> None:
    params = {key: torch.randn_like(p) for key, p in NET.named_parameters()}
    together, mine, state, own = params, clone(params), *[after_some_updates(made.init(params)) for _ in range(2)]
    for _ in range(3):
        grads = {key: torch.randn_like(p) for key, p in params.items()}
        together, state = made.apply(grads, state, together)
        before, leaves, states = clone(grads), optree.tree_leaves(mine), made.leaf_states(own, mine)
        for some in ([3, 1], [0, 2]):  # as buckets come
            given = [optree.tree_leaves(grads)[i] for i in some]
            made.update_leaves(given, [states[i] for i in some], [leaves[i] for i in some], own)
        own = ltx.tree.map(
            lambda x: replace(x, count=x.count + 1) if isinstance(x, TorchState) else x,
            own,
            is_leaf=lambda x: isinstance(x, TorchState),
        )
        assert same_bits(grads, before)
        assert same_bits((mine, own), (together, state))


def torch_clip(grads: Any, max_norm: float) -> tuple[Any, Tensor]:
    """The slow twin: torch's in-place clipping on copies."""

    def with_grad(grad: Tensor) -> Tensor:
        param = torch.zeros_like(grad)
        param.grad = grad.clone()
        return param

    params = optree.tree_map(with_grad, grads)
    norm = torch.nn.utils.clip_grad_norm_(optree.tree_leaves(params), max_norm)
    return optree.tree_map(lambda p: p.grad, params), norm


TREES = {
    "floats": lambda: {"w": torch.randn(40, 3), "b": [torch.randn(7), torch.randn(())], "none": torch.randn(0)},
    "small": lambda: {"w": 1e-3 * torch.randn(5)},
    "mixed": lambda: {"a": torch.randn(9), "b": torch.randn(9).bfloat16(), "c": torch.randn(9).double()},
    "half": lambda: {"a": torch.randn(9).bfloat16(), "b": torch.randn(()).bfloat16()},
    "nan": lambda: {"a": torch.tensor([1.0, torch.nan]), "b": torch.ones(2)},
    "inf": lambda: {"a": torch.tensor([1.0, torch.inf]), "b": torch.ones(2)},
    "complex": lambda: {"a": torch.randn(5, dtype=torch.complex64)},
    "zero": lambda: {"a": torch.zeros(5)},
    "transposed": lambda: {"a": torch.randn(5, 3).t()},
    "empty": dict,
}


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("max_norm", [0.5, 1, 1e6])
@pytest.mark.parametrize("name", TREES)
def test_bit_equal_to_torch(name: str, max_norm: float, donate: bool, seed: int) -> None:
    grads = TREES[name]()
    before = optree.tree_map(torch.clone, grads)
    expected, norm = torch_clip(grads, max_norm)
    clip = clip_by_global_norm(max_norm)
    state = clip.init(grads)
    clipped, new_state = clip.update(grads, state, grads, donate=donate)
    assert same_bits(clipped, expected)
    assert same_bits(new_state, ClipState(norm))
    assert same_bits(grads, before)
    assert state.norm.dtype == new_state.norm.dtype


def test_none_leaves_stay() -> None:
    clip = clip_by_global_norm(1.0)
    clipped, state = clip.update({"a": None, "b": torch.tensor([3.0, 4.0])}, ClipState(torch.tensor(0.0)), None)
    assert clipped["a"] is None
    assert state.norm == 5.0


def test_eps() -> None:
    clip = clip_by_global_norm(1.0, eps=5.0)
    assert clip.update([torch.tensor([3.0, 4.0])], clip.init([]), [])[0][0].tolist() == pytest.approx([0.3, 0.4])


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_under_transforms(seed: int) -> None:
    clip = clip_by_global_norm(1.0)
    grads = {"a": torch.randn(3, 4), "b": torch.randn(3)}

    def run(grads: Any) -> Any:
        return clip.update(grads, clip.init(grads), grads)

    batched = torch.vmap(run)(grads)
    for i in range(3):
        alone = run({"a": grads["a"][i], "b": grads["b"][i]})
        torch.testing.assert_close({key: grad[i] for key, grad in batched[0].items()}, alone[0])
        torch.testing.assert_close(batched[1].norm[i], alone[1].norm)

    def scalar(x: Tensor) -> Tensor:
        return (run([x])[0][0] * torch.tensor([1.0, 2.0, 3.0], dtype=x.dtype)).sum()

    x = torch.randn(3, dtype=torch.float64) + 3
    gradient = torch.func.grad(scalar)(x)
    leaf = x.clone().requires_grad_()
    scalar(leaf).backward()
    torch.testing.assert_close(gradient, leaf.grad)
    tangent = torch.randn(3, dtype=torch.float64)
    step = 1e-6 * tangent
    numeric = (scalar(x + step) - scalar(x - step)) / 2e-6
    torch.testing.assert_close(torch.func.jvp(scalar, (x,), (tangent,))[1], numeric, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(gradient @ tangent, numeric, rtol=1e-6, atol=1e-8)


def test_an_axis_that_would_be_ignored_is_no_argument() -> None:
    refuses(TypeError, "axis", clip_by_global_norm, 1.0, axis="data")


def test_gradients_must_be_tensors() -> None:
    with pytest.raises(TreeError, match=re.escape("grads must be a tree of tensors, but leaf 'w' is of type float.")):
        clip_by_global_norm(1.0).update({"w": 1.0}, None, None)


def test_by_value_as_torch(seed: int) -> None:
    grads = {"w": torch.randn(100), "scalar": torch.tensor(3.0), "none": None, "nan": torch.tensor([torch.nan])}
    found, _ = clip_by_value(0.5).update(grads, (), grads)
    for name, grad in grads.items():
        if grad is not None:
            param = torch.zeros_like(grad)
            param.grad = grad.clone()
            torch.nn.utils.clip_grad_value_([param], 0.5)
            assert same_bits(found[name], param.grad)
    assert found["none"] is None
    assert clip_by_value(0.5).elementwise
    with pytest.raises(OptimError, match="the gradient of leaf 'w' is complex"):
        clip_by_value(1.0).update({"w": torch.zeros(1, dtype=torch.complex64)}, (), {})


@pytest.mark.parametrize("name", TREES)
def test_the_norm_is_measured_and_gradients_stay(name: str, seed: int) -> None:
    grads = TREES[name]()
    measure = measure_global_norm()
    passed, state = measure.update(grads, measure.init(grads), grads)
    assert passed is grads
    assert same_bits(state, ClipState(torch_clip(grads, 1.0)[1]))


def test_the_measured_norm_has_derivatives(seed: int) -> None:
    g = torch.randn(4, dtype=torch.float64)
    measure = measure_global_norm()
    norm = lambda g: measure.update({"g": g}, measure.init({"g": g}), {"g": g})[1].norm  # noqa: E731
    torch.testing.assert_close(torch.func.grad(norm)(g), g / g.norm())


def test_grad_norm_of_groups_is_that_of_all(seed: int) -> None:
    """Not that of the first group; and where some groups measure none, or one in front has measured all."""
    grads = {name: torch.randn(5) for name in "abc"}
    whole = torch.linalg.vector_norm(torch.stack([*grads.values()]))

    def measured(first: Optimizer, *groups: Optimizer) -> torch.Tensor | None:
        optimizer = chain(first, partition(dict(zip("xyz", groups, strict=True)), dict(zip("abc", "xyz", strict=True))))
        return grad_norm(optimizer.apply(grads, optimizer.init(grads), grads)[1])

    sgd = from_torch(torch.optim.SGD, lr=0.1)
    clipped = chain(clip_by_global_norm(0.1), sgd)
    torch.testing.assert_close(measured(identity(), clipped, clipped, clipped), whole)
    nested = partition({"all": clipped}, {"*": "all"})
    torch.testing.assert_close(measured(identity(), clipped, nested, chain(measure_global_norm(), sgd)), whole)
    assert measured(identity(), clipped, sgd, clipped) is None
    torch.testing.assert_close(measured(measure_global_norm(), clipped, sgd, sgd), whole)


STEPS = 4
ADAMW, sgd = from_torch(AdamW, lr=1e-2), from_torch(SGD, lr=0.1, momentum=0.9)
STRATEGIES = {
    "ddp": ltx.DDPStrategy(),
    "small buckets": ltx.DDPStrategy(bucket_bytes=64),
    "zero": ltx.ZeroStrategy(),
    "horovod": ltx.HorovodStrategy(),
}

#: Those that have no form under vmap, as their authors' classes haven't.
OPAQUE = {
    "another author's": from_torch(Lion),
    "another author's beside AdamW": partition({"others": from_torch(Lion), "biases": ADAMW}, BIASES),
}
#: Those that need all gradients at once.
TOGETHER = {"clipped by the norm": chain(clip_by_global_norm(1.0), ADAMW), **OPAQUE}
OPTIMIZERS: dict[str, ltx.optim.Optimizer] = {
    **LEAFWISE,
    "groups": grouped,
    "groups of groups": partition(
        {"biases": partition({"all": sgd}, {"*": "all"}), "others": partition({"all": ADAMW}, {"*": "all"})}, BIASES
    ),
    "warm-up, cosine": from_torch(SGD, lr=ltx.optim.warmup_cosine(0.5, 2, 4)),
    "torch's scheduler": from_torch(AdamW, lr=from_scheduler(partial(StepLR, step_size=2), 0.1)),
    **TOGETHER,
}
WAYS = [(name, "ddp", "backward") for name in OPTIMIZERS]
WAYS += [(name, "small buckets", "update") for name in OPTIMIZERS if name not in TOGETHER]
WAYS += [(name, "zero", how) for how in ("update", "backward") for name in ("clipped", "masked", "groups")]
WAYS += [("groups", "horovod", how) for how in ("update", "backward")]


def exact() -> tuple[Params, Tensor, Tensor]:
    """A problem in float64, drawn in the test's process: LTX_SEED seeds that one, and no worker of a pool.

    AdamW's first step is lr g / (|g| + eps): where |g| is below 1e-8, it changes by up to lr / eps = 1e6 times what g
    does. In float32 the mean of two halves is 1e-8 from that of the whole: of 400 000 problems 23 parted by more than
    rtol 1e-4 and atol 1e-6, by up to 6e-3. In float64 it is 1e-16, and the same 23 part by 3e-12 at most.
    """
    params, x, y = problem()
    return {name: p.double() for name, p in params.items()}, x.double(), y


def by_hand(name: str, params: Params, x: Tensor, y: Tensor) -> Any:
    state = OPTIMIZERS[name].init(params)
    for _ in range(STEPS):
        params, state = OPTIMIZERS[name].apply(torch.func.grad(loss_fn)(params, x, y), state, params)
    return dict(params)


def trained(name: str, strategy: str, overlap: Any, params: Params, *batch: Tensor) -> Any:
    train = ltx.train_step(ltx.data_parallel(loss_fn, STRATEGIES[strategy]), OPTIMIZERS[name], overlap=overlap)
    return dict(go_on(train, train.init(params), [batch] * STEPS).params)


def both(name: str, strategy: str, overlap: Any, params: Params, x: Tensor, y: Tensor) -> tuple[Any, Any]:
    return trained(name, strategy, overlap, params, *ltx.shard((x, y))), by_hand(name, params, x, y)


def check(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.full(but=12)
@pytest.mark.covering(1)
@pytest.mark.parametrize(("name", "strategy", "overlap"), WAYS)
def test_processes_and_alone(name: str, strategy: str, overlap: str, ranks: Ranks, seed: int) -> None:
    case = (name, strategy, overlap, *exact())
    for found, expected in (both(*case), *ranks(2).run(both, *case)):
        check(found, expected)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in OPAQUE])
def test_simulated_ranks(name: str, seed: int) -> None:
    params, x, y = exact()
    found = ltx.vmap(partial(trained, name, "ddp", "backward", params))(x.view(2, 8, 4), y.view(2, 8))
    for rank in range(2):
        check(ltx.tree.map(lambda leaf, rank=rank: leaf[rank], found), by_hand(name, params, x, y))


# Optimizers of rank 0 and rank 1, that would part their parameters.
UNEQUAL = {
    "rates": (from_torch(SGD, lr=0.1), from_torch(SGD, lr=0.2), "rank 0: .*lr=0.1.*; rank 1: .*lr=0.2"),
    "classes": (ADAMW, sgd, "rank 0: .*AdamW.*; rank 1: .*SGD"),
    "clipping": (chain(clip_by_global_norm(1.0), sgd), sgd, r"rank 0: chain\(clip.*; rank 1: from_torch\("),
}


def begun(pair: tuple[ltx.optim.Optimizer, ...], strategy: ltx.Strategy) -> Tensor:
    train = ltx.train_step(ltx.data_parallel(lambda p, x: (p["w"] * x).sum(), strategy), pair[int(ltx.axis_index())])
    state, _ = train(train.init({"w": torch.ones(2)}), torch.ones(2))
    return state.params["w"]


@pytest.mark.parametrize("name", UNEQUAL)
@on_ranks(2)
def test_ranks_that_share_parameters_have_the_same(name: str) -> None:
    *pair, match = UNEQUAL[name]
    refuses(RankMismatchError, f"disagree on train.init, its arguments: {match}", begun, tuple(pair), ltx.DDPStrategy())
    begun((sgd, sgd), ltx.DDPStrategy())  # and the axis works
    begun((from_torch(SGD, lr=lambda n: 0.1),) * 2, ltx.ZeroStrategy())


@on_ranks(2)
def test_a_mapping_that_a_set_has_put_in_another_order() -> None:
    labels = [("a", "slow"), ("b", "fast"), ("*", "fast")]
    ordered = dict(labels if ltx.axis_index() == 0 else [labels[1], labels[0], labels[2]])
    train = ltx.train_step(ltx.data_parallel(lambda p: p["a"].sum()), partition({"slow": sgd, "fast": ADAMW}, ordered))
    train.init({"a": torch.ones(2), "b": torch.ones(2)})


def test_ranks_with_parameters_of_their_own_may_have_others(ranks: Ranks) -> None:
    mean = ranks(2).run(begun, UNEQUAL["rates"][:2], ltx.LocalSGDStrategy(4)).replicated()  # of 0.9 and 0.8
    torch.testing.assert_close(mean, torch.full((2,), 0.85))
