"""What carries messages between ranks in place of sockets: :mod:`ltx.core.comm.transports.shared_memory`."""
