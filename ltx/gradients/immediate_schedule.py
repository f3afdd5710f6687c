"""The schedule for ranks in one process: each bucket is reduced completely when it is ready."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch._C import _functorch

from ltx.axis import Axis
from ltx.gradients.comm_hook import reduce_at_once
from ltx.gradients.packing import pack_pure, unpack
from ltx.gradients.schedule import Dims, Schedule


class ImmediateSchedule(Schedule):
    """Reductions on simulated ranks and in a world of one, each done completely when its bucket is ready."""

    def begin(self) -> None:
        if self.plan.axis.threads and self.plan.agreement is not None:
            self.plan.axis.threads.announce(self.plan.agreement.signature)

    def start(self, index: int, dims: Dims, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        plan, bucket, hook = self.plan, self.plan.buckets[index], self.hook
        count = len(bucket.members)

        def one_rank(axis: Axis, *mine: torch.Tensor) -> tuple[torch.Tensor, ...]:
            states = plan.states_of(bucket, mine[count:])
            flat = pack_pure(mine[:count], bucket, hook, axis.size, states)
            inputs = replace(plan, axis=axis).bucket_input(bucket, flat, states)
            flat, following = reduce_at_once(hook, axis, inputs)
            return (*unpack(flat, bucket), *plan.flatten_states(bucket, following))

        return _under_vmaps(one_rank, dims, plan.axis, tensors)

    def wait(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(t.view_as(t) for t in tensors)


def _under_vmaps(
    body: Callable[..., tuple[torch.Tensor, ...]],
    dims: Dims,
    axis: Axis,
    tensors: Sequence[torch.Tensor],
    levels: tuple[int, ...] = (),
) -> tuple[torch.Tensor, ...]:
    """Run `body` for every entry of the leading dimensions that `dims` lists; the axis' own become its `levels`."""
    if not dims:
        if axis.simulated and levels:
            axis = replace(axis, backing=axis.simulated.at(levels))
        return body(axis, *tensors)

    def inner(*entries: torch.Tensor) -> tuple[torch.Tensor, ...]:
        here = (*levels, _functorch.current_level()) if dims[0] else levels
        return _under_vmaps(body, dims[1:], axis, entries, here)

    # Contiguous: what all ranks share comes back expanded, which forward mode can't attach tangents to.
    results: tuple[torch.Tensor, ...] = torch.vmap(inner, randomness="different")(*tensors)
    return tuple(result.contiguous() for result in results)
