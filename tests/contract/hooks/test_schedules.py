"""Hooks that give way to others: by steps, in chains, with error feedback, and by the names of parameters."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx import hooks
from ltx.errors import StrategyError
from ltx.extend import exchange
from ltx.hooks import CommHook
from ltx.strategies import States, StepInfo
from ltx.typing import Tree
from tests.kinds import Params, Ranks
from tests.sent import sent
from tests.train_on import go_on, on_ranks, reduced, refuses, trained
from tests.twins.cases import backward
from tests.twins.training import by_train_step, sgd

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
        (mean,), _ = exchange(self, self.comm_hook, [params], [""], info).wait()
        return mean, states


SCHEDULES = {
    "after": hooks.after(2, hooks.RandomK(0.5)),
    "two phases": hooks.after(1, hooks.OneBit(block=8), first=FED(hooks.ByteGrad())),
    "not shares": hooks.after(1, hooks.Noop()),
    "powersgd": hooks.PowerSGD(1, start_step=2),
    "chained": hooks.chain(hooks.after(1, hooks.RandomK(0.5)), hooks.BF16()),
}


def steps_of(strategy: ltx.Strategy, x: Tensor) -> Tensor:
    return torch.stack(reduced(strategy, x)[0])


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
def test_the_one_in_force_sends(name: str, seed: int) -> None:
    params = torch.randn(40, 30)
    for step in (0, 3):
        given, looked_up = (
            sent(strategy, params, 4, step)
            for strategy in (Plain(comm_hook=SCHEDULES[name]), ltx.DDPStrategy(comm_hook=SCHEDULES[name]))
        )
        assert given.packed == looked_up.packed
        assert [(e.operation, e.nbytes) for e in given.events] == [(e.operation, e.nbytes) for e in looked_up.events]


def test_an_exchange_takes_the_one_in_force(seed: int) -> None:
    hook = hooks.after(1, hooks.Noop())
    train = ltx.train_step(ltx.data_parallel(lambda w, x: (w * x).sum(), Sharing(comm_hook=hook)), sgd(0.1))
    x, start = torch.randn(2, 5), torch.randn(5)

    def two(x: Tensor) -> Tensor:
        return go_on(train, train.init(start), [x] * 2).params

    torch.testing.assert_close(ltx.vmap(two)(x), start - 0.1 * x.mean(0) - 0.1 * x)


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


SHAPES = {"embed": (40, 8), "first": (12, 10), "bias": (10,), "last": (10, 30)}
BY_NAME = hooks.partition({"embed": hooks.FP16(), "*s*": hooks.ByteGrad(), "*": hooks.AllReduce()})


def loss(params: Params, x: Tensor) -> Tensor:
    return sum((p * x).square().sum() for p in params.values())


def as_dict(params: Any) -> Params:
    return params if isinstance(params, dict) else {name: getattr(params, name) for name in SHAPES}


def start() -> Params:
    return {name: torch.linspace(-1, 1, 400)[: torch.Size(shape).numel()].view(shape) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_a_bucket_has_one_hook(bucket_bytes: int) -> None:
    strategy = ltx.DDPStrategy(comm_hook=BY_NAME, bucket_bytes=bucket_bytes, first_bucket_bytes=bucket_bytes)
    last, bias, first, embed = 4 * 10 * 30, 4 * 10, 4 * 12 * 10, 4 * 40 * 8
    in_eight_bits = [last, bias, first] if bucket_bytes == 1 else [last + bias + first]
    expected = [("ByteGrad()", nbytes) for nbytes in in_eight_bits] + [("FP16()", embed)]
    assert [(bucket.hook, bucket.nbytes) for bucket in sent(strategy, start(), 4).packed] == expected


def test_a_part_of_them_is_exchanged(ranks: Ranks) -> None:
    """DiLoCo's fragments, in each of which some pattern fits nothing."""
    outer = hooks.partition({"embed": hooks.BF16(), "*": hooks.AllReduce()})

    def run(hook: hooks.CommHook) -> Params:
        strategy = ltx.DiLoCoStrategy(2, outer_hook=hook, fragments=2)
        return trained(loss, sgd(0.1), start(), [torch.tensor(0.3 + int(ltx.axis_index()))] * 2, strategy).params

    (found, *_), (exact, *_), (rounded, *_) = (
        ranks(2).run(run, h) for h in (outer, outer.members[1], outer.members[0])
    )
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


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BY_PATH)
@on_ranks(2)
def test_in_a_graph(name: str, way: str) -> None:
    """What goes by paths meets those of parameters, in containers of any class."""
    make, text = BY_PATH[name]
    holder = dataclasses.make_dataclass("Holder", list(SHAPES))
    torch._dynamo.reset()
    x = torch.tensor(0.3 + int(ltx.axis_index()))
    for params in (start(), holder(**start())):
        step = ltx.data_parallel(lambda p, x: loss(as_dict(p), x), make("e*"))
        found = torch.compile(WAYS[way], fullgraph=True, backend="aot_eager")(step, params, x)
        torch.testing.assert_close(ltx.tree.flatten(found)[0], ltx.tree.flatten(WAYS[way](step, params, x))[0])
    wrong = ltx.data_parallel(loss, make("q*"))
    for call in (WAYS[way], torch.compile(WAYS[way], fullgraph=True, backend="aot_eager")):
        with pytest.raises(Exception, match="fits no parameter") as caught:
            call(wrong, start(), x)
        assert re.search(text, str(caught.value).replace("\\", "")), "from torch 2.14 on Dynamo quotes what it quotes"


@pytest.mark.parametrize("name", BY_PATH)
@pytest.mark.parametrize("way", ["grad", "backward", "train_step"])
def test_patterns_have_to_fit_in_a_world_of_one_too(name: str, way: str) -> None:
    make, text = BY_PATH[name]
    strategy = make("q*")
    if name == "hooks":  # of exact ones, which do nothing alone
        strategy = ltx.DDPStrategy(comm_hook=hooks.partition(dict.fromkeys(("q*", "*"), hooks.AllReduce())))
    step, x = ltx.data_parallel(loss, strategy), torch.ones(())
    refuses(StrategyError, text, {**WAYS, "backward": backward, "train_step": by_train_step}[way], step, start(), x)
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
    refuses(StrategyError, text, ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=0.1)).init, start())


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
