"""What users of ltx.vmap ran into: outputs that are equal on all ranks, NumPy's arrays, and torch's raw errors."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import ltx
from ltx.errors import AxisError, UnsupportedError
from tests import train_on
from tests.kinds import Ranks
from tests.train_on import refuses

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
