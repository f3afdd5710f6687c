"""Replicas that come and go: torchft between replicas, ltx among the ranks of each.

    torchft_lighthouse --min_replicas 1 --join_timeout_ms 1000 --bind [::]:29510 &
    export TORCHFT_LIGHTHOUSE=http://localhost:29510
    ltx run -n 2 --max-restarts 9 examples/torchft_hook.py &   # a replica of two ranks; or python, which is one rank
    ltx run -n 2 --max-restarts 9 examples/torchft_hook.py     # another; kill one, and the other goes on

Each bucket of gradients is summed in its replica, and goes on to torchft's all-reduce while the backward pass makes the
next. A step in which a replica was lost isn't committed: it raises NotCommittedError, the state stays, and the same
samples come again. A replica that was started again gets state and position from one that lives.
"""

import argparse
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch.distributed import TCPStore
from torch.nn.functional import mse_loss
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL

import ltx
from ltx.extend import (
    BucketInput,
    CollectiveRequest,
    CommHook,
    Reduction,
    StartedWork,
    States,
    StepInfo,
    Strategy,
    Update,
    Updated,
)


class NotCommittedError(ltx.errors.StepLeftOutError):
    """The step doesn't count, because a replica was lost in it. The state is as before."""


@dataclass(frozen=True)
class BetweenReplicas(CommHook):
    """The mean over the ranks of all replicas."""

    manager: Manager = field(repr=False, compare=False)

    exact: ClassVar[bool] = False  # so that buckets go through `reduce` in a replica of one rank too
    phases: ClassVar[int] = 2

    def reduce(self, inputs: BucketInput) -> Reduction:
        flat = inputs.flat
        if inputs.axis_size > 1:
            flat = yield CollectiveRequest("psum", flat)
        flat = yield StartedWork(self.manager.allreduce(flat), flat)  # their sum, divided by the number of replicas
        return flat, inputs.states


@dataclass(frozen=True, kw_only=True)
class Replicas(Strategy):
    """DDP among all ranks of all replicas."""

    manager: Manager = field(repr=False, compare=False)

    def hook(self, step: int) -> CommHook:
        return BetweenReplicas(self.manager)

    def update(self, update: Update, states: States, info: StepInfo, pending: Any) -> Updated:
        if not self.manager.should_commit():  # asked when all gradients are there, before anything is written
            raise NotCommittedError(f"step {self.manager.current_step()} isn't committed")
        return super().update(update, states, info, pending)


def manager_of(world: ltx.World, load: Callable[[Any], None], give: Callable[[], Any], timeout_s: float) -> Manager:
    """torchft's manager of this rank. Healing is complete when `start_quorum` returns: ranks know who takes part."""
    store = TCPStore(socket.gethostname(), 0, is_master=True, wait_for_workers=False) if world.rank == 0 else None
    address = ltx.broadcast_object((store.host, store.port) if store is not None else None)
    limit = timedelta(seconds=timeout_s)
    group = ProcessGroupNCCL if world.device.type == "cuda" else ProcessGroupGloo
    manager = Manager(
        pg=group(timeout=limit),
        load_state_dict=load,
        state_dict=give,
        min_replica_size=1,
        use_async_quorum=False,
        init_sync=False,  # all replicas begin with the same parameters
        timeout=limit,
        rank=world.rank,
        world_size=world.size,
        store_addr=address[0],
        store_port=address[1],
    )
    manager.own_store = store  # which lives as long
    return manager


SAMPLES, BATCH = 96, 24


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    hidden = torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32), torch.nn.Tanh()
    return torch.nn.Sequential(*hidden, torch.nn.Linear(32, 1))


def batch(indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
    return x[indices], x[indices].sin().sum(1, keepdim=True)


def main(steps: int = 40, timeout_s: float = 5.0, on_step: Callable[..., object] = lambda *_: None) -> Any:
    model = network()
    held: dict[str, Any] = {}
    with ltx.init() as world:
        manager = manager_of(world, held.update, lambda: dict(held), timeout_s)
        strategy = Replicas(
            manager=manager, bucket_bytes=2048, first_bucket_bytes=512
        )  # some buckets, as of a large model
        step = ltx.data_parallel(lambda p, x, y: mse_loss(ltx.functional_call(model, p, (x,)), y), strategy)
        train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.AdamW, lr=1e-2))
        held["state"] = train.init(model)
        held["position"] = ltx.DataPosition(SAMPLES, BATCH)
        while manager.current_step() < steps:
            manager.start_quorum()
            number = manager.num_participants()
            rank = manager.participating_rank() * world.size + world.rank
            indices = held["position"].indices(rank, number * world.size)
            try:
                held["state"], metrics = train(held["state"], *batch(indices))
            except NotCommittedError as error:
                on_step(held, manager, None)
                print(f"{error}; its samples come again", flush=True)
                continue
            held["position"] = held["position"].after_step()
            on_step(held, manager, metrics)
        manager.shutdown(wait=False)
    return held["state"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    main(parser.parse_args().steps)
