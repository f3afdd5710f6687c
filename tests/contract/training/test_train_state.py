"""TrainState as a tree, as a checkpoint, and as a value that can be given away."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.utils._pytree as torch_pytree

import ltx
from ltx.errors import DonatedStateError, InputError
from tests.inside import AsyncAveraging
from tests.kinds import Ranks
from tests.twins.cases import assert_same_bits
from tests.twins.feedback import STRATEGY
from tests.twins.training import adamw, sgd

X = torch.tensor([1.0, 2.0, 3.0])


def loss(params: Any, buffers: Any, x: torch.Tensor) -> Any:
    return ((params["a"] * x).sum() + params["b"]["c"] - 1).square(), {"seen": buffers["seen"] + 1}


TRAIN = ltx.train_step(ltx.data_parallel(loss, STRATEGY), adamw(), donate=False)


def trained(steps: int) -> ltx.TrainState:
    """A state with something in each of its parts."""
    state = TRAIN.init({"a": torch.ones(3), "b": {"c": torch.zeros(())}}, {"seen": torch.tensor(0)})
    for _ in range(steps):
        state, _ = TRAIN(state, X)
    return state


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
        assert_same_bits(TRAIN(back, X)[0], TRAIN(state, X)[0])


def test_the_step_is_part_of_the_structure() -> None:
    assert optree.tree_structure(trained(1)) != optree.tree_structure(trained(2))
    assert optree.tree_structure(trained(2)) == optree.tree_structure(trained(2))


def test_paths() -> None:
    paths = [".".join(map(str, path)) for path in optree.tree_paths(trained(1))]
    assert paths == PATHS
    assert sorted(trained(1).state_dict()) == sorted([*PATHS, "step", "updates"])


def test_kinds() -> None:
    layout = trained(0).layout
    assert (layout.params, layout.buffers, layout.opt_state, layout.sync_state) == (
        "replicated",
        "per_rank",
        "replicated",
        "per_rank",
    )


def test_pickle_goes_on_bit_equal() -> None:
    state = trained(2)
    back = pickle.loads(pickle.dumps(state))
    assert back.step == 2
    assert_same_bits(TRAIN(back, X)[0], TRAIN(state, X)[0])


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
def test_a_copy_has_nothing_that_is_under_way(name: str, ranks: Ranks) -> None:
    def run() -> None:
        train = ltx.train_step(ltx.data_parallel(lambda p, x: (p["w"] * x).sum(), UNDER_WAY[name]), adamw())
        state = train.init({"w": torch.ones(3)})
        while not state.under_way:
            state, _ = train(state, X * (1 + ltx.world().rank))
        for how, copied in COPIES.items():
            other = copied(state)
            assert_same_bits(other.params, state.params)
            for use in (lambda other=other: train(other, X), lambda other=other: train.finish(other)):
                with pytest.raises(InputError, match=r"is a copy .*which the copy hasn't got. Copy what finish gives"):
                    use()
            with pytest.raises(InputError, match="has an exchange under way"):
                other.state_dict()
            assert how
        state = train.finish(state)
        again = copy.deepcopy(state)
        assert_same_bits(train.finish(train(again, X)[0]).params, train.finish(train(state, X)[0]).params)

    ranks(2).run(run)


def test_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        trained(0).step = 3


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")
def test_distributed_checkpoint(tmp_path: Path) -> None:
    state = trained(3)
    dcp.save({"train": state}, checkpoint_id=tmp_path, no_dist=True)
    other = trained(1)
    place = other.params["a"].data_ptr()
    dcp.load({"train": other}, checkpoint_id=tmp_path, no_dist=True)
    assert other.step == 3
    assert other.params["a"].data_ptr() == place
    assert_same_bits(other.params, state.params)
    after, metrics = TRAIN(other, X)
    expected, expected_metrics = TRAIN(state, X)
    assert_same_bits(after, expected)
    assert_same_bits(metrics.loss, expected_metrics.loss)


@pytest.mark.parametrize(
    "strategy",
    [
        ltx.DDPStrategy(),
        pytest.param(ltx.LocalSGDStrategy(3), id="local SGD"),
        pytest.param(ltx.DDPStrategy(comm_hook=ltx.hooks.ByteGrad(error_feedback=True)), id="error feedback"),
    ],
    ids=str,
)
def test_torchs_checkpoints_keep_what_is_each_ranks_own(strategy: ltx.Strategy, ranks: Ranks, tmp_path: Path) -> None:
    """Of what ranks have under one name torch keeps one rank's, of each tensor another one's."""

    def run() -> bool:
        train = ltx.train_step(
            ltx.data_parallel(lambda p, x: (p["w"] * x).sum() + p["b"] * x[0], strategy), adamw(), donate=False
        )
        x = torch.tensor([1.0, -2.0, 0.3]) * (1 + ltx.world().rank)
        state, _ = train(train.init({"w": torch.ones(3), "b": torch.zeros(())}), x)
        dcp.save({"state": state}, checkpoint_id=tmp_path)
        other = train.init({"w": torch.zeros(3), "b": torch.ones(())})
        dcp.load({"state": other}, checkpoint_id=tmp_path)
        assert other.step == 1
        assert_same_bits(train(other, x)[0].params, train(state, x)[0].params)
        paths = state.state_dict()
        return all((f"params.rank_{rank}_of_2.w" in paths) == (rank == ltx.world().rank) for rank in range(2))

    assert list(ranks(2).run(run)) == [isinstance(strategy, ltx.LocalSGDStrategy)] * 2


def test_state_dict_goes_both_ways() -> None:
    state, other = trained(3), trained(0)
    other.load_state_dict(state.state_dict())
    assert_same_bits(other.state_dict(), state.state_dict())
    assert_same_bits(TRAIN(other, X)[0], TRAIN(state, X)[0])


def test_a_checkpoint_of_another_model_is_refused() -> None:
    smaller = ltx.train_step(ltx.data_parallel(lambda p, x: (p["a"] * x).sum()), sgd()).init({"a": torch.ones(3)})
    with pytest.raises(
        InputError, match=r"the checkpoint and this state differ in their leaves: \['buffers.seen', "
    ) as e:
        trained(1).load_state_dict(smaller.state_dict())
    assert "Build the state as it was when it was saved." in str(e.value)


def test_a_checkpoint_of_other_shapes_is_refused_and_changes_nothing() -> None:
    state, saved = trained(1), trained(3).state_dict()
    before = copy.deepcopy(state)
    saved["params.b.c"], saved["params.a"] = torch.tensor(7.0), torch.tensor([5.0])
    with pytest.raises(
        InputError, match=r"leaf 'params.a' is float32\[1\] in the checkpoint, and float32\[3\] in this"
    ):
        state.load_state_dict(saved)
    assert_same_bits(state, before)


@pytest.mark.full
@pytest.mark.parametrize("way", ["state_dict", "ltx.checkpoint"])
def test_compiled_steps_are_counted_once_in_a_checkpoint(way: str, tmp_path: Path) -> None:
    """They count on the communication state's clock, which is one of the leaves that are saved."""
    train = ltx.train_step(
        ltx.data_parallel(lambda p, x: (p * x).sum(), ltx.DDPStrategy(comm_hook=ltx.hooks.QSGD())), sgd(), donate=False
    )
    state = train.init(X)
    compiled = torch.compile(train, backend="eager")
    for _ in range(3):
        state, _ = compiled(state, X)
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


@pytest.mark.parametrize("use", ["step", "state_dict", "load_state_dict"])
def test_a_donated_state_says_so(use: str) -> None:
    train = ltx.train_step(ltx.data_parallel(loss, STRATEGY), adamw())
    old = train.init({"a": torch.ones(3), "b": {"c": torch.zeros(())}}, {"seen": torch.tensor(0)})
    old, _ = train(old, X)
    new, _ = train(old, X)
    uses = {
        "step": lambda: train(old, X),
        "state_dict": old.state_dict,
        "load_state_dict": lambda: old.load_state_dict(new.state_dict()),
    }
    with pytest.raises(
        DonatedStateError, match=r"this TrainState \(step 1\) was donated to the step that made state 2"
    ):
        uses[use]()
    new.state_dict()


def test_no_donation_under_transforms() -> None:
    train = ltx.train_step(ltx.data_parallel(lambda p, x: (p["w"] * x).sum()), sgd(lr=1.0))
    state = train.init({"w": torch.ones(2)})
    stepped = ltx.vmap(train, in_dims=(None, 0))
    for _ in range(2):
        after, metrics = stepped(state, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        assert after.params["w"].tolist() == [[-1.0, -2.0]] * 2
        assert metrics.loss.tolist() == [5.0, 5.0]
    assert state.params["w"].tolist() == [1.0, 1.0]


def test_metrics_are_a_tree() -> None:
    _, metrics = TRAIN(trained(0), X)
    assert optree.tree_leaves(metrics) == [metrics.loss]
    doubled = optree.tree_map(lambda t: 2 * t, metrics)
    assert (doubled.loss, doubled.aux, doubled.grad_norm) == (2 * metrics.loss, None, None)
