"""What ``import ltx`` takes after ``import torch``: median over fresh interpreters, with bytecode. At most 0.15 s.

python -m benchmarks.import_time [--runs 11]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile

SCRIPT = "import time, torch; began = time.perf_counter(); import ltx; print(time.perf_counter() - began)"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=11)
    runs = parser.parse_args().runs
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    with tempfile.TemporaryDirectory() as cache:
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment = {**inherited, "PYTHONPYCACHEPREFIX": cache}

        def once() -> float:
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
            return float(done.stdout)

        once()  # compiles, as an installation does
        taken = [once() for _ in range(runs)]
    print(f"import ltx: {statistics.median(taken):.3f} s after torch, at most 0.15")


if __name__ == "__main__":
    main()
