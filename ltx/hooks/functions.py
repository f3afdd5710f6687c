"""from_functions: a hook that is made of two functions, which compress and decompress."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from ltx.errors import StrategyError
from ltx.extend import BucketInput, CollectiveRequest, arguments, brief, recording, tree
from ltx.hooks.lossy import Compression, CompressionResult, LossyHook, from_message, to_message

Compress = Callable[[Tensor], Tensor | tuple[Tensor, ...]]
Decompress = Callable[[Any, int], Tensor]


@dataclass(frozen=True)
class FromFunctions(LossyHook):
    """A hook made of two functions; see :func:`from_functions`."""

    sums: ClassVar[bool] = False

    compress: Compress
    decompress: Decompress
    error_feedback: bool = field(default=False, kw_only=True)

    def send(self, inputs: BucketInput) -> Compression:
        given, parts = self._compressed(inputs.flat)
        if not recording():
            flat, got = inputs.flat, [(p.shape, p.dtype) for p in parts]
            wanted = _layout(self, flat.numel(), flat.dtype, flat.device)
            if got != wanted:  # such messages may have other lengths on other ranks
                gave, said = (", ".join(f"{d} of shape {[*shape]}" for shape, d in each) for each in (got, wanted))
                raise StrategyError(
                    f"{self!r}: shapes and dtypes of what compress returns must follow from the length and dtype of "
                    f"its argument. For {tree.describe(inputs.flat)} it gave {gave}, and for as many zeros {said}."
                )
        # Now, as the channel may overwrite it.
        mine = self._decompressed(given, inputs.flat) if self.error_feedback else inputs.flat
        message = torch.cat([to_message(part.reshape(1, -1)) for part in parts], 1)[0]
        messages = yield CollectiveRequest("all_gather", message)
        total = torch.zeros_like(inputs.flat)
        for rank in range(inputs.axis_size):
            row, start, found = messages[rank : rank + 1], 0, []
            for part in parts:
                values, start = from_message(row, start, part.numel(), part.dtype)
                found.append(values.reshape(part.shape))
            total = total + self._decompressed(tuple(found) if isinstance(given, tuple) else found[0], inputs.flat)
        return CompressionResult(total, lambda: inputs.flat.sub_(mine), inputs.states)

    def _compressed(self, flat: Tensor) -> tuple[Any, tuple[Tensor, ...]]:
        given = self.compress(flat)
        parts = given if isinstance(given, tuple) else (given,)
        if not parts or not all(isinstance(part, Tensor) for part in parts):
            raise StrategyError(f"{self!r}: compress must return a tensor or a tuple of tensors, got {brief(given)}.")
        return given, parts

    def _decompressed(self, compressed: Any, like: Tensor) -> Tensor:
        found = self.decompress(compressed, like.numel())
        if not isinstance(found, Tensor) or found.shape != like.shape or not found.is_floating_point():
            got = tree.describe(found) if isinstance(found, Tensor) else brief(found)
            raise StrategyError(f"{self!r}: decompress must return {tree.describe(like)}, as compress got, not {got}.")
        return found.to(like.dtype)

    def __repr__(self) -> str:
        names = (arguments.name_of(fn) for fn in (self.compress, self.decompress))
        return f"from_functions({', '.join(names)}{', error_feedback=True' if self.error_feedback else ''})"


@lru_cache(maxsize=256)
def _layout(
    hook: FromFunctions, numel: int, dtype: torch.dtype, device: torch.device
) -> list[tuple[torch.Size, torch.dtype]]:
    """Shapes and dtypes of what `compress` returns for zeros."""
    return [(part.shape, part.dtype) for part in hook._compressed(torch.zeros(numel, dtype=dtype, device=device))[1]]


def from_functions(compress: Compress, decompress: Decompress, *, error_feedback: bool = False) -> FromFunctions:
    """A lossy hook of two pure functions: each rank sends its compressed gradients to all others.

    >>> import torch, ltx
    >>> half = ltx.hooks.from_functions(lambda x: x.half(), lambda message, numel: message.float())
    >>> strategy = ltx.DDPStrategy(comm_hook=half)
    >>> ltx.vmap(lambda g: ltx.sync_gradients(g, strategy)[0])(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))[0]
    tensor([2., 3.])

    Each rank sends n - 1 messages. If that is too much, derive from :class:`ltx.hooks.CompressedAllReduce`, with which
    a rank sends the size of two messages, whatever the number of ranks.

    Args:
        compress: a function from one vector (float32 or float64), a rank's gradients of a bucket divided by the number
            of ranks, to a tensor or a tuple of tensors. Their shapes and dtypes have to follow from the vector's length
            and dtype alone. For simulated ranks it has to work under ``torch.vmap``.
        decompress: a function from what `compress` returned, and the vector's length, to a vector of that length.
        error_feedback: keep what isn't sent for the next step.

    Raises:
        ltx.errors.StrategyError: the arguments aren't such functions; in a step, one returns something else.
    """
    if not callable(compress) or not callable(decompress):
        raise StrategyError(f"hooks.from_functions takes two functions, got {brief(compress)} and {brief(decompress)}.")
    _check_takes("compress", compress, "vector")
    _check_takes("decompress", decompress, "message", "numel")
    return FromFunctions(compress, decompress, error_feedback=error_feedback)


def _check_takes(role: str, function: Callable[..., Any], *names: str) -> None:
    """Raise unless `function` can be called with these arguments, by position."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have no signature
        return
    try:
        signature.bind(*names)
    except TypeError:
        raise StrategyError(
            f"hooks.from_functions calls {role}({', '.join(names)}), and {arguments.name_of(function)} takes "
            f"{signature}. Write compress = lambda vector: ..., and decompress = lambda message, numel: ..."
        ) from None
