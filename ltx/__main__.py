"""``python -m ltx`` is ``ltx``."""

from __future__ import annotations

import sys

from ltx.cli import main

if __name__ == "__main__":
    sys.exit(main())
