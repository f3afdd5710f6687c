"""Long buffers in chunks: several passes over a chunk that stays in the cache cost little more than one over memory.

For eager tensors on the CPU alone (:func:`ltx.gradients.reduction.is_plain`); on other devices, under transforms and in
compiled graphs codecs work on all of a buffer at once, which says the same in fewer words.
"""

from __future__ import annotations

from collections.abc import Iterator

#: Numbers of a chunk. ``benchmarks.codecs`` took 2^15 to 2^20: shorter ones are all calls, longer ones leave the cache.
CHUNK = 1 << 19


def chunks(length: int, width: int = 1) -> Iterator[slice]:
    """`length` rows of `width` numbers in slices of at most a chunk, but of a row at least."""
    step = max(1, CHUNK // width)
    return (slice(start, min(start + step, length)) for start in range(0, length, step))
