"""Time of a training step with each communication hook: ltx, DDP, DDP's own hooks and the local step, interleaved.

    python -m benchmarks.hooks [--link loopback|1gbit|100mbit] [--iterations 6] [--hooks fp16 powersgd ...]

The model, the batch and the optimizer are those of benchmarks.step_time. Hooks compress from the first step on. DDP's
PowerSGD has one bucket, since it aborts with two on gloo. Variants take turns of 30 steps. A figure is the median over
iterations of the ratio of two variants' times in the same iteration, the slowest rank's each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import ltx
from benchmarks import links
from benchmarks.ranks import Variant, backend_on, found_by_ranks, interleaved, ratio
from benchmarks.step_time import Setting
from ltx import hooks

HOOKS: dict[str, hooks.CommHook] = {
    "allreduce": hooks.AllReduce(),
    "fp16": hooks.FP16(),
    "bf16": hooks.BF16(),
    "powersgd": hooks.PowerSGD(rank=2, start_step=0),
    "batched": hooks.BatchedPowerSGD(rank=2, start_step=0),
    "bytegrad": hooks.ByteGrad(),
    "quantize": hooks.Quantize(per="channel"),
    "qsgd": hooks.QSGD(),
    "onebit": hooks.OneBit(),
    "topk": hooks.TopK(0.01),
    "randomk": hooks.RandomK(0.01),
    "noop": hooks.Noop(),
}

#: (hook, link) -> at most this ratio to plain DDP
GOALS = {
    ("fp16", "1gbit"): 0.74,
    ("fp16", "100mbit"): 0.50,
    ("fp16", "loopback"): 1.0,
    ("fp16 step", "1gbit"): 0.62,
    ("fp16 step", "100mbit"): 0.50,
    ("powersgd", "1gbit"): 0.70,
    ("powersgd", "100mbit"): 0.095,
    ("powersgd", "loopback"): 1.0,
    ("bytegrad", "1gbit"): 0.66,
    ("bytegrad", "100mbit"): 0.28,
    ("bytegrad", "loopback"): 1.05,
}


def ddp_step(setting: Setting, hook: str) -> Variant:
    """DDP's step with its own hook."""
    if hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        model = nn.parallel.DistributedDataParallel(setting.fresh(), gradient_as_bucket_view=True, bucket_cap_mb=1000)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        model = setting.ddp()
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return setting.torch_step(model)


def variants(setting: Setting, names: list[str]) -> dict[str, Variant]:
    """The baselines, and ltx with each of the hooks `names`."""
    made: dict[str, Variant] = {"local": setting.torch_step(setting.fresh()), "ddp": setting.torch_step(setting.ddp())}
    made.update((f"ddp {name}", ddp_step(setting, name)) for name in ("fp16", "powersgd") if name in names)
    for name in names:
        made[f"ltx {name}"] = setting.ltx_step(ltx.DDPStrategy(comm_hook=HOOKS[name]))
        made[f"ltx {name} update"] = setting.ltx_step(ltx.DDPStrategy(comm_hook=HOOKS[name]), overlap="update")
    return made


def worker(arguments: argparse.Namespace) -> None:
    """One rank."""
    torch.set_num_threads(1)
    with ltx.init(backend=backend_on("cpu")) as world:
        made = variants(Setting(world.rank), arguments.hooks)
        times = interleaved(made, arguments.iterations, warmup=1, block=arguments.block)
        if world.is_global_zero:
            print(json.dumps(times))


def main() -> None:
    """Parse, run, print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", choices=["loopback", *links.RATES], default="loopback")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=6, help="turns")
    parser.add_argument("--block", type=int, default=30, help="steps a turn, which waits for what is under way")
    parser.add_argument(
        "--hooks", nargs="+", choices=list(HOOKS), default=["allreduce", "fp16", "powersgd", "bytegrad"]
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    times: dict[str, list[float]] = found_by_ranks(
        ["-m", "benchmarks.hooks", *sys.argv[1:]], arguments.link, arguments.ranks
    )
    print(f"| {arguments.link} | ms | ratio to ddp | goal |\n|---|---|---|---|")
    for name, seconds in times.items():
        what = name.removeprefix("ltx ").removesuffix(" update")
        goal = GOALS.get((what, arguments.link)) or GOALS.get((what.removesuffix(" step"), arguments.link), "")
        print(f"| {name} | {1e3 * statistics.median(seconds):.1f} | {ratio(times, name, 'ddp'):.3f} | {goal} |")


if __name__ == "__main__":
    sys.exit(main())
