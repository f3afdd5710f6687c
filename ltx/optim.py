"""Optimizers as pairs of pure functions, ``init(params)`` and ``update(grads, state, params)``, as in optax."""

from ltx.core.optim import *  # noqa: F403
from ltx.core.optim import __all__, __dir__  # noqa: F401
