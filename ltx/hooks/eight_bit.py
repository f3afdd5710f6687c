"""Eight bits a number. ByteGrad and Quantize round to a grid over a group's range that contains 0; QSGD is unbiased.

    q = clamp(round((x - base) / step) - offset, -128, 127),    x^ = base + (q + offset) * step,    |x^ - x| <= step / 2

    ByteGrad:   base = 0,      step = (max x - min x + 1e-7) / 255,     offset = round(max x / step) - 127
                if 0 lies outside of the range:
                base = min x,  step = (max x - min x) / 255,            offset = 128
    Quantize:   base = 0,      step = (max(x, 0) - min(x, 0)) / 255,    offset = 128 - round(-min(x, 0) / step)

    QSGD:       x^_i = |x| * sign(x_i) * l_i / s,   l_i = floor(s |x_i| / |x| + u_i),   u_i uniform in [0, 1)

ByteGrad is Bagua's MinMaxUInt8 (Gan et al., "BAGUA", VLDB 2022, section 3), whose 1e-7 is left out where it would be
more than a tenth of a step. Quantize is Jacob et al., "Quantization and training of neural networks for efficient
integer-arithmetic-only inference", CVPR 2018, equation 1. With a base of 0, 0 is decoded as 0: a parameter without
gradient must not get one by rounding, as Adam divides by the root of its second moment, which is 0 there.

QSGD is Alistarh et al., NeurIPS 2017, section 3.1: E x^ = x and E|x^ - x|^2 <= min(d / s^2, sqrt(d) / s) |x|^2 for a
block of d numbers (lemma 3.1). Levels are sent as bytes, not in the paper's Elias code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from ltx.errors import StrategyError
from ltx.extend import BucketInput, arguments, buffers
from ltx.hooks import noise
from ltx.hooks.lossy import CompressedAllReduce, by_greatest, from_message, to_message

_BAGUA_EPSILON = 1e-7


#: (base, offset, step, its inverse, which is finite) of k groups, each ``(k, 1)``: q is ``base + (q + offset) * step``.
#: The number with code 0 is the centre, base + offset * step: with a base of 0 one product, so that 0 stays exactly 0.
Grid = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class EightBitHook(CompressedAllReduce):
    """Messages are ``[centre, step] of each group, a signed byte for each number``, which is centre + byte * step."""

    def groups(self, m: int) -> int:
        """The number of groups in a row of m numbers; each group has its own grid."""
        return 1

    def grid(self, groups: torch.Tensor) -> Grid:
        """The grid for groups of shape ``(k, size)``."""
        raise NotImplementedError(f"{type(self).__name__} must define grid(groups)")

    def encode(self, rows: torch.Tensor, key: torch.Tensor | None) -> torch.Tensor:
        if buffers.is_plain(rows):
            return self._in_chunks(rows, keep=False)
        k, m = rows.shape
        groups = rows.view(k * self.groups(m), -1)
        base, offset, step, inverse = self.grid(groups)
        scaled = torch.round((groups - base) * inverse)
        codes = (scaled - offset).clamp(-128, 127).to(torch.int8)  # eight times faster than to uint8
        head = torch.cat([(base + offset * step).view(k, -1), step.view(k, -1)], 1)
        return torch.cat([to_message(head), to_message(codes.view(k, m))], 1)

    def encode_and_keep(self, rows: torch.Tensor, key: torch.Tensor | None) -> torch.Tensor:
        return self._in_chunks(rows, keep=True)

    def _in_chunks(self, rows: torch.Tensor, keep: bool) -> torch.Tensor:
        """:meth:`encode` chunk by chunk. With `keep`, `rows` hold the rounding errors afterwards."""
        k, m = rows.shape
        count = self.groups(m)
        head = 2 * count * rows.element_size()
        messages = torch.empty((k, head + m), dtype=torch.uint8, device="cpu")
        codes, memory = messages[:, head:].view(torch.int8), rows.new_empty(min(buffers.CHUNK, rows.numel()))
        # Rows of one group are processed together: a call costs as much as thousands of numbers.
        alike = (1, k, m) if count == 1 else (k, count, -1)
        grids: list[tuple[torch.Tensor, torch.Tensor]] = []
        for row, row_codes in zip(rows.view(alike), codes.view(alike), strict=True):
            several = max(1, buffers.CHUNK // row.shape[1]) if count > 1 else k
            for groups, group_codes in zip(row.split(several), row_codes.split(several), strict=True):
                base, offset, step, inverse = self.grid(groups)
                grids.append((centre := base + offset * step, step))
                based = bool(base.any())
                columns = max(1, buffers.CHUNK // len(groups))
                for chunk, code in zip(groups.split(columns, 1), group_codes.split(columns, 1), strict=True):
                    scaled = memory[: chunk.numel()].view(chunk.shape)
                    if based:
                        torch.sub(chunk, base, out=scaled).mul_(inverse)
                    else:
                        torch.mul(chunk, inverse, out=scaled)
                    code.copy_(scaled.round_().sub_(offset).clamp_(-128, 127))
                    if keep:  # computed from the codes, which are arbitrary for values that aren't finite
                        chunk.sub_(scaled.copy_(code).mul_(step).add_(centre))
        heads = torch.cat([torch.cat(parts).view(k, -1) for parts in zip(*grids, strict=True)], 1)
        messages[:, :head].copy_(to_message(heads))
        return messages

    def decode(self, messages: torch.Tensor, m: int, dtype: torch.dtype) -> torch.Tensor:
        k, count = messages.shape[0], self.groups(m)
        if buffers.is_plain(messages):
            rows = torch.empty((k, m), dtype=dtype, device="cpu")
            for row, message in zip(rows, messages, strict=True):
                for _ in self.decoded_in_turn(message, m, dtype, row):
                    pass
            return rows
        grid, start = from_message(messages, 0, 2 * count, dtype)
        centre, step = (part.reshape(-1, 1) for part in grid.split(count, 1))
        scaled = from_message(messages, start, m, torch.int8)[0].to(dtype).view(k * count, -1).mul_(step)
        # A compiler may fuse scaled + centre into one rounding, after which 0 isn't decoded as 0. `scaled - scaled`
        # instead of zeros, since an infinite range must give NaN.
        return torch.where(scaled == -centre, scaled - scaled, scaled + centre).view(k, m)

    def decoded_sum(self, messages: torch.Tensor, m: int, dtype: torch.dtype) -> torch.Tensor:
        if not buffers.is_plain(messages):
            return super().decoded_sum(messages, m, dtype)
        total = torch.empty(m, dtype=dtype, device="cpu")
        first, *others = messages
        turns = (self.decoded_in_turn(message, m, dtype) for message in others)
        for (_, chunk), *added in zip(self.decoded_in_turn(first, m, dtype, total), *turns, strict=True):
            for _, other in added:
                chunk.add_(other)
        return total

    def decoded_in_turn(
        self, message: torch.Tensor, m: int, dtype: torch.dtype, row: torch.Tensor | None = None
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """:meth:`decode` of an eager message by chunks: yields (slice, numbers), in `row`, or in memory used again."""
        count = self.groups(m)
        width = m // count
        grid, start = from_message(message[None], 0, 2 * count, dtype)
        centre, step = grid.view(2, count, 1)
        codes = message[start:].view(torch.int8).view(count, width)
        memory = torch.empty(min(m, buffers.CHUNK), dtype=dtype, device="cpu") if row is None else row
        for some in buffers.chunks(count, width):
            for columns in buffers.chunks(width):
                code = codes[some, columns]
                first = some.start * width + columns.start
                at = slice(first, first + code.numel())
                flat = memory[: code.numel()] if row is None else row[at]
                flat.view(code.shape).copy_(code).mul_(step[some]).add_(centre[some])
                yield at, flat


def _extremes(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # The extremes pass NaN on to all that is decoded. Along a dimension aminmax takes 20 times as long as amin, amax.
    if groups.shape[1] >= buffers.CHUNK and buffers.is_plain(groups):
        low, high = map(torch.stack, zip(*(group.aminmax() for group in groups), strict=True))
        return low.view(-1, 1), high.view(-1, 1)
    return groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)


def _step(low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The step and its inverse. Unless the range is 0, the step is at least the least normal number."""
    step, info = high / 255 - low / 255, torch.finfo(low.dtype)
    step = torch.where(step == 0, step, step.clamp(min=info.tiny))
    return step, (1 / step).clamp(max=info.max)


def _around_zero(low: torch.Tensor, high: torch.Tensor) -> Grid:
    half = high / 2 - low / 2  # high - low may overflow
    inverse = 127.5 / torch.where(half >= 1275 * _BAGUA_EPSILON, half + _BAGUA_EPSILON / 2, half)
    inverse = inverse.clamp(max=torch.finfo(low.dtype).max)
    step = half.sign() / inverse  # 0 if all numbers are 0
    return torch.zeros_like(low), torch.round(high * inverse) - 127, step, inverse


@dataclass(frozen=True)
class ByteGrad(EightBitHook):
    """Gradients in eight bits a number, a quarter of float32, with a grid for each rank's part of a bucket.

    Each rank's gradients are rounded, and then their sum, each by at most half a step. A 0 on all ranks stays 0.

    Args:
        error_feedback: keep what rounding loses for the next step.

    Source: Bagua's bytegrad (Gan et al., "BAGUA", VLDB 2022, section 3).

    Example:
        >>> import torch, ltx
        >>> strategy = ltx.DDPStrategy(comm_hook=ltx.hooks.ByteGrad())
        >>> grads = torch.tensor([[0.0, 255.0], [0.0, 255.0]])
        >>> ltx.vmap(lambda g: ltx.sync_gradients(g, strategy)[0])(grads)
        tensor([[  0., 255.],
                [  0., 255.]])
    """

    def filling(self, last: torch.Tensor) -> torch.Tensor:
        return last[-1]  # a zero might widen the range

    def grid(self, groups: torch.Tensor) -> Grid:
        low, high = _extremes(groups)
        around = (low <= 0) & (high >= 0)
        if buffers.is_plain(groups) and bool(around.all()):
            return _around_zero(low, high)
        # Else the least number is the base: an offset from 0 would lose most of the digits.
        pairs = zip(_around_zero(low, high), (low, torch.full_like(low, 128), *_step(low, high)), strict=True)
        base, offset, step, inverse = (torch.where(around, a, b) for a, b in pairs)
        return base, offset, step, inverse


@dataclass(frozen=True)
class Quantize(EightBitHook):
    """Affine eight-bit quantization, a quarter of float32's bytes, on a grid whose range always includes 0.

    A gradient that is 0 on all ranks stays 0.

    Args:
        per: "tensor": one grid for each rank's part of a bucket; "channel": one grid for every `channel` numbers.
        channel: the number of numbers in a channel.
        error_feedback: keep what rounding loses for the next step.

    Source: torch.distributed's quantization_pertensor_hook and quantization_perchannel_hook, which gather every rank's
    message, work only on NCCL, and floor the step at 1.19e-7. ltx uses reduce-scatter and all-gather, on every backend.

    Example:
        >>> import ltx
        >>> ltx.hooks.Quantize(per="channel")
        Quantize(per='channel')
    """

    per: Literal["tensor", "channel"] = "tensor"
    channel: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.check_whole(self, 1, "channel", most=2**24)

    def multiple(self) -> int:
        return self.channel if self.per == "channel" else 1

    def groups(self, m: int) -> int:
        return m // self.channel if self.per == "channel" else 1

    def grid(self, groups: torch.Tensor) -> Grid:
        low, high = _extremes(groups)
        low, high = low.clamp(max=0), high.clamp(min=0)
        step, inverse = _step(low, high)
        return torch.zeros_like(low), 128 - torch.round(-low * inverse).clamp(0, 255), step, inverse


@dataclass(frozen=True)
class QSGD(CompressedAllReduce):
    """Stochastic eight-bit quantization whose expectation is the mean: a quarter of float32's bytes.

    Args:
        levels: the s of the formula, at most 127.
        block: the d of the formula: so many numbers share a norm. The squared error grows with it: it is at most
            d / s^2 times the block's squared norm, or sqrt(d) / s times it if that is less.
        seed: the randomness is a function of this seed, the step, the place and the rank.
        error_feedback: keep what rounding loses for the next step; a single step's result is then biased. Only for
            blocks of less than s^2 numbers, since in longer ones the loss may be larger than the numbers.

    Raises:
        StrategyError: a field's value isn't allowed; error feedback with longer blocks.

    Source: Alistarh et al., "QSGD", NeurIPS 2017, section 3.1.

    Example:
        >>> import ltx
        >>> ltx.hooks.QSGD(levels=15)
        QSGD(levels=15)
    """

    reads_step: ClassVar[bool] = True

    levels: int = 127
    block: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.check_whole(self, 1, "levels", most=127)
        arguments.check_whole(self, 1, "block", most=2**24)
        if self.error_feedback and self.block >= self.levels**2:
            raise StrategyError(
                f"QSGD(levels={self.levels}, block={self.block}) with error feedback: in blocks of levels^2 = "
                f"{self.levels**2} numbers or more residuals may grow without bound. Use shorter ones, or no feedback."
            )

    def multiple(self) -> int:
        return self.block

    def keys(self, inputs: BucketInput) -> tuple[torch.Tensor, torch.Tensor]:
        place = (self.seed, inputs.step, inputs.bucket.index)
        first, second = (noise.key_of(*place, turn, inputs.rank, device=inputs.flat.device) for turn in (0, 1))
        return first, second

    def encode(self, rows: torch.Tensor, key: torch.Tensor | None) -> torch.Tensor:
        assert key is not None
        k, m = rows.shape
        blocks = rows.view(k, -1, self.block)
        units, greatest = by_greatest(blocks)
        lengths = torch.linalg.vector_norm(units, dim=-1, keepdim=True)
        norms = (lengths * greatest).squeeze(-1)
        scaled = units.abs() * (self.levels / torch.where(lengths == 0, 1, lengths))
        drawn = noise.uniform(key, rows.numel(), rows.dtype).view_as(blocks)
        levels = torch.floor(scaled + drawn).clamp(max=self.levels).copysign(blocks)
        return torch.cat([to_message(norms), to_message(levels.to(torch.int8).view(k, m))], 1)

    def decode(self, messages: torch.Tensor, m: int, dtype: torch.dtype) -> torch.Tensor:
        norms, start = from_message(messages, 0, m // self.block, dtype)
        levels = from_message(messages, start, m, torch.int8)[0].to(dtype).view(-1, m // self.block, self.block)
        return (levels * (norms / self.levels)[..., None]).view(-1, m)
