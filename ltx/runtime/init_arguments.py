"""The arguments of ltx.init: checked, and compared with those of a world that is up."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from ltx.arguments import brief
from ltx.comm import DEFAULT_HEARTBEAT_S
from ltx.errors import WorldError
from ltx.runtime.placement import Placement

DEFAULT_TIMEOUT = timedelta(seconds=1800)
DEFAULT_HEARTBEAT = timedelta(seconds=DEFAULT_HEARTBEAT_S)


def asked_settings(
    strategy: Any,
    backend: str | None,
    timeout: timedelta,
    mesh: Mapping[str, int] | None,
    heartbeat: timedelta,
) -> dict[str, Any]:
    """The settings that the caller asked for; what was left out is absent, and agrees with anything."""
    if timeout is DEFAULT_TIMEOUT:  # left out; the same duration written out is a request
        timeout = getattr(strategy, "timeout", None) or DEFAULT_TIMEOUT
    for name, duration in {"timeout": timeout, "heartbeat_timeout": heartbeat}.items():
        if not isinstance(duration, timedelta) or duration <= timedelta(0):
            raise WorldError(
                f"{name}={brief(duration)}: expected a positive datetime.timedelta, such as timedelta(minutes=5)."
            )
    if mesh is not None and not isinstance(mesh, Mapping):
        raise WorldError(
            f"mesh={brief(mesh)}: expected a mapping of axis names to sizes, such as {{'node': 2, 'data': 4}}."
        )
    asked: dict[str, Any] = {"backend": backend or getattr(strategy, "process_group_backend", None)}
    asked["timeout"] = None if timeout is DEFAULT_TIMEOUT else timeout
    asked["heartbeat_timeout"] = None if heartbeat is DEFAULT_HEARTBEAT else heartbeat
    asked["mesh"] = None if mesh is None else tuple(mesh.items())
    return {name: value for name, value in asked.items() if value is not None}


def check_same(asked: Mapping[str, Any], settings: Mapping[str, Any], rank: int) -> None:
    """Raise :class:`ltx.errors.WorldError` unless what is `asked` for are the `settings` of the world that is up."""
    for name, new in asked.items():
        old = settings[name]
        if name == "placement":
            name, old, new = "(rank, size, master)", _place(old), _place(new)
        if new != old:
            old, new = (dict(value) if name == "mesh" else value for value in (old, new))
            raise WorldError(
                f"rank {rank}: ltx.init was called before with {name}={old!r} and now with "
                f"{name}={new!r}. Call ltx.shutdown() on every rank first, or use the same {name}."
            )


def _place(placement: Placement) -> tuple[Any, ...]:
    return placement.rank, placement.size, placement.master and f"{placement.master[0]}:{placement.master[1]}"
