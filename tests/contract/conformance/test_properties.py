"""Properties of every collective, on inputs that hypothesis draws: trees, shapes, dims, strides and dtypes.

Values are small whole numbers, so that sums and products are exact in every dtype and results can be compared exactly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optree
import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import ltx
from tests.contract.conformance.table import everywhere
from tests.kinds import Ranks

Arguments = dict[str, Any]

# Fresh inputs at every run, in CI too; what fails is printed with the blob that repeats it. No deadline, as the first
# call of an operation imports and compiles things.
FRESH = settings(
    database=None,
    deadline=None,
    derandomize=False,
    print_blob=True,
    max_examples=10,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
ALL_DTYPES = (torch.bool, *INTEGERS, *FLOATS, *COMPLEX)
REAL_DTYPES = (torch.bool, *INTEGERS, *FLOATS)


@dataclass(frozen=True)
class Op:
    """One collective.

    Attributes:
        call: ``(tree, **arguments)`` on one rank.
        reference: ``(stack of all ranks' tensors, **arguments)`` gives the stack of what the ranks get.
        arguments: a strategy of arguments for n ranks and tensors of at least so many dimensions.
        fitted: ``(draw, shape, n, arguments)`` gives a shape that the arguments fit.
        least_dims: fewer make no sense.
        dtypes: that it works on.
        linear: the transpose identity holds.
    """

    call: Callable[..., Any]
    reference: Callable[..., Tensor]
    arguments: Callable[[int, int], st.SearchStrategy[Arguments]] = lambda n, dims: st.just({})
    fitted: Callable[[Any, list[int], int, Arguments], list[int]] = lambda draw, shape, n, arguments: shape
    least_dims: int = 0
    dtypes: tuple[torch.dtype, ...] = ALL_DTYPES
    linear: bool = True


def _sum(xs: Tensor) -> Tensor:
    return xs.sum(0, dtype=torch.int64 if xs.dtype == torch.bool else xs.dtype)


def _extremum(which: str) -> Callable[..., Tensor]:
    def reference(xs: Tensor) -> Tensor:
        if xs.dtype == torch.bool:
            return everywhere(xs.any(0) if which == "amax" else xs.all(0), len(xs))
        return everywhere(getattr(xs, which)(0), len(xs))

    return reference


def _gathered(xs: Tensor, dim: int, tiled: bool) -> Tensor:
    parts = list(xs)
    return everywhere(torch.cat(parts, dim) if tiled else torch.stack(parts, dim), len(xs))


def _scattered(xs: Tensor, dim: int, tiled: bool) -> Tensor:
    total = _sum(xs)
    return torch.stack(list(total.tensor_split(len(xs), dim) if tiled else total.unbind(dim)))


def _exchanged(xs: Tensor, split_dim: int, concat_dim: int) -> Tensor:
    parts = [x.tensor_split(len(xs), split_dim) for x in xs]
    return torch.stack([torch.cat(mine, concat_dim) for mine in zip(*parts, strict=True)])


def _permuted(xs: Tensor, perm: list[tuple[int, int]]) -> Tensor:
    sources = {destination: source for source, destination in perm}
    return torch.stack([xs[sources[r]] if r in sources else torch.zeros_like(xs[0]) for r in range(len(xs))])


def _reduced(xs: Tensor, op: str | None, keep_dtype: bool) -> Tensor:
    n = len(xs)
    match op:
        case None | "sum":
            return everywhere(_sum(xs), n)
        case "mean" | "avg":
            truncates = keep_dtype and xs.dtype not in FLOATS + COMPLEX
            mean = torch.div(_sum(xs), n, rounding_mode="trunc").to(xs.dtype) if truncates else _sum(xs) / n
            return everywhere(mean, n)
        case "min" | "max":
            return _extremum(f"a{op}")(xs)
        case "product":
            return everywhere(xs.prod(0, dtype=torch.int64 if xs.dtype is torch.bool else xs.dtype), n)
        case _:
            bits = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}[op]
            return everywhere(functools.reduce(bits, xs.unbind(0)), n)


def _at(y: Tensor, rank: int, n: int) -> Tensor:
    """What `rank` has; the others have zeros."""
    return torch.stack([y if r == rank else torch.zeros_like(y) for r in range(n)])


def _dims(dims: int) -> st.SearchStrategy[int]:
    return st.integers(-dims, dims - 1)


def _gather_arguments(n: int, dims: int) -> st.SearchStrategy[Arguments]:
    stacked = st.fixed_dictionaries({"dim": _dims(dims + 1), "tiled": st.just(False)})
    return stacked | st.fixed_dictionaries({"dim": _dims(dims), "tiled": st.just(True)}) if dims else stacked


def _cut_arguments(n: int, dims: int) -> st.SearchStrategy[Arguments]:
    return st.fixed_dictionaries({"dim": _dims(dims), "tiled": st.booleans()})


def _with_rank(
    name: str, others: Callable[[int, int], st.SearchStrategy[Arguments]] = lambda n, dims: st.just({})
) -> Callable[[int, int], st.SearchStrategy[Arguments]]:
    return lambda n, dims: st.builds(lambda rank, rest: {name: rank, **rest}, st.integers(0, n - 1), others(n, dims))


def _scatter_shape(draw: Any, shape: list[int], n: int, arguments: Arguments) -> list[int]:
    shape[arguments["dim"]] = n * draw(st.integers(0, 2)) if arguments["tiled"] else n
    return shape


def _exchange_shape(draw: Any, shape: list[int], n: int, arguments: Arguments) -> list[int]:
    shape[arguments["split_dim"]] = n * draw(st.integers(0, 2))
    return shape


@st.composite
def _perms(draw: Any, n: int) -> Arguments:
    count = draw(st.integers(0, n))
    sources, destinations = (draw(st.permutations(range(n)))[:count] for _ in range(2))
    return {"perm": list(zip(sources, destinations, strict=True))}


def _reduce_op(ops: tuple[str | None, ...]) -> Callable[[int, int], st.SearchStrategy[Arguments]]:
    return lambda n, dims: st.fixed_dictionaries({"op": st.sampled_from(ops), "keep_dtype": st.booleans()})


OPS: dict[str, Op] = {
    "psum": Op(ltx.psum, lambda xs: everywhere(_sum(xs), len(xs))),
    "pmean": Op(ltx.pmean, lambda xs: everywhere(_sum(xs) / len(xs), len(xs))),
    "pvary": Op(ltx.pvary, lambda xs: xs),
    "pmax": Op(ltx.pmax, _extremum("amax"), dtypes=REAL_DTYPES, linear=False),
    "pmin": Op(ltx.pmin, _extremum("amin"), dtypes=REAL_DTYPES, linear=False),
    "all_gather": Op(ltx.all_gather, _gathered, _gather_arguments),
    "psum_scatter": Op(ltx.psum_scatter, _scattered, _cut_arguments, _scatter_shape, least_dims=1),
    "broadcast": Op(ltx.broadcast, lambda xs, src: everywhere(xs[src], len(xs)), _with_rank("src")),
    "psum_to": Op(ltx.psum_to, lambda xs, dst: _at(_sum(xs), dst, len(xs)), _with_rank("dst")),
    "gather": Op(
        ltx.gather,
        lambda xs, dst, **how: _at(_gathered(xs, **how)[0], dst, len(xs)),
        _with_rank("dst", _gather_arguments),
    ),
    "scatter": Op(
        ltx.scatter,
        lambda xs, src, dim, tiled: torch.stack(xs[src].tensor_split(len(xs), dim) if tiled else xs[src].unbind(dim)),
        _with_rank("src", _cut_arguments),
        _scatter_shape,
        least_dims=1,
    ),
    "weighted_mean": Op(
        lambda tree, **named: ltx.weighted_mean(tree, 2, **named),
        lambda xs: everywhere(xs.double().mean(0).to(xs.dtype if xs.is_floating_point() else torch.float32), len(xs)),
        dtypes=REAL_DTYPES,
    ),
    "all_to_all": Op(
        ltx.all_to_all,
        _exchanged,
        lambda n, dims: st.fixed_dictionaries({"split_dim": _dims(dims), "concat_dim": _dims(dims)}),
        _exchange_shape,
        least_dims=1,
    ),
    "ppermute": Op(ltx.ppermute, _permuted, lambda n, dims: _perms(n)),
    "reduce linear": Op(ltx.reduce, _reduced, _reduce_op((None, "sum", "mean", "avg"))),
    "reduce": Op(ltx.reduce, _reduced, _reduce_op(("min", "max", "product")), dtypes=REAL_DTYPES, linear=False),
    "reduce bits": Op(
        ltx.reduce, _reduced, _reduce_op(("band", "bor", "bxor")), dtypes=(torch.bool, *INTEGERS), linear=False
    ),
}
DIFFERENTIABLE = [name for name in OPS if name != "reduce bits"]


def fixed(name: str, **arguments: Any) -> tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]:
    """A collective of these arguments: what one rank calls, and the same on the stack of all ranks' tensors."""
    op = OPS[name]
    return functools.partial(op.call, **arguments), functools.partial(op.reference, **arguments)


def each_fixed(n: int, dim: int) -> dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]]:
    """Each collective of `n` ranks, along `dim`; one rank of them is the last one. Its line of ranks is open."""
    return {
        **{name: fixed(name) for name in ("psum", "pmean", "pmax", "pmin", "pvary", "weighted_mean")},
        "all_gather": fixed("all_gather", dim=dim, tiled=False),
        "all_gather tiled": fixed("all_gather", dim=dim, tiled=True),
        "psum_scatter": fixed("psum_scatter", dim=dim, tiled=True),
        "broadcast": fixed("broadcast", src=n - 1),
        "psum_to": fixed("psum_to", dst=n - 1),
        "gather": fixed("gather", dst=n - 1, dim=dim, tiled=True),
        "scatter": fixed("scatter", src=n - 1, dim=dim, tiled=True),
        "all_to_all": fixed("all_to_all", split_dim=0, concat_dim=dim),
        "ppermute": fixed("ppermute", perm=[(rank, rank + 1) for rank in range(n - 1)]),
        "reduce": fixed("reduce", op="product", keep_dtype=False),
    }


@dataclass(frozen=True)
class Example:
    """A call of a collective by n ranks; `stacked` is the tree of all ranks' tensors, ranks in front."""

    op: str
    n: int
    arguments: Arguments
    stacked: Any


def _numbers(shape: list[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Whole numbers whose products over four ranks fit every dtype."""
    low = 0 if dtype in (torch.bool, torch.uint8) else -3
    high = 2 if dtype == torch.bool else 4
    draw = torch.Generator().manual_seed(seed)
    numbers = torch.randint(low, high, shape, generator=draw)
    if dtype in COMPLEX:
        return torch.complex(numbers.double(), torch.randint(low, high, shape, generator=draw).double()).to(dtype)
    return numbers.to(dtype)


def _strided(kind: str, numbers: Tensor) -> Tensor:
    """The same numbers, lying otherwise in memory; "expanded" repeats the first along the last dimension."""
    match kind:
        case "transposed":
            return numbers.movedim(0, -1).contiguous().movedim(-1, 0).mT if numbers.ndim > 2 else numbers
        case "sliced":
            return torch.stack([numbers, numbers], -1)[..., 1]
        case "offset":
            return torch.cat([numbers.new_zeros(7), numbers.reshape(-1)])[7:].view(numbers.shape)
        case "expanded" if numbers.ndim > 1 and numbers.shape[-1]:
            return numbers[..., :1].expand(numbers.shape)
    return numbers


@st.composite
def examples(draw: Any, name: str, n: int | None = None, dtypes: tuple[torch.dtype, ...] | None = None) -> Example:
    op = OPS[name]
    size = draw(st.integers(1, 4)) if n is None else n
    least = draw(st.integers(op.least_dims, 3))
    arguments = draw(op.arguments(size, least))
    # Trees of one tensor many times over, as they come; arguments fit each leaf.
    exact_dims = "concat_dim" in arguments or "dim" in arguments

    @st.composite
    def leaves(draw: Any) -> Tensor:
        dims = least if exact_dims and draw(st.booleans()) else draw(st.integers(least, 3))
        shape = op.fitted(draw, draw(st.lists(st.integers(0, 4), min_size=dims, max_size=dims)), size, arguments)
        kind = draw(st.sampled_from(["contiguous", "transposed", "sliced", "offset", "expanded"]))
        swapped = kind == "transposed" and len(shape) > 1  # by _strided, which swaps the last two
        flipped = [*shape[:-2], shape[-1], shape[-2]] if swapped else shape
        numbers = _numbers([size, *flipped], draw(st.sampled_from(dtypes or op.dtypes)), draw(st.integers(0, 2**31)))
        return _strided(kind, numbers)

    trees = st.recursive(
        leaves(),
        lambda inner: st.one_of(
            st.lists(inner, max_size=2),
            st.tuples(inner, st.none()),
            st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        ),
        max_leaves=4,
    )
    return Example(name, size, arguments, draw(trees))


def _same(got: Any, want: Any) -> None:
    assert optree.tree_structure(got) == optree.tree_structure(want)
    for a, b in zip(optree.tree_leaves(got), optree.tree_leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert torch.equal(a, b), (a, b)


def _simulated(example: Example, stacked: Any) -> Any:
    call = functools.partial(OPS[example.op].call, **example.arguments)
    return ltx.vmap(lambda _, tree: call(tree))(torch.arange(example.n), stacked)


def _expected(example: Example) -> Any:
    return optree.tree_map(lambda xs: OPS[example.op].reference(xs, **example.arguments), example.stacked)


def _memory(tree: Any) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in optree.tree_leaves(tree)} - {0}


@pytest.mark.full(but=2)
@pytest.mark.parametrize("name", OPS)
@given(data=st.data())
@FRESH
def test_simulated_ranks_give_what_torch_gives(name: str, data: st.DataObject) -> None:
    """The value; inputs as they were; memory of its own; whatever the strides."""
    example = data.draw(examples(name))
    before = optree.tree_map(torch.clone, example.stacked)
    versions = [x._version for x in optree.tree_leaves(example.stacked)]
    got = _simulated(example, example.stacked)
    _same(got, _expected(example))
    _same(example.stacked, before)
    assert [x._version for x in optree.tree_leaves(example.stacked)] == versions
    if name != "pvary":  # the identity: a view
        assert not _memory(got) & _memory(example.stacked)
    _same(_simulated(example, optree.tree_map(torch.Tensor.contiguous, before)), got)


@pytest.mark.full(but=2)
@pytest.mark.parametrize("name", OPS)
@given(data=st.data())
@FRESH
def test_a_world_of_one_is_one_simulated_rank(name: str, data: st.DataObject) -> None:
    example = data.draw(examples(name, n=1))
    mine = optree.tree_map(lambda xs: xs[0], example.stacked)
    before = optree.tree_map(torch.clone, mine)
    got = OPS[name].call(mine, **example.arguments)
    _same(optree.tree_map(lambda y: y.unsqueeze(0), got), _expected(example))
    _same(mine, before)
    if name != "pvary":
        assert not _memory(got) & _memory(mine)


@pytest.mark.full(but=2)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
@given(data=st.data())
@FRESH
def test_cotangents(name: str, data: st.DataObject) -> None:
    """Those of plain torch on the stack; and for linear ones sum_r <ȳ_r, (A x)_r> = sum_r <(A^T ȳ)_r, x_r>."""
    example = data.draw(examples(name, dtypes=(torch.float64,)))
    op, seed = OPS[name], data.draw(st.integers(0, 2**31))
    if name == "pvary":  # takes one value that all ranks share, which counts once
        example = Example(
            name, example.n, {}, optree.tree_map(lambda xs: xs[:1].expand_as(xs).contiguous(), example.stacked)
        )
    xs, spec = optree.tree_flatten(example.stacked)
    assume(xs)  # torch.func.vjp refuses functions without output
    expected = optree.tree_leaves(_expected(example))
    bars = [_numbers(list(y.shape), torch.float64, seed) for y in expected]

    def call(xs: list[Tensor]) -> list[Tensor]:
        return optree.tree_leaves(op.call(optree.tree_unflatten(spec, xs), **example.arguments))

    def pulled(_: Tensor, xs: list[Tensor], y_bars: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        ys, pull = torch.func.vjp(call, xs)
        return ys, pull(y_bars)[0]

    ys, x_bars = ltx.vmap(pulled)(torch.arange(example.n), xs, bars)
    _same(ys, expected)
    for x, y, y_bar, x_bar in zip(xs, ys, bars, x_bars, strict=True):
        _, pull = torch.func.vjp(functools.partial(op.reference, **example.arguments), x)
        (want,) = pull(y_bar)
        torch.testing.assert_close(x_bar, everywhere(want.sum(0), example.n) if name == "pvary" else want)
        if op.linear:
            torch.testing.assert_close((y_bar * y).sum(), ((x_bar * x)[:1] if name == "pvary" else x_bar * x).sum())


def _own_way(tree: Any, rank: int) -> Any:
    """The same tree on a rank that has built its dicts in the other order and keeps its tensors contiguous."""
    if rank % 2 == 0:
        return tree
    if isinstance(tree, dict):
        return {key: _own_way(tree[key], rank) for key in reversed(tree)}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_own_way(entry, rank) for entry in tree)
    return tree.contiguous() if isinstance(tree, Tensor) else tree


def _on_rank(calls: list[tuple[str, Arguments, Any]]) -> list[tuple[Any, bool]]:
    """The results; and whether they are plain tensors, and inputs were left alone and share no memory with them."""
    found = []
    rank = int(ltx.axis_index())
    for name, arguments, stacked in calls:
        mine = _own_way(optree.tree_map(lambda xs: xs[rank], stacked), rank)
        before = [x.clone() for x in optree.tree_leaves(mine)]
        got = OPS[name].call(mine, **arguments)
        pure = all(map(torch.equal, optree.tree_leaves(mine), before))
        pure &= all(type(y) is Tensor for y in optree.tree_leaves(got))
        found.append((got, pure and (name == "pvary" or not _memory(got) & _memory(mine))))
    return found


@given(drawn=st.lists(st.sampled_from(list(OPS)).flatmap(lambda name: examples(name, n=2)), min_size=40, max_size=40))
# Not shrunk, as each attempt is a run of all; the simulated ranks' tests shrink. The first of the two is the simplest.
@settings(FRESH, max_examples=2, phases=[Phase.generate])
def test_processes_give_what_simulated_ranks_give(ranks: Ranks, drawn: list[Example]) -> None:
    # Strides survive the way to the workers.
    by_rank = ranks(2).run(_on_rank, [(e.op, e.arguments, e.stacked) for e in drawn])
    for example, *found in zip(drawn, *by_rank, strict=True):
        assert all(pure for _, pure in found), example
        got = optree.tree_map(lambda *ys: torch.stack(ys), *(value for value, _ in found))
        _same(got, _simulated(example, example.stacked))


#: So many ranks are simulated.
N = 256
#: A rank's tensor has shape (2 * N,) if it is split, else (6,).
OF_MANY = each_fixed(N, dim=0)


@pytest.mark.parametrize("name", OF_MANY, ids=lambda name: name.replace(" ", "_"))
def test_many_ranks(name: str, seed: int) -> None:
    """Values, and gradients of a loss that weighs rank r by r + 1."""
    op, reference = OF_MANY[name]
    xs = torch.randn(N, 2 * N if name in ("psum_scatter", "scatter", "all_to_all") else 6, dtype=torch.float64)
    if name == "reduce":
        xs = 1 + xs / N  # so that products stay away from 0
    grads, values = ltx.vmap(
        torch.func.grad_and_value(
            lambda x: (lambda y: ((1 + ltx.axis_index()) * y.sin().sum(), y))(op(x)), has_aux=True
        )
    )(xs)
    torch.testing.assert_close(values[1], reference(xs))
    weights = torch.arange(1, N + 1, dtype=torch.float64)
    want = torch.func.grad(lambda xs: (weights * reference(xs).sin().flatten(1).sum(1)).sum())(xs)
    torch.testing.assert_close(grads, want.sum(0).expand_as(want) if name == "pvary" else want)


def _loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return (torch.tanh(x @ params["w"]) @ params["v"] - y).square().mean()


def test_step_with_gradients_in_bfloat16(seed: int) -> None:
    """Each share is rounded, then they are added up; at most 256 roundings of 2^-8 of the shares' magnitudes."""
    params = {"w": torch.randn(3, 5).double(), "v": torch.randn(5, 2).double()}
    xs, ys = torch.randn(N, 4, 3).double(), torch.randn(N, 4, 2).double()
    each = torch.vmap(torch.func.grad(_loss), in_dims=(None, 0, 0))(params, xs, ys)
    step = ltx.data_parallel(_loss, ltx.DDPStrategy(comm_hook="bf16"))
    got = ltx.vmap(torch.func.grad(step), in_dims=(None, 0, 0))(params, xs, ys)
    for name, grads in each.items():
        assert torch.equal(got[name], everywhere(got[name][0], N)), "ranks differ"
        bound = 2**-8 * ((grads / N).abs().sum(0) + grads.mean(0).abs()) + 1e-12
        error = (got[name][0] - grads.mean(0)).abs()
        assert (error > 0).any(), "nothing was rounded"
        assert (error <= bound).all(), (error / bound).max()
