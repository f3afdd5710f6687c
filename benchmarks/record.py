"""What recording messages costs: a step of the 5 M parameter transformer with it and without, in turns in one run.

    ltx run -n 2 -m benchmarks.record          (OMP_NUM_THREADS=1, on an idle machine)

The figure is the median over rounds of the ratio of the two, rank 0's times. The first step of a record, which copies
the state, and the writing of its files aren't counted. The goal is 1.15 at most.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import nullcontext

import torch
from torch.nn.functional import cross_entropy

import ltx
from benchmarks.models import VOCABULARY, Transformer

GOAL, ROUNDS, STEPS = 1.15, 12, 6


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Transformer()

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(ltx.functional_call(model, params, (x,)).flatten(0, 1), y.flatten())

    adamw = ltx.optim.from_torch(torch.optim.AdamW, lr=1e-4, fused=True)
    train = ltx.train_step(ltx.data_parallel(loss), adamw)
    with ltx.init() as world:
        state = train.init({name: p.detach().clone() for name, p in model.named_parameters()})
        torch.manual_seed(world.rank)
        x, y = torch.randint(VOCABULARY, (2, Transformer.SAMPLES, Transformer.LENGTH))
        ratios, times = [], dict[bool, float]()
        for _ in range(ROUNDS):
            for recorded in (False, True):
                with tempfile.TemporaryDirectory() as folder:
                    steps = range(state.step, state.step + STEPS)
                    with ltx.record_messages(folder, steps=steps) if recorded else nullcontext():
                        state, _ = train(state, x, y)
                        ltx.barrier()
                        began = time.perf_counter()
                        for _ in steps[1:]:
                            state, _ = train(state, x, y)
                        ltx.barrier()
                        times[recorded] = (time.perf_counter() - began) / len(steps[1:])
            ratios.append(times[True] / times[False])
        if world.is_global_zero:
            print(
                f"recorded / not: {statistics.median(ratios):.3f} (goal {GOAL}), {min(ratios):.2f} to {max(ratios):.2f}"
            )


if __name__ == "__main__":
    main()
