"""A store in which nobody waits for what won't come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

from torch._C._distributed_c10d import Store

from ltx.comm.store_exchange import poll_until
from ltx.errors import PeerLostError


class WatchedStore(Store):
    """`store`, except that a wait in it checks for trouble: process groups are made by waiting in a store.

    Args:
        store: the one that answers.
        trouble: returns why a wait would never end; "" if it may.
        limit_s: no group that is made in it waits for its peers for longer. Those that have regrouped are about to
            come, and one that connects to a rank that has given up meanwhile can't learn that.
    """

    def __init__(self, store: Store, trouble: Callable[[], str], limit_s: float = 300.0):
        super().__init__()
        self.limit = timedelta(seconds=limit_s)
        super().set_timeout(self.limit)
        self.underlying_store: Any = store  # torch's stubs leave half of it out
        self._trouble = trouble

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all `keys` are there. Raises PeerLostError if they won't be."""
        limit_s = (timeout or self.limit).total_seconds()

        def look() -> None:
            if text := self._trouble():
                raise PeerLostError(text)

        if not poll_until(lambda: self.check(keys), limit_s, look):
            raise PeerLostError(f"peers haven't come within {limit_s:g} s")

    def get(self, key: str) -> bytes:
        """The value, once it is there."""
        self.wait([key])
        return cast(bytes, self.underlying_store.get(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values, once they are there."""
        self.wait(keys)
        return cast(list[bytes], self.underlying_store.multi_get(keys))

    def set(self, key: str, value: str) -> None:
        """As the store's own, like all that follows."""
        self.underlying_store.set(key, value)

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        self.underlying_store.multi_set(keys, values)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        return cast(bytes, self.underlying_store.compare_set(key, expected_value, desired_value))

    def append(self, key: str, value: str) -> None:
        self.underlying_store.append(key, value)

    def add(self, key: str, value: int) -> int:
        return int(self.underlying_store.add(key, value))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self.underlying_store.check(list(keys)))

    def delete_key(self, key: str) -> bool:
        return bool(self.underlying_store.delete_key(key))

    def num_keys(self) -> int:
        return int(self.underlying_store.num_keys())

    # By these names torch's C++ code calls the two.
    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        self.limit = min(timeout, self.limit)
        super().set_timeout(self.limit)

    def clone(self) -> Store:
        """The store itself, over another connection."""
        return cast(Store, self.underlying_store.clone())
