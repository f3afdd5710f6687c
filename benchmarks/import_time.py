"""What ``import ltx`` takes after ``import torch``: the median over fresh interpreters. At most 0.15 s.

python -m benchmarks.import_time [--runs 11]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

SCRIPT = "import time, torch; began = time.perf_counter(); import ltx; print(time.perf_counter() - began)"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=11)
    runs = parser.parse_args().runs
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    taken = [float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(runs)]
    print(f"import ltx: {statistics.median(taken):.3f} s after torch, at most 0.15")


if __name__ == "__main__":
    main()
