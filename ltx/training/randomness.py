"""torch's default random generators, for what is computed a second time and must draw the same numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


def random_states() -> list[torch.Tensor]:
    """Those of the CPU's generator, and of the current CUDA device's if there is one in use."""
    cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *cuda]


def set_random_states(states: Sequence[torch.Tensor]) -> None:
    """Inverse of :func:`random_states`."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])


@contextmanager
def drawn_again(states: Sequence[torch.Tensor]) -> Iterator[None]:
    """In the block the generators go on from what :func:`random_states` gave; afterwards from where they were."""
    with torch.random.fork_rng([torch.cuda.current_device()] if len(states) > 1 else []):
        set_random_states(states)
        yield
