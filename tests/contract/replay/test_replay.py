"""Records of what ranks received, and a rank that runs alone from its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx.errors import (
    CheckpointError,
    InputError,
    NotFiniteError,
    RankMismatchError,
    ReplicaDivergedError,
    UnsupportedError,
    WorldError,
)
from tests.kinds import Params, Ranks
from tests.train_on import go_on, refuses

STEPS, SIZE = 10, 4

NET = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 3))
SGD = ltx.optim.from_torch(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAM = ltx.optim.from_torch(torch.optim.Adam, lr=0.01)


def mse(params: Params, x: Tensor, y: Tensor, weight: Any = 1.0) -> Tensor:
    error: Tensor = (ltx.functional_call(NET, params, x) - y).square().mean()
    return error * weight


def weighted(params: Params, x: Tensor, y: Tensor) -> ltx.Weighted:
    return ltx.Weighted((ltx.functional_call(NET, params, x) - y).square().sum(), len(x))


def train_step(strategy: ltx.Strategy | None = None, optimizer: Any = ADAM, loss: Any = mse, **how: Any) -> Any:
    return ltx.train_step(ltx.data_parallel(loss, strategy), optimizer, **how)


#: What is trained, by name.
KINDS: dict[str, Callable[[], Any]] = {
    "DDP": train_step,
    "PowerSGD": lambda: train_step(ltx.DDPStrategy(comm_hook=ltx.hooks.PowerSGD(rank=1))),
    "ZeRO": lambda: train_step(ltx.ZeroStrategy()),
    "bytegrad": lambda: train_step(ltx.BaguaStrategy("bytegrad")),
    "Adasum": lambda: train_step(ltx.HorovodStrategy(op="adasum"), SGD),
    "local SGD": lambda: train_step(ltx.LocalSGDStrategy(period=3)),
    "Weighted": lambda: train_step(loss=weighted),
    "accumulate": lambda: ltx.train_step(ltx.accumulate(ltx.data_parallel(mse), 2), ADAM),
    "uneven": train_step,
    "qadam": lambda: train_step(ltx.BaguaStrategy("qadam", warmup_steps=4), ltx.optim.qadam(lr=0.01, warmup_steps=4)),
    "decentralized": lambda: train_step(ltx.BaguaStrategy("decentralized")),
    "DiLoCo": lambda: train_step(ltx.DiLoCoStrategy(period=3)),
    "update": lambda: train_step(overlap="update"),
    "skip": lambda: train_step(guard="skip"),
    "compared": lambda: train_step(check_every=2),
}
#: Without --full: of these, records from so many steps on.
QUICK = {"DDP": (3,), "ZeRO": (0,), "Weighted": (3,)}


def params() -> Params:
    random = torch.Generator().manual_seed(1)
    return {name: torch.randn(p.shape, generator=random) / 4 for name, p in NET.named_parameters()}


def batches(kind: str, steps: int = STEPS) -> Iterator[tuple[Any, ...]]:
    rank = ltx.world().rank
    random = torch.Generator().manual_seed(rank)
    made = [(torch.randn(6, 8, generator=random), torch.randn(6, 3, generator=random)) for _ in range(steps)]
    if kind == "uneven":
        return ((*batch, weight) for batch, weight in ltx.uneven(made[: steps - 2 * (rank == 1)]))
    return iter(made)


def trained(train: Any, state: Any, given: Iterator[tuple[Any, ...]]) -> list[Tensor]:
    """The losses, with their means over ranks, and the parameters at the end."""
    losses = list[Tensor]()
    for batch in given:
        state, metrics = train(state, *batch)
        losses += [metrics.loss.clone(), ltx.pmean(metrics.loss)]
    return losses + [x.detach().clone() for x in state.params.values()]


def record(run: Path, kind: str, first: int) -> list[Tensor]:
    """What a rank comes to from step `first` on, while it is recorded."""
    train, given = KINDS[kind](), list(batches(kind))
    state = train.init(params())
    torch.manual_seed(ltx.world().rank)  # of the dropout
    with ltx.record_messages(run, steps=range(first, STEPS)):
        state, _ = go_on(train, state, given[:first])
        return trained(train, state, iter(given[first:]))


def replay(run: Path, kind: str, rank: int) -> list[Tensor]:
    train = KINDS[kind]()
    with ltx.replay(run, rank=rank) as replayed:
        assert (ltx.world().rank, ltx.world().size) == (rank, SIZE)
        return trained(train, replayed.load(train.init(params())), replayed.batches)


@pytest.mark.parametrize(
    "recorded", [QUICK, *(pytest.param({kind: (0, 3)}, marks=pytest.mark.full) for kind in KINDS)], ids=" ".join
)
def test_each_rank_alone_is_what_it_was(ranks: Ranks, tmp_path: Path, recorded: dict[str, tuple[int, ...]]) -> None:
    """In a new process, of records from the first step on and from a later one."""
    runs = [(str(tmp_path / f"{kind} {first}"), kind, first) for kind in recorded for first in recorded[kind]]
    were = ranks(SIZE).run(lambda: [record(Path(run), kind, first) for run, kind, first in runs])
    told = str(tmp_path / "told")
    program = (
        "import torch; from tests.contract.replay.test_replay import *; "
        f"torch.save([[replay(Path(r), k, rank) for r, k, _ in {runs}] for rank in range({SIZE})], {told!r})"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[3], env=dict(os.environ))
    for rank, (of_rank, alone) in enumerate(zip(were, torch.load(told, weights_only=True), strict=True)):
        for (_, kind, first), then, now in zip(runs, of_rank, alone, strict=True):
            assert [*map(torch.equal, then, now)] == [True] * len(then), f"{kind} from step {first} on, rank {rank}"


@pytest.fixture
def recorded(ranks: Ranks, tmp_path: Path) -> Path:
    """A record of steps 3 to 9 of two ranks."""
    ranks(2).run(partial(record, tmp_path, "DDP", 3))
    return tmp_path


def test_a_record_of_a_world_of_one(tmp_path: Path) -> None:
    then = record(tmp_path, "DDP", 3)
    with ltx.replay(tmp_path, rank=0) as replayed:
        train = KINDS["DDP"]()
        now = trained(train, replayed.load(train.init(params())), replayed.batches)
    assert all(map(torch.equal, then, now))
    assert replayed.steps == [3, 4, 5, 6, 7, 8, 9]


def test_on_as_many_threads_as_then(tmp_path: Path) -> None:
    here = torch.get_num_threads()
    torch.set_num_threads(here + 1)
    record(tmp_path, "DDP", 3)
    torch.set_num_threads(here)
    with ltx.replay(tmp_path, rank=0):
        assert torch.get_num_threads() == here + 1
    assert torch.get_num_threads() == here


def test_another_collective_has_left_the_record(recorded: Path) -> None:
    train = KINDS["DDP"]()
    with ltx.replay(recorded, rank=1) as replayed:
        state, batch = replayed.load(train.init(params())), next(replayed.batches)
        state, _ = train(state, *batch)
        with pytest.raises(RankMismatchError) as raised:
            ltx.psum(torch.ones(7, 1, 5))  # Which no test before it sent between these workers.
    said = str(raised.value)
    assert re.match(r"rank 1, at step 3, in call \d+ on channel 'user' of axis 'data', has left the record: ", said)
    assert re.search(r"expected psum of .*, got psum\(.*float32\[7, 1, 5\]\)\.", said)
    assert said.endswith(
        ". Run the recorded program: with the same model, strategy and batches, and the same collectives in the same "
        "order."
    )


def test_other_values_sent(recorded: Path) -> None:
    train = KINDS["DDP"]()
    for check_sent in (True, False):
        with ltx.replay(recorded, rank=1, check_sent=check_sent) as replayed:
            state, (x, y) = replayed.load(train.init(params())), next(replayed.batches)
            if check_sent:
                with pytest.raises(ReplicaDivergedError, match=r"rank 1, at step 3, .* sends other values than then"):
                    train(state, x + 1, y)
            else:
                assert train(state, x + 1, y)[0].step == 4


def test_steps_and_states_that_are_not_in_the_record(recorded: Path) -> None:
    train, other = KINDS["DDP"](), train_step(optimizer=SGD)
    with ltx.replay(recorded, rank=0) as replayed:
        with pytest.raises(InputError, match=r"step 0 isn't in the record of rank 0, which has steps \[3, 4, "):
            train(train.init(params()), torch.ones(6, 8), torch.ones(6, 3))
        refuses(InputError, "differ in their leaves", lambda: replayed.load(other.init(params())))
    with pytest.raises(CheckpointError, match=r"there is no record under .*rank_7"), ltx.replay(recorded, rank=7):
        pass
    with ltx.init(rank=0, size=1), pytest.raises(WorldError, match="has a world"), ltx.replay(recorded, rank=0):
        pass


def test_a_damaged_record_is_refused(recorded: Path) -> None:
    (file,) = recorded.glob("rank_0/step_*/*.distcp")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"expected .* bytes, found"), ltx.replay(recorded, rank=0):
        pass
    file.unlink()
    (file.parent / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json can't be read"), ltx.replay(recorded, rank=0):
        pass


def test_collectives_beside_ltx_raise(recorded: Path) -> None:
    with ltx.replay(recorded, rank=0), pytest.raises(RuntimeError, match="FakeProcessGroup"):
        torch.distributed.all_reduce(torch.ones(2))


@pytest.mark.parametrize("save", [ltx.checkpoint.save, ltx.checkpoint.save_async])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_replay_saves_nothing(rank: int, save: Any, recorded: Path, tmp_path: Path) -> None:
    """Rank 0 would write over the training's files, and the others would wait for it."""
    with ltx.replay(recorded, rank=rank) as replayed:
        state = replayed.load(KINDS["DDP"]().init(params()))
        with pytest.raises(UnsupportedError, match="a replay has one rank, and would write over the training's files"):
            save(tmp_path / "saved", state)
    assert not (tmp_path / "saved").exists()


def with_calls_between(run: Path) -> None:
    train = KINDS["DDP"]()
    state = train.init(params())
    with ltx.record_messages(run, steps=range(1, 4)):
        for x, y in batches("DDP"):
            state, _ = train(state, x, y)
            ltx.psum(torch.ones(()))


def test_a_call_that_is_left_out_between_steps(ranks: Ranks, tmp_path: Path) -> None:
    """What is sent is as it was: the calls before it aren't."""
    ranks(2).run(partial(with_calls_between, tmp_path))
    train = KINDS["DDP"]()
    with ltx.replay(tmp_path, rank=0) as replayed:
        state = replayed.load(train.init(params()))
        with pytest.raises(RankMismatchError, match="has left the record: expected the recorded calls before"):
            go_on(train, state, replayed.batches)


def not_a_number(run: Path) -> str:
    """Train until a NaN, which comes in step 4 from rank 2's batch alone; gives the error's text."""
    train, rank = train_step(guard="raise"), ltx.world().rank
    state = train.init(params())
    try:
        with ltx.record_messages(run, steps=range(2, 8)):
            for step, (x, y) in enumerate(batches("DDP")):
                x[3, 5] = float("inf") if (rank, step) == (2, 4) else 0.0
                state, _ = train(state, x, y)
    except NotFiniteError as error:
        return str(error)
    return ""


def test_where_a_nan_comes_from(ranks: Ranks, tmp_path: Path) -> None:
    texts = ranks(3).run(partial(not_a_number, tmp_path))
    train = train_step(guard="raise")
    with ltx.replay(tmp_path, rank=2) as replayed:
        state = replayed.load(train.init(params()))
        state, _ = go_on(train, state, islice(replayed.batches, 2))
        x, y = [*replayed.batches][2]
        with pytest.raises(NotFiniteError) as raised:
            train(state, x, y)
    assert str(raised.value) == texts[2]
    assert (state.step, replayed.steps) == (4, [2, 3, 4])
    assert (~x.isfinite()).nonzero().tolist() == [[3, 5]]


def test_nobody_to_compare_calls_with(recorded: Path) -> None:
    text = r"knows nothing of its ranks\. In ltx\.replay each call is compared with the record anyway"
    with ltx.replay(recorded, rank=1), pytest.raises(UnsupportedError, match=text), ltx.debug_checks():
        pass


@pytest.mark.full  # each of these starts programs; what they do, rows above do in this process
def test_the_pages_programs(tmp_path: Path) -> None:
    page = Path(__file__).parents[3] / "docs" / "how-to" / "replay.md"
    programs = re.findall(r"^```python\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(page.parents[2]), os.environ.get("PYTHONPATH", "")])}

    def run(program: str, *command: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / program).write_text(programs.pop(0))
        command = (sys.executable, *command, program)
        return subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)

    then, now = run("train.py", "-m", "ltx", "run", "-n", "3"), run("again.py")
    assert now.stdout == "3 [True]\n4 [False]\n"
    error = now.stderr.strip().rpartition("\n")[2]
    assert "rank 2" in error
    assert error.partition(": ")[2] in then.stderr


@pytest.mark.full
@pytest.mark.parametrize("nothing", [False, True])
def test_a_script_that_knows_nothing_of_it(nothing: bool, tmp_path: Path) -> None:
    lines = (
        "import sys, torch, ltx",
        "sgd = ltx.optim.from_torch(torch.optim.SGD, lr=1.0)",
        "train = ltx.train_step(ltx.data_parallel(lambda w, x: (w * x).sum()), sgd)",
        "if __name__ == '__main__':",
        "    assert sys.argv == ['train.py', '--flag']",
        "    with ltx.init() as world:",
        "        state = train.init(torch.zeros(2))",
        "        for step in range(4):",
        "            state, _ = train(state, torch.full((2,), float(world.rank + step)))",
    )
    (tmp_path / "train.py").write_text("\n".join(lines))
    command = [sys.executable, "-m", "ltx", "run", "-n", "2", "-m", "ltx.record", "run"]
    command += ["50:60" if nothing else "1:3", "train.py", "--flag"]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, cwd=tmp_path, env=environ, check=True, capture_output=True, text=True)
    if nothing:  # of which each rank tells when its world has ended
        assert done.stderr.count("no step of range(50, 60) was seen, so nothing is recorded") == 2
        return
    train = ltx.train_step(ltx.data_parallel(lambda w, x: (w * x).sum()), ltx.optim.from_torch(torch.optim.SGD, lr=1.0))
    with ltx.replay(tmp_path / "run", rank=1) as replayed:
        state, _ = go_on(train, replayed.load(train.init(torch.zeros(2))), replayed.batches)
    assert state.params.tolist() == [-(0.5 + 1.5 + 2.5)] * 2


def test_what_is_not_recorded(tmp_path: Path) -> None:
    train = KINDS["DDP"]()
    nothing = r"rank 0: no step of range\(50, 60\) was seen, so nothing is recorded"
    with pytest.warns(RuntimeWarning, match=nothing), ltx.record_messages(tmp_path, steps=range(50, 60)):
        trained(train, train.init(params()), batches("DDP"))
    assert not any(tmp_path.iterdir())


def test_batches_that_cannot_be_recorded(tmp_path: Path) -> None:
    train = KINDS["DDP"]()
    state, y = train.init(params()), torch.ones(6, 3)
    for given, named, why in (
        (({1}, y), {}, "the batch of step 0: .*of type set, which .* batches=False"),
        ((), {"x": torch.ones(6, 8), "y": y}, r"give batches by position, got \['x', 'y'\]; or batches=False"),
    ):
        recording = ltx.record_messages(tmp_path, steps=range(50))
        with pytest.warns(RuntimeWarning, match="nothing is recorded"), pytest.raises(InputError, match=why), recording:
            train(state, *given, **named)


def test_a_bound_on_size(tmp_path: Path) -> None:
    train, full = KINDS["DDP"](), "rank 0: more than max_bytes=100 came before step 1, where the record ends"
    with pytest.warns(RuntimeWarning, match=full), ltx.record_messages(tmp_path, steps=range(9), max_bytes=100):
        trained(train, train.init(params()), batches("DDP"))
    with ltx.replay(tmp_path, rank=0) as replayed:
        assert replayed.steps == [0]
