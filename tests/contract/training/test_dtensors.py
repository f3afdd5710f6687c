"""Training steps on DTensors: tensor parallel over one dimension of a mesh, data parallel over another."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import ltx
from ltx import optim
from ltx.errors import (
    DonatedStateError,
    InputError,
    LtxError,
    NotFiniteError,
    ReplicaDivergedError,
    StepError,
    StrategyError,
    UnsupportedError,
)
from ltx.tensor_parallel import with_dtensors
from tests.kinds import Ranks
from tests.meshes import distributed, drawn, full, loss_of, mesh_of, model_of, parallelize, placements
from tests.train_on import go_on, on_ranks, refuses, said

pytestmark = pytest.mark.full  # importing DTensors takes seconds, in each of four processes
STEPS = 3


def _sgd() -> optim.Optimizer:
    return optim.from_torch(torch.optim.SGD, lr=0.3, momentum=0.9)


def _clipped() -> optim.Optimizer:
    return optim.chain(optim.clip_by_global_norm(0.1), _sgd())


def _trained(
    weights: dict[str, Tensor], x: Tensor, y: Tensor, clip: float | None = None, only: str = ""
) -> tuple[dict[str, Tensor], float, float]:
    """(parameters, last loss, last norm) of plain torch on one process and the whole batch."""
    model, norm = model_of(weights), 0.0
    trained = [p for name, p in model.named_parameters() if name.startswith(only)]
    optimizer = torch.optim.SGD(trained, lr=0.3, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        loss.backward()
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(trained, clip).item()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, loss.item(), norm


def _wrapped(weights: dict[str, Tensor], mesh: Any, strategy: Any = None) -> tuple[Any, dict[str, Any]]:
    """A data-parallel step of a block split over `mesh`, and its parameters."""
    model = parallelize(model_of(weights), mesh["model"], sequence=True)
    step = ltx.data_parallel(loss_of(model, mesh["model"], sequence=True), strategy, axis=mesh["data"])
    return step, dict(model.named_parameters())


@pytest.mark.parametrize("overlap", ["backward", "update"])
@pytest.mark.parametrize("donate", [True, False])
def test_training_is_that_of_one_process(overlap: Any, donate: bool, ranks: Ranks, seed: int) -> None:
    """Parameters are DTensors that lie as the given ones; what is read off a state are copies."""

    def run(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[Any, ...]:
        with mesh_of(2, 2) as mesh:
            step, params = _wrapped(weights, mesh)
            train = with_dtensors(ltx.train_step(step, _sgd(), overlap=overlap, donate=donate))
            batch = ltx.shard((x, y), axis=mesh["data"])
            first = state = train.init(params)
            held, kept = first.params["up.weight"], copy.deepcopy(first)
            state, (*_, metrics) = go_on(train, state, [batch] * STEPS)
            if donate:
                assert "was donated" in said(DonatedStateError, lambda: first.params)
                assert "was donated" in said(DonatedStateError, train, first, *batch)
            for one in (held, kept.params["up.weight"]):
                torch.testing.assert_close(one.full_tensor(), weights["up.weight"])
            assert placements(state.params) == placements(params)
            assert state.parts.step == STEPS
            torch.testing.assert_close(full({**params}), {name: weights[name] for name in params})  # copied
            again = ltx.to_module(model_of(weights), {name: x.clone() for name, x in full(state.params).items()})
            assert torch.equal(again.up.weight, state.params["up.weight"].full_tensor())
            return full(state.params), metrics.loss

    weights, x, y = drawn()
    expected, loss, _ = _trained(weights, x, y)
    for params, found in ranks(4).run(run, weights, x, y):
        torch.testing.assert_close(params, expected, rtol=1e-3, atol=1e-5)
        assert type(found) is Tensor
        assert found.item() == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize("kind", ["plain", "ZeRO", "frozen and accumulated"])
def test_the_norm_counts_each_number_once(kind: str, ranks: Ranks, seed: int) -> None:
    """Parts are added up over the model's dimension, and what is replicated or frozen there isn't.

    With ZeRO, whose ranks have parts of those, over the data's dimension too.
    """
    only = "q" if kind == "frozen and accumulated" else ""

    def run(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[dict[str, Tensor], float]:
        with mesh_of(2, 2) as mesh:
            step, params = _wrapped(weights, mesh, ltx.ZeroStrategy() if kind == "ZeRO" else None)
            for name, p in params.items():
                p.requires_grad_(name.startswith(only))
            step, checks = (ltx.accumulate(step, 2), {"check_every": 1}) if only else (step, {})
            train = with_dtensors(ltx.train_step(step, _clipped(), **checks))
            state, batch = train.init(params), ltx.shard((x, y), axis=mesh["data"])
            state, (*_, metrics) = go_on(train, state, [batch] * STEPS)
            assert placements(state.params) == placements(params)
            return full(state.params), metrics.grad_norm.item()

    weights, x, y = drawn()
    expected, _, norm = _trained(weights, x, y, clip=0.1, only=only)
    for params, found in ranks(4).run(run, weights, x, y):
        torch.testing.assert_close(params, expected, rtol=1e-3, atol=1e-5)
        assert found == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("bad", [True, False])
@on_ranks(4)
def test_all_ranks_of_the_mesh_skip_together(bad: bool) -> None:
    """A number that isn't finite in one part of a parameter, which is one rank's of the model's dimension."""
    w, rank = torch.linspace(-1, 1, 4), torch.distributed.get_rank()
    with mesh_of(2, 2) as mesh:
        part = {"w": distributed(w, mesh["model"])}
        x = torch.full((2,), float("nan") if bad and rank == 3 else 1.0)
        step = ltx.data_parallel(lambda p, x: (p["w"].to_local() * x).sum(), axis=mesh["data"])
        skipping = with_dtensors(ltx.train_step(step, _sgd(), guard="skip"))
        state, metrics = skipping(skipping.init(part), x)
        torch.testing.assert_close(full(state.params)["w"], w if bad else w - 0.3)
        if bad:
            raising = with_dtensors(ltx.train_step(step, _sgd(), guard="raise", donate=False))
            text = r"rank 1: leaf 'w' \(NaN, 2 of 2 elements\)" if rank % 2 else "that ranks beside this axis hold"
            refuses(NotFiniteError, text, raising, raising.init(part), x)
        scaled = ltx.mixed_precision(step, ltx.Precision(compute=torch.float32, loss_scale=ltx.DynamicLossScale()))
        scaling = with_dtensors(ltx.train_step(scaled, _sgd()))
        _, others = scaling(scaling.init(part), x)
        assert (bool(metrics.skipped), bool(others.skipped)) == (bad, bad)


@pytest.mark.parametrize("name", ["zero", "local", "diloco", "diloco, sent ahead"])
def test_strategies_of_updates_work_by_parts(name: str, ranks: Ranks, seed: int) -> None:
    """As on two ranks that hold whole parameters."""
    strategies = {
        "zero": ltx.ZeroStrategy(),
        "local": ltx.LocalSGDStrategy(period=2, warmup_steps=1),
        "diloco": ltx.DiLoCoStrategy(period=2),
        "diloco, sent ahead": ltx.DiLoCoStrategy(period=2, fragment_sync_delay=1),
    }

    def run(w: Tensor, x: Tensor, split: bool) -> Tensor:
        with mesh_of(2, 2) as mesh:
            params: Any = {"w": distributed(w, mesh["model"]) if split else w, "b": w[0].clone()}

            def loss(p: Any, x: Tensor) -> Tensor:
                whole = p["w"].full_tensor() if split else p["w"]
                return (x @ whole.T + p["b"][0]).sin().mean()

            adam = optim.from_torch(torch.optim.Adam, lr=0.1, eps=1e-3)
            train: Any = ltx.train_step(ltx.data_parallel(loss, strategies[name], axis=mesh["data"]), adam)
            train = with_dtensors(train) if split else train
            state, mine = train.init(params), ltx.shard(x, axis=mesh["data"])
            state = train.gather(train.finish(go_on(train, state, [mine] * 4).state))
            return full(state.params)["w"]

    w, x = torch.randn(5, 3), torch.randn(4, 3)
    split, whole = ranks(4).run(run, w, x, True), ranks(4).run(run, w, x, False)
    for a, b in zip(split, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "strategy",
    [None, ltx.ZeroStrategy(), ltx.DDPStrategy(comm_hook=ltx.hooks.TopK(0.5)), ltx.LocalSGDStrategy(2)],
    ids=["plain", "ZeRO", "error feedback", "local SGD"],
)
def test_checkpoints_are_torchs(strategy: ltx.Strategy | None, ranks: Ranks, seed: int, tmp_path: Path) -> None:
    """Each rank keeps its parts, and what is its own; ltx's refuse to keep one rank's for all."""

    def run(w: Tensor, x: Tensor, path: str) -> list[Any]:
        import torch.distributed.checkpoint as dcp

        with mesh_of(2, 2) as mesh:
            params = {"w": distributed(w, mesh["model"])}
            params["b"] = distributed(torch.zeros(4), mesh["model"])

            def loss(params: Any, x: Tensor) -> Tensor:
                return (x @ params["w"].full_tensor().T + params["b"].full_tensor()).sin().mean()

            step = ltx.data_parallel(loss, strategy, axis=mesh["data"])
            train, mine = with_dtensors(ltx.train_step(step, _sgd(), donate=False)), ltx.shard(x, axis=mesh["data"])
            state, _ = train(train.init(params), mine)
            dcp.save({"state": state}, checkpoint_id=path)
            text = said(LtxError, ltx.checkpoint.save, path, state)
            restored = train.init(params)
            dcp.load({"state": restored}, checkpoint_id=path)
            assert restored.parts.step == 1
            moved = train.broadcast(restored, src=1) if strategy is None else restored
            return [text, *(full(train(train(one, mine)[0], mine)[0].params) for one in (restored, moved, state))]

    w, x = torch.randn(4, 5), torch.randn(4, 5)
    for text, after, moved, expected in ranks(4).run(run, w, x, str(tmp_path)):
        assert "DTensorState" in text
        torch.testing.assert_close(after, expected, rtol=0, atol=0)
        torch.testing.assert_close(moved, expected, rtol=0, atol=0)


SAVES = (ltx.checkpoint.save, ltx.checkpoint.save_async)


def _refused(save: Callable[..., Any], path: Path, state: Any) -> str:
    return said(InputError, save, path, state.parts)


def test_parts_are_saved_by_the_ranks_that_hold_them(ranks: Ranks, seed: int, tmp_path: Path) -> None:
    """In a directory for each rank of the model. One directory would keep one rank's parts for all, and is refused."""

    def run(w: Tensor, path: Path) -> list[Any]:
        from torch.distributed.tensor import Replicate

        with mesh_of(1, 2) as mesh:
            step = ltx.data_parallel(lambda p: p["w"].full_tensor().sin().sum(), axis=mesh["data"])
            train = with_dtensors(ltx.train_step(step, _sgd(), donate=False))
            params = {"w": distributed(w, mesh["model"])}
            state, _ = train(train.init(params))
            kinds = (state, train.adopt(state), train.finish(state), replace(state, parts=copy.copy(state.parts)))
            texts = [_refused(save, path / "all", kind) for save in SAVES for kind in kinds]
            mine = path / str(mesh["model"].get_local_rank())
            ltx.checkpoint.save(mine, state.parts, axis=mesh["data"])
            again = replace(state, parts=ltx.checkpoint.load(mine, train.init(params).parts, axis=mesh["data"]).state)
            texts.append(_refused(ltx.checkpoint.save, path / "all", again))
            whole = {"w": distributed(w, mesh["model"], Replicate())}  # on each rank: what one keeps is all
            ltx.checkpoint.save(path / "whole", train.init(whole).parts)
            return [texts, (path / "all").exists(), *(full(train(one)[0].params) for one in (state, again))]

    for texts, exists, expected, found in ranks(2).run(run, torch.randn(4, 3), tmp_path):
        assert len(texts) == 9
        assert all("Save those of each rank of the model in a directory of their own" in text for text in texts)
        assert not exists
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_weighted_losses_other_outputs_and_another_train_step(ranks: Ranks, seed: int) -> None:
    def run(w: Tensor, x: Tensor) -> list[Any]:
        with mesh_of(2, 2) as mesh:
            params, mine = distributed(w, mesh["model"]), ltx.shard(x, axis=mesh["data"])

            def total(w: Any, x: Tensor) -> Tensor:
                return (x @ w.full_tensor().T).sin().sum()

            steps = [
                ltx.data_parallel(lambda w, x: (total(w, x) / 6, w.detach().sum()), axis=mesh["data"]),
                ltx.data_parallel(lambda w, x: (ltx.Weighted(total(w, x), torch.tensor(6.0)), 0), axis=mesh["data"]),
            ]
            found = []
            for step in steps:
                train = with_dtensors(ltx.train_step(step, _sgd(), has_aux=True))
                state, metrics = train(train.init(params), mine)
                found.append((state.params.full_tensor(), metrics.loss))
                if step is steps[0]:
                    torch.testing.assert_close(metrics.aux, w.sum())
                clipped = with_dtensors(ltx.train_step(step, _clipped(), has_aux=True))
                assert "train.adopt" in said(StepError, lambda to=clipped, state=state: to(state, mine))
                state, _ = clipped(clipped.adopt(state), mine)
                assert state.parts.step == 2
            return found

    w, x = torch.randn(3, 2), torch.randn(4, 2)
    loss = (x @ w.T).sin().mean()
    expected = w - 0.3 * torch.func.grad(lambda w: (x @ w.T).sin().mean())(w)
    for found in ranks(4).run(run, w, x):
        for after, value in found:
            torch.testing.assert_close(after, expected)
            torch.testing.assert_close(value, loss)


@pytest.mark.parametrize("whole", [True, False])
@on_ranks(4)
def test_what_is_not_split_is_the_same_on_all_ranks(whole: bool) -> None:
    """Along the model's dimension too, where nobody makes it so."""
    from torch.distributed.tensor import DTensor, Replicate

    for odd in (False, True):
        with mesh_of(2, 2) as mesh:
            b = torch.ones(2) + (1.0 if odd and torch.distributed.get_rank() % 2 else 0.0)
            bias = DTensor.from_local(b, mesh["model"], [Replicate()]) if whole else b
            params = {"w": distributed(torch.ones(4, 2), mesh["model"]), "b": bias}
            step = ltx.data_parallel(lambda p: p["w"].full_tensor().sum(), axis=mesh["data"])
            train = with_dtensors(ltx.train_step(step, _sgd()))
            if odd:
                refuses(ReplicaDivergedError, "leaf 'b'.*It isn't split there", train.init, params)
            else:
                train.init(params)


@on_ranks(4)
def test_what_is_refused() -> None:
    with mesh_of(2, 2) as mesh:
        w = distributed(torch.ones(4, 2), mesh["model"])

        def train(optimizer: Any = None, strategy: Any = None, params: Any = w) -> Any:
            step = ltx.data_parallel(lambda w: w.full_tensor().sum(), strategy, axis=mesh["data"])
            made = with_dtensors(ltx.train_step(step, optimizer or _sgd()))
            return made(made.init(params))

        module, adafactor = nn.Module(), optim.from_torch(torch.optim.Adafactor, lr=0.1)
        module.weight = nn.Parameter(w)
        refuses(StrategyError, r"Adafactor, lr=0\.1\) needs whole parameters", train, adafactor)
        refuses(UnsupportedError, "HorovodStrategy", train, strategy=ltx.HorovodStrategy(op="adasum"))
        refuses(UnsupportedError, r"train\.init\(dict\(module\.named_parameters\(\)\)\)", train, params=module)
