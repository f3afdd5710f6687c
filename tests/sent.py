"""What a rank would send, from a recording of simulated ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import ltx
from tests.train_on import Trained, go_on


def ring(nbytes: int, n: int) -> int:
    """What each of `n` ranks sends for a sum of so many bytes."""
    return 2 * nbytes * (n - 1) // n


def sent(strategy: ltx.Strategy, params: Any, n: int = 2, step: int = 0) -> ltx.profile.Trace:
    """A recording of one of `n` ranks whose gradients are like `params`, after `step` synchronised steps."""
    state = replace(ltx.data_parallel(lambda params: params, strategy).init(params), step=step)
    with ltx.profile.record() as trace:
        ltx.vmap(lambda grads: ltx.sync_gradients(grads, strategy, state)[0], in_dims=None, axis_size=n)(params)
    return trace


def recorded(train: Any, state: Any, batches: Iterable[Any]) -> tuple[Trained, list[ltx.profile.Trace]]:
    """:func:`tests.train_on.go_on`, and a recording of each step."""
    metrics, traces = [], []
    for batch in batches:
        with ltx.profile.record() as trace:
            state, (found,) = go_on(train, state, [batch])
        metrics.append(found)
        traces.append(trace)
    return Trained(state, metrics), traces
