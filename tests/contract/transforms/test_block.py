"""Local gradients, and means over ranks, alone and in one ``.grad``, where DDP's no_sync() reduces the sum of both."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad

import ltx
from ltx import tree
from ltx.errors import LtxError, RankMismatchError, ReplicaDivergedError, StepError, TreeError
from tests.kinds import Ranks
from tests.train_on import on_ranks, refuses, said
from tests.twins.cases import (
    CASES,
    WAYS,
    Params,
    assert_close,
    assert_same_bits,
    gradient,
    params_of,
    plain_step,
    seeded,
)

STRATEGIES = {
    "default": None,
    "small buckets": ltx.DDPStrategy(bucket_bytes=128, first_bucket_bytes=16),
    "bf16": ltx.DDPStrategy(comm_hook="bf16"),
}


def on_a_rank(name: str, way: str, strategy: ltx.Strategy | None, seed: int) -> Any:
    """(local gradients, those reduced, the plain step's, how many issues the local ones took)"""
    module, batches = CASES[name].build(seed, 2)
    rank = ltx.world().rank
    step = ltx.data_parallel(plain_step(module), strategy)

    def differentiate(step: Any) -> Params:
        with seeded(rank):
            return WAYS[way](step, params_of(module), *batches[rank])

    with ltx.profile.record() as trace:
        local = differentiate(ltx.block_backward_sync(step))
    reduced, _ = ltx.sync_gradients(local, strategy)
    return local, reduced, differentiate(step), len(trace.events)


@pytest.mark.full(but=1)
@pytest.mark.covering(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("way", WAYS)
def test_blocked_then_synchronised_is_the_plain_step(way: str, strategy: str, ranks: Ranks, seed: int) -> None:
    results = ranks(2).run(on_a_rank, "mlp", way, STRATEGIES[strategy], seed)
    module, batches = CASES["mlp"].build(seed, 2)
    for (local, reduced, plain, issues), batch in zip(results, batches, strict=True):
        assert_close(local, gradient(module, module(*batch)))
        assert_same_bits(reduced, plain, results[0][1])
        assert issues == 0


@pytest.mark.parametrize("name", ["unused and rank-dependent", "mixed dtypes, 0-dim, empty", "dropout", "empty batch"])
def test_other_models(name: str, ranks: Ranks, seed: int) -> None:
    for _, reduced, plain, issues in ranks(2).run(on_a_rank, name, "torch.func.grad", None, seed):
        assert_same_bits(reduced, plain)
        assert issues == 0


def test_is_a_context_manager_that_yields_itself_and_leaves_the_step_as_it_was() -> None:
    step = ltx.data_parallel(lambda w, x: (w * x).sum())
    blocked = ltx.block_backward_sync(step)
    x = torch.tensor([[1.0], [3.0]])

    def gradients(f: Any) -> list[float]:
        return ltx.vmap(grad(f), in_dims=(None, 0))(torch.tensor(1.0), x).tolist()

    with blocked as local:
        assert local is blocked
        assert gradients(local) == [1.0, 3.0]
        assert gradients(step) == [2.0, 2.0]  # only what is called through it
    assert gradients(local) == [1.0, 3.0]
    assert ltx.block_backward_sync(step) == blocked != step
    with pytest.raises(ZeroDivisionError), blocked:
        raise ZeroDivisionError


def test_a_weighted_step_gives_its_local_mean() -> None:
    step = ltx.data_parallel(lambda w, x: ltx.Weighted((w * x).sum(), 2))
    blocked = ltx.vmap(ltx.grad_and_value(ltx.block_backward_sync(step)), in_dims=(None, 0))
    grads, losses = blocked(torch.tensor(2.0), torch.tensor([[1.0, 2.0], [4.0, 5.0]]))
    assert (grads.tolist(), losses.tolist()) == ([1.5, 4.5], [3.0, 9.0])


@pytest.mark.parametrize("way", WAYS)
def test_accumulate_and_block_commute(way: str, seed: int) -> None:
    module, (batch,) = CASES["mlp"].build(seed, 1)
    step = ltx.data_parallel(plain_step(module))
    first = ltx.block_backward_sync(ltx.accumulate(step, 2))
    second = ltx.accumulate(ltx.block_backward_sync(step), 2)
    expected = gradient(module, module(*batch))
    for blocked in (first, second):
        assert blocked.blocked
        assert_close(WAYS[way](blocked, params_of(module), *batch), expected)


def test_error() -> None:
    assert said(StepError, ltx.block_backward_sync, lambda p: p) == (
        "block_backward_sync takes a step made by ltx.data_parallel, got function. A step that isn't data parallel has "
        "local gradients already."
    )


def test_trees_with_other_leaves_and_their_derivative() -> None:
    def reduce(x: Tensor) -> Any:
        return ltx.sync_gradients({"g": [x, (2 * x).double()], "n": x.long(), "none": None})[0]

    out = ltx.vmap(reduce)(torch.tensor([[1.0], [4.0]]))
    assert out["g"][0].tolist() == [[2.5], [2.5]]
    assert (out["g"][1].tolist(), out["g"][1].dtype) == ([[5.0], [5.0]], torch.float64)
    assert (out["n"].tolist(), out["none"]) == ([[1], [4]], None)
    scale = torch.tensor([1.0, 5.0])
    square = ltx.vmap(grad(lambda x, s: s * reduce(x)["g"][0].sum()))
    assert square(torch.tensor([[1.0], [4.0]]), scale).tolist() == [[3.0], [3.0]]  # the mean of the cotangents


@on_ranks(2)
def test_what_is_given_is_left_alone() -> None:
    given = {"a": torch.arange(6.0).view(2, 3).T, "b": torch.ones(2)}
    reduced, state = ltx.sync_gradients(given)
    assert state is None
    reduced["b"].zero_()
    assert given["b"].tolist() == [1, 1]
    assert given["a"].tolist() == reduced["a"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_what_is_no_tree_of_tensors() -> None:
    assert (
        said(TreeError, ltx.sync_gradients, {"a": [torch.ones(1), 2.0]})
        == "grads must be a tree of tensors, but leaf 'a.1' is of type float."
    )


@on_ranks(2)
def test_in_inference_mode() -> None:
    with torch.inference_mode():
        assert ltx.sync_gradients(torch.ones(2) * (1 + ltx.axis_index()))[0].tolist() == [1.5, 1.5]


N = 2


def loss(w: dict[str, Tensor], x: Tensor) -> Tensor:
    return ((w["a"] * x).tanh() * w["b"]).sum()


STEP = ltx.data_parallel(loss)
LOCAL = ltx.block_backward_sync(STEP)


def problem(seed: int, batches: int = 3) -> tuple[dict[str, Tensor], Tensor, list[dict[str, Tensor]]]:
    """Parameters, this rank's batches, and the mean over ranks of each batch's gradients, by plain autograd."""
    torch.manual_seed(seed)
    w = {"a": torch.randn(4), "b": torch.randn(4)}
    xs = torch.randn(batches, size := ltx.axis_size(), 4)
    means = []
    for batch in xs:
        plain = {k: v.clone().requires_grad_() for k, v in w.items()}
        (sum(loss(plain, x) for x in batch) / size).backward()
        means.append({k: v.grad for k, v in plain.items()})
    leaves = {k: v.clone().requires_grad_() for k, v in w.items()}
    return leaves, xs[:, int(ltx.axis_index())], means  # type: ignore[return-value]


def total(means: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {k: sum(m[k] for m in means) for k in means[0]}  # type: ignore[misc]


def of(w: dict[str, Tensor]) -> dict[str, Any]:
    return {k: v.grad for k, v in w.items()}


def clipped(w: dict[str, Tensor]) -> None:
    torch.nn.utils.clip_grad_norm_(w.values(), 0.1)


def unscaled(w: dict[str, Tensor]) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(torch.optim.SGD(w.values(), lr=0.1))


def clipped_by_value(w: dict[str, Tensor]) -> None:
    """The greatest alone: if all were clipped, nothing but signs would tell the ranks' gradients apart."""
    most = max(v.grad.abs().max().item() for v in w.values() if v.grad is not None)
    torch.nn.utils.clip_grad_value_(w.values(), 0.9 * most)


def anew(w: dict[str, Tensor]) -> None:
    for v in w.values():
        v.grad = v.grad / 2  # type: ignore[operator]


# What is done to local gradients, and leaves them local.
CHANGED: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "nothing": lambda w: None,
    "clip_grad_norm_": clipped,
    "clip_grad_value_": clipped_by_value,
    "mul_": lambda w: [v.grad.mul_(0.5) for v in w.values()],  # type: ignore[union-attr]
    "div_ of data": lambda w: [v.grad.data.div_(3) for v in w.values()],  # type: ignore[union-attr]
    "foreach": lambda w: torch._foreach_mul_([v.grad for v in w.values()], 0.5),  # type: ignore[arg-type]
    "GradScaler": unscaled,
    "out of place": anew,
    "another backward pass": lambda w: loss(w, torch.ones(4)).backward(create_graph=True),
}


# Whose gradients are each rank's own.
OWN: dict[str, Callable[[dict[str, Tensor], Tensor], Any]] = {
    "blocked": lambda w, x: [LOCAL(w, y).backward() for y in (x, x + 1)],
    "half of blocked": lambda w, x: (LOCAL(w, x) / 2).backward(),
    "plain": lambda w, x: (loss(w, x) / 2).backward(),
    "after a reduced pass": lambda w, x: (STEP(w, x).backward(), loss(w, x).backward()),
    "noise": lambda w, x: (STEP(w, x).backward(), w["a"].grad.add_(x), w["b"].grad.sub_(x)),  # type: ignore[union-attr]
    "assigned": lambda w, x: [setattr(v, "grad", x.clone()) for v in w.values()],
}


def mixed(seed: int, name: str, own: str) -> str:
    w, xs, means = problem(seed)
    OWN[own](w, xs[0])
    CHANGED[name](w)
    before = copy.deepcopy({k: v.detach() for k, v in of(w).items()})
    for _ in range(2):
        text = said(RankMismatchError, STEP(w, xs[2]).backward)
        torch.testing.assert_close(of(w), before, rtol=0, atol=0)
    zero(w, set_to_none=True)
    STEP(w, xs[2]).backward()  # and goes on
    torch.testing.assert_close(of(w), means[2])
    return text


@pytest.mark.parametrize(("own", "name"), [("blocked", name) for name in CHANGED] + [(own, "nothing") for own in OWN])
def test_a_reduced_pass_refuses_gradients_of_each_rank(ranks: Ranks, seed: int, own: str, name: str) -> None:
    first, second = ranks(N).run(mixed, seed, name, own)
    assert first == second
    assert "rank 1: 'a.grad' and 1 more (digest" in first
    for text in ("block_backward_sync", "ltx.accumulate(", "ltx.sync_gradients(", "set .grad to None"):
        assert text in first


# What a reduced pass doesn't find, as no reduced pass adds to it.
UNFOUND: dict[str, Callable[[dict[str, Tensor], Tensor], Any]] = {
    "another term": lambda w, x: (STEP(w, x) + loss(w, x)).backward(),
    "a local pass after it": lambda w, x: (STEP(w, x).backward(), loss(w, x).backward()),
    "noise": OWN["noise"],
}


@pytest.mark.parametrize("name", UNFOUND)
@on_ranks(N)
def test_what_it_has_done_to_parameters_is_found_in_the_next_step(seed: int, name: str) -> None:
    w, xs, _ = problem(seed)
    UNFOUND[name](w, xs[0])
    torch.optim.SGD(w.values(), lr=0.1).step()
    zero(w, set_to_none=True)
    with ltx.debug_checks(), pytest.raises(ReplicaDivergedError, match="leaf 'a'"):
        STEP(w, xs[1])
    refuses(ReplicaDivergedError, "leaf 'a'", ltx.check_replicas, w)


def test_simulated_ranks_refuse_it_where_each_has_its_own(seed: int) -> None:
    """What all of them share gets the sum of their gradients in both passes, which is no other on any rank."""
    w, xs = problem(seed)[0], torch.randn(N, 4)

    def backward(step: Any, w: dict[str, Tensor], in_dim: int | None) -> None:
        ltx.vmap(step, in_dims=(in_dim, 0))(w, xs).sum().backward()

    backward(LOCAL, w, None)
    backward(STEP, w, None)
    expected = {k: v.detach().clone().requires_grad_() for k, v in w.items()}
    (2 * sum(loss(expected, x) for x in xs)).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(of(w), of(expected))
    stacked = {k: v.detach().expand(N, 4).clone().requires_grad_() for k, v in w.items()}
    backward(LOCAL, stacked, 0)
    CHANGED["mul_"](stacked)
    with pytest.raises(ReplicaDivergedError, match=r"leaf 'a\.grad' .* differs on rank 1 .*ltx\.accumulate\("):
        backward(STEP, stacked, 0)
    for v in stacked.values():
        v.grad.copy_(v.grad.mean(0).expand(N, 4))  # type: ignore[union-attr]
    backward(STEP, stacked, 0)


@on_ranks(N)
def test_of_one_rank_alone_both_hear(seed: int) -> None:
    """Rank 1 alone has gradients of its own: its peer mustn't wait for it, nor go on with half a mean."""
    w, xs, means = problem(seed)
    if int(ltx.axis_index()):
        LOCAL(w, xs[0]).backward()
    refuses(LtxError, "block_backward_sync", lambda: STEP(w, xs[1]).backward())
    zero(w, set_to_none=True)
    STEP(w, xs[2]).backward()
    torch.testing.assert_close(of(w), means[2])


def zero(w: dict[str, Tensor], set_to_none: bool) -> None:
    torch.optim.SGD(w.values(), lr=0.1).zero_grad(set_to_none=set_to_none)


def by_hand(w: dict[str, Tensor], xs: Tensor, in_place: bool, data: bool = False) -> None:
    LOCAL(w, xs[0]).backward()
    LOCAL(w, xs[1]).backward()
    means, _ = ltx.sync_gradients(of(w))
    for k, v in w.items():
        if in_place:
            (v.grad.data if data else v.grad).copy_(means[k])  # type: ignore[union-attr]
        else:
            v.grad = means[k]
    STEP(w, xs[2]).backward()


def averaged(w: dict[str, Tensor], xs: Tensor) -> None:
    LOCAL(w, xs[0]).backward()
    for v in w.values():
        v.grad.copy_(ltx.pmean(v.grad)).mul_(2.0).div_(2.0)  # type: ignore[union-attr]
    STEP(w, xs[1]).backward()


def after_zeros(w: dict[str, Tensor], xs: Tensor, zeroed: Callable[[Any], object]) -> None:
    LOCAL(w, xs[0]).backward()
    zeroed(w)
    STEP(w, xs[1]).backward()


def reduced_twice(w: dict[str, Tensor], xs: Tensor) -> None:
    STEP(w, xs[0]).backward()
    STEP(w, xs[1]).backward()


def same_everywhere(w: dict[str, Tensor], xs: Tensor) -> None:
    """A plain loss without data, and reduced gradients that are scaled and clipped, are the same on all ranks."""
    sum(v.square().sum() for v in w.values()).backward()  # type: ignore[union-attr]
    STEP(w, xs[0]).backward()
    for v in w.values():
        v.grad.sub_(2 * v.detach()).mul_(2.0)  # type: ignore[union-attr]
    assert torch.nn.utils.clip_grad_norm_(w.values(), 1e6) > 0
    for v in w.values():
        v.grad = v.grad / 2  # type: ignore[operator]
    STEP(w, xs[1]).backward()


def given_to_the_caller(w: dict[str, Tensor], xs: Tensor) -> None:
    """What torch.autograd.grad returns isn't added to a .grad; nor are those of a blocked pass, there, in one."""
    torch.autograd.grad(LOCAL(w, xs[1]), w.values())
    STEP(w, xs[0]).backward()
    copied = copy.deepcopy(of(w))
    zero(w, True)
    LOCAL(w, xs[1]).backward()
    found = torch.autograd.grad(STEP(w, xs[0]), w.values())
    torch.testing.assert_close(dict(zip(w, found, strict=True)), copied)
    w["a"].grad, w["b"].grad = found


def accumulated(w: dict[str, Tensor], xs: Tensor) -> None:
    step = ltx.accumulate(STEP, 2)
    step(w, xs[:2]).backward()
    step(w, xs[:2]).backward()


# What is right, and the batches whose means it adds up.
ALLOWED: dict[str, tuple[Callable[[dict[str, Tensor], Tensor], None], list[int]]] = {
    "reduced, then reduced": (reduced_twice, [0, 1]),
    "local, local, sync_gradients in new tensors, reduced": (lambda w, xs: by_hand(w, xs, False), [0, 1, 2]),
    "local, local, sync_gradients in place, reduced": (lambda w, xs: by_hand(w, xs, True), [0, 1, 2]),
    "local, local, sync_gradients in place of data, reduced": (lambda w, xs: by_hand(w, xs, True, True), [0, 1, 2]),
    "local, pmean in place, scaled twice, reduced": (averaged, [0, 1]),
    "local, None, reduced": (lambda w, xs: after_zeros(w, xs, lambda w: zero(w, True)), [1]),
    "local, zeros, reduced": (lambda w, xs: after_zeros(w, xs, lambda w: zero(w, False)), [1]),
    "local, zeros by .data, reduced": (  # as older programs zero gradients
        lambda w, xs: after_zeros(w, xs, lambda w: [v.grad.data.zero_() for v in w.values()]),
        [1],
    ),
    "torch.autograd.grad": (given_to_the_caller, [0]),
    "the same on all ranks": (same_everywhere, [0, 1]),
    "accumulate": (accumulated, [0, 1]),
}


@pytest.mark.parametrize("name", ALLOWED)
@on_ranks(N, alone=True)
def test_what_is_right_stays(seed: int, name: str) -> None:
    w, xs, means = problem(seed)
    use, batches = ALLOWED[name]
    use(w, xs)
    torch.testing.assert_close(of(w), total([means[i] for i in batches]))
    if ltx.axis_size() == 1:  # where nothing is refused
        LOCAL(w, xs[0]).backward()
        STEP(w, xs[0]).backward()


def experts(seed: int) -> None:
    """Gradients that a hook leaves on each rank may differ."""
    w, xs, means = problem(seed)
    hook = ltx.hooks.partition({"b": ltx.hooks.Noop(), "*": ltx.hooks.AllReduce()})
    step = ltx.data_parallel(loss, ltx.DDPStrategy(comm_hook=hook))
    for x in xs:
        step(w, x).backward()
        for v in w.values():
            v.grad.mul_(0.5)  # type: ignore[union-attr]
    torch.testing.assert_close(w["a"].grad, sum(m["a"] / 2 ** (3 - i) for i, m in enumerate(means)))


def with_state(seed: int) -> None:
    """Of parameters with communication state, which is differentiated with them."""
    torch.manual_seed(seed)
    rank = int(ltx.axis_index())
    step = ltx.data_parallel(loss, ltx.DDPStrategy(comm_hook=ltx.hooks.TopK(0.5)))
    w = {k: torch.randn(4, requires_grad=True) for k in "ab"}
    synced = ltx.Synced(w, tree.map(lambda x: x.requires_grad_(x.is_floating_point()), step.init(w)))
    ltx.block_backward_sync(step)(synced, torch.randn(2, 4)[rank]).backward()
    refuses(RankMismatchError, r"'a\.grad'", step(synced, torch.randn(4)).backward)


def module_and_views(seed: int) -> None:
    """Of a module, with one of two outputs, through create_graph, and through a reduced pass after another's."""
    torch.manual_seed(seed)
    net = nn.Linear(4, 2)
    step = ltx.data_parallel(lambda w, x: (ltx.functional_call(net, w, (x,)).sum(), {"aux": x}))
    params, x = dict(net.named_parameters()), torch.randn(2, 3, 4)[int(ltx.axis_index())]
    for create_graph in (False, True):
        step(params, x)[0].backward()
        with ltx.block_backward_sync(step) as local:
            local(params, x)[0].backward(create_graph=create_graph)
        refuses(RankMismatchError, r"'bias\.grad' and 1 more", step(params, x)[0].backward)
        net.zero_grad()
        step(params, x)[0].backward()
        net.zero_grad()


@pytest.mark.parametrize("check", [experts, with_state, module_and_views])
def test_other_kinds_of_gradients(check: Callable[[int], None], ranks: Ranks, seed: int) -> None:
    ranks(N).run(check, seed)
