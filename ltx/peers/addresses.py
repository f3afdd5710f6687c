"""Where ranks meet: the store at rank 0's address, and the addresses of this machine."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from ltx.core.base.errors import WorldError
from ltx.core.world.world import LOOPBACK


def open_store(address: str, port: int, holds: bool, timeout: timedelta) -> Store:
    """Connect to the store at `address`; a loopback one is for this machine. `holds`: here; port 0 is a free one."""
    try:
        socket.getaddrinfo(address, None)
    except OSError as error:  # else torch would retry until the timeout
        raise WorldError(
            f"the ranks are to meet at {address!r}, a host that isn't known here: {error}. Check MASTER_ADDR, or the "
            "master that ltx.init was given: the name or address of rank 0's machine."
        ) from error
    options: dict[str, Any] = {"is_master": holds, "timeout": timeout, "wait_for_workers": False, "multi_tenant": True}
    if holds and is_loopback(address):
        with suppress(OSError):  # this process holds a store there already, or else torch raises again
            at = LOOPBACK if address == "localhost" else address, port
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            options["master_listen_fd"] = socket.create_server(at, family=family, backlog=2048).detach()
    open_it: Callable[[], Store] = partial(dist.TCPStore, address, port, **options)  # type: ignore[attr-defined]
    return open_it() if holds else _connected(open_it, address, port, timeout.total_seconds())


def _connected(connect: Callable[[], Store], address: str, port: int, timeout_s: float) -> Store:
    """The store of ``connect()``, in a thread: a program that never answers would keep torch there, deaf to Ctrl-C."""
    connected: Future[Store] = Future()

    def run() -> None:
        try:
            connected.set_result(connect())
        except BaseException as error:
            connected.set_exception(error)

    threading.Thread(target=run, name="ltx-connects", daemon=True).start()
    try:
        return connected.result(timeout_s)
    except TimeoutError:
        try:
            socket.create_connection((address, port), 1.0).close()
        except OSError as error:
            raise TimeoutError(f"nothing listens there ({error}): rank 0 hasn't come to ltx.init.") from None
        raise TimeoutError(
            "what listens there takes connections and doesn't answer as rank 0's store does: another program has the "
            "port, or its process is stopped."
        ) from None


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def loopback_store(port: int) -> Any:
    """A new store that this process holds at `port` (0: a free one), for this machine alone."""
    return open_store(LOOPBACK, port, True, timedelta(minutes=5))


def own_address_towards(host: str, port: int) -> str:
    """The address of this machine from which it reaches `host`; "" if it can't reach it."""
    with suppress(OSError):
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # which sends nothing
            return str(probe.getsockname()[0])
    return ""


def interface_of(address: str) -> str:
    """The name of the network interface that has this IPv4 address; "" if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                reply = fcntl.ioctl(any_socket.fileno(), 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
                if socket.inet_ntoa(reply[20:24]) == address:
                    return name
    return ""
