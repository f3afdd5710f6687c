"""DataPosition: every sample once in an epoch, on any number of ranks. Shares that rank 0 gives out."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ltx
from ltx.errors import AxisError, DataError, InputError
from tests.kinds import Ranks
from tests.train_on import refuses


@pytest.mark.parametrize("shuffle", [True, False])
def test_no_sample_is_lost_or_seen_twice_while_ranks_come_and_go(shuffle: bool, seed: int) -> None:
    for _ in range(30):
        length = random.randint(1, 60)
        start = ltx.DataPosition(length, random.randint(1, 70), seed, shuffle=shuffle, weighted=True)
        position, epochs = start, [Counter[int]() for _ in range(3)]
        while position.epoch < 3:
            size = random.randint(1, 9)  # another one at every step
            parts = [position.indices(rank, size) for rank in range(size)]
            assert {part.dtype for part in parts} == {torch.int64}
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
            for part in parts:
                epochs[position.epoch].update(part.tolist())
            position = position.after_step()
        assert position == replace(start, epoch=3)
        assert epochs == [Counter(range(length))] * 3


def test_a_step_takes_the_same_samples_on_any_number_of_ranks(seed: int) -> None:
    position = ltx.DataPosition(50, 12, seed).after_step()
    sets = [
        sorted(i for rank in range(size) for i in position.indices(rank, size).tolist()) for size in (1, 2, 3, 4, 6, 12)
    ]
    assert all(indices == sets[0] for indices in sets)


def test_orders_are_those_of_torchs_sampler_and_differ_by_epoch(seed: int) -> None:
    sampler = torch.utils.data.DistributedSampler(range(20), 1, 0, seed=seed)  # type: ignore[var-annotated, arg-type]
    orders = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        orders.append(ltx.DataPosition(20, 20, seed, epoch).indices().tolist())
        assert orders[-1] == list(sampler)
    assert orders[0] != orders[1]


def test_what_it_gives_is_the_callers() -> None:
    position = ltx.DataPosition(4, 4, shuffle=False)
    position.indices().zero_()
    assert position.indices().tolist() == [0, 1, 2, 3]


def test_it_is_saved_as_a_dict() -> None:
    position = ltx.DataPosition(10, 3, seed=5).after_step()
    assert ltx.DataPosition(**asdict(position)) == position


def test_unequal_parts_are_refused_unless_the_step_is_weighted() -> None:
    with pytest.raises(InputError, match=r"a step takes 10 samples .* which 3 ranks can't share out equally"):
        ltx.DataPosition(100, 10).indices(0, 3)
    with pytest.raises(InputError, match=r"a step takes 5 samples .*length=25.* which 2 ranks"):
        ltx.DataPosition(25, 10).check_sizes(1, 2)
    ltx.DataPosition(24, 12).check_sizes(1, 4)
    ltx.DataPosition(25, 10, weighted=True).check_sizes(1, 7)


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"length": 0, "batch_size": 1}, "DataPosition.length must be a whole number of at least 1, got 0"),
        ({"length": 3, "batch_size": 0}, "batch_size must be .* got 0"),
        ({"length": 3, "batch_size": True}, r"batch_size must be int, got True"),
        ({"length": 3, "batch_size": 1, "seed": -1}, "seed must be .* got -1"),
        (
            {"length": 3, "batch_size": 1, "done": 3},
            "DataPosition.done must be a whole number of at least 0, and at most 2, got 3",
        ),
    ],
)
def test_fields_out_of_range(kwargs: dict[str, Any], said: str) -> None:
    refuses(InputError, said, ltx.DataPosition, **kwargs)


def test_a_rank_that_isnt_there() -> None:
    refuses(InputError, "expected a rank from 0 to 1, got 2", ltx.DataPosition(8, 4).indices, 2, 2)


def seen_first(folder: Path) -> Callable[[], tuple[list[bool], list[int]]]:
    """What each rank finds there, twice, and writes if it isn't; and who came there."""

    def on_a_rank() -> tuple[list[bool], list[int]]:
        found, came = [], []
        for name in ("first", "second"):
            with ltx.rank_zero_first():
                found.append((folder / name).exists())
                (folder / name).touch()
                came.append(int(ltx.axis_index()))
        return found, came

    return on_a_rank


def failing(error: BaseException) -> tuple[str, str, float]:
    try:
        with ltx.rank_zero_first():
            if int(ltx.axis_index()) == 0:
                raise error
            raise AssertionError("this rank comes after an error")
    except (OSError, KeyboardInterrupt, DataError) as raised:
        return type(raised).__name__, str(raised), ltx.psum(torch.tensor(1.0)).item()  # all go on together


def test_rank_zero_goes_first_and_its_errors_and_interrupts_reach_all(ranks: Ranks, tmp_path: Path) -> None:
    assert list(ranks(2).run(seen_first(tmp_path))) == [([False] * 2, [0, 0]), ([True] * 2, [1, 1])]
    for error, said in ((OSError("no such host"), "OSError: no such host"), (KeyboardInterrupt(), "KeyboardInterrupt")):
        first, second = ranks(2).run(failing, error)
        assert first == (type(error).__name__, str(error), 2.0)
        assert second[0::2] == ("DataError", 2.0)
        assert f"rank 0 of axis 'data' raised {said}" in second[1]
        assert "All ranks stop here." in second[1]


def test_alone_and_under_vmap() -> None:
    with pytest.raises(OSError, match="disk"), ltx.rank_zero_first():
        raise OSError("disk")
    refuses(AxisError, r"under ltx\.vmap", ltx.vmap(lambda x: ltx.rank_zero_first().__enter__()), torch.ones(2))
