"""What each strategy should do, in NumPy, all ranks at once: one file a family, from the papers' equations."""
