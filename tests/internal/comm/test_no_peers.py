"""A communicator that knows nothing of its peers trains: what watches the ranks, and compares calls, lies beside it."""

from __future__ import annotations

import os

import pytest
import torch

import ltx
from ltx.core.base.handed_in import HandedIn
from ltx.core.comm.peers import Peers
from ltx.peers.negotiation import Negotiation
from tests.kinds import Ranks
from tests.train_on import go_on


def _trains() -> tuple[list[torch.Tensor], str, float, list[int]]:
    """The state of a training with buckets that a hook compresses, the kind of peers, and what collectives give."""
    rank, axis = int(ltx.axis_index()), ltx.core.comm.resolve(None)

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return (x @ params["w"] + params["b"]).square().mean()

    strategy = ltx.DDPStrategy(comm_hook=ltx.hooks.FP16(), bucket_bytes=64, first_bucket_bytes=16)
    train = ltx.train_step(ltx.data_parallel(loss, strategy), ltx.optim.from_torch(torch.optim.SGD, lr=0.1))
    params = {"w": torch.linspace(-1.0, 1.0, 32).view(8, 4), "b": torch.zeros(4)}
    batches = [torch.sin(torch.arange(24.0).view(3, 8) * (step + 1) + rank) for step in range(4)]
    state = go_on(train, train.init(params), batches).state
    told = ltx.all_gather_object({"rank": rank})
    ltx.barrier()
    kind, total = type(axis.comm.peers).__name__, float(ltx.psum(torch.tensor(1.0 + rank)))
    return ltx.tree.flatten(state.params)[0], kind, total, [each["rank"] for each in told]


@pytest.mark.parametrize("sockets", [False, True], ids=["shared memory", "sockets"])
def test_it_trains_to_the_same_bits(sockets: bool, ranks: Ranks) -> None:
    def run() -> tuple[object, object]:
        if sockets:
            os.environ["LTX_SHARED_MEMORY"] = "0"
        try:
            results = []
            for peers in (Negotiation, Peers):
                ltx.shutdown()
                HandedIn.peers = peers
                ltx.init()
                results.append(_trains())
        finally:
            HandedIn.peers = Negotiation
            os.environ.pop("LTX_SHARED_MEMORY", None)
            ltx.shutdown()
            ltx.init()
        return results[0], results[1]

    for watched, alone in ranks(2).run(run):
        assert (watched[1:], alone[1:]) == (("Negotiation", 3.0, [0, 1]), ("Peers", 3.0, [0, 1]))
        assert all(map(torch.equal, watched[0], alone[0]))
