"""Real slow links on one machine: each rank, or node of ranks, in a network namespace, joined by a shaped bridge.

Needs root and iproute2 with tbf. Bytes are counted on the ranks' interfaces. Burst 256 kB keeps the error of the rate
at 0.1%.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

#: Bits a second.
RATES = {"1gbit": 1_000_000_000, "100mbit": 100_000_000}


@dataclass(frozen=True)
class Link:
    """How to start each rank on a link.

    Attributes:
        name: "loopback" or a rate.
        prefixes: the command that each rank's own is put behind.
        address: where rank 0's store listens.
        environ: what the ranks' environment needs.
    """

    name: str
    prefixes: tuple[tuple[str, ...], ...]
    address: str
    environ: dict[str, str]


def wire_s(name: str, ranks: int, nbytes: int) -> float:
    """How long a sum of `nbytes` keeps a rank's link busy, headers of packets left out."""
    return 2 * (ranks - 1) / ranks * nbytes * 8 / RATES[name] if name in RATES else 0.0


def why_not() -> str | None:
    """What is missing for namespaces, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"network namespaces need iproute2: {', '.join(missing)} not found" if missing else None


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def link(name: str, ranks: int, node_size: int = 1) -> Iterator[Link]:
    """A link called `name`: "loopback", or a rate of :data:`RATES` with a namespace for each `node_size` ranks."""
    if name == "loopback":
        yield Link(name, ((),) * ranks, "127.0.0.1", {"GLOO_SOCKET_IFNAME": "lo"})
        return
    if (reason := why_not()) is not None:
        raise RuntimeError(reason)
    tag = f"ltx{os.getpid()}"
    switch = f"{tag}sw"
    spaces = [f"{tag}r{rank}" for rank in range(ranks // node_size)]
    try:
        for space in (switch, *spaces):
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for rank, space in enumerate(spaces):
            _ip("-n", space, "link", "add", "eth0", "type", "veth", "peer", "name", f"port{rank}", "netns", switch)
            _ip("-n", switch, "link", "set", f"port{rank}", "master", "br0", "up")
            _ip("-n", space, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            for where, device in ((space, "eth0"), (switch, f"port{rank}")):
                shape = f"tc qdisc add dev {device} root tbf rate {RATES[name]}bit burst 256kb latency 50ms"
                _ip("netns", "exec", where, *shape.split())
        prefixes = tuple(("ip", "netns", "exec", space) for space in spaces for _ in range(node_size))
        yield Link(name, prefixes, "10.77.0.1", {"GLOO_SOCKET_IFNAME": "eth0"})
    finally:
        for space in (*spaces, switch):
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)
