"""What the network is given lies in memory and is plain, whatever tensors come and whatever modes are on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import allow_mutation_on_saved_tensors, save_on_cpu
from torch.func import grad, jvp, linearize
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import ltx
from ltx.errors import UnsupportedError
from tests.train_on import refuses, said, trained

double = partial(torch.tensor, dtype=torch.float64)
COLLECTIVES: dict[str, Callable[[Tensor], Tensor]] = {
    "psum": ltx.psum,
    "pmean": ltx.pmean,
    "pmax": ltx.pmax,
    "all_gather": ltx.all_gather,
    "psum_scatter": partial(ltx.psum_scatter, tiled=True),
    "all_to_all": lambda x: ltx.all_to_all(x, 0, 0),
    "ppermute": lambda x: ltx.ppermute(x, [(0, 1), (1, 0)]),
    "broadcast": ltx.broadcast,
    "pvary": ltx.pvary,
    "adasum": ltx.adasum,
    "weighted_mean": lambda x: ltx.weighted_mean(x, torch.ones(())),
    "sync_gradients": lambda x: ltx.sync_gradients(x)[0],
}
#: How ranks communicate, by the argument of `on_new_axis`.
BOTH = pytest.mark.parametrize("sockets", [False, True])
OnNewAxis = Callable[..., Any]


def all_kinds(make: Callable[[], Tensor], plain: Callable[[Tensor], Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Of each collective: the result for an odd tensor, and for the same numbers in a plain one."""
    return {name: (f(make()), f(plain(make()))) for name, f in COLLECTIVES.items()}


def equal(results: dict[str, tuple[Tensor, Tensor]]) -> bool:
    return all(torch.equal(odd, plain) and type(odd) is type(plain) for odd, plain in results.values())


ODD: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]] = {
    "zeros without memory": (lambda: torch._efficientzerotensor(4), torch.Tensor.clone),
    "negative view": (lambda: torch._neg_view(torch.arange(4.0) + ltx.axis_index()), torch.Tensor.resolve_neg),
    "expanded": (lambda: (1.0 + ltx.axis_index()).expand(4), torch.Tensor.clone),
}


@BOTH
@pytest.mark.parametrize("name", ODD)
def test_odd_tensors(name: str, sockets: bool, on_new_axis: OnNewAxis) -> None:
    make, plain = ODD[name]
    assert all(equal(each) for each in on_new_axis(lambda: all_kinds(make, plain), sockets=sockets))


@BOTH
def test_the_gradient_of_a_curvature_penalty(sockets: bool, on_new_axis: OnNewAxis) -> None:
    """vᵀ H v of the mean loss of data 1 and 2; some of its cotangents are torch's zeros without memory."""
    p, v = double([0.5, 0.7]), double([0.3, 0.4])

    def loss(p: Tensor, x: Any) -> Tensor:
        return (p * x).sum().sin() + (p**3 * x).sum()

    def penalty(loss: Callable[[Tensor], Tensor], p: Tensor) -> Tensor:
        return jvp(lambda p: (grad(loss)(p) * v).sum(), (p,), (v,))[1]

    def on_rank() -> Tensor:
        step, x = ltx.data_parallel(loss), 1.0 + ltx.axis_index()
        return grad(partial(penalty, lambda p: step(p, x)))(p)

    expected = grad(partial(penalty, lambda p: (loss(p, 1.0) + loss(p, 2.0)) / 2))(p)
    for found in on_new_axis(on_rank, sockets=sockets):
        torch.testing.assert_close(found, expected)


class Looks(TorchDispatchMode):
    """At the version of each tensor, which tensors of inference mode don't have."""

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert all(x._version >= 0 for x in args if isinstance(x, Tensor))
        return f(*args, **(kwargs or {}))


class SeesNoMessages(TorchFunctionMode):
    """Of torch's functions it sees none by which numbers come to shared memory, or from it."""

    def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame: Any = sys._getframe(1)
        moves = f in (Tensor.copy_, torch.add, torch.sum, torch.empty, Tensor.view)
        assert not (moves and frame.f_code.co_filename.endswith("shared_memory/transport.py")), f
        return f(*args, **(kwargs or {}))


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "one that looks": Looks,
    "one of functions": SeesNoMessages,
    "mutation of what is saved": allow_mutation_on_saved_tensors,
    "flops": partial(FlopCounterMode, display=False),
    "saved on the CPU": save_on_cpu,
    "inference": torch.inference_mode,
}


def training(mode: Callable[[], AbstractContextManager[Any]]) -> list[Any]:
    """Collectives and their gradients, a step whose hook computes, and two training steps."""
    x = 1.0 + ltx.axis_index()
    with mode():
        found = [f(torch.arange(4.0) * x) for f in COLLECTIVES.values()]
        if torch.is_inference_mode_enabled():
            return found
        w = torch.ones(4, requires_grad=True)
        for f in COLLECTIVES.values():
            f(w * x).square().sum().backward()
        p = torch.ones(4, 4, requires_grad=True)
        step = ltx.data_parallel(lambda p, x: (p @ p * x).sum(), ltx.DDPStrategy(comm_hook=ltx.hooks.ByteGrad()))
        step(p, x).backward()
        after = trained(step, ltx.optim.from_torch(torch.optim.Adam), torch.ones(4, 4), [x] * 2)
    return [*found, w.grad, p.grad, after.params]


@BOTH
@pytest.mark.parametrize("mode", MODES)
def test_modes(mode: str, sockets: bool, on_new_axis: OnNewAxis) -> None:
    def alike() -> bool:
        found, right = training(MODES[mode]), training(nullcontext)
        return all(torch.equal(x, y) for x, y in zip(found, right, strict=mode != "inference"))

    assert list(on_new_axis(alike, sockets=sockets)) == [True, True]


def checkpointed(policy: CheckpointPolicy) -> list[Tensor]:
    """The gradient of a sum between two functions, by selective checkpointing and without it."""
    grads = []
    for kwargs in (
        {"context_fn": lambda: create_selective_checkpoint_contexts(lambda ctx, op, *args, **kwargs: policy)},
        {},
    ):
        w = torch.arange(3.0, requires_grad=True)
        f = lambda x: ltx.psum((x * (1 + ltx.axis_index())).sin()).sin()  # noqa: E731
        (checkpoint(f, w, use_reentrant=False, **kwargs) if kwargs else f(w)).sum().backward()
        assert w.grad is not None
        grads.append(w.grad)
    return grads


@BOTH
@pytest.mark.parametrize("policy", ["MUST_SAVE", "PREFER_RECOMPUTE"])
def test_selective_checkpointing(policy: str, sockets: bool, on_new_axis: OnNewAxis) -> None:
    for found, right in on_new_axis(lambda: checkpointed(CheckpointPolicy[policy]), sockets=sockets):
        assert torch.equal(found, right)


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr")
@BOTH
def test_linearized_numbers(sockets: bool, on_new_axis: OnNewAxis) -> None:
    """Tensors without a dimension, in a recorded graph."""

    def both(name: str) -> bool:
        x, t = double(1.0 + ltx.world().rank), double(2.0 + ltx.world().rank)
        value, push = linearize(COLLECTIVES[name], x)
        found, right = (value, push(t)), jvp(COLLECTIVES[name], (x,), (t,))
        return all(torch.equal(a, b) for a, b in zip(found, right, strict=True))

    names = [name for name in COLLECTIVES if name not in ("psum_scatter", "all_to_all", "weighted_mean")]
    assert list(on_new_axis(lambda: [name for name in names if not both(name)], sockets=sockets)) == [[], []]


def refused() -> list[str]:
    """What is said of tensors of a class that holds them in others, and of fake tensors; then a sum goes on."""
    given = {"a": torch.ones(3), "b": TwoTensor(torch.ones(3), torch.ones(3))}
    texts = [said(UnsupportedError, f, given) for f in (ltx.psum, ltx.all_gather, ltx.broadcast)]
    with FakeTensorMode():
        assert ltx.psum(torch.ones(3)).shape == (3,)  # recorded: what is known of fake tensors
        refuses(UnsupportedError, "fake tensors can't be sent", ltx.barrier)
    assert ltx.psum(torch.ones(())).item() == 2
    return texts


@BOTH
def test_what_has_no_memory_is_refused(sockets: bool, on_new_axis: OnNewAxis) -> None:
    right = [
        f"{name}: leaf 'b' is a TwoTensor, which holds its numbers in other tensors, and a plain tensor was expected. "
        "Pass those."
        for name in ("psum", "all_gather", "broadcast")
    ]
    assert list(on_new_axis(refused, sockets=sockets)) == [right, right]
