"""A fork of a rank takes no part in its collectives, and what forks are for goes on working."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import ltx
from ltx.errors import WorldError
from ltx.runtime.pool import Pool

Ranks = Callable[[int], Pool]


class Shifted(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that a worker of a DataLoader makes, knowing whose it is."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(10 * ltx.world().rank + index)


def test_a_fork_is_refused_by_name(ranks: Ranks, tmp_path: Path) -> None:
    def on_each() -> Any:
        one = torch.ones(())
        step = ltx.data_parallel(lambda w, x: (w * x).square())
        train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=0.1))
        state, _ = train(train.init(one.clone()), one)
        before = ltx.psum(one).item()  # agreed: a fork needn't compare it any more

        def collective() -> None:
            end.send([_refused(call) for call in calls])

        calls = [
            lambda: ltx.psum(torch.tensor(100.0)),
            lambda: ltx.pmax(one),
            lambda: ltx.barrier(),
            lambda: ltx.all_gather_object(1),
            lambda: train(state, one),
            lambda: ltx.checkpoint.save(tmp_path, state),
            lambda: ltx.init(),
        ]
        mine, end = get_context("fork").Pipe(duplex=False)
        child = get_context("fork").Process(target=collective)
        child.start()
        assert mine.poll(30), "the fork hangs"
        told = mine.recv()
        child.join(30)
        ltx.checkpoint.save(tmp_path, state)  # to which the fork has said nothing in the rank's name
        return before, told, child.exitcode, ltx.psum(one).item(), train(state, one)[0].step

    for rank, (before, told, code, after, steps) in enumerate(ranks(2).run(on_each)):
        assert (before, code, after, steps) == (2.0, 0, 2.0, 2)
        assert len(told) == 7
        assert all(f"rank {rank}: this process (" in text and "is a fork of the rank's own (" in text for text in told)


def test_workers_of_a_data_loader_go_on_working(ranks: Ranks) -> None:
    def on_each() -> Any:
        loader = torch.utils.data.DataLoader(Shifted(), batch_size=2, num_workers=1, multiprocessing_context="fork")
        return [ltx.psum(batch).tolist() for batch in loader]

    assert ranks(2).run(on_each).replicated() == [[10, 12], [14, 16]]


def _refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except WorldError as error:
        return str(error)
    return "it wasn't refused"
