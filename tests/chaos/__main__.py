"""``python -m tests.chaos``."""

from tests.chaos.rounds import main

if __name__ == "__main__":
    raise SystemExit(main())
