"""A rank that is interrupted while all of them save or load: its peers raise at once, and are told who and why."""

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
from ltx.checkpoint import directory, loading, saving, storage
from ltx.checkpoint.together import Together
from ltx.errors import CheckpointError, InputError, LtxError, PeerLostError
from ltx.peers.store_exchange import StoreExchange
from tests import train_on
from tests.kinds import Ranks, Started

TRAIN = ltx.train_step(ltx.data_parallel(lambda w, x: (w * x).sum()), ltx.optim.from_torch(torch.optim.SGD, lr=0.1))


def states() -> tuple[Any, Any]:
    first = TRAIN.init(torch.ones(100))
    return TRAIN(TRAIN.init(torch.ones(100)), torch.ones(100))[0], first


class Interrupts:
    """A place in which a rank is interrupted: before what is done there, or just after."""

    def __init__(self, owner: Any, name: str, after: bool = False, at: str = ""):
        self._owner, self._name, self._after, self._at = owner, name, after, at

    def put(self, patch: pytest.MonkeyPatch, error: BaseException) -> None:
        done = getattr(self._owner, self._name)

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            if not any(isinstance(arg, str) and arg.endswith(self._at) for arg in args) and self._at:
                return done(*args, **kwargs)
            if self._after:
                done(*args, **kwargs)
            raise error

        patch.setattr(self._owner, self._name, interrupted)


PLACES = {
    "before they agree": Interrupts(saving, "_contents"),
    "waiting to agree": Interrupts(StoreExchange, "collect", at="/1"),
    "agreed": Interrupts(Together, "_meet", after=True),
    "before it writes": Interrupts(storage, "write"),
    "written": Interrupts(storage, "write", after=True),
}
ONLY_RANK_0 = {
    "waiting for parts": Interrupts(StoreExchange, "collect", at="/2"),
    "has all parts": Interrupts(StoreExchange, "collect", at="/2", after=True),
    "before it has its name": Interrupts(directory, "commit"),
}
CASES = [(place, rank) for place in PLACES for rank in (0, 1)] + [(place, 0) for place in ONLY_RANK_0]


def after_an_interrupt(place: Interrupts, interrupted: int, error: BaseException, call: Callable[[], Any]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if int(ltx.axis_index()) == interrupted:
            place.put(patch, error)
        try:
            call()
        except BaseException as raised:
            return f"{type(raised).__name__}: {raised}"
        return ""


@pytest.mark.covering(1)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=["KeyboardInterrupt", "SystemExit"])
@pytest.mark.parametrize(("place", "interrupted"), CASES)
def test_in_a_save(place: str, interrupted: int, error: BaseException, ranks: Ranks, tmp_path: Path) -> None:
    def on_a_rank() -> str:
        state, first = states()
        ltx.checkpoint.save(tmp_path, first)
        at = (PLACES | ONLY_RANK_0)[place]
        told = after_an_interrupt(at, interrupted, error, lambda: ltx.checkpoint.save(tmp_path, state))
        ltx.barrier()
        assert ltx.checkpoint.load(tmp_path, first).step == 0
        ltx.checkpoint.save(tmp_path, state)
        return told

    results = list(ranks(3).run(on_a_rank))
    kind = type(error).__name__
    assert results.pop(interrupted).startswith(kind)
    for said in results:
        assert said.startswith("CheckpointError: the checkpoint ")
        assert re.search(rf"wasn't saved.*: rank {interrupted}: {kind}", said)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["step_00000000", "step_00000001"]


TOO_LATE = [
    (Interrupts(StoreExchange, "collect", at="/3"), 1),
    (Interrupts(directory, "commit", after=True), 0),
    (Interrupts(StoreExchange, "collect", at="/4"), 0),
]


@pytest.mark.parametrize(("place", "interrupted"), TOO_LATE, ids=["has told its part", "has its name", "has told"])
def test_too_late_to_keep_others_from_saving(place: Interrupts, interrupted: int, ranks: Ranks, tmp_path: Path) -> None:
    def on_a_rank() -> str:
        state, _ = states()
        return after_an_interrupt(place, interrupted, KeyboardInterrupt(), lambda: ltx.checkpoint.save(tmp_path, state))

    results = list(ranks(3).run(on_a_rank))
    assert (results.pop(interrupted), results) == ("KeyboardInterrupt: ", ["", ""])
    assert [file.name for file in tmp_path.iterdir()] == ["step_00000001"]


def test_the_loss_of_a_peer_is_one_on_all_that_are_left(ranks: Ranks, tmp_path: Path) -> None:
    place = Interrupts(StoreExchange, "collect", at="/2")
    error = PeerLostError("rank 0: the process of rank 2 is gone")

    def on_a_rank() -> str:
        state, _ = states()
        return after_an_interrupt(place, 0, error, lambda: ltx.checkpoint.save(tmp_path, state))

    for said in ranks(3).run(on_a_rank):
        assert said.startswith("PeerLostError: ")
        assert str(error) in said
    assert list(tmp_path.iterdir()) == []


def test_while_its_copies_are_made(ranks: Ranks, tmp_path: Path) -> None:
    place = Interrupts(saving, "HostCopy")

    def on_a_rank() -> list[str]:
        def call() -> None:
            with warnings.catch_warnings(action="ignore"):
                ltx.checkpoint.save_async(tmp_path, states()[0]).result()

        return [after_an_interrupt(place, interrupted, KeyboardInterrupt(), call) for interrupted in range(2)]

    for on_rank, told in enumerate(ranks(2).run(on_a_rank)):
        for interrupted, said in enumerate(told):
            if on_rank == interrupted:
                assert said == "KeyboardInterrupt: "
            else:
                assert f"wasn't saved to {tmp_path}" in said
                assert f"rank {interrupted}: KeyboardInterrupt" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.covering(1)
@pytest.mark.parametrize("interrupted", [0, 1])
@pytest.mark.parametrize(
    "place",
    [
        Interrupts(loading, "_wanted"),
        Interrupts(StoreExchange, "collect", at="/2"),
        Interrupts(Together, "exchange", after=True, at="can't be read"),
        Interrupts(loading, "_read"),
    ],
    ids=["the steps", "waiting", "between", "the tensors"],
)
def test_in_a_load(place: Interrupts, interrupted: int, ranks: Ranks, tmp_path: Path) -> None:
    def on_a_rank() -> str:
        state, first = states()
        ltx.checkpoint.save(tmp_path, state)
        told = after_an_interrupt(place, interrupted, KeyboardInterrupt(), lambda: ltx.checkpoint.load(tmp_path, first))
        assert ltx.checkpoint.load(tmp_path, first).step == 1
        return told

    results = list(ranks(3).run(on_a_rank))
    assert results.pop(interrupted) == "KeyboardInterrupt: "
    for said in results:
        assert re.match(rf"CheckpointError: checkpoint\.load.*: rank {interrupted}: KeyboardInterrupt", said)


def test_a_warning_that_is_an_error_on_rank_0(ranks: Ranks, tmp_path: Path) -> None:
    """It alone warns, between two exchanges."""

    def on_a_rank() -> str:
        state, first = states()
        ltx.checkpoint.save(tmp_path, first)
        ltx.checkpoint.save(tmp_path, state)
        ltx.barrier()
        if int(ltx.axis_index()) == 0:
            (tmp_path / "step_00000001" / "manifest.json").write_text("{}")
        ltx.barrier()
        with warnings.catch_warnings(action="error"), pytest.raises((RuntimeWarning, LtxError)) as raised:
            ltx.checkpoint.load(tmp_path, first)
        return f"{raised.type.__name__}: {raised.value}"

    own, told = ranks(2).run(on_a_rank)
    assert own.startswith("RuntimeWarning: checkpoint.load: the checkpoint of step 1 isn't whole")
    assert told.startswith("CheckpointError: checkpoint.load")
    assert "rank 0: RuntimeWarning: checkpoint.load: the checkpoint of step 1 isn't whole" in told


def test_the_store_may_end_with_who_is_interrupted(started: Started, tmp_path: Path) -> None:
    def body(tell: Callable[[Any], None]) -> Any:
        state, _ = states()
        ltx.psum(torch.ones(3))
        if ltx.world().rank == 0:
            with pytest.MonkeyPatch.context() as patch:
                Interrupts(storage, "write").put(patch, SystemExit(0))
                ltx.checkpoint.save(tmp_path, state)
        with pytest.raises(CheckpointError, match=r"wasn't saved to .*: rank 0: SystemExit"):
            ltx.checkpoint.save(tmp_path, state)
        return "told"

    assert started(2, body, held_by="rank 0").told(1) == "told"


# What a checkpoint can't hold is refused by name, on all ranks, before anything is written.
class OfItsOwn(torch.Tensor):
    pass


NOT_PLAIN: dict[str, tuple[Callable[[], Tensor], str]] = {
    "coo": (lambda: torch.eye(3).to_sparse(), "a tensor of the layout torch.sparse_coo"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "a tensor of the layout torch.sparse_csr"),
    "meta": (lambda: torch.empty(3, device="meta"), "a tensor on the meta device"),
    "qint": (lambda: torch.quantize_per_tensor(torch.rand(3), 0.1, 0, torch.qint8), "a quantized tensor (torch.qint8)"),
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
