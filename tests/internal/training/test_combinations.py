"""Every combination gives the numbers of plain torch, or is refused by a row of the table; and the table's page.

All gradients of a rank are one number, so that lossy hooks lose nothing, and the loss is linear, so that a mean of
parameters is as good as one of gradients: the mean over ranks of any strategy's parameters is what torch's optimizer
makes of the mean gradient.
"""

from __future__ import annotations

import random
import re
import runpy
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import ltx
from ltx import hooks, optim
from tests.train_on import go_on

DOCS = Path(__file__).parents[3] / "docs"
STEPS, RANKS = 2, 2

STRATEGIES: dict[str, Callable[[Any], ltx.Strategy]] = {
    "ddp": lambda hook: ltx.DDPStrategy(comm_hook=hook),
    "ddp, then local": lambda hook: ltx.DDPStrategy(comm_hook=hook, model_averaging_period=1, start_local_sgd_step=1),
    "local": lambda hook: ltx.LocalSGDStrategy(2, 1, comm_hook=hook),
    "diloco": lambda hook: ltx.DiLoCoStrategy(1, outer_lr=1.0, outer_momentum=0.0, outer_hook=hook),
    "horovod": lambda hook: ltx.HorovodStrategy(compression=hook),
}
OTHERS = {
    "zero": ltx.ZeroStrategy(),
    "adasum": ltx.HorovodStrategy(op="adasum"),
    "bytegrad": ltx.BaguaStrategy("bytegrad"),
    "decentralized": ltx.BaguaStrategy("decentralized"),
    "low precision": ltx.BaguaStrategy("low_precision_decentralized"),
    "qadam": ltx.BaguaStrategy("qadam", warmup_steps=9),
    "async": ltx.BaguaStrategy("async", schedule=(1, 1)),
}
#: After how many steps a rank's optimizer has its own gradients, where it isn't all of them.
OWN = {"ddp, then local": 1, "local": 1, "diloco": 0, "decentralized": 0, "low precision": 0, "async": 0}
HOOKS = (
    hooks.AllReduce(),
    hooks.FP16(),
    hooks.BF16(error_feedback=True),
    hooks.ByteGrad(),
    hooks.Quantize(error_feedback=True),
    hooks.OneBit(),
    hooks.TopK(1.0),
    hooks.RandomK(1.0),
    hooks.PowerSGD(start_step=0),
    hooks.BatchedPowerSGD(start_step=0),
    hooks.after(1, hooks.ByteGrad()),
    hooks.Adasum(),
    hooks.partition({"w": hooks.BF16(error_feedback=True), "*": hooks.Adasum()}),
)
SGD, ADAM = (lambda params: torch.optim.SGD(params, lr=0.125, momentum=0.5)), (lambda p: torch.optim.Adam(p, lr=0.125))
#: The optimizer, and what makes torch's, for which gradients are cut to a norm or not.
OPTIMIZERS: dict[str, tuple[optim.Optimizer, Callable[[Any], torch.optim.Optimizer], float | None]] = {
    "sgd": (optim.from_torch(torch.optim.SGD, lr=0.125, momentum=0.5), SGD, None),
    "adam": (optim.from_torch(torch.optim.Adam, lr=0.125), ADAM, None),
    "qadam": (optim.qadam(0.125, warmup_steps=9), ADAM, None),
    "clipped": (optim.chain(optim.clip_by_global_norm(0.5), optim.from_torch(torch.optim.SGD, lr=0.125)), SGD, 0.5),
}
GUARDS = ("off", "skip", "raise")
PRECISIONS = (
    None,
    ltx.Precision(compute=torch.bfloat16),
    ltx.Precision(compute=torch.bfloat16, reduce=torch.bfloat16),
    ltx.Precision(compute=torch.float16, loss_scale=8.0),
)
ROWS = [
    (strategy, hook, *others)
    for strategy, hook in (*product(STRATEGIES, HOOKS), *((name, None) for name in OTHERS))
    for others in product(OPTIMIZERS, ("backward", "update"), GUARDS, PRECISIONS, (None, 1), (False, True))
]
REFUSED = re.compile(r"^.+ needs .+, which .+ doesn't offer: .+\.$", re.DOTALL)


def trained(row: tuple[Any, ...], params: Any, xs: torch.Tensor) -> Any:
    strategy, hook, optimizer, overlap, guard, precision, check_every, weighted = row
    made = OTHERS[strategy] if hook is None else STRATEGIES[strategy](hook)

    def loss(params: Any, x: torch.Tensor) -> Any:
        total = sum((leaf * x).sum() for leaf in params.values())
        return ltx.Weighted(total, torch.ones(())) if weighted else total

    step = ltx.data_parallel(loss, made)
    step = step if precision is None else ltx.mixed_precision(step, precision)
    train = ltx.train_step(step, OPTIMIZERS[optimizer][0], overlap=overlap, guard=guard, check_every=check_every)

    def run(x: torch.Tensor) -> Any:
        state, _ = go_on(train, train.init(params), [x] * STEPS)
        return ltx.pmean(train.finish(state).params)

    return ltx.vmap(run)(xs)


def by_torch(optimizer: str, params: Any, xs: list[torch.Tensor]) -> Any:
    _, made, norm = OPTIMIZERS[optimizer]
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    used = torch.optim.SGD(leaves.values(), lr=0.125) if norm else made(leaves.values())
    for x in xs:
        used.zero_grad()
        sum((leaf * x).sum() for leaf in leaves.values()).backward()
        if norm:
            torch.nn.utils.clip_grad_norm_(leaves.values(), norm)
        used.step()
    return {name: leaf.detach() for name, leaf in leaves.items()}


def check(rows: list[tuple[Any, ...]]) -> tuple[int, int]:
    """How many of the rows gave the right numbers, and how many were refused; others raise."""
    right = refused = 0
    for row in rows:
        params = {"b": torch.randn(5), "w": torch.randn(6, 8)}
        xs = torch.randint(1, 8, (RANKS,)).float()
        try:
            found = trained(row, params, xs)
        except ltx.errors.LtxError as error:
            if not REFUSED.match(str(error)):
                raise AssertionError(f"{row}: refused by no row of the table") from error
            refused += 1
            continue
        shared = OWN.get(row[0], STEPS)
        each = [by_torch(row[2], params, [xs.mean()] * shared + [x] * (STEPS - shared)) for x in xs]
        for name in params:
            leaf = torch.stack([own[name] for own in each]).mean(0)
            close = {"rtol": 1e-2, "atol": 1e-2, "msg": lambda text, row=row: f"{row}: {text}"}
            torch.testing.assert_close(found[name], leaf.expand(RANKS, *leaf.shape), **close)
        right += 1
    return right, refused


@pytest.mark.parametrize("count", [40, pytest.param(1500, marks=[pytest.mark.full, pytest.mark.timeout(500)])])
def test_what_is_not_refused_is_right(seed: int, count: int) -> None:
    right, refused = check(random.Random(seed).sample(ROWS, count))
    assert right + refused == count
    assert min(right, refused) > 0


def test_the_page_is_what_the_table_prints() -> None:
    table, page = runpy.run_path(str(DOCS / "combinations_table.py")), DOCS / "reference" / "combinations.md"
    assert page.read_text(encoding="utf-8") == table["markdown"](), f"python docs/combinations_table.py > {page}"
