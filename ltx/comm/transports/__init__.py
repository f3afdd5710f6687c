"""What carries messages between ranks in place of sockets: :mod:`ltx.comm.transports.shared_memory`."""
