"""Slow readable twins of the lossy hooks: from all ranks' shares at once to the result and all ranks' next states."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from ltx.hooks import noise

States = list[dict[str, dict[str, Tensor]]]  # by rank, path and name
#: (shares by rank and path, states, step) -> (the sum of what was sent, next states)
Twin = Callable[[list[dict[str, Tensor]], States, int], tuple[dict[str, Tensor], States]]
#: (a row, a key for randomness) -> what the receiver makes of its message
Code = Callable[[Tensor, Any], Tensor]


def flat(tree: dict[str, Tensor]) -> Tensor:
    """Its leaves in the order of a bucket: the last one's gradient is there first."""
    return torch.cat([tree[name].flatten() for name in reversed(tree)])


def unflat(vector: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
    parts = dict(zip(reversed(like), vector.split([x.numel() for x in reversed(like.values())]), strict=True))
    return {name: parts[name].reshape(x.shape) for name, x in like.items()}


def with_feedback(send: Callable[..., Any]) -> Twin:
    """A twin with error feedback; ``send(shares, next states, step) -> (total, each rank's part of it)``."""

    def twin(shares: list[dict[str, Tensor]], states: States, step: int) -> tuple[dict[str, Tensor], States]:
        given = [
            {name: x + state[name].get("residual", 0) for name, x in inputs.items()}
            for inputs, state in zip(shares, states, strict=True)
        ]
        following = [{name: dict(state) for name, state in of.items()} for of in states]
        total, parts = send(given, following, step)
        for rank, part in enumerate(parts):
            for name, state in following[rank].items():
                if "residual" in states[rank][name]:
                    state["residual"] = given[rank][name] - part[name]
        return total, following

    return twin


def exact(shares: list[dict[str, Tensor]], states: States, step: int) -> tuple[dict[str, Tensor], States]:
    return {name: sum((share[name] for share in shares), torch.zeros(())) for name in shares[0]}, states


def by_path(twins: dict[str, Twin]) -> Twin:
    """Each twin for the parameters whose paths its pattern is the first to fit, as if there were no others."""

    def twin(shares: list[dict[str, Tensor]], states: States, step: int) -> tuple[dict[str, Tensor], States]:
        total: dict[str, Tensor] = {}
        following: States = [{} for _ in shares]
        for pattern, own in twins.items():
            names = [name for name in shares[0] if name not in total and fnmatchcase(name, pattern)]
            if names:
                some = [[{name: of[name] for name in names} for of in each] for each in (shares, states)]
                sums, after = own(*some, step)
                total.update(sums)
                for state, new in zip(following, after, strict=True):
                    state.update(new)
        return total, following

    return twin


def scattered(code: Code, multiple: int = 1, seed: int | None = None, padded: bool = False) -> Twin:
    """Row r of each share goes to rank r as a message; the messages are added up, and the sum is a message to all.

    The code is told of the numbers of a row alone; `padded`: and of the zeros behind them.
    """

    def send(shares: list[dict[str, Tensor]], states: States, step: int) -> Any:
        n, numel = len(shares), flat(shares[0]).numel()
        lot = n * multiple
        length = -(-numel // lot) * lot
        rows = [torch.nn.functional.pad(flat(s), (0, length - numel)).reshape(n, -1) for s in shares]

        def key(rank: int, turn: int) -> Any:
            return None if seed is None else noise.key_of(seed, step, 0, turn, rank, device=torch.device("cpu"))

        counts = [max(0, min(length // n, numel - r * length // n)) for r in range(n)]

        def coded(row: Tensor, count: int) -> Tensor:
            return code(row, None) if padded else torch.cat([code(row[:count], None), row[count:]])

        if seed is None:
            sent = [torch.stack([coded(row, count) for row, count in zip(of, counts, strict=True)]) for of in rows]
        else:  # one draw for all of a rank's rows
            sent = [code(of, key(rank, 0)) for rank, of in enumerate(rows)]
        sums = sum(sent)
        result = torch.stack(
            [coded(sums[r], counts[r]) if seed is None else code(sums[r : r + 1], key(r, 1))[0] for r in range(n)]
        )
        for rank in range(n):
            sent[rank][rank] += result[rank] - sums[rank]
        parts = [unflat(part.flatten()[:numel], shares[0]) for part in sent]
        return unflat(result.flatten()[:numel], shares[0]), parts

    return with_feedback(send)


def eight_bit(extended: bool, channel: int | None) -> Code:
    """Bagua's MinMaxUInt8 with unsigned codes; where 0 is outside of the range, a grid from the least number.

    `extended`: torch's quantization, whose range is extended to 0.
    """

    def code(row: Tensor, key: Any) -> Tensor:
        out = torch.empty_like(row)
        for start in range(0, len(row), channel or max(1, len(row))):
            group = row[start : start + (channel or len(row))]
            low, high = group.min(), group.max()
            # The last bit matters: what lies halfway between two codes is not so rare in a sum of codes.
            if extended:
                low, high = min(low, torch.zeros_like(low)), max(high, torch.zeros_like(low))
                step = high / 255 - low / 255
                zero = torch.round(-low * (1 / step)) if step else step
                codes = (torch.round(group * (1 / step)) + zero).clamp(0, 255) if step else torch.zeros_like(group)
                found = (codes - zero) * step
            elif low <= 0 <= high and low < high:
                scale = 255 / (high - low + (1e-7 if high - low >= 2.55e-4 else 0))
                upper = torch.round(high * scale)
                lower = upper - 255
                codes = (torch.minimum(torch.round(group * scale), upper) - lower).clamp(0, 255)
                # Multiplied by the step, and less what 0 has become: what is sent is the code less 128.
                found = (codes - 128) * (1 / scale) + (lower + 128) * (1 / scale)
            else:
                step = high / 255 - low / 255
                codes = torch.round((group - low) * (1 / step)) if step else torch.zeros_like(group)
                found = (codes - 128) * step + (low + 128 * step)
            out[start : start + len(group)] = found
        return out

    return code


def one_bit(block: int) -> Code:
    def code(row: Tensor, key: Any) -> Tensor:
        return torch.cat([(2 * (part >= 0).to(row.dtype) - 1) * part.abs().mean() for part in row.split(block)])

    return code


def qsgd(levels: int, block: int) -> Code:
    def code(rows: Tensor, key: Any) -> Tensor:
        drawn = noise.uniform(key, rows.numel(), rows.dtype).split(block)
        out = []
        for part, u in zip(rows.flatten().split(block), drawn, strict=True):
            norm = part.pow(2).sum().sqrt()
            if norm == 0:
                out.append(torch.zeros_like(part))
                continue
            below = (part.abs() / norm * levels).floor()
            chance = part.abs() / norm * levels - below
            out.append(norm * part.sign() * (below + (u >= 1 - chance)) / levels)
        return torch.cat(out).view_as(rows)

    return code


def top_k(ratio: float) -> Code:
    def code(row: Tensor, key: Any) -> Tensor:
        kept = sorted(range(len(row)), key=lambda i: -abs(float(row[i])))[: max(1, round(ratio * len(row)))]
        out = torch.zeros_like(row)
        out[kept] = row[kept]
        return out

    return code


def rounded(dtype: torch.dtype) -> Code:
    return lambda row, key: row.to(dtype).to(row.dtype)


def random_k(ratio: float, seed: int, feedback: bool) -> Twin:
    def send(shares: list[dict[str, Tensor]], states: States, step: int) -> Any:
        numel = flat(shares[0]).numel()
        count = max(1, round(ratio * numel))
        drawn = noise.uniform(noise.key_of(seed, step, 0, device=torch.device("cpu")), count, torch.float64)
        parts = [torch.zeros_like(flat(s)) for s in shares]
        for i in range(count):
            first, last = i * numel // count, (i + 1) * numel // count
            place = first + int(drawn[i] * (last - first))
            for part, inputs in zip(parts, shares, strict=True):
                part[place] = flat(inputs)[place] * (1 if feedback else last - first)
        return unflat(sum(parts), shares[0]), [unflat(part, shares[0]) for part in parts]

    return with_feedback(send)


def power(rank: int, rate: float = 2.0, iterations: int = 1) -> Twin:
    def send(shares: list[dict[str, Tensor]], states: States, step: int) -> Any:
        n = len(shares)
        total: dict[str, Tensor] = {}
        parts: list[dict[str, Tensor]] = [{} for _ in shares]
        for name, x in shares[0].items():
            whole = sum(inputs[name] for inputs in shares)
            rows = x.shape[0] if x.ndim else 1
            columns = x.numel() // max(rows, 1)
            r = min(rows, columns, rank)
            if x.ndim < 2 or not (rows + columns) * r * rate < rows * columns:
                total[name] = whole
                for inputs, part in zip(shares, parts, strict=True):
                    part[name] = inputs[name]
                continue
            matrix = whole.reshape(rows, columns)
            q = states[0][name]["q"].mT
            for _ in range(iterations):
                p = columns_of(matrix @ q)
                q = matrix.mT @ p
            total[name] = (p @ q.mT).view_as(x)
            for part, state in zip(parts, states, strict=True):
                part[name] = total[name] / n
                state[name]["q"] = (q / q.norm(dim=0)).mT
        return total, parts

    return with_feedback(send)


def batched_power(rank: int, seed: int) -> Twin:
    def send(shares: list[dict[str, Tensor]], states: States, step: int) -> Any:
        n, whole = len(shares), sum(flat(s) for s in shares)
        side = int(whole.numel() ** 0.5)
        matrix = whole[: whole.numel() // side * side].view(-1, side)
        key = noise.key_of(seed, step, 0, device=torch.device("cpu"))
        start = noise.normal(key, min(rank, side) * side, whole.dtype).view(-1, side)
        p = columns_of(matrix @ start.mT)
        total = unflat(torch.cat([(p @ (p.mT @ matrix)).flatten(), whole[matrix.numel() :]]), shares[0])
        return total, [{name: x / n for name, x in total.items()} for _ in shares]

    return with_feedback(send)


def columns_of(matrix: Tensor) -> Tensor:
    """Orthonormal columns by torch's QR, with the signs that Gram and Schmidt's have."""
    q, r = torch.linalg.qr(matrix)
    return q * r.diagonal().sign()
