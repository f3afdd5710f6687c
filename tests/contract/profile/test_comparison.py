"""compare: train steps in turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ltx
from ltx import hooks
from ltx.errors import InputError
from tests.train_on import refuses

NET = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 3))


def loss(params: Any, buffers: Any, x: torch.Tensor) -> Any:
    y, buffers = ltx.functional_call(NET, (params, buffers), x, return_buffers=True)
    return y.square().mean(), buffers


def steps() -> dict[str, Any]:
    adam, compressed = ltx.optim.from_torch(torch.optim.Adam), ltx.DDPStrategy(comm_hook=hooks.PowerSGD(rank=1))
    strategies = {"ddp": None, "local": ltx.LocalSGDStrategy(4), "powersgd": compressed, "zero": ltx.ZeroStrategy()}
    return {name: ltx.train_step(ltx.data_parallel(loss, s), adam) for name, s in strategies.items()}


def compared() -> Any:
    candidates = steps()
    params = dict(NET.named_parameters())
    params["0.bias"].requires_grad_(False)
    state = candidates["zero"].init(params, dict(NET.named_buffers()))
    before = ltx.tree.map(torch.clone, (state.params, state.buffers))
    found = ltx.profile.compare(candidates, state, torch.randn(8, 40), steps=3)
    ltx.tree.map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), (state.params, state.buffers), before)
    return [(row.name, row.step_s) for row in found], {row.name: row.sent for row in found}, str(found)


def test_steps_in_turns(ranks: Callable[[int], ltx.Pool]) -> None:
    (rows, sent, text), (others, *_) = ranks(2).run(compared)
    assert rows == others
    assert [step_s for _, step_s in rows] == sorted(step_s for _, step_s in rows)
    assert rows[0][1] > 0
    nbytes = sum(p.nbytes for name, p in NET.named_parameters() if name != "0.bias")  # of two ranks, each sends all
    assert sent["ddp"] == nbytes
    assert sent["powersgd"] < nbytes / 2, "steps begin behind the exact ones"
    assert sent["local"] == pytest.approx(nbytes / 4)
    assert text.splitlines()[0].split() == ["candidate", "a", "step", "to", "the", "first", "sent"]
    assert text.splitlines()[2].split()[0] == rows[0][0]


def test_alone_and_what_cannot_be() -> None:
    _, sent, _ = compared()
    assert set(sent.values()) == {0.0}
    candidates = steps()
    for wrong in (({}, None), (candidates, NET)):
        refuses(InputError, "compare takes train steps by name and a state, got", ltx.profile.compare, *wrong)
    with pytest.raises(InputError, match="compare: steps must be a whole number of at least 1, got 0"):
        ltx.profile.compare(candidates, candidates["ddp"].init(dict(NET.named_parameters())), steps=0)
