"""Addresses of this machine to itself, where no other can connect."""

from __future__ import annotations

import ipaddress
import socket

LOOPBACK = "127.0.0.1"


def is_loopback(address: str) -> bool:
    """Whether `address` is this machine's to itself."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def loopback_listener(address: str, port: int) -> socket.socket:
    """A socket that listens at `port` for this machine alone; at a free port if that is 0. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    host = LOOPBACK if address == "localhost" else address
    return socket.create_server((host, port), family=family, backlog=2048)
