"""Hooks of ltx under DistributedDataParallel: it gets what ltx.data_parallel gives."""

from __future__ import annotations

import copy
import inspect
import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

import ltx
from ltx import hooks
from ltx.errors import AxisError, HookError, RankMismatchError, StrategyError, SyncStateError
from ltx.hooks import BucketInput, CollectiveRequest, CommHook, Reduction, to_torch
from tests import inside
from tests.contract.hooks.table import HOOKS, MOST
from tests.kinds import OnNewAxis, Params, Ranks
from tests.train_on import on_ranks, refuses, said
from tests.twins.feedback import ErrorFeedback

MIB = 1 << 20


@dataclass(frozen=True)
class Feedback(ErrorFeedback):
    """Takes two collectives."""

    phases: ClassVar[int] = 2

    def reduce(self, inputs: BucketInput) -> Reduction:
        zero = yield CollectiveRequest("psum", torch.zeros_like(inputs.flat[:1]))
        total, states = yield from super().reduce(inputs)
        return total + zero, states


@dataclass(frozen=True)
class Counted(CommHook):
    """The mean times the number of the step, in fp16 at odd ones; and notes who is last."""

    exact: ClassVar[bool] = False
    reads_step: ClassVar[bool] = True

    def at(self, step: int) -> CommHook:
        return self if step % 2 == 0 else hooks.FP16()

    def reduce(self, inputs: BucketInput) -> Reduction:
        return (yield CollectiveRequest("psum", inputs.flat * (inputs.step + 1) + inputs.last)), inputs.states


@dataclass(frozen=True)
class InPhases(CommHook):
    """The mean as sums over parts of the bucket, one after the other: two for even buckets, three for the others."""

    phases: ClassVar[int] = 3

    def reduce(self, inputs: BucketInput) -> Reduction:
        count = 3 - (inputs.bucket.index % 2 == 0)
        total = torch.empty_like(inputs.flat)
        for part, place in zip(inputs.flat.tensor_split(count), total.tensor_split(count), strict=True):
            place.copy_((yield CollectiveRequest("psum", part.clone())))
        return total, inputs.states


class Net(nn.Module):
    """Layers with delays of the rank's own in the backward pass; `use` of them are used."""

    def __init__(self, layers: int = 4, delays: random.Random | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(layers))
        self.delays = delays

    def forward(self, x: Tensor, use: int = 4) -> Tensor:
        for layer in self.layers[:use]:
            x = torch.tanh(layer(x))
            if (delays := self.delays) is not None:
                x.register_hook(lambda _: time.sleep(delays.choice([0.0, 0.002, 0.006])))
        return x.square().sum()


def batch(seed: int, step: int) -> Tensor:
    return torch.randn(3, 7, generator=torch.Generator().manual_seed(seed + 100 * step + ltx.world().rank))


def update(module: nn.Module, grads: Params) -> None:
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(p - 0.05 * grads[name])


def grads_of(module: nn.Module) -> Params:
    return {name: p.grad.clone() for name, p in module.named_parameters()}


def new_net(seed: int, **how: Any) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net(**how)


#: DDP with a bucket for each tensor, or nearly.
SMALL: dict[str, Any] = {"bucket_cap_mb": 100 / MIB}


def under_ddp(net: nn.Module, hook: CommHook | None, **how: Any) -> DistributedDataParallel:
    """`net` in DDP, with `hook` if there is one."""
    ddp = DistributedDataParallel(net, **how)
    if hook is not None:
        ddp.register_comm_hook(None, to_torch(hook, ddp))
    return ddp


def backward(ddp: nn.Module, *batch: Any) -> None:
    ddp.zero_grad()
    ddp(*batch).backward()


def with_ddp(
    hook: Any, seed: int, steps: int = 4, net: Net | None = None, first: int = 0, group: Any = None, **how: Any
) -> list[Params]:
    net = net or new_net(seed)
    ddp = under_ddp(net, None if callable(hook) else hook, **how)
    if callable(hook):
        ddp.register_comm_hook(group, hook)
    found = []
    for i in range(first, first + steps):
        backward(ddp, batch(seed, i))
        found.append(grads_of(net))
        update(net, found[-1])
    return found


def with_ltx(hook: CommHook, seed: int, steps: int = 4, **how: Any) -> list[Params]:
    net = new_net(seed)
    step = ltx.data_parallel(lambda p, x: functional_call(net, p, (x,)), ltx.DDPStrategy(comm_hook=hook, **how))
    state = step.init(dict(net.named_parameters()))
    found = []
    for i in range(steps):
        params = {name: p.detach() for name, p in net.named_parameters()}
        (grads, state), _ = ltx.grad_and_value(step)(params, batch(seed, i), sync_state=state)
        found.append(grads)
        update(net, grads)
    return found


def assert_equal(got: Any, want: Any, **tolerance: float) -> None:
    torch.testing.assert_close(got, want, **(tolerance or {"rtol": 0, "atol": 0}))


@pytest.mark.full(but=2)
@pytest.mark.parametrize("views", [False, True], ids=["", "gradient_as_bucket_view"])
@pytest.mark.parametrize("small", [False, True], ids=["one bucket", "several"])
@pytest.mark.parametrize(
    "hook",
    [hooks.AllReduce(), hooks.FP16(), hooks.BF16(), Feedback(), InPhases()],
    ids=lambda hook: type(hook).__name__,
)
def test_as_data_parallel(hook: CommHook, small: bool, views: bool, ranks: Ranks, seed: int) -> None:
    """To the last bit; and what isn't compressed is what DDP gives."""

    def run() -> Any:
        how = {"gradient_as_bucket_view": views, **(SMALL if small else {})}
        sizes = {"bucket_bytes": 100, "first_bucket_bytes": 100} if small else {}
        plain = with_ddp(None, seed, **how) if hook.exact else None
        return with_ddp(hook, seed, **how), with_ltx(hook, seed, **sizes), plain

    pool = ranks(2).run(run)
    pool.replicated()
    for under_ddp, under_ltx, plain in pool:
        assert_equal(under_ddp, under_ltx)
        if plain is not None:
            assert_equal(under_ddp, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.full(but=1)
@pytest.mark.parametrize("name", MOST)
def test_every_compressor(name: str, ranks: Ranks, seed: int) -> None:
    """To the last bit where the buckets are the same: one for each tensor, from the first step on."""

    def run() -> Any:
        alone = {"bucket_cap_mb": 1 / MIB, "find_unused_parameters": True}
        return with_ddp(HOOKS[name], seed, **alone), with_ltx(HOOKS[name], seed, bucket_bytes=1, first_bucket_bytes=1)

    under_ddp, under_ltx = ranks(2).run(run).replicated()
    assert_equal(under_ddp, under_ltx)


@pytest.mark.full(but=1)
@pytest.mark.parametrize("hook", [Feedback(), InPhases()], ids=lambda hook: type(hook).__name__)
def test_any_order_of_landing(hook: CommHook, ranks: Ranks, seed: int) -> None:
    """Ranks reach their buckets at random times, while others are between two phases."""

    def run() -> tuple[dict[str, list[str]], Any]:
        net = new_net(seed, layers=4, delays=random.Random(seed + ltx.world().rank))
        with ltx.profile.record() as trace:
            found = with_ddp(hook, seed, steps=6, net=net, **SMALL)
        by_channel: dict[str, list[str]] = {}
        for event in trace.events:
            by_channel.setdefault(event.channel, []).append(event.label)
        return by_channel, found

    by_channel, found = ranks(2).run(run).replicated()
    assert_equal(found, ranks(2).run(with_ltx, hook, seed, 6).replicated())
    for channel, labels in by_channel.items():
        places = [int(label.split()[1]) for label in labels if label.startswith("bucket")]
        passes = [place for place, previous in zip(places, [99, *places], strict=False) if place <= previous]
        # Each pass goes up; the first one has only bucket 0, which has no third phase.
        assert len(passes) == (6 if 0 in places else 5), f"{channel}: {places}"
        assert max(places) == 3


@on_ranks(2)
def test_buckets_are_sent_during_the_backward_pass(seed: int) -> None:
    net = new_net(seed)
    ddp = under_ddp(net, hooks.AllReduce(), **SMALL)
    log: list[tuple[float, str]] = []
    for k, layer in enumerate(net.layers):
        layer.register_full_backward_hook(lambda *_, k=k: log.append((time.perf_counter(), f"layer {k}")))
    ddp(batch(seed, 0)).backward()  # in one bucket
    log.clear()
    with ltx.profile.record() as trace:
        ddp(batch(seed, 1)).backward()
    log.extend((event.issued_s, event.label) for event in trace.events if event.label.startswith("bucket"))
    order = [label for _, label in sorted(log)]
    assert order.index("bucket 0") < order.index("layer 1")
    assert order.index("bucket 1") < order.index("layer 0")


def test_hooks_that_change_with_the_step(ranks: Ranks, seed: int) -> None:
    def run() -> tuple[list[Params], list[Params], int]:
        hook = to_torch(Counted())
        return with_ddp(hook, seed), with_ddp(None, seed, 1), hook.step

    found, plain, steps = ranks(2).run(run).replicated()
    assert steps == 4
    # One bucket, which is the last: each rank adds 1.
    assert_equal(found[0], {name: g + 2 for name, g in plain[0].items()}, rtol=1e-4, atol=1e-5)
    # At step 1, and 3, FP16 was in force.
    fp16 = ranks(2).run(lambda: with_ddp(hooks.FP16(), seed, 1)).replicated()
    assert not torch.equal(fp16[0]["layers.0.weight"], found[0]["layers.0.weight"])


def test_no_sync_accumulates(ranks: Ranks, seed: int) -> None:
    def run(hook: CommHook | None) -> tuple[Params, int]:
        net = new_net(seed)
        ddp = DistributedDataParallel(net, **SMALL)
        ours = to_torch(hook or hooks.AllReduce(), ddp)
        if hook is not None:
            ddp.register_comm_hook(None, ours)
        for i in range(6):
            with ddp.no_sync() if i % 3 < 2 else nullcontext():
                ddp(batch(seed, i)).backward()
        return grads_of(net), ours.step

    got, steps = ranks(2).run(run, hooks.AllReduce()).replicated()
    assert steps == 2
    assert_equal(got, ranks(2).run(run, None).replicated()[0], rtol=1e-5, atol=1e-6)


@pytest.mark.full(but=1)
@pytest.mark.parametrize("how", ["find_unused_parameters", "static_graph"])
def test_unused_parameters(how: str, ranks: Ranks, seed: int) -> None:
    def run(hook: CommHook | None) -> list[dict[str, Any]]:
        net, found = new_net(seed), []
        ddp = under_ddp(net, hook, **SMALL, **{how: True})
        for i in range(4):
            backward(ddp, batch(seed, i), 3 if how == "static_graph" else 2 + ltx.world().rank)
            found.append({name: p.grad for name, p in net.named_parameters()})
        return found

    for hook in (hooks.AllReduce(), InPhases()):
        got, want = ranks(2).run(run, hook).replicated(), ranks(2).run(run, None).replicated()
        assert_equal(got, want, rtol=1e-5, atol=1e-6)
        assert got[-1]["layers.3.weight"] is None  # used by nobody


def test_state_dict_goes_on_in_other_buckets(ranks: Ranks, seed: int) -> None:
    """The errors are kept by parameter: a run of four steps is one of two, and another in other buckets."""

    def run() -> Any:
        whole, halves = new_net(seed), new_net(seed)
        hook = to_torch(Feedback(), DistributedDataParallel(whole))
        with_ddp(hook, seed, 4, whole)
        first, second = (to_torch(Feedback(), dict(halves.named_parameters())) for _ in range(2))
        with_ddp(first, seed, 2, halves, group=dist.group.WORLD)
        saved = copy.deepcopy(first.state_dict())
        second.load_state_dict(saved)
        assert_equal(dict(second.state_dict()), dict(saved))
        with_ddp(second, seed, 2, halves, first=2, **SMALL)
        assert saved["step"] == 2
        assert second.step == 4
        assert {type(t) for t in saved["params"]["layers.0.weight"].values()} == {Tensor}
        params = ({name: p.detach() for name, p in net.named_parameters()} for net in (whole, halves))
        return *params, hook.state_dict(), second.state_dict()

    pool = ranks(2).run(run)
    for whole, halves, state, resumed in pool:
        assert_equal(whole, halves)
        assert_equal(dict(state), dict(resumed))
        assert state["params"].keys() == whole.keys()
        assert all(t["error"].abs().sum() > 0 for t in state["params"].values())
    assert not torch.equal(*(found[2]["params"]["layers.0.weight"]["error"] for found in pool))  # each rank's own


def test_without_names(ranks: Ranks, seed: int) -> None:
    def run() -> Any:
        hook = to_torch(Feedback())
        found = with_ddp(hook, seed, **SMALL)
        return found, {key: list(state["error"].shape) for key, state in hook.state_dict()["params"].items()}

    found, shapes = ranks(2).run(run).replicated()
    assert_equal(found, ranks(2).run(with_ltx, Feedback(), seed).replicated())
    assert shapes == {str(i): [7, 7] if i % 2 == 0 else [7] for i in range(8)}


def test_what_states_are_refused(ranks: Ranks, seed: int) -> None:
    hook = to_torch(Feedback(), dict(new_net(seed).named_parameters()))
    for state, text in (
        ([], r"to_torch\(Feedback\(\)\): expected a dict with 'step' and 'params'.*list"),
        ({"step": 1}, r"got \['step'\]"),
        ({"step": 1, "params": {"w": {}}}, r"parameters \['w'\], which aren't among names="),
    ):
        refuses(SyncStateError, text, hook.load_state_dict, state)
    refuses(HookError, r"takes an ltx.hooks.CommHook, got str", to_torch, "fp16")


@pytest.mark.full
def test_state_that_doesnt_fit(on_new_axis: OnNewAxis, seed: int) -> None:
    def run() -> tuple[str, str]:
        net = new_net(seed)
        hook = to_torch(Feedback(), dict(net.named_parameters()))
        hook.load_state_dict({"step": 1, "params": {"layers.0.bias": {"error": torch.zeros(3)}}})
        wrong = said(SyncStateError, with_ddp, hook, seed, net=net)
        return wrong, said(StrategyError, with_ddp, to_torch(Feedback(), {"w": torch.ones(2)}), seed)

    for wrong, missing in on_new_axis(run):
        assert "the state of parameter 'layers.0.bias': expected {'error': 'torch.float32[7]'}" in wrong
        assert "a parameter of shape [7, 7] that isn't among the 1 of names=" in missing


@dataclass(frozen=True)
class Fails(InPhases):
    """On rank 0, in the second phase of the second bucket."""

    def reduce(self, inputs: BucketInput) -> Reduction:
        for part in inputs.flat.tensor_split(2):
            yield CollectiveRequest("psum", part.contiguous())
            if inputs.rank == 0 and inputs.bucket.index == 1:
                raise ZeroDivisionError("mine")
        return inputs.flat, inputs.states


@pytest.mark.full
def test_a_hook_that_fails_on_one_rank(on_new_axis: OnNewAxis, seed: int) -> None:
    def run() -> tuple[str, str, Any]:
        group = inside.resolve(None).comm.group
        ddp = under_ddp(new_net(seed), Fails(), process_group=group, find_unused_parameters=True, **SMALL)
        with pytest.raises(Exception, match="mine") as raised:
            ddp(batch(seed, 0)).backward()
        # A new module goes on, in a new world.
        ltx.init()
        group = inside.resolve(None).comm.group
        again = under_ddp(new_net(seed), hooks.AllReduce(), process_group=group, **SMALL)
        again(batch(seed, 0)).backward()
        return raised.typename, str(raised.value), grads_of(again.module)

    (kind, text, grads), (told, why, others) = on_new_axis(run)
    assert (kind, text) == ("ZeroDivisionError", "mine")
    assert told == "DeadlockDetectedError"
    assert "rank 1: rank 0 has left a backward pass" in why
    assert "ZeroDivisionError: mine" in why
    assert_equal(grads, others)


def test_a_pass_that_the_program_leaves(on_new_axis: OnNewAxis, ranks: Ranks, seed: int) -> None:
    """Between two buckets, on every rank: the hook goes on with another module."""

    def run() -> tuple[Params, int]:
        group = inside.resolve(None).comm.group
        net = new_net(seed)
        hook = to_torch(Feedback())
        how = {"process_group": group, "find_unused_parameters": True, **SMALL}
        ddp = DistributedDataParallel(net, **how)
        ddp.register_comm_hook(group, hook)

        net.layers[1].weight.register_hook(lambda _: hook.load_state_dict({"step": 7, "params": {}}))
        refuses(SyncStateError, "a backward pass is under way", ddp(batch(seed, 0)).backward)
        hook.load_state_dict({"step": 7, "params": {}})
        ltx.init()
        group = inside.resolve(None).comm.group
        net, how = new_net(seed), {**how, "process_group": group}
        again = DistributedDataParallel(net, **how)
        again.register_comm_hook(group, hook)
        again(batch(seed, 0)).backward()
        return grads_of(net), hook.step

    grads, step = on_new_axis(run).replicated()
    assert step == 8
    assert_equal([grads], ranks(2).run(with_ltx, Feedback(), seed, 1).replicated())


def test_ranks_with_different_hooks(on_new_axis: OnNewAxis, seed: int) -> None:
    def run() -> str:
        hook = hooks.FP16() if ltx.world().rank else hooks.BF16()
        ddp = under_ddp(new_net(seed), hook, process_group=inside.resolve(None).comm.group)
        return said(RankMismatchError, lambda: ddp(batch(seed, 0)).backward())

    text = on_new_axis(run).replicated()
    assert "ranks disagree on bucket 0 of DistributedDataParallel, its arguments: rank 0: BF16()" in text


class Around(Net):
    """A net in the middle of which another one runs, so that in the backward pass too its buckets lie between."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = [inner]  # not a submodule

    def forward(self, x: Tensor, use: int = 4) -> Tensor:
        x = torch.tanh(self.layers[1](torch.tanh(self.layers[0](x))))
        x = x * self.inner[0](x)
        return self.layers[3](torch.tanh(self.layers[2](x))).square().sum()


def nested(seed: int, hook: Callable[[], Any], delays: random.Random | None = None, group: Any = None) -> Any:
    how = {**SMALL, "find_unused_parameters": True, "process_group": group}
    inner = DistributedDataParallel(new_net(seed, delays=delays), **how)
    with torch.random.fork_rng():
        torch.manual_seed(seed + 1)
        outer = DistributedDataParallel(Around(inner), **how)
    for ddp in (inner, outer):
        if (registered := hook()) is not None:
            ddp.register_comm_hook(group, registered)
    return inner, outer


@pytest.mark.full
def test_two_modules_in_one_backward_pass(ranks: Ranks, seed: int) -> None:
    """Their buckets interleave: the phases of one don't mix with those of the other."""

    def run(ours: bool) -> list[Params]:
        delays = random.Random(seed + ltx.world().rank)
        inner, outer = nested(seed, lambda: to_torch(InPhases()) if ours else None, delays)
        for i in range(6):
            inner.zero_grad()
            outer.zero_grad()
            outer(batch(seed, i)).backward()
        return [grads_of(inner.module), grads_of(outer.module)]

    got, want = ranks(2).run(run, True).replicated(), ranks(2).run(run, False).replicated()
    assert_equal(got, want, rtol=1e-4, atol=1e-5)


def test_one_hook_for_two_modules_is_refused(on_new_axis: OnNewAxis, seed: int) -> None:
    def run() -> str:
        one = to_torch(hooks.AllReduce())
        _, outer = nested(seed, lambda: one, group=inside.resolve(None).comm.group)
        return said(StrategyError, lambda: outer(batch(seed, 0)).backward())

    assert "Each DDP module needs a to_torch of its own" in on_new_axis(run).replicated()


def test_state_of_register_comm_hook(on_new_axis: OnNewAxis, seed: int) -> None:
    def run() -> str:
        ddp = DistributedDataParallel(new_net(seed), process_group=inside.resolve(None).comm.group)
        ddp.register_comm_hook("data", to_torch(hooks.AllReduce()))
        return said(AxisError, lambda: ddp(batch(seed, 0)).backward())

    assert "state is the process group over which to reduce, or None" in on_new_axis(run).replicated()


def test_dtypes_and_odd_shapes(ranks: Ranks, seed: int) -> None:
    """Mixed dtypes, a 0-dim parameter, an empty one; buckets of DDP's are untouched before it takes the result."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Parameter(torch.arange(3.0).double())
            self.narrow = nn.Parameter(torch.arange(4.0).bfloat16())
            self.scalar = nn.Parameter(torch.tensor(2.0))
            self.empty = nn.Parameter(torch.zeros(0, 3))

        def forward(self, x: Tensor) -> Tensor:
            return sum(((p.float() * x) ** 2).sum() for p in self.parameters())

    def run(hook: CommHook | None) -> Any:
        module = Odd()
        ddp = DistributedDataParallel(module)
        untouched = []
        if hook is not None:
            ours = to_torch(hook, ddp)

            def spied(state, bucket):  # DDP wants other annotations than text
                before = bucket.buffer().clone()
                future = ours(state, bucket)
                untouched.append(torch.equal(before, bucket.buffer()))
                return future

            ddp.register_comm_hook(None, spied)
        for _ in range(2):
            backward(ddp, torch.tensor(1.0 + ltx.world().rank))
        return grads_of(module), untouched

    for hook in (hooks.AllReduce(), InPhases(), hooks.FP16()):
        got, untouched = ranks(2).run(run, hook).replicated()
        want, _ = ranks(2).run(run, None).replicated()
        assert_equal(got, want)
        assert len(untouched) == 6  # a bucket a dtype, in each of two passes
        assert all(untouched)


def test_under_debug_checks(ranks: Ranks, seed: int) -> None:
    def run() -> list[Params]:
        with ltx.debug_checks():
            return with_ddp(Feedback(), seed, **SMALL)

    assert_equal(ranks(2).run(run).replicated(), ranks(2).run(with_ltx, Feedback(), seed).replicated())


def test_what_ddp_sees_of_it() -> None:
    hook = to_torch(hooks.FP16())
    assert hook.__qualname__ == hook.__name__ == repr(hook) == "to_torch(FP16())"
    signature = inspect.signature(hook)
    assert signature.parameters["bucket"].annotation is dist.GradBucket
    assert signature.return_annotation == torch.futures.Future[torch.Tensor]
