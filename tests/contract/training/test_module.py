"""After ``train.init(model)`` the module has the present weights and buffers between steps, as with DDP."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ltx
from ltx.errors import DonatedStateError, InvalidStateError, StepError
from tests.kinds import Ranks
from tests.train_on import go_on, on_ranks, refuses, said


class Net(nn.Module):
    """Tied weights, a frozen bias, batch norm."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.last.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).tanh())


SGD = ltx.optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)
X = torch.linspace(-1, 1, 32).reshape(8, 4) ** 3


def training(model: nn.Module, strategy: Any = None, optimizer: Any = SGD, **options: Any) -> Any:
    def loss(params: Any, buffers: Any, x: Tensor) -> Any:
        output, buffers = ltx.functional_call(model, (params, buffers), x, return_buffers=True)
        return (output - 1).square().mean(), buffers

    return ltx.train_step(ltx.data_parallel(loss, strategy), optimizer, **options)


def begun(strategy: Any = None, **options: Any) -> tuple[Net, Any, Any]:
    model = Net(int(ltx.axis_index()))  # other values on every rank
    train = training(model, strategy, **options)
    return model, train, train.init(model, dict(model.named_buffers()))


def held(state: Any) -> dict[str, Tensor]:
    """The state's values; nobody reads the state by that."""
    parts = (state.held_params, state.frozen or {}, state.held_buffers or {})
    return {name: x.detach().clone() for part in parts for name, x in part.items() if x is not None}


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in (*model.named_parameters(), *model.named_buffers())}


def shows(model: nn.Module, state: Any) -> bool:
    now, wanted = values(model), held(state)
    return now.keys() == wanted.keys() and all(torch.equal(x, wanted[name]) for name, x in now.items())


def batch(number: int) -> Tensor:
    return X.roll(number, 0) + 0.1 * int(ltx.axis_index())


SMALL: Any = {"bucket_bytes": 64, "first_bucket_bytes": 64}

#: How steps make the next state.
WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "in place": (None, {}),
    "donate=False": (None, {"donate": False}),
    "overlap": (ltx.DDPStrategy(**SMALL), {"overlap": "update"}),
    "skip": (None, {"guard": "skip"}),
    "scale": (None, {"guard": "skip", "max_skipped": 3, "donate": False}),
    "fused": (None, {"optimizer": ltx.optim.from_torch(torch.optim.AdamW, lr=0.1, fused=True)}),
    "chain": (None, {"optimizer": ltx.optim.chain(ltx.optim.clip_by_global_norm(0.1), SGD)}),
    "stateful hook": (ltx.DDPStrategy(comm_hook=ltx.hooks.error_feedback(ltx.hooks.ByteGrad())), {}),
    "local": (ltx.LocalSGDStrategy(period=2, warmup_steps=0), {}),
    "zero": (ltx.ZeroStrategy(**SMALL), {"overlap": "update"}),
    "adasum": (ltx.HorovodStrategy(op="adasum"), {}),
    "gossip": (ltx.BaguaStrategy("decentralized"), {}),
    "async": (ltx.BaguaStrategy("async", warmup_steps=0), {}),
    "diloco": (ltx.DiLoCoStrategy(period=2), {}),
}


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2, alone=True)
def test_the_module_has_the_present_values(way: str, read: bool) -> None:
    strategy, options = WAYS[way]
    model, train, state = begun(strategy, **options)
    owners, start = list(model.parameters()), values(model)
    assert shows(model, state)
    for number in range(5):
        state, _ = train(state, batch(number) * (torch.inf if way == "skip" and number == 2 else 1))
        if read:
            _ = state.params
        assert shows(model, state)
    assert shows(model, train.finish(state))
    assert all(a is b for a, b in zip(owners, model.parameters(), strict=True))
    assert [x.requires_grad for x in owners] == [True, True, True, True, False]
    assert model.last.weight is model.first.weight
    assert not torch.equal(start["first.weight"], model.first.weight)
    assert torch.equal(start["last.bias"], model.last.bias)


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for x in model.parameters():
            x.mul_(0.5)


def by_data(model: nn.Module) -> None:
    for x in model.parameters():
        x.data = x.data * 0.5


def by_a_vector(model: nn.Module) -> None:
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()) * 0.5, model.parameters())


def changed(way: str, change: Callable[[nn.Module], None]) -> tuple[bool, dict[str, Tensor]]:
    """Whether the module shows the state after it was changed between two steps; and its values then."""
    strategy, options = WAYS[way]
    model, train, state = begun(strategy, **options)
    for number in range(4):
        state, _ = train(state, batch(number))
        if number == 1:
            change(model)
    return shows(model, train.finish(state)), values(model)


@pytest.mark.parametrize(
    "way", ["in place", "donate=False", "overlap", "fused", "stateful hook", "local", "zero", "diloco"]
)
@on_ranks(2, alone=True)
def test_values_that_are_put_under_its_parameters_are_the_state_s(way: str) -> None:
    """``p.data = x``, as vector_to_parameters does: the next step went on from what was before, without a word."""
    _, wanted = changed(way, in_place)
    found = [changed(way, change) for change in (by_data, by_a_vector)]
    assert [after and all(torch.equal(x, wanted[k]) for k, x in now.items()) for after, now in found] == [True, True]


def test_values_that_are_put_under_its_parameters_are_saved(tmp_path: Path) -> None:
    model, train, state = begun()
    state, _ = train(state, X)
    by_data(model)
    ltx.checkpoint.save(tmp_path, state)
    wanted = values(model)
    assert all(torch.equal(x, wanted[name]) for name, x in state.params.items())
    model.requires_grad_(False)  # to evaluate it
    loaded = ltx.checkpoint.load(tmp_path, begun()[2]).state
    assert all(torch.equal(x, wanted[name]) for name, x in loaded.params.items())


def statistics_replaced(model: Net) -> None:
    model.norm.running_mean = torch.full((4,), 9.0)


def statistics_by_data(model: Net) -> None:
    assert model.norm.running_mean is not None
    model.norm.running_mean.data = torch.full((4,), 9.0)


def statistics_in_place(model: Net) -> None:
    assert model.norm.running_mean is not None
    model.norm.running_mean.fill_(9.0)


@pytest.mark.parametrize("way", ["in place", "donate=False"])
def test_buffers_that_are_replaced_are_the_state_s(way: str) -> None:
    _, wanted = changed(way, statistics_in_place)
    for change in (statistics_by_data, statistics_replaced):
        after, now = changed(way, change)
        assert after
        assert all(torch.equal(x, wanted[k]) for k, x in now.items())


def parts_replaced(model: Net) -> None:
    model.last = nn.Linear(4, 4)


def parameter_replaced(model: Net) -> None:
    model.first.bias = nn.Parameter(torch.zeros(4))


#: What becomes of a module between two steps, and the error.
BECOMES: dict[str, tuple[Callable[[Net], Any], str]] = {
    "a part replaced": (parts_replaced, "'last.bias' of Net was replaced"),
    "a buffer removed": (lambda m: delattr(m.norm, "running_var"), "'norm.running_var' of Net was removed"),
    "no buffer any more": (lambda m: setattr(m.norm, "running_mean", None), "'norm.running_mean' of Net was removed"),
    "a parameter replaced": (parameter_replaced, "'first.bias' of Net was replaced"),
    "frozen": (
        lambda m: m.first.requires_grad_(False),
        "'first.weight' of Net requires no gradient now, other than at",
    ),
    "unfrozen": (lambda m: m.last.requires_grad_(), "'last.bias' of Net requires a gradient now, other than at"),
    "converted": (
        lambda m: m.double(),
        r"'first.weight' of Net is float64\[4, 4\] now, and float32\[4, 4\] in the state",
    ),
    "assigned": (
        lambda m: m.load_state_dict(copy.deepcopy(m.state_dict()), assign=True),
        "'first.weight' of Net was replaced",
    ),
}


@pytest.mark.parametrize("how", BECOMES)
@pytest.mark.parametrize("donate", [True, False])
def test_what_the_step_would_pass_over_is_refused(how: str, donate: bool) -> None:
    """The state had gone on with what it had: a new layer wasn't used, a frozen one was trained."""
    model, train, state = begun(donate=donate)
    state, _ = train(state, X)
    change, text = BECOMES[how]
    change(model)
    refuses(StepError, text + r".*state = train\.init\(module\)", train, state, X)


def test_parts_around_the_same_parameters() -> None:
    """As a part that is compiled after train.init."""

    class Around(nn.Module):
        def __init__(self, part: nn.Module):
            super().__init__()
            self.__dict__["of"], self.inner = part, part

        def __getattr__(self, name: str) -> Any:
            return getattr(self.__dict__["of"], name)

        def forward(self, x: Tensor) -> Tensor:
            return self.__dict__["of"](x)

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    train = ltx.train_step(ltx.data_parallel(lambda p, x: ltx.functional_call(model, p, x).square().sum()), SGD)
    state = train.init(model)
    state, _ = train(state, X)
    model[1] = Around(model[1])
    state.module.look(state, True)  # type: ignore[union-attr]


def test_the_state_and_steady_steps_are_in_the_modules_memory() -> None:
    model = Net()
    train, places = training(model), {name: p.data_ptr() for name, p in model.named_parameters()}
    state = train.init(model, dict(model.named_buffers()))
    for number in range(3):
        trained = {name: p.data_ptr() for name, p in state.params.items()}
        assert trained.items() <= places.items() == {n: p.data_ptr() for n, p in model.named_parameters()}.items()
        state, _ = train(state, batch(number))


@pytest.mark.parametrize("donate", [True, False])
def test_init_again_begins_from_the_modules_weights(donate: bool) -> None:
    model, train, state = begun(donate=donate)
    state, _ = train(state, batch(0))
    now, best, mine = values(model), copy.deepcopy(state), state.params["first.weight"]
    again = train.init(model, dict(model.named_buffers()))
    assert shows(model, again)
    assert again.step == 0
    assert all(torch.equal(x, now[name]) for name, x in held(again).items())
    refuses(InvalidStateError, "ended: train.init was called once more, with its module", lambda: state.params)
    refuses(InvalidStateError, "ended: train.init was called once more, with its module", train, best, batch(0))
    again, _ = train(again, batch(1))
    assert torch.equal(mine, now["first.weight"]), "tensors of the older state keep their values"
    apart, _ = train(replace(best, module=None), batch(1))
    assert apart.step == 2
    assert shows(model, again)


def loaded(train: Any, state: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        folder = ltx.broadcast_object(folder)
        ltx.checkpoint.save(folder, state)
        found = ltx.checkpoint.load(folder, state).state
        ltx.barrier()
    return found


def unpickled(train: Any, state: Any) -> Any:
    """Rank 0's file, as all ranks read it."""
    return pickle.loads(ltx.broadcast_object(pickle.dumps(state)))


#: States from elsewhere, and whether they are those that ``train`` has given last, which the module shows.
ELSEWHERE: dict[str, tuple[Callable[[Any, Any], Any], bool]] = {
    "replace": (lambda train, s: replace(s, params={n: x + 1 for n, x in s.params.items()}), False),
    "deepcopy": (lambda train, s: copy.deepcopy(s), False),
    "load": (loaded, False),
    "unpickled": (unpickled, False),
    "a tree operation": (lambda train, s: ltx.tree.map(torch.clone, s), False),
    "a collective": (lambda train, s: ltx.broadcast(s), False),
    "broadcast": (lambda train, s: train.broadcast(s), True),
    "adopt": (lambda train, s: train.adopt(s), True),
    "gather": (lambda train, s: train.gather(s), True),
    "finish": (lambda train, s: train.finish(s), True),
}


@pytest.mark.parametrize("name", ELSEWHERE)
@on_ranks(2, alone=True)
def test_states_from_elsewhere(name: str) -> None:
    """The module shows what `train` gave last; what a program made is shown after a step of it."""
    model, train, state = begun(ltx.ZeroStrategy() if name == "gather" else None)
    state, _ = train(state, batch(0))
    make, at_once = ELSEWHERE[name]
    other = make(train, copy.deepcopy(state))
    if not at_once and name != "replace":
        state, _ = train(state, batch(1))  # the module goes on, and the other one is behind
        assert shows(model, state)
    assert shows(model, other) == at_once
    other, _ = train(other, batch(2))
    assert shows(model, other)
    state, _ = train(state, batch(3))
    assert shows(model, state)


def from_another_process(pickled: bytes) -> None:
    model, train, first = begun()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        behind = train(train(pickle.loads(pickled), batch(1))[0], batch(2))[0]
    assert ["Net followed it" in str(each.message) for each in caught] == [True], caught
    state = train(replace(pickle.loads(pickled), module=first.module), batch(1))[0]
    assert shows(model, state)
    assert not shows(model, behind)


def test_a_state_that_is_unpickled_in_another_process(ranks: Ranks) -> None:
    """There it has no module, and a step says so; it can be given one."""
    _, train, state = begun()
    ranks(2).run(from_another_process, pickle.dumps(train(state, batch(0))[0]))


def test_a_copied_pair_of_model_and_state_stays_together() -> None:
    first = dict(zip(("model", "train", "state"), begun(), strict=True))
    first["state"], _ = first["train"](first["state"], batch(0))
    clone = copy.deepcopy(first)
    for number in range(2):
        clone["state"], _ = first["train"](clone["state"], batch(number))
    assert shows(clone["model"], clone["state"])
    assert shows(first["model"], first["state"])
    assert not shows(first["model"], clone["state"])


@on_ranks(2, alone=True)
def test_parameters_stay_in_their_memory() -> None:
    """Another process, or a flat buffer, may look at the memory of the module's parameters."""
    model = Net(int(ltx.axis_index()))
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    at = 0
    for x in model.parameters():
        x.data = flat[at : at + x.numel()].view_as(x)
        at += x.numel()
    train = training(model)
    state = train.init(model, dict(model.named_buffers()))
    assert torch.equal(flat, ltx.broadcast(flat))
    state, _ = train(state, batch(0))
    assert torch.equal(flat, nn.utils.parameters_to_vector(model.parameters()))
    assert shows(model, state)


def test_an_expanded_parameter_and_a_quantized_buffer(ranks: Ranks) -> None:
    """The one can't be written to, the other can't be compared or sent; torch warns of quantized tensors."""

    class Odd(Net):
        def __init__(self) -> None:
            super().__init__(int(ltx.axis_index()))
            self.place = nn.Parameter(torch.randn(1, 4).expand(8, 4), requires_grad=False)
            with warnings.catch_warnings(action="ignore"):
                self.register_buffer("codes", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + self.place)

    def run() -> list[float]:
        model = Odd()
        train = training(model)
        state, _ = train(train.init(model, {name: x for name, x in model.named_buffers() if name != "codes"}), batch(0))
        return list(state.params["place"][3].tolist())

    assert len(ranks(2).run(run).replicated()) == 4


@on_ranks(2)
def test_buffers_that_nothing_writes_to_are_rank_0s() -> None:
    """Random Fourier features, say, of which a step takes the module's own."""
    model = nn.Linear(2, 2)
    model.register_buffer("fixed", torch.full((2,), float(ltx.axis_index())))
    ltx.train_step(ltx.data_parallel(lambda p, x: p["weight"].sum() * x), SGD).init(model)
    assert isinstance(model.fixed, Tensor)
    assert model.fixed.tolist() == [0.0, 0.0]


class Observer(nn.Module):
    """As torch.ao.quantization's: the first batch says how many channels there are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("least", torch.tensor([]))

    def forward(self, x: Tensor) -> Tensor:
        low = x.detach().amin(0)
        if not self.least.numel():
            self.least.resize_(low.shape).fill_(torch.inf)
        self.least.copy_(torch.minimum(self.least, low))
        return self.layer(x - self.least)


def test_a_buffer_that_changes_its_shape() -> None:
    model = Observer()
    train = training(model)
    state, _ = go_on(train, train.init(model, dict(model.named_buffers())), [batch(0), batch(1)])
    assert shows(model, state)
    assert model.least.shape == (4,)


@pytest.mark.parametrize("layers", [1, 20])
@on_ranks(2, alone=True)
def test_hooks_that_come_between_steps_are_refused(layers: int) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    train = ltx.train_step(ltx.data_parallel(lambda p, x: ltx.functional_call(model, p, x).square().mean()), SGD)
    state, _ = train(train.init(model), batch(0))
    first: Any = model[0]
    first.weight.register_hook(torch.zeros_like)
    refuses(StepError, r"'0\.weight' of Sequential has hooks \(register_hook\)", train, state, batch(1))


def test_to_module_and_the_next_step() -> None:
    """to_module puts in copies of another state; the next step puts in its own, under the same Parameters."""
    model, train, state = begun()
    kept, best = list(model.parameters()), copy.deepcopy(state)
    state, _ = train(state, batch(0))
    ltx.to_module(model, best)
    assert shows(model, best)
    assert not shows(model, state)
    state, _ = train(state, batch(1))
    assert shows(model, state)
    assert all(a is b for a, b in zip(kept, model.parameters(), strict=True))
    assert ltx.to_module(model, state) is model
    state, _ = train(state, batch(2))
    assert shows(model, state), "it had the state's values already"

    best = copy.deepcopy(state)
    ltx.to_module(model, best)
    with torch.no_grad():
        model.first.weight.zero_()
    refuses(StepError, "'first.weight' of Net was written to since ltx.to_module", train, state, batch(3))
    ltx.to_module(model, best)
    model.load_state_dict(copy.deepcopy(model.state_dict()))  # with what the state has
    state, _ = train(best, batch(3))
    assert shows(model, state)


@pytest.mark.parametrize("look", [None, "read", "save", "copy"])
def test_weights_that_are_swapped_by_data_come_back(look: str | None, tmp_path: Path) -> None:
    """An average is put in by ``p.data = x`` to evaluate or save it, and then what was there before."""
    model, train, state = begun()
    state, _ = train(state, X)
    wanted, before = values(model), [x.data for x in model.parameters()]
    for x in model.parameters():
        x.data = torch.zeros_like(x)
    if look == "save":
        ltx.checkpoint.save(tmp_path, state)
    seen = {"copy": copy.deepcopy, None: lambda _: None}.get(look, lambda state: state)(state)
    assert seen is None or not any(x.any() for x in seen.params.values())
    for x, data in zip(model.parameters(), before, strict=True):
        x.data = data
    assert all(torch.equal(x, wanted[name]) for name, x in state.params.items())
    state, _ = train(state, batch(1))
    assert shows(model, state)


@pytest.mark.parametrize("overlap", ["backward", "update"])
@on_ranks(2, alone=True)
def test_a_step_that_fails(overlap: Any) -> None:
    model, train, state = begun(ltx.DDPStrategy(**SMALL), overlap=overlap)
    state, _ = train(state, batch(0))
    was = values(model)
    refuses(Exception, "shape", train, state, torch.ones(2, 3))  # in the forward pass
    assert all(torch.equal(x, was[n]) for n, x in values(model).items())
    assert shows(model, state)
    state, _ = train(state, batch(1))
    assert shows(model, state)


def test_a_module_whose_state_is_invalid_says_so() -> None:
    model, train, state = begun()
    best = copy.deepcopy(state)
    state.invalidate("why", ValueError("so"))
    assert "this Net has the tensors of a TrainState, and this TrainState" in said(DonatedStateError, model, X)
    said(DonatedStateError, train.init, model)
    assert shows(ltx.to_module(model, best), best)
    best, _ = train(best, batch(0))
    assert shows(model, best)


def test_the_modules_own_parameters_are_refused_in_a_step() -> None:
    model = Net().eval()
    train = ltx.train_step(
        ltx.data_parallel(lambda p, x: ltx.functional_call(model, p, x).mean() + model(x).mean()), SGD
    )
    state = train.init(model)
    refuses(StepError, "'first.weight' of Net, a parameter of shape .* isn't one of its arguments", train, state, X)
    assert shows(model, replace(state, buffers=dict(model.named_buffers())))


def test_the_parameters_of_a_module_as_a_dict_warn() -> None:
    model = Net()
    train = training(model)
    with pytest.warns(UserWarning, match=r"With train\.init\(model\) the module follows each step"):
        state = train.init(dict(model.named_parameters()), dict(model.named_buffers()))
    was = values(model)
    train(state, X)
    assert all(torch.equal(x, was[name]) for name, x in values(model).items())


def test_copies_of_the_module_and_the_end_of_the_state() -> None:
    model, train, state = begun()
    twin, other = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    torch.save(dict(model.named_parameters()), file := io.BytesIO())
    file.seek(0)
    assert torch.load(file, weights_only=True).keys() == dict(model.named_parameters()).keys()
    assert pickle.loads(pickle.dumps(state)).module is state.module
    was = values(model)
    state, _ = train(state, batch(0))
    assert all(torch.equal(x, was[name]) for each in (twin, other) for name, x in values(each).items())
    was = values(model)
    del state
    gc.collect()
    assert all(torch.equal(x, was[name]) for name, x in values(model).items())
    model(X).sum().backward()
    state = train.init(model, dict(model.named_buffers()))
    assert shows(model, train(state, batch(1))[0])


def test_two_modules_and_simulated_ranks() -> None:
    model, train, state = begun()
    other, train_other, state_other = begun(donate=False)
    for number in range(2):
        state, _ = train(state, batch(number))
        state_other, _ = train_other(state_other, batch(number + 1))
        assert shows(model, state)
        assert shows(other, state_other)
    was = values(model)
    on_rank = lambda x: train(train.init(model, dict(model.named_buffers())), x)[0].params  # noqa: E731
    ltx.vmap(on_rank, out_dims=None)(torch.randn(2, 8, 4))
    assert all(torch.equal(x, was[name]) for name, x in values(model).items()), "ranks' values aren't a module's"
    state, _ = train(state, batch(2))
    assert shows(model, state)
