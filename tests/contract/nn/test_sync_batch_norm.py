"""sync_batch_norm against torch's batch norm in one process with the whole batch."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

import ltx
from ltx.errors import InputError, RankMismatchError, TreeError, UnsupportedError
from ltx.nn import SyncBatchNorm, convert_sync_batch_norm, sync_batch_norm
from tests import train_on
from tests.inside import close_axis, resolve
from tests.kinds import Ranks
from tests.train_on import on_ranks, refuses, said

C = 3


def drawn(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Any]:
    """(each rank's batch, (running mean, running variance, weight, bias))"""
    xs = [3 + 2 * torch.randn(shape, dtype=dtype) for shape in shapes]
    wide = torch.promote_types(dtype, torch.float32)
    return xs, (torch.randn(C, dtype=wide), torch.rand(C, dtype=wide), *torch.randn(2, C, dtype=wide))


def whole(xs: list[Tensor]) -> Tensor:
    """All ranks' values as one batch: (1, C, all of them)"""
    return torch.cat([x.movedim(1, 0).flatten(1) for x in xs], 1).unsqueeze(0)


def parts(y: Tensor, xs: list[Tensor]) -> list[Tensor]:
    values = y.squeeze(0).split([x.numel() // C for x in xs], 1)
    return [v.reshape(C, *x.movedim(1, 0).shape[1:]).movedim(0, 1) for v, x in zip(values, xs, strict=True)]


def bend(y: Tensor, rank: int) -> Tensor:
    """A rank's loss, in which each element counts differently."""
    return ((1 + rank) * torch.sin(y + 0.3 * torch.arange(y.numel()).reshape(y.shape))).sum()


def one_process(xs: list[Tensor], mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """(each rank's y, running statistics, first derivatives by x of each rank, and by weight and bias)"""
    mean, var = mean.clone(), var.clone()
    y = functional.batch_norm(whole(xs), mean, var, weight, bias, True, 0.3, 1e-3)

    def loss(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = functional.batch_norm(x, None, None, weight, bias, True, 0.3, 1e-3)
        return torch.stack([bend(part, rank) for rank, part in enumerate(parts(y, xs))]).sum()

    dx, *rest = torch.func.grad(loss, argnums=(0, 1, 2))(whole(xs), weight, bias)
    return parts(y, xs), (mean, var), parts(dx, xs), rest


def on_a_rank(xs: list[Tensor], mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor) -> Any:
    rank = int(ltx.axis_index())
    kept = [t.clone() for t in (xs[rank], mean, var)]
    y, *running = sync_batch_norm(xs[rank], mean, var, weight, bias, momentum=0.3, eps=1e-3)

    def loss(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return bend(sync_batch_norm(x, mean, var, weight, bias, eps=1e-3)[0], rank)

    at = [t.detach().clone().requires_grad_() for t in (xs[rank], weight, bias)]
    dx, *rest = torch.autograd.grad(loss(*at), at)
    untouched = all(torch.equal(a, b) for a, b in zip(kept, (xs[rank], mean, var), strict=True))
    return y, tuple(running), dx, ltx.psum(rest), untouched


SHAPES = {
    "equal": [(4, C), (4, C)],
    "uneven": [(5, C), (1, C), (2, C)],
    "one is empty": [(3, C, 2), (0, C, 2), (4, C, 2)],
    "the first is empty": [(0, C), (3, C)],
    "all but one are empty": [(0, C), (0, C), (5, C)],
    "images": [(2, C, 4, 3), (3, C, 4, 3)],
    "other lengths": [(2, C, 5), (3, C, 2)],
    "volumes": [(1, C, 2, 3, 2), (2, C, 2, 3, 2)],
    "one value each": [(1, C), (1, C)],
}


@pytest.mark.full(but=3)
@pytest.mark.parametrize("name", SHAPES)
def test_values_statistics_and_gradients_are_those_of_the_whole_batch(name: str, ranks: Ranks, seed: int) -> None:
    xs, rest = drawn(SHAPES[name])
    ys, running, dxs, others = one_process(xs, *rest)
    for rank, (y, mine, dx, rest_of_it, untouched) in enumerate(ranks(len(xs)).run(on_a_rank, xs, *rest)):
        torch.testing.assert_close((y, mine, dx), (ys[rank], running, dxs[rank]))
        torch.testing.assert_close(tuple(rest_of_it), tuple(others))
        assert untouched


@pytest.mark.parametrize("name", ["uneven", "one is empty", "images"])
def test_second_derivatives_are_those_of_the_whole_batch(name: str, ranks: Ranks, seed: int) -> None:
    xs, (*_, weight, bias) = drawn(SHAPES[name])
    flat = [x.movedim(1, 0).flatten(1) for x in xs]
    tangents = [torch.randn_like(x) for x in flat]

    def run() -> Tensor:
        rank = int(ltx.axis_index())

        def gradient(x: Tensor) -> Tensor:
            return torch.func.grad(lambda x: bend(sync_batch_norm(x, None, None, weight, bias, eps=1e-3)[0], rank))(x)

        x, t = flat[rank].unsqueeze(0), tangents[rank].unsqueeze(0)
        forward_over_reverse = torch.func.jvp(gradient, (x,), (t,))[1]
        reverse_over_reverse = torch.func.grad(lambda x: (gradient(x) * t).sum())(x)
        torch.testing.assert_close(forward_over_reverse, reverse_over_reverse)
        return reverse_over_reverse

    def loss(x: Tensor) -> Tensor:
        y = functional.batch_norm(x, None, None, weight, bias, True, eps=1e-3)
        return torch.stack([bend(part, rank) for rank, part in enumerate(y.split([f.shape[1] for f in flat], 2))]).sum()

    x = torch.cat(flat, 1).unsqueeze(0).requires_grad_()
    (dx,) = torch.autograd.grad(loss(x), x, create_graph=True)
    (second,) = torch.autograd.grad((dx * torch.cat(tangents, 1)).sum(), x)
    torch.testing.assert_close(torch.cat(list(ranks(len(xs)).run(run)), 2), second)


def test_under_torch_vmap_statistics_are_of_each_entry(ranks: Ranks, seed: int) -> None:
    (x, _), (mean, var, weight, bias) = drawn([(4, C), (4, C)])
    batch = torch.stack([x, 2 * x, x + 1])

    def run() -> Any:
        return torch.vmap(lambda x: sync_batch_norm(x, mean, var, weight, bias))(batch * (1 + ltx.axis_index()))

    want = ltx.vmap(lambda x: sync_batch_norm(x, mean, var, weight, bias))
    by_entry = [want(torch.stack([b, 2 * b])) for b in batch]
    for rank, found in enumerate(ranks(2).run(run)):
        for i, expected in enumerate(by_entry):
            torch.testing.assert_close(tuple(t[i] for t in found), tuple(t[rank] for t in expected))


@pytest.mark.parametrize("training", [True, False])
def test_alone_it_is_torchs(training: bool, seed: int) -> None:
    (x,), (mean, var, weight, bias) = drawn([(4, C, 2)], torch.float32)
    kept = mean.clone(), var.clone()
    y, *running = sync_batch_norm(x, mean, var, weight, bias, training=training, momentum=0.2)
    want = functional.batch_norm(x, m := mean.clone(), v := var.clone(), weight, bias, training, 0.2)
    assert all(torch.equal(a, b) for a, b in zip((y, *running), (want, m, v), strict=True)), "bit for bit"
    assert torch.equal(mean, kept[0])
    assert torch.equal(var, kept[1])
    under = torch.func.vjp(lambda x: sync_batch_norm(x, mean, var, weight, bias, training=training)[0], x)
    torch.testing.assert_close(under[0], want)
    reference = torch.func.vjp(lambda x: functional.batch_norm(x, m, v, weight, bias, training), x)
    torch.testing.assert_close(under[1](y), reference[1](y))


@on_ranks(2)
def test_not_training_communicates_nothing() -> None:
    (x,), (mean, var, weight, bias) = drawn([(0 if ltx.axis_index() else 4, C)])
    with ltx.profile.record() as trace:
        y, *running = sync_batch_norm(x, mean, var, weight, bias, training=False)
    assert torch.equal(y, functional.batch_norm(x, mean, var, weight, bias, False))
    assert running[0] is mean
    assert running[1] is var
    assert trace.events == []


@on_ranks(2)
def test_one_collective_each_way() -> None:
    x = torch.randn(4, C, 5).requires_grad_()
    w, b = torch.ones(C, requires_grad=True), torch.zeros(C, requires_grad=True)
    with ltx.profile.record() as trace:
        sync_batch_norm(x, None, None, w, b)[0].sin().sum().backward()
    assert [event.operation for event in trace.events] == ["all_gather", "psum_scatter"]


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_has_statistics_of_float32(half: torch.dtype, ranks: Ranks, seed: int) -> None:
    xs, rest = drawn([(60, C, 7), (40, C, 7)], half)
    ys, running, _, _ = one_process([x.float() for x in xs], *rest)

    def run() -> Any:
        rank = int(ltx.axis_index())
        mean, var, weight, bias = rest
        x = xs[rank].clone().requires_grad_()
        y, *mine = sync_batch_norm(x, mean, var, weight, bias, momentum=0.3, eps=1e-3)
        (dx,) = torch.autograd.grad(y.float().sum(), x)
        return y.detach(), tuple(mine), dx.dtype

    for rank, (y, mine, dtype) in enumerate(ranks(2).run(run)):
        assert y.dtype == dtype == half
        torch.testing.assert_close(mine, running)
        torch.testing.assert_close(y, ys[rank].to(half))


@pytest.mark.parametrize("training", [True, False])
def test_parameters_of_other_dtypes(training: bool, ranks: Ranks, seed: int) -> None:
    """The result has x's, the running statistics keep their own; also where torch's kernels refuse the mixture."""
    xs, (mean, var, weight, bias) = drawn([(4, C), (2, C)], torch.float32)
    mean, weight, bias = mean.double(), weight.double(), bias.bfloat16()

    def run(x: Tensor) -> Any:
        return sync_batch_norm(x, mean, var, weight, bias, training=training, momentum=1.0)

    def expected(x: Tensor) -> Any:
        m, v = mean.clone(), var.double()
        return functional.batch_norm(x.double(), m, v, weight, bias.double(), training, 1.0).float(), m, v.float()

    want = expected(torch.cat(xs))
    torch.testing.assert_close(run(torch.cat(xs)), want)
    for y, found in zip(want[0].split([4, 2]), ranks(2).run(lambda: run(xs[ltx.axis_index()])), strict=True):
        torch.testing.assert_close(found, (y, *want[1:]))


def test_large_means(ranks: Ranks, seed: int) -> None:
    """In float32 E[x²] - E[x]² would leave nothing of a variance of 1 next to a mean of 10⁴."""
    xs = [(1e4 + torch.randn(n, C, 50)) for n in (40, 10)]
    zero, one = torch.zeros(C), torch.ones(C)
    var, mean = torch.var_mean(whole(xs).double(), (0, 2))

    def run() -> Any:
        return sync_batch_norm(xs[ltx.axis_index()], zero, one, momentum=1.0)

    spacing = 2.0**-10  # of float32 at 10⁴, in which ranks tell each other their means
    apart = max(float((x.double().mean((0, 2)) - mean).abs().max()) for x in xs)
    for rank, (y, found_mean, found_var) in enumerate(ranks(2).run(run)):
        assert (found_mean - mean).abs().max() <= 1.5 * spacing
        torch.testing.assert_close(found_var.double(), var, rtol=1e-6, atol=4 * spacing * (apart + spacing))
        deviation = whole(xs).double().std((0, 2), correction=0)
        want = (xs[rank].double() - mean.reshape(1, C, 1)) / deviation.reshape(1, C, 1)
        assert (y - want).abs().max() <= 2 * spacing


@on_ranks(2)
def test_inputs_of_any_layout() -> None:
    x = torch.randn(6, C, 4, 5, dtype=torch.float64)[::2]
    last = x.contiguous(memory_format=torch.channels_last)
    want = sync_batch_norm(x.contiguous(), None, None)[0]
    for z in (x, last, x.transpose(2, 3).contiguous().transpose(2, 3)):
        torch.testing.assert_close(sync_batch_norm(z, None, None)[0], want, rtol=1e-12, atol=1e-12)
    assert sync_batch_norm(last, None, None)[0].is_contiguous(memory_format=torch.channels_last)


def test_without_running_statistics_weight_and_bias(ranks: Ranks, seed: int) -> None:
    xs, _ = drawn([(4, C), (2, C)])
    want = parts(functional.batch_norm(whole(xs), None, None, training=True), xs)
    for rank, found in enumerate(ranks(2).run(lambda: sync_batch_norm(xs[ltx.axis_index()], None, None))):
        torch.testing.assert_close(found, (want[rank], None, None))


def test_momentum_as_a_tensor(seed: int) -> None:
    """Alone; on ranks that of a cumulative average is one."""
    (x,), (mean, var, *_) = drawn([(4, C)])
    tensor, number = (sync_batch_norm(x, mean, var, momentum=m) for m in (torch.tensor(0.25), 0.25))
    torch.testing.assert_close(tensor, number)


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (0, 0)], ids=str)
def test_less_than_two_values(sizes: tuple[int, int], ranks: Ranks) -> None:
    def run() -> str:
        return said(InputError, sync_batch_norm, torch.ones(sizes[ltx.axis_index()], C), torch.zeros(C), torch.ones(C))

    text = f"expected more than one value per channel when training, got {sum(sizes)} on all ranks together."
    assert text in ranks(2).run(run).replicated()
    refuses(InputError, "more than one value per channel", sync_batch_norm, torch.ones(1, C), None, None)
    with pytest.raises(InputError, match="more than one value per channel"):
        torch.func.grad(lambda x: sync_batch_norm(x, None, None)[0].sum())(torch.ones(1, C))


@on_ranks(2)
def test_channels_that_differ_between_ranks() -> None:
    x = torch.randn(4, 11 + int(ltx.axis_index()))  # new to both ranks
    refuses(RankMismatchError, r"rank 0: float32\[23\]; rank 1: float32\[25\]", sync_batch_norm, x, None, None)


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((torch.ones(4, 2), None, None), {"momentum": None}, r"momentum=None, a cumulative average, needs .*: give"),
        ((torch.ones(4), None, None), {}, r"of shape \(N, C, \*\), got torch.float32 of shape \[4\]"),
        ((torch.ones(4, 2).long(), None, None), {}, r"a floating tensor .* got torch.int64 of shape \[4, 2\]"),
        ((torch.ones(4, 2), torch.ones(2), None), {}, "got running_mean and no running_var with training=True"),
        ((torch.ones(4, 2), None, None), {"training": False}, "got no running_mean and no .* with training=False"),
        ((torch.ones(4, 2), torch.ones(3), torch.ones(2)), {}, r"running_mean must have shape \[2\], .* got \[3\]"),
        ((torch.ones(4, 2), None, None, torch.ones(1)), {}, r"weight must have shape \[2\], .* got \[1\]"),
    ],
)
def test_arguments_that_do_not_fit(args: Any, kwargs: Any, text: str) -> None:
    refuses((InputError, UnsupportedError), text, sync_batch_norm, *args, **kwargs)


class Net(nn.Module):
    """Batch norms in every place: on top, nested, shared, of every kind."""

    def __init__(self, momentum: float | None = 0.1):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, C, 1), nn.BatchNorm2d(C, momentum=momentum))
        self.shared = nn.BatchNorm1d(C, affine=False)
        self.again = self.shared
        self.free = nn.BatchNorm1d(C, track_running_stats=False, eps=1e-3)
        self.head = nn.Linear(C, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).mean((2, 3))
        return self.head(self.free(self.again(self.shared(x).tanh())))


def test_converting_is_a_copy(seed: int) -> None:
    net = Net()
    net.eval()
    before = copy.deepcopy(net.state_dict())
    calls: list[str] = []
    net.free.register_forward_hook(lambda *_: calls.append("hook"))
    net.first[1].weight.requires_grad_(False)
    made = convert_sync_batch_norm(net, "data")
    assert [type(m) for m in net.modules()] == [type(m) for m in Net().modules()], "the argument stays"
    assert [type(m) for m in (made.first[1], made.shared, made.free)] == [SyncBatchNorm] * 3
    assert made.again is made.shared
    assert list(made.state_dict()) == list(before)
    assert list(dict(made.named_buffers())) == list(dict(net.named_buffers()))
    torch.testing.assert_close(dict(made.state_dict()), dict(before))
    assert not made.first[1].training
    assert not made.first[1].weight.requires_grad
    assert made.head.weight is not net.head.weight
    x = torch.randn(4, 1, 2, 2)
    torch.testing.assert_close(made(x), net(x), rtol=0, atol=0)
    assert calls == ["hook", "hook"]
    torch.testing.assert_close(dict(net.state_dict()), dict(before))
    made.load_state_dict(net.state_dict())
    net.load_state_dict(made.state_dict())
    assert "axis='data'" in repr(made.shared)
    again = convert_sync_batch_norm(pickle.loads(pickle.dumps(convert_sync_batch_norm(Net(), "data"))))
    assert again.shared.axis == "data"


def test_a_batch_norm_itself() -> None:
    assert isinstance(convert_sync_batch_norm(nn.BatchNorm1d(2)), SyncBatchNorm)
    assert isinstance(convert_sync_batch_norm(nn.SyncBatchNorm(2)), SyncBatchNorm)
    assert type(convert_sync_batch_norm(nn.Linear(1, 1))) is nn.Linear


class Indirect(nn.Module):
    """Reaches its batch norms by what torch doesn't register: a list, a dict, a bound method, a hook's."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.BatchNorm1d(C), nn.BatchNorm1d(C), nn.BatchNorm1d(C)
        self.listed, self.by_name, self.call = [self.one], {"two": self.two}, self.three.__call__
        self.three.weight = self.two.weight
        self.lazy = nn.LazyBatchNorm1d()
        self.lazy(torch.ones(2, C))
        self.kept = (self.lazy,)

    def forward(self, x: Tensor) -> Tensor:
        return self.kept[0](self.call(self.by_name["two"](self.listed[0](x).tanh()).tanh()).tanh())


def test_norms_that_forward_reaches_by_something_else_than_their_name(ranks: Ranks, seed: int) -> None:
    net, x = Indirect().double(), torch.randn(6, C, dtype=torch.float64)
    want = copy.deepcopy(net)

    def run() -> Any:
        made = convert_sync_batch_norm(net)
        assert made.listed[0] is made.one
        assert made.by_name["two"] is made.two
        assert made.kept[0] is made.lazy
        assert made.three.weight is made.two.weight
        return made(ltx.shard(x)).detach(), dict(made.named_buffers())

    results = list(ranks(2).run(run))
    torch.testing.assert_close(torch.cat([y for y, _ in results]), want(x).detach())
    for _, buffers in results:
        torch.testing.assert_close(buffers, dict(want.named_buffers()))
    assert {type(norm) for norm in (net.one, net.two, net.three, net.lazy)} == {nn.BatchNorm1d}, "the argument stays"


def test_a_norm_whose_forward_was_set_is_refused() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    old = net[1].forward
    net[1].forward = lambda x: old(x)  # as accelerate's add_hook_to_module does
    with pytest.raises(UnsupportedError, match=r"'1' is a BatchNorm1d whose forward attribute was set.*Convert"):
        convert_sync_batch_norm(net)
    net[1].forward = old  # as its remove_hook_from_module does
    made = convert_sync_batch_norm(net)[1]
    assert made.forward.__func__ is SyncBatchNorm.forward
    assert net[1].forward is old
    made.forward = made.forward  # one that calls SyncBatchNorm's stays
    assert isinstance(convert_sync_batch_norm(made), SyncBatchNorm)


def test_without_an_axis_a_converted_part_keeps_its_own() -> None:
    made = convert_sync_batch_norm(nn.Sequential(convert_sync_batch_norm(normed(), "node"), nn.BatchNorm1d(3)))
    assert (made[0][1].axis, made[1].axis) == ("node", None)
    assert [
        part.axis for part in convert_sync_batch_norm(made, "data").modules() if isinstance(part, SyncBatchNorm)
    ] == ["data", "data"]


def test_torchs_norms_over_a_group_need_an_axis(ranks: Ranks, seed: int) -> None:
    x = torch.randn(4, 2)

    def run() -> Any:
        group = dist.new_group([0, 1])
        net = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2, process_group=group))
        with pytest.raises(UnsupportedError, match=r"'1' is a SyncBatchNorm over a process group .*Give axis="):
            convert_sync_batch_norm(net)
        made = convert_sync_batch_norm(net[1:], group)
        assert convert_sync_batch_norm(made)[0].axis is net[1].process_group is group
        y = made(x[dist.get_rank() :: 2])
        close_axis(resolve(group))
        net[1].process_group = dist.group.WORLD
        pickle.dumps(convert_sync_batch_norm(net))
        return y.detach()

    ys = list(ranks(2).run(run))
    torch.testing.assert_close(torch.stack(ys, 1).flatten(0, 1), functional.batch_norm(x, None, None, training=True))


class Own(nn.BatchNorm1d):
    pass


@pytest.mark.parametrize("kind", [Own(2), nn.LazyBatchNorm1d()], ids=["subclass", "lazy"])
def test_other_batch_norms(kind: nn.Module) -> None:
    with pytest.raises(UnsupportedError, match=r"convert_sync_batch_norm: '1' is a (Own|LazyBatchNorm1d), which isn't"):
        convert_sync_batch_norm(nn.Sequential(nn.Linear(2, 2), kind))
    refuses(TreeError, r"takes a torch\.nn\.Module, got dict", convert_sync_batch_norm, {})


def passed(module: Any, batches: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    """Forward and backward passes: outputs, gradients as data_parallel would reduce them, up to 1 / n, and buffers."""
    ys = []
    for x in batches:
        y = module(x)
        y.sin().sum().backward()
        ys.append(y.detach())
    return ys, ltx.psum([p.grad for p in module.parameters()]), dict(module.named_buffers())


@pytest.mark.parametrize("momentum", [0.1, None], ids=["momentum", "cumulative"])
def test_converted_modules_are_one_process_with_the_whole_batch(
    momentum: float | None, ranks: Ranks, seed: int
) -> None:
    net = Net(momentum).double()
    steps = [[torch.randn(n, 1, 2, 2, dtype=torch.float64) for n in sizes] for sizes in ((4, 2), (1, 3), (0, 5))]

    def run() -> Any:
        made = convert_sync_batch_norm(net)
        return *passed(made, [xs[ltx.axis_index()] for xs in steps]), made.eval()(steps[0][0]).detach()

    results = ranks(2).run(run)
    ys, *rest = passed(net, map(torch.cat, steps))
    evaluated = net.eval()(steps[0][0]).detach()
    for t, y in enumerate(ys):
        torch.testing.assert_close(torch.cat([by_rank[0][t] for by_rank in results]), y)
    for _, grads, buffers, mine in results:
        torch.testing.assert_close(grads, rest[0])
        # Near double precision: 1 / 3 rounded to float32 would pass the default tolerance nearly always.
        torch.testing.assert_close(buffers, rest[1], rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(mine, evaluated, rtol=1e-10, atol=1e-11)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))


def with_buffers(module: nn.Module) -> Callable[..., Any]:
    """(sum of the losses and their number, next buffers)"""

    def step(params: Any, buffers: Any, x: Tensor, y: Tensor) -> Any:
        buffers = {name: b.clone() for name, b in buffers.items()}  # batch norm writes into them
        return ltx.Weighted((functional_call(module, (params, buffers), (x,)) - y).square().sum(), len(x)), buffers

    return step


def trained(module: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> Any:
    """(losses, parameters, buffers)"""
    step, sgd = with_buffers(convert_sync_batch_norm(module)), ltx.optim.from_torch(torch.optim.SGD, lr=0.1)
    params, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    found = train_on.trained(step, sgd, params, batches, buffers=buffers)
    return found.losses, found.params, found.state.buffers


def bare_loop(module: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = train_on.loop_of_torch(optimizer, lambda x, y: (module(x) - y).square().sum() / len(x), batches)
    return losses, {name: p.detach() for name, p in module.named_parameters()}, dict(module.named_buffers())


@pytest.mark.full(but=1)
@pytest.mark.parametrize("sizes", [(4, 4), (7, 2), (5, 0), (0, 3)], ids=str)
def test_training_with_buffers_is_one_process_with_the_whole_batch(
    sizes: tuple[int, int], ranks: Ranks, seed: int
) -> None:
    module = normed().double()
    batches = [
        [(torch.randn(n, 5, dtype=torch.float64), torch.randn(n, 3, dtype=torch.float64)) for n in sizes]
        for _ in range(5)
    ]
    by_rank = ranks(2).run(lambda: trained(module, [step[ltx.axis_index()] for step in batches]))
    whole = [tuple(torch.cat(p) for p in zip(*step, strict=True)) for step in batches]
    want = bare_loop(copy.deepcopy(module), whole)
    for got in by_rank:
        torch.testing.assert_close(got, want)
    torch.testing.assert_close(trained(module, whole), want)  # a world of one

    if sizes[0] == sizes[1]:
        x, y = (torch.stack([torch.stack([step[r][i] for step in batches]) for r in range(2)]) for i in (0, 1))
        simulated = ltx.vmap(lambda x, y: trained(module, list(zip(x, y, strict=True))))(x, y)
        torch.testing.assert_close(simulated, ltx.tree.map(lambda t: torch.stack([t, t]), want))


def test_placeholders_of_uneven_stay_out_of_the_statistics_if_their_samples_do(ranks: Ranks, seed: int) -> None:
    module = normed().double()
    batches = [
        [(torch.randn(n, 5).double(), torch.randn(n, 3).double()) for _ in range(t)] for n, t in ((4, 3), (5, 1))
    ]

    def run() -> Any:
        turns = ltx.uneven(batches[ltx.axis_index()])
        return trained(module, [tuple(t[: len(t) * int(weight > 0)] for t in batch) for batch, weight in turns])

    steps = [[mine[t] for mine in batches if t < len(mine)] for t in range(3)]
    whole = [tuple(torch.cat(p) for p in zip(*step, strict=True)) for step in steps]
    want = bare_loop(copy.deepcopy(module), whole)
    for got in ranks(2).run(run):
        torch.testing.assert_close(got, want)


@pytest.mark.full
@pytest.mark.slow_compile
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_compiled_module(dynamic: bool, ranks: Ranks, seed: int) -> None:
    net = normed().double()
    xs = [torch.randn(n, 5, dtype=torch.float64) for n in (4, 2)]

    def run() -> Any:
        made = convert_sync_batch_norm(net)
        made.compile(fullgraph=True, backend="aot_eager", dynamic=dynamic)
        found = passed(made, [xs[ltx.axis_index()]])
        torch._dynamo.reset()
        return found

    results = ranks(2).run(run)
    (y,), *expected = passed(net, [torch.cat(xs)])
    torch.testing.assert_close(torch.cat([mine for (mine,), *_ in results]), y)
    for _, *found in results:
        torch.testing.assert_close(found, expected)


class BatchNormAct2d(nn.BatchNorm2d):
    """As timm.layers.BatchNormAct2d."""

    def __init__(self, num_features: int, act_layer: Any = nn.ReLU, drop_layer: Any = None, inplace: bool = True):
        super().__init__(num_features)
        self.drop = nn.Identity() if drop_layer is None else drop_layer()
        self.act = act_layer(inplace=inplace)

    def forward(self, x: Tensor) -> Tensor:
        mean, var = self.running_mean, self.running_var
        x = nn.functional.batch_norm(x, mean, var, self.weight, self.bias, self.training, 0.1, self.eps)
        return self.act(self.drop(x))


class Squared(BatchNormAct2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square()


def test_timms_batch_norm_with_its_activation(ranks: Ranks, seed: int) -> None:
    x = torch.randn(4, C, 2, 2, dtype=torch.float64)
    net = nn.Sequential(nn.Conv2d(C, C, 1), BatchNormAct2d(C, drop_layer=nn.Identity)).double()
    want = copy.deepcopy(net)(x)

    def run() -> Tensor:
        made = convert_sync_batch_norm(convert_sync_batch_norm(net))
        assert isinstance(made[1], SyncBatchNorm)
        assert list(made.state_dict()) == list(net.state_dict())
        y: Tensor = made(ltx.shard(x))
        y.sum().backward()  # type: ignore[no-untyped-call]
        return y.detach()

    torch.testing.assert_close(run(), want.detach())
    torch.testing.assert_close(torch.cat(list(ranks(2).run(run))), want.detach())
    refuses(UnsupportedError, r"'0' is a Squared, which isn't", convert_sync_batch_norm, nn.Sequential(Squared(2)))
    nn.utils.parametrize.register_parametrization(net[1], "weight", nn.Identity())
    refuses(UnsupportedError, r"'1' is a ParametrizedBatchNormAct2d, which isn't", convert_sync_batch_norm, net)
