"""A backward pass whose gradients are one bucket that one sum reduces (:attr:`Plan.one_sum`), in a straight line.

Small models have such, and most of their time would go into what other passes need: buckets whose reductions overlap
the pass, programs of several phases, states, streams. :class:`ltx.core.gradients.pending.ProcessSchedule` has these.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import attrgetter

import torch

from ltx.core import comm
from ltx.core.base import private
from ltx.core.base.errors import UnsupportedError
from ltx.core.base.private import Tensors
from ltx.core.gradients.buffers import pack, unpack
from ltx.core.gradients.planning import Plan

_GRAD, _LAYOUT = attrgetter("grad"), attrgetter("layout")


def taken(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients that a pass has brought to `leaves`, which give them up; zeros where none has come."""
    grads = [*map(_GRAD, leaves)]
    if type(None) in map(type, grads):
        grads = [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, grads, strict=True)]
    for leaf in leaves:
        leaf.grad = None
    return grads


def reduced(
    plan: Plan,
    leaves: Sequence[torch.Tensor],
    outputs: Tensors,
    cotangents: Tensors | None = None,
    again: bool = False,
    name: str = "a backward pass",
    total: torch.Tensor | float = 0.0,
    weight: float = 0.0,
) -> tuple[list[torch.Tensor], comm.StepSummary]:
    """Run the pass from `outputs` to `leaves`, the plan's parameters, and reduce it: (the gradients, the sums over
    ranks of `total` and `weight`). `again`: it may run once more. `name`: of the pass, in errors.
    """
    among, bucket, hook, work = plan.axis.comm, plan.buckets[0], plan.hook, None
    sent = among.peers.own.sent
    summary = comm.begin_pass(among, among, name, plan.agreement, total, weight)
    try:
        if outputs:
            with comm.span("backward"):
                private.run_backward(outputs, cotangents, again, leaves)
        grads = taken([*map(leaves.__getitem__, bucket.members)])
        if {*map(_LAYOUT, grads)} != {torch.strided}:
            plan.refuse_sparse(bucket, grads)
        if comm.recordings:
            comm.note_packed("bucket", hook, bucket)
        with private.no_grad():
            room = partial(among.buffer_pool.take, plan.buckets, bucket.index, hook.exact)
            flat = pack(grads, bucket, hook, plan.axis.size, [{}] * len(grads), (), room)
            channel = among.bucket_channel(0)
            note = summary.carried_by(channel) if summary.numbers else ()
            work = channel.issue("psum", flat, "bucket 0", note=note, eager=True)
            if note:
                summary.work = work
            found = dict(zip(bucket.members, unpack(work.wait(), bucket), strict=True))
            return [*map(found.__getitem__, range(len(found)))], comm.end_pass(among, summary)
    except BaseException as error:
        if work is not None or not isinstance(error, UnsupportedError):  # all ranks find what isn't supported before
            among.passes.leave(error, sent)
        raise
