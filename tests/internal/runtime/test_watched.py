"""A store in which nobody waits for what won't come."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ltx.errors import PeerLostError
from ltx.runtime.membership import WatchedStore


@pytest.fixture
def plain() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20))  # type: ignore[attr-defined]


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "set": lambda store: store.set("a", "x"),
    "get": lambda store: (store.set("a", "x"), store.get("a")),
    "add": lambda store: (store.add("n", 2), store.add("n", 3), store.get("n")),
    "append": lambda store: (store.append("a", "x"), store.append("a", "y"), store.get("a")),
    "compare_set": lambda store: (store.compare_set("a", "", "x"), store.compare_set("a", "z", "y"), store.get("a")),
    "check": lambda store: (store.check(["a"]), store.set("a", "x"), store.check(["a"])),
    "delete_key": lambda store: (store.set("a", "x"), store.delete_key("a"), store.delete_key("a"), store.check(["a"])),
    "wait": lambda store: (store.set("a", "x"), store.wait(["a"]), store.wait(["a"], timedelta(seconds=1))),
    "many": lambda store: (store.multi_set(["a", "b"], ["x", "y"]), store.multi_get(["b", "a"])),
    "clone": lambda store: (store.set("a", "x"), store.clone().get("a")),
    "num_keys": lambda store: (store.set("a", "x"), store.num_keys() > 0),
    "has_extended_api": lambda store: store.has_extended_api(),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_it_does_what_the_store_does(name: str, plain: Any) -> None:
    """As torch's C++ code calls it."""
    watched = WatchedStore(plain, lambda: "")
    assert OPERATIONS[name](PrefixStore("a", watched)) == OPERATIONS[name](PrefixStore("b", plain))


@pytest.mark.parametrize("ask", [lambda s: s.get("a"), lambda s: s.wait(["a"]), lambda s: s.multi_get(["a"])])
def test_who_waits_is_told(ask: Callable[[Any], Any], plain: Any) -> None:
    troubles = iter(["", "", "", "rank 2 was lost meanwhile"])
    watched = WatchedStore(plain, lambda: next(troubles))
    with pytest.raises(PeerLostError, match="rank 2 was lost meanwhile"):
        ask(PrefixStore("p", watched))


def test_a_group_isnt_waited_for_when_a_peer_is_lost(plain: Any) -> None:
    began = time.monotonic()
    trouble = lambda: "rank 1 was lost" if time.monotonic() - began > 0.3 else ""  # noqa: E731
    watched = WatchedStore(plain, trouble)
    with pytest.raises(PeerLostError, match="rank 1 was lost"):
        dist.ProcessGroupGloo(watched, 0, 2, timedelta(seconds=30))
    assert time.monotonic() - began < 5
