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

from ltx.runtime.environments import LOOPBACK
from ltx.runtime.groups import loopback_store

#: The name under which torch's launcher finds :class:`LoopbackRendezvous`.
LOOPBACK_RENDEZVOUS = "ltx-loopback"


class LoopbackRendezvous(RendezvousHandler):
    """The launcher of one machine alone: it waits for no other, and its ranks connect on loopback.

    torch's own for this listens on all interfaces, and unpickles what any process writes there.
    """

    def __init__(self, port: int, run_id: str):
        self._store = loopback_store(port)
        self.port = self._store.port
        self._run_id, self._rounds = run_id, 0

    def get_backend(self) -> str:
        return LOOPBACK_RENDEZVOUS

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        self._rounds += 1
        store = PrefixStore(f"{self._run_id}/{self._rounds}", self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, self.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def register(tell: Callable[[int], None] | None = None) -> None:
    """Have torch's launcher know :data:`LOOPBACK_RENDEZVOUS`. ``tell(port)`` is called when its port is known."""

    def create(parameters: RendezvousParameters) -> RendezvousHandler:
        made = LoopbackRendezvous(int(parameters.endpoint.rpartition(":")[2]), parameters.run_id)
        if tell is not None:
            tell(made.port)
        return made

    rendezvous_handler_registry._registry.pop(LOOPBACK_RENDEZVOUS, None)  # an earlier run's in this process
    rendezvous_handler_registry.register(LOOPBACK_RENDEZVOUS, create)
