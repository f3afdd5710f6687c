"""How a peer's case runs: on real ranks, many cases in one call, and on simulated ones; against a formula in torch.

A :class:`Case` says what each rank calls and what plain torch makes of all ranks' inputs. Where the formula is
differentiable, its derivative is the gradient that ranks must find, for random cotangents that differ among them.
A :class:`Refusal` is a call that must raise. After each case the ranks add up their indices: nothing that went before,
errors least of all, may leave a collective behind.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import ltx

Ranks = Callable[[int], ltx.Pool]


@dataclass(frozen=True)
class Case:
    """A call on every rank, and its results by a formula.

    Attributes:
        call: what each rank calls on its own input.
        want: all ranks' inputs -> all ranks' results.
        inputs: number of ranks -> one input for each, a tree of tensors.
        worlds: on how many real ranks.
        simulated: on how many simulated ranks, besides; none where there is no simulated form.
        gradient: what the gradient of the sum of all ranks' losses is multiplied by, on n ranks; None: not compared.
        tolerance: relative and absolute; None is torch's own for the dtype.
    """

    call: Callable[[Any], Any]
    want: Callable[[list[Any]], list[Any]]
    inputs: Callable[[int], list[Any]]
    worlds: tuple[int, ...] = (3,)
    simulated: tuple[int, ...] = (4,)
    gradient: Callable[[int], float] | None = None
    tolerance: float | None = None


@dataclass(frozen=True)
class Refusal:
    """A call that raises `error` on every rank, with a text that has all of `says`."""

    call: Callable[[int], Any]
    error: type[Exception]
    says: tuple[str, ...]
    worlds: tuple[int, ...] = (2,)


Cases = Mapping[str, Case | Refusal]


def the_sum(n: int) -> float:
    """The factor of gradients where the loss is the sum of all ranks' losses: ltx's, JAX's and torch's rule."""
    return 1.0


def floats(value: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor) and x.is_floating_point()]


def attached(value: Any) -> Any:
    """A copy, whose floating tensors are leaves to differentiate by."""
    return pytree.tree_map(lambda x: x.clone().requires_grad_(x.is_floating_point()), value)


def detached(value: Any) -> Any:
    return pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, value)


def derivative(ys: Any, xs: Any, cotangents: list[Tensor]) -> list[Tensor]:
    reached = [(y, bar) for y, bar in zip(floats(ys), cotangents, strict=True) if y.requires_grad]
    if not reached:
        return [torch.zeros_like(x) for x in floats(xs)]
    heads, bars = zip(*reached, strict=True)
    found = torch.autograd.grad(heads, floats(xs), bars, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, floats(xs), strict=True)]


# --- on a real rank ---------------------------------------------------------------------------------------------------


def on_rank(cases: Cases, inputs: dict[str, list[Any]], cotangents: dict[str, list[Any]]) -> dict[str, Any]:
    """What this rank finds: by case (result, gradients), (error's classes, its text), or a traceback."""
    rank, n, found = int(ltx.axis_index()), ltx.axis_size(), {}
    for name, case in cases.items():
        if n not in case.worlds:
            continue
        if isinstance(case, Refusal):
            found[name] = refused(case, rank)
        else:
            bars = cotangents[name][rank] if name in cotangents else None
            found[name] = outcome(case, inputs[name][rank], bars)
        after = ltx.psum(torch.tensor(float(rank)))
        if after != sum(range(n)):
            found[name] = f"afterwards the sum of all ranks' indices is {after}\n{found[name]}"
    return found


def outcome(case: Case, given: Any, bars: list[Tensor] | None) -> Any:
    try:
        x = given if bars is None else attached(given)
        before = detached(pytree.tree_map(torch.clone, given))
        y = case.call(x)
        gradients = None if bars is None else derivative(y, x, bars)
        torch.testing.assert_close(detached(x), before, rtol=0, atol=0, equal_nan=True)  # nothing is written to
        return detached(y), gradients
    except Exception:
        return traceback.format_exc()


def refused(case: Refusal, rank: int) -> Any:
    try:
        return f"no error, but {case.call(rank)!r}"
    except Exception as error:
        return [kind.__name__ for kind in type(error).__mro__], str(error)


# --- all of them ------------------------------------------------------------------------------------------------------


def failures(cases: Cases, run: Callable[..., dict[str, Any]], ranks: Ranks, n: int) -> list[str]:
    """What is wrong on n real ranks: one text for each case that fails. `run` is on_rank with these very cases."""
    inputs, wanted, slopes, cotangents = {}, {}, {}, {}
    for name, case in cases.items():
        if isinstance(case, Case) and n in case.worlds:
            inputs[name], wanted[name], bars, slopes[name] = by_formula(case, n)
            if bars is not None:
                cotangents[name] = bars
    wrong = []
    by_rank = ranks(n).run(run, inputs, cotangents)
    for name, case in cases.items():
        if n not in case.worlds:
            continue
        for rank in range(n):
            got = by_rank[rank][name]
            where = f"{name}: rank {rank} of {n}"
            if isinstance(got, str):
                wrong.append(f"{where}: {got}")
            elif isinstance(case, Refusal):
                kinds, text = got
                if case.error.__name__ not in kinds or not all(part in text for part in case.says):
                    wrong.append(f"{where}: expected {case.error.__name__} with {case.says}, got {kinds[0]}: {text}")
            else:
                wrong += differences(where, got, (wanted[name][rank], slopes[name][rank]), case.tolerance)
    return wrong


def by_formula(case: Case, n: int) -> tuple[list[Any], list[Any], list[Any] | None, list[Any]]:
    """Inputs, wanted results, cotangents if gradients are compared, and wanted gradients; each by rank."""
    inputs = case.inputs(n)
    if case.gradient is None:
        return inputs, case.want(inputs), None, [None] * n
    xs = attached(inputs)
    ys = case.want(xs)
    bars = [[torch.randn_like(y) for y in floats(of_rank)] for of_rank in ys]
    slopes = derivative(ys, xs, [bar for of_rank in bars for bar in of_rank])
    scaled = iter([slope * case.gradient(n) for slope in slopes])
    return inputs, detached(ys), bars, [[next(scaled) for _ in floats(x)] for x in xs]


def differences(where: str, got: Any, want: Any, tolerance: float | None) -> list[str]:
    found = []
    for what, y, z in zip(("result", "gradient"), got, want, strict=True):
        try:
            torch.testing.assert_close(y, z, rtol=tolerance, atol=tolerance, equal_nan=True)
        except Exception as error:
            found.append(f"{where}: {what}: {error}")
    return found


def failures_simulated(cases: Cases) -> list[str]:
    """The same, on simulated ranks."""
    wrong = []
    for name, case in cases.items():
        for n in case.simulated if isinstance(case, Case) else ():
            inputs, wanted, bars, slopes = by_formula(case, n)
            xs = pytree.tree_map(lambda *parts: torch.stack(parts), *inputs)
            xs = xs if bars is None else attached(xs)
            try:
                ys = ltx.vmap(case.call)(xs)
                gradients = None
                if bars is not None:
                    gradients = derivative(ys, xs, [torch.stack(parts) for parts in zip(*bars, strict=True)])
            except Exception:
                wrong.append(f"{name}: {n} simulated ranks: {traceback.format_exc()}")
                continue
            ys = detached(ys)
            for rank in range(n):
                mine = pytree.tree_map(lambda y, rank=rank: y[rank], ys)
                slope = None if gradients is None else [g[rank] for g in gradients]
                where = f"{name}: simulated rank {rank} of {n}"
                wrong += differences(where, (mine, slope), (wanted[rank], slopes[rank]), case.tolerance)
    return wrong


def worlds_of(tables: Mapping[str, Cases]) -> list[tuple[str, int]]:
    """(name of a table, number of real ranks that it has cases for)"""
    return [
        (name, n) for name, cases in tables.items() for n in sorted({n for case in cases.values() for n in case.worlds})
    ]


def check(wrong: list[str]) -> None:
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:20])


# --- inputs -----------------------------------------------------------------------------------------------------------


def randn(*shape: int, dtype: torch.dtype = torch.float64) -> Callable[[int], list[Tensor]]:
    """A tensor for each rank, all of one shape."""
    return lambda n: [torch.randn(shape, dtype=torch.float64).to(dtype) for _ in range(n)]


def whole(*shape: int, dtype: torch.dtype, least: int = -9, most: int = 9) -> Callable[[int], list[Tensor]]:
    """Whole numbers that `dtype` can hold; also for floating dtypes, where sums of them are exact."""
    low = max(least, 0) if dtype in (torch.uint8, torch.bool) else least
    return lambda n: [torch.randint(low, most + 1, shape).to(dtype) for _ in range(n)]


def on_all(y: Any, n: int) -> list[Any]:
    return [y] * n
