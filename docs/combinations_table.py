"""The table of combinations: what needs something of a strategy, hook or optimizer, and which of ltx's don't offer it.

``python docs/combinations_table.py`` prints it as Markdown; ``docs/reference/combinations.md`` is that page. The rows
are those that refuse, of :mod:`ltx.core.base.needs`, asked of a value of each class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import ltx
from ltx import hooks, optim
from ltx.core.base.needs import TABLE
from ltx.core.ranks.axis import Axis
from ltx.core.transforms.strategy import constant_after, shares_gradients
from ltx.hooks.combined import with_error_feedback
from ltx.strategies.zero import in_messages

STRATEGIES: dict[str, ltx.Strategy] = {
    "DDPStrategy": ltx.DDPStrategy(),
    "ZeroStrategy": ltx.ZeroStrategy(),
    "DDPStrategy(comm_hook=Noop())": ltx.DDPStrategy(comm_hook=hooks.Noop()),
    "LocalSGDStrategy": ltx.LocalSGDStrategy(2),
    "DiLoCoStrategy": ltx.DiLoCoStrategy(2),
    "HorovodStrategy": ltx.HorovodStrategy(),
    'HorovodStrategy(op="adasum")': ltx.HorovodStrategy(op="adasum"),
    "HorovodStrategy(backward_passes_per_step=2)": ltx.HorovodStrategy(backward_passes_per_step=2),
    'BaguaStrategy("decentralized")': ltx.BaguaStrategy("decentralized"),
    'BaguaStrategy("low_precision_decentralized")': ltx.BaguaStrategy("low_precision_decentralized"),
    'BaguaStrategy("qadam")': ltx.BaguaStrategy("qadam", warmup_steps=2),
    'BaguaStrategy("async")': ltx.BaguaStrategy("async"),
}
HOOKS: dict[str, hooks.CommHook] = {
    type(hook).__name__: hook
    for hook in (
        hooks.AllReduce(),
        hooks.FP16(),
        hooks.BF16(),
        hooks.ByteGrad(),
        hooks.Quantize(),
        hooks.QSGD(),
        hooks.OneBit(),
        hooks.TopK(),
        hooks.RandomK(),
        hooks.PowerSGD(start_step=0),
        hooks.BatchedPowerSGD(start_step=0),
        hooks.Adasum(),
        hooks.Noop(),
    )
} | {"partition": hooks.partition({"*": hooks.BF16()})}
OPTIMIZERS: dict[str, optim.Optimizer] = {
    "from_torch(SGD)": optim.from_torch(torch.optim.SGD, lr=0.1),
    "from_torch(AdamW)": optim.from_torch(torch.optim.AdamW, lr=0.1),
    "from_torch(Adafactor)": optim.from_torch(torch.optim.Adafactor, lr=0.1),
    "chain(clip_by_global_norm, ...)": optim.chain(
        optim.clip_by_global_norm(1.0), optim.from_torch(torch.optim.SGD, lr=0.1)
    ),
    "qadam": optim.qadam(0.1, warmup_steps=2),
}
PARTS: dict[str, dict[str, Any]] = {"strategy": STRATEGIES, "hook": HOOKS, "optimizer": OPTIMIZERS}
#: A chain is asked member by member, and clipping isn't asked.
_BY_MEMBER = ("ZeRO, optimizer",)


def _takes_complex(strategy: ltx.Strategy) -> bool:
    try:
        strategy.init_optimizer(OPTIMIZERS["from_torch(SGD)"], [torch.ones((), dtype=torch.complex64)], Axis("data", 1))
    except ltx.errors.StrategyError:
        return False
    return True


#: What a row is asked besides the part: of what a strategy itself is, and what follows from a part.
_BESIDES: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "QAdam, optimizer": lambda x: (type(OPTIMIZERS["qadam"]), 2, (0.9, 0.999)),
    "graph, hook or strategy": lambda x: (0, constant_after(x)),
    "guard in a graph, strategy": lambda x: (shares_gradients(x, 0),),
    "ZeRO, hook": lambda x: (in_messages(x),),
    "complex, strategy": lambda x: (_takes_complex(x),),
    "bucket of DDP, hook": lambda x: (x.each((), part=True) is None,),
    "error feedback, hook": lambda x: (with_error_feedback(x),),
}


def lacking(row: str) -> list[str]:
    """Those of ltx's parts that don't offer what a row needs."""
    asked = PARTS.get(row.split()[-1], {})
    if row in _BY_MEMBER:
        asked = {name: part for name, part in asked.items() if not name.startswith("chain")}
    return [
        name for name, part in asked.items() if not TABLE[row].offered(part, *_BESIDES.get(row, lambda x: ())(part))
    ]


def markdown() -> str:
    """The page."""
    lines = [
        "# Combinations",
        "",
        "What fits together gives the right numbers; what doesn't is refused by a row of this table, before anything",
        'is sent: "X needs Y, which Z doesn\'t offer: do W." Yours are asked like those of ltx, by what they say of',
        "themselves ([Writing your own](api/extend.md)). Printed by `python docs/combinations_table.py`.",
        "",
        "| what | needs of the | | which isn't offered by | do |",
        "|---|---|---|---|---|",
    ]
    for row, need in TABLE.items():
        without = ", ".join(f"`{name}`" for name in lacking(row))
        lines.append(f"| {need.what} | {row.rpartition(', ')[2]} | {need.needs} | {without} | {need.do} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
