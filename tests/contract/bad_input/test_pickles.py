"""Pickles of ltx's values that are cut short, or of other fields, load or raise; and where ltx unpickles at all."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ltx
from ltx import hooks
from tests.contract.bad_input import public

VALUES: dict[str, Any] = {
    "TrainState": lambda: public.trained()[1],
    "SyncState": lambda: ltx.data_parallel(public.loss, ltx.DDPStrategy(comm_hook=hooks.TopK(0.5))).init(
        public.params()
    ),
    "DDPStrategy": lambda: ltx.DDPStrategy(comm_hook=hooks.PowerSGD(2)),
    "LocalSGDStrategy": lambda: ltx.LocalSGDStrategy(4),
    "PerRank": lambda: ltx.PerRank([torch.ones(2), torch.zeros(2)]),
    "Precision": lambda: ltx.Precision(),
    "an optimizer": lambda: ltx.optim.from_torch(torch.optim.AdamW, lr=0.1),
}


@pytest.mark.parametrize("name", VALUES)
def test_cut_short(name: str) -> None:
    """What a crash left of a pickle is never taken for the whole."""
    whole = pickle.dumps(VALUES[name]())
    assert type(pickle.loads(whole)) is type(VALUES[name]())

    @settings(max_examples=30, deadline=None, database=None, print_blob=True)
    @given(st.integers(0, len(whole) - 1))
    def loads_or_raises(length: int) -> None:
        with pytest.raises(Exception):  # noqa: B017, PT011 - pickle's own, of a dozen classes
            pickle.loads(whole[:length])

    loads_or_raises()


@pytest.mark.parametrize("name", ["DDPStrategy", "LocalSGDStrategy"])
def test_strategies_of_other_fields(name: str) -> None:
    """A field that this version doesn't know, or one too few: the strategy shows what it has, or raises, by name."""
    made = VALUES[name]()
    fields = dict(made.__dict__)
    fields.pop("bucket_bytes")
    foreign = object.__new__(type(made))
    foreign.__dict__.update(fields, unknown=3)
    again = pickle.loads(pickle.dumps(foreign))
    assert again.bucket_bytes == type(made).bucket_bytes, "what is missing has its default"


def _unpickling(path: Path) -> set[str]:
    """The functions of a file that unpickle something."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            for inner in ast.walk(node):
                named = isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name)
                if named and (inner.value.id, inner.attr) in {
                    ("pickle", "loads"),
                    ("pickle", "load"),
                    ("pickle", "Unpickler"),
                    ("cloudpickle", "loads"),
                    ("cloudpickle", "load"),
                    ("torch", "load"),
                }:
                    found.add(f"{path.name}:{node.name}")
                called = inner.func if isinstance(inner, ast.Call) else None
                if isinstance(called, ast.Name) and called.id.endswith("Unpickler"):
                    found.add(f"{path.name}:{node.name}")
    return found


def test_where_ltx_unpickles() -> None:
    """docs/concepts/security.md lists these. The store holds JSON; a new entry here needs a reason there."""
    package = Path(ltx.__file__).parent
    found = {entry for path in package.rglob("*.py") for entry in _unpickling(path)}
    assert found == {
        "uneven.py:_objects",
        "pickling.py:_of_peer",
        "messages.py:receive",
        "failures.py:failure_error",
        "storage.py:read_metadata",
    }
