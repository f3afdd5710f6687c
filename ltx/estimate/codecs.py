"""What a rank takes for a hook's own work: packing, encoding, adding up, decoding.

For CPUs, :mod:`ltx.estimate.costs` has figures. Accelerators differ by more than hooks do, so what a hook takes there
is measured, once for each hook in a process.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import fields
from functools import lru_cache
from typing import Any

import torch

from ltx import hooks
from ltx.comm.operations import OPERATIONS
from ltx.comm.timeline import mark
from ltx.errors import InputError
from ltx.estimate.costs import CODEC_S, COPY_S
from ltx.gradients.buckets import Bucket, leaves_of
from ltx.gradients.packing import pack, unpack
from ltx.gradients.reduction import BucketInput, CollectiveRequest, advance

#: The gradient that hooks are measured with: 32 MiB of float32, about a bucket on an accelerator.
_SHAPE = (1 << 11, 1 << 12)


def codec(hook: hooks.CommHook, unknown: dict[str, None], device: torch.device | None = None) -> float:
    """Seconds a number on `device`, if None a CPU's core; names of hooks of which they aren't known go to `unknown`.

    Those count as :class:`ltx.hooks.AllReduce`.
    """
    if device is not None and device.type != "cpu":
        taken = measured(hook, device)
        if taken is None:
            unknown.setdefault(repr(hook))
            taken = measured(hooks.AllReduce(), device)
        assert taken is not None
        return taken
    known = next((CODEC_S[c.__name__] for c in type(hook).__mro__ if c.__name__ in CODEC_S), None)
    if known is not None:
        return known
    parts = [part for x in fields(hook) if isinstance(part := getattr(hook, x.name), hooks.CommHook)]
    if not parts:
        unknown.setdefault(repr(hook))
        return CODEC_S["AllReduce"]
    return sum(codec(part, unknown) for part in parts)


def check_device(device: torch.device, function: str) -> None:
    """Raise unless what hooks take on `device` can be known.

    Raises:
        InputError: (a ValueError) an accelerator that this machine lacks.
    """
    if device.type == "cpu":
        return
    here = torch.accelerator.current_accelerator(check_available=True)
    if here is None or here.type != device.type:
        raise InputError(
            f"{function}: what hooks take on {device.type!r} is measured, and this machine has no such device. Call it "
            "where there is one, or give ltx.profile.plan the seconds that they take for a number: codec_s=..."
        )


@lru_cache(maxsize=256)
def copies(device: torch.device) -> float:
    """Seconds a number, with an optimizer of two moments, that isn't updated in place."""
    if device.type == "cpu":
        return COPY_S
    held = torch.zeros(_SHAPE, device=device)

    def copied() -> list[tuple[Any, Any]]:
        began = _now(device)
        held.clone(), held.clone(), held.clone()
        return [(began, _now(device))]

    return _median(copied, device) / held.numel()


@lru_cache(maxsize=256)
def measured(hook: hooks.CommHook, device: torch.device, shape: tuple[int, int] = _SHAPE) -> float | None:
    """Seconds that `hook` takes a number of one gradient on `device`, apart from what it asks of the network.

    The median of a few. Peers are taken to have sent what this rank has. None where a hook needs more than a gradient.
    """
    grad = torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(0))  # not the caller's draws
    bucket = Bucket(0, (0,), leaves_of([grad]))
    step = hook.constant_after or 0
    hook = hook.at(step)
    states = [hook.init(grad)]

    def once() -> list[tuple[Any, Any]]:
        spans, began = [], _now(device)
        flat = pack([grad], bucket, hook, 2, states)
        program = hook.reduce(BucketInput(flat, bucket, 2, 0, states, step, update=list))
        request = advance(program)
        while isinstance(request, CollectiveRequest):
            spans.append((began, _now(device)))
            answer = _as_if_equal(request)
            began = _now(device)
            request = advance(program, answer)
        unpack(request[0], hook.output_bucket(bucket, 2))
        return [*spans, (began, _now(device))]

    try:
        once()
    except torch.OutOfMemoryError:
        raise
    except Exception:  # a strategy's hook, of more than gradients: :func:`codec` names it
        return None
    return _median(once, device) / grad.numel()


def _as_if_equal(request: CollectiveRequest) -> torch.Tensor:
    """What the collective of a request gives, up to a factor, if both ranks send the same."""
    buffer, operation = request.buffer, OPERATIONS[request.operation]
    if operation.result_shape is None:
        return buffer.clone()
    return operation.new_result(buffer, 2).copy_(buffer[0] if operation.name == "psum_scatter" else buffer)


def _median(once: Any, device: torch.device, repetitions: int = 7) -> float:
    once()
    runs = [once() for _ in range(repetitions)]
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return statistics.median(sum(_between(*span) for span in spans) for spans in runs)


def _now(device: torch.device) -> Any:
    """On the CPU the time of this process alone, which other processes don't change."""
    return time.process_time() if device.type == "cpu" else mark(device)


def _between(began: Any, ended: Any) -> float:
    return float(ended - began if isinstance(began, float) else began.elapsed_time(ended) / 1e3)
