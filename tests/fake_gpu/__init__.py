"""What a GPU would meet first, without one: a device that refuses what CUDA refuses, and counts what waits for it."""
