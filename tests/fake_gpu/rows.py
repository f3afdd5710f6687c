"""Runs each row on the CPU and on the fake device, prints {row: [what went wrong, where it waited]} as JSON."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

import ltx
from ltx.core.gradients import buffers
from ltx.extend import comm
from tests.contract.conformance.table import OPS
from tests.contract.hooks.table import HOOKS
from tests.contract.optim.cases import DENSE_CASES, Case, random_grads, random_params
from tests.contract.strategies.table import ROWS as STRATEGIES
from tests.fake_gpu.device import device, got, put, register, waits
from tests.train_on import go_on

N = 2
Run = Callable[[Any], Any]
PARAMS = {"w": (6, 4), "b": (4,), "s": ()}
#: Rows of the table of collectives that make CPU tensors of their own.
OWN_TENSORS = ("sync_batch_norm", "accumulate")
#: In their rows the CPU sums as a device does: in pieces that stay in the cache it adds in another order.
IN_ANOTHER_ORDER = "adasum"


def _loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return ((x @ params["w"] + params["b"]) * params["s"]).tanh().square().mean()


def _on_ranks(each: Callable[[Any, torch.Tensor], Any], simulated: bool = True) -> tuple[Any, Run]:
    """What each rank makes of the parameters and its batch."""

    def run(given: Any) -> Any:
        params, xs = given
        return ltx.vmap(partial(each, params))(xs) if simulated else each(params, xs[0])

    return ({name: torch.randn(shape) for name, shape in PARAMS.items()}, torch.randn(N, 3, 6)), run


def _reduced(hook: Any) -> tuple[Any, Run]:
    step = ltx.data_parallel(_loss, ltx.DDPStrategy(comm_hook=hook))

    def each(params: Any, x: torch.Tensor) -> Any:
        state = step.init(params)
        for _ in range(3):
            grads, state = ltx.grad(step)(params, x, sync_state=state)
        return grads

    return _on_ranks(each)


def _trained(strategy: Any, optimizer: Any, simulated: bool, precision: Any = None, **kwargs: Any) -> tuple[Any, Run]:
    step = ltx.data_parallel(_loss, strategy)
    train = ltx.train_step(step if precision is None else ltx.mixed_precision(step, precision), optimizer, **kwargs)

    def each(params: Any, x: torch.Tensor) -> Any:
        state, metrics = go_on(train, train.init(params), [x] * 3)
        return state.params, metrics[-1].loss

    return _on_ranks(each, simulated)


def _updated(case: Case) -> tuple[Any, Run]:
    optimizer = ltx.optim.from_torch(case.cls, **{"lr": 0.1, **case.kwargs})

    def run(given: Any) -> Any:
        params, *grads = given
        state = optimizer.init(params)
        for each in grads:
            params, state = optimizer.apply(each, state, params)
        return params

    params = random_params(case)
    return (params, *(random_grads(case, params) for _ in range(3))), run


def _moved() -> tuple[Any, Run]:
    x = torch.randn(5, 3)
    batch = {"x": x, "strided": x[::2], "other order": x.T, "expanded": x[0].expand(4, 3), "number": x[0, 0]}
    return torch.zeros(()), lambda like: {name: comm.to_device(part, like.device) for name, part in batch.items()}


def rows() -> dict[str, Callable[[], tuple[Any, Run]]]:
    """Of each row: what makes its argument on the CPU, and what runs on it."""
    sgd = ltx.optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)
    adamw = ltx.optim.from_torch(torch.optim.AdamW, lr=0.1)
    found: dict[str, Callable[[], tuple[Any, Run]]] = {}
    for op in (op for op in OPS if op.name not in OWN_TENSORS):
        found[f"collective {op.name}"] = partial(lambda op: (torch.randn(N, N, 2 * N), ltx.vmap(op.apply)), op)
    index = ltx.vmap(lambda x: torch.cat([x, ltx.axis_index()[None]]))
    found["collective axis_index"] = lambda: (torch.randn(N, 3), index)
    found["collective shard"] = lambda: (torch.randn(4, 3), ltx.vmap(ltx.shard, in_dims=None, axis_size=N))
    for name, hook in HOOKS.items():
        found[f"hook {name}"] = partial(_reduced, hook)
    for name, row in STRATEGIES.items():
        if N in row.ranks:
            found[f"strategy {name}"] = partial(_trained, row.strategy, row.optimizer, True)
    for case in DENSE_CASES:
        if case.cls is not torch.optim.ASGD:  # it makes its averages by an operation that devices of Python's lack
            found[f"optimizer {case!r}"] = partial(_updated, case)
    found["step moved to the device"] = _moved
    found["step with a guard"] = partial(_trained, ltx.DDPStrategy(), sgd, False, guard="skip")
    scaled = ltx.Precision(compute=torch.bfloat16, loss_scale=ltx.DynamicLossScale())
    found["step with a loss scale"] = partial(_trained, ltx.DDPStrategy(), sgd, False, scaled)
    found["step by buckets"] = partial(_trained, ltx.DDPStrategy(), adamw, False, overlap="update")
    clipped = ltx.optim.chain(ltx.optim.clip_by_global_norm(0.1), adamw)
    found["step clipped"] = partial(_trained, ltx.DDPStrategy(), clipped, False)
    return found


def tried(build: Callable[[], tuple[Any, Run]], seed: int, in_pieces: frozenset[str]) -> tuple[str, list[str]]:
    """What went wrong in a row, "" if nothing did, and where it waited."""
    waits.clear()
    try:
        torch.manual_seed(seed)
        given, run = build()
        torch.manual_seed(seed)
        with patch.object(buffers, "IN_PIECES", in_pieces):
            expected = run(given)
        torch.manual_seed(seed)
        with device():
            found = run(put(given))
        found = got(found)
        for x, y in zip(ltx.tree.flatten(found)[0], ltx.tree.flatten(expected)[0], strict=True):
            if x.dtype != y.dtype or not torch.equal(x, y):
                return f"differs from the CPU's by {float((x.double() - y.double()).abs().max())}", sorted(waits)
    except Exception as error:
        return f"{type(error).__name__}: {error}", sorted(waits)
    return "", sorted(waits)


if __name__ == "__main__":
    torch.set_num_threads(1)
    register()
    warnings.simplefilter("ignore")
    seed, kind = int(sys.argv[1]), sys.argv[2]
    chosen = {name: build for name, build in rows().items() if name.startswith(f"{kind} ")}
    found = {}
    for name, build in chosen.items():
        in_pieces = frozenset() if IN_ANOTHER_ORDER in name.lower() else buffers.IN_PIECES
        found[name] = tried(build, seed, in_pieces)
    print(json.dumps(found))
