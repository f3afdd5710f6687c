"""functional_call beside the module itself: activation checkpointing, buffers, names. The module has other values."""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call as of_torch
from torch.utils.checkpoint import checkpoint

import ltx
from ltx.errors import InputError, StepError, TreeError, UnsupportedError
from tests import train_on
from tests.contract.reports.test_called_again import KINDS
from tests.kinds import Ranks
from tests.train_on import on_ranks, refuses
from tests.twins.cases import Params, backward, func_grad, params_of, seeded
from tests.twins.training import by_train_step, sgd

LR = 0.5


class Block(nn.Module):
    """A layer whose forward is called by a bound method that was kept, as peft and accelerate do."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4) if norm else nn.LayerNorm(4)
        self.dropout = nn.Dropout(0.3)
        self.reentrant: bool | None = None
        self.kept = [self.inner]

    def inner(self, x: Tensor) -> Tensor:
        return self.dropout(self.norm(self.layer(x)).tanh())

    def forward(self, x: Tensor) -> Tensor:
        call = self.kept[0]
        return call(x) if self.reentrant is None else checkpoint(call, x, use_reentrant=self.reentrant)


class Net(nn.Module):
    """Checkpoints inside a checkpoint, and an output layer that is the first one."""

    def __init__(self, norm: bool = False, reentrant: bool | None = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(norm) for _ in range(3))
        self.out = nn.Linear(4, 4, bias=False)
        self.out.weight = self.blocks[0].layer.weight
        self.checkpointing(reentrant)

    def checkpointing(self, reentrant: bool | None) -> None:
        self.reentrant = reentrant
        for block in self.blocks:
            block.reentrant = reentrant

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x) if self.reentrant is None else checkpoint(self.body, x, use_reentrant=self.reentrant)
        return self.out(h).square().mean()


def made(seed: int, **kwargs: Any) -> tuple[Net, Net, Tensor]:
    """A net, another one with other values that doesn't checkpoint, and a batch."""
    with seeded(seed):
        net, twin = Net(**kwargs).double(), Net(**{**kwargs, "reentrant": None}).double()
        return net, twin, torch.randn(4, 6, 4, dtype=torch.float64)


def drawn(fn: Callable[[], Any], seed: int) -> Any:
    with seeded(seed):
        return fn()


GRADIENTS: dict[str, Callable[..., Params]] = {
    "loss.backward": backward,
    "ltx.grad": lambda step, *args: ltx.grad(step)(*args),
    "torch.func.grad": func_grad,
}


def trained(seed: int, reentrant: bool | None, how: str, call: Any = ltx.functional_call) -> tuple[Params, Any]:
    """Parameters after some steps on this rank's samples, and what the module itself has then."""
    net, twin, batches = made(seed, reentrant=reentrant)
    mine = batches.view(4, ltx.axis_size(), -1, 4)[:, ltx.axis_index()]
    step = ltx.data_parallel(lambda p, x: call(net, p, (x,)))
    params = params_of(twin)
    if how in ("backward", "update"):
        train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=LR), overlap=how)
        state = train.init(params)
        for t, x in enumerate(mine):
            state, _ = drawn(lambda state=state, x=x: train(state, x), t)
        return state.params, net.state_dict()
    for t, x in enumerate(mine):
        grads = drawn(lambda params=params, x=x: GRADIENTS[how](step, params, x), t)
        params = {name: p.detach() - LR * grads[name] for name, p in params.items()}
    return params, net.state_dict()


HOWS = ["backward", "update", *GRADIENTS]


@pytest.mark.full(but=2)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("call", [ltx.functional_call, of_torch], ids=["ltx", "torch"])
def test_steps_with_checkpoints_are_those_without(call: Any, reentrant: bool, ranks: Ranks, seed: int) -> None:
    def every(hows: list[str]) -> Any:
        return [trained(seed, kind, how, call) for how in hows for kind in (reentrant, None)]

    # In a world of one torch takes the gradient of torch.func, and it has no checkpoints there.
    for results in (*ranks(2).run(every, HOWS), every(HOWS if call is ltx.functional_call else HOWS[:3])):
        for (params, own), (want, _) in zip(results[::2], results[1::2], strict=True):
            torch.testing.assert_close(params, want)
            torch.testing.assert_close(own, made(seed)[0].state_dict(), rtol=0, atol=0)


def test_they_are_those_of_torch(seed: int) -> None:
    _, twin, batches = made(seed)
    optimizer = torch.optim.SGD(twin.parameters(), lr=LR)
    train_on.loop_of_torch(optimizer, lambda t, x: drawn(lambda: twin(x), t), enumerate(batches))
    torch.testing.assert_close(trained(seed, False, "backward")[0], params_of(twin))


def test_inside_of_other_transformations(seed: int) -> None:
    net, twin, batches = made(seed)
    net.eval(), twin.eval()
    params, x = params_of(twin), batches[0]
    step = ltx.data_parallel(lambda p, x: ltx.functional_call(net, p, (x,)))
    want = torch.func.grad(lambda p: of_torch(twin, p, (x,)))(params)
    torch.testing.assert_close(ltx.grad(ltx.accumulate(step, 3))(params, x), want)
    # Where torch has no hooks for saved tensors nothing is checkpointed, and values are the same.
    if hasattr(torch.utils.checkpoint, "_NoopSaveInputs"):  # torch 2.11's, for which vmap and jvp have no rule
        return
    simulated = ltx.vmap(ltx.grad(step), in_dims=(None, 0))(params, x.view(2, 3, 4))
    torch.testing.assert_close(ltx.tree.map(lambda g: g[1], simulated), want)
    direction = ltx.tree.map(torch.ones_like, params)
    for call, module in ((ltx.functional_call, net), (of_torch, twin)):
        grad = torch.func.grad(lambda p, call=call, module=module: call(module, p, (x,)))
        second = torch.func.jvp(grad, (params,), (direction,))[1]
        want = second if call is ltx.functional_call else torch.testing.assert_close(second, want)


def test_several_calls_in_one_step_and_autocast(seed: int) -> None:
    """Two sets of parameters of one module, the second made from a gradient by the first, and another module."""
    (net, twin, batches), (other, same, _) = made(seed), made(seed + 1)
    same.load_state_dict(other.state_dict())
    for module in (net, twin, other, same):
        module.eval()
    params = {name: p.requires_grad_() for name, p in params_of(twin).items()}
    rest = {name: (2 * p).requires_grad_() for name, p in params_of(same).items()}

    def loss(call: Any, first: nn.Module, second: nn.Module) -> Tensor:
        grads = torch.autograd.grad(call(first, params, batches[0]), list(params.values()), create_graph=True)
        moved = {name: p - LR * g for (name, p), g in zip(params.items(), grads, strict=True)}
        with torch.autocast("cpu", torch.bfloat16):
            low = call(second, {n: p.float() for n, p in rest.items()}, batches[1].float()).double()
        return call(first, moved, batches[2]) * call(first, params, batches[3]) + call(second, rest, batches[0]) + low

    wanted = [*params.values(), *rest.values()]
    got = torch.autograd.grad(loss(ltx.functional_call, net, other), wanted)
    torch.testing.assert_close(got, torch.autograd.grad(loss(of_torch, twin, same), wanted))


def test_an_error_leaves_the_module_as_it_was(seed: int) -> None:
    net, twin, batches = made(seed)
    own = dict(net.named_parameters())
    refuses(RuntimeError, "shapes", ltx.functional_call, net, params_of(twin), batches[0][:, :3])
    gc.collect()  # torch 2.11 complains when its checkpoint, which the error left halfway, is freed
    assert all(p is own[name] for name, p in net.named_parameters())
    loss = ltx.functional_call(net, {name: p.requires_grad_() for name, p in params_of(twin).items()}, batches[0])
    net.blocks[1].kept[0] = lambda x: x.missing  # the second pass fails
    with pytest.raises(AttributeError):
        loss.backward()
    assert all(p is own[name] for name, p in net.named_parameters())


@pytest.mark.full
@pytest.mark.covering(1, of=lambda **_: ())
@pytest.mark.slow_compile
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo's, of what it looks at
@pytest.mark.parametrize("breaks", [False, True])
def test_compiled(breaks: bool, seed: int) -> None:
    """Also where the graph breaks inside a checkpoint, so that the call runs eagerly in the branch for graphs."""
    net, twin, batches = made(seed)
    net.eval(), twin.eval()
    net.reentrant = None
    if breaks:
        for block in net.blocks:
            block.kept = []
            block.forward = lambda x, b=block: checkpoint(broken, b, x, use_reentrant=False)
    want = torch.func.grad(lambda p: of_torch(twin, p, (batches[0],)))(params_of(twin))
    for wrap in (lambda f: f, ltx.data_parallel):
        params = {name: p.requires_grad_() for name, p in params_of(twin).items()}
        step = torch.compile(wrap(lambda p, x: ltx.functional_call(net, p, (x,))), backend="aot_eager")
        step(params, batches[0]).backward()
        torch.testing.assert_close({name: p.grad for name, p in params.items()}, want)


@pytest.mark.parametrize("part", [None, "0"])
def test_names_from_before_a_part_was_compiled(part: str | None, seed: int) -> None:
    """The first weight is the last one; its buffers are written to."""
    net = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), nn.Linear(3, 3))
    net[1].weight = net[0][0].weight
    given = {name: x.detach().clone() for name, x in (*net.named_parameters(), *net.named_buffers())}
    given["0.0.weight"].mul_(2.0)
    x = torch.randn(4, 3)
    want, after = ltx.functional_call(net, given, (x,), return_buffers=True)
    compiled: Any = torch.compile(net, backend="eager")
    if part is not None:
        compiled, net[0] = net, torch.compile(net[0], backend="eager")
    got, buffers = ltx.functional_call(compiled, given, (x,), return_buffers=True)
    torch.testing.assert_close((got, buffers), (want, after))
    refuses(StepError, "num_batches_tracked', a buffer that it was given", ltx.functional_call, compiled, given, (x,))
    ltx.to_module(compiled, given)
    assert torch.equal(net[1].weight, given["0.0.weight"])
    assert isinstance(net[1].weight, nn.Parameter)


def broken(block: Block, x: Tensor) -> Tensor:
    x = block.layer(x)
    torch._dynamo.graph_break()
    return block.norm(x).tanh()


def test_calls_of_torchs_own_in_each_other(seed: int) -> None:
    net, twin, batches = made(seed)
    net.eval(), twin.eval()

    class Outer(nn.Module):
        """A checkpointed function that gets parameters as arguments or has them in a closure, and a frozen module."""

        def __init__(self) -> None:
            super().__init__()
            self.net = Net(reentrant=None).double().eval()

        def forward(self, x: Tensor) -> Tensor:
            mine = dict(self.net.named_parameters())
            y = checkpoint(of_torch, self.net, mine, (x,), use_reentrant=False)
            y = y + checkpoint(lambda x: of_torch(self.net, mine, (x,)), x, use_reentrant=False)
            return y + net(x)

    outer = Outer()
    net.requires_grad_(False)
    params = {f"net.{name}": p.requires_grad_() for name, p in params_of(twin).items()}
    loss = ltx.data_parallel(lambda p, x: of_torch(outer, p, (x,)))(params, batches[0])
    got = torch.autograd.grad(loss, list(params.values()))
    torch.testing.assert_close(got, torch.autograd.grad(2 * twin(batches[0]), list(twin.parameters())))


def with_buffers(seed: int, reentrant: bool | None = False, sync: bool = False) -> Any:
    """(parameters, buffers) after some steps on this rank's samples"""
    net, twin, batches = made(seed, norm=True, reentrant=reentrant)
    if sync:
        net = ltx.nn.convert_sync_batch_norm(net)
        for block in net.blocks:
            block.kept = [block.inner]
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0

    def step(params: Params, buffers: Params, x: Tensor) -> Any:
        return ltx.functional_call(net, (params, buffers), x, return_buffers=True)

    train = ltx.train_step(ltx.data_parallel(step), ltx.optim.from_torch(torch.optim.SGD, lr=LR))
    state = train.init(params_of(twin), dict(twin.named_buffers()))
    for x in batches.view(4, ltx.axis_size(), -1, 4)[:, ltx.axis_index()]:
        before = copy.deepcopy(state.buffers)
        old, (state, _) = state.buffers, train(state, x)
        torch.testing.assert_close(old, before, rtol=0, atol=0)
    assert dict(net.named_buffers())["blocks.0.norm.num_batches_tracked"] == 0
    return state.params, state.buffers


@pytest.mark.full
def test_the_second_pass_doesnt_count_a_batch_twice(ranks: Ranks, seed: int) -> None:
    for results in (*ranks(2).run(lambda: [with_buffers(seed, kind) for kind in (False, True, None)]),):
        torch.testing.assert_close(results[0], results[2])
        torch.testing.assert_close(results[1], results[2])
    whole = with_buffers(seed, None)
    assert whole[1]["blocks.2.norm.num_batches_tracked"] == 4
    for results in ranks(2).run(with_buffers, seed, False, True):
        torch.testing.assert_close(results, whole)


def test_power_iterations_in_a_second_pass_begin_where_the_first_did(seed: int) -> None:
    """The output depends on buffers that are written to; the layer is called twice."""
    with seeded(seed):
        layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)).double()
        x = torch.randn(3, 4, dtype=torch.float64)

    class Twice(nn.Module):
        def __init__(self, checkpoints: bool) -> None:
            super().__init__()
            self.layer = copy.deepcopy(layer)
            self.call = (lambda x: checkpoint(self.layer, x, use_reentrant=False)) if checkpoints else self.layer

        def forward(self, x: Tensor) -> Tensor:
            return self.call(self.call(x).sin()).square().sum()

    results = []
    for checkpoints in (True, False):
        net = Twice(checkpoints)
        params = {name: p.detach().requires_grad_() for name, p in net.named_parameters()}
        loss, after = ltx.functional_call(net, (params, dict(net.named_buffers())), x, return_buffers=True)
        loss.backward()
        results.append((after, {name: p.grad for name, p in params.items()}))
    torch.testing.assert_close(*results)


def test_simulated_ranks_carry_buffers(ranks: Ranks, seed: int) -> None:
    with seeded(seed):
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        x = torch.randn(2, 3, 6, 4)

    def run(x: Tensor) -> Any:
        def step(params: Params, buffers: Params, x: Tensor) -> Any:
            y, buffers = ltx.functional_call(net, (params, buffers), x, return_buffers=True)
            return (y - 1).square().mean(), buffers

        params, buffers = dict(net.named_parameters()), dict(net.named_buffers())
        found = train_on.trained(step, sgd(LR), params, x, buffers=buffers)
        return found.params, found.state.buffers

    real = ranks(2).run(lambda: run(x[ltx.axis_index()])).stack()
    torch.testing.assert_close(ltx.tree.flatten(ltx.vmap(run)(x))[0], ltx.tree.flatten(real)[0])


def test_buffers_that_would_be_lost() -> None:
    net = nn.Sequential(nn.BatchNorm1d(2))
    params, buffers = dict(net.named_parameters()), dict(net.named_buffers())
    before, x = copy.deepcopy(buffers), torch.randn(4, 2)
    with pytest.raises(StepError, match=r"wrote to '0\.\w+', a buffer that it was given.* return_buffers=True"):
        ltx.functional_call(net, (params, buffers), x)
    with pytest.raises(StepError, match=r"wrote to '0\.\w+', a buffer that it was given"):
        ltx.vmap(lambda x: ltx.functional_call(net, (params, buffers), x))(torch.stack([x, x]))
    torch.testing.assert_close(buffers, before, rtol=0, atol=0)
    with pytest.raises(StepError, match=r"'0\.\w+' of Sequential: the module wrote to this buffer of its own"):
        ltx.functional_call(net, params, x)
    net.eval()
    got = ltx.functional_call(net, (params, buffers), x)
    torch.testing.assert_close(got, ltx.functional_call(net, params, x, return_buffers=True)[0], rtol=1e-1, atol=1e-1)


@pytest.mark.parametrize("returns", [True, False])
def test_a_buffer_that_becomes_no_tensor(returns: bool) -> None:
    """A cache that its forward empties. It was an AttributeError of ltx."""

    class Cached(nn.Module):
        cache: Tensor | None

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            self.cache = None
            return x

    net, x = Cached(), torch.ones(2)
    text = "Cached set 'cache', a buffer that it was given, to None"
    refuses(StepError, text, ltx.functional_call, net, {"cache": x}, (x,), return_buffers=returns)
    assert net.cache is not None


def test_names(seed: int) -> None:
    with seeded(seed):
        net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), nn.Linear(3, 3))
        x = torch.randn(2, 3)
    net[1].weight = net[0].parametrizations.weight.original1
    given = {name: p.detach() + 1 for name, p in net.named_parameters()}
    torch.testing.assert_close(ltx.functional_call(net, given, x), of_torch(net, given, x))
    parts = ({"1.bias": given["1.bias"]}, {"1.weight": given["0.parametrizations.weight.original1"]})
    for tie in (True, False):
        got = ltx.functional_call(net, parts, (), {"input": x}, tie_weights=tie)
        torch.testing.assert_close(got, of_torch(net, parts, (), {"input": x}, tie_weights=tie))
    own = net[1].weight  # of a layer in two places, in which torch's own leaves what it was given
    ltx.functional_call(nn.Sequential(net[1], net[1]), {"0.weight": own.detach() + 1}, x)
    assert net[1].weight is own
    net.forward = lambda *args: args
    assert ltx.functional_call(net, given, x)[0] is x
    assert ltx.functional_call(net, given) == ltx.functional_call(net, given, None) == ()


X = torch.ones(2, 2)


def test_what_a_parametrization_computes_would_get_no_gradient() -> None:
    module = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    with pytest.raises(InputError, match=r"'0\.weight' of Sequential is parametrized, and what is given"):
        ltx.functional_call(module, {"0.weight": X}, X)
    assert torch.equal(ltx.functional_call(module, params_of(module), X), module(X))


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"2.weight": X}, InputError, "has no parameter or buffer '2.weight'. Of its 4"),
        ({"0.wieght": X}, InputError, "no parameter or buffer '0.wieght'"),
        ({"0.weight": X, "1.weight": X + 1}, InputError, "are one tensor in Sequential"),
        (({"0.weight": X}, {"0.weight": X}), InputError, "'0.weight' is in two of the dicts"),
        ({"0.weight": 3.0}, TreeError, "'0.weight' must be a tensor, got float"),
        ([X], TreeError, "takes a dict of tensors or a tuple of such dicts"),
        (3, TreeError, "takes a dict of tensors or a tuple of such dicts, got 3"),
    ],
)
def test_what_cant_be_given(given: Any, error: type[Exception], text: str) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    refuses(error, re.escape(text), ltx.functional_call, net, given, torch.ones(1, 2))


def test_two_inputs_that_arent_in_a_tuple() -> None:
    net = nn.Bilinear(2, 2, 1)
    both = torch.ones(1, 2), torch.ones(1, 2)
    text = re.escape("kwargs is a dict of keyword arguments, got tensor") + ".*" + re.escape("(x, y)")
    refuses(InputError, text, ltx.functional_call, net, params_of(net), *both)


@pytest.mark.parametrize("wrapped", [nn.DataParallel, torch.jit.script])
def test_a_module_whose_tensors_cant_be_replaced(wrapped: Callable[[nn.Module], nn.Module]) -> None:
    module = wrapped(nn.Linear(2, 2))
    with pytest.raises(UnsupportedError, match=r"can't put tensors into a .*\. Give it (the )?module"):
        ltx.functional_call(module, dict(module.named_parameters()), (torch.ones(2),))


class Flow(nn.Module):
    """What it computes is asked of its methods, and one of its layers is checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> torch.distributions.Distribution:
        return torch.distributions.Normal(checkpoint(self.shift, x, use_reentrant=False), self.scale(x).exp())

    def energy(self, x: Tensor) -> Tensor:
        return self.scale(x).square().sum()


def in_block(flow: Flow, criterion: nn.Module, params: Any, x: Tensor) -> Tensor:
    with ltx.using((flow, params["flow"]), (criterion, params["criterion"])):
        return flow(x).log_prob(x).mean() + flow.energy(x) + criterion(x).mean()


def block_of(seed: int) -> tuple[Flow, nn.Module, Any, Tensor]:
    with seeded(seed):
        flow, criterion = Flow().double(), nn.Linear(4, 1).double()
        params = {"flow": params_of(flow), "criterion": params_of(criterion)}
        params = ltx.tree.map(lambda p: p.detach() + 0.1, params)
        return flow, criterion, params, torch.randn(4, 4, dtype=torch.float64)


def own_gradients(seed: int) -> Any:
    """Of modules that have the given values themselves."""
    flow, criterion, params, x = block_of(seed)
    ltx.to_module(flow, params["flow"])
    ltx.to_module(criterion, params["criterion"])
    (flow(x).log_prob(x).mean() + flow.energy(x) + criterion(x).mean()).backward()
    found = {"flow": flow, "criterion": criterion}
    return {name: {path: p.grad for path, p in module.named_parameters()} for name, module in found.items()}


def by_autograd(loss: Any, params: Any) -> Any:
    leaves, spec = ltx.tree.flatten(params)
    leaves = [x.requires_grad_() for x in leaves]
    return ltx.tree.unflatten(spec, torch.autograd.grad(loss(ltx.tree.unflatten(spec, leaves)), leaves))


@pytest.mark.parametrize(
    "gradients",
    [
        lambda loss, params: torch.func.grad(loss)(params),
        lambda loss, params: ltx.grad(ltx.data_parallel(loss))(params),
        by_autograd,
        by_train_step,
    ],
)
@on_ranks(2, alone=True)
def test_using_puts_tensors_into_modules(gradients: Any, seed: int) -> None:
    flow, criterion, params, x = block_of(seed)
    before = copy.deepcopy(flow.state_dict())
    found = gradients(lambda params: in_block(flow, criterion, params, x), params)
    torch.testing.assert_close(dict(flow.state_dict()), dict(before), rtol=0, atol=0)

    torch.testing.assert_close(found, own_gradients(seed))


def test_using_and_a_state() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    x, start = torch.randn(4, 4), {name: p.detach() + 1 for name, p in net.named_parameters()}
    train = ltx.train_step(ltx.data_parallel(lambda p, buffers, x: (p["0.weight"].sum(), buffers)), sgd(lr=LR))
    state = train.init(start, {name: b + 1 for name, b in net.named_buffers()})
    net.eval()
    twin = ltx.to_module(copy.deepcopy(net), state)
    with ltx.using(net, state):
        got = net(x)
    torch.testing.assert_close(got, twin(x))
    torch.testing.assert_close(ltx.functional_call(net, state, x), twin(x))


def test_what_using_refuses() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    params, buffers = dict(net.named_parameters()), dict(net.named_buffers())

    def block(*modules: Any) -> Tensor:
        with ltx.using(*modules):
            output: Tensor = net(X)
        return output

    refuses(
        StepError, r"using: Sequential wrote to '1\.\w+', a buffer that it was given", block, net, (params, buffers)
    )
    refuses(StepError, r"'1\.\w+' of Sequential: the module wrote to this buffer of its own", block, net, params)
    refuses(InputError, "a module is given twice, or is a part", block, (net, params), (net[0], {"weight": X}))
    refuses(InputError, "using: Sequential has no parameter or buffer 'a'", block, net, {"a": X})
    refuses(TreeError, "takes a module and its tensors, or several such pairs, got", block, params)
    with pytest.raises(ZeroDivisionError), ltx.using(net, {"0.weight": X}):
        1 / 0  # noqa: B018
    assert net[0].weight is params["0.weight"]
    compiled = torch.compile(lambda p: block(net.eval(), p), backend="eager", fullgraph=True)
    refuses(Exception, r"torch\.compile can't trace ltx\.using", compiled, params)


def test_a_block_whose_module_is_called_again_in_another_backward_pass() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    given = {name: (p.detach() + 1).requires_grad_() for name, p in net.named_parameters()}

    def loss(given: Any) -> Tensor:
        with ltx.using(net, given):
            return net[1](KINDS["adjoint"](net[0], X)).sum()  # type: ignore[no-any-return]

    refuses(StepError, "was called again in the backward pass, .* has its own tensors there", loss(given).backward)
    train = ltx.train_step(ltx.data_parallel(loss), sgd(lr=LR))
    train(train.init({name: p.detach() for name, p in given.items()}))
