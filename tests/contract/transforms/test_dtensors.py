"""Gradients of DTensors: data parallelism over one dimension of a mesh beside tensor parallelism over another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import ltx
from ltx.errors import UnsupportedError
from ltx.tensor_parallel import with_dtensors
from tests import inside
from tests.inside import stateful
from tests.kinds import Ranks
from tests.meshes import distributed, drawn, full, loss_of, mesh_of, model_of, parallelize, placements
from tests.train_on import on_ranks, said

pytestmark = pytest.mark.full  # importing DTensors takes seconds, in each of four processes


def _expected(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The gradients on one process, of the whole batch."""
    model = model_of(weights)
    params = dict(model.named_parameters())
    return dict(zip(params, torch.autograd.grad(mse_loss(model(x), y), list(params.values())), strict=True))


@dataclass(frozen=True, kw_only=True)
class MakesItsHook(ltx.Strategy):
    """One that holds no hook in a field."""

    def hook(self, step: int) -> ltx.hooks.CommHook:
        return ltx.hooks.PowerSGD(start_step=0)


@pytest.mark.parametrize("sequence", [False, True])
def test_gradients_are_those_of_one_process(sequence: bool, ranks: Ranks, seed: int) -> None:
    """By each way to take them; with a sequence that is split, those of norms come as sums (Partial) that are due."""

    def run(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[bool, dict[str, dict[str, Tensor]], Any]:
        with mesh_of(2, 2) as mesh:
            model = parallelize(model_of(weights), mesh["model"], sequence)
            params = dict(model.named_parameters())
            loss = loss_of(model, mesh["model"], sequence)
            plain, batch = ltx.data_parallel(loss, axis=mesh["data"]), ltx.shard((x, y), axis=mesh["data"])
            step, values = with_dtensors(plain), list(params.values())

            def backward() -> dict[str, Tensor]:
                step(params, *batch).backward()
                return {name: p.grad for name, p in params.items() if p.grad is not None}

            other = ltx.mixed_precision(plain, ltx.Precision(compute=torch.float64))
            ways: dict[str, Any] = {
                "backward": backward(),
                "autograd": dict(zip(params, torch.autograd.grad(step(params, *batch), values), strict=True)),
                "grad": step.grad(params, *batch),
                "micro-batches": with_dtensors(ltx.accumulate(plain, 2)).grad(params, *batch),
                "float64": with_dtensors(other).grad(params, *batch),
            }
            kept = all(placements(grads) == placements(params) for grads in ways.values())
            value = step(params, *batch)
            return kept, {name: full(grads) for name, grads in ways.items()}, (type(value), value.item())

    weights, x, y = drawn()
    expected, loss = _expected(weights, x, y), mse_loss(model_of(weights)(x), y).item()
    values = []
    for kept, ways, (kind, value) in ranks(4).run(run, weights, x, y):
        assert kept
        assert kind is Tensor
        values.append(value)
        for grads in ways.values():
            torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-6)
    assert values[0] == values[1]  # ranks of one part of the batch
    assert sum(values) / 4 == pytest.approx(loss, rel=1e-5)


def test_parts_of_unequal_and_of_no_size(ranks: Ranks, seed: int) -> None:
    """Rows that don't divide: ranks of the model's dimension reduce buckets of different sizes."""

    def run(weights: list[Tensor], x: Tensor) -> list[Tensor]:
        from torch.distributed.tensor import Replicate

        with mesh_of(2, 2) as mesh:
            model = mesh["model"]
            params = [distributed(w, model) for w in weights]

            def loss(params: list[Any], x: Tensor) -> Tensor:
                w, v, s = (p.redistribute(placements=[Replicate()]).to_local() for p in params)
                return ((x @ w.T).sin() * v * s.sum()).sum(1).mean()

            step = with_dtensors(ltx.data_parallel(loss, axis=mesh["data"]))
            return [g.full_tensor() for g in step.grad(params, ltx.shard(x, axis=mesh["data"]))]

    weights, x = [torch.randn(5, 3), torch.randn(5), torch.randn(1)], torch.randn(6, 3)
    expected = torch.func.grad(lambda p: ((x @ p[0].T).sin() * p[1] * p[2].sum()).sum(1).mean())(weights)
    for grads in ranks(4).run(run, weights, x):
        torch.testing.assert_close(grads, expected)


def test_several_axes_of_a_mesh(ranks: Ranks, seed: int) -> None:
    """Two dimensions of three are one axis: of the mesh, or of ltx beside it."""

    def run(w: Tensor, x: Tensor) -> list[Tensor]:
        names, found = ("node", "data", "model"), []
        for sizes in ((2, 1, 2), (2, 2, 1)):
            with mesh_of(*sizes, names=names, **dict(zip(names, sizes, strict=True))) as mesh:
                part = distributed(w, mesh["model"])
                for axis in (mesh["node", "data"], (mesh["node"], mesh["data"]), ("node", "data")):
                    step = ltx.data_parallel(lambda w, x: (x @ w.full_tensor().T).sin().mean(), axis=axis)
                    found.append(with_dtensors(step).grad(part, ltx.shard(x, axis=axis)).full_tensor())
        return found

    w, x = torch.randn(3, 2), torch.randn(4, 2)
    expected = torch.func.grad(lambda w: (x @ w.T).sin().mean())(w)
    for found in ranks(4).run(run, w, x):
        for grad in found:
            torch.testing.assert_close(grad, expected)


def test_second_derivatives(ranks: Ranks, seed: int) -> None:
    """By plain autograd, through what torch's DTensors can differentiate twice."""

    def run(w: Tensor, x: Tensor) -> Tensor:
        from torch.distributed.tensor import Replicate

        with mesh_of(2, 2) as mesh:
            part = nn.Parameter(distributed(w, mesh["model"]))

            def loss(w: Any, x: Tensor) -> Tensor:
                return (x @ w.redistribute(placements=[Replicate()]).to_local().T).sin().mean()

            step = with_dtensors(ltx.data_parallel(loss, axis=mesh["data"]))
            (grad,) = torch.autograd.grad(step(part, ltx.shard(x, axis=mesh["data"])), part, create_graph=True)
            (second,) = torch.autograd.grad((grad.full_tensor() ** 2).sum(), part)
            return second.full_tensor()

    w, x = torch.randn(4, 2), torch.randn(4, 2)
    grad = torch.func.grad(lambda w: (x @ w.T).sin().mean())
    expected = torch.func.grad(lambda w: (grad(w) ** 2).sum())(w)
    for second in ranks(4).run(run, w, x):
        torch.testing.assert_close(second, expected)


def test_lossy_hooks_and_their_state(ranks: Ranks, seed: int) -> None:
    """Error feedback is by parts; what is sent of a part is what a hook sends of such a tensor."""

    def run(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor, list[int]]:
        with mesh_of(2, 2) as mesh:
            part = distributed(w, mesh["model"])
            strategy = ltx.DDPStrategy(comm_hook=ltx.hooks.TopK(0.5))
            step = ltx.data_parallel(lambda w, x: (w.full_tensor() * x).sum(), strategy, axis=mesh["data"])
            step = with_dtensors(step)
            state, total = step.init(part), torch.zeros(4, 3)
            for _ in range(4):
                grad, state = step.grad(part, x[mesh["data"].get_local_rank()], sync_state=state)
                total += grad.full_tensor()
            (own,) = ltx.tree.flatten(state.leaves)[0]
            return total, own, list(part.to_local().shape)

    w, x = torch.randn(4, 3), torch.randn(2, 4, 3)
    for total, own, shape in ranks(4).run(run, w, x):
        assert list(own.shape) == shape == [2, 3]
        assert (total - 4 * x.mean(0)).abs().max() <= 4 * x.abs().max()


def test_parameters_are_compared_part_by_part(ranks: Ranks, seed: int) -> None:
    """Along the data axis: parts of one parameter differ, and those that should be the same mustn't."""

    def run(w: Tensor, odd: bool) -> str:
        from torch.distributed.tensor import DTensor, Shard

        with mesh_of(2, 2) as mesh:
            rank = torch.distributed.get_rank()
            mine = w[rank % 2] + (1.0 if odd and rank >= 2 else 0.0)
            part = {"w": DTensor.from_local(mine, mesh["model"], [Shard(0)])}
            step = with_dtensors(ltx.data_parallel(lambda p: p["w"].full_tensor().sum(), axis=mesh["data"]))
            if not odd:
                step.grad(part)
                return ""
            return said(ltx.errors.ReplicaDivergedError, lambda: step.grad(part))

    w = torch.randn(2, 2, 3)
    assert ranks(4).run(run, w, False).replicated() == ""
    assert all("leaf 'w'" in text and "differs on rank 1" in text for text in ranks(4).run(run, w, True))


def test_other_outputs(ranks: Ranks, seed: int) -> None:
    """A loss comes as its value; what has dimensions is returned as this rank's part, and its gradients are reduced."""

    def run(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        from torch.distributed.tensor import Replicate

        with mesh_of(2, 2) as mesh:
            model = mesh["model"]
            part = nn.Parameter(distributed(w, model))

            def scores(w: Any, x: Tensor) -> Any:
                out: Any = distributed(x, model, Replicate()) @ w.T
                return {"scores": out.to_local(), "sum": out.detach().sum()}

            out = with_dtensors(ltx.data_parallel(scores, axis=mesh["data"]))(part, ltx.shard(x, axis=mesh["data"]))
            assert type(out["sum"]) is Tensor
            (grad,) = torch.autograd.grad(out["scores"].sin().sum() / 2, part)
            return out["scores"].detach(), grad.full_tensor()

    w, x = torch.randn(4, 3), torch.randn(4, 3)
    expected = torch.func.grad(lambda w: (x @ w.T).sin().sum() / 4)(w)
    for rank, (out, grad) in enumerate(ranks(4).run(run, w, x)):
        torch.testing.assert_close(out, (x @ w.T).chunk(2)[rank // 2].chunk(2, 1)[rank % 2])
        torch.testing.assert_close(grad, expected)


def test_what_is_refused(ranks: Ranks) -> None:
    """By name, and on every rank."""

    def run() -> list[str]:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        with mesh_of(2, 2) as mesh:
            w = {"w": DTensor.from_local(torch.ones(2, 2), mesh["model"], [Shard(0)])}
            bare = {name: nn.Parameter(x) for name, x in w.items()}

            def step(p: Any) -> Tensor:
                return p["w"].full_tensor().sum()

            def grad(strategy: Any = None, params: Any = w, axis: Any = mesh["data"], **named: Any) -> Any:
                wrapped = with_dtensors(ltx.data_parallel(step, strategy, axis=axis))
                state = wrapped.init(params) if stateful(wrapped.step.strategy) else None
                return wrapped.grad(params, sync_state=state)

            power, adasum = ltx.hooks.PowerSGD(start_step=0), ltx.hooks.Adasum()
            both = {"w": DTensor.from_local(torch.ones(2, 2), mesh, [Replicate(), Shard(0)])}
            beside = {**w, "b": DTensor.from_local(torch.ones(2), mesh["model"], [Replicate()])}
            grad(ltx.DDPStrategy(comm_hook=ltx.hooks.FP16()), beside)
            plain = ltx.data_parallel(step, axis=mesh["data"])
            compiled: Any = (UnsupportedError, torch._dynamo.exc.TorchDynamoException)
            hooks = ltx.hooks
            strategies: list[tuple[Any, Any]] = [
                (ltx.DDPStrategy(comm_hook=power), w),
                (ltx.DDPStrategy(comm_hook=hooks.after(5, adasum)), w),
                (ltx.DDPStrategy(comm_wrapper=lambda _: power), w),
                (ltx.DDPStrategy(comm_wrapper=lambda _: hooks.after(5, power)), w),
                (MakesItsHook(), w),
                (ltx.DDPStrategy(comm_hook=hooks.TopK(0.5)), beside),
                (ltx.DDPStrategy(comm_hook=hooks.after(5, hooks.ByteGrad())), beside),
                (ltx.BaguaStrategy("qadam", warmup_steps=7), beside),
            ]
            calls: list[Callable[[], Any]] = [
                lambda: grad(params=both),
                lambda: grad(axis=None),
                lambda: with_dtensors(ltx.data_parallel(lambda p: p, axis=mesh["data"]))(bare),
                lambda: with_dtensors(ltx.block_backward_sync(plain))(bare),
                lambda: with_dtensors(ltx.data_parallel(lambda w: w["w"].sum(), axis=None))(w),
            ]
            return [
                *[said(UnsupportedError, partial(grad, strategy, params)) for strategy, params in strategies],
                *[said(UnsupportedError, call) for call in calls],
                said(compiled, lambda: torch.compile(plain, fullgraph=True, backend="eager")(w)),
            ]

    split = "leaf 'w' is a DTensor, split over ranks"
    beside = [f"{split}, and leaf 'b', which they share, is beside it", "ltx.hooks.FP16()"]
    wanted = [
        ["What PowerSGD(start_step=0) makes of a number", split, "ltx.hooks.FP16()"],
        ["Adasum()", split],
        *[["PowerSGD(start_step=0)", split]] * 3,
        ["What TopK(ratio=0.5) makes", *beside],
        ["ByteGrad()", *beside],
        beside,
        *[["leaf 'w' is a DTensor whose mesh", "so does the axis", 'axis=mesh["data"]']] * 2,
        ["the step returned a DTensor, [4, 2]", "x.full_tensor()"],
        ["block_backward_sync: take own gradients by"],
        ["leaf 'w' is a DTensor whose mesh"],
        ["a parameter in a compiled graph is a DTensor"],
    ]
    for texts in ranks(4).run(run):
        for text, parts in zip(texts, wanted, strict=True):
            assert all(part in text for part in parts), text


@on_ranks(4)
def test_without_the_wrapper_they_are_refused() -> None:
    """In every function that would take a part for the whole, on every rank, and under transforms too."""
    with mesh_of(2, 2) as mesh:
        w = {"w": nn.Parameter(distributed(torch.ones(4, 2), mesh["model"]))}
        detached = {"w": w["w"].detach()}
        module = nn.Module()
        module.w = w["w"]

        def loss(p: Any) -> Tensor:
            return p["w"].full_tensor().sum()

        def refused(axis: Any) -> list[str]:
            step = ltx.data_parallel(loss, axis=axis)
            train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=0.1))
            state = replace(train.init({"w": torch.ones(2, 2)}), params=detached)
            calls: list[Callable[[], Any]] = [
                lambda: step(w),
                lambda: step(detached),
                lambda: ltx.grad(step)(w),
                lambda: torch.func.grad(step)(detached),
                lambda: torch.func.hessian(step)(detached),
                lambda: ltx.vmap(ltx.grad(ltx.data_parallel(loss)), None, axis_size=2)(detached),
                lambda: train.init(w),
                lambda: train.init(module),
                lambda: train(state),
                lambda: ltx.sync_gradients(detached, axis=axis),
                lambda: ltx.check_replicas(detached, axis),
                lambda: ltx.psum(detached, axis),
                lambda: ltx.broadcast(detached, axis=axis),
            ]
            return [said(UnsupportedError, call) for call in calls]

        texts = refused(mesh["data"]) + refused(None)
    assert len(texts) == 26
    for text in texts:
        assert "a DTensor" in text, text
        assert "ltx.tensor_parallel.with_dtensors(train)" in text, text


def test_fully_sharded_modules(ranks: Ranks, seed: int) -> None:
    """torch's fully_shard over one dimension, the gradients at hand over the other; it takes no parameters."""

    def run(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[str, bool, dict[str, Tensor]]:
        from torch.distributed.fsdp import fully_shard

        with mesh_of(2, 2) as mesh:
            model = model_of(weights)
            fully_shard(model.up, mesh=mesh["model"])
            fully_shard(model, mesh=mesh["model"])
            params = dict(model.named_parameters())
            text = said(UnsupportedError, lambda: ltx.functional_call(model, params, (x,)))
            row = torch.distributed.get_rank()
            mse_loss(model(x[row : row + 1]), y[row : row + 1]).backward()  # fully_shard takes the mean over its ranks
            own: Any = {name: p.grad.to_local() for name, p in params.items()}  # type: ignore[union-attr, operator]
            for name, grad in ltx.sync_gradients(own, axis=mesh["data"])[0].items():
                own[name].copy_(grad)
            grads = {name: p.grad for name, p in params.items()}
            return text, placements(grads) == placements(params), full(grads)

    weights, x, y = drawn()
    expected = _expected(weights, x, y)
    for text, kept, grads in ranks(4).run(run, weights, x, y):
        assert "functional_call: FSDPBlock is under torch's fully_shard" in text
        assert kept
        torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-6)


@on_ranks(4)
def test_reductions_overlap_the_backward_pass() -> None:
    """A bucket goes out when its gradients are there, though DTensors stand between the marker and the step."""
    events: list[str] = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, name: str, x: Tensor) -> Tensor:
            ctx.name = name
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
            events.append(ctx.name)
            return None, grad

    with mesh_of(2, 2) as mesh:
        bare = inside.resolve(mesh["data"]).comm.bucket_channel(0)
        issue = bare.issue

        def issued(*args: Any, **named: Any) -> Any:
            events.append("reduced")
            return issue(*args, **named)

        bare.issue = issued
        ws = [distributed(torch.ones(4, 4), mesh["model"]) for _ in range(3)]

        def loss(ws: list[Any], x: Tensor) -> Tensor:
            for i, w in enumerate(ws):
                x = Seen.apply(f"layer {i}", x @ w.full_tensor())  # type: ignore[no-untyped-call]
            return x.sum()

        strategy = ltx.DDPStrategy(bucket_bytes=1, first_bucket_bytes=1)
        step = with_dtensors(ltx.data_parallel(loss, strategy, axis=mesh["data"]))
        try:
            step([w.requires_grad_() for w in ws], torch.randn(2, 4)).backward()
        finally:
            del bare.issue

    assert [e for e in events if e != "reduced"] == ["layer 2", "layer 1", "layer 0"]
    assert "reduced" in events[events.index("layer 2") : events.index("layer 0")], events
