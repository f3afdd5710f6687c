"""What replaces sockets, with the interface of a process group."""
