"""A table of what may change between two steps: each step after a change is right, asks anew, or refuses.

A state carries what the step before had asked. Beside each training runs a slow one, whose states say nothing of it
(they are made anew by ``dataclasses.replace``): both must come to the same bits, or to the same error.
"""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from operator import setitem
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import ltx
from ltx.core.ranks.axis import Axis
from tests.kinds import OnNewAxis, Ranks
from tests.train_on import on_ranks

ADAMW = ltx.optim.from_torch(torch.optim.AdamW, lr=0.05)
CLIPPED = ltx.optim.chain(ltx.optim.clip_by_global_norm(0.1), ADAMW)
OWN = torch.nn.Parameter(torch.ones(()))
SCHEDULED = ltx.optim.from_torch(torch.optim.AdamW, lr=lambda count: 0.1 / (1 + count))
SGD = ltx.optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)
SMALL = ltx.DDPStrategy(bucket_bytes=64, first_bucket_bytes=64)


@dataclass
class Row:
    """One thing that changes after three steps, before the fourth.

    Attributes:
        state: what becomes of the state. batch: of the batch. train: which train step goes on. around: a context.
        carried: whether the fourth step still finds the answers of the third.
        made: the arguments of the train step. earlier: the state after the second step goes on.
    """

    state: Callable[[Any], Any] = lambda state: state
    batch: Callable[[Tensor], Any] = lambda x: x
    train: Callable[[Any], Any] = lambda train: train
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    carried: bool = False
    made: dict[str, Any] = field(default_factory=dict)
    strategy: Any = None
    in_thread: bool = False
    earlier: bool = False
    only: tuple[int, ...] = (1, 2)


def loss(params: Any, x: Any) -> Any:
    x = x["x"] if isinstance(x, dict) else x
    w, v, b = (params[key] for key in "wvb") if isinstance(params, dict) else params
    total = (torch.tanh(x.to(w.dtype) @ w) @ v + b).square().mean()
    total = total * OWN if len(x) == 5 else total
    return ltx.Weighted(total * len(x), len(x)) if len(x) == 3 else total


def then(change: Callable[[Any], object]) -> Callable[[Any], Any]:
    """The state, in which something is changed."""
    return lambda state: (change(state), state)[1]


FROZEN = then(lambda s: s.params["w"].requires_grad_())
MOMENT = then(lambda s: s.opt_state.per_param["w"]["exp_avg"].mul_(3.0))


class Changing(ltx.DDPStrategy):
    """Another hook from step 3 on, which `cycle` doesn't say."""

    def hook(self, step: int) -> Any:
        return ltx.hooks.BF16() if step >= 3 else ltx.hooks.AllReduce()


@contextmanager
def as_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def another(train: Any, **made: Any) -> Any:
    return ltx.train_step(train.step, made.pop("optimizer", train.optimizer), **made)


ROWS = {
    "nothing": Row(carried=True),
    "nothing, SGD": Row(carried=True, made={"optimizer": SGD}),
    "nothing, a guard": Row(carried=True, made={"guard": "skip"}),
    "nothing, bucket by bucket": Row(carried=True, made={"overlap": "update"}),
    "nothing, small buckets": Row(carried=True, strategy=SMALL, made={"overlap": "update", "optimizer": SCHEDULED}),
    "nothing, bucket by bucket without donation": Row(carried=True, made={"overlap": "update", "donate": False}),
    "nothing, without donation": Row(carried=True, made={"donate": False}),
    "nothing, a chain": Row(carried=True, made={"optimizer": CLIPPED}),
    "a rate by schedule": Row(carried=True, made={"optimizer": SCHEDULED}),
    "the step's number is read": Row(state=lambda s: s.step and s, carried=True),
    "parameters are read": Row(state=lambda s: s.params and s),
    "a parameter is put in": Row(state=then(lambda s: setitem(s.params, "w", s.params["w"].detach().clone() * 2))),
    "parameters of another shape": Row(
        state=then(lambda s: [setitem(s.params, "w", torch.ones(5, 9)), setitem(s.params, "v", torch.ones(9))])
    ),
    "a parameter requires grad": Row(state=FROZEN),
    "a parameter requires grad, kept": Row(state=FROZEN, made={"donate": False}),
    "a parameter has a hook": Row(state=then(lambda s: s.params["w"].requires_grad_().register_hook(lambda g: g * 2))),
    "a moment is multiplied": Row(state=MOMENT),
    "a moment is put in": Row(state=then(lambda s: setitem(s.opt_state.per_param["w"], "exp_avg", torch.ones(5, 7)))),
    "a moment is multiplied, bucket by bucket": Row(state=MOMENT, made={"overlap": "update"}),
    "parameters are replaced": Row(state=lambda s: replace(s, params={k: x + 1 for k, x in s.params.items()})),
    "a step is counted anew": Row(state=lambda s: replace(s, step=7)),
    "a copy": Row(state=copy.deepcopy),
    "a pickle": Row(state=lambda s: pickle.loads(pickle.dumps(s))),
    "a tree's copy": Row(state=lambda s: ltx.tree.map(torch.clone, s)),
    "loaded values": Row(
        state=then(lambda s: s.load_state_dict({k: x + x.is_floating_point() for k, x in s.state_dict().items()}))
    ),
    "a donated state": Row(earlier=True, carried=True),
    "an earlier state": Row(earlier=True, carried=True, made={"donate": False}),
    "the same train step, made again": Row(train=lambda t: another(t)),
    "another rate": Row(train=lambda t: another(t, optimizer=ltx.optim.from_torch(torch.optim.AdamW, lr=0.5))),
    "another optimizer": Row(train=lambda t: another(t, optimizer=SGD)),
    "other parameters are trained": Row(train=lambda t: another(t, trainable="w")),
    "a guard from now on": Row(train=lambda t: another(t, guard="raise")),
    "a batch of another length": Row(batch=lambda x: x[:2], carried=True),
    "a batch of another structure": Row(batch=lambda x: {"x": x}, carried=True),
    "a batch with which another parameter is used": Row(batch=lambda x: torch.cat([x, x[:1]]), carried=True),
    "a batch of another dtype": Row(batch=Tensor.double, carried=True),
    "a weighted loss": Row(batch=lambda x: x[:3], carried=True),
    "a weighted loss, bucket by bucket": Row(batch=lambda x: x[:3], carried=True, made={"overlap": "update"}),
    "a batch that requires grad": Row(batch=Tensor.requires_grad_, carried=True),
    "a batch that requires grad, kept": Row(batch=Tensor.requires_grad_, made={"donate": False}, carried=True),
    "aux of another shape": Row(batch=lambda x: x[:2], carried=True, made={"has_aux": True}),
    "values that aren't finite": Row(batch=lambda x: x * torch.inf, carried=True, made={"guard": "raise"}),
    "a skipped step": Row(batch=lambda x: x * torch.inf, carried=True, made={"guard": "skip"}),
    "without gradients": Row(around=torch.no_grad, carried=True),
    "inference mode": Row(around=torch.inference_mode, carried=True),
    "autocast": Row(around=lambda: torch.autocast("cpu", torch.bfloat16), carried=True),
    "another default dtype": Row(around=as_float64, carried=True),
    "debug checks": Row(around=ltx.debug_checks, carried=True),
    "a thread": Row(in_thread=True, carried=True),
    "local SGD begins": Row(strategy=ltx.DDPStrategy(start_local_sgd_step=3, model_averaging_period=2)),
    "a warm-up ends": Row(strategy=ltx.DDPStrategy(comm_hook=ltx.hooks.PowerSGD(rank=1, start_step=3)), only=(2,)),
    "another hook for each parameter": Row(carried=True, strategy=ltx.DDPStrategy(comm_hook="bf16"), only=(2,)),
    "a hook that changes without a word": Row(carried=True, strategy=Changing(), only=(2,)),
    "an axis in scope": Row(around=lambda: nullcontext(ltx.vmap(ltx.psum)(torch.ones(3))), carried=True),
}


def outcome(row: Row, slow: bool) -> tuple[Any, bool]:
    """(the bits of the state after five steps, or what was raised; whether the fourth step found answers)."""
    made = {"optimizer": ADAMW, **row.made}
    with_aux = (lambda params, x: (loss(params, x), {"rows": x.clone()})) if made.get("has_aux") else loss
    train = ltx.train_step(ltx.data_parallel(with_aux, row.strategy), **made)
    draw = torch.Generator().manual_seed(3)
    # Not in the order of a bucket, which is that in which gradients come.
    start = {"v": torch.randn(7, generator=draw), "b": torch.zeros(()), "w": torch.randn(5, 7, generator=draw)}
    draw.manual_seed(int(ltx.axis_index()))
    state, found, taken = train.init(start), False, None
    try:
        for number in range(5):
            if slow:
                lease = state.lease
                state = replace(state)
                assert state.lease is lease
                state.__dict__["of_step"] = True
            x = torch.randn(4, 5, generator=draw)
            if number != 3:
                state, _ = train(state, x)
                taken = state if number == 1 else taken
                continue
            state = row.state(taken if row.earlier else state)
            x, train = row.batch(x), row.train(train)
            found = state.resolved is not None and state.resolved.train is train
            with row.around():
                state, _ = _in_thread(train, state, x) if row.in_thread else train(state, x)
        return [x.detach().clone() for x in ltx.tree.flatten(state)[0]], found
    except Exception as error:
        return (type(error).__name__, str(error)), found


def _in_thread(train: Any, state: Any, x: Tensor) -> Any:
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(train(state, x)))
    thread.start()
    thread.join()
    return got[0]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", ROWS)
def test_a_step_after_a_change(name: str, world: int, ranks: Ranks) -> None:
    row = ROWS[name]
    if world not in row.only:
        pytest.skip("the hook does nothing in a world of one")

    def on_ranks(slow: bool) -> Any:
        return [outcome(row, slow)] if world == 1 else ranks(2).run(outcome, row, slow)

    for (fast, found), (slow, asked) in zip(on_ranks(False), on_ranks(True), strict=True):
        assert (found, asked) == (row.carried, False)
        if isinstance(slow, tuple):
            assert fast == slow
        else:
            assert not isinstance(fast, tuple), fast
            for x, y in zip(fast, slow, strict=True):
                torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("overlap", ["backward", "update"])
@on_ranks(2, alone=True)
def test_a_steady_step_asks_nothing_anew(overlap: str) -> None:
    module, counts = importlib.import_module("ltx.core.training.train_step"), []
    train = ltx.train_step(ltx.data_parallel(loss), ADAMW, overlap=overlap)
    state = train.init({"w": torch.ones(5, 7), "v": torch.ones(7), "b": torch.zeros(())})
    for _ in range(3):
        with mock.patch.object(module, "resolve", wraps=module.resolve) as asked:
            state, _ = train(state, torch.ones(4, 5) + ltx.axis_index())
        counts.append(asked.call_count)
    assert counts == [1, 0, 0]
    assert state.resolved.straight == (ltx.axis_size() > 1)


def changed(change: str, w: dict[str, Tensor], x: Tensor) -> Any:
    """What a step returns from its fourth call on."""
    y = (w["w"] * x).square().mean() + w["v"].sum()
    match change:
        case "weighted":
            return ltx.Weighted(y, 1.0 + int(ltx.axis_index()))
        case "one rank's loss is constant":
            return y if int(ltx.axis_index()) else x.sum()
        case "differentiates itself":
            y.backward(retain_graph=True)
        case "communicates":
            return ltx.pmean(y)
        case "captures":
            return y * OWN
        case "raises":
            raise ZeroDivisionError
    return {"wide": y.double(), "other": y.sin().exp()}.get(change, y)


CHANGES = ("wide", "weighted", "communicates", "other", "captures", "raises", "differentiates itself")


@pytest.mark.parametrize("outputs", ["local", "mean"])
@pytest.mark.parametrize("change", [*CHANGES, "one rank's loss is constant"])
@on_ranks(2)
def test_gradients_after_a_change(change: str, outputs: Any) -> None:
    """A step that was called before and one that wasn't."""
    now, params, x = [""], {"w": torch.ones(3), "v": torch.ones(2)}, torch.ones(3) + ltx.axis_index()

    def answer(make: Callable[[Any], Any], step: Any) -> Any:
        try:
            return [*ltx.tree.flatten(make(step)(params, x))[0]]
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    for make in (ltx.grad_and_value, torch.func.grad_and_value):
        now[0] = ""
        steady, new = (ltx.data_parallel(lambda w, x: changed(now[0], w, x), outputs=outputs) for _ in range(2))
        for _ in range(3):
            answer(make, steady)
        now[0] = change
        fast, slow = answer(make, steady), answer(make, new)
        assert fast == slow if isinstance(slow, str) else all(map(torch.equal, fast, slow)), (fast, slow)


def test_an_equal_axis_is_the_same() -> None:
    """Of some axes of a mesh a new one is made at each call."""
    train = ltx.train_step(ltx.data_parallel(loss), ADAMW)
    state = train.init({"w": torch.ones(5, 7), "v": torch.ones(7), "b": torch.zeros(())})
    resolved = train(state, torch.ones(4, 5))[0].resolved
    axis = resolved.axis
    assert resolved.holds(Axis(axis.name, axis.size, axis.ranks), 1)
    assert not resolved.holds(Axis("another", axis.size, axis.ranks), 1)


def test_leaves_that_an_old_state_gives_too() -> None:
    """A skipped step without donation gives the leaves of the state before, which somebody may freeze afterwards."""
    train = ltx.train_step(ltx.data_parallel(loss), SGD, donate=False, guard="skip")
    state, _ = train(train.init({"w": torch.ones(5, 7), "v": torch.ones(7), "b": torch.zeros(())}), torch.ones(4, 5))
    skipped, metrics = train(state, torch.full((4, 5), torch.inf))
    assert bool(metrics.skipped)
    state.params["w"].requires_grad_()
    following, _ = train(skipped, torch.ones(4, 5))
    assert following.params["v"].grad_fn is not None, "v's gradient depends on w"


PACKAGE = Path(ltx.__file__).parent

Function = tuple[str, str]


def storages(value: Any, depth: int = 0) -> Iterator[int]:
    """Of the tensors in a value, and in the lists, tuples and dicts of it."""
    if isinstance(value, Tensor):
        yield value.untyped_storage().data_ptr()
    elif depth < 4 and isinstance(value, list | tuple | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from storages(part, depth + 1)


def called() -> tuple[list[Function], set[Function], set[Function]]:
    """The calls of ltx's functions in a steady step of ten parameters, and which of these get or return a parameter,
    and its gradient or the bucket that has it.
    """
    params = {f"p{i}": torch.ones(4) for i in range(10)}
    step = ltx.data_parallel(lambda p, x: (torch.stack(tuple(p.values())) * x).sum())
    train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.AdamW, lr=1e-3))
    state, found = train.init(params), list[list[Function]]()
    ways: list[tuple[set[Function], set[Function]]] = []
    for number in range(160):  # ranks in turns: a wait makes calls, too, and a peer that nobody follows comes first
        mine, calls = number % 2 == ltx.axis_index(), list[Function]()
        parameter, gradient = {*storages(state.held_params["p0"])}, set[int]()

        def note(frame: FrameType, event: str, result: Any, calls: list[Function] = calls) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
                calls.append((frame.f_code.co_filename, frame.f_code.co_qualname))

        def follow(frame: FrameType, event: str, result: Any, known: Any = (parameter, gradient)) -> None:
            code = frame.f_code
            if event in ("call", "return") and code.co_filename.startswith(str(PACKAGE)):
                seen = [*storages([*frame.f_locals.values()] if event == "call" else result)]
                known[1].update(seen if code.co_name == "pack" else ())
                for way, its in zip(ways[-1], known, strict=True):
                    way.update({(code.co_filename, code.co_qualname)} if its.intersection(seen) else ())

        if mine:
            ways.append((set(), set()))
        sys.setprofile((follow if number >= 120 else note if number > 4 else None) if mine else None)
        try:
            state, _ = train(state, torch.ones(4))
        finally:
            sys.setprofile(None)
        found += [calls] if mine and 4 < number < 120 else []
    # The fewest: memory that a gradient has left may be another's.
    of_parameter, of_gradient = (min(each, key=len) for each in zip(*ways[60:], strict=True))
    return min(found, key=len), of_parameter, of_gradient


@pytest.mark.parametrize(("sockets", "most"), [(True, (125, 90)), (False, (140, 105))])
def test_a_steady_step_asks_little(sockets: bool, most: tuple[int, int], on_new_axis: OnNewAxis) -> None:
    """What can't have changed since the step before isn't asked again, and few see a parameter and its gradient."""
    for calls, *ways in on_new_axis(called, sockets=sockets):
        counts = [(len({*some}), len({file for file, _ in some})) for some in (calls, *ways)]
        print(f"{len(calls)} calls; functions and files of a step, of a parameter, of its gradient: {counts}")
        assert len(calls) <= most[0]
        for (functions, files), (many, in_files) in zip(counts, ((most[1], 31), (15, 10), (20, 12)), strict=True):
            assert functions <= many
            assert files <= in_files
