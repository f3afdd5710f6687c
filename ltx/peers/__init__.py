"""Who else is on an axis, whether they live, and whether they agree: what :class:`ltx.core.comm.peers.Peers` asks."""
