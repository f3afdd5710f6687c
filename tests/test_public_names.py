"""The public surface: what ``import *`` and ``dir`` show."""

from __future__ import annotations

import types
from importlib import import_module

import pytest

import ltx

PUBLIC = ("ltx", "ltx.checkpoint", "ltx.errors", "ltx.extend", "ltx.hooks", "ltx.nn", "ltx.optim", "ltx.profile")
PUBLIC += ("ltx.tensor_parallel",)
MODULES = {
    "ltx": {"checkpoint", "errors", "hooks", "nn", "optim", "profile", "tensor_parallel"},
    "ltx.extend": {"arguments", "buffers", "collectives", "comm", "needs", "noise", "optimizers", "tree"},
}


@pytest.mark.parametrize("name", PUBLIC)
def test_star_and_dir_are_all(name: str) -> None:
    module, namespace = import_module(name), dict[str, object]()
    exec(f"from {name} import *", namespace)
    assert sorted(set(namespace) - {"__builtins__"}) == sorted(module.__all__) == sorted(set(module.__all__))
    assert [shown for shown in dir(module) if not shown.startswith("__")] == sorted(module.__all__)


@pytest.mark.parametrize("name", PUBLIC)
def test_no_internal_module_is_public(name: str) -> None:
    module = import_module(name)
    modules = {shown for shown in module.__all__ if isinstance(getattr(module, shown), types.ModuleType)}
    assert modules == MODULES.get(name, set())


def test_a_name_that_is_nowhere() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'allreduce'"):
        ltx.allreduce  # noqa: B018
