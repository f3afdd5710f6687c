"""Simulated ranks, worlds of one and optimizers on a fake GPU: the CPU's bits, and no wait but those that are named."""

from __future__ import annotations

import json
import random
from functools import cache

import pytest

from tests.covering import some
from tests.programs import printed

Outcomes = dict[str, tuple[str, list[str]]]

KINDS = ("collective", "hook", "strategy", "optimizer", "step")
LISTS = "copies a list of ranks to the device, once a call"
#: Where ltx waits for a device, and why.
WAITS = {
    "hooks/adasum.py: _part_of (torch.tensor(device=))": LISTS,
    "core/collectives/permute.py: _moved (torch.tensor(device=))": LISTS,
    "core/ranks/batched.py: <listcomp> (torch.tensor(device=))": LISTS,
    "core/ranks/batched.py: on_stack (a copy to or from the CPU)": LISTS,
    "core/ranks/batched.py: index (a copy to or from the CPU)": LISTS,
    "core/comm/backends.py: to_device (a copy to or from the CPU)": LISTS,
    "core/collectives/reduce.py: weighted_mean (aten::_local_scalar_dense)": "weights that are wrong raise at once",
    "core/transforms/run.py: _weighted_mean (aten::_local_scalar_dense)": "weights that are wrong raise at once",
    "core/training/train_step.py: <lambda> (a copy to or from the CPU)": "the loss scale, once, in init",
    "core/optim/kernel.py: run (aten::_local_scalar_dense)": "torch's Adafactor and Rprop read their count of steps",
}


pytestmark = pytest.mark.timeout(180)


@cache
def outcomes(kind: str) -> Outcomes:
    """By row: what went wrong, and where it waited. A process of its own, to which the device is an accelerator."""
    seed = random.SystemRandom().randrange(1 << 24)
    print(f"seed {seed}")
    return json.loads(printed("-m", "tests.fake_gpu.rows", str(seed), kind, timeout_s=180))


@pytest.mark.parametrize("kind", some(KINDS, "collective"))
def test_as_on_the_cpu(kind: str) -> None:
    assert outcomes(kind)
    assert {name: wrong for name, (wrong, _) in outcomes(kind).items() if wrong} == {}


@pytest.mark.full
def test_waits_are_those_that_are_named() -> None:
    assert {place for kind in KINDS for _, waits in outcomes(kind).values() for place in waits} == WAITS.keys()
