"""Seals: what ranks unpickle comes from a rank that knows the job's key.

The backend's connections have no authentication. So an object's bytes travel with a keyed digest (HMAC, RFC 2104) of
them and of what they are: from which rank, and which issue of the axis. Without the right one nobody looks at them.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import TYPE_CHECKING

from ltx.errors import AuthenticationError

if TYPE_CHECKING:
    from ltx.comm.axis_comm import AxisComm

#: The environment's variable with the key of the job, the same on all ranks.
KEY = "LTX_KEY"

_BYTES = hashlib.sha256().digest_size


def sealed(axis_comm: AxisComm, data: bytes, issue: int) -> bytes:
    """This rank's `data`, sealed, for the `issue`-th collective of the axis' user channel."""
    return _seal(axis_comm, data, axis_comm.rank, issue) + data


def opened(axis_comm: AxisComm, received: bytes, rank: int, issue: int) -> bytes:
    """What `rank` sealed. Raises :class:`AuthenticationError` if somebody else did."""
    seal, data = received[:_BYTES], received[_BYTES:]
    if not hmac.compare_digest(seal, _seal(axis_comm, data, rank, issue)):
        known = f"This rank's {KEY} is {'set' if os.environ.get(KEY) else 'not set'}"
        raise AuthenticationError(
            f"rank {axis_comm.rank}: an object from rank {rank} on axis {axis_comm.name!r} isn't sealed with the key "
            f"of this job, so it isn't unpickled. {known}: give all ranks of a job the same one, or none."
        )
    return data


def proof(text: str) -> str:
    """What shows that this process knows the key of the job, to those who know it: a keyed digest of `text`."""
    return hmac.digest(os.environ.get(KEY, "").encode(), text.encode(), "sha256").hex()


def _seal(axis_comm: AxisComm, data: bytes, rank: int, issue: int) -> bytes:
    # Without a key of the job the seal still tells those who have come through the store from those who haven't.
    key = os.environ.get(KEY) or axis_comm.heartbeat.world
    about = f"{axis_comm.name} {axis_comm.heartbeat.world} {rank} {issue} "
    return hmac.digest(key.encode(), about.encode() + data, "sha256")
