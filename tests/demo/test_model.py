"""The demo's model: shapes and causality."""

from __future__ import annotations

import math

import pytest
import torch
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from ltx.demo.model import GPT


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(vocabulary=11, context=12, width=16, layers=2, heads=4)


@pytest.mark.parametrize("time", [1, 7, 12])
def test_logits_for_each_position(model: GPT, time: int) -> None:
    assert model(torch.zeros(3, time, dtype=torch.int64)).shape == (3, time, 11)


def test_a_position_sees_itself_and_what_is_before(model: GPT) -> None:
    tokens = torch.randint(11, (1, 12))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 11
    before, after = model(tokens)[0], model(changed)[0]
    torch.testing.assert_close(before[:7], after[:7])
    assert (before[7:] - after[7:]).abs().amax(dim=-1).gt(1e-6).all()


def test_it_starts_as_ignorant_as_can_be(model: GPT) -> None:
    tokens = torch.randint(11, (4, 12))
    loss = cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    assert loss.item() == pytest.approx(math.log(11), rel=0.05)


def test_a_functional_call_reads_the_parameters_given(model: GPT) -> None:
    tokens = torch.randint(11, (2, 5))
    zeros = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    assert functional_call(model, zeros, (tokens,)).eq(0).all()


def test_the_demo_has_under_a_million_parameters() -> None:
    assert 500_000 < sum(parameter.numel() for parameter in GPT(vocabulary=103).parameters()) < 1_000_000
