"""What the host does for one bucket of gradients with an FP16 hook, in ltx and in torch's DDP: counted, and timed.

:mod:`benchmarks.calls` prints it on a GPU, and ``tests/streams/test_record.py`` holds the counts on the CPU. A count is
the difference between two steps over the same parameters in few and in many buckets, by the number of buckets between
them, so what is done for a step or for a parameter isn't in it. Both the thread of the step and that of the backward
pass are counted.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ltx
from ltx.core.comm.channel import Channel
from ltx.core.gradients import pending
from ltx.core.training import backward

PARAMETERS, SIDE, FEW, MANY = 12, 64, 2, 12
#: What stands for C++ or for the accelerator, with all that it calls.
FOREIGN = (
    "/tests/streams/",
    "/torch/_compile.py",
    "/torch/utils/_python_dispatch.py",
    "/torch/_library/",
    "/weakref.py",
)
#: The rows of the table, by the name of what is called.
ROWS = {
    "wait_stream": ("events", "waits of a stream"),
    "record_event": ("events",),
    "wait_event": ("waits of a stream",),
    "record_stream": ("record_stream",),
    "acquire": ("locks",),
    "start_new_thread": ("threads",),
    **dict.fromkeys(("synchronize", "query", "sleep", "is_completed"), ("waits of the host",)),
}
NAMES = ["calls of Python", "calls of C", "operations", "allocations", *dict.fromkeys(sum(ROWS.values(), ()))]
_READS = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero")

Step = Callable[[], object]


class Calls:
    """Counts calls by ``sys.setprofile``, in each thread that calls :meth:`join` while it is on."""

    def __init__(self) -> None:
        self.found, self.functions = Counter[str](), Counter[str]()
        self._on, self._inside = True, 0  # how many calls of FOREIGN code it is in

    def join(self, *_: object) -> None:
        """The current thread counts."""
        sys.setprofile(self._note)

    def end(self) -> None:
        """No thread counts any more."""
        self._on = False
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, called: Any) -> None:
        if not self._on:
            sys.setprofile(None)
        elif event == "call":
            foreign = not self._inside and any(part in frame.f_code.co_filename for part in FOREIGN)
            if foreign:
                self.found.update(ROWS.get(frame.f_code.co_name, ()))
            if foreign or self._inside:
                self._inside += 1
            else:
                self.found["calls of Python"] += 1
                self.functions[frame.f_code.co_qualname] += 1
        elif event == "return":
            self._inside -= bool(self._inside)
        elif event == "c_call" and not self._inside:
            self.found.update(["calls of C", *ROWS.get(getattr(called, "__name__", ""), ())])


class Operations(TorchDispatchMode):
    """Counts torch's operations, the memory that they make, and the numbers that the host reads."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operation."""
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in _tensors((args, kwargs))}
        self.found["operations"] += 1
        self.found["allocations"] += len({x.untyped_storage()._cdata for x in _tensors(result)} - given)
        self.found["waits of the host"] += func.name() in _READS
        return result


def _tensors(value: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, torch.Tensor) and x.layout is torch.strided]


class Model(nn.Module):
    """One operation on each parameter, so that their gradients come one after the other."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.ones(SIDE, SIDE, device=device) for _ in range(PARAMETERS))

    def forward(self, x: torch.Tensor, seen: Callable[..., object]) -> torch.Tensor:
        """The loss; `seen` is called when its backward pass begins, by the thread that runs it."""
        for weight in self.all:
            x = x * weight
        loss = x.mean()
        loss.register_hook(seen)
        return loss


def ddp_step(device: str, buckets: int, group: Any = None) -> Callable[[Callable[..., object]], object]:
    """A step of torch's DDP with so many `buckets`; the hook communicates in `group`. Its argument: as `seen`."""
    mib = PARAMETERS // buckets * SIDE * SIDE * 4 / 2**20
    with patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", int(mib * 2**20)):
        ddp = nn.parallel.DistributedDataParallel(
            Model(device), bucket_cap_mb=mib, gradient_as_bucket_view=True, init_sync=False
        )
    ddp.register_comm_hook(group, default_hooks.fp16_compress_hook)
    optimizer, x = torch.optim.SGD(ddp.parameters(), lr=0.1), torch.ones(SIDE, SIDE, device=device)

    def step(seen: Callable[..., object]) -> None:
        optimizer.zero_grad()
        ddp(x, seen).backward()
        optimizer.step()

    return step


def ltx_step(device: str, buckets: int) -> Callable[[Callable[..., object]], object]:
    """The same of ltx."""
    nbytes = PARAMETERS // buckets * SIDE * SIDE * 4
    strategy = ltx.DDPStrategy(comm_hook="fp16", bucket_bytes=nbytes, first_bucket_bytes=nbytes)
    model, x, hook = Model(device), torch.ones(SIDE, SIDE, device=device), [print]

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = ltx.functional_call(model, params, (x, lambda _: hook[0](None)))
        return found

    train = ltx.train_step(ltx.data_parallel(loss, strategy), ltx.optim.from_torch(torch.optim.SGD, lr=0.1))
    state = [train.init({name: p.detach().clone() for name, p in model.named_parameters()})]

    def step(seen: Callable[..., Any]) -> None:
        hook[0] = seen
        state[0], _ = train(state[0], x)

    return step


#: What a bucket calls once.
ONCE = {"ddp": "fp16_compress_hook", "ltx": "ProcessSchedule.start"}


def _counted(step: Callable[[Callable[..., object]], object], once: str) -> tuple[int, Counter[str]]:
    """(buckets, counts) of the step that called least."""
    for _ in range(4):
        step(lambda _: None)
    seen = []
    for _ in range(3):
        calls = Calls()
        calls.join()
        try:
            step(calls.join)
        finally:
            calls.end()
        seen.append(calls)
    fewest = min(seen, key=lambda calls: calls.found["calls of Python"])
    with Operations() as operations:
        step(lambda _: None)
    return fewest.functions[once], fewest.found + operations.found


def counted(name: str, make: Callable[[int], Callable[[Callable[..., object]], object]]) -> dict[str, float]:
    """A bucket's counts in the steps that `make` makes, given a number of buckets; `name`: of :data:`ONCE`."""
    (few, before), (many, after) = (_counted(make(buckets), ONCE[name]) for buckets in (FEW, MANY))
    assert many - few == MANY - FEW, f"{many} and {few} buckets"
    return {row: (after[row] - before[row]) / (many - few) for row in NAMES}


# --- times ------------------------------------------------------------------------------------------------------------

#: part of a bucket's way: where the functions are that do it, in DDP and in ltx
PARTS: dict[str, dict[str, tuple[Any, str]]] = {
    "ddp": {"whole": (default_hooks, "fp16_compress_hook"), "enqueue": (dist, "all_reduce")},
    "ltx": {
        "whole": (pending.ProcessSchedule, "start"),
        "pack": (pending, "pack"),
        "enqueue": (Channel, "issue"),
        "launch": (pending.Pending, "launch"),
        "unpack": (backward.CollectGradients, "complete"),
    },
}


@contextmanager
def _timed(name: str, spent: dict[str, list[tuple[float, float]]]) -> Iterator[None]:
    """Within it (seconds, seconds of the thread's processor) of each part go to `spent`."""

    def around(part: str, function: Any) -> Any:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if part == "whole":  # how long the thread waits for Python's lock, if it gives it up
                began, cpu = time.perf_counter(), time.thread_time()
                time.sleep(0)
                spent.setdefault("lock", []).append((time.perf_counter() - began, time.thread_time() - cpu))
            began, cpu = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent.setdefault(part, []).append((time.perf_counter() - began, time.thread_time() - cpu))

        return run

    patches = [patch.object(*at, around(part, getattr(*at))) for part, at in PARTS[name].items()]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


def timed(
    name: str, make: Callable[[int], Callable[[Callable[..., object]], object]], synchronize: Callable[[], object]
) -> dict[str, tuple[float, float]]:
    """By part, (microseconds, those of them in which the thread didn't run), medians over 10 steps."""
    spent: dict[str, list[tuple[float, float]]] = {}
    with _timed(name, spent):
        step = make(MANY)
        for number in range(14):
            if number == 4:
                spent.clear()
            step(lambda _: None)
            synchronize()
    middle = {part: sorted(times)[len(times) // 2] for part, times in spent.items()}
    return {part: (1e6 * wall, max(0.0, 1e6 * (wall - cpu))) for part, (wall, cpu) in middle.items()}


def table(counts: Mapping[str, Mapping[str, float]], times: Mapping[str, Mapping[str, tuple[float, float]]]) -> str:
    """Markdown, a column for each of `counts`; `times` may be empty."""
    lines = ["| a bucket | " + " | ".join(counts) + " |", "|---|" + "---:|" * len(counts)]
    lines += [f"| {row} | " + " | ".join(f"{found[row]:g}" for found in counts.values()) + " |" for row in NAMES]
    for part in dict.fromkeys(part for found in times.values() for part in found):
        cells = [f"{found[part][0]:.0f} ({found[part][1]:.0f})" if part in found else "" for found in times.values()]
        lines.append(f"| {part}, us (of them the thread didn't run) | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def found(device: str, synchronize: Callable[[], object]) -> tuple[Any, Any]:
    """Counts and times of DDP and ltx, for :func:`table`, on this rank."""
    makes = {"ddp": lambda buckets: ddp_step(device, buckets), "ltx": lambda buckets: ltx_step(device, buckets)}
    times = {name: timed(name, make, synchronize) for name, make in makes.items()}
    return {name: counted(name, make) for name, make in makes.items()}, times
