"""uneven: ranks with different numbers of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.func import grad_and_value

import ltx
from ltx.errors import AxisError, DataError, InputError
from tests.kinds import Ranks, Started
from tests.train_on import loop_of_torch, mine, on_ranks, refuses, said, trained
from tests.twins import training
from tests.twins.training import sgd, weighted_step, whole


def turns(by_rank: list[list[Any]], **kwargs: Any) -> tuple[list[tuple[Any, float]], list[str]]:
    """What this rank sees, and what was communicated."""
    with ltx.profile.record() as trace:
        seen = [(batch, weight.item()) for batch, weight in ltx.uneven(by_rank[ltx.axis_index()], **kwargs)]
    return seen, [event.operation for event in trace.events]


@pytest.mark.parametrize(("divisor", "shares"), [("data", (1.0, 1.5, 3.0)), ("all", (1.0, 1.0, 1.0))])
def test_all_ranks_turn_until_none_has_data(divisor: Any, shares: tuple[float, ...], ranks: Ranks, seed: int) -> None:
    batches = [[torch.randn(2, 3) for _ in range(n)] for n in (3, 1, 2)]
    for rank, (seen, operations) in enumerate(ranks(3).run(turns, batches, divisor=divisor)):
        mine = batches[rank]
        assert [weight for _, weight in seen] == [share if t < len(mine) else 0.0 for t, share in enumerate(shares)]
        for t, (batch, _) in enumerate(seen):
            assert torch.equal(batch, mine[t] if t < len(mine) else torch.zeros(2, 3))
        assert operations == ["all_gather"] * 4, "one small collective a turn, and one for the end"


def test_all_ranks_stop_with_the_first(ranks: Ranks, seed: int) -> None:
    batches = [[torch.randn(2) for _ in range(n)] for n in (3, 2, 4)]
    for rank, (seen, operations) in enumerate(ranks(3).run(turns, batches, stop="first")):
        assert [weight for _, weight in seen] == [1.0, 1.0]
        assert all(torch.equal(batch, mine) for (batch, _), mine in zip(seen, batches[rank], strict=False))
        assert operations == ["all_gather"] * 3
    assert list(ranks(2).run(turns, [[], [torch.ones(1)]], stop="first")) == [([], ["all_gather"])] * 2


class Pair(NamedTuple):
    x: Tensor
    name: str


def kinds(rank: int) -> Any:
    return {
        "pair": Pair(torch.randn(rank + 1, 3, dtype=torch.float64).T, f"rank {rank}"),
        "ids": [torch.randint(1, 9, (rank,)), torch.tensor(True)],
        "scalar": torch.tensor(2.0 + 1j),
        "half": torch.ones(2, 0, dtype=torch.bfloat16),
        **({"more": torch.ones(1)} if rank else {}),
    }


def shapes(batch: Any) -> Any:
    return ltx.tree.map(lambda x: (x.shape, x.dtype, x.device) if isinstance(x, Tensor) else x, batch)


def is_zero(batch: Any) -> bool:
    return all(not x.any() for x in ltx.tree.flatten(batch)[0] if isinstance(x, Tensor))


@on_ranks(2)
def test_placeholders_have_the_structure_of_a_ranks_own_last_batch(seed: int) -> None:
    rank = int(ltx.axis_index())
    mine, seen = kinds(rank), []
    wanted = shapes(mine)
    for batch, weight in ltx.uneven([mine] if rank == 0 else [mine] * 4):
        seen.append((shapes(batch), weight.dtype, weight.shape, is_zero(batch)))
        batch.clear()  # what a loop does to its batches doesn't reach the placeholders
        mine.update(kinds(rank))

    assert seen == [(wanted, torch.float32, (), rank == 0 and t > 0) for t in range(4)]


def test_a_rank_without_any_batch_takes_anothers_structure(ranks: Ranks, seed: int) -> None:
    def run() -> list[tuple[Any, float, bool]]:
        rank = int(ltx.axis_index())
        mine = [] if rank == 0 else [kinds(rank)] * rank
        return [(shapes(batch), weight.item(), is_zero(batch)) for batch, weight in ltx.uneven(iter(mine))]

    first, second, third = (shapes(kinds(rank)) for rank in (1, 1, 2))
    by_rank = ranks(3).run(run)
    assert by_rank.rank(0) == [(first, 0.0, True)] * 2, "rank 1 was the first that had one"
    assert by_rank.rank(1) == [(second, 1.5, False), (second, 0.0, True)]
    assert by_rank.rank(2) == [(third, 1.5, False), (third, 3.0, False)]


def test_no_rank_has_any_batch(ranks: Ranks) -> None:
    assert ranks(2).run(turns, [[], []]).replicated() == ([], ["all_gather"])


@on_ranks(2)
def test_what_cannot_be_pickled_raises_on_every_rank() -> None:
    batches = mine([[], [{"x": torch.ones(1), "file": (i for i in ())}]])
    refuses(TypeError, "rank 1's object can't be pickled", lambda: list(ltx.uneven(batches)))
    assert ltx.psum(torch.tensor(1.0)) == 2.0


def test_a_process_group_of_one(started: Started) -> None:
    assert started(1, lambda tell: turns([[3, 4]], axis="data")).told(0) == ([(3, 1.0), (4, 1.0)], [])


def test_world_of_one() -> None:
    assert list(ltx.uneven(["a", "b"])) == [("a", torch.tensor(1.0)), ("b", torch.tensor(1.0))]
    assert list(ltx.uneven([], divisor="all")) == []
    said(ZeroDivisionError, lambda: list(ltx.uneven(1 / x for x in [0])))
    ((_, weight),) = ltx.uneven([1])
    assert (weight.dtype, weight.shape) == (torch.float32, torch.Size([]))


def loss_of(w: Tensor, x: Tensor) -> Tensor:
    return (w * x).sin().sum()


USAGES: dict[str, tuple[Callable[[Tensor, Tensor], Any], dict[str, str]]] = {
    "weight * loss": (lambda loss, weight: weight * loss, {"data": "a", "all": "n"}),
    "Weighted by it": (lambda loss, weight: ltx.Weighted(weight * loss, weight), {"data": "a", "all": "a"}),
    "Weighted by 1": (lambda loss, weight: ltx.Weighted(weight * loss, 1.0), {"data": "a", "all": "n"}),
}


@pytest.mark.full(but=3)
@pytest.mark.parametrize("divisor", ["data", "all"])
@pytest.mark.parametrize("usage", USAGES)
def test_means(usage: str, divisor: Any, ranks: Ranks, seed: int) -> None:
    """The table in the docstring, for values and gradients."""
    output, divisors = USAGES[usage]
    batches = [[torch.randn(4) for _ in range(n)] for n in (1, 3, 0)]
    w = torch.randn(4)

    def run() -> list[tuple[Tensor, Tensor]]:
        step = ltx.data_parallel(lambda w, x, weight: output(loss_of(w, x), weight), outputs="mean")
        mine = batches[ltx.axis_index()]
        return [grad_and_value(step)(w, x, weight) for x, weight in ltx.uneven(mine, divisor=divisor)]

    found = ranks(3).run(run).replicated()
    assert len(found) == 3
    for t, got in enumerate(found):
        here = [mine[t] for mine in batches if len(mine) > t]
        count = {"a": len(here), "n": 3}[divisors[divisor]]
        want = grad_and_value(lambda w, here=here, count=count: sum(loss_of(w, x) for x in here) / count)(w)
        torch.testing.assert_close(got, want)


def test_training_by_samples_is_one_process_with_all_batches(ranks: Ranks, seed: int) -> None:
    """Ranks with 4, 1 and no batches, of different sizes."""
    counts, sizes = (4, 1, 0), (3, 5, 2)

    def run() -> tuple[Tensor, Any]:
        module, batches = training.problem(seed, sizes, 4)
        given = [mine(by_rank) for by_rank in batches][: mine(counts)]
        by_size = weighted_step(module).fn

        def step(params: Any, x: Tensor, y: Tensor, weight: Tensor) -> ltx.Weighted:
            total, count = by_size(params, x, y)
            return ltx.Weighted(total * (weight > 0), count * (weight > 0))

        turns = ((*batch, weight) for batch, weight in ltx.uneven(given))
        found = trained(step, sgd(), dict(module.named_parameters()), turns)
        return found.losses, found.params

    losses, params = ranks(3).run(run).replicated()
    module, batches = training.problem(seed, sizes, 4)
    optimizer = torch.optim.SGD(module.parameters(), lr=training.LR)
    given = whole([[b for b, n in zip(step, counts, strict=True) if t < n] for t, step in enumerate(batches)])
    torch.testing.assert_close(losses, loop_of_torch(optimizer, module, given))
    torch.testing.assert_close(params, {name: p.detach() for name, p in module.named_parameters()})


def norms(w: Tensor, x: Tensor) -> Tensor:
    """NaN on zeros, and so is its gradient."""
    return (w * x / x.norm()).sum()


SAFE: dict[str, Callable[[Tensor, Tensor, Tensor], ltx.Weighted]] = {
    "not called": lambda w, x, weight: ltx.Weighted(norms(w, x), 1) if weight > 0 else ltx.Weighted(torch.zeros(()), 0),
    "harmless inputs": lambda w, x, weight: ltx.Weighted(weight * norms(w, torch.where(weight > 0, x, 1.0)), weight),
}


@pytest.mark.parametrize("name", SAFE)
@pytest.mark.parametrize("grad_and_value", [torch.func.grad_and_value, ltx.grad_and_value], ids=["torch.func", "ltx"])
def test_losses_that_are_nan_on_placeholders(name: str, grad_and_value: Any, ranks: Ranks, seed: int) -> None:
    batches, w = [[torch.randn(4)], [torch.randn(4), torch.randn(4)]], torch.randn(4)

    def run() -> list[tuple[Tensor, Tensor]]:
        step = ltx.data_parallel(SAFE[name])
        return [grad_and_value(step)(w, x, weight) for x, weight in ltx.uneven(batches[ltx.axis_index()])]

    first, second = ranks(2).run(run).replicated()
    want = grad_and_value(lambda w: (norms(w, batches[0][0]) + norms(w, batches[1][0])) / 2)(w)
    torch.testing.assert_close(first, want)
    torch.testing.assert_close(second, grad_and_value(norms)(w, batches[1][1]))

    def train() -> tuple[Tensor, Tensor]:
        found = trained(SAFE[name], sgd(lr=0.5), w, ltx.uneven(mine(batches)))
        return found.losses, found.params

    losses, after = ranks(2).run(train).replicated()
    assert torch.isfinite(losses).all()
    torch.testing.assert_close(after, w - 0.5 * (first[0] + second[0]))  # norms is linear in w


def test_what_torch_where_on_the_loss_saves_and_what_not(ranks: Ranks, seed: int) -> None:
    batches, w = [[torch.randn(4)], []], torch.randn(4)

    def run() -> list[tuple[bool, Any]]:
        step = ltx.data_parallel(lambda w, x, weight: torch.where(weight > 0, norms(w, x), 0.0), outputs="mean")
        found = [grad_and_value(step)(w, x, weight) for x, weight in ltx.uneven(batches[ltx.axis_index()])]
        return [(bool(gradient.isnan().all()), value.isfinite().item()) for gradient, value in found]

    assert ranks(2).run(run).replicated() == [(True, True)]


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def after(n: int, error: Exception) -> Iterator[Tensor]:
    for _ in range(n):
        yield torch.ones(1)
    raise error


def failure(make: Callable[[int], Any]) -> tuple[int, str, str, float]:
    """(turns that were made, the error's text, its cause, a sum that follows)"""
    batches, seen = ltx.uneven(make(int(ltx.axis_index()))), []
    with pytest.raises(DataError) as caught:
        seen.extend(batch for batch, _ in batches)
    return len(seen), str(caught.value), repr(caught.value.__cause__), ltx.psum(torch.tensor(1.0)).item()


@pytest.mark.parametrize("n", [0, 2])
def test_an_iterable_that_raises_reaches_every_rank(n: int, ranks: Ranks) -> None:
    first, second = ranks(2).run(
        failure, lambda rank: after(n, OSError("disk is gone")) if rank == 1 else [torch.ones(1)]
    )
    text = "uneven: the iterable of rank 1 on axis 'data' raised OSError: disk is gone. All ranks stop here."
    assert first == (n, text, "None", 2.0)
    assert second == (n, text, "OSError('disk is gone')", 2.0)


def test_several_that_raise(ranks: Ranks) -> None:
    by_rank = ranks(3).run(failure, lambda rank: after(1, ValueError(f"of rank {rank}")))
    assert [text for _, text, _, _ in by_rank] == 3 * [
        "uneven: the iterable of rank 0 on axis 'data' raised ValueError: of rank 0. Those of ranks [1, 2] failed at "
        "the same step. All ranks stop here."
    ]


FAILING: dict[str, Callable[[], Any]] = {
    "TypeError: 'int' object is not iterable": lambda: 5,
    "UnprintableError: <exception str() failed>": lambda: after(0, UnprintableError()),
    "nested tensors have no placeholder. Pad them": lambda: [
        torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged)
    ],
}


@pytest.mark.parametrize("text", FAILING)
def test_other_failures(text: str, ranks: Ranks) -> None:
    by_rank = ranks(2).run(failure, lambda rank: FAILING[text]() if rank == 0 else [])
    assert all(text in found for _, found, _, _ in by_rank)


def test_simulated_ranks() -> None:
    text = r"uneven has no form under ltx.vmap: .* axis 'data' .* the ranks' weights, 0 for"
    refuses(AxisError, text, ltx.vmap(lambda x: list(ltx.uneven([x]))), torch.ones(2))


def test_fields() -> None:
    refuses(InputError, r'uneven: divisor must be "data" or "all", got 2\.', ltx.uneven, [], divisor=2)
    refuses(InputError, 'stop must be "last" or "first", got \'both\'', ltx.uneven, [], stop="both")
    assert len(list(ltx.uneven([1, 2], stop="first"))) == 2
