"""Models with a batch for each rank, and the slow twins that say what their gradients are."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed.nn.functional
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ltx
from ltx.core.comm.registry import GroupAxis
from tests.inside import new_axis
from tests.kinds import Params

Batch = tuple[Tensor, ...]

# Of each leaf, in the norm of all leaves: a bias' gradient is a sum that may cancel, and is rounded as its terms are. A
# bfloat16 gradient is rounded once by the backward pass and once by the sum.
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-6, torch.bfloat16: 2e-2}


def assert_close(got: Any, expected: Any, tolerance: float | None = None) -> None:
    """Leaf by leaf: ||got - expected|| <= tolerance ||all expected||, same dtype and shape; zeros are zeros."""
    paths = ltx.tree.leaf_paths(expected)
    assert ltx.tree.leaf_paths(got) == paths
    leaves = ltx.tree.flatten(expected)[0]
    whole = torch.stack([torch.zeros((), dtype=torch.float64), *(x.detach().double().norm() for x in leaves)]).norm()
    for path, a, b in zip(paths, ltx.tree.flatten(got)[0], leaves, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), path
        bound = tolerance if tolerance is not None else TOLERANCE[b.dtype]
        error = (a.detach().double() - b.detach().double()).norm()
        scale = whole if b.any() else 0.0
        assert error <= bound * scale, f"{path}: off by {error:.3g} of {b.double().norm():.3g}, all of {scale:.3g}"


def assert_same_bits(*values: Any, of: str = "run") -> None:
    """`values` are equal, down to the last bit: of several runs of a program, or of what `of` says, such as "rank"."""
    try:
        ltx.PerRank(values).replicated()
    except (ltx.errors.ReplicaDivergedError, ltx.errors.TreeError) as error:
        text = str(error).partition(" Use .rank(i)")[0].replace("on all", "in all")
        raise AssertionError(re.sub(r"\brank(?=s?\b)", of, text)) from None


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw random numbers from `seed`, and leave the generator as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def own_axis(timeout: timedelta = timedelta(minutes=1)) -> GroupAxis:
    """On two ranks: an axis that no other test uses, for steps that leave it out of order."""
    return new_axis("own", [0, 1], timeout)


class MLP(nn.Sequential):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(dropout), nn.Linear(7, 3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (super().forward(x) - y).square().mean()  # mse_loss has no forward over reverse mode in torch


class Transformer(nn.Module):
    """One pre-norm block; the output layer's weight is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        # Without the parameters whose gradients are small differences of large numbers.
        self.norms = nn.ModuleList([nn.LayerNorm(8, elementwise_affine=False), nn.LayerNorm(8)])
        self.qkv, self.proj = nn.Linear(8, 24, bias=False), nn.Linear(8, 8, bias=False)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        h = self.embedding(tokens)
        q, k, v = self.qkv(self.norms[0](h)).chunk(3, dim=-1)
        h = h + self.proj((q @ k.mT / 8**0.5).softmax(-1) @ v)
        h = h + self.down(functional.gelu(self.up(self.norms[1](h))))
        return functional.cross_entropy(self.head(h).flatten(0, 1), targets.flatten())


class Routed(nn.Module):
    """Each rank uses a head of its own, and nobody the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 3) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor, which: Tensor) -> Tensor:
        h = self.body(x).tanh()
        if which.ndim == 0:
            return functional.mse_loss(self.heads[int(which)](h), y)
        # One-hot: under vmap, where all ranks run the same lines.
        return functional.mse_loss(sum(w * head(h) for w, head in zip(which, self.heads, strict=True)), y)


class Summing(nn.Module):
    """The loss of a rank depends on all ranks' features."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 3)
        self.sum: Callable[[Tensor], Tensor] = ltx.psum

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.body(x).tanh()
        return (h - self.sum(h.mean(0) * y.mean())).square().mean()


class Kept(nn.Module):
    """The mean over the samples that `keep` marks. Of a batch without any it is 0, with a gradient or without."""

    def __init__(self, reaches: bool) -> None:
        super().__init__()
        self.body = nn.Linear(5, 3)
        self.reaches = reaches

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        if len(x) == 0 and not self.reaches:
            return torch.zeros(())
        return (self.body(x).square().sum(-1) * keep).sum() / keep.sum().clamp(min=1)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, 7), nn.Tanh())
        self.outer = nn.Linear(7, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        # The parameters as arguments: the second forward pass runs after functional_call has put the old ones back.
        h = checkpoint(functional_call, self.inner, dict(self.inner.named_parameters()), (x,), use_reentrant=False)
        return functional.mse_loss(self.outer(h), y)


class Mixed(nn.Module):
    """Three dtypes, a 0-dim parameter and an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 3, bias=False)
        self.wide = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = (self.body(x) * self.scale).square() + self.narrow.float().square() + self.empty.sum()  # no cancellation
        return (h.double() * self.wide.square()).mean().float() + y.square().mean()


def whole_batch(module: nn.Module, batches: Sequence[Batch]) -> Tensor:
    return module(*(torch.cat(parts) for parts in zip(*batches, strict=True)))


def mean_of_losses(module: nn.Module, batches: Sequence[Batch], seed: int = 0) -> Tensor:
    losses = []
    for rank, batch in enumerate(batches):
        with seeded(seed + rank):
            losses.append(module(*batch))
    return torch.stack(losses).mean()


def summing(module: nn.Module, batches: Sequence[Batch]) -> Tensor:
    features = [module.body(x).tanh() for x, _ in batches]
    total = sum(h.mean(0) * y.mean() for h, (_, y) in zip(features, batches, strict=True))
    return torch.stack([(h - total).square().mean() for h in features]).mean()


def regression(rank: int, equal: bool) -> Batch:
    # Targets away from 0, so that no leaf's gradient is a small difference of large numbers.
    return torch.randn(4, 5), torch.randn(4, 3) + 2


def text(rank: int, equal: bool) -> Batch:
    return torch.randint(11, (3, 6)), torch.randint(11, (3, 6))


def routed(rank: int, equal: bool) -> Batch:
    which = torch.tensor(rank)
    return *regression(rank, equal), functional.one_hot(which, 4).float() if equal else which


def kept(rank: int, equal: bool) -> Batch:
    """Rank 1 has no samples; with `equal` shapes it has four that don't count."""
    n = 0 if rank == 1 and not equal else 4
    return torch.randn(n, 5), torch.full((n,), float(rank != 1))


@dataclass(frozen=True)
class Case:
    """A model, its batches, and what its gradients should be.

    Attributes:
        module: makes the model; its forward gives this rank's loss.
        batch: ``(rank, equal)`` -> this rank's batch; `equal` asks for the same shapes on every rank.
        loss: what one process with all batches would minimise.
        ddp: whether torch's DDP can do it, and its arguments.
        transforms: whether torch.func can do it.
        random: whether the forward pass draws random numbers.
    """

    module: Callable[[], nn.Module]
    batch: Callable[[int, bool], Batch] = regression
    loss: Callable[[nn.Module, Sequence[Batch]], Tensor] = mean_of_losses
    ddp: dict[str, Any] | None = field(default_factory=dict)
    transforms: bool = True
    random: bool = False

    def build(self, seed: int, ranks: int, equal: bool = False) -> tuple[nn.Module, list[Batch]]:
        """The model and the batches of all ranks, the same in every process."""
        with seeded(seed):
            return self.module(), [self.batch(rank, equal) for rank in range(ranks)]


CASES = {
    "mlp": Case(MLP, loss=whole_batch),
    "tied transformer": Case(Transformer, text, whole_batch),
    "unused and rank-dependent": Case(Routed, routed, ddp={"find_unused_parameters": True}),
    "psum inside": Case(Summing, loss=summing),
    "empty batch": Case(lambda: Kept(True), kept),
    "loss without parameters": Case(lambda: Kept(False), kept, ddp=None),
    # torch.func has no saved-tensor hooks, which activation checkpointing is made of.
    "checkpointed": Case(Checkpointed, loss=whole_batch, transforms=False),
    "dropout": Case(lambda: MLP(0.5), random=True),
    "mixed dtypes, 0-dim, empty": Case(Mixed, loss=whole_batch),
}


def params_of(module: nn.Module) -> Params:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def plain_step(module: nn.Module) -> Callable[..., Tensor]:
    return lambda params, *batch: functional_call(module, params, batch)


def gradient(module: nn.Module, loss: Tensor) -> Params:
    """The gradient of one process; zeros for parameters that it doesn't reach."""
    names, params = zip(*module.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, params, materialize_grads=True, allow_unused=True), strict=True))


def ddp_gradient(case: Case, seed: int) -> Params:
    """On a rank: what DistributedDataParallel makes of it."""
    module, batches = case.build(seed, ltx.world().size)
    if isinstance(module, Summing):
        module.sum = torch.distributed.nn.functional.all_reduce
    rank = ltx.world().rank
    with seeded(rank):
        replica = DistributedDataParallel(module, **case.ddp)
        replica(*batches[rank]).backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in module.named_parameters()}


def backward(step: Callable[..., Tensor], params: Params, *batch: Tensor) -> Params:
    leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
    step(leaves, *batch).backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in leaves.items()}


def autograd_grad(step: Callable[..., Tensor], params: Params, *batch: Tensor) -> Params:
    leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
    grads = torch.autograd.grad(step(leaves, *batch), list(leaves.values()), materialize_grads=True, allow_unused=True)
    return dict(zip(leaves, grads, strict=True))


def func_grad(step: Callable[..., Tensor], params: Params, *batch: Tensor) -> Params:
    return torch.func.grad(step)(params, *batch)


def ltx_grad_and_value(step: Callable[..., Tensor], params: Params, *batch: Tensor) -> Params:
    return ltx.grad_and_value(step)(params, *batch)[0]


FUNC_WAYS = {"torch.func.grad": func_grad, "ltx.grad_and_value": ltx_grad_and_value}
WAYS = {"backward": backward, "torch.autograd.grad": autograd_grad, **FUNC_WAYS}
