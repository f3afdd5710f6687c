"""A steady step allocates what the model's own forward and backward pass do, and nothing large besides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import ltx
from tests.kinds import Params
from tests.train_on import on_ranks
from tests.twins.cases import seeded

LARGE = 1 << 16


def allocated(step: Callable[[], object]) -> Counter[int]:
    """Sizes of the large tensors that a step makes, once it is steady."""
    for _ in range(3):
        step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    return Counter(event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() >= LARGE)


def setting() -> tuple[Params, Callable[[Params, Tensor], Tensor], Tensor]:
    """Four layers of 300 kB each, in buckets of one or two."""

    def loss(p: Params, x: Tensor) -> Tensor:
        for name in sorted(p):
            x = torch.tanh(x @ p[name])
        return x.square().mean()

    return {f"w{k}": torch.randn(256, 300 if k == 3 else 256) / 16 for k in range(4)}, loss, torch.randn(128, 256)


@pytest.mark.full(but=2)
@pytest.mark.parametrize("overlap", ["backward", "update"])
@pytest.mark.parametrize("donate", [True, False])
@on_ranks(2)
def test_a_training_step(overlap: Any, donate: bool) -> None:
    params, loss, x = setting()
    mine = [p.clone().requires_grad_() for p in params.values()]
    optimizer = torch.optim.AdamW(mine, fused=True)

    def bare() -> None:
        optimizer.zero_grad()
        loss(dict(zip(params, mine, strict=True)), x).backward()
        optimizer.step()

    strategy = ltx.DDPStrategy(bucket_bytes=600_000, first_bucket_bytes=1)
    adamw = ltx.optim.from_torch(torch.optim.AdamW, fused=True)
    train = ltx.train_step(ltx.data_parallel(loss, strategy), adamw, overlap=overlap, donate=donate)
    state = [train.init(params)]

    def trained() -> None:
        state[0], _ = train(state[0], x)

    plain, step, params = allocated(bare), allocated(trained), Counter(p.numel() * 4 for p in params.values())
    assert plain, "activations and gradients are large"
    # What isn't donated is copied: parameters, and two moments of each.
    copies = Counter() if donate else params + params + params
    assert step - plain == copies
    assert plain - step == Counter()


@pytest.mark.parametrize("grad", [torch.func.grad, ltx.grad], ids=["torch.func", "ltx"])
@on_ranks(2)
def test_gradients_alone(grad: Any) -> None:
    params, loss, x = setting()
    params = ltx.broadcast(params)
    mine = [p.clone().requires_grad_() for p in params.values()]
    gradient = grad(ltx.data_parallel(loss))
    found = [gradient(params, x)]

    def bare() -> None:
        torch.autograd.grad(loss(dict(zip(params, mine, strict=True)), x), mine)

    def trained() -> None:
        found[0] = gradient(params, x)

    plain, step = allocated(bare), allocated(trained)
    assert step == plain


@pytest.mark.parametrize("grad", [torch.func.grad, ltx.grad], ids=["torch.func", "ltx"])
@on_ranks(2)
def test_gradients_that_are_kept_keep_their_values(grad: Any, seed: int) -> None:
    with seeded(seed):  # the same on both ranks
        params, loss, _ = setting()
        batches = [torch.randn(2, 256) for _ in range(6)]
    both = grad(ltx.data_parallel(loss)), torch.func.grad(loss)
    found = [both[0](params, x) for x in batches]
    arrays = [{k: g.numpy() for k, g in grads.items()} for grads in found]
    del found[1], found[2]
    for x in batches:
        both[0](params, x)
    for x, mine in zip(batches, arrays, strict=True):
        for name, expected in both[1](params, x).items():
            torch.testing.assert_close(torch.from_numpy(mine[name]), expected)
