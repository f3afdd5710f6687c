"""Shared memory in place of sockets between ranks of one machine: the transport that the kernel's protocol asks for."""
