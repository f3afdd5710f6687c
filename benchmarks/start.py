"""From the start of a program to the end of its first step: the library's import, the group, the first step.

    python -m benchmarks.start [--runs 7] [--compiled]

Each run has fresh processes, two ranks on loopback; libraries take turns. `--compiled` has the first call of a compiled
step instead, with an empty cache of Inductor's; its "local" is the torch loop without ranks. Seconds after
``import torch``; a ratio is the median over turns. Goals: ``import ltx`` at most 0.15 s, a first compiled step at most
1.3 times that of the local step of which as much is compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch

from benchmarks.models import Transformer, batch, cross_entropy
from benchmarks.ranks import Variant, found_by_ranks, ratio

Inputs = tuple[torch.Tensor, torch.Tensor]
AdamW = torch.optim.AdamW


def torch_loop(module: torch.nn.Module, model: torch.nn.Module, inputs: Inputs) -> Variant:
    """The plain loop over `module`, which has the parameters of `model`."""
    optimizer = AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(module(inputs[0]), inputs[1]).backward()
        optimizer.step()

    return step


def ddp(model: torch.nn.Module, inputs: Inputs, compiled: bool) -> Variant:
    """torch's own."""
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    module = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return torch_loop(torch.compile(module) if compiled else module, model, inputs)


def local(model: torch.nn.Module, inputs: Inputs, compiled: bool) -> Variant:
    """No other ranks."""
    return torch_loop(torch.compile(model) if compiled else model, model, inputs)


def local_with_optimizer(model: torch.nn.Module, inputs: Inputs, compiled: bool) -> Variant:
    """No other ranks, the optimizer's step in a graph of its own: one that a graph can hold, with lists of tensors."""
    module, optimizer = torch.compile(model), AdamW(model.parameters(), lr=1e-4, foreach=True)
    update = torch.compile(optimizer.step)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(module(inputs[0]), inputs[1]).backward()
        update()

    return step


def fabric(model: torch.nn.Module, inputs: Inputs, compiled: bool) -> Variant:
    """Fabric's DDP strategy."""
    from benchmarks.others import fabric_step

    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    return fabric_step(model, *inputs)


def accelerate(model: torch.nn.Module, inputs: Inputs, compiled: bool) -> Variant:
    """Hugging Face's loop."""
    from benchmarks.others import accelerate_step

    return accelerate_step(model, *inputs)


def ltx(model: torch.nn.Module, inputs: Inputs, compiled: bool, loss_alone: bool = False) -> Variant:
    """A train step; compiled, all of it is one graph, or the loss alone."""
    import ltx

    ltx.init()

    def loss(params: dict[str, torch.Tensor], inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(ltx.functional_call(model, params, (inputs,)), targets)

    step_fn = ltx.data_parallel(torch.compile(loss) if loss_alone else loss)
    train = ltx.train_step(step_fn, ltx.optim.from_torch(AdamW, lr=1e-4, fused=True))
    step, state = torch.compile(train, fullgraph=True) if compiled and not loss_alone else train, [train.init(model)]

    def run() -> None:
        state[0], _ = step(state[0], *inputs)

    return run


LIBRARIES: dict[str, Callable[[torch.nn.Module, Inputs, bool], Variant]] = {
    "local": local,
    "ddp": ddp,
    "fabric": fabric,
    "accelerate": accelerate,
    "ltx": ltx,
    "local, its optimizer too": local_with_optimizer,
    "ltx, its loss alone": partial(ltx, loss_alone=True),
}
EAGER = ["local", "ddp", "fabric", "accelerate", "ltx"]
COMPILED = ["local", "ddp", "ltx, its loss alone", "local, its optimizer too", "ltx"]
IMPORTS = {"fabric": "lightning_fabric", "accelerate": "accelerate", "ltx": "ltx", "ltx, its loss alone": "ltx"}


def worker(library: str, compiled: bool) -> None:
    """One rank of one run."""
    torch.set_num_threads(1)
    model, inputs = Transformer(), batch(int(os.environ["RANK"]))
    began = time.perf_counter()
    if library in IMPORTS:
        __import__(IMPORTS[library])
    imported = time.perf_counter()
    step = LIBRARIES[library](model, inputs, compiled)
    made = time.perf_counter()
    step()
    first = time.perf_counter()
    step()
    second = time.perf_counter()
    found = {"import": imported - began, "group and state": made - imported, "first step": first - made}
    found |= {"all": first - began, "second step": second - first}
    if os.environ["RANK"] == "0":
        print(json.dumps(found), flush=True)
    os._exit(0)  # what shutting down takes isn't measured


def main() -> None:
    """Parse, run, print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--library", choices=LIBRARIES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker(given.library, given.compiled)
        return
    names = COMPILED if given.compiled else EAGER
    arguments = ["-m", "benchmarks.start", *["--compiled"] * given.compiled]
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    times: dict[str, dict[str, list[float]]] = {}
    for run in range(given.compiled, given.runs + 1):  # run 0 writes bytecode and fills the page cache
        for name in names:
            with tempfile.TemporaryDirectory() as cache:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
                found = found_by_ranks([*arguments, "--library", name], "loopback", 2)
            for part, seconds in found.items() if run else ():
                times.setdefault(part, {}).setdefault(name, []).append(seconds)
    base = "local" if given.compiled else "ddp"
    print(f"| | {' | '.join(times)} | all, to {base} |\n|{'---|' * (len(times) + 2)}")
    for name in names:
        cells = [f"{statistics.median(seconds[name]):.3f}" for seconds in times.values()]
        print(f"| {name} | {' | '.join(cells)} | {ratio(times['all'], name, base):.3f} |")


if __name__ == "__main__":
    main()
