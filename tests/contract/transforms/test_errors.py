"""Bad input: every message in full, on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

import ltx
from ltx.errors import (
    AxisError,
    LtxError,
    OptimError,
    RankMismatchError,
    StepError,
    StrategyError,
    TreeError,
    WeightError,
)
from tests.kinds import Ranks
from tests.train_on import on_ranks, said
from tests.twins.cases import assert_same_bits, own_axis
from tests.twins.training import sgd

P, X = {"w": torch.ones(2)}, torch.tensor([1.0, 2.0])


def linear(params: Any, x: torch.Tensor) -> torch.Tensor:
    return (params["w"] * x).sum()


def train(step: Callable[..., Any] = linear, **kwargs: Any) -> Any:
    stepped = ltx.train_step(ltx.data_parallel(step), sgd(), **kwargs)
    return stepped(stepped.init(P), X)


MODULE = nn.Linear(2, 1)
RETURNS = (
    "the step returned a tree with the structure and shapes of its parameters (first leaf 'w', shape [2]). Gradients "
    "taken inside a data-parallel step, and parameters updated with them, are local to the rank. Either return the "
    'loss and differentiate the wrapped step; or wrap with returns="grads", which reduces the returned gradients; or '
    "call ltx.sync_gradients inside; or, if this is no gradient, return it inside a dict or a one-element list."
)
GIVE = "Give at least one rank a weight, or leave the call out on all of them."
NO_MEAN = (
    f"Weighted: the weights of all ranks add up to 0, so there is no mean. The state is as before the step. {GIVE}"
)
FIX = " Take its mean or sum; a step that returns (loss, aux) wants has_aux=True."
SCALAR = "a gradient needs a step that returns a 0-dim floating tensor, got {}." + FIX
LOSS = (
    "train_step: the loss must be a 0-dim floating tensor or ltx.Weighted, got {}."
    + FIX
    + " A mapping holds it as `loss`."
)
NO_TREE = "argument 0 of the step must be a tree of tensors, but {} is of type {}."
#: By what is raised: a call, and all that the error says.
ERRORS: dict[type[Exception], dict[str, tuple[Callable[[], Any], str]]] = {
    StepError: {
        "no function": (lambda: ltx.data_parallel(3), "data_parallel wraps a function, got int."),
        "twice": (
            lambda: ltx.data_parallel(ltx.data_parallel(linear)),
            "this step is already data parallel, and would be averaged twice. Use dataclasses.replace(step, "
            "strategy=...) for another strategy, and data_parallel(fn, axis=('data', 'model')) for several axes.",
        ),
        "argnums too large": (
            lambda: ltx.data_parallel(linear, argnums=2)(P, X),
            "argnums=2: the step was called with 2 positional arguments. Parameters are passed by position.",
        ),
        "argnums too small": (
            lambda: ltx.data_parallel(linear, argnums=(0, -3))(P, X),
            "argnums=(0, -3): the step was called with 2 positional arguments. Parameters are passed by position.",
        ),
        "parameters by keyword": (
            lambda: ltx.data_parallel(linear)(params=P, x=X),
            "argnums=0: the step was called with 0 positional arguments. Parameters are passed by position.",
        ),
        "gradients": (lambda: ltx.data_parallel(torch.func.grad(linear))(P, X), RETURNS),
        "gradients and value": (lambda: ltx.data_parallel(torch.func.grad_and_value(linear))(P, X), RETURNS),
        "new parameters": (
            lambda: ltx.data_parallel(lambda p, x: {"w": p["w"] - 0.1 * torch.func.grad(linear)(p, x)["w"]})(P, X),
            RETURNS,
        ),
        "no tensor": (
            lambda: ltx.vmap(torch.func.grad(ltx.data_parallel(lambda p: 3)), in_dims=None, axis_size=2)(P),
            "the step returned no floating or complex tensor, so its parameters have no gradient.",
        ),
        "ltx.grad of a vector": (
            lambda: ltx.grad(ltx.data_parallel(lambda p, x: {"y": p["w"] * x}["y"][:1]))(P, X),
            SCALAR.format("a tensor of shape [1] and torch.float32"),
        ),
        "ltx.grad of a count": (
            lambda: ltx.grad(ltx.data_parallel(lambda p, x: linear(p, x).long()))(P, X),
            SCALAR.format("a tensor of shape [] and torch.int64"),
        ),
        "ltx.grad of a complex number": (
            lambda: ltx.grad(ltx.data_parallel(lambda p, x: linear(p, x) * 1j))(P, X),
            SCALAR.format("a tensor of shape [] and torch.complex64"),
        ),
        "ltx.grad of gradients": (
            lambda: ltx.grad(ltx.data_parallel(lambda p, x: p, returns="grads"))(P, X),
            'this step returns gradients (returns="grads"): call it as it is.',
        ),
        "ltx.grad of a pair": (
            lambda: ltx.grad(ltx.data_parallel(lambda p, x: (linear(p, x), x)))(P, X),
            SCALAR.format("a tuple of 2"),
        ),
        "has_aux without aux": (
            lambda: ltx.grad_and_value(ltx.data_parallel(linear), has_aux=True)(P, X),
            "has_aux=True needs a step that returns (loss, aux), got a tensor of shape [] and torch.float32.",
        ),
        "Weighted vector": (
            lambda: ltx.data_parallel(lambda p, x: ltx.Weighted(p["w"] * x, 2))(P, X),
            "Weighted.total must be a 0-dim floating tensor, got shape [2], torch.float32. Sum it.",
        ),
        "Weighted number": (
            lambda: ltx.data_parallel(lambda p, x: ltx.Weighted(1.0, 2))(P, X),
            "Weighted.total must be a 0-dim floating tensor, got 1.0. Sum it.",
        ),
        "two of them": (
            lambda: ltx.data_parallel(lambda p, x: ltx.Weighted(linear(p, x), 2) + ltx.Weighted(linear(p, x), 3))(P, X),
            "a Weighted can't be added: a step has one weight. Divide each term by its own mean count over ranks, and "
            "return a plain loss: a / ltx.pmean(n) + b / ltx.pmean(m). With accumulate its n and m are the means over "
            "micro-batches too, given as arguments.",
        ),
        "Weighted by a vector": (
            lambda: ltx.data_parallel(lambda p, x: ltx.Weighted(linear(p, x), x))(P, X),
            "Weighted.weight must be 0-dim, got shape [2]. Sum it.",
        ),
        "train_step of a function": (
            lambda: ltx.train_step(linear, sgd()),
            "train_step takes a step made by ltx.data_parallel, got function. Wrap it: "
            "ltx.train_step(ltx.data_parallel(loss_fn), optimizer).",
        ),
        "train_step of a blocked step": (
            lambda: ltx.train_step(ltx.block_backward_sync(ltx.data_parallel(linear)), sgd()),
            "train_step: the step's gradients are blocked (block_backward_sync), so ranks would diverge.",
        ),
        "train_step of other argnums": (
            lambda: ltx.train_step(ltx.data_parallel(linear, argnums=1), sgd()),
            "train_step passes the parameters first: the step needs argnums=0, got 1.",
        ),
        "parameters for a state": (
            lambda: ltx.train_step(ltx.data_parallel(linear), sgd())(P, X),
            "the first argument is the TrainState that init or the last step gave, got dict. "
            "Write state = train.init(params) once, and then state, metrics = train(state, *batch).",
        ),
        "training in inference mode": (
            lambda: torch.inference_mode()(train)(),
            "a train step was called in torch.inference_mode(), where nothing is differentiated: its gradients would "
            "be zeros. Call it outside of that mode; torch.no_grad() around it does no harm.",
        ),
        "a vector for a loss": (
            lambda: train(lambda p, x: {"y": p["w"] * x}["y"][:1]),
            LOSS.format("a tensor of shape [1] and torch.float32"),
        ),
        "an integer loss": (
            lambda: train(lambda p, x: x.sum().long()),
            LOSS.format("a tensor of shape [] and torch.int64"),
        ),
        "a dict without a loss": (lambda: train(lambda p, x: {"mean": linear(p, x)}), LOSS.format("dict")),
        "a pair for a loss": (lambda: train(lambda p, x: (linear(p, x), x)), LOSS.format("a tuple of 2")),
        "no aux": (
            lambda: train(has_aux=True),
            "train_step: the step must return (loss, aux), got a tensor of shape [] and torch.float32.",
        ),
        "three for two": (
            lambda: train(lambda p, x: (linear(p, x), x, x), has_aux=True),
            "train_step: the step must return (loss, aux), got a tuple of 3.",
        ),
    },
    StrategyError: {
        "strategy": (
            lambda: ltx.data_parallel(linear, "ddp"),
            "strategy must be an ltx.Strategy such as ltx.DDPStrategy(), got 'ddp'.",
        ),
        "outputs": (
            lambda: ltx.data_parallel(linear, outputs="sum"),
            "DataParallel.outputs must be 'local' or 'mean', got 'sum' of type str.",
        ),
        "returns": (
            lambda: ltx.data_parallel(linear, returns="params"),
            "DataParallel.returns must be 'value' or 'grads', got 'params' of type str.",
        ),
        "guard": (
            lambda: train(guard="warn"),
            "TrainStep.guard must be 'off' or 'skip' or 'raise', got 'warn' of type str.",
        ),
        "overlap": (
            lambda: train(overlap="forward"),
            "TrainStep.overlap must be 'backward' or 'update', got 'forward' of type str.",
        ),
        "overlap with clipping": (
            lambda: ltx.train_step(
                ltx.data_parallel(linear),
                ltx.optim.chain(ltx.optim.clip_by_global_norm(1.0), ltx.optim.from_torch(torch.optim.SGD, lr=0.5)),
                overlap="update",
            ),
            'overlap="update" needs an update of each parameter by itself, which chain(clip_by_global_norm(1.0)'
            ', from_torch(torch.optim.SGD, lr=0.5)) doesn\'t offer: use overlap="backward".',
        ),
    },
    AxisError: {
        "axis": (
            lambda: ltx.data_parallel(linear, axis="model")(P, X),
            "no axis called 'model' is in scope; in scope: none (ltx.init hasn't made any). Open it with ltx.vmap(f, "
            "axis_name='model') or name it in ltx.init(mesh={'model': ...}).",
        ),
        "axis of a wrong type": (
            lambda: ltx.data_parallel(linear, axis=0.5)(P, X),
            "an axis is a name, a tuple of names, an ltx.Axis, a ProcessGroup or a DeviceMesh, got float.",
        ),
    },
    TreeError: {
        "a module": (
            lambda: ltx.data_parallel(linear)(MODULE, X),
            NO_TREE.format("the value itself", "Linear")
            + " Pass dict(module.named_parameters()) and call it with ltx.functional_call.",
        ),
        "a generator": (
            lambda: ltx.data_parallel(linear)(MODULE.parameters(), X),
            NO_TREE.format("the value itself", "generator")
            + " A generator is used up by its first reader: pass a dict, list or tuple of tensors."
            + " Of a module: dict(module.named_parameters()).",
        ),
        "a string": (lambda: ltx.data_parallel(linear)([X, "w"], X), NO_TREE.format("leaf '1'", "str")),
        "a number": (lambda: ltx.data_parallel(linear)({"a": {"b": 1.0}}, X), NO_TREE.format("leaf 'a.b'", "float")),
        "init of a module": (
            lambda: ltx.data_parallel(linear).init(MODULE),
            "params must be a tree of tensors, but the value itself is of type Linear. Pass "
            "dict(module.named_parameters()) and call it with ltx.functional_call.",
        ),
        "init of a generator": (
            lambda: ltx.train_step(ltx.data_parallel(linear), sgd()).init(MODULE.parameters()),
            "params must be a tree of tensors, but the value itself is of type generator. A generator is used "
            "up by its first reader: pass a dict, list or tuple of tensors. Of a module: "
            "dict(module.named_parameters()).",
        ),
        "buffers": (
            lambda: ltx.train_step(ltx.data_parallel(linear), sgd()).init(P, {"n": 3}),
            "buffers must be a tree of tensors, but leaf 'n' is of type int.",
        ),
    },
    WeightError: {
        "weights 0": (
            lambda: ltx.data_parallel(lambda p, x: ltx.Weighted(linear(p, x), 0))(P, X),
            f"Weighted: the weights of all ranks add up to 0, so there is no mean. {GIVE}",
        ),
        "weights 0, blocked": (
            lambda: ltx.block_backward_sync(ltx.data_parallel(lambda p, x: ltx.Weighted(linear(p, x), 0)))(P, X),
            f"Weighted: this rank's weight is 0, so there is no mean. {GIVE}",
        ),
        "weights 0, training": (lambda: train(lambda p, x: ltx.Weighted(linear(p, x), 0)), NO_MEAN),
    },
    OptimError: {
        "a torch optimizer": (
            lambda: ltx.train_step(ltx.data_parallel(linear), torch.optim.SGD),
            "optimizer must be an ltx.optim.Optimizer, got <class 'torch.optim.sgd.SGD'>. Use "
            "ltx.optim.from_torch(torch.optim.AdamW, lr=...) or ltx.optim.from_functions(init, update).",
        )
    },
}


@pytest.mark.parametrize(("error", "name"), [(error, name) for error, rows in ERRORS.items() for name in rows])
def test_messages(error: type[Exception], name: str) -> None:
    call, text = ERRORS[error][name]
    assert said(error, call) == text
    assert issubclass(error, LtxError)


@pytest.mark.parametrize("how", ["train", "call"])
@on_ranks(2)
def test_captured_parameters(how: str) -> None:
    """It is said at the second try too."""

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return MODULE(x).sum() + (params["w"] * x).sum()

    step, w = ltx.data_parallel(loss), torch.ones(2, requires_grad=True)
    texts = [said(StepError, lambda: train(loss) if how == "train" else step({"w": w}, X)) for _ in range(2)]
    assert {text.replace("[1, 2]", "[1]") for text in texts} == {  # of the weight or of the bias
        "the step uses 'weight' of Linear, a parameter of shape [1] that isn't one of its arguments, so its gradient "
        "would stay local to this rank without a word. Pass it in: params = dict(module.named_parameters()) and "
        "ltx.functional_call(module, params, inputs) inside the step. If it is meant to be frozen, call "
        "requires_grad_(False) on it."
    }


def test_what_isnt_captured() -> None:
    frozen = nn.Linear(2, 1).requires_grad_(False)
    w, x = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)

    def step(p: Any, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        return functional_call(MODULE, p, (x,)).sum() * frozen(x).sum() * scale

    scale = torch.tensor(2.0, requires_grad=True)
    made = {"weight": (2 * w)[None], "bias": w.sum()[None]}  # parameters that are made of others
    ltx.data_parallel(step)(made, x, scale=scale).backward()
    assert all(t.grad is not None for t in (w, x, scale))


def on_both(make: Callable[[int], tuple[Any, Any]], how: str, known: bool) -> str:
    """The error of a step whose strategy and parameters are ``make(rank)``."""

    axis = own_axis()

    def call(rank: int) -> Any:
        strategy, params = make(rank)
        step = ltx.data_parallel(lambda p: sum(x.sum().float() for x in ltx.tree.flatten(p)[0]), strategy, axis=axis)
        if how == "train_step":
            return (lambda t: t(t.init(params)))(ltx.train_step(step, sgd()))
        return torch.func.grad(step)(params) if how == "grad" else ltx.sync_gradients(params, strategy, axis=axis)

    if known:  # both have seen what rank 0 has, so that only rank 1 has something to compare
        call(0)
    text = said(RankMismatchError, call, ltx.world().rank)
    if not known and how != "train_step":  # nothing was sent: the axis is as it was
        step = ltx.data_parallel(lambda w: w * (1 + ltx.axis_index(axis)), axis=axis)
        assert torch.func.grad(step)(torch.tensor(2.0)) == 1.5
    axis.close()
    return text


A, B = torch.ones(2), torch.ones(3)
TREE = "Fix: give every rank the same tree, shapes and dtypes."
MISMATCHES: dict[str, tuple[Callable[[int], tuple[Any, Any]], str]] = {
    "shapes": (
        lambda rank: (None, {"a": A, "b": {"c": torch.ones(2 + rank)}}),
        f"axis 'own': ranks disagree on {{}}, leaf 'b.c': rank 0: float32[2]; rank 1: float32[3]. {TREE}",
    ),
    "dtypes": (
        lambda rank: (None, [A, B.double() if rank else B]),
        f"axis 'own': ranks disagree on {{}}, leaf '1': rank 0: float32[3]; rank 1: float64[3]. {TREE}",
    ),
    "a leaf more": (
        lambda rank: (None, {"a": A, "b": B} if rank else {"a": A}),
        f"axis 'own': ranks disagree on {{}}, leaf 'b': rank 0: no such leaf; rank 1: float32[3]. {TREE}",
    ),
    "another name": (
        lambda rank: (None, {"b": A} if rank else {"a": A}),
        f"axis 'own': ranks disagree on {{}}, leaf 'a': rank 0: float32[2]; rank 1: no such leaf. {TREE}",
    ),
    "strategies": (
        lambda rank: (ltx.DDPStrategy(comm_hook="bf16" if rank else "allreduce"), {"a": A}),
        "axis 'own': ranks disagree on {}, its arguments: rank 0: AllReduce() with buckets of (4194304, 1048576) "
        "bytes; rank 1: BF16() with buckets of (4194304, 1048576) bytes. Fix: call it with the same arguments on "
        "every rank.",
    ),
    "bucket sizes": (
        lambda rank: (ltx.DDPStrategy(bucket_bytes=4096 * (1 + rank)), {"a": A}),
        "axis 'own': ranks disagree on {}, its arguments: rank 0: AllReduce() with buckets of (4096, 1048576) bytes; "
        "rank 1: AllReduce() with buckets of (8192, 1048576) bytes. Fix: call it with the same arguments on every "
        "rank.",
    ),
}


@pytest.mark.full(but=3)
@pytest.mark.parametrize(
    ("how", "known"),
    [("grad", False), ("sync_gradients", False), ("grad", True)],
    ids=["new", "at hand", "known to one"],
)
@pytest.mark.parametrize("name", MISMATCHES)
def test_ranks_that_disagree(name: str, how: str, known: bool, ranks: Ranks) -> None:
    make, text = MISMATCHES[name]
    assert ranks(2).run(on_both, make, how, known).replicated() == text.format({"grad": "data_parallel"}.get(how, how))


@pytest.mark.parametrize("name", ["shapes", "dtypes", "a leaf more", "strategies"])
def test_ranks_that_disagree_in_training(name: str, ranks: Ranks) -> None:
    make, text = MISMATCHES[name]
    operation = "data_parallel" if name == "strategies" else "broadcast"
    assert ranks(2).run(on_both, make, "train_step", False).replicated() == text.format(operation)


@pytest.mark.parametrize("strategy", [ltx.DDPStrategy(), ltx.ZeroStrategy()], ids=repr)
@pytest.mark.parametrize("overlap", ["backward", "update"])
@on_ranks(2)
def test_all_weights_zero(overlap: Any, strategy: ltx.Strategy) -> None:
    step = ltx.data_parallel(lambda p, x, n: ltx.Weighted(linear(p, x), n), strategy)
    stepped = ltx.train_step(step, sgd(lr=1.0), overlap=overlap)
    state = stepped.init(P)
    before = ltx.tree.map(torch.clone, state.params)
    assert said(WeightError, stepped, state, X, torch.tensor(0.0)) == NO_MEAN
    assert_same_bits(before, state.params)
    state, _ = stepped(state, X, torch.tensor(2.0 if ltx.world().rank else 0.0))
    assert state.params["w"].tolist() == [0.0, -1.0]  # (x + x) / 2
