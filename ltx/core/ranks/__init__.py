"""What the ranks of an axis are: processes, simulated ranks, one."""
