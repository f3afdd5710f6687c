"""Backends: what the callers of a process group must know about how it moves data.

There are two kinds. On **host-blocking** backends (gloo, MPI, UCC) a wait returns when the data is there, and groups
progress independently of each other, each in threads of its own. On **stream-ordered** ones (NCCL and other vendors'
libraries) a wait only makes the current stream wait: the host runs ahead, kernels of all communicators share the
device, and so their order must be the same on all ranks. A group may have one of each, for tensors on the host and for
tensors on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

#: The backends whose waits block the host. All others order streams.
HOST_BLOCKING = frozenset({"gloo", "mpi", "ucc"})


@dataclass(frozen=True)
class Backends:
    """The backends of a process group, by the type of the device that a tensor is on.

    Attributes:
        host: the one for tensors on the host; gloo where the group has none whose waits block.
        stream: the stream-ordered one; None if there is none.
        device_type: the type of the devices whose tensors the stream-ordered one takes; None likewise.
    """

    host: str = "gloo"
    stream: str | None = None
    device_type: str | None = None

    def orders_streams(self, device: torch.device) -> bool:
        """Whether collectives of tensors on `device` are ordered by streams."""
        return device.type == self.device_type


def backends_of(group: dist.ProcessGroup) -> Backends:
    """The backends of `group`, whatever it was made with: "nccl", "cpu:gloo,cuda:nccl", or nothing at all."""
    config = c10d.BackendConfig(dist.Backend(dist.get_backend_config(group)))
    by_device: Mapping[str, str] = config.get_device_backend_map()
    host = by_device.get("cpu", "gloo")
    ordered = {device: name for device, name in by_device.items() if name not in HOST_BLOCKING}
    # A group for several kinds of accelerators is used on the one that this process has.
    used = next((device for device in ordered if device in (_accelerator(), "cpu")), None)
    return Backends(host if host in HOST_BLOCKING else "gloo", None if used is None else ordered[used], used)


def default_backend(device: torch.device) -> str:
    """What a world whose ranks compute on `device` communicates by: torch's choice for it, and gloo on the host."""
    if device.type == "cpu":
        return "gloo"
    name = dist.get_default_backend_for_device(device.type)
    return name if name in HOST_BLOCKING else f"cpu:gloo,{device.type}:{name}"


def _accelerator() -> str | None:
    """The type of this process' accelerator, if it has one."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type
