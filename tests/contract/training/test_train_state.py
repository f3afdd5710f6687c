"""TrainState as a tree, as a checkpoint, and as a value that can be given away."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any, Literal

import optree
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.utils._pytree as torch_pytree

import ltx
from ltx.errors import CallFailedError, DonatedStateError, InputError
from tests.contract.bad_input.public import loss as linear
from tests.inside import AsyncAveraging
from tests.kinds import Ranks
from tests.train_on import go_on, on_ranks, refuses, said
from tests.twins.cases import assert_same_bits
from tests.twins.feedback import STRATEGY
from tests.twins.training import adamw, sgd

X = torch.tensor([1.0, 2.0, 3.0])


def loss(params: Any, buffers: Any, x: torch.Tensor) -> Any:
    return ((params["a"] * x).sum() + params["b"]["c"] - 1).square(), {"seen": buffers["seen"] + 1}


TRAIN = ltx.train_step(ltx.data_parallel(loss, STRATEGY), adamw(), donate=False)


def trained(steps: int) -> ltx.TrainState:
    """A state with something in each of its parts."""
    start = {"a": torch.ones(3), "b": {"c": torch.zeros(())}}
    return go_on(TRAIN, TRAIN.init(start, {"seen": torch.tensor(0)}), [X] * steps).state


PATHS = [
    "params.a",
    "params.b.c",
    "buffers.seen",
    *(f"opt_state.per_param.{leaf}.{name}" for leaf in ("a", "b.c") for name in ("exp_avg", "exp_avg_sq", "step")),
    "sync_state.leaves.a.error",
    "sync_state.leaves.b.c.error",
    "sync_state.uses",
    "sync_state.clock",
]


def test_round_trip_through_both_tree_libraries() -> None:
    state = trained(3)
    for flatten, unflatten in (
        (optree.tree_flatten, optree.tree_unflatten),
        (torch_pytree.tree_flatten, lambda spec, leaves: torch_pytree.tree_unflatten(leaves, spec)),
    ):
        leaves, spec = flatten(state)
        assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
        back = unflatten(spec, leaves)
        assert (back.step, back.layout) == (3, state.layout)
        assert back.params["a"] is state.params["a"]
        for other in (back, pickle.loads(pickle.dumps(state))):
            assert_same_bits(TRAIN(other, X)[0], TRAIN(state, X)[0])


def test_the_step_is_part_of_the_structure() -> None:
    assert optree.tree_structure(trained(1)) != optree.tree_structure(trained(2))
    assert optree.tree_structure(trained(2)) == optree.tree_structure(trained(2))


def test_paths_and_kinds() -> None:
    assert [".".join(map(str, path)) for path in optree.tree_paths(trained(1))] == PATHS
    assert sorted(trained(1).state_dict()) == sorted([*PATHS, "step", "updates"])
    layout = trained(0).layout
    assert [layout.params, layout.buffers, layout.opt_state, layout.sync_state] == ["replicated", "per_rank"] * 2


COPIES: dict[str, Any] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
    "copy of a copy": lambda state: copy.copy(copy.deepcopy(state)),
    "tree": lambda state: ltx.tree.map(torch.clone, state),
}
UNDER_WAY = {
    "async": ltx.BaguaStrategy("async", warmup_steps=0, sync_interval_ms=0),
    "async, schedule": AsyncAveraging(warmup_steps=0, schedule=(2, 1)),
    "DiLoCo": ltx.DiLoCoStrategy(4, fragment_sync_delay=2),
}


@pytest.mark.parametrize("name", UNDER_WAY)
@on_ranks(2)
def test_a_copy_has_nothing_that_is_under_way(name: str) -> None:
    """Nor does a state dict, in which it would be lost, or added to other parameters than it is of."""
    train = ltx.train_step(ltx.data_parallel(lambda p, x: (p["w"] * x).sum(), UNDER_WAY[name]), adamw())
    state, restored = train.init({"w": torch.ones(3)}), train.init({"w": torch.zeros(3)})
    while not state.under_way:
        state, _ = train(state, X * (1 + ltx.world().rank))
    for use in (state.state_dict, lambda: state.load_state_dict(restored.state_dict())):
        refuses(InputError, r"^state_dict: \w+\(.* exchange under way between two steps", use)
    for copied in COPIES.values():
        other = copied(state)
        assert_same_bits(other.params, state.params)
        for use in (lambda other=other: train(other, X), lambda other=other: train.finish(other)):
            refuses(InputError, r"is a copy .*which the copy hasn't got. Copy what finish gives", use)
        refuses(InputError, "has an exchange under way", other.state_dict)
    state = train.finish(state)
    restored.load_state_dict(state.state_dict())
    assert_same_bits(restored.params, state.params)
    assert_same_bits(train.finish(train(copy.deepcopy(state), X)[0]).params, train.finish(train(state, X)[0]).params)


def test_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        trained(0).step = 3


@pytest.mark.parametrize(
    "strategy",
    [
        ltx.DDPStrategy(),
        ltx.ZeroStrategy(),
        pytest.param(ltx.LocalSGDStrategy(3), id="local SGD"),
        pytest.param(ltx.DDPStrategy(comm_hook=ltx.hooks.ByteGrad(error_feedback=True)), id="error feedback"),
    ],
    ids=str,
)
@on_ranks(2)
def test_torchs_checkpoints_keep_what_is_each_ranks_own(strategy: ltx.Strategy, tmp_path: Path) -> None:
    """Of what ranks have under one name torch keeps one rank's, of each tensor another one's."""
    step = ltx.data_parallel(lambda p, x: (p["w"] * x).sum() + p["b"] * x[0], strategy)
    train, x = ltx.train_step(step, adamw(), donate=False), torch.tensor([1.0, -2.0, 0.3]) * (1 + ltx.world().rank)
    state, _ = train(train.init({"w": torch.ones(3), "b": torch.zeros(())}), x)
    dcp.save({"state": state}, checkpoint_id=tmp_path)
    other = train.init({"w": torch.zeros(3), "b": torch.ones(())})
    place = other.params["w"].data_ptr()
    dcp.load({"state": other}, checkpoint_id=tmp_path)
    assert (other.step, other.params["w"].data_ptr()) == (1, place)
    assert_same_bits(train(other, x)[0].params, train(state, x)[0].params)
    own = [f"params.rank_{rank}_of_2.w" in state.state_dict() for rank in range(2)]
    assert own == [isinstance(strategy, ltx.LocalSGDStrategy) and rank == ltx.world().rank for rank in range(2)]


def test_a_checkpoint_of_another_model_is_refused() -> None:
    smaller = ltx.train_step(ltx.data_parallel(lambda p, x: (p["a"] * x).sum()), sgd()).init({"a": torch.ones(3)})
    text = r"this state differ in their leaves: \['buffers.seen', .*\. Build the state as it was when it was saved\."
    refuses(InputError, "the checkpoint and " + text, trained(1).load_state_dict, smaller.state_dict())


def test_a_checkpoint_of_other_shapes_is_refused_and_changes_nothing() -> None:
    state, saved = trained(1), trained(3).state_dict()
    before = copy.deepcopy(state)
    saved["params.b.c"], saved["params.a"] = torch.tensor(7.0), torch.tensor([5.0])
    text = r"leaf 'params.a' is float32\[1\] in the checkpoint, and float32\[3\] in this"
    refuses(InputError, text, state.load_state_dict, saved)
    assert_same_bits(state, before)


@pytest.mark.full
@pytest.mark.parametrize("way", ["state_dict", "ltx.checkpoint"])
def test_compiled_steps_are_counted_once_in_a_checkpoint(way: str, tmp_path: Path) -> None:
    """They count on the communication state's clock, which is one of the leaves that are saved."""
    train = ltx.train_step(
        ltx.data_parallel(lambda p, x: (p * x).sum(), ltx.DDPStrategy(comm_hook=ltx.hooks.QSGD())), sgd(), donate=False
    )
    state = train.init(X)
    state, _ = go_on(torch.compile(train, backend="eager"), state, [X] * 3)
    other = train.init(X)
    if way == "state_dict":
        other.load_state_dict(copy.deepcopy(state.state_dict()))
    else:
        ltx.checkpoint.save(tmp_path, state)
        other = ltx.checkpoint.load(tmp_path, other).state
    assert other.step == other.sync_state.checked_step() == 3
    for step in (4, 5):
        other, _ = train(other, X)
        assert other.sync_state.checked_step() == step


def test_metrics_are_a_tree() -> None:
    _, metrics = TRAIN(trained(0), X)
    assert optree.tree_leaves(metrics) == [metrics.loss]
    doubled = optree.tree_map(lambda t: 2 * t, metrics)
    assert (doubled.loss, doubled.aux, doubled.grad_norm) == (2 * metrics.loss, None, None)


# What becomes of a state, and of tensors that were read off it, once a step has taken it over.
def made(**kwargs: Any) -> tuple[Any, ltx.TrainState, torch.Tensor]:
    train = ltx.train_step(ltx.data_parallel(linear), adamw(), **kwargs)
    return train, train.init({"w": torch.randn(3, 2), "b": torch.zeros(2)}), torch.randn(4, 3)


READS: dict[str, Callable[[ltx.TrainState], Any]] = {
    "params": lambda s: s.params,
    "opt_state": lambda s: s.opt_state,
    "buffers": lambda s: s.buffers,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "flatten": lambda s: ltx.tree.flatten(s),
    "state_dict": lambda s: s.state_dict(),
    "load_state_dict": lambda s: s.load_state_dict({}),
    "to_module": lambda s: ltx.to_module(torch.nn.Linear(3, 2), s),
}


@pytest.mark.parametrize("name", READS)
def test_every_read_of_a_donated_state_raises(name: str) -> None:
    train, best, x = made()
    state, _ = train(best, x)
    refuses(DonatedStateError, r"this TrainState \(step 0\) was donated .* copy\.deepcopy\(state\)", READS[name], best)
    assert (best.step, state.step) == (0, 1)


USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "arithmetic": lambda x: x + 1,
    "item": lambda x: x[0, 0].item(),
    "format": lambda x: f"{x.sum()}",
    "clone": torch.clone,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "numpy": lambda x: x.numpy(),
    "in place": lambda x: x.zero_(),
    "module": lambda x: torch.func.functional_call(
        torch.nn.Linear(3, 2, bias=False), {"weight": x.view(2, 3)}, torch.ones(3)
    ),
}


@pytest.mark.parametrize("overlap", ["backward", "update"])
@on_ranks(2, alone=True)
def test_tensors_that_were_read_off_it_raise(overlap: Any) -> None:
    """`best = state.params`, and a leaf of it, in every way that a tensor is used; the next state's are right."""
    torch.manual_seed(1)
    (train, state, x), (plain, *_) = made(overlap=overlap), made(overlap=overlap, donate=False)
    same = plain.init(ltx.tree.map(torch.clone, state.params))
    for _ in range(3):
        best, moments = state.params, state.opt_state
        state, _ = train(state, x)
        same, _ = plain(same, x)
        assert_same_bits(dict(state.params), dict(same.params))
        for use in USES.values():
            refuses(DonatedStateError, "this tensor was read off the TrainState of step", use, best["w"])
        said(DonatedStateError, moments.per_param["w"]["exp_avg"].sum)
        assert best["w"].shape == (3, 2)
        assert best["w"].dtype == torch.float32


def test_what_functorch_wraps_holds_no_old_value() -> None:
    train, state, x = made()
    best = state.params
    state, _ = train(state, x)
    grads = torch.func.grad(lambda w: (w * w).sum())(best["w"])  # functorch doesn't ask the class of a tensor
    assert grads.isnan().all()
    assert state.params["w"].isfinite().all()


def test_tensors_that_were_put_into_a_state() -> None:
    """`dataclasses.replace` makes a state of tensors that somebody holds."""
    train, state, x = made()
    mine = {"w": torch.ones(3, 2), "b": torch.ones(2)}
    following, _ = train(replace(state, params=mine), x)
    said(DonatedStateError, mine["w"].sum)
    with pytest.raises(DonatedStateError):
        state.params  # noqa: B018 (it shares the optimizer's state)
    assert following.params["w"].isfinite().all()


@pytest.mark.parametrize("guard", ["off", "skip"])
def test_metrics_and_aux_keep_their_values(guard: Literal["off", "skip"]) -> None:
    with_aux = lambda p, x: (linear(p, x), {"b": p["b"], "row": p["w"][0]})  # noqa: E731
    clipped = ltx.optim.chain(ltx.optim.clip_by_global_norm(0.1), sgd(lr=0.5))
    train = ltx.train_step(ltx.data_parallel(with_aux), clipped, has_aux=True, guard=guard)
    state = train.init({"w": torch.randn(3, 2), "b": torch.zeros(2)})
    seen, expected = [], []
    for _ in range(3):
        before = ltx.tree.map(torch.clone, state.params)
        _ = state.opt_state
        state, metrics = train(state, torch.randn(4, 3))
        expected.append((before["b"].tolist(), before["w"][0].tolist(), metrics.grad_norm.item()))
        seen.append(metrics)
    assert [(m.aux["b"].tolist(), m.aux["row"].tolist(), m.grad_norm.item()) for m in seen] == expected


# What a program does to a state between two steps.
CHANGED: dict[str, Callable[[ltx.TrainState], ltx.TrainState]] = {
    "weights": lambda state: replace(state, params={k: x + 1 for k, x in state.params.items()}),
    "a rate": lambda state: replace(state, opt_state=ltx.optim.adjust(state.opt_state, lr=0.01)),
    "mapped": lambda state: ltx.tree.map(torch.clone, state),
}
# What it may do on one rank alone.
LOOKED_AT: dict[str, Callable[[ltx.TrainState], ltx.TrainState]] = {
    "copied": copy.deepcopy,
    "pickled": lambda state: pickle.loads(pickle.dumps(state)),
    "read": lambda state: (state, repr(state), state.params, state.opt_state)[0],
}


def changed(name: str, alone: bool, overlap: Literal["backward", "update"], donate: bool) -> float:
    rank, step = int(ltx.axis_index()), ltx.data_parallel(lambda p, x: (p["w"] * x).sum())
    optimizer = ltx.optim.from_torch(torch.optim.SGD, lr=ltx.optim.adjustable(0.1))
    train = ltx.train_step(step, optimizer, overlap=overlap, donate=donate)
    state, _ = train(train.init({"w": torch.ones(2)}), torch.ones(2))
    if rank == 1 or not alone:
        state = (CHANGED | LOOKED_AT)[name](state)
    state, _ = train(state, torch.ones(2))
    state, metrics = train(state, torch.ones(2))
    return metrics.loss.item()


@pytest.mark.parametrize(("overlap", "donate"), [("backward", True), ("update", True), ("backward", False)])
@pytest.mark.parametrize("name", CHANGED)
def test_a_state_that_one_rank_alone_has_changed(name: str, overlap: Any, donate: bool, ranks: Ranks) -> None:
    """Parameters drifted apart. Changed on all ranks it is the program's business."""
    with pytest.raises(CallFailedError, match=r"disagree on the state .* rank 1: made by the program .*broadcast"):
        ranks(2).run(changed, name, True, overlap, donate)
    ranks(2).run(changed, name, False, overlap, donate).replicated()


@pytest.mark.parametrize("name", LOOKED_AT)
def test_a_state_that_one_rank_alone_has_looked_at(name: str, ranks: Ranks) -> None:
    assert ranks(2).run(changed, name, True, "backward", True).replicated() == pytest.approx(1.6)
