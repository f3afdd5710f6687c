"""Compressors that users bring as two functions."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx.errors import LtxError, StrategyError
from ltx.hooks import error_feedback, from_functions
from tests.contract.hooks.table import quarter, spread
from tests.kinds import Ranks
from tests.train_on import refuses, said


def test_the_mean_of_what_each_rank_sends(ranks: Ranks, seed: int) -> None:
    def run() -> tuple[Tensor, Tensor]:
        x = torch.randn(64)
        got, _ = ltx.sync_gradients(x, ltx.DDPStrategy(comm_hook=from_functions(quarter, spread)))
        size = ltx.world().size
        return got, ltx.psum(spread(quarter(x / size), 64))

    for got, expected in ranks(3).run(run):
        torch.testing.assert_close(got, expected)


def test_messages_that_are_views_of_others_conjugated_or_negated(ranks: Ranks, seed: int) -> None:
    x = torch.randn(2, 7)
    for compress, decompress in (
        (lambda x: torch.complex(x, 2 * x).conj(), lambda message, numel: (message.real - message.imag) / 3),
        (lambda x: torch.complex(x, 2 * x).conj().imag, lambda message, numel: message / -2),
    ):
        strategy = ltx.DDPStrategy(comm_hook=from_functions(compress, decompress))
        found = ranks(2).run(lambda s=strategy: ltx.sync_gradients(x[ltx.world().rank], s)[0])
        torch.testing.assert_close(found.replicated(), x.mean(0))


def test_messages_whose_length_depends_on_the_values_are_refused(ranks: Ranks, seed: int) -> None:
    def run() -> str:
        hook = from_functions(lambda x: x[x > 0], lambda message, numel: message.new_zeros(numel))
        return said(LtxError, lambda: ltx.sync_gradients(torch.randn(64), ltx.DDPStrategy(comm_hook=hook)))

    for text in ranks(2).run(run):
        assert "must follow from the length and dtype of its argument" in text
        assert "and for as many zeros torch.float32 of shape [0]" in text


@pytest.mark.parametrize(
    ("compress", "decompress", "text"),
    [
        (lambda x: 3, spread, "compress must return a tensor or a tuple of tensors, got 3"),
        (lambda x: (), spread, "compress must return a tensor or a tuple of tensors, got ()"),
        (lambda x: x, lambda message, numel: 3, "decompress must return"),
        (lambda x: x, lambda message, numel: message[1:], "decompress must return"),
        (lambda x: x, lambda message, numel: message.int(), "decompress must return"),
        (None, spread, "takes two functions, got None and"),
        (lambda x: x, lambda message: message, "calls decompress(message, numel), and <lambda> takes (message)"),
        (lambda x, numel: x, spread, "calls compress(vector), and <lambda> takes (x, numel)"),
    ],
)
def test_refused(compress: Any, decompress: Any, text: str) -> None:
    def run() -> Tensor:
        strategy = ltx.DDPStrategy(comm_hook=from_functions(compress, decompress))
        reduced: Tensor = ltx.vmap(lambda x: ltx.sync_gradients(x, strategy)[0])(torch.randn(2, 8))
        return reduced

    refuses(StrategyError, re.escape(text), run)


def test_is_a_value() -> None:
    hook = from_functions(quarter, spread)
    assert hook == from_functions(quarter, spread) != from_functions(quarter, spread, error_feedback=True)
    assert repr(error_feedback(hook)) == "from_functions(quarter, spread, error_feedback=True)"
