"""The default random number generators of this process: what they would draw next, kept and put back."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def torch_states() -> dict[str, Any]:
    """torch's: the CPU's, and the current CUDA device's if there is one in use."""
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def random_states() -> dict[str, Any]:
    """torch's, Python's, and NumPy's if it is loaded, in what a checkpoint can hold."""
    states = torch_states() | {"python": random.getstate()}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = (str(name), [int(key) for key in keys], int(rest[0]), int(rest[1]), float(rest[2]))
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Inverse of :func:`torch_states` and :func:`random_states`. Generators that `states` doesn't have go on."""
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states:
        import numpy  # it needn't be installed

        numpy.random.set_state(states["numpy"])


@contextmanager
def drawn_again(states: dict[str, Any]) -> Iterator[None]:
    """In the block torch's generators go on from what :func:`torch_states` gave; afterwards from where they were."""
    with torch.random.fork_rng([torch.cuda.current_device()] if "cuda" in states else []):
        set_random_states(states)
        yield
