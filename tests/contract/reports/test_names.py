"""Names of parameters that look like patterns: a name that exists is itself, wherever patterns choose parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx.errors import LtxError
from tests.train_on import refuses
from tests.twins.training import sgd

Params = dict[str, Tensor]


def params() -> Params:
    return {name: torch.tensor([1.0, 2.0]) for name in ("a[0]", "a0", "b?", "bc", "d*", "de")}


@ltx.data_parallel
def step(params: Params) -> Tensor:
    return sum((x.square().sum() for x in params.values()), torch.zeros(()))


def moved(train: Any) -> set[str]:
    state, _ = train(train.init(params()))
    return {name for name, x in params().items() if not torch.equal(x, state.params[name])}


def by_trainable(name: str) -> set[str]:
    return moved(ltx.train_step(step, sgd(lr=0.1), trainable=[name]))


def by_labels(name: str) -> set[str]:
    groups = {"own": sgd(lr=0.1), "rest": sgd(lr=0.0)}
    return moved(ltx.train_step(step, ltx.optim.partition(groups, {name: "own", "*": "rest"})))


def by_labels_of_frozen(name: str) -> set[str]:
    """A group whose only parameter is frozen takes no other one."""
    groups = {"own": sgd(lr=0.1), "rest": sgd(lr=0.0)}
    optimizer = ltx.optim.partition(groups, {name: "own", "*": "rest"})
    frozen = moved(ltx.train_step(step, optimizer, trainable=lambda path: path != name))
    return frozen or {name} - frozen


def by_keep_params(name: str) -> set[str]:
    seen: dict[str, torch.dtype] = {}

    def look(params: Params) -> Tensor:
        seen.update({name: x.dtype for name, x in params.items()})
        return step.fn(params)

    precision = ltx.Precision(compute=torch.bfloat16, keep_params=(name,))
    ltx.mixed_precision(ltx.data_parallel(look), precision)(params())
    return {name for name, dtype in seen.items() if dtype == torch.float32}


def by_hooks(name: str) -> set[str]:
    hook = ltx.hooks.partition({name: ltx.hooks.AllReduce(), "*": ltx.hooks.TopK(0.5, error_feedback=False)})
    strategy = ltx.DDPStrategy(comm_hook=hook)
    run = functools.partial(ltx.sync_gradients, strategy=strategy)
    grads = {name: x.expand(2, 2) for name, x in params().items()}
    reduced = ltx.vmap(lambda g: run(g)[0])(grads)
    return {name for name, x in reduced.items() if (x != 0).all()}


WAYS: list[Callable[[str], set[str]]] = [by_trainable, by_labels, by_labels_of_frozen, by_keep_params, by_hooks]


@pytest.mark.parametrize("name", ["a[0]", "b?", "d*"])
@pytest.mark.parametrize("way", WAYS)
def test_a_name_that_exists_is_itself(way: Callable[[str], set[str]], name: str) -> None:
    assert way(name) == {name}


def test_groups_of_names_with_brackets() -> None:
    """Both are in one group each: `a[0]` had taken `a0` too, which is in another."""
    strategy = ltx.HorovodStrategy(groups=(("a[0]",), ("a0", "b?"), ("bc",)))
    reduced = ltx.vmap(lambda g: ltx.sync_gradients(g, strategy)[0])({k: x.expand(2, 2) for k, x in params().items()})
    assert all(torch.equal(x, params()[name].expand(2, 2)) for name, x in reduced.items())


def test_other_patterns_with_brackets_stay_patterns() -> None:
    assert by_trainable("[ab]*") == {"a[0]", "a0", "b?", "bc"}
    assert by_trainable("a[[]*") == {"a[0]"}
    refuses(LtxError, "fits no parameter", by_trainable, "a[9]")
