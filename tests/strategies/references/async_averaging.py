"""Local steps, and rounds that add what the mean of all ranks was ahead of each when the round began."""

from __future__ import annotations

from collections.abc import Callable

from tests.strategies.problem import Params, Problem, Sgd, mean_of, on_each


def rounds(warmup_steps: int, period: int, delay: int) -> Callable[[Problem], list[list[Params]]]:
    def reference(problem: Problem) -> list[list[Params]]:
        optimizers = [Sgd() for _ in range(problem.ranks)]
        params, history = [problem.start] * problem.ranks, []
        began: dict[int, list[Params]] = {}
        for step in range(problem.steps):
            grads = problem.grads(params, step)
            if step < warmup_steps:
                grads = [mean_of(grads)] * problem.ranks
            params = [sgd.step(p, g) for sgd, p, g in zip(optimizers, params, grads, strict=True)]
            if snapshots := began.get(step - delay):
                mean = mean_of(snapshots)
                params = [
                    on_each(lambda x, y, s: x + y - s, p, mean, s) for p, s in zip(params, snapshots, strict=True)
                ]
            if step >= warmup_steps and (step - warmup_steps) % period == 0:
                began[step] = params
            history.append(params)
        return history

    return reference
