"""Memory that buckets take again: never while anybody looks at it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ltx.core.comm import buffer_pool
from ltx.core.comm.buffer_pool import BufferPool


def take(of: BufferPool, plan: Any = "plan", place: int = 0, shape: tuple[int, ...] = (1000,)) -> Tensor:
    return of.take(plan, place, True, shape, torch.float32, torch.device("cpu"))


def test_memory_that_nobody_looks_at_is_taken_again() -> None:
    found = BufferPool()
    first = take(found)
    where = first.data_ptr()
    del first
    again = take(found)
    assert again.data_ptr() == where
    assert (again.shape, again.dtype, again.grad_fn, again.requires_grad) == ((1000,), torch.float32, None, False)
    del again
    assert take(found, shape=(10, 100)).shape == (10, 100)


@pytest.mark.parametrize(
    "kept",
    [
        lambda x: x,
        lambda x: x[3:5],
        lambda x: x.view(10, 100).t(),
        lambda x: x.detach().numpy(),
        lambda x: memoryview(x.numpy()),
        lambda x: torch.utils.dlpack.to_dlpack(x),
        lambda x: x.untyped_storage(),
        lambda x: (x.clone().requires_grad_() * x).sum().grad_fn,  # saved for a backward pass
        lambda x: x.clone().requires_grad_().mul(x).sum(),
    ],
)
def test_memory_that_somebody_looks_at_is_left_alone(kept: Callable[[Tensor], Any]) -> None:
    found = BufferPool()
    first = take(found)
    where, held = first.data_ptr(), kept(first)
    del first
    second = take(found)
    assert second.data_ptr() != where
    third = take(found)  # both are in use
    assert third.data_ptr() not in (where, second.data_ptr())
    del held, second, third


def test_what_was_kept_has_its_values(seed: int) -> None:
    """Random takes, some of which are kept for a while: nobody's values change."""
    found, held = BufferPool(), list[tuple[Tensor, Tensor]]()
    reused = set[int]()
    for step in range(200):
        taken = take(found, place=step % 3)
        reused.add(taken.data_ptr())
        taken.copy_(torch.randn(1000))
        if torch.rand(()) < 0.5:
            part = taken[int(torch.randint(0, 500, ())) :]
            held.append((part, part.clone()))
        if held and torch.rand(()) < 0.5:
            held.pop(int(torch.randint(0, len(held), ())))
        del taken
        assert all(torch.equal(part, as_it_was) for part, as_it_was in held)
    assert len(reused) < 200


def test_places_plans_and_sizes_are_kept_apart() -> None:
    found = BufferPool()
    first, second = take(found), take(found, place=1)
    assert first.data_ptr() != second.data_ptr()
    del first, second
    assert len(found._kept) == 2
    larger = take(found, shape=(2000,))
    assert larger.untyped_storage().nbytes() == 8000
    del larger
    assert [storage.nbytes() for storage, _ in found._kept[0, True]] == [8000]
    take(found, plan="another")
    assert len(found._kept) == 1
    found.clear()
    assert not found._kept


def test_other_devices_and_other_torches_get_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    found = BufferPool()
    assert found.take("plan", 0, True, (3,), torch.float32, torch.device("meta")).device.type == "meta"
    monkeypatch.setattr(buffer_pool, "storage_uses", None)
    assert take(found).shape == (1000,)
    assert not found._kept
