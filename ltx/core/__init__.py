"""The kernel: what somebody must understand to trust a gradient. It imports nothing of the other rooms."""
