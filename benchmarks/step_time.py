"""Time of a training step: ltx, torch DDP and the local step, iteration by iteration in one run.

    python -m benchmarks.step_time [--link loopback|1gbit|100mbit] [--iterations 60]
        [--compiled] [--memory] [--alone] [--waiting]

Each variant does forward, backward and fused AdamW on the 5 M parameter transformer, one thread a rank. A figure is the
median over iterations of the ratio of two variants' times in the same iteration, the slowest rank's each. Variants take
turns of `--block` steps. `--memory`
runs each variant in processes of its own and compares their peak resident memory above that of the imports. `--alone`
compares a world of one with the bare torch loop, and with that loop through ``functional_call``, which costs about half
a percent by itself. `--waiting` has a model that waits instead of computing, so that ranks of
one machine contend for nothing but the link, and prints the bound, the longer of computation and message.
"""

from __future__ import annotations

import argparse
import copy
import json
import resource
import statistics
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.func import functional_call

import ltx
from benchmarks import links, others
from benchmarks.models import Large, Transformer, Waiting, batch, cross_entropy
from benchmarks.ranks import Variant, backend_on, found_by_ranks, interleaved, ratio

# (variant, what it is compared with, the goal, the link where that isn't for all)
GOALS: list[tuple[str, str, float, str | None]] = [
    ("ltx", "ddp", 1.0, None),
    ("ltx update", "ddp", 0.97, None),
    ("ltx update, fp16", "ddp", 0.62, "1gbit"),
    ("ltx func.grad", "ddp gradients", 1.0, None),
    ("ltx compiled", "ddp compiled", 0.95, None),
    ("ltx alone", "torch loop", 1.01, None),
]

with torch.device("meta"):
    #: Of the gradients.
    NBYTES = sum(4 * p.numel() for p in Transformer().parameters())
HALVES = ltx.DDPStrategy(comm_hook="fp16")


class Setting:
    """The model, the batch and the optimizer of all variants on this rank."""

    def __init__(self, rank: int, device: str = "cpu", model: type[nn.Module] = Transformer):
        torch.manual_seed(0)
        self.model = model().to(device)
        self.params = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.inputs, self.targets = (x.to(device) for x in batch(rank, (model.SAMPLES, model.LENGTH)))
        self.optimizer = ltx.optim.from_torch(torch.optim.AdamW, lr=1e-4, fused=True)

    def loss(self, params: dict[str, torch.Tensor], inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The user's step."""
        return cross_entropy(functional_call(self.model, params, (inputs,)), targets)

    def torch_step(self, model: nn.Module) -> Variant:
        """The plain loop over a module, wrapped in DDP or not."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def step() -> None:
            optimizer.zero_grad()
            cross_entropy(model(self.inputs), self.targets).backward()
            optimizer.step()

        return step

    def functional_step(self) -> Variant:
        """The plain loop over the user's step, which calls its module through torch.func.functional_call."""
        params = {name: nn.Parameter(p.clone()) for name, p in self.params.items()}
        optimizer = torch.optim.AdamW(params.values(), lr=1e-4, fused=True)

        def step() -> None:
            optimizer.zero_grad()
            self.loss(params, self.inputs, self.targets).backward()
            optimizer.step()

        return step

    def torch_gradients(self, model: nn.Module) -> Variant:
        """Forward and backward over a module."""

        def step() -> None:
            model.zero_grad()
            cross_entropy(model(self.inputs), self.targets).backward()

        return step

    def fresh(self) -> nn.Module:
        """The model as it was at the start."""
        return copy.deepcopy(self.model)

    def ddp(self, fp16: bool = False) -> nn.Module:
        """torch's DistributedDataParallel, as its users run it."""
        ddp = nn.parallel.DistributedDataParallel(self.fresh(), gradient_as_bucket_view=True)
        if fp16:
            ddp.register_comm_hook(None, fp16_compress_hook)
        return ddp

    def ltx_step(self, strategy: ltx.Strategy | None = None, **options: object) -> Variant:
        """A train step of ltx."""
        train = ltx.train_step(ltx.data_parallel(self.loss, strategy), self.optimizer, **options)
        state = [train.init(self.params)]

        def step() -> None:
            state[0], _ = train(state[0], self.inputs, self.targets)

        return step

    def ltx_of_compiled_loss(self, strategy: ltx.Strategy | None = None) -> Variant:
        """A train step of a loss that is compiled."""
        train = ltx.train_step(ltx.data_parallel(torch.compile(self.loss), strategy), self.optimizer)
        state = [train.init(self.params)]

        def step() -> None:
            state[0], _ = train(state[0], self.inputs, self.targets)

        return step

    def ltx_gradients(self) -> Variant:
        """Gradients alone, through torch.func."""
        gradient = torch.func.grad(ltx.data_parallel(self.loss))
        return lambda: gradient(self.params, self.inputs, self.targets)

    def ltx_compiled(self) -> Variant:
        """Loss and gradients as one compiled graph, collectives inside; then the optimizer."""
        both = torch.compile(torch.func.grad_and_value(ltx.data_parallel(self.loss)), fullgraph=True)
        held = [{k: v.clone() for k, v in self.params.items()}]
        state = [self.optimizer.init(held[0])]

        def step() -> None:
            grads, _ = both(held[0], self.inputs, self.targets)
            held[0], state[0] = self.optimizer.apply(grads, state[0], held[0], donate=True)

        return step

    def ltx_compiled_step(self) -> Variant:
        """A whole train step as one compiled graph."""
        train = ltx.train_step(ltx.data_parallel(self.loss), self.optimizer)
        step, state = torch.compile(train, fullgraph=True), [train.init(self.params)]

        def run() -> None:
            state[0], _ = step(state[0], self.inputs, self.targets)

        return run


def variants(setting: Setting, names: list[str]) -> dict[str, Variant]:
    """The variants called `names`, made in the same order on every rank."""
    makers = {
        "local": lambda: setting.torch_step(setting.fresh()),
        "torch loop": lambda: setting.torch_step(setting.fresh()),
        "functional loop": setting.functional_step,
        "ddp": lambda: setting.torch_step(setting.ddp()),
        "ddp, fp16": lambda: setting.torch_step(setting.ddp(fp16=True)),
        "ddp compiled, fp16": lambda: setting.torch_step(torch.compile(setting.ddp(fp16=True))),
        "ltx, fp16": lambda: setting.ltx_step(HALVES),
        "ltx, large buckets, fp16": lambda: setting.ltx_step(ltx.DDPStrategy(comm_hook="fp16", bucket_bytes=100 << 20)),
        "ltx update, fp16": lambda: setting.ltx_step(HALVES, overlap="update"),
        "ltx guarded, fp16": lambda: setting.ltx_step(HALVES, guard="skip"),
        "ltx of a compiled loss": setting.ltx_of_compiled_loss,
        "ltx of a compiled loss, fp16": lambda: setting.ltx_of_compiled_loss(HALVES),
        "ddp gradients": lambda: setting.torch_gradients(setting.ddp()),
        "ddp compiled": lambda: setting.torch_step(torch.compile(setting.ddp())),
        "local compiled": lambda: setting.torch_step(torch.compile(setting.fresh())),
        "fabric": lambda: others.fabric_step(setting.fresh(), setting.inputs, setting.targets),
        "accelerate": lambda: others.accelerate_step(setting.fresh(), setting.inputs, setting.targets),
        "ltx": setting.ltx_step,
        "ltx alone": setting.ltx_step,
        "ltx update": lambda: setting.ltx_step(overlap="update"),
        "ltx guarded": lambda: setting.ltx_step(guard="skip"),
        "ltx func.grad": setting.ltx_gradients,
        "ltx compiled": setting.ltx_compiled,
        "ltx compiled step": setting.ltx_compiled_step,
    }
    return {name: makers[name]() for name in names}


def worker(arguments: argparse.Namespace) -> None:
    """One rank."""
    torch.set_num_threads(1)
    if arguments.large:
        torch.set_float32_matmul_precision("high")
    with ltx.init(backend=backend_on(arguments.device)) as world:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        model = Waiting if arguments.waiting else Large if arguments.large else Transformer
        made = variants(Setting(world.rank, arguments.device, model), arguments.variants)
        times = interleaved(made, arguments.iterations, arguments.warmup, arguments.block)
        peak = torch.tensor(float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
        if dist.is_initialized():
            dist.all_reduce(peak, dist.ReduceOp.MAX)
        if world.is_global_zero:
            print(json.dumps({"times": times, "peak_mib": peak.item() / 1024}))


def measure(
    names: list[str],
    link: str,
    ranks: int,
    iterations: int,
    warmup: int = 5,
    keep_memory: bool = True,
    block: int = 1,
    device: str = "cpu",
    waiting: bool = False,
    large: bool = False,
) -> dict[str, object]:
    """Run `names` interleaved on `link`."""
    arguments = ["-m", "benchmarks.step_time", "--variants", *names]
    arguments += ["--iterations", str(iterations), "--warmup", str(warmup), "--block", str(block), "--device", device]
    arguments += ["--waiting"] * waiting + ["--large"] * large
    found: dict[str, object] = found_by_ranks(arguments, link, ranks, keep_memory=keep_memory)
    return found


def table(times: dict[str, list[float]], base: str, link: str) -> list[str]:
    """Markdown: median time, ratio to the base, and to the goal's base with the goal."""
    lines = [f"| {link} | ms | ratio to {base} | goal |", "|---|---|---|---|"]
    for name, seconds in times.items():
        goal = next((g for g in GOALS if g[0] == name and g[1] in times and g[3] in (None, link)), None)
        against = "" if goal is None else f"{ratio(times, name, goal[1]):.3f} of {goal[1]}, at most {goal[2]}"
        median = 1e3 * statistics.median(seconds)
        lines.append(f"| {name} | {median:.1f} | {ratio(times, name, base):.3f} | {against} |")
    return lines


def main() -> None:
    """Parse, run, print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", choices=["loopback", *links.RATES], default="loopback")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--warmup", type=int, help="turns; 5, or 1 of several iterations")
    parser.add_argument("--block", type=int, help="iterations a turn; 30 where something is left under way, else 1")
    parser.add_argument("--compiled", action="store_true", help="compiled steps")
    parser.add_argument("--memory", action="store_true", help="peak memory, each variant in processes of its own")
    parser.add_argument("--alone", action="store_true", help="a world of one beside the bare torch loop")
    parser.add_argument("--waiting", action="store_true", help="a model that waits instead of computing, and the bound")
    parser.add_argument("--large", action="store_true", help="a model of 152 M parameters, for GPUs")
    parser.add_argument("--default-malloc", action="store_true", help="let glibc give freed memory back each step")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--variants", nargs="+", help="only these")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    if arguments.memory:
        peaks = {
            name: measure([name], "loopback", 2, 20, keep_memory=False)["peak_mib"]
            for name in ("local", "ddp", "ltx", "ltx update")
        }
        print("| peak memory | MiB | ratio to ddp |\n|---|---|---|")
        for name, peak in peaks.items():
            print(f"| {name} | {peak:.1f} | {peak / peaks['ddp']:.3f} |")
        return
    if arguments.alone:
        names, ranks, base = ["torch loop", "functional loop", "ltx alone"], 1, "torch loop"
    elif arguments.compiled:
        names, ranks, base = (
            ["local compiled", "ddp", "ddp compiled", "ltx compiled", "ltx compiled step"],
            arguments.ranks,
            "ddp",
        )
    elif arguments.waiting:
        names = ["local", "ddp", "ltx", "ltx update"]
        ranks, base = arguments.ranks, "ddp"
    else:
        names, ranks, base = (
            ["local", "ddp", "ltx", "ltx update", "ddp gradients", "ltx func.grad"],
            arguments.ranks,
            "ddp",
        )
    names = arguments.variants or names
    keep = not arguments.default_malloc
    block = arguments.block or 1
    warmup = arguments.warmup or (5 if block == 1 else 1)
    waiting = arguments.waiting
    device, large = arguments.device, arguments.large
    found = measure(names, arguments.link, ranks, arguments.iterations, warmup, keep, block, device, waiting, large)
    times, base = found["times"], base if base in found["times"] else names[0]
    if waiting:
        message_s = links.wire_s(arguments.link, ranks, NBYTES)
        times["the bound"] = [max(alone, message_s) for alone in times["local"]]
    print("\n".join(table(times, base, arguments.link)))


if __name__ == "__main__":
    sys.exit(main())
