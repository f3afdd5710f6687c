"""The executor of a steady step whose gradients are one bucket that one sum reduces, as those of small models are.

Their steps would spend most of their time on what other steps need: several buckets, whose reductions overlap the pass,
states, phases, streams. :meth:`ltx.core.training.resolved.Resolved.after` says which steps are so. What a call shows
too late, such as a weighted loss, the :class:`EagerStep` that this is goes on with, after the user's function.
"""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import Any

import torch

from ltx.core import comm
from ltx.core.base import private, tree
from ltx.core.gradients.buffers import pack, unpack
from ltx.core.gradients.planning import in_step
from ltx.core.training.backward import BackwardResult
from ltx.core.training.step import EagerStep
from ltx.core.transforms.run import Called
from ltx.typing import Tree

_GRAD, _LAYOUT = attrgetter("grad"), attrgetter("layout")


class StraightStep(EagerStep):
    def differentiate(self) -> tuple[BackwardResult, torch.Tensor, Tree, Any]:
        leaves = [*map(torch.Tensor.requires_grad_, map(torch.Tensor.detach, self.leaves))]
        params = tree.unflatten(self.spec, leaves)
        with torch.enable_grad(), self._calls.recorded():
            self._calls.kept.append(params)  # they are there in the backward pass
            token, before = in_step.set(True), private.nodes_made()
            try:
                loss = self.train.step.fn(params, *self.batch.args, **self.batch.named)
            finally:
                in_step.reset(token)
        nodes = private.nodes_made() - before
        plain = type(loss) is torch.Tensor and loss.ndim == 0 and loss.requires_grad and loss.is_floating_point()
        if not plain or nodes != self.resolved.known.nodes:
            self._called = Called(leaves, loss, nodes)
            return super().differentiate()
        with private.no_grad():
            return self._reduced(leaves, loss)

    def _reduced(
        self, leaves: list[torch.Tensor], loss: torch.Tensor
    ) -> tuple[BackwardResult, torch.Tensor, None, None]:
        """The backward pass, and the mean gradients, with which the sum of the losses comes."""
        plan: Any = self.resolved.known.plan
        among, bucket, hook = plan.axis.comm, plan.buckets[0], plan.hook
        name = f"step {self.state.step}"
        summary = comm.begin_pass(among, among, name, plan.agreement, loss.detach(), 1.0)
        with self._calls.in_pass():
            private.run_backward([loss], None, False, leaves)
        of_bucket = [*map(leaves.__getitem__, bucket.members)]
        grads = [*map(_GRAD, of_bucket)]
        if type(None) in map(type, grads):
            grads = [torch.zeros_like(x) if grad is None else grad for x, grad in zip(of_bucket, grads, strict=True)]
        if {*map(_LAYOUT, grads)} != {torch.strided}:
            plan.refuse_sparse(bucket, grads)
        room = partial(among.buffer_pool.take, plan.buckets, bucket.index, hook.exact)
        flat = pack(grads, bucket, hook, plan.axis.size, [{}] * len(grads), (), room)
        channel = among.bucket_channel(0)
        note = summary.carried_by(channel) if summary.numbers else ()
        work = channel.issue("psum", flat, "bucket 0", note=note, eager=True)
        if note:
            summary.work = work
        total = work.wait()
        mean = comm.end_pass(among, summary).mean(loss.dtype)
        total = total if total.dtype == bucket.dtype else total.to(bucket.dtype)
        by_place = dict(zip(bucket.members, unpack(total, bucket, cast=False), strict=True))
        return BackwardResult([*map(by_place.__getitem__, range(len(leaves)))], {}), mean, None, None
