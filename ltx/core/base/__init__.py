"""What every room of the kernel uses: trees, errors, arguments, random numbers, recorders."""
