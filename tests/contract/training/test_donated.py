"""What becomes of a state, and of tensors that were read off it, once a step has taken it over."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch

import ltx
from ltx.errors import DonatedStateError
from tests.kinds import Params, Ranks
from tests.twins.training import adamw, sgd


def loss(p: Params, x: torch.Tensor) -> torch.Tensor:
    return (x @ p["w"] + p["b"]).square().mean()


def made(**kwargs: Any) -> tuple[Any, ltx.TrainState, torch.Tensor]:
    train = ltx.train_step(ltx.data_parallel(loss), adamw(), **kwargs)
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
    "to_module": lambda s: ltx.to_module(torch.nn.Linear(3, 2), s),
}


@pytest.mark.parametrize("name", READS)
def test_every_read_of_a_donated_state_raises(name: str) -> None:
    train, best, x = made()
    state, _ = train(best, x)
    with pytest.raises(DonatedStateError, match=r"this TrainState \(step 0\) was donated .* copy\.deepcopy\(state\)"):
        READS[name](best)
    assert (best.step, state.step) == (0, 1)


def test_a_step_from_it_raises_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no tensor can be a DTensor, and nobody has asked the state for one."""
    monkeypatch.delitem(sys.modules, "torch.distributed.tensor", raising=False)
    train, best, x = made()
    train(best, x)
    with pytest.raises(DonatedStateError, match=r"this TrainState \(step 0\) was donated"):
        train(best, x)


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


def on_ranks_and_alone(run: Callable[[], Any], ranks: Ranks) -> list[Any]:
    return [run(), *ranks(2).run(run)]


def test_tensors_that_were_read_off_it_raise(ranks: Ranks) -> None:
    """`best = state.params`, and a leaf of it, in every way that a tensor is used; the next state's are right."""

    def run() -> tuple[list[str], bool, bool]:
        torch.manual_seed(1)
        told, equal, names = [], True, []
        for overlap in ("backward", "update"):
            train, state, x = made(overlap=overlap)
            plain, same, _ = made(overlap=overlap, donate=False)
            same = plain.init(ltx.tree.map(torch.clone, state.params))
            for _ in range(3):
                best, moments = state.params, state.opt_state
                kept = ltx.tree.map(torch.clone, best)
                state, _ = train(state, x)
                same, _ = plain(same, x)
                equal &= all(torch.equal(state.params[k], same.params[k]) for k in kept)
                for name, use in USES.items():
                    try:
                        use(best["w"])
                        told.append(f"{overlap}: {name} passes")
                    except DonatedStateError as error:
                        names.append("this tensor was read off the TrainState of step" in str(error))
                with pytest.raises(DonatedStateError):
                    moments.per_param["w"]["exp_avg"].sum()
                assert best["w"].shape == (3, 2)
                assert best["w"].dtype == torch.float32
        return told, equal, all(names)

    for told, equal, named in on_ranks_and_alone(run, ranks):
        assert told == []
        assert equal
        assert named


def test_what_functorch_wraps_holds_no_old_value() -> None:
    train, state, x = made()
    best = state.params
    state, _ = train(state, x)
    grads = torch.func.grad(lambda w: (w * w).sum())(best["w"])  # functorch doesn't ask the class of a tensor
    assert grads.isnan().all()
    assert state.params["w"].isfinite().all()


@pytest.mark.parametrize("how", ["deepcopy", "clone", "donate=False", "pickle"])
def test_keeping_the_best(how: str) -> None:
    train, state, x = made(donate=how != "donate=False")
    ways: dict[str, Callable[[], Params]] = {
        "deepcopy": lambda: copy.deepcopy(state).params,
        "clone": lambda: ltx.tree.map(torch.clone, state.params),
        "donate=False": lambda: state.params,
        "pickle": lambda: pickle.loads(pickle.dumps(state)).params,
    }
    expected = {name: value.tolist() for name, value in state.params.items()}
    best = ways[how]()
    for _ in range(2):
        state, _ = train(state, x)
    assert {name: value.tolist() for name, value in best.items()} == expected
    assert {name: value.tolist() for name, value in state.params.items()} != expected


def test_going_back_to_a_copy() -> None:
    train, state, x = made()
    state, _ = train(state, x)
    best = copy.deepcopy(state)
    once = [train(copy.deepcopy(best), x)[0].params["w"].tolist() for _ in range(2)]
    state, _ = train(state, x)
    assert once == [state.params["w"].tolist()] * 2


def test_tensors_that_were_put_into_a_state() -> None:
    """`dataclasses.replace` makes a state of tensors that somebody holds."""
    from dataclasses import replace

    train, state, x = made()
    mine = {"w": torch.ones(3, 2), "b": torch.ones(2)}
    following, _ = train(replace(state, params=mine), x)
    with pytest.raises(DonatedStateError):
        mine["w"].sum()
    with pytest.raises(DonatedStateError):
        state.params  # noqa: B018 (it shares the optimizer's state)
    assert following.params["w"].isfinite().all()


@pytest.mark.parametrize("guard", ["off", "skip"])
def test_metrics_and_aux_keep_their_values(guard: Literal["off", "skip"]) -> None:
    def with_aux(p: Params, x: torch.Tensor) -> Any:
        return loss(p, x), {"b": p["b"], "row": p["w"][0]}

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
