"""What is written by habit from DDP, Lightning or JAX: the error, or the warning, names what to write here."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx.errors import ArgumentError, DonatedStateError, EqualBatchesWarning, OptimError, StepError, TreeError
from tests.contract.bad_input.public import batch, loss, params
from tests.kinds import Ranks
from tests.train_on import refuses, said, trained
from tests.twins.training import sgd


def stepped(step: Any = loss) -> Any:
    return trained(step, sgd(0.1), params(), [batch()])


def train() -> Any:
    return ltx.train_step(ltx.data_parallel(loss), sgd(0.1))


def with_old_state() -> None:
    made = train()
    state = made.init(params())
    for _ in range(2):
        made(state, batch())


def differentiates(p: Any, x: Tensor) -> Tensor:
    value = loss(p, x)
    value.backward(retain_graph=True)
    return value


net = torch.nn.Linear(3, 2)

#: {what is written: (the call, the error, what it says to write)}
SLIPS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    **{
        f"ltx.{name}": (lambda name=name: getattr(ltx, name), AttributeError, text)
        for name, text in {
            "all_reduce": "ltx.psum(x)",
            "psum_invariant": "ltx.psum(x)",
            "rank": "ltx.world().rank",
            "world_size": "ltx.world().size",
            "remat": "torch.utils.checkpoint.checkpoint(f",
            "stop_gradient": "x.detach()",
            "PartitionSpec": "ltx.init(mesh={'node': 2, 'data': 4})",
            "jit": "torch.compile",
            "pmap": "ltx.vmap(f)",
            "shard_map": "ltx.data_parallel(step)",
            "tree_map": "ltx.tree.map",
            "device_put": "ltx.to_device(tree)",
            "DDP": "ltx.train_step(ltx.data_parallel(step), optimizer)",
            "DistributedDataParallel": "ltx.train_step(ltx.data_parallel(step), optimizer)",
            "no_sync": "ltx.accumulate(step, n)",
            "hessian": "torch.func.hessian",
        }.items()
    },
    **{
        f"ltx.optim.{name}": (lambda name=name: getattr(ltx.optim, name), AttributeError, text)
        for name, text in {
            "AdamW": "ltx.optim.from_torch(torch.optim.AdamW, lr=...)",
            "adam": "ltx.optim.from_torch(torch.optim.Adam, lr=...)",
        }.items()
    },
    "a module": (lambda: ltx.data_parallel(net), StepError, "ltx.functional_call(model, params, (x,))"),
    "device_ids": (lambda: ltx.data_parallel(loss, device_ids=[0]), ArgumentError, "`with ltx.init():`"),  # type: ignore[call-overload]
    "strategy=": (
        lambda: ltx.train_step(ltx.data_parallel(loss), sgd(0.1), strategy=ltx.DDPStrategy()),  # type: ignore[call-arg]
        ArgumentError,
        "ltx.train_step(ltx.data_parallel(step, strategy), ...)",
    ),
    "torch's optimizer": (
        lambda: ltx.train_step(ltx.data_parallel(loss), torch.optim.SGD(net.parameters(), lr=0.1)),  # type: ignore[arg-type]
        OptimError,
        "ltx.optim.from_torch(torch.optim.AdamW, lr=...)",
    ),
    "metrics['loss']": (lambda: stepped().metrics[0]["loss"], ArgumentError, "metrics.loss"),
    "metrics['seen']": (lambda: stepped().metrics[0]["seen"], ArgumentError, "metrics.aux['seen']"),
    "metrics.item()": (lambda: stepped().metrics[0].item(), AttributeError, "metrics.loss.item()"),
    "state['w']": (lambda: stepped().state["w"], ArgumentError, "state.params['w']"),
    "state.parameters()": (lambda: stepped().state.parameters(), AttributeError, "state.params"),
    "optimizer.step()": (lambda: sgd(0.1).step(), AttributeError, "state, metrics = train(state, batch)"),
    "optimizer.zero_grad()": (lambda: sgd(0.1).zero_grad(), AttributeError, "nothing, as each step has new gradients"),
    "train(params)": (lambda: train()(params(), batch()), StepError, "state = train.init(params)"),
    "state = train(state)": (lambda: train()((1, 2), batch()), StepError, "state, metrics = train(state, *batch)"),
    "the old state": (with_old_state, DonatedStateError, "state, metrics = train(state, ...)"),
    "parameters()": (lambda: train().init(net.parameters()), TreeError, "dict(module.named_parameters())"),
    "state_dict()": (lambda: train().init(net.state_dict()), TreeError, "dict(module.named_buffers())"),
    "no parameter": (lambda: stepped(lambda p, x: x.square().mean()), StepError, "use the parameters that the step is"),
    "an odd batch": (
        lambda: ltx.vmap(ltx.shard, in_dims=None, axis_size=2)(torch.ones(3)),
        ltx.errors.AxisError,
        "ltx.share_out(batch)",
    ),
}


@pytest.mark.parametrize("name", SLIPS)
def test_the_error_names_what_to_write(name: str) -> None:
    call, error, text = SLIPS[name]
    refuses(error, re.escape(text), call)


def test_a_name_of_a_caller_s_own_goes_to_the_function() -> None:
    """Where a function takes any keyword."""
    with ltx.Pool(1) as pool:
        assert pool.run(lambda strategy: strategy, strategy=3)[0] == 3


WAYS: dict[str, Callable[[Any], Any]] = {
    "train_step": stepped,
    "ltx.grad": lambda step: ltx.grad(ltx.data_parallel(step))(params(), batch()),
    "torch.func": lambda step: torch.func.grad(ltx.data_parallel(step))(params(), batch()),
}


@pytest.mark.parametrize("way", WAYS)
def test_backward_inside_a_step(way: str, ranks: Ranks) -> None:
    """It had counted twice, without a word where the graph was retained or had nothing to keep."""
    for text in (said(StepError, WAYS[way], differentiates), *ranks(2).run(said, StepError, WAYS[way], differentiates)):
        assert "the step has called .backward() itself" in text
        assert "Return the loss" in text


X = torch.arange(24.0).reshape(8, 3)
#: {what ranks train on, by rank: whether it is worth a warning}
BATCHES: dict[str, tuple[Callable[[int], Any], bool]] = {
    "all alike": (lambda rank: X, True),
    "a part": (lambda rank: ltx.shard(X), False),
    "one number": (lambda rank: X.index_put((torch.tensor(5), torch.tensor(1)), torch.tensor(float(rank))), False),
    "lengths": (lambda rank: torch.ones(2 + rank, 3), False),
    "no samples": (lambda rank: torch.tensor(1.0), False),
}


@pytest.mark.parametrize("name", BATCHES)
def test_equal_batches(name: str, on_new_axis: Callable[..., Any]) -> None:
    """Said once in a world, on rank 0; later steps compare nothing."""
    of_rank, warns = BATCHES[name]

    def on_rank() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                trained(lambda p, x: (x * p["w"][0, 0]).mean(), sgd(0.1), params(), [of_rank(ltx.world().rank)] * 2)
        return [str(one.message) for one in caught if one.category is EqualBatchesWarning]

    first, second = on_new_axis(on_rank)
    assert len(first) == warns
    assert second == []
    assert all("ltx.shard(batch)" in text and "DistributedSampler" in text for text in first)
