"""Signatures: what is compared, and the texts of disagreements."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ltx.core.comm import operations
from ltx.core.comm.signature import Signature, explain_mismatch
from ltx.core.comm.step_summary import IssuedSummary, Said, send_summary
from ltx.errors import LtxError, RankMismatchError

PSUM = Signature("psum", (("w", "float32[2]"), ("b", "float32[]")), "dim=0")


def _random_signature() -> Signature:
    text = ["", "w", "layers.0", "barrier 'x'", 'quote"', "ünïcode\n\\", "<tensor>"]
    leaves = tuple((random.choice(text), random.choice(text)) for _ in range(random.randrange(4)))
    return Signature(random.choice(text), leaves, random.choice(text))


def test_there_and_back_through_json(seed: int) -> None:
    drawn = [_random_signature() for _ in range(200)]
    for signature in drawn:
        assert Signature.from_json(signature.to_json()) == signature
    assert len({s.fingerprint for s in drawn}) == len(set(drawn)), "different ones have different fingerprints"


def test_fingerprints_are_the_same_in_every_process() -> None:
    assert PSUM.fingerprint == 599021627975147398
    assert 0 <= PSUM.fingerprint < 2**60


def test_texts() -> None:
    w, b = PSUM.leaves
    others = {
        "the operation: rank 0: psum; rank 1: pmax. Fix: call the same collectives in the same order.": Signature(
            "pmax", PSUM.leaves
        ),
        "psum, leaf 'w': rank 0: float32[2]; rank 1: float64[2]. Fix: give every rank the same tree, shapes and "
        "dtypes.": Signature("psum", (("w", "float64[2]"), b), "dim=0"),
        "psum, leaf 'b': rank 0: float32[]; rank 1: no such leaf. Fix: give every rank the same tree, shapes and "
        "dtypes.": Signature("psum", (w,), "dim=0"),
        "psum, leaf 'c': rank 0: no such leaf; rank 1: int64[]. Fix: give every rank the same tree, shapes and "
        "dtypes.": Signature("psum", (w, b, ("c", "int64[]")), "dim=0"),
        "psum, order of leaves: rank 0: ['w', 'b']; rank 1: ['b', 'w']. Fix: give every rank the same tree.": Signature(
            "psum", (b, w), "dim=0"
        ),
        "psum, its arguments: rank 0: dim=0; rank 1: dim=1. Fix: call it with the same arguments on every "
        "rank.": Signature("psum", PSUM.leaves, "dim=1"),
    }
    for text, other in others.items():
        error = explain_mismatch("data", {0: PSUM, 1: other})
        assert str(error) == f"axis 'data': ranks disagree on {text}"
        assert isinstance(error, RankMismatchError | LtxError | RuntimeError)


def test_many_ranks_are_grouped() -> None:
    by_rank = {rank: PSUM if rank != 7 else Signature("pmax", ()) for rank in range(20)}
    text = str(explain_mismatch("data", by_rank))
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 8 and 11 more: psum; rank 7: pmax." in text


def test_leaves_of_one_path_are_compared_one_by_one() -> None:
    """A list of tensors under one path: the second differs."""
    pair = Signature("psum", (("x", "float32[1]"), ("x", "float32[2]")))
    other = Signature("psum", (("x", "float32[1]"), ("x", "float32[3]")))
    assert "float32[2]" in str(explain_mismatch("data", {0: pair, 1: other}))


# --- The header: sums of losses and weights, and digests that differ on any rank -------------------------------------


class Wire:
    """Adds up what the ranks of an axis put on a channel."""

    def __init__(self, size: int):
        self.size = size
        self.axis_name = "data"
        self.sum: Tensor = torch.zeros(())

    def orders_streams(self, device: torch.device) -> bool:
        return False

    def issue(self, operation: str, buffer: Tensor, label: str) -> Any:
        assert operation == "psum"
        self.sum = self.sum + buffer
        return SimpleNamespace(wait=lambda: self.sum)


def _send(digests: list[int], losses: list[float]) -> list[IssuedSummary]:
    wire: Any = Wire(len(digests))
    return [
        IssuedSummary(send_summary(wire, torch.tensor(loss), torch.tensor(1), Said(digest), torch.device("cpu")), wire)
        for digest, loss in zip(digests, losses, strict=True)
    ]


@pytest.mark.parametrize("n", [1, 2, 3, 100])
def test_equal_digests(n: int, seed: int) -> None:
    losses = [random.uniform(-1, 1) for _ in range(n)]
    for work in _send([random.getrandbits(62)] * n, losses):
        header = work.wait()
        assert header is work.wait(), "a second wait gives the same"
        assert header.total.item() == pytest.approx(sum(torch.tensor(losses).double()).item(), rel=1e-12)
        assert (header.weight.item(), header.total.dtype) == (n, torch.float64)


@pytest.mark.full(but=1)
@pytest.mark.parametrize("n", [2, 3, 100])
def test_one_bit_on_one_rank(n: int, seed: int) -> None:
    for bit in range(60):
        digests = [random.getrandbits(60)] * n
        digests[random.randrange(n)] ^= 1 << bit
        for work in _send(digests, [0.0] * n)[:2]:
            with pytest.raises(RankMismatchError, match=r"axis 'data': ranks have issued different collectives"):
                work.wait()


def test_a_loss_that_is_not_finite_leaves_the_digest_alone() -> None:
    header = _send([5, 5], [float("nan"), 1.0])[0].wait()
    assert header.total.isnan()
    assert _send([5, 5], [float("inf"), 1.0])[0].wait().total.isinf()


# --- The bits of numbers, also where vmap has no rule for them, as in torch 2.11 -------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("out", [torch.uint8, torch.int16])
@pytest.mark.parametrize("dim", [0, 1])
def test_views_equal_torchs(
    dtype: torch.dtype, out: torch.dtype, dim: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-100, 100, (3, 3, 8), generator=generator).to(dtype)
    want = x.movedim(dim, 0).contiguous().view(out)
    monkeypatch.setattr(operations, "_VMAP_KNOWS_VIEW", False)
    got = torch.vmap(lambda row: operations.view_as(row, out), in_dims=dim)(x)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    twice = torch.vmap(torch.vmap(lambda row: operations.view_as(row, out)), in_dims=dim)(x)
    torch.testing.assert_close(twice, want, rtol=0, atol=0)
    torch.testing.assert_close(operations.view_as(x, out), x.view(out), rtol=0, atol=0)


def test_under_grad_no_gradient_flows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "_VMAP_KNOWS_VIEW", False)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (x * operations.view_as(x, torch.int32).float()).sum()

    x = torch.ones(2)
    torch.testing.assert_close(torch.func.grad(loss)(x), x.view(torch.int32).float())
