"""Optimizers as pairs of pure functions, ``init(params)`` and ``update(grads, state, params)``, as in optax."""

from typing import Any

from ltx.core.base.private import has_memory as has_memory
from ltx.core.base.private import in_transform as in_transform
from ltx.core.base.slips import lacks
from ltx.core.base.traced import at_trace_time as at_trace_time
from ltx.core.optim.base import ClipState as ClipState
from ltx.core.optim.base import Optimizer as Optimizer
from ltx.core.optim.base import TorchState as TorchState
from ltx.core.optim.base import advanced as advanced
from ltx.core.optim.base import apply_leaves as apply_leaves
from ltx.core.optim.base import apply_updates as apply_updates
from ltx.core.optim.base import at_nodes as at_nodes
from ltx.core.optim.base import check_grads as check_grads
from ltx.core.optim.base import check_state as check_state
from ltx.core.optim.base import differentiated as differentiated
from ltx.core.optim.base import donated as donated
from ltx.core.optim.base import global_norm as global_norm
from ltx.core.optim.base import grad_norm as grad_norm
from ltx.core.optim.base import leaf_name as leaf_name
from ltx.core.optim.base import leaves_like as leaves_like
from ltx.core.optim.base import times_lr as times_lr
from ltx.core.optim.base import unless as unless
from ltx.core.optim.from_torch import TorchOptimizer as TorchOptimizer
from ltx.core.optim.kernel import NotGatheredError as NotGatheredError
from ltx.core.optim.torch_class import ClassOptimizer as ClassOptimizer
from ltx.core.optim.torch_class import Hyperparameter as Hyperparameter
from ltx.core.optim.torch_class import Kept as Kept


def __getattr__(name: str) -> Any:
    raise lacks("module 'ltx.extend.optimizers'", name)
