"""ltx.vmap's arguments and results; and axes over parts of an axis, on processes and simulated ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import ltx
from ltx import hooks
from ltx.errors import AxisError, TreeError, UnsupportedError
from ltx.extend import exchange, inner, outer
from ltx.hooks import BucketInput, CollectiveRequest, Reduction
from ltx.strategies import StepInfo
from tests import train_on
from tests.inside import find
from tests.kinds import Ranks
from tests.train_on import on_ranks, refuses, said

XS = torch.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize(
    ("in_dims", "args", "expected"),
    [
        (0, (XS,), XS.sum(0).expand(2, 3)),
        (1, (XS,), XS.sum(1).expand(3, 2)),
        (-1, (XS,), XS.sum(1).expand(3, 2)),
        ((0,), (XS,), XS.sum(0).expand(2, 3)),
    ],
)
def test_in_dims(in_dims: Any, args: Any, expected: Tensor) -> None:
    assert torch.equal(ltx.vmap(ltx.psum, in_dims=in_dims)(*args), expected)


def test_in_dims_of_several_arguments() -> None:
    given = torch.tensor(2.0), torch.tensor([1.0, 2.0]), torch.tensor([[10.0, 20.0]])
    assert ltx.vmap(lambda a, b, c: ltx.psum(a * b) + c, in_dims=(None, 0, 1))(*given).tolist() == [[16.0], [26.0]]


def test_in_dims_as_prefixes_of_trees() -> None:
    batch = {"x": [XS, 2 * XS], "y": torch.tensor(1.0), "t": (XS.T,), "name": "kept"}
    in_dims = ({"x": 0, "y": None, "t": (1,), "name": None}, None)

    def f(batch: dict[str, Any], extra: dict[str, Any]) -> Any:
        assert (batch["name"], extra) == ("kept", {"n": None, "flag": True})
        assert [x.shape for x in (*batch["x"], *batch["t"])] == [(3,)] * 3
        return ltx.psum(batch["x"][1] + batch["t"][0]) + batch["y"]

    assert torch.equal(ltx.vmap(f, in_dims=in_dims)(batch, {"n": None, "flag": True}), (3 * XS.sum(0) + 1).expand(2, 3))


@pytest.mark.parametrize("out_dims", [0, 1, -1])
def test_out_dims(out_dims: int) -> None:
    got = ltx.vmap(lambda x: {"a": x, "same": ltx.psum(x)}, out_dims=out_dims)(XS)
    assert torch.equal(got["a"], XS.movedim(0, out_dims))
    assert torch.equal(got["same"], XS.sum(0).expand(2, 3).movedim(0, out_dims))


def test_out_dims_for_each_output() -> None:
    got = ltx.vmap(lambda x: {"a": x, "b": [2 * x, ltx.psum(x)]}, out_dims={"a": 1, "b": [0, None]})(XS)
    assert torch.equal(got["a"], XS.T)
    assert torch.equal(got["b"][0], 2 * XS)
    assert torch.equal(got["b"][1], XS.sum(0))
    total, same = ltx.vmap(lambda x: (ltx.psum(x), torch.ones(2)), out_dims=None)(XS)
    assert torch.equal(total, XS.sum(0))
    assert torch.equal(same, torch.ones(2))
    nested = ltx.vmap(ltx.vmap(lambda x: ltx.psum(x, "inner"), out_dims=None, axis_name="inner"), axis_name="outer")
    assert torch.equal(nested(XS), XS.sum(1))
    sums = torch.vmap(ltx.vmap(ltx.psum, out_dims=None))(XS)  # of ranks in a batch
    assert torch.equal(sums, XS.sum(1))


@pytest.mark.parametrize(
    ("out_dims", "text"),
    [
        ((0, None), "out_dims=None: the output '1' differs between ranks. Give it a dimension"),
        ((0, 5), "out_dims=5 is out of range for an output of 2 dimensions"),
        ((0,), "isn't a prefix of its output"),
        ("data", "out_dims must be an int, None or a tree of them, got 'data'"),
        ((0, 1.5), "out_dims must be an int, None or a tree of them, got 1.5"),
    ],
)
def test_out_dims_that_do_not_fit(out_dims: Any, text: str) -> None:
    assert text in said(AxisError, lambda: ltx.vmap(lambda x: (x, 2 * x), out_dims=out_dims)(XS))


def test_an_error_about_outputs_does_not_hold_all_of_them() -> None:
    with pytest.raises(AxisError, match="isn't a prefix of its output") as caught:
        ltx.vmap(lambda x: (x, torch.outer(torch.ones(1000), x)), out_dims=(0,))(XS)
    assert len(str(caught.value)) < 1000


def test_keyword_arguments_are_mapped_over_their_first_dimension() -> None:
    def f(x: torch.Tensor, *, scale: torch.Tensor, name: str = "") -> Any:
        return ltx.psum(x * scale), name

    scale = torch.tensor([1.0, 10.0])
    total, name = ltx.vmap(f, out_dims=None)(XS, scale=scale, name="n")
    assert torch.equal(total, (XS * scale[:, None]).sum(0))
    assert name == "n"
    assert ltx.vmap(lambda *, x: ltx.psum(x))(x=XS).shape == XS.shape
    assert torch.equal(ltx.vmap(lambda x, *, y: x + y, in_dims=(None,))(XS, y=scale)[1], XS + 10)
    refuses(AxisError, r"needs one size, got sizes \[2, 3\]", ltx.vmap(lambda x, y: x), XS, y=XS.T)


def test_chunks_are_refused() -> None:
    refuses(UnsupportedError, "ranks of one axis wait for each other", ltx.vmap, lambda x: x, chunk_size=2)
    said(TypeError, ltx.vmap, lambda x: x, 0, 0, "data")  # type: ignore[misc]


def test_outputs_that_are_no_tensors() -> None:
    assert ltx.vmap(lambda x: ("text", None, {"n": 3}))(XS) == ("text", None, {"n": 3})
    label, x, size = ltx.vmap(lambda x: ("text", x, ltx.axis_size()))(XS)
    assert (label, size) == ("text", 2)
    assert torch.equal(x, XS)


def test_an_output_in_which_tensors_are_out_of_sight() -> None:
    """They would hold all ranks' values, with a rank's shape, in a batch that has ended."""

    class Holds:
        def __init__(self, x: Tensor):
            self.x = x

    with pytest.raises(TreeError, match=r"axis 'data': the output: leaf 'a' is of type Holds, which holds tensors"):
        ltx.vmap(lambda x: {"a": Holds(x)})(torch.ones(2))


def test_no_mapped_argument_needs_a_size() -> None:
    assert ltx.vmap(lambda: ltx.axis_index(), axis_size=3)().tolist() == [0, 1, 2]
    assert ltx.vmap(lambda x: x + ltx.axis_index(), axis_size=2, in_dims=None)(torch.tensor(1)).tolist() == [1, 2]
    assert ltx.vmap(lambda n: ltx.psum(torch.ones(())) * n, axis_size=2)(5).tolist() == [10.0, 10.0]


@pytest.mark.parametrize(
    ("kwargs", "args", "text"),
    [
        ({}, (), "axis 'data' needs one size, got no mapped tensor. Stack one entry for each rank, or give axis_size."),
        ({"in_dims": None}, (XS,), "axis 'data' needs one size, got no mapped tensor."),
        ({}, (XS, XS.T), "axis 'data' needs one size, got sizes [2, 3]."),
        ({"axis_size": 4, "axis_name": "r"}, (XS,), "axis 'r' needs one size, got sizes [2, 4]."),
        ({}, (XS, torch.tensor(1.0)), "axis 'data': a 0-dim tensor has no dimension to map over; use in_dims=None"),
        ({"in_dims": (0, 0)}, (XS,), "in_dims has 2 entries for 1 arguments."),
    ],
)
def test_axes_without_one_size(kwargs: dict[str, Any], args: tuple[Any, ...], text: str) -> None:
    assert text in said(AxisError, lambda: ltx.vmap(lambda *xs: xs, **kwargs)(*args))


@pytest.mark.parametrize(
    ("in_dims", "args"),
    [(2, (XS,)), ((-3,), (XS,)), (({"x": 0},), ({"y": XS},)), (({"x": [0, 0]},), ({"x": [XS]},))],
    ids=["too large", "too small", "other keys", "other length"],
)
def test_in_dims_that_do_not_fit(in_dims: Any, args: tuple[Any, ...]) -> None:
    said(AxisError, lambda: ltx.vmap(lambda x: x, in_dims=in_dims)(*args))


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_random_numbers(randomness: str, seed: int) -> None:
    first, second = ltx.vmap(lambda: torch.rand(8), axis_size=2, randomness=randomness)()
    assert torch.equal(first, second) == (randomness == "same")


def test_it_composes_with_torch_func(seed: int) -> None:
    xs = torch.randn(2, 3, dtype=torch.float64)

    def f(x: Tensor) -> Tensor:
        return (ltx.psum(x) ** 3).sum()

    hessian = torch.func.hessian(lambda xs: ltx.vmap(f)(xs).sum())(xs)
    assert torch.allclose(hessian, torch.func.hessian(lambda xs: 2 * (xs.sum(0) ** 3).sum())(xs))
    assert torch.allclose(torch.vmap(ltx.vmap(f), in_dims=2)(torch.stack([xs, -xs], 2))[1], -ltx.vmap(f)(xs))


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
@on_ranks(4)
def test_parts_are_closed_with_their_axis() -> None:
    before = len(torch.distributed.distributed_c10d._world.pg_map)
    with ltx.axis_from_group([0, 1, 2, 3]) as axis:
        ltx.psum(torch.ones(1), inner(axis, 2))
        ltx.psum(torch.ones(1), outer(axis, 2))
    assert len(torch.distributed.distributed_c10d._world.pg_map) == before


ROOT = Path(__file__).parents[3]
SGD = ltx.optim.from_torch(torch.optim.SGD, lr=0.1)


def loss(w: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ w).square().mean()


STEP = ltx.data_parallel(loss)


def trained(w: Tensor, x: Tensor) -> Tensor:
    return train_on.trained(STEP, SGD, w, [x]).params


#: What is documented as equal on every rank, of (w, x), and the same of one process with the whole batch.
EQUAL: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Tensor, Tensor], Tensor]]] = {
    "grad": (lambda w, x: ltx.grad(STEP)(w, x), lambda w, x: torch.func.grad(loss)(w, x)),
    "torch.func.grad": (lambda w, x: torch.func.grad(STEP)(w, x), lambda w, x: torch.func.grad(loss)(w, x)),
    "sync_gradients": (
        lambda w, x: ltx.sync_gradients(torch.func.grad(loss)(w, x))[0],
        lambda w, x: torch.func.grad(loss)(w, x),
    ),
    "state.params": (trained, lambda w, x: w - 0.1 * torch.func.grad(loss)(w, x)),
    "all_gather": (lambda w, x: ltx.all_gather(x.sum()).sum(), lambda w, x: x.sum()),
}


@pytest.mark.parametrize("name", EQUAL)
def test_what_is_equal_on_every_rank_is_one_output(name: str, seed: int) -> None:
    w, x = torch.randn(3, dtype=torch.float64), torch.randn(2, 4, 3, dtype=torch.float64)
    simulated, alone = EQUAL[name]
    expected = alone(w, x.flatten(0, 1))
    mapped = ltx.vmap(simulated, in_dims=(None, 0), out_dims=None)
    torch.testing.assert_close(mapped(w, x), expected)
    # In a tree, and under transforms outside, which see the same.
    both = ltx.vmap(lambda w, x: {"a": simulated(w, x), "b": x}, in_dims=(None, 0), out_dims={"a": None, "b": 1})(w, x)
    torch.testing.assert_close(both["a"], expected)
    assert torch.equal(both["b"], x.movedim(0, 1))
    torch.testing.assert_close(torch.vmap(mapped)(torch.stack([w, w]), torch.stack([x, x]))[1], expected)
    if name == "state.params":  # nothing flows through a train step's state
        return
    direction = torch.randn_like(w)
    _, derivative = torch.func.jvp(lambda w: mapped(w, x), (w,), (direction,))
    _, wanted = torch.func.jvp(lambda w: alone(w, x.flatten(0, 1)), (w,), (direction,))
    torch.testing.assert_close(derivative, wanted)


def test_what_differs_is_refused_by_its_path() -> None:
    x = torch.tensor([1.0, 2.0])
    outside = torch.vmap(ltx.vmap(lambda x: x, out_dims=None))
    for call in (lambda: ltx.vmap(lambda x: {"a": x}, out_dims=None)(x), lambda: outside(torch.stack([x, x]))):
        refuses(AxisError, r"out_dims=None: the (output .*|value itself) differs between ranks\..*pmean", call)
    assert torch.equal(
        ltx.vmap(lambda x: x, out_dims=None)(torch.tensor([torch.nan, torch.nan])).isnan(), torch.tensor(True)
    )


def test_numpy_arrays_are_mapped() -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    for given in (x, x[:, ::-1], x.astype(">f4")):
        found = ltx.vmap(lambda x, k: ltx.psum(k * x))(given, k=np.array([1, 2]))
        np.testing.assert_array_equal(found.numpy(), np.stack([given[0] + 2 * given[1]] * 2))
    assert ltx.vmap(lambda a, x: x * int(a[0]), in_dims=(None, 0))(np.array([3]), torch.ones(2)).tolist() == [3, 3]


def test_a_wrong_prefix_is_told_in_shapes() -> None:
    tree = {"b": torch.ones(2, 1000), "c": [torch.ones(2), 3]}
    assert train_on.said(AxisError, ltx.vmap(lambda d: d, in_dims=({"a": 0},)), tree) == (
        "in_dims: {'a': 0} isn't a prefix of its argument, which is {'b': float32[2, 1000], 'c': [float32[2], int]}."
    )
    text = train_on.said(AxisError, ltx.vmap(lambda d: d["b"], out_dims=[0]), {"b": tree["b"]})
    assert "out_dims: [0] isn't a prefix of its output, which is float32[1000]." in text


def written(x: Tensor) -> Tensor:
    y = x.clone()
    y[x > 0] = 0
    return y


def assigned(x: Tensor) -> Tensor:
    y = ltx.psum(x) * 1
    y[:2] = x[:2]
    return y


#: (a function of one rank, what its error says)
RAW: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "item": (lambda x: x.sum().item(), r"reads values.*ltx\.Pool\(n\)\.run\(fn\).*torch\.where"),
    "float": (lambda x: float(x.sum()), r"reads values.*ltx\.Pool\(n\)\.run\(fn\)"),
    "if": (lambda x: x if x.sum() > 0 else -x, r"reads values.*torch\.where"),
    "mask": (lambda x: x[x > 0], r"reads values.*torch\.where"),
    "written mask": (written, r"reads values.*torch\.where"),
    "nonzero": (torch.nonzero, r"reads values.*ltx\.Pool\(n\)\.run\(fn\)"),
    "numpy": (lambda x: x.numpy(), r"reads values.*ltx\.Pool\(n\)\.run\(fn\)"),
    "an index": (lambda x: [1.0, 2.0][ltx.axis_index()], r"reads values.*ltx\.Pool\(n\)\.run\(fn\)"),
    "a module": (lambda x: torch.nn.Linear(3, 1)(x), r"Make the module before.*ltx\.Pool\(n\)\.run\(fn\)"),
    "in place": (lambda x: ltx.psum(x).add_(x), r"no rank dimension: write psum\(x\) \+ y"),
    "an entry": (lambda x: torch.zeros(3).index_fill_(0, torch.tensor(1), x.sum()), r"no rank dimension"),
    "a slice": (assigned, r"no rank dimension: write psum\(x\) \+ y"),
    "multiplied": (lambda x: ltx.psum(x).mul_(x), r"no rank dimension"),
    "lerp": (lambda x: torch.zeros(3).lerp_(x, 0.5), r"no rank dimension"),
    "equal": (lambda x: torch.equal(x, x), r"reads values.*ltx\.Pool\(n\)\.run\(fn\)"),
    "contiguous": (lambda x: x.view(1, 3, 1, 1).contiguous(memory_format=torch.channels_last), r"before ltx\.vmap"),
    "cloned": (lambda x: x.view(1, 3, 1, 1).clone(memory_format=torch.channels_last), r"before ltx\.vmap"),
    "channels_last": (lambda x: x.view(1, 3, 1, 1).to(memory_format=torch.channels_last), r"before ltx\.vmap"),
    "batch norm": (lambda x: torch.nn.BatchNorm1d(3)(torch.stack([x, x])), r"ltx\.nn\.sync_batch_norm"),
    "backward": (lambda x: x.requires_grad_().sum().backward(), r"ltx\.grad"),
}


@pytest.mark.parametrize("name", RAW)
def test_what_vmap_cannot_run_says_what_to_write(name: str, ranks: Ranks) -> None:
    fn, text = RAW[name]
    with pytest.raises(UnsupportedError, match=rf"(?s)ltx\.vmap, axis 'data': .*{text}.* torch says: ") as raised:
        ltx.vmap(fn)(torch.randn(2, 3))
    assert isinstance(raised.value.__cause__, RuntimeError)
    ranks(2).run(lambda: fn(torch.randn(3)))


def test_errors_of_the_user_s_own_stay_what_they_are() -> None:
    def fails(x: Tensor) -> Tensor:
        raise RuntimeError("mine")

    refuses(RuntimeError, r"^mine$", ltx.vmap(fails), torch.ones(2))


def test_the_advice_of_an_error_is_not_buried() -> None:
    step = ltx.data_parallel(loss, ltx.DDPStrategy(comm_hook=ltx.hooks.OneBit()))
    assert "timedelta" not in train_on.said(ltx.errors.LtxError, step, torch.zeros(3), torch.zeros(2, 3))


@pytest.mark.parametrize("page", ["docs/faq.md", "docs/how-to/accumulate.md", "examples/plain/dp_sgd.py"])
def test_the_dp_sgd_recipe_takes_0_dim_parameters(page: str, seed: int) -> None:
    """The pages' lines for each sample's norm, against one sample after the other."""

    def model(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return ((x @ p["w"]) * p["scale"]).square()

    params = {"w": torch.randn(3, dtype=torch.float64), "scale": torch.tensor(1.5, dtype=torch.float64)}
    x = torch.randn(6, 3, dtype=torch.float64)
    each = torch.func.vmap(torch.func.grad(model), in_dims=(None, 0))(params, x)
    line = re.search(r"^ +norms = (.*)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert line is not None
    norms = eval(line[1], {"torch": torch, "each": each, "per_sample": each})
    for sample, norm in zip(x, norms, strict=True):
        found = torch.func.grad(model)(params, sample)
        torch.testing.assert_close(torch.cat([found["w"], found["scale"][None]]).norm(), norm)
