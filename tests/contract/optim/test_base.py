from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cloudpickle
import optree
import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Muon, SparseAdam

import ltx
from ltx.errors import LtxError, OptimError
from ltx.optim import Optimizer, apply_updates, chain, clip_by_global_norm, from_functions, from_torch, partition
from tests.contract.optim.cases import FUSED_CASES, Case, same_bits
from tests.contract.optim.test_opaque import Lion
from tests.kinds import Ranks
from tests.train_on import on_ranks, refuses, trained


class Trace(NamedTuple):
    momentum: Any


def trace_init(params: Any) -> Trace:
    return Trace(optree.tree_map(torch.zeros_like, params))


def trace_update(grads: Any, state: Trace, params: Any) -> tuple[Any, Trace]:
    momentum = optree.tree_map(lambda g, m: g + 0.9 * m, grads, state.momentum)
    return optree.tree_map(lambda m: -0.1 * m, momentum), Trace(momentum)


def test_pair_of_functions_is_an_optimizer(seed: int) -> None:
    optimizer = from_functions(trace_init, trace_update, elementwise=True)
    assert isinstance(optimizer, Optimizer)
    assert optimizer.elementwise
    assert not from_functions(trace_init, trace_update).elementwise
    params = {"w": torch.randn(3)}
    expected, theirs = params["w"].clone().requires_grad_(), None
    theirs = torch.optim.SGD([expected], lr=0.1, momentum=0.9)
    state = optimizer.init(params)
    for donate in (False, True, False):
        grads = {"w": torch.randn(3)}
        new_params, state = optimizer.apply(grads, state, params, donate=donate)
        assert (new_params is params) == donate
        params = new_params
        expected.grad = grads["w"]
        theirs.step()
    torch.testing.assert_close(params["w"], expected.detach())


PULLED = from_functions(
    lambda params: params,
    lambda grads, first, params: ({k: -0.1 * (g + params[k] - first[k]) for k, g in grads.items()}, first),
)
BY_THE_LAST = from_functions(
    lambda params: {k: x.clone() for k, x in params.items()},
    lambda grads, last, params: ({k: 0.9 * (params[k] - last[k]) - 0.1 * g for k, g in grads.items()}, params),
)


STRATEGIES = {
    "ddp": ltx.DDPStrategy(),
    "local SGD": ltx.LocalSGDStrategy(2),
    "ring": ltx.BaguaStrategy("low_precision_decentralized"),
    "adasum": ltx.HorovodStrategy(op="adasum"),
}


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(
    "optimizer", [PULLED, BY_THE_LAST, ltx.optim.chain(ltx.optim.clip_by_global_norm(9.0), PULLED)]
)
@on_ranks(2)
def test_a_state_that_is_the_parameters(optimizer: Optimizer, name: str) -> None:
    """A step with donate=True writes to them, and the state keeps what they were, as without."""
    step = ltx.data_parallel(lambda p: (1.0 + ltx.axis_index()) * (p["w"] ** 2).sum(), STRATEGIES[name])
    start = {"w": torch.tensor([1.0, -2.0])}
    donated, kept = (trained(step, optimizer, start, [()] * 5, donate=donate).params["w"] for donate in (True, False))
    assert donated.equal(kept)


def test_a_state_of_numbers_is_refused() -> None:
    counting = from_functions(lambda params: {"n": 0}, lambda grads, state, params: (grads, state))
    refuses(
        OptimError,
        r"init's state has 0 at 'n', and a state is a tree of tensors: write torch\.tensor",
        counting.init,
        {},
    )


@dataclass(frozen=True)
class Halving:
    """A schedule that compares by value."""

    start: float

    def __call__(self, count: int) -> float:
        return self.start / 2**count


#: What optimizers print, what makes them, and others that they don't equal.
VALUES: dict[str, tuple[Callable[[], Optimizer], Optimizer]] = {
    "identity()": (ltx.optim.identity, clip_by_global_norm(1.0)),
    "clip_by_global_norm(1.0)": (lambda: clip_by_global_norm(1.0), clip_by_global_norm(2.0)),
    "clip_by_global_norm(1, eps=0.1)": (lambda: clip_by_global_norm(1, eps=0.1), clip_by_global_norm(1)),
    "measure_global_norm()": (ltx.optim.measure_global_norm, clip_by_global_norm(1.0)),
    "from_functions(trace_init, trace_update)": (
        lambda: from_functions(trace_init, trace_update),
        from_functions(trace_init, trace_update, elementwise=True),
    ),
    "from_torch(torch.optim.AdamW)": (lambda: from_torch(AdamW), from_torch(Adam)),
    "from_torch(torch.optim.AdamW, lr=0.001, weight_decay=0.1, betas=(0.9, 0.95))": (
        lambda: from_torch(AdamW, lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95)),
        from_torch(AdamW, lr=0.5, weight_decay=0.1, betas=(0.9, 0.95)),
    ),
    "from_torch(torch.optim.SGD, lr=Halving(start=0.1))": (lambda: from_torch(SGD, lr=Halving(0.1)), from_torch(SGD)),
    "from_torch(Lion, lr=0.1)": (lambda: from_torch(Lion, lr=0.1), from_torch(Lion, lr=0.2)),
    "chain(clip_by_global_norm(1.0), from_functions(trace_init, trace_update, elementwise=True), from_torch(Lion))": (
        lambda: chain(
            clip_by_global_norm(1.0), from_functions(trace_init, trace_update, elementwise=True), from_torch(Lion)
        ),
        chain(clip_by_global_norm(1.0), from_torch(Lion)),
    ),
    "partition({'0': from_torch(torch.optim.SGD, lr=0.1)}, {'*': '0'})": (
        lambda: partition({"0": from_torch(SGD, lr=0.1)}, {"*": "0"}),
        partition({"0": from_torch(SGD, lr=0.1)}, lambda path: "0"),
    ),
    "qadam(lr=0.1, warmup_steps=5, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.0, bagua_exact=True)": (
        lambda: ltx.optim.qadam(0.1, warmup_steps=5, bagua_exact=True),
        ltx.optim.qadam(0.1, warmup_steps=5),
    ),
}


@pytest.mark.parametrize("text", VALUES)
def test_is_a_value(text: str) -> None:
    make, other = VALUES[text]
    for again in (make(), pickle.loads(pickle.dumps(make())), cloudpickle.loads(cloudpickle.dumps(make()))):
        assert again == make() != other
        assert hash(again) == hash(make())
        assert repr(again) == text


def test_apply_updates() -> None:
    params = {"a": torch.ones(2, dtype=torch.bfloat16), "b": torch.ones(())}
    updates = {"a": torch.ones(2), "b": None}
    new = apply_updates(params, updates)
    assert same_bits(new, {"a": torch.full((2,), 2.0, dtype=torch.bfloat16), "b": torch.ones(())})
    assert new["b"] is not params["b"]
    assert params["a"].tolist() == [1.0, 1.0]
    assert apply_updates(params, updates, donate=True) is params
    assert params["a"].tolist() == [2.0, 2.0]
    with pytest.raises(OptimError, match=re.escape("updates must have the tree structure of params: ")):
        apply_updates(params, {"a": None})


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize(
    ("of", "update"),
    [(torch.float8_e4m3fn, torch.bool), (torch.float32, torch.float8_e5m2), (torch.float32, torch.complex64)],
)
def test_updates_that_cant_be_added(of: torch.dtype, update: torch.dtype, donate: bool) -> None:
    params, updates = {"w": torch.ones(2).to(of)}, {"w": torch.ones(2).to(update)}
    with pytest.raises(OptimError, match=r"the update of .*w.* is .*, which can't be added to"):
        apply_updates(params, updates, donate=donate)


def test_apply_updates_is_differentiable() -> None:
    grad = torch.func.grad(lambda u: apply_updates({"w": torch.ones(2)}, {"w": u})["w"].pow(2).sum())(torch.ones(2))
    assert grad.tolist() == [4.0, 4.0]


def test_protocol_is_abstract() -> None:
    class Half(Optimizer):
        def init(self, params: Any) -> Tensor:
            return torch.zeros(())

    refuses(TypeError, "update", Half)


class Transformation(NamedTuple):
    """As torchopt.base.GradientTransformation."""

    init: Any
    update: Any


def _torchopts_sgd(lr: float) -> Transformation:
    def update(updates: Any, state: Any, *, params: Any = None, inplace: bool = True) -> Any:
        assert params is not None
        if inplace:
            return {name: g.mul_(-lr) for name, g in updates.items()}, state
        return {name: g.mul(-lr) for name, g in updates.items()}, state

    return Transformation(lambda params: (), update)


def test_torchopts_signature(ranks: Ranks) -> None:
    optimizer = from_functions(*_torchopts_sgd(0.5))
    params, grads = {"w": torch.ones(2)}, {"w": torch.ones(2)}
    updated, _ = optimizer.apply(grads, optimizer.init(params), params)
    assert updated["w"].tolist() == [0.5, 0.5]
    assert grads["w"].tolist() == [1.0, 1.0]

    def run() -> Any:
        train = ltx.train_step(ltx.data_parallel(lambda p, x: (p["w"] * x).sum()), from_functions(*_torchopts_sgd(0.5)))
        state, _ = train(train.init(params), torch.ones(2) * (1 + ltx.axis_index()))
        return state.params["w"]

    assert ranks(2).run(run).replicated().tolist() == [0.25, 0.25]


@pytest.mark.parametrize(
    ("cls", "kwargs", "text"),
    [
        (torch.optim.LBFGS, {}, "from_torch(LBFGS): LBFGS evaluates the loss several times a step through a closure"),
        (AdamW, {"params": []}, "from_torch(AdamW): parameters aren't given here but to init(params) and apply(...)."),
        (
            SGD,
            {"beta": 1, "weight_decai": 2},
            "from_torch(SGD): no argument beta, weight_decai; allowed are lr, momentum, dampening, weight_decay, "
            "nesterov, maximize, foreach, differentiable, fused.",
        ),
        (
            Adam,
            {"betas": (2.0, 0.9)},
            "from_torch(Adam): Adam refused its arguments: Invalid beta parameter at index 0",
        ),
        (Adam, {"lr": -1.0}, "from_torch(Adam): Adam refused its arguments: Invalid learning rate: -1.0"),
        (SGD, {"nesterov": True}, "Nesterov momentum requires a momentum and zero dampening"),
        (Adam, {"fused": True, "foreach": True}, "`fused` and `foreach` cannot be `True` together."),
        (
            Adam,
            {"lr": torch.tensor(0.5)},
            "from_torch(Adam): lr must be a number or a function of the step, got tensor(0.5000). A schedule may "
            "return a tensor: lr=lambda count: tensor.",
        ),
        (Adam, {"lr": "0.1"}, "lr must be a number or a function of the step, got '0.1'."),
        (Adam, {"betas": (torch.tensor(0.5), 0.9)}, "from_torch(Adam): betas holds a tensor; optimizers compare by"),
        (Adam, {"eps": {}}, "from_torch(Adam): eps must be hashable, got {}."),
        (
            torch.nn.Linear,
            {},
            "from_torch expected a class of torch.optim, got <class 'torch.nn.modules.linear.Linear'>",
        ),
        (SGD([torch.ones(1)]), {}, "Pass the class, SGD."),
    ],
)
def test_refused_when_made(cls: Any, kwargs: dict[str, Any], text: str) -> None:
    refuses(OptimError, re.escape(text), from_torch, cls, **kwargs)


@pytest.mark.parametrize(
    ("cls", "kwargs", "leaf", "text"),
    [
        (
            Muon,
            {},
            torch.ones(3),
            "from_torch(Muon): leaf 'layers.1' is float32[3]: Muon takes 2-D parameters only; give the others to an "
            "optimizer of their own, such as AdamW.",
        ),
        (Muon, {}, torch.ones(3, 3, dtype=torch.complex64), "leaf 'layers.1' is complex64[3, 3]: Muon takes real"),
        (AdamW, {}, torch.ones(3).int(), "leaf 'layers.1' is int32[3]: parameters must be floating or complex."),
        (
            AdamW,
            {},
            torch.ones(3).to_sparse(),
            "leaf 'layers.1' is float32[3] (sparse in 1 dim): parameters must be dense.",
        ),
        (
            AdamW,
            {"fused": True},
            torch.ones(3, dtype=torch.complex64),
            "leaf 'layers.1' is complex64[3]: torch has no fused kernel that works for it on cpu; leave fused out.",
        ),
        (SGD, {"fused": True}, torch.ones(3).half(), "leaf 'layers.1' is float16[3]: torch has no fused kernel that"),
        (AdamW, {}, 3, "params must be a tree of tensors, but leaf 'layers.1' is of type int."),
    ],
)
def test_refused_parameters(cls: Any, kwargs: dict[str, Any], leaf: Any, text: str) -> None:
    refuses(LtxError, re.escape(text), from_torch(cls, **kwargs).init, {"layers": [torch.ones(2, 2), leaf]})


def test_sparse_adam_wants_sparse_gradients() -> None:
    params = {"table": torch.ones(2, 2)}
    optimizer = from_torch(SparseAdam)
    text = "from_torch(SparseAdam): the gradient of leaf 'table' is dense, but SparseAdam takes sparse gradients only"
    refuses(OptimError, re.escape(text), optimizer.apply, params, optimizer.init(params), params)


def test_capturable_is_passed_on() -> None:
    optimizer = from_torch(Adam, capturable=True, fused=False)
    params = {"w": torch.ones(2)}
    with pytest.raises(AssertionError, match="capturable=True"):  # torch's own word on CPU tensors
        optimizer.apply(params, optimizer.init(params), params)


def test_schedulers_of_torch_are_refused_as_rates() -> None:
    schedulers = torch.optim.lr_scheduler
    instance = schedulers.StepLR(torch.optim.SGD([torch.ones(1)], lr=0.1), 1)
    for lr, named in ((schedulers.CosineAnnealingLR, "CosineAnnealingLR"), (instance, "a StepLR")):
        with pytest.raises(OptimError, match=rf"from_torch\(AdamW\): lr is {named}.* Give a function of the number"):
            from_torch(AdamW, lr=lr)  # type: ignore[arg-type]


@pytest.mark.parametrize("grad", [None, torch.ones(1)], ids=["none", "tensor"])
def test_parameters_must_be_tensors(grad: Any) -> None:
    optimizer = from_torch(torch.optim.SGD)
    with pytest.raises(OptimError, match=r"params: leaf .* must be a tensor, got 2\."):
        optimizer.apply({"w": grad}, optimizer.init({"w": torch.ones(1)}), {"w": 2})


def test_the_class_itself_is_left_alone() -> None:
    step = torch.optim.Adam.step
    from_torch(torch.optim.Adam)
    assert torch.optim.Adam.step is step


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(4, 6, 3, 2),
    "transposed": lambda: torch.randn(6, 4, 3, 2).transpose(0, 1),
    "channels_last": lambda: torch.randn(4, 6, 3, 2).to(memory_format=torch.channels_last),
    "strided": lambda: torch.randn(8, 6, 3, 2)[::2],
    "expanded": lambda: torch.randn(1, 6, 1, 1).expand(4, 6, 3, 2),
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("grad_layout", LAYOUTS)
@pytest.mark.parametrize("param_layout", [name for name in LAYOUTS if name != "expanded"])
@pytest.mark.parametrize("case", FUSED_CASES, ids=repr)
def test_any_layout(case: Case, param_layout: str, grad_layout: str, donate: bool, seed: int) -> None:
    params = {"a": LAYOUTS[param_layout](), "b": torch.randn(5)}
    straight = {key: param.clone(memory_format=torch.contiguous_format) for key, param in params.items()}
    optimizer = from_torch(case.cls, **case.kwargs)
    state, straight_state = optimizer.init(params), optimizer.init(straight)
    for _ in range(3):
        grads = {"a": LAYOUTS[grad_layout](), "b": torch.randn(5)}
        params, state = optimizer.apply(grads, state, params, donate=donate)
        flat_grads = {key: grad.contiguous() for key, grad in grads.items()}
        straight, straight_state = optimizer.apply(flat_grads, straight_state, straight, donate=True)
    # Where vector lanes fall depends on the layout, and so does the last bit.
    torch.testing.assert_close(params, straight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state.per_param, straight_state.per_param, rtol=1e-5, atol=1e-6)


# Updates as nodes of compiled graphs: those of the same class eagerly, on lists of tensors where the class can.
CLASSES: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.Adam, {}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    (torch.optim.Rprop, {}),
]


@pytest.mark.slow_compile
@pytest.mark.full(but=2)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(("cls", "options"), CLASSES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_a_class(cls: Any, options: dict[str, Any], backend: str, seed: int) -> None:
    optimizer = from_torch(cls, lr=0.02, **options)
    params = {"a": torch.randn(3, 4), "b": torch.randn(5), "0-dim": torch.randn(())}
    graphs: list[str] = []

    def watched(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append("lists" if [n for n in graph.graph.nodes if "_foreach_" in str(n.target)] else "tensors")
        return graph

    if backend == "aot_eager":
        from torch._dynamo.backends.common import aot_autograd

        compiler: Any = aot_autograd(fw_compiler=watched)
    else:
        compiler = backend
    compiled = torch.compile(lambda g, s, p: optimizer.apply(g, s, p), fullgraph=True, backend=compiler)
    mine = theirs = (params, optimizer.init(params))
    for _ in range(4):
        grads = ltx.tree.map(torch.randn_like, params)
        mine, theirs = compiled(grads, mine[1], mine[0]), optimizer.apply(grads, theirs[1], theirs[0])
    torch.testing.assert_close(dict(mine[0]), dict(theirs[0]), rtol=1e-5, atol=1e-6)
    for own, other in zip(*(ltx.tree.flatten(pair[1])[0] for pair in (mine, theirs)), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)
    assert set(graphs) == (set() if backend == "eager" else {"lists"})


def test_one_that_reads_its_count_of_steps_is_refused() -> None:
    optimizer, params = from_torch(torch.optim.Adagrad, lr=0.02), {"a": torch.randn(3)}
    state = optimizer.init(params)
    with pytest.raises(Exception, match=r"UnsupportedError: .* reads numbers off its state"):  # as Dynamo hands it on
        torch.compile(lambda g, s, p: optimizer.apply(g, s, p), backend="eager")(params, state, params)
