"""What a step takes: collectives of a link and of a rank's core, and hooks of the rank's own time.

    T(sum of B bytes over n ranks) = 2 (n-1) alpha + 2 (n-1)/n B / beta

and likewise for the other collectives: alpha is the latency of a message, beta the bandwidth of a rank's link (Hockney,
"The communication challenge for MPP", 1994; Thakur, Rabenseifner and Gropp, "Optimization of collective communication
operations in MPICH", 2005, section 4). The figures of cores were measured on an AMD EPYC with torch 2.13, by ``python
-m benchmarks.plan --codecs`` and ``python -m benchmarks.prices``. Accelerators differ by more than hooks do, so what a
hook takes there is measured, once for each hook in a process.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import torch

from ltx import comm, hooks
from ltx.comm.ledger import mark
from ltx.comm.operations import OPERATIONS
from ltx.errors import InputError
from ltx.estimate.requests import Collective
from ltx.gradients.buckets import Bucket, leaves_of
from ltx.gradients.packing import pack, unpack
from ltx.gradients.reduction import BucketInput, CollectiveRequest, advance

#: Seconds of a core for a float32 number, by hook with its defaults: packing, encoding, adding up, decoding.
CODEC_S: dict[str, float] = {
    "AllReduce": 0.4e-9,
    "FP16": 0.7e-9,
    "BF16": 0.7e-9,
    "PowerSGD": 3.0e-9,
    "BatchedPowerSGD": 4.4e-9,
    "ByteGrad": 2.7e-9,
    "Quantize": 3.3e-9,
    "QSGD": 35e-9,
    "OneBit": 4.7e-9,
    "TopK": 7.5e-9,
    "RandomK": 3.3e-9,
    "Noop": 0.3e-9,
    # Of strategies.
    "Adasum": 2.8e-9,
    "MeanMomentum": 3.6e-9,
    "Ring": 4e-9,
    "ShiftOne": 0.6e-9,
    "WithinNode": 0.4e-9,
    "ToParts": 0.4e-9,
    "FromParts": 0.4e-9,
    "MeanPart": 0.4e-9,
    "AllParts": 0.4e-9,
}

#: Seconds for a gradient's number by which its passing through a core's caches makes the rest of the step longer: the
#: backward pass and the optimizer find theirs empty. As for :data:`SEND_S`, where cores do such work at all.
BESIDE_S = 1.6e-9

#: Seconds for a number, with an optimizer of two moments, that isn't updated in place.
COPY_S = 1.2e-9

#: Seconds for a byte that a core sends, and one that it receives meanwhile, through the kernel's sockets.
SEND_S = 1.4e-9

#: To that of a sum of float32 numbers, for a byte of one in half precision, which gloo adds up more slowly.
HALF_SUM = {"float16": 1.5, "bfloat16": 1.2}


def sending_s(bandwidth: float, on_core: bool = True) -> float:
    """Seconds of a core for a byte sent over a link of so many bits a second.

    One that is faster than a core can feed through sockets comes with hardware that does it (RDMA, NCCL's). Where the
    step is an accelerator's, cores have nothing else to do.
    """
    return SEND_S if on_core and 8 / bandwidth >= SEND_S else 0.0


@dataclass(frozen=True)
class Link(comm.Network):
    """A network, and what a rank's core takes to feed it with a byte, in seconds."""

    send_s: float = 0.0

    def seconds(self, collective: Collective) -> float:
        """How long a collective takes, alone on the link, which is no faster than the core that feeds it."""
        messages = OPERATIONS[collective.operation].messages(collective.ranks)
        return messages * self.latency + max(collective.nbytes * 8 / self.bandwidth, self.core_s(collective))

    def core_s(self, collective: Collective) -> float:
        """How long it keeps a core busy."""
        share = OPERATIONS[collective.operation].core_share
        if collective.operation == "psum":
            share = HALF_SUM.get(collective.buffer.partition("[")[0], share)
        return collective.nbytes * self.send_s * share


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
