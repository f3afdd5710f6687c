"""What a rank would send, from a recording of simulated ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ltx


def sent(strategy: ltx.Strategy, params: Any, n: int = 2, step: int = 0) -> ltx.profile.Trace:
    """A recording of one of `n` ranks whose gradients are like `params`, after `step` synchronised steps."""
    state = replace(ltx.data_parallel(lambda params: params, strategy).init(params), step=step)
    with ltx.profile.record() as trace:
        ltx.vmap(lambda grads: ltx.sync_gradients(grads, strategy, state)[0], in_dims=None, axis_size=n)(params)
    return trace
