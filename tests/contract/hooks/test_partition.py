"""Another hook for each parameter: buckets, what is refused, exchanges of a part. Its numbers: tests of conformance."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx import hooks
from ltx.errors import StrategyError
from tests.kinds import Params, Ranks
from tests.sent import sent
from tests.train_on import refuses, trained
from tests.twins.training import sgd

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
            step = ltx.data_parallel(lambda p, x: loss(as_dict(p), x), make("e*"))
            found = torch.compile(WAYS[way], fullgraph=True, backend="aot_eager")(step, params, x)
            torch.testing.assert_close(ltx.tree.flatten(found)[0], ltx.tree.flatten(WAYS[way](step, params, x))[0])
        wrong = ltx.data_parallel(loss, make("q*"))
        for call in (WAYS[way], torch.compile(WAYS[way], fullgraph=True, backend="aot_eager")):
            with pytest.raises(Exception, match="fits no parameter") as caught:
                call(wrong, start(), x)
            assert re.search(text, str(caught.value).replace("\\", "")), (
                "from torch 2.14 on Dynamo quotes what it quotes"
            )

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
    refuses(StrategyError, text, calls[way])
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
