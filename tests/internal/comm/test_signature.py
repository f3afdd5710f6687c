"""Signatures: what is compared, and the texts of disagreements."""

from __future__ import annotations

import random

from ltx.core.comm.signature import Signature, explain_mismatch
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
