"""Signatures: the texts of disagreements that no test of calls has."""

from __future__ import annotations

from ltx.core.comm.signature import Signature, explain_mismatch

PSUM = Signature("psum", (("w", "float32[2]"), ("b", "float32[]")), "dim=0")


def test_many_ranks_are_grouped() -> None:
    by_rank = {rank: PSUM if rank != 7 else Signature("pmax", ()) for rank in range(20)}
    text = str(explain_mismatch("data", by_rank))
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 8 and 11 more: psum; rank 7: pmax." in text


def test_leaves_in_another_order() -> None:
    text = str(explain_mismatch("data", {0: PSUM, 1: Signature("psum", PSUM.leaves[::-1], "dim=0")}))
    assert "order of leaves: rank 0: ['w', 'b']; rank 1: ['b', 'w']. Fix: give every rank the same tree." in text


def test_leaves_of_one_path_are_compared_one_by_one() -> None:
    """A list of tensors under one path: the second differs."""
    pair = Signature("psum", (("x", "float32[1]"), ("x", "float32[2]")))
    other = Signature("psum", (("x", "float32[1]"), ("x", "float32[3]")))
    assert "float32[2]" in str(explain_mismatch("data", {0: pair, 1: other}))
