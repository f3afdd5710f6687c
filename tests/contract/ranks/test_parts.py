"""Parts of an axis: the ranks of a node, and those with the same place in every node."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import ltx
from ltx import hooks
from ltx.errors import AxisError, UnsupportedError
from ltx.extend import exchange, inner, outer
from ltx.hooks import BucketInput, CollectiveRequest, Reduction
from ltx.strategies import StepInfo
from tests.inside import find
from tests.kinds import Ranks


def sums(x: Tensor, size: int) -> dict[str, Tensor]:
    node, across = inner(find("data"), size), outer(find("data"), size)
    weights = torch.arange(1.0, 1 + x.numel())
    return {
        "node": ltx.psum(x, node),
        "across": ltx.psum(x, across),
        "place": ltx.axis_index(node) + 0,
        "node's number": ltx.axis_index(across) + 0,
        "largest": ltx.pmax(x, node),
        "gathered": ltx.all_gather(x, across),
        "gradient": torch.func.grad(lambda x: (ltx.psum(x, node).square() * weights).sum())(x),
    }


def expected(x: Tensor, rank: int, size: int) -> dict[str, Tensor]:
    """For the rows of x, which are the ranks'."""
    node, place = divmod(rank, size)
    mine, across = x[node * size : (node + 1) * size], x[place::size]
    weights = torch.arange(1.0, 1 + x.shape[1])
    return {
        "node": mine.sum(0),
        "across": across.sum(0),
        "place": torch.tensor(place),
        "node's number": torch.tensor(node),
        "largest": mine.amax(0),
        "gathered": across,
        "gradient": 2 * size * mine.sum(0) * weights,
    }


@pytest.mark.parametrize("size", [1, 2, 4])
def test_processes(size: int, ranks: Ranks, seed: int) -> None:
    x = torch.randn(4, 3)
    for rank, got in enumerate(ranks(4).run(lambda: sums(x[int(ltx.axis_index())], size))):
        torch.testing.assert_close(got, expected(x, rank, size))


@pytest.mark.parametrize(("n", "size"), [(4, 2), (6, 3), (6, 2), (6, 1), (6, 6)])
def test_simulated_ranks(n: int, size: int, seed: int) -> None:
    x = torch.randn(n, 3)
    got = ltx.vmap(lambda x: sums(x, size))(x)
    for rank in range(n):
        torch.testing.assert_close({name: y[rank] for name, y in got.items()}, expected(x, rank, size))


def test_a_world_of_one() -> None:
    x = torch.tensor([1.0, 2.0])
    torch.testing.assert_close(sums(x, 1), expected(x[None], 0, 1))


@dataclass(frozen=True, repr=False)
class InTwoSteps(hooks.CommHook):
    """The mean within nodes, then that across them."""

    size: int = 2
    phases = 2

    def axes(self, axis: ltx.Axis) -> tuple[ltx.Axis, ...]:
        return inner(axis, self.size), outer(axis, self.size)

    def reduce(self, share: BucketInput) -> Reduction:
        node, across = self.axes(share.axis)
        total = yield CollectiveRequest("psum", share.flat, axis=node)
        total = yield CollectiveRequest("psum", total, axis=across)
        return total, share.states


def reduced(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    strategy = ltx.DDPStrategy(comm_hook=InTwoSteps(size), bucket_bytes=8, first_bucket_bytes=8)
    grad = torch.func.grad(ltx.data_parallel(lambda p, x: sum((q * x).sum() for q in p), strategy))
    grads = grad([torch.ones(3), torch.ones(1)], x)
    exchanged, _ = exchange(strategy, InTwoSteps(size), [x], ["x"], StepInfo(0, find("data"))).wait()
    return grads[0], exchanged[0]


@pytest.mark.full(but=1)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_hooks_may_ask_among_parts(size: int, ranks: Ranks, seed: int) -> None:
    x = torch.randn(4, 3)
    for grad, exchanged in ranks(4).run(lambda: reduced(x[int(ltx.axis_index())], size)):
        torch.testing.assert_close(grad, x.mean(0))
        torch.testing.assert_close(exchanged, x.mean(0))
    for values in ltx.vmap(lambda x: reduced(x, size))(x):
        torch.testing.assert_close(values, x.mean(0).expand(4, 3))


def test_parts_of_parts(seed: int) -> None:
    xs = torch.randn(8)
    got = ltx.vmap(lambda x: ltx.psum(x, inner(outer(find("data"), 2), 2)))(xs)
    torch.testing.assert_close(got, torch.cat([(xs[i : i + 2] + xs[i + 2 : i + 4]).repeat(2) for i in (0, 4)]))


def test_what_cant_be() -> None:
    with pytest.raises(AxisError, match=re.escape("axis 'data' has 4 ranks, which don't divide into nodes of 3.")):
        ltx.vmap(lambda x: ltx.psum(x, inner(find("data"), 3)))(torch.ones(4))
    with pytest.raises(UnsupportedError, match=re.escape("Nest two ltx.vmap")):
        ltx.vmap(lambda x: torch.func.grad(ltx.data_parallel(lambda w: w * x, axis=inner(find("data"), 2)))(x))(
            torch.ones(4)
        )


def test_data_parallel_within_a_node(ranks: Ranks) -> None:
    def within() -> float:
        step = ltx.data_parallel(lambda w: w * (1.0 + ltx.axis_index()), axis=inner(find("data"), 2))
        return torch.func.grad(step)(torch.tensor(1.0)).item()

    assert list(ranks(4).run(within)) == [1.5, 1.5, 3.5, 3.5]


@pytest.mark.full
def test_parts_are_closed_with_their_axis(ranks: Ranks) -> None:
    def run() -> tuple[int, int]:
        before = len(torch.distributed.distributed_c10d._world.pg_map)
        with ltx.axis_from_group([0, 1, 2, 3]) as axis:
            ltx.psum(torch.ones(1), inner(axis, 2))
            ltx.psum(torch.ones(1), outer(axis, 2))
        return before, len(torch.distributed.distributed_c10d._world.pg_map)

    for before, after in ranks(4).run(run):
        assert before == after
