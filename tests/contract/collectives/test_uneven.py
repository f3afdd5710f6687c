"""Unequal shapes: gather_all_tensors, and the collectives that take splits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx.errors import AxisError, RankMismatchError
from tests import inside
from tests.kinds import OnNewAxis, Ranks
from tests.train_on import mine, on_ranks, refuses, said

SHAPES: dict[str, list[tuple[int, ...]]] = {
    "rows": [(2, 3), (0, 3), (5, 3)],
    "every dimension": [(2, 3), (4, 1), (1, 1)],
    "numbers of dimensions": [(), (3,), (2, 2, 2)],
    "equal": [(2, 2), (2, 2), (2, 2)],
    "empty": [(0,), (0, 4), (0,)],
}


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shapes", list(SHAPES.values()), ids=list(SHAPES))
def test_gather_all_tensors(ranks: Ranks, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    xs = [(torch.randn(shape) * 3).to(dtype) for shape in shapes]
    for got, x in zip(ranks(3).run(lambda xs: ltx.gather_all_tensors(mine(xs)), xs).replicated(), xs, strict=True):
        assert (type(got), got.dtype) == (Tensor, x.dtype)
        assert torch.equal(got, x)


@pytest.mark.full
def test_gradients_flow_through_gather_all_tensors(ranks: Ranks) -> None:
    """Each rank weighs each tensor otherwise; a second derivative and a transform on the way."""
    xs = [torch.randn(shape, dtype=torch.float64) for shape in SHAPES["rows"]]

    def loss(x: Tensor) -> Tensor:
        rank = int(ltx.axis_index())
        gathered = ltx.gather_all_tensors(x.T)
        return sum(((rank + 2 * k + 1) * torch.sin(y)).sum() for k, y in enumerate(gathered))  # type: ignore[return-value]

    def run(xs: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x = mine(xs).requires_grad_()
        (plain,) = torch.autograd.grad(loss(x), x)
        hvp = torch.func.jvp(torch.func.grad(loss), (x,), (torch.ones_like(x),))[1]
        return torch.func.grad(loss)(x), plain, hvp

    for k, (by_func, plain, hvp) in enumerate(ranks(3).run(run, xs)):
        weight = sum(rank + 2 * k + 1 for rank in range(3))
        torch.testing.assert_close(by_func, weight * torch.cos(xs[k]))
        torch.testing.assert_close(plain, weight * torch.cos(xs[k]))
        torch.testing.assert_close(hvp, -weight * torch.sin(xs[k]))


@pytest.mark.parametrize("splits", [(1, 4, 0), (2, 2, 2), (0, 0, 3)], ids=str)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_all_gather_and_scatter(ranks: Ranks, splits: tuple[int, ...], dim: int) -> None:
    whole = torch.randn(sum(splits), 2, dtype=torch.float64).movedim(0, dim)
    bars = torch.randn(3, *whole.shape, dtype=torch.float64)

    def run() -> tuple[Tensor, ...]:
        rank, how = int(ltx.axis_index()), {"dim": dim, "tiled": True, "splits": splits}
        found, pull = torch.func.vjp(lambda x: ltx.all_gather(x, **how), whole.split(splits, dim)[rank])
        part, pull_part = torch.func.vjp(lambda x: ltx.psum_scatter(x, **how), bars[rank])
        return found, pull(bars[rank])[0], part, pull_part(part)[0]

    for rank, (found, bar, part, part_bar) in enumerate(ranks(3).run(run)):
        assert torch.equal(found, whole)
        own = bars.sum(0).split(splits, dim)[rank]
        torch.testing.assert_close((bar, part, part_bar), (own, own, bars.sum(0)))


@pytest.mark.parametrize("dim", [0, 1])
def test_all_to_all(ranks: Ranks, dim: int) -> None:
    """Row r of the table is how rank r splits; what it receives is column r, and gradients go back."""
    table = torch.randint(0, 4, (3, 3)).tolist()
    xs = [torch.randn(sum(row), 2, dtype=torch.float64).movedim(0, dim) for row in table]

    def run() -> tuple[Tensor, tuple[int, ...], Tensor]:
        rank = int(ltx.axis_index())
        (found, received) = ltx.all_to_all(xs[rank], dim, dim, splits=table[rank])
        grad = torch.func.grad(lambda x: (ltx.all_to_all(x, dim, dim, splits=table[rank])[0] ** 2).sum() / 2)(xs[rank])
        return found, received, grad

    for rank, (found, received, grad) in enumerate(ranks(3).run(run)):
        assert torch.equal(found, torch.cat([x.split(row, dim)[rank] for x, row in zip(xs, table, strict=True)], dim))
        assert received == tuple(row[rank] for row in table)
        torch.testing.assert_close(grad, xs[rank])


def test_alone() -> None:
    x = torch.randn(3, 2)
    assert torch.equal(ltx.gather_all_tensors(x)[0], x)
    assert torch.equal(ltx.all_gather(x, tiled=True, splits=[3]), x)
    assert torch.equal(ltx.psum_scatter(x, tiled=True, splits=[3]), x)
    found, received = ltx.all_to_all(x, 0, 0, splits=[3])
    assert torch.equal(found, x)
    assert received == (3,)


CALLS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "gather": (ltx.gather_all_tensors, "gather_all_tensors has no form under ltx.vmap"),
    "all_gather": (
        lambda x: ltx.all_gather(x, tiled=True, splits=[1, 1]),
        "all_gather(splits=) has no form under ltx.vmap",
    ),
    "scatter": (lambda x: ltx.psum_scatter(x, tiled=True, splits=[1, 1]), "has no form under ltx.vmap"),
    "all_to_all": (lambda x: ltx.all_to_all(x, 0, 0, splits=[1, 1]), "has no form under ltx.vmap"),
}


@pytest.mark.full(but=1)
@pytest.mark.parametrize("call", list(CALLS))
def test_no_simulated_and_no_compiled_form(call: str) -> None:
    fn, message = CALLS[call]
    assert message in said(AxisError, lambda: ltx.vmap(fn)(torch.ones(2, 2)))
    with pytest.raises(RuntimeError, match=r"UnsupportedError: .* can't be compiled"):  # Dynamo's wrapper around it
        torch.compile(fn, fullgraph=True, backend="eager")(torch.ones(2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ltx.all_gather(x, splits=[3]), "splits= needs tiled=True"),
        (lambda x: ltx.psum_scatter(x, splits=[3]), "splits= needs tiled=True"),
        (lambda x: ltx.all_gather(x, tiled=True, splits=[1, 2]), "splits must be 1 lengths, one for each rank"),
        (lambda x: ltx.all_gather(x, tiled=True, splits=[-1]), "got [-1]"),
        (
            lambda x: ltx.all_gather(x, tiled=True, splits=[2]),
            "part has length 3 along dimension 0, but splits[0] is 2",
        ),
        (lambda x: ltx.psum_scatter(x, tiled=True, splits=[2]), "splits [2] add up to 2, but dimension 0"),
        (lambda x: ltx.all_to_all(x, 1, 0, splits=[2]), "dim=1 is out of range"),
        (lambda x: ltx.all_to_all(x, 0, 0, tiled=False, splits=[3]), "needs tiled=True"),
    ],
)
def test_arguments(call: Callable[[Tensor], Any], message: str) -> None:
    assert message in said(AxisError, call, torch.ones(3))


#: name: (the call on a tensor of a length, a length that doesn't fit splits (3, 3) on rank 1, what is said of it)
MISFITS: dict[str, tuple[Callable[[int, tuple[int, ...]], Any], int, str]] = {
    "all_gather": (
        lambda length, splits: ltx.all_gather(torch.ones(length), tiled=True, splits=splits),
        4,
        "rank 1's part has length 4 along dimension 0, but splits[1] is 3",
    ),
    "psum_scatter": (
        lambda length, splits: ltx.psum_scatter(torch.ones(length), tiled=True, splits=splits),
        5,
        "splits [3, 3] add up to 6, but dimension 0 of a tensor of shape [5] has length 5",
    ),
    "all_to_all": (
        lambda length, splits: ltx.all_to_all(torch.ones(length), 0, 0, splits=splits),
        5,
        "splits [3, 3] add up to 6, but dimension 0 of a tensor of shape [5] has length 5",
    ),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("op", ["all_gather", "psum_scatter"])
@pytest.mark.parametrize("known", [False, True])
def test_splits_that_differ_between_ranks(on_new_axis: OnNewAxis, op: str, known: bool) -> None:
    """Padded to the same length they would pair, and rank 1 would take padding for data."""

    def run() -> str:
        rank = int(ltx.axis_index())
        choices = [(1, 3), (2, 3)] if op == "all_gather" else [(1, 3), (3, 1)]
        calls = [(splits[rank] if op == "all_gather" else sum(splits), splits) for splits in choices]
        if known:
            for fits in calls:
                MISFITS[op][0](*fits)
        return said(RankMismatchError, MISFITS[op][0], *calls[rank])

    found = list(on_new_axis(run))
    assert all(op in text for text in found)
    assert known or all("splits [1, 3]" in text for text in found)


@pytest.mark.full(but=2)
@pytest.mark.parametrize("op", MISFITS)
@pytest.mark.parametrize("known", [False, True])
def test_a_tensor_that_does_not_fit_raises_on_all_ranks(on_new_axis: OnNewAxis, op: str, known: bool) -> None:
    """At once, and the same error; also if the peers have met these splits before and don't ask again."""
    call, wrong, problem = MISFITS[op]
    right = 3 if op == "all_gather" else 6

    def run() -> str:
        if known:
            call(right, (3, 3))
        return said(RankMismatchError, call, wrong if ltx.axis_index() else right, (3, 3))

    text = on_new_axis(run).replicated()
    assert f"ranks disagree on {op}, its arguments: rank 0: splits [3, 3]; rank 1: {problem}" in text


@on_ranks(2)
def test_what_fits_on_no_rank() -> None:
    """The same error of one's own everywhere, each time; then the axis works."""
    found = [said(AxisError, MISFITS[op][0], 5, (3, 3)) for op in ("psum_scatter", "all_to_all", "psum_scatter")]
    with pytest.raises(RankMismatchError, match=r"rank 0's part has length 1 .*rank 1's part has length 1"):
        MISFITS["all_gather"][0](1, (2, 3))
    with pytest.raises(RankMismatchError, match=r"rank 0: splits must be 2 lengths.*rank 1: splits"):
        MISFITS["all_gather"][0](2, (2,) if ltx.axis_index() == 0 else (2, 2))
    found.append(str(MISFITS["all_gather"][0](1, (1, 1)).tolist()))

    *texts, last = found
    assert all("splits [3, 3] add up to 6" in text for text in texts)
    assert last == "[1.0, 1.0]"


@on_ranks(2)
def test_all_to_all_nobody_raises_alone() -> None:
    rank, raises = int(ltx.axis_index()), (RankMismatchError, AxisError)
    # Rank 1's splits don't add up; then only rank 0 receives chunks of unequal lengths.
    text = said(raises, ltx.all_to_all, torch.ones(4, 2), 0, 0, splits=[2, 2 + rank])
    assert "rank 0: splits [2, 2]; rank 1: splits [2, 3] add up to 5" in text
    text = said(raises, ltx.all_to_all, torch.ones(4, 2), 0, 1, splits=[1 + rank, 3 - rank])
    assert "can't be concatenated" in text


def _ragged(n: int, lengths: list[list[int]], dim: int) -> list[dict[str, Tensor]]:
    """By rank a tree of two leaves, of these lengths along `dim`."""
    return [
        {
            name: torch.randn(length, *shape, dtype=torch.float64).movedim(0, dim)
            for (name, shape), length in zip({"a": (2,), "b": (2, 3)}.items(), lengths[rank], strict=True)
        }
        for rank in range(n)
    ]


@pytest.mark.parametrize("lengths", [[[2, 0], [0, 5], [3, 1]], [[2, 2]] * 3, [[0, 0]] * 3], ids=str)
@pytest.mark.parametrize("dim", [0, -1])
def test_all_gather_infers_lengths(ranks: Ranks, lengths: list[list[int]], dim: int, seed: int) -> None:
    """Values, the transpose, and a second derivative; two calls in a row, of other lengths."""
    trees = _ragged(3, lengths, dim)
    wholes = {name: torch.cat([one[name] for one in trees], dim) for name in ("a", "b")}
    bars = [{name: torch.randn_like(whole) for name, whole in wholes.items()} for _ in range(3)]

    def gather(x: Any) -> Any:
        return ltx.all_gather(x, dim=dim, tiled=True, splits="infer")

    def run() -> tuple[Any, Any, Any, Any]:
        rank = int(ltx.axis_index())
        found, pull = torch.func.vjp(gather, trees[rank])

        def loss(x: Any) -> Tensor:
            return sum((y.sin() * bar).sum() for y, bar in zip(gather(x).values(), bars[rank].values(), strict=True))  # type: ignore[return-value]

        hvp = torch.func.jvp(torch.func.grad(loss), (trees[rank],), (trees[rank],))[1]
        one_more = gather(ltx.tree.map(lambda x: torch.cat([x, x], dim), trees[rank]))
        return found, pull(bars[rank])[0], hvp, one_more

    for rank, (found, bar, hvp, one_more) in enumerate(ranks(3).run(run)):
        assert all(torch.equal(found[name], wholes[name]) for name in wholes)
        for name, whole in wholes.items():
            splits = [one[name].shape[dim] for one in trees]
            total = sum(of_rank[name] for of_rank in bars)
            torch.testing.assert_close(bar[name], total.split(splits, dim)[rank])
            torch.testing.assert_close(hvp[name], (-total * whole.sin() * whole).split(splits, dim)[rank])
            assert torch.equal(one_more[name], torch.cat([torch.cat([one[name]] * 2, dim) for one in trees], dim))


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint16, torch.float8_e5m2, torch.bfloat16, torch.complex64], ids=str
)
def test_inferred_dtypes(ranks: Ranks, dtype: torch.dtype) -> None:
    xs = [(torch.randn(length, 2).abs() * 3).to(dtype) for length in (3, 0, 2)]
    found = ranks(3).run(lambda: ltx.all_gather(mine(xs), tiled=True, splits="infer")).replicated()
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), torch.cat([x.view(torch.uint8) for x in xs]))


@on_ranks(2)
def test_what_inferring_sends() -> None:
    """The lengths of all leaves in one message, and then no more comparing: the shapes follow from them."""

    def call(length: int) -> None:
        ltx.all_gather([torch.ones(length, 7), torch.ones(1)], tiled=True, splits="infer")

    call(1)
    user = inside.resolve("data").comm.user
    compared = user.compared
    with ltx.profile.record() as trace:
        call(5 + int(ltx.axis_index()))
    labels = ['all_gather(splits="infer"): lengths', "all_gather", "all_gather"]
    assert [(event.operation, event.label) for event in trace.events] == [("all_gather", label) for label in labels]
    assert user.compared == compared


@on_ranks(2)
def test_inferred_under_vmap_and_in_groups() -> None:
    parts = [torch.arange(3.0 * (1 + rank)).view(3, 1 + rank) for rank in range(2)]
    batched = torch.vmap(lambda x: ltx.all_gather(x, tiled=True, splits="infer"))(mine(parts))
    assert torch.equal(batched, torch.cat(parts, 1))
    turned = ltx.all_gather(mine(parts).T, tiled=True, splits="infer", axis_index_groups=[[1, 0]])
    assert torch.equal(turned, torch.cat(parts[::-1], 1).T)


@pytest.mark.parametrize("lengths", [[3, 7], [4, 0], [1, 1]], ids=str)
def test_psum_scatter_and_all_to_all_infer(ranks: Ranks, lengths: list[int], seed: int) -> None:
    """As equal as can be, as torch.tensor_split; Horovod's reducescatter has it so too."""
    xs = [torch.randn(length, 2, dtype=torch.float64) for length in lengths]
    whole = torch.randn(2, lengths[0], 2, dtype=torch.float64)

    def run() -> tuple[Any, ...]:
        rank = int(ltx.axis_index())
        scattered, pull = torch.func.vjp(lambda x: ltx.psum_scatter(x, tiled=True, splits="infer"), whole[rank])
        exchanged, received = ltx.all_to_all(xs[rank], 0, 0, splits="infer")
        grad = torch.func.grad(lambda x: ltx.all_to_all(x, 0, 0, splits="infer")[0].square().sum() / 2)(xs[rank])
        return scattered, pull(scattered)[0], exchanged, received, grad

    for rank, (scattered, bar, exchanged, received, grad) in enumerate(ranks(2).run(run)):
        torch.testing.assert_close(scattered, whole.sum(0).tensor_split(2)[rank])
        torch.testing.assert_close(bar, whole.sum(0))
        chunks = [x.tensor_split(2)[rank] for x in xs]
        assert torch.equal(exchanged, torch.cat(chunks))
        assert received == tuple(map(len, chunks))
        torch.testing.assert_close(grad, xs[rank])


def test_inferred_alone_and_simulated(seed: int) -> None:
    x = torch.randn(3, 2)
    assert torch.equal(ltx.all_gather(x, tiled=True, splits="infer"), x)
    assert torch.equal(ltx.psum_scatter(x, tiled=True, splits="infer"), x)
    assert ltx.all_to_all(x, 0, 0, splits="infer")[1] == (3,)
    xs = torch.randn(2, 4, 2)
    assert torch.equal(ltx.vmap(lambda x: ltx.all_gather(x, tiled=True, splits="infer"))(xs)[1], xs.flatten(0, 1))
    scattered = ltx.vmap(lambda x: ltx.psum_scatter(x, tiled=True, splits="infer"))(xs)
    torch.testing.assert_close(scattered, torch.stack(xs.sum(0).chunk(2)))
    received: list[Any] = []

    def exchanged(x: Tensor) -> Tensor:
        y, lengths = ltx.all_to_all(x, 0, 0, splits="infer")
        received.append(lengths)
        return y

    assert torch.equal(ltx.vmap(exchanged)(xs), ltx.vmap(lambda x: ltx.all_to_all(x, 0, 0))(xs))
    assert received == [(2, 2)]
    with pytest.raises(AxisError, match="must be a multiple of 2, got 3"):
        ltx.vmap(lambda x: ltx.psum_scatter(x, tiled=True, splits="infer"))(torch.ones(2, 3))
    with pytest.raises(RuntimeError, match=r"UnsupportedError: all_gather\(splits=.infer.\) can't be compiled"):
        torch.compile(lambda x: ltx.all_gather(x, tiled=True, splits="infer"), fullgraph=True, backend="eager")(x)


def test_only_some_ranks_infer(on_new_axis: OnNewAxis) -> None:
    """Whichever has seen what before: an error on all ranks, never a hang."""

    def run() -> list[str]:
        rank, found, x = int(ltx.axis_index()), [], torch.ones(3)
        for splits in ("infer", [3, 3], "infer"):
            found.append(said(RankMismatchError, ltx.all_gather, x, tiled=True, splits=splits if rank else None))
            if len(found) == 2:
                ltx.all_gather(x, tiled=True)  # known to rank 0 from now on
        return found

    first, second = on_new_axis(run)
    assert first == second
    assert 'the operation: rank 0: all_gather; rank 1: all_gather(splits="infer").' in first[0]
    assert "all_gather" in first[1]
    assert 'rank 1: all_gather(splits="infer")' in first[2]


def test_both_known(on_new_axis: OnNewAxis) -> None:
    def run() -> str:
        x = torch.ones(3)
        ltx.all_gather(x, tiled=True, splits="infer")
        ltx.all_gather(x, tiled=True)
        return said(RankMismatchError, ltx.all_gather, x, tiled=True, splits="infer" if ltx.axis_index() else None)

    assert all("a peer has issued another collective here" in text for text in on_new_axis(run))


@on_ranks(2)
def test_what_can_not_be_inferred() -> None:
    rank, infer = int(ltx.axis_index()), {"tiled": True, "splits": "infer"}
    given = {"w": torch.ones(2) if rank else torch.tensor(1.0)}
    refuses(RankMismatchError, r"rank 0: float32\[\]; rank 1: float32\[any\]", ltx.all_gather, given, **infer)
    text = r"all_gather: dim=0 is out of range for a tensor of shape \[\]"
    refuses(AxisError, text, ltx.all_gather, torch.tensor(1.0), **infer)
    hint = said(RankMismatchError, ltx.all_gather, torch.ones(17 + rank), tiled=True)
    assert hint.endswith('shapes and dtypes; ltx.all_gather(x, tiled=True, splits="infer") takes unequal lengths.')
