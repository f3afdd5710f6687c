"""Models of other libraries on two ranks, against a plain torch loop in one process on the whole batch."""

from __future__ import annotations

import pytest
import torch

from tests.contract.models.twins import STEPS, both, load
from tests.contract.models.zoo import MODELS
from tests.covering import some
from tests.kinds import Ranks
from tests.needs import needs

# Not imported here, which takes seconds: ranks do that.
pytestmark = needs("transformers", "peft")


ROWS = {
    "gpt2": ("plain", "checkpoint", "bf16", "weights", "uneven"),
    "llama": ("plain", "checkpoint", "accumulate", "bf16"),
    "bert": ("plain", "checkpoint", "bf16", "uneven"),
    "t5": ("plain", "checkpoint", "weights"),
    "vit": ("plain", "accumulate", "bf16", "uneven", "compiled"),
    "resnet18": ("eval", "local", "sync"),
    "resnet50": ("eval", "local", "sync"),
    "lora": ("plain", "checkpoint", "accumulate", "uneven"),
}


@pytest.fixture(scope="module")
def loaded(ranks: Ranks) -> Ranks:
    ranks(2).run(load)
    return ranks


def check(name: str, variants: tuple[str, ...], ranks: Ranks, seed: int) -> None:
    for rank, results in enumerate(ranks(2).run(both, name, variants, seed)):
        for variant, (mine, expected, before) in results.items():
            said = f"{name}, {variant}, rank {rank}: "
            rtol = max(MODELS[name].rtol, 1e-5 if "bf16" in variant else 0.0)
            tolerance = {"rtol": rtol, "atol": rtol, "msg": lambda text, said=said: said + text}
            assert len(mine.losses) == STEPS
            torch.testing.assert_close(mine.losses, expected.losses, **tolerance)
            torch.testing.assert_close(dict(mine.params), expected.params, **tolerance)
            torch.testing.assert_close(dict(mine.buffers), expected.buffers, **tolerance)
            frozen = [key for key in before if name == "lora" and "lora_" not in key]
            assert all(torch.equal(mine.params[key], before[key]) for key in frozen), said + "a frozen parameter moved"
            moved = [key for key in before if not torch.equal(mine.params[key], before[key])]
            assert len(moved) > 3, said + "nothing was trained"


@pytest.mark.full
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", some(ROWS, "llama", "resnet18", "lora"))
def test_like_one_process(name: str, loaded: Ranks, seed: int) -> None:
    check(name, ROWS[name], loaded, seed)
