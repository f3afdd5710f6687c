"""What the ranks of an axis post in the store to compare what they are about to issue."""

from __future__ import annotations

from collections.abc import Sequence

from ltx.comm.heartbeat import TimeoutStore
from ltx.comm.signature import Post


class StorePosts:
    """Posts by place and rank, and the place at which each rank waits."""

    def __init__(self, store: TimeoutStore, rank: int, size: int):
        self._store, self._rank, self._size = store, rank, size

    def post(self, place: str, post: Post) -> None:
        """Put `post` at `place`, where peers read it."""
        self._store.set(f"{place}/{self._rank}", post.to_json())

    def withdraw(self, place: str, instead: Post) -> None:
        """This rank no longer waits at `place`; a peer that comes there finds `instead`."""
        self.post(place, instead)
        self.stand_at("")

    def forget(self, place: str) -> None:
        """Every rank has read what was posted at `place`: keep the store small."""
        self._store.delete_key(f"{place}/{self._rank}")

    def absent(self, place: str) -> list[int]:
        """The ranks that haven't come to `place`."""
        return [rank for rank in range(self._size) if not self.holds([f"{place}/{rank}"])]

    def read(self, place: str, rank: int) -> Post | None:
        """What `rank` has posted at `place`, if it has."""
        key = f"{place}/{rank}"
        return Post.from_json(self._store.get(key)) if self.holds([key]) else None

    def posts(self, keys: Sequence[str]) -> list[Post]:
        """What stands at `keys`, which are all there."""
        return [Post.from_json(text) for text in self._store.multi_get(list(keys))]

    def stand_at(self, place: str) -> None:
        """This rank waits at `place` for its peers' posts; "" when it does no longer."""
        self._store.set(f"latest/{self._rank}", place)

    def standing(self, rank: int) -> str:
        """Where `rank` waits for its peers to compare something; "" if nowhere."""
        return self._store.get(f"latest/{rank}").decode() if self.holds([f"latest/{rank}"]) else ""

    def leave(self) -> None:
        """This rank has ended its part of the world in good order."""
        self._store.append("ended", f"{self._rank}\n")

    def have_left(self) -> list[int]:
        """The ranks that have ended their part of the world in good order."""
        return [int(rank) for rank in self._store.get("ended").split()] if self.holds(["ended"]) else []

    def holds(self, keys: list[str]) -> bool:
        """Whether all `keys` are in the store."""
        return self._store.check(keys)
