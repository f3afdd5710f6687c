"""Optimizers as pairs of pure functions, ``init(params)`` and ``update(grads, state, params)``, as in optax."""

from __future__ import annotations

from ltx.optim.base import Optimizer as Optimizer
from ltx.optim.base import apply_updates as apply_updates
from ltx.optim.base import from_functions as from_functions
from ltx.optim.chain import chain as chain
from ltx.optim.chain import identity as identity
from ltx.optim.clip import ClipState as ClipState
from ltx.optim.clip import clip_by_global_norm as clip_by_global_norm
from ltx.optim.clip import clip_by_value as clip_by_value
from ltx.optim.clip import grad_norm as grad_norm
from ltx.optim.ema import EmaState as EmaState
from ltx.optim.ema import averaged as averaged
from ltx.optim.ema import ema as ema
from ltx.optim.from_torch import from_torch as from_torch
from ltx.optim.noise import add_noise as add_noise
from ltx.optim.partition import masked as masked
from ltx.optim.partition import partition as partition
from ltx.optim.quantized_adam import qadam as qadam
from ltx.optim.schedules import from_scheduler as from_scheduler
from ltx.optim.schedules import linear as linear
from ltx.optim.schedules import warmup_cosine as warmup_cosine
from ltx.optim.state import TorchState as TorchState
