"""A module that is called again in the backward pass, by an autograd.Function that computes a part of the step anew.

Right is what a step gives whose Functions are left out. Each step also leaves the module as it was.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call as of_torch
from torch.nn.modules import module as torch_modules
from torch.utils.checkpoint import checkpoint

import ltx
from ltx.errors import DeadlockDetectedError, StepError, TreeError, UnsupportedError
from ltx.optim import from_torch
from tests import train_on
from tests.train_on import on_ranks, refuses
from tests.twins.cases import Params, seeded

SGD = from_torch(torch.optim.SGD, lr=0.5)
CALLS = {"ltx": ltx.functional_call, "torch": of_torch}


class Adjoint(torch.autograd.Function):
    """As torchdiffeq's odeint_adjoint: the gradients of what it is given."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor, *params: Tensor) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x, *params)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, *params = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return None, *torch.autograd.grad(ctx.block(x), (x, *params), dy, allow_unused=True)


class Reversible(Adjoint):
    """As reversible networks: a backward pass inside of the other one, which knows the parameters by itself."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            ctx.block(x).backward(dy)
        return None, x.grad


class ByHand(torch.autograd.Function):
    """Values alone: torch.func takes it too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(block: nn.Module, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return (x @ weight.T + bias).tanh()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.block, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        d = (1 - ctx.block(x).square()) * dy
        return None, d @ weight, d.T @ x, d.sum(0)


class Told(Adjoint):
    """What the error recommends: the backward pass says with which parameters it calls the module."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, *params = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            given = dict(zip((name for name, _ in ctx.block.named_parameters()), params, strict=True))
            y = ltx.functional_call(ctx.block, given, (x,)) + of_torch(ctx.block, given, (x,))
            return None, *torch.autograd.grad(y, (x, *params), dy / 2)


KINDS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "plain": lambda block, x: block(x),
    "adjoint": lambda block, x: Adjoint.apply(block, x, *block.parameters()),
    "told": lambda block, x: Told.apply(block, x, *block.parameters()),
    "reversible": Reversible.apply,
    "by hand": lambda block, x: ByHand.apply(block, x, *block.parameters()),
}
BY_AUTOGRAD = ["adjoint", "reversible", "by hand"]  # which call the module alone


class Net(nn.Module):
    def __init__(self, kind: str, checkpoints: bool | None = None) -> None:
        super().__init__()
        self.kind, self.checkpoints = kind, checkpoints
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2))

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = KINDS[self.kind](block, x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.body(x) if self.checkpoints is None else checkpoint(self.body, x, use_reentrant=self.checkpoints)
        return self.last(x).square().mean()


def problem(seed: int, kind: str, checkpoints: bool | None = None) -> tuple[Net, Params, Any]:
    """A net, other parameters, and three batches of this rank."""
    with seeded(seed):
        net, other = Net(kind, checkpoints).double(), Net("plain").double()
        batches = torch.randn(3, 8, 3, dtype=torch.float64)
    params = {name: p.detach() for name, p in other.named_parameters()}
    return net, params, batches.view(3, ltx.axis_size(), -1, 3)[:, ltx.axis_index()]


def unchanged(net: nn.Module, before: dict[str, Tensor]) -> bool:
    return all(p is before[name] for name, p in net.named_parameters()) and not torch_modules._global_forward_pre_hooks


def trained(
    seed: int, kind: str, how: str, call: str = "ltx", checkpoints: bool | None = None, bucket_bytes: int | None = None
) -> Params:
    net, params, batches = problem(seed, kind, checkpoints)
    before = dict(net.named_parameters())
    strategy = ltx.DDPStrategy() if bucket_bytes is None else ltx.DDPStrategy(bucket_bytes=bucket_bytes)
    step: Any = ltx.data_parallel(lambda p, x: CALLS[call](net, p, (x,)), strategy)
    if how == "accumulate":
        step = ltx.accumulate(step, 2)
    if how in ("train", "update", "accumulate"):
        found = train_on.trained(step, SGD, params, batches, overlap="update" if how == "update" else "backward")
        params, batches = found.params, []
    for x in batches:
        if how == "loop":
            params = {name: p.detach().requires_grad_() for name, p in params.items()}
            step(params, x).backward()
            grads: Any = {name: p.grad for name, p in params.items()}
        else:
            grads = {"ltx.grad": ltx.grad, "torch.func.grad": torch.func.grad}[how](step)(params, x)
        params = {name: p.detach() - 0.5 * grads[name] for name, p in params.items()}
    assert unchanged(net, before)
    return params


@pytest.mark.parametrize("call", CALLS)
@on_ranks(2, alone=True)
def test_a_step_that_runs_its_own_backward_pass(seed: int, call: str) -> None:
    for how in ("train", "update", "accumulate", "ltx.grad", "torch.func.grad"):
        want = trained(seed, "plain", how)
        for kind in BY_AUTOGRAD:
            torch.testing.assert_close(trained(seed, kind, how, call), want)
    # Buckets of one parameter: those of the blocks are complete after that of the last layer.
    torch.testing.assert_close(trained(seed, "reversible", "train", call, None, 8), trained(seed, "plain", "train"))
    if call == "ltx":
        for kind in BY_AUTOGRAD[:2]:
            for checkpoints in (False, True):
                got = trained(seed, kind, "train", call, checkpoints)
                torch.testing.assert_close(got, trained(seed, "plain", "train"))


def test_on_simulated_ranks(seed: int) -> None:
    found = []
    for kind in ("by hand", "plain"):
        net, params, batches = problem(seed, kind)
        step = ltx.data_parallel(lambda p, x, net=net: ltx.functional_call(net, p, (x,)))
        train = ltx.train_step(step, SGD)
        xs = batches.view(3, 2, -1, 3)
        grads = ltx.vmap(ltx.grad(step), in_dims=(None, 0))(params, xs[0])
        state = ltx.vmap(lambda x, train=train, params=params: train(train.init(params), x)[0].params)(xs[0])
        found.append((grads, state))
        assert not torch_modules._global_forward_pre_hooks
    torch.testing.assert_close(*found)


AGAIN = r"'blocks\.1' of Net was called again in the backward pass, .*"


@pytest.mark.parametrize("call", CALLS)
@on_ranks(2, alone=True)
def test_in_a_backward_pass_of_somebody_else_it_raises(seed: int, call: str) -> None:
    for kind in BY_AUTOGRAD:
        with pytest.raises(StepError, match=AGAIN + r"ltx\.grad\(step\)\(params, \.\.\.\) or ltx\.train_step"):
            trained(seed, kind, "loop", call)
    torch.testing.assert_close(trained(seed, "told", "loop", call), trained(seed, "plain", "loop", call))

    found = trained(seed, "by hand", "torch.func.grad", call)  # of ltx's step, which runs below the transform
    torch.testing.assert_close(found, trained(seed, "plain", "torch.func.grad", call))


def test_without_a_step_too(seed: int) -> None:
    net, params, (x, *_) = problem(seed, "adjoint")
    params = {name: p.requires_grad_() for name, p in params.items()}
    refuses(StepError, AGAIN, ltx.functional_call(net, params, (x,)).backward)
    twin, *_ = problem(seed, "plain")
    net.checkpoints = False
    ltx.functional_call(twin, params, (x,)).backward()
    for own in ({}, dict(net.named_parameters())):
        ltx.functional_call(net, own, (x,)).backward()  # the tensors that it has in the backward pass too
    assert not torch_modules._global_forward_pre_hooks


def of(step: Callable[..., Tensor], seed: int, kind: str) -> Params:
    net, params, (x, *_) = problem(seed, kind)
    before = dict(net.named_parameters())
    train = ltx.train_step(ltx.data_parallel(lambda p, x: step(net, p, x)), SGD)
    try:
        return train(train.init(params), x)[0].params
    finally:
        assert unchanged(net, before)


def doubled(params: Params) -> Params:
    return {name: 2 * p for name, p in params.items()}


def two_batches(net: Net, p: Params, x: Tensor) -> Tensor:
    return ltx.functional_call(net, p, (x,)) + ltx.functional_call(net, p, (2 * x,))


def teacher(net: Net, p: Params, x: Tensor) -> Tensor:
    with torch.no_grad():
        wanted = ltx.functional_call(net, doubled(p), (x,))
    return (ltx.functional_call(net, p, (x,)) - wanted).square()


def two_sets(net: Net, p: Params, x: Tensor) -> Tensor:
    return ltx.functional_call(net, p, (x,)) + of_torch(net, doubled(p), (x,))


def two_modules(net: Net, p: Params, x: Tensor) -> Tensor:
    return ltx.functional_call(net, p, (x,)) + ltx.functional_call(copy.deepcopy(net), doubled(p), (x,))


def inner_loop(net: Net, p: Params, x: Tensor) -> Tensor:
    grads = torch.autograd.grad(ltx.functional_call(net, p, (x,)), list(p.values()))
    return ltx.functional_call(net, {n: v - g for (n, v), g in zip(p.items(), grads, strict=True)}, (x,))


@pytest.mark.parametrize("kind", BY_AUTOGRAD)
@on_ranks(2, alone=True)
def test_several_calls_in_one_step(seed: int, kind: str) -> None:
    lost = pytest.raises(StepError, match=AGAIN + "was given .* nobody has kept")
    with lost if kind == "reversible" else nullcontext():  # the others save what they are given
        torch.testing.assert_close(of(two_modules, seed, kind), of(two_modules, seed, "plain"))
    for step in (two_batches, teacher):
        torch.testing.assert_close(of(step, seed, kind), of(step, seed, "plain"))
    refuses(StepError, AGAIN + r"several sets of tensors.* copy\.deepcopy", of, two_sets, seed, kind)
    refuses(StepError, AGAIN + r"has its own tensors there", of, inner_loop, seed, kind)


@on_ranks(2, alone=True)
def test_tensors_that_nobody_keeps(seed: int) -> None:
    """A call doesn't keep what a step makes: the weights of a sharded layer, say. What needs them again raises."""

    def step(net: Net, p: Params, x: Tensor) -> Tensor:
        return ltx.functional_call(net, {name: value.double() * 1 for name, value in p.items()}, (x,))

    torch.testing.assert_close(of(step, seed, "adjoint"), of(step, seed, "plain"))  # it saves them
    told = (StepError, DeadlockDetectedError)  # of this rank or of the other
    refuses(told, r"was given a 'blocks.*' that nobody has kept since", of, step, seed, "reversible")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_errors_and_interrupts_leave_the_module_as_it_was(error: Any, seed: int) -> None:
    def step(net: Net, p: Params, x: Tensor) -> Tensor:
        def interrupt(_: Tensor) -> None:
            assert net.first.bias is not own  # the blocks were called before
            raise error("now")

        own = net.first.bias
        first = p["first.weight"] * 1
        first.register_hook(interrupt)
        return ltx.functional_call(net, {**p, "first.weight": first}, (x,))

    refuses(error, "now", of, step, seed, "reversible")
    torch.testing.assert_close(of(two_batches, seed, "adjoint"), of(two_batches, seed, "plain"))


def with_buffers(seed: int, norm: Callable[[], nn.Module], kind: str) -> Any:
    with seeded(seed):
        first, block = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), norm())
        net, x = nn.Sequential(first, block).double(), torch.randn(2, 6, 3, dtype=torch.float64)
    net.forward = lambda x: KINDS[kind](block, first(x)).square().mean()  # type: ignore[method-assign]

    def step(params: Params, buffers: Params, x: Tensor) -> Any:
        return ltx.functional_call(net, (params, buffers), (x,), return_buffers=True)

    params, buffers = ({k: v.detach() for k, v in named()} for named in (net.named_parameters, net.named_buffers))
    state, _ = train_on.trained(step, SGD, params, x, buffers=buffers)
    return state.params, state.buffers


def test_buffers(seed: int) -> None:
    """Batch norm's output doesn't depend on what it has written; the output after a power iteration does."""
    wanted = with_buffers(seed, lambda: nn.BatchNorm1d(3), "plain")
    torch.testing.assert_close(with_buffers(seed, lambda: nn.BatchNorm1d(3), "adjoint"), wanted)
    with pytest.raises(StepError, match=r"has written to its buffer '1\.1\..*' since.* torch\.utils\.checkpoint"):
        with_buffers(seed, lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)), "adjoint")


class Dummy(Reversible):
    """As reversible networks whose input needs no gradient: a dummy is to bring the backward pass there."""

    @staticmethod
    def forward(ctx: Any, dummy: Tensor, block: nn.Module, x: Tensor) -> Tensor:  # type: ignore[override]
        return Reversible.forward(ctx, block, x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return None, *Reversible.backward(ctx, dy)


@pytest.mark.parametrize("how", ["train", "update", "accumulate", "ltx.grad", "torch.func.grad"])
@on_ranks(2, alone=True)
def test_a_function_that_leads_to_a_tensor_of_its_own_alone(seed: int, how: str) -> None:
    def step_of(kind: str) -> tuple[Any, Params, Tensor]:
        with seeded(seed):
            net, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), torch.randn(2, 4, 3)[ltx.axis_index()]

        def forward(x: Tensor) -> Tensor:
            dummy = torch.ones((), requires_grad=True)
            first = net[0](x) if "plain" in kind else Dummy.apply(dummy if kind == "near" else dummy * 1, net[0], x)
            return net[1](first).square().mean() + (net[0](x).mean() if "twice" in kind else 0)

        net.forward = forward  # type: ignore[method-assign]
        step = ltx.data_parallel(lambda p, x: ltx.functional_call(net, p, (x,)))
        step = ltx.accumulate(step, 2) if how == "accumulate" else step
        return step, {name: p.detach() for name, p in net.named_parameters()}, x

    def found(kind: str) -> Params:
        step, params, x = step_of(kind)
        if how in ("train", "update", "accumulate"):
            overlap: Any = "update" if how == "update" else "backward"
            return train_on.trained(step, SGD, params, [x], overlap=overlap).params
        return {"ltx.grad": ltx.grad, "torch.func.grad": torch.func.grad}[how](step)(params, x)  # type: ignore[operator]

    for kind in ("near", "far"):
        torch.testing.assert_close(found(kind), found("plain"))
    torch.testing.assert_close(found("twice"), found("plain twice"))


def test_a_batch_that_leads_there_keeps_its_grad() -> None:
    """A Function that leads to the batch alone is called, too, and what the batch has as `.grad` stays."""
    net, x = nn.Sequential(nn.Linear(3, 1)), torch.ones(2, 3, requires_grad=True)
    x.grad = kept = torch.full((2, 3), 5.0)

    def after(call: Callable[[nn.Module, Tensor], Tensor]) -> Params:
        net.forward = lambda x: call(net[0], x).square().mean()  # type: ignore[method-assign]
        train = ltx.train_step(ltx.data_parallel(lambda p, x: ltx.functional_call(net, p, (x,))), SGD)
        return train(train.init({name: p.detach() for name, p in net.named_parameters()}), x)[0].params

    torch.testing.assert_close(after(KINDS["reversible"]), after(KINDS["plain"]))
    assert x.grad is kept
    assert kept.eq(5.0).all()


@pytest.mark.parametrize("kind", ["reversible", "dummy"])
@on_ranks(2, alone=True)
def test_a_step_that_autograd_differentiates_refuses_passes_inside(kind: str) -> None:
    """What they bring has no derivative, and had been left out of the first one too."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    dummy = torch.ones((), requires_grad=True)

    def forward(x: Tensor) -> Tensor:
        y: Tensor = Dummy.apply(dummy * 1, net[0], x) if kind == "dummy" else Reversible.apply(net[0], x)
        return net[1](y).square().mean()

    net.forward = forward  # type: ignore[method-assign]
    train = ltx.train_step(ltx.data_parallel(lambda p, x: ltx.functional_call(net, p, (x,))), SGD, donate=False)
    state = train.init({name: p.detach() for name, p in net.named_parameters()})
    refuses(UnsupportedError, "runs a backward pass of its own", train, state, torch.ones(2, 3, requires_grad=True))


MASK = torch.tensor([[0.0, 1.0]])


def masked(net: nn.Linear, hook: str) -> Any:
    if hook == "register_hook":
        return net.weight.register_hook(lambda g: g * MASK)
    return net.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * MASK))  # type: ignore[operator]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
@on_ranks(2, alone=True)
def test_hooks_of_parameters(hook: str, call: str) -> None:
    net, x = nn.Linear(2, 1, bias=False), torch.full((1, 2), 4.0)
    net.weight.data.zero_()
    own = dict(net.named_parameters())
    detached = {"weight": net.weight.detach()}

    def step() -> ltx.DataParallel:
        return ltx.data_parallel(lambda p, x: CALLS[call](net, p, (x,)).sum())

    handle = masked(net, hook)
    for grad in (ltx.grad, torch.func.grad):
        for params in (own, detached):
            with pytest.raises(StepError, match=r"'weight'.* has hooks \(register_hook\).*grads\[\"name\"\] \* mask"):
                grad(step())(params, x)
    for given in (own, net):
        text = r"leaf 'weight' has hooks \(register_hook\).* the gradients that you get"
        refuses(TreeError, text, ltx.train_step(step(), SGD).init, given)
    train = ltx.train_step(step(), SGD)
    refuses(StepError, r"'weight'.* has hooks.*ltx\.optim\.chain", train, train.init(detached), x)
    step()(own, x).backward()  # here they are called
    assert torch.equal(net.weight.grad, 4 * MASK)  # type: ignore[arg-type]
    if call == "ltx":
        with pytest.raises(StepError, match=r"parameter 'weight' of Linear has hooks"):
            torch.func.grad(lambda p: ltx.functional_call(net, p, (x,)).sum())(detached)
    handle.remove()
    chain = ltx.optim.chain(
        ltx.optim.from_functions(lambda p: None, lambda g, s, p: ({"weight": g["weight"] * MASK}, s)), SGD
    )
    train = ltx.train_step(step(), chain)
    assert torch.equal(train(train.init(own), x)[0].params["weight"], -2 * MASK)
