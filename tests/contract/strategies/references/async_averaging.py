"""Steps of ranks or of nodes, and rounds that add what all were ahead of each on the mean as the round began."""

from __future__ import annotations

from collections.abc import Callable

from tests.contract.strategies.problem import Params, Problem, Sgd, mean_of, on_each


def rounds(warmup_steps: int, period: int, delay: int, node: int = 1) -> Callable[[Problem], list[list[Params]]]:
    def reference(problem: Problem) -> list[list[Params]]:
        optimizers = [Sgd() for _ in range(problem.ranks)]
        params, history = [problem.start] * problem.ranks, []
        began: dict[int, list[Params]] = {}
        for step in range(problem.steps):
            grads = problem.grads(params, step)
            together = problem.ranks if step < warmup_steps else min(node, problem.ranks)
            means = [mean_of(grads[first : first + together]) for first in range(0, problem.ranks, together)]
            grads = [mean for mean in means for _ in range(together)]
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
