"""Where a launcher put a process, and the environment variables that say it; what all launchers have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ltx.core.base.errors import WorldError

#: Ports that are derived from a job's id: below those that Linux gives to connections by itself, 32768 to 60999.
DERIVED_PORTS = range(15000, 25000)
DEFAULT_PORT = 29500

# Longer numbers than any launcher's; beyond some thousand digits Python refuses them in words of its own.
_MAX_DIGITS = 20


@dataclass(frozen=True)
class Placement:
    """Where a launcher put this process, and where its processes meet.

    Attributes:
        launcher: see :class:`ltx.World`.
        rank, size, local_rank, node_rank, num_nodes: see :class:`ltx.World`.
        local_size: the number of processes on this node.
        master: the address and port of the store through which they find each other; None for a process that is alone.
        own_devices: how many CUDA devices the launcher shows to this process alone; None if it shows the same ones to
            all processes of a node.
        joins: the address and port of the store of a run that this process, which is alone until then, is to be taken
            into by :func:`ltx.elastic`.
        agreed: whether all ranks know this placement from the same source, so that they needn't compare it.
    """

    launcher: str
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    master: tuple[str, int] | None = None
    own_devices: int | None = None
    joins: tuple[str, int] | None = None
    agreed: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class Variables:
    """The environment, read for one launcher.

    Attributes:
        environ: the environment.
        launcher: its name.
        marks: the variables by which it is recognised.
        start: how one starts processes with it, for error messages.
    """

    environ: Mapping[str, str]
    launcher: str
    marks: Sequence[str]
    start: str

    def first(self, *names: str) -> str:
        """The first of `names` that is set; the first one if none is."""
        return next((name for name in names if name in self.environ), names[0])

    def number(self, name: str, low: int, high: int | None, relation: str, default: int | None = None) -> int:
        """The integer in variable `name`, from `low` to `high`. `relation` says where these come from."""
        text = self.environ.get(name)
        if text is None and default is not None:
            return default
        allowed = f"an integer {f'of at least {low}' if high is None else f'from {low} to {high}'}, {relation}"
        if text is None:
            raise self.missing(name, allowed)
        value = int(text) if text.isdecimal() and len(text) <= _MAX_DIGITS else -1
        if value < low or (high is not None and value > high):
            raise self.wrong(name, allowed)
        return value

    def missing(self, name: str, allowed: str) -> WorldError:
        found = [f"{mark}={self.environ[mark]!r}" for mark in self.marks if mark in self.environ]
        return WorldError(
            f"environment variable {name} is missing (launcher {self.launcher}): expected {allowed}, since "
            f"{' and '.join(found)} is set. {self.start}, or unset them all to run as a world of one."
        )

    def wrong(self, name: str, allowed: str) -> WorldError:
        return WorldError(
            f"environment variable {name}={self.environ[name]!r} (launcher {self.launcher}): expected {allowed}. "
            "Launchers set it; unset it and the launcher's other variables to run as a world of one."
        )

    def check_agrees(self, name: str, value: int, because: str) -> None:
        """Raise unless variable `name` is absent, or says `value`."""
        if name in self.environ:
            self.number(name, value, value, because)

    def master_port(self, default: int) -> int:
        """The port where the ranks meet."""
        return self.number("MASTER_PORT", 1, 65535, "a port at MASTER_ADDR where the ranks meet", default)


def derived_port(seed: int) -> int:
    """One of :data:`DERIVED_PORTS`, another one for the next `seed`."""
    return DERIVED_PORTS[seed % len(DERIVED_PORTS)]


def node_of(rank: int, size: int, local_rank: int, local_size: int) -> tuple[int, int] | None:
    """The index of a process' node and the number of nodes, if these have equal numbers of processes; else None.

    Ranks are dealt out to nodes by slot, one node after the other; else by node, in turns.

    Example:
        >>> node_of(5, 8, 1, 4), node_of(5, 8, 2, 4), node_of(4, 5, 1, 2)
        ((1, 2), (1, 2), None)
    """
    num_nodes, rest = divmod(size, local_size)
    if rest == 0 and rank % local_size == local_rank:
        return rank // local_size, num_nodes
    if rest == 0 and rank // num_nodes == local_rank:
        return rank % num_nodes, num_nodes
    return None
