"""Another hook for each parameter: buckets, what is refused, exchanges of a part. Its numbers: tests of conformance."""

from __future__ import annotations

import dataclasses
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx import hooks
from ltx.errors import StrategyError, UnsupportedError
from ltx.hooks import CommHook
from ltx.strategies import States, StepInfo
from ltx.typing import Tree
from tests.contract.strategies.references.horovod import adasum
from tests.kinds import Params, Ranks

SHAPES = {"embed": (40, 8), "first": (12, 10), "bias": (10,), "last": (10, 30)}
BY_NAME = hooks.partition({"embed": hooks.FP16(), "*s*": hooks.ByteGrad(), "*": hooks.AllReduce()})


def loss(params: Params, x: Tensor) -> Tensor:
    return sum((p * x).square().sum() for p in params.values())


def start() -> Params:
    return {name: torch.linspace(-1, 1, 400)[: torch.Size(shape).numel()].view(shape) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_a_bucket_has_one_hook(bucket_bytes: int) -> None:
    strategy = ltx.DDPStrategy(comm_hook=BY_NAME, bucket_bytes=bucket_bytes, first_bucket_bytes=bucket_bytes)
    step = ltx.data_parallel(loss, strategy)
    found = ltx.profile.explain(step, start(), torch.ones(()), world=4).buckets
    assert {path: repr(bucket.hook) for bucket in found for path in bucket.paths} == {
        "embed": "FP16()",
        "first": "ByteGrad()",
        "bias": "ByteGrad()",
        "last": "ByteGrad()",
    }
    assert len(found) == (4 if bucket_bytes == 1 else 2)


@pytest.mark.parametrize("overlap", ["backward", "update"])
def test_training(overlap: str, ranks: Ranks) -> None:
    """The embedding's gradients are rounded to halves; the others' are exact."""
    hook = hooks.partition({"embed": hooks.FP16(), "*": hooks.AllReduce()})
    params, xs = start(), [0.3, 1.7]

    def run() -> Params:
        step = ltx.data_parallel(loss, ltx.DDPStrategy(comm_hook=hook, bucket_bytes=1000))
        train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=0.1), overlap=overlap)
        state, _ = train(train.init(params), torch.tensor(xs[int(ltx.axis_index())]))
        return state.params

    shares = [{name: 2 * p * torch.tensor(x) ** 2 / 2 for name, p in params.items()} for x in xs]
    for found in ranks(2).run(run):
        for name, p in params.items():
            sent = [share[name].half() if name == "embed" else share[name] for share in shares]
            torch.testing.assert_close(found[name], p - 0.1 * (sent[0] + sent[1]).float(), rtol=1e-6, atol=1e-7)


def test_a_part_of_them_is_exchanged(ranks: Ranks) -> None:
    """DiLoCo's fragments, in each of which some pattern fits nothing."""
    outer = hooks.partition({"embed": hooks.BF16(), "*": hooks.AllReduce()})

    def run(hook: hooks.CommHook) -> Params:
        strategy = ltx.DiLoCoStrategy(2, outer_hook=hook, fragments=2)
        train = ltx.train_step(ltx.data_parallel(loss, strategy), ltx.optim.from_torch(torch.optim.SGD, lr=0.1))
        state = train.init(start())
        for _ in range(2):
            state, _ = train(state, torch.tensor(0.3 + int(ltx.axis_index())))
        return state.params

    (found, *_), (exact, *_), (rounded, *_) = (ranks(2).run(run, h) for h in (outer, outer.hooks[1], outer.hooks[0]))
    assert all(torch.equal(found[name], (rounded if name == "embed" else exact)[name]) for name in SHAPES)


#: What goes by paths: in a strategy, what a pattern that fits nothing says.
BY_PATH: dict[str, tuple[Any, str]] = {
    "hooks": (
        lambda name: ltx.DDPStrategy(comm_hook=hooks.partition({name: hooks.AllReduce(), "*": hooks.BF16()})),
        r"hooks.partition: 'q\*' fits no parameter\. Their paths: bias",
    ),
    "groups": (
        lambda name: ltx.HorovodStrategy(groups=[[name, "last"]]),
        r"groups: 'q\*' fits no parameter\. Their paths: bias, embed",
    ),
}
WAYS: dict[str, Any] = {
    "grad": lambda step, params, x: ltx.grad(step)(params, x),
    "sync_gradients": lambda step, params, x: ltx.sync_gradients(ltx.tree.map(x.mul, params), step.strategy)[0],
}


@pytest.mark.full(but=2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BY_PATH)
def test_in_a_graph(name: str, way: str, ranks: Ranks) -> None:
    """What goes by paths meets those of parameters, in containers of any class."""
    make, text = BY_PATH[name]
    holder = dataclasses.make_dataclass("Holder", list(SHAPES))

    def run() -> None:
        torch._dynamo.reset()
        x = torch.tensor(0.3 + int(ltx.axis_index()))
        for params in (start(), holder(**start())):
            step = ltx.data_parallel(lambda p, x: loss(p if isinstance(p, dict) else vars(p), x), make("e*"))
            found = torch.compile(WAYS[way], fullgraph=True, backend="aot_eager")(step, params, x)
            torch.testing.assert_close(ltx.tree.flatten(found)[0], ltx.tree.flatten(WAYS[way](step, params, x))[0])
        wrong = ltx.data_parallel(loss, make("q*"))
        for call in (WAYS[way], torch.compile(WAYS[way], fullgraph=True, backend="aot_eager")):
            with pytest.raises(Exception, match=text):
                call(wrong, start(), x)

    ranks(2).run(run)


@pytest.mark.parametrize("name", BY_PATH)
@pytest.mark.parametrize("way", ["grad", "backward", "train_step"])
def test_patterns_have_to_fit_in_a_world_of_one_too(name: str, way: str) -> None:
    make, text = BY_PATH[name]
    strategy = make("q*")
    if name == "hooks":  # of exact ones, which do nothing alone
        strategy = ltx.DDPStrategy(comm_hook=hooks.partition(dict.fromkeys(("q*", "*"), hooks.AllReduce())))
    step, x = ltx.data_parallel(loss, strategy), torch.ones(())
    train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=0.1))
    calls: dict[str, Any] = {
        "grad": lambda: ltx.grad(step)(start(), x),
        "backward": lambda: step({k: p.requires_grad_() for k, p in start().items()}, x),
        "train_step": lambda: train(train.init(start()), x),
    }
    with pytest.raises(StrategyError, match=text):
        calls[way]()
    assert step(start(), x).isfinite(), "without a gradient there is nothing to choose"


REFUSED = {
    r"'head\.\*' fits no parameter\. Their paths: bias, embed": {"head.*": hooks.FP16(), "*": hooks.AllReduce()},
    r'no pattern fits first.*\. Give the rest a hook: \{\.\.\., "\*"': {"embed": hooks.FP16(), "b*": hooks.BF16()},
}


@pytest.mark.parametrize("text", REFUSED)
def test_patterns_that_dont_fit(text: str) -> None:
    hook = hooks.partition(REFUSED[text])
    with pytest.raises(StrategyError, match=text):
        ltx.grad(ltx.data_parallel(loss, ltx.DDPStrategy(comm_hook=hook)))(start(), torch.ones(()))
    step = ltx.data_parallel(loss, ltx.DiLoCoStrategy(2, outer_hook=hook))
    with pytest.raises(StrategyError, match=text):
        ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=0.1)).init(start())


def test_it_isnt_for_ddp() -> None:
    with pytest.raises(StrategyError, match=r"to_torch needs one hook for all parameters, as DDP fills the"):
        hooks.to_torch(hooks.after(2, BY_NAME))


def test_what_is_around_it_is_around_each() -> None:
    def each(make: Any) -> Any:
        return hooks.partition({"a": make(hooks.RandomK(0.5)), "*": make(hooks.FP16())})

    both = each(lambda hook: hook)
    for make in (
        hooks.error_feedback,
        lambda hook: hooks.cast(hook, torch.bfloat16),
        lambda hook: hooks.chain(hook, hooks.ByteGrad()),
    ):
        assert make(both) == each(make)
    assert hooks.partition({"a": both, "*": hooks.BF16()}).each(["a", "b"]) == [hooks.RandomK(0.5), hooks.BF16()]


# --- Hooks that give way to others: where a strategy leaves to them which is in force, in chains, with error feedback


FED = hooks.error_feedback
EXACT = hooks.AllReduce()


@dataclass(frozen=True)
class Plain(ltx.Strategy):
    """It gives the hook that it has, at every step."""

    comm_hook: CommHook = EXACT

    def hook(self, step: int) -> CommHook:
        return self.comm_hook


@dataclass(frozen=True)
class Sharing(ltx.Strategy):
    """Each rank trains alone; `comm_hook` makes one of the ranks' parameters."""

    layout = ltx.strategies.StateLayout(params="per_rank", opt_state="per_rank", sync_state="per_rank")

    comm_hook: CommHook = EXACT

    def hook(self, step: int) -> None:
        return None

    def communicates_after_update(self, step: int) -> bool:
        return True

    def after_update(self, params: Tree, states: States, info: StepInfo) -> tuple[Tree, States]:
        (mean,), _ = self.exchange(self.comm_hook, [params], [""], info).wait()
        return mean, states


SCHEDULES = {
    "after": hooks.after(2, hooks.RandomK(0.5)),
    "two phases": hooks.after(1, hooks.OneBit(block=8), first=FED(hooks.ByteGrad())),
    "not shares": hooks.after(1, hooks.Noop()),
    "powersgd": hooks.PowerSGD(1, start_step=2),
    "chained": hooks.chain(hooks.after(1, hooks.RandomK(0.5)), hooks.BF16()),
}


def steps_of(strategy: ltx.Strategy, x: Tensor) -> Tensor:
    state = ltx.data_parallel(lambda w: w.sum(), strategy).init(torch.empty_like(x[0]))
    found = []
    for grad in x:
        reduced, state = ltx.sync_gradients(grad, strategy, state)
        found.append(reduced)
    return torch.stack(found)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_strategy_may_leave_it_to_the_hook_which_is_in_force(name: str, ranks: Ranks, seed: int) -> None:
    hook = SCHEDULES[name]
    x = torch.randn(2, 4, 8, 8)
    given, looked_up = Plain(comm_hook=hook), ltx.DDPStrategy(comm_hook=hook)
    assert torch.equal(ltx.vmap(lambda x: steps_of(given, x))(x), ltx.vmap(lambda x: steps_of(looked_up, x))(x))

    def run() -> tuple[Tensor, Tensor]:
        mine = x[int(ltx.axis_index())]
        return steps_of(given, mine), steps_of(looked_up, mine)

    for got, want in ranks(2).run(run):
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", SCHEDULES)
def test_explained_is_the_one_in_force(name: str) -> None:
    params = torch.empty(40, 30)
    for number in (0, 3):
        given, looked_up = (
            ltx.profile.explain(
                ltx.data_parallel(lambda w: w.sum(), strategy), params, world=4, sync_step=number
            ).buckets
            for strategy in (Plain(comm_hook=SCHEDULES[name]), ltx.DDPStrategy(comm_hook=SCHEDULES[name]))
        )
        assert given == looked_up


def test_an_exchange_takes_the_one_in_force(seed: int) -> None:
    hook = hooks.after(1, hooks.Noop())
    train = ltx.train_step(
        ltx.data_parallel(lambda w, x: (w * x).sum(), Sharing(comm_hook=hook)),
        ltx.optim.from_torch(torch.optim.SGD, lr=0.1),
    )
    x, start = torch.randn(2, 5), torch.randn(5)

    def two(x: Tensor) -> Tensor:
        state = train.init(start)
        for _ in range(2):
            state, _ = train(state, x)
        whole: Tensor = state.params
        return whole

    torch.testing.assert_close(ltx.vmap(two)(x), start - 0.1 * x.mean(0) - 0.1 * x)


# --- what can't work is refused when it is made, not at the step from which on it would be in force ------------------

WRONG = {
    "needs a request for sums, which ByteGrad": lambda: hooks.chain(hooks.after(10, hooks.ByteGrad()), hooks.BF16()),
    "needs sums of its results, which Adasum": lambda: hooks.chain(hooks.AllReduce(), hooks.after(10, hooks.Adasum())),
    "needs sums of its results, which Noop": lambda: hooks.chain(hooks.AllReduce(), hooks.Noop()),
    "needs sums of its results, which FromTorch": lambda: hooks.chain(
        hooks.AllReduce(), hooks.from_torch(lambda state, bucket: None)
    ),
    "needs an error to feed back": lambda: FED(hooks.after(10, hooks.AllReduce())),
}


@pytest.mark.parametrize("text", WRONG)
def test_combinations_that_cannot_work(text: str) -> None:
    with pytest.raises(StrategyError, match=text):
        WRONG[text]()


def test_hooks_that_would_share_a_tensor_have_one_shape_of_it() -> None:
    hook = hooks.after(10, hooks.PowerSGD(4, start_step=0), first=hooks.PowerSGD(1, start_step=0))
    with pytest.raises(StrategyError, match=r"PowerSGD\(start_step=0\) keeps 'q' of parameter 'w' as float32\[1, 30\]"):
        hook.init(torch.empty(40, 30), "w")
    assert hook.init(torch.empty(40), "b") == {}
    alike = hooks.after(10, hooks.PowerSGD(4, start_step=0), first=hooks.PowerSGD(4, start_step=0, seed=1))
    assert alike.init(torch.empty(40, 30), "w")["q"].shape == (4, 30)


def test_both_are_cast_chained_and_fed_back() -> None:
    warmed = hooks.after(10, hooks.RandomK(0.5, error_feedback=False), first=hooks.AllReduce())
    bf16 = torch.bfloat16
    assert hooks.cast(warmed, bf16) == hooks.after(10, hooks.cast(warmed.hook, bf16), first=hooks.BF16())
    assert hooks.cast(hooks.after(10, hooks.Noop()), bf16).at(10) == hooks.Noop()
    chained = hooks.chain(warmed, hooks.after(20, hooks.ByteGrad()))
    assert chained.at(9) == hooks.chain(hooks.AllReduce(), hooks.AllReduce())
    assert chained.at(20) == hooks.chain(warmed.hook, hooks.ByteGrad())
    assert FED(hooks.after(10, hooks.AllReduce(), first=hooks.FP16())).at(0) == FED(hooks.FP16())
    assert FED(hooks.after(10, hooks.ByteGrad(), first=hooks.FP16())).at(0) == FED(hooks.FP16())


# --- hooks.Adasum: in steps, in buckets of any size, on every backing; where it has no meaning it says so ------------


ADASUM_SHAPES = {"matrix": (5, 3), "scalar": (), "empty": (0,), "vector": (131,)}


def strategy(bucket_bytes: int = 1 << 20, hook: hooks.CommHook | None = None) -> ltx.DDPStrategy:
    return ltx.DDPStrategy(comm_hook=hook or hooks.Adasum(), bucket_bytes=bucket_bytes, first_bucket_bytes=bucket_bytes)


def gradients(n: int) -> dict[str, Tensor]:
    return {name: torch.randn(n, *shape, dtype=torch.float64) for name, shape in ADASUM_SHAPES.items()}


def expected(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.tensor(adasum([x.numpy() for x in xs])) for name, xs in given.items()}


@pytest.mark.full(but=2)
@pytest.mark.parametrize("bucket_bytes", [8, 200, 1 << 20])
@pytest.mark.parametrize("n", [2, 4])
def test_processes(n: int, bucket_bytes: int, ranks: Ranks) -> None:
    given = gradients(n)

    def run() -> Any:
        mine = {name: xs[ltx.axis_index()] for name, xs in given.items()}
        step = ltx.data_parallel(lambda p: sum((p[k] * mine[k]).sum() for k in p), strategy(bucket_bytes))
        params = {name: torch.ones(shape, dtype=torch.float64) for name, shape in ADASUM_SHAPES.items()}
        return ltx.sync_gradients(mine, strategy(bucket_bytes))[0], torch.func.grad(step)(params)

    results = ranks(n).run(run)
    for found in results:
        for tree in found:
            torch.testing.assert_close(tree, expected(given), rtol=1e-12, atol=1e-12)
        assert all(map(torch.equal, ltx.tree.flatten(found)[0], ltx.tree.flatten(results.rank(0))[0]))


@pytest.mark.parametrize("n", [1, 8, 64])
def test_simulated(n: int) -> None:
    given = gradients(n)
    found = ltx.vmap(lambda g: ltx.sync_gradients(g, strategy(200))[0])(given)
    for rank in (0, n - 1):
        torch.testing.assert_close({k: x[rank] for k, x in found.items()}, expected(given), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("n", [2, 4])
def test_bytes_are_the_rings(n: int, ranks: Ranks) -> None:
    params = {"a": torch.ones(64, 256), "b": torch.ones(1024)}

    def run() -> Any:
        grads = ltx.tree.map(torch.randn_like, params)
        with ltx.profile.record() as trace:
            ltx.sync_gradients(grads, strategy())
        step = ltx.data_parallel(lambda p: p["a"].sum(), strategy())
        with ltx.profile.record() as again:
            torch.func.grad(step)(params)
        return (
            sum(e.nbytes for e in trace.buckets),
            ltx.profile.explain(step, params).matches(again),
            str(ltx.profile.explain(step, params)),
        )

    ring = 2 * (n - 1) / n * (64 * 256 + 1024) * 4
    for sent, matches, said in ranks(n).run(run):
        assert ring <= sent <= ring + 48 * n * 2
        assert matches
        assert "Adasum() isn't a mean, and has no derivative" in said


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision(dtype: torch.dtype) -> None:
    xs = torch.randn(2, 9)
    found = ltx.vmap(lambda g: ltx.sync_gradients(g, strategy(hook=hooks.Adasum(dtype)))[0])(xs)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found[0], ltx.vmap(ltx.adasum)(xs.to(dtype))[0].float(), rtol=0, atol=0)


@pytest.mark.full
def test_compiled(ranks: Ranks) -> None:
    given = gradients(2)

    def run() -> Any:
        mine = {name: xs[ltx.axis_index()] for name, xs in given.items()}
        step = ltx.data_parallel(lambda p, m: sum((p[k] * m[k]).sum() for k in p), strategy())
        params = {name: torch.ones(shape, dtype=torch.float64) for name, shape in ADASUM_SHAPES.items()}
        return torch.compile(torch.func.grad(step), backend="aot_eager", fullgraph=True)(params, mine)

    for found in ranks(2).run(run):
        torch.testing.assert_close(found, expected(given), rtol=1e-12, atol=1e-12)


def test_its_derivatives_raise() -> None:
    xs = torch.randn(2, 3)

    def hessian_row(x: Tensor) -> Tensor:
        step = ltx.data_parallel(lambda w: (w * x).sum().square(), strategy())
        return torch.func.jvp(torch.func.grad(step), (torch.ones(3),), (torch.ones(3),))[1]

    with pytest.raises(UnsupportedError, match=r"needs a mean of gradients, which Adasum\(\) doesn't"):
        ltx.vmap(hessian_row)(xs)
    with pytest.raises(UnsupportedError, match=r"needs a mean of gradients, which Adasum\(\) doesn't"):
        ltx.vmap(torch.func.grad(lambda g: ltx.sync_gradients(g, strategy())[0].sum()))(xs)


def test_is_a_value_and_what_it_doesnt_go_with() -> None:
    hook = hooks.Adasum(torch.float16)
    assert pickle.loads(pickle.dumps(hook)) == hook != hooks.Adasum()
    assert repr(hooks.Adasum()) == "Adasum()"
    with pytest.raises(StrategyError, match=r"Adasum\.dtype must be a real floating dtype"):
        hooks.Adasum(torch.int8)
    with pytest.raises(StrategyError, match="needs sums of its results"):
        hooks.chain(hooks.AllReduce(), hooks.Adasum())
    with pytest.raises(StrategyError, match="needs a request for sums"):
        hooks.cast(hooks.Adasum(), torch.float16)
    with pytest.raises(StrategyError, match="needs an error to feed back"):
        hooks.error_feedback(hooks.Adasum())
    with pytest.raises(StrategyError, match="combines real gradients"):
        ltx.sync_gradients(torch.ones(2, dtype=torch.complex64), strategy())
    assert hooks.after(2, hooks.Adasum()).at(2) == hooks.Adasum()
