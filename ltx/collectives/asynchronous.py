"""async_: collectives that are begun where they are called, and waited for later."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from ltx import comm, traced
from ltx.arguments import brief, name_of
from ltx.collectives.broadcast import broadcast, psum_to
from ltx.collectives.extremum import pmax, pmin
from ltx.collectives.futures import Future
from ltx.collectives.gather import all_gather, psum_scatter
from ltx.collectives.permute import all_to_all, ppermute
from ltx.collectives.psum import pmean, psum
from ltx.collectives.scatter import gather, scatter
from ltx.errors import UnsupportedError
from ltx.typing import Tree

#: Those that send one message for each tensor.
ONE_MESSAGE = (
    psum,
    pmean,
    pmax,
    pmin,
    psum_to,
    all_gather,
    psum_scatter,
    all_to_all,
    ppermute,
    broadcast,
    gather,
    scatter,
)


def async_(collective: Callable[..., Tree]) -> Callable[..., Future]:
    """A collective that returns at once: a :class:`ltx.Future` of what it gives.

    It is issued where it is called, like the collective itself, so all ranks must call their collectives in the same
    order, these among them; a rank may call ``ltx.psum`` where another calls ``ltx.async_(ltx.psum)``. Where and in
    which order they wait is each rank's own. Tensors are read at the call, so they may change after it.

    Args:
        collective: psum, pmean, pmax, pmin, psum_to, all_gather, psum_scatter, all_to_all, ppermute, broadcast, gather
            or scatter.

    Returns:
        A function with the same arguments. Its future has ``wait()`` and ``done``. On simulated ranks and in a world of
        one it is done at once.

    Gradient:
        None: a leaf that requires a gradient, and calls under transforms of torch.func or forward mode, are refused. On
        simulated ranks ``ltx.vmap`` itself, and ``torch.vmap`` around it, are allowed.

    Raises:
        UnsupportedError: `collective` is none of these; a leaf requires a gradient; `splits`, and sparse tensors, which
            take several messages; in compiled graphs, which order their collectives themselves.
        Else, at the call, what the collective raises before anything is sent; at ``wait()``, what it raises after that.

    Example:
        >>> import torch, ltx
        >>> future = ltx.async_(ltx.psum)({"hits": torch.tensor(3)}, axis="data")
        >>> y = torch.ones(2) * 2  # meanwhile
        >>> future.wait()
        {'hits': tensor(3)}

    Source: ``async_op=True`` in torch.distributed; Horovod's ``allreduce_async`` and ``synchronize``.
    """
    if not any(collective is known for known in ONE_MESSAGE):
        name = name_of(collective) if callable(collective) else brief(collective)
        raise UnsupportedError(
            f"async_ takes a collective that is one message, got {name}. It must be one of "
            f"{', '.join(f'ltx.{known.__name__}' for known in ONE_MESSAGE)}."
        )
    signature = inspect.signature(collective)

    @functools.wraps(collective)
    def wrapped(*args: Any, **kwargs: Any) -> Future:
        if torch.compiler.is_compiling():
            _refuse_trace(collective.__name__)
        bound = signature.bind(*args, **kwargs)
        bound.arguments["axis"] = comm.InBackground(bound.arguments.get("axis"), collective.__name__)
        future: Future = collective(*bound.args, **bound.kwargs)
        return future

    return wrapped


@traced.at_trace_time
def _refuse_trace(name: str) -> None:
    raise UnsupportedError(
        f"async_: ltx.{name} can't be begun in a compiled graph, which orders its collectives itself. Call ltx.{name} "
        "itself there."
    )
