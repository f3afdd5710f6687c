"""What a training comes to by a plain loop in one process, whatever number of ranks did which step."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

import ltx


def replayed(
    model: torch.nn.Module,
    loss: Callable[[Tensor], Tensor],
    optimizer: ltx.optim.Optimizer,
    position: ltx.DataPosition,
    sizes: Iterable[tuple[int, int]],
) -> dict[str, Tensor]:
    """The parameters at the end. `loss` gives that of some samples; `sizes`: by step, (replicas, ranks of each).

    The sum of a replica's ranks comes before that over replicas, and then a division, which is exact for powers of two.
    """
    params = dict(model.named_parameters())
    opt_state = optimizer.init(params)
    for replicas, ranks in sizes:
        total = {path: torch.zeros_like(p) for path, p in params.items()}
        for replica in range(replicas):
            mean = {path: torch.zeros_like(p) for path, p in params.items()}
            for rank in range(ranks):
                indices = position.indices(replica * ranks + rank, replicas * ranks)
                grads = torch.autograd.grad(loss(indices), list(params.values()))
                for own, grad in zip(mean.values(), grads, strict=True):
                    own += grad / ranks
            for path, own in mean.items():
                total[path] += own
        grads = {path: grad / replicas for path, grad in total.items()}
        with torch.no_grad():
            params, opt_state = optimizer.apply(grads, opt_state, params, donate=True)
        position = position.after_step()
    return {path: p.detach() for path, p in params.items()}
