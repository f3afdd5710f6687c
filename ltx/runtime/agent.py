"""Where the ranks of ``ltx run`` on one machine meet: on loopback."""

from __future__ import annotations

from collections.abc import Callable

from torch._C._distributed_c10d import PrefixStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from ltx.core.world.groups import loopback_store
from ltx.core.world.placement import LOOPBACK

#: The name under which torch's launcher finds :class:`LoopbackRendezvous`.
LOOPBACK_RENDEZVOUS = "ltx-loopback"


class LoopbackRendezvous(StaticTCPRendezvous):
    """The launcher of one machine alone: it waits for no other, and its ranks connect on loopback.

    torch's own for this listens on all interfaces, and unpickles what any process writes there.
    """

    def __init__(self, port: int, run_id: str):
        self._own_store = loopback_store(port)
        self._rounds = 0
        super().__init__(LOOPBACK, self._own_store.port, rank=0, world_size=1, run_id=run_id, timeout=0)

    def get_backend(self) -> str:
        return LOOPBACK_RENDEZVOUS

    def next_rendezvous(self) -> RendezvousInfo:
        self._rounds += 1
        store = PrefixStore(f"{self.run_id}/{self._rounds}", self._own_store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(self.master_addr, self.master_port))


def register(tell: Callable[[int], None] | None = None) -> None:
    """Have torch's launcher know :data:`LOOPBACK_RENDEZVOUS`. ``tell(port)`` is called when its port is known."""

    def create(parameters: RendezvousParameters) -> RendezvousHandler:
        made = LoopbackRendezvous(int(parameters.endpoint.rpartition(":")[2]), parameters.run_id)
        if tell is not None:
            tell(made.master_port)
        return made

    rendezvous_handler_registry._registry.pop(LOOPBACK_RENDEZVOUS, None)  # an earlier run's in this process
    rendezvous_handler_registry.register(LOOPBACK_RENDEZVOUS, create)
