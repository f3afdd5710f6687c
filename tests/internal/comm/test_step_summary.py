"""The header: sums of losses and weights, and digests that differ on any rank. What signatures say of that."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ltx.core.comm.signature import Signature
from ltx.core.comm.step_summary import IssuedSummary, Said, numbers_of
from ltx.errors import RankMismatchError
from ltx.peers.posts import explain_apart, explain_mismatch
from tests.train_on import refuses


class Wire:
    def __init__(self, size: int):
        self.size = size
        self.axis_name = "data"
        self.peers = SimpleNamespace(explain_apart=lambda place, said, late: explain_apart("data", [], late))
        self.sum: Tensor = torch.zeros(())

    def orders_streams(self, device: torch.device) -> bool:
        return False

    def issue(self, operation: str, buffer: Tensor, label: str) -> Any:
        assert operation == "psum"
        self.sum = self.sum + buffer
        return SimpleNamespace(wait=lambda: self.sum, note=())


def _send(digests: list[int], losses: list[float]) -> list[IssuedSummary]:
    wire: Any = Wire(len(digests))
    numbers = [numbers_of([loss, 1.0], Said(digest).digest) for digest, loss in zip(digests, losses, strict=True)]
    tensors = [torch.tensor(each, dtype=torch.float64) for each in numbers]
    return [IssuedSummary(wire.issue("psum", tensor, "summary"), wire) for tensor in tensors]


@pytest.mark.parametrize("n", [1, 2, 3, 100])
def test_equal_digests(n: int, seed: int) -> None:
    losses = [random.uniform(-1, 1) for _ in range(n)]
    for work in _send([random.getrandbits(62)] * n, losses):
        header = work.wait()
        assert header is work.wait(), "a second wait gives the same"
        assert (header.total, header.weight) == (pytest.approx(sum(losses), rel=1e-12), n)
        assert header.mean(torch.float32) == torch.tensor(header.total / n, dtype=torch.float32)


@pytest.mark.full(but=1)
@pytest.mark.parametrize("n", [2, 3, 100])
def test_one_bit_on_one_rank(n: int, seed: int) -> None:
    for bit in range(60):
        digests = [random.getrandbits(60)] * n
        digests[random.randrange(n)] ^= 1 << bit
        for work in _send(digests, [0.0] * n)[:2]:
            refuses(RankMismatchError, r"axis 'data': ranks have issued different collectives", work.wait)


def test_a_loss_that_is_not_finite_leaves_the_digest_alone() -> None:
    assert _send([5, 5], [float("nan"), 1.0])[0].wait().mean(torch.float32).isnan()
    assert _send([5, 5], [float("inf"), 1.0])[0].wait().mean(torch.float32).isinf()


# Signatures: the texts of disagreements that no test of calls has.
PSUM = Signature("psum", (("w", "float32[2]"), ("b", "float32[]")), "dim=0")


def test_many_ranks_are_grouped() -> None:
    by_rank = {rank: PSUM if rank != 7 else Signature("pmax", ()) for rank in range(20)}
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 8 and 11 more: psum; rank 7: pmax." in str(explain_mismatch("data", by_rank))


def test_leaves_in_another_order() -> None:
    text = str(explain_mismatch("data", {0: PSUM, 1: Signature("psum", PSUM.leaves[::-1], "dim=0")}))
    assert "order of leaves: rank 0: ['w', 'b']; rank 1: ['b', 'w']. Fix: give every rank the same tree." in text


def test_leaves_of_one_path_are_compared_one_by_one() -> None:
    pair = Signature("psum", (("x", "float32[1]"), ("x", "float32[2]")))
    other = Signature("psum", (("x", "float32[1]"), ("x", "float32[3]")))
    assert "float32[2]" in str(explain_mismatch("data", {0: pair, 1: other}))
