"""A gradient's way from the train step to the network and back to the optimizer, which should stay short."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ltx
from ltx import PerRank
from ltx.core.training.train_step import TrainStep

PACKAGE = Path(ltx.__file__).parent

#: (file below ltx/, name)
Function = tuple[str, str]


def function_of(frame: FrameType) -> Function | None:
    """The function of ltx that `frame` runs; None for code of others, comprehensions, and constructors of values."""
    code = frame.f_code
    if not code.co_filename.startswith(str(PACKAGE)):
        return None
    if code.co_name in ("<listcomp>", "<dictcomp>", "<genexpr>", "__init__"):
        return None
    return str(Path(code.co_filename).relative_to(PACKAGE)), code.co_qualname


def storages_in(value: Any, depth: int = 3) -> Iterator[int]:
    """The memory of the tensors in `value`: in containers and in values such as frozen dataclasses, not in objects."""
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        yield value.untyped_storage().data_ptr()
    elif depth and isinstance(value, list | tuple):
        for item in value:
            yield from storages_in(item, depth - 1)
    elif depth and isinstance(value, dict):
        yield from storages_in(list(value.values()), depth)
    elif depth and is_dataclass(type(value)) and type(value).__dataclass_params__.frozen:  # type: ignore[attr-defined]
        yield from storages_in([getattr(value, field.name) for field in fields(value)], depth)


class Way:
    """Records the functions that a bucket's gradients pass through in one call."""

    def __init__(self) -> None:
        self.functions: dict[Function, None] = {}
        self._buffer: int | None = None  # the bucket's memory, once its collective is issued
        self._arrived = False

    def issued(self, buffer: torch.Tensor, frame: FrameType | None) -> None:
        """The all-reduce of the bucket's `buffer` is issued from `frame`."""
        self._buffer = buffer.untyped_storage().data_ptr()
        stack: list[Function] = []
        while frame is not None:
            if (function := function_of(frame)) is not None:
                stack.insert(0, function)
            is_step = frame.f_code is inspect.unwrap(TrainStep.__call__).__code__
            frame = None if is_step else frame.f_back
        self.functions.update(dict.fromkeys(stack))

    def profile(self, frame: FrameType, event: str, returned: Any) -> None:
        """For sys.setprofile: is the reduced bucket among what this function takes or returns?"""
        if self._buffer is None or self._arrived or event not in ("call", "return"):
            return
        function = function_of(frame)
        if function is None:
            return
        if event == "return":
            values = [returned]
        else:
            arguments = frame.f_code.co_varnames[: frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount]
            values = [frame.f_locals.get(name) for name in arguments]
        if self._buffer in storages_in(values, depth=4):
            self._arrived = function[0].startswith("core/optim/")
            if not self._arrived:
                self.functions[function] = None


def trace() -> tuple[list[Function], bool]:
    torch.manual_seed(0)
    params = {"w": torch.randn(16, 8), "b": torch.zeros(16)}
    step = ltx.data_parallel(lambda p, x: (x @ p["w"].T + p["b"]).tanh().square().mean())
    train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.AdamW, lr=1e-3))
    state = train.init(params)
    for _ in range(2):  # the first steps of a new function compare signatures and parameters
        state, _ = train(state, torch.randn(4, 8))
    way, numel = Way(), sum(x.numel() for x in params.values())
    all_reduce: Callable[..., Any] = dist.all_reduce

    def observed(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.numel() == numel:  # not the step summary
            way.issued(tensor, sys._getframe(1))
        return all_reduce(tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", observed)
        sys.setprofile(way.profile)
        try:
            train(state, torch.randn(4, 8))
        finally:
            sys.setprofile(None)
    return list(way.functions), way._arrived


def called() -> tuple[int, set[Function]]:
    """The number of calls of ltx's functions in a steady step of ten parameters, and these functions."""
    params = {f"p{i}": torch.ones(4) for i in range(10)}
    step = ltx.data_parallel(lambda p, x: (torch.stack(tuple(p.values())) * x).sum())
    train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.AdamW, lr=1e-3))
    state, found = train.init(params), list[list[Function]]()
    for number in range(60):  # on a loaded machine most steps wait
        calls: list[Function] = []

        def note(frame: FrameType, event: str, _: Any, calls: list[Function] = calls) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
                calls.append((frame.f_code.co_filename, frame.f_code.co_qualname))

        sys.setprofile(note if number > 2 else None)
        try:
            state, _ = train(state, torch.ones(4))
        finally:
            sys.setprofile(None)
        found += [calls] if number > 2 else []
    fewest = min(found, key=len)  # a wait for the peer makes calls, too
    return len(fewest), {*fewest}


@pytest.mark.parametrize(("sockets", "most"), [(True, (210, 165)), (False, (230, 185))])
def test_a_steady_step_asks_little(
    sockets: bool, most: tuple[int, int], on_new_axis: Callable[..., PerRank[Any]]
) -> None:
    """What can't have changed since the step before isn't asked again."""
    for count, functions in on_new_axis(called, sockets=sockets):
        print(f"{count} calls of {len(functions)} functions")
        assert count <= most[0]
        assert len(functions) <= most[1]
        assert len({file for file, _ in functions}) <= 46


def test_a_gradients_way_is_short(on_new_axis: Callable[..., PerRank[tuple[list[Function], bool]]]) -> None:
    """The functions on the stack when a bucket's all-reduce is issued, and those that its result passes through.

    The way ends where :mod:`ltx.optim` gets the gradients. A function that is only a relay belongs into its caller.
    """
    for functions, arrived in on_new_axis(trace, sockets=True):
        files = list(dict.fromkeys(file for file, _ in functions))
        listed = "\n".join(f"  {file}: {name}" for file, name in functions)
        print(f"{len(functions)} functions in {len(files)} files:\n{listed}")
        assert arrived
        assert len(functions) <= 22
        assert len(files) <= 11
