"""What strategies are made of: pairs, cuts, scaled rates, memory that may be written to."""

from __future__ import annotations

import pytest
import torch

import ltx
from ltx.core.transforms.strategy import may_be_written_to
from ltx.errors import StrategyError
from ltx.strategies import decentralized
from ltx.strategies.diloco import cut
from ltx.strategies.horovod import with_scaled_lr
from tests.contract.strategies.test_horovod import SGD, trainer


@pytest.mark.parametrize("_", range(20))
def test_cuts_are_balanced(_: int, seed: int) -> None:
    sizes = torch.randint(0, 100, (int(torch.randint(1, 30, ())),)).tolist()
    for parts in range(1, len(sizes) + 1):
        runs = cut(sizes, parts)
        assert [i for run in runs for i in run] == list(range(len(sizes)))
        assert len(runs) == parts
        assert all(len(run) for run in runs)
        assert max(sum(sizes[i] for i in run) for run in runs) <= sum(sizes) / parts + max(sizes)


def test_scaled_learning_rates() -> None:
    adam = ltx.optim.from_torch(torch.optim.Adam, weight_decay=0.1)
    assert with_scaled_lr(adam, 4) == ltx.optim.from_torch(torch.optim.Adam, lr=0.004, weight_decay=0.1)
    clip = ltx.optim.clip_by_global_norm(1.0)
    assert with_scaled_lr(ltx.optim.chain(clip, SGD), 2) == ltx.optim.chain(
        clip, ltx.optim.from_torch(torch.optim.SGD, lr=0.2)
    )
    scheduled = with_scaled_lr(ltx.optim.from_torch(torch.optim.SGD, lr=lambda count: 1.0 + count), 3)
    assert scheduled.lr(1) == 6.0
    own = ltx.optim.from_functions(lambda params: (), lambda grads, state, params: (grads, state))
    with pytest.raises(StrategyError, match="multiplies the learning rate of"):
        trainer(own, scale_lr=True)


def test_memory_that_others_see_isnt_written_to() -> None:
    x = torch.zeros(4)
    assert may_be_written_to([x, torch.zeros(4), torch.zeros(0), torch.zeros(0)], {"m": torch.zeros(4)})
    assert not may_be_written_to([x, x.detach()], ())
    assert not may_be_written_to([x], {"m": x.view(2, 2)})
    assert not may_be_written_to([torch.zeros(2, 2).t()], ())
    assert not torch.vmap(lambda x: torch.tensor(may_be_written_to([x], ())))(torch.zeros(2, 3)).any()


@pytest.mark.parametrize("rows", [1, 3])
def test_differences_are_added_leaf_by_leaf(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ltx.core.gradients.buffers.CHUNK", 8)
    sizes = [1, 0, 30, 4, 7]
    width = -(-sum(sizes) // rows)
    change = torch.randn(rows, width)
    messages = decentralized._CODEC.encode(change, None)
    leaves = [torch.randn(size) for size in sizes]
    whole = torch.cat(leaves) + decentralized._CODEC.decode(messages, width, torch.float32).reshape(-1)[: sum(sizes)]
    params = [torch.zeros_like(leaf) for leaf in leaves]
    decentralized._move({"own": messages}, [{"own": leaf} for leaf in leaves], params)
    for moved in (leaves, params):
        torch.testing.assert_close(torch.cat(moved), whole, rtol=0, atol=0)
