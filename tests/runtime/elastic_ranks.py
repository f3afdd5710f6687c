"""Real processes that train together, some of which are killed, stopped or cut off in the middle."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ltx
from ltx.runtime.init import forget

SAMPLES = 48
X = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(1))
Y = X.sin().sum(1)
Body = Callable[[Callable[[Any], None]], object]


class Ranks:
    """Forks of this process, which are ranks of a world; what they tell comes piece by piece.

    Where they meet is held by this process, as a launcher does, or with ``held_by="rank 0"`` by rank 0.
    """

    def __init__(
        self, size: int, body: Body, held_by: str = "launcher", sockets: bool = False, heartbeat_s: float = 2.0
    ):
        context = get_context("fork")
        port = _free_port()
        self.holder: Any = None
        self.to_holder: Connection | None = None
        if held_by == "launcher":
            ours, theirs = context.Pipe()
            self.holder = context.Process(target=_hold_store, args=(theirs,))
            self.holder.start()
            theirs.close()
            self.to_holder, port = ours, ours.recv()
        self.lines: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(size):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "LTX_SHARED_MEMORY": "0" if sockets else "1",
                **({"TORCHELASTIC_USE_AGENT_STORE": "True"} if held_by == "launcher" else {}),
            }
            mine, its = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(body, its, environment, heartbeat_s))
            process.start()
            its.close()
            self.lines.append(mine)
            self.processes.append(process)

    def told(self, rank: int, timeout_s: float = 30.0) -> Any:
        """What `rank` tells next."""
        assert self.lines[rank].poll(timeout_s), f"rank {rank} tells nothing"
        return self.lines[rank].recv()

    def close(self) -> None:
        """End them."""
        for process in (*self.processes, *([self.holder] if self.holder else [])):
            process.kill()
            process.join()
            process.close()
        for line in self.lines:
            line.close()
        if self.to_holder is not None:
            self.to_holder.close()


def _rank(body: Body, line: Connection, environment: dict[str, str], heartbeat_s: float) -> None:
    for name in [name for name in os.environ if name.startswith(("TORCHELASTIC_", "LTX_"))]:
        del os.environ[name]
    os.environ.update(environment)
    torch.set_num_threads(1)
    forget()
    try:
        with ltx.init(timeout=timedelta(seconds=20), heartbeat_timeout=timedelta(seconds=heartbeat_s)):
            end = body(line.send)
        assert not dist.is_initialized(), "the with block has left a world behind"
        line.send(end)
    except Exception as error:
        line.send(f"{type(error).__name__}: {error}")


def _hold_store(end: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    end.send(store.port)
    end.poll(300)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> ltx.Weighted:
    error = (torch.tanh(x @ params["w"]) @ params["v"] - y).square()
    return ltx.Weighted(error.sum(), error.numel())


def make(strategy: ltx.Strategy | None = None, **kwargs: Any) -> tuple[Any, Any]:
    """A train step, and its state at the start."""
    step = ltx.data_parallel(loss, strategy or ltx.DDPStrategy())
    train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.AdamW, lr=0.05), **kwargs)
    generator = torch.Generator().manual_seed(2)
    params = {"w": torch.randn(5, 7, generator=generator), "v": torch.randn(7, generator=generator)}
    return train, train.init(params)


def batch(indices: Tensor) -> tuple[Tensor, Tensor]:
    return X[indices], Y[indices]


START = ltx.DataPosition(SAMPLES, 10, seed=3, weighted=True)  # the last step of an epoch takes 8
STEPS = 5  # an epoch


def values(state: Any) -> list[Any]:
    """All values of a state, to be compared bit for bit."""
    return [state.step, *(x.tolist() for x in ltx.tree.flatten((state.params, state.opt_state))[0])]
