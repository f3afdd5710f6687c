"""The ranks of an axis: processes, simulated ranks, or one rank alone."""
