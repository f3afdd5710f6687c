"""What a checkpoint can't hold is refused by name, on all ranks, before anything is written."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx.checkpoint import saving
from ltx.errors import CheckpointError, InputError
from tests import train_on
from tests.kinds import Ranks

TRAIN = ltx.train_step(ltx.data_parallel(lambda w, x: (w * x).sum()), ltx.optim.from_torch(torch.optim.SGD, lr=0.1))


class OfItsOwn(torch.Tensor):
    pass


NOT_PLAIN: dict[str, tuple[Callable[[], Tensor], str]] = {
    "coo": (lambda: torch.eye(3).to_sparse(), "a tensor of the layout torch.sparse_coo"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "a tensor of the layout torch.sparse_csr"),
    "meta": (lambda: torch.empty(3, device="meta"), "a tensor on the meta device"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.rand(3), 0.1, 0, torch.qint8),
        "a quantized tensor (torch.qint8)",
    ),
    "nested": (lambda: torch.nested.nested_tensor([torch.rand(2), torch.rand(3)]), "a nested tensor"),
    "class": (lambda: torch.rand(3).as_subclass(OfItsOwn), "a OfItsOwn, a class of tensors of its own"),
}


@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_data_that_isnt_plain_is_one_error_on_all(kind: str, ranks: Ranks, tmp_path: Path) -> None:
    def on_a_rank() -> str:
        make, _ = NOT_PLAIN[kind]
        with warnings.catch_warnings(action="ignore"):  # torch's own, of what it calls a prototype
            data = {"seen": [torch.ones(2), make() if ltx.axis_index() == 1 else torch.ones(3)]}
        state = TRAIN.init(torch.ones(3))
        text = train_on.said(InputError, ltx.checkpoint.save, tmp_path, state, data=data)
        ltx.checkpoint.save(tmp_path, state, data=data["seen"][0])
        return text

    first, second = ranks(2).run(on_a_rank)
    assert first == second
    assert f"rank 1: checkpoint: data['seen'][1] is {NOT_PLAIN[kind][1]}, and a checkpoint holds" in first
    assert [file.name for file in tmp_path.iterdir()] == ["step_00000000"]


def test_data_that_cant_be_compared_is_one_error_on_all(ranks: Ranks, tmp_path: Path) -> None:
    """As where its device fails, which shows when it is read."""

    def on_a_rank() -> str:
        def fail(*args: Any, **kwargs: Any) -> str:
            raise MemoryError

        with pytest.MonkeyPatch.context() as patch:
            if ltx.axis_index() == 1:
                patch.setattr(saving, "digest", fail)
            return train_on.said(CheckpointError, lambda: ltx.checkpoint.save(tmp_path, TRAIN.init(torch.ones(3))))

    (said,) = set(ranks(2).run(on_a_rank))
    assert said == "the checkpoint wasn't saved: rank 1: MemoryError. Earlier ones are as they were."
    assert list(tmp_path.iterdir()) == []


def test_data_inside_of_a_transform(tmp_path: Path) -> None:
    state = TRAIN.init(torch.ones(3))
    with pytest.raises(InputError, match=r"data\['x'\] is a tensor inside of a transform of torch.func"):
        torch.func.vmap(lambda x: ltx.checkpoint.save(tmp_path, state, data={"x": x}))(torch.ones(2))


def test_a_state_that_isnt_plain(tmp_path: Path) -> None:
    """It was written, and could never be read."""
    state = TRAIN.init(torch.ones(3).as_subclass(OfItsOwn))
    with pytest.raises(InputError, match=re.escape("checkpoint: leaf 'params' is a OfItsOwn, a class of tensors of")):
        ltx.checkpoint.save(tmp_path, state)
    assert list(tmp_path.iterdir()) == []
