"""Classes of other authors that keep their arithmetic to themselves, beside themselves on torch's own terms."""

from __future__ import annotations

import itertools
import math
import pickle
import random
import re
import threading
from array import array
from collections.abc import Callable, Iterable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx.errors import OptimError, StrategyError
from ltx.extend import Update
from ltx.optim import from_torch
from tests import train_on
from tests.contract.optim.cases import clone, same_bits
from tests.kinds import Ranks
from tests.needs import needs
from tests.train_on import refuses


class Lion(torch.optim.Optimizer):
    """Ten lines, as people write them: no _init_group, state made at the first step."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.add_(m.lerp(p.grad, 1 - group["betas"][0]).sign_(), alpha=-group["lr"])
                m.lerp_(p.grad, 1 - group["betas"][1])


class Together(torch.optim.Optimizer):
    """All that such classes do: one norm for all, a count in the group, numbers and None in the state, p.data set."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-2, decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            with_grads = [p for p in group["params"] if p.grad is not None]
            norm = math.sqrt(sum(float(p.grad.square().sum()) for p in with_grads)) or 1.0
            for p in with_grads:
                state = self.state[p]
                if not state:
                    state.update(n=0, rms=0.0, row=None, avg=torch.zeros_like(p))
                state["n"] += 1
                state["rms"] = 0.5 * state["rms"] + 0.5 * norm
                p.grad.div_(norm).add_(p, alpha=group["decay"])  # in place, as many do
                state["avg"].mul_(0.9).add_(p.grad)
                p.data = p.data - group["lr"] * state["avg"] / (group["step"] * (1 + state["rms"]) + state["n"])


class Lamb(torch.optim.Optimizer):
    """As timm's: gradients clipped together, a trust ratio for each parameter, a tensor in the group that counts."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-2, max_norm: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "max_norm": max_norm, "snapshot": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        clip = (torch.stack([g.norm() for g in grads]).norm() / self.defaults["max_norm"]).clamp(min=1.0)
        for group in self.param_groups:
            if "step" not in group:
                group["step"] = torch.tensor(0.0)
            group["step"].add_(1)
            debiased = 1 - 0.9 ** group["step"].item()
            for p in (p for p in group["params"] if p.grad is not None):
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p)).lerp_(p.grad / clip, 0.1)
                ratio = torch.where(m.norm() > 0, p.norm() / m.norm(), 1.0)
                p.sub_(group["snapshot"] * ratio * m / debiased)


class Hidden(torch.optim.SGD):
    """Gathers its tensors, and keeps a state besides."""

    def _init_group(self, group: Any, *lists: Any) -> Any:
        found = super()._init_group(group, *lists)
        for p in group["params"]:
            self.state[p]["seen"] = self.state[p].get("seen", torch.zeros(())) + 1
        return found


class Anchored(Lion):
    """Whose state begins with other numbers than 0, and the group's count, too, when there is none yet."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        group["turn"] = group.get("turn", 3) + 1
        for p in (p for p in group["params"] if p.grad is not None):
            state = self.state[p]
            if len(state) == 0:
                state.update(anchor=p.clone(), n=2)
            state["n"] += 1
            p.sub_(p.grad, alpha=group["lr"] * group["turn"] / state["n"]).lerp_(state["anchor"], 0.25)


class NumbersAsKeys(Lion):
    """Two averages, under their rates; and names that begin as ltx's own do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for p in self.param_groups[0]["params"] if p.grad is not None):
            for key in (0.5, 9, (1, "b"), "number of steps"):
                m = self.state[p].setdefault(key, torch.zeros_like(p))
                p.sub_(m.mul_(0.5).add_(p.grad), alpha=0.1)


class Decays(Lion):
    """Changes its rate itself, as timm's Adafactor, and divides by its gradients' sum, as DAdaptSGD."""

    def step(self, closure: Any = None) -> None:
        super().step()
        total = sum(float(p.grad.abs().sum()) for p in self.param_groups[0]["params"] if p.grad is not None)
        self.param_groups[0]["lr"] *= 0.5 + 0.01 / total


class HalvesLater(Lion):
    """Changes its rate at the third step, when the state is made long since."""

    def step(self, closure: Any = None) -> None:
        super().step()
        group = self.param_groups[0]
        group["n"] = group.get("n", 0) + 1
        group["lr"] *= 0.5 if group["n"] == 3 else 1


class Gathers(Lion):
    """Gathers its tensors in _init_group, and makes its state after it, as timm's SGDW."""

    def _init_group(self, group: Any, params: list[Any], momenta: list[Any]) -> None:
        for p in (p for p in group["params"] if p.grad is not None):
            params.append(p)
            momenta.append(self.state[p].get("m"))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        lists: list[list[Any]] = [[], []]
        self._init_group(self.param_groups[0], *lists)
        for p, m in zip(*lists, strict=True):
            new = self.state[p]["m"] = p.grad.clone() if m is None else m.mul_(0.9).add_(p.grad)
            p.sub_(new, alpha=self.param_groups[0]["lr"])


class Built(torch.optim.Optimizer):
    """Built as torch's are: its state is made where its tensors are gathered."""

    def __init__(self, params: Any, lr: float = 1e-2, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    def _init_group(self, group: Any, params: list[Any], grads: list[Any], momenta: list[Any]) -> None:
        for p in group["params"]:
            if p.grad is not None:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                params.append(p)
                grads.append(p.grad)
                momenta.append(state["momentum"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            lists: list[list[Any]] = [[], [], []]
            self._init_group(group, *lists)
            for p, g, m in zip(*lists, strict=True):
                p.sub_(m.lerp(g, 0.1).sign(), alpha=group["lr"])
                m.lerp_(g, 1 - group["beta"])


class MadeAtOnce(Built):
    """State made by the constructor, as that of torch 2.11's Adagrad."""

    def __init__(self, params: Any, lr: float = 0.1, start: float = 0.1) -> None:
        super().__init__(params, lr)
        for p in self.param_groups[0]["params"]:
            self.state[p]["momentum"] = torch.full_like(p, start)


class Clips(torch.optim.AdamW):
    """A class of torch whose step looks at all parameters."""

    def step(self, closure: Any = None) -> None:
        torch.nn.utils.clip_grad_norm_([p for p in self.param_groups[0]["params"] if p.grad is not None], 0.1)
        super().step()


class EverySecond(torch.optim.SGD):
    """A class of torch that counts its steps in the group."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.param_groups[0]["n"] = 0

    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["n"] += 1
        if self.param_groups[0]["n"] % 2 == 0:
            super().step()


class Hooked(torch.optim.SGD):
    def __init__(self, params: Iterable[Tensor], lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)

        @torch.no_grad()
        def halve(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            for p in optimizer.param_groups[0]["params"]:
                p.mul_(0.5)

        self.register_step_post_hook(halve)


class MakesGroups(torch.optim.SGD):
    def __init__(self, params: Iterable[Tensor], lr: float = 0.1) -> None:
        params = [*params]
        decayed, others = [p for p in params if p.dim() > 1], [p for p in params if p.dim() < 2]
        super().__init__([{"params": decayed, "weight_decay": 0.5}, {"params": others}], lr=lr)


class ByShape(torch.optim.SGD):
    """A group for each parameter, with a rate by its shape."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.1) -> None:
        super().__init__([{"params": [p], "lr": lr / p.numel()} for p in params], lr=lr)


class SetsAfterwards(torch.optim.SGD):
    def __init__(self, params: Iterable[Tensor], lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.param_groups[0]["momentum"] = 0.9


class AddsDecay(torch.optim.SGD):
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group({**param_group, "weight_decay": 0.5})


CLASSES: dict[str, tuple[Callable[[], type], dict[str, Any]]] = {
    "lion": (lambda: Lion, {"lr": 0.01, "betas": (0.5, 0.9)}),
    "together": (lambda: Together, {"lr": 0.1, "decay": 0.01}),
    "lamb": (lambda: Lamb, {"lr": 0.1}),
    "hidden": (lambda: Hidden, {"lr": 0.1, "momentum": 0.9}),
    "anchored": (lambda: Anchored, {"lr": 0.1}),
    "numbers as keys": (lambda: NumbersAsKeys, {}),
    "decays": (lambda: Decays, {"lr": 0.1}),
    "halves its rate later": (lambda: HalvesLater, {"lr": 0.1}),
    "schedule-free": (lambda: Averaging, {"lr": 0.1}),
    "gathers": (lambda: Gathers, {"lr": 0.1}),
    "built as torch's": (lambda: Built, {"lr": 0.1, "beta": 0.5}),
    "clips": (lambda: Clips, {"lr": 0.1}),
    "every second": (lambda: EverySecond, {}),
    "hooked": (lambda: Hooked, {}),
    "makes groups": (lambda: MakesGroups, {}),
    "a group for each": (lambda: ByShape, {}),
    "sets afterwards": (lambda: SetsAfterwards, {}),
    "adds decay": (lambda: AddsDecay, {"lr": 0.1}),
    "state of the constructor": (lambda: MadeAtOnce, {"start": 0.05}),
    "transformers": (
        lambda: import_module("transformers.optimization").Adafactor,
        {"scale_parameter": True, "relative_step": True, "warmup_init": True},
    ),
}


@pytest.mark.filterwarnings("ignore:Averaging evaluates with other weights")
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[needs("transformers")][: name == "transformers"]) for name in CLASSES]
)
def test_as_the_class_itself(name: str, donate: bool, seed: int) -> None:
    if name == "transformers" and not hasattr(import_module("transformers.optimization"), "Adafactor"):
        pytest.skip("this transformers has no Adafactor of its own")
    make, kwargs = CLASSES[name]
    cls = make()
    theirs = [torch.randn(size).requires_grad_() for size in ((4, 3), 3, 2, 3)]
    params: Any = dict(zip("abcd", [x.detach().clone() for x in theirs], strict=True))
    optimizer, reference = from_torch(cls, **kwargs), cls(theirs, **kwargs)
    state = optimizer.init(params)
    count = ltx.tree.flatten(state)[1].num_leaves
    for step in range(4):
        given: Any = {key: torch.randn_like(x) for key, x in params.items()}
        given |= {"c": None} if step == 1 else {}  # a parameter without a gradient stays as it is
        given |= {"d": None} if step < 2 else {}  # and a state begins at the first one
        for x, g in zip(theirs, given.values(), strict=True):
            x.grad = None if g is None else g.clone()
        getattr(reference, "train", lambda: None)()
        reference.step()
        before = clone((given, params, state))
        new, new_state = optimizer.apply(given, state, params, donate=donate)
        assert same_bits(given, before[0])
        assert donate or same_bits((params, state), before[1:]), "neither parameters nor state are written to"
        params, state = new, new_state
        assert all(torch.equal(x, y) for x, y in zip(theirs, params.values(), strict=True))
        late = step < 2 and name == "hidden"  # whose momentum comes with the first gradient
        assert late or ltx.tree.flatten(state)[1].num_leaves == count
    assert pickle.loads(pickle.dumps(optimizer)) == optimizer


@pytest.mark.parametrize("finite", [False, torch.tensor(False)], ids=["on the host", "on the device"])
@pytest.mark.parametrize("donate", [False, True])
def test_a_first_step_that_is_skipped_begins_no_state(finite: Any, donate: bool, seed: int) -> None:
    optimizer, params = from_torch(Anchored, lr=0.1), {"w": torch.randn(3)}
    leaf = params["w"].clone().requires_grad_()
    reference = Anchored([leaf], lr=0.1)
    bad, grad = {"w": torch.full((3,), torch.nan)}, torch.randn(3)
    kept, state = Update(optimizer, params, bad, optimizer.init(params), donate=donate, finite=finite).apply()
    after, _ = optimizer.apply({"w": grad}, state, kept, donate=donate)
    leaf.grad = grad.clone()
    reference.step()
    assert torch.equal(after["w"], leaf)


def trained(name: str, seed: int) -> Any:
    """Three steps, on each rank's own part of the batches."""
    cls, kwargs = CLASSES[name]
    torch.manual_seed(seed)
    params = {"w": torch.randn(3, 3, dtype=torch.float64), "b": torch.randn(3, dtype=torch.float64)}
    xs = torch.randn(3, 4, 3, dtype=torch.float64)
    step = ltx.data_parallel(lambda p, x: (x @ p["w"] + p["b"]).square().mean())
    state, _ = train_on.trained(step, from_torch(cls(), **kwargs), params, [ltx.shard(x) for x in xs])
    return state.params, xs, params


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.full, needs("transformers")][: 2 * (name == "transformers")])
        for name in CLASSES
    ],
)
def test_two_ranks_train_as_one(name: str, ranks: Ranks, seed: int) -> None:
    both, xs, start = ranks(2).run(trained, name, seed).replicated()
    theirs = {key: x.clone().requires_grad_() for key, x in start.items()}
    cls, kwargs = CLASSES[name]
    optimizer = cls()(list(theirs.values()), **kwargs)
    getattr(optimizer, "train", lambda: None)()
    train_on.loop_of_torch(optimizer, lambda x: (x @ theirs["w"] + theirs["b"]).square().mean(), xs)
    torch.testing.assert_close(both, {key: x.detach() for key, x in theirs.items()}, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("cls", "steps"), [(Together, 1), (Anchored, 0)])
def test_a_checkpoint_goes_on(cls: Any, steps: int, tmp_path: Any, seed: int) -> None:
    """Also that of a state that has not begun."""
    train = ltx.train_step(ltx.data_parallel(lambda w, x: (w * x).square().mean()), from_torch(cls))
    x = torch.randn(4, 3)
    state, _ = train_on.go_on(train, train.init(torch.randn(3)), [x] * steps)
    ltx.checkpoint.save(tmp_path, state)
    restored = ltx.checkpoint.load(tmp_path, train.init(torch.randn(3))).state
    assert torch.equal(train(state, x)[0].params, train(restored, x)[0].params)


def test_what_it_cannot_do_is_refused() -> None:
    step = ltx.data_parallel(lambda w: (w**2).sum())
    for cls in (Lion, Clips):
        with pytest.raises(StrategyError, match=rf"each parameter by itself, .* from_torch\({cls.__name__}\) doesn't"):
            ltx.train_step(step, from_torch(cls), overlap="update")
    with pytest.raises(StrategyError, match=r"ZeroStrategy needs an elementwise update, .* from_torch\(Lion\) doesn't"):
        ltx.train_step(ltx.data_parallel(lambda w: (w**2).sum(), ltx.ZeroStrategy()), from_torch(Lion))
    with pytest.raises(OptimError, match=r"neither torch\.func nor torch\.compile"):
        torch.func.vmap(lambda w: from_torch(Lion).init(w))(torch.ones(2, 3))


class WantsClosure(Lion):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


class KeepsObjects(Lion):
    def step(self, closure: Any = None) -> None:
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["history"] = [1, 2]


class WarmsUp(torch.optim.Adam):
    """Whose count isn't in its state, though it is torch's otherwise."""

    done = 0

    def step(self, closure: Any = None) -> None:
        self.done += 1
        super().step()


class CountsLater(Lion):
    """Keeps a hidden count from the fifth step on."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.later = 0

    def step(self, closure: Any = None) -> None:
        super().step()
        group = self.param_groups[0]
        group["n"] = group.get("n", 0) + 1
        self.later += group["n"] > 4


class CountsInEach(MakesGroups):
    def step(self, closure: Any = None) -> None:
        self.param_groups[1]["n"] = self.param_groups[1].get("n", 0) + 1
        super().step()


class KeepsGlobals(Lion):
    def step(self, closure: Any = None) -> None:
        super().step()
        self.state["all"]["n"] = torch.ones(1)  # type: ignore[index]


class Fails(Lion):
    def step(self, closure: Any = None) -> None:
        raise RuntimeError("call prepare() first.")


class Split(Tensor):
    """A tensor whose numbers lie in another one."""

    part: Tensor

    @staticmethod
    def __new__(cls, part: Tensor) -> Split:
        made = Tensor._make_wrapper_subclass(cls, part.shape, dtype=part.dtype)
        made.part = part
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].part)
        raise NotImplementedError(func)


class KeepsParts(Lion):
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("m", Split(torch.zeros(p.shape)))


@pytest.mark.parametrize(
    ("cls", "text"),
    [
        (WantsClosure, "wants a closure"),
        (KeepsObjects, "in its state as 'history'"),
        (WarmsUp, "from_torch(WarmsUp): its step() changes self.done, and ltx carries what is in state[parameter]"),
        (CountsLater, "its step() changes self.later"),
        (CountsInEach, "its step() changes group 1's n"),
        (lambda: from_torch(Decays, lr=lambda count: 0.1), "its step() changes the group's lr"),
        (KeepsGlobals, "keeps state under 'all'"),
        (KeepsParts, "keeps a Split in its state as 'm', which isn't a plain tensor"),
        (Fails, "its step() raised RuntimeError"),
        (Fails, "call prepare() first. ltx makes an"),
    ],
)
def test_classes_that_cannot_be_held(cls: Any, text: str) -> None:
    refuses(OptimError, re.escape(text), (from_torch(cls) if isinstance(cls, type) else cls()).init, torch.ones(2))


def keeping(make: Callable[[Any], Any], use: Callable[[Any], object]) -> type[torch.optim.Optimizer]:
    """A class that keeps something, made by its constructor, and uses it in each step."""

    class Keeps(Lion):
        shared = 0

        def __init__(self, params: Iterable[Tensor], lr: float = 1e-2) -> None:
            super().__init__([*params], lr)
            self.kept = make(self)

        def step(self, closure: Any = None) -> None:
            super().step()
            use(self)

    return Keeps


@pytest.mark.parametrize(
    ("make", "use", "where"),
    [
        (lambda _: 0, lambda own: setattr(own, "kept", own.kept + 1), "self.kept"),
        (
            lambda own: [torch.zeros_like(own.param_groups[0]["params"][0])],
            lambda own: own.kept[0].add_(1),
            "self.kept",
        ),
        (lambda _: torch.Generator(), lambda own: torch.rand(1, generator=own.kept), "self.kept"),
        (lambda _: random.Random(1), lambda own: own.kept.random(), "self.kept"),
        (lambda _: itertools.count(), lambda own: next(own.kept), "self.kept"),
        (lambda _: SimpleNamespace(n=0), lambda own: vars(own.kept).update(n=own.kept.n + 1), "self.kept"),
        (lambda _: {1}, lambda own: own.kept.add(len(own.kept) + 1), "self.kept"),
        (lambda _: array("d", [0]), lambda own: own.kept.append(0), "self.kept"),
        (lambda _: {0: {1: {2: {3: {}}}}}, lambda own: own.kept[0][1][2][3].update(n=1), "self.kept"),
        (lambda _: [threading.Lock(), []], lambda own: own.kept[1].append(0), "self.kept"),
        (lambda _: torch.zeros(()), lambda own: own.kept.data.add_(1), "self.kept"),
        (lambda _: torch.nn.BatchNorm1d(1), lambda own: own.kept(torch.randn(2, 1)), "self.kept"),
        (type, lambda own: setattr(type(own), "shared", type(own).shared + 1), "Keeps.shared"),
        (type, lambda own: own.defaults.update(n=own.defaults.get("n", 0) + 1), "self.defaults['n']"),
        (type, lambda own: setattr(own.param_groups[0]["params"][0], "n", 1), "parameter 0's .n"),
    ],
)
def test_what_a_step_changes_beside_its_state_is_found(make: Any, use: Any, where: str) -> None:
    optimizer = from_torch(keeping(make, use))
    refuses(OptimError, re.escape(f"its step() changes {where}, and ltx carries"), optimizer.init, torch.ones(2))


def test_what_a_step_leaves_alone_is_no_state() -> None:
    made = lambda own: [threading.Lock(), len, own.step, lambda: 0, torch.ones(100), own, own.param_groups[0]["params"]]  # noqa: E731
    optimizer, params = from_torch(keeping(made, id)), torch.ones(2)
    optimizer.apply(torch.ones(2), optimizer.init(params), params)


def test_what_a_constructor_makes_anew_each_time() -> None:
    of_values = lambda own: [p.detach().clone() for p in own.param_groups[0]["params"]]  # noqa: E731
    in_group = lambda own: own.param_groups[0].update(start=of_values(own))  # noqa: E731
    for made, where in (
        (of_values, "self.kept"),
        (in_group, "the group's start"),
        (lambda _: random.random(), "self."),
    ):
        why = rf"its __init__\(\) makes {where}.* anew each time, .*pair of functions"
        refuses(OptimError, why, from_torch, keeping(made, id))


class KeepsFirstRate(Lion):
    """Decays by the rate beside the first one, as some classes of timm with ``corrected_weight_decay``."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.first_lr = lr

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.mul_(1 - self.param_groups[0]["lr"] / self.first_lr / 10)
        super().step()


def test_the_rate_of_the_constructor_is_that_of_torchs_scheduler(seed: int) -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))

    leaf, grads = torch.randn(3).requires_grad_(), torch.randn(5, 3)
    params = leaf.detach().clone()
    reference = KeepsFirstRate([leaf], lr=0.5)
    scheduler = schedule(reference)
    rates = []
    for grad in grads:
        leaf.grad = grad.clone()
        rates.append(reference.param_groups[0]["lr"])
        reference.step()
        scheduler.step()
    adjustable = ltx.optim.adjustable(0.5)
    for lr in (ltx.optim.from_scheduler(schedule, lr=0.5), ltx.optim.warmup_cosine(0.5, 3, 10**12), adjustable):
        optimizer, mine = from_torch(KeepsFirstRate, lr=lr), params
        state = optimizer.init(params)
        for rate, grad in zip(rates, grads, strict=True):
            state = ltx.optim.adjust(state, lr=rate) if lr is adjustable else state
            mine, state = optimizer.apply(grad, state, mine)
        torch.testing.assert_close(mine, leaf.detach())
    refuses(OptimError, r"keeps the rate as self\.first_lr", from_torch, KeepsFirstRate, lr=lambda step: 0.5)


def test_hidden_state_is_found_at_the_first_update_that_changes_it() -> None:
    """Here at a large gradient alone, so that the probe doesn't show it."""
    counts = lambda own: own.kept.append(0) if own.param_groups[0]["params"][0].grad.max() > 1 else None  # noqa: E731
    optimizer, params = from_torch(keeping(lambda _: [], counts)), torch.ones(2)
    state = optimizer.init(params)
    refuses(OptimError, r"its step\(\) changes self\.kept", optimizer.apply, torch.full((2,), 2.0), state, params)


class Averaging(torch.optim.Optimizer):
    """As schedule-free classes: gradients are taken between two points, evaluation is at one of them."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    def _to(self, training: bool) -> None:
        for group in self.param_groups:
            weight = 1 - group["beta"] if training else 1 - 1 / group["beta"]
            for p in group["params"] if group["train_mode"] is not training else ():
                if "z" in self.state[p]:
                    p.data.lerp_(self.state[p]["z"], weight)
            group["train_mode"] = training

    def train(self) -> None:
        self._to(True)

    def eval(self) -> None:
        self._to(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["train_mode"], "call train() first"
            group["k"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, 1 / group["k"]).add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - 1 / group["k"]) - 1))
                z.sub_(p.grad, alpha=group["lr"])


def test_weights_for_evaluation(seed: int) -> None:
    with pytest.warns(UserWarning, match=r"Averaging evaluates with other weights .* optimizer\.evaluated\("):
        optimizer, grouped = from_torch(Averaging, lr=0.05), from_torch(Averaging, {}, lr=0.05)
    w, xs = torch.randn(3), torch.randn(5, 3)
    train = ltx.train_step(ltx.data_parallel(lambda p, x: (p["w"] * x).sum().square()), optimizer)
    state = train.init({"w": w})
    own = torch.nn.Parameter(w.clone())
    theirs = Averaging([own], lr=0.05)

    def loop(xs: Tensor) -> None:
        theirs.train()
        train_on.loop_of_torch(theirs, lambda x: (own * x).sum().square(), xs)

    torch.testing.assert_close(optimizer.evaluated(state.params, state.opt_state)["w"], w)
    state, _ = train_on.go_on(train, state, xs)
    loop(xs)
    torch.testing.assert_close(state.params["w"], own.detach())
    theirs.eval()
    torch.testing.assert_close(optimizer.evaluated(state.params, state.opt_state)["w"], own.detach())
    for around in (ltx.optim.chain(ltx.optim.clip_by_global_norm(1e9), optimizer), grouped):
        part = ltx.train_step(train.step, around, trainable="w")
        inside, _ = train_on.go_on(part, part.init({"frozen": torch.ones(1), "w": w}), xs)
        evaluated = around.evaluated(inside.params, inside.opt_state)
        torch.testing.assert_close(evaluated, {"frozen": torch.ones(1), "w": own.detach()})
    state, _ = train(state, xs[0])  # and training goes on from what it had
    loop(xs[:1])
    torch.testing.assert_close(state.params["w"], own.detach())
