"""The executor of a steady step that one sum reduces (:mod:`ltx.core.gradients.one_sum`), and of which nothing else is
asked: :meth:`ltx.core.training.resolved.Resolved.after` says which steps are so. What a call shows too late, such as a
weighted loss, the :class:`EagerStep` that this is goes on with, after the user's function.
"""

from __future__ import annotations

from typing import Any

import torch

from ltx.core import comm
from ltx.core.base import tree
from ltx.core.gradients import one_sum
from ltx.core.training.backward import BackwardResult
from ltx.core.training.step import EagerStep
from ltx.core.transforms.run import Called
from ltx.typing import Tree


class StraightStep(EagerStep):
    def differentiate(self) -> tuple[BackwardResult, torch.Tensor, Tree, Any]:
        plan = self.resolved.known.plan
        leaves = [*map(torch.Tensor.requires_grad_, map(torch.Tensor.detach, self.leaves))]
        params = tree.unflatten(self.spec, leaves)
        with comm.span("forward"), torch.enable_grad(), self._calls.recorded():
            called = Called.now(self.train.step.fn, params, leaves, (params, *self.batch.args), self.batch.named)
        loss = called.output
        if plan is None or not called.is_loss(self.resolved.known.nodes):
            self._called, self.prepared = called, None  # which knows leaves in another order than a bucket's
            return super().differentiate()
        name = f"step {self.state.step}"
        with self._calls.in_pass():
            grads, sums = one_sum.reduced(plan, leaves, [loss], None, False, name, loss.detach(), 1.0)
        return BackwardResult(grads, {}), sums.mean(loss.dtype), None, None
