"""Training that goes on from a checkpoint: bit for bit what it would have been, for every strategy."""

from __future__ import annotations

import random
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ltx
from ltx.errors import CheckpointError, InputError, RankMismatchError, UnsupportedError
from ltx.strategies import StateLayout
from tests import train_on
from tests.contract.strategies.problem import make_problem
from tests.contract.strategies.table import KINDS, ROWS
from tests.contract.strategies.test_conformance import tensors, trainer
from tests.kinds import Params, Ranks
from tests.train_on import go_on, on_ranks, refuses
from tests.twins.cases import assert_same_bits

ADAMW = ltx.optim.from_torch(torch.optim.AdamW, lr=lambda count: 0.05 / (1 + count))


def bits(state: Any) -> list[Tensor]:
    return ltx.tree.flatten((state.params, state.buffers, state.opt_state, state.sync_state, state.loss_scale))[0]


def assert_same(a: Any, b: Any) -> None:
    assert (a.step, a.sync_state.step, a.layout) == (b.step, b.sync_state.step, b.layout)
    assert ltx.tree.flatten(a)[1] == ltx.tree.flatten(b)[1]
    assert_same_bits(*(dict(zip(ltx.tree.leaf_paths(state), bits(state), strict=True)) for state in (a, b)))


@pytest.mark.full(but=2)
@pytest.mark.covering(1, of=lambda name, how: (KINDS[name], how))
@pytest.mark.parametrize("how", ["save", "save_async"])
@pytest.mark.parametrize("name", ROWS)
def test_every_strategy_goes_on_bit_for_bit(name: str, how: str, ranks: Ranks, seed: int, tmp_path: Path) -> None:
    row = ROWS[name]
    problem = make_problem(seed, row.ranks[0])

    def on_a_rank() -> tuple[Any, Any]:
        train = trainer(row)

        def steps(state: Any, *which: int) -> Any:
            return train.finish(go_on(train, state, problem.batches(*which)).state)

        state, saving = steps(train.init(tensors(problem.start)), 0, 5), None
        if how == "save":
            ltx.checkpoint.save(tmp_path, state)
        else:
            saving = ltx.checkpoint.save_async(tmp_path, state)
        end = steps(state, 5)  # which overwrite what is being saved
        if saving is not None:
            saving.result()
        restored = ltx.checkpoint.load(tmp_path, train.init(tensors(problem.start)))
        assert (restored.step, restored.data) == (5, None)
        return end, steps(restored.state, 5)

    for end, other_end in ranks(row.ranks[0]).run(on_a_rank):
        assert_same(end, other_end)


def with_dropout(p: Params, buffers: Params, x: Tensor) -> Any:
    hidden = torch.nn.functional.dropout(torch.tanh(x @ p["w"]), 0.5)
    noise = 1e-3 * (random.random() + np.random.rand())
    return (hidden @ p["v"] - 1).square().mean() + noise, {"seen": buffers["seen"] + len(x), "last": x.mean(0)}


def big_train(strategy: ltx.Strategy | None = None, **kwargs: Any) -> Any:
    return ltx.train_step(ltx.data_parallel(with_dropout, strategy or ltx.DDPStrategy()), ADAMW, **kwargs)


def start(train: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    params = {"w": torch.randn(6, 40, generator=generator), "v": torch.randn(40, 1, generator=generator)}
    return train.init(params, {"seen": torch.tensor(0), "last": torch.zeros(6)})


def batches(position: int) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * position + int(ltx.axis_index())))


def steps(train: Any, state: Any, which: range) -> Any:
    return go_on(train, state, map(batches, which)).state


@pytest.mark.parametrize("n", [1, 2])
def test_dropout_data_and_buffers_go_on(n: int, ranks: Ranks, seed: int, tmp_path: Path) -> None:
    def on_a_rank() -> Any:
        rank = int(ltx.axis_index())
        torch.manual_seed(seed + rank)
        random.seed(seed + rank)
        np.random.seed((seed + rank) % 2**32)
        train = big_train()
        state = steps(train, start(train), range(3))
        random.gauss(0, 1)  # leaves half of a pair behind
        np.random.randn()
        order = torch.randperm(9)
        position = {"next": 3, "order": order, "inner": [(rank, None, 0.1, True, "a"), {}], "nan": float("inf")}
        ltx.checkpoint.save(tmp_path, state, data=position)
        end, draws = steps(train, state, range(3, 6)), [torch.rand(3), random.gauss(0, 1), np.random.randn()]
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        restored = ltx.checkpoint.load(tmp_path, start(train))
        assert torch.equal(restored.data.pop("order"), order)
        assert restored.data == {key: value for key, value in position.items() if key != "order"}
        assert type(restored.data["inner"][0]) is tuple
        other_end = steps(train, restored.state, range(restored.data["next"], 6))
        assert torch.equal(torch.rand(3), draws[0])
        assert [random.gauss(0, 1), np.random.randn()] == draws[1:]
        return end, other_end

    for end, other_end in ranks(n).run(on_a_rank) if n > 1 else [on_a_rank()]:
        assert_same(end, other_end)


def test_generators_may_be_left_alone(tmp_path: Path) -> None:
    train = big_train()
    for saved, loaded in ((False, True), (True, False)):
        ltx.checkpoint.save(tmp_path, start(train), rng=saved)
        torch.manual_seed(3)
        ltx.checkpoint.load(tmp_path, start(train), rng=loaded)
        drawn = torch.rand(1)
        torch.manual_seed(3)
        assert torch.equal(drawn, torch.rand(1))


def test_generators_go_on_where_there_are_as_many_ranks(ranks: Ranks, tmp_path: Path) -> None:
    def plain() -> ltx.TrainState:
        step = ltx.data_parallel(lambda w, x: (w * x).sum())
        return ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=0.1)).init(torch.ones(3))

    def seed(number: int) -> None:
        torch.manual_seed(number)
        random.seed(number)

    def draw() -> torch.Tensor:
        """What torch draws, and what Python does."""
        return torch.cat([torch.rand(2), torch.tensor([random.random()])])

    def saved() -> Any:
        seed(3)
        ltx.checkpoint.save(tmp_path, plain())
        return draw()

    def loaded() -> Any:
        seed(4)
        ltx.checkpoint.load(tmp_path, plain(), rng="same ranks")
        return draw()

    assert all(torch.equal(*both) for both in zip(ranks(2).run(saved), ranks(2).run(loaded), strict=True))
    seed(4)
    assert torch.equal(draw(), next(iter(ranks(3).run(loaded))))  # and without a warning, which is an error here
    with pytest.raises(ltx.errors.ArgumentError, match=r"load: rng must be bool or .same ranks., got 'always'"):
        ltx.checkpoint.load(tmp_path, plain(), rng="always")


@on_ranks(2)
def test_leaves_of_all_kinds(tmp_path: Path) -> None:
    """0-dim, empty, non-contiguous, narrow, complex and integer leaves, and what isn't a number, bit by bit."""
    torch.manual_seed(5)
    params = {
        "scalar": torch.tensor(1.5),
        "empty": torch.ones(0, 3),
        "transposed": torch.randn(4, 3).T,
        "part": torch.randn(100)[3:9:2],
        "half": torch.randn(5).bfloat16(),
        "complex": torch.randn(3, dtype=torch.complex64).conj(),
        "double": torch.randn(2).double(),
    }
    buffers = {"flags": torch.tensor([True, False]), "count": torch.tensor(3), "nan": torch.tensor([float("nan")])}
    train = ltx.train_step(ltx.data_parallel(lambda p, b: (p["scalar"].square(), b)), ADAMW)
    state, _ = train(train.init(params, buffers))
    ltx.checkpoint.save(tmp_path, state)
    empty = ltx.tree.map(torch.zeros_like, (params, buffers))
    assert_same(state, ltx.checkpoint.load(tmp_path, train.init(*empty)).state)


def test_a_loss_scale_goes_on(tmp_path: Path) -> None:
    precision = ltx.Precision(compute=torch.float16, loss_scale=ltx.DynamicLossScale(init=8.0, growth_interval=2))
    step = ltx.mixed_precision(ltx.data_parallel(lambda w, x: (w * x).sum()), precision)
    train = ltx.train_step(step, ADAMW, donate=False)
    state, _ = go_on(train, train.init(torch.ones(3)), [torch.ones(3)] * 3)
    ltx.checkpoint.save(tmp_path, state)
    assert_same(state, ltx.checkpoint.load(tmp_path, train.init(torch.ones(3))).state)
    saved = state.state_dict()
    assert (saved["loss_scale.scale"], saved["loss_scale.good_steps"]) == (16.0, 1)


FEEDBACK = ltx.hooks.ByteGrad(error_feedback=True)


@on_ranks(2)
def test_other_buckets_take_the_same_state(tmp_path: Path) -> None:
    one = big_train(ltx.DDPStrategy(comm_hook=FEEDBACK), donate=False)
    many = big_train(ltx.DDPStrategy(comm_hook=FEEDBACK, bucket_bytes=64, first_bucket_bytes=16), donate=False)
    state = steps(one, start(one), range(3))
    assert any(x.any() for x in ltx.tree.flatten(state.sync_state.leaves)[0])
    ltx.checkpoint.save(tmp_path, state)
    restored = ltx.checkpoint.load(tmp_path, start(many)).state
    state = replace(state, layout=restored.layout)
    assert_same(state, restored)
    ends = []
    for each in (restored, state):
        torch.manual_seed(0)
        ends.append(steps(many, each, range(3, 5)).params)
    assert_same_bits(*ends)


HOOKS = [
    ltx.hooks.Noop(),  # each rank's parameters are its own
    ltx.hooks.after(2, ltx.hooks.Noop()),
    ltx.hooks.PowerSGD(rank=2, start_step=1),
    ltx.hooks.BatchedPowerSGD(rank=2, start_step=1),
    ltx.hooks.OneBit(),
    ltx.hooks.TopK(0.2),
    ltx.hooks.RandomK(0.3),
    ltx.hooks.QSGD(),
    ltx.hooks.after(4, ltx.hooks.OneBit()),
    ltx.hooks.partition({"w": ltx.hooks.PowerSGD(rank=2, start_step=1), "*": ltx.hooks.OneBit()}),
]


@pytest.mark.full(but=2)
@pytest.mark.parametrize("hook", HOOKS, ids=repr)
@on_ranks(2)
def test_what_hooks_carry_goes_on(hook: Any, seed: int, tmp_path: Path) -> None:
    train = plain_train(ltx.DDPStrategy(comm_hook=hook, bucket_bytes=64, first_bucket_bytes=16))
    state = steps(train, plain_start(train), range(3))
    ltx.checkpoint.save(tmp_path, state)
    restored = ltx.checkpoint.load(tmp_path, plain_start(train)).state
    assert_same(steps(train, state, range(3, 6)), steps(train, restored, range(3, 6)))


@pytest.mark.parametrize("strategy", [ltx.ZeroStrategy(), ltx.LocalSGDStrategy(2)], ids=["zero", "local SGD"])
def test_simulated_ranks_are_one_process(strategy: Any, tmp_path: Path) -> None:
    """A state of all of them is saved as it is, outside of ltx.vmap."""
    train, x = plain_train(strategy), torch.randn(4, 3, 8, 6)
    first, _ = ltx.vmap(train, in_dims=(None, 0))(plain_start(train), x[0])
    state, _ = ltx.vmap(train)(first, x[1])
    ltx.checkpoint.save(tmp_path, state)
    restored = ltx.checkpoint.load(tmp_path, first).state
    assert_same(state, restored)
    assert_same(ltx.vmap(train)(state, x[2])[0], ltx.vmap(train)(restored, x[2])[0])


def loss(p: Params, x: Tensor) -> Tensor:
    return (torch.tanh(x @ p["w"]) @ p["v"] - p["one"]).square().mean()


def plain_train(strategy: ltx.Strategy) -> Any:
    return ltx.train_step(ltx.data_parallel(loss, strategy), ADAMW, donate=False)


def plain_start(train: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    shapes = {"w": (6, 5), "v": (5, 1), "one": (), "few": (2,), "none": (0,)}
    return train.init({name: torch.randn(shape, generator=generator) for name, shape in shapes.items()})


@pytest.mark.full(but=1)
@pytest.mark.covering(1)
@pytest.mark.filterwarnings("ignore::ltx.errors.UnusedParameterWarning")
@pytest.mark.parametrize("strategy", [ltx.DDPStrategy(), ltx.ZeroStrategy()], ids=["ddp", "zero"])
@pytest.mark.parametrize(("before", "now"), [(2, 3), (3, 2), (1, 2), (2, 1), (3, 1)])
def test_another_number_of_ranks(strategy: Any, before: int, now: int, ranks: Ranks, tmp_path: Path) -> None:
    """The state is the same to the bit, and trains as one that came by another way."""

    def saved() -> dict[str, Tensor]:
        train = plain_train(strategy)
        state = steps(train, plain_start(train), range(3))
        ltx.checkpoint.save(tmp_path, state, data={"next": 3}, rng=False)
        return train.gather(state).state_dict()

    def gone_on(whole: dict[str, Tensor]) -> Any:
        train = plain_train(strategy)
        restored = ltx.checkpoint.load(tmp_path, plain_start(train))
        got = train.gather(restored.state).state_dict()
        expected = train.gather(plain_start(train))
        expected.load_state_dict(whole)
        return restored.data, got, steps(train, restored.state, range(3, 5)), steps(train, expected, range(3, 5))

    def on(n: int, fn: Any, *args: Any) -> list[Any]:
        return list(ranks(n).run(fn, *args)) if n > 1 else [fn(*args)]

    whole = on(before, saved)[0]
    for data, got, end, expected in on(now, gone_on, whole):
        assert data == {"next": 3}
        assert got.keys() == whole.keys()
        assert all(torch.equal(got[name], whole[name]) for name in whole)
        assert_same(end, expected)


@on_ranks(3)
def test_a_gathered_state_and_shards_are_the_same_checkpoint(tmp_path: Path) -> None:
    train = plain_train(ltx.ZeroStrategy())
    state = steps(train, plain_start(train), range(3))
    whole = train.gather(state)
    ltx.checkpoint.save(tmp_path / "shards", state)
    ltx.checkpoint.save(tmp_path / "whole", whole)
    assert_same(ltx.checkpoint.load(tmp_path / "shards", train.gather(plain_start(train))).state, whole)
    assert_same(ltx.checkpoint.load(tmp_path / "whole", plain_start(train)).state, state)


def test_what_is_each_ranks_own_needs_as_many_ranks(ranks: Ranks, tmp_path: Path) -> None:
    local = ltx.LocalSGDStrategy(100)

    def saved() -> Params:
        train = plain_train(local)
        state = steps(train, plain_start(train), range(3))
        ltx.checkpoint.save(tmp_path, state, data={"at": int(ltx.axis_index())})
        return state.params

    def loaded(strategy: ltx.Strategy, **kwargs: Any) -> Any:
        train = plain_train(strategy)
        try:
            restored = ltx.checkpoint.load(tmp_path, plain_start(train), **kwargs)
        except InputError as error:
            return str(error)
        return restored.state.params, restored.data

    mine = ranks(2).run(saved)
    (refused,) = set(ranks(3).run(loaded, local))
    assert "leaf 'params.few' was each rank's own, saved by 2 ranks with LocalSGDStrategy(" in refused
    assert refused.endswith(
        "and this world has 3 ranks. Load it on 2 ranks, or give every rank the mean of the saved values: "
        'per_rank="mean".'
    )
    (refused,) = set(ranks(2).run(loaded, ltx.DDPStrategy()))
    assert "and in this state it should be the same on every rank" in refused
    (refused,) = set(ranks(3).run(loaded, local, per_rank="mean"))
    assert "2 ranks saved different positions in their data, and this world has 3 ranks" in refused
    with pytest.warns(RuntimeWarning, match="saved by 2 ranks, and this world has 1, so they are left alone"):
        alone, _ = loaded(local, per_rank="mean", data="all")
    for params, data in [*ranks(3).run(loaded, local, per_rank="mean", data="all", rng=False), (alone, None)]:
        assert data in (None, [{"at": 0}, {"at": 1}])
        for name, x in params.items():
            assert torch.equal(x, ((mine[0][name].double() + mine[1][name].double()) / 2).float())


@dataclass(frozen=True)
class Cut(ltx.Strategy):
    """Ranks hold parts of the parameters, as a strategy of somebody else's may cut them."""

    layout: ClassVar[StateLayout] = StateLayout(params="sharded", opt_state="sharded")

    def hook(self, step: int) -> None:
        return None


def test_each_rank_gets_its_parts_back_from_whatever_cuts_them(ranks: Ranks, tmp_path: Path) -> None:
    def saved_and_loaded() -> tuple[Any, Any, set[str]]:
        train = ltx.train_step(ltx.data_parallel(lambda w, x: (w * x).sum(), Cut()), ADAMW)
        state, _ = train(train.init(torch.ones(2)), torch.tensor([1.0, -1.0]) * (1 - 2 * int(ltx.axis_index())))
        ltx.checkpoint.save(tmp_path, state)
        restored = ltx.checkpoint.load(tmp_path, train.init(torch.ones(2))).state
        return bits(state), bits(restored), {path for path in state.state_dict() if path.startswith("params")}

    each = ranks(2).run(saved_and_loaded)
    for mine, loaded, _ in each:
        torch.testing.assert_close(loaded, mine, rtol=0.0, atol=0.0)
    assert not torch.equal(each[0][0][0], each[1][0][0])
    assert [paths for *_, paths in each] == [{"params.rank_0_of_2"}, {"params.rank_1_of_2"}]
    alone = ltx.train_step(ltx.data_parallel(lambda w, x: (w * x).sum(), Cut()), ADAMW).init(torch.ones(2))
    with pytest.raises(InputError, match=r"leaf 'params' was each rank's own.*Load it on 2 ranks\.$"):
        ltx.checkpoint.load(tmp_path, alone, per_rank="mean")


def test_states_that_dont_fit_are_refused(tmp_path: Path) -> None:
    train = plain_train(ltx.DDPStrategy())
    ltx.checkpoint.save(tmp_path, plain_start(train))
    other = train.init({"w": torch.zeros(6, 5), "v": torch.zeros(5, 2), "one": torch.zeros(())})
    with pytest.raises(InputError, match=re.escape("leaf 'opt_state.per_param.few.exp_avg' isn't in the state, nor")):
        ltx.checkpoint.load(tmp_path, other)
    other = train.init({**plain_start(train).params, "v": torch.zeros(5, 2)})
    with pytest.raises(InputError, match=re.escape("was saved as float32[5, 1], and is float32[5, 2] in the state")):
        ltx.checkpoint.load(tmp_path, other)
    more = train.init({**plain_start(train).params, "more": torch.zeros(1)})
    text = r"isn't in the checkpoint.*It was saved by 1 ranks with DDPStrategy\("
    refuses(InputError, text, ltx.checkpoint.load, tmp_path, more)
    with pytest.raises(CheckpointError, match="there is no checkpoint of step 7 under"):
        ltx.checkpoint.load(tmp_path, plain_start(train), step=7)
    zero = plain_train(ltx.ZeroStrategy())
    with pytest.raises(InputError, match="Build the state with the model, optimizer and strategy"):
        ltx.checkpoint.load(tmp_path, plain_start(zero))


def test_wrong_arguments(tmp_path: Path) -> None:
    state = plain_start(plain_train(ltx.DDPStrategy()))
    for kwargs, text in (
        ({"keep": 0}, "keep must be None (all) or a whole number of at least 1, got 0"),
        ({"data": iter([])}, "data is of type list_iterator, which a checkpoint can't hold without a pickle"),
        ({"data": {"a": [{1: 2}]}}, "data['a'][0] is of type dict"),
    ):
        refuses(InputError, re.escape(text), ltx.checkpoint.save, tmp_path, state, **kwargs)
    assert ltx.checkpoint.latest(tmp_path) is None
    with pytest.raises(UnsupportedError, match="simulated ranks have no files of their own"):
        ltx.vmap(lambda x: ltx.checkpoint.save(tmp_path, state) and x)(torch.ones(2))


def test_ranks_must_save_the_same(ranks: Ranks, tmp_path: Path) -> None:
    def on_a_rank(what: str) -> str:
        train, rank = plain_train(ltx.DDPStrategy()), int(ltx.axis_index())
        state = plain_start(train)
        if rank == 1 and what == "step":
            state = replace(state, step=1)
        path = tmp_path / str(rank) if what == "path" else tmp_path
        return train_on.said(
            (RankMismatchError, CheckpointError), ltx.checkpoint.save, path, 3 if what == "state" and rank else state
        )

    for what in ("step", "path"):
        (said,) = set(ranks(2).run(on_a_rank, what))
        assert "ranks disagree on where and at which step to save: rank 0: [" in said
    assert list(tmp_path.glob("**/.*")) == []


def test_torchs_tools_read_it(ranks: Ranks, tmp_path: Path) -> None:
    def on_a_rank() -> Any:
        train = plain_train(ltx.ZeroStrategy())
        state = steps(train, plain_start(train), range(3))
        return ltx.checkpoint.save(tmp_path, state), train.gather(state)

    path, whole = ranks(2).run(on_a_rank)[0]
    dcp_to_torch_save(path, tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert torch.equal(found["params.w"], whole.params["w"])
    assert torch.equal(found["opt_state.per_param.v.exp_avg"][:5], whole.opt_state.state.per_param["v"]["exp_avg"])


@pytest.mark.parametrize("n", [1, 2, 3])
def test_one_of_an_earlier_version(n: int, ranks: Ranks, tmp_path: Path) -> None:
    """Saved by two ranks when DCP's writer wrote the files, after a step of Adam on gradients 0.5, 1.5, ... and 1."""
    shutil.unpack_archive(Path(__file__).with_name("version_1.zip"), tmp_path)
    adam = ltx.optim.from_torch(torch.optim.Adam, lr=0.5)

    def on_a_rank() -> Any:
        train = ltx.train_step(ltx.data_parallel(lambda p: p["w"].sum() + p["b"], ltx.ZeroStrategy()), adam)
        restored = ltx.checkpoint.load(tmp_path, train.init({"w": torch.zeros(5), "b": torch.zeros(())}), data="all")
        return restored.data, restored.step, train.gather(restored.state)

    for data, step, whole in ranks(n).run(on_a_rank) if n > 1 else [on_a_rank()]:
        assert [(seen["rank"], seen["order"][0].tolist()) for seen in data] == [(0, [0, 7]), (1, [1, 7])]
        assert (step, whole.step) == (1, 1)
        torch.testing.assert_close(whole.params, {"w": torch.full((5,), 0.5), "b": torch.tensor(-0.5)})
        torch.testing.assert_close(whole.opt_state.state.per_param["w"]["exp_avg"], 0.1 * (torch.arange(5) + 0.5))


def test_replicated_leaves_are_written_once_and_by_all(ranks: Ranks, tmp_path: Path) -> None:
    def on_a_rank() -> Any:
        state = plain_train(ltx.DDPStrategy()).init({str(i): torch.zeros(10_000) for i in range(8)})
        return ltx.checkpoint.save(tmp_path, state, rng=False)

    sizes = [file.stat().st_size for file in ranks(2).run(on_a_rank)[0].glob("*.distcp")]
    assert len(sizes) == 2
    once = 3 * 8 * 40_000
    assert once < sum(sizes) < 1.1 * once
    assert max(sizes) < 0.6 * once
