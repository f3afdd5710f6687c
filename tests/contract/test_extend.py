"""A user's hooks and strategies, written with ltx.extend or with the names that ltx.hooks and ltx.strategies offer."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import ltx
import ltx.hooks
import ltx.strategies
from ltx import extend
from ltx.hooks import BucketInput, CollectiveRequest, CommHook, Reduction
from ltx.strategies import StateLayout, States, StepInfo, Strategy, Updated
from tests.kinds import Ranks
from tests.train_on import go_on, on_ranks, refuses

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class OldHook(CommHook):
    """The mean of gradients that are rounded to a multiple of `step`."""

    exact = False
    step: float = 1.0

    def reduce(self, inputs: BucketInput) -> Reduction:
        return (yield CollectiveRequest("psum", (inputs.flat / self.step).round() * self.step)), inputs.states


@dataclass(frozen=True)
class OldStrategy(Strategy):
    """Local steps, and at every second one the mean of all ranks' parameters."""

    layout = StateLayout(params="per_rank", opt_state="per_rank")

    def hook(self, step: int) -> None:
        return None

    def update(self, update: Any, states: States, info: StepInfo, pending: Any) -> Updated:
        params, opt_state = update.apply()
        if info.step % 2 == 1:
            means, _ = extend.exchange(self, ltx.hooks.AllReduce(), [params["w"]], ["w"], info).wait()
            params = {"w": means[0]}
        return Updated(params, opt_state, states, pending)


@dataclass(frozen=True)
class NewHook(extend.CommHook):
    """:class:`OldHook`, by a collective that takes the ranks' gradients, in chunks where it may."""

    exact = False
    sums = False
    step: float = 1.0

    def reduce(self, inputs: extend.BucketInput) -> extend.Reduction:
        flat = inputs.flat
        if extend.buffers.is_plain(flat):
            for some in extend.buffers.chunks(len(flat)):
                flat[some].div_(self.step).round_().mul_(self.step)
        else:
            flat = (flat / self.step).round() * self.step
        return (yield extend.CollectiveRequest("all_gather", flat)).sum(0), inputs.states


@dataclass(frozen=True)
class NewStrategy(extend.Strategy):
    """:class:`OldStrategy`, for any tree."""

    layout = extend.StateLayout(params="per_rank", opt_state="per_rank")
    every: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        extend.arguments.check_whole(self, 1, "every")

    def hook(self, step: int) -> None:
        return None

    def communicates_after_update(self, step: int) -> bool:
        return (step + 1) % self.every == 0

    def after_update(self, params: Any, states: extend.States, info: extend.StepInfo) -> Any:
        if not self.communicates_after_update(info.step):
            return params, states
        leaves, spec = extend.tree.flatten(params)
        means, _ = extend.exchange(self, extend.AllReduce(), leaves, extend.tree.leaf_paths(params), info).wait()
        return extend.tree.unflatten(spec, means), states


def reduced(hook: CommHook, grads: torch.Tensor) -> torch.Tensor:
    return ltx.sync_gradients({"w": grads}, ltx.DDPStrategy(comm_hook=hook))[0]["w"]


def trained(strategy: Strategy, x: torch.Tensor) -> torch.Tensor:
    step = ltx.data_parallel(lambda params, x: (params["w"] * x).sum(), strategy)
    train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=0.5))
    return go_on(train, train.init({"w": torch.zeros_like(x)}), [x, 2.0 * x, 4.0 * x]).params["w"]


def everywhere(f: Callable[..., torch.Tensor], value: Any, xs: torch.Tensor, ranks: Ranks) -> list[torch.Tensor]:
    """`f` of `value` and of a row of `xs`, on simulated ranks and on real ones: the ranks' results, in rows."""
    real = ranks(2).run(lambda x: f(value, x[ltx.world().rank]), xs)
    return [ltx.vmap(lambda x: f(value, x))(xs), torch.stack(list(real))]


@pytest.mark.parametrize("hook", [OldHook(0.5), NewHook(0.5)])
def test_a_hook(hook: CommHook, seed: int, ranks: Ranks) -> None:
    xs = 4 * torch.randn(2, 5)
    mean = ((xs / 2 / 0.5).round() * 0.5).sum(0)
    for found in everywhere(reduced, hook, xs, ranks):
        torch.testing.assert_close(found, mean.expand(2, -1))


@pytest.mark.parametrize("strategy", [OldStrategy(), NewStrategy()])
def test_a_strategy(strategy: Strategy, seed: int, ranks: Ranks) -> None:
    xs = torch.randn(2, 3)
    # Steps of -0.5, -1 and -2 times x, the mean after the second.
    wanted = -1.5 * xs.mean(0) - 2.0 * xs
    for found in everywhere(trained, strategy, xs, ranks):
        torch.testing.assert_close(found, wanted)


@on_ranks(2)
def test_a_rule_leaves_its_argument() -> None:
    """Though the network adds up in place."""
    rule = extend.collectives.Rule("total", "psum", stacked=lambda xs, n, static: (xs.sum(0), False))
    for length in (3, 0):
        x = torch.ones(3)
        total = extend.collectives.collective(rule, x[:length])
        assert (total.tolist(), x.tolist()) == ([2.0] * length, [1.0] * 3)
        assert total.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_what_a_rule_is_refused_for() -> None:
    mine = extend.collectives.Rule("psum", None, stacked=lambda xs, n, static: (xs, True))
    refuses(
        ltx.errors.CollectiveError, "a rule called 'psum' already", extend.collectives.collective, mine, torch.ones(2)
    )
    # An operation that moves bytes alone doesn't make a rule one that does.
    latest = extend.collectives.Rule(
        "latest", "all_gather", stacked=lambda xs, n, static: (xs.amax(0), False), weights=torch.eq
    )
    for dtype, said in ((torch.float8_e5m2, "has no sums"), (torch.complex64, "real numbers alone")):
        refuses(ltx.errors.UnsupportedError, said, extend.collectives.collective, latest, torch.ones(2).to(dtype))


def test_what_is_gone_says_what_is_written_now() -> None:
    for value, name, now in (
        (ltx.DDPStrategy(), "exchange", "ltx.extend.exchange(strategy, hook, tensors, paths, info)"),
        (ltx.hooks.FP16(), "gives_gradients", "packing(dtype, axis_size), whose result may be proportional=False"),
    ):
        refuses(AttributeError, re.escape(f"{type(value).__name__}.{name} is gone: {now}"), getattr, value, name)


def test_names_of_before_are_those_of_extend() -> None:
    shared = [*ltx.strategies.__all__, "AllReduce", "BucketInput", "CollectiveRequest", "CommHook", "Reduction"]
    for name in set(shared) - {"DDPStrategy"}:
        owner = ltx.strategies if name in ltx.strategies.__all__ else ltx.hooks
        assert getattr(owner, name) is getattr(extend, name), name


def test_every_name_says_what_it_promises() -> None:
    page = (ROOT / "docs/reference/api/extend.md").read_text().partition("Names that are public elsewhere")[0]
    said = re.findall(r"{(?:class|func|data|mod)}`(?:~ltx\.extend\.)?(\w+)(?: <[\w.]+>)?`", page)
    assert sorted({*said}) == sorted(extend.__all__)


def test_what_is_said_is_in_what_is_offered() -> None:
    """By an attribute, a property or a method of a field's name; of what is wrapped too."""
    said = OldHook(), NewHook(), ltx.hooks.chain(OldHook(), ltx.hooks.BF16()), OldStrategy(), NewStrategy()
    for value in (*said, ltx.HorovodStrategy(op="adasum"), ltx.BaguaStrategy("qadam", warmup_steps=2)):
        for name in type(value.offers).__dataclass_fields__:
            offered, read = getattr(value.offers, name), getattr(value, name)
            assert callable(offered) == callable(read)
            assert offered == read or callable(offered), (value, name)
    assert (OldHook().offers.exact, NewHook().offers.sums, OldStrategy().offers.cycle) == (False, False, (0, 1))
    assert [NewStrategy().offers.communicates_after_update(step) for step in range(4)] == [False, True] * 2
    assert OldStrategy().offers.updates_in_buckets is False
    assert NewStrategy().offers.updates_in_buckets is True


@pytest.mark.parametrize("base", [CommHook, Strategy])
def test_what_is_gone_is_refused_when_a_class_is_made(base: Any) -> None:
    """As a method, an attribute or a property; a field of the class' own may have such a name."""
    for name in base._gone:
        for member in (False, property(lambda self: 1), lambda self: 1):
            refuses(
                ltx.errors.StrategyError, rf"Mine\.{name} is gone: say it by ", type, "Mine", (base,), {name: member}
            )
        given = {"__annotations__": {name: int}, name: 1}
        assert getattr(dataclass(frozen=True)(type("Mine", (base,), given))(), name) == 1
    refuses(ImportError, r"Write ltx\.extend\.buffers\.pack", exec, "from ltx.extend import pack")


def test_what_is_refused_says_the_field() -> None:
    typo = type("Typo", (CommHook,), {"reach": "elements"})
    refuses(ltx.errors.StrategyError, r"Typo\.reach is one of \('element', .*, got 'elements'", typo)
    refuses(ltx.errors.StrategyError, r"NewStrategy\.every must be a whole number .*, got 0", NewStrategy, every=0)
