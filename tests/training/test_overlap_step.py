"""overlap="step" beside overlap="backward", bit for bit: steps that complete during the next forward pass.

Ranks communicate through sockets here, since nothing stays pending through shared memory.
"""

from __future__ import annotations

import copy
import os
import pickle
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ltx
from ltx import hooks
from ltx.errors import (
    DonatedStateError,
    InvalidStateError,
    LtxError,
    PeerLostError,
    StrategyError,
    UnsupportedError,
    WeightError,
    WorkerError,
)
from ltx.training.pending_step import PendingParameter
from tests.covering import some
from tests.twins.cases import Params, assert_same_bits, params_of, seeded
from tests.twins.training import adamw, sgd

STEPS = 4
OnNewAxis = Callable[..., Any]
Loss = Callable[[Params, Tensor, Tensor], Any]

# --- models: each a loss of (parameters, tokens, targets) ------------------------------------------------------------


class Encoder(nn.Module):
    """Layers that torch has fused kernels for, and an output layer that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True) for _ in range(2))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.unused = nn.Linear(3, 3)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        for layer in self.layers:
            h = layer(h)
        return self.out(h + self.attention(h, h, h)[0])


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def plain(module: nn.Module) -> Loss:
    return lambda p, x, y: cross_entropy(functional_call(module, p, (x,)), y)


def checkpointed(module: nn.Module) -> Loss:
    def loss(p: Params, x: Tensor, y: Tensor) -> Tensor:
        h = functional_call(module.embedding, {"weight": p["embedding.weight"]}, (x,))
        for i, layer in enumerate(module.layers):
            mine = {name.split(".", 2)[2]: q for name, q in p.items() if name.startswith(f"layers.{i}.")}
            h = checkpoint(lambda h, *a: functional_call(*a, (h,)), h, layer, mine, use_reentrant=False)
        return cross_entropy(h @ p["embedding.weight"].T, y)

    return loss


def penalised(module: nn.Module) -> Loss:
    """The gradient's norm is part of the loss."""

    def loss(p: Params, x: Tensor, y: Tensor) -> Tensor:
        value = cross_entropy(p["embedding.weight"][x].tanh() @ p["embedding.weight"].T, y)
        (grad,) = torch.autograd.grad(value, p["embedding.weight"], create_graph=True)
        return value + grad.square().sum() + p["unused.weight"].norm()

    return loss


def inner_steps(module: nn.Module) -> Loss:
    """torch.func inside: a gradient step before the loss, and a directional derivative."""

    def inner(p: Params, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(p["embedding.weight"][x] @ p["embedding.weight"].T, y) + p["unused.bias"].sum()

    def loss(p: Params, x: Tensor, y: Tensor) -> Tensor:
        grads = torch.func.grad(inner)(p, x, y)
        moved = {name: q - 0.1 * grads[name] for name, q in p.items()}
        tangents = {name: torch.ones_like(q) for name, q in p.items()}
        slope = torch.func.jvp(lambda q: inner(q, x, y), (p,), (tangents,))[1]
        rows = torch.func.vmap(lambda row: (row @ p["unused.weight"]).sum())(p["unused.weight"])
        return inner(moved, x, y) + slope + rows.sum()

    return loss


def jvp_first(module: nn.Module) -> Loss:
    """Trees of primals and tangents are compared before anything is computed."""

    def loss(p: Params, x: Tensor, y: Tensor) -> Tensor:
        weight = p["embedding.weight"]
        given = {name: q for name, q in p.items() if name != "embedding.weight"}
        tangents = {"embedding.weight": torch.ones(11, 8)}
        value, slope = torch.func.jvp(
            lambda q: cross_entropy(q["embedding.weight"][x] @ q["embedding.weight"].T, y),
            ({"embedding.weight": weight},),
            (tangents,),
        )
        return value + slope + sum(q.sum() for q in given.values())

    return loss


def looked_at(module: nn.Module) -> Loss:
    """Views, numbers, decisions and an evaluation without gradients, some of it under other modes."""

    def loss(p: Params, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            module.eval()
            before = cross_entropy(functional_call(module, p, (x,)), y)
            module.train()
        with torch.inference_mode():
            norm = p["attention.out_proj.weight"].norm().item()
        with torch.autocast("cpu", torch.bfloat16):
            value = cross_entropy(functional_call(module, p, (x,)).float(), y)
        flipped = p["unused.weight"].t()[1:].flip(0)
        sign = 1 if p["unused.bias"][0] > 0 else -1
        return value + before * norm * 1e-2 + sign * flipped.sum() + float(p["unused.bias"].numpy(force=True)[1])

    return loss


class Counting(TorchDispatchMode):
    """Sees every operation of the step, and none of what completes in it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "adam" not in str(func)
        return func(*args, **(kwargs or {}))


def under_modes(module: nn.Module) -> Loss:
    """All of it where other things would be computed than outside."""

    def loss(p: Params, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16), Counting():
            value = cross_entropy(functional_call(module, p, (x,)).float(), y)
        with torch.device("meta"):
            return value + p["unused.weight"].square().sum() + p["unused.bias"].sum()

    return loss


class Through(torch.autograd.Function):
    """Keeps a parameter for its backward pass, and doesn't look at it before."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return h.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (weight,) = ctx.saved_tensors
        return grad * weight.sum(), grad.sum() * weight


def kept_by(module: nn.Module) -> Loss:
    """A parameter goes through a Function that only keeps it, and a copy of one is written to."""

    def loss(p: Params, x: Tensor, y: Tensor) -> Tensor:
        copied = p["unused.weight"].clone()
        copied[0].mul_(0.9)
        value = cross_entropy(functional_call(module, p, (x,)), y)
        return Through.apply(value, p["unused.bias"]) + copied.square().sum()

    return loss


def routed(module: nn.Module) -> Loss:
    """Each rank uses its layers in an order of its own, and now and then leaves one out."""
    calls = [0]

    def loss(p: Params, x: Tensor, y: Tensor) -> Tensor:
        calls[0] += 1
        rank = ltx.world().rank
        h = p["embedding.weight"][x]
        for i in (range(2), (1,) if calls[0] % 2 else (1, 0))[rank]:
            mine = {name.split(".", 2)[2]: q for name, q in p.items() if name.startswith(f"layers.{i}.")}
            h = functional_call(module.layers[i], mine, (h,))
            time.sleep(random.random() * 0.002)
        return cross_entropy(h @ p["embedding.weight"].T, y)

    return loss


def reducing(module: nn.Module) -> Loss:
    """Collectives of the step's own."""
    of = plain(module)
    return lambda p, x, y: of(p, x, y) + ltx.psum(p["unused.weight"].sum())


LOSSES: dict[str, Callable[[nn.Module], Loss]] = {
    "encoder": plain,
    "checkpoint": checkpointed,
    "gradient penalty": penalised,
    "torch.func inside": inner_steps,
    "jvp first": jvp_first,
    "looked at": looked_at,
    "under modes": under_modes,
    "kept by a Function": kept_by,
    "routed": routed,
    "psum inside": reducing,
}
HOOKS: dict[str, Any] = {
    "none": None,
    "fp16": "fp16",
    "powersgd": hooks.PowerSGD(rank=2, start_step=1),
    "batched powersgd": hooks.BatchedPowerSGD(rank=2, start_step=1),
    "bytegrad": hooks.ByteGrad(),
    "qsgd": hooks.QSGD(),
    "onebit": hooks.OneBit(),
    "topk with feedback": hooks.error_feedback(hooks.TopK(0.2)),
    "after": hooks.after(2, hooks.BF16()),
}


def strategy_of(hook: Any) -> ltx.Strategy:
    return ltx.DDPStrategy(bucket_bytes=2048, first_bucket_bytes=256, **({} if hook is None else {"comm_hook": hook}))


def module_and_batches(seed: int, steps: int = STEPS) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """The same module on every rank, this rank's batches."""
    with seeded(seed):
        module = Encoder()
    draw = torch.Generator().manual_seed(seed + ltx.world().rank)
    return module, [tuple(torch.randint(11, (4, 6), generator=draw) for _ in range(2)) for _ in range(steps)]


def delayed(loss: Loss) -> Loss:
    """Ranks come at different times."""

    def later(*args: Any) -> Any:
        time.sleep(random.random() * 0.005)
        return loss(*args)

    return later


def train_of(
    module: nn.Module, overlap: Any, loss: str = "encoder", hook: Any = None, accumulate: int = 1, **options: Any
) -> Any:
    step = ltx.data_parallel(delayed(LOSSES[loss](module)), strategy_of(hook))
    step = step if accumulate == 1 else ltx.accumulate(step, accumulate)
    return ltx.train_step(step, options.pop("optimizer", adamw()), overlap=overlap, **options)


def trained(seed: int, overlap: Any, **options: Any) -> tuple[Any, bool]:
    """(all that came of some steps, whether each left something pending)"""
    module, batches = module_and_batches(seed)
    random.seed(seed + ltx.world().rank)
    with seeded(seed):
        train, losses, flew = train_of(module, overlap, **options), [], []
        state = train.init(params_of(module))
        for i, batch in enumerate(batches):
            state, metrics = train(state, *batch)
            flew.append(state.pending_step is not None and not state.pending_step.over)
            if i % 2:
                losses.append(metrics.loss)
    return (state.params, state.opt_state, state.sync_state.leaves, state.step, losses), all(flew)


def both(seed: int, options: dict[str, Any]) -> tuple[Any, Any, bool]:
    (expected, _), (got, flew) = trained(seed, "backward", **options), trained(seed, "step", **options)
    return expected, got, flew


@pytest.mark.full(but=1)
@pytest.mark.covering(1)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_model_is_trained_as_without(loss: str, accumulate: int, on_new_axis: OnNewAxis, seed: int) -> None:
    for expected, got, flew in on_new_axis(lambda: both(seed, {"loss": loss, "accumulate": accumulate}), sockets=True):
        assert_same_bits(expected, got)
        assert flew


@pytest.mark.full(but=1)
@pytest.mark.covering(1)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_gives_what_it_gives_without(hook: str, accumulate: int, on_new_axis: OnNewAxis, seed: int) -> None:
    options = {"hook": HOOKS[hook], "accumulate": accumulate, "loss": "routed"}
    for expected, got, flew in on_new_axis(lambda: both(seed, options), sockets=True):
        assert_same_bits(expected, got)
        assert flew


@pytest.mark.full
@pytest.mark.parametrize("hook", ["powersgd", "bytegrad", "topk with feedback"])
def test_a_hook_is_not_disturbed_by_where_it_completes(hook: str, on_new_axis: OnNewAxis, seed: int) -> None:
    for expected, got, flew in on_new_axis(
        lambda: both(seed, {"hook": HOOKS[hook], "loss": "under modes"}), sockets=True
    ):
        assert_same_bits(expected, got)
        assert flew


@pytest.mark.full(but=1)
@pytest.mark.covering(1)
@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("optimizer", ["adamw", "not fused", "momentum", "schedule"])
def test_optimizers(optimizer: str, donate: bool, on_new_axis: OnNewAxis, seed: int) -> None:
    made = {
        "adamw": adamw(),
        "not fused": adamw(fused=False),
        "momentum": sgd(momentum=0.9, nesterov=True),
        "schedule": adamw(lambda step: 0.1 / (1 + step)),
    }[optimizer]
    for expected, got, flew in on_new_axis(lambda: both(seed, {"optimizer": made, "donate": donate}), sockets=True):
        assert_same_bits(expected, got)
        assert flew


# --- where it completes ----------------------------------------------------------------------------------------------


def where_it_completes(seed: int) -> list[list[str]]:
    """The classes of two parameters, the first and the last one used, at three points of the second forward pass."""
    torch.manual_seed(seed)
    params = {"first": torch.randn(40, 40), "unused": torch.randn(40), "last": torch.randn(40, 40)}
    seen: list[list[str]] = []

    def loss(p: Params, x: Tensor) -> Tensor:
        def look() -> None:
            seen.append([type(p[name]).__name__ for name in ("first", "unused", "last")])

        look()
        h = x @ p["first"]
        look()
        h = h @ p["last"]
        look()
        return h.square().mean()

    strategy = ltx.DDPStrategy(bucket_bytes=64, first_bucket_bytes=64)
    train = ltx.train_step(ltx.data_parallel(loss, strategy), adamw(), overlap="step")
    state = train.init(params)
    for _ in range(2):
        state, metrics = train(state, torch.randn(3, 40))
    assert metrics.loss > 0
    assert not state.pending_step.over  # to read the loss is to wait for that alone
    assert state.step == 2
    assert not state.pending_step.over
    assert type(state.params["first"]) is Tensor
    assert state.pending_step is None
    return seen


def test_each_bucket_lands_when_it_is_first_used(on_new_axis: OnNewAxis, seed: int) -> None:
    plain, hidden = "Tensor", "PendingParameter"
    for seen in on_new_axis(lambda: where_it_completes(seed), sockets=True):
        assert seen[:3] == [[plain] * 3] * 3
        assert seen[3:] == [[hidden] * 3, [plain, hidden, hidden], [plain, hidden, plain]]


def unseen_by_torch(seed: int) -> bool:
    def loss(p: Params, x: Tensor) -> Tensor:
        if isinstance(p["w"], PendingParameter):
            with torch._C.DisableTorchFunctionSubclass():  # as an extension that takes tensors as they come
                found.append(p["w"].detach().clone())
        return (p["w"] * x).sum()

    found: list[Tensor] = []
    train = ltx.train_step(ltx.data_parallel(loss), adamw(), overlap="step")
    state = train.init({"w": torch.randn(5)})
    for _ in range(2):
        state, _ = train(state, torch.ones(5))
    return bool(found[0].isnan().all()) and bool(state.params["w"].isfinite().all())


def test_what_torch_does_not_see_is_nan_rather_than_old(on_new_axis: OnNewAxis, seed: int) -> None:
    assert list(on_new_axis(lambda: unseen_by_torch(seed), sockets=True)) == [True, True]


def written_to(seed: int) -> list[str]:
    """What parameters that are written to say."""
    said, writes = [], [False]

    def loss(p: Params, x: Tensor) -> Tensor:
        if writes[0]:
            with torch.no_grad():
                p["w"].mul_(0.9)
        return (p["w"] * x).sum()

    for overlap in ("backward", "step"):
        writes[0] = False
        train = ltx.train_step(ltx.data_parallel(loss), adamw(), overlap=overlap)
        state, _ = train(train.init({"w": torch.randn(5)}), torch.ones(5))
        writes[0] = True
        with pytest.raises(RuntimeError) as caught:
            train(state, torch.ones(5))
        said.append(str(caught.value))
    return said


def test_parameters_that_are_written_to_are_refused_alike(on_new_axis: OnNewAxis, seed: int) -> None:
    for backward, step in on_new_axis(lambda: written_to(seed), sockets=True):
        assert backward == step
        assert "modified inplace" in step


def interrupt_while_waiting(seed: int) -> Any:
    """What comes while a parameter is waited for is raised at the place that waits, and nothing is lost."""
    module, batches = module_and_batches(seed)
    train = train_of(module, "step", hook=hooks.ByteGrad())
    state = train.init(params_of(module))
    with seeded(seed):
        for i, batch in enumerate(batches):
            if i == 2:
                summary = state.pending_step._summary
                wait, summary.wait = summary.wait, interrupt
                with pytest.raises(KeyboardInterrupt):
                    train(state, *batch)
                summary.wait = wait
            state, _ = train(state, *batch)
    expected, _ = trained(seed, "backward", hook=hooks.ByteGrad())
    assert_same_bits(state.params, expected[0])
    return state.params


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.full
def test_an_interrupt_while_it_lands(on_new_axis: OnNewAxis, seed: int) -> None:
    on_new_axis(lambda: interrupt_while_waiting(seed), sockets=True).replicated()


READERS: dict[str, Callable[[Any], Any]] = {
    "params": lambda s: s.params,
    "opt_state": lambda s: s.opt_state,
    "sync_state": lambda s: s.sync_state.leaves,
    "flatten": lambda s: ltx.tree.flatten(s)[0],
    "torch's flatten": lambda s: torch.utils._pytree.tree_flatten(s)[0],
    "state_dict": lambda s: s.state_dict(),
    "pickle": lambda s: ltx.tree.flatten(pickle.loads(pickle.dumps(s)))[0],
    "deepcopy": lambda s: ltx.tree.flatten(copy.deepcopy(s))[0],
    "copy": lambda s: ltx.tree.flatten(copy.copy(s))[0],
    "replace": lambda s: ltx.tree.flatten(replace(s, step=7))[0],
    "repr": repr,
}


def read(seed: int) -> dict[str, tuple[Any, Any]]:
    module, batches = module_and_batches(seed, 2)
    found = {}
    hook = HOOKS["topk with feedback"]
    for name, look in READERS.items():
        by = []
        for overlap in ("backward", "step"):
            with seeded(seed):
                train = train_of(module, overlap, hook=hook)
                state = train.init(params_of(module))
                for batch in batches:
                    state, metrics = train(state, *batch)
                by.append((look(state), pickle.loads(pickle.dumps(metrics)).loss, repr(metrics)))
        found[name] = tuple(by)
    return found


@pytest.mark.full
def test_whoever_reads_the_state_waits(on_new_axis: OnNewAxis, seed: int) -> None:
    for found in on_new_axis(lambda: read(seed), sockets=True):
        for name, (expected, got) in found.items():
            assert_same_bits(expected, got), name


# --- steps that aren't one after the other ---------------------------------------------------------------------------


class OutOfDataError(Exception):
    pass


def interrupted(seed: int, overlap: Any, error: type[BaseException]) -> Any:
    """A step raises halfway through its forward pass on one rank; all go on with the next batch."""
    module, batches = module_and_batches(seed)
    of, fail = plain(module), [False]

    def loss(p: Params, x: Tensor, y: Tensor) -> Tensor:
        if fail[0]:
            _ = p["embedding.weight"].sum()
            raise error
        return of(p, x, y)

    with seeded(seed):
        train = ltx.train_step(ltx.data_parallel(loss, strategy_of(None)), adamw(), overlap=overlap)
        state = train.init(params_of(module))
        for i, batch in enumerate(batches):
            if i == 2 and ltx.world().rank == 1:
                fail[0] = True
                with pytest.raises(error):
                    train(state, *batch)
                fail[0] = False
            state, _ = train(state, *batch)
            if i == 0:  # evaluation between steps, with collectives
                assert ltx.pmean(cross_entropy(functional_call(module, state.params, batch[:1]), batch[1])) > 0
    return state.params


@pytest.mark.full(but=1)
@pytest.mark.parametrize("error", [OutOfDataError, KeyboardInterrupt])
def test_a_step_that_raises_loses_nothing(error: type[BaseException], on_new_axis: OnNewAxis, seed: int) -> None:
    for overlap_step, backward in on_new_axis(
        lambda: (interrupted(seed, "step", error), interrupted(seed, "backward", error)), sockets=True
    ):
        assert_same_bits(overlap_step, backward)


def kept(seed: int) -> tuple[Any, ...]:
    """Two steps from one state, with donate=False; and a donated state."""
    module, batches = module_and_batches(seed, 3)
    train = train_of(module, "step", donate=False, hook=hooks.PowerSGD(rank=1, start_step=0))
    old, _ = train(train.init(params_of(module)), *batches[0])
    torch.manual_seed(0)
    one, _ = train(old, *batches[1])
    before = ltx.tree.map(torch.clone, old.params)
    torch.manual_seed(0)
    other, _ = train(old, *batches[1])
    assert_same_bits(before, old.params)
    assert_same_bits(one.params, other.params)

    donating = train_of(module, "step")
    first, _ = donating(donating.init(params_of(module)), *batches[0])
    second, _ = donating(first, *batches[1])
    with pytest.raises(DonatedStateError, match="was donated to the step that made state 2"):
        _ = first.params
    with pytest.raises(DonatedStateError, match="was donated"):
        donating(first, *batches[1])
    other_train = train_of(module, "backward")
    third, _ = other_train(second, *batches[2])  # another step takes the state, and waits
    return third.params


def test_donation(on_new_axis: OnNewAxis, seed: int) -> None:
    on_new_axis(lambda: kept(seed), sockets=True).replicated()


def aliases(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """What a step returns of its parameters is what they were."""

    def loss(p: Params, x: Tensor) -> Any:
        return (p["w"] * x).sum(), p["w"]

    train = ltx.train_step(ltx.data_parallel(loss), adamw(), overlap="step", has_aux=True)
    torch.manual_seed(seed)
    given = torch.randn(5)
    state, metrics = train(train.init({"w": given}), torch.ones(5))
    assert torch.equal(metrics.aux, given)
    before = state.params["w"].clone()
    assert torch.equal(metrics.aux, given)
    assert not torch.equal(before, given)
    state, metrics = train(state, torch.ones(5))
    _ = state.params
    assert torch.equal(metrics.aux, before)
    return given, before, state.params["w"]


def test_what_a_step_returns_does_not_change_later(on_new_axis: OnNewAxis, seed: int) -> None:
    on_new_axis(lambda: aliases(seed), sockets=True).replicated()


def weighted(seed: int, overlap: Any) -> Any:
    def loss(p: Params, x: Tensor) -> ltx.Weighted:
        return ltx.Weighted((x * p["w"]).square().sum(), len(x))

    train = ltx.train_step(ltx.data_parallel(loss), adamw(), overlap=overlap)
    torch.manual_seed(seed)
    state = train.init({"w": torch.randn(3)})
    sizes = [(3, 1), (0, 2), (5, 5)]
    losses = []
    for by_rank in sizes:
        state, metrics = train(state, torch.randn(by_rank[ltx.world().rank], 3))
        losses.append(metrics.loss)
    with pytest.raises(WeightError, match="The state is as before the step"):
        train(state, torch.randn(0, 3))
    return state.params, losses


def test_weights(on_new_axis: OnNewAxis, seed: int) -> None:
    for got, expected in on_new_axis(lambda: (weighted(seed, "step"), weighted(seed, "backward")), sockets=True):
        assert_same_bits(got, expected)


def recorded(seed: int) -> tuple[list[Any], list[Any]]:
    module, batches = module_and_batches(seed)
    found = []
    for overlap in ("backward", "step"):
        train = train_of(module, overlap, hook=hooks.ByteGrad())
        state = train.init(params_of(module))
        with ltx.profile.record() as trace:
            for batch in batches:
                state, _ = train(state, *batch)
            _ = state.params
        assert all(e.completed_s is not None and e.completed_s >= e.issued_s and e.waited_s >= 0 for e in trace.events)
        assert 0 <= trace.hidden <= 1
        found.append(sorted((e.channel, e.operation, e.kind, e.nbytes) for e in trace.events))
    return tuple(found)


def test_the_same_is_sent(on_new_axis: OnNewAxis, seed: int) -> None:
    for backward, step in on_new_axis(lambda: recorded(seed), sockets=True):
        assert backward == step


@pytest.mark.full(but=1)
@pytest.mark.parametrize("hook", ["none", "powersgd", "bytegrad"])
def test_one_rank_reads_while_others_wait_elsewhere(hook: str, on_new_axis: OnNewAxis, seed: int) -> None:
    """As when one rank saves, and the others meet it at a barrier that isn't ltx's."""

    def on_rank() -> Any:
        module, batches = module_and_batches(seed)
        train = train_of(module, "step", hook=HOOKS[hook])
        state = train.init(params_of(module))
        for batch in batches:
            state, _ = train(state, *batch)
        read = ltx.tree.map(torch.clone, state.params) if ltx.world().rank == 0 else None
        dist.barrier()
        return state.params if read is None else read

    on_new_axis(on_rank, sockets=True).replicated()


def test_a_rank_that_drops_its_state_is_no_loss(on_new_axis: OnNewAxis, seed: int) -> None:
    def on_rank() -> Any:
        module, batches = module_and_batches(seed)
        train = train_of(module, "step", hook=HOOKS["powersgd"])
        state, _ = train(train.init(params_of(module)), *batches[0])
        if ltx.world().rank == 1:
            del state
            again, _ = train(train.init(params_of(module)), *batches[1])
            return again.params
        read = state.params
        again, _ = train(train.init(params_of(module)), *batches[1])
        assert read is not None
        return again.params

    on_new_axis(on_rank, sockets=True).replicated()


# --- what fails ------------------------------------------------------------------------------------------------------


def losing_a_peer(seed: int) -> list[str]:
    module, batches = module_and_batches(seed)
    train = train_of(module, "step")
    state, _ = train(train.init(params_of(module)), *batches[0])
    pending_step = state.pending_step
    said = []
    if ltx.world().rank == 0:
        # As if the connection broke: what it waits for next fails.
        broken = PeerLostError("rank 0: bucket 1 failed while waiting for its peers, one of which is gone")

        def fail(index: int) -> Any:
            raise broken

        pending_step._schedule.wait_bucket = fail
    for look in (lambda: train(state, *batches[1]), lambda: state.params, lambda: pickle.dumps(state)):
        try:
            look()
        except LtxError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_a_peer_lost_while_waiting_leaves_a_state_that_nobody_reads(on_new_axis: OnNewAxis, seed: int) -> None:
    said = on_new_axis(lambda: losing_a_peer(seed), sockets=True).rank(0)
    assert said[0].startswith("PeerLostError: rank 0: bucket 1 failed")
    for text in said[1:]:
        assert text.startswith(
            "InvalidStateError: rank 0: step 1 was still pending when something failed (PeerLostError: "
        )
        assert "0 of its" in text
        assert "Load a checkpoint" in text


def dying(seed: int) -> Any:
    module, batches = module_and_batches(seed)
    train = train_of(module, "step", hook=hooks.PowerSGD(rank=1, start_step=0))
    state = train.init(params_of(module))
    for batch in batches:
        state, _ = train(state, *batch)
    if ltx.world().rank == 1:
        os._exit(3)
    try:
        while True:
            state, _ = train(state, *batches[0])
    except LtxError as error:
        first = error
    with pytest.raises((InvalidStateError, type(first))):
        _ = state.params
    return type(first).__name__


@pytest.mark.full
def test_a_peer_that_dies(seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LTX_SHARED_MEMORY", "0")
        with ltx.Pool(2, timeout_s=50.0) as pool, pytest.raises(WorkerError, match="rank 1"):
            pool.run(dying, seed)


def test_ranks_that_overlap_differently_are_told(on_new_axis: OnNewAxis, seed: int) -> None:
    def on_rank() -> str:
        module, batches = module_and_batches(seed)
        train = train_of(module, ("step", "update")[ltx.world().rank])
        with pytest.raises(ltx.errors.RankMismatchError) as caught:
            train(train.init(params_of(module)), *batches[0])
        return str(caught.value)

    for said in on_new_axis(on_rank, sockets=True):
        assert 'data_parallel with overlap="step"' in said


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "clipping": (
        lambda: ltx.train_step(
            ltx.data_parallel(lambda p: p), ltx.optim.chain(ltx.optim.clip_by_global_norm(1.0), sgd()), overlap="step"
        ),
        "needs all of them",
    ),
    "local SGD": (
        lambda: ltx.train_step(
            ltx.data_parallel(lambda p: p, ltx.LocalSGDStrategy(period=2, warmup_steps=1)), sgd(), overlap="step"
        ),
        "does something with the parameters in between",
    ),
    "ZeRO": (
        lambda: ltx.train_step(ltx.data_parallel(lambda p: p, ltx.ZeroStrategy()), sgd(), overlap="step"),
        'does something with the parameters in between. Use overlap="update"',
    ),
    "loss scaling": (
        lambda: ltx.train_step(
            ltx.mixed_precision(
                ltx.data_parallel(lambda p: p), ltx.Precision(compute=torch.float16, loss_scale=ltx.DynamicLossScale())
            ),
            sgd(),
            overlap="step",
        ),
        "before it is known whether all gradients are finite",
    ),
    "another word": (
        lambda: ltx.train_step(ltx.data_parallel(lambda p: p), sgd(), overlap="forward"),
        '"backward", "update" or "step"',
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_right_is_refused(name: str) -> None:
    make, said = REFUSED[name]
    with pytest.raises(StrategyError, match=said):
        make()


# --- without a wire, and compiled ------------------------------------------------------------------------------------


def test_shared_memory_leaves_nothing_pending(ranks: Callable[[int], ltx.Pool], seed: int) -> None:
    for expected, got, flew in ranks(2).run(both, seed, {}):
        assert_same_bits(expected, got)
        assert not flew


def test_a_world_of_one(seed: int) -> None:
    expected, got, _ = both(seed, {"loss": "looked at"})
    assert_same_bits(expected, got)


def test_simulated_ranks(seed: int) -> None:
    def after(overlap: Any) -> Any:
        step = ltx.data_parallel(lambda p, x: (p["w"] * x).square().mean())
        train = ltx.train_step(step, adamw(), overlap=overlap)
        return ltx.vmap(lambda x: train(train.init({"w": torch.ones(3)}), x)[0].params)(torch.arange(6.0).view(2, 3))

    assert_same_bits(after("step"), after("backward"))


def compiled_inside(seed: int, overlap: Any) -> tuple[Any, list[int]]:
    module, batches = module_and_batches(seed)
    # Dynamo counts what it compiles.
    calls: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        calls.append(1)
        return graph.forward

    tanh = torch.compile(lambda w, x: w[x].tanh() @ w.T, backend=backend)

    def loss(p: Params, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(tanh(p["embedding.weight"], x), y) + p["unused.bias"].sum()

    train = ltx.train_step(ltx.data_parallel(loss, strategy_of(None)), adamw(), overlap=overlap)
    state, counts = train.init(params_of(module)), []
    for batch in batches:
        state, _ = train(state, *batch)
        counts.append(len(calls))
    return state.params, counts


@pytest.mark.full
@pytest.mark.slow_compile
def test_a_compiled_function_inside_has_everything_landed_first(on_new_axis: OnNewAxis, seed: int) -> None:
    def on_rank() -> Any:
        return compiled_inside(seed, "backward"), compiled_inside(seed, "step")

    for (expected, once), (got, counts) in on_new_axis(on_rank, 45.0, sockets=True):
        assert_same_bits(expected, got)
        assert counts[1] <= once[-1] + 1  # the first pending step tells
        assert counts[-1] == counts[1]


@pytest.mark.slow_compile
def test_a_compiled_train_step_is_refused() -> None:
    step = ltx.data_parallel(lambda p, x: (p["w"] * x).sum())
    train = ltx.train_step(step, sgd(), overlap="step")
    state = train.init({"w": torch.ones(3)})
    with pytest.raises((UnsupportedError, Exception), match="under way between two steps"):
        torch.compile(train, fullgraph=True, backend="eager")(state, torch.ones(3))


ENDING = """
import sys, torch, ltx
world = ltx.init()
train = ltx.train_step(
    ltx.data_parallel(
        lambda p, x: (x @ p["w"]).square().mean(),
        ltx.DDPStrategy(comm_hook=ltx.hooks.PowerSGD(rank=1, start_step=0), bucket_bytes=64, first_bucket_bytes=64),
    ),
    ltx.optim.from_torch(torch.optim.AdamW, lr=0.1),
    overlap="step",
)
state = train.init({"w": torch.ones(5, 6)})
for _ in range(3):
    state, _ = train(state, torch.randn(2, 5))
assert not state.pending_step.over
if sys.argv[1] == "shutdown":
    ltx.shutdown()
    assert state.pending_step.over
    assert state.params["w"].isfinite().all()
if sys.argv[1] == "raise" and world.rank == 1:
    raise KeyError("mine")
"""


@pytest.mark.full
@pytest.mark.parametrize("leave", some(["shutdown", "exit", "raise"], "exit"))
def test_processes_end_in_order(leave: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ENDING)
    environment = os.environ | {"LTX_SHARED_MEMORY": "0", "PYTHONPATH": str(Path(ltx.__file__).parents[1])}
    ended = subprocess.run(
        [sys.executable, "-m", "ltx", "run", "-n", "2", str(script), leave],
        env=environment,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (ended.returncode == 0) is (leave != "raise"), ended.stderr
    assert ("KeyError" in ended.stderr + ended.stdout) is (leave == "raise")
    assert "Aborted" not in ended.stderr
